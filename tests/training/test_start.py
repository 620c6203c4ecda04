"""What a training starts from: a checkpoint, random weights, a sentence-transformers folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, built, results, state, synthetic_pairs, tiny_config
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from tokenizers import processors
from transformers import AutoTokenizer, BertModel, PreTrainedTokenizerFast

import modeling_dap
from dap.encoding import SentenceEncoder
from dap.publishing import write_modules
from dap.search import retrieval_accuracy
from dap.training.training_arguments import parse_arguments
from train_dap import build_trainer, run


def test_dap_checkpoints_go_on_with_their_weights_and_keep_what_these_are_made_for(
    flags: list[str], tmp_path: Path
) -> None:
    run([*flags, "--max_steps", "1", "--output_dir", str(tmp_path / "first")])
    flags[1] = str(tmp_path / "first")
    changed = ["--max_steps", "1", "--tr_temperature", "0.1", "--tr_bidirectional"]
    with pytest.raises(ValueError, match="first was trained with objective='tr\\+rtl', not 'tr'"):
        run([*flags, *changed, "--objective", "tr", "--output_dir", str(tmp_path / "second")])
    run([*flags, *changed, "--learning_rate", "0", "--output_dir", str(tmp_path / "second")])
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (config["objective"], config["tr_temperature"], config["tr_bidirectional"]) == (
        "tr+rtl",
        0.1,
        True,
    )


@pytest.fixture(scope="module")
def scratch(
    tmp_path_factory: pytest.TempPathFactory,
    bitext_dir: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> tuple[Path, list[str]]:
    """An encoder made by masked language modelling, and the flags that made it."""
    folder = tmp_path_factory.mktemp("scratch")
    tiny_config("bert").save_pretrained(folder / "shape")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    flags = [
        "--tokenizer_name",
        str(folder / "tokenizer"),
        "--train_data",
        str(bitext_dir),
        "--max_seq_length",
        "24",
    ]
    flags += [
        "--per_device_train_batch_size",
        "32",
        "--dev_pairs",
        "20",
        "--report_to",
        "none",
        "--use_cpu",
    ]
    flags += [
        "--logging_steps",
        "10",
        "--learning_rate",
        "5e-3",
        "--max_steps",
        "50",
        "--disable_tqdm",
        "true",
    ]
    flags += ["--config_name", str(folder / "shape" / "config.json"), "--save_strategy", "no"]
    run([*flags, "--objective", "mlm", "--pooling", "mean", "--output_dir", str(folder / "mlm")])
    return folder, flags


def changed_tokenizer(
    scratch: tuple[Path, list[str]], folder: Path, **tokens: str | None
) -> PreTrainedTokenizerFast:
    """The tokenizer of that encoder with other special tokens, written into a folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch[0] / "tokenizer")
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return tokenizer


def without(flags: list[str], *names: str) -> list[str]:
    """The flags but for some that have a value."""
    places = {flags.index(name) + step for name in names for step in (0, 1)}
    return [flag for place, flag in enumerate(flags) if place not in places]


def test_an_encoder_learns_from_scratch(scratch: tuple[Path, list[str]]) -> None:
    history = state(scratch[0] / "mlm")["log_history"]
    losses = [line["mlm_loss"] for line in history if "mlm_loss" in line]
    assert losses[0] < 5.52 + 0.1  # the log of the vocabulary of 250
    assert losses[-1] < losses[0] - 0.4
    assert {"tr_loss", "accuracy"} & {name for line in history for name in line} == set()
    assert "eval_sw-en_accuracy" in results(scratch[0] / "mlm")


@pytest.mark.parametrize("restricted", ["true", "false"])
def test_an_encoder_made_here_starts_dual_alignment(
    restricted: str, scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, flags = scratch
    start = [
        *without(flags, "--config_name", "--tokenizer_name"),
        "--model_name_or_path",
        str(folder / "mlm"),
    ]
    start += [
        "--objective",
        "tr+rtl",
        "--rtl_layers",
        "2",
        "--restrict_target_vocabulary",
        restricted,
    ]
    trainer = built([*start, "--output_dir", str(tmp_path)])
    found, made = trainer.model.state_dict(), load_file(folder / "mlm" / "model.safetensors")
    assert (trainer.model.config.objective, trainer.model.config.pooling) == ("tr+rtl", "mean")
    ids = found.pop("prediction_head.token_ids", torch.arange(250))
    assert (len(ids) < 250) == (restricted == "true")
    torch.testing.assert_close(
        found["prediction_head.bias"], made.pop("prediction_head.bias")[ids], rtol=0, atol=0
    )
    assert all(
        torch.equal(found[name], value) for name, value in made.items()
    )  # encoder and prediction head
    blocks = {name: value for name, value in found.items() if name.startswith("rtl_head.")}
    for name, value in blocks.items():
        layer, rest = name.removeprefix("rtl_head.blocks.encoder.layer.").split(".", 1)
        assert torch.equal(value, made[f"dap.encoder.encoder.layer.{int(layer) + 1}.{rest}"])
    assert blocks


def test_masked_language_modelling_goes_on(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, flags = scratch
    more = [
        *without(flags, "--config_name", "--max_steps"),
        "--model_name_or_path",
        str(folder / "mlm"),
    ]
    more += ["--max_steps", "1", "--mlm_probability", "0.3", "--output_dir", str(tmp_path / "more")]
    run([*more, "--learning_rate", "0"])
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert (config["objective"], config["mlm_probability"], config["pooling"]) == (
        "mlm",
        0.3,
        "mean",
    )
    first, second = (
        load_file(path / "model.safetensors") for path in (folder / "mlm", tmp_path / "more")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_masks_are_of_the_tokenizer_that_reads_the_text(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, flags = scratch
    tokenizer = changed_tokenizer(scratch, tmp_path / "other", mask_token="a")
    flags = [
        *without(flags, "--config_name", "--tokenizer_name"),
        "--model_name_or_path",
        str(folder / "mlm"),
    ]
    flags += ["--tokenizer_name", str(tmp_path / "other"), "--output_dir", str(tmp_path / "out")]
    trainer = built([*flags, "--objective", "tr+rtl", "--pooling", "mean"])
    assert trainer.model.config.mask_token_id == tokenizer.mask_token_id != 4
    with pytest.raises(
        ValueError,
        match=f"mlm was trained with mask token 4, .*other has {tokenizer.mask_token_id}",
    ):
        built([*flags, "--objective", "mlm", "--pooling", "mean"])


def test_the_token_that_ends_a_sentence_is_not_counted_for_masks(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    changed_tokenizer(scratch, tmp_path / "other", sep_token=None)
    flags = [
        *scratch[1],
        "--objective",
        "mlm",
        "--prediction_bias",
        "frequencies",
        "--output_dir",
        str(tmp_path),
    ]
    with_sep, without_sep = (
        built([*flags, "--tokenizer_name", str(name)]).model.prediction_head.bias
        for name in (scratch[0] / "tokenizer", tmp_path / "other")
    )
    assert torch.equal(with_sep, without_sep)
    assert with_sep[2] == with_sep.min() < with_sep.max()


def test_another_encoder_of_the_shape_of_one_made_here(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, flags = scratch
    flags = [
        *without(flags, "--config_name"),
        "--config_name",
        str(folder / "mlm"),
        "--output_dir",
        str(tmp_path),
    ]
    trainer = built([*flags, "--objective", "mlm", "--per_device_train_batch_size", "1"])
    made = load_file(folder / "mlm" / "model.safetensors")
    found = trainer.model.state_dict()
    assert {name: value.shape for name, value in found.items()} == {
        name: made[name].shape for name in found
    }
    name = "dap.encoder.embeddings.word_embeddings.weight"
    assert not torch.equal(found[name], made[name])


def test_dual_alignment_starts_from_scratch_too(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    trainer = built([*scratch[1], "--output_dir", str(tmp_path)])
    config = trainer.model.config
    assert (config.objective, config.mask_token_id, config.encoder_config.pad_token_id) == (
        "tr+rtl",
        4,
        1,
    )
    assert config.target_vocab_size == len(trainer.model.prediction_head.token_ids) < 250
    assert trainer.model.prediction_head.token_ids[0] > 0  # CLS is not predicted


def test_what_to_start_from_is_given_once(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, flags = scratch
    out = ["--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="--model_name_or_path and --config_name say the same"):
        parse_arguments([*flags, *out, "--model_name_or_path", str(folder / "mlm")])
    with pytest.raises(ValueError, match="give --model_name_or_path, or --config_name"):
        parse_arguments([*without(flags, "--config_name"), *out])
    recipe = str(REPOSITORY / "configs" / "mlm.yaml")
    model, _, _ = parse_arguments([recipe, "--model_name_or_path", "a", *out])
    assert (model.model_name_or_path, model.config_name) == ("a", None)


def test_configurations_that_do_not_fit_the_tokenizer_are_refused(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    flags = [
        *without(scratch[1], "--config_name", "--tokenizer_name"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    small, shape, whole = (
        str(folder)
        for folder in (tmp_path / "small", scratch[0] / "shape", scratch[0] / "tokenizer")
    )
    tiny_config("bert", vocab_size=99).save_pretrained(small)
    bare = changed_tokenizer(scratch, tmp_path / "maskless", mask_token=None)
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    bare.save_pretrained(tmp_path / "bare")
    for config, tokenizer, message in (
        (small, whole, "small has vocab_size=99, its tokenizer has ids up to 246"),
        (shape, None, "shape holds no tokenizer: add its files, or to train give --tokenizer_name"),
        (shape, "bare", r"bare makes \[.*\] of 'a', but .* a special token before and after"),
        (shape, "maskless", "no mask token"),
    ):
        given = ["--tokenizer_name", str(tmp_path / tokenizer)] if tokenizer else []
        with pytest.raises(ValueError, match=message):
            built([*flags, "--config_name", config, *given])


def library_folder(folder: Path, encoder_dir: Path, **settings: object) -> Path:
    """A sentence-transformers folder with the encoder in a folder of its own, as earlier versions wrote it."""
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    encoder = SentenceEncoder(BertModel.from_pretrained(encoder_dir), tokenizer, **settings)
    write_modules(encoder, folder, normalize=True, prompts={"other": "lo: "})
    shutil.copytree(encoder_dir, folder / "0_Transformer")
    shutil.move(folder / "sentence_bert_config.json", folder / "0_Transformer")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(
        json.dumps([modules[0] | {"path": "0_Transformer"}, *modules[1:]])
    )
    return folder


def test_a_sentence_transformers_folder_gives_its_settings_and_the_model_keeps_them(
    flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    flags[1] = str(
        library_folder(
            tmp_path / "start", tiny_bert_dir, pooling="mean", prefix="ka: ", max_seq_length=9
        )
    )
    given = [*flags[:4], *flags[6:], "--objective", "tr", "--output_dir", str(tmp_path / "out")]
    trainer, record = build_trainer(*parse_arguments(given))
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("mean", "ka: ", 9)
    tokenizer, row = trainer.processing_class, trainer.train_dataset[7]
    language, number = row["pair_id"].split(":")
    for side, text in zip(
        ("source", "target"), synthetic_pairs(language)[int(number)], strict=True
    ):
        assert (
            row[f"{side}_input_ids"]
            == tokenizer("ka: " + text, truncation=True, max_length=9)["input_ids"]
        )
    encoders = [
        SentenceEncoder(trainer.model.dap, tokenizer, "mean", prefix, 9) for prefix in ("ka: ", "")
    ]
    sides = trainer.dev_bitext["de"]
    accuracies = [retrieval_accuracy(*map(encoder.encode, sides)) for encoder in encoders]
    found = trainer.evaluate()
    assert (
        (found["eval_de-en_accuracy"], found["eval_en-de_accuracy"])
        == tuple(accuracies[0])
        != tuple(accuracies[1])
    )
    trainer.save_model()
    expected = encoders[0].encode(sides[0])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    saved = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(saved.encode(sides[0]), expected, atol=1e-5)
    assert saved.prompts["other"] == "lo: "
    again = built([*given[:-1], str(tmp_path / "2"), "--model_name_or_path", str(tmp_path / "out")])
    assert (again.prefix, again.max_seq_length, again.model.config.pooling) == ("ka: ", 9, "mean")
    other = ["--pooling", "cls", "--prefix", "", "--max_seq_length", "12"]
    trainer, record = build_trainer(*parse_arguments([*given, *other]))
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("cls", "", 12)
    trainer, _ = build_trainer(*parse_arguments([*given, "--tr_hard_negatives", "1"]))
    copies = trainer.data_collator.negatives([trainer.train_dataset[row] for row in range(8)])
    kept = tokenizer("ka:")["input_ids"][:-1]
    assert any(copies)
    assert all(copy[: len(kept)] in (kept, []) for copy in copies)


def test_a_bias_from_frequencies_is_refused_or_left_out_with_a_word(
    flags: list[str],
    scratch: tuple[Path, list[str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [*flags, "--output_dir", str(tmp_path), "--prediction_bias"]
    for more, message in (
        (
            ["frequencies", "--objective", "tr"],
            "does nothing, as objective 'tr' predicts no tokens",
        ),
        (
            ["frequencies", "--streaming", "--language_mix", "uniform"],
            "does nothing, as a stream cannot be counted",
        ),
        (["uniform"], "prediction_bias='uniform': give 'zeros' or 'frequencies'"),
    ):
        with pytest.raises(ValueError, match=message):
            built([*asked, *more])
    with pytest.raises(ValueError, match="prediction_bias='uniform': give"):
        built([*asked, "uniform", "--model_name_or_path", str(scratch[0] / "mlm")])
    modeling_dap.logger.addHandler(caplog.handler)
    made = load_file(scratch[0] / "mlm" / "model.safetensors")["prediction_head.bias"]
    for objective, word in (
        ("tr+tlm", "has a masked-LM head: its bias is taken"),
        ("mlm", "its bias stays"),
    ):
        start = [
            "--model_name_or_path",
            str(scratch[0] / "mlm"),
            "--objective",
            objective,
            "--pooling",
            "mean",
        ]
        trainer = built([*asked, "frequencies", *start])
        assert torch.equal(trainer.model.prediction_head.bias, made)
        assert word in caplog.text
