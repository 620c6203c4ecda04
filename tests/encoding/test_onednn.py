"""Products by oneDNN against those of `torch.nn.functional.linear`, and where they are left alone."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dap.encoding import SentenceEncoder, onednn


def count(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the states that oneDNN is given from now on."""
    found, product = [], onednn.onednn_linear

    def counted(states: Tensor, *rest: Tensor | None) -> Tensor:
        found.append(states.shape)
        return product(states, *rest)

    monkeypatch.setattr(onednn, "onednn_linear", counted)
    return found


@pytest.mark.parametrize(
    "shape", [(24,), (0, 24), (7, 24), (2, 0, 24), (1, 300, 24), (2, 3, 4, 24)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_products_are_those_of_float64(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer, states = nn.Linear(24, 50, has_bias), torch.randn(shape)
    for each in (states, states.flip(-1), states.expand(2, *shape)):
        with torch.inference_mode(), onednn.OneDNNLinear():
            found = layer(each)
        wanted = linear(
            each.double(), layer.weight.double(), layer.bias.double() if has_bias else None
        )
        torch.testing.assert_close(found, wanted.detach().float(), rtol=1e-5, atol=2e-6)
    turned = torch.randn(24, 50).T
    torch.testing.assert_close(
        onednn.onednn_linear(states, turned), states @ turned.T, rtol=1e-5, atol=1e-5
    )


def test_other_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Tensor):
        pass

    taken, weight = count(monkeypatch), torch.randn(3, 4)
    with torch.inference_mode(), onednn.OneDNNLinear():
        for states, weights in ((torch.ones(2, 4, dtype=torch.double), weight.double()),
                                (torch.ones(2, 4, dtype=torch.bfloat16), weight.bfloat16()),
                                (torch.ones(2, 4), weight.as_subclass(Own)),
                                (torch.ones(2, 4, device="meta"), weight.to("meta"))):  # fmt: skip
            assert linear(states, weights).shape == (2, 3)
        assert not taken
        linear(torch.ones(2, 4), weight)
    linear(torch.ones(2, 4), weight)
    assert taken == [(2, 4)]


@pytest.mark.parametrize(("instructions", "pays"), [("AVX512", True), ("AVX2", False)])
def test_an_encoder_takes_them_where_they_pay_and_for_float32_alone(
    tiny_bert_dir: Path, monkeypatch: pytest.MonkeyPatch, instructions: str, pays: bool
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    rough = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", bf16=True)
    expected = [each.encode(["ka lo", "mi"]) for each in (encoder, rough)]
    taken = count(monkeypatch)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    np.testing.assert_array_equal(rough.encode(["ka lo", "mi"]), expected[1])
    assert not taken
    np.testing.assert_allclose(encoder.encode(["ka lo", "mi"]), expected[0], atol=1e-6)
    assert len(taken) == (3 * 6 + 1 if pays else 0)  # of each layer and the pooler
    assert linear(
        torch.ones(1, 2), nn.Parameter(torch.ones(1, 2))
    ).requires_grad  # training is as it was


def test_a_torch_without_it_does_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert isinstance(onednn.fast_linear(torch.device("cpu")), nullcontext)


def test_a_compiled_model_is_left_to_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, layer, states = count(monkeypatch), nn.Linear(4, 3), torch.ones(2, 4)
    with torch.inference_mode(), onednn.OneDNNLinear():
        expected = layer(states)
        layer.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(layer(states), expected)
    assert taken == [(2, 4)]
