"""The published folder: every library gives the same vectors, and nothing superfluous is in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    load_encoder,
    load_library,
    save,
    save_bert,
    synthetic_pairs,
    tiny_config,
    tiny_tokenizer,
)
from damaged_files import damage
from numpy.testing import assert_allclose
from safetensors.torch import save_file
from tiny_models import SHAPE, make_batch, start_from, tiny_model
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer, PreTrainedConfig

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json
from dap_transformers.publishing.layout import (
    POOLER_SCALE,
    FolderOptions,
    build,
    require_same_vectors,
)
from dap_transformers.publishing.publish import PublishOptions, publish
from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification, DAPModel
from modules_dap import write_modules

POOLERS = [
    *map(tiny_config, ("bert", "xlm-roberta", "mpnet")),
    transformers.AlbertConfig(**SHAPE, embedding_size=16),
    transformers.BigBirdConfig(**SHAPE, attention_type="original_full"),
]
QWEN2 = transformers.Qwen2Config(**SHAPE, num_key_value_heads=4)
LONG = " ".join(target for _, target in synthetic_pairs("fr", 30))
SETTINGS = "config_sentence_transformers.json"
SENTENCES = [source for source, _ in synthetic_pairs("de", 4)] + ["", "ka", LONG]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable:
    """Return a function that saves a DAP checkpoint in several files of weights."""

    def make(model_type: str = "bert", **config: Any) -> Path:
        folder = tmp_path / "dap"
        tiny_model(model_type, **config).save_pretrained(folder, max_shard_size="20KB")
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return make


def library_vectors(folder: Path, method: str = "encode", **options: Any) -> np.ndarray:
    library = load_library(folder, **options)
    return getattr(library, method)(SENTENCES)


def own_vectors(folder: Path, **options: Any) -> np.ndarray:
    return load_encoder(folder, **options).encode(SENTENCES)


def test_the_root_of_a_published_checkpoint_is_a_plain_encoder(
    checkpoint: Callable, tmp_path: Path
) -> None:
    source, out = checkpoint("distilbert", objective="tr", pooling="mean"), tmp_path / "out"
    assert not build(source, out).has_pooler
    assert load_encoder(source, "lasttoken").pooling == "lasttoken"
    plain = AutoModel.from_pretrained(out)
    assert "pooler_output" not in plain(torch.tensor([[0, 5, 2]]))
    assert type(plain).__module__.startswith("transformers.")
    assert "auto_map" not in (out / "config.json").read_text()
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


def test_no_pickle_local_path_or_training_leftover_is_published(
    tmp_path: Path, tiny_bert_dir: Path
) -> None:
    source, out = tmp_path / "dap", tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    tokenizer(["ka"], truncation=True, max_length=3, padding="max_length")
    model = start_from(tiny_bert_dir)
    model.resize_token_embeddings(len(tokenizer))
    save(source, model, tokenizer)
    (source / "training_args.bin").write_bytes(b"pickle")
    publish(source, "user/tiny", PublishOptions(dry_run=True, with_heads=True), out)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".py", ".md"}
    for path in files:
        content = path.read_bytes()
        assert not [own for own in (source, tiny_bert_dir) if str(own).encode() in content], path
    content = read_json(out / "tokenizer.json")
    assert content["truncation"] is content["padding"] is None
    # What Transformers 4 knows.
    settings = read_json(out / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<de>"]
    assert not {"max_length", "is_local", "extra_special_tokens"} & set(settings)
    assert "<de>" in AutoTokenizer.from_pretrained(out).all_special_tokens


@pytest.mark.parametrize("is_dap", [False, True])
@pytest.mark.parametrize(
    ("config", "pooling"), [(POOLERS[0], "mean"), *((config, "cls") for config in POOLERS)]
)
def test_pooler_output_is_the_sentence_vector_or_zero_but_never_random(
    config: PreTrainedConfig, pooling: str, is_dap: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source = save(tmp_path / "plain", AutoModel.from_config(config))
    if is_dap:
        source = save(tmp_path / "dap", start_from(source, objective="tr", pooling=pooling))
    published = build(source, out, FolderOptions(pooling=pooling))
    is_cls = pooling == "cls"
    assert published.pools_itself == is_cls
    again, report = AutoModel.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    batch = tokenizer(SENTENCES, padding=True, truncation=True, return_tensors="pt")
    pooled = again(**batch).pooler_output.detach().numpy()
    expected = POOLER_SCALE * own_vectors(out) if is_cls else 0.0
    assert_allclose(pooled, expected, rtol=1e-3, atol=1e-6 if is_cls else 0)


def test_a_checkpoint_of_the_released_code_is_published_and_trained(tmp_path: Path) -> None:
    config = tiny_config("xlm-roberta")
    plain = transformers.XLMRobertaModel(config, add_pooling_layer=False).eval()
    old, out = save(tmp_path / "old", config), tmp_path / "out"
    weights = {f"mlp.dense.{name}": torch.zeros(32) for name in ("weight", "bias")}
    for name, value in plain.state_dict().items():
        weights[f"roberta.{name}"] = value
        weights[f"decoder.roberta.{name}"] = value.clone()
    save_file(weights, old / "model.safetensors", {"format": "pt"})

    build(old, out, FolderOptions(pooling="cls"))
    _, report = AutoModel.from_pretrained(out, output_loading_info=True)
    assert not report["unexpected_keys"]  # nothing that only training needed
    expected = SentenceEncoder(plain, tiny_tokenizer(), "cls").encode(SENTENCES)
    assert_allclose(own_vectors(out), expected, atol=1e-5)
    model = start_from(old, objective="tr", pooling="cls")
    found = SentenceEncoder(model.dap, tiny_tokenizer()).encode(SENTENCES)
    assert_allclose(found, expected, atol=1e-5)


def test_publishing_again_keeps_prefix_length_and_normalisation(
    checkpoint: Callable, tmp_path: Path
) -> None:
    source = checkpoint(objective="tr")
    build(
        source,
        tmp_path / "first",
        FolderOptions(prefix="kaban: ", max_seq_length=9, normalize=True),
    )
    # Servers know these names. The ONNX and OpenVINO backends do not accept further arguments.
    types = [module["type"] for module in read_json(tmp_path / "first/modules.json")]
    names = ("Transformer", "Pooling", "Normalize")
    assert types == [f"sentence_transformers.models.{name}" for name in names]
    transformer = read_json(tmp_path / "first/sentence_bert_config.json")
    assert transformer == {"max_seq_length": 9, "do_lower_case": False}

    again = build(tmp_path / "first", tmp_path / "second")
    assert (again.encoder.max_seq_length, again.normalize) == (9, True)
    build(tmp_path / "first", tmp_path / "bare", FolderOptions(prefix=""))
    for folder, prefix in (("first", "kaban: "), ("second", "kaban: "), ("bare", "")):
        encoder = load_encoder(source, None, prefix, 9)
        expected = encoder.encode(SENTENCES, normalize=True)
        for method in ("encode", "encode_query", "encode_document"):
            found = library_vectors(tmp_path / folder, method)
            assert_allclose(found, expected, atol=1e-5)


def test_publishing_again_keeps_similarity_and_prompts(
    checkpoint: Callable, tmp_path: Path
) -> None:
    build(checkpoint(tr_similarity="dot"), tmp_path / "first")
    prompts = {"query": "kaban: ", "passage": "loder: "}
    own = {"prompts": prompts, "default_prompt_name": "passage"}
    damage(tmp_path / "first", SETTINGS, own)
    build(tmp_path / "first", tmp_path / "second")
    prompts["document"] = "loder: "  # encode_document needs a prompt of this name
    assert read_json(tmp_path / "second" / SETTINGS) == own | {"similarity_fn_name": "dot"}


def test_the_subfolder_with_heads_keeps_prefix_prompts_and_length(tmp_path: Path) -> None:
    settings = {"prefix": "ka ", "max_seq_length": 7, "prompts": {"query": "lo "}}
    source = save(tmp_path / "dap", tiny_model(objective="tr+bow", pooling="mean"))
    write_modules(SentenceEncoder(load_encoder(source).model, tiny_tokenizer(), **settings), source)
    build(source, tmp_path / "out", FolderOptions(with_heads=True, normalize=True))
    heads = tmp_path / "out/pretraining"
    assert_allclose(own_vectors(heads), own_vectors(source), atol=1e-5)
    for folder in (source, heads):
        queries = library_vectors(folder, "encode_query", trust_remote_code=True)
        assert_allclose(queries, own_vectors(source, prefix="lo "), atol=1e-5)


def test_a_model_without_heads_gets_no_subfolder(tmp_path: Path) -> None:
    source = save(tmp_path / "dap", tiny_model(objective="tr+distill"))
    assert not build(source, tmp_path / "out", FolderOptions(with_heads=True)).heads
    assert not (tmp_path / "out/pretraining").exists()


def test_heads_load_from_the_subfolder_and_can_be_trained(tmp_path: Path) -> None:
    model, out = tiny_model(target_vocab_size=100), tmp_path / "out"
    model.set_target_vocabulary(list(range(50, 150)))
    build(save(tmp_path / "dap", model), out, FolderOptions(with_heads=True))
    again = AutoModelForPreTraining.from_pretrained(out, subfolder="pretraining").train()
    assert isinstance(again, DAPForPreTraining)
    expected = model(**make_batch()).loss.item()
    assert again(**make_batch()).loss.item() == pytest.approx(expected, rel=1e-6)
    # Transformers looks at the root, and the subfolder also works by itself
    references = read_json(out / "pretraining/config.json")["auto_map"].values()
    needed = {"losses_dap.py", *(f"{name.split('.')[0]}.py" for name in references)}
    for place in (out, out / "pretraining"):
        assert needed <= {path.name for path in place.iterdir()}
    assert isinstance(AutoModel.from_pretrained(out / "pretraining"), DAPModel)


def test_a_folder_that_is_not_empty_stays_and_an_empty_one_is_filled(
    checkpoint: Callable, tmp_path: Path
) -> None:
    source, options, out = checkpoint(), PublishOptions(dry_run=True), tmp_path / "out"
    out.mkdir()
    publish(source, "user/tiny", options, out)
    assert (out / "README.md").is_file()
    with pytest.raises(ValueError, match="is not empty"):
        publish(source, "user/tiny", options, out)


def saved(folder: Path, kind: str) -> None:
    """Save a checkpoint that cannot be published."""
    model = tiny_model()
    others = {"classifier": DAPForSequenceClassification(model.config), "without heads": model.dap}
    if kind == "other tokens":  # Transformers makes a tokenizer of its own for this type
        model = DAPModel(DAPConfig(QWEN2, objective="tr"))
    if kind == "plain":
        save_bert(folder)
    else:
        save(folder, others.get(kind, model))
    if kind == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        (folder / "2_Dense").mkdir()
        (folder / "2_Dense/model.safetensors").touch()


@pytest.mark.parametrize(
    ("kind", "own", "says"),
    [
        ("plain", {}, "does not say how it pools"),
        ("plain", {"pooling": "cls", "with_heads": True}, "has no heads"),
        ("classifier", {}, "is a classifier"),
        ("without heads", {"with_heads": True}, r"lacks \d+ weights, such as"),
        ("pickle", {}, "no weights as safetensors"),
        ("other tokens", {}, "AutoTokenizer makes a Qwen2Tokenizer for model_type 'qwen2'"),
        ("whole", {"results": ["absent.json"]}, r"absent\.json"),
    ],
)
def test_what_is_refused_leaves_nothing(kind: str, own: dict, says: str, tmp_path: Path) -> None:
    saved(tmp_path / "dap", kind)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        publish(tmp_path / "dap", "user/a", PublishOptions(dry_run=True, **own), tmp_path / "out")
    assert not (tmp_path / "out").exists()  # not even half of it


def test_other_vectors_are_refused() -> None:
    expected = np.eye(3, dtype=np.float32)
    assert require_same_vectors(2 * expected, 2 * expected, "the copy") == 0
    for found in (2 * expected, expected[[1, 0, 2]], np.full((3, 3), np.nan, np.float32)):
        with pytest.raises(ValueError, match=r"the copy|NaN|vectors"):
            require_same_vectors(expected, found, "the copy")
