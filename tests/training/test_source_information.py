"""How much heads use the source: against the losses of the model in one batch."""

import pytest
import torch
from conftest import tiny_config, tiny_tokenizer
from tiny_models import MASK, cipher

from dap_transformers.evaluation.evaluator import PairsByLanguage
from dap_transformers.training import encoded_pairs, source_information
from dap_transformers.training.source_information import (
    EncoderWithHeads,
    SourceInformation,
    sample_pairs,
)
from modeling_dap import DAPConfig, DAPForPreTraining
from objectives_dap import Pairs, Sentences


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
    for module in (encoded_pairs, source_information):
        monkeypatch.setattr(module, "PAIRS_AT_A_TIME", 16)
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

    def loss(side: str, rows: torch.Tensor) -> float:
        """Return the model's loss with sentences of a side as the sources."""
        sources = {}
        for name in ("input_ids", "attention_mask"):
            sources[f"source_{name}"] = batch[f"{side}_{name}"][rows]
        with torch.no_grad():
            return model(**batch | sources).bow_loss.item()

    rows = torch.arange(28)
    of_targets = loss("target", rows)
    for name, sources in (("bow_loss", rows), ("bow_loss_shuffled", others)):
        of_both = loss("source", sources)  # the mean of both sides' losses
        assert found[name] == pytest.approx(2 * of_both - of_targets, abs=1e-4)


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


def test_states_are_kept_as_long_as_they_were_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_pairs, "PAIRS_AT_A_TIME", 2)
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[:2, 3:] = 0
    side = Sentences(torch.full_like(mask, 7), mask)
    pairs = Pairs(side, side, language_ids=torch.zeros(4, dtype=torch.long))
    needs = frozenset({"source_states"})
    kept = encoded_pairs.encode_once(new_encoder().with_heads, pairs, needs, torch.float32)
    assert [len(states) for states in kept.states["source_states"]] == [3, 3, 9, 9]
