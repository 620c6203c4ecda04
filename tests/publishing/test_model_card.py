"""The model card: it says what was recorded and measured, and nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import squeezed, tiny_config
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from test_published_folder import dap_checkpoint
from transformers import BertModel, PreTrainedTokenizerFast

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.publishing.card import (
    POOLER_SCALE,
    Published,
    Sources,
    languages,
    loss_curve,
    model_card,
    read_sources,
)
from dap_transformers.publishing.card_results import eval_results
from dap_transformers.publishing.layout import Options, build_with_card
from dap_transformers.publishing.mteb_results import read_result
from dap_transformers.reports import merge_seeds, report

PLAIN = Published("plain", False, "bert", 12, 384, "mean", "", 128, False, "cosine", True)
RUN = {
    "model_name_or_path": "intfloat/multilingual-e5-small",
    "base_commit": "614241f622f53c4eeff9890bdc4f31cfecc418b3",
}
RUN |= {
    "objective": "tr+rtl",
    "rtl_layers": 2,
    "tlm_weight": 0.1,
    "learning_rate": 5e-05,
    "pairs a step": 64,
}
RUN |= {"max_seq_length": 32, "language_mix": "uniform", "mix_alpha": 0.5, "target_language": "en"}
RUN |= {"training text": {"de": "31876 pairs, 88f034853299", "sw": "13832 pairs, 5ca2061b88ce"}}
HISTORY = [
    {"step": 10 * i, "loss": 12.0 - i / 10, "tr_loss": 1.0, "rtl_loss": 11.0 - i / 10}
    for i in range(1, 33)
]
HISTORY += [
    {"step": 160, "eval_mean_accuracy": 97.5, "eval_de-en_accuracy": 98.0},
    {"step": 320, "train_runtime": 9.0},
]
TATOEBA = report(
    "/home/someone/out",
    "bitext retrieval: nearest neighbour",
    {
        "languages": {
            "de": {
                "pairs": 1000,
                "xx-en": 97.8,
                "en-xx": 97.7,
                "pool_xx-en": 96.0,
                "own_xx-en": 3.0,
            },
            "sw": {"pairs": 390, "xx-en": 81.7949},
        },
        "averages": {"all": {"xx-en": 89.8}},
    },
    {"pooling": "mean", "prefix": "", "max_seq_length": 128, "data": ["/home/someone/tatoeba"]},
    10.0,
)
BUCC = report(
    "/home/someone/out",
    "BUCC, sample",
    {
        "source": {"lines": 13, "repeated": 2},
        "pairs": {
            "zh-en": {
                "precision": 90.5,
                "recall": 80.25,
                "f1": 85.07,
                "threshold": 1.06,
                "gold": 257,
            }
        },
    },
    {
        "bucc": "/home/someone/bucc",
        "margin": "ratio",
        "k": 4,
        "threshold": None,
        "text": "0123abcd",
    },
    10.0,
)
XNLI = report(
    "/home/someone/out",
    "XNLI, zero-shot",
    {
        "languages": {
            "en": {"pairs": 5010, "accuracy": 70.5},
            "sw": {"pairs": 5010, "accuracy": 60.25},
        },
        "mean": {"languages": 2, "accuracy": 65.375},
        "dev": {"en": {"accuracy": 71.0}},
    },
    {"data": "facebook/xnli", "train_data": "/home/someone/snli.tsv", "search": [{"lr": 1}]},
    10.0,
    seed=3,
)


def test_card_says_what_is_known() -> None:
    sources = Sources(
        config={"model_type": "dap", "objective": "tr+rtl", "pooling": "mean"},
        run=RUN,
        history=HISTORY,
        steps=320,
        reports=[TATOEBA, BUCC, XNLI],
        dataset_info={
            "languages": {
                "de": {"origins": {"Tanzil": 876, "Europarl": 31000}},
                "sw": {"origins": {"Tanzil": 1}},
            },
            "licences": {"Europarl": "public domain"},
        },
        licence="apache-2.0",
    )
    card = model_card("user/dap-e5", PLAIN, sources)
    data = card.data.to_dict()
    assert data["language"] == ["de", "sw", "en"]
    assert data["base_model"] == "intfloat/multilingual-e5-small"
    assert data["license"] == "apache-2.0"
    assert data["pipeline_tag"] == "sentence-similarity"
    assert data["widget"][0]["sentences"]
    text = squeezed(card.text)
    assert text.index("89.8%") < text.index("## Results") < text.index("<summary>Recipe")
    results = text.split("## Results")[1].split("## Use")[0]
    rows = [line for line in results.splitlines() if re.match(r"\| \w", line)]
    assert not [row for row in rows if "| |" in row]  # no empty cells
    assert results.index("| zh-en |") < results.index("| source |")  # counts stand last
    assert "0123abcd" not in results  # a checksum
    for expected in (
        "by dual-alignment pre-training (DAP), objective `tr+rtl`.",
        "Languages: German, Swahili, English.",
        "45,708 sentence pairs of 2 languages with English",
        "| German (de) | 31,876 |",
        "| Europarl | 31,000 | public domain |",
        "| Tanzil | 877 | not stated |",
        "| optimizer steps | 320 |",
        "| rtl layers | 2 |",
        "**Finds the English translation of 89.8% of the sentences (tatoeba, mean of all).**",
        "**Finds translations in two texts with F1 85.1% (bucc, zh-en).**",
        "| accuracy en→xx | multilingual pool xx→en | pairs | lost to own language xx→en |",
        "| German | 97.80 | 97.70 | 96.00 | 1,000 | 3.00 |",
        "| Swahili | 81.79 | 390 |",
        "| zh-en | 90.50 | 80.25 | 85.07 | 1.0600 | 257 |",
        "**Recommended threshold for mining: 1.0600** (ratio margin, 4 neighbours)",
        "1.0600 (best F1 on BUCC zh-en). Texts of another kind",
        "<summary>Recipe</summary>",
        "seed 3",
        "Training cut sentences at 32 tokens",
        "the mean of the tokens' last hidden states. Text is cut at 128 tokens.",
        "Compare vectors by cosine.",
        "@inproceedings{",
    ):
        assert expected in text, expected
    assert "tlm" not in text  # of another objective
    assert "mix alpha" not in text  # of another mix
    assert "/home/someone" not in str(card)


def test_model_index_has_every_metric_and_nothing_else() -> None:
    card = model_card("user/dap-e5", PLAIN, Sources(reports=[TATOEBA, BUCC, XNLI]))
    name, results = model_index_to_eval_results(ModelCard(str(card)).data.to_dict()["model-index"])
    assert name == "dap-e5"
    test = [result for result in results if result.dataset_split is None]
    found = {
        (r.dataset_name, r.dataset_config, r.metric_name): (r.metric_type, r.metric_value)
        for r in test
    }
    assert found == {
        ("tatoeba", "de", "accuracy xx→en"): ("accuracy", 97.8),
        ("tatoeba", "de", "accuracy en→xx"): ("accuracy", 97.7),
        ("tatoeba", "de", "multilingual pool xx→en"): ("accuracy", 96.0),
        ("tatoeba", "sw", "accuracy xx→en"): ("accuracy", 81.7949),
        ("tatoeba", "all", "accuracy xx→en"): ("accuracy", 89.8),
        ("bucc", "zh-en", "precision"): ("precision", 90.5),
        ("bucc", "zh-en", "recall"): ("recall", 80.25),
        ("bucc", "zh-en", "F1"): ("f1", 85.07),
        ("facebook/xnli", "en", "accuracy"): ("accuracy", 70.5),
        ("facebook/xnli", "sw", "accuracy"): ("accuracy", 60.25),
        ("facebook/xnli", "mean", "accuracy"): ("accuracy", 65.375),
    }
    tasks = {result.dataset_name: (result.task_type, result.task_name) for result in results}
    assert tasks["bucc"] == ("sentence-similarity", "bitext mining")
    assert tasks["facebook/xnli"] == ("text-classification", "natural language inference")
    (dev,) = (result for result in results if result.dataset_split == "validation")
    assert (dev.dataset_name, dev.dataset_config, dev.metric_value) == ("facebook/xnli", "en", 71.0)


def test_numbers_of_several_seeds_keep_their_spread() -> None:
    seeds = []
    for i in (1, 2, 3):
        seeds.append({**XNLI, "seed": i, "mean": {"languages": 2, "accuracy": 60.0 + i}})
    merged = merge_seeds(seeds)
    mean = next(result for result in eval_results(merged) if result.dataset_config == "mean")
    assert mean.metric_value == pytest.approx(62.0)
    text = model_card("user/dap", PLAIN, Sources(reports=[merged])).text
    assert "62.00 ± 1.00" in text
    assert "seeds 1, 2, 3." in text


def test_results_of_mteb_are_accepted(tmp_path: Path) -> None:
    scores = [
        {"hf_subset": "deu-eng", "main_score": 0.95, "f1": 0.95, "accuracy": 0.96},
        {"hf_subset": "fra-eng", "main_score": 0.85, "f1": 0.85, "accuracy": 0.86},
    ]
    content = {"task_name": "Tatoeba", "mteb_version": "2.26.24", "dataset_revision": "69e8f12"}
    path = tmp_path / "Tatoeba.json"
    path.write_text(json.dumps(content | {"scores": {"test": scores}}))
    card = model_card("user/dap", PLAIN, Sources(reports=[read_result(path)]))
    assert (
        "**Finds translations in two texts with F1 90.0% (Tatoeba, mean of 2 subsets)" in card.text
    )
    assert "Classifies" not in card.text  # its accuracy is that of mining
    assert "| deu-eng | 96.00 | 95.00 | 95.00 |" in squeezed(card.text)
    values = {
        (result.dataset_name, result.dataset_config, result.metric_name): result.metric_value
        for result in eval_results(read_result(path))
    }
    assert values["Tatoeba", "fra-eng", "F1"] == 85.0

    # one subset has no average beside it
    one = scores[0] | {"main_score": 0.612}
    path.write_text(json.dumps(content | {"scores": {"test": [one]}}))
    found = [result.metric_value for result in eval_results(read_result(path))]
    assert sorted(found) == [61.2, 95.0, 96.0]

    # a classification has the same metrics, but another main score
    for subset in scores:
        subset["main_score"] = subset["accuracy"]
    path.write_text(json.dumps(content | {"scores": {"test": scores}}))
    card = model_card("user/dap", PLAIN, Sources(reports=[read_result(path)]))
    assert "Finds translations" not in card.text
    assert {result.task_name for result in eval_results(read_result(path))} == {"MTEB"}

    path.write_text(json.dumps(content | {"scores": {"train": scores}}))
    with pytest.raises(ValueError, match="without scores of test"):
        read_result(path)


def test_hard_negative_errors_are_a_table_with_words() -> None:
    errors = {"error": 7.5, "number": 0.5, "negation": 6.0, "name": 0.0, "other": 1.0}
    german = {"pairs": 200, "without_copies": 14, "copies": {"number": 9}, "error": errors}
    content = {"hard_negatives": {"de": german, "mean": {"error": errors}}}
    measured = report("out", "retrieval", content, {"data": ["tatoeba"]}, 1.0)
    text = squeezed(model_card("user/dap", PLAIN, Sources(reports=[measured])).text)
    assert "| hard-negative error | by number | by negation |" in text
    assert "| German | 7.50 | 0.50 | 6.00 | 0.00 | 1.00 |" in text
    assert "copies" not in text


def test_results_of_shortened_vectors_are_marked() -> None:
    short = {
        **TATOEBA,
        "settings": {**TATOEBA["settings"], "truncate_dim": 256, "precision": "int8"},
    }
    names = {result.metric_name for result in eval_results(short)}
    assert names == {
        f"{what} (truncate_dim 256, precision int8)"
        for what in ("accuracy xx→en", "accuracy en→xx", "multilingual pool xx→en")
    }
    whole = {
        **TATOEBA,
        "settings": {**TATOEBA["settings"], "truncate_dim": None, "precision": "float32"},
    }
    assert {result.metric_name for result in eval_results(whole)} == {
        "accuracy xx→en",
        "accuracy en→xx",
        "multilingual pool xx→en",
    }


def test_a_card_without_records_states_no_numbers() -> None:
    card = model_card("user/mystery", PLAIN, Sources())
    data = card.data.to_dict()
    assert not {"language", "license", "base_model", "model-index", "datasets", "metrics"} & set(
        data
    )
    assert "Languages: not stated." in card.text
    assert "Recipe and training data: not stated." in card.text
    assert "No evaluation was given" in card.text
    twice = RUN | {"training text": {"de": "5 pairs, 1", "en": "2 pairs, 2"}}
    assert languages(Sources(run=twice)) == ["de", "en"]
    outside_code = re.sub(r"```.*?```", "", card.text, flags=re.DOTALL)
    from_the_config = {"12", "384", "128"}
    assert set(re.findall(r"\d+(?:\.\d+)?", outside_code)) == from_the_config
    trained = model_card(
        "user/dap", PLAIN, Sources(config={"objective": "tr", "model_type": "dap"})
    ).text
    assert "Amount of text: not stated." in trained
    assert "Sources and licences: not stated." in trained
    assert "### Loss" not in trained


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"pooling": "cls"}, "`pooler_output` is the sentence vector times 2⁻¹⁰"),
        ({}, "Do not use `pooler_output`, which is all zeros."),
        (
            {"pooling": "cls", "has_pooler": False},
            "vectors = output.last_hidden_state[:, 0]",
        ),
        (
            {"normalize": True},
            "sentence-transformers returns vectors of length 1.",
        ),
    ],
)
def test_card_says_which_line_gives_the_vector_and_its_length(
    made: dict[str, Any], said: str
) -> None:
    assert said in model_card("user/dap", replace(PLAIN, **made), Sources()).text


def test_an_encoder_of_masked_language_modelling_is_not_called_aligned() -> None:
    made = model_card(
        "user/mlm", PLAIN, Sources(config={"objective": "mlm", "model_type": "dap"})
    ).text
    assert "an encoder to start training from (`bert`, 12 layers)" in made
    assert "by masked language modelling (MLM), objective `mlm`" in made
    assert "translations similar vectors" not in made


def test_loss_curve_keeps_ends_and_evaluations() -> None:
    rows = [
        line.split(" | ") for line in loss_curve(HISTORY).splitlines() if re.match(r"\| \d", line)
    ]
    steps = [int(row[0].strip("| ")) for row in rows]
    assert steps[0] == 10
    assert steps[-1] == 320
    assert steps == sorted(set(steps))
    assert 10 <= len(steps) <= 14
    assert rows[steps.index(160)][-1] == "97.500 |"
    assert "tlm" not in loss_curve(HISTORY)
    assert loss_curve([]) == ""
    assert loss_curve(HISTORY[-2:]) == ""


@pytest.mark.parametrize(
    ("layout", "pooling"), [("plain", "mean"), ("plain", "cls"), ("dap", "mean")]
)
def test_the_code_on_the_card_runs_and_gives_the_vectors(
    layout: str,
    pooling: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = dap_checkpoint(tmp_path / "dap", tiny_tokenizer, pooling=pooling)
    prefix = 'kaban "a\\b": '  # needs escapes in Python
    options = Options(layout=layout, prefix=prefix, max_seq_length=14)
    published = build_with_card(
        checkpoint, tmp_path / "user/tiny", "user/tiny", options, read_sources(checkpoint)
    )
    monkeypatch.chdir(tmp_path)  # here the repository's id is a folder
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    sentences = ["Guten Morgen!", "Good morning!"]
    expected = SentenceEncoder.from_pretrained(
        str(checkpoint), prefix=prefix, max_seq_length=14
    ).encode(sentences)
    card = ModelCard.load("user/tiny/README.md").text
    snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(snippets) == (4 if published.heads else 3)
    for snippet in snippets[:3]:
        names: dict[str, Any] = {}
        tolerance = 1e-5
        exec(snippet, names)
        vectors = np.asarray(names["vectors"])
        is_pooler_output = snippet is snippets[1] and (layout, pooling) == ("plain", "cls")
        if is_pooler_output:  # scaled, and slightly changed by tanh
            vectors = vectors / POOLER_SCALE
            tolerance = 1e-4
            assert "times 2⁻¹⁰" in card
        np.testing.assert_allclose(vectors, expected, atol=tolerance)


def test_sources_are_read_from_the_checkpoint_and_the_folder_above(tmp_path: Path) -> None:
    last = tmp_path / "out/checkpoint-320"
    last.mkdir(parents=True)
    (tmp_path / "out/run.json").write_text(json.dumps(RUN))
    state = {"log_history": HISTORY, "global_step": 320}
    for folder in (tmp_path / "out", last):
        (folder / "config.json").write_text(
            json.dumps({"model_type": "dap", "objective": "tr+rtl"})
        )
        (folder / "trainer_state.json").write_text(json.dumps(state))
        sources = read_sources(folder)
        assert sources.run == RUN
        assert (sources.steps, len(sources.history)) == (320, len(HISTORY))
        assert languages(sources) == ["de", "sw", "en"]
    (tmp_path / "out/encoder").mkdir()
    assert read_sources(tmp_path / "out/encoder") == Sources()  # the folder above is not read
    plain = tmp_path / "plain"
    BertModel(tiny_config("bert")).save_pretrained(plain)
    assert read_sources(plain) == Sources()  # a plain encoder was not trained here


def test_a_data_card_or_dataset_info_is_quoted_on_the_card(tmp_path: Path) -> None:
    config = {"config": {"objective": "tr", "model_type": "dap"}}
    (tmp_path / "README.md").write_text(
        "---\nlanguage: [de]\n---\n# Our pairs\n\nTanzil, CC-BY 3.0.\n"
    )
    stated = read_sources(tmp_path, dataset_info=tmp_path / "README.md").dataset_info
    text = model_card("user/dap", PLAIN, Sources(**config, dataset_info=stated)).text
    assert "Tanzil, CC-BY 3.0." in text
    assert "language: [de]" not in text
    metadata = "license: cc-by-4.0\nsource_datasets: [original, user/pairs]\nlanguage: [de]"
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\nOur pairs.\n")
    sources = read_sources(tmp_path, dataset_info=tmp_path / "README.md")
    data = model_card("user/dap", PLAIN, sources).data
    assert (data.license, data.datasets) == ("cc-by-4.0", ["user/pairs"])
    given = read_sources(tmp_path, dataset_info=tmp_path / "README.md", licence="mit")
    assert model_card("user/dap", PLAIN, given).data.license == "mit"
    (tmp_path / "info.json").write_text(
        '{"description": "Pairs.", "license": ["mit", "cc0-1.0"], "languages": []}'
    )
    stated = read_sources(tmp_path, dataset_info=tmp_path / "info.json").dataset_info
    assert (
        "Licence: mit, cc0-1.0."
        in model_card("user/dap", PLAIN, Sources(**config, dataset_info=stated)).text
    )
    (tmp_path / "info.json").write_text("[]")
    with pytest.raises(ValueError, match="info.json: holds a JSON list"):
        read_sources(tmp_path, dataset_info=tmp_path / "info.json")
    (tmp_path / "README.md").write_bytes("Paare\nfür Köln".encode("latin-1"))
    with pytest.raises(UserError, match="README.md, line 2: not UTF-8"):
        read_sources(tmp_path, dataset_info=tmp_path / "README.md")
    with pytest.raises(FileNotFoundError):
        read_sources(tmp_path, dataset_info=tmp_path / "absent.json")


def test_paths_of_this_machine_are_not_on_the_card(tmp_path: Path) -> None:
    found = {**TATOEBA, "settings": {**TATOEBA["settings"], "data": ["corpora/tatoeba"]}}
    assert {result.dataset_type for result in eval_results(found)} == {"tatoeba"}
    for run, path, said in (
        (RUN, str(tmp_path), f"a local folder, `{tmp_path.name}`"),
        ({}, "encoders/e5", "| started from | `e5` |"),
    ):
        run = run | {"model_name_or_path": path}
        sources = Sources(config={"objective": "tr", "model_type": "dap"}, run=run, reports=[found])
        card = model_card("user/dap", PLAIN, sources)
        assert "base_model" not in card.data.to_dict()
        assert said in card.text
        assert not {path, "corpora/tatoeba"} & set(re.split(r"[\s`]", str(card)))


def test_the_card_gives_the_steps_of_the_published_weights(tmp_path: Path) -> None:
    last = tmp_path / "out/checkpoint-12"
    last.mkdir(parents=True)
    for folder in (tmp_path / "out", last):
        (folder / "config.json").write_text(json.dumps({"model_type": "dap", "objective": "tr"}))
        (folder / "trainer_state.json").write_text(
            json.dumps({"global_step": 12, "best_global_step": 8})
        )
    assert read_sources(last).steps == 12
    # the weights may be the last or the best
    assert read_sources(tmp_path / "out").steps is None
    (tmp_path / "out/train_results.json").write_text(
        json.dumps({"model_step": 8, "base_commit": "614241f"})
    )
    assert read_sources(tmp_path / "out").steps == 8
    assert read_sources(last).steps == 12
    assert read_sources(last).run == {"base_commit": "614241f"}
