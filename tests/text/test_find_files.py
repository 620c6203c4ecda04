"""The languages of files are found from names, headers and content. Other files are named."""

import json
import lzma
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from written import PAIRS, many, pairs_of, read, text_of, write, write_format, zip_of

from dap_transformers.errors import UserError
from dap_transformers.prepare.evaluation_sets import read_evaluation
from dap_transformers.text.corpus import load_bitext
from dap_transformers.text.find import find_bitext, find_hub_files
from dap_transformers.text.formats import BitextFile, read_pairs
from dap_transformers.xnli.data import find_nli

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.mark.parametrize("sides", [("de", "en"), ("deu", "eng")])
@pytest.mark.parametrize("name", ["news.de-en.XX", "news.XX.gz"])
def test_moses_sides_read_back_from_a_folder_or_from_either_side(
    tmp_path: Path, name: str, sides: tuple[str, str]
) -> None:
    write_format(tmp_path, name, PAIRS, sides)
    source, target = (tmp_path / name.replace("XX", side) for side in sides)
    for paths in (tmp_path, source, target, [source, target], [tmp_path, target, source]):
        ((file,),) = find_bitext(paths).values()
        assert read(file) == PAIRS


def test_a_target_side_stands_for_the_source_sides_that_are_given_or_for_all(
    tmp_path: Path,
) -> None:
    write_format(tmp_path, "news.XX", PAIRS)
    write(tmp_path / "news.fr", "oui\n")
    german, english = tmp_path / "news.de", tmp_path / "news.en"
    assert list(find_bitext([german, english])) == ["de"]
    assert list(find_bitext(english)) == ["de", "fr"]


def test_a_target_language_other_than_english(tmp_path: Path) -> None:
    for name in ("fr-de.tsv", "fr-en.tsv"):
        write(tmp_path / name, text_of(PAIRS))
    (file,) = find_bitext(tmp_path, target_language="deu")["fr"]
    assert file.paths == (str(tmp_path / "fr-de.tsv"),)
    with pytest.raises(ValueError, match="german"):
        find_bitext(tmp_path, target_language="german")


@pytest.mark.parametrize(
    "name", ["missing/de-en.tsv", "gone.tsv", "/no/such/folder", "some-user/no-such-dataset"]
)
def test_a_missing_path_is_refused_with_what_was_looked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file or folder.*xx}}-en.tsv"):
        load_bitext(name)


def test_a_name_that_tells_no_language_is_refused_or_left_out_of_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train.tsv", "en-en.tsv", "en-de.tsv", "lonely.de", "notes.md"):
        path = write(tmp_path / name, text_of(PAIRS))
        with pytest.raises(UserError, match=name):
            find_bitext(path)
    with pytest.raises(UserError, match=r"train\.tsv"):
        find_bitext(tmp_path)
    with pytest.raises(UserError, match="no parallel text is given"):
        find_bitext([])
    write(tmp_path / "de-en.tsv", text_of(PAIRS))
    write(tmp_path / "fr-en.tsv.bz2", b"")
    assert list(find_bitext(tmp_path)) == ["de"]
    for name in ("train.tsv", "fr-en.tsv.bz2"):
        assert f"{name} is left out" in caplog.text


def test_a_folder_of_folders_is_refused_with_their_names_except_for_train(tmp_path: Path) -> None:
    write(tmp_path / "report.json", "{}")
    for name in ("dev", "test"):
        write(tmp_path / name / "de-en.tsv", "a\tb\n")
    with pytest.raises(UserError, match=rf"report.json; .*{tmp_path}/dev/ or {tmp_path}/test/"):
        find_bitext(tmp_path)
    write(tmp_path / "train" / "fr-en.tsv", "a\tb\n")
    assert list(find_bitext(tmp_path)) == ["fr"]


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to("absent")


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_link_to_nothing, make_link_to_itself, make_pipe])
def test_a_file_of_a_folder_that_cannot_be_read_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = write(tmp_path / "raw/de-en.tsv", "ja\tyes\n").parent
    make(folder / "fr-en.tsv")
    for look in (find_bitext, find_nli, lambda path: read_evaluation([path])):
        with pytest.raises(UserError, match=f"^{re.escape(str(folder))}/fr-en.tsv"):
            look(str(folder))


def test_links_to_files_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw/de-en.tsv", "ja\tyes\n").parent
    (folder / "fr-en.tsv").symlink_to(write(tmp_path / "elsewhere", "oui\tyes\n"))
    assert list(find_bitext(folder)) == ["de", "fr"]


def test_hidden_files_are_left_out_of_a_folder_but_read_if_they_are_given(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw/de-en.tsv", "ja\tyes\n").parent
    hidden = write(folder / "._de-en.tsv", "Mac OS X\tattributes\n")
    (folder / ".#de-en.tsv").symlink_to("someone@host.4711")  # the lock of an editor
    members = {"fr-en.tsv": b"oui\tyes\n", "__MACOSX/._fr-en.tsv": b"Mac OS X\tattributes\n"}
    zip_of(folder / "a.zip", members)
    assert read_folder(folder) == {"de": [("ja", "yes")], "fr": [("oui", "yes")]}
    assert sorted(read_evaluation([str(folder)])) == ["ja", "oui", "yes"]
    assert read(hidden) == [("Mac OS X", "attributes")]


def test_beside_a_target_side_only_files_of_its_name_are_looked_at(tmp_path: Path) -> None:
    write_format(tmp_path, "news.XX", PAIRS)
    (tmp_path / "other").symlink_to("absent")
    assert list(find_bitext(tmp_path / "news.en")) == ["de"]
    (tmp_path / "news.fr").symlink_to("absent")
    with pytest.raises(UserError, match="news.fr"):
        find_bitext(tmp_path / "news.en")


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / os.fsdecode(b"b\xff.de-en.tsv"), "ja\tyes\n")
    with pytest.raises(UserError, match=r"/b\\xff\.de-en\.tsv"):
        find_bitext(tmp_path)


LANGUAGES = {
    "pt-br-en.tsv": "pt", "news.pt_br-en.tsv.gz": "pt", "zh-tw-en.jsonl": "zh",
    "zh-CN-en.tsv": "zh", "zho_Hans-eng_Latn.tsv": "zh", "zh-Hant-TW-en_GB.parquet": "zh",
    "es-419-en.tsv": "es", "eu-es-en.tsv": "eu", "bn-in-en.tsv": "bn", "xh-ZA-en.tsv": "xh",
    "de-en-us.tsv": "de", "br-en.tsv": "br", "it-da-en.tsv": "da", "ted-de-en.tsv": "de",
    "a.pt-br": "pt", "a.zh-CN.gz": "zh", "a.pt_BR": "pt",
}  # fmt: skip


@pytest.mark.parametrize(("name", "language"), LANGUAGES.items())
def test_regions_are_not_taken_for_languages(tmp_path: Path, name: str, language: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "a.en").touch()
    (file,) = find_bitext(tmp_path / name)[language]
    assert file.paths[0] == str(tmp_path / name)


def test_common_endings_are_not_taken_for_languages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_format(tmp_path, "x.XX", PAIRS)
    write(tmp_path / "x.xh", "umbala\n")
    for ending in ("txt", "ids", "log", "bak", "tmp", "csv", "md", "txt.gz", "tar.xz"):
        path = write(tmp_path / f"x.{ending}", text_of(PAIRS))
        with pytest.raises(UserError, match=path.name):
            find_bitext(path)
    for _ in range(2):
        assert list(find_bitext(tmp_path)) == ["de", "xh"]
    assert caplog.text.count("unknown language 'xh'") == 1


def hub_folder(folder: Path, records: dict[str, list[dict]]) -> str:
    """Make a local dataset folder, which is loaded by the same code as one of the Hub."""
    header = ["configs:"]
    for config, rows in records.items():
        write(folder / f"{config}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        header += [
            f"- config_name: {config}",
            "  data_files:",
            "  - split: train",
            f"    path: {config}.jsonl",
        ]
    write(folder / "README.md", "\n".join(["---", *header, "---", ""]))
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_datasets_have_columns_of_sides_or_of_translations(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    records = {
        "de-en": [{"source": source, "target": target} for source, target in PAIRS],
        "en-fr": [{"translation": {"en": target, "fr": source}} for source, target in PAIRS],
        "de-fr": [{"source": "a", "target": "b"}],
        "en-sw": [{"source": target, "target": source} for source, target in PAIRS],
    }
    name = hub_folder(tmp_path / "hub", records)
    found = find_hub_files(name, "en")
    assert [file.language for file in found] == ["de", "fr", "sw"]
    assert find_hub_files(f"{name}:de-en", "en") == found[:1]
    for file in found:
        assert read(replace(file, streaming=streaming)) == PAIRS
    with pytest.raises(UserError, match=name):
        find_hub_files(name, "zh")


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_datasets_with_bad_rows_or_other_columns_are_refused_by_name(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    records = {
        "it-en": [
            {"translation": {"en": "a", "it": None}},
            {"translation": {"en": "b", "it": "c"}},
        ],
        "tr-en": [{"de": "a", "en": "b"}],
        "de-en": [{"source": "a", "target": "b"}],
    }
    name = hub_folder(tmp_path / "hub", records)
    write(tmp_path / "hub/de-en.jsonl", json.dumps(records["de-en"][0]) + "\n{")  # it breaks off
    write(tmp_path / "script/script.py", "")

    def dataset(language: str, folder: str = name) -> BitextFile:
        return BitextFile(language, (folder,), "hub", config=f"{language}-en", streaming=streaming)

    assert read(dataset("it"), 0.5) == [("c", "b")]
    for bad in (*map(dataset, ("it", "tr", "de")), dataset("de", str(tmp_path / "script"))):
        with pytest.raises(UserError, match=re.escape(str(bad))):
            read(bad)


def read_folder(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Read the pairs of each language, without tolerance for bad lines."""
    found = find_bitext(folder)
    pairs: dict[str, list[tuple[str, ...]]] = {}
    for language, files in found.items():
        for file in files:
            own = [tuple(pair.values()) for pair in read_pairs(file, 0.0)]
            pairs.setdefault(language, []).extend(own)
    return pairs


def test_a_tatoeba_folder_is_read_without_tolerance(tmp_path: Path) -> None:
    write_format(tmp_path, "tatoeba.cmn-eng.XX", PAIRS, ("cmn", "eng"))
    write_format(tmp_path, "tatoeba.swh-eng.XX", PAIRS[:2], ("swh", "eng"))
    assert read_folder(tmp_path) == {"sw": PAIRS[:2], "zh": PAIRS}
    write_format(tmp_path, "tatoeba.swh-eng.XX", [*many(5000), (" ", "x")], ("swh", "eng"))
    with pytest.raises(ValueError, match="line 5001"):
        read_folder(tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real data of ../shared")
def test_real_data_is_found_and_read(tmp_path: Path) -> None:
    texts = read_folder(SHARED / "data/tatoeba")
    assert len(texts) == 36
    assert sum(map(len, texts.values())) == 31_692
    assert list(find_bitext(SHARED / "data/train")) == list(texts)
    path = SHARED / "data/train/jv-en.tsv.xz"
    lines = lzma.decompress(path.read_bytes()).decode().split("\n")[:-1]
    assert pairs_of(load_bitext(path, cache_dir=tmp_path)["jv"]) == [
        tuple(line.split("\t")[:2]) for line in lines
    ]


@pytest.mark.parametrize("code", ["sh", "vec", "src"])
def test_a_language_that_is_also_an_ending_is_found_if_the_name_says_it_twice(
    code: str, tmp_path: Path
) -> None:
    for name in (f"X.en-{code}.{code}", f"X.en-{code}.en", f"Y.{code}", "Y.en"):
        write(tmp_path / name, b"a\n")
    found = find_bitext(tmp_path)
    assert list(found) == [code]
    assert len(found[code]) == 1


def test_moses_sides_may_have_regions_and_scripts(tmp_path: Path) -> None:
    write_format(tmp_path, "nllb.XX", PAIRS, ("deu_Latn", "eng_Latn"))
    write_format(tmp_path, "c.XX", PAIRS, ("es-ES", "en-GB"))
    write_format(tmp_path, "d.XX", PAIRS, ("fr", "en"))
    write(tmp_path / "d.en-US", "no\n")
    assert read_folder(tmp_path) == dict.fromkeys(("de", "es", "fr"), PAIRS)
    for name in ("nllb.deu_Latn", "nllb.eng_Latn"):
        assert list(find_bitext(tmp_path / name)) == ["de"]


def test_a_warning_names_text_that_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "de-en.tsv", text_of(PAIRS))
    others = ("fr-en.TSV", "no-en.tsv.GZ", "news.fi", "sw-en.txt", "it-en.json")
    for name in others:
        write(tmp_path / name, "x")
    write(tmp_path / "notes.log", "x")
    find_bitext(tmp_path)
    assert {Path(record.args[0]).name for record in caplog.records} == set(others)


def test_a_packed_copy_beside_a_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "de-en.tsv", text_of(PAIRS))
    write(tmp_path / "de-en.tsv.gz", text_of(PAIRS))
    with pytest.raises(UserError, match=r"de-en\.tsv and .*de-en\.tsv\.gz"):
        find_bitext(tmp_path)
