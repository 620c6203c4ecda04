"""Bitext retrieval accuracy as on Tatoeba: line i of one side must find line i of the other.

The candidates are the other side only, or a multilingual pool that also holds the query's language.

Legend: `N` pairs, `D` dimensions.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluator import (
    Evaluator,
    Metric,
    Numbers,
    PairsByLanguage,
    as_pairs,
    both_sides,
    card_rows,
    console_tables,
    pairs_of_mean,
)
from dap_transformers.evaluation.paper import (
    DIRECTIONS,
    PAPER_MODELS,
    PAPER_TATOEBA_PLACES,
    tatoeba_averages,
)
from dap_transformers.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36, base_language
from dap_transformers.search.exact import Array, first_equal_rows, nearest, nearest_neighbours
from dap_transformers.text.formats import BitextFile, read_pairs

#: Key of a number -> its name on the model card and on the Hub.
ON_CARD = {
    "xx-en": ("accuracy xx→en", "accuracy"),
    "en-xx": ("accuracy en→xx", "accuracy"),
    "pool_xx-en": ("multilingual pool xx→en", "accuracy"),
    "pool_en-xx": ("multilingual pool en→xx", "accuracy"),
    "own_xx-en": ("lost to own language xx→en", None),
    "own_en-xx": ("lost to own language en→xx", None),
    "pairs": ("pairs", None),
}
GROUPS: dict[int, tuple[str, ...]] = {14: TATOEBA_14, 28: TATOEBA_28, 36: TATOEBA_36}


@dataclass
class Retrieval(Evaluator):
    """Accuracy of retrieval in both directions, by language and averaged over the paper's groups.

    Attributes:
        pairs: language code -> (source, target) sentences, or a dataset with these columns. The
            numbers call the targets English.
        pool: also measure the pool that holds the other sentences of the query's language.
        target_language: code of the targets' language, for the names in a training's log.
    """

    pairs: PairsByLanguage
    pool: bool = False
    target_language: str = "en"
    name = "retrieval"
    task = "bitext retrieval"
    primary = "mean_accuracy"
    description = (
        "bitext retrieval: nearest neighbour by cosine over the other side, accuracy by line, "
        "macro averages"
    )

    def __post_init__(self) -> None:
        self.pairs = as_pairs(self.pairs)

    def sentences(self) -> Iterator[str]:
        return both_sides(self.pairs)

    def size(self) -> float:
        return 2 * pairs_of_mean(self.pairs)  # of both directions

    def __call__(self, encoder: Encoder) -> Numbers:
        languages = {}
        for code, rows in self.pairs.items():
            source, target = (encoder.encode(list(side)) for side in zip(*rows, strict=True))
            values = dict(zip(DIRECTIONS, retrieval_accuracy(source, target), strict=True))
            if self.pool:
                in_pool = multilingual_pool_accuracy(source, target)
                for direction, each in zip(DIRECTIONS, in_pool, strict=True):
                    values[f"pool_{direction}"] = each.accuracy
                    values[f"own_{direction}"] = each.own_language
            languages[code] = {"pairs": len(rows)} | values

        averages: Numbers = {}
        for group, codes in groups_of(languages).items():
            # all languages have the same values
            averages[group] = {name: _mean(languages, name, codes) for name in values}
        return {"languages": languages, "averages": averages}

    def logged(self, numbers: Numbers) -> dict[str, float]:
        target = self.target_language
        languages = numbers["languages"]
        found = {}
        for code, each in languages.items():
            found[f"{code}-{target}_accuracy"] = each["xx-en"]
            found[f"{target}-{code}_accuracy"] = each["en-xx"]
        found["mean_accuracy"] = float(np.mean(list(found.values())))
        if self.pool:
            in_pool = [_mean(languages, f"pool_{direction}", languages) for direction in DIRECTIONS]
            found["mean_pool_accuracy"] = float(np.mean(in_pool))
        return found

    def metrics(self, numbers: Numbers) -> list[Metric]:
        found = []
        for place, values in (numbers["averages"] | numbers["languages"]).items():
            for key, (name, kind) in ON_CARD.items():
                if key in values:
                    found.append(Metric(name, values[key], place, kind))
        return found


class Tatoeba(Retrieval):
    """Retrieval on Tatoeba, whose table also has the paper's numbers."""

    def table(self, numbers: Numbers) -> str:
        metrics = self.metrics(numbers)
        for place in numbers["averages"] | numbers["languages"]:
            for model, (direction, arrow) in product(PAPER_MODELS, DIRECTIONS.items()):
                value = PAPER_TATOEBA_PLACES[model][direction].get(place)
                if value is not None:
                    metrics.append(Metric(f"paper: {model} {arrow}", value, place))
        table = console_tables(card_rows(self.task, metrics))
        averages = tatoeba_averages(numbers["averages"])
        return f"{table}\n\n{averages}" if averages else table


def _mean(languages: Numbers, name: str, codes: Iterable[str]) -> float:
    """Average a number over some of the languages."""
    return float(np.mean([languages[code][name] for code in codes]))


# From files to pairs


def read_languages(
    found: Mapping[str, Sequence[BitextFile]],
    languages: Sequence[str] | None = None,
    max_pairs: int | None = None,
) -> PairsByLanguage:
    """Read parallel text of all languages or some. A malformed line is an error: every line counts.

    A language's files (`find_bitext`) are joined in their order. The first `max_pairs` are kept.
    """
    wanted = dict.fromkeys(found if languages is None else map(base_language, languages))
    pairs = {}
    for code in wanted:
        if code not in found:
            raise UserError(f"there is no text in {code}, only in {' '.join(found)}")
        rows = chain.from_iterable(read_pairs(file, max_bad_lines=0.0) for file in found[code])
        pairs[code] = [(row["source"], row["target"]) for row in rows][:max_pairs]
    return pairs


# From vectors to accuracies


def retrieval_accuracy(source_embeds: Array, target_embeds: Array) -> tuple[float, float]:
    """Compute the accuracy of nearest-neighbour retrieval by cosine in both directions, in percent.

    Row i of the target (N, D) is the translation of source row i. With English as the target, the
    directions are the paper's "xx→en" and "en→xx". As on Tatoeba, only the same line counts: an
    equal sentence on another line is a miss. Of equal cosines the lowest line is taken.

    >>> retrieval_accuracy(np.eye(4), np.eye(4)[[0, 1, 2, 2]])
    (75.0, 75.0)
    """
    require_pairs(source_embeds, target_embeds)
    lines = np.arange(len(source_embeds))
    forward = int((nearest(source_embeds, target_embeds) == lines).sum())
    backward = int((nearest(target_embeds, source_embeds) == lines).sum())
    return 100 * forward / len(lines), 100 * backward / len(lines)


def require_pairs(source_embeds: Array, target_embeds: Array) -> None:
    """Raise `ValueError` unless both sides have equally many rows."""
    if len(source_embeds) != len(target_embeds):
        raise ValueError(f"{len(source_embeds)} source and {len(target_embeds)} target rows")


class PoolAccuracy(NamedTuple):
    """Results of one direction of `multilingual_pool_accuracy`, in percent of the queries.

    Attributes:
        accuracy: queries whose nearest candidate is their translation.
        own_language: queries whose nearest candidate is in their own language. The rest finds a
            wrong sentence of the other language.
    """

    accuracy: float
    own_language: float


def multilingual_pool_accuracy(
    source_embeds: Array, target_embeds: Array
) -> tuple[PoolAccuracy, PoolAccuracy]:
    """Compute retrieval accuracy in a pool that also holds the query's own language.

    A query's candidates are all sentences of the other side and all other sentences of its own
    side. An encoder that groups sentences by language prefers sentences of the query's own side.
    LAReQA (arXiv 2004.05484) calls this language bias, and calls an encoder without it strongly
    aligned. The first result has source rows as the queries, the second has target rows.

    A sentence of the query's language wins a tie with the translation. A sentence with exactly the
    query's vector counts as the query itself, so it is no candidate. Within the other side, ties
    and equal sentences count as in `retrieval_accuracy`.

    >>> german = np.array([[3.0, 1.0], [1.0, 3.0], [1.0, 2.0]])
    >>> english = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    >>> to_english, to_german = multilingual_pool_accuracy(german, english)
    >>> round(to_english.accuracy, 1), round(to_english.own_language, 1)
    (33.3, 66.7)
    """
    require_pairs(source_embeds, target_embeds)
    forward = _pool_accuracy(source_embeds, target_embeds)
    backward = _pool_accuracy(target_embeds, source_embeds)
    return forward, backward


def _pool_accuracy(queries: Array, others: Array) -> PoolAccuracy:
    """Compute one direction: the queries (N, D) are all sentences of one language."""
    # the nearest sentence of the other language
    distinct = np.unique(first_equal_rows(others))
    cosines, found = nearest_neighbours(queries, others[distinct])  # (N, 1)
    is_translation = distinct[found[:, 0]] == np.arange(len(queries))  # (N,)

    # the nearest sentence of the query's language, among two because one may be the query
    own_row = first_equal_rows(queries)  # (N,)
    distinct = np.unique(own_row)
    own_cosines, found = nearest_neighbours(queries, queries[distinct], min(2, len(distinct)))
    is_query = distinct[found] == own_row[:, None]  # (N, 2)
    own_cosines = np.where(is_query, -np.inf, own_cosines).max(1)  # (N,)

    prefers_own = own_cosines >= cosines[:, 0]
    is_right = is_translation & ~prefers_own
    return PoolAccuracy(100 * float(is_right.mean()), 100 * float(prefers_own.mean()))


def groups_of(codes: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the groups of languages over which results are averaged, by name.

    The paper's groups of 14, 28 and 36 languages appear only if all of their languages are there.
    If only some of the 36 are there, their group has a name such as "2 of 36 languages". If there
    are languages outside the 36, a further group has all languages given.

    >>> groups_of(["de", "fr"])
    {'2 of 36 languages': ('de', 'fr')}
    """
    groups: dict[str, tuple[str, ...]] = {}
    for size, group in GROUPS.items():
        if set(group) <= set(codes):
            groups[f"{size} languages"] = group
    benchmark = tuple(code for code in codes if code in TATOEBA_36)
    if 0 < len(benchmark) < len(TATOEBA_36):
        groups[f"{len(benchmark)} of {len(TATOEBA_36)} languages"] = benchmark
    if len(benchmark) < len(codes):
        groups[f"all {len(codes)} languages given"] = tuple(codes)
    return groups
