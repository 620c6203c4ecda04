"""States of words, token retrieval and the quality of links, each against a plain loop."""

import numpy as np
import pytest

from dap_transformers.alignment.links import (
    align_tokens,
    alignment_quality,
    token_retrieval_accuracy,
    word_states,
)

#: Source states, target states and links of each pair.
AlignedPairs = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]


def pairs(seed: int, count: int = 7) -> AlignedPairs:
    """Make noisy translations in another order, with some of their links.

    The last pair has no tokens and no links.
    """
    rng = np.random.default_rng(seed)
    source = [rng.normal(size=(rng.integers(2, 7), 5)) for _ in range(count)]
    orders = [rng.permutation(len(states)) for states in source]
    target = []
    for states, order in zip(source, orders):
        target.append(states[order] + rng.normal(size=states.shape))
    links = []
    for order in orders:
        all_links = np.stack([order, np.arange(len(order))], 1)
        links.append(all_links[: rng.integers(1, 7)])
    links[0] = np.concatenate([links[0], [[0, 0], [0, 1]]])  # a token may have several links
    empty = np.empty((0, 5))
    return [*source, empty], [*target, empty], [*links, np.empty((0, 2), np.int64)]


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / lengths) if lengths else 0.0


def naive_alignment(
    source: np.ndarray, target: np.ndarray
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the links of rows that are each other's nearest, and all cosines, by plain loops."""
    table = []
    for a in source.astype(np.float64):
        table.append([cosine(a, b) for b in target.astype(np.float64)])
    links = []
    for s, row in enumerate(table):
        t = row.index(max(row))
        column = [other[t] for other in table]
        if column.index(max(column)) == s and source[s].any() and target[t].any():
            links.append([s, t])
    return links, table


def naive_accuracy(
    queries: list[np.ndarray], keys: list[np.ndarray], links: list[np.ndarray]
) -> tuple[float, float]:
    hits = [0, 0]  # among all keys, and among those of the own pair
    total = 0
    for row, states in enumerate(queries):
        for i, query in enumerate(states):
            gold = {(row, int(b)) for a, b in links[row] if a == i}
            if not gold:
                continue
            total += 1
            own = {(row, j): cosine(query, key) for j, key in enumerate(keys[row])}
            pool = {}
            for other, side in enumerate(keys):
                for j, key in enumerate(side):
                    pool[other, j] = cosine(query, key)
            hits[0] += max(pool, key=pool.get) in gold
            hits[1] += max(own, key=own.get) in gold
    return 100 * hits[0] / total, 100 * hits[1] / total


def test_alignment_equals_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    for sizes in ((1, 1), (7, 4), (3, 11)):
        source_size, target_size = sizes
        source = random.normal(size=(source_size, 5)).astype(np.float32) * 100
        target = random.normal(size=(target_size, 5)).astype(np.float32) * 100
        target[0] = 0  # no direction
        links, similarity = align_tokens(source, target)
        expected_links, expected = naive_alignment(source, target)
        assert links.tolist() == expected_links
        np.testing.assert_allclose(similarity, expected, atol=1e-6)
        assert similarity.dtype == np.float32


def first_highest(values: list[float]) -> int:
    return values.index(max(values))


def naive_itermax(table: list[list[float]]) -> set[tuple[int, int]]:
    """Link tokens as Algorithm 1 of SimAlign does with two rounds, by plain loops in float64."""
    size = (len(table), len(table[0]))
    links: set[tuple[int, int]] = set()
    for _ in range(1 if min(size) <= 2 else 2):
        sources = {s for s, _ in links}
        targets = {t for _, t in links}
        if len(sources) == size[0] or len(targets) == size[1]:
            break
        similarity = [[0.0] * size[1] for _ in range(size[0])]
        for s in range(size[0]):
            for t in range(size[1]):
                factor = (1.0, 0.9, 0.0)[(s in sources) + (t in targets)]
                similarity[s][t] = factor * (table[s][t] + 1) / 2
        for s in range(size[0]):
            t = first_highest(similarity[s])
            is_mutual = first_highest([row[t] for row in similarity]) == s
            if is_mutual and not (s in sources and t in targets):
                links.add((s, t))
    return links


def test_itermax_equals_a_plain_loop_and_only_adds_links() -> None:
    random = np.random.default_rng(1)
    added = 0
    for size in [(1, 5), (2, 9), (9, 2), *[(7, 4), (3, 11), (12, 12)] * 5]:
        source = random.normal(size=(size[0], 3))
        target = random.normal(size=(size[1], 3))
        links, similarity = align_tokens(source, target, "itermax")
        found = {(s, t) for s, t in links.tolist()}
        assert found == naive_itermax(similarity.astype(np.float64).tolist())
        mutual = {(s, t) for s, t in align_tokens(source, target)[0].tolist()}
        assert mutual <= found
        added += len(found - mutual)
    assert added

    # rows without a state take no part
    gap = np.insert(target, 2, 0, axis=0)
    with_gap = align_tokens(source, gap, "itermax")[0]
    shifted = [[s, t + (t >= 2)] for s, t in links.tolist()]
    assert with_gap.tolist() == shifted
    with pytest.raises(ValueError, match="method='mwmf': choose one of argmax, itermax"):
        align_tokens(source, target, "mwmf")


def test_alignment_of_equal_tokens_takes_the_first_and_of_none_is_empty() -> None:
    twice = np.ones((2, 3), np.float32)
    assert align_tokens(twice, twice)[0].tolist() == [[0, 0]]
    np.testing.assert_allclose(align_tokens(twice * 1e30, twice * 1e-30)[1], 1, rtol=1e-6)
    links, similarity = align_tokens(np.empty((0, 3)), twice)
    assert (links.shape, similarity.shape) == ((0, 2), (0, 2))


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), "3 dimensions, target states 4"),
        (np.ones((2, 3)), np.array([[1.0, 1, 1], [1, np.nan, 1]]), "target states: row 1"),
        (np.ones(3), np.ones((2, 3)), r"source states: shape \(3,\)"),
    ],
)
def test_alignment_refuses_what_cannot_be_compared(
    source: np.ndarray, target: np.ndarray, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        align_tokens(source, target)


@pytest.mark.parametrize("seed", range(4))
def test_token_retrieval_equals_a_plain_loop(seed: int) -> None:
    source, target, links = pairs(seed)
    found = token_retrieval_accuracy(source, target, links)
    forward = naive_accuracy(source, target, links)
    backward = naive_accuracy(target, source, [pair[:, ::-1] for pair in links])
    assert (found.pool[0], found.sentence[0]) == pytest.approx(forward)
    assert (found.pool[1], found.sentence[1]) == pytest.approx(backward)
    assert 0 < found.pool[0] < found.sentence[0] < 100  # the pool is harder, and neither is trivial
    for side in (0, 1):
        linked_tokens = [len(set(pair[:, side].tolist())) for pair in links]
        assert found.queries[side] == sum(linked_tokens)


def test_retrieval_is_of_angles_and_of_pairs_in_any_order() -> None:
    source, target, links = pairs(9)
    found = token_retrieval_accuracy(source, target, links)
    scaled = [states * 10.0 ** np.arange(len(states))[:, None] for states in source]
    assert token_retrieval_accuracy(scaled, target, links) == found
    order = np.random.default_rng(0).permutation(len(source))
    source = [source[row] for row in order]
    target = [target[row] for row in order]
    links = [links[row] for row in order]
    assert token_retrieval_accuracy(source, target, links) == found


def test_quality_equals_a_plain_loop() -> None:
    rng = np.random.default_rng(0)

    def random_links() -> list[np.ndarray]:
        return [np.unique(rng.integers(0, 4, size=(size, 2)), axis=0) for size in (5, 0, 7)]

    links = random_links()
    sure = random_links()
    further = random_links()
    right = correct = found = certain = 0
    for row in range(3):
        one = set(map(tuple, links[row].tolist()))
        gold = set(map(tuple, sure[row].tolist()))
        allowed = gold | set(map(tuple, further[row].tolist()))
        found += len(one)
        certain += len(gold)
        right += len(one & gold)
        correct += len(one & allowed)
    quality = alignment_quality(links, sure, further)
    assert quality.precision == pytest.approx(100 * correct / found)
    assert quality.recall == pytest.approx(100 * right / certain)
    assert quality.error_rate == pytest.approx(100 * (1 - (right + correct) / (found + certain)))
    assert 0 < quality.recall < quality.precision < 100


def test_quality_of_one_kind_of_link_is_one_minus_f1() -> None:
    sure = [np.array([[0, 0], [1, 1], [2, 0]])]
    quality = alignment_quality([np.array([[0, 0], [1, 0]])], sure)
    f1 = 2 * quality.precision * quality.recall / (quality.precision + quality.recall)
    assert quality.error_rate == pytest.approx(100 - f1)
    assert alignment_quality(sure, sure).error_rate == 0
    nothing = alignment_quality([np.empty((0, 2), np.int64)], sure)
    assert (nothing.precision, nothing.recall, nothing.error_rate) == (0, 0, 100)


def test_word_states_are_means_of_the_subwords_that_touch_the_word() -> None:
    states = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    # the token 5-8 contains a space, and 8-8 has no character
    tokens = np.array([[0, 3], [3, 5], [5, 8], [8, 8], [9, 12]])
    words = np.array([[0, 5], [6, 7], [7, 8], [20, 22]])
    found = word_states(states, tokens, words)
    expected = [states[:2].mean(0), states[2], states[2], np.zeros(3)]
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert word_states(states, tokens, np.empty((0, 2))).shape == (0, 3)


def test_what_cannot_be_measured_is_named() -> None:
    source, target, links = pairs(0)
    with pytest.raises(ValueError, match="8 and 8 and 2 pairs"):
        token_retrieval_accuracy(source, target, links[:2])
    with pytest.raises(ValueError, match=r"pair 1: a link \(0, 99\)"):
        token_retrieval_accuracy(source, target, [links[0], np.array([[0, 99]]), *links[2:]])
    nothing = [np.empty((0, 2), np.int64)] * len(source)
    with pytest.raises(ValueError, match="no link in 8 pairs"):
        token_retrieval_accuracy(source, target, nothing)
    with pytest.raises(ValueError, match="no link in 8 pairs"):
        alignment_quality(links, nothing)
    with pytest.raises(ValueError, match="5 token states and 4 spans"):
        word_states(np.ones((5, 2)), np.ones((4, 2)), np.ones((1, 2)))


def test_a_word_without_state_is_no_hit_and_has_no_link() -> None:
    states = np.array([[0.0, 0.0], [-1.0, 0.0]])
    links, _ = align_tokens(states, states)
    assert links.tolist() == [[1, 1]]
    found = token_retrieval_accuracy([states], [states], [np.array([[0, 0], [1, 1]])])
    assert (found.pool, found.sentence) == ((50.0, 50.0), (50.0, 50.0))
