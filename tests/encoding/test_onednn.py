"""Products by oneDNN against those of `torch.nn.functional.linear`, and where they are left alone."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dap.encoding import SentenceEncoder, onednn
from dap.search import takes_less


@pytest.fixture
def measured_anew() -> Iterator[None]:
    onednn.onednn_pays.cache_clear()
    yield
    onednn.onednn_pays.cache_clear()


def count(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the states that oneDNN is given from now on."""
    found, product = [], onednn.onednn_linear

    def counted(states: Tensor, *rest: Tensor | None) -> Tensor:
        found.append(states.shape)
        return product(states, *rest)

    monkeypatch.setattr(onednn, "onednn_linear", counted)
    return found


@pytest.mark.parametrize("shape", [(24,), (0, 24), (7, 24), (2, 0, 24), (1, 300, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_products_are_those_of_float64(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(0)
    layer, states = nn.Linear(24, 50, has_bias), torch.randn(shape)
    for each in (states, states.flip(-1), states.expand(2, *shape)):
        with torch.inference_mode(), onednn.OneDNNLinear():
            found = layer(each)
        wanted = linear(each.double(), layer.weight.double(), layer.bias.double() if has_bias else None)
        torch.testing.assert_close(found, wanted.detach().float(), rtol=1e-5, atol=2e-6)
    turned = torch.randn(24, 50).T
    torch.testing.assert_close(onednn.onednn_linear(states, turned), states @ turned.T, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("pays", [True, False])
def test_an_encoder_takes_them_where_they_pay_and_for_float32_alone(
    tiny_bert_dir: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    rough = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", bf16=True)
    expected = [each.encode(["ka lo", "mi"]) for each in (encoder, rough)]
    taken = count(monkeypatch)
    monkeypatch.setattr(onednn, "onednn_pays", lambda: pays)
    np.testing.assert_array_equal(rough.encode(["ka lo", "mi"]), expected[1])
    assert not taken
    np.testing.assert_allclose(encoder.encode(["ka lo", "mi"]), expected[0], atol=1e-6)
    assert len(taken) == (3 * 6 + 1 if pays else 0)  # of each layer and the pooler
    assert linear(torch.ones(1, 2), nn.Parameter(torch.ones(1, 2))).requires_grad  # training is as it was


@pytest.mark.usefixtures("measured_anew")
@pytest.mark.parametrize(("seconds", "pays"), [(0.74, True), (0.76, False)])
def test_it_pays_where_it_takes_three_quarters_of_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, pays: bool
) -> None:
    now = [0.0]
    for name, cost in (("onednn_linear", seconds), ("linear", 1.0)):
        monkeypatch.setattr(onednn, name, lambda *_, cost=cost: now.__setitem__(0, now[0] + cost))
    monkeypatch.setattr(onednn, "takes_less", partial(takes_less, clock=lambda: now[0]))
    assert onednn.onednn_pays() == pays


@pytest.mark.usefixtures("measured_anew")
@pytest.mark.parametrize("missing", [AttributeError, RuntimeError, NotImplementedError])
def test_a_torch_without_it_does_as_before(monkeypatch: pytest.MonkeyPatch, missing: type[Exception]) -> None:
    def absent(*_: object) -> Tensor:
        raise missing("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=absent))
    assert not onednn.onednn_pays()
