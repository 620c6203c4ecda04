"""Links and states of words, each against a plain loop."""

import numpy as np
from naive import cosines
from numpy.testing import assert_allclose

from dap_transformers.alignment.links import align_tokens, overlaps, word_states


def naive_links(table: np.ndarray, rounds: int) -> list[tuple[int, int]]:
    """Link tokens as Algorithm 1 of SimAlign does, one by one in float64."""
    links: set[tuple[int, int]] = set()
    for _ in range(1 if min(table.shape) <= 2 else rounds):
        sources = {s for s, _ in links}
        targets = {t for _, t in links}
        if len(sources) == len(table) or len(targets) == len(table.T):
            break
        similarity = (table + 1) / 2
        for s, t in np.ndindex(table.shape):
            similarity[s, t] *= (1.0, 0.9, 0.0)[(s in sources) + (t in targets)]
        for s, t in enumerate(similarity.argmax(1)):
            is_mutual = similarity[:, t].argmax() == s
            if is_mutual and not (s in sources and t in targets):
                links.add((s, t))
    return sorted(links)


def test_links_equal_a_plain_loop() -> None:
    random = np.random.default_rng(1)
    added = 0
    for size in [(1, 1), (1, 5), (2, 9), (9, 2), *[(7, 4), (3, 11), (12, 12)] * 5]:
        source, target = (100 * random.normal(size=(count, 3)) for count in size)
        mutual, similarity = align_tokens(source, target)
        links, _ = align_tokens(source, target, "itermax")
        table = cosines(source, target)
        assert_allclose(similarity, table, atol=1e-6)
        assert similarity.dtype == np.float32
        assert [*map(tuple, mutual)] == naive_links(table, 1)
        assert [*map(tuple, links)] == naive_links(table, 2)
        added += len(links) - len(mutual)
    assert added


def test_alignment_of_equal_tokens_takes_the_first() -> None:
    twice = np.ones((2, 3), np.float32)
    assert align_tokens(twice, twice)[0].tolist() == [[0, 0]]


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
