import json
from pathlib import Path
from typing import get_args

import pytest
from conftest import tiny_config
from huggingface_hub.errors import StrictDataclassError
from tiny_models import ENCODERS
from transformers import AutoConfig, BertConfig

import configuration_dap
from configuration_dap import AUTO_MAP, FIELDS, DAPConfig
from modeling_dap import DAPModel
from states_dap import POOLINGS


@pytest.mark.parametrize("model_type", ENCODERS)
def test_save_load_save_is_stable(model_type: str, tmp_path: Path) -> None:
    config = DAPConfig(
        tiny_config(model_type), objective="tr+rtl", target_vocab_size=100, mask_token_id=4
    )
    config.save_pretrained(tmp_path / "a")
    again = AutoConfig.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    first, second = (tmp_path / name / "config.json" for name in "ab")
    assert first.read_text() == second.read_text()
    assert type(again.encoder_config) is type(config.encoder_config)
    assert again.encoder_config.num_hidden_layers == 3
    assert again.auto_map == AUTO_MAP


def test_a_saved_field_that_is_not_known_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DAPConfig(tiny_config("bert"), rtl_weight=0.5).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_later_version": 1}))
    configuration_dap.logger.addHandler(caplog.handler)
    config = AutoConfig.from_pretrained(tmp_path)
    assert "of_a_later_version" in caplog.text
    assert config.rtl_weight == 0.5
    assert not hasattr(config, "of_a_later_version")


def test_fields_of_a_new_objective_are_kept(tmp_path: Path) -> None:
    DAPConfig(tiny_config("bert"), objective="tr+mine", mine_weight=0.5).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.objectives, config.mine_weight) == ({"tr", "mine"}, 0.5)


def test_defaults_are_the_papers() -> None:
    config = DAPConfig()
    assert isinstance(config.encoder_config, BertConfig)
    expected = {"objective": "tr+rtl", "pooling": "cls", "rtl_layers": 2, "rtl_ratio": 1.0}
    expected |= {"tr_similarity": "cosine", "tr_temperature": 0.05, "tr_margin": 0.0}
    expected |= {"rtl_direction": "source-to-target", "rtl_weight": 1.0}
    expected |= {"tlm_probability": 0.2, "tlm_weight": 0.1, "mlm_probability": 0.15}
    assert {name: getattr(config, name) for name in expected} == expected
    assert DAPConfig(tr_similarity="dot").tr_temperature == 1.0  # eq. L_TR as printed


def test_poolings_have_the_names_of_the_table() -> None:
    assert get_args(FIELDS["pooling"].type) == tuple(POOLINGS)


REFUSED = [
    ({"rtl_wieght": 1}, "rtl_wieght"),
    ({"objective": "tr+mine", "rtl_wieght": 1}, "rtl_wieght"),
    ({"mine_weight": 1}, "mine_weight"),
    ({"objective": None}, "objective"),
    ({"pooling": "max"}, "pooling"),
    ({"rtl_tied": None}, "rtl_tied"),
    ({"tr_weight": "big"}, "tr_weight"),
    ({"tr_weight": -1}, "tr_weight=-1"),
    ({"tr_margin": -0.1}, "tr_margin"),
    ({"tr_temperature": 0.0}, "tr_temperature"),
    ({"tr_temperature": float("nan")}, "tr_temperature=nan"),
    ({"tr_hard_negatives": 1.5}, "tr_hard_negatives"),
    ({"objective": "rtl", "tr_hard_negatives": 0.5}, "tr_hard_negatives"),
    ({"tr_matryoshka_dims": [768]}, "tr_matryoshka_dims"),
    ({"tr_matryoshka_dims": [8], "projection": "mlp"}, "tr_matryoshka_dims"),
    ({"rtl_layers": 13}, "rtl_layers"),
    ({"rtl_layers": 0}, "rtl_layers"),
    ({"rtl_ratio": 1.5}, "rtl_ratio"),
    ({"mlm_probability": 0}, "mlm_probability"),
    ({"rtl_direction": "both"}, "rtl_languages"),
    ({"rtl_direction": "both", "rtl_languages": ["de"], "target_vocab_size": 9}, "target_vocab"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_is_refused(fields: dict, says: str) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=says):
        DAPConfig(**fields)


def test_values_are_checked_again_when_they_change() -> None:
    config = DAPConfig(tiny_config("bert"), objective="tr")
    with pytest.raises(StrictDataclassError, match="pooling"):
        config.pooling = "max"
    config.tr_temperature = -1
    with pytest.raises(StrictDataclassError, match="tr_temperature=-1"):
        DAPModel(config)
