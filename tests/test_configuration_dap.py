import json
from pathlib import Path

import pytest
from conftest import tiny_config
from tiny_models import ENCODERS
from transformers import AutoConfig, BertConfig

import configuration_dap
from configuration_dap import AUTO_MAP, DAPConfig


@pytest.mark.parametrize("model_type", ENCODERS)
def test_save_load_save_is_stable(model_type: str, tmp_path: Path) -> None:
    config = DAPConfig(
        tiny_config(model_type), objective="tr+rtl", target_vocab_size=100, mask_token_id=4
    )
    config.save_pretrained(tmp_path / "a")
    again = AutoConfig.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_text() == (
        tmp_path / "b" / "config.json"
    ).read_text()
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
    assert (config.objective, config.pooling, config.rtl_layers) == ("tr+rtl", "cls", 2)
    assert (config.tr_similarity, config.tr_temperature, config.tr_margin) == ("cosine", 0.05, 0.0)
    assert (config.rtl_direction, config.rtl_ratio, config.rtl_weight) == (
        "source-to-target",
        1.0,
        1.0,
    )
    assert (config.tlm_probability, config.tlm_weight) == (0.2, 0.1)
    assert config.mlm_probability == 0.15  # BERT's
    assert DAPConfig(tr_similarity="dot").tr_temperature == 1.0  # eq. L_TR as printed


WRONG = [
    ({"objective": "tr+tr"}, r"objective='tr\+tr'.*different names joined by '\+'"),
    ({"objective": "tr+"}, r"objective='tr\+' is not"),
    ({"objective": None}, "objective=None is not"),
    ({"objective": "tr+mine", "rtl_wieght": 1}, "no field for rtl_wieght=1"),
    ({"mine_weight": 1}, "no field for mine_weight=1"),
    ({"tr_weight": -1}, r"tr_weight=-1.*\[0, inf\)"),
    ({"rtl_tied": None}, "rtl_tied=None.*True or False"),
    ({"pooling": "max"}, "pooling='max'.*'cls', 'mean'"),
    ({"projection": "linear"}, "projection='linear'.*None, 'mlp'"),
    ({"tr_similarity": "l2"}, "tr_similarity='l2'"),
    ({"tr_temperature": 0.0}, r"tr_temperature=0.0.*\(0, inf\)"),
    ({"tr_temperature": float("nan")}, "tr_temperature=nan"),
    ({"tr_hard_negatives": 1.5}, r"tr_hard_negatives=1.5.*\[0, 1\]"),
    (
        {"objective": "rtl", "tr_hard_negatives": 0.5},
        "tr_hard_negatives=0.5.*0 unless TR is in the objective",
    ),
    ({"tr_margin": -0.1}, r"tr_margin=-0.1.*\[0, inf\)"),
    ({"tr_bidirectional": 1}, "tr_bidirectional=1.*True or False"),
    ({"tr_matryoshka_dims": [768]}, r"tr_matryoshka_dims=\[768\].*1 to 767"),
    ({"tr_matryoshka_dims": [8, 8]}, "different sizes"),
    ({"tr_matryoshka_dims": [8], "projection": "mlp"}, "without a projection"),
    ({"distill_size": 0}, "distill_size=0"),
    ({"rtl_layers": 13}, "rtl_layers=13.*1 to 12"),
    ({"rtl_layers": 0}, "rtl_layers=0"),
    ({"rtl_ratio": 1.5}, r"rtl_ratio=1.5.*\(0, 1\]"),
    ({"rtl_weight": "big"}, "rtl_weight='big'"),
    ({"tlm_probability": 0}, "tlm_probability=0"),
    ({"mlm_probability": 1.1}, r"mlm_probability=1.1.*\(0, 1\]"),
    ({"mask_token_id": 10**6}, "mask_token_id=1000000.*0 to 30521"),
    ({"target_vocab_size": 10**6}, "target_vocab_size=1000000"),
    ({"rtl_direction": "sideways"}, "rtl_direction='sideways'"),
    ({"rtl_direction": "both"}, "rtl_languages=None.*rtl_direction is 'both'"),
    ({"rtl_direction": "both", "rtl_languages": ["de", "de"]}, "rtl_languages=.*different"),
    (
        {"rtl_direction": "both", "rtl_languages": "de"},
        "rtl_languages='de'.*a list of language codes",
    ),
    (
        {"rtl_direction": "both", "rtl_languages": ["de"], "target_vocab_size": 9},
        "target_vocab_size=9.*reconstructs",
    ),
    ({"temperature": 0.1}, "no field for temperature=0.1.*tr_temperature"),
    ({"encoder_config": {"hidden_size": 3}}, "encoder_config=.*'model_type'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_values_that_are_not_allowed_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DAPConfig(**fields)
