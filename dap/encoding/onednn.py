"""Float32 products of an encoder's weights by oneDNN: torch takes MKL, which multiplies at half the rate on some CPUs.

Both add in float32, in another order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from dap.search import takes_less

#: Share of MKL's time below which oneDNN is taken: where neither has twice the width they differ by a tenth.
MOST = 0.75


def fast_linear(device: torch.device) -> AbstractContextManager:
    """A context in which `torch.nn.functional.linear` is the fastest there is, for what needs no gradient."""
    return OneDNNLinear() if device.type == "cpu" and onednn_pays() else nullcontext()


class OneDNNLinear(TorchFunctionMode):
    """Lets oneDNN do `linear` of plain float32 tensors on CPU, for this thread; it gives no gradient."""

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is linear and not kwargs and all(map(_is_plain, args)):
            return onednn_linear(*args)
        return function(*args, **kwargs)


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """States (..., O) of (..., D) by weights (O, D) and a bias (O,), in float32 on CPU."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def _is_plain(value: Tensor | None) -> bool:
    kind = type(value) in (Tensor, nn.Parameter)  # none of those that bring a `linear` of their own
    return value is None or (kind and value.dtype == torch.float32 and value.is_cpu and value.layout == torch.strided)


@cache
def onednn_pays() -> bool:
    """Whether this torch has oneDNN, and it takes much less time here; measured once a process."""
    states, weight, bias = torch.ones(512, 384), torch.ones(1536, 384), torch.ones(1536)
    try:
        onednn_linear(states, weight, bias)
    except (AttributeError, RuntimeError):  # built without it
        return False
    own, other = (partial(each, states, weight, bias) for each in (onednn_linear, linear))
    return takes_less(MOST, own, other)
