"""Retrieval accuracy against a naive loop and sentence-transformers, and group averages."""

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import TranslationEvaluator

from dap_transformers.evaluation.retrieval import (
    group_averages,
    multilingual_pool_accuracy,
    retrieval_accuracy,
)
from dap_transformers.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36


def noisy_pairs(pairs: int = 80, dimensions: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    source = rng.normal(size=(pairs, dimensions))
    return source, source + 0.7 * rng.normal(size=source.shape)


def naive_accuracy(queries: np.ndarray, keys: np.ndarray) -> float:
    hits = 0
    for i, query in enumerate(queries):
        cosines = [query @ key / np.linalg.norm(query) / np.linalg.norm(key) for key in keys]
        hits += cosines.index(max(cosines)) == i
    return 100 * hits / len(queries)


def test_equals_the_naive_loop_in_both_directions() -> None:
    source, target = noisy_pairs()
    forward, backward = retrieval_accuracy(source, target)
    assert (forward, backward) == (naive_accuracy(source, target), naive_accuracy(target, source))
    assert forward != backward
    assert 50 < forward < 100


def test_equals_the_translation_evaluator_of_sentence_transformers() -> None:
    source, target = noisy_pairs()

    class GivenEmbeddings(TranslationEvaluator):
        def embed_inputs(
            self, model: object, sentences: list[str], **_: object
        ) -> list[torch.Tensor]:
            rows = {"s": source, "t": target}
            return [torch.tensor(rows[name[0]][int(name[1:])]) for name in sentences]

        def store_metrics_in_model_card_data(self, *_: object) -> None:
            """There is no model."""

    source_names = [f"s{i}" for i in range(len(source))]
    target_names = [f"t{i}" for i in range(len(source))]
    metrics = GivenEmbeddings(source_names, target_names, write_csv=False)(None)
    expected = metrics["src2trg_accuracy"] * 100, metrics["trg2src_accuracy"] * 100
    assert retrieval_accuracy(source, target) == pytest.approx(expected)


def naive_pool(queries: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return accuracy and share of the own language, with the rules of the docstring as loops."""
    right = 0
    own = 0
    for i, query in enumerate(queries):
        best = ("none", -1)
        highest = -np.inf
        candidates = [("own", row, queries[row]) for row in range(len(queries))]
        candidates += [("other", row, others[row]) for row in range(len(others))]
        for side, row, key in candidates:
            cosine = query @ key / np.linalg.norm(query) / np.linalg.norm(key)
            is_query = side == "own" and np.array_equal(query, key)
            if not is_query and cosine > highest:
                best = (side, row)
                highest = cosine
        right += best == ("other", i)
        own += best[0] == "own"
    return 100 * right / len(queries), 100 * own / len(queries)


@pytest.mark.parametrize("bias", [0.0, 1.0, 2.0])
def test_the_multilingual_pool_equals_the_naive_loop(bias: float) -> None:
    source, target = noisy_pairs()
    source[:, 0] += bias  # a direction that only tells the language
    target[:, 0] -= bias
    source[7] = source[3]  # repeated sentences
    target[50] = target[51]
    found = multilingual_pool_accuracy(source, target)
    expected = naive_pool(source, target), naive_pool(target, source)
    for shares, (accuracy, own_language) in zip(found, expected, strict=True):
        assert (shares.accuracy, shares.own_language) == (accuracy, own_language)
    plain = retrieval_accuracy(source, target)
    losses = [accuracy - shares.accuracy for accuracy, shares in zip(plain, found, strict=True)]
    assert min(losses) >= 0
    if bias:
        assert min(losses) > 5


def test_a_sentence_of_the_own_language_wins_a_tie_in_the_pool() -> None:
    queries = np.array([[1.0, 0.0], [1.0, 1.0]])
    others = np.array([[1.0, 1.0], [0.0, 1.0]])  # the first one is as near as the second query
    to_others, _ = multilingual_pool_accuracy(queries, others)
    assert (to_others.accuracy, to_others.own_language) == (0, 50)


def test_the_multilingual_pool_of_useless_encoders() -> None:
    rng = np.random.default_rng(0)
    source, target = rng.normal(size=(2, 500, 32))
    for shares in multilingual_pool_accuracy(source, target):  # half of all candidates each
        assert shares.accuracy < 2
        assert shares.own_language == pytest.approx(50, abs=8)
    # all sentences of a language have one vector
    one, other = np.eye(2).repeat(4, 0).reshape(2, 4, 2)
    for shares in multilingual_pool_accuracy(one, other):
        assert (shares.accuracy, shares.own_language) == (25, 0)
    for shares in multilingual_pool_accuracy(one[:1], other[:1]):  # there is no other sentence
        assert (shares.accuracy, shares.own_language) == (100, 0)


@pytest.mark.parametrize(("source", "target"), [(3, 2), (0, 0)])
def test_rows_that_are_no_pairs(source: int, target: int) -> None:
    with pytest.raises(ValueError, match=f"{source} source and {target} target rows"):
        retrieval_accuracy(np.ones((source, 2)), np.ones((target, 2)))


def test_groups_are_averaged_only_when_complete() -> None:
    accuracies = {code: (float(i), 2.0 * i) for i, code in enumerate(TATOEBA_36)}
    averages = group_averages(accuracies)
    assert list(averages) == ["14 languages", "28 languages", "36 languages"]
    assert averages["36 languages"] == (17.5, 35.0)
    for group in (TATOEBA_14, TATOEBA_28):
        mean = np.mean([accuracies[code] for code in group], axis=0)
        assert averages[f"{len(group)} languages"] == pytest.approx(tuple(mean))
    del accuracies["jv"]
    assert list(group_averages(accuracies)) == [
        "14 languages",
        "28 languages",
        "35 of 36 languages",
    ]


def test_languages_beyond_the_benchmark_have_their_own_mean() -> None:
    averages = group_averages({"de": (80.0, 60.0), "gsw": (40.0, 20.0)})
    assert averages == {"1 of 36 languages": (80.0, 60.0), "all 2 languages given": (60.0, 40.0)}
