"""Every kind of sentence-transformers model encodes, trains and is published.

The folders are made with sentence-transformers itself, from tiny models with random weights.
"""

import copy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import (
    load_encoder,
    load_library,
    run,
    save,
    synthetic_pairs,
    tiny_config,
    tiny_tokenizer,
)
from damaged_files import damage
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_models import start_from
from tokenizers import processors
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from dap_transformers.dap_loss import DAPLoss
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.publishing.layout import build
from encoder_dap import auto_class
from modules_dap import pooling_mode


class Kind(NamedTuple):
    """A sentence-transformers model.

    Attributes:
        model_type: type of its encoder.
        pooling: its pooling.
        sizes: sizes of its Dense layers.
        normalize: whether its vectors have length 1.
        template: where its special tokens are.
    """

    model_type: str
    pooling: str = "mean"
    sizes: tuple[int, ...] = ()
    normalize: bool = False
    template: str = "<s> $A </s>"


KINDS = {
    "bert": Kind("bert", "cls"),
    "xlm-roberta": Kind("xlm-roberta", normalize=True),
    "labse": Kind("bert", "cls", (12,), normalize=True),
    "modernbert": Kind("modernbert"),
    "deberta-v2": Kind("deberta-v2"),
    "eurobert": Kind("eurobert"),
    "nomic-bert": Kind("nomic_bert", normalize=True),
    "gte": Kind("gte", "cls"),
    "t5": Kind("t5", sizes=(12,), normalize=True, template="$A </s>"),
    "qwen3": Kind("qwen3", "lasttoken", normalize=True, template="$A </s>"),
    "gemma": Kind("gemma3_text", sizes=(24, 12), normalize=True),
    "mistral": Kind("mistral", "lasttoken", template="<s> $A"),
    "llama": Kind("llama", template="<s> $A"),
}
#: Only queries get a prompt, as of E5 and Qwen3.
PROMPTS = {"query": "lo: ", "document": ""}
TEXT = ["kaban lofin", "de 1", "a", "migol pusut raban neder kafin logol", "Ünïcode, ok?"]


def tokenizer_for(template: str, side: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.padding_side = side
    return tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Return a function that makes the folder of a kind with sentence-transformers, once."""

    @cache
    def make(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        model_type, pooling, sizes, normalize, template = KINDS[kind]
        torch.manual_seed(0)
        config = tiny_config(model_type)
        backbone = auto_class(config).from_config(config)
        for parameter in backbone.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        backbone.save_pretrained(place / "plain")
        side = "left" if pooling == "lasttoken" else "right"
        tokenizer_for(template, side).save_pretrained(place / "plain")

        modules = [Transformer(str(place / "plain"), max_seq_length=32), Pooling(32, pooling)]
        width = 32
        for size in sizes:
            modules.append(Dense(width, size, bias=size != 24))
            width = size
        if normalize:
            modules.append(Normalize())
        model = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS)
        model.save(str(place / "folder"))
        return place / "folder"

    return make


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Vectors are equal in direction and length."""
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_loss_are_those_of_the_library(kind: str, folders: Callable) -> None:
    folder = folders(kind)
    library = load_library(folder)
    encoder = load_encoder(folder)
    same(encoder.encode(TEXT), library.encode(TEXT))

    # TR without dropout is the library's ranking loss.
    features = [library.preprocess([*side]) for side in zip(*synthetic_pairs("de", 8))]
    theirs = losses.MultipleNegativesRankingLoss(library)
    expected = theirs(copy.deepcopy(features), None)
    model = start_from(folder, objective="tr").eval()
    inputs = {}
    for name, tokens in zip(("source", "target"), features):
        inputs[f"{name}_input_ids"] = tokens["input_ids"]
        inputs[f"{name}_attention_mask"] = tokens["attention_mask"]
    own = model(**inputs).loss
    of_library = sum(DAPLoss(library, model)(features, None).values())  # with the library's encoder
    for loss in (own, of_library):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)

    half = SentenceEncoder(model.to(torch.bfloat16), encoder.tokenizer).encode(TEXT)
    cosines = np.diag(encoder.similarity(half, encoder.encode(TEXT)))
    assert cosines[np.abs(half).sum(1) > 0].min() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_and_is_published(
    kind: str, folders: Callable, short_bitext_dir: Path, tmp_path: Path
) -> None:
    start, out, hub = folders(kind), tmp_path / "out", tmp_path / "hub"
    objective = "tr+bow" if kind == "t5" else "tr+bow+rtl"
    run(
        f"--model_name_or_path {start} --output_dir {out} --train_data {short_bitext_dir} "
        f"--max_steps 2 --head_steps 2 --objective {objective} --rtl_layers 1 --peft_lora_rank 2 "
        "--mini_batch_size 4 --gradient_checkpointing true --per_device_train_batch_size 8 "
        "--learning_rate 1e-2 --dev_pairs 0 --report_to none --load_best_model_at_end false"
    )
    trained = load_encoder(out)
    assert np.abs(trained.encode(TEXT) - load_encoder(start).encode(TEXT)).max() > 1e-4

    library = load_library(out, trust_remote_code=True)
    same(trained.encode(TEXT), library.encode(TEXT))
    query = trained.for_task("query")
    assert query.prefix == PROMPTS["query"]
    same(query.encode(TEXT), library.encode_query(TEXT))

    build(out, hub)
    for published in (load_library(hub), load_encoder(hub)):
        same(published.encode(TEXT), trained.encode(TEXT))


# Settings in the JSON files of a folder


@pytest.fixture
def with_setting(folders: Callable, tmp_path: Path) -> Callable:
    """Return a function that copies the folder of a kind, with a setting in one of its files."""

    def copy_of(kind: str, file: str, setting: Any) -> Path:
        folder = shutil.copytree(folders(kind), tmp_path / "folder")
        damage(folder, file, setting)
        return folder

    return copy_of


TRANSFORMER = "sentence_bert_config.json"
LENGTHS = [
    {"processing_kwargs": {"text": {"max_length": 4}}},
    {"processor_kwargs": {"model_max_length": 4}},
    {"tokenizer_args": {"model_max_length": 4}},
    None,
]


@pytest.mark.parametrize("setting", LENGTHS, ids=str)
def test_a_length_has_its_effect(setting: dict | None, with_setting: Callable) -> None:
    folder = with_setting("qwen3", TRANSFORMER, setting)
    if setting is None:  # a file of an older name
        (folder / "sentence_xlm-roberta_config.json").write_text('{"max_seq_length": 4}')
    encoder = load_encoder(folder)
    same(encoder.encode(TEXT), load_library(folder).encode(TEXT))
    assert encoder.max_seq_length == 4


def test_a_length_above_the_table_of_positions_is_lowered(with_setting: Callable) -> None:
    folder = with_setting("bert", TRANSFORMER, {"max_seq_length": 82})
    assert load_encoder(folder).max_seq_length == 80


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("config.json", {"dtype": "bfloat16"}),
        (TRANSFORMER, {"model_kwargs": {"torch_dtype": "bfloat16"}}),
    ],
)
def test_another_precision_is_named(
    file: str, setting: dict, with_setting: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_setting("gemma", file, setting)
    for _ in range(2):
        encoder = load_encoder(folder)
    assert caplog.text.count("bfloat16") == 1
    model = start_from(folder, objective="tr")  # has Gemma's scale of embeddings in float32
    same(SentenceEncoder(model.dap, encoder.tokenizer).encode(TEXT), encoder.encode(TEXT))


POOLING = "1_Pooling/config.json"
NORMALIZE = "3_Normalize/config.json"
CNN = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("CNN", "Pooling")]


@pytest.mark.parametrize(
    ("file", "setting", "says"),
    [
        (
            TRANSFORMER,
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "add_special",
        ),
        (TRANSFORMER, {"config_args": {"is_causal": False}}, "is_causal"),
        (TRANSFORMER, {"do_lower_case": True}, "do_lower_case"),
        (TRANSFORMER, {"new_setting": 1}, "new_setting"),
        ("config_sentence_transformers.json", {"truncate_dim": 4}, "truncate_dim"),
        (POOLING, {"pooling_mode": ["cls", "mean"]}, "cannot run here"),
        (POOLING, {"include_prompt": False}, "include_prompt=False"),
        # Only code of torch runs.
        (
            "2_Dense/config.json",
            {"activation_function": "os.system"},
            "os.system is not an activation",
        ),
        (NORMALIZE, {"module_input_name": "tokens"}, "module_input_name"),
        (NORMALIZE, {"module_output_name": "tokens"}, "module_output_name"),
        ("modules.json", CNN, "cannot run here"),
    ],
)
def test_a_setting_without_effect_is_refused_by_its_name(
    file: str, setting: dict | list, says: str, with_setting: Callable
) -> None:
    folder = with_setting("labse", file, setting)
    for start in (load_encoder, start_from):
        with pytest.raises(ValueError, match=says):
            start(folder)


def test_the_flags_of_an_old_folder_name_every_pooling_mode() -> None:
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    assert pooling_mode(flags) == "mean+max_tokens"


@pytest.mark.parametrize("kind", ["xlm-roberta", "qwen3"])
def test_an_adapter_is_added_to_its_base_or_refused_without_peft(
    kind: str, folders: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_library(folders(kind))
    library.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    folder = tmp_path / "adapter"
    library.save(str(folder))
    assert not (folder / "model.safetensors").exists()

    expected = load_library(folder).encode(TEXT)
    same(load_encoder(folder).encode(TEXT), expected)
    model = start_from(folder, objective="tr")
    same(SentenceEncoder(model.dap, library.tokenizer).encode(TEXT), expected)
    build(folder, tmp_path / "published")
    same(load_library(tmp_path / "published").encode(TEXT), expected)

    monkeypatch.setattr("encoder_dap.is_peft_available", lambda: False)
    with pytest.raises(ValueError, match="peft"):
        load_encoder(folder)


def test_an_adapter_of_a_model_with_a_head_fits_its_encoder(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", AutoModelForMaskedLM.from_config(tiny_config("bert")))
    base = SentenceTransformer(modules=[Transformer(str(plain)), Pooling(32, "cls")], device="cpu")
    base.save(str(tmp_path / "base"))
    model = AutoModelForMaskedLM.from_pretrained(plain)
    options = LoraConfig(
        r=2,
        target_modules=["query"],
        alpha_pattern={"bert.encoder.layer.0.attention.self.query": 64},
        modules_to_save=["cls"],
        init_lora_weights=False,
    )
    adapted = get_peft_model(model, options)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    folder = save(tmp_path / "adapter", adapted)

    expected = SentenceEncoder(adapted.merge_and_unload().bert, base.tokenizer, pooling="cls")
    encoder = load_encoder(folder)
    same(encoder.encode(TEXT), expected.encode(TEXT))  # it pools as its base
    assert not encoder.model.get_input_embeddings()._forward_hooks
    assert start_from(folder, objective="tr").config.pooling == "cls"

    weights = load_file(folder / "adapter_model.safetensors")
    weights[min(weights).replace("query", "key")] = weights.pop(min(weights))
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="2 weights of the adapter are missing or fit no layer"):
        load_encoder(folder)


def test_a_plain_folder_pools_as_the_library_does(
    folders: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, pooling in (("bert", "mean"), ("qwen3", "lasttoken"), ("gemma", "mean")):
        plain = folders(kind).parent / "plain"
        assert load_encoder(plain).pooling == pooling
        assert f"using '{pooling}'" in caplog.text
        assert start_from(plain, objective="tr").config.pooling == pooling


def test_only_the_configuration_of_a_dap_model_says_how_it_pools(with_setting: Callable) -> None:
    folder = with_setting("mistral", "config.json", {"pooling": "mean"})  # means something else
    same(load_encoder(folder).encode(TEXT), load_library(folder).encode(TEXT))
    assert start_from(folder, objective="tr").config.pooling == "lasttoken"
