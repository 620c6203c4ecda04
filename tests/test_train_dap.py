import json
import os
import shutil
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, results, save, state, synthetic_pairs, tiny_config
from forked import processes
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from tokenizers import processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

import modeling_dap
from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.publishing import write_modules
from dap.reports import CURVES
from dap.search import retrieval_accuracy
from dap.training.arguments import parse_arguments
from dap.training.data import BitextCollator
from dap.training.resuming import FINISHED
from dap.training.trainer import DAPTrainer
from train_dap import build_datasets, build_trainer, main, run


def test_training_improves_retrieval_and_saves_the_best_model(flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    schedule = ["--max_steps", "80", "--eval_strategy", "steps", "--save_strategy", "steps", "--save_steps", "40"]
    more = ["--eval_steps", "40", "--load_best_model_at_end", "--eval_on_start", "--objective", "tr"]
    run([*flags, *schedule, *more, "--learning_rate", "5e-3", "--output_dir", str(out)])
    history = state(out)["log_history"]
    means = [line["eval_mean_accuracy"] for line in history if "eval_mean_accuracy" in line]
    assert max(means) > means[0] + 20
    assert results(out)["eval_mean_accuracy"] == pytest.approx(max(means))
    if find_spec("matplotlib"):  # a panel of three losses, one of the dev accuracies
        assert "<!-- accuracy on dev pairs, % -->" in (out / CURVES).read_text()
    assert AutoModel.from_pretrained(out).config.model_type == "dap"
    assert not [path.name for path in out.iterdir() if path.suffix in (".bin", ".pt", ".pth")]  # pickles
    with pytest.raises(ValueError, match="holds a finished run"):
        run([*flags, "--max_steps", "2", "--output_dir", str(out)])


def built(flags: list[str]) -> DAPTrainer:
    """The trainer that a command makes."""
    return build_trainer(*parse_arguments(flags))[0]


def run_killed_at(step: int, flags: list[str]) -> None:
    """A run that kills its process as that step begins."""
    training_step = DAPTrainer.training_step

    def kill(self: DAPTrainer, *args: object) -> torch.Tensor:
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, *args)

    DAPTrainer.training_step = kill
    run(flags)


def refuse(*_: object) -> None:
    raise UserError("a.tsv: no pairs\n  are left")


@pytest.mark.parametrize(
    ("fault", "line"),
    [(lambda *_: os.kill(os.getpid(), signal.SIGKILL), ".* ended from outside.*--dataloader_num_workers"),
     (refuse, "a.tsv: no pairs are left")],
)  # fmt: skip
def test_the_end_of_a_process_that_reads_the_batches_is_one_line(
    fault: Callable[..., None], line: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BitextCollator, "__call__", fault)
    with pytest.raises(SystemExit, match=f"^error: {line}$"):
        main([*flags, "--max_steps", "2", "--dataloader_num_workers", "1", "--output_dir", str(tmp_path)])


def test_killed_run_resumes_to_the_same_weights(flags: list[str], tmp_path: Path) -> None:
    flags += ["--per_device_train_batch_size", "100", "--rtl_ratio", "0.7", "--tr_hard_negatives", "0.5"]
    flags += ["--max_steps", "8", "--save_strategy", "steps", "--save_steps", "3"]  # 5 steps an epoch
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = processes.Process(target=run_killed_at, args=(4, [*flags, "--output_dir", str(killed)]))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in killed.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not (killed / FINISHED).exists()
    run([*flags, "--output_dir", str(killed)])
    run([*flags, "--output_dir", str(whole)])
    resumed, expected = (load_file(folder / "model.safetensors") for folder in (killed, whole))
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)


@pytest.mark.parametrize("more", [[], ["--mini_batch_size", "6", "--gradient_accumulation_steps", "2"]])
def test_heads_learn_alone_and_the_encoder_stays_what_it_was(
    more: list[str], flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    options = ["--freeze_encoder", "--prediction_bias", "frequencies", "--max_steps", "4", "--rtl_ratio", "0.7", *more]
    options += ["--head_learning_rate", "1e-2"]
    run([*flags, *options, "--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(tmp_path)])
    learned, start = load_file(tmp_path / "model.safetensors"), load_file(tiny_bert_dir / "model.safetensors")
    encoder = {name.removeprefix("dap.encoder."): value for name, value in learned.items() if name.startswith("dap.")}
    assert encoder.keys() == start.keys()
    assert all(torch.equal(encoder[name], start[name]) for name in start)
    heads = {name for name in learned if not name.startswith("dap.")} - {"prediction_head.token_ids"}
    first = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert not [name for name in heads if torch.equal(first[name], learned[name])]
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(AutoTokenizer.from_pretrained(tiny_bert_dir))
    (tmp_path / FINISHED).unlink()
    shutil.rmtree(tmp_path / "checkpoint-4")
    run([*flags, *options, "--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(tmp_path)])
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(resumed[name], learned[name]) for name in learned)


@pytest.fixture(scope="module")
def trained_heads(tiny_bert_dir: Path, bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `configs/head.yaml` makes, of two languages of three."""
    folder, text = tmp_path_factory.mktemp("heads"), [str(bitext_dir / f"{name}-en.tsv") for name in ("de", "fr")]
    steps = ["--max_steps", "2", "--total_train_batch_size", "16", "--warmup_steps", "0", "--report_to", "none"]
    recipe = [str(REPOSITORY / "configs" / "head.yaml"), "--model_name_or_path", str(tiny_bert_dir)]
    run([*recipe, "--train_data", *text, *steps, "--dev_pairs", "5", "--use_cpu", "--output_dir", str(folder)])
    return folder


@pytest.mark.parametrize(
    ("objective", "taken"),
    [
        ("tr+rtl", "rtl_head and prediction_head"),
        ("tr+rtl --restrict_target_vocabulary true --freeze_encoder", "rtl_head and prediction_head"),
        ("tr+bow", "prediction_head"),
    ],
)
def test_heads_are_taken_from_another_training(
    objective: str, taken: str, trained_heads: Path, flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    flags += ["--init_heads_from", str(trained_heads), "--output_dir", str(tmp_path)]
    trainer, record = build_trainer(*parse_arguments([*flags, "--objective", *objective.split(), "--max_steps", "1"]))
    found, made = trainer.model.state_dict(), load_file(trained_heads / "model.safetensors")
    parts = ("dap", *taken.split(" and "))
    assert found.keys() == {name for name in made if name.startswith(parts)}  # the target vocabulary is among them
    assert all(torch.equal(value, made[name]) for name, value in found.items())
    assert f" {taken} taken from {trained_heads}" in caplog.text
    assert "not the one that the heads were trained around" not in caplog.text
    assert record["init_heads_from"] == str(trained_heads)


def test_of_other_objectives_those_heads_are_taken_that_both_have(
    flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    other, heads = tmp_path / "other", tmp_path / "heads"
    run([*flags, "--objective", "tr+tlm", "--projection", "mlp", "--max_steps", "1", "--output_dir", str(heads)])
    options = ["--init_heads_from", str(heads), "--restrict_target_vocabulary", "false", "--output_dir", str(other)]
    made = load_file(heads / "model.safetensors")
    for more, taken in (
        (["--objective", "tr+rtl", "--prediction_bias", "frequencies"], {"prediction_head"}),
        (["--objective", "tr", "--projection", "mlp"], {"projection"}),
        (["--objective", "tr+tlm", "--projection", "mlp"], {"prediction_head", "projection"}),
    ):
        trainer = built([*flags, *options, *more])
        found = trainer.model.state_dict()
        parts = {name: name.split(".")[0] for name in found if not name.startswith("dap.")}
        assert taken <= {*parts.values()}
        assert all(torch.equal(found[name], made[name]) for name, part in parts.items() if part in taken)


def test_both_directions_have_the_languages_of_the_data_or_of_the_heads(
    flags: list[str], bitext_dir: Path, tmp_path: Path
) -> None:
    both = [*flags, "--rtl_direction", "both", "--max_steps", "1"]
    run([*both, "--output_dir", str(tmp_path / "heads")])
    one = [*both[:3], str(bitext_dir / "fr-en.tsv"), *both[4:], "--init_heads_from", str(tmp_path / "heads")]
    trainer = built([*one, "--output_dir", str(tmp_path / "one")])
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["rtl_languages"] == trainer.model.config.rtl_languages == ["de", "fr", "sw"]
    assert trainer.data_collator.languages == ["de", "fr", "sw"]
    run([*both[:3], str(bitext_dir / "de-en.tsv"), *both[4:], "--output_dir", str(tmp_path / "german")])
    with pytest.raises(ValueError, match="rtl_direction='both' on de, the text has fr sw too"):
        built([*both, "--model_name_or_path", str(tmp_path / "german"), "--output_dir", str(tmp_path / "next")])


def test_heads_that_do_not_fit_are_refused(
    flags: list[str], trained_heads: Path, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    file, small, run_of = tmp_path / "ids.json", tmp_path / "small", f"--init_heads_from {trained_heads}: "
    size = len(AutoTokenizer.from_pretrained(tiny_bert_dir))
    file.write_text(json.dumps({"tokenizer": "tiny", "vocab_size": size, "target_token_ids": [2, 7, 9]}))
    shape = tiny_config("bert", size).to_dict() | {"intermediate_size": 20}
    save(small, BertModel(BertConfig(**shape)), AutoTokenizer.from_pretrained(tiny_bert_dir))
    theirs = len(load_file(trained_heads / "model.safetensors")["prediction_head.token_ids"])
    for more, message in (
        (["--rtl_layers", "1"], run_of + "rtl_layers=2 there, but 1 here: give --rtl_layers 2"),
        (["--rtl_direction", "both"], run_of + "rtl_direction='source-to-target' there, but 'both' here"),
        (["--objective", "tr"], run_of + r"objective 'rtl' there has no head that objective 'tr' here has"),
        (["--target_vocabulary_file", str(file)], f"{theirs}, these target_vocab_size=3: leave --target_vocabulary"),
        (["--restrict_target_vocabulary", "false"], f"target_vocab_size={theirs}, these the whole vocabulary: leave"),
        (["--model_name_or_path", str(small)], r"has shape \(\d+,.* there, \(20,.* here: give the encoder"),
        (["--init_heads_from", str(tiny_bert_dir)], "a plain 'bert' checkpoint: train heads by configs/"),
        (["--init_heads_from", "nowhere"], "^the configuration of nowhere cannot be loaded "),
    ):
        given = [*flags, "--init_heads_from", str(trained_heads), *more, "--output_dir", str(tmp_path / "out")]
        with pytest.raises(UserError, match=message):
            built(given)


def test_heads_of_another_encoder_come_with_a_warning(
    flags: list[str], trained_heads: Path, tiny_bert_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = BertModel(tiny_config("bert", len(AutoTokenizer.from_pretrained(tiny_bert_dir))))
    save(tmp_path / "other", other, AutoTokenizer.from_pretrained(tiny_bert_dir))
    flags += ["--init_heads_from", str(trained_heads), "--model_name_or_path", str(tmp_path / "other")]
    built([*flags, "--output_dir", str(tmp_path / "out")])
    assert "the encoder is not the one that the heads were trained around" in caplog.text


def test_a_run_whose_head_hardly_reads_the_source_says_so_once(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = ["--max_steps", "2", "--eval_strategy", "steps", "--eval_steps", "1"]
    run([*flags, *steps, "--output_dir", str(tmp_path / "out")])
    nats = results(tmp_path / "out")["eval_rtl_source_nats"]
    (said,) = (line for line in caplog.messages if "hardly reads the source" in line)
    assert f"({nats:.2f} nats a token)" in said
    assert len([line for line in state(tmp_path / "out")["log_history"] if "eval_rtl_source_nats_rho25" in line]) == 2
    caplog.clear()
    run([*flags, *steps, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    assert "hardly reads" not in caplog.text
    assert not [name for name in results(tmp_path / "tr") if "rtl" in name]


def test_early_stopping_ends_a_run_that_does_not_improve(flags: list[str], tmp_path: Path) -> None:
    schedule = ["--max_steps", "100", "--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "best"]
    more = ["--load_best_model_at_end", "--early_stopping_patience", "2", "--objective", "tr"]
    run([*flags, *schedule, *more, "--learning_rate", "0", "--output_dir", str(tmp_path / "out")])
    assert state(tmp_path / "out")["global_step"] == 3


def test_a_prepared_target_vocabulary_is_what_rtl_predicts(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    flags += ["--target_vocabulary_file", str(file), "--max_steps", "1"]
    size = len(AutoTokenizer.from_pretrained(flags[1]))
    file.write_text(json.dumps({"tokenizer": "tiny", "vocab_size": size, "target_token_ids": [9, 2, 7, 9]}))
    run([*flags, "--streaming", "--language_mix", "temperature", "--output_dir", str(tmp_path / "out")])
    assert "eval_sw-en_accuracy" in results(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert [saved[name].tolist() for name in saved if name.endswith(".token_ids")] == [[2, 7, 9]]
    with pytest.raises(ValueError, match="out has its target vocabulary already"):
        run([flags[0], str(tmp_path / "out"), *flags[2:], "--output_dir", str(tmp_path / "next")])
    with pytest.raises(ValueError, match="ids.json does nothing with objective='tr'"):
        run([*flags, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    file.write_text(json.dumps({"tokenizer": "other", "vocab_size": size + 5, "target_token_ids": [2]}))
    with pytest.raises(ValueError, match=f"for the {size + 5} ids of other, the tokenizer here has {size}"):
        run([*flags, "--output_dir", str(tmp_path / "other")])


@pytest.mark.parametrize("restricted", ["true", "false"])
def test_the_bias_of_a_new_head_starts_from_token_frequencies(
    restricted: str, flags: list[str], tmp_path: Path
) -> None:
    flags += ["--prediction_bias", "frequencies", "--restrict_target_vocabulary", restricted]
    arguments = parse_arguments([*flags, "--output_dir", str(tmp_path)])
    trainer, _ = build_trainer(*arguments)
    train, _ = build_datasets(*arguments[1:], trainer.processing_class)
    head = trainer.model.prediction_head
    ids = head.token_ids.tolist() if restricted == "true" else range(len(trainer.processing_class))
    targets = [token for part in train.values() for row in part["target_input_ids"] for token in row[1:]]
    counts = torch.tensor([targets.count(token) + 1.0 for token in ids], dtype=torch.float64)
    torch.testing.assert_close(head.bias, (counts / counts.sum()).log().float(), check_dtype=False)
    assert torch.isfinite(head.bias).all()


def test_a_bias_from_frequencies_is_refused_or_left_out_with_a_word(
    flags: list[str], scratch: tuple[Path, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [*flags, "--output_dir", str(tmp_path), "--prediction_bias"]
    for more, message in (
        (["frequencies", "--objective", "tr"], "does nothing, as objective 'tr' predicts no tokens"),
        (["frequencies", "--streaming", "--language_mix", "uniform"], "does nothing, as a stream cannot be counted"),
        (["uniform"], "prediction_bias='uniform': give 'zeros' or 'frequencies'"),
    ):
        with pytest.raises(ValueError, match=message):
            built([*asked, *more])
    with pytest.raises(ValueError, match="prediction_bias='uniform': give"):
        built([*asked, "uniform", "--model_name_or_path", str(scratch[0] / "mlm")])
    modeling_dap.logger.addHandler(caplog.handler)
    made = load_file(scratch[0] / "mlm" / "model.safetensors")["prediction_head.bias"]
    for objective, word in (("tr+tlm", "has a masked-LM head: its bias is taken"), ("mlm", "its bias stays")):
        start = ["--model_name_or_path", str(scratch[0] / "mlm"), "--objective", objective, "--pooling", "mean"]
        trainer = built([*asked, "frequencies", *start])
        assert torch.equal(trainer.model.prediction_head.bias, made)
        assert word in caplog.text


def test_dap_checkpoints_go_on_with_their_weights_and_keep_what_these_are_made_for(
    flags: list[str], tmp_path: Path
) -> None:
    run([*flags, "--max_steps", "1", "--output_dir", str(tmp_path / "first")])
    flags[1] = str(tmp_path / "first")
    changed = ["--max_steps", "1", "--tr_temperature", "0.1", "--tr_bidirectional"]
    with pytest.raises(ValueError, match="first was trained with objective='tr\\+rtl', not 'tr'"):
        run([*flags, *changed, "--objective", "tr", "--output_dir", str(tmp_path / "second")])
    run([*flags, *changed, "--learning_rate", "0", "--output_dir", str(tmp_path / "second")])
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (config["objective"], config["tr_temperature"], config["tr_bidirectional"]) == ("tr+rtl", 0.1, True)


def test_english_of_validation_data_is_not_trained_on(flags: list[str], tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    dev.mkdir()
    pairs = synthetic_pairs("de")[:30]
    (dev / "sw-en.tsv").write_text("".join(f"{source}\t{target}.\n" for source, target in pairs))
    model, data, training = parse_arguments([*flags, "--validation_data", str(dev), "--output_dir", str(tmp_path)])
    train, held = build_datasets(data, training, AutoTokenizer.from_pretrained(model.model_name_or_path))
    assert {language: len(part) for language, part in train.items()} == {"de": 170, "fr": 200, "sw": 200}
    assert len(held["sw"]) == 30


# ----------------------------------------------------------------------------------------- from scratch


@pytest.fixture(scope="module")
def scratch(
    tmp_path_factory: pytest.TempPathFactory, bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> tuple[Path, list[str]]:
    """An encoder made by masked language modelling, and the flags that made it."""
    folder = tmp_path_factory.mktemp("scratch")
    tiny_config("bert").save_pretrained(folder / "shape")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    flags = ["--tokenizer_name", str(folder / "tokenizer"), "--train_data", str(bitext_dir), "--max_seq_length", "24"]
    flags += ["--per_device_train_batch_size", "32", "--dev_pairs", "20", "--report_to", "none", "--use_cpu"]
    flags += ["--logging_steps", "10", "--learning_rate", "5e-3", "--max_steps", "50", "--disable_tqdm", "true"]
    flags += ["--config_name", str(folder / "shape" / "config.json"), "--save_strategy", "no"]
    run([*flags, "--objective", "mlm", "--pooling", "mean", "--output_dir", str(folder / "mlm")])
    return folder, flags


def changed_tokenizer(scratch: tuple[Path, list[str]], folder: Path, **tokens: str | None) -> PreTrainedTokenizerFast:
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
    start = [*without(flags, "--config_name", "--tokenizer_name"), "--model_name_or_path", str(folder / "mlm")]
    start += ["--objective", "tr+rtl", "--rtl_layers", "2", "--restrict_target_vocabulary", restricted]
    trainer = built([*start, "--output_dir", str(tmp_path)])
    found, made = trainer.model.state_dict(), load_file(folder / "mlm" / "model.safetensors")
    assert (trainer.model.config.objective, trainer.model.config.pooling) == ("tr+rtl", "mean")
    ids = found.pop("prediction_head.token_ids", torch.arange(250))
    assert (len(ids) < 250) == (restricted == "true")
    torch.testing.assert_close(found["prediction_head.bias"], made.pop("prediction_head.bias")[ids], rtol=0, atol=0)
    assert all(torch.equal(found[name], value) for name, value in made.items())  # encoder and prediction head
    blocks = {name: value for name, value in found.items() if name.startswith("rtl_head.")}
    for name, value in blocks.items():
        layer, rest = name.removeprefix("rtl_head.blocks.encoder.layer.").split(".", 1)
        assert torch.equal(value, made[f"dap.encoder.encoder.layer.{int(layer) + 1}.{rest}"])
    assert blocks


def test_masked_language_modelling_goes_on(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, flags = scratch
    more = [*without(flags, "--config_name", "--max_steps"), "--model_name_or_path", str(folder / "mlm")]
    more += ["--max_steps", "1", "--mlm_probability", "0.3", "--output_dir", str(tmp_path / "more")]
    run([*more, "--learning_rate", "0"])
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert (config["objective"], config["mlm_probability"], config["pooling"]) == ("mlm", 0.3, "mean")
    first, second = (load_file(path / "model.safetensors") for path in (folder / "mlm", tmp_path / "more"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_masks_are_of_the_tokenizer_that_reads_the_text(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, flags = scratch
    tokenizer = changed_tokenizer(scratch, tmp_path / "other", mask_token="a")
    flags = [*without(flags, "--config_name", "--tokenizer_name"), "--model_name_or_path", str(folder / "mlm")]
    flags += ["--tokenizer_name", str(tmp_path / "other"), "--output_dir", str(tmp_path / "out")]
    trainer = built([*flags, "--objective", "tr+rtl", "--pooling", "mean"])
    assert trainer.model.config.mask_token_id == tokenizer.mask_token_id != 4
    with pytest.raises(ValueError, match=f"mlm was trained with mask token 4, .*other has {tokenizer.mask_token_id}"):
        built([*flags, "--objective", "mlm", "--pooling", "mean"])


def test_the_token_that_ends_a_sentence_is_not_counted_for_masks(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    changed_tokenizer(scratch, tmp_path / "other", sep_token=None)
    flags = [*scratch[1], "--objective", "mlm", "--prediction_bias", "frequencies", "--output_dir", str(tmp_path)]
    with_sep, without_sep = (
        built([*flags, "--tokenizer_name", str(name)]).model.prediction_head.bias
        for name in (scratch[0] / "tokenizer", tmp_path / "other")
    )
    assert torch.equal(with_sep, without_sep)
    assert with_sep[2] == with_sep.min() < with_sep.max()


def test_another_encoder_of_the_shape_of_one_made_here(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, flags = scratch
    flags = [*without(flags, "--config_name"), "--config_name", str(folder / "mlm"), "--output_dir", str(tmp_path)]
    trainer = built([*flags, "--objective", "mlm", "--per_device_train_batch_size", "1"])
    made = load_file(folder / "mlm" / "model.safetensors")
    found = trainer.model.state_dict()
    assert {name: value.shape for name, value in found.items()} == {name: made[name].shape for name in found}
    name = "dap.encoder.embeddings.word_embeddings.weight"
    assert not torch.equal(found[name], made[name])


def test_dual_alignment_starts_from_scratch_too(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    trainer = built([*scratch[1], "--output_dir", str(tmp_path)])
    config = trainer.model.config
    assert (config.objective, config.mask_token_id, config.encoder_config.pad_token_id) == ("tr+rtl", 4, 1)
    assert config.target_vocab_size == len(trainer.model.prediction_head.token_ids) < 250
    assert trainer.model.prediction_head.token_ids[0] > 0  # CLS is not predicted


def test_what_to_start_from_is_given_once(scratch: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, flags = scratch
    out = ["--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="--model_name_or_path and --config_name say the same"):
        parse_arguments([*flags, *out, "--model_name_or_path", str(folder / "mlm")])
    with pytest.raises(ValueError, match="give --model_name_or_path, or --config_name to begin from scratch"):
        parse_arguments([*without(flags, "--config_name"), *out])
    recipe = str(REPOSITORY / "configs" / "mlm.yaml")
    model, _, _ = parse_arguments([recipe, "--model_name_or_path", "a", *out])
    assert (model.model_name_or_path, model.config_name) == ("a", None)


def test_configurations_that_do_not_fit_the_tokenizer_are_refused(
    scratch: tuple[Path, list[str]], tmp_path: Path
) -> None:
    flags = [*without(scratch[1], "--config_name", "--tokenizer_name"), "--output_dir", str(tmp_path / "out")]
    small, shape, whole = (
        str(folder) for folder in (tmp_path / "small", scratch[0] / "shape", scratch[0] / "tokenizer")
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


# ----------------------------------------------------------------------------------------- bad input


def test_the_log_says_what_the_run_is(flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for text, named in (
        (flags[3], "on 3 languages, 540 pairs"),
        (f"{flags[3]}/de-en.tsv", "on 1 language, 180 pairs"),
    ):
        built([*flags, "--train_data", text, "--output_dir", str(tmp_path / "out")])
        assert named in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--freeze_encoder --objective tr", "--freeze_encoder is for heads, but objective 'tr' has none: leave it"),
        ("--per_device_train_batch_size 1024", "540 training pairs do not fill one batch of 1024"),
        ("--per_device_train_batch_size 1", "a batch of 1 pair has no negatives"),
        ("--dev_pairs 0 --eval_strategy steps", "eval_strategy='steps', but there are no dev pairs"),
        ("--early_stopping_patience 2", "early_stopping_patience=2 needs evaluations"),
        ("--max_seq_length 90 --train_data nowhere", "max_seq_length=90 is above the encoder's 80 positions"),
        ("--train_data nowhere", "nowhere"),
        ("--model_name_or_path nowhere", "^the configuration of nowhere cannot be loaded "),
        ("--model_name_or_path dense", "of the modules Transformer, Pooling, Dense, which cannot be trained"),
        ("--tokenizer_name nowhere", "^the tokenizer of nowhere cannot be loaded "),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    more: str, message: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [
        {"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Dense")
    ]
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, FileNotFoundError), match=message):
        run([*flags, *more.split(), "--output_dir", "out"])


def test_metrics_that_cannot_choose_the_best_model_are_refused(flags: list[str], tmp_path: Path) -> None:
    best = ["--eval_strategy", "steps", "--save_strategy", "steps", "--load_best_model_at_end", "--max_steps", "2"]
    flags = [*flags, *best, "--save_steps", "1", "--eval_steps", "1", "--output_dir", str(tmp_path / "out")]
    metric = "--metric_for_best_model"
    for more, message in (
        ([metric, "nope"], "='nope' is in no evaluation: give eval_mean_accuracy, eval_rtl_loss, "),
        ([metric, "eval_rtl_loss", "--objective", "tr"], "metric_for_best_model='eval_rtl_loss' is in no evaluation"),
        (["--freeze_encoder"], "'eval_mean_accuracy' stays as it is under --freeze_encoder: give eval_rtl_loss"),
    ):
        with pytest.raises(UserError, match=message):
            run([*flags, *more])
    run([*flags, "--freeze_encoder", metric, "eval_rtl_loss", "--head_learning_rate", "1e-2"])
    losses = [line["eval_rtl_loss"] for line in state(tmp_path / "out")["log_history"] if "eval_rtl_loss" in line]
    assert state(tmp_path / "out")["best_metric"] == min(losses)


def library_folder(folder: Path, encoder_dir: Path, **settings: object) -> Path:
    """A sentence-transformers folder with the encoder in a folder of its own, as earlier versions wrote it."""
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    encoder = SentenceEncoder(BertModel.from_pretrained(encoder_dir), tokenizer, **settings)
    write_modules(encoder, folder, normalize=True, prompts={"other": "lo: "})
    shutil.copytree(encoder_dir, folder / "0_Transformer")
    shutil.move(folder / "sentence_bert_config.json", folder / "0_Transformer")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0] | {"path": "0_Transformer"}, *modules[1:]]))
    return folder


def test_a_sentence_transformers_folder_gives_its_settings_and_the_model_keeps_them(
    flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    flags[1] = str(library_folder(tmp_path / "start", tiny_bert_dir, pooling="mean", prefix="ka: ", max_seq_length=9))
    given = [*flags[:4], *flags[6:], "--objective", "tr", "--output_dir", str(tmp_path / "out")]
    trainer, record = build_trainer(*parse_arguments(given))
    assert (record["pooling"], record["prefix"], record["max_seq_length"]) == ("mean", "ka: ", 9)
    tokenizer, row = trainer.processing_class, trainer.train_dataset[7]
    language, number = row["pair_id"].split(":")
    for side, text in zip(("source", "target"), synthetic_pairs(language)[int(number)], strict=True):
        assert row[f"{side}_input_ids"] == tokenizer("ka: " + text, truncation=True, max_length=9)["input_ids"]
    encoders = [SentenceEncoder(trainer.model.dap, tokenizer, "mean", prefix, 9) for prefix in ("ka: ", "")]
    sides = trainer.dev_bitext["de"]
    accuracies = [retrieval_accuracy(*map(encoder.encode, sides)) for encoder in encoders]
    found = trainer.evaluate()
    assert (found["eval_de-en_accuracy"], found["eval_en-de_accuracy"]) == tuple(accuracies[0]) != tuple(accuracies[1])
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--streaming", "--num_train_epochs", "1"], "--streaming reads text again and again.*give --max_steps"),
        (["--save_strategy", "best"], "metric_for_best_model='eval_foo' is in no evaluation"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "metric_for_best_model='eval_foo' is in no evaluation"),
    ],
)
def test_what_would_end_in_the_midst_of_a_run_is_refused(
    more: list[str], message: str, flags: list[str], tmp_path: Path
) -> None:
    options = ["--eval_strategy", "steps", "--eval_steps", "1", "--metric_for_best_model", "eval_foo"]
    with pytest.raises(UserError, match=message):
        run([*flags, *options, *more, "--output_dir", str(tmp_path)])


def test_other_text_is_not_taken_for_the_dev_pairs(flags: list[str], tmp_path: Path) -> None:
    trainer = built([*flags, "--output_dir", str(tmp_path)])
    for other in ([], {}, "de"):
        with pytest.raises(UserError, match="nothing to evaluate on: pass sources and targets by language"):
            trainer.evaluate(other)
