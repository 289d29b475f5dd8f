"""Permutations of [0, n) that give any position without making the whole order.

Small orders are shuffled outright (Fisher-Yates, exactly uniform up to the generator); larger
ones go through a Feistel network over a times b >= n, mixed radix so that hardly any index has
to walk twice. Both are functions of (n, key) alone and are held still by golden vectors.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel

__all__ = ["below", "mix", "permutation", "permute", "unpermute"]

SMALL = 64
"""Up to here an index costs a whole shuffle; beyond, a Feistel network is uniform enough."""

ROUNDS = 8
M32 = np.uint64(0xFFFFFFFF)


@kernel
def mix(key: np.uint64, counter: np.uint64) -> np.uint64:
    """A 64-bit key for `counter` under `key` (splitmix64's finaliser, twice keyed)."""
    x = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(counter) + np.uint64(1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def below(key: np.uint64, counter: int, bound: int) -> int:
    """A number in [0, bound); the bias of the multiplication is under bound / 2**32."""
    high = mix(key, np.uint64(counter)) >> np.uint64(32)
    return np.int64((high * np.uint64(bound)) >> np.uint64(32))


@kernel
def _shuffled(n: int, key: np.uint64) -> NDArray[np.int64]:
    order = np.arange(n)
    for last in range(n - 1, 0, -1):
        other = below(key, last, last + 1)
        held = order[last]
        order[last] = order[other]
        order[other] = held
    return order


@kernel
def _sides(n: int) -> tuple[int, int]:
    a = np.int64(np.ceil(np.sqrt(np.float64(n))))
    return a, (n + a - 1) // a


@kernel
def _round(key: np.uint64, number: int, half: int, side: int) -> int:
    """The round function: a keyed hash of one half, scaled to the other half's side."""
    x = (np.uint64(half) + (mix(key, np.uint64(number)) & M32)) & M32
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(0x2C1B3C6D)) & M32
    x ^= x >> np.uint64(12)
    x = (x * np.uint64(0x297A2D39)) & M32
    x ^= x >> np.uint64(15)
    return np.int64((x * np.uint64(side)) >> np.uint64(32))


@kernel
def permute(index: int, n: int, key: np.uint64) -> int:
    """Where `index` goes in the permutation of [0, n) that `key` names."""
    if n <= SMALL:
        return _shuffled(n, key)[index]
    a, b = _sides(n)
    x = np.int64(index)
    while True:
        left = x // b
        right = x - left * b
        for number in range(0, ROUNDS, 2):
            left += _round(key, number, right, a)
            if left >= a:
                left -= a
            right += _round(key, number + 1, left, b)
            if right >= b:
                right -= b
        x = left * b + right
        # a * b may exceed n by a little: walk on until the index is inside again.
        if x < n:
            return x


@kernel
def unpermute(value: int, n: int, key: np.uint64) -> int:
    """The index that `permute` sends to `value`."""
    if n <= SMALL:
        order = _shuffled(n, key)
        for index in range(n):
            if order[index] == value:
                return index
    a, b = _sides(n)
    x = np.int64(value)
    while True:
        left = x // b
        right = x - left * b
        for number in range(ROUNDS - 2, -1, -2):
            right -= _round(key, number + 1, left, b)
            if right < 0:
                right += b
            left -= _round(key, number, right, a)
            if left < 0:
                left += a
        x = left * b + right
        if x < n:
            return x


@kernel
def permutation(n: int, key: np.uint64) -> NDArray[np.int64]:
    """The whole order: `permutation(n, key)[i] == permute(i, n, key)`."""
    if n <= SMALL:
        return _shuffled(n, key)
    out = np.empty(n, np.int64)
    for index in range(n):
        out[index] = permute(index, n, key)
    return out
