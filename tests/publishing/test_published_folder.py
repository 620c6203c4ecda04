"""The published folder: every library gives the same vectors, and nothing superfluous is in it."""

import json
from pathlib import Path

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
from dap_transformers.errors import UserError
from dap_transformers.publishing.card import POOLER_SCALE, Sources
from dap_transformers.publishing.hub import fetch_checkpoint
from dap_transformers.publishing.layout import Options, build, build_with_card, write_modules
from modeling_dap import DAPForPreTraining, DAPForSequenceClassification, DAPModel

#: Classes whose pooler has another shape or place, beside those that the other tests have.
POOLERS = ("Bert", "XLMRoberta", "Albert", "BigBird", "MPNet")
LONG = " ".join(target for _, target in synthetic_pairs("fr", 30))
SENTENCES = [source for source, _ in synthetic_pairs("de", 4)] + ["", "ka", LONG]


def dap_checkpoint(
    folder: Path, tokenizer: PreTrainedTokenizerFast, model_type: str = "bert", **config: object
) -> Path:
    model = tiny_model(model_type, **config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return save(folder, model, tokenizer)


def library_vectors(folder: Path, **options: object) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", **options).encode(SENTENCES)


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
    model_type: str, pooling: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = dap_checkpoint(
        tmp_path / "dap", tiny_tokenizer, model_type, pooling=pooling, objective="tr"
    )
    published = build(checkpoint, tmp_path / "out")
    expected = SentenceEncoder.from_pretrained(str(checkpoint)).encode(SENTENCES)
    assert published.pooling == pooling
    np.testing.assert_allclose(library_vectors(tmp_path / "out"), expected, atol=1e-5)
    np.testing.assert_allclose(
        SentenceEncoder.from_pretrained(str(tmp_path / "out")).encode(SENTENCES), expected
    )
    plain = AutoModel.from_pretrained(tmp_path / "out")
    assert published.has_pooler == ("pooler_output" in plain(torch.tensor([[0, 5, 2]])))
    assert published.has_pooler == (model_type in ("bert", "xlm-roberta"))
    assert published.pools_itself == (model_type == "bert")
    assert plain.config.model_type == model_type
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
    for source, options in (
        ("dap", Options(with_heads=True)),
        ("encoder", Options(pooling="mean")),
    ):
        out = tmp_path / f"out-{source}"
        build_with_card(tmp_path / source, out, "user/tiny", options, Sources())
        with safe_open(out / "model.safetensors", framework="pt") as weights:
            names = set(weights.keys())
            scale = POOLER_SCALE if source == "dap" else 0.0
            torch.testing.assert_close(
                weights.get_tensor("pooler.dense.weight"), scale * torch.eye(32)
            )
        unsaved = set(plain.state_dict()) - names
        assert names <= set(plain.state_dict())
        assert unsaved == (set() if source == "dap" else {"pooler.dense.bias"})
        files = [path for path in out.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {".json", ".safetensors", ".py", ".md"}
        for path in files:
            assert str(tmp_path).encode() not in path.read_bytes(), path
        settings = json.loads((out / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not {"max_length", "is_local"} & set(settings)
        content = json.loads((out / "tokenizer.json").read_text())
        assert content["truncation"] is None
        assert content["padding"] is None


def test_the_files_of_sentence_transformers_have_names_that_servers_know(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    build(
        dap_checkpoint(tmp_path / "dap", tiny_tokenizer), tmp_path / "out", Options(normalize=True)
    )
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    kinds = ("Transformer", "Pooling", "Normalize")
    assert [module["type"] for module in modules] == [
        f"sentence_transformers.models.{kind}" for kind in kinds
    ]
    pooling = json.loads((tmp_path / "out/1_Pooling/config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == [
        "pooling_mode_cls_token",
        "include_prompt",
    ]
    assert pooling["word_embedding_dimension"] == 32
    assert (tmp_path / "out/2_Normalize/config.json").exists()
    transformer = json.loads((tmp_path / "out/sentence_bert_config.json").read_text())
    # the ONNX and OpenVINO backends do not accept further arguments
    assert set(transformer) == {"max_seq_length", "do_lower_case"}
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["model_max_length"] == transformer["max_seq_length"] == 64


@pytest.mark.parametrize("name", POOLERS)
def test_pooler_output_is_the_sentence_vector_or_zero_but_never_random(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    config_class = getattr(transformers, f"{name}Config")
    shape = {
        "vocab_size": len(tiny_tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    shape |= {"intermediate_size": 48, "pad_token_id": 1}
    extra = {"attention_type": "original_full", "emb_size": 32, "embedding_size": 32}
    more = {name: value for name, value in extra.items() if hasattr(config_class(), name)}
    model = AutoModel.from_config(config_class(**shape, **more))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data.add_(0.1)
    save(tmp_path / "plain", model, tiny_tokenizer)
    for pooling in ("cls", "mean"):
        out = tmp_path / pooling
        published = build(tmp_path / "plain", out, Options(pooling=pooling))
        batch = AutoTokenizer.from_pretrained(out)(
            SENTENCES, padding=True, truncation=True, return_tensors="pt"
        )
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
        expected = torch.from_numpy(SentenceEncoder.from_pretrained(str(out)).encode(SENTENCES))
        assert float(torch.cosine_similarity(pooled.double(), expected.double()).min()) > 1 - 1e-6
        torch.testing.assert_close(pooled, POOLER_SCALE * expected, rtol=1e-3, atol=1e-6)


def test_write_modules_makes_a_checkpoint_load_in_sentence_transformers(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = tmp_path / "dap"
    save(checkpoint, tiny_model(tr_similarity="dot"), tiny_tokenizer)
    encoder = SentenceEncoder.from_pretrained(str(checkpoint))
    np.testing.assert_allclose(library_vectors(checkpoint), encoder.encode(SENTENCES), atol=1e-5)
    encoder = SentenceEncoder.from_pretrained(str(checkpoint), max_seq_length=9)
    expected = encoder.encode(SENTENCES)
    write_modules(encoder, checkpoint)
    # first with the imported modeling_dap, then with the folder's own code
    for options in ({}, {"trust_remote_code": True}):
        np.testing.assert_allclose(library_vectors(checkpoint, **options), expected, atol=1e-5)
    np.testing.assert_allclose(
        SentenceEncoder.from_pretrained(str(checkpoint)).encode(SENTENCES), expected
    )
    library = json.loads((checkpoint / "config_sentence_transformers.json").read_text())
    assert library == {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "dot"}


def test_write_modules_refuses_an_encoder_of_another_layer(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    save(tmp_path, tiny_model(), tiny_tokenizer)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    with pytest.raises(ValueError, match="layer=1: sentence-transformers pools the last layer"):
        write_modules(SentenceEncoder.from_pretrained(str(tmp_path), layer=1), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == before


def test_publishing_again_keeps_prefix_length_and_normalisation(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    encoder = dap_checkpoint(tmp_path / "dap", tiny_tokenizer, objective="tr")
    options = Options(prefix="kaban: ", max_seq_length=9, normalize=True)
    build(encoder, tmp_path / "first", options)
    again = build(tmp_path / "first", tmp_path / "second")
    assert (again.prefix, again.max_seq_length, again.normalize, again.pooling) == (
        "kaban: ",
        9,
        True,
        "cls",
    )
    model = AutoModel.from_pretrained(encoder)
    expected = []
    for sentence in SENTENCES:
        batch = tiny_tokenizer(
            ["kaban: " + sentence], truncation=True, max_length=9, return_tensors="pt"
        )
        with torch.no_grad():
            vector = model(batch["input_ids"]).pooler_output[0].double()
        expected.append((vector / vector.norm()).numpy())
    from sentence_transformers import SentenceTransformer

    for folder in ("first", "second"):
        np.testing.assert_allclose(
            library_vectors(tmp_path / folder), np.array(expected), atol=1e-5
        )
        library = SentenceTransformer(str(tmp_path / folder), device="cpu")
        for encode in (library.encode_query, library.encode_document):
            np.testing.assert_allclose(encode(SENTENCES), np.array(expected), atol=1e-5)
    build(tmp_path / "first", tmp_path / "bare", Options(prefix=""))
    library = SentenceTransformer(str(tmp_path / "bare"), device="cpu")
    bare = SentenceEncoder.from_pretrained(str(tmp_path / "bare")).encode(SENTENCES)
    bare /= np.linalg.norm(bare, axis=1, keepdims=True)
    for encode in (library.encode, library.encode_query, library.encode_document):
        np.testing.assert_allclose(encode(SENTENCES), bare, atol=1e-5)


def test_heads_load_from_the_subfolder_and_can_be_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model(target_vocab_size=100)
    model.set_target_vocabulary(list(range(50, 150)))
    save(tmp_path / "dap", model, tiny_tokenizer)
    build(tmp_path / "dap", tmp_path / "out", Options(with_heads=True))
    again = AutoModelForPreTraining.from_pretrained(
        tmp_path / "out", subfolder="pretraining"
    ).train()
    assert isinstance(again, DAPForPreTraining)
    assert again(**make_batch()).loss.item() == pytest.approx(
        model(**make_batch()).loss.item(), rel=1e-6
    )
    assert again.prediction_head.token_ids.tolist() == list(range(50, 150))
    config = json.loads((tmp_path / "out/pretraining/config.json").read_text())
    # Transformers looks at the root, and the subfolder also works by itself
    for place in ("out", "out/pretraining"):
        for reference in config["auto_map"].values():
            assert (tmp_path / place / f"{reference.split('.')[0]}.py").exists()
        assert (tmp_path / place / "losses_dap.py").exists()
    alone = AutoModel.from_pretrained(tmp_path / "out/pretraining")
    assert isinstance(alone, DAPModel)


def test_layout_dap_puts_the_whole_checkpoint_at_the_root(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = dap_checkpoint(tmp_path / "dap", tiny_tokenizer, pooling="mean")
    published = build(checkpoint, tmp_path / "out", Options(layout="dap"))
    assert published.heads
    assert isinstance(AutoModelForPreTraining.from_pretrained(tmp_path / "out"), DAPForPreTraining)
    with pytest.raises(ValueError, match="pooling='cls', but .* was trained with 'mean'"):
        build(checkpoint, tmp_path / "other", Options(layout="dap", pooling="cls"))


def test_a_sharded_checkpoint_becomes_one_file(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_model(objective="tr").save_pretrained(tmp_path / "dap", max_shard_size="20KB")
    tiny_tokenizer.save_pretrained(tmp_path / "dap")
    assert len(list((tmp_path / "dap").glob("model-*.safetensors"))) > 1
    build(tmp_path / "dap", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def test_pickles_are_not_read_and_the_remedy_works(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "old"
    model = transformers.XLMRobertaModel(tiny_config("xlm-roberta", len(tiny_tokenizer)))
    save(folder, model.config, tiny_tokenizer)
    with pytest.raises(ValueError, match="holds no weights"):
        build(folder, tmp_path / "out", Options(pooling="cls"))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a pickle was read"))
        with pytest.raises(
            ValueError, match="only as pytorch_model.bin, a pickle.*convert it: python -c"
        ) as error:
            build(folder, tmp_path / "out", Options(pooling="cls"))
    assert not (tmp_path / "out").exists()
    exec(str(error.value).split('python -c "')[1].rstrip('"'), {})
    build(tmp_path / "old-safe", tmp_path / "out", Options(pooling="cls"))
    torch.testing.assert_close(
        AutoModel.from_pretrained(tmp_path / "out").embeddings.state_dict(),
        model.embeddings.state_dict(),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(), "does not say how it pools: give --pooling cls"),
        (
            Options(pooling="cls", with_heads=True),
            "plain 'bert' encoder without DAP heads: leave --with_heads",
        ),
        (Options(layout="flat"), "layout='flat': choose one of plain, dap"),
    ],
)
def test_options_that_do_not_fit_a_plain_encoder_are_refused(
    options: Options, message: str, tmp_path: Path, tiny_bert_dir: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tiny_bert_dir, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (DAPForSequenceClassification, "is a classifier"),
        (DAPModel, r"lacks \d+ weights of its heads"),
        (DAPForPreTraining, "the tokenizer of .* cannot be loaded"),
    ],
)
def test_checkpoints_of_other_heads_or_without_tokenizer_are_refused_and_leave_nothing(
    model_class: type, message: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizers = [] if model_class is DAPForPreTraining else [tiny_tokenizer]
    save(tmp_path / "dap", model_class(tiny_model().config), *tokenizers)
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "dap", tmp_path / "out", Options(with_heads=True))
    assert not (tmp_path / "out").exists()  # not even half of it


def test_a_folder_that_is_not_empty_stays_and_an_empty_one_is_replaced(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "out/mine").mkdir(parents=True)
    with pytest.raises(ValueError, match="is not empty"):
        build(tmp_path / "dap", tmp_path / "out")
    assert (tmp_path / "out/mine").is_dir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    build(dap_checkpoint(tmp_path / "dap", tiny_tokenizer), tmp_path / "link")
    assert (tmp_path / "empty/model.safetensors").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "dap", "empty", "link"}


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        fetch_checkpoint(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pooling": "mean"},
            "tatoeba were measured with pooling='mean', but the model is published with 'cls'",
        ),
        (
            {"max_seq_length": 512},
            "measured with max_seq_length=512, but the model is published with 64",
        ),
    ],
)
def test_results_of_other_vectors_are_refused(
    settings: dict[str, object],
    message: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    checkpoint = dap_checkpoint(tmp_path / "dap", tiny_tokenizer)
    settings = {"pooling": "cls", "prefix": "", "data": ["tatoeba"], **settings}
    report = {"model": "out", "protocol": "retrieval", "settings": settings}
    with pytest.raises(ValueError, match=message):
        build_with_card(
            checkpoint, tmp_path / "out", "user/tiny", Options(), Sources(reports=[report])
        )


def test_two_results_on_the_same_data_are_refused(tmp_path: Path) -> None:
    settings = {"pooling": "cls", "prefix": "", "data": ["tatoeba"]}
    report = {"protocol": "retrieval", "settings": settings, "languages": {"de": {"xx-en": 60.0}}}
    other = {**report, "languages": {"fr": {"xx-en": 70.0}, "de": {"xx-en": 70.0}}}
    with pytest.raises(
        ValueError, match="two reports give tatoeba, de, accuracy xx→en: give one of them"
    ):
        build_with_card(
            tmp_path, tmp_path / "out", "user/tiny", Options(), Sources(reports=[report, other])
        )
    assert not (tmp_path / "out").exists()


def test_a_list_of_extra_tokens_has_the_name_that_transformers_4_knows(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = dap_checkpoint(tmp_path / "dap", tiny_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    tokenizer.save_pretrained(checkpoint)
    build(checkpoint, tmp_path / "out")
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert not isinstance(settings.get("extra_special_tokens"), list)
    assert settings["additional_special_tokens"] == ["<de>"]
    assert "<de>" in AutoTokenizer.from_pretrained(tmp_path / "out").all_special_tokens


def test_a_tokenizer_with_a_value_that_json_does_not_have_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = dap_checkpoint(tmp_path / "dap", tiny_tokenizer)
    file = checkpoint / "tokenizer_config.json"
    file.write_text(file.read_text().replace("{", '{"odd": NaN,', 1))
    with pytest.raises(UserError, match="the tokenizer of .*dap: .*it holds NaN"):
        build(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_publishing_again_keeps_similarity_and_prompts(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    build(dap_checkpoint(tmp_path / "dap", tiny_tokenizer, tr_similarity="dot"), tmp_path / "first")
    path = tmp_path / "first/config_sentence_transformers.json"
    prompts = {"query": "kaban: ", "passage": "loder: "}
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"prompts": prompts, "default_prompt_name": "passage"}
        )
    )
    build(tmp_path / "first", tmp_path / "second")
    again = json.loads((tmp_path / "second/config_sentence_transformers.json").read_text())
    prompts["document"] = "loder: "  # encode_document needs a prompt of this name
    assert again == {
        "prompts": prompts,
        "default_prompt_name": "passage",
        "similarity_fn_name": "dot",
    }
