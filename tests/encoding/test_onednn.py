"""oneDNN multiplies as `torch.nn.functional.linear` does, and only plain float32 tensors."""

import copy
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import load_encoder
from torch import Tensor, nn
from torch.nn.functional import linear

from dap_transformers.encoding import onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Record the calls of oneDNN."""
    calls = Mock(wraps=onednn.onednn_linear)
    monkeypatch.setattr(onednn, "onednn_linear", calls)
    return calls


@pytest.mark.parametrize("shape", [(24,), (0, 24), (1, 300, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_products_are_those_of_float64(shape: tuple, has_bias: bool) -> None:
    layer = nn.Linear(24, 50, has_bias)
    exact = copy.deepcopy(layer).double()
    layer.weight.data = layer.weight.data.T.contiguous().T
    states = torch.randn(shape)
    for each in (states, states.flip(-1), states.expand(2, *shape)):
        with torch.inference_mode(), onednn.OneDNNLinear():
            found = layer(each)
            expected = exact(each.double()).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_other_tensors_and_compiled_models_are_left_to_torch(calls: Mock) -> None:
    class OwnTensor(Tensor):
        pass

    states = torch.ones(2, 4)
    layer = nn.Linear(4, 3)
    weight = layer.weight.detach()
    with torch.inference_mode(), onednn.OneDNNLinear():
        for dtype in (torch.float64, torch.bfloat16):
            linear(states.to(dtype), weight.to(dtype))
        linear(states.to("meta"), weight.to("meta"))
        linear(states, weight.as_subclass(OwnTensor))
        calls.assert_not_called()
        expected = layer(states)
        assert calls.call_count == 1
        layer.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(layer(states), expected)
    linear(states, weight)  # outside of the context
    assert calls.call_count == 1


@pytest.mark.parametrize(
    ("instructions", "bf16", "calls_per_batch"),
    [("AVX512", False, 3 * 6 + 1), ("AVX512", True, 0), ("AVX2", False, 0)],
)
def test_an_encoder_uses_them_in_float32_on_cpus_with_avx512(
    instructions: str,
    bf16: bool,
    calls_per_batch: int,
    calls: Mock,
    tiny_bert_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = load_encoder(tiny_bert_dir, "mean", bf16=bf16)
    found = []
    for capability in ("DEFAULT", instructions):
        calls.reset_mock()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda own=capability: own)
        found.append(encoder.encode(["ka lo", "mi"]))
    np.testing.assert_allclose(*found, atol=1e-6)
    assert calls.call_count == calls_per_batch  # six for each of three layers, and the pooler's
    # Training still has gradients.
    assert linear(torch.ones(1, 2), nn.Parameter(torch.ones(1, 2))).requires_grad
