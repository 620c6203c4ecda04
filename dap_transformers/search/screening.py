"""Find the pairs that can be nearest neighbours, without computing all cosines exactly.

A query is a row whose neighbours are wanted. A key is a row that may be a neighbour.

A product of int8 numbers gives an upper bound of every cosine at half the cost of float32 or less.
Only pairs whose bound exceeds the k-th best cosine so far are computed exactly. So the result is
that of a full search.

**The bound.** The vectors of an encoder lie close together, so both sides are centred first. With
a = a' + m and b = b' + n, where m and n are the means of the two sides,

    a·b = a'·b' + a·n + m·(b - n).

The centred rows are rounded to whole numbers p and q from -127 to 127, so that a' ~ s·p and b' ~
t·q. By the Cauchy-Schwarz inequality

    |a'·b' - s·t·p·q| <= |a' - s·p| |b'| + |s·p| |b' - t·q|.

The lengths of the rounding errors, |a' - s·p| and |b' - t·q|, are computed, not estimated. Sums of
whole numbers are exact. A float32 sum of D terms of unit rows errs by at most D·2⁻²⁴, and the bound
allows for eight such errors. So no cosine exceeds its bound.

Legend: `R` × `C` a block of queries × keys, `D` dimensions, `k` neighbours, `H` pairs of a block
that can be among the k best.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

#: A bound that leaves more than this share of a block's pairs is of no use, unless the pairs are
#: few.
USEFUL_SHARE = 1 / 16
FEW_PAIRS = 2**16
#: Smallest rounding step. With it, 1 divided by the product of two steps is far below 2³¹.
SMALLEST_STEP = 2.0**-13
#: A GPU multiplies int8 matrices only in multiples of this many rows and dimensions.
MULTIPLE = 32
#: While a row has fewer than k neighbours, this many times k promising pairs are computed for it.
PROMISING = 2
#: Rows whose largest products are searched at a time.
CHUNK = 1024


@contextmanager
def whole_float32(device: torch.device) -> Iterator[None]:
    """Within this block, multiply float32 matrices in full precision, as the bounds assume.

    This switches off autocast to half precision and TF32, and restores them afterwards.
    """
    # torch 2.9 has new switches. Reading the old switch after the new ones were set raises.
    has_new_switches = hasattr(torch.backends.mkldnn, "matmul")
    if has_new_switches:
        switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        before = [switch.fp32_precision for switch in switches]
    else:
        switches = ()
        before = torch.get_float32_matmul_precision()
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        if not has_new_switches:
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, precision in zip(switches, before):
            switch.fp32_precision = precision
        if not has_new_switches:
            torch.set_float32_matmul_precision(before)


@cache
def rounding_pays(device: torch.device) -> bool:
    """Tell whether a device multiplies int8 matrices fast and exactly enough to screen with them.

    It pays if the int8 product is exact and takes less than half the time of a float32 product.
    Some CPUs add with saturation, so their product is not exact. The time is measured at the first
    call for a device.
    """
    count = 8192 if device.type == "cuda" else 1024  # smaller ones only measure a GPU's launch
    rows = torch.full((count, 768), 127.0, device=device)
    numbers = rows.to(torch.int8)
    try:
        if not (torch._int_mm(numbers, numbers.T) == 768 * 127**2).all():
            return False
    except RuntimeError:  # the device has no such product
        return False
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    return takes_half(lambda: torch._int_mm(numbers, numbers.T), lambda: rows @ rows.T, wait)


def takes_half(
    product: Callable,
    other: Callable,
    wait: Callable,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Tell whether a product takes less than half the time of another, by the fastest of six."""
    seconds = dict.fromkeys((product, other), math.inf)
    for _ in range(6):  # in turns, because other programs may slow the machine down for a while
        for work in seconds:
            wait()
            started = clock()
            work()
            wait()
            seconds[work] = min(clock() - started, seconds[work])
    return seconds[product] < seconds[other] / 2


class RoundedRows:
    """Unit rows (R, D), centred and rounded to whole numbers from -127 to 127.

    Attributes:
        centre: (D,) mean of the rows.
        longest: Euclidean length of the longest centred row.
        step: rounding step. A centred row is about `step` times its row of `numbers`.
        numbers: (R, D) int8. Both dimensions are padded with zeros to multiples of `MULTIPLE`.
        errors: (R,) Euclidean length of each row's rounding error, centred row - `step` · numbers.
    """

    def __init__(self, rows: Tensor) -> None:
        self.centre = rows.mean(0)
        centred = rows - self.centre
        self.longest = float(torch.linalg.vector_norm(centred, dim=1).max())
        # values beyond 4 standard deviations are clipped
        four_deviations = 4 * float(centred.square().mean().sqrt())
        self.step = max(four_deviations / 127, SMALLEST_STEP)
        numbers = (centred / self.step).round_().clamp_(-127, 127)
        self.errors = torch.linalg.vector_norm(centred.sub_(numbers, alpha=self.step), dim=1)
        fill = (0, -rows.shape[1] % MULTIPLE, 0, -len(rows) % MULTIPLE)
        self.numbers = pad(numbers.to(torch.int8), fill)


class Screen:
    """Finds the pairs of a query and a key that may be among the k nearest neighbours.

    The keys (C, D) are fixed unit rows. Queries come block by block, in calls of `pairs`.

    Attributes:
        in_float32: number of pairs in blocks for which the int8 bound did not help, so that the
            whole block was multiplied in float32.
    """

    def __init__(self, keys: Tensor, k: int) -> None:
        self.keys = keys
        self.k = k
        self.in_float32 = 0
        self._rounded = RoundedRows(keys) if rounding_pays(keys.device) else None

    def pairs(
        self, queries: Tensor, worst: Tensor, key_worst: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs that can be among the k best of a query or a key, and their cosines.

        They are rows (H,) and columns (H,), ascending, and cosines (H,). The cosines do not depend
        on how queries and keys are cut into blocks.

        Args:
            queries: (R, D) unit rows.
            worst: (R,) the k-th best cosine of each query so far, -inf if fewer than k are known. A
                pair matters only if its cosine is higher.
            key_worst: (C,) the k-th best of each key. None if no neighbours of keys are searched.
        """
        near = self._near_by_rounding(queries, worst, key_worst)
        if near is None:
            near = self._near_by_float32(queries, worst, key_worst)
        rows, columns = _positions(near)
        return rows, columns, _cosines(queries, self.keys, rows, columns)

    def _near_by_rounding(
        self, queries: Tensor, worst: Tensor, key_worst: Tensor | None
    ) -> Tensor | None:
        """Mark the pairs (R, C) that can be among the k best, by int8 copies of the vectors.

        The result is None if so many pairs are left that this does not pay, or if int8 screening is
        off. It is off where `rounding_pays` says no, and after a block with too many pairs left
        although all k-th best cosines were known.
        """
        if self._rounded is None:
            return None
        highest, unit = self._bounds(queries)
        slack = _float32_error(queries) + 3 * unit
        near = self._near(highest, unit, slack, queries, worst, key_worst)
        if near is None:
            limits = [worst] if key_worst is None else [worst, key_worst]
            if all(bool(cosines.isfinite().all()) for cosines in limits):
                self._rounded = None  # the next blocks will be like this one
        return near

    def _near_by_float32(self, queries: Tensor, worst: Tensor, key_worst: Tensor | None) -> Tensor:
        """Mark the pairs (R, C) that can be among the k best, by float32 products.

        A float32 product has a small error. If that leaves too many pairs, only the k best products
        of each query and each key are taken.
        """
        self.in_float32 += len(queries) * len(self.keys)
        products = queries @ self.keys.T
        near = self._near(products, 1.0, _float32_error(queries), queries, worst, key_worst)
        if near is None:
            near = torch.zeros_like(products, dtype=torch.bool)
            _mark_best(near, products, worst, self.k)
            if key_worst is not None:
                _mark_best(near.T, products.T, key_worst, self.k)
        return near

    def _bounds(self, queries: Tensor) -> tuple[Tensor, float]:
        """Compute an upper bound of every cosine of queries (R, D) and keys by int8 products.

        It is in whole numbers (R, C) int32 of a unit. No cosine is more than (number + 3) times the
        unit, plus the error of float32 arithmetic (`_float32_error`).
        """
        own = RoundedRows(queries)
        keys = self._rounded
        unit = own.step * keys.step
        longest_product = own.longest + float(own.errors.max())  # no s·p is longer
        row_terms = queries @ keys.centre + own.errors * keys.longest  # (R,)
        column_terms = (
            self.keys @ own.centre - keys.centre @ own.centre + longest_product * keys.errors
        )  # (C,)
        highest = torch._int_mm(own.numbers, keys.numbers.T)[: len(row_terms), : len(column_terms)]
        highest.add_((column_terms / unit).int())
        highest.add_((row_terms / unit).int()[:, None])
        return highest, unit

    def _near(
        self,
        highest: Tensor,
        unit: float,
        slack: float,
        queries: Tensor,
        worst: Tensor,
        key_worst: Tensor | None,
    ) -> Tensor | None:
        """Mark the pairs (R, C) whose upper bound exceeds the k-th best of their query or key.

        No cosine exceeds `highest` · `unit` + `slack`. The result is None if too many pairs remain.
        """
        least = (self._lower_bounds(highest, queries, self.keys, worst) - slack) / unit
        near = highest > least.to(highest.dtype)[:, None]
        if key_worst is not None:
            least = (self._lower_bounds(highest.T, self.keys, queries, key_worst) - slack) / unit
            near |= highest > least.to(highest.dtype)
        is_useful = near.count_nonzero() <= max(USEFUL_SHARE * near.numel(), FEW_PAIRS)
        return near if is_useful else None

    def _lower_bounds(self, highest: Tensor, own: Tensor, others: Tensor, worst: Tensor) -> Tensor:
        """Return a lower bound (R,) of each row's k-th best cosine: the current one or a new one.

        The new one is the k-th best of the `PROMISING` · k pairs with the highest upper bounds.
        With fewer than k others there is none, and -inf becomes -2, which is below every cosine.
        """
        if worst.isfinite().all() or len(others) < self.k:
            return worst.clamp(min=-2)
        count = min(PROMISING * self.k, len(others))
        columns = highest.topk(count, dim=1).indices.sort(1).values  # (R, count)
        rows = torch.arange(len(own), device=own.device).repeat_interleave(count)
        cosines = _cosines(own, others, rows, columns.flatten()).view_as(columns)
        return torch.maximum(worst, cosines.topk(self.k, dim=1).values[:, -1])


def _float32_error(rows: Tensor) -> float:
    """Return eight times the largest rounding error of a float32 cosine of unit rows (R, D)."""
    return rows.shape[1] * 2.0**-21


def _mark_best(near: Tensor, products: Tensor, worst: Tensor, k: int) -> None:
    """Set `near` (R, C) to True in place, at each row's k largest products above its limit (R,).

    Of equal products the first is taken, which `topk` does not promise.
    """
    for rows in (products.amax(1) > worst).nonzero()[:, 0].split(CHUNK):
        values = products[rows]
        for _ in range(min(k, values.shape[1])):
            columns = values.argmax(1, keepdim=True)  # (r, 1), the first of the largest
            near[rows, columns[:, 0]] = True
            values.scatter_(1, columns, -torch.inf)


def _positions(near: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (H,) and columns (H,) of the true elements of (R, C), in ascending order."""
    # `nonzero` is slow, so eight booleans at a time are read as one int64.
    eights = pad(near, (0, -near.shape[1] % 8)).view(torch.int64)
    rows, groups = eights.nonzero(as_tuple=True)
    which, columns = eights[rows, groups, None].view(torch.bool).nonzero(as_tuple=True)
    return rows[which], 8 * groups[which] + columns


def _cosines(queries: Tensor, keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute the cosines (H,) of pairs at rows (H,), ascending, and columns (H,), sparsely."""
    ends = pad(rows.bincount(minlength=len(queries)).cumsum(0), (1, 0))  # (R + 1,)
    zeros = queries.new_zeros(len(rows))
    size = (len(queries), len(keys))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # torch calls it a beta
        wanted = torch.sparse_csr_tensor(ends, columns, zeros, size, check_invariants=False)
    return torch.sparse.sampled_addmm(wanted, queries, keys.T, beta=0.0).values()
