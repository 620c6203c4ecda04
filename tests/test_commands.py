"""What all commands share: how they end, what they refuse to write, and the lock on outputs."""

import ctypes
import io
import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from conftest import load_encoder
from damaged_files import damage
from forked import run_python
from written import write

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.safeguards import command, guarded, refuse_changes
from dap_transformers.errors import UserError, reading
from dap_transformers.files import claimed, read_json, whole_file, whole_folder, write_json

TRAIN, EVALUATE, XNLI = "train_dap", "eval_retrieval", "run_xnli"
MINE, ALIGN, PREPARE, PUSH = (
    f"dap_transformers.commands.{name}"
    for name in ("mine_bitext", "align_words", "prepare_data", "push_to_hub")
)
COMMANDS = (TRAIN, EVALUATE, XNLI, MINE, ALIGN, PREPARE, PUSH)


# ------------------------------------------------------------------------------- how a command ends


@pytest.fixture(params=COMMANDS)
def main_that_raises(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Runs a command's `main` in which something below raises."""

    def run(error: type[BaseException]) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error("raised\n  below")

        monkeypatch.setattr(ArgumentParser, "parse_args_into_dataclasses", fail)
        import_module(request.param).main([])

    return run


def test_errors_that_the_user_can_fix_end_a_command_in_one_line(
    main_that_raises: Callable, capsys: pytest.CaptureFixture
) -> None:
    for error in (UserError, FileNotFoundError, FloatingPointError):
        with pytest.raises(SystemExit) as end:
            main_that_raises(error)
        assert end.value.code == "error: raised below"  # a text makes Python exit with status 1
    for error in (ValueError, RuntimeError):  # a bug keeps its traceback
        with pytest.raises(error) as bug:
            main_that_raises(error)
        assert bug.type is error
    with pytest.raises(SystemExit) as end:
        main_that_raises(KeyboardInterrupt)
    assert end.value.code == 130
    printed = capsys.readouterr().err
    assert re.fullmatch("\ninterrupted: (raised below|the same command begins anew, .*)\n", printed)


def test_a_launch_that_starts_one_process_instead_of_several_is_refused(
    main_that_raises: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SystemExit, match="--num_processes.*--multi_gpu"):
        main_that_raises(RuntimeError)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError):
        main_that_raises(RuntimeError)


@pytest.mark.parametrize("name", [TRAIN, XNLI])
def test_the_arguments_of_the_trainer_are_only_in_the_long_help(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    texts = []
    for flag in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            import_module(name).main([flag])
        texts.append(capsys.readouterr().out)
    short, long = texts
    assert "--adam_beta1 " not in short
    assert "--seed" in short
    assert "--adam_beta1 " in long


def test_a_console_that_is_not_utf_8_gets_replaced_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="cp1252"))

    @command
    def main(argv: list[str] | None = None) -> None:
        print("de → en: 93 %", flush=True)

    main()
    assert printed.getvalue() == b"de ? en: 93 %\n"


def test_an_error_while_reading_names_what_was_read() -> None:
    with (
        pytest.raises(UserError, match=r"^the weights of m: TypeError: a wrong value$"),
        reading("the weights of m"),
    ):
        raise TypeError("a wrong\n value")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", {"layer.2."}),
        ("model.safetensors", 0.5),
        ("model.safetensors", None),
        ("config.json", {"vocab_size": 999}),
        ("config.json", {"hidden_act": "nope"}),
        ("config.json", [1]),
        ("tokenizer.json", {}),
        ("tokenizer*", None),
        ("modules.json", [3]),
    ],
)
def test_a_damaged_model_is_refused_by_its_name(
    file: str, content: Any, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_bert_dir, tmp_path / "model")
    damage(model, file, content)
    with pytest.raises(UserError) as refused:
        load_encoder(model)
    assert str(model) in str(refused.value)


# ------------------------------------------------------------------------- what a command may write


@pytest.fixture
def place(tiny_bert_dir: Path, bitext_dir: Path, here: Path) -> Path:
    """Make inputs and links to them in the current folder."""
    for name in ("model", "run/checkpoint-10"):
        shutil.copytree(tiny_bert_dir, name)
    for name in ("in/a.de", "in/a.en", "test.txt"):
        write(here / name, "a sentence\n")
    shutil.copy(bitext_dir / "de-en.tsv", "in")
    (here / "linked").symlink_to("model")
    (here / "soft").symlink_to("in/de-en.tsv")
    return here


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return all paths below a folder, and the content of the files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


TEXTS = "in/a.de in/a.en --model model --output"
FROM_CONFIG = "--train_data in --use_cpu --config_name a/a"
#: (command, arguments, the outputs that take the place of {}). The fixture `place` makes the files.
REFUSED = [
    (PREPARE, "--data in --output_dir {}", "in in/out"),
    (PREPARE, "--data in --evaluation_data test.txt --output_dir {}", "."),
    (MINE, f"{TEXTS} out.tsv --report_file {{}}", "in/a.de out.tsv linked/config.json"),
    (MINE, f"{TEXTS} out.tsv --embeddings_dir {{}}", "in"),
    (ALIGN, f"{TEXTS} {{}}", "in/a.de in/a.en model/model.safetensors in"),
    (ALIGN, f"{TEXTS} out --gold test.txt --report_file {{}}", "test.txt out model/config.json"),
    (EVALUATE, "--data_dir in --model model --output_file {}", "in/de-en.tsv soft in/a.en in"),
    (EVALUATE, "--data_dir in --model model --output_file {}", "none/../in/de-en.tsv"),
    (EVALUATE, "--data_dir in --model model --output_file {}", "model/tokenizer.json"),
    (TRAIN, "--train_data in --use_cpu --model_name_or_path model --output_dir {}", "model linked"),
    (TRAIN, f"{FROM_CONFIG} --distill_from model --output_dir {{}}", "model in none/../in"),
    (TRAIN, f"{FROM_CONFIG} --tokenizer_name run/checkpoint-10 --output_dir {{}}", "run"),
    (TRAIN, f"{FROM_CONFIG} --distill_from run/checkpoint-10 --output_dir {{}}", "run"),
    (XNLI, "--model_name_or_path model --data_dir in --use_cpu --output_dir {}", "model in in/out"),
    (PUSH, "model --repo_id user/a --dry_run --output_dir {}", "model linked"),
]


@pytest.mark.parametrize(("name", "arguments", "outputs"), REFUSED)
def test_no_command_writes_over_what_it_reads(
    name: str, arguments: str, outputs: str, place: Path
) -> None:
    before = contents(place)
    for out in outputs.split():
        with pytest.raises(SystemExit, match=rf"^error: --\w+ {re.escape(out)} (would|is)"):
            import_module(name).main(arguments.format(out).split())
        assert contents(place) == before


def test_a_new_file_may_be_written_into_the_folder_of_a_model(place: Path) -> None:
    refuse_changes({"--output_file": place / "model/retrieval.json"}, {}, ["model"])


# ------------------------------------------------------------------------------- one run at a time


@pytest.mark.parametrize(("name", "arguments"), [row[:2] for row in REFUSED])
def test_an_output_without_a_name_or_of_another_run_is_refused(
    name: str, arguments: str, place: Path
) -> None:
    before = contents(place)
    with claimed(place / "new"), pytest.raises(SystemExit, match="^error: .* new is in use"):
        import_module(name).main(arguments.format("new").split())
    with pytest.raises(SystemExit, match="^error: .* is empty"):
        import_module(name).main([word.format("") for word in arguments.split()])
    assert contents(place) == before


def test_the_process_that_writes_has_the_folder_to_itself(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    outputs = {"--output_dir": folder}
    with (
        guarded({}, outputs),
        guarded({}, outputs, is_writer=False),
        pytest.raises(UserError, match="in use"),
        guarded({}, outputs),
    ):
        raise AssertionError("claimed twice")
    assert list(folder.parent.iterdir()) == []


def test_a_folder_is_locked_inside_if_nothing_can_be_written_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with claimed(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        with pytest.raises(UserError, match="in use"), claimed(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ files


def test_json_is_read_whole_or_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json({"a": 1}, path)
    assert read_json(path) == {"a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")}, path)
    for content in (b"\xff", b"[" * 100_000, b"{"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.json"):
            read_json(path)


def test_a_file_or_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    def write_half() -> None:
        with whole_file(tmp_path / "a") as file, whole_folder(tmp_path / "b") as folder:
            file.write(b"half")
            (folder / "half").touch()
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, write_half)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_folder_replaces_none_that_is_full_and_fills_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for path in (tmp_path / "folder", tmp_path / "link"):
        for name in ("first", "second"):
            with whole_folder(path) as new:
                (new / name).touch()
        assert [each.name for each in path.iterdir()] == ["first"]
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link", "folder"}


def test_the_umask_and_links_are_kept(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    before = os.umask(0o027)
    try:
        write_json({"a": 1}, tmp_path / "link.json")
    finally:
        os.umask(before)
    assert (tmp_path / "file.json").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link.json").is_symlink()


def test_every_help_works_without_optional_packages() -> None:
    extras = {"polars", "matplotlib", "peft", "sentence_transformers", "faiss", "onnx", "ray"}
    extras.add("fcntl")  # Windows has none
    code = f"""
import importlib, sys
for name in [*sys.modules, *{extras}]:
    if name.split(".")[0] in {extras}:
        sys.modules[name] = None
from dap_transformers import *
for name in {COMMANDS}:
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as end:
        print("ended", end.code)
"""
    assert run_python(code).count("ended 0") == len(COMMANDS)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="for glibc")
def test_the_memory_of_a_batch_is_used_again_by_the_next() -> None:
    code = """
import resource, torch
from dap_transformers.commands.safeguards import command
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16, 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
new_pages()
first = new_pages()
command(lambda argv: new_pages())()
print(first, min(new_pages() for _ in range(5)))
"""
    before, after = map(int, run_python(code).split())
    assert before > 10_000
    assert after < 100
