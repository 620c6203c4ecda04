"""Flags over recipes over defaults, and the recipes of the project."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from configuration_dap import DAPConfig
from dap.errors import UserError
from dap.training.resuming import changes_weights
from dap.training.training_arguments import (
    CHANGEABLE,
    CONFIG_FIELDS,
    FROM_TEXT,
    DAPTrainingArguments,
    check_launched,
    given_fields,
    parse_arguments,
    recipe_flags,
    share_of_batch,
)
from experiments.recipes import read_recipe


@pytest.mark.parametrize("name", ["mbert", "xlmr", "tr", "tlm"])
def test_recipes_hold_the_papers_values(name: str, tmp_path: Path) -> None:
    argv = [str(REPOSITORY / "configs" / f"{name}.yaml"), "--output_dir", str(tmp_path)]
    model, data, training = parse_arguments(argv)
    assert (data.max_seq_length, training.learning_rate, training.max_steps) == (32, 5e-5, 100_000)
    assert data.train_data == ["corpus"]
    assert training.total_train_batch_size == training.per_device_train_batch_size == 1024
    config = DAPConfig(**given_fields(model))
    assert (config.rtl_layers, config.rtl_weight, config.tlm_probability, config.tlm_weight) == (
        2,
        1.0,
        0.2,
        0.1,
    )
    assert config.pooling == "cls"
    assert config.objective == {"tr": "tr", "tlm": "tr+tlm"}.get(name, "tr+rtl")


def test_the_best_recipe_trains_what_the_study_shows(tmp_path: Path) -> None:
    parts = parse_arguments(
        [str(REPOSITORY / "configs" / "best.yaml"), "--output_dir", str(tmp_path)]
    )
    given = vars(DAPConfig(**given_fields(parts[0])))
    for part in parts:
        given |= vars(part)
    places = dict.fromkeys(
        ("encoder", "data", "bow_heads", "longer_bow_heads", "longest_bow_heads", "tlm_heads"),
        "there",
    )
    shown = (
        read_recipe(REPOSITORY / "experiments" / "recipes" / "edits.yaml", places)
        .runs["best-long-slow"]
        .arguments
    )
    names = {name for name, value in shown.items() if "there" not in str(value)}
    names -= {"bf16", "use_cpu", "report_to", "eval_strategy"}
    assert {name: given[name] for name in names} == {name: shown[name] for name in names}
    assert len(names) > 10
    assert parts[0].init_heads_from


def test_the_recipe_from_scratch_is_complete(tmp_path: Path) -> None:
    model, data, training = parse_arguments(
        [str(REPOSITORY / "configs" / "mlm.yaml"), "--output_dir", str(tmp_path)]
    )
    config = DAPConfig(**given_fields(model))
    assert (config.objective, config.mlm_probability, data.max_seq_length) == ("mlm", 0.15, 64)
    assert model.config_name
    assert 0 < training.warmup_steps < training.max_steps


def test_flags_override_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: a\ntrain_data: [x, y]\nlearning_rate: 1e-4\ntr_bidirectional: true\nrevision: null\n"
    )
    model, data, training = parse_arguments(
        [str(recipe), "--learning_rate", "2e-4", "--output_dir", str(tmp_path)]
    )
    assert (model.model_name_or_path, model.tr_bidirectional, model.revision) == ("a", True, None)
    assert (data.train_data, training.learning_rate) == (["x", "y"], 2e-4)


def test_a_flag_overrides_the_other_one_of_the_recipe_that_says_the_same(tmp_path: Path) -> None:
    recipe = [str(REPOSITORY / "configs" / "xlmr.yaml"), "--output_dir", str(tmp_path)]
    _, _, training = parse_arguments(
        [*recipe, "--per-device-train-batch-size=16", "--num_train_epochs", "2"]
    )
    assert (training.total_train_batch_size, training.per_device_train_batch_size) == (None, 16)
    assert (training.num_train_epochs, training.max_steps) == (2, -1)
    for both in (
        ["--per_device_train_batch_size", "--total_train_batch_size"],
        ["--max_steps", "--num_train_epochs"],
    ):
        with pytest.raises(ValueError, match=f"{' and '.join(both)} say the same"):
            parse_arguments([*recipe, both[0], "8", both[1], "16"])


def test_every_field_that_a_user_chooses_is_an_argument(tmp_path: Path) -> None:
    start = ["--model_name_or_path", "a", "--train_data", "x", "--output_dir", str(tmp_path)]
    model, _, _ = parse_arguments(
        [*start, "--tr_bidirectional", "--mlm_probability", "0.3", "--projection", "mlp"]
    )
    assert given_fields(model) == {
        "tr_bidirectional": True,
        "mlm_probability": 0.3,
        "projection": "mlp",
    }
    own = {name for name in CONFIG_FIELDS if name not in FROM_TEXT}
    assert own == {name for name in vars(model) if name in CONFIG_FIELDS}
    assert {*CHANGEABLE} < own
    assert changes_weights("mlm_probability")
    assert not {
        name for name in ("mini_batch_size", "save_steps", "report_to") if changes_weights(name)
    }


def test_bare_no_of_yaml_is_a_strategy(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("save_strategy: no\ntr_bidirectional: no\n")
    assert recipe_flags(recipe) == ["--save_strategy", "no", "--tr_bidirectional", "False"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnign_rate: 1", "unknown argument learnign_rate"),
        ("- a", "found list"),
        ("train_data: []", "train_data is an empty list"),
        ("1: 2\nb: 3", "unknown argument 1, b"),
        ("learning_rate 1\nseed: 2", r"no YAML that can be read \(.*line 2.*\); repair it"),
        ("seed: !!python/object:os.system []", "no YAML that can be read .*python"),
        ("seed: !!int many", "no YAML that can be read .*many"),
        ("seed: \udcff", "no YAML that can be read .*codec can't decode"),
    ],
)
def test_recipes_with_mistakes_are_refused(text: str, message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=rf"recipe\.yaml: .*{message}"):
        recipe_flags(recipe)
    with pytest.raises(FileNotFoundError, match="absent.yaml: no such recipe"):
        parse_arguments([str(tmp_path / "absent.yaml")])


@pytest.mark.parametrize(
    ("total", "processes", "better"), [(3, 8, 8), (100, 8, 96), (1023, 2, 1024)]
)
def test_batches_that_processes_cannot_share_are_refused(
    total: int, processes: int, better: int
) -> None:
    with pytest.raises(
        ValueError, match=f"total_train_batch_size={total} .* {processes} processes; give {better}"
    ):
        share_of_batch(total, processes)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("dataloader_drop_last", False, "dataloader_drop_last=False"),
        ("early_stopping_patience", 0, "early_stopping_patience=0"),
        ("mini_batch_size", 0, "mini_batch_size=0: give 1 or more"),
        ("head_learning_rate", -1.0, "head_learning_rate=-1.0: give 0 or more"),
        (
            "total_train_batch_size",
            0,
            "total_train_batch_size=0 cannot be shared evenly by 1 processes; give 1",
        ),
        ("gradient_accumulation_steps", 0, "gradient_accumulation_steps=0: give 1 or more"),
        ("weight_decay", -1.0, "weight_decay=-1.0: give 0 or more"),
        ("max_grad_norm", -1.0, "max_grad_norm=-1.0: give 0"),
        ("adam_beta1", 2.0, "optimizer .*adam_beta1=2.0, .*: Invalid beta parameter"),
        ("lr_scheduler_kwargs", "[", r"schedule .*lr_scheduler_kwargs=\[: .* must be a mapping"),
        ("data_seed", -1, "data_seed=-1: give 0 or more, below"),
        ("torch_compile_backend", "nope", "torch_compile_backend='nope': give no or eager"),
        ("neftune_noise_alpha", 5.0, "neftune_noise_alpha=5.0: give none"),
        ("fp16", True, "fp16=True: give false, or --bf16"),
        ("save_strategy", "best", "save_strategy=best needs evaluations"),
        ("max_steps", 0, "max_steps=0: give 1 or more"),
        ("save_steps", 0, "save_steps=0: give 1 or more"),
        ("label_smoothing_factor", 0.1, "label_smoothing_factor=0.1"),
        (
            "train_sampling_strategy",
            "group_by_length",
            "train_sampling_strategy='group_by_length'.*--language_mix",
        ),
        ("accelerator_config", {"split_batches": True}, "accelerator_config.split_batches=True"),
        (
            "accelerator_config",
            {"dispatch_batches": True},
            "accelerator_config.dispatch_batches=True",
        ),
    ],
)
def test_arguments_that_do_nothing_or_harm_are_refused(
    argument: str, value: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        DAPTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{argument: value})


def test_other_accelerator_settings_keep_the_streams_shared(tmp_path: Path) -> None:
    args = DAPTrainingArguments(output_dir=str(tmp_path), accelerator_config={"even_batches": True})
    assert args.accelerator_config.dispatch_batches is False


def test_batches_are_pinned_only_for_cuda(tmp_path: Path) -> None:
    assert (
        DAPTrainingArguments(output_dir=str(tmp_path), use_cpu=True).dataloader_pin_memory is False
    )
    assert (
        DAPTrainingArguments(output_dir=str(tmp_path)).dataloader_pin_memory
        == torch.cuda.is_available()
    )
    assert DAPTrainingArguments(
        output_dir=str(tmp_path), dataloader_pin_memory=True
    ).dataloader_pin_memory


def test_processes_that_would_train_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size = DAPTrainingArguments(output_dir=str(tmp_path)).world_size
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match="2 processes were launched, but world_size=1.*ACCELERATE_USE_CPU"
    ):
        check_launched(world_size)


def test_pushes_are_kept_for_the_end_and_the_token_out_of_the_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    given = {"output_dir": str(tmp_path), "report_to": [], "push_to_hub": True}
    args = DAPTrainingArguments(**given, hub_token="hf_secret")
    assert args.hub_strategy == "end"
    assert os.environ["HF_TOKEN"] == "hf_secret"
    assert b"hf_secret" not in pickle.dumps(args)
    with pytest.raises(ValueError, match="hub_strategy=.*every_save.*: give end"):
        DAPTrainingArguments(**given, hub_strategy="every_save")


def test_a_plateau_is_one_of_the_metric(tmp_path: Path) -> None:
    options = {
        "output_dir": str(tmp_path),
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "steps",
    }
    for metric, mode in (("eval_mean_accuracy", "max"), ("eval_rtl_loss", "min")):
        args = DAPTrainingArguments(
            **options, metric_for_best_model=metric, lr_scheduler_kwargs={"patience": 3}
        )
        assert args.lr_scheduler_kwargs == {"mode": mode, "patience": 3}
    assert DAPTrainingArguments(
        **options, lr_scheduler_kwargs={"mode": "min"}
    ).lr_scheduler_kwargs == {"mode": "min"}
