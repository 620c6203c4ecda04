"""What a training starts from: a checkpoint, random weights, a sentence-transformers folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import built, results, run, state, synthetic_pairs, tiny_config
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from tokenizers import processors
from transformers import AutoTokenizer, BertModel, PreTrainedTokenizerFast

from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.modules import write_modules
from dap_transformers.evaluation.retrieval import retrieval_accuracy
from dap_transformers.training.run import build_trainer

# A DAP checkpoint


def test_a_dap_checkpoint_is_trained_further_with_its_weights_and_objective(
    flags: list[str], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    run([*flags, "--max_steps", "1", "--output_dir", str(first)])
    flags[1] = str(first)
    changed = "--max_steps 1 --tr_temperature 0.1 --tr_bidirectional --learning_rate 0"
    command = [*flags, *changed.split(), "--output_dir", str(second)]
    with pytest.raises(ValueError, match=r"objective='tr\+rtl', not 'tr'"):
        run([*command, "--objective", "tr"])

    run(command)
    before = load_file(first / "model.safetensors")
    after = load_file(second / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((second / "config.json").read_text())
    assert config["objective"] == "tr+rtl"
    assert (config["tr_temperature"], config["tr_bidirectional"]) == (0.1, True)


# Random weights


@pytest.fixture(scope="module")
def scratch(
    tmp_path_factory: pytest.TempPathFactory,
    bitext_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> tuple[Path, list[str]]:
    """A folder with an encoder (`mlm`) trained from random weights, and the flags that made it."""
    folder = tmp_path_factory.mktemp("scratch")
    tiny_config("bert").save_pretrained(folder / "shape")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    settings = (
        "--max_seq_length 24 --per_device_train_batch_size 16 --dev_pairs 20 --max_steps 30 "
        "--learning_rate 1e-2 --logging_steps 6 --report_to none --use_cpu --disable_tqdm true "
        "--save_strategy no"
    )
    flags = ["--tokenizer_name", str(folder / "tokenizer"), "--train_data", str(bitext_dir)]
    flags += ["--config_name", str(folder / "shape" / "config.json"), *settings.split()]
    run([*flags, "--objective", "mlm", "--pooling", "mean", "--output_dir", str(folder / "mlm")])
    return folder, flags


def changed_tokenizer(
    scratch: tuple[Path, list[str]], folder: Path, **tokens: str | None
) -> PreTrainedTokenizerFast:
    """Save that encoder's tokenizer with other special tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch[0] / "tokenizer")
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return tokenizer


def without(flags: list[str], *names: str) -> list[str]:
    """Return the flags without some that have a value."""
    left = list(flags)
    for name in names:
        place = left.index(name)
        del left[place : place + 2]
    return left


def from_mlm(scratch: tuple[Path, list[str]]) -> list[str]:
    """Return the flags of a training that starts from the encoder made here."""
    folder, flags = scratch
    return [
        *without(flags, "--config_name", "--tokenizer_name"),
        "--model_name_or_path",
        str(folder / "mlm"),
    ]


def test_an_encoder_learns_from_random_weights(scratch: tuple[Path, list[str]]) -> None:
    history = state(scratch[0] / "mlm")["log_history"]
    losses = [line["mlm_loss"] for line in history if "mlm_loss" in line]
    assert losses[0] < np.log(250) + 0.1  # the vocabulary has 250 tokens
    assert losses[-1] < losses[0] - 0.4
    logged = {name for line in history for name in line}
    assert not logged & {"tr_loss", "accuracy"}
    assert "eval_sw-en_accuracy" in results(scratch[0] / "mlm")


@pytest.mark.parametrize("restricted", ["true", "false"])
def test_an_encoder_made_here_starts_dual_alignment(
    restricted: str, scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    more = f"--objective tr+rtl --rtl_layers 2 --restrict_target_vocabulary {restricted}"
    trainer = built([*from_mlm(scratch), *more.split(), "--output_dir", str(tmp_path)])
    assert (trainer.model.config.objective, trainer.model.config.pooling) == ("tr+rtl", "mean")

    # Encoder and prediction head are those of the checkpoint.
    found = trainer.model.state_dict()
    made = load_file(scratch[0] / "mlm" / "model.safetensors")
    ids = found.pop("prediction_head.token_ids", torch.arange(250))
    assert (len(ids) < 250) == (restricted == "true")
    bias = made.pop("prediction_head.bias")[ids]
    assert torch.equal(found["prediction_head.bias"], bias)
    assert all(torch.equal(found[name], value) for name, value in made.items())

    # The RTL head starts as the encoder's last two layers.
    prefix = "rtl_head.blocks.encoder.layer."
    blocks = {name: value for name, value in found.items() if name.startswith("rtl_head.")}
    assert blocks
    for name, value in blocks.items():
        layer, rest = name.removeprefix(prefix).split(".", 1)
        assert torch.equal(value, made[f"dap.encoder.encoder.layer.{int(layer) + 1}.{rest}"])


def test_masked_language_modelling_continues(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, flags = scratch
    more = f"--model_name_or_path {folder / 'mlm'} --max_steps 1 --mlm_probability 0.3"
    command = [*without(flags, "--config_name", "--max_steps"), *more.split()]
    run([*command, "--learning_rate", "0", "--output_dir", str(tmp_path / "more")])
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert (config["objective"], config["mlm_probability"]) == ("mlm", 0.3)
    assert config["pooling"] == "mean"
    first = load_file(folder / "mlm" / "model.safetensors")
    second = load_file(tmp_path / "more" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_mask_token_is_that_of_the_given_tokenizer(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    tokenizer = changed_tokenizer(scratch, tmp_path / "other", mask_token="a")
    flags = [*from_mlm(scratch), "--tokenizer_name", str(tmp_path / "other"), "--pooling", "mean"]
    flags += ["--output_dir", str(tmp_path / "out")]
    trainer = built([*flags, "--objective", "tr+rtl"])
    assert trainer.model.config.mask_token_id == tokenizer.mask_token_id != 4
    with pytest.raises(ValueError, match=f"mask token 4, .*other has {tokenizer.mask_token_id}"):
        built([*flags, "--objective", "mlm"])


def test_a_dap_checkpoint_can_give_the_shape_of_an_encoder(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, flags = scratch
    more = f"--config_name {folder / 'mlm'} --objective mlm --per_device_train_batch_size 1"
    command = [*without(flags, "--config_name"), *more.split(), "--output_dir", str(tmp_path)]
    found = built(command).model.state_dict()
    made = load_file(folder / "mlm" / "model.safetensors")
    for name, value in found.items():
        assert value.shape == made[name].shape
    name = "dap.encoder.embeddings.word_embeddings.weight"
    assert not torch.equal(found[name], made[name])


def test_dual_alignment_can_start_from_random_weights(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    model = built([*scratch[1], "--output_dir", str(tmp_path)]).model
    config = model.config
    assert (config.objective, config.mask_token_id) == ("tr+rtl", 4)
    assert config.encoder_config.pad_token_id == 1
    ids = model.prediction_head.token_ids
    assert config.target_vocab_size == len(ids) < 250
    assert ids[0] > 0  # CLS is not predicted


def test_a_configuration_that_does_not_fit_the_tokenizer_is_refused(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    flags = without(scratch[1], "--config_name", "--tokenizer_name")
    flags += ["--output_dir", str(tmp_path / "out")]
    shape = scratch[0] / "shape"
    whole = scratch[0] / "tokenizer"
    small = tmp_path / "small"
    tiny_config("bert", vocab_size=99).save_pretrained(small)
    bare = changed_tokenizer(scratch, tmp_path / "maskless", mask_token=None)
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    bare.save_pretrained(tmp_path / "bare")
    for config, tokenizer, named in (
        (small, whole, "vocab_size=99"),
        (shape, None, "--tokenizer_name"),
        (shape, tmp_path / "bare", "special token before and after"),
        (shape, tmp_path / "maskless", "no mask token"),
    ):
        given = ["--config_name", str(config)]
        if tokenizer is not None:
            given += ["--tokenizer_name", str(tokenizer)]
        with pytest.raises(ValueError, match=named):
            built([*flags, *given])

    # The given objective is the one that needs a mask token.
    built([*flags, *given, "--objective", "tr+bow"])


# A sentence-transformers folder


def library_folder(folder: Path, encoder_dir: Path, **settings: object) -> Path:
    """Make a sentence-transformers folder that has its encoder in a subfolder."""
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    encoder = SentenceEncoder(BertModel.from_pretrained(encoder_dir), tokenizer, **settings)
    write_modules(encoder, folder, normalize=True, prompts={"other": "lo: "})
    shutil.copytree(encoder_dir, folder / "0_Transformer")
    shutil.move(folder / "sentence_bert_config.json", folder / "0_Transformer")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.fixture
def from_library(flags: list[str], tiny_bert_dir: Path, tmp_path: Path) -> list[str]:
    """The flags of a TR training from a sentence-transformers folder, without a length."""
    settings = {"pooling": "mean", "prefix": "ka: ", "max_seq_length": 9}
    flags[1] = str(library_folder(tmp_path / "start", tiny_bert_dir, **settings))
    command = [*without(flags, "--max_seq_length"), "--objective", "tr"]
    return [*command, "--output_dir", str(tmp_path / "out")]


def test_training_takes_the_settings_of_a_sentence_transformers_folder(
    from_library: list[str],
) -> None:
    trainer, record = build_trainer(*parse_arguments(from_library))
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("mean", "ka: ", 9)
    tokenizer = trainer.processing_class

    # Training pairs have the prefix.
    row = trainer.train_dataset[7]
    language, number = row["pair_id"].split(":")
    source, target = synthetic_pairs(language)[int(number)]
    for side, text in (("source", source), ("target", target)):
        expected = tokenizer("ka: " + text, truncation=True, max_length=9)["input_ids"]
        assert row[f"{side}_input_ids"] == expected

    # So do dev pairs.
    sides = list(zip(*trainer.evaluators[0].pairs["de"], strict=True))
    accuracies = []
    for prefix in ("ka: ", ""):
        encoder = SentenceEncoder(trainer.model.dap, tokenizer, "mean", prefix, 9)
        accuracies.append(tuple(retrieval_accuracy(*map(encoder.encode, sides))))
    found = trainer.evaluate()
    found = found["eval_de-en_accuracy"], found["eval_en-de_accuracy"]
    assert found == accuracies[0] != accuracies[1]


def test_the_saved_model_keeps_the_settings_of_a_sentence_transformers_folder(
    from_library: list[str], tmp_path: Path
) -> None:
    trainer = built(from_library)
    trainer.save_model()
    sentences = [source for source, _ in trainer.evaluators[0].pairs["de"]]
    encoder = SentenceEncoder(trainer.model.dap, trainer.processing_class, "mean", "ka: ", 9)
    expected = encoder.encode(sentences)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    saved = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(saved.encode(sentences), expected, atol=1e-5)
    assert saved.prompts["other"] == "lo: "

    # A training that starts from the saved model has them, too.
    start = ["--model_name_or_path", str(tmp_path / "out"), "--output_dir", str(tmp_path / "2")]
    again = built([*from_library, *start])
    assert (again.prefix, again.max_seq_length, again.model.config.pooling) == ("ka: ", 9, "mean")


def test_arguments_override_a_sentence_transformers_folder(from_library: list[str]) -> None:
    other = ["--pooling", "cls", "--prefix", "", "--max_seq_length", "12"]
    _, record = build_trainer(*parse_arguments([*from_library, *other]))
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("cls", "", 12)


def test_hard_negatives_keep_the_prefix_of_a_sentence_transformers_folder(
    from_library: list[str],
) -> None:
    trainer = built([*from_library, "--tr_hard_negatives", "1"])
    rows = [trainer.train_dataset[row] for row in range(8)]
    copies = [copy for copy in trainer.data_collator.negatives(rows) if copy]
    kept = trainer.processing_class("ka:")["input_ids"][:-1]
    assert copies
    assert all(copy[: len(kept)] == kept for copy in copies)


# The bias of a prediction head
