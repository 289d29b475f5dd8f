"""Compiled loops over chains of edges: where they lead, and what they foretell.

Edges are followed both ways. With P predicates and N entities, step s < P reads predicate s from
head to tail and step s + P reads it from tail to head; the ends of step s from x stand in
`ends[ptr[s * N + x] : ptr[s * N + x + 1]]`. A chain never goes back over the edge it just came by.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel

__all__ = ["apply_chains", "count_chains", "learn_chains", "reach"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bits = NDArray[np.uint8]
Doubles = NDArray[np.float64]


@kernel
def turned(step: int, preds: int) -> int:
    """The same step read the other way."""
    return step + preds if step < preds else step - preds


@kernel
def _direct(u: int, step: int, v: int, x: int, y: int, preds: int, bits: Bits) -> int:
    """The bit of the head whose own fact, between x and y, this step uses; 0 if none."""
    found = 0
    if u == x and v == y:
        found |= int(bits[step])
    if u == y and v == x:
        found |= int(bits[turned(step, preds)])
    return found


@kernel
def reach(
    x: int,
    body: Ints,
    length: int,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    bits: Bits,
    stamp: Longs,
    now: int,
    uses: Bits,
    out: Ints,
) -> int:
    """The distinct ends of a chain from x: their number, and they themselves in `out`.

    `uses[y]` says by which heads' own fact every way to y goes: bit `bits[s]` is set if no chain
    reaches y without the fact of step s between x and y.
    """
    count = 0
    for i in range(ptr[body[0] * n + x], ptr[body[0] * n + x + 1]):
        z = ends[i]
        if length == 1:
            used = _direct(x, body[0], z, x, z, preds, bits)
            if stamp[z] != now:
                stamp[z] = now
                uses[z] = used
                out[count] = z
                count += 1
            else:
                uses[z] &= used
            continue
        back = body[1] == turned(body[0], preds)
        for j in range(ptr[body[1] * n + z], ptr[body[1] * n + z + 1]):
            w = ends[j]
            if back and w == x:
                continue
            if length == 2:
                used = _direct(x, body[0], z, x, w, preds, bits)
                used |= _direct(z, body[1], w, x, w, preds, bits)
                if stamp[w] != now:
                    stamp[w] = now
                    uses[w] = used
                    out[count] = w
                    count += 1
                else:
                    uses[w] &= used
                continue
            back_again = body[2] == turned(body[1], preds)
            for k in range(ptr[body[2] * n + w], ptr[body[2] * n + w + 1]):
                y = ends[k]
                if back_again and y == z:
                    continue
                if stamp[y] == now and uses[y] == 0:
                    continue
                used = _direct(x, body[0], z, x, y, preds, bits)
                used |= _direct(z, body[1], w, x, y, preds, bits)
                used |= _direct(w, body[2], y, x, y, preds, bits)
                if stamp[y] != now:
                    stamp[y] = now
                    uses[y] = used
                    out[count] = y
                    count += 1
                else:
                    uses[y] &= used
    return count


@kernel
def count_chains(
    bodies: Ints,
    lengths: Ints,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    by_entity: Longs,
    edge_step: Ints,
    edge_end: Ints,
    totals: Longs,
    least_support: int,
    least_confidence: float,
    prior: float,
) -> tuple[Longs, Longs, Longs, Longs]:
    """Body, head step, support and pairs of every rule that is good enough.

    The edges of x, as steps, are `edge_step` and `edge_end` from `by_entity[x]` on. A pair whose
    every chain uses the head's own fact is counted neither for nor against the rule. `totals`
    takes the number of pairs of each body.
    """
    stamp = np.full(n, -1, np.int64)
    uses = np.zeros(n, np.uint8)
    out = np.empty(n, np.int32)
    support = np.zeros(2 * preds, np.int64)
    less = np.zeros(8, np.int64)
    bits = np.zeros(2 * preds, np.uint8)
    slot = np.zeros(2 * preds, np.int64)
    found_body = [np.int64(0) for _ in range(0)]
    found_head = [np.int64(0) for _ in range(0)]
    found_support = [np.int64(0) for _ in range(0)]
    found_total = [np.int64(0) for _ in range(0)]
    now = 0
    for b in range(len(bodies)):
        body = bodies[b]
        length = lengths[b]
        support[:] = 0
        less[:] = 0
        used_slots = 0
        # Each step of the body and its reverse is a head whose own fact may be on the way.
        for i in range(length):
            for way in range(2):
                step = int(body[i]) if way == 0 else turned(int(body[i]), preds)
                if bits[step] == 0:
                    bits[step] = np.uint8(1 << used_slots)
                    slot[step] = used_slots
                    used_slots += 1
        total = 0
        for x in range(n):
            if ptr[body[0] * n + x] == ptr[body[0] * n + x + 1]:
                continue
            count = reach(x, body, length, ptr, ends, n, preds, bits, stamp, now, uses, out)
            total += count
            if count:
                for i in range(count):
                    mask = uses[out[i]]
                    if mask:
                        for s in range(used_slots):
                            if mask & np.uint8(1 << s):
                                less[s] += 1
                for i in range(by_entity[x], by_entity[x + 1]):
                    step = edge_step[i]
                    y = edge_end[i]
                    if stamp[y] == now and not (uses[y] & bits[step]):
                        support[step] += 1
            now += 1
        totals[b] = total
        mirrored = True
        for i in range(length):
            if body[i] != turned(body[length - 1 - i], preds):
                mirrored = False
        # A body that is its own mirror says the same of a head and of its reverse.
        for step in range(preds if mirrored else 2 * preds):
            pairs = total - (less[slot[step]] if bits[step] else 0)
            if support[step] >= least_support and support[step] >= least_confidence * (
                pairs + prior
            ):
                found_body.append(np.int64(b))
                found_head.append(np.int64(step))
                found_support.append(support[step])
                found_total.append(np.int64(pairs))
        for i in range(length):
            bits[body[i]] = 0
            bits[turned(body[i], preds)] = 0
    return (
        np.array(found_body),
        np.array(found_head),
        np.array(found_support),
        np.array(found_total),
    )


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
    greatest: bool,
    scores: NDArray[np.float32],
) -> None:
    """Fill [Q, N] with the sum of the evidence of all rules that reach an entity, or the greatest.

    The rules of head step s are those from `rule_ptr[s]` to `rule_ptr[s + 1]`.
    """
    stamp = np.full(n, -1, np.int64)
    uses = np.zeros(n, np.uint8)
    out = np.empty(n, np.int32)
    bits = np.zeros(2 * preds, np.uint8)
    now = 0
    for q in range(len(given)):
        for r in range(rule_ptr[heads[q]], rule_ptr[heads[q] + 1]):
            count = reach(
                given[q], bodies[r], lengths[r], ptr, ends, n, preds, bits, stamp, now, uses, out
            )
            now += 1
            weight = np.float32(evidence[r])
            for i in range(count):
                if greatest:
                    scores[q, out[i]] = max(scores[q, out[i]], weight)
                else:
                    scores[q, out[i]] += weight


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
    rate: float,
    evidence: Doubles,
    squares: Doubles,
) -> tuple[float, int]:
    """One pass of Adagrad over questions (x, step, y); the mean loss and how many counted.

    The score of an entity is the sum of the evidence of all rules that reach it without the
    question's own fact, 0 if there is none; the loss is the cross-entropy of the softmax over all
    entities but other true answers. A question whose answer no rule reaches teaches nothing.
    """
    stamp = np.full(n, -1, np.int64)
    uses = np.zeros(n, np.uint8)
    out = np.empty(n, np.int32)
    bits = np.zeros(2 * preds, np.uint8)
    score = np.zeros(n)
    seen = np.full(n, -1, np.int64)
    true = np.full(n, -1, np.int64)
    touched = np.empty(n, np.int32)
    hits = np.empty(1024, np.int32)
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
        for i in range(ptr[step * n + x], ptr[step * n + x + 1]):
            true[ends[i]] = q
        bits[step] = 1
        reached = 0
        filled = 0
        others = n
        for i in range(ptr[step * n + x], ptr[step * n + x + 1]):
            others -= ends[i] != y
        for r in range(rules):
            rule = first + r
            count = reach(
                x, bodies[rule], lengths[rule], ptr, ends, n, preds, bits, stamp, now, uses, out
            )
            now += 1
            for i in range(count):
                e = out[i]
                if uses[e] or (true[e] == q and e != y):
                    continue
                if seen[e] != q:
                    seen[e] = q
                    score[e] = 0.0
                    touched[reached] = e
                    reached += 1
                score[e] += evidence[rule]
                if filled == len(hits):
                    more = np.empty(2 * filled, np.int32)
                    more[:filled] = hits
                    hits = more
                hits[filled] = e
                filled += 1
            hits_ptr[r + 1] = filled
        bits[step] = 0
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
                slope += score[hits[i]]
            rule = first + r
            squares[rule] += slope * slope
            evidence[rule] -= rate * slope / np.sqrt(squares[rule])
    return loss / max(1, counted), counted
