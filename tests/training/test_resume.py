"""A killed run resumes to the same weights, and another run does not resume."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import assert_equal_weights, results, run, state, training_flags, weights
from forked import run_killed
from safetensors.torch import save_file
from transformers import TrainerState

from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from dap_transformers.reports import RECORD
from dap_transformers.training.arguments import DAPTrainingArguments
from dap_transformers.training.resume import (
    FINISHED,
    correct_state,
    count_intervals,
    find_resumable,
    record_run,
    require_no_other_model,
)
from dap_transformers.training.trainer import DAPTrainer


def saved_checkpoint(folder: Path) -> Path:
    """Make a folder with the files of a checkpoint."""
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).touch()
    (folder / "trainer_state.json").write_text("{}")
    return folder


# Finding a checkpoint


def test_incomplete_checkpoints_and_those_of_an_earlier_run_are_skipped(tmp_path: Path) -> None:
    write_json({"seed": 7}, tmp_path / RECORD)
    for step, record in ((4, {"seed": 7}), (8, {"seed": 42}), (40, {"processes": 2})):
        write_json(record, saved_checkpoint(tmp_path / f"checkpoint-{step}") / RECORD)
    for step, name in ((20, "rng_state.pth"), (50, "optimizer.pt"), (60, "scheduler.pt")):
        (saved_checkpoint(tmp_path / f"checkpoint-{step}") / name).unlink()
    (saved_checkpoint(tmp_path / "checkpoint-30") / "trainer_state.json").write_text("{")
    args = DAPTrainingArguments(tmp_path)
    assert find_resumable(args) == str(tmp_path / "checkpoint-4")
    args.resume_from_checkpoint = "false"
    assert find_resumable(args) is None
    args.resume_from_checkpoint = str(tmp_path / "checkpoint-20")
    with pytest.raises(ValueError, match="checkpoint-20 is no whole checkpoint"):
        find_resumable(args)
    (tmp_path / FINISHED).touch()
    with pytest.raises(ValueError, match="holds a finished run"):
        find_resumable(args)


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json", "modules.json"])
def test_a_folder_with_another_model_is_refused(file: str, tmp_path: Path) -> None:
    require_no_other_model(tmp_path / "new")
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match="holds another model"):
        require_no_other_model(tmp_path)
    write_json({}, tmp_path / RECORD)  # of a run that was killed while it saved its model
    require_no_other_model(tmp_path)


def test_a_best_checkpoint_that_is_missing_is_chosen_anew(tmp_path: Path) -> None:
    args = DAPTrainingArguments(tmp_path, save_strategy="best")
    saved_checkpoint(tmp_path / "checkpoint-5")
    # The last one was better than that of step 5, but was not saved.
    for step, saved, is_there in ((5, 5, True), (6, 6, False), (7, 5, False)):
        path = str(tmp_path / f"checkpoint-{saved}")
        remembering = TrainerState(best_global_step=step, best_model_checkpoint=path)
        correct_state(args, remembering)
        expected = (path, step) if is_there else (None, None)
        assert (remembering.best_model_checkpoint, remembering.best_global_step) == expected
    moved = TrainerState(best_global_step=5, best_model_checkpoint="old/checkpoint-5")
    correct_state(args, moved)
    assert moved.best_model_checkpoint == str(tmp_path / "checkpoint-5")


def test_no_run_goes_on_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    args = DAPTrainingArguments(tmp_path / "out")
    for folder in ("out/checkpoint-5", "elsewhere/checkpoint-5"):
        write_json({"seed": 1}, tmp_path / folder / RECORD)
    record_run({"seed": 1}, args, str(tmp_path / "elsewhere/checkpoint-5"))
    write_json({"seed": 2}, tmp_path / "out/checkpoint-5" / RECORD)
    for folder in ("elsewhere/checkpoint-5", "out/old/checkpoint-5"):
        with pytest.raises(UserError, match="out/checkpoint-5 is of another run"):
            record_run({"seed": 1}, args, str(tmp_path / folder))


# Stopped runs


def run_killed_at(step: int, flags: str) -> None:
    """Run a training that kills its own process as that step begins."""
    training_step = DAPTrainer.training_step

    def kill(self: DAPTrainer, *args: object) -> torch.Tensor:
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, *args)

    DAPTrainer.training_step = kill
    run(flags)


@pytest.mark.parametrize(
    ("step", "checkpoints", "options"),
    [
        # an epoch has 6 steps, and 0.4 of the run are 3
        (4, ["checkpoint-3"], "--rtl_ratio 0.7 --tr_hard_negatives 0.5 --save_steps 0.4"),
        (1, [], "--head_steps 3 --max_steps 2"),  # the heads are trained again
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    step: int, checkpoints: list, options: str, short_flags: str, tmp_path: Path
) -> None:
    schedule = "--max_steps 7 --save_strategy steps --save_steps 3 --dev_pairs 0"
    flags = f"{short_flags} {schedule} {options}"
    killed = tmp_path / "killed"
    whole = tmp_path / "whole"
    command = f"{flags} --output_dir {killed}"
    run_killed(run_killed_at, step, command)
    assert [path.name for path in killed.glob("checkpoint-*")] == checkpoints
    assert not (killed / FINISHED).exists()

    run(command)
    run(f"{flags} --output_dir {whole}")
    assert_equal_weights(killed, whole)


def test_the_intervals_of_a_resumed_run_are_steps_as_in_its_checkpoint(tmp_path: Path) -> None:
    args = DAPTrainingArguments(tmp_path, save_steps=0.4, logging_steps=5)
    count_intervals(args, 7)
    assert (args.save_steps, args.logging_steps, args.eval_steps) == (3, 5, None)


def test_a_run_killed_after_its_last_step_needs_no_other_step(flags: str, tmp_path: Path) -> None:
    schedule = "--max_steps 6 --save_strategy steps --save_steps 3 --lr_scheduler_type constant"
    out = tmp_path / "out"
    command = f"{flags} {schedule} --output_dir {out}"
    run(command)
    shutil.copytree(out, tmp_path / "whole")
    for name in (FINISHED, "model.safetensors", "eval_results.json"):
        (out / name).unlink()

    run(command)
    assert_equal_weights(out, tmp_path / "whole")
    assert state(out)["global_step"] == 6
    assert results(out, "train")["steps"] == 6
    checkpoints = sorted(path.name for path in out.glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-3", "checkpoint-6"]


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, tiny_bert_dir: Path, bitext_dir: Path
) -> tuple[str, Path]:
    """The command of a run that was stopped after two of its four steps, and its folder."""
    folder = tmp_path_factory.mktemp("stopped")
    steps = "--max_steps 4 --use_cpu --save_strategy steps --save_steps 2"
    command = f"{training_flags(tiny_bert_dir, bitext_dir)} {steps} --output_dir {folder}"
    run(command)
    (folder / FINISHED).unlink()
    shutil.rmtree(folder / "checkpoint-4")
    return command, folder


def test_a_run_with_other_arguments_or_text_does_not_resume(
    stopped: tuple,
    tiny_bert_dir: Path,
    bitext_dir: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    shutil.copytree(tiny_bert_dir, "other")
    # The same lines, of which two changed places.
    shutil.copytree(bitext_dir, "text")
    text = here / "text/de-en.tsv"
    first, second, *others = text.read_text().splitlines(keepends=True)
    text.write_text("".join([second, first, *others]))
    (here / "sts.tsv").write_text("a\tb\t1\nc\td\t2\n")
    changed = (
        "--sts sts.tsv --rtl_weight 0.5 --language_mix uniform --adam_beta2 0.98 "
        "--metric_for_best_model eval_rtl_loss "
        "--per_device_train_batch_size 32 --model_name_or_path other --train_data text"
    )
    with pytest.raises(ValueError, match="checkpoint-2 is of a run with .*: give") as refused:
        run(f"{stopped[0]} {changed}")
    for named in (
        "rtl_weight=1.0, now 0.5",
        "language_mix='natural', now 'uniform'",
        "adam_beta2=0.999, now 0.98",
        "bf16=False, now True",
        "metric_for_best_model='eval_mean_accuracy', now 'eval_rtl_loss'",
        "sts_data=[], now ['sts.tsv']",
        "pairs a step=16, now 32",
        f"model_name_or_path={str(tiny_bert_dir)!r}, now 'other'",
        "training text={'de': '",
    ):
        assert named in str(refused.value)


def test_arguments_that_do_not_change_the_weights_may_differ(
    stopped: tuple, bitext_dir: Path, tmp_path: Path
) -> None:
    # The text and the output folder may be elsewhere.
    command, folder = stopped
    out = tmp_path / "run"
    shutil.copytree(bitext_dir, tmp_path / "text")
    shutil.copytree(folder, tmp_path / "old")

    # Another version may have kept other arguments, and the processes may have been others.
    for path in (tmp_path / "old").rglob(RECORD):
        record = read_json(path) | {"of an older version": 1, "processes": 2}
        del record["max_grad_norm"]
        write_json(record, path)
    checkpoint = tmp_path / "old/checkpoint-2"
    shutil.copy(checkpoint / "rng_state.pth", checkpoint / "rng_state_1.pth")

    free = (
        "--logging_steps 1 --save_steps 1 --eval_strategy steps --eval_steps 1 "
        "--save_total_limit 2 --run_name x --load_best_model_at_end "
        "--dataloader_num_workers 1 --max_bad_lines 0.1 --attn_implementation eager "
        f"--resume_from_checkpoint {checkpoint}"
    )
    run(f"{command} --train_data {tmp_path}/text --output_dir {out} {free}")
    assert state(out)["global_step"] == 4
    logged = [line["step"] for line in state(out)["log_history"] if "loss" in line]
    assert logged == [3, 4]
    assert read_json(out / RECORD) == read_json(folder / RECORD)  # of this run, not of the old one


# What `Trainer` would not notice


def test_a_checkpoint_without_a_weight_is_refused(stopped: tuple, tmp_path: Path) -> None:
    command, folder = stopped
    out = shutil.copytree(folder, tmp_path / "out")
    left = weights(out / "checkpoint-2")
    del left[max(left)]
    save_file(left, out / "checkpoint-2" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="does not fit"):
        run(f"{command} --output_dir {out}")
