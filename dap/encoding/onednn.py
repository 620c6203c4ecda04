"""Float32 products of an encoder's weights by oneDNN: torch takes MKL, which has no AVX-512 for the CPUs of others.

Both add in float32, in another order.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


def fast_linear(device: torch.device) -> AbstractContextManager:
    """A context in which `torch.nn.functional.linear` is the fastest there is, for what needs no gradient.

    Which one it is hangs on the CPU's instructions alone, so that the same vectors come of equal CPUs.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    pays = device.type == "cpu" and has_avx512 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return OneDNNLinear() if pays else nullcontext()


class OneDNNLinear(TorchFunctionMode):
    """Lets oneDNN do `linear` of plain float32 tensors on CPU, for this thread; it gives no gradient."""

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            function is not linear
            or kwargs
            or torch.compiler.is_compiling()
            or not all(map(_is_plain, args))
        ):
            return function(*args, **kwargs)
        return onednn_linear(*args)


def onednn_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """States (..., O) of (..., D) by weights (O, D) and a bias (O,), in float32 on CPU."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def _is_plain(value: Tensor | None) -> bool:
    kind = type(value) in (Tensor, nn.Parameter)  # none of those that bring a `linear` of their own
    return value is None or (
        kind and value.dtype == torch.float32 and value.is_cpu and value.layout == torch.strided
    )
