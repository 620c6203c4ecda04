"""What all commands share: how they end, what they refuse to write, and who may write it now."""

import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from conftest import REPOSITORY
from safetensors.torch import load
from safetensors.torch import save as dump
from tqdm.auto import tqdm
from written import full_disk

import mine_bitext
import train_dap
from dap.arguments import ArgumentParser
from dap.commands import check_outputs, claimed, guarded
from dap.encoding import EncoderArguments
from dap.errors import UserError, refusals
from dap.file_io import read_json, read_object, whole_file, write_json
from dap.publishing import Options, build
from dap.text import load_bitext
from dap.training import load_model, parse_arguments, read_start

COMMANDS = ("train_dap", "eval_retrieval", "mine_bitext", "run_xnli", "prepare_data", "push_to_hub")
COMMANDS += ("dap.publishing.onnx_export", "dap.reports.merge")
BUSY = r"another run( \(process \d+\))? is at work on it"


# ------------------------------------------------------------------------------------------ how they end


@pytest.fixture(params=COMMANDS)
def main_that_raises(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[type], None]:
    """Runs a command's `main` in which something below raises."""

    def run(error: type[BaseException]) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error("raised\n  below")

        monkeypatch.setattr(ArgumentParser, "parse_args_into_dataclasses", fail)
        monkeypatch.setattr("dap.reports.merge.read_report", fail)
        import_module(request.param).main(
            ["a.json"] if request.param == "dap.reports.merge" else []
        )

    return run


@pytest.mark.parametrize("error", [UserError, FileNotFoundError, OSError, FloatingPointError])
def test_what_a_user_can_mend_is_one_line(
    main_that_raises: Callable[[type], None], error: type, capsys: pytest.CaptureFixture
) -> None:
    bar = tqdm(total=2)  # in whose line it would stand
    with pytest.raises(SystemExit) as end:
        main_that_raises(error)
    assert end.value.code == "error: raised below"  # text on stderr is status 1
    assert bar.disable  # it is closed
    assert capsys.readouterr().err.endswith("?it/s]\n")


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_a_bug_keeps_its_traceback(main_that_raises: Callable[[type], None], error: type) -> None:
    with pytest.raises(error, match="raised") as bug:
        main_that_raises(error)
    assert bug.type is error


@pytest.mark.parametrize("name", COMMANDS[:6])  # the others begin with their package
def test_ctrl_c_is_one_line_from_the_first_import_on(name: str) -> None:
    code = f"""if True:
        import sys
        class Stop:
            def find_spec(name, *_):
                light = ("dap", "dap.commands", "dap.errors", "dap.file_io", "{name}")
                if name not in light and name.split(".")[0] not in sys.stdlib_module_names:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Stop)
        import {name}
    """
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "interrupted\n")


def test_a_launch_that_starts_one_process_of_two_is_refused(
    main_that_raises: Callable[[type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "accelerate",
        "-c",
        "echo; read line",
        "launch",
        "--cpu",
        "--num_processes=2",
        "train_dap.py",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, executable="/bin/sh", **pipes) as launcher:
        launcher.stdout.readline()  # before that it may have no command line yet
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        with pytest.raises(
            SystemExit, match="--num_processes 2 has started one process alone.*ACCELERATE_USE_CPU"
        ):
            main_that_raises(RuntimeError)
        launcher.communicate()


def test_a_process_ends_with_status_1_and_that_line_alone(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dap.reports", str(tmp_path / "absent.json")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/absent.json: No such file or directory\n"


def test_refusals_of_libraries_become_ours_and_name_what_is_refused() -> None:
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


#: File of a checkpoint, what is in it instead (None: it is gone; a dict: fields of it; a set: without these weights),
#: and what is said.
DAMAGE = [
    ("model.safetensors", {"layer.2."}, r"lacks 16 weights of its encoder, .* 'encoder\.layer\.2"),
    ("model.safetensors", b"", "the weights of .*SafetensorError: .*header too small"),
    ("model.safetensors", 0.5, "the weights of .*SafetensorError: .*not fully covered"),
    ("model.safetensors", None, "the weights of .*OSError: .*no file named model.safetensors"),
    ("pytorch_model.bin", pickle.dumps(Planted(), 2), "a pickle that is damaged or would run code"),
    (
        "config.json",
        {"vocab_size": 999},
        "the weights of .*their shapes are not those of the configuration",
    ),
    ("config.json", {"hidden_act": "nope"}, "the weights of .*KeyError: 'nope'"),
    ("config.json", {"hidden_act": math.nan}, "the configuration of .*expected str, got float"),
    ("config.json", {"layer_norm_eps": math.nan}, "has layer_norm_eps=nan in its configuration"),
    (
        "config.json",
        {"num_hidden_layers": 10**9},
        "has num_hidden_layers=1000000000 in its configuration",
    ),
    ("config.json", {"num_attention_heads": -1}, "has num_attention_heads=-1 in its configuration"),
    ("config.json", {"vocab_size": 200}, "has vocab_size=200, its tokenizer has ids up to 246"),
    ("config.json", [1], "the configuration of .*Unrecognized model"),
    ("config.json", b"\xff", "the configuration of .*not a valid JSON"),
    ("tokenizer.json", {}, "the tokenizer of .*KeyError: 'added_tokens'"),
    ("tokenizer*", None, "holds no tokenizer: add its files"),
    ("modules.json", [3], "the sentence-transformers files of .*TypeError"),
    ("modules.json", modules(3, "1"), "the sentence-transformers files of .*TypeError"),
]


@pytest.mark.parametrize(("file", "content", "said"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_alike_wherever_it_is_read(
    file: str, content: object, said: str, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_bert_dir, tmp_path / "model")
    whole = (model / file).read_bytes() if (model / file).exists() else b""
    for path in model.glob("model.safetensors" if file.endswith(".bin") else file):
        path.unlink()
    if isinstance(content, dict) and content:
        content = json.loads(whole) | content
    if isinstance(content, set):
        weights = load(whole)
        content = dump(
            {name: weights[name] for name in weights if not any(part in name for part in content)}
        )
    if isinstance(content, float):
        content = whole[: int(content * len(whole))]
    if content is not None:
        (model / file).write_bytes(
            content if isinstance(content, bytes) else json.dumps(content).encode()
        )
    argv = argv_of("train_dap", str(model), tmp_path, tmp_path / "out")
    train, _, _ = parse_arguments([*argv, "--objective", "tr"])
    readers = {
        "encode": EncoderArguments(str(model)).load,
        "push": lambda: build(model, tmp_path / "out", Options(pooling="cls")),
        "train": lambda: load_model(train, read_start(train), {}),
    }
    for name, read in readers.items():
        if name == "train" and file == "modules.json":  # which training does not read
            continue
        is_known = name != "push" or said.startswith("lacks")  # push names the file in other words
        with pytest.raises(UserError, match=said if is_known else None) as refused:
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
        assert "share of the tokens that mlm masks. (default: 0.15)" in own
        options, listed = (
            ("--model_name_or_path", "--mlm_probability", "--train_data", "--freeze_encoder"),
            [],
        )
        for option in (*options, "--weight_decay"):
            listed.append(text.partition("model and objective:")[2].index(f" {option} "))
        assert listed == sorted(listed)


#: Command, its arguments, bytes that a file may have, which are too few for torch, safetensors or Arrow, and where.
FULL = [
    (
        "train_dap",
        "--max_steps 1 --save_steps 1 --dev_pairs 0 --objective tr --report_to none",
        200_000,
        "out",
    ),
    (
        "train_dap",
        "--max_steps 1 --save_steps 1 --dev_pairs 0 --objective tr --report_to none",
        5_000,
        "tokens",
    ),
    ("push_to_hub", "--pooling cls", 90_000, "out"),
]


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    case: tuple,
    tiny_bert_dir: Path,
    bitext_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, more, size, place = case
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "tokens")
    load_bitext(bitext_dir / "de-en.tsv")  # which is cached there, too
    argv = [
        *argv_of(name, str(tiny_bert_dir), bitext_dir / "de-en.tsv", tmp_path / "out"),
        *more.split(),
    ]
    main, said = (
        import_module(name).main,
        rf"^error: {tmp_path}/{place}: the disk is full \(.*make room, then run",
    )
    with full_disk(size), pytest.raises(SystemExit, match=said):
        main(argv)
    main(argv)
    assert [*(tmp_path / "out").rglob("model.safetensors")]


# ---------------------------------------------------------------------------------- what they do not write


def argv_of(name: str, model: str, text: Path, out: Path) -> list[str]:
    """A short command line, whose model need not be there."""
    write = {"eval_retrieval": "--output_file", "mine_bitext": "--output"}.get(name, "--output_dir")
    start = {
        "train_dap": ["--train_data", str(text), "--model_name_or_path", model, "--use_cpu"],
        "run_xnli": [
            "--train_data",
            "absent.tsv",
            "--data_dir",
            "absent",
            "--model_name_or_path",
            model,
            "--use_cpu",
        ],
        "eval_retrieval": ["--data_dir", str(text), "--model", model],
        "mine_bitext": [str(text / "a.de"), str(text / "a.en"), "--model", model],
        "push_to_hub": [model, "--repo_id", "user/a", "--dry_run"],
        "prepare_data": ["--data", str(text)],
    }
    return [*start[name], write, str(out)]


#: Command, arguments, and what stands for {} in them; model/, in/ and so on are made by `place`.
REFUSED = [
    (
        "prepare_data",
        "--data in --output_dir out --list_leaks {}",
        "in/de-en.tsv in/new.jsonl hard soft in",
    ),
    ("prepare_data", "--data in/a.de --output_dir out --list_leaks {}", "in/a.de in/a.en"),
    (
        "prepare_data",
        "--data in --evaluation_data test.txt --output_dir out --list_leaks {}",
        "test.txt in/de-en.tsv",
    ),
    (
        "prepare_data",
        "--data in --licences report.json --output_dir out --list_leaks {}",
        "report.json",
    ),
    (
        "prepare_data",
        "--data in --target_vocabulary model --output_dir out --list_leaks {}",
        "model/tokenizer.json",
    ),
    (
        "prepare_data",
        "--data in --evaluation_data model --output_dir {}",
        "in in/out in/de-en.tsv model model/out",
    ),
    (
        "mine_bitext",
        "in/a.de in/a.en --model model --output {}",
        "in/a.de in/a.en hard-side linked/config.json in",
    ),
    (
        "mine_bitext",
        "in/a.de in/a.en --model model --output {}",
        "model/model.safetensors model/onnx/model.onnx",
    ),
    (
        "mine_bitext",
        "in/a.de in/a.en --model model --output {}",
        "model/tokenizer.json model/1_Pooling/config.json",
    ),
    (
        "mine_bitext",
        "in/a.de in/a.en --model model --output out --report_file {}",
        "in/a.de in/a.de/a.json out",
    ),
    (
        "mine_bitext",
        "in/a.de in/a.en --model model --output out --report_file {}",
        "in/a.en model/config.json",
    ),
    (
        "mine_bitext",
        "in/a.de in/a.en --model model --output out --embeddings_dir {}",
        "model linked in/a.de",
    ),
    (
        "eval_retrieval",
        "--data_dir in --model model --output_file {}",
        "in/de-en.tsv hard soft in/a.en in",
    ),
    (
        "eval_retrieval",
        "--data_dir in --model model --hard_negatives --output_file {}",
        "model/config.json in/a.de",
    ),
    (
        "eval_retrieval",
        "--data_dir in --model model --output_file {}",
        "model/model.safetensors model/tokenizer.json",
    ),
    ("eval_retrieval", "--data_dir in --model model --output_dir {}", "in/de-en.tsv"),
    (
        "train_dap",
        "--train_data in --model_name_or_path model --use_cpu --output_dir {}",
        "model linked in/a.de",
    ),
    ("train_dap", "--train_data in --config_name model --use_cpu --output_dir {}", "model linked"),
    (
        "train_dap",
        "--train_data in --config_name user/a --tokenizer_name model --use_cpu --output_dir {}",
        "model",
    ),
    (
        "run_xnli",
        "--model_name_or_path model --data_dir in --use_cpu --output_dir {}",
        "model linked in/a.de test.txt/a",
    ),
    ("push_to_hub", "model --repo_id user/a --dry_run --output_dir {}", "model linked in in/a.de"),
    ("dap.publishing.onnx_export", "model {}", "in/a.de in"),
    ("dap.reports.merge", "report.json --output {}", "report.json in"),
]


@pytest.fixture
def place(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The current folder, with inputs and links to them."""
    shutil.copytree(tiny_bert_dir, tmp_path / "model")
    (tmp_path / "linked").symlink_to("model")
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


def state(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "arguments", "outputs"), REFUSED)
def test_no_command_writes_over_what_it_reads(
    name: str, arguments: str, outputs: str, place: Path
) -> None:
    before = state(place)
    why = "overwrite|lies in|is a file|is a folder|is the folder of the model|not empty|cannot be written"
    for out in outputs.split():
        with pytest.raises(SystemExit, match=f"^error: .*{out}.*({why})") as end:
            import_module(name).main(arguments.format(out).split())
        assert "\n" not in end.value.code
        assert state(place) == before


PATHS = {
    "train_dap": "train_data validation_data model_name_or_path tokenizer_name target_vocabulary_file output_dir",
    "run_xnli": "train_data data_dir model_name_or_path output_dir",
    "eval_retrieval": "data_dir model output_file output_dir embeddings_dir plot before",
    "mine_bitext": "model output report_file embeddings_dir bucc",
    "push_to_hub": "output_dir results dataset_info",
    "prepare_data": "data evaluation_data output_dir list_leaks download_dir licences tokenizer target_vocabulary",
}


@pytest.mark.parametrize("name", PATHS)
def test_an_empty_path_is_not_the_current_folder(name: str, place: Path) -> None:
    before, main = state(place), import_module(name).main
    for path in PATHS[name].split():
        given = argv_of(name, "model", Path("in"), Path("out"))
        for odd, message in (
            ("", "is empty: give a value"),
            ("\udcff", "xff': a file name that is no UTF-8; rename it"),
        ):
            with pytest.raises(SystemExit, match=f"^error: .*{message}") as end:
                main([*given, f"--{path}", odd])
            assert odd or f"--{path}" in end.value.code or path == "model"
    assert state(place) == before


def test_empty_texts_and_reports_are_refused_too(place: Path) -> None:
    before = state(place)
    with pytest.raises(SystemExit, match="^error: FILES is empty"):
        mine_bitext.main(["in/a.de", "", "--model", "model", "--output", "out"])
    with pytest.raises(SystemExit, match="^error: --output is missing"):
        mine_bitext.main(["in/a.de", "in/a.en", "--model", "model"])
    with pytest.raises(
        SystemExit, match="^error: --output p.tsv.zst: pairs are packed by .gz or .xz alone"
    ):
        mine_bitext.main(["in/a.de", "in/a.en", "--model", "model", "--output", "p.tsv.zst"])
    with pytest.raises(SystemExit, match=r"^error: \.: Is a directory"):
        import_module("dap.reports.merge").main([""])
    with pytest.raises(SystemExit, match=r"^error: --output is a folder"):
        import_module("dap.reports.merge").main(["report.json", "--output", ""])
    assert state(place) == before


def test_names_that_are_too_long_are_found_before_the_work(place: Path) -> None:
    before = state(place)
    for name in PATHS:
        is_file = name in ("eval_retrieval", "mine_bitext")
        for length in (
            (243, 300) if is_file else (300,)
        ):  # the first has no room for a name until the file is whole
            option = "--(output|embeddings).*" if is_file else "--output_dir .*"
            said = f"^error: {option} cannot be written: .*File name too long"
            with pytest.raises(SystemExit, match=said):
                import_module(name).main(argv_of(name, "model", Path("in"), Path("x" * length)))
    assert state(place) == before


def test_results_may_lie_beside_a_models_files(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").touch()
    check_outputs({"--output_file": tmp_path / "retrieval.json"}, model=tmp_path)
    check_outputs({"--output_file": tmp_path.parent / "config.json"}, model=tmp_path)
    with pytest.raises(
        UserError, match="^--output_file /dev/null is a device: give the file to write"
    ):
        check_outputs({"--output_file": os.devnull})
    for name in ("tokenizer.json", "onnx/model_quantized.onnx"):
        with pytest.raises(UserError, match="a file of the model"):
            check_outputs(
                {"--output_file": tmp_path / name}, model=tmp_path / "onnx" / "model.onnx"
            )


# ------------------------------------------------------------------------------------- one run at a time


@pytest.mark.parametrize(
    "name", sorted(PATHS.keys() - {"prepare_data"})
)  # which has a test of its own
def test_what_another_run_writes_is_left_to_it(name: str, bitext_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = argv_of(name, str(tmp_path / "absent"), bitext_dir, out)
    with claimed(out, beside=name in ("eval_retrieval", "mine_bitext")):
        for _ in range(2):
            with pytest.raises(SystemExit, match=f"^error: .* {out}: {BUSY}: wait"):
                import_module(name).main(argv)
    if name == "mine_bitext":
        with (
            claimed(Path(f"{out}.embeddings")),
            pytest.raises(SystemExit, match=f"--embeddings_dir .*: {BUSY}"),
        ):
            mine_bitext.main(argv)
    with pytest.raises(SystemExit, match=r"absent|a\.de"):  # the lock is free again
        import_module(name).main(argv)
    assert list(tmp_path.iterdir()) == []


def test_only_the_process_that_writes_takes_the_lock(tmp_path: Path) -> None:
    outputs = {"--output_dir": tmp_path / "out"}
    with guarded(folders=outputs), guarded(folders=outputs, is_writer=False):
        assert (tmp_path / "out").is_dir()


def fork(work: Callable[[], None]) -> int:
    """The id of a process that does the work and then waits to be killed; returns when the work is done."""
    done, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            work()
            os.write(tell, b"!")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(done, 1) == b"!"
    os.close(done)
    return pid


@pytest.mark.parametrize("beside", [False, True])
def test_a_killed_run_holds_nothing_even_where_a_process_that_it_forked_lives_on(
    tmp_path: Path, beside: bool
) -> None:
    path, note = tmp_path / "out", tmp_path / "pid"

    held = claimed(path, beside=beside)

    def hold() -> None:
        held.__enter__()  # until the kill
        note.write_text(str(fork(lambda: None)))

    run = fork(hold)
    try:
        with pytest.raises(UserError, match=rf"another run \(process {run}\) is at work on it"):
            claimed(path, beside=beside).__enter__()
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        with claimed(path, beside=beside):
            os.kill(int(note.read_text()), 0)  # it lives
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)
    assert list(tmp_path.iterdir()) == [note]


def test_a_refused_claim_leaves_the_folder_to_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with claimed(folder), pytest.raises(UserError, match=BUSY), claimed(folder):
        raise AssertionError("claimed twice")
    assert not folder.exists()
    with claimed(folder):
        (folder / "kept").touch()
    assert (folder / "kept").is_file()


def test_a_folder_that_was_taken_away_before_its_lock_is_claimed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, taken_away = tmp_path / "run", []
    lock = import_module("dap.commands")._lock

    def lock_too_late(handle: int, name: str) -> None:
        if len(taken_away) < 2:  # as by another run that ends between the opening and the lock
            folder.rmdir()
            taken_away.append(folder)
        lock(handle, name)

    monkeypatch.setattr("dap.commands._lock", lock_too_late)
    before = set(os.listdir("/proc/self/fd"))
    with claimed(folder):
        monkeypatch.undo()
        assert folder.is_dir()
        with pytest.raises(UserError, match=BUSY), claimed(folder):
            raise AssertionError("claimed twice")
    assert set(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------------------- files


def test_json_is_read_whole_or_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json({"a": 1}, path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")}, path)
    assert read_object(path) == read_json(path) == {"a": 1}
    path.write_text('["x", NaN]')
    with pytest.raises(UserError, match=r"a\.json: no JSON \(it holds NaN\)"):
        read_json(path, finite=True)
    with pytest.raises(UserError, match=r"a\.json: holds a JSON list, expected an object"):
        read_object(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"a\.json: no JSON"):
        read_json(path)


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    def stopped() -> None:
        with whole_file(tmp_path / "new" / "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, stopped)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_is_for_those_to_read_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_json({}, tmp_path / "a.json")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_one_when_its_file_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    write_json({"a": 1}, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_json(tmp_path / "file.json") == {"a": 1}
