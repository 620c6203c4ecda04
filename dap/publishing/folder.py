"""A checkpoint as the folder that is published.

At the root lies what every library loads without code of ours: the plain backbone, its tokenizer and the files of
sentence-transformers under their legacy names. `pretraining/` holds the whole DAP checkpoint, if it is wanted.
Shapes: `N` sentences, `D` hidden size.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

import configuration_dap
from configuration_dap import CHOICES, DAPConfig
from dap.arguments import arg
from dap.encoding import (
    LibraryEncoder,
    LibrarySettings,
    SentenceEncoder,
    library_settings,
    load_complete,
    load_encoder,
    longest_input,
)
from dap.errors import UserError, loading
from dap.file_io import read_json, write_json
from dap.publishing.card_results import dataset_name, require_different
from dap.publishing.hub import upload
from dap.publishing.model_card import (
    HEADS_FOLDER,
    POOLER_SCALE,
    Published,
    Sources,
    model_card,
    read_sources,
)
from dap.tokenizers import forget_calls, require_padding
from modeling_dap import DAPForPreTraining, save_modules

LAYOUTS = ("plain", "dap")
UNFINISHED = ".unfinished"  # folder of what is being written
#: The probe covers scripts, a single letter, and more tokens than any maximum length that is usual.
PROBE = (
    "Guten Morgen!",
    "Доброе утро, мир.",
    "我喜欢喝茶。",
    "a",
    "one two three four five six seven " * 100,
)
#: What loading and encoding leave in a tokenizer_config.json: paths, and the lengths of training.
LEFT_BY_USE = (
    "is_local",
    "local_files_only",
    "name_or_path",
    "max_length",
    "stride",
    "truncation_strategy",
)
TOLERANCE = 1e-5  # of the largest value of a vector
POOLER_TOLERANCE = 1e-6  # of the cosine to it


@dataclass(frozen=True)
class Options:
    """How a checkpoint is published."""

    layout: str = arg(
        "plain", "plain, or dap: the whole DAP checkpoint at the root.", choices=LAYOUTS
    )
    with_heads: bool = arg(False, "Add the whole DAP checkpoint in pretraining/.")
    pooling: str | None = arg(
        None, "How a plain encoder pools. Default: as it says.", choices=CHOICES["pooling"]
    )
    prefix: str | None = arg(None, "Text before every sentence. Default: as it says.")
    max_seq_length: int | None = arg(None, "Tokens a sentence. Default: 128, or its own.")
    normalize: bool = arg(False, "sentence-transformers gives vectors of length 1.")
    trust_remote_code: bool = arg(False, "Run the code that a plain encoder carries.")


def require_safetensors(folder: Path) -> None:
    """Raise `ValueError` unless the folder has weights as safetensors: pickles can run code, and are not read."""
    with loading("modules.json", folder):
        modules = _read(folder / "modules.json") or [{"path": ""}]
        place = (
            folder / modules[0]["path"]
        )  # sentence-transformers may keep the encoder in a subfolder
    if any(place.glob("model*.safetensors")):
        return
    pickles = sorted(
        path.name for path in place.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if not pickles:
        raise UserError(
            f"{place} holds no weights as safetensors (model*.safetensors); others are not read."
        )
    raise UserError(
        f"{place} has its weights only as {pickles[0]}, a pickle, which is not read. Where you trust it, convert it: "
        f"python -c \"from transformers import AutoModel, AutoTokenizer; a, b = '{place}', '{place}-safe'; "
        'AutoModel.from_pretrained(a).save_pretrained(b); AutoTokenizer.from_pretrained(a).save_pretrained(b)"'
    )


def build(checkpoint: Path, folder: Path, options: Options | None = None) -> Published:
    """Write the published layout of a checkpoint into an empty folder, and compare both on a few sentences.

    Raises:
        ValueError: no safetensors, an unknown layout, heads that are not there, a folder that is not empty, a
            checkpoint that does not give sentence vectors, or vectors that differ after all.
    """
    options = options or Options()
    if options.layout not in LAYOUTS:
        raise UserError(f"layout={options.layout!r}: choose one of {', '.join(LAYOUTS)}.")
    with _whole_or_nothing(folder) as new:
        require_safetensors(checkpoint)
        encoder = _load(checkpoint, options)
        published = _describe(encoder, checkpoint, options)
        if published.layout == "dap":
            write_pretraining(checkpoint, new)
        else:
            write_backbone(encoder.backbone, published.pooling, new)
            if published.heads:
                model = write_pretraining(checkpoint, new / HEADS_FOLDER)
                own = encoder.tokenizer.model_max_length
                save_tokenizer(
                    encoder.tokenizer, min(own, longest_input(model) or own), new / HEADS_FOLDER
                )
                custom_object_save(
                    model, new
                )  # Transformers looks for code at the root, whatever the subfolder
        save_tokenizer(encoder.tokenizer, published.max_seq_length, new)
        write_modules(encoder, new, published.normalize, published.similarity, published.prompts)
        _require_same_vectors(encoder, published, new)
    return published


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A place to write within a folder, whose content moves up when the block ends without an error, and else goes.

    What a kill has left there goes first; raises `UserError` where the folder holds anything else.
    """
    new = folder / UNFINISHED
    if folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {new}):
        raise UserError(f"{folder} is not empty: give another folder, or remove it.")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for path in new.iterdir():
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with suppress(OSError):  # a folder that holds something
            folder.rmdir()


def write(
    checkpoint: Path, folder: Path, repo_id: str, options: Options, sources: Sources
) -> Published:
    """`build`, and the model card as README.md."""
    require_different(sources.reports)
    with _whole_or_nothing(folder) as new:
        published = build(checkpoint, new, options)
        for report in sources.reports:
            _require_same_making(report, published)
        model_card(repo_id, published, sources).save(new / "README.md")
    return published


def publish(checkpoint: str | Path, repo_id: str, options: Options, **to: Any) -> str:
    """Write a checkpoint's layout and card into a temporary folder and `upload` it (`to`); gives the commit's id."""
    with tempfile.TemporaryDirectory(prefix="dap-hub-") as folder:
        write(Path(checkpoint), Path(folder), repo_id, options, read_sources(Path(checkpoint)))
        return upload(Path(folder), repo_id, **to)


def _require_same_making(report: dict[str, Any], published: Published) -> None:
    """Raise `ValueError` where numbers belong to vectors that are made in another way than the published ones."""
    settings = report.get("settings", {})
    names = ["pooling", "prefix"] + ["max_seq_length"] * (
        "prefix" in settings
    )  # else that of a fine-tuned pair
    for name in names:
        ours = getattr(published, name)
        if name in settings and settings[name] != ours:
            raise UserError(
                f"results on {dataset_name(report)} were measured with {name}={settings[name]!r}, the model is "
                f"published with {ours!r}: evaluate it so, or give --{name}."
            )


def _load(checkpoint: Path, options: Options) -> SentenceEncoder:
    with loading("configuration", checkpoint):
        _require_publishable(checkpoint, _read(checkpoint / "config.json"), options)
    encoder = load_encoder(
        str(checkpoint),
        pooling=options.pooling,
        prefix=options.prefix,
        max_seq_length=options.max_seq_length,
        trust_remote_code=options.trust_remote_code,
    )
    if isinstance(encoder, LibraryEncoder):
        raise UserError(
            f"{checkpoint} has sentence-transformers modules of its own: push it with that library."
        )
    require_padding(encoder.tokenizer, checkpoint)  # other libraries need it
    encoder.model.to("cpu")
    own = getattr(encoder.model.config, "pooling", None)
    if options.layout == "dap" and encoder.pooling != own:
        raise UserError(
            f"pooling={encoder.pooling!r}, but {checkpoint} was trained with {own!r}: leave it out."
        )
    return encoder


def _require_publishable(checkpoint: Path, config: dict[str, Any], options: Options) -> None:
    if "DAPForSequenceClassification" in config.get("architectures", []):
        raise UserError(
            f"{checkpoint} is a classifier: publish the checkpoint that it was fine-tuned from, or push this one with "
            "its own push_to_hub method."
        )
    if config.get("model_type") == DAPConfig.model_type:
        return
    if options.with_heads or options.layout == "dap":
        raise UserError(
            f"{checkpoint} is a plain {config.get('model_type')!r} encoder without DAP heads: leave --with_heads and "
            "--layout dap out."
        )
    if options.pooling is None and not (checkpoint / "modules.json").exists():
        raise UserError(
            f"{checkpoint} does not say how it pools: give --pooling cls or --pooling mean."
        )


def _describe(encoder: SentenceEncoder, checkpoint: Path, options: Options) -> Published:
    config = encoder.model.config
    is_dap = config.model_type == DAPConfig.model_type
    library = library_settings(str(checkpoint), None) or LibrarySettings()
    backbone = encoder.backbone
    return Published(
        layout=options.layout,
        heads=options.with_heads or options.layout == "dap",
        model_type=backbone.config.model_type,
        layers=backbone.config.num_hidden_layers,
        hidden_size=encoder.hidden_size,
        pooling=encoder.pooling,
        prefix=encoder.prefix,
        max_seq_length=encoder.max_seq_length,
        normalize=options.normalize or library.normalize,
        similarity=config.tr_similarity if is_dap else library.similarity or "cosine",
        has_pooler=hasattr(backbone, "pooler"),
        prompts=library.prompts if options.prefix is None else {},
    )


def write_backbone(backbone: PreTrainedModel, pooling: str, folder: Path) -> None:
    """Save the plain encoder, with a pooler of fixed weights where `AutoModel` would add one of random weights.

    A pooler is tanh(W x + b) of the first token's state x. For "cls" W is `POOLER_SCALE` times the identity and b is
    0, so that `pooler_output` is the sentence vector times that scale. The mean of the tokens cannot be had from it:
    for "mean" both are 0, as is then `pooler_output`, which nobody takes for a vector.
    """
    if not type(backbone).__module__.startswith("transformers."):
        raise UserError(
            f"{type(backbone).__name__} needs code of its own to be loaded: no plain layout is possible."
        )
    if hasattr(backbone, "pooler"):
        with torch.device("meta"):  # for its shape alone
            plain = AutoModel.from_config(backbone.config)
        backbone.pooler = plain.pooler.to_empty(device="cpu")
        for parameter in backbone.pooler.parameters():
            nn.init.zeros_(parameter)
            if pooling == "cls" and parameter.dim() == 2:
                parameter.data.fill_diagonal_(POOLER_SCALE)
    if longest_input(backbone) is not None:
        backbone.config.position_embedding_type = (
            "absolute"  # Transformers 5 leaves it out, vLLM asks XLM-R for it
        )
    backbone.save_pretrained(folder)
    _scrub(folder / "config.json")


def write_pretraining(checkpoint: Path, folder: Path) -> DAPForPreTraining:
    """Save the DAP checkpoint, the whole `auto_map` and its code; raises `ValueError` where heads are missing."""
    model = load_complete(checkpoint, DAPForPreTraining)
    model.config.auto_map = dict(configuration_dap.AUTO_MAP)
    model.save_pretrained(folder)
    _scrub(folder / "config.json")
    return model


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, max_length: int, folder: Path) -> None:
    """Save a tokenizer so that Transformers 4 and 5 load it and cut there, without what encoding left in it."""
    tokenizer.model_max_length = max_length
    forget_calls(tokenizer)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {key: value for key, value in _read(path).items() if key not in LEFT_BY_USE}
    if isinstance(
        config.get("extra_special_tokens"), list
    ):  # of which Transformers 4 expects a mapping
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if (
        config.get("tokenizer_class") == "TokenizersBackend"
    ):  # a name that only Transformers 5 knows
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(config, path)


def _scrub(path: Path) -> None:
    """Take the path of the local folder that training began with out of a config.json."""
    config = _read(path)
    for part in (config, config.get("encoder_config", {})):
        part.pop("_name_or_path", None)
    write_json(config, path)


def write_modules(
    encoder: SentenceEncoder,
    folder: Path,
    normalize: bool = False,
    similarity: str | None = None,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write what makes `SentenceTransformer(folder)` give the encoder's vectors, beside a saved model and tokenizer.

    It needs `trust_remote_code=True`, or modeling_dap imported, for a DAP model.

    Args:
        normalize: the library gives vectors of length 1.
        similarity: "cosine" or "dot"; None: a DAP model's own, else "cosine".
        prompts: of the library, by name, beside the encoder's prefix.

    Raises:
        ValueError: the encoder pools another layer than the last.
    """
    if encoder.layer is not None:
        raise UserError(
            f"layer={encoder.layer}: sentence-transformers pools the last layer; leave layer out"
        )
    save_modules(folder, encoder.pooling, encoder.hidden_size, normalize)
    cut = {"max_seq_length": encoder.max_seq_length, "do_lower_case": False}
    write_json(cut, folder / "sentence_bert_config.json")
    prefix, prompts = encoder.prefix, dict(prompts or {})
    default = next((name for name, text in prompts.items() if text == prefix), "text")
    if prefix:  # encode_query and encode_document put nothing before a sentence unless prompts of theirs are there
        prompts = {default: prefix, "query": prefix, "document": prefix} | prompts
    library = {"prompts": prompts, "default_prompt_name": default if prefix else None}
    similarity = similarity or getattr(encoder.model.config, "tr_similarity", "cosine")
    write_json(
        library | {"similarity_fn_name": similarity}, folder / "config_sentence_transformers.json"
    )


def _require_same_vectors(encoder: SentenceEncoder, published: Published, folder: Path) -> None:
    before = encoder.encode(PROBE)  # (N, D)
    again = SentenceEncoder.from_pretrained(str(folder), device="cpu")
    difference = float(np.abs(before - again.encode(PROBE)).max() / np.abs(before).max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"what is published gives other vectors than the checkpoint, by {difference:.1e}: not pushed."
        )
    if published.pools_itself:
        texts = [again.prefix + text for text in PROBE]
        batch = again.tokenizer(
            texts, padding=True, truncation=True, return_tensors="pt"
        )  # cut by model_max_length
        with torch.no_grad():
            pooled = again.model(**batch).pooler_output  # (N, D)
        away = 1 - float(
            cosine_similarity(torch.from_numpy(before).double(), pooled.double()).min()
        )
        if not away <= POOLER_TOLERANCE:
            raise UserError(
                f"pooler_output is not the sentence vector, by {away:.1e} in cosine: not pushed."
            )


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else {}
