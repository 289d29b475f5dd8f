"""Compiled loops that find bodies of rules and count them, at a cost that hubs do not raise.

An `Adjacency` lists the edges of an entity, in both directions, twice: by step and by end. So the
steps between two entities, or the ends of a step, are found by binary search, and memory grows with
the facts and the entities alone.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import BadProgram
from batchwright.jit import kernel
from batchwright.logic.facts import as_triples, check_size, lower_bound
from batchwright.logic.mine.kernels import inverse
from batchwright.permutation import mix

__all__ = ["Adjacency", "adjacency", "between", "count_bodies", "distinct", "find_paths"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class Adjacency(NamedTuple):
    """Edges as (step, end), from `ptr[x]` to `ptr[x + 1]`: by step and end, and by end and step."""

    ptr: Longs
    step: Ints
    end: Ints
    step_by_end: Ints
    end_by_end: Ints
    start_ptr: Longs
    """The entities that have step s are `starts[start_ptr[s] : start_ptr[s + 1]]`."""
    starts: Ints


def adjacency(triples: ArrayLike, entities: int, preds: int) -> Adjacency:
    """The edges of distinct triples (head, predicate, tail) in both directions."""
    h, p, t = distinct(triples, entities).T
    start = np.concatenate([h, t])
    step = np.concatenate([p, p + np.int32(preds)])
    end = np.concatenate([t, h])
    ptr = np.concatenate([[0], np.cumsum(np.bincount(start, minlength=entities))])
    order = np.lexsort((end, step, start))
    by_end = np.lexsort((step, end, start))
    of_step = np.unique(step.astype(np.int64) * entities + start)
    counts = np.bincount(of_step // entities, minlength=2 * preds)
    return Adjacency(
        ptr.astype(np.int64),
        step[order],
        end[order],
        step[by_end],
        end[by_end],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        (of_step % entities).astype(np.int32),
    )


def distinct(triples: ArrayLike, entities: int) -> Ints:
    """The triples, each once, by head, predicate and tail."""
    given = as_triples(triples)
    if given.min(initial=0) < 0 or given[:, [0, 2]].max(initial=-1) >= entities:
        raise BadProgram(
            f"triples hold ids outside the {entities:,} entities of the vocabulary; index them "
            f"with the one they came from"
        )
    high = int(given[:, 1].max(initial=0)) + 1
    check_size(entities, high)
    # One number for each, which is sorted several times as fast as rows are.
    h, p, t = given.astype(np.int64).T
    numbers = np.unique((h * high + p) * entities + t)
    rest, t = numbers // max(entities, 1), numbers % max(entities, 1)
    return np.stack([rest // high, rest % high, t], 1).astype(np.int32)


@kernel
def between(index: Adjacency, u: int, v: int) -> tuple[int, int]:
    """The span of `step_by_end` that holds the steps from u to v."""
    low, high = index.ptr[u], index.ptr[u + 1]
    first = lower_bound(index.end_by_end, low, high, v)
    last = first
    while last < high and index.end_by_end[last] == v:
        last += 1
    return first, last


@kernel
def _span(index: Adjacency, u: int, step: int) -> tuple[int, int]:
    """The span of `end` that holds the ends of a step from u."""
    low, high = index.ptr[u], index.ptr[u + 1]
    first = lower_bound(index.step, low, high, step)
    return first, lower_bound(index.step, first, high, step + 1)


@kernel
def _own(u: int, step: int, v: int, x: int, r: int, y: int, preds: int) -> bool:
    """Whether an edge is the fact r(x, y), in either direction."""
    return (u == x and step == r and v == y) or (u == y and step == r + preds and v == x)


@kernel
def find_paths(
    facts: Ints,
    index: Adjacency,
    preds: int,
    length: int,
    most: int,
    key: np.uint64,
    turn: int,
    out: Longs,
    count: int,
) -> tuple[int, int, bool]:
    """Add to the `count` keys in `out` the bodies that join the ends of facts (x, r, y).

    Returns the count, the facts done, and whether all paths were looked at. A key is
    ((s1 + 1) M + s2 + 1) M + s3 + 1 times P plus r, with M = 2 P + 1; shorter bodies have zeros at
    their end. Of a fact at most about `most` paths of each length are looked at, drawn at random by
    (key, turn + number of the fact) where there are more. It stops before a fact for which `out`
    may not do, unless that is empty.
    """
    room = len(out)
    whole = True
    m = 2 * preds + 1
    for fact in range(len(facts)):
        # No fact adds more than this: every look at a pair of edges gives at most 2 P bodies.
        if count + 2 * m * (most + 2) > room and count > 0:
            return count, fact, whole
        i = turn + fact
        x, r, y = facts[fact, 0], facts[fact, 1], facts[fact, 2]
        first, last = between(index, x, y)
        for a in range(first, last):
            s = index.step_by_end[a]
            if not _own(x, s, y, x, r, y, preds) and count < room:
                out[count] = ((s + 1) * m * m) * preds + r
                count += 1
        if length < 2:
            continue
        # From the end with fewer edges; t steps from y to z read backwards are steps to y.
        forward = index.ptr[x + 1] - index.ptr[x] <= index.ptr[y + 1] - index.ptr[y]
        near, far = (x, y) if forward else (y, x)
        low, size = index.ptr[near], index.ptr[near + 1] - index.ptr[near]
        looks = min(size, most)
        whole = whole and looks == size
        for k in range(looks):
            at = low + k
            if looks < size:
                at = low + np.int64(mix(key, np.uint64(i * most + k)) % np.uint64(size))
            s_near, z = index.step[at], index.end[at]
            if _own(near, s_near, z, x, r, y, preds):
                continue
            first, last = between(index, z, far)
            for a in range(first, last):
                s_far = index.step_by_end[a]
                if _own(z, s_far, far, x, r, y, preds):
                    continue
                if far == near and s_far == inverse(s_near, preds):
                    continue
                s1, s2 = s_near, s_far
                if not forward:
                    s1, s2 = inverse(s_far, preds), inverse(s_near, preds)
                if count < room:
                    out[count] = ((s1 + 1) * m * m + (s2 + 1) * m) * preds + r
                    count += 1
        if length < 3:
            continue
        low_x, size_x = index.ptr[x], index.ptr[x + 1] - index.ptr[x]
        low_y, size_y = index.ptr[y], index.ptr[y + 1] - index.ptr[y]
        looks = min(size_x * size_y, most)
        whole = whole and looks == size_x * size_y
        for k in range(looks):
            pair = k
            if looks < size_x * size_y:
                pair = np.int64(
                    mix(key + np.uint64(1), np.uint64(i * most + k)) % np.uint64(size_x * size_y)
                )
            a, b = low_x + pair // size_y, low_y + pair % size_y
            s1, z = index.step[a], index.end[a]
            t, w = index.step[b], index.end[b]
            s3 = inverse(t, preds)
            if _own(x, s1, z, x, r, y, preds) or _own(w, s3, y, x, r, y, preds):
                continue
            first, last = between(index, z, w)
            for c in range(first, last):
                s2 = index.step_by_end[c]
                if _own(z, s2, w, x, r, y, preds):
                    continue
                if (s2 == inverse(s1, preds) and w == x) or (s3 == inverse(s2, preds) and y == z):
                    continue
                if count < room:
                    out[count] = ((s1 + 1) * m * m + (s2 + 1) * m + s3 + 1) * preds + r
                    count += 1
    return count, len(facts), whole


@kernel
def _used(u: int, step: int, v: int, x: int, y: int, preds: int, bits: NDArray[np.uint8]) -> int:
    """The bit of the head whose own fact, between x and y, this edge is; 0 if none."""
    found = 0
    if u == x and v == y:
        found |= int(bits[step])
    if u == y and v == x:
        found |= int(bits[inverse(step, preds)])
    return found


@kernel
def _reach(
    x: int,
    body: Ints,
    length: int,
    index: Adjacency,
    preds: int,
    bits: NDArray[np.uint8],
    stamp: Longs,
    now: int,
    uses: NDArray[np.uint8],
    out: Ints,
    limit: int,
) -> tuple[int, int]:
    """How many distinct ends a body has from x, in `out` (-1: over `limit`); the edges looked at.

    `uses[y]` says which heads' own fact every chain to y uses: bit `bits[s]` is set if no chain
    reaches y without the fact of step s between x and y.
    """
    count = 0
    cost = 0
    first, last = _span(index, x, body[0])
    for i in range(first, last):
        z = index.end[i]
        low, high = i, i + 1
        if length >= 2:
            low, high = _span(index, z, body[1])
        for j in range(low, high):
            w = index.end[j]
            if length >= 2 and body[1] == inverse(body[0], preds) and w == x:
                continue
            low_3, high_3 = j, j + 1
            if length == 3:
                low_3, high_3 = _span(index, w, body[2])
            cost += high_3 - low_3 + 1
            if cost > limit:
                return -1, cost
            for k in range(low_3, high_3):
                y = index.end[k]
                if length == 3 and body[2] == inverse(body[1], preds) and y == z:
                    continue
                used = _used(x, body[0], z, x, y, preds, bits)
                if length >= 2:
                    used |= _used(z, body[1], w, x, y, preds, bits)
                if length == 3:
                    used |= _used(w, body[2], y, x, y, preds, bits)
                if stamp[y] != now:
                    stamp[y] = now
                    uses[y] = used
                    out[count] = y
                    count += 1
                else:
                    uses[y] &= used
        cost += 1
    return count, cost


@kernel
def count_bodies(
    bodies: Ints,
    lengths: Ints,
    begin: int,
    index: Adjacency,
    n: int,
    preds: int,
    limit: int,
    work: int,
    key: np.uint64,
    least_support: int,
    least_confidence: float,
    prior: float,
    stamp: Longs,
    uses: NDArray[np.uint8],
    out: Ints,
    now: int,
) -> tuple[Longs, Longs, Longs, Longs, int, int, int]:
    """Body, head step, support and pairs of every rule that is good enough.

    Then `now`, how many bodies were cut, and the body before which it stopped: it starts at body
    `begin` and ends after the one that brings the edges looked at to `work`.

    For each body entities are visited that it may begin at, in a random order if `limit` edges do
    not suffice for all of them. An entity from which a tenth of the limit does not suffice is left
    out, and the body is counted as cut in both cases. A pair whose every chain uses the head's own
    fact is counted neither for nor against the rule.
    """
    support = np.zeros(2 * preds, np.int64)
    touched = np.zeros(2 * preds, np.int64)
    less = np.zeros(8, np.int64)
    bits = np.zeros(2 * preds, np.uint8)
    slot = np.zeros(2 * preds, np.int64)
    found = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    cut = looked = 0
    b = begin
    while b < len(bodies) and looked < work:
        body, length = bodies[b], lengths[b]
        less[:] = 0
        slots = 0
        # Each step of the body and its reverse is a head whose own fact may be part of a chain.
        for i in range(length):
            for direction in range(2):
                step = int(body[i]) if direction == 0 else inverse(int(body[i]), preds)
                if bits[step] == 0:
                    bits[step] = np.uint8(1 << slots)
                    slot[step] = slots
                    slots += 1
        low, size = index.start_ptr[body[0]], index.start_ptr[body[0] + 1]
        size -= low
        heads = 0
        total = 0
        spent = 0
        short = False
        # A walk over all of them in a random order: a stride without common divisor.
        stride = np.int64(mix(key, np.uint64(2 * b)) % np.uint64(max(size, 1))) | 1
        while _divisor(stride, size) > 1:
            stride += 2
        at = np.int64(mix(key, np.uint64(2 * b + 1)) % np.uint64(max(size, 1)))
        for _ in range(size):
            if spent > limit:
                short = True
                break
            at = (at + stride) % size
            x = index.starts[low + at]
            count, cost = _reach(
                x, body, length, index, preds, bits, stamp, now, uses, out, limit // 10
            )
            spent += cost
            if count < 0:
                short = True
                now += 1
                continue
            total += count
            if count:
                for i in range(count):
                    mask = uses[out[i]]
                    if mask:
                        for s in range(slots):
                            if mask & np.uint8(1 << s):
                                less[s] += 1
                spent += index.ptr[x + 1] - index.ptr[x]
                for i in range(index.ptr[x], index.ptr[x + 1]):
                    step, y = index.step[i], index.end[i]
                    if stamp[y] == now and not (uses[y] & bits[step]):
                        if support[step] == 0:
                            touched[heads] = step
                            heads += 1
                        support[step] += 1
            now += 1
        cut += short
        looked += spent + 1
        mirrored = True
        for i in range(length):
            if body[i] != inverse(body[length - 1 - i], preds):
                mirrored = False
        for i in range(heads):
            step = touched[i]
            pairs = total - (less[slot[step]] if bits[step] else 0)
            # A body that is its own mirror says the same of a head and of its reverse.
            if (
                not (mirrored and step >= preds)
                and support[step] >= least_support
                and support[step] >= least_confidence * (pairs + prior)
            ):
                found.append((np.int64(b), np.int64(step), support[step], np.int64(pairs)))
            support[step] = 0
        for i in range(length):
            bits[body[i]] = 0
            bits[inverse(body[i], preds)] = 0
        b += 1
    columns = np.empty((4, len(found)), np.int64)
    for i in range(len(found)):
        for c in range(4):
            columns[c, i] = found[i][c]
    return columns[0], columns[1], columns[2], columns[3], now, cut, b


@kernel
def _divisor(a: int, b: int) -> int:
    """The greatest common divisor."""
    while b:
        a, b = b, a % b
    return a
