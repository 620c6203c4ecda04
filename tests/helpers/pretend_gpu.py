"""A pretend GPU: tensors that say they are on "cuda:0", and compute on the CPU.

Most faults that only a GPU shows are mixtures: one operation gets a tensor of the GPU and another
of the CPU. Inside `pretend_gpu()` such an operation raises the error of CUDA, on any machine.

- It shows mixtures, calls of `.numpy()` on the GPU, and where the CPU waits for the GPU.
- It runs our branches for CUDA, but not flash attention.
- It cannot show whether CUDA's kernels work, how fast they are, how much memory they need, or how
  they round, and has no autocast. Random numbers are those of the CPU.
- It works in the thread that has called it, without `torch.compile`. A hook that a parameter got
  before its model moved to the GPU is lost.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
GPU = torch.device("cuda:0")
REPOSITORY = Path(__file__).resolve().parents[2]

#: Operations that take indices from the CPU, too, if the indexed tensor is on the GPU.
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
#: Operations whose result has a size that only the GPU knows, so that the CPU waits for it.
WAITS = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive}
WAITS |= {aten._local_scalar_dense, aten.equal}


class PretendTensor(Tensor):
    """A tensor that says it is on "cuda:0". Its values are in a tensor of the CPU, `on_cpu`."""

    on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type, on_cpu: Tensor) -> "PretendTensor":
        is_dense = on_cpu.layout is torch.strided
        # To the C++ code of torch it is on "meta". A build for CPUs stops at gradients on "cuda".
        tensor = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride() if is_dense else None,
            storage_offset=on_cpu.storage_offset() if is_dense else None,
            dtype=on_cpu.dtype,
            device="meta",
        )
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return run(function, args, dict(kwargs or {}), Counter())

    @property
    def device(self) -> torch.device:
        return GPU

    is_cuda = True

    def numpy(self, **_: Any) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()


def run(function: Any, args: tuple, kwargs: dict, waits: Counter) -> Any:
    """Run an operation of torch on the CPU, as if some of its tensors were on a GPU.

    Args:
        function: the operation, after autograd.
        args, kwargs: its arguments.
        waits: counts the operations for which the CPU would wait for the GPU, by their place.

    Raises:
        RuntimeError: tensors of the CPU and of the GPU are mixed.
    """
    operation = function.overloadpacket
    on_gpu: list[PretendTensor] = []
    on_cpu: list[Tensor] = []

    def to_cpu(value: Any) -> Any:
        if isinstance(value, PretendTensor):
            on_gpu.append(value)
            return value.on_cpu
        if isinstance(value, Tensor):
            on_cpu.append(value)
        return value

    plain_args = tree_map(to_cpu, args)
    plain_kwargs = tree_map(to_cpu, kwargs)
    gives_gpu = bool(on_gpu)
    if kwargs.get("device") is not None:
        gives_gpu = asks_for_gpu(operation, kwargs["device"], bool(on_gpu))
    if gives_gpu and "device" in kwargs:
        plain_kwargs["device"] = torch.device("cpu")
    if not on_gpu and not gives_gpu:
        return function(*args, **kwargs)

    require_one_device(operation, args, on_gpu, on_cpu)
    if must_wait(operation, args, kwargs, gives_gpu):
        waits[place()] += 1

    owners = {id(tensor.on_cpu): tensor for tensor in on_gpu}  # for operations in place

    def to_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor) or not gives_gpu:
            return value
        return owners[id(value)] if id(value) in owners else PretendTensor(value)

    return tree_map(to_gpu, function(*plain_args, **plain_kwargs))


def asks_for_gpu(operation: Any, device: torch.device, has_gpu: bool) -> bool:
    """Tell whether an operation that names a device is to give a tensor of the GPU.

    torch's C++ code names "meta" where it makes a tensor like one of ours.
    """
    is_scalar = operation in (aten.scalar_tensor, aten._to_copy)
    is_in_backward = torch._C._current_graph_task_id() != -1
    is_like_ours = device.type == "meta" and (has_gpu or is_scalar or is_in_backward)
    return device.type == "cuda" or is_like_ours


def require_one_device(operation: Any, args: tuple, on_gpu: list, on_cpu: list) -> None:
    """Raise CUDA's error if an operation mixes tensors of the CPU and of the GPU.

    Copies may mix them. Scalars of the CPU may be mixed with tensors of the GPU. Indices may be on
    the CPU.
    """
    if operation in (aten.copy, aten.copy_, aten._to_copy) or not on_gpu:
        return
    if operation in INDEXING:
        if not isinstance(args[0], PretendTensor):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        indices = {id(index) for index in args[1]}
        on_cpu = [tensor for tensor in on_cpu if id(tensor) not in indices]
    if any(tensor.dim() for tensor in on_cpu):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! (in {operation})"
        )


def must_wait(operation: Any, args: tuple, kwargs: dict, gives_gpu: bool) -> bool:
    """Tell whether the CPU would wait for the GPU in an operation."""
    if operation in (aten._to_copy, aten.copy_):
        target_on_gpu = gives_gpu if operation is aten._to_copy else args[0].is_cuda
        source = args[0] if operation is aten._to_copy else args[1]
        is_blocking = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return source.is_cuda != target_on_gpu and is_blocking and source.numel() > 0
    if operation in INDEXING:
        indices = [index for index in args[1] if index is not None]
        fills = operation is not aten.index and len(args) > 2 and args[2].numel() == 1
        is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        return (is_mask and not fills) or not all(index.is_cuda for index in indices)
    return operation in WAITS


def place() -> str:
    """Return "file:line" of our innermost line that runs, or of a library's without one."""
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and ".venv" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(REPOSITORY)}:{line}"
    return "a library"


class _PretendMode(TorchDispatchMode):
    """Runs all operations of torch by `run`, so that new tensors can be on the pretend GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return run(function, args, dict(kwargs or {}), self.waits)


class _Calls(TorchFunctionMode):
    """Does what torch's C++ code does before `run`, and cannot do here."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = with_index(kwargs["device"])
        if function is Tensor.to and len(args) > 1:
            args = (args[0], with_index(args[1]), *args[2:])
        if function is F.scaled_dot_product_attention:
            kwargs["attn_mask"] = attention_mask(*args[:2], **kwargs)
            kwargs["is_causal"] = False
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == GPU:
            del kwargs["device"]
            return function(*args, **kwargs).to(GPU)

        return function(*args, **kwargs)


def attention_mask(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor | None:
    """Return the mask of an attention in the type of the query. 0 is seen, and -inf is not."""
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2]).tril() > 0
    if attn_mask is None or attn_mask.is_floating_point():
        return attn_mask
    return query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)


def with_index(device: Any) -> Any:
    is_cuda = isinstance(device, (str, torch.device)) and str(device) == "cuda"
    return GPU if is_cuda else device


@contextmanager
def pretend_gpu() -> Iterator[Counter]:
    """Let torch have a GPU until the block ends.

    Returns:
        Where the CPU would have waited for the GPU: "file:line" -> number of times.
    """
    mode = _PretendMode()
    state = torch.zeros(16, dtype=torch.uint8)
    nothing = ("_lazy_init", "set_device", "set_rng_state")
    answers = dict.fromkeys(nothing) | {"current_device": 0, "_maybe_exchange_device": 0}
    answers |= {"is_available": True, "device_count": 1, "is_bf16_supported": False}
    answers |= {"get_rng_state": state}
    answers |= {"get_rng_state_all": [state]}
    with ExitStack() as stack:
        for name, answer in answers.items():
            for module in (torch.cuda, torch.cuda.random):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, constant(answer)))
        for place, name, new in (
            # A torch with CUDA would look for a driver.
            (torch.accelerator, "is_available", constant(False)),
            # A wrapper made in inference mode cannot be a view of another one.
            (torch._C, "_InferenceMode", lambda on: torch.no_grad() if on else nullcontext()),
        ):
            stack.enter_context(mock.patch.object(place, name, new))
        stack.enter_context(mode)
        stack.enter_context(_Calls())
        yield mode.waits


def constant(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer
