"""Search arrays of vectors: nearest neighbours, retrieval accuracy and hard negatives (xsim++)."""

from dap.search.approximate import approximate_neighbours, recall_at_k
from dap.search.retrieval import (
    PoolAccuracy,
    group_averages,
    multilingual_pool_accuracy,
    multilingual_pool_hits,
    retrieval_accuracy,
)
from dap.search.similarity import (
    Array,
    Neighbours,
    Search,
    mutual_neighbours,
    nearest,
    nearest_neighbours,
    unit_rows,
)
from dap.search.xsim import (
    COPY_KINDS,
    Copy,
    hard_negative_copies,
    hard_negative_errors,
    hard_negative_hits,
)

__all__ = [
    "Array",
    "COPY_KINDS",
    "Copy",
    "Neighbours",
    "PoolAccuracy",
    "Search",
    "approximate_neighbours",
    "group_averages",
    "hard_negative_copies",
    "hard_negative_errors",
    "hard_negative_hits",
    "multilingual_pool_accuracy",
    "multilingual_pool_hits",
    "mutual_neighbours",
    "nearest",
    "nearest_neighbours",
    "recall_at_k",
    "retrieval_accuracy",
    "unit_rows",
]
