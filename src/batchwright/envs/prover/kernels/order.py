"""Where many indices in a row go in a permutation, one round of all of them at a time."""

# Kernels say int where numba has its own 64-bit integers; only numba could tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return, operator"

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import M32, ROUNDS, SMALL, mix, permute

__all__ = ["permute_row"]

Halves = NDArray[np.uint32]


@kernel
def permute_row(
    first: int, count: int, n: int, key: np.uint64, left: Halves, right: Halves
) -> None:
    """Put `permute(first + i, n, key)` into `left[i]` for every i below `count`.

    The same network as that of `permute`, whose rounds wait for each other. Here the processor
    has other indices to go on with meanwhile, and a round's own key is made once for all.
    """
    if n <= SMALL:
        for i in range(count):
            left[i] = permute(first + i, n, key)
        return
    a = np.int64(np.ceil(np.sqrt(np.float64(n))))
    b = (n + a - 1) // a
    for i in range(count):
        left[i] = (first + i) // b
        right[i] = (first + i) - np.int64(left[i]) * b
    for number in range(0, ROUNDS, 2):
        _round(right, left, count, mix(key, np.uint64(number)), a)
        _round(left, right, count, mix(key, np.uint64(number + 1)), b)
    for i in range(count):
        x = np.int64(left[i]) * b + np.int64(right[i])
        # Beyond n the walk goes on, alone.
        left[i] = x if x < n else permute(x, n, key)


@kernel
def _round(given: Halves, changed: Halves, count: int, key: np.uint64, side: int) -> None:
    """Add to `changed` a keyed hash of `given`, modulo `side`."""
    added, modulus = np.uint32(key & M32), np.uint32(side)
    for i in range(count):
        x = np.uint32(given[i] + added)
        x ^= np.uint32(x >> np.uint32(15))
        x = np.uint32(x * np.uint32(0x2C1B3C6D))
        x ^= np.uint32(x >> np.uint32(12))
        x = np.uint32(x * np.uint32(0x297A2D39))
        x ^= np.uint32(x >> np.uint32(15))
        step = np.uint32((np.uint64(x) * np.uint64(modulus)) >> np.uint64(32))
        x = np.uint32(changed[i] + step)
        changed[i] = np.uint32(x - modulus) if x >= modulus else x
