"""Links and states of words, each against a plain loop."""

import numpy as np

from dap_transformers.alignment.links import align_tokens, overlaps, word_states


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


def test_alignment_of_equal_tokens_takes_the_first_and_of_none_is_empty() -> None:
    twice = np.ones((2, 3), np.float32)
    assert align_tokens(twice, twice)[0].tolist() == [[0, 0]]
    np.testing.assert_allclose(align_tokens(twice * 1e30, twice * 1e-30)[1], 1, rtol=1e-6)
    links, similarity = align_tokens(np.empty((0, 3)), twice)
    assert (links.shape, similarity.shape) == ((0, 2), (0, 2))


def test_word_states_are_means_of_the_subwords_that_touch_the_word() -> None:
    states = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    # the token 5-8 contains a space, and 8-8 has no character
    tokens = np.array([[0, 3], [3, 5], [5, 8], [8, 8], [9, 12]])
    words = np.array([[0, 5], [6, 7], [7, 8], [20, 22]])
    found = word_states(states, overlaps(words, tokens))
    expected = [states[:2].mean(0), states[2], states[2], np.zeros(3)]
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_a_word_without_state_has_no_link() -> None:
    states = np.array([[0.0, 0.0], [-1.0, 0.0]])
    links, _ = align_tokens(states, states)
    assert links.tolist() == [[1, 1]]
