"""Faster float32 matrix products on CPUs with AVX-512.

`torch.nn.functional.linear` uses MKL, which has no AVX-512 code for CPUs other than Intel's. oneDNN
has it. Both add in float32, but in another order, so results differ by rounding."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


def fast_linear(device: torch.device) -> AbstractContextManager:
    """Return a context in which `linear` uses oneDNN, where that is faster. It has no gradients.

    The choice depends on the CPU's instruction set and not on a timing, so that two machines with
    the same CPU give identical vectors.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if device.type == "cpu" and has_avx512 and has_onednn:
        return OneDNNLinear()
    return nullcontext()


class OneDNNLinear(TorchFunctionMode):
    """A context in which oneDNN computes `linear` of plain float32 tensors on the CPU."""

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_plain_linear = function is linear and not kwargs and all(map(_is_plain, args))
        if is_plain_linear and not torch.compiler.is_compiling():
            return onednn_linear(*args)
        return function(*args, **kwargs)


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return states (..., D) times the transposed weight (O, D) plus the bias (O,)."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def _is_plain(value: Tensor | None) -> bool:
    """Tell whether an argument of `linear` is None, or a dense float32 tensor on the CPU."""
    if value is None:
        return True
    if type(value) not in (Tensor, nn.Parameter):  # a subclass may have its own `linear`
        return False
    return value.dtype == torch.float32 and value.is_cpu and value.layout == torch.strided
