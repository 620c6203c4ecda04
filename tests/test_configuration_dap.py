from pathlib import Path
from typing import get_args

import pytest
from conftest import tiny_config
from damaged_files import damage
from huggingface_hub.errors import StrictDataclassError
from tiny_models import ENCODERS
from transformers import AutoConfig, BertConfig

import configuration_dap
from configuration_dap import AUTO_MAP, FIELDS, DAPConfig
from modeling_dap import DAPModel
from states_dap import POOLINGS


def test_the_attention_of_a_configuration_is_that_of_its_encoder() -> None:
    config = DAPConfig(tiny_config("bert"), objective="tr", attn_implementation="eager")
    assert config.encoder_config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", ENCODERS)
def test_a_saved_configuration_loads_the_same(model_type: str, tmp_path: Path) -> None:
    # Also with an objective of the user, whose name begins a field of ours.
    own = {"objective": "tr+rtl+target", "target_weight": 0.5}
    config = DAPConfig(tiny_config(model_type), target_vocab_size=100, mask_token_id=4, **own)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    config.name_or_path = str(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert type(again.encoder_config) is type(config.encoder_config)
    assert (again.objectives, again.target_weight) == ({"tr", "rtl", "target"}, 0.5)
    assert again.auto_map == AUTO_MAP


def test_a_saved_field_that_is_not_known_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DAPConfig(tiny_config("bert"), rtl_weight=0.5).save_pretrained(tmp_path)
    damage(tmp_path, "config.json", {"of_a_later_version": 1})
    configuration_dap.logger.addHandler(caplog.handler)
    config = AutoConfig.from_pretrained(tmp_path)
    assert "of_a_later_version" in caplog.text
    assert config.rtl_weight == 0.5
    assert not hasattr(config, "of_a_later_version")


def test_defaults_are_the_papers() -> None:
    config = DAPConfig()
    assert isinstance(config.encoder_config, BertConfig)
    expected = {"objective": "tr+rtl", "pooling": "cls", "rtl_layers": 2, "rtl_ratio": 1.0}
    expected |= {"tr_similarity": "cosine", "tr_temperature": 0.05}
    expected |= {"rtl_direction": "source-to-target", "rtl_weight": 1.0}
    expected |= {"tlm_probability": 0.2, "tlm_weight": 0.1, "mlm_probability": 0.15}
    assert {name: getattr(config, name) for name in expected} == expected
    assert DAPConfig(tr_similarity="dot").tr_temperature == 1.0  # eq. L_TR as printed


def test_poolings_have_the_names_of_the_table() -> None:
    names, _ = get_args(FIELDS["pooling"].type)  # or None
    assert get_args(names) == tuple(POOLINGS)


#: Fields of which the last one is refused.
REFUSED = [
    {"rtl_wieght": 1},
    {"objective": "tr+mine", "rtl_wieght": 1},
    {"mine_weight": 1},
    {"tr_weight": -1},
    {"tr_temperature": 0.0},
    {"tr_temperature": float("nan")},
    {"tr_hard_negatives": 1.5},
    {"objective": "rtl", "tr_hard_negatives": 0.5},
    {"tr_matryoshka_dims": [768]},
    {"projection": "mlp", "tr_matryoshka_dims": [8]},
    {"rtl_layers": 13},
    {"rtl_layers": 0},
    {"rtl_ratio": 1.5},
    {"mlm_probability": 0},
    {"rtl_direction": "both", "rtl_languages": None},
    {"rtl_direction": "both", "rtl_languages": ["de"], "target_vocab_size": 9},
]


@pytest.mark.parametrize("fields", REFUSED)
def test_what_is_refused(fields: dict) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=[*fields][-1]):
        DAPConfig(**fields)


def test_values_are_checked_again_when_they_change() -> None:
    config = DAPConfig(tiny_config("bert"), objective="tr")
    with pytest.raises(StrictDataclassError, match="pooling"):
        config.pooling = "max"
    config.tr_temperature = -1
    with pytest.raises(StrictDataclassError, match="tr_temperature=-1"):
        DAPModel(config)
