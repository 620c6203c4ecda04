"""Test combinations of objectives, and the one that docs/architecture.md adds."""

import re
from collections.abc import Iterator

import pytest
import torch
from conftest import REPOSITORY, tiny_config
from tiny_models import COMBINATIONS, MASK, NoFloat64, gradients, make_batch, tiny_model, widen
from torch import Tensor

from dap_transformers.training.grad_cache import CachedBatch
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
    out, total = model(**batch), torch.zeros(())
    state = model.state_dict()
    for name in objective.split("+"):
        alone = model_of(name)
        own = {key: state[key] for key in alone.state_dict()}
        if name == "bow" and model.bow_transform is not None:
            own |= {
                f"prediction_head.{key}": value
                for key, value in model.bow_transform.state_dict().items()
            }
        if (
            OBJECTIVES[name].predicts == "targets" and len(own["prediction_head.bias"]) == 250
        ):  # others predict ids that these do not
            own["prediction_head.bias"] = own["prediction_head.bias"][
                own["prediction_head.token_ids"]
            ]
        alone.load_state_dict(own)
        expected = alone(**batch)
        for key, value in expected.measures.items():
            torch.testing.assert_close(out.measures[key], value)
        torch.testing.assert_close(
            expected.loss, model.config.to_dict()[f"{name}_weight"] * getattr(out, f"{name}_loss")
        )
        total = total + expected.loss
    torch.testing.assert_close(out.loss, total)


def test_the_order_of_names_changes_nothing() -> None:
    batch, found = make_batch(), []
    for objective in ("tr+rtl+mlm", "mlm+rtl+tr"):
        model = model_of(objective)
        model(**batch).loss.backward()
        found.append((list(model.state_dict()), gradients(model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    config = DAPConfig(tiny_config("bert"), objective="tr+rtk", mask_token_id=MASK)
    with pytest.raises(
        ValueError,
        match=r"='tr\+rtk': there is no rtk; give one of tr, rtl, tlm, mlm, bow, distill, or",
    ):
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


def step(
    model: DAPForPreTraining, batch: dict[str, Tensor], size: int | None = None
) -> tuple[float, Tensor]:
    """Loss and gradients of a plain step, or of one in chunks."""
    model.zero_grad()
    if size is None:
        out = model(**batch)
        out.loss.backward()
    else:
        cached = CachedBatch(model, model, batch, size)
        for part in cached.parts:
            cached.run(part).backward()
        out = cached.output()
    return out.loss.item(), gradients(model)


def test_the_objective_that_the_page_adds_trains_and_does_not_see_padding_or_chunks(
    added: str,
) -> None:
    batch = make_batch()
    for objective in (added, f"tr+{added}", f"tr+rtl+{added}"):
        model = tiny_model(objective=objective, **{f"{added}_weight": 0.5})
        loss, expected = step(model, batch)
        order = torch.randperm(6)
        for changed, size in (
            (widen(batch, 5), None),
            ({k: v[order] for k, v in batch.items()}, None),
            (batch, 4),
        ):
            again, found = step(model, changed, size)
            assert again == pytest.approx(loss, rel=1e-5)
            assert (found - expected).norm() < 1e-4 * expected.norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            out = model(**batch)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        assert model(**batch).loss.item() < loss
        rest = sum(
            own.weight * out.measures[f"{own.name}_loss"]
            for own in model.objectives
            if own.name != added
        )
        torch.testing.assert_close(out.loss, 0.5 * getattr(out, f"{added}_loss") + rest)


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("objective", COMBINATIONS)
def test_a_device_without_float64_trains(objective: str, size: int | None) -> None:
    model = model_of(objective)
    batch = {name: value for name, value in make_batch().items() if "noise" not in name}
    with NoFloat64():
        loss, _ = step(model, batch, size)
    assert loss > 0
