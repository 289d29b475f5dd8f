"""Compiled sums over all actions of a policy: the probability of every answer, and its gradient.

A policy draws a rule for a query by its weight, and then a fact for each step of the rule's body,
uniformly. Edges are followed in both directions, as `batchwright.logic.mine.Steps` lists them: the
ends of step s from x are `ends[ptr[s * n + x] : ptr[s * n + x + 1]]`.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.mine.kernels import walk

__all__ = ["answer", "learn"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

WIDE = 1 << 20
"""Edges that one rule may lead along from one entity."""


@kernel
def answer(
    given: Ints,
    heads: Longs,
    rule_ptr: Longs,
    bodies: Ints,
    lengths: Ints,
    weights: Doubles,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    mass: Doubles,
) -> int:
    """Fill [Q, N] with the probability of each answer to query q: step `heads[q]` from `given[q]`.

    A rule that leads along more than `WIDE` edges from an entity is left out there, and counted.

    The rules of step s are `rule_ptr[s]` to `rule_ptr[s + 1]`, with probabilities `weights`.
    """
    stamp = np.full(n, -1, np.int64)
    probability = np.zeros(n)
    out = np.empty(n, np.int32)
    now = left_out = 0
    for q in range(len(given)):
        for r in range(rule_ptr[heads[q]], rule_ptr[heads[q] + 1]):
            count = walk(
                given[q], bodies[r], lengths[r], ptr, ends, n, preds, -1, -1, True, stamp, now,
                probability, out, WIDE,
            )  # fmt: skip
            now += 1
            left_out += count < 0
            for i in range(count):
                mass[q, out[i]] += weights[r] * probability[out[i]]
    return left_out


@kernel
def learn(
    questions: Longs,
    rule_ptr: Longs,
    bodies: Ints,
    lengths: Ints,
    ptr: Ints,
    ends: Ints,
    n: int,
    preds: int,
    rate: float,
    logits: Doubles,
    squares: Doubles,
) -> tuple[float, int]:
    """One pass of Adagrad over questions (x, step, y); the mean loss and how many counted.

    The loss of a query is the negative log-probability that the policy answers y, given that it
    answers y or what is not known to be true; the query's own fact is hidden. Its gradient is the
    policy gradient over all rules at once: a rule gains by its share in the right answer and loses
    by its share in all of them. A query that no rule answers changes nothing.
    """
    stamp = np.full(n, -1, np.int64)
    probability = np.zeros(n)
    out = np.empty(n, np.int32)
    true = np.full(n, -1, np.int64)
    most = 1
    for s in range(len(rule_ptr) - 1):
        most = max(most, rule_ptr[s + 1] - rule_ptr[s])
    right, whole, weight = np.zeros(most), np.zeros(most), np.zeros(most)
    loss = 0.0
    counted = 0
    now = 0
    for q in range(len(questions)):
        x, step, y = questions[q, 0], questions[q, 1], questions[q, 2]
        first = rule_ptr[step]
        rules = rule_ptr[step + 1] - first
        for i in range(ptr[step * n + x], ptr[step * n + x + 1]):
            true[ends[i]] = q
        top = -np.inf
        for r in range(rules):
            top = max(top, logits[first + r])
        all_right = all_whole = 0.0
        for r in range(rules):
            count = walk(
                x, bodies[first + r], lengths[first + r], ptr, ends, n, preds, step, y, True, stamp,
                now, probability, out, WIDE,
            )  # fmt: skip
            now += 1
            right[r] = whole[r] = 0.0
            for i in range(count):
                e = out[i]
                if e == y:
                    right[r] = probability[e]
                if e == y or true[e] != q:
                    whole[r] += probability[e]
            weight[r] = np.exp(logits[first + r] - top)
            all_right += weight[r] * right[r]
            all_whole += weight[r] * whole[r]
        if all_right <= 0.0:
            continue
        loss += np.log(all_whole / all_right)
        counted += 1
        for r in range(rules):
            if whole[r] > 0.0:
                gradient = weight[r] * (whole[r] / all_whole - right[r] / all_right)
                squares[first + r] += gradient * gradient
                logits[first + r] -= rate * gradient / np.sqrt(squares[first + r])
    return loss / max(1, counted), counted
