"""Training with DDP and FSDP2 on two CPU processes equals one process; accelerate's configurations.

accelerate has no FSDP on CPUs and would use DDP there. These tests therefore tell it that there are
GPUs, after it has chosen the CPU and gloo.

The trainings are slow tests. test_distributed.py compares the gradients of single steps.
"""

import os
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from conftest import (
    LANGUAGES,
    REPOSITORY,
    assert_equal_weights,
    results,
    run,
    save_bert,
    save_with_modules,
    state,
    synthetic_pairs,
    weights,
)
from forked import run_two
from written import text_of

from dap_transformers.commands import recipes
from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.files import read_json
from dap_transformers.training import run as training_run
from dap_transformers.training.arguments import Arguments
from dap_transformers.training.head_training import RESULTS_FILE
from dap_transformers.training.resume import FINISHED
from dap_transformers.training.sharding import adjust
from modeling_dap import DAPForPreTraining

PLACE = REPOSITORY / "dap_transformers/configs/accelerate"
CONFIGS = {path.stem: path for path in sorted(PLACE.glob("*.yaml"))}
LOSSES = ("loss", "tr_loss", "rtl_loss", "grad_norm", "negatives", "ignored_tokens")


# Whole trainings


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers, and Dense and Normalize."""
    plain = save_bert(tmp_path_factory.mktemp("plain"), num_hidden_layers=2)
    return save_with_modules(tmp_path_factory.mktemp("encoder"), plain)


@pytest.fixture(scope="module")
def flags(encoder: Path, short_bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    dev = tmp_path_factory.mktemp("dev")
    for language in LANGUAGES:
        pairs = synthetic_pairs(language, 20, seed=1)
        (dev / f"{language}-en.tsv").write_bytes(text_of(pairs))

    # An epoch of 180 pairs has two steps.
    options = (
        "--max_seq_length 16 --total_train_batch_size 88 --max_steps 4 "
        "--gradient_accumulation_steps 2 --learning_rate 1e-4 --head_learning_rate 5e-4 "
        "--rtl_layers 1 --head_steps 3 --report_to none --disable_tqdm true --logging_steps 1 "
        "--ddp_timeout 300"
    )
    start = f"--model_name_or_path {encoder} --train_data {short_bitext_dir}"
    return f"{start} --validation_data {dev} {options}"


@pytest.fixture(scope="module")
def runs(flags: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of trainings that must have the same losses.

    - `one`: one process with whole batches.
    - `ddp`, `fsdp2`: two processes with chunks (GradCache). The latter was also resumed.
    - `frozen-one`, `frozen-ddp`, `frozen-fsdp2`: the same, with frozen word embeddings.
    """
    folder = tmp_path_factory.mktemp("runs")
    no_saves = "--save_strategy no"
    chunks = "--mini_batch_size 12"
    saves = (
        "--save_strategy steps --save_steps 3 --load_best_model_at_end --eval_strategy steps "
        "--eval_steps 3 --eval_on_start"
    )
    frozen = f"{flags} {no_saves} --freeze_word_embeddings --max_steps 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "find_spec", lambda _: None)  # no curves
        run(f"{flags} {no_saves} --output_dir {folder}/one")
        run(f"{frozen} --output_dir {folder}/frozen-one")

    ddp = f"{flags} {chunks} {no_saves} --output_dir {folder}/ddp"
    frozen_ddp = f"{frozen} --output_dir {folder}/frozen-ddp"
    run_two(train, CONFIGS["ddp"], ddp, frozen_ddp)

    fsdp = f"{flags} {chunks} {saves} --output_dir {folder}/fsdp2"
    frozen_fsdp = f"{frozen} --output_dir {folder}/frozen-fsdp2"
    run_two(train, CONFIGS["fsdp2"], fsdp, frozen_fsdp, fsdp)
    return folder


def train(rank: int, config: Path, *runs: str) -> None:
    """Run trainings in one process of two.

    A second training in the same folder resumes, as if the first one had been killed.

    Args:
        rank: number of the process.
        config: configuration of accelerate.
        runs: arguments of each training; the last one is its folder.
    """
    # Rank, address and CPU are set already.
    os.environ |= launch_environment(config, "--num_processes 2") | os.environ
    training_run.find_spec = lambda _: None  # no curves
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        recipes.parse_arguments = parse_as_with_gpus

    for flags in runs:
        folder = Path(flags.split()[-1])
        if (folder / FINISHED).exists():
            torch.distributed.barrier()  # both have seen it
            if rank == 0:
                for name in ("checkpoint-4", FINISHED):
                    (folder / name).rename(folder.parent / name)
            torch.distributed.barrier()
        run(flags)


def launch_environment(config: Path, flags: str = "") -> dict[str, str]:
    """Return the environment that `accelerate launch --config_file CONFIG` gives its processes."""
    arguments = f"--config_file {config} --main_process_port 0 {flags} train_dap.py"
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments.split()))
    return prepare_multi_gpu_env(args)


def parse_as_with_gpus(argv: list[str]) -> Arguments:
    """Parse the arguments, then tell accelerate that there are GPUs."""
    arguments = parse_arguments(argv)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_in_chunks_have_the_losses_of_one(
    name: str, runs: Path, encoder: Path
) -> None:
    for kind, steps in (("", 4), ("frozen-", 2)):
        logs = []
        for folder in (f"{kind}one", f"{kind}{name}"):
            history = state(runs / folder)["log_history"]
            logs.append([line for line in history if "loss" in line])
        assert len(logs[0]) == steps
        for first, second in zip(*logs, strict=True):
            for key in LOSSES:
                place = (kind, key, first["step"])
                assert second[key] == pytest.approx(first[key], rel=1e-4), place

    # The heads were trained first, by one process.
    of_heads = [read_json(runs / folder / RESULTS_FILE)["loss"] for folder in (name, "one")]
    assert of_heads[0] == pytest.approx(of_heads[1], rel=1e-4)

    # Frozen word embeddings stay the same.
    saved, start = weights(runs / f"frozen-{name}"), weights(encoder)
    key = "embeddings.word_embeddings.weight"
    assert torch.equal(saved[f"dap.encoder.{key}"], start[key])


@pytest.mark.slow
def test_processes_draw_different_dropout_and_masks(runs: Path) -> None:
    states = []
    for rank in (0, 1):
        path = runs / "fsdp2" / "checkpoint-3" / f"rng_state_{rank}.pth"
        states.append(torch.load(path, weights_only=False)["cpu"])
    assert not torch.equal(*states)


@pytest.mark.slow
def test_a_sharded_model_is_evaluated_as_a_whole_one(runs: Path) -> None:
    one = results(runs / "one")
    ddp = results(runs / "ddp")
    history = state(runs / "fsdp2")["log_history"]
    lines = [line for line in history if "eval_mean_accuracy" in line]
    # Evaluated at both starts, after step 3 (both evaluations are the same), and at the end.
    assert [line["step"] for line in lines] == [0, 3, 3, 4]
    for key in one:
        # One of the 20 sentences may differ.
        error = 5.01 if key.endswith("accuracy") else 1e-3
        if "accuracy" in key or "rtl" in key:
            assert ddp[key] == pytest.approx(one[key], abs=error), key
            assert lines[-1][key] == pytest.approx(one[key], abs=error), key


@pytest.mark.slow
def test_checkpoints_of_a_sharded_model_load_anywhere(runs: Path) -> None:
    code = {path.name for path in (runs / "one").glob("*.py")}
    for folder in (runs / "fsdp2", runs / "fsdp2" / "checkpoint-3"):
        _, report = DAPForPreTraining.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        config = read_json(folder / "config.json")
        assert config["auto_map"]["AutoModelForPreTraining"] == "modeling_dap.DAPForPreTraining"
        assert {path.name for path in folder.glob("*.py")} == code


@pytest.mark.slow
def test_a_sharded_run_resumed_in_its_second_epoch_ends_with_the_same_weights(runs: Path) -> None:
    assert state(runs / "fsdp2")["epoch"] == 2
    assert_equal_weights(runs / "checkpoint-4", runs / "fsdp2" / "checkpoint-4")


# Configurations


@pytest.mark.parametrize("path", CONFIGS.values(), ids=CONFIGS)
def test_accelerate_reads_the_configurations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"accelerate launch --config_file {path.relative_to(REPOSITORY)}" in path.read_text()
    config = load_config_from_file(str(path))  # refuses unknown keys, but not nested ones
    known = vars(launch_command_parser().parse_args(["train_dap.py"]))
    assert (config.fsdp_config or {}).keys() <= known.keys()
    assert config.num_processes % config.num_machines == 0

    if path.stem == "fsdp2":
        for name, value in launch_environment(path).items():
            if name.startswith("FSDP_"):
                monkeypatch.setenv(name, value)
        adjust(FullyShardedDataParallelPlugin())


def test_fsdp_saves_whole_checkpoints_and_its_first_version_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    adjust(plugin)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    with pytest.raises(ValueError, match="fsdp_version=1"):
        adjust(FullyShardedDataParallelPlugin(fsdp_version=1))
