"""From plain encoders to DAP models, to disk and back."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import save, tiny_config
from forked import run_python
from tiny_models import COMBINATIONS, ENCODERS, MASK, make_batch, tiny_model
from transformers import AutoModel, AutoModelForMaskedLM, BertModel, PreTrainedTokenizerFast

import modeling_dap
from encoder_dap import require_encoder
from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification, DAPModel
from states_dap import layer_stack


@pytest.mark.parametrize(
    ("model_type", "objective"),
    [
        ("bert", "tr+tlm"),
        ("bert", "tr+mlm+bow"),
        *((model_type, "tr+rtl") for model_type in ENCODERS),
    ],
)
def test_from_encoder_takes_last_layers_and_masked_lm_head(
    model_type: str, objective: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = AutoModelForMaskedLM.from_config(tiny_config(model_type, len(tiny_tokenizer)))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save(tmp_path, plain.eval(), tiny_tokenizer)
    model = DAPForPreTraining.from_encoder(str(tmp_path), objective=objective).eval()
    assert model.config.mask_token_id == MASK
    ids = make_batch()["source_input_ids"]
    expected = plain(ids, output_hidden_states=True)
    out = model.dap(ids, torch.ones_like(ids), output_hidden_states=True)
    torch.testing.assert_close(out.last_hidden_state, plain.base_model(ids).last_hidden_state)
    # the prediction head on the encoder's states is the masked-LM model's output
    head, states = model.prediction_head, out.last_hidden_state
    for before in (head, model.bow_transform or head):
        logits = before.transform(states) @ model.get_input_embeddings().weight.T + head.bias
        torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert (model.bow_transform is None) == ("bow" not in objective)
    if objective == "tr+rtl":
        # the head's two blocks give the encoder's output for the states before its last two layers
        before = expected.hidden_states[1]
        redone = model.rtl_head.blocks(inputs_embeds=before).last_hidden_state
        torch.testing.assert_close(redone, out.last_hidden_state, rtol=1e-4, atol=1e-4)


def test_from_encoder_without_masked_lm_head_warns_and_restricts_the_vocabulary(
    tiny_bert_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modeling_dap.logger.addHandler(caplog.handler)
    model = DAPForPreTraining.from_encoder(str(tiny_bert_dir), target_token_ids=[9, 7, 7, 30])
    assert "no masked-LM head" in caplog.text
    assert model.config.target_vocab_size == 3
    assert model.prediction_head.token_ids.tolist() == [7, 9, 30]
    original = BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False)
    for mine, its in zip(
        layer_stack(model.rtl_head.blocks)[1], layer_stack(original)[1][1:], strict=True
    ):
        torch.testing.assert_close(mine.state_dict(), its.state_dict())


def test_a_masked_lm_head_with_an_untied_matrix_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("bert")
    config.tie_word_embeddings = False
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    modeling_dap.logger.addHandler(caplog.handler)
    model = DAPForPreTraining.from_encoder(str(tmp_path), objective="tr+tlm", mask_token_id=MASK)
    assert "the prediction head starts from random weights" in caplog.text
    assert not torch.equal(
        model.prediction_head.dense.weight,
        transformers.BertForMaskedLM.from_pretrained(
            tmp_path
        ).cls.predictions.transform.dense.weight,
    )


def test_an_encoder_from_scratch_has_the_requested_precision_and_attention() -> None:
    config = tiny_config("bert")
    config.dtype = torch.float16
    model = DAPForPreTraining.from_scratch(config, objective="tr")
    assert {part.dtype for part in model.parameters()} == {torch.float32}
    assert config.dtype == torch.float16  # the caller's own stays
    eager = DAPForPreTraining.from_scratch(config, objective="tr", attn_implementation="eager")
    assert eager.dap.encoder.config._attn_implementation == "eager"
    for dtype in (torch.bfloat16, "bfloat16"):
        half = DAPForPreTraining.from_scratch(config, objective="tr", dtype=dtype)
        assert {part.dtype for part in half.parameters()} == {torch.bfloat16}


SHAPE = {"vocab_size": 250, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"intermediate_size": 48, "pad_token_id": 1}
UNTESTED = [
    transformers.BigBirdConfig(**SHAPE, attention_type="original_full"),  # has a pooler
    transformers.EuroBertConfig(**SHAPE, num_key_value_heads=4),  # has no part called embeddings
    transformers.XLMConfig(vocab_size=250, emb_dim=32, n_layers=3, n_heads=4),
    transformers.ElectraConfig(**SHAPE, embedding_size=16),  # embeddings narrower than the states
    transformers.AlbertConfig(**SHAPE, embedding_size=16),  # one layer, used three times
    transformers.LongformerConfig(**SHAPE, attention_window=4),  # pads its input to the window
]
SEES_PADDING = [
    transformers.FNetConfig(
        vocab_size=250, hidden_size=32, num_hidden_layers=3, intermediate_size=48
    ),
    transformers.ConvBertConfig(**SHAPE, embedding_size=32),  # its convolution sees padding
    transformers.EsmConfig(**SHAPE, mask_token_id=MASK, token_dropout=True),  # scales ids only
]


@pytest.mark.parametrize("config", UNTESTED, ids=lambda config: config.model_type)
def test_encoders_without_tests_train_with_sentence_vectors_and_masked_text(
    config: transformers.PreTrainedConfig, tmp_path: Path
) -> None:
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    options = {"objective": "tr+tlm", "mask_token_id": MASK}
    model = DAPForPreTraining.from_encoder(str(tmp_path), **options)
    assert model.training
    assert torch.isfinite(model(**make_batch()).loss)
    if config.model_type == "albert":
        with pytest.raises(ValueError, match="no list of 3 layers"):
            DAPForPreTraining.from_encoder(str(tmp_path), mask_token_id=MASK)


GPT2 = transformers.GPT2Config(vocab_size=250, n_embd=32, n_layer=2, n_head=4)
T5 = transformers.T5Config(vocab_size=250, d_model=32, d_ff=32, num_layers=2, num_heads=4)
REMOTE = type("NewConfig", (transformers.BertConfig,), {"__module__": "transformers_modules.new"})


def bert_without_some_weights() -> BertModel:
    model = BertModel(tiny_config("bert"))
    del model.encoder.layer[0].output
    return model


@pytest.mark.parametrize(
    ("build", "says"),
    [
        *((partial(AutoModelForMaskedLM.from_config, config), "alone") for config in SEES_PADDING),
        (partial(transformers.GPT2LMHeadModel, GPT2), "'gpt2'.* not a bidirectional encoder"),
        (partial(transformers.T5ForConditionalGeneration, T5), "'t5'.* not a bidirectional"),
        (partial(tiny_model, objective="tr"), "from_pretrained"),
        (bert_without_some_weights, "lacks 4 weights of its encoder"),
    ],
)
def test_which_checkpoints_are_no_encoders(
    build: Callable[[], transformers.PreTrainedModel], says: str, tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says):
        DAPForPreTraining.from_encoder(str(tmp_path), objective="tr")


def test_which_configurations_are_no_encoders(tiny_bert_dir: Path) -> None:
    with pytest.raises(ValueError, match="not a bidirectional encoder"):
        require_encoder(REMOTE(), "some/encoder")
    with pytest.raises(ValueError, match="encoder_config .* not a bidirectional encoder"):
        DAPModel(DAPConfig(GPT2, objective="tr"))
    with pytest.raises(ValueError, match="plain 'bert' checkpoint.*from_encoder"):
        DAPModel.from_pretrained(tiny_bert_dir)


def test_a_tokenizer_without_mask_token_is_enough_for_tr(
    tiny_bert_dir: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    encoder = BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False)
    backend = tiny_tokenizer.backend_tokenizer
    save(tmp_path, encoder, PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>"))
    with pytest.raises(ValueError, match="needs a mask token"):
        DAPForPreTraining.from_encoder(str(tmp_path))
    model = DAPForPreTraining.from_encoder(str(tmp_path), objective="tr")
    assert model.config.mask_token_id is None


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_from_scratch_starts_every_objective_with_its_weights(
    model_type: str, tmp_path: Path
) -> None:
    options = {"objective": "mlm", "pooling": "mean", "mask_token_id": MASK}
    made = DAPForPreTraining.from_scratch(tiny_config(model_type), **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(tmp_path)
    for objective in ("tr", "tr+tlm", "tr+rtl"):
        model = DAPForPreTraining.from_encoder(str(tmp_path), objective=objective)
        assert (model.config.objective, model.config.pooling) == (objective, "mean")
        state = model.state_dict()
        shared = {name: value for name, value in made.state_dict().items() if name in state}
        heads = 0 if objective == "tr" else len(made.prediction_head.state_dict())
        assert len(shared) == len(made.dap.state_dict()) + heads
        assert all(torch.equal(state[name], value) for name, value in shared.items())
        assert torch.isfinite(model(**make_batch()).loss)
    assert DAPForPreTraining.from_encoder(str(tmp_path), pooling="cls").config.pooling == "cls"


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_saved_model_loads_the_same_through_every_auto_class(
    objective: str, tmp_path: Path
) -> None:
    options = {"target_vocab_size": 200} if "rtl" in objective else {}
    model, batch = tiny_model("xlm-roberta", objective=objective, **options), make_batch()
    if options:
        model.set_target_vocabulary(list(range(50, 250)))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForPreTraining.from_pretrained(tmp_path).train()
    assert isinstance(again, DAPForPreTraining)
    assert again(**batch).loss.item() == pytest.approx(model(**batch).loss.item())

    encoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(encoder, DAPModel)
    inputs = (batch["source_input_ids"], batch["source_attention_mask"])
    vectors = encoder(*inputs).pooler_output
    torch.testing.assert_close(vectors, model.dap(*inputs).pooler_output)

    kind = transformers.AutoModelForSequenceClassification
    classifier = kind.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(classifier, DAPForSequenceClassification)
    labels = torch.arange(6) % 3
    out = classifier(*inputs, labels=labels)
    assert out.logits.shape == (6, 3)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))


def test_each_checkpoint_loads_with_its_own_code_without_this_project(
    tmp_path: Path,
) -> None:
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
    done = run_python(["-c", script], environment, tmp_path)
    assert done.stdout.splitlines() == [
        "first first first",
        "second second second",
        "first first first",
    ], done.stderr
