import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import MASK, cipher
from transformers import PreTrainedTokenizerFast

from dap_transformers.training.head_reading import HARDLY, sample_pairs, source_reading
from modeling_dap import DAPConfig, DAPForPreTraining


def new_model(**config: object) -> DAPForPreTraining:
    """Build a model with one layer and a head of one, whose weights learn in a few steps."""
    torch.manual_seed(0)
    encoder = tiny_config("bert")
    encoder.num_hidden_layers, encoder.initializer_range = 1, 0.1
    given = {"objective": "tr+rtl", "mask_token_id": MASK, "rtl_layers": 1} | config
    return DAPForPreTraining(DAPConfig(encoder, **given))


@pytest.mark.parametrize("is_true", [True, False])
@pytest.mark.parametrize("reader", ["rtl", "bow"])
def test_a_head_that_reads_the_source_is_told_from_one_that_does_not(
    reader: str, is_true: bool, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = new_model(objective=f"tr+{reader}").train()
    batch, _ = sample_pairs({"de": cipher(512, 0, is_true)}, tiny_tokenizer, 16, ["de"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(50):
        rows = torch.randint(512, (64,))
        model(**{name: value[rows] for name, value in batch.items()}).measures[
            f"{reader}_loss"
        ].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = source_reading(model, tiny_tokenizer, {"de": cipher(100, 1, is_true)}, 16)
    if is_true:
        assert found[f"{reader}_source_nats"] > 5 * HARDLY
        assert (
            min(value for name, value in found.items() if "_nats" in name and "25" not in name)
            > HARDLY
        )
    else:
        assert abs(found[f"{reader}_source_nats"]) < HARDLY / 2
    assert len(found) == {"rtl": 6, "bow": 3}[reader]


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("vocabulary", [None, list(range(2, 60))])
def test_losses_are_those_of_pairs_one_by_one(
    ratio: float,
    vocabulary: list[int] | None,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dap_transformers.training.head_reading.PAIRS_AT_A_TIME", 16)
    model = new_model(rtl_ratio=ratio, target_vocab_size=vocabulary and len(vocabulary)).double()
    if vocabulary:
        model.set_target_vocabulary(vocabulary)
    bitext = {"de": cipher(11, 0, True), "fr": cipher(6, 1, True)}
    before = torch.random.get_rng_state()
    found = source_reading(model, tiny_tokenizer, bitext, 16)
    assert torch.equal(before, torch.random.get_rng_state())
    assert found == source_reading(model, tiny_tokenizer, bitext, 16)
    assert model.config.rtl_ratio == ratio
    batch, others = sample_pairs(bitext, tiny_tokenizer, 16, ["de", "fr"])
    assert others.tolist() == [*range(1, 11), 0, *range(12, 17), 11]

    def loss(sources: torch.Tensor, every: int) -> float:
        total, count = 0.0, 0
        for row in range(0, 17, every):
            own = {
                name: value[row if name.startswith("target") else sources[row]]
                for name, value in batch.items()
            }
            ids, chosen = (
                own["target_input_ids"][1:],
                own["target_noise"][1:] < model.config.rtl_ratio,
            )
            chosen &= own["target_attention_mask"][1:].bool()
            labels = sum(
                vocabulary is None or token in vocabulary for token in ids[chosen].tolist()
            )
            total += (
                labels * model(**{name: value[None] for name, value in own.items()}).rtl_loss.item()
            )
            count += labels
        return total / count

    rows = torch.arange(17)
    with torch.no_grad():
        assert found["rtl_loss"] == pytest.approx(loss(rows, 1), abs=1e-4)
        assert found["rtl_loss_shuffled"] == pytest.approx(loss(others, 1), abs=1e-4)
        model.config.rtl_ratio = 0.25
        difference = loss(others, 4) - loss(rows, 4)
    assert found["rtl_source_nats_rho25"] == pytest.approx(difference, abs=1e-4)


def test_of_bags_of_words_the_loss_is_that_of_the_words_which_the_sources_vector_tells(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = new_model(objective="tr+bow").double().eval()
    bitext = {"de": cipher(19, 0, True), "fr": cipher(9, 1, True)}
    found = source_reading(model, tiny_tokenizer, bitext, 16)
    batch, others = sample_pairs(bitext, tiny_tokenizer, 16, ["de", "fr"])
    head, table = model.prediction_head, model.get_input_embeddings().weight
    with torch.no_grad():
        vectors = F.normalize(model(**batch).source_embeds, dim=-1)  # (N, D)
        states = head.norm(head.activation(head.dense(vectors * vectors.shape[1] ** 0.5)))
        shares = (states @ table.T + head.bias).log_softmax(-1)  # (N, V)
    for name, rows in ("bow_loss", range(28)), ("bow_loss_shuffled", others.tolist()):
        losses = [
            -shares[row, token].item()
            for row, ids, mask in zip(
                rows, batch["target_input_ids"], batch["target_attention_mask"]
            )
            for token in ids[mask.bool()][1:-1]
        ]
        assert found[name] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_pairs_are_spread_over_the_languages_and_never_keep_their_source(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    sizes = {"de": 1, "fr": 1000, "sw": 1, "tr": 2}
    bitext = {language: cipher(size, 0, True) for language, size in sizes.items()}
    batch, others = sample_pairs(bitext, tiny_tokenizer, 16, [*bitext])
    assert torch.bincount(batch["language_ids"]).tolist() == [1, 128, 1, 2]
    assert not (others == torch.arange(132)).any()
    moved = batch["language_ids"][others] != batch["language_ids"]
    assert moved.nonzero().flatten().tolist() == [0, 129]  # of languages with one pair


@pytest.mark.parametrize("direction", ["target-to-source", "both"])
def test_other_directions_leave_out_languages_that_the_head_does_not_know(
    direction: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = new_model(rtl_direction=direction, rtl_languages=["de", "sw"])
    known = {"de": cipher(5, 0, True)}
    found = source_reading(model, tiny_tokenizer, known | {"fr": cipher(5, 1, True)}, 16)
    assert found == source_reading(model, tiny_tokenizer, known, 16)
    assert found["rtl_loss"] > 0
    assert source_reading(model, tiny_tokenizer, {"fr": cipher(5, 1, True)}, 16) == {}
    assert source_reading(model, tiny_tokenizer, {"de": cipher(1, 1, True)}, 16) == {}
