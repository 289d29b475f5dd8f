"""Compiled scoring by rules: all that rules conclude of one query, and how it is joined or learned.

What a query reaches is gathered first, as hits (rule, entity, share), and then joined in as many
ways as are asked for. A rule that leads along more than `limit` edges from an entity says next to
nothing of where they end, and is left out of that query.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.facts import lower_bound
from batchwright.logic.mine.constants import Constants
from batchwright.logic.mine.kernels import inverse, walk
from batchwright.logic.mine.paths import Adjacency
from batchwright.logic.rows import row_span

__all__ = [
    "Program",
    "Scratch",
    "gather",
    "learn_rules",
    "new_scratch",
    "raise_evidence",
    "score_rules",
]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]


class Program(NamedTuple):
    """Chains by the step they answer, rules with constants, and the graph they are applied to."""

    rule_ptr: Longs
    """The chains of step s are `rule_ptr[s]` to `rule_ptr[s + 1]`; other rules follow them."""
    bodies: Ints
    lengths: Ints
    ptr: Ints
    ends: Ints
    edges: Adjacency
    constants: Constants
    reflexive: NDArray[np.bool_]
    """Whether the predicate holds of some entity and itself, [2 P]."""


class Scratch(NamedTuple):
    stamp: Longs
    share: Doubles
    out: Ints
    hit_rule: Longs
    hit_entity: Ints
    hit_share: Doubles


@kernel
def gather(
    x: int,
    step: int,
    y: int,
    program: Program,
    n: int,
    preds: int,
    limit: int,
    now: int,
    scratch: Scratch,
) -> tuple[int, int, int, Scratch]:
    """All hits of the query of `step` from x, in `scratch`: their number, `now`, rules left out.

    With y not negative the fact of the step from x to y is hidden.
    """
    count = wide = 0
    hidden = step if y >= 0 else -1
    loops = program.reflexive[step]
    for r in range(program.rule_ptr[step], program.rule_ptr[step + 1]):
        found = walk(
            x, program.bodies[r], program.lengths[r], program.ptr, program.ends, n, preds, hidden,
            y, False, scratch.stamp, now, scratch.share, scratch.out, limit,
        )  # fmt: skip
        now += 1
        if found < 0:
            wide += 1
            continue
        if count + found > len(scratch.hit_rule):
            scratch = _roomier(scratch, count + found)
        for i in range(found):
            e = scratch.out[i]
            if e != x or loops:
                scratch.hit_rule[count] = r
                scratch.hit_entity[count] = e
                scratch.hit_share[count] = scratch.share[e]
                count += 1
    given, edges = program.constants, program.edges
    first = program.rule_ptr[2 * preds]
    before = -1
    for i in range(edges.ptr[x] - 1, edges.ptr[x + 1]):
        # First what holds of everything, then what an edge says, and each of its steps once.
        for general in range(2):
            if i < edges.ptr[x]:
                if general:
                    continue
                feature = np.int64(2 * preds) * (n + 1)
            else:
                s, end = np.int64(edges.step[i]), edges.end[i]
                if s == hidden and end == y:
                    continue
                if general:
                    if s == before:
                        continue
                    before = s
                feature = s * (n + 1) + (n if general else end)
            key = feature * (2 * preds) + step
            k = _place(given.keys, key)
            if k < 0:
                continue
            found = given.ptr[k + 1] - given.ptr[k]
            if count + found > len(scratch.hit_rule):
                scratch = _roomier(scratch, count + found)
            for j in range(given.ptr[k], given.ptr[k + 1]):
                if given.entity[j] != x or loops:
                    scratch.hit_rule[count] = first + given.rule[j]
                    scratch.hit_entity[count] = given.entity[j]
                    scratch.hit_share[count] = 1.0
                    count += 1
    k = _place(given.back_keys, np.int64(step) * n + x)
    if k >= 0:
        for j in range(given.back_ptr[k], given.back_ptr[k + 1]):
            row = np.int64(inverse(given.back_step[j], preds)) * n + given.back_end[j]
            low, high = row_span(program.ptr, row)
            if high - low > limit:
                wide += 1
                continue
            if count + high - low > len(scratch.hit_rule):
                scratch = _roomier(scratch, count + high - low)
            for i in range(low, high):
                e = program.ends[i]
                # The hidden fact, read from its other end, is no evidence either.
                own = hidden >= 0 and e == y and given.back_step[j] == inverse(step, preds)
                own = own and given.back_end[j] == x
                if (e != x or loops) and not own:
                    scratch.hit_rule[count] = first + given.back_rule[j]
                    scratch.hit_entity[count] = e
                    scratch.hit_share[count] = 1.0 / (high - low)
                    count += 1
    return count, now, wide, scratch


@kernel
def _place(keys: Longs, wanted: int) -> int:
    """Where `wanted` stands in the ascending keys; -1 if nowhere."""
    at = lower_bound(keys, 0, len(keys), wanted)
    return at if at < len(keys) and keys[at] == wanted else -1


@kernel
def new_scratch(n: int) -> Scratch:
    return Scratch(
        np.full(n, -1, np.int64),
        np.zeros(n),
        np.empty(n, np.int32),
        np.empty(4096, np.int64),
        np.empty(4096, np.int32),
        np.empty(4096),
    )


@kernel
def _roomier(old: Scratch, needed: int) -> Scratch:
    room = max(needed, 2 * len(old.hit_rule))
    rule, entity, share = np.empty(room, np.int64), np.empty(room, np.int32), np.empty(room)
    for hit in range(len(old.hit_rule)):
        rule[hit] = old.hit_rule[hit]
        entity[hit] = old.hit_entity[hit]
        share[hit] = old.hit_share[hit]
    return Scratch(old.stamp, old.share, old.out, rule, entity, share)


@kernel
def _weighted(share: float, power: float) -> float:
    if power == 0.0:
        return 1.0
    if power == 0.5:
        return float(np.sqrt(share))
    if power == 1.0:
        return share
    if power == 2.0:
        return share * share
    return float(share**power)


@kernel
def raise_evidence(evidence: Doubles, powers: Doubles) -> Doubles:
    """Evidence [A, R] to the powers of its ways, where these are finite: once for all queries."""
    raised = evidence.copy()
    for a in range(len(powers)):
        if 1.0 < powers[a] < np.inf:
            for r in range(evidence.shape[1]):
                raised[a, r] = evidence[a, r] ** powers[a]
    return raised


@kernel
def score_rules(
    given: Ints,
    steps: Longs,
    program: Program,
    raised: Doubles,
    n: int,
    preds: int,
    limit: int,
    powers: Doubles,
    shares: Doubles,
    scores: NDArray[np.float32],
) -> int:
    """Fill [Q, A, N] with the scores of every way a to join what rules say; how many were left out.

    Way a is the `powers[a]`-norm over rules of evidence * share ** shares[a], share being the
    probability that a random walk along the rule ends at the entity. With infinite power the norm
    is the maximum. `raised` [A, R] is the evidence of `raise_evidence`.
    """
    scratch = new_scratch(n)
    # Powers are summed and their root is taken in 64 bits, one number at a time: in 32 bits, and
    # by the processor's vector units, the last bit would differ from machine to machine.
    total = np.zeros(n)
    seen = np.full(n, -1, np.int64)
    touched = np.empty(n, np.int32)
    now = wide = turn = 0
    for q in range(len(given)):
        count, now, left, scratch = gather(
            given[q], steps[q], -1, program, n, preds, limit, now, scratch
        )
        wide += left
        for a in range(len(powers)):
            power, exponent = powers[a], shares[a]
            if 1.0 < power < np.inf:
                exponent *= power
            reached = 0
            for i in range(count):
                e = scratch.hit_entity[i]
                part = raised[a, scratch.hit_rule[i]]
                if exponent != 0.0:
                    part *= _weighted(scratch.hit_share[i], exponent)
                if seen[e] != turn:
                    seen[e] = turn
                    total[e] = 0.0
                    touched[reached] = e
                    reached += 1
                if power == np.inf:
                    total[e] = max(total[e], part)
                else:
                    total[e] += part
            turn += 1
            for i in range(reached):
                e = touched[i]
                value = total[e]
                if 1.0 < power < np.inf:
                    value = value ** (1.0 / power)
                scores[q, a, e] = np.float32(value)
    return wide


@kernel
def learn_rules(
    questions: Longs,
    program: Program,
    n: int,
    preds: int,
    limit: int,
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
    scratch = new_scratch(n)
    score = np.zeros(n)
    seen = np.full(n, -1, np.int64)
    true = np.full(n, -1, np.int64)
    touched = np.empty(n, np.int32)
    slope = np.zeros(len(evidence))
    loss = 0.0
    counted = 0
    now = 0
    for q in range(len(questions)):
        x, step, y = questions[q, 0], questions[q, 1], questions[q, 2]
        others = n
        low, high = row_span(program.ptr, step * n + x)
        for i in range(low, high):
            true[program.ends[i]] = q
            if program.ends[i] != y:
                others -= 1
        count, now, _, scratch = gather(x, step, y, program, n, preds, limit, now, scratch)
        reached = 0
        for i in range(count):
            e = scratch.hit_entity[i]
            if true[e] == q and e != y:
                continue
            if seen[e] != q:
                seen[e] = q
                score[e] = 0.0
                touched[reached] = e
                reached += 1
            scratch.hit_share[i] = _weighted(scratch.hit_share[i], share_power)
            score[e] += evidence[scratch.hit_rule[i]] * scratch.hit_share[i]
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
        # Rules are met one after the other or again later; each is moved once.
        for i in range(count):
            e = scratch.hit_entity[i]
            if seen[e] == q and not (true[e] == q and e != y):
                slope[scratch.hit_rule[i]] += score[e] * scratch.hit_share[i]
        for i in range(count):
            rule = scratch.hit_rule[i]
            if slope[rule] != 0.0:
                squares[rule] += slope[rule] * slope[rule]
                evidence[rule] -= rate * slope[rule] / np.sqrt(squares[rule])
                slope[rule] = 0.0
    return loss / max(1, counted), counted
