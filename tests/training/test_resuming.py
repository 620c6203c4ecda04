"""Which checkpoint a run goes on from, and which it refuses."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import results, state, training_flags
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from dap.file_io import write_json
from dap.reports.records import RECORD
from dap.training.resuming import FINISHED, RecordInCheckpoints, ResumedSchedule, find_resumable
from dap.training.training_arguments import DAPTrainingArguments
from train_dap import run


def saved_checkpoint(folder: Path, without: str = "") -> Path:
    """A folder with the files of a checkpoint."""
    folder.mkdir(parents=True)
    for name in (
        "config.json",
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    ):
        (folder / name).touch()
    (folder / "training_args.bin").touch()
    (folder / "trainer_state.json").write_text("{}")
    if without:
        (folder / without).unlink()
    return folder


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ("trainer_state.json", "trainer_state.json"),
        ("model.safetensors", "weights"),
        ("optimizer.pt", "optimizer"),
    ],
)
def test_half_saved_and_half_deleted_checkpoints_are_left_out(
    without: str, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_checkpoint(tmp_path / "checkpoint-20")
    broken = saved_checkpoint(tmp_path / "checkpoint-100", without)
    args = DAPTrainingArguments(output_dir=str(tmp_path))
    assert find_resumable(args) == str(tmp_path / "checkpoint-20")
    assert (
        f"checkpoint-100 is skipped: it was only partly saved, its {named} is missing"
        in caplog.text
    )
    args.resume_from_checkpoint = "false"
    assert find_resumable(args) is None
    args.resume_from_checkpoint = str(broken)
    with pytest.raises(ValueError, match=f"checkpoint-100: its {named} is missing"):
        find_resumable(args)


def test_torn_state_is_no_checkpoint_and_models_alone_do_not_resume(tmp_path: Path) -> None:
    (saved_checkpoint(tmp_path / "checkpoint-5") / "trainer_state.json").write_text("{")
    args = DAPTrainingArguments(output_dir=str(tmp_path))
    assert find_resumable(args) is None
    args.save_only_model = True
    with pytest.raises(ValueError, match="--save_only_model, which cannot be resumed"):
        find_resumable(args)


def test_a_checkpoint_has_the_whole_record_of_its_run_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, args = (
        saved_checkpoint(tmp_path / "checkpoint-5"),
        DAPTrainingArguments(output_dir=str(tmp_path)),
    )
    (tmp_path / RECORD).write_text('{"seed": 1}')
    saved = args, TrainerState(global_step=5), TrainerControl()
    with monkeypatch.context() as stopped:
        stopped.setattr(
            "os.replace", mock.Mock(side_effect=KeyboardInterrupt)
        )  # as it gets its name
        with pytest.raises(KeyboardInterrupt):
            RecordInCheckpoints().on_save(*saved)
    assert not (checkpoint / RECORD).exists()
    RecordInCheckpoints().on_save(*saved)
    assert json.loads((checkpoint / RECORD).read_text()) == {"seed": 1}


def test_run_killed_after_its_last_step_is_finished_without_another(
    flags: list[str], tmp_path: Path
) -> None:
    schedule = [
        "--max_steps",
        "6",
        "--save_strategy",
        "steps",
        "--save_steps",
        "3",
        "--lr_scheduler_type",
        "constant",
    ]
    out = tmp_path / "out"
    run([*flags, *schedule, "--output_dir", str(out)])
    expected = load_file(out / "model.safetensors")
    for name in (FINISHED, "model.safetensors", "eval_results.json"):
        (out / name).unlink()
    run([*flags, *schedule, "--output_dir", str(out)])
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert state(out)["global_step"] == 6
    assert results(out, "train")["steps"] == 6
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-6",
    ]


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, tiny_bert_dir: Path, bitext_dir: Path
) -> list[str]:
    """The command of a run that was stopped after two of its four steps."""
    folder = tmp_path_factory.mktemp("stopped")
    command = [*training_flags(tiny_bert_dir, bitext_dir), "--max_steps", "4", "--use_cpu"]
    command += ["--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(folder)]
    run(command)
    (folder / FINISHED).unlink()
    shutil.rmtree(folder / "checkpoint-4")
    return command


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--rtl_weight", "0.5", "rtl_weight=1.0, now 0.5"),
        ("--learning_rate", "1e-4", "learning_rate=0.001, now 0.0001"),
        ("--language_mix", "uniform", "language_mix='natural', now 'uniform'"),
        ("--max_steps", "8", "max_steps=4, now 8"),
        ("--max_grad_norm", "0.5", "max_grad_norm=1.0, now 0.5"),
        ("--adam_beta2", "0.98", "adam_beta2=0.999, now 0.98"),
        ("--bf16", "true", "bf16=False, now True"),
        ("--lr_scheduler_type", "cosine", "lr_scheduler_type='linear', now 'cosine'"),
        ("--per_device_train_batch_size", "32", "pairs a step=16, now 32"),
        ("--model_name_or_path", "other", "model_name_or_path='.*', now 'other'"),
    ],
)
def test_another_run_does_not_resume(
    stopped: list[str],
    flag: str,
    value: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped[1], "other")
    message = f"checkpoint-2 is of a run with {named}: give the same arguments; or another --output_dir, with --model"
    with pytest.raises(ValueError, match=message):
        run([*stopped, flag, value])


def test_epochs_in_place_of_steps_do_not_resume(stopped: list[str]) -> None:
    place = stopped.index("--max_steps")
    with pytest.raises(ValueError, match="num_train_epochs=3.0, now 1.0; max_steps=4, now -1"):
        run([*stopped[:place], *stopped[place + 2 :], "--num_train_epochs", "1"])


def test_another_text_with_as_many_pairs_does_not_resume(
    stopped: list[str], tmp_path: Path
) -> None:
    shutil.copytree(stopped[3], tmp_path / "text")
    file = tmp_path / "text" / "de-en.tsv"
    lines = file.read_text().splitlines()
    file.write_text(
        "".join(f"{lines[row]}\n" for row in [1, 0, *range(2, len(lines))])
    )  # two lines change places
    message = (
        r"training text=\{'de': '180 pairs, \w{12}'\}, now \{'de': '180 pairs, \w{12}'\}: give"
    )
    with pytest.raises(ValueError, match=message):
        run([*stopped[:3], str(tmp_path / "text"), *stopped[4:]])
    with pytest.raises(ValueError, match="training text={'fr'.*'sw'.*}, now {}"):
        run(
            [
                *stopped[:3],
                str(Path(stopped[3]) / "de-en.tsv"),
                *stopped[4:],
                "--no_restrict_target_vocabulary",
            ]
        )


def test_what_does_not_change_the_weights_may_differ(stopped: list[str], tmp_path: Path) -> None:
    for source, name in ((stopped[-1], "run"), (stopped[3], "text")):
        shutil.copytree(source, tmp_path / name)  # both were moved
    free = "--logging_steps 1 --save_steps 1 --eval_strategy steps --eval_steps 1 --save_total_limit 2 --run_name x "
    free += "--early_stopping_patience 9 --load_best_model_at_end --dataloader_num_workers 1 --max_bad_lines 0.1"
    text, out = str(tmp_path / "text"), str(tmp_path / "run")
    record = json.loads((tmp_path / "run" / RECORD).read_text()) | {"of an older version": 1}
    del record["max_grad_norm"]  # as of a version that did not keep it
    (tmp_path / "run" / RECORD).write_text(json.dumps(record))
    run([*stopped[:3], text, *stopped[4:-1], out, *free.split(), "--attn_implementation", "eager"])
    assert state(tmp_path / "run")["global_step"] == 4
    assert [line["step"] for line in state(tmp_path / "run")["log_history"] if "loss" in line] == [
        3,
        4,
    ]


def test_a_stream_is_known_by_its_paths(flags: list[str], tmp_path: Path) -> None:
    streamed = [
        *flags,
        "--streaming",
        "--max_steps",
        "4",
        "--save_steps",
        "2",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    run(streamed)
    (tmp_path / "out" / FINISHED).unlink()
    shutil.copytree(flags[3], tmp_path / "text")
    changed = [
        "--train_data",
        str(tmp_path / "text"),
        "--shuffle_buffer",
        "5",
        "--dataloader_num_workers",
        "1",
    ]
    with pytest.raises(
        ValueError, match="train_data=.*now .*text.*shuffle_buffer=4000, now 5; dataloader_num_work"
    ):
        run([*streamed, *changed])


def test_best_checkpoint_is_found_again_where_the_folder_was_moved(tmp_path: Path) -> None:
    args = DAPTrainingArguments(output_dir=str(tmp_path / "here"))
    best = saved_checkpoint(tmp_path / "here" / "checkpoint-5")
    for remembered in (None, str(tmp_path / "there" / "checkpoint-5"), str(best)):
        remembering = TrainerState(best_global_step=5, best_model_checkpoint=remembered)
        ResumedSchedule().on_train_begin(args, remembering, TrainerControl())
        assert remembering.best_model_checkpoint == str(best)


def test_checkpoints_from_before_a_run_was_begun_anew_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, seed in ((4, 7), (8, 42)):
        write_json({"seed": seed}, saved_checkpoint(tmp_path / f"checkpoint-{step}") / RECORD)
    write_json({"seed": 7}, tmp_path / RECORD)
    assert find_resumable(DAPTrainingArguments(output_dir=str(tmp_path))) == str(
        tmp_path / "checkpoint-4"
    )
    assert "checkpoint-8 is skipped: it is from an earlier run" in caplog.text


def test_a_run_that_goes_on_elsewhere_is_recorded_there(stopped: list[str], tmp_path: Path) -> None:
    (last,) = Path(stopped[-1]).glob("checkpoint-*")
    run([*stopped[:-1], str(tmp_path), "--resume_from_checkpoint", str(last)])
    assert json.loads((tmp_path / RECORD).read_text()) == json.loads(
        (Path(stopped[-1]) / RECORD).read_text()
    )
