"""Permutations of [0, n) that give any position without making the whole order.

Small orders are shuffled outright (Fisher-Yates, exactly uniform up to the generator); larger
ones go through a Feistel network over a times b >= n, mixed radix so that hardly any index has
to walk twice. Both are functions of (n, key) alone and are held still by golden vectors.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import interpreted, kernel, quicker_without_numba

__all__ = [
    "below",
    "mix",
    "mix_many",
    "permutation",
    "permute",
    "permute_many",
    "permute_run",
    "unpermute",
]

SMALL = 64
"""Up to here an index costs a whole shuffle; beyond, a Feistel network is uniform enough."""

ROUNDS = 8
RUN = 256
"""Indices that go through a round together; their halves stay in the nearest cache."""
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
    """The smallest a with a * a >= n, and b with a * b >= n."""
    a = np.int64(np.sqrt(np.float64(n)))
    # The root is only a guess: whole numbers decide, so no processor can differ.
    while a * a < n:
        a += 1
    while (a - 1) * (a - 1) >= n:
        a -= 1
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
def permute_run(start: int, n: int, key: np.uint64, out: NDArray[np.int64]) -> None:
    """`permute` of start, start + 1, ... into all of `out`: the rounds run over many at once."""
    if n <= SMALL:
        order = _shuffled(n, key)
        for at in range(out.size):
            out[at] = order[start + at]
        return
    a, b = _sides(n)
    rounds = np.empty(ROUNDS, np.uint32)
    for number in range(ROUNDS):
        rounds[number] = mix(key, np.uint64(number)) & M32
    # Numbers of 32 bits, for which processors have wide instructions.
    left, right = np.empty(RUN, np.uint32), np.empty(RUN, np.uint32)
    a32, b32 = np.uint32(a), np.uint32(b)
    for first in range(0, out.size, RUN):
        count = min(RUN, out.size - first)
        high = (start + first) // b
        low = start + first - high * b
        for at in range(count):
            left[at], right[at] = high, low
            low += 1
            if low == b:
                low = 0
                high += 1
        for number in range(0, ROUNDS, 2):
            own, other = rounds[number], rounds[number + 1]
            for at in range(count):
                x = np.uint32(left[at] + _scaled32(own, right[at], a32))
                x = np.uint32(x - a32) if x >= a32 else x
                left[at] = x
                y = np.uint32(right[at] + _scaled32(other, x, b32))
                right[at] = np.uint32(y - b32) if y >= b32 else y
        for at in range(count):
            x64 = np.int64(left[at]) * b + np.int64(right[at])
            # Hardly any has to walk on.
            out[first + at] = x64 if x64 < n else permute(x64, n, key)


@kernel
def _scaled32(own: np.uint32, half: np.uint32, side: np.uint32) -> np.uint32:
    """`_round` in 32 bits."""
    x = np.uint32(half + own)
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x2C1B3C6D))
    x = np.uint32(x ^ (x >> np.uint32(12)))
    x = np.uint32(x * np.uint32(0x297A2D39))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    return np.uint32((np.uint64(x) * np.uint64(side)) >> np.uint64(32))


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


def permutation(n: int, key: np.uint64) -> NDArray[np.int64]:
    """The whole order: `permutation(n, key)[i] == permute(i, n, key)`."""
    if quicker_without_numba(n):
        return permute_many(np.arange(n), np.full(n, n), np.full(n, key))
    return _permutation(n, key)


@kernel
def _permutation(n: int, key: np.uint64) -> NDArray[np.int64]:
    out = np.empty(n, np.int64)
    permute_run(0, n, key, out)
    return out


def mix_many(
    key: np.uint64 | NDArray[np.uint64], counters: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """`mix` of many counters at once, by numpy alone."""
    with interpreted():
        return mix(key, counters)


def permute_many(
    index: NDArray[np.int64], n: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """`permute` of many indices, each in an order of its own, by numpy alone.

    >>> n, keys = np.array([5, 100]), np.array([7, 8], np.uint64)
    >>> permute_many(np.array([3, 42]), n, keys).tolist()
    [4, 61]
    """
    out = np.empty(len(index), np.int64)
    with interpreted():
        few = np.flatnonzero(n <= SMALL)
        orders = np.stack((n[few].astype(np.uint64), keys[few]))
        (sizes, own), which = np.unique(orders, axis=1, return_inverse=True)
        out[few] = _shuffled_many(sizes.astype(np.int64), own)[which, index[few]]
        walking = np.flatnonzero(n > SMALL)
        roots, which = np.unique(n[walking], return_inverse=True)
        sides = np.array([_sides(int(root)) for root in roots]).reshape(-1, 2)[which]
        at = index[walking]
        while walking.size:
            (a, b), key = sides.T, keys[walking]
            left, right = np.divmod(at, b)
            for number in range(0, ROUNDS, 2):
                left = (left + _round(key, number, right, a)) % a
                right = (right + _round(key, number + 1, left, b)) % b
            at = left * b + right
            out[walking] = at
            outside = at >= n[walking]
            walking, sides, at = walking[outside], sides[outside], at[outside]
    return out


def _shuffled_many(n: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The shuffled orders of several small n, a row each."""
    orders = np.tile(np.arange(SMALL), (len(n), 1))
    for last in range(int(n.max(initial=1)) - 1, 0, -1):
        rows = np.flatnonzero(n > last)
        other = below(keys[rows], last, last + 1)
        orders[rows, last], orders[rows, other] = orders[rows, other], orders[rows, last]
    return orders
