"""Named random streams: the same numbers for (seed, purpose, counters) in every process.

Keys are hashes, never sums: seed 43 in epoch 0 and seed 42 in epoch 1 have nothing in common.
Golden vectors in the tests hold them still.
"""

import hashlib
from typing import TYPE_CHECKING

from batchwright.fingerprint import canonical

if TYPE_CHECKING:
    import numpy as np

__all__ = ["key", "stream"]


def key(seed: int, purpose: str, *counters: int) -> int:
    """A 64-bit key for one purpose at these counters.

    >>> key(42, "shuffle", 1) == key(43, "shuffle", 0)
    False
    """
    return int.from_bytes(_bits(seed, purpose, counters)[:8], "little")


def stream(seed: int, purpose: str, *counters: int) -> "np.random.Generator":
    """A numpy generator for one purpose at these counters.

    The bits are Philox's, which numpy promises never to change. Orders do not come from here
    but from `batchwright.permutation`, because numpy may change how it shuffles.
    """
    import numpy as np

    bits = _bits(seed, purpose, counters)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(bits[:16], "little")))


def _bits(seed: int, purpose: str, counters: tuple[int, ...]) -> bytes:
    return hashlib.sha256(canonical(["rng", seed, purpose, list(counters)])).digest()
