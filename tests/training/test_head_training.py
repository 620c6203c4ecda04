"""Heads of random weights are trained before the joint training, with the encoder unchanged."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, run, save, state, tiny_config
from safetensors.torch import load_file
from tiny_models import cipher
from transformers import BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from dap_transformers.errors import UserError
from dap_transformers.files import read_json
from dap_transformers.training import heads as head_training
from dap_transformers.training.head_reading import HARDLY
from dap_transformers.training.heads import HEADS_FILE, RESULTS_FILE


@pytest.fixture(scope="module")
def encoder(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A BERT whose random weights are large enough to tell words apart."""
    config = tiny_config("bert", len(tiny_tokenizer))
    config.num_hidden_layers = 1
    config.initializer_range = 0.1
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False)
    return save(tmp_path_factory.mktemp("encoder"), model, tiny_tokenizer)


def command(encoder: Path, folder: Path, is_true: bool = True) -> list[str]:
    """Return a training without joint steps that change a weight, on a cipher of two letters."""
    text = folder / "de-en.tsv"
    lines = [f"{source}\t{target}\n" for source, target in zip(*cipher(600, 0, is_true))]
    text.write_text("".join(lines))
    options = (
        "--objective tr+bow --rtl_layers 1 --max_seq_length 16 --dev_pairs 50 --max_steps 1 "
        "--per_device_train_batch_size 8 --learning_rate 0 --report_to none --disable_tqdm true "
        "--head_pairs 450 --pooling mean"
    )
    return ["--model_name_or_path", str(encoder), "--train_data", str(text), *options.split()]


@pytest.mark.parametrize("is_true", [True, False])
def test_heads_learn_from_the_source_and_the_encoder_stays_the_same(
    is_true: bool, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_training, "LEARNING_RATE", 1e-2)  # tiny heads learn faster
    out = tmp_path / "out"
    heads = ["rtl", "bow"] if is_true else ["bow"]
    objective = "+".join(["tr", *heads])
    more = ["--objective", objective, "--head_steps", "60", "--output_dir", str(out)]
    run([*command(encoder, tmp_path, is_true), *more])
    found = read_json(out / RESULTS_FILE)
    assert (found["pairs"], found["steps"]) == (450, 60)
    for head in heads:
        assert abs(found[f"{head}_source_nats_before"]) < HARDLY
        after = found[f"{head}_source_nats_after"]
        assert after > 1.5 * HARDLY if is_true else after < HARDLY, (head, after)

    # The joint training begins with these heads and the encoder's own weights.
    evaluated = read_json(out / "eval_results.json")
    now = evaluated["eval_bow_source_nats"]
    assert now == pytest.approx(found["bow_source_nats_after"], abs=0.03)
    start = load_file(encoder / "model.safetensors")
    saved = load_file(out / "model.safetensors")
    assert all(torch.equal(saved[f"dap.encoder.{name}"], start[name]) for name in start)
    assert not (out / HEADS_FILE).exists()


def test_a_loss_of_the_heads_that_is_not_finite_stops_the_run(
    encoder: Path, tmp_path: Path
) -> None:
    model = BertModel.from_pretrained(encoder, add_pooling_layer=False)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias.fill_(float("nan"))
    model.save_pretrained(shutil.copytree(encoder, tmp_path / "nan"))
    out = tmp_path / "out"
    with pytest.raises(FloatingPointError, match="loss of the heads is nan at step 2 of"):
        run([*command(tmp_path / "nan", tmp_path), "--head_steps", "2", "--output_dir", str(out)])
    assert not (out / HEADS_FILE).exists()


def test_a_run_that_is_started_again_reuses_its_trained_heads(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*command(encoder, tmp_path), "--learning_rate", "1e-3", "--head_steps", "4"]
    whole = tmp_path / "whole"
    run([*flags, "--output_dir", str(whole)])

    def fail(*_: object) -> None:
        raise InterruptedError

    # Stopped between the two stages, once with other arguments.
    stopped = [*flags, "--output_dir", str(tmp_path / "stopped")]
    for steps in ("3", "4"):
        with monkeypatch.context() as patched:
            patched.setattr("dap_transformers.training.run.train_to_end", fail)
            with pytest.raises(InterruptedError):
                run([*stopped, "--head_steps", steps])
        assert read_json(tmp_path / "stopped" / RESULTS_FILE)["steps"] == int(steps)

    monkeypatch.setattr(head_training, "train_on_kept", fail)
    run(stopped)
    first = load_file(whole / "model.safetensors")
    second = load_file(tmp_path / "stopped" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_stream_gives_its_first_pairs(encoder: Path, tmp_path: Path) -> None:
    more = [
        "--streaming",
        "--shuffle_buffer",
        "0",
        "--head_steps",
        "2",
        "--head_pairs",
        "30",
        "--rtl_ratio",
        "0.5",
    ]
    more += ["--objective", "tr+rtl", "--rtl_direction", "both"]
    run([*command(encoder, tmp_path), *more, "--output_dir", str(tmp_path / "out")])
    assert read_json(tmp_path / "out" / RESULTS_FILE)["pairs"] == 30


def test_the_recipe_for_fine_tuning_needs_only_model_data_and_output(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    recipe = [str(REPOSITORY / "dap_transformers" / "configs" / "finetune.yaml")]
    recipe += ["--model_name_or_path", str(tiny_bert_dir), "--train_data", str(bitext_dir)]
    recipe += ["--max_steps", "1", "--output_dir", str(tmp_path)]
    run([*recipe, "--report_to", "none", "--disable_tqdm", "true"])
    history = state(tmp_path)["log_history"]
    evaluated = [line["step"] for line in history if "eval_mean_pool_accuracy" in line]
    assert evaluated == [0, 1]


def test_only_missing_heads_are_trained(
    encoder: Path, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    flags = command(encoder, tmp_path)
    has_head = save(tmp_path / "mlm", BertForMaskedLM(tiny_config("bert", 250)), tiny_tokenizer)
    first = tmp_path / "off"
    for name, more in (
        ("off", ["--head_steps", "0"]),
        ("frozen", ["--freeze_encoder"]),
        ("tr", ["--objective", "tr"]),
        ("has-head", ["--model_name_or_path", str(has_head)]),
        ("given", ["--init_heads_from", str(first)]),
        ("continued", ["--model_name_or_path", str(first)]),
    ):
        run([*flags, *more, "--output_dir", str(tmp_path / name)])
        assert not (tmp_path / name / RESULTS_FILE).exists(), name
        assert len(state(tmp_path / name)["log_history"]) > 0

    for name in ("head_steps", "head_pairs"):
        with pytest.raises(UserError, match=f"{name}=-1"):
            run([*flags, f"--{name}", "-1", "--output_dir", str(tmp_path / "bad")])
