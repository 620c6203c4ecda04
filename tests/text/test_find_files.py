"""The languages of files are found from names, headers and content. Other files are named."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from written import PAIRS, folder_text, lines_of, read, text_of, write, write_format, zip_of

from dap_transformers.errors import UserError
from dap_transformers.prepare.evaluation_sets import read_evaluation
from dap_transformers.text.corpus import load_bitext
from dap_transformers.text.find import find_bitext, find_dev, find_hub_files


@pytest.mark.parametrize(
    "name_and_sides",
    ["news.de-en.XX de en", "news.XX.gz deu eng", "nllb.XX deu_Latn eng_Latn", "c.XX de-AT en-GB"],
)
def test_moses_sides_read_back_from_a_folder_or_from_either_side(
    tmp_path: Path, name_and_sides: str
) -> None:
    name, *sides = name_and_sides.split()
    write_format(tmp_path, name, PAIRS, sides)
    source, target = (tmp_path / name.replace("XX", side) for side in sides)
    for paths in (tmp_path, source, target, [source, target], [tmp_path, target, source]):
        [[file]] = find_bitext(paths).values()
        assert read(file) == PAIRS


def test_a_target_side_stands_for_the_source_sides_that_are_given_or_for_all(
    tmp_path: Path,
) -> None:
    write_format(tmp_path, "news.XX", PAIRS)
    write(tmp_path / "news.fr", "oui\n")
    write(tmp_path / "news.en-US", "of another region\n")
    german, english = tmp_path / "news.de", tmp_path / "news.en"
    assert folder_text([german, english]) == {"de": text_of(PAIRS).decode()}
    assert list(find_bitext(english)) == ["de", "fr"]


def test_a_target_language_other_than_english(tmp_path: Path) -> None:
    for name in ("fr-de.tsv", "fr-en.tsv"):
        write(tmp_path / name, text_of(PAIRS))
    (file,) = find_bitext(tmp_path, target_language="deu")["fr"]
    assert file.paths == (str(tmp_path / "fr-de.tsv"),)
    with pytest.raises(ValueError, match="german"):
        find_bitext(tmp_path, target_language="german")


@pytest.mark.parametrize("name", ["missing/de-en.tsv", "/no/folder", "some-user/no-such-dataset"])
def test_a_missing_path_is_refused(name: str, here: Path) -> None:
    with pytest.raises((FileNotFoundError, UserError), match=f"{name}: no such file or folder"):
        load_bitext(name)


def test_a_name_that_tells_no_language_is_refused_or_left_out_of_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train.tsv", "en-en.tsv", "en-de.tsv", "lonely.de", "x.txt", "x.ids", "x.txt.gz"):
        path = write(tmp_path / name, text_of(PAIRS))
        with pytest.raises(UserError, match=name):
            find_bitext(path)
    with pytest.raises(UserError, match=r"en-de\.tsv"):
        find_bitext(tmp_path)
    with pytest.raises(UserError, match="no parallel text is given"):
        find_bitext([])
    left_out = {
        "a.po": " (its header names no Language)",
        "app.XLF": " (XLIFF: convert it, such as with xliff2po of the Translate Toolkit)",
        "en-de.tsv": "",
        "en-en.tsv": "",
        "fr-en.tsv.bz2": " (unpack it, or pack it as .gz)",
        "it-en.json": "",
        "lonely.de": "",
        "no-en.tsv.7z": "",
        "sw-en.txt": "",
        "train.tsv": "",
    }
    for name in (*left_out, "notes.log"):
        write(tmp_path / name, 'msgid "x"\nmsgstr "y"\n')
    write_format(tmp_path, "x.XX", PAIRS)
    write(tmp_path / "x.xh", "umbala\n")
    write(tmp_path / "x.xh.json", "{}")  # a report of mine-bitext
    write(tmp_path / "sub/NEWS.DE", "of another folder\n")
    write(tmp_path / "other/notes.log", "no text")
    caplog.clear()
    for _ in range(2):
        assert list(find_bitext(tmp_path)) == ["de", "xh"]
    [listed] = [record.args[1] for record in caplog.records if "left out" in record.msg]
    assert listed == ", ".join([*map("".join, left_out.items()), "1 more"])  # the folder sub
    assert caplog.text.count("'xh' is not one of the 36 languages") == 1


@pytest.mark.parametrize(
    "splits",
    [
        "train.csv validation.csv test.csv",
        "train.de-en.tsv dev.de-en.tsv test-2020.de-en.tsv",
        "TRAIN.DE-EN.TSV DEV.DE-EN.TSV TEST.DE-EN.TSV",
        "train/de-en.tsv val/de-en.tsv test/de-en.tsv",
        "train/de-en.tsv dev.de-en.tsv test2014.de-en.tsv",
        "a.de-en-train.csv a.de-en-dev.csv a.de-en-test.csv",
        "kftt-train.de-en.tsv kftt-tune.de-en.tsv kftt-test.de-en.tsv",
        "train2019/de-en.tsv dev2019/de-en.tsv test2019/de-en.tsv",
    ],
)
def test_splits_in_a_folder_are_kept_apart(tmp_path: Path, splits: str) -> None:
    train, dev, test = splits.split()
    mark = "," if train.endswith("csv") else "\t"
    for name in (dev, test):
        write(tmp_path / name, f"de{mark}en\n{name}{mark}x\n")
    write(tmp_path / "train.log", "no text")
    write(tmp_path / "validation" / ".hidden", "")
    assert find_dev([str(tmp_path)]) == []
    write(tmp_path / train, f"de{mark}en\n{train}{mark}x\n")
    assert folder_text(tmp_path) == {"de": f"{train}\tx\n"}
    for name, split in ((test, "test"), (dev, "dev")):
        [[file]] = find_bitext(tmp_path, split=split).values()
        assert read(file) == [(name, "x")]
    assert read(tmp_path / test) == [(test, "x")]

    given = tmp_path / train
    found = find_dev([str(given)])
    assert folder_text(Path(*found)) == {"de": f"{dev}\tx\n"}
    assert find_dev([str(tmp_path)]) == find_dev([str(given.parent)]) == found
    assert find_dev([str(given), *found]) == []


def test_splits_in_archives_are_kept_apart(tmp_path: Path) -> None:
    texts = {split: f"{split}\tx\n" for split in ("train", "dev", "test")}
    members = {f"{split}_set/de-en.tsv": text for split, text in texts.items()}
    whole = zip_of(tmp_path / "a.zip", members)
    for split, text in texts.items():
        zip_of(tmp_path / f"fr-en_{split}20.zip", {"fr-en.tsv": text})
    train = texts["train"]
    assert folder_text(tmp_path) == {"de": train, "fr": train}
    assert folder_text(whole) == {"de": train}
    assert folder_text(tmp_path / "fr-en_train20.zip") == {"fr": train}


def test_a_folder_named_for_a_split_trains_on_its_other_files(tmp_path: Path) -> None:
    for name in ("news", "contest", "dev", "test"):
        write(tmp_path / "test" / f"{name}.de-en.tsv", f"{name}\tx\n")
    write(tmp_path / "train" / "de-en.tsv", "a\tb\n")
    write(tmp_path / "web-dev" / "app.py", "")
    assert find_dev([str(tmp_path), str(tmp_path / "train/de-en.tsv")]) == []
    for split, names in (("train", {"news", "contest"}), ("dev", {"dev"}), ("test", {"test"})):
        [files] = find_bitext(tmp_path / "test", split=split).values()
        assert {source for file in files for source, _ in read(file)} == names


def test_all_folders_of_a_split_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "news.de-en.tsv", "a\tb\n")
    write(tmp_path / "test" / "test_app.py", "")
    for year in (2014, 2016):
        write(tmp_path / f"newstest{year}" / "de-en.tsv", f"{year}\tx\n")
    write(tmp_path / "test_results" / "de-en.jsonl", "{}")
    write(tmp_path / "eval" / "scores.csv", "a,b")
    [files] = find_bitext(tmp_path, split="test").values()
    assert [source for file in files for source, _ in read(file)] == ["2014", "2016"]
    assert "news.de-en.tsv is named for no split, so it is not read as test text" in caplog.text
    assert "test_results (a subfolder" in caplog.text


def test_the_dev_set_of_a_year_belongs_to_the_training_file_beside_it(tmp_path: Path) -> None:
    train = write(tmp_path / "training" / "train2019.de-en.tsv", "a\tb\n")
    dev = write(tmp_path / "training" / "newsdev2016.de-en.tsv", "c\td\n")
    for name in ("dev.de-en.tsv.json", ".dev.de-en.tsv", "newsdev2016.de-en.tsv.gz"):
        write(tmp_path / "training" / name, "{}")
    write(tmp_path / "test" / "x.zip", "broken")
    write(tmp_path / "training" / "dev.fr-en.tsv", "c\td\n")
    assert find_dev([str(train)]) == [str(dev)]


def test_a_link_to_nothing_is_refused_by_name(tmp_path: Path) -> None:
    link = write(tmp_path / "de-en.tsv", "ja\tyes\n").parent / "fr-en.tsv"
    link.symlink_to("absent")
    for look in (load_bitext, lambda path: read_evaluation([path])):
        with pytest.raises(OSError, match=re.escape(str(link))):
            look(tmp_path)


def test_hidden_files_are_left_out_of_a_folder_but_read_if_they_are_given(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw/de-en.tsv", "ja\tyes\n").parent
    hidden = write(folder / "._de-en.tsv", "Mac OS X\tattributes\n")
    (folder / ".#de-en.tsv").symlink_to("someone@host.4711")  # the lock of an editor
    members = {"fr-en.tsv": b"oui\tyes\n", "__MACOSX/._fr-en.tsv": b"Mac OS X\tattributes\n"}
    zip_of(folder / "a.zip", members)
    assert folder_text(folder) == {"de": "ja\tyes\n", "fr": "oui\tyes\n"}
    assert sorted(read_evaluation([str(folder)])) == ["ja", "oui", "yes"]
    assert read(hidden) == [("Mac OS X", "attributes")]


LANGUAGES = {
    "news.pt_br-en.tsv.gz": "pt", "zh-CN-en.tsv": "zh", "zho_Hans-eng_Latn.tsv": "zh",
    "es-419-en.tsv": "es", "xh-ZA-en.tsv": "xh", "de-en-us.tsv": "de", "br-en.tsv": "br",
    "it-da-en.tsv": "da", "FI-EN.TSV": "fi", "News.DE-EN.tsv": "de",
    "a.pt-br": "pt", "a.zh-CN.gz": "zh",
}  # fmt: skip


@pytest.mark.parametrize(("name", "language"), LANGUAGES.items())
def test_regions_are_not_taken_for_languages(tmp_path: Path, name: str, language: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "a.en").touch()
    (file,) = find_bitext(tmp_path / name)[language]
    assert file.paths[0] == str(tmp_path / name)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_datasets_have_columns_of_sides_or_of_translations(
    tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local dataset folder is loaded by the same code as one of the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    records = {
        "de-en": [{"source": source, "target": target} for source, target in PAIRS],
        "en-fr": [{"translation": {"en": target, "fr": source}} for source, target in PAIRS],
        "de-fr": [{"source": "a", "target": "b"}],
        "en-sw": [{"source": target, "target": source} for source, target in PAIRS],
    }
    header = "configs:\n"
    for config, rows in records.items():
        write(tmp_path / f"hub/{config}.jsonl", lines_of(map(json.dumps, rows)))
        header += f"- config_name: {config}\n  data_files: {config}.jsonl\n"
    name = str(write(tmp_path / "hub/README.md", f"---\n{header}---\n").parent)
    found = find_hub_files(name, "en")
    assert [file.language for file in found] == ["de", "fr", "sw"]
    assert find_hub_files(f"{name}:de-en", "en") == found[:1]
    write(tmp_path / "hub/de-fr.jsonl", '{"de": "a", "fr": "b"}\n')
    with pytest.raises(UserError, match="hub:de-fr"):
        read(replace(found[0], paths=(f"{name}:de-fr",), streaming=streaming))
    for file in found:
        assert read(replace(file, streaming=streaming)) == PAIRS
    with pytest.raises(UserError, match=name):
        find_hub_files(name, "zh")


@pytest.mark.parametrize("code", ["sh", "vec", "src"])
def test_a_language_that_is_also_an_ending_is_found_if_the_name_says_it_twice(
    code: str, tmp_path: Path
) -> None:
    for name in (f"X.en-{code}.{code}", f"X.en-{code}.en", f"Y.{code}", "Y.en"):
        write(tmp_path / name, b"a\n")
    found = find_bitext(tmp_path)
    assert list(found) == [code]
    assert len(found[code]) == 1


@pytest.mark.parametrize("packed", ["de-en.tsv.gz", "opus.zip/de-en.tsv"])
def test_a_packed_copy_beside_a_file_is_refused(packed: str, tmp_path: Path) -> None:
    write(tmp_path / "de-en.tsv", text_of(PAIRS))
    if "zip" in packed:
        zip_of(tmp_path / "opus.zip", {"de-en.tsv": text_of(PAIRS)})
    else:
        write(tmp_path / packed, text_of(PAIRS))
    with pytest.raises(UserError, match=rf"de-en\.tsv and .*{packed}"):
        find_bitext(tmp_path)
