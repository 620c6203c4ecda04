"""The paper's numbers: consistent with each other, and shown beside ours."""

import re
from collections.abc import Iterator

import pytest

from dap_transformers.evaluation.paper import (
    BUCC_PAIRS,
    PAPER_BUCC,
    PAPER_TATOEBA,
    PAPER_TATOEBA_PLACES,
    PAPER_XNLI,
    XNLI_LANGUAGES,
    bucc_table,
    tatoeba_averages,
    xnli_table,
)
from dap_transformers.evaluation.retrieval import GROUPS, Retrieval, Tatoeba
from dap_transformers.languages import TATOEBA_36


def printed_averages() -> Iterator[tuple[tuple, list[float], float]]:
    """Yield the name of each average in the paper, the numbers that it is of, and its value."""
    for model, directions in PAPER_TATOEBA_PLACES.items():
        for direction, accuracies in directions.items():
            assert tuple(accuracies)[:36] == TATOEBA_36
            printed = PAPER_TATOEBA[model][direction]
            for average, (size, group) in zip(printed, GROUPS.items(), strict=True):
                yield (model, direction, size), [accuracies[code] for code in group], average
    for model, (*numbers, average) in PAPER_XNLI.items():
        assert len(numbers) == len(XNLI_LANGUAGES)
        yield (model, "xnli"), numbers, average
    for split, models in PAPER_BUCC.items():
        for model, (*triples, average) in models.items():
            assert len(triples) == 3 * len(BUCC_PAIRS)
            yield (model, "bucc", split), triples[2::3], average


def test_printed_averages_follow_from_their_numbers_with_five_exceptions() -> None:
    off = {}
    for name, numbers, average in printed_averages():
        mean = sum(numbers) / len(numbers)
        if abs(mean - average) > 0.05 + 1e-9:  # more than rounding
            off[name] = (round(mean, 2), average)
    assert off == {
        ("XLM-R+DAP", "xx-en", 14): (94.92, 95.0),
        ("XLM-R+TR", "xx-en", 14): (93.74, 93.8),
        ("mBERT+DAP", "xx-en", 36): (90.84, 90.9),
        ("mBERT", "xnli"): (66.85, 66.8),
        ("XLM-R+TR", "xnli"): (73.15, 73.1),
    }


def test_f1_of_bucc_follows_from_precision_and_recall() -> None:
    for protocol, models in PAPER_BUCC.items():
        for model, numbers in models.items():
            for precision, recall, printed in zip(numbers[:-1:3], numbers[1::3], numbers[2::3]):
                if precision is not None:  # each of the three is rounded
                    harmonic = 2 * precision * recall / (precision + recall)
                    assert harmonic == pytest.approx(printed, abs=0.1), (protocol, model)


def cells(table: str, name: str) -> str:
    """Return the cells of a row between single spaces. A wide table has several parts."""
    parts = re.findall(rf"^{re.escape(name)} +(.+)$", table, re.MULTILINE)
    return " ".join(" ".join(parts).split())


def test_tatoeba_table_has_the_papers_number_of_each_language_and_group() -> None:
    numbers = {
        "languages": {
            "de": {"pairs": 1000, "xx-en": 80.0, "en-xx": 70.0},
            "gsw": {"pairs": 5, "xx-en": 1.0, "en-xx": 2.0},
        },
        "averages": {
            "36 languages": {"xx-en": 50.0, "en-xx": 40.0},
            "all 2": {"xx-en": 3.0, "en-xx": 4.0},
        },
    }
    table = Tatoeba({}).table(numbers)
    assert cells(table, "German") == "80.0 70.0 1000 99.1 98.9 99.2 98.9"
    assert cells(table, "gsw") == "1.0 2.0 5"
    assert cells(table, "36 languages") == "50.0 40.0 90.9 91.2 91.3 92.7"
    assert cells(table, "all 2") == "3.0 4.0"
    assert cells(table, "this model") == "- - 50.0 - - 40.0"
    assert "paper" not in Retrieval({}).table(numbers)  # for text other than Tatoeba
    assert tatoeba_averages({}) is None


def test_xnli_table_averages_only_all_15_languages() -> None:
    ours = {code: float(i) for i, code in enumerate(XNLI_LANGUAGES)}
    table = xnli_table(ours | {"nl": 99.0})
    assert cells(table, "this model") == " ".join([*(f"{i}.0" for i in range(15)), "7.0"])
    assert cells(table, "paper: XLM-R+DAP").endswith("66.0 74.0")
    del ours["ur"]
    assert cells(xnli_table(ours), "this model").endswith("- -")


def test_bucc_table_averages_only_all_four_pairs() -> None:
    ours = {}
    for i, pair in enumerate(BUCC_PAIRS):
        ours[pair] = {"precision": 90.0, "recall": 80.0, "f1": 84.0 + i}
    table = bucc_table(ours, "sample-threshold-on-training")
    assert cells(table, "this model").endswith("90.0 80.0 87.0 85.5")
    assert table.split()[-1] == "86.8"
    one = bucc_table({"de-en": ours["de-en"]}, "sample")
    assert cells(one, "this model") == "- - - 90.0 80.0 85.0" + " -" * 7
    assert bucc_table({"de-fr": ours["de-en"]}, "sample") is None
    assert bucc_table(ours, "training-optimal") is None


@pytest.mark.parametrize(("columns", "most"), [("200", 100), ("60", 60), ("20", 30)])
def test_tables_are_as_wide_as_the_terminal_and_at_most_100(
    columns: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = xnli_table(dict.fromkeys(XNLI_LANGUAGES, 50.0))
    assert most - 10 < max(map(len, table.splitlines())) <= most
    assert cells(table, "this model") == " ".join(["50.0"] * 16)
