"""Retrieval accuracy against a naive loop and sentence-transformers, and group averages."""

from unittest.mock import Mock

import numpy as np
import pytest
from datasets import Dataset
from naive import cosines
from table_encoder import TableEncoder

from dap_transformers.evaluation.evaluator import evaluate
from dap_transformers.evaluation.retrieval import (
    Retrieval,
    groups_of,
    multilingual_pool_accuracy,
    retrieval_accuracy,
)
from dap_transformers.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36


def noisy_pairs(pairs: int = 80) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    source = rng.normal(size=(pairs, 12))
    return source, source + 0.7 * rng.normal(size=source.shape)


def test_equals_the_naive_loop_in_both_directions() -> None:
    source, target = noisy_pairs()
    forward, backward = retrieval_accuracy(source, target)
    table = cosines(source, target)
    for axis, accuracy in ((1, forward), (0, backward)):
        hits = table.argmax(axis) == np.arange(80)
        assert accuracy == 100 * hits.mean()
    assert forward != backward
    assert 50 < forward < 100
    with pytest.raises(ValueError, match="80 source and 79 target"):
        retrieval_accuracy(source, target[1:])


def naive_pool(queries: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return accuracy and share of the own language, with the rules of the docstring as loops."""
    count = len(queries)
    right = own = 0
    for i, row in enumerate(cosines(queries, np.concatenate([queries, others]))):
        row[:count][(queries == queries[i]).all(1)] = -np.inf  # the query and its copies
        best = row.argmax()
        right += best == count + i
        own += best < count
    return 100 * right / count, 100 * own / count


@pytest.mark.parametrize("bias", [0.0, 2.0])
def test_the_multilingual_pool_equals_the_naive_loop(bias: float) -> None:
    source, target = noisy_pairs()
    source[:, 0] += bias  # a direction that only tells the language
    target[:, 0] -= bias
    source[7] = source[3]  # repeated sentences
    target[50] = target[51]
    found = multilingual_pool_accuracy(source, target)
    assert found == (naive_pool(source, target), naive_pool(target, source))
    plain = retrieval_accuracy(source, target)
    losses = [accuracy - shares.accuracy for accuracy, shares in zip(plain, found, strict=True)]
    assert min(losses) >= (5 if bias else 0)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # the first target is as near to the first source as the second source, which wins
        ([[1, 0], [1, 1]], [[1, 1], [0, 1]]),
        # all sentences of a language have one vector
        ([[1, 0]] * 4, [[0, 1]] * 4),
        # there is no other sentence
        ([[1, 0]], [[0, 1]]),
    ],
)
def test_ties_in_the_multilingual_pool(source: list, target: list) -> None:
    source, target = np.array([source, target], float)
    found = multilingual_pool_accuracy(source, target)
    assert found == (naive_pool(source, target), naive_pool(target, source))


def test_groups_are_averaged_only_when_complete() -> None:
    groups = groups_of(TATOEBA_36)
    assert list(groups.values()) == [TATOEBA_14, TATOEBA_28, TATOEBA_36]
    incomplete = ["14 languages", "28 languages", "35 of 36 languages"]
    assert list(groups_of([code for code in TATOEBA_36 if code != "jv"])) == incomplete
    expected = {"1 of 36 languages": ("de",), "all 2 languages given": ("de", "gsw")}
    assert groups_of(["de", "gsw"]) == expected


def test_the_size_gives_the_standard_error_of_a_mean_over_unequal_languages() -> None:
    counts = np.array([1000, 1000, 20])
    retrieval = Retrieval({str(row): [("a", "b")] * count for row, count in enumerate(counts)})
    found = np.random.default_rng(0).binomial(counts, 0.8, (20_000, 2, 3))  # of both directions
    variance = (found / counts).mean((1, 2)).var()
    assert 0.8 * 0.2 / retrieval.size() == pytest.approx(variance, rel=0.05)


# The evaluator


def test_evaluators_share_vectors_and_their_numbers_have_names() -> None:
    source, target = noisy_pairs(20)
    encoder = Mock(wraps=TableEncoder(np.concatenate([source, target])))
    pairs = {"de": [(f"de {i}", f"en {20 + i}") for i in range(20)]}
    rows = Dataset.from_list([{"source": one, "target": other} for one, other in pairs["de"]])
    retrieval = Retrieval({"de": rows}, pool=True, target_language="fr")
    without_pool = Retrieval(pairs)
    without_pool.name = "other"
    found = evaluate(encoder, [retrieval, without_pool])
    assert [len(call.args[0]) for call in encoder.encode.call_args_list] == [40]
    assert "mean_pool_accuracy" not in without_pool.logged(found["other"])
    for wrong in (rows[:], [{"source": "ja", "target": "yes"}], ["ja", "yes"]):
        with pytest.raises(ValueError, match="is no pair"):
            Retrieval({"de": wrong})

    numbers = found["retrieval"]
    forward, backward = retrieval_accuracy(source, target)
    pool = multilingual_pool_accuracy(source, target)
    names = ("xx-en", "en-xx", "pool_xx-en", "own_xx-en", "pool_en-xx", "own_en-xx")
    expected = dict(zip(names, (forward, backward, *pool[0], *pool[1])))
    assert numbers["languages"]["de"] == {"pairs": 20} | expected
    assert numbers["averages"] == {"1 of 36 languages": expected}
    assert f"{pool[0].own_language:.1f}" in retrieval.table(numbers)
    assert retrieval.logged(numbers) == {
        "de-fr_accuracy": forward,
        "fr-de_accuracy": backward,
        "mean_accuracy": pytest.approx((forward + backward) / 2),
        "mean_pool_accuracy": pytest.approx((pool[0].accuracy + pool[1].accuracy) / 2),
    }
