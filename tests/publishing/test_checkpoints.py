"""From plain encoders to DAP models, to disk and back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import save, save_bert, tiny_config, tiny_tokenizer
from forked import run_python
from huggingface_hub.errors import StrictDataclassError
from tiny_models import COMBINATIONS, ENCODERS, MASK, SHAPE, make_batch, start_from, tiny_model
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import modeling_dap
from dap_transformers.encoding.encoder import SentenceEncoder
from encoder_dap import require_encoder
from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification, DAPModel


def started(model: PreTrainedModel, folder: Path, objective: str = "tr") -> DAPForPreTraining:
    """Save an encoder with a tokenizer, and start training from it."""
    return start_from(save(folder, model), objective=objective)


@pytest.mark.parametrize(
    ("model_type", "objective"),
    [
        ("bert", "tr+tlm"),
        ("bert", "tr+mlm+bow"),
        *((model_type, "tr+rtl") for model_type in ENCODERS),
    ],
)
def test_from_encoder_takes_last_layers_and_masked_lm_head(
    model_type: str, objective: str, tmp_path: Path
) -> None:
    plain = AutoModelForMaskedLM.from_config(tiny_config(model_type))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save(tmp_path, plain.eval())
    model = start_from(tmp_path, objective=objective).eval()
    assert model.config.mask_token_id == MASK
    ids = make_batch()["source_input_ids"]
    expected = plain(ids, output_hidden_states=True)
    out = model.dap(ids, torch.ones_like(ids), output_hidden_states=True)
    assert_close(out.last_hidden_state, plain.base_model(ids).last_hidden_state)
    # the prediction head on the encoder's states is the masked-LM model's output
    head, states = model.prediction_head, out.last_hidden_state
    for before in (head, model.bow_transform or head):
        logits = before.transform(states) @ model.get_input_embeddings().weight.T + head.bias
        assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert (model.bow_transform is None) == ("bow" not in objective)
    if objective == "tr+rtl":
        # the head's two blocks give the encoder's output for the states before its last two layers
        before = expected.hidden_states[1]
        redone = model.rtl_head.blocks(inputs_embeds=before).last_hidden_state
        assert_close(redone, out.last_hidden_state, rtol=1e-4, atol=1e-4)


def test_from_encoder_without_masked_lm_head_warns_and_restricts_the_vocabulary(
    tiny_bert_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modeling_dap.logger.addHandler(caplog.handler)
    model = start_from(tiny_bert_dir, target_token_ids=[9, 7, 7, 30])
    assert "starts from random weights" in caplog.text
    assert model.config.target_vocab_size == 3
    assert model.prediction_head.token_ids.tolist() == [7, 9, 30]


def test_a_masked_lm_head_with_an_untied_matrix_is_not_used(tmp_path: Path) -> None:
    config = tiny_config("bert")
    config.tie_word_embeddings = False
    plain = transformers.BertForMaskedLM(config)
    model = started(plain, tmp_path, "tr+tlm")
    own = plain.cls.predictions.transform.dense.weight
    assert not torch.equal(model.prediction_head.dense.weight, own)


def test_an_encoder_from_scratch_is_in_float32_and_has_the_requested_attention() -> None:
    config = tiny_config("bert")
    config.dtype = torch.float16
    model = DAPForPreTraining.from_scratch(config, objective="tr", attn_implementation="eager")
    assert {part.dtype for part in model.parameters()} == {torch.float32}
    assert config.dtype == torch.float16  # the caller's own stays
    assert model.dap.encoder.config._attn_implementation == "eager"


ALBERT = transformers.AlbertConfig(**SHAPE, embedding_size=16)  # one layer, used three times
NARROW = transformers.ElectraConfig(**SHAPE, embedding_size=16)  # than the states
UNTESTED = [
    transformers.BigBirdConfig(**SHAPE, attention_type="original_full"),  # has a pooler
    tiny_config("xlm"),
    NARROW,
    ALBERT,
    transformers.RemBertConfig(**SHAPE, input_embedding_size=16, output_embedding_size=24),
    transformers.LongformerConfig(**SHAPE, attention_window=4),  # pads its input to the window
]
# Their states depend on padding, or they do more with ids than to embed them.
FNET = tiny_config("fnet")
ESM = transformers.EsmConfig(**SHAPE, mask_token_id=MASK, token_dropout=True)


@pytest.mark.parametrize("config", UNTESTED, ids=lambda config: config.model_type)
def test_encoders_without_tests_train_with_sentence_vectors_and_masked_text(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    model = started(AutoModelForMaskedLM.from_config(config), tmp_path, "tr+tlm")
    assert model.training
    assert torch.isfinite(model(**make_batch()).loss)


GPT2 = tiny_config("gpt2")
REMOTE = type("NewConfig", (transformers.BertConfig,), {"__module__": "transformers_modules.new"})
NO_ENCODER = "not a text encoder"
BART = transformers.BartConfig(vocab_size=250, d_model=32)
UMT5 = tiny_config("umt5")
LONG_T5 = transformers.LongT5Config(vocab_size=250, d_model=32, d_ff=32, num_heads=4)
MAMBA = transformers.MambaConfig(vocab_size=250, hidden_size=32, num_hidden_layers=2, state_size=4)


def bert_without_some_weights() -> BertModel:
    model = BertModel(tiny_config("bert"))
    del model.encoder.layer[0].output
    return model


def plain_as_dap(folder: Path) -> None:
    BertModel(tiny_config("bert")).save_pretrained(folder)
    DAPModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda place: started(transformers.FNetModel(FNET), place), "alone"),
        (lambda place: started(transformers.EsmModel(ESM), place), "alone"),
        (lambda place: started(transformers.AlbertModel(ALBERT), place, "rtl"), "no list of 3"),
        (
            lambda place: started(transformers.ElectraModel(NARROW), place, "rtl"),
            r"'electra' cannot train",
        ),
        (lambda place: started(transformers.GPT2Model(GPT2), place, "tlm"), "no 'tlm'"),
        (lambda place: started(transformers.T5Model(tiny_config("t5")), place, "rtl"), "no 'rtl'"),
        (lambda place: started(tiny_model(objective="tr"), place), "from_pretrained"),
        (lambda place: started(bert_without_some_weights(), place), "lacks 4 weights"),
        (lambda _: require_encoder(REMOTE(), "some/encoder"), NO_ENCODER),
        (lambda _: DAPModel(DAPConfig(BART, objective="tr")), f"encoder_config .* {NO_ENCODER}"),
        (lambda _: DAPConfig(GPT2, objective="tr", pooling="cls"), "'lasttoken' or 'mean'"),
        (plain_as_dap, "plain 'bert' checkpoint.*from_encoder"),
    ],
)
def test_what_is_no_encoder(call: Callable, says: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=says):
        call(tmp_path)


def test_only_a_decoder_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    # their configurations say that they have a decoder
    for encoder in (transformers.UMT5EncoderModel(UMT5), transformers.LongT5EncoderModel(LONG_T5)):
        assert SentenceEncoder(encoder, tiny_tokenizer()).model is encoder
    assert not caplog.text
    whole = transformers.BartModel(BART)
    assert SentenceEncoder(whole, tiny_tokenizer()).model is whole.encoder
    assert "the decoder of a BartModel is not used" in caplog.text


def test_an_encoder_without_attention_gives_vectors() -> None:
    model = DAPModel(DAPConfig(MAMBA, objective="tr"))
    assert model(make_batch()["source_input_ids"]).pooler_output.shape[1] == 32


def test_a_tokenizer_without_mask_token_is_enough_for_tr(tmp_path: Path) -> None:
    without = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    without.save_pretrained(save_bert(tmp_path))
    folder = str(tmp_path)
    with pytest.raises(ValueError, match="needs a mask token"):
        DAPForPreTraining.from_encoder(folder, objective="tr+tlm")
    model = DAPForPreTraining.from_encoder(folder, objective="tr+rtl")
    assert model.config.mask_token_id is None
    model(**make_batch()).loss.backward()
    assert model.rtl_head.mask_token.grad.abs().sum() > 0


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_saved_model_loads_the_same_through_every_auto_class(
    objective: str, tmp_path: Path
) -> None:
    options = {"target_vocab_size": 200} if "rtl" in objective else {}
    model, batch = tiny_model("xlm-roberta", objective=objective, **options), make_batch()
    if options:
        model.set_target_vocabulary(list(range(50, 250)))
    model.save_pretrained(tmp_path)
    again = AutoModelForPreTraining.from_pretrained(tmp_path).train()
    assert isinstance(again, DAPForPreTraining)
    assert again(**batch).loss.item() == pytest.approx(model(**batch).loss.item())

    encoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(encoder, DAPModel)
    inputs = (batch["source_input_ids"], batch["source_attention_mask"])
    vectors = encoder(*inputs).pooler_output
    assert_close(vectors, model.dap(*inputs).pooler_output)

    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(classifier, DAPForSequenceClassification)
    assert classifier(*inputs).logits.shape == (6, 3)


def test_each_checkpoint_loads_with_its_own_code_without_this_project(tmp_path: Path) -> None:
    batch, expected = make_batch(), {}
    for name, pooling in (("first", "cls"), ("second", "mean")):
        model = tiny_model("bert", pooling=pooling)
        model.save_pretrained(tmp_path / name)
        expected[name] = model(**batch).source_embeds
        for module, owner in (("configuration_dap", "DAPConfig"), ("modeling_dap", "DAPModel")):
            with (tmp_path / name / f"{module}.py").open("a") as file:
                file.write(f"\n{owner}.version = {name!r}\n")
    torch.save(
        (batch["source_input_ids"], batch["source_attention_mask"], expected),
        tmp_path / "expected.pt",
    )
    script = """
import sys, torch
from transformers import AutoModel, AutoModelForPreTraining
assert not any(name.endswith("modeling_dap") for name in sys.modules)
ids, mask, expected = torch.load("expected.pt")
for name in ("first", "second", "first"):
    model = AutoModel.from_pretrained(name, trust_remote_code=True)
    torch.testing.assert_close(model(ids, mask).pooler_output, expected[name])
    whole = AutoModelForPreTraining.from_pretrained(name, trust_remote_code=True)
    assert whole.rtl_head is not None
    print(name, type(model).version, type(model.config).version)
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""}
    lines = [f"{name} {name} {name}" for name in ("first", "second", "first")]
    assert run_python(script, tmp_path, environment).splitlines() == lines
