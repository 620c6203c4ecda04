"""Turn a checkpoint into the folder that is published, and prove that its vectors are the same.

The root holds files that every library loads without our code: the plain encoder, its tokenizer,
and the files of sentence-transformers. With `with_heads`, `pretraining/` holds the whole DAP
checkpoint.

Shapes: `N` sentences, `D` hidden size.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

import configuration_dap
from configuration_dap import DAPConfig
from dap_transformers.encoding.checkpoint import Checkpoint, longest_input
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from dap_transformers.options import arg
from dap_transformers.tokenizer import as_in_file, forget_calls, require_padding
from encoder_dap import auto_class
from modeling_dap import DAPForPreTraining
from modules_dap import Normalize, write_modules
from states_dap import POOLINGS

HEADS_FOLDER = "pretraining"  # in the published folder, with the whole DAP checkpoint
#: Entries that loading and encoding leave in a tokenizer_config.json, such as a training's length.
LEFT_BY_USE = (
    "is_local",
    "local_files_only",
    "max_length",
    "stride",
    "truncation_strategy",
)
TEXT = "Guten Morgen! Доброе утро, мир. 我喜欢喝茶。 Habari ya asubuhi? "
#: Sentences in several scripts, from one character to more tokens than any model has positions.
PROBE = (*(TEXT[:end] for end in (1, 5, 12, 30, 60)), TEXT * 3, TEXT * 400)
#: Largest allowed difference of an entry, for vectors of length 1.
TOLERANCE = 1e-4
#: Factor of `pooler_output`. The pooler's tanh changes x by less than 3e-4 of its value for |x| <
#: 32 with this factor, and layer normalisation keeps states below that. float16 can hold the
#: result.
POOLER_SCALE = 2.0**-10
#: Largest allowed difference from 1 of the cosine between `pooler_output` and the sentence vector.
POOLER_TOLERANCE = 1e-6


@dataclass(frozen=True)
class FolderOptions:
    """What the published folder holds, and how it pools and cuts. None is the checkpoint's own."""

    with_heads: bool = arg(False, "Add the DAP checkpoint in pretraining/, if it has heads.")
    pooling: str | None = arg(
        None, "How to pool a plain encoder. Default: the checkpoint's.", choices=tuple(POOLINGS)
    )
    prefix: str | None = arg(None, "Text before every sentence. Default: the checkpoint's.")
    max_seq_length: int | None = arg(
        None, "Maximum tokens per sentence. Default: the checkpoint's, or 128."
    )
    normalize: bool = arg(False, "Make sentence-transformers return vectors of length 1.")


@dataclass(frozen=True)
class Published:
    """What a published folder holds, and how a sentence vector is computed with it.

    Attributes:
        encoder: gives the vectors of the folder.
        heads: whether the folder has the training heads.
        similarity: "cosine" or "dot".
        has_pooler: whether the encoder's class has a pooler, even if the checkpoint has no
            weights for it.
    """

    encoder: SentenceEncoder
    heads: bool
    similarity: str
    has_pooler: bool

    @property
    def normalize(self) -> bool:
        """Tell whether sentence-transformers returns vectors of length 1."""
        return any(isinstance(each, Normalize) for each in self.encoder.after)

    @property
    def has_dense(self) -> bool:
        """Tell whether Dense layers follow the pooling."""
        return bool(self.encoder.after.state_dict())

    @property
    def pools_itself(self) -> bool:
        """Tell whether `pooler_output` is the sentence vector, times `POOLER_SCALE`."""
        return self.has_pooler and self.encoder.pooling == "cls" and not self.has_dense


def build(source: Path, folder: Path, options: FolderOptions | None = None) -> Published:
    """Write the published form of a checkpoint into a new or empty folder, without a model card.

    Its vectors are compared with the checkpoint's.
    """
    options = options or FolderOptions()
    checkpoint = Checkpoint.read(source)
    _require_publishable(checkpoint, options)
    encoder = _load_encoder(checkpoint, options)
    own_similarity = getattr(checkpoint.config, "tr_similarity", None)
    similarity = own_similarity or checkpoint.library.similarity or "cosine"

    # the heads come first, because saving the tokenizer at the root changes its length
    has_heads = options.with_heads and write_heads(checkpoint, encoder, folder)
    has_pooler = write_backbone(encoder.backbone, encoder.pooling, folder)
    save_tokenizer(encoder.tokenizer, encoder.max_seq_length, folder)
    write_modules(encoder, folder, similarity)

    published = Published(encoder, has_heads, similarity, has_pooler)
    _check_vectors(published, folder)
    return published


def _require_publishable(checkpoint: Checkpoint, options: FolderOptions) -> None:
    """Raise `UserError` if other libraries could not load a checkpoint, or not pool as it does."""
    name = checkpoint.name
    folder = Path(name, checkpoint.library.subfolder)
    if not any(folder.glob("*model*.safetensors")):  # also of an adapter; a pickle can run any code
        raise UserError(
            f"{name} has no weights as safetensors. If you trust its pickle, load it by "
            "AutoModel.from_pretrained, and save it by save_pretrained"
        )
    require_padding(checkpoint.tokenizer, name)
    if "DAPForSequenceClassification" in (checkpoint.config.architectures or []):
        raise UserError(f"{name} is a classifier: push it by its own push_to_hub method")
    if options.with_heads and checkpoint.config.model_type != DAPConfig.model_type:
        raise UserError(f"{name} has no heads: give the DAP checkpoint, or leave out with_heads")
    if options.pooling is None and checkpoint.pooling is None:
        raise UserError(f"{name} does not say how it pools: give a pooling")


def _load_encoder(checkpoint: Checkpoint, options: FolderOptions) -> SentenceEncoder:
    """Load the encoder of a checkpoint on the CPU."""
    encoder = SentenceEncoder.from_pretrained(
        checkpoint,
        pooling=options.pooling,
        prefix=options.prefix,
        max_seq_length=options.max_seq_length,
        device="cpu",
    )
    if options.normalize and not any(isinstance(each, Normalize) for each in encoder.after):
        encoder.after.append(Normalize())
    return encoder


def write_heads(checkpoint: Checkpoint, encoder: SentenceEncoder, folder: Path) -> bool:
    """Save the whole DAP checkpoint in the subfolder `HEADS_FOLDER`, with its own pooling.

    The sentence vectors there use prefix, prompts and length of `encoder`, the published one. The
    tokenizer keeps the longest input of the model. The model's code is also saved at the root.

    Returns:
        Whether the checkpoint has heads. Without any, nothing is saved.
    """
    model = checkpoint.load(DAPForPreTraining)
    if all(name == "dap" for name, _ in model.named_children()):
        return False
    model.config.auto_map = dict(configuration_dap.AUTO_MAP)
    model.save_pretrained(folder / HEADS_FOLDER)
    own_length = encoder.tokenizer.model_max_length
    length = min(own_length, longest_input(model) or own_length)
    save_tokenizer(encoder.tokenizer, length, folder / HEADS_FOLDER)
    own = SentenceEncoder(
        model,
        encoder.tokenizer,
        prefix=encoder.prefix,
        max_seq_length=encoder.max_seq_length,
        prompts=encoder.prompts,
    )
    write_modules(own, folder / HEADS_FOLDER)
    custom_object_save(model, folder)  # Transformers looks for the code at the root
    return True


def write_backbone(backbone: PreTrainedModel, pooling: str, folder: Path) -> bool:
    """Save the plain encoder. If its class has a pooler, the pooler gets fixed weights.

    Without saved weights, `AutoModel` would give the pooler random ones. A pooler computes
    tanh(W x + b) of the first token's state x.

    - For "cls", W is `POOLER_SCALE` times the identity and b is 0. Then `pooler_output` is the
      sentence vector times that scale.
    - Otherwise, a pooler cannot compute the vector. W and b are 0, and so is `pooler_output`, so
      that nobody mistakes it for the vector.

    Returns:
        Whether the class has a pooler.
    """
    with torch.device("meta"):  # without memory for weights
        plain = auto_class(backbone.config).from_config(backbone.config)
    pooler = getattr(plain, "pooler", None)
    if pooler is not None:
        plain.load_state_dict(backbone.state_dict(), strict=False, assign=True)  # shares them
        backbone = plain
        for parameter in pooler.to_empty(device="cpu").parameters():
            nn.init.zeros_(parameter)
            if pooling == "cls" and parameter.dim() == 2:
                parameter.data.fill_diagonal_(POOLER_SCALE)
    if longest_input(backbone) is not None:
        # vLLM wants this of XLM-R, but Transformers 5 does not write it
        backbone.config.position_embedding_type = "absolute"
    backbone.save_pretrained(folder)
    return pooler is not None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, max_length: int, folder: Path) -> None:
    """Save a tokenizer that cuts to `max_length` tokens, for both Transformers 4 and 5.

    The tokenizer's `model_max_length` is changed, and padding and truncation are switched off.
    """
    tokenizer.model_max_length = max_length
    forget_calls(tokenizer)
    tokenizer.save_pretrained(folder)

    path = folder / "tokenizer_config.json"
    saved = read_json(path)
    config = {key: value for key, value in saved.items() if key not in LEFT_BY_USE}
    if isinstance(config.get("extra_special_tokens"), list):  # Transformers 4 expects a mapping
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config.get("tokenizer_class") == "TokenizersBackend":  # unknown to Transformers 4
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(config, path)


def _check_vectors(published: Published, folder: Path) -> None:
    """Check that a published folder gives the checkpoint's vectors, also by `pooler_output`."""
    expected = published.encoder.encode(PROBE)  # (N, D)
    again = SentenceEncoder.from_pretrained(str(folder), device="cpu")
    require_same_vectors(expected, again.encode(PROBE), "the published folder")
    plain = AutoTokenizer.from_pretrained(folder)
    if as_in_file(plain, folder) is not plain:
        raise UserError(
            f"AutoTokenizer makes a {type(plain).__name__} for model_type "
            f"{again.model.config.model_type!r}. Its tokens are not those of tokenizer.json: "
            "nothing was written"
        )
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


def require_same_vectors(expected: np.ndarray, found: np.ndarray, what: str) -> float:
    """Check that the vectors (N, D) of `what` equal the checkpoint's, also in their length.

    Returns:
        The largest absolute difference of an entry, divided by the length of the expected vector.

    Raises:
        UserError: if the difference is above `TOLERANCE`.
    """
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)  # (N, 1)
    difference = float((np.abs(expected - found) / lengths).max())
    if not difference <= TOLERANCE:  # also refuses NaN
        raise UserError(
            f"the vectors of {what} differ from the checkpoint's by {difference:.1e}, "
            f"above {TOLERANCE}: nothing was written"
        )
    return difference
