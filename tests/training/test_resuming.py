"""Which checkpoint a run resumes from, and which runs do not resume."""

import json
import logging
import logging.handlers
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import results, run, state, training_flags
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from dap_transformers.files import write_json
from dap_transformers.reports import RECORD
from dap_transformers.training.arguments import DAPTrainingArguments
from dap_transformers.training.resume import (
    FINISHED,
    RecordInCheckpoints,
    ResumedSchedule,
    find_resumable,
)

CHECKPOINT_FILES = (
    "config.json",
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "training_args.bin",
)


#: The least that a trainer_state.json holds.
STATE = {"global_step": 1, "max_steps": 9, "epoch": 1, "total_flos": 2.5}


def saved_checkpoint(folder: Path, without: str = "") -> Path:
    """Make a folder with the files of a checkpoint."""
    folder.mkdir(parents=True)
    for name in CHECKPOINT_FILES:
        (folder / name).touch()
    (folder / "trainer_state.json").write_text(json.dumps(STATE))
    if without:
        (folder / without).unlink()
    return folder


# Finding a checkpoint


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ("trainer_state.json", "trainer_state.json"),
        ("model.safetensors", "weights"),
        ("optimizer.pt", "optimizer"),
    ],
)
def test_incomplete_checkpoints_are_skipped(
    without: str, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    complete = saved_checkpoint(tmp_path / "checkpoint-20")
    broken = saved_checkpoint(tmp_path / "checkpoint-100", without)
    args = DAPTrainingArguments(output_dir=str(tmp_path))
    assert find_resumable(args) == str(complete)
    assert f"checkpoint-100 is skipped: it was only partly saved, its {named}" in caplog.text
    args.resume_from_checkpoint = "false"
    assert find_resumable(args) is None
    args.resume_from_checkpoint = str(broken)
    with pytest.raises(ValueError, match=f"checkpoint-100: its {named} is missing"):
        find_resumable(args)


@pytest.mark.parametrize("content", ["{", ""])
def test_a_damaged_state_is_no_checkpoint(content: str, tmp_path: Path) -> None:
    (saved_checkpoint(tmp_path / "checkpoint-5") / "trainer_state.json").write_text(content)
    args = DAPTrainingArguments(output_dir=str(tmp_path))
    assert find_resumable(args) is None


def test_a_run_that_saved_only_models_is_refused(tmp_path: Path) -> None:
    saved_checkpoint(tmp_path / "checkpoint-5")
    args = DAPTrainingArguments(output_dir=str(tmp_path), save_only_model=True)
    with pytest.raises(ValueError, match="save_only_model"):
        find_resumable(args)


def test_checkpoints_of_an_earlier_run_in_the_folder_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, seed in ((4, 7), (8, 42)):
        write_json({"seed": seed}, saved_checkpoint(tmp_path / f"checkpoint-{step}") / RECORD)
    write_json({"seed": 7}, tmp_path / RECORD)
    args = DAPTrainingArguments(output_dir=str(tmp_path))
    assert find_resumable(args) == str(tmp_path / "checkpoint-4")
    assert "checkpoint-8 is skipped: it is from an earlier run" in caplog.text


def test_the_best_checkpoint_is_that_of_the_folder_even_if_it_was_copied(tmp_path: Path) -> None:
    args = DAPTrainingArguments(output_dir=str(tmp_path / "here"))
    best = saved_checkpoint(tmp_path / "here" / "checkpoint-5")
    there = saved_checkpoint(tmp_path / "there" / "checkpoint-5")
    for remembered in (None, str(there), str(tmp_path / "gone" / "checkpoint-5"), str(best)):
        remembering = TrainerState(best_global_step=5, best_model_checkpoint=remembered)
        ResumedSchedule().on_train_begin(args, remembering, TrainerControl())
        assert remembering.best_model_checkpoint == str(best)

    # The copy lacks it.
    best.rename(best.with_name("checkpoint-9"))
    remembering = TrainerState(global_step=9, best_global_step=5, best_model_checkpoint=str(there))
    ResumedSchedule().on_train_begin(args, remembering, TrainerControl())
    assert remembering.best_model_checkpoint is None


def test_a_checkpoint_has_the_whole_record_of_its_run_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved_checkpoint(tmp_path / "checkpoint-5")
    args = DAPTrainingArguments(output_dir=str(tmp_path))
    (tmp_path / RECORD).write_text('{"seed": 1}')
    event = args, TrainerState(global_step=5), TrainerControl()

    # The run is stopped at the moment in which the written file gets its name.
    with monkeypatch.context() as stopped:
        stopped.setattr("os.replace", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            RecordInCheckpoints().on_save(*event)
    assert not (checkpoint / RECORD).exists()
    RecordInCheckpoints().on_save(*event)
    assert json.loads((checkpoint / RECORD).read_text()) == {"seed": 1}


# Whole runs


def test_a_run_killed_after_its_last_step_needs_no_other_step(
    flags: list[str], tmp_path: Path
) -> None:
    schedule = "--max_steps 6 --save_strategy steps --save_steps 3 --lr_scheduler_type constant"
    out = tmp_path / "out"
    command = [*flags, *schedule.split(), "--output_dir", str(out)]
    run(command)
    expected = load_file(out / "model.safetensors")
    for name in (FINISHED, "model.safetensors", "eval_results.json"):
        (out / name).unlink()

    run(command)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert state(out)["global_step"] == 6
    assert results(out, "train")["steps"] == 6
    checkpoints = sorted(path.name for path in out.glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-3", "checkpoint-6"]


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, tiny_bert_dir: Path, bitext_dir: Path
) -> list[str]:
    """The command of a run that was stopped after two of its four steps."""
    folder = tmp_path_factory.mktemp("stopped")
    steps = "--max_steps 4 --use_cpu --save_strategy steps --save_steps 2"
    command = [*training_flags(tiny_bert_dir, bitext_dir), *steps.split()]
    command += ["--output_dir", str(folder)]
    run(command)
    (folder / FINISHED).unlink()
    shutil.rmtree(folder / "checkpoint-4")
    return command


def test_a_run_with_other_arguments_does_not_resume(
    stopped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped[1], "other")
    changed = (
        "--rtl_weight 0.5 --learning_rate 1e-4 --language_mix uniform --max_steps 8 "
        "--max_grad_norm 0.5 --adam_beta2 0.98 --bf16 true --lr_scheduler_type cosine "
        "--per_device_train_batch_size 32 --model_name_or_path other"
    )
    with pytest.raises(ValueError, match="checkpoint-2 is of a run with .*: give") as refused:
        run([*stopped, *changed.split()])
    for named in (
        "rtl_weight=1.0, now 0.5",
        "learning_rate=0.001, now 0.0001",
        "language_mix='natural', now 'uniform'",
        "max_steps=4, now 8",
        "max_grad_norm=1.0, now 0.5",
        "adam_beta2=0.999, now 0.98",
        "bf16=False, now True",
        "lr_scheduler_type='linear', now 'cosine'",
        "pairs a step=16, now 32",
        f"model_name_or_path={Path(stopped[1]).name!r}, now 'other'",
    ):
        assert named in str(refused.value)

    # One of them is enough.
    with pytest.raises(ValueError, match="checkpoint-2 is of a run with rtl_weight=1.0, now 0.5: "):
        run([*stopped, "--rtl_weight", "0.5"])


def test_a_run_in_another_precision_of_the_launcher_does_not_resume(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="bf16=False, now True"):
        run(stopped)


def test_no_file_of_a_training_has_a_path_of_this_machine(flags: list[str], tmp_path: Path) -> None:
    steps = "--max_steps 2 --save_steps 1 --eval_steps 1 --eval_strategy steps"
    run([*flags, *steps.split(), "--load_best_model_at_end", "--output_dir", str(tmp_path)])
    assert state(tmp_path)["best_global_step"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    roots = [str(tmp_path).encode(), str(Path(flags[1]).parent).encode()]
    assert not [path for path in files if any(root in path.read_bytes() for root in roots)]
    assert not list(tmp_path.rglob("training_args.bin"))


def test_a_run_with_epochs_instead_of_steps_does_not_resume(stopped: list[str]) -> None:
    place = stopped.index("--max_steps")
    command = [*stopped[:place], *stopped[place + 2 :], "--num_train_epochs", "1"]
    with pytest.raises(ValueError, match="num_train_epochs=3.0, now 1.0; max_steps=4, now -1"):
        run(command)


def test_a_run_with_other_text_does_not_resume(stopped: list[str], tmp_path: Path) -> None:
    # The same lines, of which two changed places.
    shutil.copytree(stopped[3], tmp_path / "text")
    file = tmp_path / "text" / "de-en.tsv"
    first, second, *others = file.read_text().splitlines(keepends=True)
    file.write_text("".join([second, first, *others]))
    message = r"training text=\{'de': '180 pairs, \w{12}'\}, now \{'de': '180 pairs, \w{12}'\}"
    with pytest.raises(ValueError, match=message):
        run([*stopped[:3], str(tmp_path / "text"), *stopped[4:]])

    # Two languages less.
    one = str(Path(stopped[3]) / "de-en.tsv")
    with pytest.raises(ValueError, match="training text={'fr'.*'sw'.*}, now {}"):
        run([*stopped[:3], one, *stopped[4:], "--no_restrict_target_vocabulary"])


def test_arguments_that_do_not_change_the_weights_may_differ(
    stopped: list[str], tmp_path: Path
) -> None:
    # The text and the output folder may be elsewhere.
    text = tmp_path / "text"
    out = tmp_path / "run"
    shutil.copytree(stopped[3], text)
    shutil.copytree(stopped[-1], out)

    # Another version may have kept other arguments, and the processes may have been others.
    for place in out.rglob(RECORD):
        record = json.loads(place.read_text())
        record |= {"of an older version": 1, "processes": 2}
        del record["max_grad_norm"]
        place.write_text(json.dumps(record))

    free = (
        "--logging_steps 1 --save_steps 1 --eval_strategy steps --eval_steps 1 "
        "--save_total_limit 2 --run_name x --early_stopping_patience 9 --load_best_model_at_end "
        "--dataloader_num_workers 1 --max_bad_lines 0.1 --attn_implementation eager"
    )
    warnings = logging.handlers.BufferingHandler(1000)
    logging.getLogger("transformers.trainer_utils").addHandler(warnings)
    run([*stopped[:3], str(text), *stopped[4:-1], str(out), *free.split()])
    logging.getLogger("transformers.trainer_utils").removeHandler(warnings)
    assert not [each for each in warnings.buffer if "do not match" in each.getMessage()]
    assert state(out)["global_step"] == 4
    logged = [line["step"] for line in state(out)["log_history"] if "loss" in line]
    assert logged == [3, 4]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_stopped_stream_resumes_to_the_same_weights(
    workers: str, short_flags: list[str], tmp_path: Path
) -> None:
    more = (
        "--streaming --shuffle_buffer 20 --max_steps 7 --save_strategy steps --save_steps 4 "
        f"--dataloader_num_workers {workers}"
    )
    command = [*short_flags, *more.split(), "--output_dir", str(tmp_path)]
    run(command)
    expected = load_file(tmp_path / "model.safetensors")
    (tmp_path / FINISHED).unlink()
    shutil.rmtree(tmp_path / "checkpoint-7")

    # An epoch would have 5 steps, so the rest is in the second pass over the text.
    run(command)
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)


def test_a_stream_with_other_files_order_or_processes_does_not_resume(
    flags: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    streamed = [*flags, *["--streaming", "--max_steps", "4", "--save_steps", "2"]]
    streamed += ["--output_dir", str(out)]
    run(streamed)
    (out / FINISHED).unlink()
    shutil.copytree(flags[3], tmp_path / "text")
    changed = ["--train_data", str(tmp_path / "text"), "--shuffle_buffer", "5"]
    changed += ["--dataloader_num_workers", "1"]
    for record in out.rglob(RECORD):
        write_json(json.loads(record.read_text()) | {"processes": 2}, record)
    named = (
        "train_data=.*now .*text.*shuffle_buffer=4000, now 5; dataloader_num_workers=0, now 1; "
        "processes=2, now 1"
    )
    with pytest.raises(ValueError, match=named):
        run([*streamed, *changed])


def test_a_run_that_resumes_in_another_folder_is_recorded_there(
    stopped: list[str], tmp_path: Path
) -> None:
    (last,) = Path(stopped[-1]).glob("checkpoint-*")
    run([*stopped[:-1], str(tmp_path), "--resume_from_checkpoint", str(last)])
    before = json.loads((Path(stopped[-1]) / RECORD).read_text())
    assert json.loads((tmp_path / RECORD).read_text()) == before
