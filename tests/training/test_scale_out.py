"""The configurations of accelerate, and trainings with DDP and FSDP2 on two CPU processes beside one process.

accelerate has FSDP for accelerators alone: on CPU it would train with DDP. So that FSDP is run here, its state is told
that there are GPUs, after it has chosen the CPU and gloo.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from conftest import REPOSITORY, results, save, state, tiny_config
from forked import run_two
from safetensors.torch import load_file
from transformers import BertModel, PreTrainedTokenizerFast

import train_dap
from dap.training.fsdp import check_fsdp
from dap.training.resuming import FINISHED
from dap.training.training_arguments import Arguments, DAPTrainingArguments, parse_arguments
from modeling_dap import DAPForPreTraining
from train_dap import run

CONFIGS = {
    path.stem: path for path in sorted((REPOSITORY / "configs" / "accelerate").glob("*.yaml"))
}
LOSSES = ("loss", "tr_loss", "rtl_loss", "grad_norm", "negatives", "ignored_tokens")


@pytest.fixture(scope="module")
def encoder(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A BERT of two layers."""
    folder = tmp_path_factory.mktemp("encoder")
    config = tiny_config("bert", len(tiny_tokenizer))
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    save(folder, BertModel(config, add_pooling_layer=False), tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def flags(encoder: Path, bitext_dir: Path) -> list[str]:
    text = [
        "--model_name_or_path",
        str(encoder),
        "--train_data",
        str(bitext_dir),
        "--max_seq_length",
        "16",
    ]
    steps = [
        "--total_train_batch_size",
        "134",
        "--max_steps",
        "4",
        "--gradient_accumulation_steps",
        "2",
    ]  # 2 an epoch
    quiet = [
        "--report_to",
        "none",
        "--disable_tqdm",
        "true",
        "--logging_steps",
        "1",
        "--ddp_timeout",
        "100",
    ]
    rates = ["--learning_rate", "1e-4", "--head_learning_rate", "5e-4", "--rtl_layers", "1"]
    return [*text, *steps, *quiet, *rates, "--dev_pairs", "20"]


@pytest.fixture(scope="module")
def runs(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with whole batches; DDP and FSDP2 in chunks (GradCache), the latter once more as after a kill.

    Each also trains heads alone.
    """
    folder = tmp_path_factory.mktemp("runs")
    ddp = ["--mini_batch_size", "34", "--save_strategy", "no", "--output_dir", str(folder / "ddp")]
    fsdp = [
        "--mini_batch_size",
        "34",
        "--save_strategy",
        "steps",
        "--save_steps",
        "3",
        "--load_best_model_at_end",
    ]
    fsdp += [
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "3",
        "--eval_on_start",
        "--output_dir",
        str(folder / "fsdp2"),
    ]
    heads = [
        *flags,
        "--freeze_encoder",
        "--max_steps",
        "2",
        "--save_strategy",
        "no",
        "--output_dir",
    ]
    run([*flags, "--save_strategy", "no", "--output_dir", str(folder / "one")])
    run([*heads, str(folder / "heads-one")])
    for config, own, again in (("ddp", ddp, []), ("fsdp2", fsdp, [[*flags, *fsdp]])):
        run_two(
            train,
            CONFIGS[config],
            [*flags, *own],
            [*heads, str(folder / f"heads-{config}")],
            *again,
        )
    return folder


def launch_environment(config: Path, *flags: str) -> dict[str, str]:
    """What `accelerate launch --config_file CONFIG` gives its processes."""
    arguments = ["--config_file", str(config), "--main_process_port", "0", *flags, "train_dap.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    return prepare_multi_gpu_env(args)


def parse_as_with_gpus(argv: list[str]) -> Arguments:
    arguments = parse_arguments(argv)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


def train(rank: int, config: Path, *runs: list[str]) -> None:
    """One process of two: its trainings, one after the other; a second one in a folder goes on as after a kill."""
    os.environ |= (
        launch_environment(config, "--num_processes", "2") | os.environ
    )  # rank, address and CPU stay
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        train_dap.parse_arguments = parse_as_with_gpus
    for flags in runs:
        folder = Path(flags[-1])
        if (folder / FINISHED).exists():
            torch.distributed.barrier()  # both have seen it
            if rank == 0:
                for name in ("checkpoint-4", FINISHED):
                    (folder / name).rename(folder.parent / name)
            torch.distributed.barrier()
        run(flags)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_in_chunks_and_on_a_frozen_encoder_have_the_losses_of_one(
    name: str, runs: Path, encoder: Path
) -> None:
    for kind, steps in (("", 4), ("heads-", 2)):
        one, two = (
            [line for line in state(runs / f"{kind}{run}")["log_history"] if "loss" in line]
            for run in ("one", name)
        )
        assert len(one) == steps
        for first, second in zip(one, two, strict=True):
            for key in (*LOSSES, "head_learning_rate"):
                assert second[key] == pytest.approx(first[key], rel=1e-4), (
                    kind,
                    key,
                    first["step"],
                )
    saved, start = (
        load_file(runs / f"heads-{name}" / "model.safetensors"),
        load_file(encoder / "model.safetensors"),
    )
    assert all(torch.equal(saved[f"dap.encoder.{key}"], start[key]) for key in start)


def test_shards_are_evaluated_as_the_whole_model(runs: Path) -> None:
    ends = [results(runs / name) for name in ("one", "ddp")]
    lines = [line for line in state(runs / "fsdp2")["log_history"] if "eval_mean_accuracy" in line]
    assert [line["step"] for line in lines] == [0, 3, 3, 4]  # on start, and on the second start
    for key in (key for key in ends[0] if key.endswith("accuracy")):
        assert ends[1][key] == pytest.approx(ends[0][key], abs=5.01), key  # one of 20 sentences
        assert lines[-1][key] == pytest.approx(ends[0][key], abs=5.01), key
        assert lines[1][key] == lines[2][key], key
    for key in (key for key in ends[0] if key.startswith("eval_rtl_")):
        assert ends[1][key] == pytest.approx(ends[0][key], abs=1e-3), key
        assert lines[-1][key] == pytest.approx(ends[0][key], abs=1e-3), key
    assert "eval_rtl_source_nats_rho75" in ends[0]


def test_checkpoints_of_shards_load_anywhere(runs: Path) -> None:
    for folder in (runs / "fsdp2", runs / "fsdp2" / "checkpoint-3"):
        _, report = DAPForPreTraining.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        config = json.loads((folder / "config.json").read_text())
        assert config["auto_map"]["AutoModelForPreTraining"] == "modeling_dap.DAPForPreTraining"
        assert {path.name for path in folder.glob("*.py")} == {
            path.name for path in (runs / "one").glob("*.py")
        }


def test_a_run_of_shards_resumed_in_its_second_epoch_ends_with_the_same_weights(runs: Path) -> None:
    folders = runs / "checkpoint-4", runs / "fsdp2" / "checkpoint-4"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("path", CONFIGS.values(), ids=CONFIGS)
def test_accelerate_reads_the_configurations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"accelerate launch --config_file {path.relative_to(REPOSITORY)}" in path.read_text()
    config = load_config_from_file(
        str(path)
    )  # refuses keys that it does not know, but for nested ones
    known = vars(launch_command_parser().parse_args(["train_dap.py"]))
    assert {**(config.fsdp_config or {}), **(config.deepspeed_config or {})}.keys() <= known.keys()
    assert config.num_processes % config.num_machines == 0
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", *config.to_dict()):
        monkeypatch.delenv(name, raising=False)
    if path.stem == "deepspeed_zero2":
        assert deepspeed_plugin(path, monkeypatch).zero_stage == 2
        return
    environment = launch_environment(path)
    assert (environment.get("ACCELERATE_USE_FSDP") == "true") == (path.stem == "fsdp2")
    if path.stem == "fsdp2":
        for name in (name for name in environment if name.startswith("FSDP_")):
            monkeypatch.setenv(name, environment[name])
        check_fsdp(FullyShardedDataParallelPlugin())


def deepspeed_plugin(path: Path, monkeypatch: pytest.MonkeyPatch) -> DeepSpeedPlugin:
    """What accelerate makes of a configuration in a process that it starts."""
    args = launch_command_parser().parse_args(
        ["--config_file", str(path), "--main_process_port", "0", "train_dap.py"]
    )
    args, defaults, _ = _validate_launch_command(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, environment = prepare_deepspeed_cmd_env(args)
    for name in (name for name in environment if name.startswith("ACCELERATE_")):
        monkeypatch.setenv(name, environment[name])
    return DeepSpeedPlugin()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT"},
            "fsdp_version=1 is not supported: give 2",
        ),
        (
            {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
            "=SHARDED_STATE_DICT .*: give FULL_STATE_DICT",
        ),
    ],
)
def test_settings_that_would_leave_no_model_are_refused(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fsdp(FullyShardedDataParallelPlugin(**setting))


def test_fsdp_that_accelerate_would_leave_out_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate has no FSDP on cpu, it would use DDP"):
        run([*flags, "--output_dir", str(tmp_path)])


def test_chunks_under_deepspeed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="mini_batch_size=4 does not work with DeepSpeed"):
        DAPTrainingArguments(output_dir=str(tmp_path), mini_batch_size=4)
