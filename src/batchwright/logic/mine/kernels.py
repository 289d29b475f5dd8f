"""Compiled loops over chains of edges: where they lead, and what they predict.

Edges are followed in both directions. With P predicates and N entities, step s < P reads predicate
s from head to tail and step s + P reads it from tail to head; the ends of step s from x are
`ends[ptr[s * N + x] : ptr[s * N + x + 1]]`. A chain never goes back over the edge it just came by.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel

__all__ = ["apply_chains", "inverse", "learn_chains", "walk"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]


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
    low, high = int(ptr[step * n + u]), int(ptr[step * n + u + 1])
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
) -> int:
    """The distinct ends of a chain from x, and the probability that a random walk ends in each.

    The fact of step `hidden` from x to y is taken out of the graph; -1 hides nothing. No walk
    uses the fact it just came by once more. That fact is not a choice, or, with `lost`, a choice
    whose probability is lost, as for a policy that draws it and has then proved nothing. (Such a
    policy may not take a loop twice either, which is one fact in both directions.)
    """
    count = 0
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


@kernel
def _weighted(share: float, power: float) -> float:
    if power == 0.0:
        return 1.0
    if power == 0.5:
        return float(np.sqrt(share))
    return float(share**power)


@kernel
def apply_chains(
    given: Ints,
    heads: Longs,
    rule_ptr: Longs,
    bodies: Ints,
    lengths: Ints,
    evidence: Doubles,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    share_power: float,
    power: float,
    scores: NDArray[np.float32],
) -> None:
    """Fill [Q, N] with the `power`-norm over rules of evidence * share ** share_power.

    The rules of head step s are those from `rule_ptr[s]` to `rule_ptr[s + 1]`; share is the
    probability that a random walk along the rule ends at the entity. With infinite `power` the
    norm is the maximum.
    """
    stamp = np.full(n, -1, np.int64)
    share = np.zeros(n)
    out = np.empty(n, np.int32)
    # Powers are summed and their root is taken in 64 bits, one number at a time: in 32 bits, and
    # by the processor's vector units, the last bit would differ from machine to machine.
    total = np.zeros(n)
    now = 0
    for q in range(len(given)):
        for r in range(rule_ptr[heads[q]], rule_ptr[heads[q] + 1]):
            count = walk(
                given[q],
                bodies[r],
                lengths[r],
                ptr,
                ends,
                n,
                preds,
                -1,
                -1,
                False,
                stamp,
                now,
                share,
                out,
            )
            now += 1
            for i in range(count):
                e = out[i]
                part = evidence[r] * _weighted(share[e], share_power)
                if np.isinf(power):
                    scores[q, e] = max(scores[q, e], np.float32(part))
                elif power == 1.0:
                    scores[q, e] += np.float32(part)
                else:
                    total[e] += part**power
        if 1.0 < power < np.inf:
            for e in range(n):
                if total[e] > 0.0:
                    scores[q, e] = np.float32(total[e] ** (1.0 / power))
                    total[e] = 0.0


@kernel
def learn_chains(
    questions: Longs,
    rule_ptr: Longs,
    bodies: Ints,
    lengths: Ints,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    share_power: float,
    rate: float,
    evidence: Doubles,
    squares: Doubles,
) -> tuple[float, int]:
    """One pass of Adagrad over questions (x, step, y); the mean loss and how many counted.

    The score of an entity is the sum over rules of evidence * share ** share_power with the
    question's own fact hidden, 0 if no rule reaches it; the loss is the cross-entropy of the
    softmax over all entities but other true answers. A question whose answer no rule reaches
    changes nothing.
    """
    stamp = np.full(n, -1, np.int64)
    share = np.zeros(n)
    out = np.empty(n, np.int32)
    score = np.zeros(n)
    seen = np.full(n, -1, np.int64)
    true = np.full(n, -1, np.int64)
    touched = np.empty(n, np.int32)
    hits = np.empty(1024, np.int32)
    parts = np.empty(1024)
    hits_ptr = np.zeros(np.max(np.diff(rule_ptr)) + 1, np.int64)
    loss = 0.0
    counted = 0
    now = 0
    for q in range(len(questions)):
        x = questions[q, 0]
        step = questions[q, 1]
        y = questions[q, 2]
        first = rule_ptr[step]
        rules = rule_ptr[step + 1] - first
        others = n
        for i in range(ptr[step * n + x], ptr[step * n + x + 1]):
            true[ends[i]] = q
            if ends[i] != y:
                others -= 1
        reached = 0
        filled = 0
        for r in range(rules):
            rule = first + r
            count = walk(
                x,
                bodies[rule],
                lengths[rule],
                ptr,
                ends,
                n,
                preds,
                step,
                y,
                False,
                stamp,
                now,
                share,
                out,
            )
            now += 1
            if filled + count > len(hits):
                room = max(2 * len(hits), filled + count)
                more = np.empty(room, np.int32)
                more[:filled] = hits[:filled]
                hits = more
                more_parts = np.empty(room)
                more_parts[:filled] = parts[:filled]
                parts = more_parts
            for i in range(count):
                e = out[i]
                if true[e] == q and e != y:
                    continue
                if seen[e] != q:
                    seen[e] = q
                    score[e] = 0.0
                    touched[reached] = e
                    reached += 1
                parts[filled] = _weighted(share[e], share_power)
                score[e] += evidence[rule] * parts[filled]
                hits[filled] = e
                filled += 1
            hits_ptr[r + 1] = filled
        if seen[y] != q:
            continue
        top = 0.0
        for i in range(reached):
            top = max(top, score[touched[i]])
        total = (others - reached) * np.exp(-top)
        for i in range(reached):
            total += np.exp(score[touched[i]] - top)
        loss += top + np.log(total) - score[y]
        counted += 1
        for i in range(reached):
            score[touched[i]] = np.exp(score[touched[i]] - top) / total
        score[y] -= 1.0
        for r in range(rules):
            if hits_ptr[r] == hits_ptr[r + 1]:
                continue
            slope = 0.0
            for i in range(hits_ptr[r], hits_ptr[r + 1]):
                slope += score[hits[i]] * parts[i]
            rule = first + r
            squares[rule] += slope * slope
            evidence[rule] -= rate * slope / np.sqrt(squares[rule])
    return loss / max(1, counted), counted
