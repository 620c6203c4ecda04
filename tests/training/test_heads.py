"""Heads: trained with a frozen encoder, copied from another training, and what they predict."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, built, results, save, state, tiny_config
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

from dap_transformers.errors import UserError
from dap_transformers.training.arguments import parse_arguments
from dap_transformers.training.resume import FINISHED
from train_dap import build_datasets, build_trainer, run


@pytest.mark.parametrize("more", ["", "--mini_batch_size 6 --gradient_accumulation_steps 2"])
def test_a_frozen_encoder_stays_the_same_and_all_heads_learn(
    more: str, flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    options = (
        f"--freeze_encoder --prediction_bias frequencies --head_learning_rate 1e-2 {more} "
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
        ("--objective tr+bow", ["prediction_head"]),
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
        ("--objective tr+rtl --prediction_bias frequencies", {"prediction_head"}),
        ("--objective tr --projection mlp", {"projection"}),
        ("--objective tr+tlm --projection mlp", {"prediction_head", "projection"}),
    ):
        found = built([*command, *more.split()]).model.state_dict()
        copied = {name: value for name, value in found.items() if name.split(".")[0] in taken}
        assert {name.split(".")[0] for name in copied} == taken
        assert all(torch.equal(value, made[name]) for name, value in copied.items())


def test_heads_of_bag_of_words_go_where_bag_of_words_uses_them(
    flags: list[str], tmp_path: Path
) -> None:
    made = {}
    for objective in ("bow", "tr+rtl+bow"):
        folder = tmp_path / objective
        steps = ["--max_steps", "1", "--freeze_encoder"]
        run([*flags, *steps, "--objective", objective, "--output_dir", str(folder)])
        made[objective] = load_file(folder / "model.safetensors")

    # BOW has a transform of its own only beside RTL.
    transform = ("dense.weight", "dense.bias", "norm.weight", "norm.bias")
    cases = [("bow", "tr+rtl+bow", "prediction_head", "bow_transform")]
    cases.append(("tr+rtl+bow", "tr+bow", "bow_transform", "prediction_head"))
    for start, objective, theirs, own in cases:
        more = ["--init_heads_from", str(tmp_path / start), "--objective", objective]
        model = built([*flags, *more, "--output_dir", str(tmp_path / "next")]).model
        found = model.state_dict()
        for part in transform:
            assert torch.equal(found[f"{own}.{part}"], made[start][f"{theirs}.{part}"])
        bias = "prediction_head.bias"
        assert torch.equal(found[bias], made[start][bias])
        # The transform of RTL still has to learn.
        assert model.has_random_head == (objective == "tr+rtl+bow")
    assert not torch.equal(
        made["bow"]["prediction_head.dense.weight"],
        made["tr+rtl+bow"]["bow_transform.dense.weight"],
    )


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


def write_ids(path: Path, size: int, ids: list[int]) -> Path:
    """Write a target vocabulary as `prepare-data` does, for a tokenizer of this size."""
    content = {"tokenizer": "tiny", "vocab_size": size, "target_token_ids": ids}
    path.write_text(json.dumps(content))
    return path


def test_heads_that_do_not_fit_are_refused(
    flags: list[str], trained_heads: Path, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_dir)
    file = write_ids(tmp_path / "ids.json", len(tokenizer), [2, 7, 9])
    small = tmp_path / "small"
    shape = tiny_config("bert", len(tokenizer)).to_dict() | {"intermediate_size": 20}
    save(small, BertModel(BertConfig(**shape)), tokenizer)
    command = [*flags, "--init_heads_from", str(trained_heads)]
    command += ["--output_dir", str(tmp_path / "out")]
    for more, named in (
        ("--rtl_layers 1", f"{trained_heads}: rtl_layers=2 there, but 1 here"),
        ("--rtl_direction both", "rtl_direction='source-to-target' there, but 'both' here"),
        ("--objective tr", "objective 'rtl' there has no head that objective 'tr' here has"),
        ("--objective bow --rtl_tied false", "rtl_tied=True there, but False here"),
        (f"--target_vocabulary_file {file}", "target_vocab_size=3"),
        ("--restrict_target_vocabulary false", "the whole vocabulary"),
        (f"--model_name_or_path {small}", r"has shape \(\d+,.* there, \(20,.* here"),
        (f"--init_heads_from {tiny_bert_dir}", "plain 'bert' checkpoint"),
        ("--init_heads_from nowhere", "configuration of nowhere"),
    ):
        with pytest.raises(UserError, match=named):
            built([*command, *more.split()])


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
    (said,) = (line for line in caplog.messages if "hardly uses the source" in line)
    assert f"({nats:.2f} nats per token)" in said
    history = state(tmp_path / "out")["log_history"]
    # The evaluation during the training did not warn.
    assert len([line for line in history if "eval_rtl_source_nats_rho25" in line]) == 1

    # Without a head there is nothing to warn of.
    caplog.clear()
    run([*flags, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    assert "hardly uses" not in caplog.text
    assert not [name for name in results(tmp_path / "tr") if "rtl" in name]


# What they predict


def test_rtl_predicts_only_a_prepared_target_vocabulary(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    out = tmp_path / "out"
    size = len(AutoTokenizer.from_pretrained(flags[1]))
    flags += ["--target_vocabulary_file", str(file), "--max_steps", "1"]

    # The file also works for a stream, whose vocabulary is unknown.
    write_ids(file, size, [9, 2, 7, 9])
    streamed = ["--streaming", "--language_mix", "temperature", "--output_dir", str(out)]
    run([*flags, *streamed])
    assert "eval_sw-en_accuracy" in results(out)
    saved = load_file(out / "model.safetensors")
    assert saved["prediction_head.token_ids"].tolist() == [2, 7, 9]

    # The vocabulary of a trained model cannot change.
    with pytest.raises(ValueError, match="out has its target vocabulary already"):
        run([*flags, "--model_name_or_path", str(out), "--output_dir", str(tmp_path / "next")])
    with pytest.raises(ValueError, match="ids.json does nothing with objective='tr'"):
        run([*flags, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"ids.json, line 1: not UTF-8; .*; give a file that"):
        run([*flags, "--output_dir", str(tmp_path / "other")])
    write_ids(file, size + 5, [2])
    with pytest.raises(ValueError, match=f"for the {size + 5} ids of tiny, .* has {size}"):
        run([*flags, "--output_dir", str(tmp_path / "other")])


@pytest.mark.parametrize("restricted", ["true", "false"])
def test_the_bias_of_a_new_head_can_start_from_token_frequencies(
    restricted: str, flags: list[str], tmp_path: Path
) -> None:
    flags += ["--prediction_bias", "frequencies", "--restrict_target_vocabulary", restricted]
    arguments = parse_arguments([*flags, "--output_dir", str(tmp_path)])
    trainer, _ = build_trainer(*arguments)
    train, *_ = build_datasets(*arguments[1:], trainer.processing_class)
    head = trainer.model.prediction_head
    ids = range(len(trainer.processing_class))
    if restricted == "true":
        ids = head.token_ids.tolist()

    targets = []
    for part in train.values():
        for row in part["target_input_ids"]:
            targets += row[1:]
    counts = torch.tensor([targets.count(token) + 1.0 for token in ids], dtype=torch.float64)
    expected = (counts / counts.sum()).log().float()
    torch.testing.assert_close(head.bias, expected, check_dtype=False)
    assert torch.isfinite(head.bias).all()
