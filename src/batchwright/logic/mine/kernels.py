"""Compiled loops over chains of edges: where they lead, and what they predict.

Edges are followed in both directions. With P predicates and N entities, step s < P reads predicate
s from head to tail and step s + P reads it from tail to head; the ends of step s from x are
`ends[low:high]` with `low, high = row_span(ptr, s * N + x)`. A chain never goes back over the edge
it just came by.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.rows import row_span

__all__ = ["NO_LIMIT", "inverse", "walk"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

NO_LIMIT = 2**62
"""A limit of edges that no chain reaches."""


@kernel
def inverse(step: int, preds: int) -> int:
    """The same step in the other direction."""
    return step + preds if step < preds else step - preds


@kernel
def _choices(
    u: int,
    step: int,
    by: int,
    before: int,
    x: int,
    hidden: int,
    y: int,
    lost: bool,
    reached: float,
    ptr: Ints,
    n: int,
    preds: int,
) -> tuple[int, int, int, int, float]:
    """A step from u, reached by step `by` from `before` with probability `reached`; see `walk`.

    Returns its span in `ends`; the two of them that are excluded, as the hidden fact and as the
    fact we came by (-1: none); and the probability of each of the others.
    """
    low, high = row_span(ptr, np.int64(step) * n + u)
    count = high - low
    facing = back = -1
    if hidden >= 0:
        if step == hidden and u == x:
            facing = y
        elif step == inverse(hidden, preds) and u == y:
            facing = x
        if facing >= 0:
            count -= 1
    if by >= 0:
        if step == inverse(by, preds):
            back = before
            if not lost and back != facing:
                count -= 1
        elif lost and step == by and u == before:
            back = u
    return low, high, facing, back, reached / count if count > 0 else 0.0


@kernel
def walk(
    x: int,
    body: Ints,
    length: int,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    hidden: int,
    y: int,
    lost: bool,
    stamp: Longs,
    now: int,
    probability: Doubles,
    out: Ints,
    limit: int,
) -> int:
    """The distinct ends of a chain from x, and the probability that a random walk ends in each.

    -1 if more than `limit` edges lead to them.

    The fact of step `hidden` from x to y is taken out of the graph; -1 hides nothing. No walk
    uses the fact it just came by once more. That fact is not a choice, or, with `lost`, a choice
    whose probability is lost, as for a policy that draws it and has then proved nothing. (Such a
    policy may not take a loop twice either, which is one fact in both directions.)
    """
    count = 0
    cost = 0
    # A shorter chain stays put in the outer loops, so that walks end in one place; a function
    # for that place would be called too often.
    low, high, facing, reached = 0, 1, -1, 1.0
    by_1 = by_2 = -1
    if length == 3:
        low, high, facing, _, reached = _choices(
            x, body[0], -1, -1, x, hidden, y, lost, 1.0, ptr, n, preds
        )
        by_1 = int(body[0])
    if length >= 2:
        by_2 = int(body[length - 2])
    for i in range(low, high):
        z = int(ends[i]) if length == 3 else x
        if z == facing:
            continue
        low_2, high_2, facing_2, back_2, reached_2 = 0, 1, -1, -1, reached
        if length >= 2:
            low_2, high_2, facing_2, back_2, reached_2 = _choices(
                z, by_2, by_1, x, x, hidden, y, lost, reached, ptr, n, preds
            )
        for j in range(low_2, high_2):
            w = int(ends[j]) if length >= 2 else z
            if w in (facing_2, back_2):
                continue
            low_3, high_3, facing_3, back_3, each = _choices(
                w, body[length - 1], by_2, z, x, hidden, y, lost, reached_2, ptr, n, preds
            )
            cost += 1 + high_3 - low_3
            if cost > limit:
                return -1
            for k in range(low_3, high_3):
                end = ends[k]
                if end in (facing_3, back_3):
                    continue
                if stamp[end] != now:
                    stamp[end] = now
                    probability[end] = 0.0
                    out[count] = end
                    count += 1
                probability[end] += each
    return count
