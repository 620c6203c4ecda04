"""Smaller vectors: the first dimensions only (Matryoshka), or a byte or a bit a dimension.

The codes are sentence-transformers' own (the extra `st`), of which indexes for search can be made.
Legend: `N` vectors, `D` dimensions.
"""

from importlib.util import find_spec

import numpy as np

from dap.errors import UserError
from dap.search import unit_rows

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


def require_reducible(dimensions: int, dim: int | None, precision: str) -> None:
    """Refuses what `reduced` cannot do with vectors of so many dimensions, before they are made.

    Raises:
        ValueError: `dim` is below 1 or above the dimensions, an unknown precision, or sentence-transformers, which
            every precision but float32 needs, is not installed.
    """
    if dim is not None and not 1 <= dim <= dimensions:
        raise UserError(
            f"truncate_dim={dim}, but the vectors have {dimensions} dimensions: give 1 to {dimensions}"
        )
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
    if precision != "float32" and find_spec("sentence_transformers") is None:
        raise UserError(
            f"precision={precision!r} needs sentence-transformers: pip install 'dap-transformers[st]'"
        )


def reduced(
    embeddings: np.ndarray, dim: int | None = None, precision: str = "float32"
) -> np.ndarray:
    """Vectors (N, D) as retrieval by cosine sees them once they are cut, normalised and quantised: (N, dim) float32.

    A byte stands for the middle of its step, of 255 steps between the smallest and the largest value that a dimension
    has in these vectors. A bit stands for +1 or -1: the cosine is then 1 - 2 H / dim, with H the number of differing
    bits, and so ranks as the Hamming distance does (float error decides among keys of equal distance).

    >>> reduced(np.array([[3.0, 4.0, 12.0]]), 2)
    array([[0.6, 0.8]], dtype=float32)

    Raises:
        ValueError: as `require_reducible`, or a vector is not finite.
    """
    require_reducible(embeddings.shape[1], dim, precision)
    rows = unit_rows(embeddings[:, :dim], "embeddings").numpy()  # (N, dim)
    if precision == "float32":
        return rows
    from sentence_transformers.util.quantization import quantize_embeddings

    ranges = np.stack([rows.min(0), rows.max(0)])  # (2, dim)
    codes = quantize_embeddings(rows, precision, ranges)  # (N, dim), or of bits (N, ⌈dim / 8⌉)
    levels = codes if precision.startswith("u") else (codes.astype(np.int16) + 128).astype(np.uint8)
    if precision.endswith("binary"):
        return np.unpackbits(levels, axis=1, count=rows.shape[1]).astype(np.float32) * 2 - 1
    return ranges[0] + (levels.astype(np.float32) + 0.5) * (ranges[1] - ranges[0]) / 255
