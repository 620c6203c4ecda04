"""Heads: trained alone, taken from another training, and what they predict."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, built, results, save, state, tiny_config
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

from dap.errors import UserError
from dap.training.resuming import FINISHED
from dap.training.training_arguments import parse_arguments
from train_dap import build_datasets, build_trainer, run


@pytest.mark.parametrize(
    "more", [[], ["--mini_batch_size", "6", "--gradient_accumulation_steps", "2"]]
)
def test_heads_learn_alone_and_the_encoder_stays_what_it_was(
    more: list[str], flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    options = [
        "--freeze_encoder",
        "--prediction_bias",
        "frequencies",
        "--max_steps",
        "4",
        "--rtl_ratio",
        "0.7",
        *more,
    ]
    options += ["--head_learning_rate", "1e-2"]
    run(
        [
            *flags,
            *options,
            "--save_strategy",
            "steps",
            "--save_steps",
            "2",
            "--output_dir",
            str(tmp_path),
        ]
    )
    learned, start = (
        load_file(tmp_path / "model.safetensors"),
        load_file(tiny_bert_dir / "model.safetensors"),
    )
    encoder = {
        name.removeprefix("dap.encoder."): value
        for name, value in learned.items()
        if name.startswith("dap.")
    }
    assert encoder.keys() == start.keys()
    assert all(torch.equal(encoder[name], start[name]) for name in start)
    heads = {name for name in learned if not name.startswith("dap.")} - {
        "prediction_head.token_ids"
    }
    first = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert not [name for name in heads if torch.equal(first[name], learned[name])]
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(
        AutoTokenizer.from_pretrained(tiny_bert_dir)
    )
    (tmp_path / FINISHED).unlink()
    shutil.rmtree(tmp_path / "checkpoint-4")
    run(
        [
            *flags,
            *options,
            "--save_strategy",
            "steps",
            "--save_steps",
            "2",
            "--output_dir",
            str(tmp_path),
        ]
    )
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(resumed[name], learned[name]) for name in learned)


@pytest.fixture(scope="module")
def trained_heads(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What `configs/head.yaml` makes, of two languages of three."""
    folder, text = (
        tmp_path_factory.mktemp("heads"),
        [str(bitext_dir / f"{name}-en.tsv") for name in ("de", "fr")],
    )
    steps = [
        "--max_steps",
        "2",
        "--total_train_batch_size",
        "16",
        "--warmup_steps",
        "0",
        "--report_to",
        "none",
    ]
    recipe = [str(REPOSITORY / "configs" / "head.yaml"), "--model_name_or_path", str(tiny_bert_dir)]
    run(
        [
            *recipe,
            "--train_data",
            *text,
            *steps,
            "--dev_pairs",
            "5",
            "--use_cpu",
            "--output_dir",
            str(folder),
        ]
    )
    return folder


@pytest.mark.parametrize(
    ("objective", "taken"),
    [
        ("tr+rtl", "rtl_head and prediction_head"),
        (
            "tr+rtl --restrict_target_vocabulary true --freeze_encoder",
            "rtl_head and prediction_head",
        ),
        ("tr+bow", "prediction_head"),
    ],
)
def test_heads_are_taken_from_another_training(
    objective: str,
    taken: str,
    trained_heads: Path,
    flags: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    flags += ["--init_heads_from", str(trained_heads), "--output_dir", str(tmp_path)]
    trainer, record = build_trainer(
        *parse_arguments([*flags, "--objective", *objective.split(), "--max_steps", "1"])
    )
    found, made = trainer.model.state_dict(), load_file(trained_heads / "model.safetensors")
    parts = ("dap", *taken.split(" and "))
    assert found.keys() == {
        name for name in made if name.startswith(parts)
    }  # the target vocabulary is among them
    assert all(torch.equal(value, made[name]) for name, value in found.items())
    assert f" {taken} taken from {trained_heads}" in caplog.text
    assert "trained with another encoder" not in caplog.text
    assert record["init_heads_from"] == str(trained_heads)


def test_of_other_objectives_those_heads_are_taken_that_both_have(
    flags: list[str], tiny_bert_dir: Path, tmp_path: Path
) -> None:
    other, heads = tmp_path / "other", tmp_path / "heads"
    run(
        [
            *flags,
            "--objective",
            "tr+tlm",
            "--projection",
            "mlp",
            "--max_steps",
            "1",
            "--output_dir",
            str(heads),
        ]
    )
    options = [
        "--init_heads_from",
        str(heads),
        "--restrict_target_vocabulary",
        "false",
        "--output_dir",
        str(other),
    ]
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
        assert all(
            torch.equal(found[name], made[name]) for name, part in parts.items() if part in taken
        )


def test_both_directions_have_the_languages_of_the_data_or_of_the_heads(
    flags: list[str], bitext_dir: Path, tmp_path: Path
) -> None:
    both = [*flags, "--rtl_direction", "both", "--max_steps", "1"]
    run([*both, "--output_dir", str(tmp_path / "heads")])
    one = [
        *both[:3],
        str(bitext_dir / "fr-en.tsv"),
        *both[4:],
        "--init_heads_from",
        str(tmp_path / "heads"),
    ]
    trainer = built([*one, "--output_dir", str(tmp_path / "one")])
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config["rtl_languages"] == trainer.model.config.rtl_languages == ["de", "fr", "sw"]
    assert trainer.data_collator.languages == ["de", "fr", "sw"]
    run(
        [
            *both[:3],
            str(bitext_dir / "de-en.tsv"),
            *both[4:],
            "--output_dir",
            str(tmp_path / "german"),
        ]
    )
    with pytest.raises(ValueError, match="rtl_direction='both' on de, but the text also has fr sw"):
        built(
            [
                *both,
                "--model_name_or_path",
                str(tmp_path / "german"),
                "--output_dir",
                str(tmp_path / "next"),
            ]
        )


def test_heads_that_do_not_fit_are_refused(
    flags: list[str], trained_heads: Path, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    file, small, run_of = (
        tmp_path / "ids.json",
        tmp_path / "small",
        f"--init_heads_from {trained_heads}: ",
    )
    size = len(AutoTokenizer.from_pretrained(tiny_bert_dir))
    file.write_text(
        json.dumps({"tokenizer": "tiny", "vocab_size": size, "target_token_ids": [2, 7, 9]})
    )
    shape = tiny_config("bert", size).to_dict() | {"intermediate_size": 20}
    save(small, BertModel(BertConfig(**shape)), AutoTokenizer.from_pretrained(tiny_bert_dir))
    theirs = len(load_file(trained_heads / "model.safetensors")["prediction_head.token_ids"])
    for more, message in (
        (["--rtl_layers", "1"], run_of + "rtl_layers=2 there, but 1 here: give --rtl_layers 2"),
        (
            ["--rtl_direction", "both"],
            run_of + "rtl_direction='source-to-target' there, but 'both' here",
        ),
        (
            ["--objective", "tr"],
            run_of + r"objective 'rtl' there has no head that objective 'tr' here has",
        ),
        (
            ["--target_vocabulary_file", str(file)],
            f"{theirs}, these target_vocab_size=3: leave --target_vocabulary",
        ),
        (
            ["--restrict_target_vocabulary", "false"],
            f"target_vocab_size={theirs}, these the whole vocabulary: leave",
        ),
        (
            ["--model_name_or_path", str(small)],
            r"has shape \(\d+,.* there, \(20,.* here: give the encoder",
        ),
        (
            ["--init_heads_from", str(tiny_bert_dir)],
            "a plain 'bert' checkpoint: train heads by configs/",
        ),
        (["--init_heads_from", "nowhere"], "^the configuration of nowhere cannot be loaded "),
    ):
        given = [
            *flags,
            "--init_heads_from",
            str(trained_heads),
            *more,
            "--output_dir",
            str(tmp_path / "out"),
        ]
        with pytest.raises(UserError, match=message):
            built(given)


def test_heads_of_another_encoder_come_with_a_warning(
    flags: list[str],
    trained_heads: Path,
    tiny_bert_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = BertModel(tiny_config("bert", len(AutoTokenizer.from_pretrained(tiny_bert_dir))))
    save(tmp_path / "other", other, AutoTokenizer.from_pretrained(tiny_bert_dir))
    flags += [
        "--init_heads_from",
        str(trained_heads),
        "--model_name_or_path",
        str(tmp_path / "other"),
    ]
    built([*flags, "--output_dir", str(tmp_path / "out")])
    assert "the heads were trained with another encoder" in caplog.text


def test_a_run_whose_head_hardly_reads_the_source_says_so_once(
    flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = ["--max_steps", "2", "--eval_strategy", "steps", "--eval_steps", "1"]
    run([*flags, *steps, "--output_dir", str(tmp_path / "out")])
    nats = results(tmp_path / "out")["eval_rtl_source_nats"]
    (said,) = (line for line in caplog.messages if "hardly reads the source" in line)
    assert f"({nats:.2f} nats per token)" in said
    assert (
        len(
            [
                line
                for line in state(tmp_path / "out")["log_history"]
                if "eval_rtl_source_nats_rho25" in line
            ]
        )
        == 2
    )
    caplog.clear()
    run([*flags, *steps, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    assert "hardly reads" not in caplog.text
    assert not [name for name in results(tmp_path / "tr") if "rtl" in name]


def test_a_prepared_target_vocabulary_is_what_rtl_predicts(
    flags: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "ids.json"
    flags += ["--target_vocabulary_file", str(file), "--max_steps", "1"]
    size = len(AutoTokenizer.from_pretrained(flags[1]))
    file.write_text(
        json.dumps({"tokenizer": "tiny", "vocab_size": size, "target_token_ids": [9, 2, 7, 9]})
    )
    run(
        [
            *flags,
            "--streaming",
            "--language_mix",
            "temperature",
            "--output_dir",
            str(tmp_path / "out"),
        ]
    )
    assert "eval_sw-en_accuracy" in results(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert [saved[name].tolist() for name in saved if name.endswith(".token_ids")] == [[2, 7, 9]]
    with pytest.raises(ValueError, match="out has its target vocabulary already"):
        run([flags[0], str(tmp_path / "out"), *flags[2:], "--output_dir", str(tmp_path / "next")])
    with pytest.raises(ValueError, match="ids.json does nothing with objective='tr'"):
        run([*flags, "--objective", "tr", "--output_dir", str(tmp_path / "tr")])
    file.write_text(
        json.dumps({"tokenizer": "other", "vocab_size": size + 5, "target_token_ids": [2]})
    )
    with pytest.raises(
        ValueError, match=f"for the {size + 5} ids of other, the tokenizer here has {size}"
    ):
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
    targets = [
        token for part in train.values() for row in part["target_input_ids"] for token in row[1:]
    ]
    counts = torch.tensor([targets.count(token) + 1.0 for token in ids], dtype=torch.float64)
    torch.testing.assert_close(head.bias, (counts / counts.sum()).log().float(), check_dtype=False)
    assert torch.isfinite(head.bias).all()
