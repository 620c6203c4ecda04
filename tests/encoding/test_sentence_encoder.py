"""`SentenceEncoder` equals encoding one sentence at a time, and loads every kind of checkpoint."""

import copy
import itertools
import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LANGUAGES, save, save_bert, synthetic_pairs, tiny_config
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from dap_transformers.encoding.encoder import SentenceEncoder, length_batches, load_encoder
from dap_transformers.encoding.load import NeedsSentenceTransformers
from modeling_dap import DAPConfig, DAPForPreTraining, DAPModel

SENTENCES: list[str] = []
for language in LANGUAGES:
    for pair in synthetic_pairs(language, 6):
        SENTENCES += pair
# An empty sentence, a short one, a repeated one, and one that is longer than the limit.
SENTENCES += ["", "a", SENTENCES[3], " ".join(SENTENCES)]

LEGACY_POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
}
NEW_POOLING = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}


def write_modules(
    folder: Path, paths: str, pooling: dict, more: tuple[str, ...] = (), **transformer: object
) -> None:
    """Write the files of a sentence-transformers folder.

    Args:
        paths: "legacy" or "new", the version of the library whose class names to write.
        pooling: content of the pooling module's config.
        more: modules behind transformer and pooling.
        transformer: content of the transformer's config.
    """
    modules = []
    for number, kind in enumerate(("Transformer", "Pooling", *more)):
        dotted = f"sentence_transformers.models.{kind}"
        if paths == "new" and kind == "Pooling":
            dotted = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        elif paths == "new":
            dotted = f"sentence_transformers.base.modules.{kind.lower()}.{kind}"
        path = f"{number}_{kind}" if number else ""
        modules.append({"idx": number, "name": str(number), "path": path, "type": dotted})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))


def library_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    normalize: bool = False,
) -> Any:
    """Save a folder with the sentence-transformers library, and return the library's own model."""
    library = pytest.importorskip("sentence_transformers")
    # Version 6 warns that the modules have moved, and version 5 does not know the new place.
    with warnings.catch_warnings(action="ignore"):
        modules = pytest.importorskip("sentence_transformers.models")
        model.save_pretrained(folder / "plain")
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = length
        tokenizer.save_pretrained(folder / "plain")
        parts = [modules.Transformer(str(folder / "plain")), modules.Pooling(32, "mean")]
        parts += [modules.Normalize()] if normalize else []
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    library.SentenceTransformer(modules=parts, device="cpu", **prompts).save_pretrained(
        str(folder / "saved")
    )
    return library.SentenceTransformer(str(folder / "saved"), device="cpu")


def naive_encode(
    model: PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    pooling: str,
    prefix: str = "",
) -> np.ndarray:
    """Encode `SENTENCES` one at a time in float64, so that there is no padding."""
    model = copy.deepcopy(model).double().eval()
    rows = []
    for sentence in SENTENCES:
        text = prefix + sentence
        ids = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")["input_ids"]
        if model.config.is_encoder_decoder:
            states = model(input_ids=ids, decoder_input_ids=ids[:, :1]).encoder_last_hidden_state[0]
        else:
            states = model(input_ids=ids).last_hidden_state[0]
        rows.append((states[0] if pooling == "cls" else states.mean(0)).detach().numpy())
    return np.stack(rows)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(("pooling", "prefix"), [("cls", ""), ("mean", "query: "), ("mean", "")])
def test_equals_one_sentence_at_a_time(tiny_bert_dir: Path, pooling: str, prefix: str) -> None:
    encoder = SentenceEncoder.from_pretrained(
        str(tiny_bert_dir), pooling, prefix, max_seq_length=40
    )
    computed = []  # input of the last layer's feed-forward network, (1, T, 32) each

    def record(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        computed.append(inputs[0])

    encoder.model.encoder.layer[-1].intermediate.register_forward_hook(record)
    model = AutoModel.from_pretrained(tiny_bert_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_dir)
    expected = naive_encode(model, tokenizer, pooling, prefix)
    vectors = encoder.encode(SENTENCES)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)

    # Nothing is computed for padding and, with CLS pooling, only that token in the last layer.
    texts = [prefix + sentence for sentence in set(SENTENCES)]
    ids = tokenizer(texts, truncation=True, max_length=40)["input_ids"]
    needed = len(ids) if pooling == "cls" else sum(map(len, ids))
    assert sum(states.numel() for states in computed) == 32 * needed


@pytest.mark.parametrize(
    ("token_budget", "full"), [(1, 64), (50, 1), (50, 100_000), (100_000, 1), (100_000, 64)]
)
def test_budget_and_batching_change_nothing(
    tiny_bert_dir: Path, token_budget: int, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    expected = encoder.encode(SENTENCES)
    monkeypatch.setattr("dap_transformers.encoding.encoder.FULL_CPU_BATCH", full)
    monkeypatch.setattr("dap_transformers.encoding.encoder.CHUNK", 17)
    vectors = encoder.encode(SENTENCES, token_budget)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert SENTENCES[3] == SENTENCES[-2]
    np.testing.assert_array_equal(vectors[3], vectors[-2])


@pytest.mark.parametrize(
    "model_type", ["bert", "xlm-roberta", "deberta-v2", "modernbert", "distilbert", "dap"]
)
def test_any_hidden_layer_is_pooled(
    tiny_tokenizer: PreTrainedTokenizerFast, model_type: str
) -> None:
    config = tiny_config("bert" if model_type == "dap" else model_type, len(tiny_tokenizer))
    if model_type == "dap":
        model = DAPModel(DAPConfig(config)).eval()
        plain = model.encoder
    else:
        model = plain = AutoModel.from_config(config).eval()
    all_states = []  # of one sentence at a time, (layers, S, D)
    for sentence in SENTENCES:
        inputs = tiny_tokenizer(sentence, truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            outputs = plain(input_ids=inputs["input_ids"], output_hidden_states=True)
        all_states.append(torch.cat(outputs.hidden_states))

    for pooling in ("cls", "mean"):
        options = {"pooling": pooling, "max_seq_length": 40}
        by_layer = []
        for layer in range(4):
            encoder = SentenceEncoder(model, tiny_tokenizer, layer=layer, **options)
            by_layer.append(encoder.encode(SENTENCES))
            layer_states = [states[layer] for states in all_states]
            if pooling == "cls":
                expected = torch.stack([states[0] for states in layer_states])
            else:
                expected = torch.stack([states.mean(0) for states in layer_states])
            np.testing.assert_allclose(by_layer[layer], expected.numpy(), atol=1e-5)
        default = SentenceEncoder(model, tiny_tokenizer, **options).encode(SENTENCES)
        np.testing.assert_allclose(by_layer[3], default, atol=1e-5)
        for one, other in itertools.pairwise(by_layer):
            assert np.abs(one - other).max() > 1e-4


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_of_an_encoder_decoder_only_the_encoder_runs(
    tiny_tokenizer: PreTrainedTokenizerFast, pooling: str
) -> None:
    config = transformers.T5Config(
        vocab_size=len(tiny_tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = AutoModel.from_config(config).eval()
    expected = naive_encode(model, tiny_tokenizer, pooling)
    vectors = SentenceEncoder(model, tiny_tokenizer, pooling, max_seq_length=40).encode(SENTENCES)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_text_without_tokens_is_the_zero_vector(
    tiny_bert_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    model = AutoModel.from_pretrained(tiny_bert_dir)
    vectors = SentenceEncoder(model, tokenizer).encode(["ka lo", ""])
    assert vectors[0].any()
    assert not vectors[1].any()


def test_similarity_is_the_cosine_and_normalised_vectors_have_length_1(
    tiny_bert_dir: Path,
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    plain = encoder.encode(["kaban loder", "mifin"])
    unit = encoder.encode(["kaban loder", "mifin"], normalize=True)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, plain / lengths, rtol=1e-6)
    np.testing.assert_allclose(encoder.similarity(plain, 3 * plain[:1]), unit @ unit[:1].T, 1e-5)
    with pytest.raises(ValueError, match="32 and 31 columns"):
        encoder.similarity(plain, plain[:, :31])


def test_no_sentences_give_no_vectors(tiny_bert_dir: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "cls")
    assert encoder.encode([]).shape == (0, 32)
    assert encoder.encode_tokens([]) == []


def test_sentences_come_from_any_iterable(tiny_bert_dir: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "cls")
    sentences = ["kaban", "loder mifin"]
    vectors = encoder.encode(sentences)
    token_states = encoder.encode_tokens(sentences)
    for make in (np.array, iter):
        np.testing.assert_array_equal(encoder.encode(make(sentences)), vectors)
        for found, expected in zip(
            encoder.encode_tokens(make(sentences)), token_states, strict=True
        ):
            np.testing.assert_array_equal(found, expected)
        assert encoder.token_words(make(sentences)) == encoder.token_words(sentences) != [[], []]


def test_what_is_no_list_of_texts_is_refused(tiny_bert_dir: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "cls")
    for encode in (encoder.encode, encoder.encode_tokens):
        with pytest.raises(ValueError, match="list of strings"):
            encode("a string")
        for missing in (None, float("nan"), b"ka", "ka \ud800"):
            with pytest.raises(ValueError, match=re.escape(f"sentences[1] is {missing!r}")):
                encode(["ka lo", missing])
    with pytest.raises(ValueError, match="token_budget=0"):
        encoder.encode(["a"], token_budget=0)


def test_the_model_returns_to_training_mode(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    config = tiny_config("bert", len(tiny_tokenizer))
    config.hidden_dropout_prob = 0.5
    model = BertModel(config).train()
    encoder = SentenceEncoder(model, tiny_tokenizer)
    np.testing.assert_array_equal(encoder.encode(["ka lo"]), encoder.encode(["ka lo"]))
    assert model.training


def test_bf16_stays_near_float32(tiny_bert_dir: Path) -> None:
    vectors = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean").encode(SENTENCES)
    rough = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", bf16=True).encode(SENTENCES)
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - vectors).max() < 0.1


@pytest.mark.parametrize("prefix", ["", "query: "])
def test_token_states_leave_out_special_tokens_padding_and_prefix(
    tiny_bert_dir: Path, prefix: str
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "cls", prefix)
    sentences = ["kaban loder", "", "mifin"]
    states = encoder.encode_tokens(sentences)
    prefix_ids = encoder.tokenizer(prefix.rstrip(), add_special_tokens=False)["input_ids"]
    for sentence, found in zip(sentences, states, strict=True):
        ids = encoder.tokenizer(prefix + sentence, return_tensors="pt")["input_ids"]
        expected = encoder.model(input_ids=ids).last_hidden_state[0, 1 + len(prefix_ids) : -1]
        if not sentence:  # the space at the prefix's end may be a token of its own
            expected = expected[expected.shape[0] - len(found) :]
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
    assert len(states[1]) == 0
    assert len(states[0]) >= 2


@pytest.mark.parametrize("model_class", [DAPModel, DAPForPreTraining])
def test_dap_checkpoint_brings_its_pooling_and_gives_its_pooler_output(
    model_class: type, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = DAPConfig(tiny_config("bert", len(tiny_tokenizer)), objective="tr", pooling="mean")
    saved = model_class(config).eval()
    encoder = SentenceEncoder.from_pretrained(str(save(tmp_path, saved, tiny_tokenizer)))
    assert isinstance(encoder.model, DAPModel)
    assert encoder.pooling == "mean"
    batch = tiny_tokenizer(["kaban loder"], return_tensors="pt")
    expected = getattr(saved, "dap", saved)(
        batch["input_ids"], batch["attention_mask"]
    ).pooler_output
    np.testing.assert_allclose(
        encoder.encode(["kaban loder"]), expected.detach().numpy(), atol=1e-6
    )
    assert SentenceEncoder.from_pretrained(str(tmp_path), pooling="cls").pooling == "cls"
    assert SentenceEncoder(encoder.model, tiny_tokenizer).pooling == "mean"


@pytest.mark.parametrize("normalize", [False, True])
def test_a_folder_saved_by_sentence_transformers(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, normalize: bool
) -> None:
    model = AutoModel.from_config(tiny_config("bert", len(tiny_tokenizer)))
    library = library_folder(tmp_path, model, tiny_tokenizer, 33, normalize)
    encoder = load_encoder(str(tmp_path / "saved"))
    assert isinstance(encoder, SentenceEncoder)
    assert (encoder.pooling, encoder.max_seq_length, encoder.prefix) == ("mean", 33, "query: ")
    found, expected = encoder.encode(SENTENCES), library.encode(SENTENCES)
    np.testing.assert_allclose(unit(found) if normalize else found, expected, atol=1e-5)
    assert load_encoder(str(tmp_path / "saved"), prefix="").prefix == ""


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("bert", 80), ("modernbert", 80), ("xlm-roberta", 78), ("xlnet", VERY_LARGE_INTEGER)],
)
def test_length_of_a_folder_whose_tokenizer_has_no_limit(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, model_type: str, expected: int
) -> None:
    xlnet = transformers.XLNetConfig(
        vocab_size=len(tiny_tokenizer), d_model=32, n_layer=2, n_head=4, d_inner=48, pad_token_id=1
    )
    config = xlnet if model_type == "xlnet" else tiny_config(model_type, len(tiny_tokenizer))
    library = library_folder(
        tmp_path, AutoModel.from_config(config), tiny_tokenizer, VERY_LARGE_INTEGER
    )
    encoder = SentenceEncoder.from_pretrained(str(tmp_path / "saved"))
    assert encoder.max_seq_length == expected
    # The library counts the whole table of positions, and fails beyond its end.
    if model_type == "xlm-roberta":
        library.max_seq_length = expected
    assert library.max_seq_length == expected
    np.testing.assert_allclose(encoder.encode(SENTENCES), library.encode(SENTENCES), atol=1e-5)


@pytest.mark.parametrize(
    ("names", "pooling", "more"),
    [("legacy", LEGACY_POOLING, ("Normalize",)), ("new", NEW_POOLING, ())],
)
def test_folders_of_earlier_sentence_transformers(
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    names: str,
    pooling: dict,
    more: tuple[str, ...],
) -> None:
    write_modules(save_bert(tmp_path, tiny_tokenizer), names, pooling, more, max_seq_length=33)
    encoder = load_encoder(str(tmp_path))
    assert isinstance(encoder, SentenceEncoder)
    assert (encoder.pooling, encoder.max_seq_length, encoder.prefix) == ("mean", 33, "")
    library = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(tmp_path), device="cpu"
    )
    expected = library.encode(SENTENCES, normalize_embeddings=True)
    np.testing.assert_allclose(unit(encoder.encode(SENTENCES)), expected, atol=1e-5)
    # A length above the table of positions is lowered.
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 82}')
    assert SentenceEncoder.from_pretrained(str(tmp_path)).max_seq_length == 80


def test_folder_with_a_dense_module_goes_to_the_library(
    tmp_path: Path, tiny_bert_dir: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    transformer, pooling = modules.Transformer(str(tiny_bert_dir)), modules.Pooling(32, "mean")
    model = library.SentenceTransformer(
        modules=[transformer, pooling, modules.Dense(32, 8)], device="cpu"
    )
    model.save(str(tmp_path))
    with pytest.raises(NeedsSentenceTransformers, match="Transformer, Pooling, Dense"):
        SentenceEncoder.from_pretrained(str(tmp_path))
    plain = SentenceEncoder.from_pretrained(str(tmp_path), only_transformer=True)
    assert (plain.pooling, plain.encode(SENTENCES).shape[1]) == ("mean", 32)
    for options in ({"pooling": "cls"}, {"layer": 0}, {"bf16": True}):
        with pytest.raises(ValueError, match="pooling, layer and bf16 cannot be set"):
            load_encoder(str(tmp_path), **options)
    vectors = load_encoder(str(tmp_path), prefix="query: ").encode(SENTENCES, token_budget=256)
    np.testing.assert_allclose(vectors, model.encode([f"query: {s}" for s in SENTENCES]), atol=1e-5)


def test_static_embeddings_of_the_library(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    static = modules.StaticEmbedding(tiny_tokenizer.backend_tokenizer, embedding_dim=8)
    library.SentenceTransformer(modules=[static], device="cpu").save(str(tmp_path))
    encoder = load_encoder(str(tmp_path))
    assert encoder.encode(SENTENCES).shape == (len(SENTENCES), 8)
    assert encoder.max_seq_length is None
    with pytest.raises(ValueError, match="max_seq_length=9: .* leave it out"):
        load_encoder(str(tmp_path), max_seq_length=9)


def test_folder_with_a_dense_module_and_no_library(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_modules(save_bert(tmp_path, tiny_tokenizer), "new", NEW_POOLING, ("Dense",))
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"Dense: pip install sentence-transformers"):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("pooling", "transformer"),
    [
        (NEW_POOLING | {"pooling_mode": ["cls", "mean"]}, {}),
        (LEGACY_POOLING | {"pooling_mode_max_tokens": True}, {}),
        (NEW_POOLING, {"do_lower_case": True}),
    ],
)
def test_other_poolings_and_lower_casing_need_the_library(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, pooling: dict, transformer: dict
) -> None:
    write_modules(save_bert(tmp_path, tiny_tokenizer), "new", pooling, (), **transformer)
    with pytest.raises(NeedsSentenceTransformers):
        SentenceEncoder.from_pretrained(str(tmp_path))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        SentenceEncoder.from_pretrained(str(tmp_path))


def test_a_plain_encoder_pools_as_the_paper_with_a_warning(
    tiny_bert_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir))
    assert (encoder.pooling, encoder.prefix) == ("cls", "")
    assert encoder.max_seq_length == 80  # the model has no room for the default of 128
    assert "does not say how it pools: using 'cls'" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling": "max"}, "pooling='max'"),
        ({"max_seq_length": 2}, "max_seq_length=2 .* 3"),
        ({"max_seq_length": 3, "prefix": "query: "}, "max_seq_length=3 .* prefix='query: '"),
        ({"max_seq_length": 81}, "max_seq_length=81 .* 80"),
        ({"layer": -1}, "layer=-1: .* 3"),
        ({"layer": 4}, "layer=4: .* 3"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tiny_bert_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SentenceEncoder.from_pretrained(str(tiny_bert_dir), **arguments)


@pytest.mark.parametrize("full", [1, 30, 200])
def test_batches_hold_every_row_once_within_the_budget(full: int) -> None:
    lengths = random.Random(0).choices(range(60), k=500)
    batches = length_batches(lengths, token_budget=50, full=full)
    rows = sorted(itertools.chain(*batches))
    assert rows == [row for row, length in enumerate(lengths) if length]
    for batch in batches:
        batch_lengths = [lengths[row] for row in batch]
        assert len(batch) == 1 or len(batch) * max(batch_lengths) <= 50
        assert full > 1 or len(set(batch_lengths)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu(tiny_bert_dir: Path) -> None:
    on_cpu = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", device="cpu")
    on_cuda = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", device="cuda")
    np.testing.assert_allclose(on_cuda.encode(SENTENCES), on_cpu.encode(SENTENCES), atol=1e-4)
