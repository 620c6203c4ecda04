"""Fine-tuning on English NLI and zero-shot tests, from files to JSON, with tiny real models."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import load_encoder, save, save_with_modules, tiny_config, tiny_tokenizer, weights
from tiny_models import start_from
from torch.testing import assert_close
from transformers import AutoModel, BertModel, pipeline
from written import contents, text_of, write

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json
from dap_transformers.publishing.model_card import eval_results
from dap_transformers.training.resume import ResumableTrainer
from dap_transformers.xnli.data import LABEL
from dap_transformers.xnli.finetuning import build_classifier, has_token_types
from run_xnli import main, run, summary

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi") for b in ("ban", "der", "gol", "sut")]
MARKS = ("nefin", "pusut", "rader")  # one per label
SIZES = {"train-en": 120, "dev-en": 30, "test-en": 30, "test-de": 24, "test-sw": 24}
RUN = "lr-0.003-seed-42"
SEARCH = "--search --learning_rates 1e-7 5e-3 --num_train_epochs 3"
Searched = tuple[Path, dict]


def examples(name: str) -> list[tuple[str, str, str]]:
    rng = random.Random(name)
    rows = []
    for number in range(SIZES[name]):
        hypothesis = rng.choices(WORDS, k=rng.randint(0, 2))
        hypothesis.insert(rng.randint(0, len(hypothesis)), MARKS[number % 3])
        premise = " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))
        rows.append((premise, " ".join(hypothesis), LABEL.names[number % 3]))
    return rows


@pytest.fixture(scope="module")
def nli_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nli")
    for name in SIZES:
        write(folder / f"{name}.tsv", text_of(examples(name)))
    return folder


@pytest.fixture(scope="module")
def dap_dir(tiny_bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = start_from(tiny_bert_dir, pooling="mean")
    return save(tmp_path_factory.mktemp("dap"), model)


@pytest.fixture(scope="module")
def fine_tune(dap_dir: Path, nli_dir: Path) -> Callable:
    """Return a function that runs the command, with flags that may override these."""

    def call(output: Path, more: str = "", command: Callable = run) -> dict:
        flags = f"--model_name_or_path {dap_dir} --data_dir {nli_dir} --output_dir {output} "
        flags += "--max_seq_length 64 --total_train_batch_size 12 --per_device_train_batch_size 12 "
        flags += f"--learning_rate 3e-3 --disable_tqdm true {more}"
        return command(flags.split())

    return call


@pytest.fixture(scope="module")
def searched(fine_tune: Callable, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Search and fine-tune. Gives the output folder and the report."""
    output = tmp_path_factory.mktemp("searched") / "new"
    return output, fine_tune(output, SEARCH)


def test_the_search_chooses_by_english_dev_and_tests_every_language(searched: Searched) -> None:
    output, made = searched
    assert read_json(output / "xnli.json") == made
    assert made["settings"]["learning_rate"] == 5e-3
    tried = {each["learning_rate"]: each["dev_accuracy"] for each in made["settings"]["search"]}
    assert list(tried) == [1e-7, 5e-3]
    assert tried[1e-7] < 50 < 60 < tried[5e-3]  # chance is 33.3
    assert re.findall(r"\S+ \(taken\)", summary(made)) == ["0.005 (taken)"]
    pairs = {code: each["pairs"] for code, each in made["languages"].items()}
    assert pairs == {"en": 30, "de": 24, "sw": 24}
    assert made["languages"]["de"]["accuracy"] > 60
    places = [entry.dataset_config for entry in eval_results(made)]
    assert places == ["3 of 15 languages", "en", "de", "sw"]
    assert {"max_steps", "num_train_epochs"} - made["settings"].keys() == {"max_steps"}
    assert not list(output.glob("*/checkpoint-*"))

    # The saved model has the reported accuracy on single pairs.
    rows = examples("test-sw")
    classify = pipeline("text-classification", str(output / "lr-0.005-seed-42"))
    found = classify([{"text": premise, "text_pair": text} for premise, text, _ in rows])
    right = sum(each["label"] == label for each, (*_, label) in zip(found, rows))
    assert made["languages"]["sw"]["accuracy"] == pytest.approx(100 * right / len(rows))


def test_finished_runs_are_used_again_if_settings_and_text_are_the_same(
    searched: Searched,
    fine_tune: Callable,
    nli_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, made = searched
    copied = shutil.copytree(output, tmp_path / "copied")
    data = shutil.copytree(nli_dir, tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(ResumableTrainer, "train", None)
        patch.setattr(ResumableTrainer, "predict", None)
        again = fine_tune(copied, f"{SEARCH} --data_dir {data}")
    assert again["languages"] == made["languages"]

    swahili = (data / "test-sw.tsv").read_text().replace("entailment", "neutral")
    (data / "test-sw.tsv").write_text(swahili)
    with pytest.raises(ValueError, match="is of a run with texts={'test sw': '24 pairs"):
        fine_tune(copied, f"{SEARCH} --data_dir {data}")
    with pytest.raises(ValueError, match="'train en': '120 pairs, .*now {'train en': '100 pairs"):
        fine_tune(copied, f"{SEARCH} --max_train_pairs 100")


def test_a_stopped_run_continues_to_the_same_weights(
    tiny_bert_dir: Path, fine_tune: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = f"--model_name_or_path {tiny_bert_dir} --pooling mean --save_steps 6"
    plain += " --num_train_epochs 2"
    whole = fine_tune(tmp_path / "whole", plain)
    step = ResumableTrainer.training_step

    def stop(self: ResumableTrainer, *args: object, **kwargs: object) -> torch.Tensor:
        if self.state.global_step == 14:  # in the second epoch, two steps after a checkpoint
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    folders = [tmp_path / name / RUN for name in ("whole", "stopped")]
    monkeypatch.setattr(ResumableTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        fine_tune(tmp_path / "stopped", plain)
    monkeypatch.undo()
    assert (folders[1] / "checkpoint-12").is_dir()
    assert fine_tune(tmp_path / "stopped", plain)["languages"] == whole["languages"]
    one, other = map(contents, folders)
    assert one.keys() == other.keys() > {"model.safetensors", "tokenizer.json", "config.json"}
    # These hold times, and the path of the folder.
    assert {name for name in one if one[name] != other[name]} == {
        "result.json",
        "training_args.bin",
    }


def test_accumulation_and_batch_size_of_the_evaluation_change_nothing(
    fine_tune: Callable, tmp_path: Path
) -> None:
    # the fifth and last step has 7 pairs: batches of 4 and 3
    base = "--num_train_epochs 1 --save_strategy no --max_train_pairs 55"
    small = f"{base} --per_device_train_batch_size 4 --per_device_eval_batch_size 7"
    made = [fine_tune(tmp_path / "one", base), fine_tune(tmp_path / "other", small)]
    assert made[0]["languages"] == made[1]["languages"]
    one, other = (weights(tmp_path / name / RUN) for name in ("one", "other"))
    assert_close(one, other, atol=2e-4, rtol=0)


def test_the_classifier_of_any_encoder_begins_with_its_sentence_vector(
    dap_dir: Path, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    save(tmp_path / "with pooler", BertModel.from_pretrained(tiny_bert_dir))
    library = save_with_modules(tmp_path / "library", tiny_bert_dir)
    save(tmp_path / "dap", start_from(library, objective="tr"))
    for folder in (dap_dir, tiny_bert_dir, *tmp_path.iterdir()):
        encoder = load_encoder(folder, "mean")
        model = build_classifier(encoder).eval()
        assert model.config.label2id == {"entailment": 0, "neutral": 1, "contradiction": 2}
        assert model.config.pooling == "mean"
        tokens = encoder.tokenizer("kaban loder", return_tensors="pt")
        found = model.dap(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        assert_close(found.detach().numpy(), encoder.encode(["kaban loder"]))


def test_only_encoders_with_token_type_embeddings_have_token_types() -> None:
    for model_type, expected in (("bert", True), ("distilbert", False), ("deberta-v2", False)):
        model = AutoModel.from_config(tiny_config(model_type))
        assert has_token_types(SentenceEncoder(model, tiny_tokenizer())) == expected


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--total_train_batch_size 20", "total_train_batch_size=20"),
        ("--search --data_dir {tmp}/data", "the search needs English dev pairs"),
        ("--max_train_pairs -1", "max_train_pairs=-1: at least 1"),
        ("--max_seq_length 500", "max_seq_length=500"),
        ("--max_steps 3 --learning_rate 1e30 --logging_strategy no", "weights are not finite"),
    ],
)
def test_what_is_refused_ends_in_one_line(
    more: str, says: str, fine_tune: Callable, nli_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train-en.tsv", "test-en.tsv"):
        shutil.copy(nli_dir / name, tmp_path / "data" / name)
    with pytest.raises(SystemExit, match=f"^error: .*{says}"):
        fine_tune(tmp_path / "out", more.format(tmp=tmp_path), main)
