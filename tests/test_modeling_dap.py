import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from datasets import Dataset
from torch import Tensor
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    ElectraConfig,
    FNetConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LongformerConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    XLMConfig,
)

import modeling_dap
from modeling_dap import (
    DAPConfig,
    DAPForPreTraining,
    DAPForSequenceClassification,
    DAPModel,
    layer_stack,
    maskable,
    pool,
    position_offset,
    require_encoder,
    translation_ranking_loss,
    vocabulary_cross_entropy,
)

ENCODERS = ("bert", "xlm-roberta", "roberta", "deberta-v2", "modernbert", "distilbert")
OBJECTIVES = ("tr", "tr+tlm", "tr+rtl")
MASK, PAD = 4, 1


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny batches, too, run in several groups of like length."""
    monkeypatch.setattr(modeling_dap, "TOKENS_PER_GROUP", 8)


def tiny_model(model_type: str = "bert", **config: object) -> DAPForPreTraining:
    torch.manual_seed(0)
    options = {"mask_token_id": MASK, "objective": "tr+rtl", **config}
    model = DAPForPreTraining(DAPConfig(tiny_config(model_type), **options))
    for parameter in model.parameters():  # biases and norms too: zeros and ones would hide mistakes
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else parameter.data.add_(0.1)
    return model.train()


def make_batch(pairs: int = 6, longest: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Pairs of random ids: CLS 0, SEP 2, padded on the right, every length from 4 tokens on."""
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for side, shift in (("source", 0), ("target", 2)):
        lengths = torch.tensor([4 + (3 * row + shift) % (longest - 3) for row in range(pairs)])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        ids = torch.randint(5, 250, mask.shape, generator=generator)
        ids[:, 0], ids[torch.arange(pairs), lengths - 1] = 0, 2
        batch[f"{side}_input_ids"] = ids.masked_fill(mask == 0, PAD)
        batch[f"{side}_attention_mask"] = mask
        batch[f"{side}_noise"] = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    return batch


def widen(batch: dict[str, Tensor], extra: int) -> dict[str, Tensor]:
    """The same batch with more padding."""
    fill = {"input_ids": PAD, "attention_mask": 0, "noise": 0.01}
    return {key: F.pad(value, (0, extra), value=fill[key.split("_", 1)[1]]) for key, value in batch.items()}


def tokens_of(batch: dict[str, Tensor], side: str, row: int) -> Tensor:
    """The real tokens of one sentence."""
    return batch[f"{side}_input_ids"][row][batch[f"{side}_attention_mask"][row].bool()]


def gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# ----------------------------------------------------------------------------------------- losses against plain loops


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
    monkeypatch.setattr(modeling_dap, "LOGITS_PER_CHUNK", per_chunk * 11)
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


def reconstruct_one_by_one(model: DAPForPreTraining, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[int]]:
    """RTL cross entropies of every target token, pair by pair without any padding (eq. g^0 and L_RTL)."""
    encoder, head, prediction = model.dap.encoder, model.rtl_head, model.prediction_head
    offset = position_offset(encoder)
    losses, labels = [], []
    for row in range(len(batch["source_input_ids"])):
        source, target = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        states = encoder(source[None]).last_hidden_state[:, 1:]  # without CLS
        positions = {} if offset is None else {"position_ids": torch.arange(len(target))[None] + offset}
        masks = encoder.embeddings(input_ids=torch.full_like(target, MASK)[None], **positions)[:, 1:]
        representations = encoder(target[None]).last_hidden_state[:, 1:]
        for i in range(len(target) - 1):
            if batch["target_noise"][row, i + 1] >= model.config.rtl_ratio:
                masks[:, i] = representations[:, i]
        out = head.blocks(inputs_embeds=torch.cat([states, masks], 1)).last_hidden_state[0, states.shape[1] :]
        for i, label in enumerate(target[1:].tolist()):
            if batch["target_noise"][row, i + 1] < model.config.rtl_ratio:
                hidden = prediction.norm(prediction.activation(prediction.dense(out[i])))
                logits = hidden @ model.get_input_embeddings().weight.T + prediction.bias
                losses.append(-(logits[label] - logits.exp().sum().log()))
                labels.append(label)
    return losses, labels


@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_rtl_is_the_mean_over_real_target_tokens_of_unpadded_pairs(model_type: str, ratio: float) -> None:
    model = tiny_model(model_type, rtl_ratio=ratio).double()
    batch = make_batch()
    losses, _ = reconstruct_one_by_one(model, batch)
    assert model(**batch).rtl_loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)


def test_target_vocabulary_is_the_softmax_over_its_ids_and_ignores_others() -> None:
    model, full = tiny_model("bert", target_vocab_size=140), tiny_model("bert")
    batch = make_batch()
    ids = sorted({2, *range(60, 199)})
    model.set_target_vocabulary(ids)
    full.load_state_dict(
        {
            k: v
            for k, v in model.state_dict().items()
            if k not in ("prediction_head.token_ids", "prediction_head.bias")
        },
        strict=False,
    )
    with torch.no_grad():
        full.prediction_head.bias.fill_(float("-inf"))
        full.prediction_head.bias[ids] = model.prediction_head.bias
    losses, labels = reconstruct_one_by_one(full, batch)
    kept = [loss for loss, label in zip(losses, labels) if label in ids]
    out = model(**batch)
    assert 0 < len(kept) < len(losses)
    assert out.rtl_loss.item() == pytest.approx(torch.stack(kept).mean().item(), rel=1e-5)
    assert out.ignored_tokens.item() == len(losses) - len(kept)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_tlm_is_the_mean_over_masked_tokens_of_unpadded_pairs(model_type: str) -> None:
    model = tiny_model(model_type, objective="tr+tlm", tlm_probability=0.6).double()
    batch, encoder, prediction = make_batch(), model.dap.encoder, model.prediction_head
    losses, kinds = [], set()
    for row in range(6):
        x, y = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        ids = torch.cat([x, y[1:]])
        noise = torch.cat([batch["source_noise"][row, : len(x)], batch["target_noise"][row, 1 : len(y)]])
        separators = {0, len(x) - 1, len(ids) - 1}
        masked, chosen = ids.clone(), []
        for i in range(len(ids)):
            if i in separators or noise[i] >= 0.6:
                continue
            chosen.append(i)
            if noise[i] / 0.6 < 0.8:
                masked[i] = MASK
            elif noise[i] / 0.6 < 0.9:
                masked[i] = int((noise[i].item() * 2**20) % 1 * 250)
            kinds.add(min(int(noise[i] / 0.06), 9) if noise[i] / 0.6 >= 0.8 else 0)
        positions = torch.cat([torch.arange(len(x)), torch.arange(1, len(y))])
        offset = position_offset(encoder)
        given = {} if offset is None else {"position_ids": positions[None] + offset}
        states = encoder(masked[None], **given).last_hidden_state[0]
        for i in chosen:
            logits = prediction.norm(prediction.activation(prediction.dense(states[i])))
            logits = logits @ model.get_input_embeddings().weight.T + prediction.bias
            losses.append(-(logits[ids[i]] - logits.exp().sum().log()))
    assert kinds == {0, 8, 9}  # masked, random and kept tokens all occurred
    assert model(**batch).tlm_loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)


def test_first_and_last_tokens_are_never_masked() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert maskable(mask).tolist() == [[False, True, True, False, False], [False, True, True, True, False]]


# ----------------------------------------------------------------------------------------- what must not matter


@pytest.mark.parametrize(("model_type", "objective"), itertools.product(ENCODERS, OBJECTIVES))
def test_padding_and_order_change_nothing(model_type: str, objective: str) -> None:
    model = tiny_model(model_type, objective=objective, tlm_probability=0.5)
    batch = make_batch()
    model(**batch).loss.backward()
    expected_loss, expected = model(**batch).loss.item(), gradients(model)
    order = torch.randperm(6)
    for changed in (widen(batch, 5), {key: value[order] for key, value in batch.items()}):
        model.zero_grad()
        out = model(**changed)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(expected_loss, rel=1e-5)
        assert (gradients(model) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("model_type", ENCODERS)
def test_groups_of_like_length_equal_the_padded_batch(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, found = tiny_model(model_type), make_batch(), []
    for tokens in (1, 8, 10**9):
        monkeypatch.setattr(modeling_dap, "TOKENS_PER_GROUP", tokens)
        model.zero_grad()
        model(**batch).loss.backward()
        found.append(gradients(model))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # one padded batch, as on a GPU
    model.zero_grad()
    model(**batch).loss.backward()
    for gradient in found:
        assert (gradient - gradients(model)).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("direction", ["target-to-source", "both"])
def test_directions_swap_sides_and_read_languages(direction: str) -> None:
    languages = ["de", "fr", "sw"]
    model = tiny_model("bert", rtl_direction=direction, rtl_languages=languages).double()
    batch, ids = make_batch(), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = model(**batch, language_ids=ids).rtl_loss
    embeddings, losses = model.rtl_head.language_embeddings.weight, {False: [], True: []}
    for row in range(6):
        reverse = direction == "target-to-source" or row % 2 == 1
        sides = ("target", "source") if reverse else ("source", "target")
        x, y = (tokens_of(batch, side, row) for side in sides)
        own, english = embeddings[ids[row] + 1], embeddings[0]
        states = model.dap.encoder(x[None]).last_hidden_state[:, 1:] + (english if reverse else own)
        masks = model.dap.encoder.embeddings(torch.full_like(y, MASK)[None])[:, 1:] + (own if reverse else english)
        out = model.rtl_head.blocks(inputs_embeds=torch.cat([states, masks], 1)).last_hidden_state
        logits = model.prediction_head
        hidden = logits.norm(logits.activation(logits.dense(out[0, states.shape[1] :])))
        scores = hidden @ model.get_input_embeddings().weight.T + logits.bias
        losses[reverse] += [score.exp().sum().log() - score[label] for score, label in zip(scores, y[1:])]
    means = [torch.stack(part).mean().item() for part in losses.values() if part]
    assert len(means) == (2 if direction == "both" else 1)
    assert loss.item() == pytest.approx(sum(means) / len(means), rel=1e-9)
    with pytest.raises(ValueError, match="language_ids=None.*" + direction):
        model(**batch)


def test_equal_targets_are_not_negatives_whatever_their_padding() -> None:
    model, unmasked = tiny_model("bert", objective="tr"), tiny_model("bert", objective="tr", tr_mask_duplicates=False)
    batch = make_batch()
    for key in ("target_input_ids", "target_attention_mask"):
        batch[key][3] = batch[key][0]
    assert model(**batch).negatives.item() == pytest.approx((4 * 5 + 2 * 4) / 6)
    assert unmasked(**batch).negatives.item() == 5
    assert model(**widen(batch, 4)).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_bidirectional_is_the_mean_of_both_directions() -> None:
    both, forward = (tiny_model("bert", objective="tr", tr_bidirectional=flag) for flag in (True, False))
    batch = make_batch()
    swapped = {
        key.replace("source", "x").replace("target", "source").replace("x", "target"): value
        for key, value in batch.items()
        if "noise" not in key
    }
    expected = (forward(**batch).loss + forward(**swapped).loss) / 2
    assert both(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_projection_is_for_the_loss_only() -> None:
    plain, projected = (tiny_model("bert", objective="tr", projection=kind) for kind in (None, "mlp"))
    projected.dap.load_state_dict(plain.dap.state_dict())
    batch = make_batch()
    torch.testing.assert_close(projected(**batch).source_embeds, plain(**batch).source_embeds)
    assert projected(**batch).loss.item() != pytest.approx(plain(**batch).loss.item())


# ----------------------------------------------------------------------------------------- ways of running it


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta", "modernbert"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_eager_and_sdpa_agree(model_type: str, objective: str) -> None:
    model, batch = tiny_model(model_type, objective=objective), make_batch()
    losses = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert model.dap.encoder.config._attn_implementation == implementation
        if model.rtl_head is not None:
            assert model.rtl_head.blocks.config._attn_implementation == implementation
        losses.append(model(**batch).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_activation_checkpointing_keeps_gradients(objective: str) -> None:
    model, batch = tiny_model("xlm-roberta", objective=objective), make_batch()
    model(**batch).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**batch).loss.backward()
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bf16_autocast_keeps_loss_logits_in_float32(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, seen = tiny_model("bert", objective=objective), make_batch(), []
    cross_entropy, chunked = F.cross_entropy, modeling_dap._VocabularyCrossEntropy.apply

    def spy_ranking(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return cross_entropy(logits, labels)

    def spy_vocabulary(*values: Tensor) -> Tensor:
        seen.extend(value.dtype for value in values[:3])
        return chunked(*values)

    monkeypatch.setattr(modeling_dap.F, "cross_entropy", spy_ranking)
    monkeypatch.setattr(modeling_dap._VocabularyCrossEntropy, "apply", spy_vocabulary)
    expected = model(**batch).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch)
        hidden = model.dap(batch["source_input_ids"], batch["source_attention_mask"])
        product = hidden.last_hidden_state @ hidden.last_hidden_state.mT
    assert product.dtype == torch.bfloat16  # autocast was on
    assert set(seen) == {torch.float32}
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected, rel=0.1)
    out.loss.backward()
    assert torch.isfinite(gradients(model)).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_torch_compile_gives_the_same_gradients(objective: str) -> None:
    torch._dynamo.reset()
    model, batch = tiny_model("bert", objective=objective), make_batch()
    model(**batch).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(**batch).loss.backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_parameter_gets_a_gradient(objective: str) -> None:
    for model_type in ENCODERS:
        model = tiny_model(model_type, objective=objective)
        model(**make_batch()).loss.backward()
        assert [name for name, value in model.named_parameters() if value.grad is None] == []


# ----------------------------------------------------------------------------------------- from and to disk


@pytest.mark.parametrize("model_type", ENCODERS)
@pytest.mark.parametrize("objective", ["tr+tlm", "tr+rtl"])
def test_from_encoder_takes_last_layers_and_masked_lm_head(
    model_type: str, objective: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = AutoModelForMaskedLM.from_config(tiny_config(model_type, len(tiny_tokenizer)))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    plain.eval().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model = DAPForPreTraining.from_encoder(str(tmp_path), objective=objective).eval()
    assert model.config.mask_token_id == MASK
    ids = make_batch()["source_input_ids"]
    expected = plain(ids, output_hidden_states=True)
    out = model.dap(ids, torch.ones_like(ids), output_hidden_states=True)
    torch.testing.assert_close(out.last_hidden_state, plain.base_model(ids).last_hidden_state)
    # the prediction head on the encoder's states is the masked-LM model's output
    head, states = model.prediction_head, out.last_hidden_state
    logits = head.norm(head.activation(head.dense(states))) @ model.get_input_embeddings().weight.T + head.bias
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    if objective == "tr+rtl":  # the head's blocks on the states before the last two layers give the encoder's output
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
    for mine, its in zip(layer_stack(model.rtl_head.blocks)[1], layer_stack(original)[1][1:], strict=True):
        torch.testing.assert_close(mine.state_dict(), its.state_dict())


def test_decoders_and_dap_checkpoints_are_refused(tmp_path: Path) -> None:
    shape = {"vocab_size": 250, "n_embd": 32, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")
    T5ForConditionalGeneration(
        T5Config(vocab_size=250, d_model=32, d_ff=32, num_layers=2, num_heads=4)
    ).save_pretrained(tmp_path / "t5")
    tiny_model().save_pretrained(tmp_path / "dap")
    for name, reason in (
        ("gpt2", "not a bidirectional encoder"),
        ("t5", "encoder-decoder"),
        ("dap", "from_pretrained"),
    ):
        with pytest.raises(ValueError, match=reason):
            DAPForPreTraining.from_encoder(str(tmp_path / name), mask_token_id=4)


SHAPE = {"vocab_size": 250, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"intermediate_size": 48, "pad_token_id": 1}
UNFIT = [
    XLMConfig(vocab_size=250, emb_dim=32, n_layers=3, n_heads=4),
    ElectraConfig(**SHAPE, embedding_size=16),  # embeddings narrower than the states
    AlbertConfig(**SHAPE, embedding_size=16),  # one layer, used three times
    LongformerConfig(**SHAPE, attention_window=4),  # pads its input to the window
]


@pytest.mark.parametrize("config", UNFIT, ids=lambda config: config.model_type)
def test_encoders_that_rtl_cannot_be_built_on_are_named_and_train_with_tr(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    message = f"{tmp_path}: objective 'tr\\+rtl' does not work with .*'{config.model_type}'.*use objective='tr'"
    with pytest.raises(ValueError, match=message):
        DAPForPreTraining.from_encoder(str(tmp_path), mask_token_id=MASK)
    model = DAPForPreTraining.from_encoder(str(tmp_path), objective="tr")
    assert torch.isfinite(model(**make_batch()).loss)


def test_an_encoder_that_ignores_padding_is_named(tmp_path: Path) -> None:
    config = FNetConfig(vocab_size=250, hidden_size=32, num_hidden_layers=3, intermediate_size=48)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"objective 'tr' does not work with .*'fnet'.*give another encoder"):
        DAPForPreTraining.from_encoder(str(tmp_path), objective="tr")


def test_trying_an_encoder_out_leaves_the_random_numbers_alone(tiny_bert_dir: Path) -> None:
    torch.manual_seed(1)
    model = DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr+tlm")
    after = torch.rand(3)
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DAPForPreTraining, "_try_out", lambda self: None)
        DAPForPreTraining.from_encoder(str(tiny_bert_dir), objective="tr+tlm")
    assert torch.equal(after, torch.rand(3))
    assert model.training


def test_plain_checkpoints_and_decoders_are_no_dap_models(tiny_bert_dir: Path) -> None:
    for model_class in (DAPModel, DAPForPreTraining, DAPForSequenceClassification):
        with pytest.raises(ValueError, match="plain 'bert' checkpoint.*from_encoder"):
            model_class.from_pretrained(tiny_bert_dir)
    with pytest.raises(ValueError, match="encoder_config is not a bidirectional encoder"):
        DAPModel(DAPConfig(GPT2Config(vocab_size=250, n_embd=32, n_layer=2, n_head=4), objective="tr"))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_sentence_vectors_do_not_depend_on_the_side_of_the_padding(pooling: str) -> None:
    model = DAPModel(DAPConfig(tiny_config("deberta-v2"), pooling=pooling, objective="tr")).eval()
    ids, mask = torch.tensor([[0, 7, 8, 2, PAD, PAD]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    left = model(ids.roll(2, 1), mask.roll(2, 1)).pooler_output
    torch.testing.assert_close(left, model(ids, mask).pooler_output, rtol=1e-4, atol=1e-5)


def test_training_batches_must_be_padded_on_the_right() -> None:
    model, batch = tiny_model("bert", objective="tr"), make_batch()
    batch["source_attention_mask"] = batch["source_attention_mask"].flip(1)
    with pytest.raises(ValueError, match="pad on the right"):
        model(**batch)


def test_mean_in_half_precision_does_not_overflow() -> None:
    states = torch.full((1, 512, 2), 300.0, dtype=torch.float16)
    assert pool(states, torch.ones(1, 512), "mean").tolist() == [[300.0, 300.0]]


def test_labels_are_counted_exactly_in_half_precision() -> None:
    model, batch = tiny_model("bert").to(torch.bfloat16), make_batch(pairs=63)
    batch["target_attention_mask"][0, 3:] = 0
    labels = int(batch["target_attention_mask"][:, 1:].sum())
    assert labels != int(torch.tensor(labels).bfloat16())
    assert model(**batch).ignored_tokens.item() == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_vocabulary_can_be_resized(objective: str) -> None:
    model, batch = tiny_model("bert", objective=objective), make_batch()
    model.resize_token_embeddings(260)
    batch["target_input_ids"][0, 1] = 255
    assert model.config.vocab_size == model.config.encoder_config.vocab_size == 260
    assert torch.isfinite(model(**batch).loss)


def test_configured_outputs_are_given() -> None:
    config = DAPConfig(tiny_config("bert"), objective="tr", output_hidden_states=True, return_dict=False)
    outputs = DAPModel(config)(torch.tensor([[0, 7, 2]]))
    assert isinstance(outputs, tuple)
    assert len(outputs[2]) == 4  # embeddings and three layers


def test_a_direction_without_labels_does_not_halve_the_loss() -> None:
    languages = {"rtl_languages": ["de"], "rtl_direction": "both"}
    both, forward = tiny_model("bert", **languages), tiny_model("bert")
    forward.load_state_dict(both.state_dict(), strict=False)
    with torch.no_grad():
        both.rtl_head.language_embeddings.weight.zero_()
    one = {key: value[:1] for key, value in make_batch().items()}
    loss = both(**one, language_ids=torch.tensor([0])).rtl_loss.item()
    assert loss == pytest.approx(forward(**one).rtl_loss.item(), rel=1e-5)


def test_encoders_with_code_of_their_own_are_refused_for_that_reason() -> None:
    config = type("NewConfig", (BertConfig,), {"__module__": "transformers_modules.new.configuration"})()
    with pytest.raises(ValueError, match="some/encoder .* runs code of its own"):
        require_encoder(config, "some/encoder")


def test_checkpoint_without_encoder_weights_is_refused(tiny_bert_dir: Path, tmp_path: Path) -> None:
    model = BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False)
    state = {key: value for key, value in model.state_dict().items() if "layer.2" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks 16 weights"):
        DAPForPreTraining.from_encoder(str(tmp_path), objective="tr")


def test_tokenizer_without_mask_token_is_refused(
    tiny_bert_dir: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    BertModel.from_pretrained(tiny_bert_dir, add_pooling_layer=False).save_pretrained(tmp_path)
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, pad_token="<pad>")
    bare.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no mask token"):
        DAPForPreTraining.from_encoder(str(tmp_path))
    assert DAPForPreTraining.from_encoder(str(tmp_path), objective="tr").config.mask_token_id is None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_saved_model_loads_the_same_through_every_auto_class(objective: str, tmp_path: Path) -> None:
    model, batch = tiny_model("xlm-roberta", objective=objective), make_batch()
    if objective == "tr+rtl":
        model = tiny_model("xlm-roberta", target_vocab_size=200)
        model.set_target_vocabulary(list(range(50, 250)))
    model.save_pretrained(tmp_path)
    again = AutoModelForPreTraining.from_pretrained(tmp_path).train()
    assert isinstance(again, DAPForPreTraining)
    assert again(**batch).loss.item() == pytest.approx(model(**batch).loss.item())
    encoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(encoder, DAPModel)
    ids, mask = batch["source_input_ids"], batch["source_attention_mask"]
    torch.testing.assert_close(encoder(ids, mask).pooler_output, model(**batch).source_embeds)
    assert encoder(ids, mask).last_hidden_state.shape == (6, 9, 32)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(classifier, DAPForSequenceClassification)
    out = classifier(ids, mask, labels=torch.tensor([0, 1, 2, 0, 1, 2]))
    assert out.logits.shape == (6, 3)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, torch.tensor([0, 1, 2, 0, 1, 2])))


def test_checkpoint_loads_where_this_project_cannot_be_imported(tmp_path: Path) -> None:
    model, batch = tiny_model("bert"), make_batch()
    model.save_pretrained(tmp_path / "checkpoint")
    expected = model(**batch).source_embeds
    torch.save((batch["source_input_ids"], batch["source_attention_mask"], expected), tmp_path / "expected.pt")
    script = """
import sys, torch
from transformers import AutoModel, AutoModelForPreTraining
assert not any(name.endswith("modeling_dap") for name in sys.modules)
ids, mask, expected = torch.load("expected.pt")
model = AutoModel.from_pretrained("checkpoint", trust_remote_code=True)
torch.testing.assert_close(model(ids, mask).pooler_output, expected)
assert AutoModelForPreTraining.from_pretrained("checkpoint", trust_remote_code=True).rtl_head is not None
print("loaded", type(model).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "loaded DAPModel" in done.stdout


def test_models_refuse_what_was_set_after_the_config_was_checked() -> None:
    config = DAPConfig(BertConfig(num_hidden_layers=2), objective="tr")
    config.pooling = "max"
    with pytest.raises(ValueError, match="pooling='max'"):
        DAPForPreTraining(config)
    with pytest.raises(ValueError, match="mask_token_id=None"):
        DAPForPreTraining(DAPConfig(tiny_config("bert")))


def test_trainer_keeps_token_types_for_classification(tmp_path: Path) -> None:
    model = DAPForSequenceClassification(DAPConfig(tiny_config("bert"), num_labels=3))
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    rows = [{"input_ids": [0, 5, 2], "token_type_ids": [0, 0, 1], "labels": 1, "premise": "text"}]
    loader = Trainer(model=model, args=args, train_dataset=Dataset.from_list(rows)).get_train_dataloader()
    batch = next(iter(loader))
    assert set(batch) == {"input_ids", "token_type_ids", "labels"}
    assert not torch.equal(model.eval()(**batch).logits, model(input_ids=batch["input_ids"]).logits)
