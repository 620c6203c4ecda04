"""Smaller vectors: the first dimensions only (Matryoshka), or a byte or a bit a dimension; and how to compare them.

The codes are those of sentence-transformers' `quantize_embeddings`: an index made with one serves the other.
Legend: `N` vectors, `D` dimensions.
"""

import numpy as np

from dap.errors import UserError
from dap.search import unit_rows

#: Bits a dimension. Each pair differs in the sign of its bytes only: faiss wants uint8 and ubinary.
BITS = {"float32": 32, "int8": 8, "uint8": 8, "binary": 1, "ubinary": 1}
PRECISIONS = tuple(BITS)
SIGN = np.uint8(0x80)


def require_dimension(dim: int | None, dimensions: int) -> None:
    """Raise `ValueError` unless vectors of so many dimensions can be cut to `dim` (None: not cut)."""
    if dim is not None and not 1 <= dim <= dimensions:
        raise UserError(f"truncate_dim={dim}, but the vectors have {dimensions} dimensions: give 1 to {dimensions}")


def truncate(embeddings: np.ndarray, dim: int | None) -> np.ndarray:
    """The vectors' first `dim` dimensions (None: all), divided by their length again: (N, dim) float32.

    What is lost depends on the training: with a Matryoshka loss (Kusupati et al., 2022) little, without it more.

    >>> truncate(np.array([[3.0, 4.0, 12.0]]), 2)
    array([[0.6, 0.8]], dtype=float32)

    Raises:
        ValueError: `dim` is below 1 or above D, or a vector is not finite.
    """
    require_dimension(dim, embeddings.shape[1])
    return unit_rows(embeddings[:, :dim], "embeddings").numpy()  # (N, dim)


def calibrate(embeddings: np.ndarray) -> np.ndarray:
    """Smallest and largest value of each dimension, (2, D) float32: the ranges that int8 and uint8 divide by 256.

    Keep them beside an index: queries must be quantised with the ranges of its vectors.

    Raises:
        ValueError: fewer than two vectors, or one that is not finite.
    """
    if len(embeddings) < 2:
        raise UserError(f"{len(embeddings)} vectors have no range: calibrate on some thousands like yours")
    ranges = np.stack([embeddings.min(0), embeddings.max(0)]).astype(np.float32)  # (2, D)
    if not np.isfinite(ranges).all():
        raise UserError("NaN or infinity among the vectors to calibrate on: check the model's weights")
    return ranges


def quantize(embeddings: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """The vectors' codes: int8 or uint8 (N, D), or binary or ubinary with 8 dimensions a byte, (N, ⌈D / 8⌉).

    >>> quantize(np.array([[0.5, -0.5, 0.1], [-0.5, 0.5, 0.2]]), "ubinary")
    array([[160],
           [ 96]], dtype=uint8)

    Args:
        embeddings: (N, D) floats, normalised where they are to be compared by cosine.
        precision: one of `PRECISIONS`; "float32" gives the vectors as they are.
        ranges: (2, D) of `calibrate`, for int8 and uint8; values outside are clipped. None: of these vectors.

    Raises:
        ValueError: an unknown precision, or ranges of other dimensions.
    """
    _require(precision)
    if precision == "float32":
        return np.asarray(embeddings, np.float32)
    if BITS[precision] == 1:
        codes = np.packbits(embeddings > 0, axis=1)  # (N, ⌈D / 8⌉)
    else:
        ranges = calibrate(embeddings) if ranges is None else ranges
        _require_ranges(ranges, embeddings.shape[1])
        steps = _steps(ranges)
        steps[steps == 0] = 1  # a dimension that does not vary
        codes = np.clip(np.floor((embeddings - ranges[0]) / steps), 0, 255).astype(np.uint8)  # (N, D)
    return codes if precision.startswith("u") else (codes ^ SIGN).view(np.int8)


def dequantize(codes: np.ndarray, precision: str, dimensions: int, ranges: np.ndarray | None = None) -> np.ndarray:
    """Vectors (N, D) float32 to compare in the codes' place, by cosine.

    Of int8 and uint8 that is the middle of each step. Of binary it is +1 or -1 a dimension: the cosine is then
    1 - 2 H / D, with H the number of differing bits, and so ranks as the Hamming distance does (float error decides
    among keys of equal distance).

    >>> dequantize(np.array([[160]], np.uint8), "ubinary", dimensions=3)
    array([[ 1., -1.,  1.]], dtype=float32)

    Args:
        codes: what `quantize` gave.
        dimensions: D, which the codes of binary do not tell.
        ranges: those that the codes were made with; int8 and uint8 need them.

    Raises:
        ValueError: an unknown precision, or no ranges, or ranges of other dimensions.
    """
    _require(precision)
    if precision == "float32":
        return codes
    levels = codes if precision.startswith("u") else codes.view(np.uint8) ^ SIGN
    if BITS[precision] == 1:
        return np.unpackbits(levels, axis=1, count=dimensions).astype(np.float32) * 2 - 1  # (N, D)
    if ranges is None:
        raise UserError(f"{precision} codes mean nothing without the ranges that they were made with: give ranges")
    _require_ranges(ranges, dimensions)
    return ranges[0] + (levels.astype(np.float32) + 0.5) * _steps(ranges)  # (N, D)


def reduced(embeddings: np.ndarray, dim: int | None = None, precision: str = "float32") -> np.ndarray:
    """Vectors (N, D) as retrieval by cosine sees them once they are normalised, cut and quantised: (N, dim) float32.

    The ranges of int8 are those of these vectors.

    Raises:
        ValueError: as `truncate` and `quantize` do.
    """
    rows = truncate(embeddings, dim)  # (N, dim)
    ranges = calibrate(rows) if BITS.get(precision) == 8 else None
    return dequantize(quantize(rows, precision, ranges), precision, rows.shape[1], ranges)


def _steps(ranges: np.ndarray) -> np.ndarray:
    return (ranges[1] - ranges[0]) / 255  # (D,)


def _require(precision: str) -> None:
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")


def _require_ranges(ranges: np.ndarray, dimensions: int) -> None:
    if ranges.shape != (2, dimensions):
        raise UserError(
            f"ranges of shape {ranges.shape} for vectors of {dimensions} dimensions: need (2, {dimensions})"
        )
