"""Test combinations of objectives, and the one that docs/architecture.md adds."""

import re
from collections.abc import Iterator

import pytest
import torch
from conftest import REPOSITORY, tiny_config
from tiny_models import COMBINATIONS, MASK, NoFloat64, make_batch, step, tiny_model, widen

from modeling_dap import DAPConfig, DAPForPreTraining
from objectives_dap import OBJECTIVES

WEIGHTS = {"tr_weight": 0.7, "rtl_weight": 0.5, "tlm_weight": 0.3}
WEIGHTS |= {"mlm_weight": 0.2, "bow_weight": 0.6, "distill_weight": 0.4}
OPTIONS = {
    "tlm_probability": 0.5,
    "mlm_probability": 0.5,
    "target_vocab_size": 140,
    "rtl_ratio": 0.8,
    **WEIGHTS,
}


def model_of(objective: str) -> DAPForPreTraining:
    model = tiny_model(objective=objective, **OPTIONS)
    if any(each.predicts == "targets" for each in model.objectives):
        model.set_target_vocabulary([2, *range(60, 199)])
    return model


@pytest.mark.parametrize("objective", [name for name in COMBINATIONS if "+" in name])
def test_each_loss_of_a_combination_is_that_of_the_objective_alone(objective: str) -> None:
    model, batch = model_of(objective), make_batch()
    out = model(**batch)
    total = torch.zeros(())
    state = model.state_dict()
    for name in objective.split("+"):
        alone = model_of(name)
        own = {key: state[key] for key in alone.state_dict()}
        if name == "bow" and model.bow_transform is not None:
            transform = model.bow_transform.state_dict()
            own |= {f"prediction_head.{key}": value for key, value in transform.items()}
        if alone.prediction_head is not None and alone.prediction_head.is_narrow:
            bias, ids = (state[f"prediction_head.{key}"] for key in ("bias", "token_ids"))
            own["prediction_head.bias"] = bias if len(bias) == len(ids) else bias[ids]
        alone.load_state_dict(own)
        expected = alone(**batch)
        for key, value in expected.measures.items():
            torch.testing.assert_close(out.measures[key], value)
        loss = getattr(out, f"{name}_loss")
        torch.testing.assert_close(expected.loss, WEIGHTS[f"{name}_weight"] * loss)
        total = total + expected.loss
    torch.testing.assert_close(out.loss, total)


def test_the_order_of_names_changes_nothing() -> None:
    (loss, expected), (again, found) = (
        step(model_of(objective), make_batch()) for objective in ("tr+rtl+mlm", "mlm+rtl+tr")
    )
    assert loss == again
    assert torch.equal(found, expected)


def test_every_objective_has_a_title_and_unknown_ones_are_refused() -> None:
    assert all(each.title for each in OBJECTIVES.values())
    config = DAPConfig(tiny_config("bert"), objective="tr+rtk", mask_token_id=MASK)
    with pytest.raises(ValueError, match="there is no rtk, but tr, rtl, tlm, mlm, bow, distill"):
        DAPForPreTraining(config)


@pytest.fixture
def added() -> Iterator[str]:
    """Register the objective of docs/architecture.md by the code of the page."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("### An objective")[1]
    code = re.search(r"```py\n(.*?)```", section, re.DOTALL)[1]
    before = set(OBJECTIVES)
    exec(code, {"__name__": "page"})
    (name,) = set(OBJECTIVES) - before
    yield name
    del OBJECTIVES[name]


def test_the_objective_of_the_page_trains_and_does_not_see_padding_or_chunks(added: str) -> None:
    batch = make_batch()
    for objective in (added, f"tr+{added}", f"tr+rtl+{added}"):
        model = tiny_model(objective=objective, **{f"{added}_weight": 0.5})
        loss, expected = step(model, batch)
        order = torch.randperm(6)
        shuffled = {key: value[order] for key, value in batch.items()}
        for changed, size in ((widen(batch, 5), None), (shuffled, None), (batch, 4)):
            again, found = step(model, changed, size)
            assert again == pytest.approx(loss, rel=1e-5)
            assert (found - expected).norm() < 1e-4 * expected.norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            step(model, batch)
            optimizer.step()
        out = model(**batch)
        assert out.loss.item() < loss
        weighted = [each.weight * getattr(out, f"{each.name}_loss") for each in model.objectives]
        torch.testing.assert_close(out.loss, sum(weighted))
        assert model.objectives[-1].weight == 0.5


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("objective", COMBINATIONS)
def test_a_device_without_float64_trains(objective: str, size: int | None) -> None:
    model = model_of(objective)
    batch = {name: value for name, value in make_batch().items() if "noise" not in name}
    with NoFloat64():
        loss, _ = step(model, batch, size)
    assert loss > 0
