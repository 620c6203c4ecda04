"""The alignment of two translations in order, against a naive dynamic programme, and its files."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import synthetic_pairs
from written import pairs_of
from written import write as write_text

from dap_transformers.commands.mine import run
from dap_transformers.mining.in_order import MARGIN, Costs, align, band_around, best_groups
from dap_transformers.mining.texts import GroupedText
from dap_transformers.text.corpus import load_bitext

SOURCE, TARGET = zip(*synthetic_pairs("de", 40))


def costs_of(*texts: np.ndarray, noise: float = 0.3) -> Costs:
    """Return the costs of texts of meanings (N, D). A group's vector is a noisy sum of meanings."""
    rng = np.random.default_rng(0)
    vectors = []
    for text in texts:
        sums = [text[i : i + size].sum(0) for size in (1, 2, 3) for i in range(len(text))]
        vectors.append(sums + noise * rng.normal(size=(len(sums), text.shape[1])))
    return Costs(vectors, [np.arange(len(side)).reshape(3, -1).T for side in vectors])


def two_books(n: int, seed: int) -> Costs:
    """Return the costs of two texts. In the second, sentences are left out, added and merged."""
    rng = np.random.default_rng(seed)
    meanings = rng.normal(size=(n, 16)) + 0.7
    other = [meanings[0]]
    for meaning in meanings[1:]:
        kind = rng.choice(["same", "left out", "added", "merged"], p=[0.6, 0.1, 0.1, 0.2])
        if kind == "merged":
            other[-1] = other[-1] + meaning
        elif kind != "left out":
            other.append(meaning)
        if kind == "added":
            other.append(rng.normal(size=16))
    return costs_of(meanings, np.array(other))


def naive(costs: Costs) -> list[tuple[int, ...]]:
    """Return the groups (i, j, a, b) of lowest cost by a full table in float64."""
    unit = []
    for side in costs.vectors:
        unit.append(side / np.linalg.norm(side, axis=1, keepdims=True))
    x, y = unit
    usual = (1 - x @ y.mean(0))[:, None] + (1 - y @ x.mean(0))
    table = 2 * (1 - x @ y.T) / usual
    n, m = map(len, costs.groups)
    best = np.full((n + 1, m + 1), np.inf)
    step = {}
    for i, j in product(range(n + 1), range(m + 1)):
        found = [(0.0, 0, 0)] if i == j == 0 else []
        for a, b in [(1, 0), (0, 1), *product((1, 2, 3), repeat=2)]:
            if a <= i and b <= j:
                cost = costs.skip
                if a and b:
                    rows = costs.groups[0][i - a, a - 1], costs.groups[1][j - b, b - 1]
                    cost = a * b * table[rows]
                found.append((best[i - a, j - b] + cost, a, b))
        best[i, j], *step[i, j] = min(found)
    groups = []
    i, j = n, m
    while i or j:
        a, b = step[i, j]
        i, j = i - a, j - b
        if a and b:
            groups.append((i, j, a, b))
    return groups[::-1]


@pytest.mark.parametrize(("n", "seed"), [(200, 0), (80, 1), (2, 2), (1, 3)])
def test_the_groups_are_those_of_a_full_table_in_float64(n: int, seed: int) -> None:
    costs = two_books(n, seed)
    groups, remarks = align(costs)
    assert groups[["source", "target", "sources", "targets"]].tolist() == naive(costs)
    assert not remarks
    for score, i, j, a, b in groups.tolist():
        x, y = costs.units(0, [i], a)[0], costs.units(1, [j], b)[0]
        assert score == pytest.approx(float(x @ y), abs=1e-6)


def test_the_band_holds_the_best_groups_beside_a_long_run_without_translation() -> None:
    rng = np.random.default_rng(0)
    book = rng.normal(size=(400, 16))
    longer = np.concatenate([book[:150], rng.normal(size=(3 * MARGIN, 16)), book[150:]])
    for costs in (costs_of(longer, book), costs_of(book, longer)):
        n, m = map(len, costs.groups)
        whole = best_groups(costs, np.zeros(n + 1, int), np.full(n + 1, m))
        found, _ = align(costs)
        whole["score"] = found["score"]
        assert found.tolist() == whole.tolist()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_the_band_grows_with_the_length_wherever_the_anchors_are(share: float) -> None:
    n, m = 20_000, 30_000
    low, high = band_around(np.linspace(0, [n * share, m], 100).astype(int), n, m)
    assert (low[0], high[-1]) == (0, m)
    assert (np.diff([low, high]) >= 0).all()
    assert (high - low).sum() <= 2 * MARGIN * (n + m) + 2 * n


def test_texts_in_another_order_and_of_another_length_are_reported() -> None:
    meanings = np.random.default_rng(0).normal(size=(60, 16))
    for other, expected in ((meanings[::-1], "in one order"), (meanings[:5], "60 sentences")):
        _, remarks = align(costs_of(meanings, other, noise=0.1))
        assert any(expected in remark for remark in remarks)


def test_the_groups_of_a_text_join_neighbours_over_empty_lines() -> None:
    text = GroupedText(["a", " ", "是。", "c"], "t", 2)
    assert [text[row] for row in text.groups.flat] == ["a", "a 是。", "是。", "是。c", "c", "c"]
    assert str(text) == "t: 4 lines, 1 empty, 0 repeated, 3 sentences"
    assert [text.place(row).split()[-1] for row in range(5)] == ["1", "3", "4", "1", "3"]


def test_two_books_become_a_file_of_groups(tiny_bert_dir: Path, tmp_path: Path) -> None:
    sides = {"source": [*SOURCE[:3], "", *SOURCE[3:]], "target": [f"{x} & <b>" for x in TARGET]}
    for side, lines in sides.items():
        write_text(tmp_path / side, "\n".join(lines))
    command = f"{tmp_path}/source {tmp_path}/target --model {tiny_bert_dir} --pooling mean"
    outputs = [tmp_path / f"de-en.{ending}" for ending in ("tsv", "parquet", "tmx", "jsonl")]
    read = []
    for output in outputs:
        languages = "--pair de-en" if output.suffix == ".tmx" else ""
        made = run(f"{command} --in_order --output {output} {languages}".split())
        read.append(pairs_of(load_bitext([str(output)])["de"]))
        assert read[-1] == read[0]
    assert made["source"]["lines"] == 41

    rows = [json.loads(line) for line in outputs[-1].read_text().splitlines()]
    assert [(row["source"], row["target"]) for row in rows] == read[0]
    assert len(rows) == made["kept"] > 5
    for side, lines in sides.items():
        seen = [number for row in rows for number in row[f"{side}_lines"]]
        assert seen == sorted(set(seen))
        assert len(seen) + made[f"{side}_without_translation"] == 40
        for row in rows:
            assert row[side] == " ".join(lines[number - 1] for number in row[f"{side}_lines"])
