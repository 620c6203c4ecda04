"""64-bit hashes of normalised texts, called keys, and a random order of them.

Equal texts have equal keys. Different texts have different keys, apart from rare chance: in 100
million texts, 0.0003 pairs with the same key are expected.

Shapes: N texts.
"""

from collections.abc import Sequence

import numpy as np
import xxhash


def text_keys(letters: Sequence[str]) -> np.ndarray:
    """Return a 64-bit hash of each text, so that texts can be compared as integers.

    Args:
        letters: N texts, normalised by `dap_transformers.languages.normalise_all`.

    Returns:
        Keys, uint64 (N,). Equal texts have equal keys.
    """
    digest = xxhash.xxh3_64_intdigest
    keys = (digest(text.encode("utf-32-le", "surrogatepass")) for text in letters)
    return np.fromiter(keys, np.uint64, len(letters))


def ranks(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return the rank of each key: its place in a random order of all 64-bit integers.

    The order depends only on the seed, not on files or processes. A dev set or a sample takes the
    texts with the smallest ranks.

    Args:
        keys: keys of texts (`text_keys`), uint64 (N,).
        seed: any integer. Each seed has another order.

    Returns:
        Ranks, uint64 (N,). Different keys have different ranks.
    """
    salt = scramble(np.array([seed % 2**64], np.uint64) ^ np.uint64(0xD1B54A32D192ED03))
    return scramble(keys ^ salt)


def scramble(keys: np.ndarray) -> np.ndarray:
    """Map each uint64 to another one, so that every bit depends on all bits (SplitMix64).

    Different values stay different.

    Args:
        keys: uint64 (N,).

    Returns:
        A new array, uint64 (N,).
    """
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
