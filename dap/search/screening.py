"""Which pairs of a block can be among the nearest neighbours: a rough product and a proved bound tell.

Encoders put all sentences into one corner, so both sides are centred: with a = a' + m and b = b' + n,

    a·b = a'·b' + a·n + m·(b - n).

The centred rows are rounded to whole numbers p, q from -127 to 127, a' ~ s·p and b' ~ t·q. By Cauchy and Schwarz

    |a'·b' - s·t·p·q| <= |a' - s·p| |b'| + |s·p| |b' - t·q|,

with the lengths of the rounding errors as they are. Sums of whole numbers are exact; those of D terms in float32 err
by at most D·2⁻²⁴ for rows of length 1, and eight such errors are allowed for. A pair beyond that changes no result.

Legend: `R` × `C` a block of queries × keys, `D` dimensions, `k` neighbours, `H` pairs that can be among them.
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

#: Share of a block's pairs, and their number, above which they are not computed one by one.
MOST, ALWAYS = 1 / 16, 2**16
#: Least step of rounding: 1 in units of two steps' product stays far below 2³¹.
LEAST = 2.0**-13
#: A GPU multiplies whole numbers in multiples of this many rows and dimensions.
MULTIPLE = 32
#: Before k cosines of a row are known, those of this many times k pairs that seem likely are computed.
LIKELY = 2
#: Rows of which the largest are sought at a time.
CHUNK = 1024


@contextmanager
def whole_float32(device: torch.device) -> Iterator[None]:
    """Products of float32 are those of IEEE, as the bounds assume: not of half precision by autocast, nor of TF32."""
    new = hasattr(
        torch.backends.mkldnn, "matmul"
    )  # torch 2.9, where reading the old switch raises after the new one
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul) if new else ()
    before = [switch.fp32_precision for switch in switches] or torch.get_float32_matmul_precision()
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        if not switches:
            torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, precision in zip(switches, before):
            switch.fp32_precision = precision
        if not switches:
            torch.set_float32_matmul_precision(before)


@cache
def rounding_pays(device: torch.device) -> bool:
    """Whether products of whole numbers are exact and take under half the time of float32, measured once a process."""
    count = (
        8192 if device.type == "cuda" else 1024
    )  # a GPU takes longer for so many than for a launch
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
    """Whether a product takes under half the time of another; `wait` returns when the device has done them."""
    seconds = dict.fromkeys((product, other), math.inf)
    for _ in range(6):  # by turns, as others' work comes and goes
        for work in seconds:
            wait()
            started = clock()
            work()
            wait()
            seconds[work] = min(clock() - started, seconds[work])
    return seconds[product] < seconds[other] / 2


class Rounded:
    """Centred unit rows (R, D) as whole numbers: `numbers` × `step` are they, but for `errors` (R,), their lengths."""

    def __init__(self, rows: Tensor) -> None:
        self.centre = rows.mean(0)
        centred = rows - self.centre
        self.longest = float(torch.linalg.vector_norm(centred, dim=1).max())
        self.step = max(
            4 / 127 * float(centred.square().mean().sqrt()), LEAST
        )  # clips beyond 4 standard deviations
        numbers = (centred / self.step).round_().clamp_(-127, 127)
        self.errors = torch.linalg.vector_norm(centred.sub_(numbers, alpha=self.step), dim=1)
        fill = 0, -rows.shape[1] % MULTIPLE, 0, -len(rows) % MULTIPLE
        self.numbers = pad(numbers.to(torch.int8), fill)


class Screen:
    """Finds the pairs of blocks of queries with these keys, unit rows (C, D), that can change the k best of either."""

    def __init__(self, keys: Tensor, k: int) -> None:
        self.keys, self.k = keys, k
        self.in_float32 = 0  # pairs of the blocks whose products were float32
        self._rounded = Rounded(keys) if rounding_pays(keys.device) else None

    def pairs(
        self, queries: Tensor, worst: Tensor, key_worst: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and columns of the pairs, (H,) both, ascending, and their cosines (H,), the same in any block.

        Where they are too many, those of the k best of each query and key by the product in float32 alone.

        Args:
            queries: (R, D) unit rows.
            worst: (R,) the k-th best cosine so far of the queries, -inf where there is none.
            key_worst: (C,) the same of the keys; None where they seek no queries.
        """
        near, slack = None, queries.shape[1] * 2.0**-21
        if self._rounded is not None:
            highest, unit = self._bounds(queries)
            near = self._near(highest, unit, slack + 3 * unit, queries, worst, key_worst)
        if near is None:
            if all(
                bool(cosines.isfinite().all())
                for cosines in (worst, key_worst)
                if cosines is not None
            ):
                self._rounded = None  # the blocks that follow will be like this one
            self.in_float32 += len(queries) * len(self.keys)
            products = queries @ self.keys.T
            near = self._near(products, 1.0, slack, queries, worst, key_worst)
            if near is None:
                near = torch.zeros_like(products, dtype=torch.bool)
                _mark_best(near, products, worst, self.k)
                if key_worst is not None:
                    _mark_best(near.T, products.T, key_worst, self.k)
        rows, columns = _places(near)
        return rows, columns, _cosines(queries, self.keys, rows, columns)

    def _bounds(self, queries: Tensor) -> tuple[Tensor, float]:
        """Whole numbers (R, C) and a unit: no cosine is more than their product and 3 units."""
        own, keys = Rounded(queries), self._rounded
        unit, reach = (
            own.step * keys.step,
            own.longest + float(own.errors.max()),
        )  # no s·p is longer than reach
        rows = queries @ keys.centre + own.errors * keys.longest  # (R,)
        columns = self.keys @ own.centre - keys.centre @ own.centre + reach * keys.errors  # (C,)
        highest = torch._int_mm(own.numbers, keys.numbers.T)[: len(rows), : len(columns)]
        return highest.add_((columns / unit).int()).add_((rows / unit).int()[:, None]), unit

    def _near(
        self,
        highest: Tensor,
        unit: float,
        slack: float,
        queries: Tensor,
        worst: Tensor,
        key_worst: Tensor | None,
    ) -> Tensor | None:
        """Which pairs matter, (R, C) bool, where a cosine is at most `highest` × `unit` + `slack`; None: too many."""
        least = (self._least(highest, queries, self.keys, worst) - slack) / unit
        near = highest > least.to(highest.dtype)[:, None]
        if key_worst is not None:
            least = (self._least(highest.T, self.keys, queries, key_worst) - slack) / unit
            near |= highest > least.to(highest.dtype)
        return near if near.count_nonzero() <= max(MOST * near.numel(), ALWAYS) else None

    def _least(self, highest: Tensor, own: Tensor, others: Tensor, worst: Tensor) -> Tensor:
        """What the k best cosines are not below, (R,): those so far or, before there are k, of likely ones."""
        if worst.isfinite().all() or len(others) < self.k:
            return worst.clamp(min=-2)
        columns = (
            highest.topk(min(LIKELY * self.k, len(others)), dim=1).indices.sort(1).values
        )  # (R, LIKELY·k)
        rows = torch.arange(len(own), device=own.device).repeat_interleave(columns.shape[1])
        cosines = _cosines(own, others, rows, columns.flatten()).view_as(columns)
        return torch.maximum(worst, cosines.topk(self.k, dim=1).values[:, -1])


def _mark_best(near: Tensor, products: Tensor, worst: Tensor, k: int) -> None:
    """Marks the k largest products of each row with one above its worst; of equal ones the first, unlike `topk`."""
    for rows in (products.amax(1) > worst).nonzero()[:, 0].split(CHUNK):
        values = products[rows]
        for _ in range(min(k, values.shape[1])):
            columns = values.argmax(1, keepdim=True)  # (r, 1), the first of the largest
            near[rows, columns[:, 0]] = True
            values.scatter_(1, columns, -torch.inf)


def _places(near: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is true in (R, C), ascending; `nonzero` is slow, so it looks at eight at a time."""
    eights = pad(near, (0, -near.shape[1] % 8)).view(torch.int64)
    rows, places = eights.nonzero(as_tuple=True)
    which, columns = eights[rows, places, None].view(torch.bool).nonzero(as_tuple=True)
    return rows[which], 8 * places[which] + columns


def _cosines(queries: Tensor, keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The products of single pairs of rows, (H,)."""
    ends = pad(rows.bincount(minlength=len(queries)).cumsum(0), (1, 0))  # (R + 1,)
    zeros, size = queries.new_zeros(len(rows)), (len(queries), len(keys))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # torch calls it a beta
        wanted = torch.sparse_csr_tensor(ends, columns, zeros, size, check_invariants=False)
    return torch.sparse.sampled_addmm(wanted, queries, keys.T, beta=0.0).values()
