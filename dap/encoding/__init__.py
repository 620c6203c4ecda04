"""From sentences to vectors: load an encoder, encode, and keep vectors on disk."""

from dap.encoding.embeddings import (
    SHARD_SIZE,
    Encoder,
    SentenceError,
    embed_to_disk,
    encode_shared,
    launched,
    model_fingerprint,
    require_finite,
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
