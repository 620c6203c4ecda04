"""The vocabulary loss against plain loops; test_objective_losses.py has the other losses."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from tiny_models import distance, on_cuda
from torch import Tensor

import losses_dap
from losses_dap import vocabulary_cross_entropy


@pytest.mark.parametrize("per_chunk", [3, 10_000])
def test_vocabulary_loss_and_gradients_do_not_depend_on_the_chunk(
    monkeypatch: pytest.MonkeyPatch, per_chunk: int
) -> None:
    monkeypatch.setattr(losses_dap, "LOGITS_PER_CHUNK", per_chunk * 11)
    shapes = ((7, 5), (11, 5), (11,))
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    hidden, weight, bias = values
    labels = torch.randint(0, 11, (7,))
    expected = F.cross_entropy(hidden @ weight.T + bias, labels, reduction="sum")
    loss = vocabulary_cross_entropy(*values, labels)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(3 * loss, values, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(3 * expected, values))
    with pytest.raises(RuntimeError, match="compute the loss again"):  # gradients are used up
        loss.backward()


def made_up_liger(weight: Tensor, hidden: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    """What Liger's kernel computes, its arguments in the same order and of one type."""
    assert weight.dtype == hidden.dtype == bias.dtype
    return F.cross_entropy((hidden @ weight.T + bias).float(), labels, reduction="sum")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_the_vocabulary_loss_in_half_precision_is_near_that_in_float64(
    device: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fused = kernel == "fused"
    made_up = Mock(side_effect=made_up_liger)
    if device == "cpu" or not is_fused:
        replacement = made_up if is_fused else None
        monkeypatch.setattr(losses_dap, "fused_cross_entropy", lambda device: replacement)
    elif losses_dap.fused_cross_entropy(device) is None:
        pytest.skip("liger-kernel is not installed")
    monkeypatch.setattr(losses_dap, "LOGITS_PER_CHUNK", 200 * 5000)

    weight, labels = torch.randn(5000, 64), torch.randint(0, 5000, (300,))
    known = torch.linspace(0, 0.3, 300)[:, None] * weight[labels]  # the last ones are known well
    hidden = torch.randn(300, 64) * 0.3 + known
    start = [value.to(device) for value in (hidden, weight, torch.randn(5000) - 10)]
    labels = labels.to(device)
    values = [value.double().requires_grad_() for value in start]
    rows = F.cross_entropy(values[0] @ values[1].T + values[2], labels, reduction="none")
    assert rows.max() > 10 > 0.05 > rows.min()
    expected = torch.autograd.grad(rows.sum(), values)
    half_limits = (2e-2, 2e-2) if is_fused else (6e-4, 4.5e-3)
    for half, (nats, share) in ((False, (1e-4, 1e-4)), (True, half_limits)):
        values = [value.clone().requires_grad_() for value in start]
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = vocabulary_cross_entropy(*values, labels)
        found = torch.autograd.grad(loss, values)
        assert loss.dtype == torch.float32
        assert (loss - rows.sum()).abs() < nats * len(rows)
        for a, b in zip(found, expected):
            assert distance(a, b) < share
        if not is_fused:  # small gradients of tokens that are known well are as near as others
            errors = (found[0] - expected[0]).norm(dim=1) / expected[0].norm(dim=1)
            assert errors.max() < (0.08 if half else 1e-4)
    assert made_up.called == (device == "cpu" and is_fused)


def test_a_half_product_has_the_gradients_of_the_product() -> None:
    hidden, weight = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    given = (hidden.requires_grad_(), weight.requires_grad_(), torch.float64)
    assert torch.autograd.gradcheck(losses_dap._HalfProduct.apply, given)
    assert torch.equal(losses_dap._HalfProduct.apply(*given), hidden @ weight.T)
