"""Command-line arguments that choose an encoder."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass
from typing import Any

import torch

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.options import arg
from dap_transformers.reports import report, training_record
from states_dap import POOLINGS


@dataclass
class BaseEncoderArguments:
    """Command-line arguments of every command that loads an encoder: its name and its pooling."""

    model_name_or_path: str = arg(
        MISSING,
        "A DAP checkpoint, any encoder of AutoModel, or a sentence-transformers folder; a folder "
        "or a Hub id.",
        aliases=["--model"],
    )
    pooling: str | None = arg(
        None,
        "How a plain encoder pools. Default: as the checkpoint says, else 'cls' as in the paper.",
        choices=tuple(POOLINGS),
    )
    revision: str | None = arg(None, "Branch, tag or commit of a Hub repository.")
    trust_remote_code: bool = arg(False, "Run the code that the repository carries.")


@dataclass
class EncoderArguments(BaseEncoderArguments):
    """Command-line arguments of commands that encode: which encoder, and how it makes a vector."""

    prefix: str | None = arg(
        None, "Text before every sentence, such as 'query: ' for E5. Default: the checkpoint's."
    )
    max_seq_length: int | None = arg(
        None, "Tokens per sentence. Default: the sentence-transformers folder's, else 128."
    )
    bf16: bool = arg(False, "Encode under bfloat16 autocast: faster on BF16 hardware.")

    def load(self) -> SentenceEncoder:
        """Load the encoder that the arguments choose."""
        options = asdict(self)
        return SentenceEncoder.from_pretrained(options.pop("model_name_or_path"), **options)

    def summary(self, encoder: SentenceEncoder) -> str:
        """Return one line that says how sentence vectors are made: pooling, prefix and length.

        Args:
            encoder: the loaded encoder.
        """
        return (
            f"{self.model_name_or_path}: pooling {encoder.pooling}, prefix "
            f"{encoder.prefix!r}, at most {encoder.max_seq_length} tokens"
        )

    def report(
        self,
        encoder: SentenceEncoder,
        protocol: str,
        numbers: Mapping[str, Any],
        settings: Mapping[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        """Return the report of an evaluation, a dictionary that can be written as JSON.

        To the given settings it adds those of the encoder, such as pooling and prefix. If the model
        folder has a record of its training, the report also has the seed and the recipe. The recipe
        is a hash of the training's arguments (`training_record`).

        Args:
            encoder: the loaded encoder.
            protocol: how the results were measured, such as "Tatoeba, cosine, index match".
            numbers: the results by name.
            settings: further settings by name, such as the data. They win over the encoder's.
            seconds: wall-clock time of the evaluation.
        """
        own: dict[str, Any] = {}
        for name in ("pooling", "prefix", "max_seq_length", "bf16"):
            own[name] = getattr(encoder, name)
        own |= settings
        seed, recipe = training_record(self.model_name_or_path)
        if recipe:
            own["recipe"] = recipe
        revision = encoder.revision or self.revision
        return report(self.model_name_or_path, protocol, numbers, own, seconds, revision, seed)


def tokens_of_a_batch(token_budget: int | None) -> int:
    """Return the most tokens that a batch may have, padding included.

    Args:
        token_budget: the user's `--token_budget`, which is returned unchanged. None takes 32,768 if
            there is a GPU, which keeps it busy, and 4,096 on a CPU, which fits into its caches.
    """
    if token_budget is not None:
        return token_budget
    return 32768 if torch.cuda.is_available() else 4096
