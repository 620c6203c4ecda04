"""The command that trains, from its text to its model, and what it refuses."""

import json
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import built, results, state, synthetic_pairs
from forked import processes
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from dap.errors import UserError
from dap.reports import CURVES
from dap.training.batches import BitextCollator
from dap.training.resuming import FINISHED
from dap.training.trainer import DAPTrainer
from dap.training.training_arguments import parse_arguments
from train_dap import build_datasets, main, run


def test_training_improves_retrieval_and_saves_the_best_model(
    flags: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    schedule = [
        "--max_steps",
        "80",
        "--eval_strategy",
        "steps",
        "--save_strategy",
        "steps",
        "--save_steps",
        "40",
    ]
    more = [
        "--eval_steps",
        "40",
        "--load_best_model_at_end",
        "--eval_on_start",
        "--objective",
        "tr",
    ]
    run([*flags, *schedule, *more, "--learning_rate", "5e-3", "--output_dir", str(out)])
    history = state(out)["log_history"]
    means = [line["eval_mean_accuracy"] for line in history if "eval_mean_accuracy" in line]
    assert max(means) > means[0] + 20
    assert results(out)["eval_mean_accuracy"] == pytest.approx(max(means))
    if find_spec("matplotlib"):  # a panel of three losses, one of the dev accuracies
        assert "<!-- accuracy on dev pairs, % -->" in (out / CURVES).read_text()
    assert AutoModel.from_pretrained(out).config.model_type == "dap"
    assert not [
        path.name for path in out.iterdir() if path.suffix in (".bin", ".pt", ".pth")
    ]  # pickles
    with pytest.raises(ValueError, match="holds a finished run"):
        run([*flags, "--max_steps", "2", "--output_dir", str(out)])


def run_killed_at(step: int, flags: list[str]) -> None:
    """A run that kills its process as that step begins."""
    training_step = DAPTrainer.training_step

    def kill(self: DAPTrainer, *args: object) -> torch.Tensor:
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, *args)

    DAPTrainer.training_step = kill
    run(flags)


def refuse(*_: object) -> None:
    raise UserError("a.tsv: no pairs\n  are left")


@pytest.mark.parametrize(
    ("fault", "line"),
    [(lambda *_: os.kill(os.getpid(), signal.SIGKILL), ".* ended from outside.*--dataloader_num_workers"),
     (refuse, "a.tsv: no pairs are left")],
)  # fmt: skip
def test_the_end_of_a_process_that_reads_the_batches_is_one_line(
    fault: Callable[..., None],
    line: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BitextCollator, "__call__", fault)
    with pytest.raises(SystemExit, match=f"^error: {line}$"):
        main(
            [
                *flags,
                "--max_steps",
                "2",
                "--dataloader_num_workers",
                "1",
                "--output_dir",
                str(tmp_path),
            ]
        )


def test_killed_run_resumes_to_the_same_weights(flags: list[str], tmp_path: Path) -> None:
    flags += [
        "--per_device_train_batch_size",
        "100",
        "--rtl_ratio",
        "0.7",
        "--tr_hard_negatives",
        "0.5",
    ]
    flags += [
        "--max_steps",
        "8",
        "--save_strategy",
        "steps",
        "--save_steps",
        "3",
    ]  # 5 steps an epoch
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = processes.Process(
        target=run_killed_at, args=(4, [*flags, "--output_dir", str(killed)])
    )
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in killed.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not (killed / FINISHED).exists()
    run([*flags, "--output_dir", str(killed)])
    run([*flags, "--output_dir", str(whole)])
    resumed, expected = (load_file(folder / "model.safetensors") for folder in (killed, whole))
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)


def test_early_stopping_ends_a_run_that_does_not_improve(flags: list[str], tmp_path: Path) -> None:
    schedule = [
        "--max_steps",
        "100",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "1",
        "--save_strategy",
        "best",
    ]
    more = ["--load_best_model_at_end", "--early_stopping_patience", "2", "--objective", "tr"]
    run([*flags, *schedule, *more, "--learning_rate", "0", "--output_dir", str(tmp_path / "out")])
    assert state(tmp_path / "out")["global_step"] == 3


def test_english_of_validation_data_is_not_trained_on(flags: list[str], tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    dev.mkdir()
    pairs = synthetic_pairs("de")[:30]
    (dev / "sw-en.tsv").write_text("".join(f"{source}\t{target}.\n" for source, target in pairs))
    model, data, training = parse_arguments(
        [*flags, "--validation_data", str(dev), "--output_dir", str(tmp_path)]
    )
    train, held = build_datasets(
        data, training, AutoTokenizer.from_pretrained(model.model_name_or_path)
    )
    assert {language: len(part) for language, part in train.items()} == {
        "de": 170,
        "fr": 200,
        "sw": 200,
    }
    assert len(held["sw"]) == 30


def test_the_log_says_what_the_run_is(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for text, named in (
        (flags[3], "on 3 languages, 540 pairs"),
        (f"{flags[3]}/de-en.tsv", "on 1 language, 180 pairs"),
    ):
        built([*flags, "--train_data", text, "--output_dir", str(tmp_path / "out")])
        assert named in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "--freeze_encoder --objective tr",
            "--freeze_encoder is for heads, but objective 'tr' has none: leave it",
        ),
        ("--per_device_train_batch_size 1024", "540 training pairs do not fill one batch of 1024"),
        ("--per_device_train_batch_size 1", "a batch of 1 pair has no negatives"),
        (
            "--dev_pairs 0 --eval_strategy steps",
            "eval_strategy='steps', but there are no dev pairs",
        ),
        ("--early_stopping_patience 2", "early_stopping_patience=2 needs evaluations"),
        (
            "--max_seq_length 90 --train_data nowhere",
            "max_seq_length=90 is above the encoder's 80 positions",
        ),
        ("--train_data nowhere", "nowhere"),
        ("--model_name_or_path nowhere", "^the configuration of nowhere cannot be loaded "),
        (
            "--model_name_or_path dense",
            "of the modules Transformer, Pooling, Dense, which cannot be trained",
        ),
        ("--tokenizer_name nowhere", "^the tokenizer of nowhere cannot be loaded "),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    more: str, message: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [
        {"path": kind, "type": f"sentence_transformers.models.{kind}"}
        for kind in ("Transformer", "Pooling", "Dense")
    ]
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, FileNotFoundError), match=message):
        run([*flags, *more.split(), "--output_dir", "out"])


def test_metrics_that_cannot_choose_the_best_model_are_refused(
    flags: list[str], tmp_path: Path
) -> None:
    best = [
        "--eval_strategy",
        "steps",
        "--save_strategy",
        "steps",
        "--load_best_model_at_end",
        "--max_steps",
        "2",
    ]
    flags = [
        *flags,
        *best,
        "--save_steps",
        "1",
        "--eval_steps",
        "1",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    metric = "--metric_for_best_model"
    for more, message in (
        ([metric, "nope"], "='nope' is in no evaluation: give eval_mean_accuracy, eval_rtl_loss, "),
        (
            [metric, "eval_rtl_loss", "--objective", "tr"],
            "metric_for_best_model='eval_rtl_loss' is in no evaluation",
        ),
        (
            ["--freeze_encoder"],
            "'eval_mean_accuracy' stays as it is under --freeze_encoder: give eval_rtl_loss",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run([*flags, *more])
    run([*flags, "--freeze_encoder", metric, "eval_rtl_loss", "--head_learning_rate", "1e-2"])
    losses = [
        line["eval_rtl_loss"]
        for line in state(tmp_path / "out")["log_history"]
        if "eval_rtl_loss" in line
    ]
    assert state(tmp_path / "out")["best_metric"] == min(losses)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--streaming", "--num_train_epochs", "1"],
            "--streaming reads text again and again.*give --max_steps",
        ),
        (["--save_strategy", "best"], "metric_for_best_model='eval_foo' is in no evaluation"),
        (
            ["--lr_scheduler_type", "reduce_lr_on_plateau"],
            "metric_for_best_model='eval_foo' is in no evaluation",
        ),
    ],
)
def test_what_would_end_in_the_midst_of_a_run_is_refused(
    more: list[str], message: str, flags: list[str], tmp_path: Path
) -> None:
    options = [
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "1",
        "--metric_for_best_model",
        "eval_foo",
    ]
    with pytest.raises(UserError, match=message):
        run([*flags, *options, *more, "--output_dir", str(tmp_path)])


def test_other_text_is_not_taken_for_the_dev_pairs(flags: list[str], tmp_path: Path) -> None:
    trainer = built([*flags, "--output_dir", str(tmp_path)])
    for other in ([], {}, "de"):
        with pytest.raises(
            UserError, match="nothing to evaluate on: pass sources and targets by language"
        ):
            trainer.evaluate(other)
