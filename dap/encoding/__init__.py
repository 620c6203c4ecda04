"""From sentences to vectors: load an encoder, encode, and keep vectors on disk."""

from dap.encoding.embeddings import (
    SHARD_SIZE,
    Encoder,
    SentenceError,
    embed_to_disk,
    encode_shared,
    hash_of_text,
    is_whole,
    launched,
    model_fingerprint,
    require_finite,
    write_vectors,
)
from dap.encoding.encoder_arguments import BaseEncoderArguments, EncoderArguments, tokens_of_a_batch
from dap.encoding.loading import (
    LibrarySettings,
    NeedsSentenceTransformers,
    hub_commit,
    library_length,
    library_settings,
    load_complete,
    load_config,
    longest_input,
    pooling_mode,
)
from dap.encoding.onnx import FLOAT32, INT8, OnnxEncoder, require_packages
from dap.encoding.sentence_encoder import (
    EncoderOptions,
    LibraryEncoder,
    SentenceEncoder,
    load_encoder,
)

__all__ = [
    "BaseEncoderArguments",
    "Encoder",
    "EncoderArguments",
    "EncoderOptions",
    "FLOAT32",
    "INT8",
    "LibraryEncoder",
    "LibrarySettings",
    "NeedsSentenceTransformers",
    "OnnxEncoder",
    "SHARD_SIZE",
    "SentenceEncoder",
    "SentenceError",
    "embed_to_disk",
    "encode_shared",
    "hash_of_text",
    "hub_commit",
    "is_whole",
    "launched",
    "library_length",
    "library_settings",
    "load_complete",
    "load_config",
    "load_encoder",
    "longest_input",
    "model_fingerprint",
    "pooling_mode",
    "require_finite",
    "require_packages",
    "tokens_of_a_batch",
    "write_vectors",
]
