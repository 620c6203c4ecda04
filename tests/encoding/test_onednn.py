"""oneDNN multiplies as `torch.nn.functional.linear` does, and only plain float32 tensors."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dap_transformers.encoding import onednn
from dap_transformers.encoding.encoder import SentenceEncoder


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return a list to which every later call of oneDNN adds the shape of its states."""
    shapes = []
    onednn_linear = onednn.onednn_linear

    def recorded(states: Tensor, *rest: Tensor | None) -> Tensor:
        shapes.append(states.shape)
        return onednn_linear(states, *rest)

    monkeypatch.setattr(onednn, "onednn_linear", recorded)
    return shapes


@pytest.mark.parametrize(
    "shape", [(24,), (0, 24), (7, 24), (2, 0, 24), (1, 300, 24), (2, 3, 4, 24)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_products_are_those_of_float64(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 50, has_bias)
    states = torch.randn(shape)
    exact = copy.deepcopy(layer).double()
    for each in (states, states.flip(-1), states.expand(2, *shape)):
        with torch.inference_mode(), onednn.OneDNNLinear():
            found = layer(each)
        expected = exact(each.double()).detach().float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    transposed = torch.randn(24, 50).T  # not contiguous
    found = onednn.onednn_linear(states, transposed)
    torch.testing.assert_close(found, states @ transposed.T, rtol=1e-5, atol=1e-5)


def test_other_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnTensor(Tensor):
        pass

    calls = record_calls(monkeypatch)
    states = torch.ones(2, 4)
    weight = torch.randn(3, 4)
    with torch.inference_mode(), onednn.OneDNNLinear():
        linear(states.double(), weight.double())
        linear(states.bfloat16(), weight.bfloat16())
        linear(states.to("meta"), weight.to("meta"))
        linear(states, weight.as_subclass(OwnTensor))
        assert not calls
        linear(states, weight)
    linear(states, weight)  # outside of the context
    assert calls == [(2, 4)]


@pytest.mark.parametrize(("instructions", "calls_per_batch"), [("AVX512", 3 * 6 + 1), ("AVX2", 0)])
def test_an_encoder_uses_them_in_float32_on_cpus_with_avx512(
    tiny_bert_dir: Path, monkeypatch: pytest.MonkeyPatch, instructions: str, calls_per_batch: int
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    rough = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", bf16=True)
    sentences = ["ka lo", "mi"]
    expected = encoder.encode(sentences)
    expected_rough = rough.encode(sentences)
    calls = record_calls(monkeypatch)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    np.testing.assert_array_equal(rough.encode(sentences), expected_rough)
    assert not calls
    np.testing.assert_allclose(encoder.encode(sentences), expected, atol=1e-6)
    assert len(calls) == calls_per_batch  # six for each of three layers, and the pooler's
    # Training still has gradients.
    assert linear(torch.ones(1, 2), nn.Parameter(torch.ones(1, 2))).requires_grad


def test_a_compiled_model_is_left_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch)
    layer = nn.Linear(4, 3)
    states = torch.ones(2, 4)
    with torch.inference_mode(), onednn.OneDNNLinear():
        expected = layer(states)
        layer.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(layer(states), expected)
    assert calls == [(2, 4)]  # the first one, before compiling
