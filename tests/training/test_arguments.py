"""Flags override recipes, which override defaults; and what a training sets for itself."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import REPOSITORY

from configuration_dap import DAPConfig
from dap_transformers.commands.recipes import RECIPES, parse_arguments
from dap_transformers.errors import UserError
from dap_transformers.training.arguments import (
    CONFIG_FIELDS,
    FROM_FILES,
    Arguments,
    DAPTrainingArguments,
    check_launched,
    given_fields,
)
from objectives_dap import OBJECTIVES, objectives_of
from study.recipes import read_recipe

START = "--model_name_or_path a --train_data x"


def parse(command: str) -> Arguments:
    return parse_arguments(f"{command} --output_dir out".split())


def test_the_target_language_has_one_code() -> None:
    for spelling in ("en", "eng", "EN", "en_US"):
        _, data, _ = parse(f"{START} --target_language {spelling}")
        assert data.target_language == "en"


# Recipes


@pytest.mark.parametrize("name", ["mbert", "xlmr", "tr", "tlm"])
def test_recipes_hold_the_papers_values(name: str) -> None:
    model, data, training = parse(name)
    assert (data.max_seq_length, training.learning_rate, training.max_steps) == (32, 5e-5, 100_000)
    assert data.train_data == ["corpus"]
    assert training.total_train_batch_size == training.per_device_train_batch_size == 1024

    config = DAPConfig(**given_fields(model))
    assert (config.rtl_layers, config.rtl_weight) == (2, 1.0)
    assert (config.tlm_probability, config.tlm_weight) == (0.2, 0.1)
    assert config.pooling == "cls"
    assert config.objective == {"tr": "tr", "tlm": "tr+tlm"}.get(name, "tr+rtl")


def test_the_recipe_for_hard_negatives_trains_what_the_study_shows() -> None:
    parts = parse("hard-negatives")
    given = vars(DAPConfig(**given_fields(parts[0])))
    for part in parts:
        given |= vars(part)

    shown = read_recipe(REPOSITORY / "study" / "recipes" / "edits.yaml").runs["best"].arguments
    compared = {name for name, value in shown.items() if "{" not in str(value)}
    compared -= {"bf16", "use_cpu", "report_to", "eval_strategy"}
    assert {name: given[name] for name in compared} == {name: shown[name] for name in compared}
    assert len(compared) > 10


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_is_accepted(name: str) -> None:
    parse(f"{name} {START} --use_cpu")


def test_flags_override_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: a\ntrain_data: [x, y]\nlearning_rate: 1e-4\nsave_strategy: no\n"
        "tr_bidirectional: true\nrevision: null\nlr_scheduler_kwargs: {a: 1}\n"
    )
    model, data, training = parse(f"{recipe} --learning_rate 2e-4")
    assert (model.model_name_or_path, model.tr_bidirectional, model.revision) == ("a", True, None)
    assert (data.train_data, training.learning_rate) == (["x", "y"], 2e-4)
    assert (training.save_strategy, training.lr_scheduler_kwargs) == ("no", {"a": 1})


def test_a_flag_replaces_the_argument_of_the_recipe_that_says_the_same() -> None:
    flags = "--per-device-train-batch-size=16 --num_train_epochs 2 --config_name b"
    model, _, training = parse(f"xlmr {flags}")
    assert (training.total_train_batch_size, training.per_device_train_batch_size) == (None, 16)
    assert (training.num_train_epochs, training.max_steps) == (2, -1)
    assert (model.model_name_or_path, model.config_name) == (None, "b")


def test_epochs_replace_the_default_of_the_steps() -> None:
    for given, steps, epochs in (({}, 100_000, 3), ({"num_train_epochs": 1}, -1, 1)):
        training = DAPTrainingArguments("out", **given)
        assert (training.max_steps, training.num_train_epochs) == (steps, epochs)


def test_the_total_batch_counts_accumulated_batches() -> None:
    _, _, training = parse(f"xlmr {START} --gradient_accumulation_steps 4")
    assert training.per_device_train_batch_size == 256  # 1,024 pairs per step
    with pytest.raises(ValueError, match="no multiple of 3"):
        parse(f"xlmr {START} --gradient_accumulation_steps 3")


# Arguments


def test_every_field_that_a_user_chooses_is_an_argument() -> None:
    model, _, _ = parse(f"{START} --tr_bidirectional --mlm_probability 0.3 --projection mlp")
    given = {"tr_bidirectional": True, "mlm_probability": 0.3, "projection": "mlp"}
    assert given_fields(model) == given
    chosen = {name for name in CONFIG_FIELDS if name not in FROM_FILES}
    assert chosen == {name for name in vars(model) if name in CONFIG_FIELDS}


def plugin(folder: Path, name: str, options: str) -> str:
    """Write a plug-in with an objective. Its file has no extension."""
    file = folder / name
    body = f"class Own(TranslationRanking):\n    name, options = {name!r}, {options}\n"
    file.write_text(f"from objectives_dap import *\n{body}\nOBJECTIVES[{name!r}] = Own\n")
    return f"--plugin {file}"


@patch.dict(OBJECTIVES)
def test_options_of_objectives_of_the_user_reach_the_configuration(tmp_path: Path) -> None:
    default = "{'angle': 1.0, 'sizes': (8,), 'name': 'cls', 'shift': 0, 'is_free': False}"
    start = f"{plugin(tmp_path, 'arc', default)} {plugin(tmp_path, 'target', '{}')}"
    flags = "--arc_angle 1e-3 --arc-sizes 64 128 --arc_name=3 --arc_shift -1 --arc_is_free"
    model, _, _ = parse(f"{START} {start} --objective arc+target {flags} --target_weight 2")
    expected = {"angle": 1e-3, "sizes": [64, 128], "name": "3", "shift": -1, "is_free": True}
    config = DAPConfig(**given_fields(model))
    first, second = objectives_of(config)
    assert first.options == {"weight": 1.0, **expected}
    assert second.weight == 2
    same = plugin(tmp_path, "arc_is", "{'free': 1}")
    with pytest.raises(UserError, match="--arc_is_free exists"):
        parse(f"{START} {same}")


@patch.dict(OBJECTIVES)
@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("arc", "{}", "--arc_angle"),  # an option that it does not have
        ("tr", "{}", "replaces the objective tr"),
        ("head", "{'steps': 1}", "--head_steps exists"),
        ("mask", "{'token_id': 1}", "--mask_token_id exists"),
    ],
)
def test_plugins_that_are_refused(name: str, options: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        parse(f"{START} {plugin(tmp_path, name, options)} --arc_angle 1")


def arguments(**given: object) -> DAPTrainingArguments:
    return DAPTrainingArguments("out", report_to=[], **given)


def test_what_the_losses_rest_on_is_set() -> None:
    args = arguments(
        dataloader_drop_last=False,
        remove_unused_columns=True,
        accelerator_config={"split_batches": True, "dispatch_batches": True},
        auto_find_batch_size=True,
        hub_strategy="every_save",
    )
    assert args.dataloader_drop_last
    assert not args.remove_unused_columns
    assert not args.auto_find_batch_size
    assert not args.accelerator_config.split_batches
    assert not args.accelerator_config.dispatch_batches
    assert args.hub_strategy == "end"
    assert not args.ddp_broadcast_buffers
    assert not arguments(use_cpu=True).dataloader_pin_memory
    assert arguments().dataloader_pin_memory == torch.cuda.is_available()


def test_pickles_hold_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    args = DAPTrainingArguments(tmp_path, hub_token="hf_secret")
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert b"hf_secret" not in pickle.dumps(args)


def test_of_losses_and_errors_the_lowest_is_the_best() -> None:
    options = {"eval_strategy": "steps", "lr_scheduler_type": "reduce_lr_on_plateau"}
    for name, is_greater in (("accuracy", True), ("rtl_loss", False), ("aer", False)):
        args = arguments(metric_for_best_model=f"eval_mean_{name}", **options)
        assert args.greater_is_better == is_greater
        assert args.lr_scheduler_kwargs == {"mode": "max" if is_greater else "min"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: parse("absent"), "no such recipe.* xlmr"),
        (lambda: parse("setup.py"), "setup.py: .*Error"),
        (lambda: parse("--max_steps 1 --num_train_epochs=1"), "say the same"),
        (lambda: parse(f"{START} --dev_pairs -1"), "dev_pairs=-1"),
        (lambda: parse(f"{START} --mini_batch_size 0"), "mini_batch_size=0"),
        (lambda: check_launched(Mock(world_size=2, n_gpu=1)), "world_size=2"),
    ],
)
def test_what_is_refused(call: Callable, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ValueError, match=says):
        call()
