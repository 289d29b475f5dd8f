"""Rules with constants: what an edge of an entity, or nothing at all, says of its other edges.

    born_in(X, rome)   <- citizen_of(X, italy)     an edge to a constant
    born_in(X, rome)   <- citizen_of(X, Z)         an edge to anything
    speaks(X, english) <-                          nothing: how often the answer is right

Confidence is support / (pairs + prior) as of chains: of all X with the body, how many have the
head. A fact does not count for itself. Where an answer has so many X that only some are looked at,
they say which bodies to count; each is then counted over X that have it, all or evenly drawn ones.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.jit import kernel
from batchwright.logic.facts import Facts, as_triples, lower_bound
from batchwright.logic.mine.kernels import inverse
from batchwright.logic.mine.paths import Adjacency, adjacency
from batchwright.logic.rules import Atom, Clause, Rules
from batchwright.logic.vocab import Vocab

__all__ = ["CONSTANT_CONFIDENCE", "NO_CONSTANTS", "Constants", "constants_of", "mine_constants"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

CONSTANT_CONFIDENCE = 0.05
"""The lowest confidence of a rule with constants, of which there are very many, unless told."""
SEEN = 256
"""Entities of one answer, and edges of one entity, that are looked at."""
WORK = 2**19
"""Edges looked at between two moments at which Ctrl-C is heard, or those of one answer."""
EACH = 10
"""Rules kept for one answer of a relation."""


class Constants(NamedTuple):
    """Rules with constants by what they are looked up with.

    Forward, for an entity x that is given: key number k is (feature * 2 P + step of the query),
    and its rules `ptr[k]` to `ptr[k + 1]` conclude `entity`. A feature is an edge of x, step *
    (n + 1) + end, with n for any end; 2 P (n + 1) is none. Backward, for a constant that is given:
    rules `back_ptr[k]` to `back_ptr[k + 1]` of key (step * n + constant) are concluded of all that
    have the edge (`back_step`, `back_end`).
    """

    keys: Longs
    ptr: Longs
    entity: Ints
    rule: Longs
    back_keys: Longs
    back_ptr: Longs
    back_step: Ints
    back_end: Ints
    back_rule: Longs


NO_CONSTANTS = Constants(
    np.empty(0, np.int64),
    np.zeros(1, np.int64),
    np.empty(0, np.int32),
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    np.zeros(1, np.int64),
    np.empty(0, np.int32),
    np.empty(0, np.int32),
    np.empty(0, np.int64),
)


def mine_constants(
    facts: Facts | ArrayLike,
    vocab: Vocab,
    *,
    min_support: int = 2,
    min_confidence: float = CONSTANT_CONFIDENCE,
    most: int = 1000,
    prior: float = 5.0,
    progress: Callable[[int, int], None] | None = None,
) -> Rules:
    """Rules with constants, at most `most` for each end of each predicate, the best.

    `min_confidence` is for those with a body. The others say how frequent an answer is, which
    orders what no other rule tells apart.

    >>> vocab = Vocab.of(["a", "b", "c", "d", "it", "ro"], ["in", "of"])
    >>> facts = [(e, 0, 5) for e in range(4)] + [(e, 1, 4) for e in range(3)]
    >>> rules = mine_constants(facts, vocab, min_confidence=0.3)
    >>> [rules.text(r, vocab).partition(":")[2] for r in range(len(rules))][:3]
    ['0.444444444444: -> in(X,ro)', '0.375:of(X,Y) -> in(X,ro)', '0.375:of(X,it) -> in(X,ro)']
    """
    triples = as_triples(facts.triples if isinstance(facts, Facts) else facts)
    n, preds = vocab.num_entities, vocab.num_predicates
    index = adjacency(triples, n, preds)
    codes = index.step.astype(np.int64) * n + index.end
    names, feature, counts = np.unique(codes, return_inverse=True, return_counts=True)
    count, count_any = np.zeros(len(names), np.int64), np.zeros(2 * preds, np.int64)
    clauses: list[Clause] = []
    weights: list[float] = []
    feature, counts = feature.astype(np.int64), counts.astype(np.int64)
    for s in range(2 * preds):
        first, last = index.start_ptr[inverse(s, preds)], index.start_ptr[inverse(s, preds) + 1]
        parts: list[list[Any]] = []
        # A part at a time, so that Ctrl-C is heard.
        while not parts or first < last:
            first, *part = _count_answers(
                s, first, index, feature, counts, preds, min_support, min_confidence, prior, WORK,
                count, count_any,
            )  # fmt: skip
            parts.append(part)
        rows, confidence = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0], -confidence))[:most]
        for i in order.tolist():
            c, step, code = rows[i].tolist()
            end = int(names[code] % n) if code >= 0 else n + 1
            head = _atom(s, n, c, preds)
            clauses.append((head, [_atom(step, n, end, preds)] if step >= 0 else []))
            weights.append(float(confidence[i]))
        if progress:
            progress(s + 1, 2 * preds)
    return Rules.of(clauses, vocab, weights, [f"c{number}" for number in range(len(clauses))])


def _atom(step: int, x: int, end: int, preds: int) -> Atom:
    """The edge from x by a step to an end."""
    return (step, x, end) if step < preds else (step - preds, end, x)


@kernel
def _supported(s: int, c: int, step: int, end: int, index: Adjacency, preds: int) -> int:
    """How many X that have edge (step, end), or of end -1 any by that step, have edge (s, c).

    If they are more than `SEEN`, as many are looked at, evenly drawn, and speak for the others.
    """
    if end < 0:
        low, high = index.start_ptr[step], index.start_ptr[step + 1]
    else:
        turned = inverse(step, preds)
        first, last = index.ptr[end], index.ptr[end + 1]
        low = lower_bound(index.step, first, last, turned)
        high = lower_bound(index.step, low, last, turned + 1)
    pairs = high - low
    looks, hits = min(pairs, SEEN), 0
    for k in range(looks):
        at = low + k * pairs // looks
        x = index.starts[at] if end < 0 else index.end[at]
        last = index.ptr[x + 1]
        first = lower_bound(index.step, index.ptr[x], last, s)
        last = lower_bound(index.step, first, last, s + 1)
        place = lower_bound(index.end, first, last, c)
        if place == last or index.end[place] != c:
            continue
        if x != c or step != inverse(s, preds):
            hits += 1
        elif end >= 0:
            hits += end != c
        else:
            # The fact is a loop, and the edge back is the same one: it takes another.
            last = lower_bound(index.step, index.ptr[x], index.ptr[x + 1], step + 1)
            hits += last - lower_bound(index.step, index.ptr[x], last, step) > 1
    return hits * pairs // max(1, looks)


@kernel
def _count_answers(
    s: int,
    first_answer: int,
    index: Adjacency,
    feature: Longs,
    counts: Longs,
    preds: int,
    least_support: int,
    least_confidence: float,
    prior: float,
    work: int,
    count: Longs,
    count_any: Longs,
) -> tuple[int, Longs, NDArray[np.float64]]:
    """Rules whose head is step s to a constant: rows (constant, step of the body, feature or -1).

    The step is -1 where there is no body. Answers begin at number `first_answer` of `starts` and
    end after the one that brings the edges looked at to `work`; the next one is returned first.
    `count` and `count_any` are all zero, before and after.
    """
    rows = [(np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    found = [0.0 for _ in range(0)]
    turned = inverse(s, preds)
    askers = index.start_ptr[s + 1] - index.start_ptr[s]
    touched = np.empty(SEEN * SEEN, np.int64)
    best = np.zeros(EACH)
    best_row = np.zeros((EACH, 2), np.int64)
    a, end, looked = np.int64(first_answer), index.start_ptr[turned + 1], 0
    while a < end and looked < work:
        c = index.starts[a]
        a += 1
        looked += 1
        high = index.ptr[c + 1]
        low = lower_bound(index.step, index.ptr[c], high, turned)
        size = lower_bound(index.step, low, high, turned + 1) - low
        if size < least_support:
            continue
        rows.append((np.int64(c), np.int64(-1), np.int64(-1)))
        found.append(size / (askers + prior))
        looks = min(size, SEEN)
        whole = looks == size
        used = 0
        for k in range(looks):
            x = index.end[low + k * size // looks]
            first, edges = index.ptr[x], index.ptr[x + 1] - index.ptr[x]
            some = min(edges, SEEN)
            whole = whole and some == edges
            looked += some
            before = -1
            for j in range(some):
                at = first + j * edges // some
                step = index.step[at]
                # The fact itself; of a loop it is the edge back as well.
                if index.end[at] == c and (step == s or (x == c and step == turned)):
                    continue
                f = feature[at]
                if count[f] == 0:
                    touched[used] = at
                    used += 1
                count[f] += 1
                # The answer itself says nothing of its other answers by the same step.
                if step != before and step != s:
                    count_any[step] += 1
                    before = step
        kept = 0
        looked += used + 2 * preds
        for i in range(used + 2 * preds):
            if i < used:
                step, f = index.step[touched[i]], feature[touched[i]]
                support, pairs = count[f], counts[f]
                count[f] = 0
            else:
                step, f = i - used, np.int64(-1)
                support = count_any[step]
                pairs = index.start_ptr[step + 1] - index.start_ptr[step]
                count_any[step] = 0
            if not whole and support > 0:
                # Few X of many: one that happens to be among them would count for hundreds.
                if kept == EACH and pairs / (pairs + prior) <= best[EACH - 1]:
                    continue
                end_of_edge = index.end[touched[i]] if i < used else np.int64(-1)
                support = _supported(s, c, step, end_of_edge, index, preds)
                looked += min(pairs, SEEN)
            confidence = support / (pairs + prior)
            if support < least_support or confidence < least_confidence:
                continue
            place = kept
            if kept == EACH:
                if confidence <= best[EACH - 1]:
                    continue
                place = EACH - 1
            else:
                kept += 1
            while place > 0 and best[place - 1] < confidence:
                best[place] = best[place - 1]
                best_row[place, 0], best_row[place, 1] = (
                    best_row[place - 1, 0],
                    best_row[place - 1, 1],
                )
                place -= 1
            best[place] = confidence
            best_row[place, 0], best_row[place, 1] = step, f
        for i in range(kept):
            rows.append((np.int64(c), best_row[i, 0], best_row[i, 1]))
            found.append(best[i])
    out = np.empty((len(rows), 3), np.int64)
    for i in range(len(rows)):
        out[i, 0], out[i, 1], out[i, 2] = rows[i][0], rows[i][1], rows[i][2]
    return a, out, np.array(found)


def constants_of(rules: Rules) -> tuple[Constants, NDArray[np.float64], Longs]:
    """Those of the rules that are of the three forms above; weights, and which rules they are.

    Weights stand twice, as rule numbers of `Constants` do: first forward, then backward.
    """
    n, preds = rules.num_entities, rules.num_predicates
    forward: list[tuple[int, int, int]] = []
    backward: list[tuple[int, int, int, int]] = []
    used: list[int] = []
    short = np.flatnonzero((rules.body_len <= 1) & ((rules.head[:, 1:] < n).sum(1) == 1))
    for r in short.tolist():
        (p, a, b), body = rules.clause(r)
        x, c, s = (a, b, p) if a >= n else (b, a, p + preds)
        number = len(used)
        if not body:
            forward.append((2 * preds * (n + 1) * 2 * preds + s, c, number))
            used.append(r)
            continue
        q, u, v = body[0]
        if (u == x) == (v == x):
            continue
        step, end = (q, v) if u == x else (q + preds, u)
        forward.append(((step * (n + 1) + min(end, n)) * 2 * preds + s, c, number))
        if end < n:
            turned = s + preds if s < preds else s - preds
            backward.append((turned * n + c, step, end, number))
        used.append(r)
    weight = rules.weight[used]
    ahead = np.array(sorted(forward), np.int64).reshape(-1, 3)
    back = np.array(sorted(backward), np.int64).reshape(-1, 4)
    keys, first = np.unique(ahead[:, 0], return_index=True)
    back_keys, back_first = np.unique(back[:, 0], return_index=True)
    return (
        Constants(
            keys,
            np.append(first, len(ahead)).astype(np.int64),
            ahead[:, 1].astype(np.int32),
            ahead[:, 2].copy(),
            back_keys,
            np.append(back_first, len(back)).astype(np.int64),
            back[:, 1].astype(np.int32),
            back[:, 2].astype(np.int32),
            back[:, 3] + len(used),
        ),
        np.concatenate([weight, weight]),
        np.array(used, np.int64),
    )
