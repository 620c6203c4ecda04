"""Token alignment of a sentence and its translation: which tokens are each other's nearest. Arrays only, no model.

Legend: `S` source tokens, `T` target tokens, `D` hidden size, `L` links.
"""

import numpy as np


def align_tokens(source_states: np.ndarray, target_states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Links the tokens that are each other's nearest by cosine, such as those of `SentenceEncoder.encode_tokens`.

    Of equal cosines the token of the lowest number is nearest. A zero state has cosine 0 with everything. A sentence
    without tokens has no links.

    >>> links, similarity = align_tokens(np.eye(3), np.eye(3)[[1, 0]])
    >>> links.tolist(), similarity[2].tolist()
    ([[0, 1], [1, 0]], [0.0, 0.0])

    Args:
        source_states: (S, D), need not be normalised.
        target_states: (T, D).

    Returns:
        links (L, 2) int64, token numbers of source and target, ascending; and similarity (S, T) float32, the cosines.

    Raises:
        ValueError: not two-dimensional, unequal D, or a state that is not finite (side and token are named).
    """
    source, target = _unit(source_states, "source"), _unit(target_states, "target")
    if source.shape[1] != target.shape[1]:
        raise ValueError(
            f"source states have {source.shape[1]} dimensions, target states {target.shape[1]}: "
            f"use one encoder for both"
        )
    similarity = (source @ target.T).astype(np.float32)  # (S, T)
    if not similarity.size:
        return np.empty((0, 2), np.int64), similarity
    forward, backward = similarity.argmax(1), similarity.argmax(0)  # (S,), (T,)
    linked = np.flatnonzero(backward[forward] == np.arange(len(forward)))  # (L,)
    return np.stack([linked, forward[linked]], 1).astype(np.int64), similarity


def _unit(states: np.ndarray, side: str) -> np.ndarray:
    """The states divided by their length, float64; zero states stay zero."""
    states = np.asarray(states, np.float64)
    if states.ndim != 2 or states.shape[1] == 0:
        raise ValueError(f"{side} states have shape {states.shape}: expected (tokens, dimensions)")
    if len(bad := np.flatnonzero(~np.isfinite(states).all(1))):
        raise ValueError(f"{side} states: token {bad[0]} has NaN or infinite values; check the model's weights")
    largest = np.abs(states).max(1, keepdims=True)  # (N, 1): squares cannot overflow
    states = states / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(states, axis=1, keepdims=True)  # (N, 1)
    return states / np.where(length > 0, length, 1)
