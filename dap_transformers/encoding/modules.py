"""The files of a sentence-transformers folder: read them, run their modules, and write them.

A folder lists its modules in `modules.json`. `SentenceEncoder` runs a transformer, a pooling and,
behind it, the modules Dense and Normalize.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from dap_transformers.encoding.load import longest_input
from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from modeling_dap import save_modules
from states_dap import POOLINGS


@dataclass(frozen=True)
class LibrarySettings:
    """Settings in the sentence-transformers files of a folder.

    Attributes:
        subfolder: where the transformer's files are, within the folder.
        pooling: a name in `POOLINGS`. None in a folder without such files.
        prefix: the default prompt, which is put before every sentence.
        max_seq_length: most tokens per sentence. None if the files do not say.
        after: kind and subfolder of each module behind the pooling, "Dense" or "Normalize".
        similarity: name of the similarity function, such as "cosine". None if the files do not say.
    """

    subfolder: str = ""
    pooling: str | None = None
    prefix: str = ""
    max_seq_length: int | None = None
    after: tuple[tuple[str, str], ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    similarity: str | None = None

    @property
    def normalize(self) -> bool:
        """Tell whether vectors are divided by their Euclidean length."""
        return "Normalize" in dict(self.after)


# -------------------------------------------------------------------------------------------- read


def library_settings(name_or_path: str, revision: str | None = None) -> LibrarySettings | None:
    """Read the sentence-transformers files of a folder or Hub id. None without modules.json."""

    def read(filename: str) -> Any:
        path = find_file(name_or_path, filename, revision)
        return None if path is None else read_json(path)

    listed = read("modules.json")
    if listed is None:
        return None
    modules = [(module_kind(module["type"]), module["path"]) for module in listed]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or {*kinds[2:]} - {"Dense", "Normalize"}:
        raise UserError(f"{name_or_path} has the modules {', '.join(kinds)}, which cannot run here")
    (_, subfolder), (_, place), *after = modules
    transformer = read(str(Path(subfolder, "sentence_bert_config.json"))) or {}
    pooling = read(f"{place}/config.json") or {}
    library = read("config_sentence_transformers.json") or {}

    mode = pooling_mode(pooling)
    prompts = library.get("prompts") or {}
    prefix = prompts.get(library.get("default_prompt_name"), "")
    leaves_prompt_out = prefix and not pooling.get("include_prompt", True)
    if mode not in POOLINGS or transformer.get("do_lower_case") or leaves_prompt_out:
        raise UserError(
            f"{name_or_path} pools by {mode!r}, lower-cases its text, or leaves its prompt out of "
            "pooling: that cannot run here"
        )
    return LibrarySettings(
        subfolder,
        mode,
        prefix,
        transformer.get("max_seq_length"),
        tuple(after),
        prompts,
        library.get("similarity_fn_name"),
    )


def find_file(name_or_path: str, filename: str, revision: str | None = None) -> str | None:
    """Return the local path of a file of a folder or Hub repository, or None if there is none."""
    return cached_file(
        name_or_path, filename, revision=revision, _raise_exceptions_for_missing_entries=False
    )


def module_kind(dotted: str) -> str:
    """Return the class name of a module of sentence-transformers, or a foreign module's full path.

    The library has moved its modules, so its older and newer paths must give the same name.

    >>> module_kind("sentence_transformers.models.Pooling")
    'Pooling'
    >>> module_kind("sentence_transformers.base.modules.transformer.Transformer")
    'Transformer'
    """
    return dotted.rsplit(".", 1)[-1] if dotted.startswith("sentence_transformers.") else dotted


def pooling_mode(config: dict[str, Any]) -> str:
    """Return the pooling mode that a sentence-transformers pooling config sets, "" if none.

    The library writes it in two ways: as one name, and in old folders as one flag per mode.
    Several modes are joined by "+", such as "cls+mean".

    >>> pooling_mode({"pooling_mode": "cls"}), pooling_mode({"pooling_mode_mean_tokens": True})
    ('cls', 'mean')
    """
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return modes if isinstance(modes, str) else "+".join(modes)
    names = {f"pooling_mode_{pooling.flag}": name for name, pooling in POOLINGS.items()}
    modes = []
    for key, value in config.items():
        if key.startswith("pooling_mode_") and value is True:
            modes.append(names.get(key, key.removeprefix("pooling_mode_")))
    return "+".join(modes)


def library_length(
    named: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return how many tokens per sentence the sentence-transformers library keeps.

    It takes the length in the folder's files or, if that is None, the smaller of the limits in the
    tokenizer and the model's config. Limits of 0 or below mean no limit, as in XLNet's config. The
    result is never above the model's number of positions. XLM-R's folders name 514 for 512.
    """
    lengths = [named or tokenizer.model_max_length, longest_input(model)]
    if not named:
        lengths.append(getattr(model.config, "max_position_embeddings", None))
    return min(length for length in lengths if length is not None and length > 0)


# --------------------------------------------------------------------------------------------- run


class Normalize(nn.Module):
    """Divides vectors (B, E) by their Euclidean length. A zero vector stays zero."""

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1)


def read_modules(
    name_or_path: str, modules: Sequence[tuple[str, str]], revision: str | None = None
) -> nn.Sequential:
    """Load the modules that turn pooled vectors (B, D) into sentence vectors (B, E)."""
    after = nn.Sequential()
    for kind, folder in modules:
        is_dense = kind == "Dense"
        after.append(read_dense(name_or_path, folder, revision) if is_dense else Normalize())
    return after.eval()


def read_dense(name_or_path: str, folder: str, revision: str | None = None) -> nn.Sequential:
    """Load a Dense module of sentence-transformers: a linear layer and its activation."""
    config = read_json(find_file(name_or_path, f"{folder}/config.json", revision))
    source = config.get("module_input_name", "sentence_embedding")
    target = config.get("module_output_name") or source
    if {source, target} != {"sentence_embedding"} or config.get("use_residual"):
        raise UserError(f"{folder}/config.json: a residual or other inputs cannot run here")
    # As the library, run no code but torch's.
    package, _, name = config["activation_function"].rpartition(".")
    if not package.startswith("torch.nn."):
        raise UserError(f"{folder}/config.json: {name} is not an activation function of torch")
    linear = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
    dense = nn.Sequential(OrderedDict(linear=linear, activation=getattr(nn, name)()))
    weights = find_file(name_or_path, f"{folder}/model.safetensors", revision)
    if weights is None:
        pickled = find_file(name_or_path, f"{folder}/pytorch_model.bin", revision)
        dense.load_state_dict(torch.load(pickled, map_location="cpu", weights_only=True))
    else:
        dense.load_state_dict(load_file(weights))
    return dense.float()


# ------------------------------------------------------------------------------------------- write


def write_modules(
    encoder: Any,
    folder: Path,
    normalize: bool = False,
    similarity: str | None = None,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write the files that make `SentenceTransformer(folder)` give the encoder's vectors.

    The folder must already hold the model and the tokenizer. For a DAP model, the user has to give
    `trust_remote_code=True` or import `modeling_dap`. Dense modules are not written.

    Args:
        normalize: make the library return vectors of length 1.
        similarity: "cosine" or "dot". None takes a DAP model's own, or else "cosine".
    """
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
