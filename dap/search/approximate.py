"""Approximate nearest neighbours by cosine through faiss, for corpora that are too large to compare in full.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap.errors import UserError
from dap.search.similarity import (
    Array,
    Neighbours,
    nearest_neighbours,
    require_searchable,
    unit_rows,
)

#: Rows that are added or searched at a time.
PART = 4096
#: Rows that an index is trained on at most: in all, and a cluster (faiss itself takes no more).
TRAINING_ROWS = 1_000_000
ROWS_A_CLUSTER = 256
SAMPLE = 1000  # rows of a side that show the recall


def approximate_neighbours(
    source: Array,
    target: Array,
    k: int = 4,
    index: str = "IVF1024,Flat:nprobe=32",
    progress: bool = False,
    built: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> Neighbours:
    """`dap.search.mutual_neighbours` by two faiss indexes, one a side, built and searched one after the other.

    The index finds the neighbours; their cosines are computed again from the vectors, in float32. Rows for which the
    index finds fewer than k, as where the lists that it visits are short, are compared with all rows of the other
    side.

    Args:
        source: (N, D), need not be normalised.
        target: (M, D).
        k: 1 to min(N, M).
        index: a string of faiss's index factory (`IVF4096,PQ64`, `HNSW32`, …), with search parameters after a colon
            (`IVF4096,Flat:nprobe=64`). Without them an IVF index visits the square root of its number of lists.
        progress: show a bar.
        built: what `built_index` made of the source and of the target, where that is done already.

    Raises:
        ValueError: faiss is not installed or refuses the index, k out of range, or a row that is not finite.
    """
    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    total = 2 * (len(source) + len(target))
    with tqdm(
        total=total, desc=f"faiss {index}", unit=" rows", unit_scale=True, disable=not progress
    ) as bar:
        forward = _search(source, "source", target, "target", k, index, bar, built[1])
        backward = _search(target, "target", source, "source", k, index, bar, built[0])
    return Neighbours(*forward, *backward)


def built_index(keys: Array, index: str) -> np.ndarray:
    """A faiss index that holds all keys, as bytes: it is built once and searched in many processes."""
    trained = _build(keys, "keys", index, tqdm(disable=True))
    return import_module("faiss").serialize_index(trained)


def recall_at_k(approximate: Neighbours, source: Array, target: Array) -> float:
    """Share of the exact k nearest neighbours that the approximate search found, 0 to 1, mean of both directions.

    At most `SAMPLE` rows of each side, the same in every call, are compared exactly.

    >>> rows = np.eye(3)
    >>> found = np.array([[0], [1], [0]])
    >>> recall_at_k(Neighbours(rows[:, :1], found, rows[:, :1], found), rows, rows) == 2 / 3
    True
    """
    directions = (
        (approximate.forward_indices, source, target),
        (approximate.backward_indices, target, source),
    )
    shares = []
    for found, queries, keys in directions:
        chosen = np.sort(
            np.random.default_rng(0).choice(len(queries), min(SAMPLE, len(queries)), replace=False)
        )
        _, exact = nearest_neighbours(queries[chosen], keys, found.shape[1])  # (SAMPLE, k)
        shares.append(float((found[chosen][:, :, None] == exact[:, None, :]).any(2).mean()))
    return sum(shares) / 2


def _search(
    queries: Array,
    query_name: str,
    keys: Array,
    key_name: str,
    k: int,
    name: str,
    bar: tqdm,
    built: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    index = (
        _build(keys, key_name, name, bar)
        if built is None
        else import_module("faiss").deserialize_index(built)
    )
    scores = np.empty((len(queries), k), np.float32)
    indices = np.empty((len(queries), k), np.int64)
    for start in range(0, len(queries), PART):
        block = _unit_block(queries, query_name, start)
        with _refusals(name, keys, key_name):
            found = np.sort(index.search(block, k)[1], axis=1)  # (B, k), -1 where nothing was found
        near = unit_rows(keys[np.maximum(found, 0).ravel()], key_name).cpu().numpy()  # (B·k, D)
        exact = np.einsum("bd,bkd->bk", block, near.reshape(*found.shape, -1))
        order = np.argsort(-exact, axis=1, kind="stable")
        scores[start : start + PART] = np.take_along_axis(exact, order, 1)
        indices[start : start + PART] = np.take_along_axis(found, order, 1)
        bar.update(len(block))
    short = (indices < 0).any(1)  # rows for which fewer than k were found
    if short.any():
        scores[short], indices[short] = nearest_neighbours(queries[short], keys, k)
    return scores, indices


def _build(keys: Array, key_name: str, name: str, bar: tqdm) -> Any:
    """A trained faiss index that holds all keys."""
    try:
        import faiss
    except ImportError:
        raise UserError(
            f"--index {name} needs faiss: pip install 'dap-transformers[faiss]'"
        ) from None
    factory, _, parameters = name.partition(":")
    with _refusals(name, keys, key_name):
        index = faiss.index_factory(keys.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        lists = getattr(faiss.try_extract_index_ivf(index), "nlist", 0)
        if not index.is_trained:
            bits = max(
                [8, *map(int, re.findall(r"x(\d+)", factory))]
            )  # of a quantiser's code: PQ16x12
            step = -(
                -len(keys) // min(ROWS_A_CLUSTER * max(lists, 2**bits), TRAINING_ROWS)
            )  # evenly spread
            index.train(unit_rows(keys[::step], key_name).cpu().numpy())
        if lists and not parameters:
            parameters = f"nprobe={max(1, round(lists**0.5))}"
        if parameters:
            faiss.ParameterSpace().set_index_parameters(index, parameters)
        for start in range(0, len(keys), PART):
            block = _unit_block(keys, key_name, start)
            index.add(block)
            bar.update(len(block))
    return index


@contextmanager
def _refusals(name: str, keys: Array, key_name: str) -> Iterator[None]:
    """Turns faiss's errors into one that names the index and the rows, without faiss's own places in C++."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().rpartition(": ")[2]
        raise UserError(
            f"--index {name}: faiss refuses it for {len(keys)} {key_name} rows: {reason}"
        ) from error


def _unit_block(rows: Array, name: str, start: int) -> np.ndarray:
    return unit_rows(rows[start : start + PART], name, start).cpu().numpy()
