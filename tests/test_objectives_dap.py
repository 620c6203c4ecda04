"""Combinations of objectives; test_architecture_page.py adds one."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_models import COMBINATIONS, make_batch, step, tiny_model
from torch import Tensor
from torch.testing import assert_close

from objectives_dap import OBJECTIVES, BagOfWords, TranslationRanking

WEIGHTS = {"tr_weight": 0.7, "rtl_weight": 0.5, "tlm_weight": 0.3}
WEIGHTS |= {"mlm_weight": 0.2, "bow_weight": 0.6, "distill_weight": 0.4}
OPTIONS = {"tlm_probability": 0.5, "mlm_probability": 0.5, "rtl_ratio": 0.8, **WEIGHTS}


@pytest.mark.parametrize("objective", [name for name in COMBINATIONS if "+" in name])
def test_each_loss_of_a_combination_is_that_of_the_objective_alone(objective: str) -> None:
    model, batch = tiny_model(objective=objective, **OPTIONS), make_batch()
    out = model(**batch)
    total = torch.zeros(())
    state = model.state_dict()
    for name in objective.split("+"):
        alone = tiny_model(objective=name, **OPTIONS)
        own = {key: state[key] for key in alone.state_dict()}
        if name == "bow" and model.bow_transform is not None:
            transform = model.bow_transform.state_dict()
            own |= {f"prediction_head.{key}": value for key, value in transform.items()}
        alone.load_state_dict(own)
        expected = alone(**batch)
        for key, value in expected.measures.items():
            assert_close(out.measures[key], value)
        loss = getattr(out, f"{name}_loss")
        assert_close(expected.loss, WEIGHTS[f"{name}_weight"] * loss)
        total = total + expected.loss
    assert_close(out.loss, total)


@pytest.mark.parametrize("shape", [(6, -1), (-1,)])  # each pair would be a group; no groups
def test_labels_without_groups_are_refused(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ungrouped(BagOfWords):
        def labels(self, *args: Any) -> Tensor:
            return super().labels(*args)[0].reshape(shape)

        def loss_sum(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return super().loss_sum(*args[:-1], args[-1].expand(2, *args[-1].shape))

    monkeypatch.setitem(OBJECTIVES, "bow", Ungrouped)
    with pytest.raises(ValueError, match=r"objective bow: labels of shape \(.*\(G, ...\)"):
        tiny_model(objective="bow")(**make_batch())


def test_the_order_of_names_changes_nothing() -> None:
    models = [tiny_model(objective=name, **OPTIONS) for name in ("tr+rtl+mlm", "mlm+rtl+tr")]
    (loss, expected), (again, found) = (step(model, make_batch()) for model in models)
    assert loss == again
    assert torch.equal(found, expected)


class Arc(TranslationRanking):
    name = "tr_arc"
    options = {"angle": 0.1, "steps": 2}


@patch.dict(OBJECTIVES, {"tr_arc": Arc})
def test_a_name_that_begins_with_another_name_has_options_of_its_own() -> None:
    first, second = tiny_model(objective="tr+tr_arc", tr_arc_angle=1).objectives
    assert not first.options
    assert second.options == {"weight": 1.0, "angle": 1, "steps": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"tr_arc_angel": 0.2},
        {"tr_arc_angle": "wide"},
        {"tr_arc_angle": True},
        {"tr_arc_steps": [1, 2]},
        {"tr_arc_weight": -1},
        {"tr_arc_weight": "1"},
    ],
)
@patch.dict(OBJECTIVES, {"tr_arc": Arc})
def test_options_of_a_wrong_name_type_or_sign_are_refused(fields: dict) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=next(iter(fields))):
        tiny_model(objective="tr_arc", **fields)


@patch.dict(OBJECTIVES, {"arc": Arc})
def test_a_key_that_is_not_the_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'arc'.* 'tr_arc'"):
        tiny_model(objective="tr+arc")
