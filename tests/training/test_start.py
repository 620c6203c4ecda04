"""What a training starts from: a checkpoint, random weights, a sentence-transformers folder."""

import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import (
    LANGUAGES,
    assert_equal_weights,
    built,
    built_and_described,
    load_encoder,
    load_library,
    logged,
    results,
    run,
    save,
    save_bert,
    save_with_modules,
    synthetic_pairs,
    tiny_config,
    tiny_tokenizer,
    weights,
)
from tiny_models import start_from
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json, write_json
from modules_dap import Normalize, write_modules
from objectives_dap import OBJECTIVES, TranslationRanking

# A DAP checkpoint


def test_a_dap_checkpoint_is_trained_further_with_its_weights_and_objective(
    flags: str, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    flags += " --max_steps 1 --dev_pairs 0"
    run(f"{flags} --output_dir {first}")
    changed = "--tr_temperature 0.1 --tr_bidirectional --learning_rate 0"
    command = f"{flags} {changed} --model_name_or_path {first} --output_dir {second}"
    with pytest.raises(ValueError, match=r"objective='tr\+rtl', not 'tr'"):
        run(f"{command} --objective tr")

    run(command)
    assert_equal_weights(first, second)
    config = read_json(second / "config.json")
    assert config["objective"] == "tr+rtl"
    assert (config["tr_temperature"], config["tr_bidirectional"]) == (0.1, True)


class OwnRanking(TranslationRanking):
    name = "own"
    options = {"scale": 2.0}


@patch.dict(OBJECTIVES, {"own": OwnRanking})
def test_a_checkpoint_becomes_its_own_anchor_under_another_objective(
    flags: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = tmp_path / "first"
    flags += " --dev_pairs 0"
    run(f"{flags} --objective own --max_steps 1 --output_dir {first}")
    command = f"{flags} --model_name_or_path {first} --max_steps 2 --logging_steps 1"
    out = tmp_path / "out"
    run(f"{command} --objective tr+distill --distill_weight 20 --output_dir {out}")

    assert f"{first}: objective tr+distill, before own" in caplog.text
    scales = [read_json(folder / "config.json").get("own_scale") for folder in (first, out)]
    assert scales == [2.0, None]
    assert len(logged(out, "distill_loss")) == 2
    pairs = [pair for language in LANGUAGES for pair in synthetic_pairs(language)]
    text = sorted({sentence for pair in pairs for sentence in pair})
    before = load_encoder(first, max_seq_length=16).encode(text)
    (file,) = (out / "teacher").iterdir()
    distances = np.abs(np.load(file)[:, None] - before).max(2)  # (N, number of sentences)
    assert distances.min(1).max() < 1e-5


# Random weights


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, bitext_dir: Path) -> tuple[Path, str]:
    """A folder with an encoder (`mlm`) trained from random weights, and flags for any start."""
    folder = tmp_path_factory.mktemp("scratch")
    tiny_config("bert").save_pretrained(folder / "shape")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    settings = (
        "--max_seq_length 24 --per_device_train_batch_size 16 --dev_pairs 20 --max_steps 30 "
        "--learning_rate 1e-2 --logging_steps 6 --report_to none --use_cpu --disable_tqdm true "
        "--save_strategy no"
    )
    flags = f"--train_data {bitext_dir} {settings}"
    mlm = f"--objective mlm --pooling mean --output_dir {folder}/mlm"
    run(f"{flags} {from_shape(folder)} {mlm}")
    return folder, flags


def from_shape(folder: Path, shape: str | Path = "shape") -> str:
    """Flags that start from random weights."""
    return f"--config_name {folder / shape} --tokenizer_name {folder}/tokenizer"


def test_an_encoder_learns_from_random_weights(scratch: tuple) -> None:
    folder = scratch[0] / "mlm"
    losses = logged(folder, "mlm_loss")
    assert losses[0] < np.log(250) + 0.1  # the vocabulary has 250 tokens
    assert losses[-1] < losses[0] - 0.4
    assert not logged(folder, "tr_loss") + logged(folder, "accuracy")
    assert "eval_sw-en_accuracy" in results(folder)


def test_an_encoder_made_here_starts_dual_alignment(scratch: tuple, tmp_path: Path) -> None:
    folder, flags = scratch
    start = f"--model_name_or_path {folder}/mlm --output_dir {tmp_path}"
    trainer = built(f"{flags} {start} --objective tr+rtl --rtl_layers 2")
    assert (trainer.model.config.objective, trainer.model.config.pooling) == ("tr+rtl", "mean")

    # Encoder and prediction head are those of the checkpoint.
    found = trainer.model.state_dict()
    made = weights(folder / "mlm")
    ids = found.pop("prediction_head.token_ids")
    assert ids[0] > 0  # without CLS
    assert len(ids) < 250
    bias = made.pop("prediction_head.bias")[ids]
    assert torch.equal(found["prediction_head.bias"], bias)
    assert all(torch.equal(found[name], value) for name, value in made.items())


def test_vectors_that_were_never_trained_are_not_kept(scratch: tuple, tmp_path: Path) -> None:
    folder, flags = scratch
    bare = save_bert(tmp_path / "bert")  # an encoder whose vectors would be kept
    masked = shutil.copytree(bare, tmp_path / "masked")
    config = read_json(bare / "config.json")
    write_json(config | {"architectures": ["BertForMaskedLM"]}, masked / "config.json")
    for start in (
        f"--model_name_or_path {folder}/mlm",
        f"--model_name_or_path {masked}",
        from_shape(folder, bare),
    ):
        trainer = built(f"{flags} {start} --objective tr+distill --output_dir {tmp_path}/out")
        assert trainer.model.config.objective == "tr"
        assert "kept_neighbours" not in [each.name for each in trainer.evaluators]


def test_the_mask_token_is_that_of_the_given_tokenizer(scratch: tuple, tmp_path: Path) -> None:
    folder, flags = scratch
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", mask_token="a")
    tokenizer.save_pretrained(tmp_path / "other")
    start = f"--model_name_or_path {folder}/mlm --tokenizer_name {tmp_path}/other --pooling mean"
    command = f"{flags} {start} --output_dir {tmp_path}"
    trainer = built(f"{command} --objective tr+rtl")
    assert trainer.model.config.mask_token_id == tokenizer.mask_token_id != 4
    with pytest.raises(ValueError, match=f"mask token 4, .* has {tokenizer.mask_token_id}"):
        built(f"{command} --objective mlm")


def test_dual_alignment_can_start_from_the_shape_of_a_checkpoint(
    scratch: tuple, tmp_path: Path
) -> None:
    folder, flags = scratch
    model = built(f"{flags} {from_shape(folder, 'mlm')} --output_dir {tmp_path}").model
    config = model.config
    assert (config.objective, config.mask_token_id) == ("tr+rtl", 4)
    assert config.encoder_config.pad_token_id == 1
    name = "dap.encoder.embeddings.word_embeddings.weight"
    assert not torch.equal(model.state_dict()[name], weights(folder / "mlm")[name])


# A sentence-transformers folder


@pytest.fixture
def from_library(flags: str, tiny_bert_dir: Path, tmp_path: Path) -> str:
    """The flags of a TR training from a sentence-transformers folder, without a length.

    The folder has its encoder in a subfolder.
    """
    encoder = load_encoder(tiny_bert_dir, "mean", "ka: ", 9)
    encoder.after.append(Normalize())
    encoder.prompts = {"other": "lo: "}
    start = tmp_path / "start"
    inside = shutil.copytree(tiny_bert_dir, start / "0_Transformer")
    write_modules(encoder, start)
    shutil.move(start / "sentence_bert_config.json", inside)
    modules = read_json(start / "modules.json")
    modules[0]["path"] = inside.name
    write_json(modules, start / "modules.json")
    flags = flags.replace("--max_seq_length 16", "")
    return f"{flags} --model_name_or_path {start} --objective tr --output_dir {tmp_path}/out"


def test_training_after_mlm_has_the_modules_of_the_folder(
    tiny_bert_dir: Path, tmp_path: Path
) -> None:
    library = save_with_modules(tmp_path / "library", tiny_bert_dir)
    mlm = save(tmp_path / "mlm", start_from(library, objective="mlm"))
    encoder = SentenceEncoder(start_from(mlm, objective="tr"), tiny_tokenizer())
    sentences = ["kaban loder", "mifin"]
    assert_close(encoder.encode(sentences), load_encoder(library).encode(sentences))
    # The head of MLM reads token states, which are larger than the vectors behind the Dense layer.
    for objective in ("tr+bow", "tr+rtl+bow"):
        assert start_from(mlm, objective=objective).has_random_head
    assert not start_from(mlm, objective="tr+rtl").has_random_head


def test_training_takes_the_settings_of_a_sentence_transformers_folder(from_library: str) -> None:
    trainer, record = built_and_described(f"{from_library} --tr_hard_negatives 1")
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("mean", "ka: ", 9)
    tokenizer = trainer.processing_class

    # Training pairs have the prefix, and so have hard negatives.
    row = trainer.train_dataset[7]
    language, number = row["pair_id"].split(":")
    source, target = synthetic_pairs(language)[int(number)]
    for side, text in (("source", source), ("target", target)):
        expected = tokenizer("ka: " + text, truncation=True, max_length=9)["input_ids"]
        assert row[f"{side}_input_ids"] == expected
    copies = trainer.data_collator.negatives([trainer.train_dataset[row] for row in range(8)])
    kept = tokenizer("ka:")["input_ids"][:-1]
    assert any(copies)
    assert all(copy[: len(kept)] == kept for copy in copies if copy)

    # So do dev pairs.
    assert trainer.encoder().prefix == "ka: "
    assert trainer.encoder().max_seq_length == 9

    # Arguments go before the folder.
    other = "--pooling cls --prefix= --max_seq_length 12"
    _, record = built_and_described(f"{from_library} {other}")
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("cls", "", 12)


def test_the_saved_model_keeps_the_settings_of_a_sentence_transformers_folder(
    from_library: str, tmp_path: Path
) -> None:
    trainer = built(from_library)
    trainer.save_model()
    sentences = [source for source, _ in trainer.evaluators[0].pairs["de"]]
    encoder = SentenceEncoder(trainer.model.dap, trainer.processing_class, "mean", "ka: ", 9)
    expected = encoder.encode(sentences)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    saved = load_library(tmp_path / "out")
    np.testing.assert_allclose(saved.encode(sentences), expected, atol=1e-5)
    assert set(saved.prompts.values()) == {"ka: "}  # not those that the training did not see

    # A training that starts from the saved model has them, too.
    start = f"--model_name_or_path {tmp_path}/out --output_dir {tmp_path}/2"
    again = built(f"{from_library} {start}")
    assert (again.prefix, again.max_seq_length, again.model.config.pooling) == ("ka: ", 9, "mean")


# What is refused


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--train_data nowhere --config_name small", "vocab_size=99"),
        ("--objective tr+tlm --tokenizer_name maskless", "needs a mask token"),
        ("--train_data nowhere --tokenizer_name nowhere", "tokenizer of nowhere"),
        ("--train_data nowhere --model_name_or_path nowhere", "nowhere: there is no"),
        ("--train_data nowhere --tr_weight -1", "tr_weight=-1"),
        ("--train_data nowhere --rtl_direction both --rtl_layers 99", "rtl_layers=99"),
        ("--train_data nowhere --max_seq_length 90", "max_seq_length=90"),
        ("--train_data nowhere --distill_from shape", "distill_from=shape"),
        ("--train_data nowhere --objective distill", "give a teacher"),
        ("--objective tr --per_device_train_batch_size 1024", "batch of 1,?024"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    more: str, named: str, scratch: tuple, here: Path
) -> None:
    folder, flags = scratch
    shutil.copytree(folder / "shape", "shape")
    tiny_config("bert", vocab_size=99).save_pretrained("small")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    tokenizer.mask_token = None
    tokenizer.save_pretrained("maskless")
    start = "" if "--model_name_or_path" in more else from_shape(folder)
    with pytest.raises(ValueError, match=named):
        built(f"{flags} {start} {more} --output_dir out")
