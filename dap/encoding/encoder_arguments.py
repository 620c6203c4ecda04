"""The arguments by which a command names an encoder, and the encoder that they name."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

import torch

from configuration_dap import CHOICES
from dap.arguments import arg
from dap.encoding.embeddings import Encoder
from dap.encoding.onnx import OnnxEncoder
from dap.encoding.sentence_encoder import load_encoder
from dap.errors import UserError
from dap.reports import report, training_record


@dataclass
class ModelArguments:
    """Which encoder, and how it pools."""

    model_name_or_path: str = arg(
        MISSING, "A DAP checkpoint, any encoder of AutoModel, a sentence-transformers folder or Hub id; to encode "
        "with, also a .onnx file of ours.", aliases=["--model"]
    )  # fmt: skip
    pooling: str | None = arg(
        None, "How a plain encoder pools, 'cls' as in the paper unless the checkpoint says otherwise.",
        choices=CHOICES["pooling"]
    )  # fmt: skip
    revision: str | None = arg(None, "Branch, tag or commit of a Hub repository.")
    trust_remote_code: bool = arg(False, "Run the code that the repository carries.")


@dataclass
class EncoderArguments(ModelArguments):
    """Which model, and how it makes a sentence vector."""

    prefix: str | None = arg(
        None, "Text before every sentence, such as 'query: ' for E5. Default: the checkpoint's."
    )
    max_seq_length: int | None = arg(
        None, "Tokens a sentence. Default: the sentence-transformers folder's, else 128."
    )
    bf16: bool = arg(False, "Encode under bfloat16 autocast: faster on BF16 hardware.")
    layer: int | None = arg(None, "Hidden layer to pool, from 0 (embeddings). Default: the last.")

    def load(self) -> Encoder:
        """The encoder.

        Raises:
            ValueError: it cannot be loaded; names the model and the reason.
        """
        options = dict(vars(self))
        name = options.pop("model_name_or_path")
        if not name.endswith(".onnx"):
            return load_encoder(name, **options)
        if self.pooling or self.bf16 or self.layer is not None:
            raise UserError(
                "pooling, layer and number format are fixed in the file: leave pooling, bf16, layer out"
            )
        return OnnxEncoder(name, prefix=self.prefix, max_seq_length=self.max_seq_length)

    def report(
        self,
        encoder: Encoder,
        protocol: str,
        numbers: Mapping[str, Any],
        settings: Mapping[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        """What `dap.reports.report` says of the loaded encoder: its own settings, seed and recipe are put in."""
        own = {
            name: getattr(encoder, name) for name in ("pooling", "prefix", "max_seq_length", "bf16")
        }
        own |= settings
        if encoder.layer is not None:
            own["layer"] = encoder.layer
        seed, recipe = training_record(self.model_name_or_path)
        if recipe:
            own["recipe"] = recipe
        revision = encoder.revision or self.revision
        return report(self.model_name_or_path, protocol, numbers, own, seconds, revision, seed)


def tokens_of_a_batch(wanted: int | None) -> int:
    """The `--token_budget` given, else what keeps a GPU busy or a CPU's caches warm."""
    if wanted is not None:
        return wanted
    return 32768 if torch.cuda.is_available() else 4096
