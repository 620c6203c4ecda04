"""Every format reads back what was written, and bad input stops with a message that tells what to do."""

import gzip
import json
import logging
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset

from dap.text import corpus, files as files_module
from dap.text.corpus import count_pairs, find_bitext, load_bitext, read_pairs

SHARED = Path(__file__).resolve().parents[3] / "shared"
PAIRS = [
    ('"Nein", sagte er. "', 'He said "no'),
    ("eins\u2028zwei\x85drei\x0cvier", "one\u2028two\x85three\x0cfour"),
    (" null NA None ", "nan"),
    ("''\\t\\n", "日本語 \U0001f600"),
]


def write_tsv(path: Path, pairs: list[tuple[str, ...]], end: str = "\n") -> Path:
    data = "".join("\t".join(pair) + end for pair in pairs).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def write_jsonl(path: Path, pairs: list[tuple[str, str]]) -> Path:
    records = [{"source": source, "target": target, "origin": 1} for source, target in pairs]
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data))
    return path


def write_parquet(path: Path, pairs: list[tuple[str, str]]) -> Path:
    source, target = zip(*pairs)
    columns = {"origin": pa.array(range(len(pairs))), "target": pa.array(target, pa.large_string())}
    pq.write_table(pa.table({**columns, "source": pa.array(source).dictionary_encode()}), path)
    return path


def write_moses(stem: Path, pairs: list[tuple[str, str]], sides: tuple[str, str]) -> tuple[Path, Path]:
    paths = tuple(stem.with_name(f"{stem.name}.{side}") for side in sides)
    for path, texts in zip(paths, zip(*pairs)):
        data = "".join(f"{text}\n" for text in texts).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return paths


def read(path: Path | list[Path], **options: float) -> list[tuple[str, str]]:
    (files,) = find_bitext(path).values()
    return [(pair["source"], pair["target"]) for file in files for pair in read_pairs(file, **options)]


def pairs_of(dataset: Dataset | IterableDataset) -> list[tuple[str, str]]:
    return [(row["source"], row["target"]) for row in dataset]


def many(count: int) -> list[tuple[str, str]]:
    return [(f"Satz {number}", f"sentence {number}") for number in range(count)]


# Round trips


@pytest.mark.parametrize("name", ["de-en.tsv", "de-en.tsv.gz", "deu-eng.tsv.xz", "wiki.v1.de-en.tsv"])
@pytest.mark.parametrize("extra", [(), ("origin",), ("origin", "more")])
def test_tsv_reads_back_what_was_written(tmp_path: Path, name: str, extra: tuple[str, ...]) -> None:
    path = write_tsv(tmp_path / name, [(*pair, *extra) for pair in PAIRS])
    assert list(find_bitext(path)) == ["de"]
    assert read(path) == PAIRS


@pytest.mark.parametrize("name", ["de-en.jsonl", "de-en.jsonl.gz", "de-en.jsonl.xz"])
def test_jsonl_reads_back_what_was_written(tmp_path: Path, name: str) -> None:
    assert read(write_jsonl(tmp_path / name, PAIRS)) == PAIRS


def test_parquet_reads_back_what_was_written(tmp_path: Path) -> None:
    assert read(write_parquet(tmp_path / "de-en.parquet", PAIRS)) == PAIRS


@pytest.mark.parametrize("sides", [("de", "en"), ("de.gz", "en"), ("deu", "eng")])
def test_moses_sides_read_back_from_a_folder_or_from_either_side(tmp_path: Path, sides: tuple[str, str]) -> None:
    source, target = write_moses(tmp_path / "news.de-en", PAIRS, sides)
    for paths in (tmp_path, source, target, [source, target], [tmp_path, target, source]):
        assert read(paths) == PAIRS


def test_a_target_side_stands_for_the_given_sources_alone_or_for_all(tmp_path: Path) -> None:
    german, english = write_moses(tmp_path / "news", PAIRS, ("de", "en"))
    write_moses(tmp_path / "news", PAIRS, ("fr", "en"))
    assert list(find_bitext([german, english])) == ["de"]
    assert list(find_bitext(english)) == ["de", "fr"]


def test_crlf_and_byte_order_mark_are_not_text(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", PAIRS, end="\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == PAIRS


def test_last_line_without_line_feed_counts(tmp_path: Path) -> None:
    path = tmp_path / "de-en.tsv"
    path.write_bytes(b"a\tb\nc\td")
    assert read(path) == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize("streaming", [False, True])
def test_all_formats_of_one_language_follow_each_other(tmp_path: Path, streaming: bool) -> None:
    write_jsonl(tmp_path / "a.de-en.jsonl", PAIRS)
    write_parquet(tmp_path / "b.deu-en.parquet", PAIRS[:2])
    write_moses(tmp_path / "c", PAIRS[1:], ("de", "en"))
    write_tsv(tmp_path / "d.de-en.tsv.xz", PAIRS)
    write_tsv(tmp_path / "xh-en.tsv", PAIRS[:1])
    data = load_bitext(tmp_path, streaming=streaming, cache_dir=tmp_path / "cache")
    assert list(data) == ["de", "xh"]
    assert data["de"].features == (corpus.STREAM_FEATURES if streaming else corpus.FEATURES)
    assert pairs_of(data["de"]) == PAIRS + PAIRS[:2] + PAIRS[1:] + PAIRS
    assert pairs_of(data["xh"]) == PAIRS[:1]


def test_a_stream_resumes_where_it_stopped(tmp_path: Path) -> None:
    write_tsv(tmp_path / "a.de-en.tsv", many(30))
    write_tsv(tmp_path / "b.de-en.tsv", many(20))
    stream = load_bitext(tmp_path, streaming=True)["de"]
    rows = iter(stream)
    seen = [next(rows) for _ in range(37)]
    state = stream.state_dict()
    again = load_bitext(tmp_path, streaming=True)["de"]
    again.load_state_dict(state)
    assert seen + list(again) == list(stream)


def test_rows_of_a_stream_name_the_place_in_the_text(tmp_path: Path) -> None:
    write_tsv(tmp_path / "fr-en.tsv", [*many(2), ("alone",), *many(2)])
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_tsv(tmp_path / folder / "de-en.tsv", many(2))
    write_moses(tmp_path / "y/a", many(1), ("de", "en"))
    paths = [tmp_path / "fr-en.tsv", tmp_path / "x", tmp_path / "y"]
    data = load_bitext(paths, streaming=True, max_bad_lines=0.5)
    assert [row["row"] for row in data["fr"]] == ["0", "1", "2", "3"]  # as the rows of a map-style dataset
    assert [row["row"] for row in data["de"]] == [
        "x/de-en.tsv:0",
        "x/de-en.tsv:1",
        "y/a.de:0",
        "y/de-en.tsv:0",
        "y/de-en.tsv:1",
    ]
    assert [row["row"] for row in load_bitext(tmp_path / "y", streaming=True)["de"]][0] == "a.de:0"


def test_a_stream_warns_of_bad_lines_in_its_first_pass_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", [*many(9), ("alone",)])
    stream = load_bitext(path, streaming=True, max_bad_lines=0.1)["de"]
    for _ in range(3):
        assert pairs_of(stream) == many(9)
    assert caplog.text.count("line 10 skipped") == caplog.text.count("1 of 10 lines skipped") == 1


def test_the_fixture_streams_what_it_loads(bitext_dir: Path, tmp_path: Path) -> None:
    loaded, streamed = load_bitext(bitext_dir, cache_dir=tmp_path), load_bitext(bitext_dir, streaming=True)
    assert list(loaded) == list(streamed) == ["de", "fr", "sw"]
    assert all(pairs_of(loaded[language]) == pairs_of(streamed[language]) for language in loaded)
    assert count_pairs(find_bitext(bitext_dir)["de"]) == len(loaded["de"]) == 200


def test_a_target_language_other_than_english(tmp_path: Path) -> None:
    write_tsv(tmp_path / "fr-de.tsv", PAIRS)
    write_tsv(tmp_path / "fr-en.tsv", PAIRS)
    (file,) = find_bitext(tmp_path, target_language="de")["fr"]
    assert file.paths == (str(tmp_path / "fr-de.tsv"),)


# Cache


def test_cache_is_used_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = write_tsv(tmp_path / "de-en.tsv", PAIRS), tmp_path / "cache"
    first = load_bitext(path, cache_dir=cache)["de"]
    second = load_bitext(path, cache_dir=cache)["de"]
    assert first.cache_files == second.cache_files
    assert first._fingerprint == second._fingerprint
    write_tsv(path, PAIRS[::-1])
    os.utime(path, ns=(1, 1))  # same size, other time
    assert pairs_of(load_bitext(path, cache_dir=cache)["de"]) == PAIRS[::-1]
    assert len(list(cache.iterdir())) == 2


def test_a_cache_file_read_leniently_is_not_used_strictly(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", [*PAIRS, ("alone",)])
    assert len(load_bitext(path, max_bad_lines=0.5, cache_dir=tmp_path / "cache")["de"]) == 4
    with pytest.raises(ValueError, match="line 5"):
        load_bitext(path, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half written


# Bad lines


BAD = {
    b"no tab here": "one column, expected source<TAB>target",
    b"": "one column",
    b"\tempty": "empty source side",
    b"empty\t \xe2\x80\xa8": "empty target side",
    b"ab\xffc\td": "invalid UTF-8: byte 0xff at offset 2",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_tsv_line_is_skipped_and_logged_or_stops(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", many(199))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:6], line, *lines[6:]]))
    with caplog.at_level(logging.WARNING, "dap.text.corpus"):
        assert read(path, max_bad_lines=0.01) == many(199)
    assert f"{path}, line 7 skipped: {BAD[line]}" in caplog.text
    assert "1 of 200 lines skipped" in caplog.text
    with pytest.raises(ValueError, match="1 of the first 200 lines are bad, more than max_bad_lines=0.001") as error:
        read(path)
    assert str(path) in str(error.value)
    assert f"line 7: {BAD[line]}" in str(error.value)
    assert "raise max_bad_lines" in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"source": "a"', "delimiter"),
        (b'["a", "b"]', "expected an object"),
        (b'{"source": "a"}', "expected an object"),
        (b'{"source": "a", "target": null}', "target side is None"),
        (b'{"source": 3, "target": "b"}', "source side is 3"),
        (b'{"source": "a", "target": ""}', "empty target side"),
        (b'{"source": "\\ud800", "target": "b"}', "surrogates"),
        (b'{"source": "\xff", "target": "b"}', "invalid UTF-8"),
    ],
)
def test_bad_json_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write_jsonl(tmp_path / "de-en.jsonl", PAIRS)
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert read(path, max_bad_lines=0.2) == PAIRS
    with pytest.raises(ValueError, match=f"line 5: .*{reason}"):
        read(path)


def test_bad_parquet_and_moses_lines(tmp_path: Path) -> None:
    moses, _ = write_moses(tmp_path / "a", [*PAIRS, ("alone", "")], ("de", "en"))
    pq.write_table(pa.table({"source": ["a", None], "target": ["b", "c"]}), tmp_path / "de-en.parquet")
    with pytest.raises(ValueError, match="line 5: empty target side"):
        read(moses)
    with pytest.raises(ValueError, match="line 2: source side is None"):
        read(tmp_path / "de-en.parquet")


def test_an_early_bad_line_does_not_stop_a_long_file(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", [("alone",), *many(999)])
    assert read(path) == many(999)  # 1 of 1,000 is 0.1%
    write_tsv(path, [("alone",), *many(998)])
    with pytest.raises(ValueError, match="1 of the first 999 lines"):
        read(path)


def test_a_hopeless_file_stops_before_its_end(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", [("one column",)] * 5000)
    with pytest.raises(ValueError, match=r"101 of the first 101 lines (.|\n)*line 5: one column") as error:
        read(path)
    assert "line 6:" not in str(error.value)


def test_zero_stops_at_the_first_bad_line_and_a_wrong_share_is_refused(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", [*many(50), ("alone",), *many(50)])
    with pytest.raises(ValueError, match="1 of the first 51 lines"):
        read(path, max_bad_lines=0.0)
    for share in (-0.1, 5.0):
        with pytest.raises(ValueError, match="share of lines"):
            load_bitext(path, streaming=True, max_bad_lines=share)


def test_a_bad_file_stops_a_stream_too(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "de-en.tsv", [("one column",)] * 3)
    with pytest.raises(ValueError, match=r"de-en\.tsv: 3 of the first 3 lines"):
        list(load_bitext(path, streaming=True)["de"])


# Bad files


def test_empty_language(tmp_path: Path) -> None:
    write_tsv(tmp_path / "fr-en.tsv", PAIRS)
    empty = write_tsv(tmp_path / "sw-en.tsv", [])
    with pytest.raises(ValueError, match="no pair of language 'sw'") as error:
        load_bitext(tmp_path, cache_dir=tmp_path / "cache")
    assert str(empty) in str(error.value)


@pytest.mark.parametrize("name", ["missing/de-en.tsv", "gone.tsv", "/no/such/folder", "some-user/no-such-dataset"])
def test_missing_path_names_what_was_looked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder") as error:
        load_bitext(name)
    assert name in str(error.value)
    assert "{xx}-en.tsv" in str(error.value)


def test_names_that_tell_no_language(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train.tsv", "en-en.tsv", "en-de.tsv", "lonely.de", "notes.md"):
        path = write_tsv(tmp_path / name, PAIRS)
        with pytest.raises(ValueError, match="does not tell the language"):
            find_bitext(path)
    with pytest.raises(ValueError, match=r"holds no parallel text but .*train\.tsv"):
        find_bitext(tmp_path)
    with pytest.raises(ValueError, match="no parallel text is given"):
        find_bitext([])
    write_tsv(tmp_path / "de-en.tsv", PAIRS)
    assert list(find_bitext(tmp_path)) == ["de"]
    assert "train.tsv is left out" in caplog.text


def test_a_folder_of_folders_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    for name in ("dev", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "de-en.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match=rf"but report.json; .*give {tmp_path}/dev/ or {tmp_path}/train/ itself"):
        find_bitext(tmp_path)
    assert list(find_bitext(tmp_path / "train")) == ["de"]


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("pt-br-en.tsv", "pt"),
        ("news.pt_br-en.tsv.gz", "pt"),
        ("zh-tw-en.jsonl", "zh"),
        ("zh-CN-en.tsv", "zh"),
        ("zho_Hans-eng_Latn.tsv", "zh"),
        ("zh-Hant-TW-en_GB.parquet", "zh"),
        ("es-419-en.tsv", "es"),
        ("eu-es-en.tsv", "eu"),
        ("bn-in-en.tsv", "bn"),
        ("xh-ZA-en.tsv", "xh"),
        ("de-en-us.tsv", "de"),
        ("br-en.tsv", "br"),
        ("it-da-en.tsv", "da"),
        ("ted-de-en.tsv", "de"),
        ("a.pt-br", "pt"),
        ("a.zh-CN.gz", "zh"),
        ("a.pt_BR", "pt"),
    ],
)
def test_regions_are_no_languages(tmp_path: Path, name: str, language: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "a.en").touch()
    (file,) = find_bitext(tmp_path / name)[language]
    assert file.paths[0] == str(tmp_path / name)


def test_endings_that_are_no_languages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_moses(tmp_path / "x", PAIRS, ("de", "en"))
    write_moses(tmp_path / "x", PAIRS, ("xh", "en"))
    for ending in ("txt", "ids", "log", "bak", "tmp", "csv", "md", "txt.gz", "tar.xz"):
        write_tsv(tmp_path / f"x.{ending}", PAIRS)
        with pytest.raises(ValueError, match="does not tell the language"):
            find_bitext(tmp_path / f"x.{ending}")
    for _ in range(2):
        assert list(find_bitext(tmp_path)) == ["de", "xh"]
    assert caplog.text.count("x.en is taken for text in the language 'xh'") == 1


def test_moses_sides_of_different_length(tmp_path: Path) -> None:
    source, target = write_moses(tmp_path / "a", PAIRS, ("de", "en"))
    target.write_bytes(target.read_bytes() + b"one more\n")
    with pytest.raises(ValueError, match="has 4 lines, .* has 5") as error:
        read(tmp_path)
    assert str(source) in str(error.value)
    assert str(target) in str(error.value)


@pytest.mark.parametrize("name", ["de-en.tsv.gz", "de-en.tsv.xz"])
@pytest.mark.parametrize("damage", ["truncated", "not packed"])
def test_damaged_compressed_file(tmp_path: Path, name: str, damage: str) -> None:
    path = write_tsv(tmp_path / name, many(2000))
    path.write_bytes(path.read_bytes()[:-40] if damage == "truncated" else b"plain\ttext\n")
    with pytest.raises(ValueError, match="damaged or truncated compressed file") as error:
        read(path)
    assert str(path) in str(error.value)


def test_parquet_that_is_none_or_lacks_columns(tmp_path: Path) -> None:
    path = tmp_path / "de-en.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"de-en\.parquet: damaged or no Parquet file"):
        read(path)
    pq.write_table(pa.table({"de": ["a"], "en": ["b"]}), path)
    with pytest.raises(ValueError, match=r"columns are \['de', 'en'\]; expected 'source' and 'target'"):
        read(path)


# Datasets of the Hub: a local dataset folder goes through the same loading code


def hub_folder(folder: Path, records: dict[str, list[dict]]) -> str:
    folder.mkdir()
    header = ["configs:"]
    for config, rows in records.items():
        (folder / f"{config}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        header += [f"- config_name: {config}", "  data_files:", "  - split: train", f"    path: {config}.jsonl"]
    (folder / "README.md").write_text("\n".join(["---", *header, "---", ""]))
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset_with_pairs_of_columns_or_translations(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    name = hub_folder(
        tmp_path / "hub",
        {
            "de-en": [{"source": source, "target": target} for source, target in PAIRS],
            "en-fr": [{"translation": {"en": target, "fr": source}} for source, target in PAIRS],
            "de-fr": [{"source": "a", "target": "b"}],
            "en-sw": [{"source": target, "target": source} for source, target in PAIRS],
        },
    )
    files = files_module._find_hub(name, "en")
    assert [file.language for file in files] == ["de", "fr", "sw"]
    assert files_module._find_hub(f"{name}:de-en", "en") == files[:1]
    for file in files:
        data = corpus._stream([file], 0.001) if streaming else corpus._load_cached(file, 0.001, tmp_path)
        assert pairs_of(data) == PAIRS
    with pytest.raises(ValueError, match="no configuration of"):
        files_module._find_hub(name, "zh")


# Tatoeba


def read_folder(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Pairs of every language, no line of which may be bad."""
    found = find_bitext(folder)
    return {code: [tuple(pair.values()) for file in found[code] for pair in read_pairs(file, 0.0)] for code in found}


def test_tatoeba_folder_by_line_and_without_tolerance(tmp_path: Path) -> None:
    write_moses(tmp_path / "tatoeba.cmn-eng", PAIRS, ("cmn", "eng"))
    write_moses(tmp_path / "tatoeba.swh-eng", PAIRS[:2], ("swh", "eng"))
    assert read_folder(tmp_path) == {"sw": PAIRS[:2], "zh": PAIRS}
    write_moses(tmp_path / "tatoeba.swh-eng", [*many(5000), (" ", "x")], ("swh", "eng"))
    with pytest.raises(ValueError, match="line 5001: empty source side"):
        read_folder(tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real data of ../shared")
def test_real_data(tmp_path: Path) -> None:
    texts = read_folder(SHARED / "data/tatoeba")
    assert len(texts) == 36
    assert sum(map(len, texts.values())) == 31_692
    found = find_bitext(SHARED / "data/train")
    assert list(found) == list(texts)
    loaded = load_bitext(SHARED / "data/train/jv-en.tsv.xz", cache_dir=tmp_path)["jv"]
    lines = lzma.decompress((SHARED / "data/train/jv-en.tsv.xz").read_bytes()).decode().split("\n")[:-1]
    assert pairs_of(loaded) == [tuple(line.split("\t")[:2]) for line in lines]


@pytest.mark.parametrize(
    ("name", "header", "language"), [("django.po", "pt_BR", "pt"), ("app.de.po", "zh_Hans", "zh")]
)
def test_the_header_of_a_catalogue_may_have_a_region_or_script(
    name: str, header: str, language: str, tmp_path: Path
) -> None:
    text = f'msgid ""\nmsgstr ""\n"Language: {header}\\n"\n\nmsgid "Hello"\nmsgstr "x"\n'
    (tmp_path / name).write_text(text)
    assert list(find_bitext(tmp_path / name)) == [language]
