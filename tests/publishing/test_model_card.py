"""The model card: it says what was recorded and measured, and nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import load_encoder, save, save_with_modules, tiny_config, tiny_tokenizer
from huggingface_hub import ModelCard
from numpy.testing import assert_allclose
from tiny_models import tiny_model
from transformers import BertConfig, BertModel

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json, write_json
from dap_transformers.publishing.layout import POOLER_SCALE, Published
from dap_transformers.publishing.model_card import Sources, model_card, read_sources
from dap_transformers.publishing.publish import PublishOptions, publish
from modules_dap import write_modules

PLACE = Path(__file__).parent
SHAPE = {"vocab_size": 250, "num_hidden_layers": 12, "hidden_size": 384, "intermediate_size": 8}
ENCODER = SentenceEncoder(BertModel(BertConfig(**SHAPE)), tiny_tokenizer(), "mean")
PLAIN = Published(ENCODER, heads=False, similarity="cosine", has_pooler=True)
KNOWN = Sources(**read_json(PLACE / "card.json"))
CONFIG, RUN = KNOWN.config, KNOWN.run
TATOEBA, BUCC, _ = KNOWN.reports


def test_the_card_says_what_is_known() -> None:
    """The whole card, as it was read and found right.

    It shows no path of this machine, and no settings of another objective or mix.
    """
    card = str(model_card("user/dap-e5", PLAIN, KNOWN))
    assert card == (PLACE / "card.txt").read_text()
    assert "/home/someone" not in card
    data = ModelCard(card).data
    assert (data.model_name, len(data.eval_results)) == ("dap-e5", 10)


def test_results_of_several_tasks_at_one_place_keep_their_tasks() -> None:
    tasks = {"ndcg_at_10": "search", "spearman": "semantic textual similarity", "f1": "my task"}
    metrics = []
    for kind, task in tasks.items():
        row = {"task": task, "data": "x", "value": 50.0, "place": "mean"}
        metrics.append(row | {"name": kind, "kind": kind})
    report = TATOEBA | {"metrics": metrics}
    card = str(model_card("user/dap-e5", PLAIN, replace(KNOWN, reports=[report])))
    results = ModelCard(card).data.eval_results
    assert {each.metric_type: each.task_name for each in results} == tasks


def test_a_card_without_records_states_no_numbers() -> None:
    card = model_card("user/mystery", PLAIN, Sources())
    stated = {"language", "license", "base_model", "model-index", "datasets", "metrics"}
    assert not stated & set(card.data.to_dict())
    outside_code = re.sub(r"```.*?```", "", card.text, flags=re.DOTALL)
    assert set(re.findall(r"\d+(?:\.\d+)?", outside_code)) == {"12", "384", "128"}  # of the model
    trained = model_card("user/dap", PLAIN, Sources(config=CONFIG)).text
    # Languages, training and quality; of a trained model text and licences instead of training.
    assert (card.text.count("not stated"), trained.count("not stated")) == (3, 4)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [(None, "(TR) and the anchor (its own vectors"), ("/data/labse", "| teacher | `labse` |")],
)
def test_the_card_names_the_teacher_or_the_anchor(teacher: str | None, said: str) -> None:
    config, run = CONFIG | {"objective": "tr+distill"}, RUN | {"distill_from": teacher}
    card = model_card("user/a", PLAIN, Sources(config=config, run=run)).text
    assert said in re.sub(" +", " ", card)
    assert "/data" not in card


@pytest.mark.parametrize(
    ("made", "objective", "said"),
    [
        ({"heads": True}, "tr", 'subfolder="pretraining", trust_remote_code=True'),
        ({"heads": True}, "tr+mine", "the Python file of the objective `mine`"),
        ({}, "tr+bow_of_mine", "| bow of mine weight | 0.5 |"),
        ({}, "mlm", "an encoder to start training from (`bert`, 12 layers)"),
        ({}, "tr+mine", "by translation ranking (TR) and mine, objective"),
    ],
)
def test_the_card_follows_the_model(made: dict, objective: str, said: str) -> None:
    own = {"objective": objective, f"{objective.split('+')[-1]}_weight": 0.5}
    sources = Sources(config=CONFIG | own)
    text = model_card("user/dap", replace(PLAIN, **made), sources).text
    assert said in text
    assert ("translations similar vectors" in text) == (objective != "mlm")


def run_snippets(card: str) -> dict[str, dict]:
    """Run the three pieces of Python on a card, and return the names that each one sets."""
    found: dict[str, dict] = {}
    for snippet in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(snippet, found.setdefault(snippet, {}))
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    ("pooling", "model_type"),
    [("mean", "bert"), ("cls", "bert"), ("cls", "distilbert"), ("lasttoken", "distilbert")],
)
def test_the_code_on_the_card_runs_and_gives_the_vectors(
    pooling: str, model_type: str, here: Path
) -> None:
    checkpoint = save(here / "dap", tiny_model(model_type, pooling=pooling))
    prefix = 'kaban "a\\b": '  # needs escapes in Python
    options = PublishOptions(dry_run=True, prefix=prefix, max_seq_length=14)
    publish(checkpoint, "user/tiny", options, here / "user/tiny")
    encoder = load_encoder(checkpoint, prefix=prefix, max_seq_length=14)
    expected = encoder.encode(["Guten Morgen!", "Good morning!"])
    card = ModelCard.load("user/tiny/README.md").text  # here the repository's id is a folder
    for snippet, names in run_snippets(card).items():
        vectors = np.asarray(names["vectors"])
        tolerance = 1e-5
        if "pooler_output" in snippet:  # scaled, and slightly changed by tanh
            vectors = vectors / POOLER_SCALE
            tolerance = 1e-4
        assert_allclose(vectors, expected, atol=tolerance)


def test_the_code_on_the_card_puts_the_prompts_of_a_search(here: Path) -> None:
    model = tiny_model(pooling="mean")
    checkpoint = save(here / "dap", model)
    prompts = {"query": "kaban: ", "document": "loder: "}
    encoder = SentenceEncoder(model, tiny_tokenizer(), prefix="kaban: ", prompts=prompts)
    write_modules(encoder, checkpoint)
    publish(checkpoint, "user/tiny", PublishOptions(dry_run=True), here / "user/tiny")
    card = ModelCard.load("user/tiny/README.md").text
    assert "a question is 'kaban: ', and the prompt of a passage is 'loder: '" in card
    assert "Every sentence" not in card
    texts = ["kaban: Where is the station?", "loder: Der Bahnhof liegt im Zentrum."]
    expected = SentenceEncoder(model, tiny_tokenizer()).encode(texts)
    for names in run_snippets(card).values():
        vectors = names["vectors"]
        if "questions" in names:
            vectors = np.concatenate([names["questions"], names["passages"]])
        assert_allclose(vectors, expected, atol=1e-5)


def test_sources_are_read_from_the_checkpoint_and_the_folder_above(tmp_path: Path) -> None:
    out, last = tmp_path / "out", tmp_path / "out/checkpoint-12"
    last.mkdir(parents=True)
    write_json(RUN, out / "run.json")
    write_json({"model_step": 8}, out / "train_results.json")
    for folder in (out, last):
        write_json(CONFIG, folder / "config.json")
        write_json({"global_step": 12}, folder / "trainer_state.json")
    assert (read_sources(out).steps, read_sources(last).steps) == (8, 12)
    assert read_sources(out).run == read_sources(last).run == RUN
    assert read_sources(last).languages == ["de", "sw", "en"]
    tiny_config("bert").save_pretrained(out / "checkpoint-plain")
    for folder in (out / "encoder", out / "checkpoint-plain"):  # it was not trained here
        assert read_sources(folder) == Sources()


@pytest.mark.parametrize(
    ("metadata", "licence", "datasets"),
    [
        (
            "license: cc-by-4.0\nsource_datasets: [original, user/pairs]",
            "cc-by-4.0",
            ["user/pairs"],
        ),
        ("license: [mit, cc0-1.0]\nlanguage: [de]", None, []),
        ("license: [mit]\ndatasets: user/pairs", "mit", ["user/pairs"]),
        ("language: [de]", None, []),
    ],
)
def test_a_data_card_is_quoted_and_gives_its_licence(
    metadata: str, licence: str | None, datasets: list, tmp_path: Path
) -> None:
    path = tmp_path / "data.md"
    path.write_text(f"---\n{metadata}\n---\n# Our pairs\n")
    sources = read_sources(tmp_path, dataset_info=path)
    assert (sources.dataset_info, sources.licence) == ("# Our pairs", licence)
    assert sources.datasets == datasets
    assert read_sources(tmp_path, dataset_info=path, licence="cc0-1.0").licence == "cc0-1.0"


def test_a_local_start_shows_only_its_name() -> None:
    run = RUN | {"model_name_or_path": "/home/someone/e5", "base_commit": None}
    card = model_card("user/dap", PLAIN, Sources(config=CONFIG, run=run))
    assert "base_model" not in card.data.to_dict()
    assert "| started from | `e5` |" in card.text
    assert "/home/someone" not in str(card)


def test_the_card_tells_the_size_behind_dense_layers(tiny_bert_dir: Path, tmp_path: Path) -> None:
    library = save_with_modules(tmp_path / "library", tiny_bert_dir)
    publish(library, "user/tiny", PublishOptions(dry_run=True), tmp_path / "hub")
    card = ModelCard.load(tmp_path / "hub/README.md").text
    assert "a vector of 8 numbers" in card
    assert "last hidden states after Dense layers" in card
    assert "32" not in re.findall(r"\d+", card)


@pytest.mark.parametrize(
    ("name", "value"), [("pooling", "cls"), ("max_seq_length", 512), ("query_prompt", "query: ")]
)
def test_results_of_other_vectors_are_refused(name: str, value: object) -> None:
    other = TATOEBA | {"settings": TATOEBA["settings"] | {name: value}}
    says = f"tatoeba were measured with {name}={value!r}, but the model is published with"
    with pytest.raises(ValueError, match=says):
        model_card("user/tiny", PLAIN, Sources(reports=[other]))
    own = BUCC | {"settings": {"max_seq_length": 512}}  # of pairs, as in run-xnli
    model_card("user/tiny", PLAIN, Sources(reports=[own]))
