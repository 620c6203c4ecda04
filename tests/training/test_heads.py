"""Heads that are trained before the joint training."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    built,
    results,
    run,
    save,
    save_bert,
    tiny_config,
    weights,
)
from tiny_models import cipher
from transformers import BertForMaskedLM, BertModel
from written import text_of, write

from dap_transformers.files import read_json
from dap_transformers.training import head_training
from dap_transformers.training.head_training import RESULTS_FILE, train_missing_heads
from dap_transformers.training.source_information import LEAST_INFORMATION

# Trained before the joint training


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose random weights are large enough to tell words apart."""
    folder = tmp_path_factory.mktemp("encoder")
    return save_bert(folder, num_hidden_layers=1, initializer_range=0.1)


def command(encoder: Path, folder: Path, is_true: bool = True) -> str:
    """Return a training without joint steps that change a weight, on a cipher of two letters."""
    text = write(folder / "de-en.tsv", text_of(cipher(600, 0, is_true)))
    options = (
        "--objective tr+bow --rtl_layers 1 --max_seq_length 16 --dev_pairs 50 --max_steps 1 "
        "--per_device_train_batch_size 8 --learning_rate 0 --report_to none --disable_tqdm true "
        "--head_pairs 450 --pooling mean"
    )
    return f"--model_name_or_path {encoder} --train_data {text} {options}"


@pytest.mark.parametrize("is_true", [True, False])
def test_heads_learn_from_the_source_and_the_encoder_stays_the_same(
    is_true: bool, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_training, "LEARNING_RATE", 1e-2)  # tiny heads learn faster
    out = tmp_path / "out"
    more = f"--objective tr+rtl+bow --head_steps 60 --output_dir {out}"
    run(f"{command(encoder, tmp_path, is_true)} {more}")
    found = read_json(out / RESULTS_FILE)
    assert (found["pairs"], found["steps"]) == (450, 60)

    # The joint training begins with these heads and the encoder's own weights.
    for head in ("rtl", "bow"):
        nats = results(out)[f"eval_{head}_source_nats"]
        is_right = nats > 1.5 * LEAST_INFORMATION if is_true else nats < LEAST_INFORMATION
        assert is_right, (head, nats)
    found = weights(out)
    for name, value in weights(encoder).items():
        assert torch.equal(found[f"dap.encoder.{name}"], value), name


def test_a_loss_of_the_heads_that_is_not_finite_stops_the_run(
    encoder: Path, tmp_path: Path
) -> None:
    model = BertModel.from_pretrained(encoder, add_pooling_layer=False)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias.fill_(float("nan"))
    model.save_pretrained(shutil.copytree(encoder, tmp_path / "nan"))
    more = f"--head_steps 2 --dev_pairs 0 --output_dir {tmp_path}/out"
    with pytest.raises(FloatingPointError, match="loss of the heads is nan"):
        run(f"{command(tmp_path / 'nan', tmp_path)} {more}")


def test_only_missing_heads_are_trained(
    encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = command(encoder, tmp_path)
    has_head = save(tmp_path / "mlm", BertForMaskedLM(tiny_config("bert", 250)))
    first = tmp_path / "off"
    for name, more in (
        ("off", "--head_steps 0"),
        ("tr", "--objective tr --head_steps 2"),
        ("has-head", f"--model_name_or_path {has_head}"),
        ("continued", f"--model_name_or_path {first}"),
    ):
        run(f"{flags} {more} --output_dir {tmp_path / name}")
        assert not (tmp_path / name / RESULTS_FILE).exists(), name
    assert caplog.text.count("head_steps has no effect") == 1


def test_the_bias_of_a_new_head_starts_from_token_frequencies(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_training, "LEARNING_RATE", 0)
    more = "--objective rtl --head_steps 1 --head_pairs 9000"
    trainer = built(f"{flags} {more} --output_dir {tmp_path}")
    train_missing_heads(trainer)
    head = trainer.model.prediction_head
    targets = []
    for ids in trainer.train_dataset["target_input_ids"]:
        targets += ids[1:]
    counts = torch.tensor([targets.count(token) + 1.0 for token in head.token_ids.tolist()])
    torch.testing.assert_close(head.bias.data, (counts / counts.sum()).log())


def test_a_run_warns_once_if_its_head_hardly_uses_the_source(
    flags: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags += " --max_steps 1 --eval_strategy steps --eval_steps 1"
    run(f"{flags} --output_dir {tmp_path}/out")
    nats = results(tmp_path / "out")["eval_rtl_source_nats"]
    (said,) = (line for line in caplog.messages if "teaches the encoder little" in line)
    assert f"rtl_source_nats is only {nats:.2f} per token" in said

    # Without a head there is nothing to warn of.
    caplog.clear()
    run(f"{flags} --objective tr --output_dir {tmp_path}/tr")
    assert "teaches" not in caplog.text


def test_language_embeddings_are_those_of_the_text_or_of_the_checkpoint(
    flags: str, bitext_dir: Path, tmp_path: Path
) -> None:
    both = f"{flags} --rtl_direction both --max_steps 1 --dev_pairs 0"
    german = tmp_path / "german"
    run(f"{both} --train_data {bitext_dir}/de-en.tsv --output_dir {german}")
    config = read_json(german / "config.json")
    assert config["rtl_languages"] == ["de"]

    # The checkpoint cannot be trained on other languages.
    command = f"{both} --model_name_or_path {german} --output_dir {tmp_path}/next"
    with pytest.raises(ValueError, match="knows de, but the text also has fr sw"):
        built(command)
    trainer = built(f"{command} --train_data {bitext_dir}/de-en.tsv")
    assert trainer.data_collator.languages == ["de"]
