"""The arguments of commands that choose an encoder."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from typing import Any

from dap_transformers.encoding.encoder import Encoder, SentenceEncoder
from dap_transformers.options import arg
from dap_transformers.ray.connection import Cluster
from dap_transformers.ray.encoder import ClusterEncoder
from dap_transformers.reports import report
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
        "How a plain encoder pools. Default: as the checkpoint says, else the mean, and the last "
        "token of a decoder.",
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

    def load(self, cluster: Cluster | None = None) -> Encoder:
        """Load the encoder that the arguments choose, here or on a cluster."""
        options = asdict(self)
        name = options.pop("model_name_or_path")
        load = partial(SentenceEncoder.from_pretrained, name, **options)
        return ClusterEncoder(load, cluster) if cluster and cluster.ray else load()

    def summary(self, encoder: SentenceEncoder) -> str:
        """Return one line that says how sentence vectors are made: pooling, prefix and length."""
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

        To the given settings it adds those of the encoder, such as pooling and prefix.
        """
        names = ("pooling", "prefix", "max_seq_length", "bf16")
        own = {name: getattr(encoder, name) for name in names} | dict(settings)
        revision = encoder.revision or self.revision
        return report(self.model_name_or_path, protocol, numbers, own, seconds, revision)
