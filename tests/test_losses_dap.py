"""The losses and their token functions against plain loops."""

import pytest
import torch

import losses_dap
from losses_dap import maskable, pool, translation_ranking_loss, vocabulary_cross_entropy


@pytest.mark.parametrize(
    ("similarity", "temperature", "margin"), [("cosine", 0.05, 0.0), ("cosine", 0.1, 0.3), ("dot", 1.0, 0.0)]
)
def test_translation_ranking_follows_its_equation(similarity: str, temperature: float, margin: float) -> None:
    x, y = torch.randn(4, 8), torch.randn(7, 8)
    excluded = torch.zeros(4, 7, dtype=torch.bool)
    excluded[0, 5] = excluded[1, 3] = True  # (1, 3) is query 1's own candidate: never excluded
    result = translation_ranking_loss(x, y, similarity, temperature, margin, first=2, excluded=excluded)

    total, correct, negatives = 0.0, 0, 0
    for i in range(4):
        scores = {}
        for j in range(7):
            if excluded[i, j] and j != i + 2:
                continue
            phi = x[i].double() @ y[j].double()
            if similarity == "cosine":
                phi = phi / x[i].double().norm() / y[j].double().norm()
            scores[j] = (phi - (margin if j == i + 2 else 0.0)) / temperature
        total -= scores[i + 2] - torch.stack(list(scores.values())).exp().sum().log()
        correct += max(scores, key=scores.get) == i + 2
        negatives += len(scores) - 1
    assert result.loss.item() == pytest.approx(total.item() / 4, rel=1e-5)
    assert result.accuracy.item() == correct / 4
    assert result.negatives.item() == negatives / 4


@pytest.mark.parametrize("per_chunk", [3, 10_000])
def test_vocabulary_loss_and_gradients_do_not_depend_on_the_chunk(
    monkeypatch: pytest.MonkeyPatch, per_chunk: int
) -> None:
    monkeypatch.setattr(losses_dap, "LOGITS_PER_CHUNK", per_chunk * 11)
    values = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 5), (11, 5), (11,))]
    labels = torch.randint(0, 11, (7,))
    (3 * vocabulary_cross_entropy(*values, labels)).backward()
    found = [value.grad.clone() for value in values]
    for value in values:
        value.grad = None
    hidden, weight, bias = values
    loss = 0.0
    for i in range(7):
        scores = torch.stack([hidden[i] @ weight[v] + bias[v] for v in range(11)])
        loss = loss - (scores[labels[i]] - scores.exp().sum().log())
    (3 * loss).backward()
    assert vocabulary_cross_entropy(*values, labels).item() == pytest.approx(loss.item())
    for grad, value in zip(found, values):
        torch.testing.assert_close(grad, value.grad)


def test_first_and_last_tokens_are_never_masked() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert maskable(mask).tolist() == [[False, True, True, False, False], [False, True, True, True, False]]


def test_mean_in_half_precision_does_not_overflow() -> None:
    states = torch.full((1, 512, 2), 300.0, dtype=torch.float16)
    assert pool(states, torch.ones(1, 512), "mean").tolist() == [[300.0, 300.0]]
