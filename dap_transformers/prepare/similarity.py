"""Measure how similar the two sides of pairs are, with a sentence encoder.

Shapes: N pairs of a table, D dimensions of a vector.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from dap_transformers.errors import UserError

#: Imported only when it is asked for. Preparing text otherwise needs no model and no torch.
_ENCODING = "..encoding"


@cache
def load_encoder(name: str) -> Any:
    """Load the encoder of a folder, a Hub id or an `.onnx` file, with its own pooling and prefix.

    The result, a `SentenceEncoder`, is cached for further calls.
    """
    return import_module(_ENCODING, __package__).EncoderArguments(model_name_or_path=name).load()


def cosines(name: str, source: Sequence[str], target: Sequence[str]) -> np.ndarray:
    """Compute the cosine of the two sentence vectors of each pair.

    Args:
        name: folder, Hub id or `.onnx` file of the encoder.
        source: source sentences of N pairs. Without pairs the encoder is not loaded.
        target: their target sentences.

    Returns:
        Cosines, (N,) float64. A vector of zeros gives 0.
    """
    if not source:
        return np.empty(0)
    encoder = load_encoder(name)
    token_budget = import_module(_ENCODING, __package__).tokens_of_a_batch(None)
    sides = []
    for texts in (source, target):
        vectors = encoder.encode(texts, token_budget=token_budget).astype(np.float64)  # (N, D)
        bad = np.flatnonzero(~np.isfinite(vectors).all(1))
        if len(bad):
            raise UserError(
                f"--model {name}: NaN or infinity in the vector of {texts[bad[0]][:60]!r}; check "
                "the model's weights"
            )
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        sides.append(vectors / np.where(lengths == 0, 1, lengths))
    source_vectors, target_vectors = sides
    return (source_vectors * target_vectors).sum(1)
