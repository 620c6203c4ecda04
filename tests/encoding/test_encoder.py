"""`SentenceEncoder` equals encoding one sentence at a time, in float64 and with other libraries."""

import copy
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import LANGUAGES, save, save_bert, synthetic_pairs, tiny_config
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, BertModel, PreTrainedModel, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from dap_transformers.encoding.encoder import SentenceEncoder, length_batches
from modeling_dap import DAPConfig, DAPForPreTraining, DAPModel

SENTENCES: list[str] = []
for language in LANGUAGES:
    for pair in synthetic_pairs(language, 6):
        SENTENCES += pair
# An empty sentence, a short one, a repeated one, and one that is longer than the limit.
SENTENCES += ["", "a", SENTENCES[3], " ".join(SENTENCES)]

LEGACY_POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
NEW_POOLING = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}


@pytest.fixture
def load(tiny_bert_dir: Path) -> Callable[..., SentenceEncoder]:
    """Return a function that loads the tiny BERT, with mean pooling unless another is given."""

    def load(pooling: str = "mean", **options: Any) -> SentenceEncoder:
        return SentenceEncoder.from_pretrained(str(tiny_bert_dir), pooling, **options)

    return load


def tiny_t5(tokenizer: PreTrainedTokenizerFast) -> transformers.T5Config:
    """A one-layer configuration of T5."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    vocabulary = {"vocab_size": len(tokenizer), "decoder_start_token_id": 0}
    return transformers.T5Config(**shape, **vocabulary)


def naive_encode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    pooling: str,
    prefix: str = "",
) -> np.ndarray:
    """Encode `SENTENCES` one at a time in float64, so that there is no padding."""
    model = copy.deepcopy(model).double().eval()
    rows = []
    for sentence in SENTENCES:
        text = prefix + sentence
        ids = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")["input_ids"]
        more = {"decoder_input_ids": ids[:, :1]} if model.config.is_encoder_decoder else {}
        out = model(input_ids=ids, **more)
        states = (out.encoder_last_hidden_state if more else out.last_hidden_state)[0].detach()
        pooled = {"cls": states[0], "mean": states.mean(0), "lasttoken": states[-1]}
        rows.append(pooled[pooling].numpy())
    return np.stack(rows)


# ------------------------------------------------------------------------------- sentence vectors


@pytest.mark.parametrize(
    ("pooling", "prefix"), [("cls", ""), ("mean", "query: "), ("lasttoken", "")]
)
def test_equals_one_sentence_at_a_time(
    load: Callable, tiny_tokenizer: PreTrainedTokenizerFast, pooling: str, prefix: str
) -> None:
    encoder = load(pooling, prefix=prefix, max_seq_length=40)
    expected = naive_encode(encoder.model, tiny_tokenizer, pooling, prefix)
    computed = []  # input of the last layer's feed-forward network, (1, T, 32) each

    def record(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        computed.append(inputs[0])

    encoder.model.encoder.layer[-1].intermediate.register_forward_hook(record)
    vectors = encoder.encode(SENTENCES)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)

    # Nothing is computed for padding, and in the last layer only the token that is pooled.
    texts = [prefix + sentence for sentence in set(SENTENCES)]
    ids = tiny_tokenizer(texts, truncation=True, max_length=40)["input_ids"]
    needed = sum(map(len, ids)) if pooling == "mean" else len(ids)
    assert sum(states.numel() for states in computed) == 32 * needed


@pytest.mark.parametrize("model_type", ["deberta-v2", "modernbert", "dap"])
def test_encoders_of_other_kinds_equal_one_sentence_at_a_time(
    tiny_tokenizer: PreTrainedTokenizerFast, model_type: str
) -> None:
    if model_type == "dap":
        model = DAPModel(DAPConfig(tiny_config("bert", len(tiny_tokenizer))))
        plain = model.encoder
    else:
        model = plain = AutoModel.from_config(tiny_config(model_type, len(tiny_tokenizer)))
    expected = naive_encode(plain, tiny_tokenizer, "mean")
    vectors = SentenceEncoder(model.eval(), tiny_tokenizer, "mean", None, 40).encode(SENTENCES)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_an_encoder_of_t5_needs_no_decoder(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    whole = AutoModel.from_config(tiny_t5(tiny_tokenizer)).eval()
    expected = naive_encode(whole, tiny_tokenizer, "mean")
    alone = transformers.T5EncoderModel(copy.deepcopy(whole.config))
    alone.encoder.load_state_dict(whole.encoder.state_dict())
    for name, model in (("whole", whole), ("alone", alone)):
        folder = save(tmp_path / name, model, tiny_tokenizer)
        encoder = SentenceEncoder.from_pretrained(str(folder), "mean", max_seq_length=40)
        np.testing.assert_allclose(encoder.encode(SENTENCES), expected, atol=1e-5)


@pytest.mark.parametrize(("token_budget", "full"), [(1, 64), (50, 1), (100_000, 1), (100_000, 64)])
def test_budget_and_batching_change_nothing(
    load: Callable, token_budget: int, full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load()
    expected = encoder.encode(SENTENCES)
    monkeypatch.setattr("dap_transformers.encoding.encoder.FULL_CPU_BATCH", full)
    monkeypatch.setattr("dap_transformers.encoding.encoder.CHUNK", 17)
    vectors = encoder.encode(iter(SENTENCES), token_budget)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert SENTENCES[3] == SENTENCES[-2]
    np.testing.assert_array_equal(vectors[3], vectors[-2])


def test_a_text_without_tokens_is_the_zero_vector(
    load: Callable, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    vectors = SentenceEncoder(load().model, tokenizer).encode(["ka lo", ""])
    assert vectors[0].any()
    assert not vectors[1].any()


def test_similarity_is_the_cosine_and_normalised_vectors_have_length_1(load: Callable) -> None:
    encoder = load()
    plain = encoder.encode(["kaban loder", "mifin"])
    unit = encoder.encode(["kaban loder", "mifin"], normalize=True)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, plain / lengths, rtol=1e-6)
    np.testing.assert_allclose(encoder.similarity(plain, 3 * plain[:1]), unit @ unit[:1].T, 1e-5)


def test_no_sentences_give_no_vectors(load: Callable) -> None:
    assert load().encode([]).shape == (0, 32)
    assert load().encode_tokens([]) == []


def test_the_model_returns_to_training_mode(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    config = tiny_config("bert", len(tiny_tokenizer))
    config.hidden_dropout_prob = 0.5
    model = BertModel(config).train()
    encoder = SentenceEncoder(model, tiny_tokenizer)
    np.testing.assert_array_equal(encoder.encode(["ka lo"]), encoder.encode(["ka lo"]))
    assert model.training


def test_bf16_stays_near_float32(load: Callable) -> None:
    rough = load(bf16=True).encode(SENTENCES)
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - load().encode(SENTENCES)).max() < 0.1


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
def test_cuda_equals_cpu(load: Callable) -> None:
    on_cpu, on_cuda = (load(device=device).encode(SENTENCES) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(on_cuda, on_cpu, atol=1e-4)


# ---------------------------------------------------------------------------------- token states


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("prefix", ["", "query: "])
def test_token_states_leave_out_special_tokens_padding_and_prefix(
    load: Callable, prefix: str, layer: int | None
) -> None:
    encoder = load(prefix=prefix)
    sentences = ["kaban loder", "", "mifin"]
    states = encoder.encode_tokens(sentences, layer=layer)
    prefix_ids = encoder.tokenizer(prefix.rstrip(), add_special_tokens=False)["input_ids"]
    for sentence, found in zip(sentences, states, strict=True):
        ids = encoder.tokenizer(prefix + sentence, return_tensors="pt")["input_ids"]
        hidden = encoder.model(input_ids=ids, output_hidden_states=True).hidden_states
        expected = hidden[-1 if layer is None else layer][0, 1 + len(prefix_ids) : -1]
        if not sentence:  # the space at the prefix's end may be a token of its own
            expected = expected[expected.shape[0] - len(found) :]
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
    assert len(states[1]) == 0
    assert len(states[0]) >= 2


# ------------------------------------------------------------------------------------ checkpoints


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
    out = getattr(saved, "dap", saved)(batch["input_ids"], batch["attention_mask"])
    expected = out.pooler_output.detach().numpy()
    np.testing.assert_allclose(encoder.encode(["kaban loder"]), expected, atol=1e-6)
    assert SentenceEncoder.from_pretrained(str(tmp_path), pooling="cls").pooling == "cls"


def test_the_pooling_of_a_plain_encoder_is_a_guess(
    tiny_bert_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir))
    assert (encoder.pooling, encoder.max_seq_length) == ("cls", 80)  # 80 positions instead of 128
    assert "does not say how it pools: using 'cls'" in caplog.text


def library_model(folder: Path, *more: Any, pooling: str = "mean", **options: Any) -> Any:
    """Return a model of sentence-transformers with a folder's encoder and modules behind it."""
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    parts = [modules.Transformer(str(folder)), modules.Pooling(32, pooling), *more]
    return library.SentenceTransformer(modules=parts, device="cpu", **options)


@pytest.mark.parametrize("kinds", [(), ("Normalize",), ("Dense",), ("Dense", "Normalize")])
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_a_folder_of_sentence_transformers_gives_its_vectors(
    tmp_path: Path, tiny_bert_dir: Path, kinds: tuple[str, ...], pooling: str
) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    made = {"Dense": modules.Dense(32, 8), "Normalize": modules.Normalize()}
    more = [made[kind] for kind in kinds]
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    library = library_model(tiny_bert_dir, *more, pooling=pooling, **prompts)
    library.max_seq_length = 33
    library.save_pretrained(str(tmp_path))
    encoder = SentenceEncoder.from_pretrained(str(tmp_path))
    assert (encoder.pooling, encoder.max_seq_length, encoder.prefix) == (pooling, 33, "query: ")
    found = encoder.encode(SENTENCES)
    np.testing.assert_allclose(found, library.encode(SENTENCES), atol=1e-5)
    assert found.shape[1] == encoder.dimensions == (8 if "Dense" in kinds else 32)
    assert encoder.encode_tokens(["ka"])[0].shape[1] == 32
    assert SentenceEncoder.from_pretrained(str(tmp_path), prefix="").prefix == ""


def test_a_dense_module_of_an_older_library_and_of_another_activation(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    t5 = transformers.T5EncoderModel(tiny_t5(tiny_tokenizer))
    folder = save(tmp_path / "t5", t5, tiny_tokenizer)
    dense = modules.Dense(32, 4, bias=False, activation_function=torch.nn.Identity())
    library = library_model(folder, dense, modules.Normalize())
    library.save_pretrained(str(tmp_path / "saved"))
    torch.save(dense.state_dict(), tmp_path / "saved/2_Dense/pytorch_model.bin")
    (tmp_path / "saved/2_Dense/model.safetensors").unlink()
    encoder = SentenceEncoder.from_pretrained(str(tmp_path / "saved"))
    np.testing.assert_allclose(encoder.encode(SENTENCES), library.encode(SENTENCES), atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("modernbert", 80), ("xlm-roberta", 78), ("xlnet", VERY_LARGE_INTEGER)],
)
def test_length_of_a_folder_whose_tokenizer_has_no_limit(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, model_type: str, expected: int
) -> None:
    size = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "pad_token_id": 1}
    xlnet = transformers.XLNetConfig(vocab_size=len(tiny_tokenizer), **size)
    config = xlnet if model_type == "xlnet" else tiny_config(model_type, len(tiny_tokenizer))
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = VERY_LARGE_INTEGER
    folder = save(tmp_path / "plain", AutoModel.from_config(config), tokenizer)
    library = library_model(folder)
    library.save_pretrained(str(tmp_path / "saved"))
    encoder = SentenceEncoder.from_pretrained(str(tmp_path / "saved"))
    assert encoder.max_seq_length == expected
    # The library counts the whole table of positions, and fails beyond its end.
    library.max_seq_length = expected
    np.testing.assert_allclose(encoder.encode(SENTENCES), library.encode(SENTENCES), atol=1e-5)


def write_folder(
    folder: Path, paths: str, pooling: dict, more: tuple[str, ...] = (), **transformer: object
) -> None:
    """Write the files of a sentence-transformers folder by hand.

    Args:
        paths: "legacy" or "new", the version of the library whose class names to write.
        pooling: content of the pooling module's config.
        more: modules behind transformer and pooling.
        transformer: content of the transformer's config.
    """
    modules = []
    for number, kind in enumerate(("Transformer", "Pooling", *more)):
        dotted = f"sentence_transformers.models.{kind}"
        if paths == "new":
            dotted = f"sentence_transformers.base.modules.{kind.lower()}.{kind}"
        path = f"{number}_{kind}" if number else ""
        modules.append({"idx": number, "name": str(number), "path": path, "type": dotted})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))


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
    write_folder(save_bert(tmp_path, tiny_tokenizer), names, pooling, more, max_seq_length=33)
    encoder = SentenceEncoder.from_pretrained(str(tmp_path))
    assert (encoder.pooling, encoder.max_seq_length, encoder.prefix) == ("mean", 33, "")
    expected = naive_encode(encoder.model, copy.deepcopy(tiny_tokenizer), "mean")[:-1]
    lengths = np.linalg.norm(expected, axis=1, keepdims=True) if more else 1
    np.testing.assert_allclose(encoder.encode(SENTENCES[:-1]), expected / lengths, atol=1e-5)
    # A length above the table of positions is lowered.
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 82}')
    assert SentenceEncoder.from_pretrained(str(tmp_path)).max_seq_length == 80


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda load: load().encode("a string"), "list of strings"),
        (lambda load: load().encode_tokens("a string"), "list of strings"),
        (lambda load: load().encode_tokens(["a"], layer=4), "layer=4: .* 3"),
        (lambda load: load().encode_tokens(["a"], layer=-1), "layer=-1: .* 3"),
        (lambda load: load(max_seq_length=2), "max_seq_length=2 .* 3"),
        (lambda load: load(max_seq_length=3, prefix="query: "), "max_seq_length=3 .*'query: '"),
        (lambda load: load(max_seq_length=81), "max_seq_length=81 .* 80"),
        (lambda load: SentenceEncoder.from_pretrained("no/such/model"), "no/such/model"),
    ],
)
def test_what_is_refused(load: Callable, call: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(load)


def test_a_checkpoint_that_lacks_weights_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = tiny_config("bert", len(tiny_tokenizer))
    save_bert(tmp_path, tiny_tokenizer)
    config.num_hidden_layers += 1
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 16 weights"):
        SentenceEncoder.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("pooling", "more", "transformer"),
    [
        (NEW_POOLING | {"pooling_mode": ["cls", "mean"]}, (), {}),
        (LEGACY_POOLING | {"pooling_mode_max_tokens": True}, (), {}),
        (NEW_POOLING, (), {"do_lower_case": True}),
        (NEW_POOLING, ("CNN",), {}),
    ],
)
def test_folders_that_cannot_run_here_are_refused(
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    pooling: dict,
    more: tuple[str, ...],
    transformer: dict,
) -> None:
    write_folder(save_bert(tmp_path, tiny_tokenizer), "new", pooling, more, **transformer)
    with pytest.raises(ValueError, match="cannot run here"):
        SentenceEncoder.from_pretrained(str(tmp_path))
