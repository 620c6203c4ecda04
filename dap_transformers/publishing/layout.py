"""Turn a checkpoint into the folder that is published.

The root holds files that every library loads without our code: the plain encoder, its tokenizer,
and the files of sentence-transformers. With `--with_heads`, `pretraining/` holds the whole DAP
checkpoint.

Shapes: `N` sentences, `D` hidden size.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

import configuration_dap
from configuration_dap import DAPConfig
from dap_transformers.commands.arguments import arg
from dap_transformers.encoding.encoder import LibraryEncoder, SentenceEncoder, load_encoder
from dap_transformers.encoding.load import (
    LibrarySettings,
    library_settings,
    load_complete,
    longest_input,
)
from dap_transformers.errors import UserError, loading, refusals
from dap_transformers.files import read_json, read_object, whole_folder, write_json
from dap_transformers.publishing.card import (
    HEADS_FOLDER,
    POOLER_SCALE,
    Published,
    Sources,
    model_card,
    read_sources,
)
from dap_transformers.publishing.card_results import dataset_name, require_different
from dap_transformers.publishing.hub import upload
from dap_transformers.publishing.same_vectors import PROBE, require_same_vectors
from dap_transformers.tokenizers import forget_calls, require_padding
from modeling_dap import DAPForPreTraining, save_modules
from states_dap import POOLINGS

LAYOUTS = ("plain", "dap")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
#: Entries that loading and encoding leave in a tokenizer_config.json: paths and lengths of
#: training.
LEFT_BY_USE = (
    "is_local",
    "local_files_only",
    "name_or_path",
    "max_length",
    "stride",
    "truncation_strategy",
)
#: Largest allowed difference from 1 of the cosine between `pooler_output` and the sentence vector.
POOLER_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Options:
    """Options of publishing: which layout is written, and how the model pools and cuts sentences.

    The help text of each field says what it does. None takes the checkpoint's own setting.
    """

    layout: str = arg(
        "plain",
        "plain: an encoder that needs no code of ours. dap: the whole DAP checkpoint at the root.",
        choices=LAYOUTS,
    )
    with_heads: bool = arg(False, "Add the whole DAP checkpoint in pretraining/.")
    pooling: str | None = arg(
        None, "How to pool a plain encoder. Default: the checkpoint's.", choices=tuple(POOLINGS)
    )
    prefix: str | None = arg(None, "Text before every sentence. Default: the checkpoint's.")
    max_seq_length: int | None = arg(
        None, "Maximum tokens per sentence. Default: the checkpoint's, or 128."
    )
    normalize: bool = arg(False, "Make sentence-transformers return vectors of length 1.")
    trust_remote_code: bool = arg(False, "Run code that comes with a plain encoder.")


def build(checkpoint: Path, folder: Path, options: Options | None = None) -> Published:
    """Write the published layout of a checkpoint, and compare its vectors with the checkpoint's.

    There is no model card (`build_with_card` adds one).

    Args:
        checkpoint: folder of a checkpoint.
        folder: a new or empty folder. It is written whole or not at all.
        options: how to publish. None takes the defaults.

    Returns:
        What the folder holds.
    """
    with _new_folder(folder) as new:
        return _write_model(checkpoint, new, options or Options())


def build_with_card(
    checkpoint: Path, folder: Path, repo_id: str, options: Options, sources: Sources
) -> Published:
    """Write the published layout as `build` does, with the model card as README.md.

    Args:
        checkpoint: folder of a checkpoint.
        folder: a new or empty folder. It is written whole or not at all.
        repo_id: id of the model on the Hub, for the card.
        options: how to publish.
        sources: what the card shows (`read_sources`).

    Returns:
        What the folder holds.
    """
    require_different(sources.reports)
    with _new_folder(folder) as new:
        published = _write_model(checkpoint, new, options)
        for report in sources.reports:
            _require_same_encoding(report, published)
        model_card(repo_id, published, sources).save(new / "README.md")
    return published


def publish(checkpoint: str | Path, repo_id: str, options: Options, **to: Any) -> str:
    """Write a checkpoint's layout and card into a temporary folder, and push it to the Hub.

    Args:
        checkpoint: folder of a checkpoint.
        repo_id: id of the Hub repository.
        options: how to publish.
        **to: other arguments of `upload`, such as `private`.

    Returns:
        The id of the commit.
    """
    checkpoint = Path(checkpoint)
    # Windows cannot remove a file of weights that is still mapped into memory.
    with tempfile.TemporaryDirectory(prefix="dap-hub-", ignore_cleanup_errors=True) as place:
        folder = Path(place, "hub")
        build_with_card(checkpoint, folder, repo_id, options, read_sources(checkpoint))
        return upload(folder, repo_id, **to)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which takes its name only if the block ends without an error."""
    folder = Path(os.path.realpath(folder))  # a symbolic link stays one
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty: give another folder, or remove it")
    with whole_folder(folder) as new:
        yield new
    if not any(folder.iterdir()):
        raise UserError(f"{folder} cannot be replaced, as it is in use: give a folder inside it")


def _write_model(checkpoint: Path, folder: Path, options: Options) -> Published:
    """Write the published layout of a checkpoint, and compare its vectors with the checkpoint's.

    Returns:
        What the folder holds.
    """
    if options.layout not in LAYOUTS:
        raise UserError(f"layout={options.layout!r}: choose one of {', '.join(LAYOUTS)}")
    require_safetensors(checkpoint)
    encoder = _load_encoder(checkpoint, options)
    published = _describe(encoder, checkpoint, options)

    if published.layout == "dap":
        write_pretraining(checkpoint, folder)
    else:
        write_backbone(encoder.backbone, published.pooling, folder)
    if published.layout == "plain" and published.heads:
        heads_folder = folder / HEADS_FOLDER
        model = write_pretraining(checkpoint, heads_folder)
        own_length = encoder.tokenizer.model_max_length
        length = min(own_length, longest_input(model) or own_length)
        save_tokenizer(encoder.tokenizer, length, heads_folder)
        custom_object_save(model, folder)  # Transformers looks for the code at the root

    save_tokenizer(encoder.tokenizer, published.max_seq_length, folder)
    write_modules(encoder, folder, published.normalize, published.similarity, published.prompts)
    _check_vectors(encoder, published, folder)
    return published


def require_safetensors(folder: Path) -> None:
    """Raise `UserError` unless a checkpoint's folder has weights as safetensors.

    Pickles are never read, because a pickle can run any code when it is loaded. If there are only
    pickles, the message says how to convert them. In a sentence-transformers folder, the weights
    may be in a subfolder.
    """
    place = folder
    modules = folder / "modules.json"
    if modules.is_file():  # sentence-transformers may keep the encoder in a subfolder
        with loading("modules.json", folder):
            place = folder / read_json(modules)[0]["path"]
    if any(place.glob("model*.safetensors")):
        return

    pickles = sorted(path.name for path in place.glob("*") if path.suffix in PICKLES)
    if not pickles:
        raise UserError(f"{place} holds no weights as safetensors (model*.safetensors)")
    raise UserError(
        f"{place} has its weights only as {pickles[0]}, a pickle, which is not read. If you trust "
        "it, convert it: "
        f"python -c \"from transformers import AutoModel, AutoTokenizer; a, b = '{place}', "
        f"'{place}-safe'; AutoModel.from_pretrained(a).save_pretrained(b); "
        'AutoTokenizer.from_pretrained(a).save_pretrained(b)"'
    )


def _load_encoder(checkpoint: Path, options: Options) -> SentenceEncoder:
    """Load the encoder of a checkpoint on the CPU, and check that it can be published."""
    config_file = checkpoint / "config.json"
    with loading("configuration", checkpoint):
        config = read_object(config_file) if config_file.is_file() else {}
        _require_publishable(checkpoint, config, options)
    encoder = load_encoder(
        str(checkpoint),
        pooling=options.pooling,
        prefix=options.prefix,
        max_seq_length=options.max_seq_length,
        trust_remote_code=options.trust_remote_code,
    )
    if isinstance(encoder, LibraryEncoder):
        raise UserError(
            f"{checkpoint} has sentence-transformers modules that we cannot write: push it with "
            "sentence-transformers"
        )
    require_padding(encoder.tokenizer, checkpoint)  # other libraries need a padding token
    encoder.model.to("cpu")

    trained_pooling = getattr(encoder.model.config, "pooling", None)
    if options.layout == "dap" and encoder.pooling != trained_pooling:
        raise UserError(
            f"pooling={encoder.pooling!r}, but {checkpoint} was trained with {trained_pooling!r}: "
            "leave it out"
        )
    return encoder


def _require_publishable(checkpoint: Path, config: Mapping[str, Any], options: Options) -> None:
    """Raise `UserError` for a classifier, or for options that do not fit a plain encoder."""
    if "DAPForSequenceClassification" in config.get("architectures", []):
        raise UserError(
            f"{checkpoint} is a classifier: publish the checkpoint that it was fine-tuned from, or "
            "push this one by its own push_to_hub method"
        )
    if config.get("model_type") == DAPConfig.model_type:
        return
    if options.with_heads or options.layout == "dap":
        raise UserError(
            f"{checkpoint} is a plain {config.get('model_type')!r} encoder without DAP heads: "
            "leave --with_heads and --layout dap out"
        )
    if options.pooling is None and not (checkpoint / "modules.json").exists():
        raise UserError(
            f"{checkpoint} does not say how it pools: give --pooling cls or --pooling mean"
        )


def _describe(encoder: SentenceEncoder, checkpoint: Path, options: Options) -> Published:
    """Collect what the published folder will hold, and how it makes a sentence vector."""
    backbone = encoder.backbone
    library = library_settings(str(checkpoint), None) or LibrarySettings()
    config = encoder.model.config
    similarity = library.similarity or "cosine"
    if config.model_type == DAPConfig.model_type:
        similarity = config.tr_similarity
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
        similarity=similarity,
        has_pooler=hasattr(backbone, "pooler"),
        prompts=library.prompts if options.prefix is None else {},
    )


def _require_same_encoding(report: Mapping[str, Any], published: Published) -> None:
    """Check that a report was measured with the published model's pooling, prefix and length."""
    settings = report.get("settings", {})
    names = ["pooling", "prefix"]
    if "prefix" in settings:  # else max_seq_length is about pairs of texts, as in run_xnli.py
        names.append("max_seq_length")
    for name in names:
        ours = getattr(published, name)
        if name in settings and settings[name] != ours:
            raise UserError(
                f"results on {dataset_name(report)} were measured with {name}={settings[name]!r}, "
                f"but the model is published with {ours!r}: evaluate it so, or give --{name}"
            )


def write_backbone(backbone: PreTrainedModel, pooling: str, folder: Path) -> None:
    """Save the plain encoder. If its class has a pooler, the pooler gets fixed weights.

    Without saved weights, `AutoModel` would give the pooler random ones. A pooler computes
    tanh(W x + b) of the first token's state x.

    - For "cls", W is `POOLER_SCALE` times the identity and b is 0. Then `pooler_output` is the
      sentence vector times that scale.
    - For "mean", a pooler cannot compute the vector. W and b are 0, and so is `pooler_output`, so
      that nobody mistakes it for the vector. b is not saved: Transformers then fills in zeros and
      prints that a weight of the pooler is missing. So zeros do not come without a warning.

    Args:
        backbone: the encoder. Its pooler is replaced.
        pooling: "cls" or "mean".
        folder: where to save it.
    """
    if not type(backbone).__module__.startswith("transformers."):
        raise UserError(
            f"{type(backbone).__name__} needs its own code to be loaded: publish it with "
            "sentence-transformers"
        )
    if hasattr(backbone, "pooler"):
        with torch.device("meta"):  # only the pooler's shape is needed
            plain = AutoModel.from_config(backbone.config)
        backbone.pooler = plain.pooler.to_empty(device="cpu")
        for parameter in backbone.pooler.parameters():
            nn.init.zeros_(parameter)
            if pooling == "cls" and parameter.dim() == 2:
                parameter.data.fill_diagonal_(POOLER_SCALE)
    if longest_input(backbone) is not None:
        # vLLM wants this of XLM-R, but Transformers 5 does not write it
        backbone.config.position_embedding_type = "absolute"
    weights = backbone.state_dict()
    if pooling != "cls":
        without_bias = {}
        for name, value in weights.items():
            if "pooler" not in name.split(".") or not name.endswith("bias"):
                without_bias[name] = value
        weights = without_bias
    backbone.save_pretrained(folder, state_dict=weights)
    _remove_local_path(folder / "config.json")


def write_pretraining(checkpoint: Path, folder: Path) -> DAPForPreTraining:
    """Save the whole DAP checkpoint, with its heads and its code, and return the model.

    Args:
        checkpoint: folder of the checkpoint.
        folder: where to save it.
    """
    model = load_complete(checkpoint, DAPForPreTraining)
    model.config.auto_map = dict(configuration_dap.AUTO_MAP)
    model.save_pretrained(folder)
    _remove_local_path(folder / "config.json")
    return model


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, max_length: int, folder: Path) -> None:
    """Save a tokenizer in a form that both Transformers 4 and 5 can load.

    Args:
        tokenizer: the tokenizer. Its `model_max_length` is changed, and the padding and
            truncation of earlier calls are switched off.
        max_length: number of tokens that the saved tokenizer cuts sentences to.
        folder: where to save it.
    """
    tokenizer.model_max_length = max_length
    forget_calls(tokenizer)
    tokenizer.save_pretrained(folder)

    path = folder / "tokenizer_config.json"
    with refusals(f"the tokenizer of {tokenizer.name_or_path}"):
        saved = read_object(path, finite=True)
    config = {key: value for key, value in saved.items() if key not in LEFT_BY_USE}
    if isinstance(config.get("extra_special_tokens"), list):  # Transformers 4 expects a mapping
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config.get("tokenizer_class") == "TokenizersBackend":  # unknown to Transformers 4
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(config, path)


def _remove_local_path(path: Path) -> None:
    """Remove the path of the folder that the training started from out of a config.json."""
    config = read_object(path)
    config.pop("_name_or_path", None)
    config.get("encoder_config", {}).pop("_name_or_path", None)
    write_json(config, path)


def write_modules(
    encoder: SentenceEncoder,
    folder: Path,
    normalize: bool = False,
    similarity: str | None = None,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write the files that make `SentenceTransformer(folder)` give the encoder's vectors.

    The folder must already hold the model and the tokenizer. For a DAP model, the user has to give
    `trust_remote_code=True` or import `modeling_dap`.

    Args:
        encoder: gives the pooling, the prefix and the maximum length.
        folder: where the model was saved.
        normalize: make the library return vectors of length 1.
        similarity: "cosine" or "dot". Default: a DAP model's own, else "cosine".
        prompts: prompts of the library by name, in addition to the encoder's prefix.
    """
    if encoder.layer is not None:
        raise UserError(
            f"layer={encoder.layer}: sentence-transformers pools the last layer, leave layer out"
        )
    save_modules(folder, encoder.pooling, encoder.hidden_size, normalize)

    cut = {"max_seq_length": encoder.max_seq_length, "do_lower_case": False}
    write_json(cut, folder / "sentence_bert_config.json")

    prompts = dict(prompts or {})
    default = None
    if encoder.prefix:
        same = [name for name, text in prompts.items() if text == encoder.prefix]
        default = same[0] if same else "text"
        # encode_query and encode_document use only prompts of these names
        own = dict.fromkeys((default, "query", "document"), encoder.prefix)
        prompts = own | prompts
    settings = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": similarity
        or getattr(encoder.model.config, "tr_similarity", "cosine"),
    }
    write_json(settings, folder / "config_sentence_transformers.json")


def _check_vectors(encoder: SentenceEncoder, published: Published, folder: Path) -> None:
    """Check that a published folder gives the checkpoint's sentence vectors.

    If its `pooler_output` should be the sentence vector, that is checked as well.
    """
    expected = encoder.encode(PROBE)  # (N, D)
    again = SentenceEncoder.from_pretrained(str(folder), device="cpu")
    require_same_vectors(expected, again.encode(PROBE), "the published folder")
    if not published.pools_itself:
        return

    texts = [again.prefix + text for text in PROBE]
    batch = again.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        pooled = again.model(**batch).pooler_output  # (N, D)
    cosines = cosine_similarity(torch.from_numpy(expected).double(), pooled.double())  # (N,)
    difference = 1 - float(cosines.min())
    if not difference <= POOLER_TOLERANCE:
        raise UserError(
            f"pooler_output is not the sentence vector, their cosine is {difference:.1e} below 1: "
            "nothing was written"
        )
