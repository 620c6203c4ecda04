"""`SentenceEncoder` gives the vectors of sentence-transformers, whatever the batches are."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    LANGUAGES,
    load_encoder,
    save,
    synthetic_pairs,
    tiny_config,
    tiny_tokenizer,
)
from numpy.testing import assert_allclose, assert_array_equal
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from tiny_models import on_cuda, start_from
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, PreTrainedConfig
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from dap_transformers.encoding.encoder import SentenceEncoder

SENTENCES: list[str] = []
for language in LANGUAGES:
    for pair in synthetic_pairs(language, 6):
        SENTENCES += pair
# An empty sentence, a short one, a repeated one, and one that is longer than the limit.
SENTENCES += ["", "a", SENTENCES[3], " ".join(SENTENCES)]


@pytest.fixture
def load(tiny_bert_dir: Path) -> Callable:
    """Return a function that loads the tiny BERT, with mean pooling unless another is given."""

    def load(pooling: str = "mean", **options: Any) -> SentenceEncoder:
        return load_encoder(tiny_bert_dir, pooling, **options)

    return load


#: A class that can only be encoded with.
XLNET = transformers.XLNetConfig(
    vocab_size=250, d_model=32, n_layer=2, n_head=4, d_inner=48, pad_token_id=1
)


# ------------------------------------------------------------------------------- sentence vectors


@pytest.mark.parametrize(
    ("config", "named", "length"),
    [
        (tiny_config("t5"), 33, 33),
        # The tokenizer has no limit. The library counts the whole table of positions, and fails
        # beyond its end.
        (tiny_config("modernbert"), None, 80),
        (tiny_config("xlm-roberta"), None, 78),
        (XLNET, None, sys.maxsize),
    ],
)
def test_a_folder_of_an_older_library_gives_its_vectors(
    config: PreTrainedConfig, named: int | None, length: int, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.model_max_length = VERY_LARGE_INTEGER
    plain = str(save(tmp_path / "plain", AutoModel.from_config(config), tokenizer))
    dense = Dense(32, 8, False, torch.nn.Identity())
    modules = [Transformer(plain), Pooling(32, "mean"), dense, Normalize()]
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    library = SentenceTransformer(modules=modules, device="cpu", **prompts)
    if named:
        library.max_seq_length = named
    saved = tmp_path / "saved"
    library.save_pretrained(str(saved))
    (saved / "2_Dense/model.safetensors").unlink()
    torch.save(dense.state_dict(), saved / "2_Dense/pytorch_model.bin")
    library.max_seq_length = length

    encoder = load_encoder(saved)
    assert (encoder.pooling, encoder.max_seq_length, encoder.prefix) == ("mean", length, "query: ")
    found = encoder.encode(SENTENCES)
    assert_allclose(found, library.encode(SENTENCES), atol=1e-5)
    assert found.shape[1] == encoder.dimensions == 8
    assert encoder.encode_tokens(["ka"])[0][0].shape[1] == 32
    assert load_encoder(saved, prefix="").prefix == ""
    # A plain folder, also of T5 with its decoder, takes the settings from the caller.
    by_hand = load_encoder(plain, "mean", "query: ", length)
    by_hand.after = encoder.after
    assert_allclose(by_hand.encode(SENTENCES), found, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
def test_nothing_is_computed_for_padding_and_for_tokens_that_are_not_pooled(
    load: Callable, pooling: str
) -> None:
    encoder = load(pooling, max_seq_length=40)
    counts = []  # tokens in each call of the last layer's feed-forward network
    last = encoder.model.encoder.layer[-1].intermediate
    last.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[1]))
    assert encoder.encode(SENTENCES).dtype == np.float32
    ids = encoder.tokenizer([*set(SENTENCES)], truncation=True, max_length=40)["input_ids"]
    assert sum(counts) == (sum(map(len, ids)) if pooling == "mean" else len(ids))


@pytest.mark.parametrize("batch_size", [1, 2, 999])
def test_batches_change_nothing(
    load: Callable, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load()
    expected = encoder.encode(SENTENCES)
    monkeypatch.setattr("dap_transformers.encoding.encoder.CHUNK", 17)
    vectors = encoder.encode(iter(SENTENCES), batch_size=batch_size)
    assert_allclose(vectors, expected, atol=1e-5)
    assert SENTENCES[3] == SENTENCES[-2]
    assert_array_equal(vectors[3], vectors[-2])


def test_a_text_without_tokens_is_the_zero_vector(load: Callable) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    vectors = SentenceEncoder(load().model, tokenizer).encode(["ka lo", ""])
    assert vectors[0].any()
    assert not vectors[1].any()


def test_similarity_is_the_cosine_and_normalised_vectors_have_length_1(load: Callable) -> None:
    encoder = load()
    plain, unit = (encoder.encode(SENTENCES, normalize=each) for each in (False, True))
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert_allclose(unit, plain / lengths, rtol=1e-6)
    assert_allclose(encoder.similarity(plain, 3 * plain[:1]), unit @ unit[:1].T, atol=1e-6)


def test_the_model_returns_to_training_mode(load: Callable) -> None:
    encoder = load()
    encoder.model.train()
    encoder.model.embeddings.dropout.p = 0.5
    encoder.model.encoder.eval()
    assert_array_equal(encoder.encode(["ka lo"]), encoder.encode(["ka lo"]))
    assert encoder.model.training
    assert not encoder.model.encoder.layer[0].training


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"bf16": True}, 0.1), pytest.param({"device": "cuda"}, 1e-4, marks=on_cuda)],
)
def test_other_arithmetic_stays_near_float32_on_a_cpu(
    load: Callable, options: dict, tolerance: float
) -> None:
    rough = load(**options).encode(SENTENCES)
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - load(device="cpu").encode(SENTENCES)).max() < tolerance


def test_a_prompt_that_another_thread_asks_for_changes_no_vector(
    load: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(max_seq_length=8)
    expected = encoder.encode(SENTENCES)
    set_cut = encoder.tokenizer.set_truncation_and_padding

    def ask(*limits: Any, **more: Any) -> None:
        set_cut(*limits, **more)
        monkeypatch.undo()
        encoder.for_task("query")  # between setting the cut and using it

    monkeypatch.setattr(encoder.tokenizer, "set_truncation_and_padding", ask)
    assert_array_equal(encoder.encode(SENTENCES), expected)


# ---------------------------------------------------------------------------------- token states


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("prefix", ["", "query: "])
def test_token_states_leave_out_special_tokens_padding_and_prefix(
    load: Callable, prefix: str, layer: int | None
) -> None:
    encoder = load(prefix=prefix)
    first = 1 + len(encoder.tokenizer.tokenize(prefix.rstrip()))
    sentences = ["kaban loder", "mifin"]
    *states, empty = encoder.encode_tokens([*sentences, ""], layer=layer)[0]
    for sentence, found in zip(sentences, states, strict=True):
        ids = encoder.tokenizer(prefix + sentence, return_tensors="pt")["input_ids"]
        hidden = encoder.model(input_ids=ids, output_hidden_states=True).hidden_states
        expected = hidden[-1 if layer is None else layer][0, first:-1].detach()
        assert_allclose(found, expected, atol=1e-5)
    assert empty.shape == (0, 32)
    assert encoder.encode_tokens([]) == ([], [])


# ------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(("kind", "reads_padding"), [("convbert", True), ("albert", False)])
def test_an_encoder_that_reads_padding_gives_a_warning(
    kind: str, reads_padding: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, AutoModel.from_config(tiny_config(kind)))
    load_encoder(tmp_path)
    assert ("share a batch" in caplog.text) == reads_padding


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda load: load().encode("a string"), "list of strings"),
        (lambda load: load().encode_tokens("a string"), "list of strings"),
        (lambda load: load().encode_tokens(["a"], layer=4), "layer=4: .* 3"),
        (lambda load: load().encode_tokens(["a"], layer=-1), "layer=-1: .* 3"),
        (lambda load: load(max_seq_length=2), "max_seq_length=2 leaves no"),
        (lambda load: load(max_seq_length=3, prefix="query: "), "max_seq_length=3 .*'query: '"),
        (lambda load: load(max_seq_length=81), "max_seq_length=81 .* 80"),
        (lambda _: load_encoder("no/such/model"), "no/such/model"),
    ],
)
def test_what_is_refused(load: Callable, call: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(load)


LATENTS = {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_self_attends_per_block": 1}
NO_TEXT = (
    transformers.PerceiverConfig(vocab_size=250, **LATENTS),
    transformers.ViTConfig(image_size=16, patch_size=8, hidden_size=12, num_hidden_layers=1),
)


@pytest.mark.parametrize("config", NO_TEXT)
def test_a_model_that_reads_no_text_is_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    folder = save(tmp_path, AutoModel.from_config(config))
    for load in (load_encoder, start_from):
        with pytest.raises(ValueError, match="no.* text encoder"):
            load(folder)
