"""64-bit keys of normalised texts, and a random order of them that depends only on a seed.

Equal texts have equal keys. That two different texts have the same key by chance is expected 0.0003
times in 100 million pairs.

Shapes: N texts.
"""

from collections.abc import Sequence

import numpy as np
import xxhash


def text_keys(letters: Sequence[str]) -> np.ndarray:
    """Compute a key for each text.

    Args:
        letters: N texts, as `dap.languages.normalise_all` leaves them.

    Returns:
        uint64 (N,).
    """
    digest = xxhash.xxh3_64_intdigest
    keys = (digest(text.encode("utf-32-le", "surrogatepass")) for text in letters)
    return np.fromiter(keys, np.uint64, len(letters))


def ranks(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return each key's place in the random order of this seed.

    The order depends only on the keys and the seed, not on files or processes. A dev set or a
    sample takes the keys with the smallest ranks.

    Args:
        keys: uint64 (N,).
        seed: any integer.

    Returns:
        uint64 (N,), different for different keys.
    """
    salt = scramble(np.array([seed % 2**64], np.uint64) ^ np.uint64(0xD1B54A32D192ED03))
    return scramble(keys ^ salt)


def scramble(keys: np.ndarray) -> np.ndarray:
    """Map uint64 to uint64 one to one, so that each bit depends on all bits (SplitMix64)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
