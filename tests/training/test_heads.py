"""Heads: trained with a frozen encoder, copied from another training, and what they predict."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, built, results, run, save, state, tiny_config
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertModel

from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.errors import UserError
from dap_transformers.training.resume import FINISHED
from dap_transformers.training.run import build_trainer


@pytest.mark.parametrize("more", ["", "--mini_batch_size 6 --gradient_accumulation_steps 2"])
def test_a_frozen_encoder_stays_the_same_and_all_heads_learn(
    more: str, flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    options = (
        f"--freeze_encoder --head_learning_rate 1e-2 {more} "
        "--rtl_ratio 0.7 --max_steps 2 --save_strategy steps --save_steps 1"
    )
    command = [*flags, *options.split(), "--output_dir", str(tmp_path)]
    run(command)
    learned = load_file(tmp_path / "model.safetensors")
    first = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    start = load_file(tiny_bert_dir / "model.safetensors")
    for name, value in start.items():
        assert torch.equal(learned.get(f"dap.encoder.{name}"), value)
    for name, value in learned.items():
        if not name.startswith("dap.") and name != "prediction_head.token_ids":
            assert not torch.equal(value, first[name])
    vocabulary = len(AutoTokenizer.from_pretrained(tmp_path))
    assert vocabulary == len(AutoTokenizer.from_pretrained(tiny_bert_dir))

    # A resumed run ends with the same weights.
    (tmp_path / FINISHED).unlink()
    shutil.rmtree(tmp_path / "checkpoint-2")
    run(command)
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(resumed[name], learned[name]) for name in learned)


# Heads of another training


@pytest.fixture(scope="module")
def trained_heads(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Heads that `configs/head.yaml` trains on two languages of three."""
    folder = tmp_path_factory.mktemp("heads")
    recipe = str(REPOSITORY / "dap_transformers" / "configs" / "head.yaml")
    text = [str(bitext_dir / "de-en.tsv"), str(bitext_dir / "fr-en.tsv")]
    options = (
        "--max_steps 2 --total_train_batch_size 16 --warmup_steps 0 --dev_pairs 5 --use_cpu "
        "--report_to none"
    )
    command = [recipe, "--model_name_or_path", str(tiny_bert_dir), "--train_data", *text]
    run([*command, *options.split(), "--output_dir", str(folder)])
    return folder


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ("--objective tr+rtl", ["rtl_head", "prediction_head"]),
        ("--objective tr+rtl --freeze_encoder", ["rtl_head", "prediction_head"]),
    ],
)
def test_heads_are_copied_from_another_training(
    options: str,
    taken: list[str],
    trained_heads: Path,
    flags: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    flags += ["--init_heads_from", str(trained_heads), "--output_dir", str(tmp_path)]
    arguments = parse_arguments([*flags, *options.split(), "--max_steps", "1"])
    trainer, record = build_trainer(*arguments)
    found = trainer.model.state_dict()
    made = load_file(trained_heads / "model.safetensors")

    # The target vocabulary is copied, too.
    assert found.keys() == {name for name in made if name.startswith(("dap", *taken))}
    assert all(torch.equal(value, made[name]) for name, value in found.items())
    assert f"{' and '.join(taken)} taken from {trained_heads}" in caplog.text
    assert "with another encoder" not in caplog.text
    assert record["init_heads_from"] == trained_heads.name


def test_only_heads_that_both_objectives_have_are_copied(flags: list[str], tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    options = "--objective tr+tlm --projection mlp --max_steps 1"
    run([*flags, *options.split(), "--output_dir", str(heads)])
    made = load_file(heads / "model.safetensors")
    command = [*flags, "--init_heads_from", str(heads), "--restrict_target_vocabulary", "false"]
    command += ["--output_dir", str(tmp_path / "other")]
    for more, taken in (
        ("--objective tr+rtl", {"prediction_head"}),
        ("--objective tr --projection mlp", {"projection"}),
        ("--objective tr+tlm --projection mlp", {"prediction_head", "projection"}),
    ):
        found = built([*command, *more.split()]).model.state_dict()
        copied = {name: value for name, value in found.items() if name.split(".")[0] in taken}
        assert {name.split(".")[0] for name in copied} == taken
        assert all(torch.equal(value, made[name]) for name, value in copied.items())


def test_language_embeddings_are_those_of_the_text_or_of_the_copied_heads(
    flags: list[str], bitext_dir: Path, tmp_path: Path
) -> None:
    both = [*flags, "--rtl_direction", "both", "--max_steps", "1"]
    heads = tmp_path / "heads"
    run([*both, "--output_dir", str(heads)])
    config = json.loads((heads / "config.json").read_text())
    assert config["rtl_languages"] == ["de", "fr", "sw"]

    # A run on one language keeps the languages of the copied heads.
    french = ["--train_data", str(bitext_dir / "fr-en.tsv"), "--init_heads_from", str(heads)]
    trainer = built([*both, *french, "--output_dir", str(tmp_path / "one")])
    assert trainer.model.config.rtl_languages == ["de", "fr", "sw"]
    assert trainer.data_collator.languages == ["de", "fr", "sw"]

    # A checkpoint of one language cannot be trained on others.
    german = tmp_path / "german"
    text = ["--train_data", str(bitext_dir / "de-en.tsv")]
    run([*both, *text, "--output_dir", str(german)])
    start = ["--model_name_or_path", str(german), "--output_dir", str(tmp_path / "next")]
    with pytest.raises(ValueError, match="'both' on de, but the text also has fr sw"):
        built([*both, *start])


def test_heads_of_another_encoder_come_with_a_warning(
    flags: list[str],
    trained_heads: Path,
    tiny_bert_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_dir)
    other = save(tmp_path / "other", BertModel(tiny_config("bert", len(tokenizer))), tokenizer)
    start = ["--init_heads_from", str(trained_heads), "--model_name_or_path", str(other)]
    built([*flags, *start, "--output_dir", str(tmp_path / "out")])
    assert "the heads were trained with another encoder" in caplog.text


def test_a_run_warns_once_if_its_head_hardly_uses_the_source(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags += ["--max_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    run([*flags, "--output_dir", str(tmp_path / "out")])
    nats = results(tmp_path / "out")["eval_rtl_source_nats"]
    (said,) = (line for line in caplog.messages if "teaches the encoder little" in line)
    assert f"{nats:.2f} per token" in said
    history = state(tmp_path / "out")["log_history"]
    # The evaluation during the training did not warn.
    assert len([line for line in history if "eval_rtl_source_nats_rho25" in line]) == 1

    # Without a head there is nothing to warn of.
    caplog.clear()
    run([*flags, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    assert "teaches the encoder little" not in caplog.text
    assert not [name for name in results(tmp_path / "tr") if "rtl" in name]


def test_heads_that_do_not_fit_are_refused(
    flags: list[str], trained_heads: Path, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    command = [*flags, "--init_heads_from", str(trained_heads)]
    command += ["--output_dir", str(tmp_path / "out")]
    for more, named in (
        ("--rtl_layers 1", "rtl_layers=2 there, but 1 here"),
        ("--rtl_direction both", "rtl_direction='source-to-target' there, but 'both' here"),
        ("--objective tr", "has no head that this model has"),
        ("--objective bow", "does not read what this one reads"),
        ("--restrict_target_vocabulary false", "token_ids|size mismatch"),
        (f"--init_heads_from {tiny_bert_dir}", "plain 'bert' checkpoint"),
    ):
        with pytest.raises(UserError, match=named):
            built([*command, *more.split()])
