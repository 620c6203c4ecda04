"""Flags override recipes, which override defaults; and the recipes of the project."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from configuration_dap import DAPConfig
from dap_transformers.commands.recipes import find_recipe, parse_arguments, recipe_flags
from dap_transformers.errors import UserError
from dap_transformers.training.arguments import (
    CONFIG_FIELDS,
    FROM_TEXT,
    DAPTrainingArguments,
    check_launched,
    given_fields,
    share_of_batch,
)
from dap_transformers.training.resume import changes_weights
from dap_transformers.training.start import is_changeable
from study.recipes import read_recipe

CONFIGS = REPOSITORY / "dap_transformers" / "configs"


@pytest.mark.parametrize("name", ["mbert", "xlmr", "tr", "tlm"])
def test_recipes_hold_the_papers_values(name: str, tmp_path: Path) -> None:
    argv = [str(CONFIGS / f"{name}.yaml"), "--output_dir", str(tmp_path)]
    model, data, training = parse_arguments(argv)
    assert (data.max_seq_length, training.learning_rate, training.max_steps) == (32, 5e-5, 100_000)
    assert data.train_data == ["corpus"]
    assert training.total_train_batch_size == training.per_device_train_batch_size == 1024

    config = DAPConfig(**given_fields(model))
    assert (config.rtl_layers, config.rtl_weight) == (2, 1.0)
    assert (config.tlm_probability, config.tlm_weight) == (0.2, 0.1)
    assert config.pooling == "cls"
    assert config.objective == {"tr": "tr", "tlm": "tr+tlm"}.get(name, "tr+rtl")


def test_the_arguments_in_a_log_have_no_absolute_path(tmp_path: Path) -> None:
    logged = json.loads(DAPTrainingArguments(output_dir=str(tmp_path / "out")).to_json_string())
    assert (logged["output_dir"], logged["optim"]) == ("out", "adamw_torch_fused")


def test_the_best_recipe_trains_what_the_study_shows(tmp_path: Path) -> None:
    parts = parse_arguments([str(CONFIGS / "hard-negatives.yaml"), "--output_dir", str(tmp_path)])
    given = vars(DAPConfig(**given_fields(parts[0])))
    for part in parts:
        given |= vars(part)

    study = read_recipe(REPOSITORY / "study" / "recipes" / "edits.yaml")
    shown = study.runs["best"].arguments
    compared = {name for name, value in shown.items() if "{" not in str(value)}
    compared -= {"bf16", "use_cpu", "report_to", "eval_strategy"}
    assert {name: given[name] for name in compared} == {name: shown[name] for name in compared}
    assert len(compared) > 10
    # The study copied trained heads.
    assert parts[2].head_steps != 0


def test_the_recipe_from_scratch_is_complete(tmp_path: Path) -> None:
    argv = [str(CONFIGS / "mlm.yaml"), "--output_dir", str(tmp_path)]
    model, data, training = parse_arguments(argv)
    config = DAPConfig(**given_fields(model))
    assert (config.objective, config.mlm_probability, data.max_seq_length) == ("mlm", 0.15, 64)
    assert model.config_name
    assert 0 < training.warmup_steps < training.max_steps


def test_flags_override_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: a\ntrain_data: [x, y]\nlearning_rate: 1e-4\n"
        "tr_bidirectional: true\nrevision: null\n"
    )
    argv = [str(recipe), "--learning_rate", "2e-4", "--output_dir", str(tmp_path)]
    model, data, training = parse_arguments(argv)
    assert (model.model_name_or_path, model.tr_bidirectional, model.revision) == ("a", True, None)
    assert (data.train_data, training.learning_rate) == (["x", "y"], 2e-4)


def test_a_flag_replaces_the_argument_of_the_recipe_that_says_the_same(tmp_path: Path) -> None:
    recipe = [str(CONFIGS / "xlmr.yaml"), "--output_dir", str(tmp_path)]
    flags = ["--per-device-train-batch-size=16", "--num_train_epochs", "2"]
    _, _, training = parse_arguments([*recipe, *flags])
    assert (training.total_train_batch_size, training.per_device_train_batch_size) == (None, 16)
    assert (training.num_train_epochs, training.max_steps) == (2, -1)
    for first, second in (
        ("--per_device_train_batch_size", "--total_train_batch_size"),
        ("--max_steps", "--num_train_epochs"),
    ):
        with pytest.raises(ValueError, match=f"{first} and {second} say the same"):
            parse_arguments([*recipe, first, "8", second, "16"])


def test_every_field_that_a_user_chooses_is_an_argument(tmp_path: Path) -> None:
    start = ["--model_name_or_path", "a", "--train_data", "x", "--output_dir", str(tmp_path)]
    flags = ["--tr_bidirectional", "--mlm_probability", "0.3", "--projection", "mlp"]
    model, _, _ = parse_arguments([*start, *flags])
    given = {"tr_bidirectional": True, "mlm_probability": 0.3, "projection": "mlp"}
    assert given_fields(model) == given
    chosen = {name for name in CONFIG_FIELDS if name not in FROM_TEXT}
    assert chosen == {name for name in vars(model) if name in CONFIG_FIELDS}


def test_metadata_tells_which_fields_shape_the_weights() -> None:
    assert is_changeable("tr_temperature")
    assert is_changeable("bow_weight")
    assert not is_changeable("objective")
    assert not is_changeable("rtl_layers")
    for name in ("mlm_probability", "language_mix", "head_learning_rate", "max_steps"):
        assert changes_weights(name)
    for name in ("mini_batch_size", "max_bad_lines", "save_steps", "report_to", "no_argument"):
        assert not changes_weights(name)


def test_bare_no_of_yaml_is_a_strategy(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("save_strategy: no\ntr_bidirectional: no\n")
    assert recipe_flags(recipe) == ["--save_strategy", "no", "--tr_bidirectional", "False"]


def test_a_recipe_is_found_by_name_and_a_path_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("xlmr") == CONFIGS / "xlmr.yaml"
    Path("xlmr").write_text("seed: 3\n")
    assert find_recipe("xlmr") == Path("xlmr")
    for absent in ("absent", "absent.yaml"):
        with pytest.raises(UserError, match=f"{absent}: no such recipe.* quickstart.* xlmr"):
            parse_arguments([absent, "--seed", "1"])


def test_a_batch_that_cannot_be_shared_evenly_is_refused() -> None:
    for total, processes, better in ((3, 8, 8), (100, 8, 96), (1023, 2, 1024), (0, 1, 1)):
        with pytest.raises(ValueError, match=f"={total} .* {processes} processes.* {better},"):
            share_of_batch(total, processes)


def test_batches_are_pinned_only_for_cuda(tmp_path: Path) -> None:
    out = str(tmp_path)
    on_cpu = DAPTrainingArguments(output_dir=out, use_cpu=True)
    by_default = DAPTrainingArguments(output_dir=out)
    asked_for = DAPTrainingArguments(output_dir=out, dataloader_pin_memory=True)
    assert on_cpu.dataloader_pin_memory is False
    assert by_default.dataloader_pin_memory == torch.cuda.is_available()
    assert asked_for.dataloader_pin_memory


def test_processes_that_would_train_on_their_own_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size = DAPTrainingArguments(output_dir=str(tmp_path)).world_size
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="world_size=1.*ACCELERATE_USE_CPU"):
        check_launched(world_size)


def test_a_model_is_pushed_only_at_the_end_and_no_pickle_holds_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    given = {"output_dir": str(tmp_path), "report_to": [], "push_to_hub": True}
    args = DAPTrainingArguments(**given, hub_token="hf_secret")
    assert args.hub_strategy == "end"
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert b"hf_secret" not in pickle.dumps(args)


def test_what_the_losses_rest_on_is_set(tmp_path: Path) -> None:
    args = DAPTrainingArguments(
        output_dir=str(tmp_path),
        dataloader_drop_last=False,
        remove_unused_columns=True,
        auto_find_batch_size=True,
        hub_strategy="every_save",
        accelerator_config={"split_batches": True, "dispatch_batches": True},
    )
    assert args.dataloader_drop_last
    assert not args.remove_unused_columns
    assert not args.auto_find_batch_size
    assert args.hub_strategy == "end"
    assert not args.accelerator_config.split_batches
    assert not args.accelerator_config.dispatch_batches
    assert args.ddp_broadcast_buffers is False
    for wrong in ({"mini_batch_size": 0}, {"head_steps": -1}, {"total_train_batch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DAPTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **wrong)


def test_a_plateau_schedule_follows_the_direction_of_the_metric(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "eval_strategy": "steps"}
    options["lr_scheduler_type"] = "reduce_lr_on_plateau"
    for metric, mode in (("eval_mean_accuracy", "max"), ("eval_rtl_loss", "min")):
        args = DAPTrainingArguments(
            **options, metric_for_best_model=metric, lr_scheduler_kwargs={"patience": 3}
        )
        assert args.lr_scheduler_kwargs == {"mode": mode, "patience": 3}
    args = DAPTrainingArguments(**options, lr_scheduler_kwargs={"mode": "min"})
    assert args.lr_scheduler_kwargs == {"mode": "min"}
