"""Names, headers and content tell the languages, and what tells none is named."""

import json
import lzma
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from written import PAIRS, many, pairs_of, read, text_of, write, write_format, zip_of

from dap.errors import UserError
from dap.prepare import read_evaluation
from dap.text import corpus, find_bitext, find_files, load_bitext, read_pairs
from dap.xnli import find_nli

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


def test_a_target_side_stands_for_the_given_sources_alone_or_for_all(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="target language 'german': expected a code"):
        find_bitext(tmp_path, target_language="german")


@pytest.mark.parametrize(
    "name", ["missing/de-en.tsv", "gone.tsv", "/no/such/folder", "some-user/no-such-dataset"]
)
def test_missing_path_names_what_was_looked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder") as error:
        load_bitext(name)
    assert name in str(error.value)
    assert "{xx}-en.tsv" in str(error.value)


def test_names_that_tell_no_language(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train.tsv", "en-en.tsv", "en-de.tsv", "lonely.de", "notes.md"):
        path = write(tmp_path / name, text_of(PAIRS))
        with pytest.raises(ValueError, match="does not tell the language"):
            find_bitext(path)
    with pytest.raises(ValueError, match=r"holds no parallel text but .*train\.tsv"):
        find_bitext(tmp_path)
    with pytest.raises(ValueError, match="no parallel text is given"):
        find_bitext([])
    write(tmp_path / "de-en.tsv", text_of(PAIRS))
    assert list(find_bitext(tmp_path)) == ["de"]
    assert "train.tsv is left out" in caplog.text
    write(tmp_path / "fr-en.tsv.bz2", b"")
    assert list(find_bitext(tmp_path)) == ["de"]
    assert (
        "fr-en.tsv.bz2 is left out: it tells no language that it pairs with 'en', or is packed"
        in caplog.text
    )


def test_a_folder_of_folders_is_refused_with_their_names(tmp_path: Path) -> None:
    write(tmp_path / "report.json", "{}")
    for name in ("dev", "test"):
        write(tmp_path / name / "de-en.tsv", "a\tb\n")
    with pytest.raises(
        ValueError, match=rf"but report.json; .*give {tmp_path}/dev/ or {tmp_path}/test/ itself"
    ):
        find_bitext(tmp_path)
    write(tmp_path / "train" / "fr-en.tsv", "a\tb\n")
    assert list(find_bitext(tmp_path)) == ["fr"]  # whose name tells what it is for


def test_what_cannot_be_read_in_a_folder_stops_instead_of_vanishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "raw/de-en.tsv", "ja\tyes\n").parent
    odd, remedy = (
        folder / "fr-en.tsv",
        "is no file that can be read; give the right to read it, or move it elsewhere",
    )

    def refused(make: Callable[[], object], message: str) -> None:
        made = make()
        for look in (find_bitext, read_evaluation, find_nli):
            given = [str(folder)] if look is read_evaluation else str(folder)
            with pytest.raises(UserError, match=f"^{re.escape(str(folder))}/fr-en.tsv:? {message}"):
                look(given)
        odd.unlink()
        del made

    refused(lambda: odd.symlink_to("absent"), "No such file or directory; mend or remove it")
    refused(lambda: odd.symlink_to(odd), "Too many levels of symbolic links; mend or remove it")
    refused(lambda: os.mkfifo(odd), remedy)
    refused(lambda: socket.socket(socket.AF_UNIX).bind(str(odd)), remedy)
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "access", lambda path, _: Path(path) != odd
        )  # tests may run as root, who may read all
        refused(odd.touch, remedy)
    odd.symlink_to(write(tmp_path / "elsewhere", "oui\tyes\n"))
    assert list(find_bitext(folder)) == ["de", "fr"]


def test_hidden_files_that_editors_and_macos_leave_are_no_text(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw/de-en.tsv", "ja\tyes\n").parent
    write(folder / "._de-en.tsv", "Mac OS X\tattributes\n")
    (folder / ".#de-en.tsv").symlink_to("someone@host.4711")  # the lock of an editor
    zip_of(
        folder / "a.zip",
        {"fr-en.tsv": b"oui\tyes\n", "__MACOSX/._fr-en.tsv": b"Mac OS X\tattributes\n"},
    )
    found = find_bitext(folder)
    assert [read(file) for files in found.values() for file in files] == [
        [("ja", "yes")],
        [("oui", "yes")],
    ]
    assert sorted(read_evaluation([str(folder)])) == ["ja", "oui", "yes"]
    assert [read(file) for file in find_bitext(folder / "._de-en.tsv")["de"]] == [
        [("Mac OS X", "attributes")]
    ]


def test_only_what_has_the_name_of_a_target_side_is_looked_at_beside_it(tmp_path: Path) -> None:
    write_format(tmp_path, "news.XX", PAIRS)
    (tmp_path / "other").symlink_to("absent")
    assert list(find_bitext(tmp_path / "news.en")) == ["de"]
    (tmp_path / "news.fr").symlink_to("absent")
    with pytest.raises(UserError, match="news.fr: No such file or directory; mend or remove it"):
        find_bitext(tmp_path / "news.en")


def test_names_that_are_no_utf8_are_shown_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / os.fsdecode(b"b\xff.de-en.tsv"), "ja\tyes\n")
    with pytest.raises(
        UserError, match=r"^b'.*/b\\xff\.de-en\.tsv': a file name that is no UTF-8; rename it$"
    ):
        find_bitext(tmp_path)


LANGUAGES = {
    "pt-br-en.tsv": "pt", "news.pt_br-en.tsv.gz": "pt", "zh-tw-en.jsonl": "zh", "zh-CN-en.tsv": "zh",
    "zho_Hans-eng_Latn.tsv": "zh", "zh-Hant-TW-en_GB.parquet": "zh", "es-419-en.tsv": "es", "eu-es-en.tsv": "eu",
    "bn-in-en.tsv": "bn", "xh-ZA-en.tsv": "xh", "de-en-us.tsv": "de", "br-en.tsv": "br", "it-da-en.tsv": "da",
    "ted-de-en.tsv": "de", "a.pt-br": "pt", "a.zh-CN.gz": "zh", "a.pt_BR": "pt",
}  # fmt: skip


@pytest.mark.parametrize(("name", "language"), LANGUAGES.items())
def test_regions_are_no_languages(tmp_path: Path, name: str, language: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "a.en").touch()
    (file,) = find_bitext(tmp_path / name)[language]
    assert file.paths[0] == str(tmp_path / name)


def test_endings_that_are_no_languages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_format(tmp_path, "x.XX", PAIRS)
    write(tmp_path / "x.xh", "umbala\n")
    for ending in ("txt", "ids", "log", "bak", "tmp", "csv", "md", "txt.gz", "tar.xz"):
        path = write(tmp_path / f"x.{ending}", text_of(PAIRS))
        with pytest.raises(ValueError, match="does not tell the language"):
            find_bitext(path)
    for _ in range(2):
        assert list(find_bitext(tmp_path)) == ["de", "xh"]
    assert (
        caplog.text.count("x.xh + ")
        == caplog.text.count("is taken for text in the language 'xh'")
        == 1
    )


def hub_folder(folder: Path, records: dict[str, list[dict]]) -> str:
    """A local dataset folder, which goes through the same loading code as one of the Hub."""
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
def test_hub_dataset_with_pairs_of_columns_or_translations(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    records = {
        "de-en": [{"source": source, "target": target} for source, target in PAIRS],
        "en-fr": [{"translation": {"en": target, "fr": source}} for source, target in PAIRS],
        "de-fr": [{"source": "a", "target": "b"}],
        "en-sw": [{"source": target, "target": source} for source, target in PAIRS],
        "bad": [{"translation": {"en": "a", "it": None}}, {"translation": {"en": "b", "it": "c"}}],
        "en-tr": [{"de": "a", "en": "b"}],
    }
    name = hub_folder(tmp_path / "hub", records)
    *found, without = find_files._find_hub(name, "en")
    assert [file.language for file in found] == ["de", "fr", "sw"]
    assert find_files._find_hub(f"{name}:de-en", "en") == found[:1]
    for file in found:
        data = (
            corpus._stream([file], 0.001)
            if streaming
            else corpus._load_cached(file, 0.001, tmp_path)
        )
        assert pairs_of(data) == PAIRS
    with pytest.raises(
        ValueError, match="columns are .*; expected 'source' and 'target', or 'translation'"
    ):
        read(without)
    with pytest.raises(ValueError, match="no configuration of"):
        find_files._find_hub(name, "zh")
    bad = find_files.BitextFile("it", (name,), "hub", config="bad")
    assert read(bad, 0.5) == [("c", "b")]
    with pytest.raises(ValueError, match="line 1: source side is None, expected text"):
        read(bad)
    write(tmp_path / "hub/de-fr.jsonl", json.dumps(records["de-fr"][0]) + "\n{")  # it breaks off
    write(tmp_path / "script/script.py", "")
    for folder, reason in (
        ("hub", "Arrow|DatasetGeneration"),
        ("script", "RuntimeError: Dataset scripts"),
    ):
        file = find_files.BitextFile(
            "de", (str(tmp_path / folder),), "hub", config="de-fr", streaming=streaming
        )
        with pytest.raises(UserError, match=rf"{folder}:de-fr cannot be loaded \(({reason})"):
            read(file)


def read_folder(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Pairs of every language, no line of which may be bad."""
    found = find_bitext(folder)
    return {
        code: [tuple(pair.values()) for file in found[code] for pair in read_pairs(file, 0.0)]
        for code in found
    }


def test_tatoeba_folder_by_line_and_without_tolerance(tmp_path: Path) -> None:
    write_format(tmp_path, "tatoeba.cmn-eng.XX", PAIRS, ("cmn", "eng"))
    write_format(tmp_path, "tatoeba.swh-eng.XX", PAIRS[:2], ("swh", "eng"))
    assert read_folder(tmp_path) == {"sw": PAIRS[:2], "zh": PAIRS}
    write_format(tmp_path, "tatoeba.swh-eng.XX", [*many(5000), (" ", "x")], ("swh", "eng"))
    with pytest.raises(ValueError, match="line 5001: empty source side"):
        read_folder(tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real data of ../shared")
def test_real_data(tmp_path: Path) -> None:
    texts = read_folder(SHARED / "data/tatoeba")
    assert len(texts) == 36
    assert sum(map(len, texts.values())) == 31_692
    assert list(find_bitext(SHARED / "data/train")) == list(texts)
    path = SHARED / "data/train/jv-en.tsv.xz"
    lines = lzma.decompress(path.read_bytes()).decode().split("\n")[:-1]
    assert pairs_of(load_bitext(path, cache_dir=tmp_path)["jv"]) == [
        tuple(line.split("\t")[:2]) for line in lines
    ]


def test_moses_sides_have_regions_and_scripts_on_either_side(tmp_path: Path) -> None:
    write_format(tmp_path, "nllb.XX", PAIRS, ("deu_Latn", "eng_Latn"))
    write_format(tmp_path, "c.XX", PAIRS, ("es-ES", "en-GB"))
    write_format(tmp_path, "d.XX", PAIRS, ("fr", "en"))
    write(tmp_path / "d.en-US", "no\n")
    assert read_folder(tmp_path) == dict.fromkeys(("de", "es", "fr"), PAIRS)
    assert (
        list(find_bitext(tmp_path / "nllb.deu_Latn"))
        == list(find_bitext(tmp_path / "nllb.eng_Latn"))
        == ["de"]
    )


def test_text_that_is_not_taken_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    with pytest.raises(
        UserError, match=r"de-en\.tsv and .*de-en\.tsv\.gz are the same text twice: keep one"
    ):
        find_bitext(tmp_path)
