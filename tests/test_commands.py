"""What all commands share: how they end, what they refuse to write, and the lock on outputs."""

import io
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from conftest import REPOSITORY
from safetensors.torch import load
from safetensors.torch import save as dump
from written import full_disk

import train_dap
from dap_transformers import __version__
from dap_transformers.commands import mine as mine_bitext
from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.edge import ClaimedError, check_outputs, claimed, command, guarded
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.errors import UserError, refusals
from dap_transformers.files import read_json, read_object, whole_file, whole_folder, write_json
from dap_transformers.publishing.layout import Options, build
from dap_transformers.text.corpus import load_bitext
from dap_transformers.training.arguments import parse_arguments
from dap_transformers.training.start import load_model, read_start

COMMANDS = ("train_dap", "eval_retrieval", "mine_bitext", "run_xnli", "prepare_data", "push_to_hub")
COMMANDS += ("align_words", "dap_transformers.publishing.onnx_export")


# ------------------------------------------------------------------------------- how a command ends


@pytest.fixture(params=COMMANDS)
def main_that_raises(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[type], None]:
    """Runs a command's `main` in which something below raises."""

    def run(error: type[BaseException]) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error("raised\n  below")

        monkeypatch.setattr(ArgumentParser, "parse_args_into_dataclasses", fail)
        import_module(request.param).main([])

    return run


@pytest.mark.parametrize("error", [UserError, FileNotFoundError, OSError, FloatingPointError])
def test_errors_that_the_user_can_fix_end_a_command_in_one_line(
    main_that_raises: Callable[[type], None], error: type
) -> None:
    with pytest.raises(SystemExit) as end:
        main_that_raises(error)
    assert end.value.code == "error: raised below"  # a text makes Python exit with status 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        import_module(name).main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"dap-transformers {__version__}\n"


def test_ctrl_c_ends_a_command_in_one_line(
    main_that_raises: Callable[[type], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main_that_raises(KeyboardInterrupt)
    assert end.value.code == 130
    # train_dap.py says instead that the run can be resumed.
    assert re.fullmatch(
        "interrupted: (raised below|by default, the same .*)\n", capsys.readouterr().err
    )


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_printed_stops_no_work_and_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @command
    def main(argv: list[str] | None = None) -> None:
        with guarded({"--output": tmp_path / "a.json"}):
            print("a result" * 10_000, flush=True)
            print("progress" * 10_000, file=sys.stderr, flush=True)
            write_json({"a": 1}, tmp_path / "a.json")

    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(SystemExit, match=r"standard output .* \(No space left on device\)"):
            main()
        assert sys.stdout is full
    assert read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_a_bug_keeps_its_traceback(main_that_raises: Callable[[type], None], error: type) -> None:
    with pytest.raises(error, match="raised") as bug:
        main_that_raises(error)
    assert bug.type is error


def test_a_launch_that_starts_one_process_instead_of_several_is_refused(
    main_that_raises: Callable[[type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SystemExit, match="--num_processes.*--multi_gpu"):
        main_that_raises(RuntimeError)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError):
        main_that_raises(RuntimeError)


def test_a_refused_command_prints_one_line_and_has_status_1(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dap_transformers.reports", str(tmp_path / "absent.json")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/absent.json: No such file or directory\n"


def test_errors_of_libraries_become_user_errors_that_name_the_argument() -> None:
    with pytest.raises(UserError, match="^a wrong value$"), refusals():
        raise ValueError("a wrong\n value")
    with pytest.raises(UserError, match="^--model m: not there$"), refusals("--model m"):
        raise OSError("not there")
    with pytest.raises(FileNotFoundError), refusals():
        raise FileNotFoundError
    with pytest.raises(TypeError), refusals("--model m"):
        raise TypeError


def test_a_refused_configuration_is_one_line(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    flags = ["--tr_temperature", "-1", "--max_steps", "1"]
    with pytest.raises(SystemExit, match="^error: .*tr_temperature"):
        train_dap.main(
            [*argv_of("train_dap", str(tiny_bert_dir), bitext_dir, tmp_path / "out"), *flags]
        )
    assert not (tmp_path / "out").exists()


class Planted:
    """A pickle of it would stop this process."""

    def __reduce__(self) -> tuple:
        return os._exit, (9,)


def modules(*paths: object) -> list:
    kinds = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
    return [{"path": path, "type": kind} for path, kind in zip(paths, kinds)]


#: (a file of a checkpoint, its new content). None removes the file. A dictionary replaces some
#: fields of a JSON file. A set names weights to leave out. A number keeps that share of the bytes.
DAMAGE = [
    ("model.safetensors", {"layer.2."}),
    ("model.safetensors", b""),
    ("model.safetensors", 0.5),
    ("model.safetensors", None),
    ("pytorch_model.bin", pickle.dumps(Planted(), 2)),
    ("config.json", {"vocab_size": 999}),
    ("config.json", {"hidden_act": "nope"}),
    ("config.json", {"hidden_act": math.nan}),
    ("config.json", {"layer_norm_eps": math.nan}),
    ("config.json", {"num_hidden_layers": 10**9}),
    ("config.json", {"num_attention_heads": -1}),
    ("config.json", {"vocab_size": 200}),
    ("config.json", [1]),
    ("config.json", b"\xff"),
    ("tokenizer.json", {}),
    ("tokenizer*", None),
    ("modules.json", [3]),
    ("modules.json", modules(3, "1")),
]


def damage(model: Path, file: str, content: object) -> None:
    """Replace a file of a checkpoint, as `DAMAGE` describes it."""
    before = (model / file).read_bytes() if (model / file).exists() else b""
    for path in model.glob("model.safetensors" if file.endswith(".bin") else file):
        path.unlink()
    if content is None:
        return

    if isinstance(content, float):
        content = before[: int(content * len(before))]
    elif isinstance(content, set):
        (left_out,) = content
        weights = load(before)
        content = dump({name: weights[name] for name in weights if left_out not in name})
    elif isinstance(content, dict) and content:
        content = json.loads(before) | content

    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    (model / file).write_bytes(content)


@pytest.mark.parametrize(("file", "content"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_its_name_wherever_it_is_read(
    file: str, content: object, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_bert_dir, tmp_path / "model")
    damage(model, file, content)
    argv = argv_of("train_dap", str(model), tmp_path, tmp_path / "out")
    train, _, _ = parse_arguments([*argv, "--objective", "tr"])
    readers = {
        "encode": EncoderArguments(str(model)).load,
        "push": lambda: build(model, tmp_path / "out", Options(pooling="cls")),
        "train": lambda: load_model(train, read_start(train), {}),
    }
    if file == "modules.json":  # training does not read it
        del readers["train"]
    for read in readers.values():
        with pytest.raises(UserError) as refused:
            read()
        assert str(model) in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_each_default_once_and_only_where_there_is_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        import_module(name).main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert not re.search(r"\(default: (None|False|\[\])\)", text)
    assert not re.search(r"[dD]efault(?:(?! --)[^()])*\. \(default:", text)
    own, _, inherited = text.partition("arguments of Transformers' Trainer:")
    assert ("--adam_beta1 " in inherited) == (name in ("train_dap", "run_xnli"))
    assert "--adam_beta1 " not in own
    assert "--output-dir" not in text  # each name once
    if name == "train_dap":
        assert re.search(r"--mlm_probability [^-]* checkpoint, otherwise 0\.15\.", own)
        assert not re.search(r"Default: [^.]*\. Default: that of the checkpoint", own)
        options, listed = (
            ("--model_name_or_path", "--mlm_probability", "--train_data", "--freeze_encoder"),
            [],
        )
        for option in (*options, "--weight_decay"):
            listed.append(text.partition("model and objective:")[2].index(f" {option} "))
        assert listed == sorted(listed)


TRAIN_ONE_STEP = "--max_steps 1 --save_steps 1 --dev_pairs 0 --objective tr --report_to none"
#: (command, arguments, bytes that a file may have, the folder that gets full). The sizes are too
#: small for torch, Arrow and safetensors.
FULL = [
    ("train_dap", TRAIN_ONE_STEP, 200_000, "out"),
    ("train_dap", TRAIN_ONE_STEP, 5_000, "tokens"),
    ("push_to_hub", "--pooling cls", 90_000, "out"),
]


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_is_one_line_and_the_run_resumes_once_there_is_space(
    case: tuple,
    tiny_bert_dir: Path,
    bitext_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, more, size, full_folder = case
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "tokens")
    text = bitext_dir / "de-en.tsv"
    load_bitext(text)  # so that only the tokens are missing in the cache
    argv = [*argv_of(name, str(tiny_bert_dir), text, tmp_path / "out"), *more.split()]
    main = import_module(name).main
    message = rf"^error: {tmp_path}/{full_folder}: the disk is full"
    with full_disk(size), pytest.raises(SystemExit, match=message):
        main(argv)
    main(argv)
    assert [*(tmp_path / "out").rglob("model.safetensors")]


# ------------------------------------------------------------------------- what a command may write


def argv_of(name: str, model: str, text: Path, out: Path) -> list[str]:
    """Return a short command line. Its model need not exist."""
    outputs = {"eval_retrieval": "--output_file"}
    outputs |= dict.fromkeys(("mine_bitext", "align_words"), "--output")
    write = outputs.get(name, "--output_dir")
    of_the_model = ["--model_name_or_path", model, "--use_cpu"]
    start = {
        "train_dap": ["--train_data", str(text), *of_the_model],
        "run_xnli": ["--train_data", "absent.tsv", "--data_dir", "absent", *of_the_model],
        "eval_retrieval": ["--data_dir", str(text), "--model", model],
        "mine_bitext": [str(text / "a.de"), str(text / "a.en"), "--model", model],
        "align_words": [str(text / "a.de"), str(text / "a.en"), "--model", model],
        "push_to_hub": [model, "--repo_id", "user/a", "--dry_run"],
        "prepare_data": ["--data", str(text)],
    }
    return [*start[name], write, str(out)]


MINE = "in/a.de in/a.en --model model --output"
EVALUATE = "--data_dir in --model model"
TRAIN = "--train_data in --use_cpu"
PREPARE = "--data in --output_dir out"
#: (command, arguments, the outputs that take the place of {}). The fixture `place` makes the files.
REFUSED = [
    ("prepare_data", f"{PREPARE} --list_leaks {{}}", "in/de-en.tsv in/new.jsonl hard soft in"),
    ("prepare_data", "--data in/a.de --output_dir out --list_leaks {}", "in/a.de in/a.en"),
    ("prepare_data", f"{PREPARE} --evaluation_data test.txt --list_leaks {{}}", "test.txt"),
    ("prepare_data", f"{PREPARE} --licences report.json --list_leaks {{}}", "report.json"),
    (
        "prepare_data",
        f"{PREPARE} --target_vocabulary model --list_leaks {{}}",
        "model/tokenizer.json",
    ),
    (
        "prepare_data",
        "--data in --evaluation_data model --output_dir {}",
        "in in/out in/de-en.tsv model model/out",
    ),
    ("mine_bitext", f"{MINE} {{}}", "in/a.de in/a.en hard-side linked/config.json in"),
    ("mine_bitext", f"{MINE} {{}}", "model/model.safetensors model/onnx/model.onnx"),
    ("mine_bitext", f"{MINE} {{}}", "model/tokenizer.json model/1_Pooling/config.json"),
    ("mine_bitext", f"{MINE} out --report_file {{}}", "in/a.de in/a.de/a.json out"),
    ("mine_bitext", f"{MINE} out --report_file {{}}", "in/a.en model/config.json"),
    ("mine_bitext", f"{MINE} out --embeddings_dir {{}}", "model linked in/a.de"),
    ("align_words", f"{MINE} {{}}", "in/a.de in/a.en hard-side linked/model.safetensors in"),
    ("align_words", f"{MINE} out --report_file {{}}", "in/a.de out model/config.json"),
    ("align_words", f"{MINE} out --gold test.txt --report_file {{}}", "test.txt"),
    ("eval_retrieval", f"{EVALUATE} --output_file {{}}", "in/de-en.tsv hard soft in/a.en in"),
    ("eval_retrieval", f"{EVALUATE} --hard_negatives --output_file {{}}", "model/config.json"),
    ("eval_retrieval", f"{EVALUATE} --output_file {{}}", "model/tokenizer.json"),
    ("eval_retrieval", f"{EVALUATE} --output_dir {{}}", "in/de-en.tsv"),
    ("eval_retrieval", f"{EVALUATE} --output_file {{}}", "none/../in/de-en.tsv model/notes.txt"),
    ("eval_retrieval", f"{EVALUATE} --embeddings_dir {{}}", "in none/../in in/kept linked"),
    ("mine_bitext", f"{MINE} {{}}", "none/../in/a.de"),
    ("train_dap", f"{TRAIN} --model_name_or_path model --output_dir {{}}", "model linked in/a.de"),
    ("train_dap", f"{TRAIN} --config_name model --output_dir {{}}", "model linked in none/../in"),
    ("train_dap", f"{TRAIN} --config_name a/a --init_heads_from model --output_dir {{}}", "model"),
    ("train_dap", f"{TRAIN} --config_name a/a --tokenizer_name model --output_dir {{}}", "model"),
    (
        "run_xnli",
        "--model_name_or_path model --data_dir in --use_cpu --output_dir {}",
        "model linked in in/out in/a.de test.txt/a",
    ),
    ("push_to_hub", "model --repo_id user/a --dry_run --output_dir {}", "model linked in in/a.de"),
    ("dap_transformers.publishing.onnx_export", "model {}", "in/a.de in"),
]
WHY_REFUSED = "overwrite|lies in|is a file|is a folder|is the folder|not empty|cannot be written"
WHY_REFUSED += "|pairs are written as"  # a file that is no format of mined pairs


@pytest.fixture
def place(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Make inputs and links to them in the current folder."""
    shutil.copytree(tiny_bert_dir, tmp_path / "model")
    (tmp_path / "linked").symlink_to("model")
    (tmp_path / "model/notes.txt").write_text("my own notes\n")
    (tmp_path / "in").mkdir()
    shutil.copy(bitext_dir / "de-en.tsv", tmp_path / "in")
    for name in ("in/a.de", "in/a.en", "test.txt"):
        (tmp_path / name).write_text("a sentence\n")
    (tmp_path / "report.json").write_text('{"de-en.tsv": "CC0"}')
    (tmp_path / "hard").hardlink_to(tmp_path / "in/de-en.tsv")
    (tmp_path / "hard-side").hardlink_to(tmp_path / "in/a.en")
    (tmp_path / "soft").symlink_to("in/de-en.tsv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return all paths below a folder, and the content of the files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "arguments", "outputs"), REFUSED)
def test_no_command_writes_over_what_it_reads(
    name: str, arguments: str, outputs: str, place: Path
) -> None:
    before = contents(place)
    for out in outputs.split():
        with pytest.raises(SystemExit, match=f"^error: .*{out}.*({WHY_REFUSED})") as end:
            import_module(name).main(arguments.format(out).split())
        assert "\n" not in end.value.code
        assert contents(place) == before


PATHS = {
    "train_dap": "train_data validation_data model_name_or_path tokenizer_name output_dir "
    "target_vocabulary_file",
    "run_xnli": "train_data data_dir model_name_or_path output_dir",
    "eval_retrieval": "data_dir model output_file output_dir embeddings_dir plot before",
    "mine_bitext": "model output report_file embeddings_dir bucc",
    "align_words": "model output report_file gold",
    "push_to_hub": "output_dir results dataset_info",
    "prepare_data": "data evaluation_data output_dir list_leaks download_dir licences tokenizer "
    "target_vocabulary model",
}


@pytest.mark.parametrize("name", PATHS)
def test_empty_and_unreadable_paths_are_refused(name: str, place: Path) -> None:
    before = contents(place)
    for argument in PATHS[name].split():
        argv = argv_of(name, "model", Path("in"), Path("out"))
        for odd, message in (("", "is empty"), ("\udcff", "xff'.*not UTF-8")):
            with pytest.raises(SystemExit, match=f"^error: .*{message}"):
                import_module(name).main([*argv, f"--{argument}", odd])
    assert contents(place) == before


def test_missing_or_wrong_outputs_of_mining_and_merging_are_refused(place: Path) -> None:
    before = contents(place)
    texts = ["in/a.de", "in/a.en", "--model", "model"]
    with pytest.raises(SystemExit, match="^error: FILES is empty"):
        mine_bitext.main(["in/a.de", "", "--model", "model", "--output", "out"])
    with pytest.raises(SystemExit, match="^error: --output is missing"):
        mine_bitext.main(texts)
    with pytest.raises(SystemExit, match=r"^error: --output p\.tsv\.zst"):
        mine_bitext.main([*texts, "--output", "p.tsv.zst"])
    assert contents(place) == before


@pytest.mark.parametrize("name", PATHS)
def test_names_that_are_too_long_are_refused_before_the_work(name: str, place: Path) -> None:
    before = contents(place)
    lengths = [300]
    if name in ("eval_retrieval", "mine_bitext", "align_words"):
        lengths.append(243)  # leaves no room for the temporary name
    for length in lengths:
        with pytest.raises(SystemExit, match="^error: --.* cannot be written: .*too long"):
            import_module(name).main(argv_of(name, "model", Path("in"), Path("x" * length)))
    assert contents(place) == before


def test_only_the_files_of_a_model_are_protected_in_its_folder(tmp_path: Path) -> None:
    onnx = tmp_path / "onnx" / "model.onnx"
    onnx.parent.mkdir()
    onnx.touch()
    report = tmp_path / "retrieval.json"
    for content in (None, {"protocol": "", "versions": {}}):
        if content:
            write_json(content, report)
        check_outputs({"--output_file": report}, model=tmp_path)
    check_outputs({"--output_file": tmp_path.parent / "config.json"}, model=tmp_path)
    for name in ("tokenizer.json", "onnx/model_quantized.onnx"):
        with pytest.raises(UserError, match="a file of the model"):
            check_outputs({"--output_file": tmp_path / name}, model=onnx)
    with pytest.raises(UserError, match=os.devnull):
        check_outputs({"--output_file": os.devnull})


# ------------------------------------------------------------------------------- one run at a time


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_command_refuses_an_output_of_another_run(
    name: str, bitext_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = argv_of(name, str(tmp_path / "absent"), bitext_dir, out)
    with claimed(out), pytest.raises(SystemExit, match=f"^error: .* {out} is in use"):
        import_module(name).main(argv)
    if name == "mine_bitext":
        vectors = f"{out}.embeddings"
        argv += ["--embeddings_dir", vectors]
        with claimed(vectors), pytest.raises(SystemExit, match="--embeddings_dir .* is in use"):
            mine_bitext.main(argv)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_free_and_empty_folders_are_gone_after_a_refused_run(
    bitext_dir: Path, tmp_path: Path
) -> None:
    argv = argv_of("eval_retrieval", str(tmp_path / "absent"), bitext_dir, tmp_path / "out")
    for _ in range(2):
        with pytest.raises(SystemExit, match="absent"):
            import_module("eval_retrieval").main(argv)
    assert list(tmp_path.iterdir()) == []


def test_only_the_process_that_writes_takes_the_lock(tmp_path: Path) -> None:
    outputs = {"--output_dir": tmp_path / "out"}
    with guarded(folders=outputs), guarded(folders=outputs, is_writer=False):
        assert (tmp_path / "out").is_dir()


def test_a_refused_claim_leaves_the_folder_to_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    outputs = {"--output_dir": folder}
    with guarded(folders=outputs):
        with pytest.raises(ClaimedError), guarded(folders=outputs):
            raise AssertionError("claimed twice")
        assert folder.is_dir()
    assert list(folder.parent.iterdir()) == []


def claim_and_stay(path: Path, is_claimed: multiprocessing.Event) -> None:
    with claimed(path):
        is_claimed.set()
        multiprocessing.Event().wait()


def test_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "out"
    context = multiprocessing.get_context("fork")
    is_claimed = context.Event()
    run = context.Process(target=claim_and_stay, args=(path, is_claimed))
    run.start()
    is_claimed.wait()
    with pytest.raises(ClaimedError), claimed(path):
        raise AssertionError("claimed twice")
    run.kill()
    run.join()
    with claimed(path):
        pass
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ files


def test_json_is_read_whole_or_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json({"a": 1}, path)
    assert read_object(path) == read_json(path) == {"a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")}, path)
    path.write_text('["x", NaN]')
    with pytest.raises(UserError, match=r"a\.json: .*NaN"):
        read_json(path, finite=True)
    with pytest.raises(UserError, match=r"a\.json: .*list"):
        read_object(path)
    for content in (b"\xff", b"[" * 100_000, b"1" + b"0" * 400):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.json"):
            read_json(path, finite=True)


def test_a_value_of_another_kind_is_named_by_its_place(tmp_path: Path) -> None:
    kinds = {"a": ({str: {"n": [float]}}, int | None), "b": str | None}
    fitting = [{}, {"a": 3, "c": []}, {"a": {"x": {"n": [1, 2.5]}}, "b": "y"}]
    unfit = {"a": True, "a x n": {"x": {"n": 1}}, "a x n 1": {"x": {"n": [1, "2"]}}}
    for content in fitting:
        write_json(content, tmp_path / "a.json")
        assert read_object(tmp_path / "a.json", kinds) == content
    for place, value in unfit.items():
        write_json({"a": value}, tmp_path / "a.json")
        with pytest.raises(UserError, match=rf"a\.json: '{place}' is .*, expected "):
            read_object(tmp_path / "a.json", kinds)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    def write_half() -> None:
        with whole_file(tmp_path / "new" / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, write_half)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_has_its_name_only_when_it_is_whole_and_replaces_none_that_is_full(
    tmp_path: Path,
) -> None:
    path = tmp_path / "folder"

    def write_half() -> None:
        with whole_folder(path) as new:
            (new / "half").touch()
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, write_half)
    assert list(tmp_path.iterdir()) == []

    for name in ("first", "second"):
        with whole_folder(path) as new:
            (new / name).touch()
    assert [each.name for each in path.iterdir()] == ["first"]
    assert list(tmp_path.iterdir()) == [path]

    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with whole_folder(tmp_path / "link") as new:
        (new / "file").touch()
    assert (tmp_path / "empty" / "file").is_file()

    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), whole_folder(tmp_path / "file"):
        pass
    with pytest.raises(FileNotFoundError), whole_folder(path) as new:
        (new / "absent").read_text()


def test_the_umask_decides_who_may_read_a_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_json({}, tmp_path / "a.json")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_writing_to_a_link_replaces_the_file_that_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    write_json({"a": 1}, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_json(tmp_path / "file.json") == {"a": 1}
