"""The published folder: every library gives the same vectors, and nothing superfluous is in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import save, synthetic_pairs, tiny_config
from safetensors import safe_open
from tiny_models import make_batch, tiny_model
from transformers import (
    AutoModel,
    AutoModelForPreTraining,
    AutoTokenizer,
    BertModel,
    PreTrainedTokenizerFast,
)

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.modules import write_modules
from dap_transformers.publishing.layout import (
    POOLER_SCALE,
    Options,
    build,
    require_same_vectors,
)
from dap_transformers.publishing.publish import PublishOptions, publish
from modeling_dap import DAPForPreTraining, DAPForSequenceClassification, DAPModel

#: Classes whose pooler has another shape or place, beside those that the other tests have.
POOLERS = ("Bert", "XLMRoberta", "Albert", "BigBird", "MPNet")
LONG = " ".join(target for _, target in synthetic_pairs("fr", 30))
SENTENCES = [source for source, _ in synthetic_pairs("de", 4)] + ["", "ka", LONG]


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[..., Path]:
    """Return a function that saves a DAP checkpoint of random weights in `dap`."""

    def make(model_type: str = "bert", **config: Any) -> Path:
        model = tiny_model(model_type, **config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return save(tmp_path / "dap", model, tiny_tokenizer)

    return make


def library_vectors(folder: Path, method: str = "encode", **options: Any) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(folder), device="cpu", **options)
    return getattr(library, method)(SENTENCES)


def own_vectors(folder: Path, **options: Any) -> np.ndarray:
    return SentenceEncoder.from_pretrained(str(folder), **options).encode(SENTENCES)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("model_type", "pooling"),
    [
        ("bert", "cls"),
        ("xlm-roberta", "mean"),
        ("modernbert", "cls"),
        ("deberta-v2", "mean"),
        ("distilbert", "cls"),
    ],
)
def test_every_library_gives_the_checkpoints_vectors(
    model_type: str, pooling: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint(model_type, pooling=pooling, objective="tr")
    published = build(source, tmp_path / "out")
    expected = own_vectors(source)
    assert published.pooling == pooling
    np.testing.assert_allclose(library_vectors(tmp_path / "out"), expected, atol=1e-5)
    np.testing.assert_allclose(own_vectors(tmp_path / "out"), expected)
    plain = AutoModel.from_pretrained(tmp_path / "out")
    assert published.has_pooler == ("pooler_output" in plain(torch.tensor([[0, 5, 2]])))
    assert published.has_pooler == (model_type in ("bert", "xlm-roberta"))
    assert published.pools_itself == (model_type == "bert")
    assert type(plain).__module__.startswith("transformers.")
    assert "auto_map" not in (tmp_path / "out/config.json").read_text()


def test_the_root_has_no_random_weight_pickle_local_path_or_training_leftover(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    torch.manual_seed(1)
    plain = BertModel(tiny_config("bert", len(tiny_tokenizer)))
    save(tmp_path / "encoder", plain, tiny_tokenizer)
    model = DAPForPreTraining.from_encoder(str(tmp_path / "encoder"), objective="tr")
    model.save_pretrained(tmp_path / "dap")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    tokenizer(["ka"], truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(tmp_path / "dap")
    (tmp_path / "dap/training_args.bin").write_bytes(b"pickle")
    for source, own in (("dap", {"with_heads": True}), ("encoder", {"pooling": "mean"})):
        out = tmp_path / f"out-{source}"
        publish(tmp_path / source, "user/tiny", PublishOptions(dry_run=True, **own), out)
        with safe_open(out / "model.safetensors", framework="pt") as weights:
            names = set(weights.keys())
            pooler = weights.get_tensor("pooler.dense.weight")
        scale = POOLER_SCALE if source == "dap" else 0.0
        torch.testing.assert_close(pooler, scale * torch.eye(32))
        assert names <= set(plain.state_dict())
        unsaved = set(plain.state_dict()) - names
        assert unsaved == (set() if source == "dap" else {"pooler.dense.bias"})
        files = [path for path in out.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {".json", ".safetensors", ".py", ".md"}
        for path in files:
            assert str(tmp_path).encode() not in path.read_bytes(), path
        settings = read(out / "tokenizer_config.json")
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not {"max_length", "is_local"} & set(settings)
        content = read(out / "tokenizer.json")
        assert content["truncation"] is content["padding"] is None


def test_the_files_of_sentence_transformers_have_names_that_servers_know(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build(checkpoint(), out, Options(normalize=True))
    kinds = [module["type"] for module in read(out / "modules.json")]
    expected = ("Transformer", "Pooling", "Normalize")
    assert kinds == [f"sentence_transformers.models.{kind}" for kind in expected]
    pooling = read(out / "1_Pooling/config.json")
    set_names = [name for name, value in pooling.items() if value is True]
    assert set_names == ["pooling_mode_cls_token", "include_prompt"]
    assert pooling["word_embedding_dimension"] == 32
    assert (out / "2_Normalize/config.json").exists()
    # the ONNX and OpenVINO backends do not accept further arguments
    transformer = read(out / "sentence_bert_config.json")
    assert transformer == {"max_seq_length": 64, "do_lower_case": False}
    assert read(out / "tokenizer_config.json")["model_max_length"] == 64


@pytest.mark.parametrize("name", POOLERS)
def test_pooler_output_is_the_sentence_vector_or_zero_but_never_random(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config_class = getattr(transformers, f"{name}Config")
    shape = tiny_config("bert", len(tiny_tokenizer)).to_diff_dict()
    shape.pop("model_type")
    extra = {"attention_type": "original_full", "emb_size": 32, "embedding_size": 32}
    more = {key: value for key, value in extra.items() if hasattr(config_class(), key)}
    model = AutoModel.from_config(config_class(**shape, **more))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save(tmp_path / "plain", model, tiny_tokenizer)
    for pooling in ("cls", "mean"):
        out = tmp_path / pooling
        published = build(tmp_path / "plain", out, Options(pooling=pooling))
        tokenizer = AutoTokenizer.from_pretrained(out)
        batch = tokenizer(SENTENCES, padding=True, truncation=True, return_tensors="pt")
        again, report = AutoModel.from_pretrained(out, output_loading_info=True)
        # A mean cannot be computed by a pooler: its missing bias makes loading print a warning.
        missing = {key.rsplit(".", 1)[-1] for key in report["missing_keys"]}
        assert missing == (set() if pooling == "cls" else {"bias"})
        assert not report["unexpected_keys"]
        with torch.no_grad():
            pooled = again(**batch).pooler_output
        assert published.pools_itself == (pooling == "cls")
        if pooling == "mean":
            assert not pooled.any()
            continue
        expected = torch.from_numpy(own_vectors(out))
        assert float(torch.cosine_similarity(pooled.double(), expected.double()).min()) > 1 - 1e-6
        torch.testing.assert_close(pooled, POOLER_SCALE * expected, rtol=1e-3, atol=1e-6)


def test_write_modules_makes_a_checkpoint_load_in_sentence_transformers(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = save(tmp_path / "dap", tiny_model(tr_similarity="dot"), tiny_tokenizer)
    np.testing.assert_allclose(library_vectors(folder), own_vectors(folder), atol=1e-5)
    encoder = SentenceEncoder.from_pretrained(str(folder), max_seq_length=9)
    expected = encoder.encode(SENTENCES)
    write_modules(encoder, folder)
    # first with the imported modeling_dap, then with the folder's own code
    for options in ({}, {"trust_remote_code": True}):
        np.testing.assert_allclose(library_vectors(folder, **options), expected, atol=1e-5)
    np.testing.assert_allclose(own_vectors(folder), expected)
    library = read(folder / "config_sentence_transformers.json")
    assert library == {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "dot"}


def test_publishing_again_keeps_prefix_length_and_normalisation(
    checkpoint: Callable[..., Path], tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = checkpoint(objective="tr")
    build(source, tmp_path / "first", Options(prefix="kaban: ", max_seq_length=9, normalize=True))
    again = build(tmp_path / "first", tmp_path / "second")
    assert (again.prefix, again.max_seq_length, again.normalize) == ("kaban: ", 9, True)
    model = AutoModel.from_pretrained(source)
    expected = []
    for sentence in SENTENCES:
        cut = {"truncation": True, "max_length": 9, "return_tensors": "pt"}
        batch = tiny_tokenizer(["kaban: " + sentence], **cut)
        with torch.no_grad():
            vector = model(batch["input_ids"]).pooler_output[0].double()
        expected.append((vector / vector.norm()).numpy())
    build(tmp_path / "first", tmp_path / "bare", Options(prefix=""))
    bare = own_vectors(tmp_path / "bare")
    bare /= np.linalg.norm(bare, axis=1, keepdims=True)
    for method in ("encode", "encode_query", "encode_document"):
        for folder in ("first", "second"):
            found = library_vectors(tmp_path / folder, method)
            np.testing.assert_allclose(found, np.array(expected), atol=1e-5)
        np.testing.assert_allclose(library_vectors(tmp_path / "bare", method), bare, atol=1e-5)


def test_publishing_again_keeps_similarity_and_prompts(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    build(checkpoint(tr_similarity="dot"), tmp_path / "first")
    path = tmp_path / "first/config_sentence_transformers.json"
    prompts = {"query": "kaban: ", "passage": "loder: "}
    own = {"prompts": prompts, "default_prompt_name": "passage"}
    path.write_text(json.dumps(read(path) | own))
    build(tmp_path / "first", tmp_path / "second")
    prompts["document"] = "loder: "  # encode_document needs a prompt of this name
    again = read(tmp_path / "second/config_sentence_transformers.json")
    assert again == own | {"similarity_fn_name": "dot"}


def test_heads_load_from_the_subfolder_and_can_be_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model(target_vocab_size=100)
    model.set_target_vocabulary(list(range(50, 150)))
    save(tmp_path / "dap", model, tiny_tokenizer)
    out = tmp_path / "out"
    build(tmp_path / "dap", out, Options(with_heads=True))
    again = AutoModelForPreTraining.from_pretrained(out, subfolder="pretraining").train()
    assert isinstance(again, DAPForPreTraining)
    expected = model(**make_batch()).loss.item()
    assert again(**make_batch()).loss.item() == pytest.approx(expected, rel=1e-6)
    assert again.prediction_head.token_ids.tolist() == list(range(50, 150))
    config = read(out / "pretraining/config.json")
    # Transformers looks at the root, and the subfolder also works by itself
    for place in (out, out / "pretraining"):
        for reference in config["auto_map"].values():
            assert (place / f"{reference.split('.')[0]}.py").exists()
        assert (place / "losses_dap.py").exists()
    assert isinstance(AutoModel.from_pretrained(out / "pretraining"), DAPModel)


def test_a_sharded_checkpoint_becomes_one_file(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_model(objective="tr").save_pretrained(tmp_path / "dap", max_shard_size="20KB")
    tiny_tokenizer.save_pretrained(tmp_path / "dap")
    assert len(list((tmp_path / "dap").glob("model-*.safetensors"))) > 1
    build(tmp_path / "dap", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def test_a_list_of_extra_tokens_has_the_name_that_transformers_4_knows(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    tokenizer.save_pretrained(source)
    build(source, tmp_path / "out")
    settings = read(tmp_path / "out/tokenizer_config.json")
    assert not isinstance(settings.get("extra_special_tokens"), list)
    assert settings["additional_special_tokens"] == ["<de>"]
    assert "<de>" in AutoTokenizer.from_pretrained(tmp_path / "out").all_special_tokens


def test_a_folder_that_is_not_empty_stays_and_an_empty_one_is_filled(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = checkpoint()
    (tmp_path / "out/mine").mkdir(parents=True)
    with pytest.raises(ValueError, match="is not empty"):
        publish(source, "user/tiny", PublishOptions(dry_run=True), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    done = publish(source, "user/tiny", PublishOptions(dry_run=True), tmp_path / "link")
    assert done.commit is None
    assert done.files["README.md"] == (tmp_path / "empty/README.md").stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {"out", "dap", "empty", "link"}


def saved(folder: Path, kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save a checkpoint that cannot be published."""
    model = tiny_model()
    if kind in ("plain", "dense"):
        model = BertModel(tiny_config("bert", len(tokenizer)))
    elif kind == "classifier":
        model = DAPForSequenceClassification(model.config)
    elif kind == "without heads":
        model = DAPModel(model.config)
    save(folder, model, *([] if kind == "without tokenizer" else [tokenizer]))
    if kind == "dense":
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Dense

        library = SentenceTransformer(str(folder), device="cpu")
        library.append(Dense(32, 32))
        library.save_pretrained(str(folder))
    if kind == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("kind", "own", "says"),
    [
        ("plain", {}, "does not say how it pools"),
        ("plain", {"pooling": "cls", "with_heads": True}, "plain 'bert' checkpoint"),
        ("classifier", {}, "is a classifier"),
        ("without heads", {"with_heads": True}, r"lacks \d+ weights, such as"),
        ("without tokenizer", {}, "tokenizer"),
        ("pickle", {}, "no weights as safetensors"),
        ("dense", {}, "has a Dense module: push it with sentence-transformers"),
        ("whole", {"dataset_info": "absent.md"}, r"absent\.md"),
        ("whole", {"results": ["absent.json"]}, r"absent\.json"),
    ],
)
def test_what_is_refused_leaves_nothing(
    kind: str, own: dict[str, Any], says: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    saved(tmp_path / "dap", kind, tiny_tokenizer)
    with pytest.raises(ValueError, match=says):
        publish(tmp_path / "dap", "user/a", PublishOptions(dry_run=True, **own), tmp_path / "out")
    assert not (tmp_path / "out").exists()  # not even half of it


def test_other_vectors_are_refused() -> None:
    expected = np.eye(3, dtype=np.float32)
    assert require_same_vectors(expected, 2 * expected, "the copy") == 0
    for found in (expected[[1, 0, 2]], np.full((3, 3), np.nan, np.float32)):
        with pytest.raises(ValueError, match=r"the copy|NaN|vectors"):
            require_same_vectors(expected, found, "the copy")
