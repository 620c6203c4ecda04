"""What follows the encoder in a sentence-transformers folder: read it, run it, and write it.

The file ships with every checkpoint, beside modeling_dap.py. A folder lists its modules in
`modules.json`: a transformer, a pooling and, behind it, Dense layers and Normalize. A setting of
such a folder has its effect here, or the folder is refused by the name of the setting.

Shapes in the comments: `B` sentences, `D` size of the vector that a module gets.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import cached_file, logging

try:
    from .encoder_dap import adapter_base
    from .losses_dap import at_least_float32
    from .states_dap import POOLINGS
except ImportError:  # a checkout, where these files are top-level modules
    from encoder_dap import adapter_base
    from losses_dap import at_least_float32
    from states_dap import POOLINGS

logger = logging.get_logger(__name__)

#: File with the settings of a folder's transformer.
TRANSFORMER = "sentence_bert_config.json"
#: The kinds of encoders in the names that this file has had. As in the library, the first is read.
TRANSFORMER_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
#: Settings of the most tokens per sentence. As in the library, the last one wins.
LENGTHS = (
    "max_seq_length",
    "tokenizer_args.model_max_length",
    "processor_kwargs.model_max_length",
    "processing_kwargs.common.max_length",
    "processing_kwargs.text.max_length",
)
#: Settings by the last part of their name, and the only value that changes no vector here.
EXPECTED = {
    "add_special_tokens": True,
    "do_lower_case": False,
    "method": "forward",
    "method_output_name": "last_hidden_state",
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
    "transformer_task": "feature-extraction",
    "truncation": True,
    "use_residual": False,
}
#: Task -> names of the prompts that serve it, best last.
PROMPTS_OF = {"query": ("query",), "document": ("corpus", "passage", "document")}
#: Settings that change no vector here, whatever their value is.
WITHOUT_EFFECT = {
    "add_pooling_layer",
    "attn_implementation",
    "dtype",
    "embedding_dimension",
    "model_type",
    "padding",
    "padding_side",
    "torch_dtype",
    "trust_remote_code",
    "unpad_inputs",
    "use_cache",
    "word_embedding_dimension",
}


# ---------------------------------------------------------------------------------------- modules


class VectorLinear(nn.Linear):
    """Linear layer that casts vectors (B, D) to its precision. `Normalize` returns float32."""

    def forward(self, vectors: Tensor) -> Tensor:
        return super().forward(vectors.to(self.weight.dtype))


class Dense(nn.Module):
    """Linear layer and activation on vectors (B, D). The weights have the names of the library.

    Args:
        config: `in_features`, `out_features`, `bias` (default true), and `activation_function`, the
            dotted name of a class of torch.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = {key: value for key, value in config.items() if key != "type"}
        bias = config.get("bias", True)
        self.linear = nn.Linear(config["in_features"], config["out_features"], bias)
        self.activation = getattr(nn, config["activation_function"].rpartition(".")[2])()

    def forward(self, vectors: Tensor) -> Tensor:
        weight = self.linear.weight
        if isinstance(weight, Tensor) and weight.is_floating_point():  # not quantised
            vectors = vectors.to(weight.dtype)
        return self.activation(self.linear(vectors))


class Normalize(nn.Module):
    """Divides vectors (B, D) by their Euclidean length, in float32. A zero vector stays zero."""

    config: Mapping[str, Any] = {}

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(at_least_float32(vectors), dim=-1)


def build_modules(configs: Sequence[Mapping[str, Any]] | None) -> nn.Sequential:
    """Return the modules behind the pooling with random weights, as `DAPConfig.modules` has them.

    >>> build_modules([{"type": "Normalize"}])(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    modules = nn.Sequential()
    for config in configs or ():
        modules.append(Dense(config) if config["type"] == "Dense" else Normalize())
    return modules


# ------------------------------------------------------------------------------------------- read


@dataclass(frozen=True)
class LibrarySettings:
    """Settings in the sentence-transformers files of a folder.

    Attributes:
        place: folder or Hub id, and revision, of these files.
        subfolder: where the transformer's files are, within the folder.
        pooling: a name in `POOLINGS`. None in a folder without such files.
        prefix: the default prompt, which is put before every sentence.
        max_seq_length: most tokens per sentence. None if the files do not say.
        modules: the modules behind the pooling, as in `DAPConfig.modules`.
        folders: subfolder of each of these modules.
        prompts: name -> text to put before a sentence, such as "query".
        similarity: name of the similarity function, such as "cosine". None if the files do not say.
    """

    place: tuple[str, str | None] = ("", None)
    subfolder: str = ""
    pooling: str | None = None
    prefix: str = ""
    max_seq_length: int | None = None
    modules: tuple[dict[str, Any], ...] = ()
    folders: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    similarity: str | None = None


class Settings:
    """The settings in a JSON file of a folder, by name, such as "processor_kwargs.padding_side".

    `close` refuses those that nobody has taken. A missing file has no settings.
    """

    def __init__(self, name_or_path: str, file: str, revision: str | None) -> None:
        self.place = file
        path = find_file(name_or_path, file, revision)
        content = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
        self.values = dict(_flattened(content))

    def take(self, name: str, default: Any = None) -> Any:
        """Remove a setting and return its value. Null counts as the default."""
        value = self.values.pop(name, None)
        return default if value is None else value

    def take_all(self, prefix: str) -> dict[str, Any]:
        """Remove and return all settings whose name begins with a prefix, without the prefix."""
        names = [name for name in self.values if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.values.pop(name) for name in names}

    def close(self) -> None:
        """Raise `ValueError` for a setting that would change the vectors but has no effect here.

        A precision other than float32 only causes a warning.
        """
        for name, value in self.values.items():
            last = name.rpartition(".")[2]
            is_expected = value is None or value == EXPECTED.get(last)
            if last in ("dtype", "torch_dtype") and value not in (None, "float32"):
                logger.warning_once("%s has %s=%r, but float32 runs", self.place, name, value)
            if not is_expected and last not in WITHOUT_EFFECT:
                raise ValueError(f"{self.place} has {name}={value!r}, which cannot run here")


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each setting. Names of nested settings are joined by dots."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def library_settings(name_or_path: str, revision: str | None) -> LibrarySettings:
    """Read the sentence-transformers files of a folder or Hub id. Without them, all are defaults.

    A LoRA adapter without such files has those of the model that it was trained on.

    Raises:
        ValueError: if a module or a setting would change the vectors but has no effect here.
    """
    found = find_file(name_or_path, "modules.json", revision)
    if found is None:
        base = adapter_base(name_or_path, revision=revision)
        return replace(library_settings(base, None), subfolder="") if base else LibrarySettings()
    listed = json.loads(Path(found).read_text(encoding="utf-8"))
    kinds = [module_kind(module["type"]) for module in listed]
    if not can_run(kinds):
        raise ValueError(
            f"{name_or_path} has the modules {', '.join(kinds)}, which cannot run here: Dense and "
            "Normalize may follow Transformer and Pooling"
        )
    subfolder, pooling_folder, *folders = (module["path"] for module in listed)

    for kind in TRANSFORMER_KINDS:
        file = f"{subfolder}/sentence_{kind}_config.json".lstrip("/")
        transformer = Settings(name_or_path, file, revision)
        if transformer.values:
            break
    length = _max_seq_length(transformer)
    transformer.close()

    pooling = Settings(name_or_path, f"{pooling_folder}/config.json", revision)
    mode = pooling_mode(pooling.values)
    if mode not in POOLINGS:
        raise ValueError(f"{name_or_path} pools by {mode!r}, which cannot run here")

    modules = []
    for kind, folder in zip(kinds[2:], folders):
        config = Settings(name_or_path, f"{folder}/config.json", revision)
        modules.append({"type": kind} | (_read_dense(config) if kind == "Dense" else {}))
        config.close()

    library = Settings(name_or_path, "config_sentence_transformers.json", revision)
    library.take_all("__version__.")
    prompts = library.take_all("prompts.")
    prefix = prompts.get(library.take("default_prompt_name"), "")
    for task, names in PROMPTS_OF.items():
        if prompts.keys().isdisjoint(names):
            prompts[task] = ""  # not the default prompt, as in the library
    similarity = library.take("similarity_fn_name")
    library.close()
    if any((prefix, *prompts.values())) and not pooling.take("include_prompt", True):
        raise ValueError(f"{pooling.place} has include_prompt=False, which cannot run here")
    place = name_or_path, revision
    return LibrarySettings(
        place, subfolder, mode, prefix, length, tuple(modules), tuple(folders), prompts, similarity
    )


def _max_seq_length(transformer: Settings) -> int | None:
    """Take the settings about text. Return the most tokens per sentence, None if none says so."""
    # Token states are what the pooling reads. A module that returns something else is refused.
    if transformer.values.get("module_output_name") == "token_embeddings":
        transformer.take("module_output_name")
    # Settings of other modalities, such as images, do not concern text.
    modalities = transformer.take_all("modality_config.")
    for name, value in modalities.items():
        if name.startswith("text."):
            transformer.values[name] = value
    length = None
    for name in LENGTHS:
        length = transformer.take(name, default=length)
    return length


def _read_dense(settings: Settings) -> dict[str, Any]:
    """Read the settings of a Dense module, for `Dense`. Its activation must be one of torch."""
    activation = settings.take("activation_function", "torch.nn.modules.activation.Tanh")
    if not activation.startswith("torch.nn."):  # as the library, run no code but torch's
        raise ValueError(f"{settings.place}: {activation} is not an activation function of torch")
    return {
        "in_features": settings.take("in_features"),
        "out_features": settings.take("out_features"),
        "bias": settings.take("bias", True),
        "activation_function": activation,
    }


def load_modules(library: LibrarySettings) -> nn.Sequential:
    """Load the modules that turn pooled vectors (B, D) into sentence vectors, in float32."""
    modules = build_modules(library.modules)
    name_or_path, revision = library.place
    for module, folder in zip(modules, library.folders):
        if isinstance(module, Normalize):
            continue
        path = find_file(name_or_path, f"{folder}/model.safetensors", revision)
        if path is not None:
            weights = load_file(path)
        else:
            path = cached_file(name_or_path, f"{folder}/pytorch_model.bin", revision=revision)
            weights = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(weights)
    return modules.float().eval()


def find_file(name_or_path: str, filename: str, revision: str | None) -> str | None:
    """Return the local path of a file of a folder or Hub repository, or None if there is none."""
    return cached_file(
        name_or_path, filename, revision=revision, _raise_exceptions_for_missing_entries=False
    )


def prompt_for(task: str, prompts: Mapping[str, str], default: str) -> str:
    """Return the prompt of a task, "query" or "document". Without one, return the default.

    >>> prompt_for("document", {"query": "query: ", "passage": "passage: "}, "")
    'passage: '
    """
    for name in PROMPTS_OF[task]:
        default = prompts.get(name, default)
    return default


def can_run(kinds: list[str]) -> bool:
    """Tell whether a list of modules can run here, given the names of their classes."""
    return kinds[:2] == ["Transformer", "Pooling"] and {*kinds[2:]} <= {"Dense", "Normalize"}


def module_kind(dotted: str) -> str:
    """Return the class name of a module of sentence-transformers, or a foreign module's full path.

    The library has moved its modules, so its older and newer paths must give the same name.

    >>> module_kind("sentence_transformers.models.Pooling")
    'Pooling'
    >>> module_kind("sentence_transformers.base.modules.transformer.Transformer")
    'Transformer'
    """
    return dotted.rsplit(".", 1)[-1] if dotted.startswith("sentence_transformers.") else dotted


def pooling_mode(config: Mapping[str, Any]) -> str:
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


# ------------------------------------------------------------------------------------------ write


def save_modules(folder: Path, pooling: str, hidden_size: int, modules: nn.Sequential) -> None:
    """Write `modules.json`, the pooling's configuration, and the modules behind it.

    Without them sentence-transformers would use mean pooling. The types have the names of older
    versions, which servers also know.
    """
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    flags += ("weightedmean_tokens", "lasttoken")
    settings: dict[str, Any] = {"word_embedding_dimension": hidden_size}
    for flag in flags:
        settings[f"pooling_mode_{flag}"] = flag == POOLINGS[pooling].flag
    settings["include_prompt"] = True
    _write_json(settings, folder / "1_Pooling" / "config.json")

    listed = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for number, module in enumerate(modules, start=2):
        kind = type(module).__name__
        place = f"{number}_{kind}"
        listed.append((place, kind))
        _write_json(module.config, folder / place / "config.json")
        if isinstance(module, Dense):
            weights = {name: value.contiguous() for name, value in module.state_dict().items()}
            save_file(weights, folder / place / "model.safetensors")

    entries = []
    for number, (place, kind) in enumerate(listed):
        dotted = f"sentence_transformers.models.{kind}"
        entries.append({"idx": number, "name": str(number), "path": place, "type": dotted})
    _write_json(entries, folder / "modules.json")


def _write_json(content: Any, path: Path) -> None:
    """Write a JSON file, and make its folder."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


def write_modules(encoder: Any, folder: Path, similarity: str | None = None) -> None:
    """Write the files that make `SentenceTransformer(folder)` give the encoder's vectors.

    The folder must already hold the model and the tokenizer. For a DAP model, the user has to give
    `trust_remote_code=True` or import `modeling_dap`.

    Args:
        encoder: a `SentenceEncoder`.
        similarity: "cosine" or "dot". None takes a DAP model's own, or else "cosine".
    """
    # A plain encoder's `save_pretrained` has not written these.
    save_modules(folder, encoder.pooling, encoder.hidden_size, encoder.after)

    transformer = {"max_seq_length": encoder.max_seq_length, "do_lower_case": False}
    _write_json(transformer, folder / TRANSFORMER)

    prompts = dict(encoder.prompts)
    default = None
    if encoder.prefix:
        same = [name for name, text in prompts.items() if text == encoder.prefix]
        default = same[0] if same else "text"
        prompts[default] = encoder.prefix
    if prompts:
        # encode_query and encode_document use only prompts of these names
        of_tasks = {task: prompt_for(task, prompts, encoder.prefix) for task in PROMPTS_OF}
        prompts = of_tasks | prompts
    own_similarity = getattr(encoder.model.config, "tr_similarity", "cosine")
    settings = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": similarity or own_similarity,
    }
    _write_json(settings, folder / "config_sentence_transformers.json")
