"""Links and states of words, each against a plain loop."""

import numpy as np
from naive import cosines
from numpy.testing import assert_allclose

from dap_transformers.alignment.links import align_tokens, overlaps, word_states


def first_highest(values: list[float]) -> int:
    return values.index(max(values))


def naive_links(table: list[list[float]], rounds: int) -> list[list[int]]:
    """Link tokens as Algorithm 1 of SimAlign does, by plain loops in float64."""
    size = (len(table), len(table[0]))
    links: set[tuple[int, int]] = set()
    for _ in range(1 if min(size) <= 2 else rounds):
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
    return [list(link) for link in sorted(links)]


def test_links_equal_a_plain_loop() -> None:
    random = np.random.default_rng(1)
    added = 0
    for size in [(1, 1), (1, 5), (2, 9), (9, 2), *[(7, 4), (3, 11), (12, 12)] * 5]:
        source = random.normal(size=(size[0], 3)).astype(np.float32) * 100
        target = random.normal(size=(size[1], 3)).astype(np.float32) * 100
        mutual, similarity = align_tokens(source, target)
        links, _ = align_tokens(source, target, "itermax")
        table = cosines(source, target).tolist()
        assert_allclose(similarity, table, atol=1e-6)
        assert similarity.dtype == np.float32
        assert mutual.tolist() == naive_links(table, 1)
        assert links.tolist() == naive_links(table, 2)
        added += len(links) - len(mutual)
    assert added


def test_alignment_of_equal_tokens_takes_the_first_and_of_none_is_empty() -> None:
    twice = np.ones((2, 3), np.float32)
    assert align_tokens(twice, twice)[0].tolist() == [[0, 0]]
    assert_allclose(align_tokens(twice * 1e30, twice * 1e-30)[1], 1, rtol=1e-6)
    links, similarity = align_tokens(np.empty((0, 3)), twice)
    assert (links.shape, similarity.shape) == ((0, 2), (0, 2))


def test_word_states_are_means_of_the_subwords_that_touch_the_word() -> None:
    states = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    # the token 5-8 contains a space, and 8-8 has no character
    tokens = np.array([[0, 3], [3, 5], [5, 8], [8, 8], [9, 12]])
    words = np.array([[0, 5], [6, 7], [7, 8], [20, 22]])
    found = word_states(states, overlaps(words, tokens))
    expected = [states[:2].mean(0), states[2], states[2], np.zeros(3)]
    assert_allclose(found, expected, atol=1e-7)


def test_a_word_without_state_has_no_link() -> None:
    gap = np.array([[0.0, 0.0], [-1.0, 0.0]])
    opposite = -gap[1:]
    assert align_tokens(gap, gap)[0].tolist() == [[1, 1]]
    assert align_tokens(gap, opposite)[0].tolist() == [[1, 0]]
    assert align_tokens(opposite, gap)[0].tolist() == [[0, 1]]
