"""Kernels of the replay buffer: a sum tree for sampling, a tournament tree for eviction.

Both are binary trees in one array: node k has the children 2k and 2k + 1, the leaves begin at
half of the array. A node is computed from its two children each time, never by adding a
difference, so the trees are functions of their leaves alone and rounding cannot accumulate.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import mix, permute

__all__ = [
    "draw_distinct",
    "draw_proportional",
    "draw_uniform",
    "evicted_at_random",
    "mark",
    "place",
    "place_many",
    "rebuild",
    "remove",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@kernel
def _unit(key: np.uint64, counter: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return np.float64(mix(key, np.uint64(counter)) >> np.uint64(11)) * 2.0**-53


@kernel
def _set_weight(tree: Floats, slot: int, weight: float) -> None:
    node = slot + tree.size // 2
    tree[node] = weight
    node //= 2
    while node >= 1:
        tree[node] = tree[2 * node] + tree[2 * node + 1]
        node //= 2


@kernel
def _sooner(a: int, b: int, priorities: Floats, serials: Ints, by_priority: bool) -> int:
    """Which of two entries is evicted first; 0 stands for no entry, k + 1 for slot k."""
    if a == 0 or b == 0:
        return a + b
    if by_priority and priorities[a - 1] != priorities[b - 1]:
        return a if priorities[a - 1] < priorities[b - 1] else b
    return a if serials[a - 1] < serials[b - 1] else b


@kernel
def _set_contender(
    first: Ints, slot: int, entry: int, priorities: Floats, serials: Ints, by_priority: bool
) -> None:
    node = slot + first.size // 2
    first[node] = entry
    node //= 2
    while node >= 1:
        first[node] = _sooner(
            first[2 * node], first[2 * node + 1], priorities, serials, by_priority
        )
        node //= 2


@kernel
def place(
    tree: Floats,
    first: Ints,
    priorities: Floats,
    serials: Ints,
    by_priority: bool,
    slot: int,
    weight: float,
) -> None:
    """Let `slot`, whose priority and serial are set, take part with this weight."""
    _set_weight(tree, slot, weight)
    if first.size:
        _set_contender(first, slot, slot + 1, priorities, serials, by_priority)


@kernel
def remove(
    tree: Floats, first: Ints, priorities: Floats, serials: Ints, by_priority: bool, slot: int
) -> None:
    """Take `slot` out of both trees."""
    _set_weight(tree, slot, 0.0)
    if first.size:
        _set_contender(first, slot, 0, priorities, serials, by_priority)


@kernel
def place_many(
    tree: Floats,
    first: Ints,
    priorities: Floats,
    serials: Ints,
    by_priority: bool,
    dirty: NDArray[np.uint8],
    size: int,
    slots: Ints,
    expected: Ints,
    given: Floats,
    weights: Floats,
) -> int:
    """Give `slots` new priorities, in order; one whose serial is not `expected` is passed over.

    Returns how many were set.
    """
    done = 0
    for k in range(slots.size):
        slot = slots[k]
        if slot < 0 or slot >= size or serials[slot] != expected[k]:
            continue
        priorities[slot] = given[k]
        dirty[slot] |= 1
        _set_weight(tree, slot, weights[k])
        if first.size and by_priority:
            _set_contender(first, slot, slot + 1, priorities, serials, by_priority)
        done += 1
    return done


@kernel
def rebuild(
    tree: Floats,
    first: Ints,
    priorities: Floats,
    serials: Ints,
    by_priority: bool,
    weights: Floats,
) -> None:
    """Set the first `weights.size` slots at once and empty the others: O(n)."""
    half = tree.size // 2
    for slot in range(half):
        tree[half + slot] = weights[slot] if slot < weights.size else 0.0
        if first.size:
            first[half + slot] = slot + 1 if slot < weights.size else 0
    for node in range(half - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]
        if first.size:
            first[node] = _sooner(
                first[2 * node], first[2 * node + 1], priorities, serials, by_priority
            )


@kernel
def _find(tree: Floats, mass: float) -> int:
    """The slot at `mass` of the cumulative weights; never one of weight 0."""
    half = tree.size // 2
    node = 1
    while node < half:
        node *= 2
        # Rounding may leave a little more mass than the right side has: the last slot that
        # weighs anything takes it.
        if mass >= tree[node] and tree[node + 1] > 0.0:
            mass -= tree[node]
            node += 1
    return node - half


@kernel
def draw_proportional(tree: Floats, base: np.uint64, draw: int, slots: Ints) -> None:
    """Fill `slots` in proportion to the weights, with replacement, in random order.

    Stratified: draw k of n falls into the k-th of n equal parts of the whole weight. A slot that
    has the share s is expected s * n times, and comes at least floor(s * n) - 1 and at most
    ceil(s * n) + 1 times.
    """
    key = mix(base, np.uint64(draw))
    n = slots.size
    masses = np.empty(n, np.float64)
    for k in range(n):
        masses[k] = (k + _unit(key, k)) / n * tree[1]
        slots[k] = 1
    # As `_find`, but all draws go down together: the processor waits for many of them at once.
    half = tree.size // 2
    level = 1
    while level < half:
        for k in range(n):
            node = 2 * slots[k]
            left = tree[node]
            right = np.int64((masses[k] >= left) & (tree[node + 1] > 0.0))
            masses[k] -= right * left
            slots[k] = node + right
        level *= 2
    for k in range(n):
        slots[k] -= half
    for last in range(n - 1, 0, -1):
        other = int(_unit(key, n + last) * (last + 1))
        held = slots[last]
        slots[last] = slots[other]
        slots[other] = held


@kernel
def draw_distinct(tree: Floats, base: np.uint64, draw: int, slots: Ints) -> int:
    """Fill `slots` one after the other, each in proportion to the weights that are left.

    Returns how many were found: fewer than asked if there are fewer weights above 0.
    """
    key = mix(base, np.uint64(draw))
    taken = np.empty(slots.size, np.float64)
    found = 0
    half = tree.size // 2
    while found < slots.size and tree[1] > 0.0:
        slot = _find(tree, _unit(key, found) * tree[1])
        taken[found] = tree[half + slot]
        slots[found] = slot
        _set_weight(tree, slot, 0.0)
        found += 1
    for k in range(found):
        _set_weight(tree, slots[k], taken[k])
    return found


@kernel
def draw_uniform(size: int, base: np.uint64, draw: int, distinct: bool, slots: Ints) -> None:
    """Fill `slots` with slots below `size`, all equally likely."""
    key = mix(base, np.uint64(draw))
    for k in range(slots.size):
        slots[k] = permute(k, size, key) if distinct else int(_unit(key, k) * size)


@kernel
def evicted_at_random(base: np.uint64, number: int, size: int) -> int:
    """The slot that eviction `number` takes."""
    return int(_unit(base, number) * size)


@kernel
def mark(
    tree: Floats,
    slots: Ints,
    replays: Ints,
    dirty: NDArray[np.uint8],
    weights: Floats,
) -> None:
    """Count one replay for each of `slots`, and write down their weights."""
    half = tree.size // 2
    for k in range(slots.size):
        slot = slots[k]
        replays[slot] += 1
        dirty[slot] |= 1
        weights[k] = tree[half + slot]
