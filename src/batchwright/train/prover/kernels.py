"""Compiled sums over all actions of a policy: the probability of every answer, and its gradient.

A policy draws a rule for a query by its weight, and then a fact for each step of the rule's body,
uniformly. Edges are followed in both directions, as `batchwright.logic.mine.Steps` lists them: the
ends of step s from x are `ends[low:high]` with `low, high = row_span(ptr, s * n + x)`.

Another policy follows every rule and draws one of the answers they prove, by the summed weights of
the rules that prove it: `find_answers` draws, and `improve_answers` has the gradient of PPO.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.mine.kernels import walk
from batchwright.logic.mine.score import Program, gather, new_scratch
from batchwright.logic.rows import row_span
from batchwright.permutation import mix

__all__ = ["answer", "find_answers", "improve_answers", "learn"]

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
        low, high = row_span(ptr, step * n + x)
        for i in range(low, high):
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


@kernel
def find_answers(
    questions: Longs,
    program: Program,
    n: int,
    preds: int,
    limit: int,
    weights: Doubles,
    key: np.uint64,
    ptr: Longs,
    hit_rule: Ints,
    hit_answer: Ints,
    answers: Longs,
    right: Longs,
    drawn: Ints,
    logp: Doubles,
) -> int:
    """Follow every rule of questions (x, step, y), and draw from the answers that they prove.

    The fact of each question is hidden, and its other known answers are left out. Answers are
    numbered as they are found: `answers[q]` of them, y being number `right[q]` (-1: not proved).
    Hit i of `ptr[q]` to `ptr[q + 1]` says that rule `hit_rule[i]` proves answer `hit_answer[i]`.
    Row q of `drawn` are draws from the softmax of the summed weights, the number of draw d being
    named by (key, q, d), and `logp` their log-probabilities. Returns how many questions there was
    room for in the hits.
    """
    scratch = new_scratch(n)
    seen = np.full(n, -1, np.int64)
    true = np.full(n, -1, np.int64)
    place = np.zeros(n, np.int32)
    score = np.zeros(n)
    now = at = 0
    for q in range(len(questions)):
        x, step, y = questions[q, 0], questions[q, 1], questions[q, 2]
        low, high = row_span(program.ptr, step * n + x)
        for i in range(low, high):
            true[program.ends[i]] = q
        count, now, _, scratch = gather(x, step, y, program, n, preds, limit, now, scratch)
        if at + count > len(hit_rule):
            return q
        ptr[q] = at
        reached = 0
        for i in range(count):
            e = scratch.hit_entity[i]
            if true[e] == q and e != y:
                continue
            if seen[e] != q:
                seen[e] = q
                place[e] = reached
                score[reached] = 0.0
                reached += 1
            hit_rule[at] = scratch.hit_rule[i]
            hit_answer[at] = place[e]
            score[place[e]] += weights[hit_rule[at]]
            at += 1
        ptr[q + 1] = at
        answers[q] = reached
        right[q] = place[y] if seen[y] == q else -1
        if not reached:
            continue
        total = _shares(score, reached)
        for d in range(drawn.shape[1]):
            # 53 bits of the hash, in [0, 1).
            bits = mix(mix(key, np.uint64(q)), np.uint64(d)) >> np.uint64(11)
            aim = np.float64(bits) * 2.0**-53 * total
            passed = 0.0
            chosen = 0
            for k in range(reached):
                if score[k] > 0.0:
                    passed += score[k]
                    chosen = k
                    if passed > aim:
                        break
            drawn[q, d] = chosen
            logp[q, d] = np.log(score[chosen] / total)
    return len(questions)


@kernel
def _shares(score: Doubles, count: int) -> float:
    """Put exp(score - greatest) in place of the first `count` scores; their sum."""
    top = -np.inf
    for k in range(count):
        top = max(top, score[k])
    total = 0.0
    for k in range(count):
        score[k] = np.exp(score[k] - top)
        total += score[k]
    return total


@kernel
def improve_answers(
    some: Longs,
    n: int,
    ptr: Longs,
    hit_rule: Ints,
    hit_answer: Ints,
    answers: Longs,
    right: Longs,
    drawn: Ints,
    logp: Doubles,
    weights: Doubles,
    clip: float,
    entropy_coef: float,
    slope: Doubles,
) -> tuple[float, float, float]:
    """Add the gradient of PPO's clipped objective at questions `some`, as `find_answers` left them.

    The reward of an answer is 1 if it is right and 0 if not. Its advantage is how far that lies
    from the mean over the draws of its question, in their standard deviations; if all draws are
    right or all wrong, nothing is learned from them. Returns sums over the draws: how many were
    clipped, the approximate KL divergence, and the entropy of the policy.
    """
    share = np.zeros(n)
    gain = np.zeros(n)
    draws = drawn.shape[1]
    clipped = kl = entropies = 0.0
    for q in some:
        count = answers[q]
        if not count:
            continue
        for k in range(count):
            share[k] = gain[k] = 0.0
        for i in range(ptr[q], ptr[q + 1]):
            share[hit_answer[i]] += weights[hit_rule[i]]
        total = _shares(share, count)
        entropy = 0.0
        for k in range(count):
            share[k] /= total
            if share[k] > 0.0:
                entropy -= share[k] * np.log(share[k])
        entropies += entropy * draws
        hits = 0
        for d in range(draws):
            hits += drawn[q, d] == right[q]
        mean = hits / draws
        spread = np.sqrt(mean * (1.0 - mean))
        moved = 0.0
        for d in range(draws):
            k = drawn[q, d]
            ratio = share[k] / np.exp(logp[q, d])
            kl += ratio - 1.0 - np.log(max(ratio, 1e-300))
            if spread == 0.0:
                continue
            advantage = ((1.0 if k == right[q] else 0.0) - mean) / spread
            if (advantage > 0.0 and ratio > 1.0 + clip) or (advantage < 0.0 and ratio < 1.0 - clip):
                clipped += 1.0
                continue
            gain[k] += advantage * ratio / draws
            moved += advantage * ratio / draws
        for k in range(count):
            gain[k] -= moved * share[k]
            if share[k] > 0.0:
                gain[k] -= entropy_coef * share[k] * (np.log(share[k]) + entropy)
        for i in range(ptr[q], ptr[q + 1]):
            slope[hit_rule[i]] += gain[hit_answer[i]]
    return clipped, kl, entropies
