"""Find the pairs that can be nearest neighbours by one matrix product in low precision.

A query is a row whose neighbours are wanted. A key is a row that may be a neighbour.

**The bound.** The vectors of an encoder lie close together, so both sides are centred first. With
a = a' + m and b = b' + n, where m and n are about the means of the two sides,

    a·b = a'·b' + a'·n + m·b' + m·n.

The centred rows are rounded to bfloat16 numbers p and q. By the Cauchy-Schwarz inequality

    |a'·b' - p·q| <= |a' - p| |b'| + |p| |b' - q|.

The lengths of the rounding errors, |a' - p| and |b' - q|, are computed, not estimated. The terms of
a single row are appended to p and q. So one product gives an upper bound of a·b - m·n for all
pairs. It is rounded to bfloat16 itself, and so are the limits that it is compared with.

**The maxima.** Seen as int16, positive bfloat16 numbers keep their order. Maxima of int16 numbers
along an outer axis are many times as fast as other comparisons. So the maxima of groups are
computed first, and only groups whose maximum reaches the limit are looked into. If a limit is not
positive, all numbers are replaced by others whose order is right for negative ones, too, and the
maxima are computed again. A constant is added to all bounds, so that this is rare.

Legend: `R` × `C` a block of queries × keys, `D` dimensions, `k` neighbours, `G` members of a group,
`H` pairs of a block that can be among the k best.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Most members of a group.
GROUP = 32
#: Groups that are looked into at a time.
SLICE = 2**16
#: Most pairs whose cosines are computed at a time.
PAIRS = 2**18
#: Rows that are centred, multiplied or put in order at a time: few, so that they stay in the cache.
PART = 512
#: Columns that are appended to the rows of both sides: two terms and two ones.
APPENDED = 4
#: Added to all bounds, so that nearly all limits are positive. A larger number loses precision.
LIFT = 2.0**-4
#: Term of the rows that fill up a group, so that none of their numbers reaches `LEAST_LIMIT`.
FILL = -8.0
LEAST_LIMIT = -4.0

#: Rows (H,), ascending, columns (H,) and cosines (H,) of pairs.
Pairs = tuple[Tensor, Tensor, Tensor]


@contextmanager
def whole_float32(device: torch.device) -> Iterator[None]:
    """Within this block, multiply float32 matrices in full precision, as the bounds assume.

    This switches off autocast to half precision, TF32, and sums of bfloat16 products that are not
    in float32. All are restored afterwards.
    """
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [switch.fp32_precision for switch in switches]
    sums_before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = sums_before
        for switch, precision in zip(switches, before):
            switch.fp32_precision = precision


def _bfloat16(rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Multiply bfloat16 matrices, as `PRODUCTS` asks."""
    torch.mm(rows, columns.T, out=out)


def _float32(rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Multiply float32 matrices."""
    out.copy_(rows @ columns.T)


def _float32_by_onednn(rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Multiply float32 matrices. MKL has no AVX-512 code for CPUs other than Intel's."""
    out.copy_(torch.ops.mkldnn._linear_pointwise(rows, columns, None, "none", [], ""))


#: Kind of product -> type of the numbers, and a function that writes the product of rows (R, E)
#: and columns (C, E) to bfloat16 `out` (R, C). Some CPUs have no fast product of bfloat16.
PRODUCTS: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor, Tensor], None]]] = {
    "bfloat16": (torch.bfloat16, _bfloat16),
    "float32": (torch.float32, _float32),
    "float32 by oneDNN": (torch.float32, _float32_by_onednn),
}


@cache
def fastest_product(device: torch.device) -> str:
    """Return the kind of product that is fastest on a device, timed at the first call for it."""
    size = 8192 if device.type == "cuda" else 1024
    seconds: dict[str, float] = {}
    for _ in range(5):  # in turns, because other programs may slow the machine down for a while
        for kind, (dtype, multiply) in PRODUCTS.items():
            rows = torch.ones(size, 768, dtype=dtype, device=device)
            out = torch.empty(size, size, dtype=torch.bfloat16, device=device)
            started = time.perf_counter()
            try:
                multiply(rows, rows, out)
                out[0, 0].item()  # waits for the device
            except (AttributeError, RuntimeError):  # the device has no such product
                continue
            elapsed = time.perf_counter() - started
            seconds[kind] = min(elapsed, seconds.get(kind, elapsed))
    return min(seconds, key=seconds.__getitem__)


def ordered(bits: Tensor) -> Tensor:
    """Map the bits of floats, as int16 or int32, to whole numbers of the same order, and back."""
    kind = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> kind.bits - 1) & kind.max)


class CentredRows:
    """Unit rows (R, D), centred and rounded, with columns for the terms of a single row.

    Attributes:
        rows: (R, D) the unit rows.
        group: rows of a group.
        numbers: (R', E) the centred rows in the type of the product, the terms, and zeros. R' is a
            multiple of `group`.
        terms: (R,) product of each centred row and the other side's centre.
        errors: (R,) Euclidean length of each row's rounding error.
        longest: Euclidean length that no centred row exceeds, before and after rounding.
    """

    def __init__(self, rows: Tensor, centre: Tensor, other: Tensor, kind: str) -> None:
        size, width = rows.shape
        self.rows = rows
        self.group = max(1, min(GROUP, size // GROUP))
        # some products are faster if the sizes are multiples of eight
        shape = (size + -size % self.group, width + APPENDED + -(width + APPENDED) % 8)
        self.numbers = rows.new_zeros(shape, dtype=PRODUCTS[kind][0])

        terms = []
        lengths = []
        errors = []
        for part, numbers in zip(rows.split(PART), self.numbers[:size, :width].split(PART)):
            centred = part - centre
            numbers.copy_(centred)
            terms.append(centred @ other)
            lengths.append(torch.linalg.vector_norm(centred, dim=1))
            centred -= numbers.float()
            errors.append(torch.linalg.vector_norm(centred, dim=1))
        self.terms = torch.cat(terms)
        self.errors = torch.cat(errors)
        self.longest = (torch.cat(lengths) + self.errors).max()

    def append(self, terms: Tensor, first: int) -> None:
        """Write terms (R,), each as the sum of the appended columns `first` and `first` + 1."""
        end = self.rows.shape[1] + APPENDED
        appended = self.numbers[:, end - APPENDED : end]
        appended.fill_(1)
        terms = pad(terms, (0, len(appended) - len(terms)), value=FILL)
        appended[:, first] = terms
        appended[:, first + 1] = terms - appended[:, first]


class Bounds:
    """Upper bounds of the cosines of a block, from which the pairs that matter are found.

    A pair matters if its cosine can exceed the k-th best so far of its query, `worst` (R,), or of
    its key, `key_worst` (C,). -inf means that fewer than k are known.

    Args:
        mean: product of the two centres.
        kind: key of `PRODUCTS`.
        memory: (at least R' · C',) bfloat16 numbers that the bounds are written to. R' and C' are R
            and C, rounded up to whole groups. New memory for each block would make the search a
            tenth slower.
    """

    def __init__(
        self,
        queries: CentredRows,
        keys: CentredRows,
        worst: Tensor,
        key_worst: Tensor,
        k: int,
        mean: Tensor,
        kind: str,
        memory: Tensor,
    ) -> None:
        self.queries = queries
        self.keys = keys
        self.k = k
        # All float32 sums of D products, and the terms as two numbers each, err by less than this.
        # Centred rows are at most 2 long. So the product errs by at most 9 D · 2^-24, and each of
        # the two terms by 2 D · 2^-24 and, as two numbers, by 2^-16. The exact cosine and `mean`
        # are such sums, too, and err by D · 2^-24 each.
        self.slack = (queries.rows.shape[1] + 128) * 2.0**-20
        lowest = mean + self.slack - LIFT
        self.limits = worst.clamp(min=LEAST_LIMIT) - lowest
        self.key_limits = key_worst.clamp(min=LEAST_LIMIT) - lowest

        self.row_errors = queries.errors * keys.longest  # (R,) |a' - p| |b'|
        self.column_errors = keys.errors * queries.longest  # (C,) |p| |b' - q|
        queries.append(queries.terms + self.row_errors + LIFT, 0)
        keys.append(keys.terms + self.column_errors, 2)
        size = len(queries.numbers), len(keys.numbers)
        product = memory[: size[0] * size[1]].view(size)  # (R', C')
        for rows, out in zip(queries.numbers.split(PART), product.split(PART)):
            PRODUCTS[kind][1](rows, keys.numbers, out)
        self.bits = product.view(torch.int16)  # the same memory
        self.are_ordered = False

    def near_keys(self) -> Iterator[Pairs]:
        """Yield the pairs that matter to the queries: rows are queries, columns are keys."""
        groups = self.bits.view(len(self.bits), self.keys.group, -1)  # (R', G, C'/G)
        errors = self.row_errors + self.column_errors.max()
        limits, hits = self._hits(lambda: groups.amax(1), self.limits, errors)
        return _pairs(groups, limits, hits, self.queries.rows, self.keys.rows)

    def near_queries(self) -> Iterator[Pairs]:
        """Yield the pairs that matter to the keys: rows are keys, columns are queries."""
        groups = self.bits.view(self.queries.group, -1, self.bits.shape[1])  # (G, R'/G, C')
        errors = self.column_errors + self.row_errors.max()
        limits, hits = self._hits(lambda: groups.amax(0).T, self.key_limits, errors)
        return _pairs(groups.permute(2, 0, 1), limits, hits, self.keys.rows, self.queries.rows)

    def _hits(
        self, maxima_of_groups: Callable[[], Tensor], limits: Tensor, errors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Find the groups to look into. Put `bits` in order first if a limit is not positive.

        Args:
            maxima_of_groups: computes the maxima (r, g) of the groups of each row.
            limits: (r,) value that the bound of a pair that matters is not below.
            errors: (r,) half of what a bound may exceed its cosine by, without `slack`.

        Returns:
            The limits (r,) as whole numbers like `bits`, and rows and groups (h, 2), ascending.
        """
        maxima = maxima_of_groups()[: len(limits)]  # without the rows that fill a group up
        bits = _bits(limits)
        is_hit = maxima >= bits[:, None]
        if is_hit.count_nonzero() > self.k * len(limits) and maxima.shape[1] >= self.k:
            # More than k groups per row reach their limit, so a closer limit saves work.
            # The groups hold different pairs, so k pairs are as good as the k-th maximum.
            tops = maxima.topk(self.k).values[:, -1]
            # Until the numbers are in order, a negative maximum becomes a wrong negative number or
            # NaN. Neither raises a positive limit.
            known = ordered(tops).view(torch.bfloat16).float()
            # Rounding changed a bound by at most 1/256 of it. Twice as much is taken off.
            known -= known.abs() / 128 + 2 * (errors + self.slack)
            bits = _bits(limits.fmax(known))
            is_hit = maxima >= bits[:, None]
        if bits.min() <= 0 and not self.are_ordered:
            # the order of negative numbers was wrong until here
            self.are_ordered = True
            for part in self.bits.split(PART):
                part.copy_(ordered(part))
            return self._hits(maxima_of_groups, limits, errors)
        return bits, is_hit.contiguous().nonzero()  # slow in another layout


def _bits(limits: Tensor) -> Tensor:
    """Round float32 limits (r,) down to bfloat16. Return whole numbers of the same order."""
    bits = ordered(limits.clamp(min=LEAST_LIMIT).view(torch.int32))
    # A positive bfloat16 number ends in 0x0000 here, and a negative one in 0xFFFF. So its upper
    # half alone would round a negative limit up.
    return ((bits - 0xFFFF * (bits < 0)) >> 16).to(torch.int16)


def _pairs(
    groups: Tensor, limits: Tensor, hits: Tensor, rows: Tensor, columns: Tensor
) -> Iterator[Pairs]:
    """Yield the pairs that reach their limit, of the groups (r, G, g) at `hits` (h, 2)."""
    for part in hits.split(SLICE):
        row, group = part.T
        for pairs in (groups[row, :, group] >= limits[row, None]).nonzero().split(PAIRS):
            which, member = pairs.T
            own = row[which]
            column = member * groups.shape[2] + group[which]
            yield own, column, _cosines(rows, columns, own, column)


def _cosines(own: Tensor, others: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Compute the cosines (H,) of pairs at rows (H,), ascending, and columns (H,), sparsely."""
    ends = pad(rows.bincount(minlength=len(own)).cumsum(0), (1, 0))  # (R + 1,)
    zeros = own.new_zeros(len(rows))
    size = (len(own), len(others))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # torch calls it a beta
        wanted = torch.sparse_csr_tensor(ends, columns, zeros, size, check_invariants=False)
    return torch.sparse.sampled_addmm(wanted, own, others.T, beta=0.0).values()
