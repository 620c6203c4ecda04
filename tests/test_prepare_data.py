"""`prepare-data` makes shards, a report and a card from raw files, and resumes stopped runs."""

import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import REPOSITORY, synthetic_pairs
from datasets import load_dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from written import full_disk, serve_folder, text_of, zip_of

from dap_transformers import __version__
from dap_transformers.commands.prepare import DataArguments, find_files, main, run
from dap_transformers.encoding.encoder import load_encoder
from dap_transformers.errors import UserError
from dap_transformers.languages import normalise
from dap_transformers.prepare.options import PrepareOptions
from dap_transformers.text.corpus import load_bitext
from dap_transformers.text.formats import BitextFile
from dap_transformers.training.batches import tokenize_bitext
from dap_transformers.training.start import target_vocabulary

SHARED = REPOSITORY.parent / "shared"


def long_pairs(language: str, count: int) -> list[tuple[str, str]]:
    """Return pairs that are long enough for the filters."""
    pairs = [pair for pair in synthetic_pairs(language, 2 * count) if len(pair[1].split()) > 3]
    return pairs[:count]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    for language in ("de", "fr"):
        (folder / f"{language}-en.tsv").write_bytes(text_of(long_pairs(language, 80)))
    return folder


def arguments(raw: Path, output: Path, **options: Any) -> list[str]:
    """Make a command line. A list becomes several values."""
    given = {"data": raw, "output_dir": output, "dev_pairs": 5, "max_shared": 2, **options}
    argv = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        argv += [f"--{name}", *map(str, values)]
    return argv


def test_without_polars_the_command_says_its_version_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", "dap_transformers.commands.prepare"]
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(SystemExit, match=r"^error: .* pip install polars$"):
        runpy.run_path(command)
    monkeypatch.setattr(sys, "argv", [command, "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(command)
    assert ended.value.code is None
    assert capsys.readouterr().out == f"dap-transformers {__version__}\n"


def test_the_trainer_and_datasets_read_the_output(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    cache = tmp_path / "cache"
    licences = write(tmp_path / "licences.json", {"de-en.tsv": "CC0 | mine"})
    report = run(arguments(raw, out, licences=licences))
    assert {path.name for path in out.iterdir()} == {"train", "dev", "README.md", "report.json"}
    assert json.loads((out / "report.json").read_text()) == report

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
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["language"] == ["de", "fr", "en"]
    assert metadata["size_categories"] == ["n<1K"]
    assert metadata["license"] == "unknown"  # that of one file is not stated
    assert r"| de-en.tsv | 75 | CC0 \| mine |" in card
    assert "| fr-en.tsv | 75 | not stated; see the source |" in card
    assert "not compared with any evaluation set" in card
    printed = capsys.readouterr().out
    assert "target_repeated" in printed
    assert "url" not in printed  # no pair was dropped for it


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_target_vocabulary_equals_that_of_the_trainer(
    raw: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    out = tmp_path / "out"
    same = {"target_vocabulary": tmp_path / "tokenizer", "tokenizer": tmp_path / "tokenizer"}
    run(arguments(raw, out, **same, max_tokens=500, target_language="eng"))
    assert "train/00000.de-en.parquet" in contents(out)
    found = json.loads((out / "target_vocabulary.json").read_text())
    train = load_bitext(out / "train", cache_dir=tmp_path / "cache")
    expected = target_vocabulary(tokenize_bitext(train, tiny_tokenizer, 64), tiny_tokenizer)
    of_tokenizer = {"tokenizer": "tokenizer", "vocab_size": len(tiny_tokenizer)}
    assert found == of_tokenizer | {"target_token_ids": expected}
    assert len(expected) > 20


def test_leaks_are_counted_and_listed(raw: Path, tmp_path: Path) -> None:
    source, target = long_pairs("de", 80)[7]
    (tmp_path / "test.txt").write_text(f"{target.upper()}!\n{source}\tnothing else of this kind\n")
    out = tmp_path / "out"
    options = {"evaluation_data": tmp_path / "test.txt", "list_leaks": tmp_path / "new/leaks.jsonl"}
    report = run(arguments(raw, out, **options))
    records = (tmp_path / "new/leaks.jsonl").read_text().splitlines()
    leaks = [json.loads(record) for record in records]
    assert report["evaluation_sentences"] == 3
    assert report["languages"]["de"]["leak"] == 1
    of_line = [leak for leak in leaks if leak["line"] == 8 and leak["language"] == "de"]
    listed = {(leak["side"], leak["equal"]) for leak in of_line}
    assert listed == {("source", True), ("target", True)}
    train = load_bitext(out / "train", cache_dir=tmp_path / "cache")["de"]
    assert normalise(target) not in map(normalise, train["target"])
    assert "evaluation sets test.txt" in (out / "README.md").read_text()


def identify(texts: list[str]) -> list[str]:
    """Identify the languages of synthetic texts, whose words end with their language's code."""
    codes = []
    for text in texts:
        end = text.split()[0][-2:]
        codes.append(end if end in ("de", "fr") or not text.isascii() else "en")
    return codes


def test_the_identifier_is_asked(raw: Path, tmp_path: Path) -> None:
    with (raw / "de-en.tsv").open("a") as file:
        file.writelines(f"{source}\t{target}\n" for source, target in long_pairs("fr", 90)[80:])
    report = run(arguments(raw, tmp_path / "out", language_identifier="test_prepare_data:identify"))
    assert {code: found["language"] for code, found in report["languages"].items()} == {
        "de": 10,
        "fr": 0,
    }


def test_pairs_of_low_cosine_are_dropped_and_counted(
    raw: Path, tmp_path: Path, tiny_bert_dir: Path
) -> None:
    out = tmp_path / "out"
    encoder = load_encoder(str(tiny_bert_dir))
    cosines = []
    for pair in long_pairs("de", 80):
        one, other = encoder.encode(pair).astype(np.float64)
        cosines.append(float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)))
    threshold = (sorted(cosines)[39] + sorted(cosines)[40]) / 2

    options = {"model": tiny_bert_dir, "min_similarity": threshold, "languages": "de"}
    report = run(arguments(raw, out, **options))
    assert report["languages"]["de"]["similarity"] == 40
    assert "low cosine of the sentence vectors" in (out / "README.md").read_text()
    kept = set()
    for row in load_dataset(str(out), cache_dir=str(tmp_path / "cache"))["train"]:
        kept.add((row["source"], row["target"]))
    for pair, cosine in zip(long_pairs("de", 80), cosines, strict=True):
        assert pair not in kept or cosine >= threshold

    for option in (["--min_similarity", "0.5"], ["--model", "m"]):
        with pytest.raises(UserError, match="give --min_similarity and --model together"):
            run([*arguments(raw, tmp_path / "other"), *option])


def test_a_warning_names_a_language_without_training_pairs(
    raw: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (raw / "sw-en.tsv").write_text("mbili\ttwo\n")
    report = run(arguments(raw, tmp_path / "out"))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("sw: ")
    assert report["languages"]["sw"]["short"] == 1
    assert list(load_bitext(tmp_path / "out/train", cache_dir=tmp_path / "cache")) == ["de", "fr"]
    card = yaml.safe_load((tmp_path / "out/README.md").read_text().split("---")[1])
    assert [config["config_name"] for config in card["configs"]] == ["default", "de-en", "fr-en"]


def test_bad_lines_are_counted_and_languages_chosen(raw: Path, tmp_path: Path) -> None:
    with (raw / "de-en.tsv").open("ab") as file:
        file.write(
            b"no tab\n\xff\tx\n" + b"Der Zug steht noch da.\tThe train still stands there." + b"\n"
        )
    report = run(arguments(raw, tmp_path / "out", languages="deu", max_bad_lines=0.1))
    assert list(report["languages"]) == ["de"]
    assert (report["languages"]["de"]["read"], report["languages"]["de"]["unreadable"]) == (81, 2)


def test_the_same_command_does_nothing_and_another_one_is_refused(
    raw: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / ".prepare_data").mkdir(parents=True)  # as of a run that was killed at its first write
    report = run(arguments(raw, out))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(arguments(raw, out, num_workers=2)) == report
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(UserError, match="--overwrite"):
        run(arguments(raw, out, seed=1))

    # A touched file is the same. A changed one may have the same size and time.
    file = raw / "de-en.tsv"
    os.utime(file, ns=(1, 1))
    assert run(arguments(raw, out)) == report
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[::-1]))
    os.utime(file, ns=(1, 1))
    with pytest.raises(UserError, match="--overwrite"):
        run(arguments(raw, out))
    again = run([*arguments(raw, out, max_pairs=10, dev_pairs=0), "--overwrite"])
    assert again["languages"]["de"]["train"] == 10
    assert not (out / ".prepare_data").exists()
    assert not list((out / "dev").iterdir())


@pytest.mark.parametrize(
    ("name", "more"), [("thesis.tex", []), ("train/mine.txt", ["--overwrite"])]
)
def test_a_folder_with_other_files_is_left_alone(
    name: str, more: list[str], raw: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(UserError, match=f"mine .*{name.split('/')[0]}"):
        run([*arguments(raw, tmp_path / "mine"), *more])
    assert path.is_file()


def test_foreign_files_survive_overwriting_planted_links_and_patterns_in_paths(
    raw: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out[1]*"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "a.txt").touch()
    report = run(arguments(raw, out))
    assert str(tmp_path) not in json.dumps(report) + (out / "README.md").read_text()

    (out / ".prepare_data").symlink_to(foreign)
    (out / "dev/mine.txt").touch()
    again = [*arguments(raw, out, seed=1), "--overwrite"]
    with pytest.raises(UserError, match=r"holds other files \(dev/mine.txt\)"):
        run(again)
    (out / "dev/mine.txt").unlink()
    run(again)
    assert (foreign / "a.txt").exists()


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def run_to_its_end(argv: list[str], at_its_end: Callable = stop) -> None:
    """Run the command, and stop it before it finishes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prepare_data.finish", at_its_end)
        pytest.raises(KeyboardInterrupt, run, argv)


def test_a_second_run_on_the_same_folder_is_refused(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def beside(*_: Any) -> None:
        with pytest.raises(UserError, match="out is in use by another run"):
            run(arguments(raw, out))
        stop()

    run_to_its_end(arguments(raw, out), beside)
    assert run(arguments(raw, out))["languages"]["de"]["train"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


@pytest.mark.parametrize("name", ["data", "evaluation_data", "licences", "list_leaks"])
def test_an_input_in_the_output_folder_is_refused(name: str, raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "train").mkdir(parents=True)
    path = out / "train/de-en.tsv"
    path.write_bytes((raw / "de-en.tsv").read_bytes())
    with pytest.raises(UserError, match=f"--{name} .* lies in --output_dir"):
        run([*arguments(raw, out, **{name: path}), "--overwrite"])
    assert path.is_file()


@pytest.mark.parametrize("option", ["tokenizer", "evaluation_data", "language_identifier"])
def test_after_a_wrong_name_the_corrected_command_runs(
    option: str, raw: Path, tmp_path: Path
) -> None:
    with pytest.raises((UserError, FileNotFoundError), match="absent"):
        run(arguments(raw, tmp_path / "out", **{option: tmp_path / "absent"}))
    assert not (tmp_path / "out").exists()
    assert run(arguments(raw, tmp_path / "out"))["languages"]["de"]["train"]


def test_after_a_file_is_repaired_only_this_file_is_cleaned(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = (raw / "fr-en.tsv").read_bytes().splitlines(keepends=True)
    good = b"".join(lines[:20])
    (raw / "fr-en.tsv").write_bytes(b"one column\n" * 5 + good)  # the larger file is cleaned first
    with pytest.raises(UserError, match="lines are bad"):
        run(arguments(raw, out))
    (finished,) = (out / ".prepare_data").glob("clean-*")
    os.utime(finished, (1, 1))
    (raw / "fr-en.tsv").write_bytes(good)
    run_to_its_end(arguments(raw, out))
    assert finished.stat().st_mtime == 1  # not made again
    report = run(arguments(raw, out))
    assert report["languages"] == run(arguments(raw, tmp_path / "other"))["languages"]
    assert contents(out) == contents(tmp_path / "other")


def test_a_stopped_run_that_overwrites_is_resumed(raw: Path, tmp_path: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (out / ".prepare_data").glob("clean-*")}

    out = tmp_path / "out"
    run(arguments(raw, out))
    (out / "target_vocabulary.json").touch()  # of a run that asked for it
    command = [*arguments(raw, out, seed=1), "--overwrite"]
    run_to_its_end(command)
    for name in ("report.json", "README.md", "target_vocabulary.json"):
        assert not (out / name).exists()
    before = times()
    run_to_its_end(command)
    assert times() == before
    run(command)
    run(arguments(raw, tmp_path / "other", seed=1))
    assert contents(out) == contents(tmp_path / "other")


def test_a_full_disk_is_named_and_the_run_is_resumed_once_there_is_space(
    raw: Path, tmp_path: Path
) -> None:
    (tmp_path / "test.txt").write_text("a sentence\n" * 50)
    given = {"evaluation_data": tmp_path / "test.txt", "list_leaks": tmp_path / "leaks.jsonl"}
    run(arguments(raw, tmp_path / "clean", **given))
    full = rf"^error: {tmp_path}/out/\S+: the disk is full \(.*"
    before = contents(tmp_path / "clean")
    for size in (600, 1200, 2500):  # bytes that a file may have
        with full_disk(size), pytest.raises(SystemExit, match=full):
            main(arguments(raw, tmp_path / "out", **given))
        assert contents(tmp_path / "out").items() <= before.items()  # whole shards
        assert not list((tmp_path / "out").rglob("*.tmp"))
    run(arguments(raw, tmp_path / "out", **given))
    assert contents(tmp_path / "out") == before


def test_a_finished_folder_takes_new_licences_and_needs_all_its_shards(
    raw: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "test.txt").write_text("nothing of the kind\n")
    leaks = {"evaluation_data": tmp_path / "test.txt", "list_leaks": tmp_path / "leaks.jsonl"}
    run(arguments(raw, out, **leaks))
    licences = write(tmp_path / "licences.json", {"de-en.tsv": "CC0"})
    report = run(arguments(raw, out, **leaks, licences=licences))
    assert "| de-en.tsv | 75 | CC0 |" in (out / "README.md").read_text()
    assert json.loads((out / "report.json").read_text())["licences"] == report["licences"]
    with pytest.raises(UserError, match="leaks.jsonl"):
        run(arguments(raw, out, **leaks | {"list_leaks": tmp_path / "elsewhere.jsonl"}))
    (out / "train/00000.fr-en.parquet").unlink()
    with pytest.raises(UserError, match="00000.fr-en.parquet.*--overwrite"):
        run(arguments(raw, out, **leaks))


@pytest.mark.parametrize("text", ['["CC0"]', "{broken", '{"de-en.tsv": 1}'])
def test_a_wrong_file_of_licences_is_refused_by_name(text: str, raw: Path, tmp_path: Path) -> None:
    (tmp_path / "licences.json").write_text(text)
    with pytest.raises(UserError, match="licences.json"):
        run(arguments(raw, tmp_path / "out", licences=tmp_path / "licences.json"))


def test_a_report_of_another_program_is_refused_by_name(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine/report.json", {"a": 1})
    with pytest.raises(UserError, match="report.json"):
        run(arguments(raw, tmp_path / "mine"))


def test_ids_beyond_the_vocabulary_are_refused(raw: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 7}, unk_token="[UNK]"))
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    with pytest.raises(UserError, match="has 4 tokens, but ids up to 7"):
        run(arguments(raw, tmp_path / "out", target_vocabulary=folder))


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    file = BitextFile("de", ("user/name",), "hub", config="de-en")
    monkeypatch.setattr("prepare_data.find_bitext", lambda *_: {"de": [file]})
    (found,), _ = find_files(DataArguments(output_dir="out", data=["user/name"]), PrepareOptions())
    assert found.file.streaming
    assert found.origin == "user/name:de-en"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data", "absent"),
        ("languages", "th"),
        ("tokenizer", "no/such-tokenizer"),
        ("evaluation_data", "absent.txt"),
        ("language_identifier", "absent:f"),
        ("num_workers", 0),
        ("leak_threshold", 2),
        ("min_similarity", 1.5),
        ("url_pattern", "("),
        ("opus", "NoSuchCorpus"),
    ],
)
def test_a_wrong_argument_ends_the_command_with_one_line_that_has_its_value(
    name: str, value: object, raw: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{re.escape(str(value))}"):
        main(arguments(raw, tmp_path / "out", **{name: value}))


def test_a_command_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data, --opus"):
        run(["--output_dir", str(tmp_path)])


@pytest.fixture
def opus(tmp_path: Path) -> Iterator[str]:
    """Serve a copy of OPUS' file store with one small corpus."""
    files = {"README": "about it"}
    for side, texts in zip(("sw", "en"), zip(*long_pairs("sw", 40))):
        files[f"WikiMatrix.en-sw.{side}"] = "".join(f"{text}\n" for text in texts)
    (tmp_path / "store/OPUS-WikiMatrix/v1/moses").mkdir(parents=True)
    zip_of(tmp_path / "store/OPUS-WikiMatrix/v1/moses/en-sw.txt.zip", files)
    with serve_folder(tmp_path / "store") as address:
        yield address


def test_text_from_opus_is_mixed_with_other_text_and_named(
    raw: Path, opus: str, tmp_path: Path
) -> None:
    options = {
        "opus": "WikiMatrix",
        "languages": ["sw", "de"],
        "mirror": opus,
        "download_dir": tmp_path / "fetched",
    }
    report = run(arguments(raw, tmp_path / "out", **options))
    assert {code: found["origins"] for code, found in report["languages"].items()} == {
        "de": {"de-en.tsv": 75},
        "sw": {"WikiMatrix v1": 36},
    }
    card = (tmp_path / "out/README.md").read_text()
    assert "| WikiMatrix v1 | 36 | CC-BY-SA 4.0. (https://" in card
    with pytest.raises(UserError, match="--opus WikiMatrix"):
        run(arguments(raw, tmp_path / "none", **options | {"languages": "fr"}))


def test_the_recipe_sets_the_steps_of_the_released_code(
    raw: Path,
    opus: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = {"opus": ["CCMatrix", "WikiMatrix"], "languages": ["sw", "de"], "mirror": opus}
    options |= {
        "recipe": "release",
        "tokenizer": tmp_path / "tokenizer",
        "download_dir": tmp_path / "fetched",
    }
    settings = run(arguments(raw, tmp_path / "out", **options | {"max_tokens": 500}))["settings"]
    assert settings["max_corpus_pairs"] == 1_010_000
    assert settings["shared_beyond"] == 5
    # Arguments that are given take precedence.
    assert settings["dev_pairs"] == 5
    assert settings["tokenizer"] == "tokenizer"
    # German is not asked for.
    messages = [record.getMessage() for record in caplog.records]
    asked = [message for message in messages if "OPUS has no CCMatrix" in message]
    assert [message.rpartition("/")[2] for message in asked] == ["en-sw.txt.zip"]
    with pytest.raises(UserError, match="--recipe 'ours'"):
        run(arguments(raw, tmp_path / "out", recipe="ours"))


@pytest.mark.skipif(
    not (SHARED / "data/train").is_dir(), reason="../shared with real text is absent"
)
def test_most_real_text_passes(tmp_path: Path) -> None:
    data = [SHARED / f"data/train/{code}-en.tsv.xz" for code in ("jv", "af")]
    argv = ["--data", *map(str, data), "--output_dir", str(tmp_path / "out")]
    report = run([*argv, "--evaluation_data", str(SHARED / "data/tatoeba")])
    for found in report["languages"].values():
        assert found["train"] + found["dev"] > 0.75 * found["read"]
        assert found["script"] < 0.02 * found["read"]
        assert found["leak"] < 0.01 * found["read"]
