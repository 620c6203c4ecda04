"""The paper's tables and figures show what the reports of finished runs say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dap_transformers.languages import XNLI_LANGUAGES
from experiments.paper_figures import draw_figures, varied_data
from experiments.paper_tables import paper_tables, variants
from experiments.recipes import Recipe, read_recipe

RTL = {"objective": "tr+rtl", "learning_rate": 1.0}
RUNS = {
    "mbert-tr": {"objective": "tr", "learning_rate": 1.0},
    "mbert-dap": RTL,
    "half": RTL | {"rtl_ratio": 0.5},
    "deep": RTL | {"rtl_layers": 3},
    "back": RTL | {"rtl_direction": "target-to-source"},
    "other": RTL | {"rtl_ratio": 0.25, "max_steps": 3},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "paper.yaml"
    path.write_text(yaml.safe_dump({"name": "paper", "runs": RUNS, "evaluate": {}}))
    return read_recipe(path, {})


def reports(value: float) -> dict[str, Any]:
    """Return the reports of one seed, with results that can be told from each other."""
    both = {"xx-en": value, "en-xx": value + 2}
    found: dict[str, Any] = {
        "tatoeba": {
            "settings": {},
            "averages": {"36 languages": both},
            "languages": {"de": both},
        },
        "xnli": {
            "mean": {"accuracy": value - 20},
            "languages": {code: {"accuracy": value - 20} for code in XNLI_LANGUAGES},
        },
    }
    for number, pair in enumerate(("fr-en", "de-en", "ru-en", "zh-en")):
        numbers = {"precision": 90.0, "recall": 80.0, "f1": value - 10 + number}
        protocol = "BUCC sample-threshold-on-training: margin"
        found[f"training-{pair}"] = {"protocol": protocol, "pairs": {pair: numbers}}
    return found


def cells(table: str, row: str) -> list[str]:
    """Return the cells of the row with this label."""
    (line,) = [line for line in table.splitlines() if line.startswith(row)]
    return re.split(r" {2,}", line)[1:]


def test_rows_have_means_over_seeds_and_the_papers_rows_follow(recipe: Recipe) -> None:
    found = {"mbert-tr": {0: reports(80.0), 1: reports(81.0)}, "mbert-dap": {0: reports(90.0)}}
    found["back"] = {0: reports(85.0)}
    found["cost"] = {
        0: {
            "cost": {
                "pair": {name: {"flops": 2e9, "wall": 0.5} for name in ("TR", "TLM", "DAP")},
                "arguments": {"batch_size": 100},
                "machine": {"gpu": "a GPU", "cpu": "a CPU"},
            }
        }
    }
    tables = paper_tables(recipe, found)
    averages, training, xnli, directions, costs, forward, _, ratios, layers = tables
    assert cells(averages, "mbert-tr (n=2)") == ["-", "-", "80.5 ± 0.7", "-", "-", "82.5 ± 0.7"]
    assert cells(averages, "paper: mBERT+DAP")[2] == "90.9"
    assert cells(training, "mbert-tr (n=2)")[-1] == "72.0 ± 0.7"
    row = "90.0 80.0 80.0 90.0 80.0 81.0 90.0 80.0 82.0 90.0 80.0 83.0 81.5"
    assert cells(training, "mbert-dap (n=1)") == row.split()
    assert cells(xnli, "mbert-dap (n=1)")[-1] == "70.0"
    assert cells(directions, "xx→en (n=1)") == ["91.0", "81.5", "70.0"]
    assert cells(directions, "en→xx (n=1)") == ["86.0", "76.5", "65.0"]
    assert cells(directions, "paper: both") == ["90.8", "86.3", "70.5"]
    assert cells(costs, "TLM") == ["2.00", "33.7", "5.00", "1.34"]
    assert cells(forward, "de German") == ["80.5", "90.0", *cells(forward, "de German")[2:]]
    assert "back" not in averages


def test_a_variant_differs_from_the_base_in_one_option(recipe: Recipe) -> None:
    assert variants(recipe, "rtl_ratio") == {1.0: "mbert-dap", 0.5: "half"}
    assert variants(recipe, "rtl_layers") == {2: "mbert-dap", 3: "deep"}


def test_figures_are_drawn_as_far_as_there_are_results(recipe: Recipe, tmp_path: Path) -> None:
    found = {"mbert-dap": {0: reports(90.0), 1: reports(91.0)}, "half": {0: reports(70.0)}}
    data = varied_data(recipe, found, "rtl_ratio")
    assert data["Tatoeba"] == {0.5: [71.0], 1.0: [91.0, 92.0]}
    assert [*data] == ["Tatoeba", "BUCC", "XNLI"]
    lines = draw_figures(recipe, found, {}, tmp_path / "figures")
    assert lines[0] == "figure-1.svg: mbert-tr is not trained yet"
    assert lines[2].endswith("figure-4.svg, without rtl_layers 3")
    drawn = [path.name for path in sorted((tmp_path / "figures").iterdir())]
    assert drawn == ["figure-3.svg", "figure-4.svg"]
    text = (tmp_path / "figures" / "figure-3.svg").read_text()
    assert "reconstruction ratio" in text
    with pytest.raises(ValueError, match="has no run mbert-tr"):
        draw_figures(Recipe("other", {}), {}, {}, tmp_path)
