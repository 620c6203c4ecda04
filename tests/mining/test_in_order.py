"""The alignment of two translations in order, against a naive dynamic programme, and its files."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import synthetic_pairs
from naive import cosines
from written import json_rows, lines_of, pairs_of, read_table, write

from dap_transformers.commands import mine_bitext
from dap_transformers.errors import UserError
from dap_transformers.mining import in_order
from dap_transformers.mining.in_order import (
    BAND,
    SKIP_SHARE,
    SKIPPED,
    align,
    band_around,
    cost_of_skipping,
    gains,
    gains_of_pairs,
    longest_ascending,
    nearest_pairs,
    sides_of,
)
from dap_transformers.mining.texts import GroupedText
from dap_transformers.search.exact import mutual_neighbours
from dap_transformers.text.corpus import load_bitext
from dap_transformers.text.sentences import Sentence

#: An array of the source and one of the target.
Sides = Sequence[np.ndarray]
SOURCE, TARGET = zip(*synthetic_pairs("de", 40), strict=True)


def texts_of(*meanings: np.ndarray, noise: float = 0.3, most: int = 3) -> tuple[list, list]:
    """Return vectors and texts of sentences with meanings (N, D), in groups of at most `most`.

    A group's vector is a noisy sum of meanings.
    """
    rng = np.random.default_rng(0)
    vectors = []
    for text in meanings:
        sums = [text[i : i + size].sum(0) for size in range(1, most + 1) for i in range(len(text))]
        vectors.append(sums + noise * rng.normal(size=(len(sums), text.shape[1])))
    grouped = []
    for side in vectors:
        groups = np.arange(len(side)).reshape(most, -1).T
        lengths = rng.integers(9, 12, len(groups))
        grouped.append(SimpleNamespace(groups=groups, lengths=lengths, kinds=groups[:, 0]))
    return vectors, grouped


def two_books(n: int, seed: int, most: int) -> tuple[list, list]:
    """Return two texts. In the second, sentences are left out, added and merged."""
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
    return texts_of(meanings, np.array(other), most=most)


def lengths_between(chain: list, lengths: Sides, most: int) -> np.ndarray:
    """Return both texts' characters from first to last anchor, without what only one text has."""
    total = np.zeros(2)
    after = (chain[-1][0] + 1, chain[-1][1] + 1)
    for (i, j), (later, other) in pairwise([*chain, after]):
        steps = (later - i, other - j)
        if max(steps) <= most * min(steps):
            total += lengths[0][i:later].sum(), lengths[1][j:other].sum()
    return total


def naive(
    vectors: Sides, lengths: Sides
) -> tuple[list[tuple[int, ...]], list[list[float]], np.ndarray]:
    """Find the groups (i, j, a, b) of highest gain by a full table in float64.

    A sentence without a translation is a group with an empty side.

    Args:
        vectors: (S, N, D) and (S, M, D), of the groups of 1 to S sentences, by first sentence.
        lengths: (N,) and (M,)

    Returns:
        The groups, the gains (N, M) of single sentences, and the anchors (A, 2).
    """
    x, y = (side / np.linalg.norm(side, axis=-1, keepdims=True) for side in vectors)
    n, m = map(len, lengths)

    def mean_near(vector: np.ndarray, alone: np.ndarray, first: int, size: int) -> float:
        places = [first - 2, first - 1, first + size, first + size + 1]
        near = [k for k in places if 0 <= k < len(alone)] or [0, -1]
        return sum(vector @ alone[k] for k in near) / len(near)

    def gain(i: int, j: int, a: int, b: int) -> float:
        own, other = x[a - 1, i], y[b - 1, j]
        near = mean_near(own, y[0], j, b) + mean_near(other, x[0], i, a)
        shares = [
            part.sum() / whole
            for part, whole in zip((lengths[0][i : i + a], lengths[1][j : j + b]), anchored)
        ]
        return (own @ other - near / 2) * np.log2(1 + min(shares) / max(shares))

    cosines = x[0] @ y[0].T
    forward, backward = cosines.argmax(1), cosines.argmax(0)
    pairs = [(i, j) for i, j in enumerate(forward) if backward[j] == i]
    chain = [pairs[place] for place in longest_ascending([j for _, j in pairs])]
    anchored = lengths_between(chain, lengths, len(x))
    joins = [True]
    for (i, j), (later, other) in pairwise(chain):
        a, b = later - i, other - j
        if (a, b) in ((2, 1), (1, 2)) and len(x) > 1:
            with_first = gain(i, j, a, b) >= gain(i, j, 1, 1)
            with_second = gain(i + 1, j + 1, a, b) >= gain(later, other, 1, 1)
            joins.append(with_first or with_second)
    skip = max(0, SKIP_SHARE * (np.mean(joins) - SKIPPED))
    skip *= max(0, np.median([gain(i, j, 1, 1) for i, j in chain]))

    @cache
    def best(i: int, j: int) -> tuple[float, list]:
        """Return the highest gain of the first i and j sentences, and its groups."""
        if i == j == 0:
            return 0.0, []
        found = []
        for a, b in [(1, 0), (0, 1), *product(range(1, len(x) + 1), repeat=2)]:
            if a <= i and b <= j:
                own = gain(i - a, j - b, a, b) if a and b else -skip
                found.append((best(i - a, j - b)[0] + own, a, b))
        highest, a, b = max(found)
        return highest, [*best(i - a, j - b)[1], (i - a, j - b, a, b)]

    of_sentences = [[gain(i, j, 1, 1) for j in range(m)] for i in range(n)]
    return best(n, m)[1], of_sentences, np.array(chain)


@pytest.mark.parametrize(("n", "seed", "most"), [(80, 1, 3), (2, 2, 3), (1, 3, 3), (80, 1, 1)])
def test_the_groups_are_those_of_a_full_table_in_float64(
    n: int, seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_order, "BLOCK", 32)
    vectors, texts = two_books(n, seed, most)
    groups, remarks = align(vectors, texts)
    by_size = [side.reshape(most, -1, side.shape[1]) for side in vectors]
    expected, of_sentences, anchors = naive(by_size, [text.lengths for text in texts])
    sides = sides_of(vectors, texts, [np.zeros(len(text.groups), bool) for text in texts], anchors)
    singles = (side.groups(np.arange(len(side.rows)), 1) for side in sides)
    np.testing.assert_allclose(gains(*singles), of_sentences, atol=1e-6)
    assert groups[["source", "target", "sources", "targets"]].tolist() == expected
    assert not remarks
    for score, i, j, a, b in groups[~np.isnan(groups["score"])].tolist():
        [[cosine]] = cosines(by_size[0][a - 1, [i]], by_size[1][b - 1, [j]])
        assert score == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize(
    ("sentences", "places"),
    [(120, [60] * 600), (5, [0] * 12 + [5] * 13), (1, [0, 0, 1, 1]), (1, [])],
)
def test_passages_that_only_one_text_has_change_no_other_group(
    sentences: int, places: list
) -> None:
    rng = np.random.default_rng(3)
    book = rng.normal(size=(sentences, 16)) + 2  # as alike as vectors of encoders
    longer = np.insert(book, places, rng.normal(size=(len(places), 16)) + 2, axis=0)
    groups, _ = align(*texts_of(book, longer))
    found = groups[groups["sources"] > 0][["source", "target", "sources", "targets"]].tolist()
    assert found == [(i, i + sum(place <= i for place in places), 1, 1) for i in range(sentences)]


@pytest.mark.parametrize("numbered", [False, True])
def test_a_line_that_one_text_repeats_is_in_no_group(numbered: bool) -> None:
    rng = np.random.default_rng(5)
    book = rng.normal(size=(60, 16)) + 0.7
    foot = rng.normal(size=16) + 0.7
    places = np.arange(5, 60, 9)
    vectors, texts = texts_of(np.insert(book, places, foot, axis=0), book)
    feet = places + np.arange(len(places))
    printed = texts[0]
    printed.kinds = np.arange(60 + len(feet))
    printed.kinds[feet] = feet[0]
    if not numbered:  # one line of the text
        printed.groups[:, 0] = np.unique(printed.kinds, return_inverse=True)[1]
        printed.groups[:, 1:] -= len(feet) - 1
        vectors[0] = np.delete(vectors[0], feet[1:], axis=0)
    groups, _ = align(vectors, texts)
    of_feet = groups[np.isin(groups["source"], feet) & (groups["sources"] > 0)]
    assert of_feet[["sources", "targets"]].tolist() == [(1, 0)] * len(feet)
    assert (groups["sources"] * groups["targets"] == 1).sum() == 60
    # They are no sign that skipping is cheap.
    anchors = np.stack([np.delete(np.arange(60 + len(feet)), feet), np.arange(60)], 1)
    _, is_ungrouped = nearest_pairs(vectors, texts, mutual_neighbours)
    sides = sides_of(vectors, texts, is_ungrouped, anchors)
    highest = SKIP_SHARE * (1 - SKIPPED) * np.median(gains_of_pairs(*sides, anchors))
    assert cost_of_skipping(*sides, anchors) == pytest.approx(highest)


def test_the_band_holds_the_best_groups_beside_a_long_run_without_translation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    book = rng.normal(size=(400, 16))
    longer = np.concatenate([book[:150], rng.normal(size=(3 * BAND, 16)), book[150:]])
    both = [texts_of(longer, book), texts_of(book, longer)]
    found = [align(*texts)[0].tobytes() for texts in both]
    monkeypatch.setattr(
        in_order, "band_around", lambda _, n, m: (np.zeros(n + 1, int), np.full(n + 1, m))
    )
    assert [align(*texts)[0].tobytes() for texts in both] == found


@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_the_band_grows_with_the_length_wherever_the_anchors_are(share: float) -> None:
    n, m = 20_000, 30_000
    low, high = band_around(np.linspace(0, [n * share, m], 100).astype(int), n, m)
    assert (low[0], high[-1]) == (0, m)
    assert (np.diff([low, high]) >= 0).all()
    assert (high - low).sum() <= 2 * BAND * (n + m) + 2 * n


def test_texts_in_another_order_and_of_another_length_are_reported() -> None:
    meanings = np.random.default_rng(0).normal(size=(60, 16))
    moved = np.roll(meanings, 20, axis=0)
    for other, expected in ((moved, "in one order"), (meanings[:5], "60 sentences")):
        _, remarks = align(*texts_of(meanings, other, noise=0.1))
        assert any(expected in remark for remark in remarks)


def test_the_groups_of_a_text_join_neighbours_over_empty_lines() -> None:
    lines = ["a", " ", "是。", "c"]
    text = GroupedText([Sentence(*line) for line in enumerate(lines, 1)], "t", 2)
    assert [text[row] for row in text.groups.flat] == ["a", "a 是。", "是。", "是。c", "c", "c"]
    assert str(text) == "t: 3 sentences"
    assert [text.place(row).split()[-1] for row in range(5)] == ["1", "3", "4", "1", "3"]
    lines = ["Page 7", "a", "Page 12"]
    text = GroupedText([Sentence(*line) for line in enumerate(lines, 1)], "t", 2)
    assert text.kinds[0] == text.kinds[2] != text.kinds[1]


def run(command: str) -> dict:
    return mine_bitext.run(command.split())


def joined(texts: Iterable[str]) -> str:
    return " ".join(filter(None, texts))


@pytest.fixture
def options(tiny_bert_dir: Path) -> str:
    return f"--model {tiny_bert_dir} --pooling mean --in_order"


def test_two_books_become_a_file_from_which_both_texts_can_be_read_back(
    options: str, tmp_path: Path
) -> None:
    sides = {"source": [*SOURCE[:3], "", *SOURCE[3:]], "target": [f"{x} & <b>" for x in TARGET]}
    for number in range(12):
        sides["source"].insert(4 * number, f"Seite {number}")
    for side, lines in sides.items():
        write(tmp_path / side, lines_of(lines))

    def require_both_texts(rows: list[dict]) -> None:
        for side, lines in sides.items():
            assert joined(row[side] for row in rows) == joined(lines)

    command = f"{tmp_path}/source {tmp_path}/target {options} --pair de-en"
    outputs = [tmp_path / f"de-en.{ending}" for ending in ("tsv", "parquet", "tmx", "jsonl")]
    for output in outputs:
        made = run(f"{command} --output {output}")
    assert made["source"]["sentences"] == made["target"]["sentences"] + 12 == 52

    rows = json_rows(outputs[-1])
    assert pq.read_table(outputs[1]).to_pylist() == rows
    table = read_table(outputs[0])
    for side in sides:
        assert table[side].tolist() == [row[side] for row in rows]
    pairs = [(row["source"], row["target"]) for row in rows if row["score"] is not None]
    for output in outputs:
        assert pairs_of(load_bitext([output])["de"]) == pairs
        unnamed = output.rename(tmp_path / f"x{output.suffix}")
        language = "de" if output == outputs[2] else "und"  # TMX states its languages
        assert pairs_of(load_bitext([unnamed])[language]) == pairs
        unnamed.rename(output)
    assert len(pairs) == made["kept"] > 5
    alone = [row["source"] for row in rows if not row["target"]]
    assert sum(text.startswith("Seite") for text in alone) == 12
    require_both_texts(rows)
    for side, lines in sides.items():
        for row in rows:
            assert row[side] == " ".join(lines[number - 1] for number in row[f"{side}_lines"])
            assert row[side] or row["score"] is None

    # The sentences of groups below a threshold are listed as well.
    lowest = sorted(row["score"] for row in rows if row["score"] is not None)[len(pairs) // 2]
    made = run(f"{command} --output {outputs[-1]} --threshold {lowest}")
    rows = json_rows(outputs[-1])
    assert made["kept"] == sum(row["score"] is not None for row in rows) < len(pairs)
    assert made["source_without_translation"] == sum(not row["target"] for row in rows)
    require_both_texts(rows)


SUBTITLES = """1
00:00:01,500 --> 00:00:01,900
<i>He came, for</i>

2
00:00:02,500 --> 00:00:02,900
example, in May.

3
00:00:03,500 --> 00:00:03,900
<i> </i>

4
00:00:04,500 --> 00:00:04,900
She
left! Yes.
"""


def test_paragraphs_and_subtitles_become_sentences_with_their_places(
    options: str, tmp_path: Path
) -> None:
    paragraph = "Er kam z.\u00a0B. am 3. Mai. Sie ging! " * 20
    source = write(tmp_path / "a.de", f"{paragraph}\nJa. Nein.\n")
    target = write(tmp_path / "a.srt", SUBTITLES)
    output = tmp_path / "groups.jsonl"
    command = f"{source} {target} {options} --output {output}"
    with pytest.raises(UserError, match="--pair"):
        run(command)
    made = run(f"{command} --pair de-en")
    assert (made["source"]["sentences"], made["target"]["sentences"]) == (42, 3)
    rows = json_rows(output)
    assert "source_times" not in rows[0]
    places = {name: sum((row[name] for row in rows), []) for name in rows[0] if name[-1] == "s"}
    assert places["source_lines"] == [1] * 40 + [2] * 2
    assert places["source_numbers"] == [*range(1, 41), 1, 2]
    assert places["target_lines"] == [1, 4, 4]
    assert places["target_numbers"] == [1, 1, 2]
    assert places["target_times"] == ["0:00:01", "0:00:04", "0:00:04"]
    shown = joined(row["target"] for row in rows)
    assert shown == "He came, for example, in May. She left! Yes."
    run(f"{command} --split_lines false")
    assert len(output.read_text().splitlines()) < 5
