"""The alignment of two translations in order, against a naive dynamic programme, and its files."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import synthetic_pairs
from written import write as write_text

from dap_transformers.commands.mine import run
from dap_transformers.mining.in_order import (
    SKIP_QUANTILE,
    Costs,
    Side,
    align,
    band_around,
    best_groups,
)
from dap_transformers.search.exact import mutual_neighbours
from dap_transformers.text.corpus import load_bitext

PAIRS = synthetic_pairs("de", 40)


def book(rng: np.random.Generator, meanings: np.ndarray, noise: float) -> Side:
    """Return a text whose group vectors are noisy sums of the sentences' vectors."""
    vectors, rows = [], []
    for size in (1, 2, 3):
        count = len(meanings) - size + 1
        sums = sum(meanings[start : start + count] for start in range(size))
        vectors.append((sums + noise * rng.normal(size=sums.shape)).astype(np.float32))
        rows.append(np.arange(count))
    return Side(vectors, rows)


def two_books(n: int, seed: int) -> tuple[Side, Side]:
    """Return two texts: sentences are left out, added and merged on the second side."""
    rng = np.random.default_rng(seed)
    meanings = rng.normal(size=(n, 16)) + 0.7
    other = []
    for meaning in meanings:
        kind = rng.choice(["same", "left out", "added", "merged"], p=[0.6, 0.1, 0.1, 0.2])
        if kind == "merged" and other:
            other[-1] = other[-1] + meaning
        elif kind != "left out":
            other.append(meaning)
        if kind == "added":
            other.append(rng.normal(size=16))
    return book(rng, meanings, 0.3), book(rng, np.array(other), 0.3)


def naive(source: Side, target: Side, skip: float) -> tuple[float, list[tuple[int, ...]]]:
    """Return the lowest cost and its groups (i, j, a, b) by a full table in float64."""
    unit = []
    for side in (source, target):
        vectors = [each.astype(np.float64) for each in side.vectors]
        unit.append([each / np.linalg.norm(each, axis=1, keepdims=True) for each in vectors])
    means = [np.concatenate(each).mean(0) for each in unit]
    n, m = len(source), len(target)
    best = np.full((n + 1, m + 1), np.inf)
    best[0, 0] = 0
    step = {}
    for i in range(n + 1):
        for j in range(m + 1):
            found = [(best[i - 1, j] + skip, 1, 0)] if i else []
            found += [(best[i, j - 1] + skip, 0, 1)] if j else []
            for a in range(1, min(i, 3) + 1):
                for b in range(1, min(j, 3) + 1):
                    x, y = unit[0][a - 1][i - a], unit[1][b - 1][j - b]
                    mean = ((1 - x @ means[1]) + (1 - y @ means[0])) / 2
                    found.append((best[i - a, j - b] + a * b * (1 - x @ y) / mean, a, b))
            if found:
                best[i, j], *step[i, j] = min(found)
    groups = []
    i, j = n, m
    while i or j:
        a, b = step[i, j]
        i, j = i - a, j - b
        if a and b:
            groups.append((i, j, a, b))
    return best[n, m], groups[::-1]


@pytest.mark.parametrize(("n", "seed"), [(150, 0), (80, 1), (2, 2), (1, 3)])
def test_the_groups_are_those_of_a_full_table_in_float64(n: int, seed: int) -> None:
    if n > 3:
        source, target = two_books(n, seed)
    else:
        rng = np.random.default_rng(seed)
        sides = []
        for count in (n, n + 1):
            own = book(rng, rng.normal(size=(count, 16)), 0.1)
            sides.append(Side(own.vectors[:count], own.rows[:count]))
        source, target = sides
    neighbours = mutual_neighbours(source.vectors[0], target.vectors[0], 1)
    groups, remarks = align(source, target, neighbours)
    costs = Costs(source, target)
    _, expected = naive(source, target, costs.skip())
    assert [tuple(row)[1:] for row in groups.tolist()] == expected
    assert not remarks
    for score, i, j, a, b in groups.tolist():
        x, y = source.vectors[a - 1][i], target.vectors[b - 1][j]
        assert score == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-6)

    # a band as wide as the table gives the same path as the one around the anchors
    everywhere = np.zeros(len(source) + 1, int), np.full(len(source) + 1, len(target))
    whole = best_groups(costs, *everywhere)
    assert whole[["source", "target"]].tolist() == groups[["source", "target"]].tolist()


def test_skipping_costs_a_fifth_of_the_random_pairs_or_more() -> None:
    source, target = two_books(60, 4)
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in
            (source.vectors[0], target.vectors[0])]  # fmt: skip
    cosines = unit[0] @ unit[1].T
    costs = Costs(source, target)
    mean = 2 - (unit[0] @ costs.target_mean)[:, None] - unit[1] @ costs.source_mean
    expected = np.quantile(2 * (1 - cosines) / mean, SKIP_QUANTILE)
    assert costs.skip() == pytest.approx(expected, rel=0.01)


def test_the_band_grows_with_the_length_and_not_with_its_square() -> None:
    widths = []
    for n in (1_000, 100_000):
        anchors = np.arange(0, n, 3)
        low, high = band_around(np.stack([anchors, anchors], 1), n, n)
        widths.append((high - low + 1).max())
        assert low[0] == 0
        assert high[-1] == n
    assert widths[0] == widths[1] < 100


def test_texts_in_another_order_and_of_another_length_are_reported() -> None:
    rng = np.random.default_rng(0)
    meanings = rng.normal(size=(60, 16))
    source = book(rng, meanings, 0.1)
    for other, expected in ((meanings[::-1], "in one order"), (meanings[:5], "60 sentences")):
        target = book(rng, other, 0.1)
        neighbours = mutual_neighbours(source.vectors[0], target.vectors[0], 1)
        _, remarks = align(source, target, neighbours)
        assert any(expected in remark for remark in remarks)


@pytest.mark.parametrize("name", ["book.tsv", "book.jsonl", "book.parquet", "de-en.tmx"])
def test_two_books_become_a_file_of_groups(tiny_bert_dir: Path, tmp_path: Path, name: str) -> None:
    source = [sentence for sentence, _ in PAIRS]
    source[3:3] = [""]  # an empty line counts, but is no sentence
    target = [f"{sentence} & <b>" for _, sentence in PAIRS]
    files = []
    for place, lines in (("a.de", source), ("a.en", target)):
        files.append(str(write_text(tmp_path / place, "".join(f"{line}\n" for line in lines))))
    output = tmp_path / name
    argv = [*files, "--model", str(tiny_bert_dir), "--pooling", "mean", "--in_order"]
    argv += ["--output", str(output)]
    made = run([*argv, *(["--pair", "de-en"] if name.endswith("tmx") else [])])

    if name.endswith("tmx"):
        read = load_bitext([str(output)])["de"]
        pairs = list(zip(read["source"], read["target"]))
        assert len(pairs) == made["kept"]
        assert all(" & <b>" in text for _, text in pairs)
        return
    if name.endswith("tsv"):
        header, *lines = output.read_text().splitlines()
        rows = [dict(zip(header.split("\t"), line.split("\t"))) for line in lines]
        for row in rows:
            for side in ("source_lines", "target_lines"):
                row[side] = [int(number) for number in row[side].split()]
    elif name.endswith("jsonl"):
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    else:
        rows = pq.read_table(output).to_pylist()
    assert len(rows) == made["kept"] > 5
    for side, lines in (("source", source), ("target", target)):
        seen = [number for row in rows for number in row[f"{side}_lines"]]
        assert seen == sorted(set(seen))
        assert len(seen) + made[f"{side}_without_translation"] == 40
        for row in rows:
            own = [lines[number - 1] for number in row[f"{side}_lines"]]
            assert row[side] == " ".join(own)
