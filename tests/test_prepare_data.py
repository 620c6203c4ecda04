"""`prepare-data` makes shards, a report and a card from raw files, and resumes stopped runs."""

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import synthetic_pairs, tiny_tokenizer
from datasets import load_dataset
from written import contents, json_rows, lines_of, text_of, write, zip_of

from dap_transformers.commands.prepare_data import main
from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from dap_transformers.prepare import opus, prepare_text
from dap_transformers.prepare.data_card import LOSSES
from dap_transformers.prepare.options import PrepareOptions, RawText
from dap_transformers.text.corpus import load_bitext
from dap_transformers.text.find import find_dev
from dap_transformers.text_keys import normalise

OPTIONS = {field.name for field in fields(PrepareOptions)}


def long_pairs(language: str, count: int) -> list[tuple[str, str]]:
    """Return pairs that are long enough for the filters."""
    pairs = [pair for pair in synthetic_pairs(language, 2 * count) if len(pair[1].split()) > 3]
    return pairs[:count]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    for language in ("de", "fr"):
        write(folder / f"{language}-en.tsv", text_of(long_pairs(language, 80)))
    return folder


def prepared(raw: Path, output: Path, **given: Any) -> dict:
    """Prepare text with some options, and return the report."""
    given = {"data": [str(raw)], "dev_pairs": 5, "max_shared": 2, **given}
    options = {name: given.pop(name) for name in OPTIONS & given.keys()}
    return prepare_text.prepare_text(RawText(str(output), **given), PrepareOptions(**options))


def test_the_trainer_and_datasets_read_the_output(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cache = tmp_path / "cache"
    licences = str(tmp_path / "licences.json")
    write_json({"de-en.tsv": "CC0 | mine"}, licences)
    report = prepared(raw, out, licences=licences)
    assert {path.name for path in out.iterdir()} == {"train", "dev", "README.md", "report.json"}
    assert read_json(out / "report.json") == report

    of_all = load_dataset(str(out), cache_dir=str(cache))
    french = load_dataset(str(out), "fr-en", cache_dir=str(cache))
    for folder, split in (("train", "train"), ("dev", "validation")):
        loaded = load_bitext(out / folder, cache_dir=cache)
        sizes = {code: report["languages"][code][folder] for code in ("de", "fr")}
        assert {code: len(part) for code, part in loaded.items()} == sizes
        assert len(of_all[split]) == sum(sizes.values())
        assert len(french[split]) == sizes["fr"]
    assert list(load_bitext(out, cache_dir=cache)) == ["de", "fr"]  # those of out/train

    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["language"] == ["de", "fr", "en"]
    assert r"| de-en.tsv | 75 | CC0 \| mine |" in card
    assert "| fr-en.tsv | 75 | not stated; see the source |" in card
    assert "not compared with any evaluation set" in card
    assert str(tmp_path) not in json.dumps(report) + card


def test_leaks_are_counted_and_listed(raw: Path, tmp_path: Path) -> None:
    source, target = long_pairs("de", 80)[7]
    (tmp_path / "test.txt").write_text(f"{target.upper()}!\n{source}\tnothing else of this kind\n")
    out = tmp_path / "out"
    report = prepared(raw, out, evaluation_data=[str(tmp_path / "test.txt")])
    leaks = json_rows(out / "leaks.jsonl")
    assert report["evaluation_sentences"] == 3
    assert report["languages"]["de"]["leak"] == 1
    of_line = [leak for leak in leaks if leak["line"] == 8 and leak["language"] == "de"]
    assert {(leak["side"], leak["equal"]) for leak in of_line} == {
        ("source", True),
        ("target", True),
    }
    train = load_bitext(out / "train", cache_dir=tmp_path / "cache")["de"]
    assert normalise(target) not in map(normalise, train["target"])
    assert "evaluation sets test.txt" in (out / "README.md").read_text()


def test_bad_lines_are_counted_and_languages_chosen(
    raw: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (raw / "de-en.tsv").open("ab") as file:
        file.write(b"no tab\n\n\xff\tx\nDer Zug steht noch da.\tThe train still stands there.\n")
    write(raw / "es-en.tsv", "1\t2\n")
    report = prepared(raw, tmp_path / "out", languages=["deu", "es"], max_bad_lines=0.1)
    assert "no training pairs are left of: es;" in caplog.text
    assert list(report["languages"]) == ["de", "es"]
    counts = report["languages"]["de"]
    assert (counts["read"], counts["unreadable"]) == (83, 2)
    assert counts["read"] == sum(counts[name] for name in (*LOSSES, "train", "dev"))
    assert "| unreadable | 2 |" in (tmp_path / "out/README.md").read_text()


def test_a_finished_run_is_only_replaced_if_told(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".prepare_data").mkdir(parents=True)  # as of a run that was killed at its first write
    prepared(raw, out)
    before = contents(out, "*.parquet")
    with pytest.raises(UserError, match="holds a finished run"):
        prepared(raw, out, seed=1)
    assert contents(out, "*.parquet") == before
    again = prepared(raw, out, max_pairs=10, dev_pairs=0, overwrite=True)
    assert again["languages"]["de"]["train"] == 10
    assert not (out / ".prepare_data").exists()
    assert not list((out / "dev").iterdir())
    assert find_dev([str(out)]) == []  # the folder of an earlier run
    prepared(raw, tmp_path / "new", dev_pairs=0)
    assert not (tmp_path / "new/dev").exists()


def test_a_changed_file_is_cleaned_again_and_a_touched_one_is_not(raw: Path) -> None:
    def keys(*evaluation: str, **options: int) -> list[str]:
        text = RawText("out", data=[str(raw)])
        files, _ = prepare_text.find_files(text, PrepareOptions(**options), evaluation)
        return [file.key for file in files]

    file = raw / "de-en.tsv"
    before = keys()
    assert not set(before) & set(keys("A sentence of a test set."))
    os.utime(file, ns=(1, 1))
    assert keys() == keys(shard_size=5, dev_pairs=1) == before
    assert not set(before) & set(keys(max_pairs=9))  # cleaning drops what no sample needs
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[::-1]))
    os.utime(file, ns=(1, 1))  # of the same size and time
    assert keys()[0] != before[0]
    assert keys()[1:] == before[1:]


def test_files_of_others_are_left_alone(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out[1]*"
    out.mkdir()
    (out / "README.md").write_text("of others")
    with pytest.raises(UserError, match="holds other files"):
        prepared(raw, out, overwrite=True)
    (out / "report.json").write_text("{}")  # any report
    with pytest.raises(UserError, match="holds other files"):
        prepared(raw, out, overwrite=True)
    assert (out / "README.md").read_text() == "of others"
    for name in ("README.md", "report.json"):
        (out / name).unlink()
    (out / ".lock").touch()  # this command's own, in a mounted folder
    prepared(raw, out)
    (out / "dev/mine.txt").touch()
    shutil.copytree(out / "train", out / "train-old")
    copied = sorted((out / "train-old").iterdir())
    prepared(raw, out, dev_pairs=0, overwrite=True)
    assert [path.name for path in (out / "dev").iterdir()] == ["mine.txt"]
    assert sorted((out / "train-old").iterdir()) == copied != []


@pytest.mark.parametrize("name", ["data", "evaluation_data", "licences"])
def test_an_input_in_the_output_folder_is_refused(name: str, raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = write(out / "train/de-en.tsv", (raw / "de-en.tsv").read_bytes())
    value = str(path) if name == "licences" else [str(path)]
    with pytest.raises(UserError, match="lies in the output folder"):
        prepared(raw, out, **{name: value}, overwrite=True)
    assert path.is_file()


def test_text_from_opus_is_mixed_with_other_text_and_named(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"README": "about it"}
    for side, texts in zip(("sw", "en"), zip(*long_pairs("sw", 40))):
        files[f"WikiMatrix.en-sw.{side}"] = lines_of(texts)

    def download(url: str, path: Path) -> bool:
        if is_there := "WikiMatrix/v1/moses/en-sw" in url:
            zip_of(path, files)
        return is_there

    monkeypatch.setattr(opus, "download", download)
    options = {"languages": ["sw", "de"], "download_dir": str(tmp_path / "fetched")}
    report = prepared(raw, tmp_path / "out", opus=["CCMatrix,WikiMatrix"], **options)
    assert {code: found["origins"] for code, found in report["languages"].items()} == {
        "de": {"de-en.tsv": 75},
        "sw": {"WikiMatrix v1": 36},
    }
    card = (tmp_path / "out/README.md").read_text()
    assert "| WikiMatrix v1 | 36 | CC-BY-SA 4.0. (https://" in card


def test_files_of_the_same_name_are_corpora_of_their_own(raw: Path, tmp_path: Path) -> None:
    archive = zip_of(tmp_path / "a.zip", {"de-en.tsv": text_of(long_pairs("de", 160)[80:])})
    licences = tmp_path / "licences.json"
    write_json({"a.zip/de-en.tsv": "CC0", "fr-en.tsv": "CC-BY"}, licences)
    given = {
        "data": [str(raw), str(archive)],
        "licences": str(licences),
        "languages": ["de"],
        "dev_pairs": 0,
    }
    report = prepared(raw, tmp_path / "out", max_corpus_pairs=30, **given)
    assert report["languages"]["de"]["origins"] == {"a.zip/de-en.tsv": 30, "raw/de-en.tsv": 30}
    assert "| a.zip/de-en.tsv | 30 | CC0 |" in (tmp_path / "out/README.md").read_text()
    write_json({"de-en.tsv": "CC0"}, licences)
    with pytest.raises(UserError, match="called de-en.tsv, .*'raw/de-en.tsv'"):
        prepared(raw, tmp_path / "again", **given)


def test_a_recipe_of_the_command_sets_the_steps_of_the_released_code(
    raw: Path, tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    argv = f"--data {raw} --output_dir {tmp_path}/out --recipe release"
    main(f"{argv} --tokenizer {tmp_path}/tokenizer --max_tokens 500".split())
    settings = read_json(tmp_path / "out/report.json")["settings"]
    assert (settings["max_corpus_pairs"], settings["shared_beyond"]) == (1_010_000, 5)
    # Arguments that are given take precedence.
    assert (settings["tokenizer"], settings["max_tokens"]) == ("tokenizer", 500)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": ["absent"]}, "absent"),
        ({"languages": ["th"]}, "only in de fr"),
        ({"min_tokens": 99}, "nothing is left of 160 pairs"),
        ({"leak_threshold": 70}, "leak_threshold=70"),
        ({"dev_pairs": -1}, "dev_pairs=-1"),
        ({"url_pattern": "("}, r"url_pattern='\(': .* unclosed group"),
    ],
)
def test_what_is_refused(raw: Path, tmp_path: Path, options: dict, says: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        prepared(raw, tmp_path / "out", **options)
