"""How much heads use the source: against the losses of the model in one batch."""

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config, tiny_tokenizer
from tiny_models import MASK, cipher

from dap_transformers.evaluation.evaluator import PairsByLanguage
from dap_transformers.training.source_information import (
    EncoderWithHeads,
    SourceInformation,
    sample_pairs,
)
from modeling_dap import DAPConfig, DAPForPreTraining


def new_encoder(**config: object) -> EncoderWithHeads:
    """Build a model with one layer and a head of one, whose weights learn in a few steps."""
    torch.manual_seed(0)
    encoder = tiny_config("bert")
    encoder.num_hidden_layers, encoder.initializer_range = 1, 0.1
    given = {"objective": "tr+rtl", "mask_token_id": MASK, "rtl_layers": 1} | config
    model = DAPForPreTraining(DAPConfig(encoder, **given))
    return EncoderWithHeads(model, tiny_tokenizer(), None, max_seq_length=16)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("vocabulary", [None, list(range(2, 60))])
def test_losses_are_those_of_all_pairs_in_one_batch(
    ratio: float, vocabulary: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap_transformers.training.source_information.PAIRS_AT_A_TIME", 16)
    size = vocabulary and len(vocabulary)
    encoder = new_encoder(rtl_ratio=ratio, target_vocab_size=size)
    model = encoder.with_heads.double()
    if vocabulary:
        model.set_target_vocabulary(vocabulary)
    pairs = {"de": cipher(11), "fr": cipher(6, 1)}
    before = torch.random.get_rng_state()
    found = SourceInformation(pairs)(encoder)
    assert torch.equal(before, torch.random.get_rng_state())
    assert found == SourceInformation(pairs)(encoder)
    assert model.config.rtl_ratio == ratio
    batch, others = sample_pairs(pairs, encoder, ["de", "fr"])
    assert others.tolist() == [*range(1, 11), 0, *range(12, 17), 11]

    with torch.no_grad():
        assert found["rtl_loss"] == pytest.approx(model(**batch).rtl_loss.item(), abs=1e-4)
        shuffled = {}
        for name, value in batch.items():
            shuffled[name] = value if name.startswith("target") else value[others]
        loss = model(**shuffled).rtl_loss.item()
        assert found["rtl_loss_shuffled"] == pytest.approx(loss, abs=1e-4)


def test_of_bags_of_words_the_loss_is_that_of_the_words_which_the_sources_vector_tells() -> None:
    encoder = new_encoder(objective="tr+bow")
    model = encoder.with_heads.double().eval()
    pairs = {"de": cipher(19), "fr": cipher(9, 1)}
    found = SourceInformation(pairs)(encoder)
    batch, others = sample_pairs(pairs, encoder, ["de", "fr"])
    head, table = model.prediction_head, model.get_input_embeddings().weight
    with torch.no_grad():
        vectors = F.normalize(model(**batch).source_embeds, dim=-1)  # (N, D)
        states = head.norm(head.activation(head.dense(vectors * vectors.shape[1] ** 0.5)))
        shares = (states @ table.T + head.bias).log_softmax(-1)  # (N, V)
    for name, rows in ("bow_loss", range(28)), ("bow_loss_shuffled", others.tolist()):
        losses = []
        targets = zip(batch["target_input_ids"], batch["target_attention_mask"])
        for row, (ids, mask) in zip(rows, targets, strict=True):
            losses += [-shares[row, token].item() for token in ids[mask.bool()][1:-1]]
        assert found[name] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_pairs_are_spread_over_the_languages_and_never_keep_their_source() -> None:
    sizes = {"de": 3, "fr": 1000, "tr": 2}
    pairs: PairsByLanguage = {language: cipher(size) for language, size in sizes.items()}
    batch, others = sample_pairs(pairs, new_encoder(), [*pairs])
    assert torch.bincount(batch["language_ids"]).tolist() == [3, 170, 2]
    assert not (others == torch.arange(175)).any()
    assert torch.equal(batch["language_ids"][others], batch["language_ids"])


@pytest.mark.parametrize("direction", ["target-to-source", "both"])
def test_other_directions_leave_out_languages_that_the_head_does_not_know(direction: str) -> None:
    encoder = new_encoder(rtl_direction=direction, rtl_languages=["de", "sw"])
    known = {"de": cipher(5)}
    unknown = {"fr": cipher(5, 1)}
    found = SourceInformation(known | unknown)(encoder)
    assert found == SourceInformation(known)(encoder)
    assert found["rtl_loss"] > 0
    assert SourceInformation(unknown)(encoder) == {}
    assert SourceInformation({"de": cipher(1)})(encoder) == {}
