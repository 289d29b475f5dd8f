"""Exhaustive search for shortest proofs: the numba kernels under `prove`.

Depth is counted in steps of resolution, so a rule of two atoms proved by two facts has depth 3.
The search deepens by one step at a time and only accepts proofs of exactly that many steps, which
is the order of a breadth-first search without its memory. A state with more goals than steps left
cannot be proved, and a state that was searched with the same number of steps left need not be
searched again: those are kept in a table and compared exactly.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.prove.unify import (
    LOOPS,
    SUBJECTS,
    Program,
    resolve_fact,
    resolve_rule,
    same_state,
    span,
    unify,
)

__all__ = ["ALL", "ANSWERS", "FACT", "FIRST", "ONE_RULE", "RULE", "search"]

Ints = NDArray[np.int32]

FACT, RULE = 0, 1
"""How a goal was resolved; the first column of a step."""

FIRST, ANSWERS, ALL, ONE_RULE = 0, 1, 2, 3
"""What to look for: one shortest proof, one for every answer, every proof, or every proof by facts
and at most one rule."""

PROBES = 8
"""Places looked at in the table. A state that finds none free is searched again when met again."""


@kernel
def search(
    prog: Program,
    entities: int,
    goal: Ints,
    answer: int,
    hidden: Ints,
    depth: int,
    mode: int,
    max_nodes: int,
    scratch: Ints,
    table: Ints,
    stamp: int,
    seen: NDArray[np.bool_],
    steps: Ints,
    lengths: Ints,
    answers: Ints,
) -> tuple[int, bool]:
    """Prove `goal` (predicate, term, term); the number of proofs and whether nothing was left out.

    `hidden` [H, 3] are facts (head, predicate, tail) that no proof may use. Proof number i is
    `steps[i, : lengths[i]]`, rows (FACT, predicate, subject, object) or (RULE, rule, -1, -1) in
    the order in which goals are met, and `answers[i]`. `table` holds states of the search that
    `stamp` names; rows of other stamps are free.
    """
    ps_ptr, ps_sub, ps_obj, po_ptr, po_sub, loop_ptr, loop_sub = prog[:7]
    heads, body, body_len, variables, by_head, head_ptr = prog[7:]
    goals = np.full((depth + 1, max(depth, 1), 3), -1, np.int32)
    count, term = np.zeros(depth + 1, np.int64), np.zeros(depth + 1, np.int64)
    # Of each level: kind, begin and length of the span, cursor.
    spans = np.zeros((depth + 1, 4), np.int64)
    path = np.zeros((depth + 1, 4), np.int32)
    bound, names = scratch[0], scratch[1]
    proofs = 0
    nodes = 0
    for limit in range(1, depth + 1):
        goals[0, 0] = goal
        count[0], term[0] = 1, answer
        level = 0
        spans[0, 3] = -1
        while level >= 0:
            p, x, y = goals[level, 0, 0], goals[level, 0, 1], goals[level, 0, 2]
            if spans[level, 3] < 0:
                kind, low, size = span(ps_ptr, ps_obj, po_ptr, loop_ptr, entities, p, x, y)
                spans[level, 0], spans[level, 1], spans[level, 2] = kind, low, size
                spans[level, 3] = 0
            n, left = count[level], limit - level
            cursor, size = spans[level, 3], spans[level, 2]
            rules = 0 if mode == ONE_RULE and level > 0 else head_ptr[p + 1] - head_ptr[p]
            if cursor >= size + rules:
                level -= 1
                continue
            spans[level, 3] += 1
            child = level + 1
            if cursor < size:
                at = spans[level, 1] + cursor
                if spans[level, 0] == SUBJECTS:
                    s, o = po_sub[at], y
                elif spans[level, 0] == LOOPS:
                    s = o = loop_sub[at]
                else:
                    s, o = ps_sub[at], ps_obj[at]
                if _among(hidden, s, p, o):
                    continue
                _copy(goals, level, n)
                n, found = resolve_fact(goals, child, n, term[level], s, o, entities, names)
                path[level, 0], path[level, 1], path[level, 2], path[level, 3] = FACT, p, s, o
            else:
                r = by_head[head_ptr[p] + cursor - size]
                if n + body_len[r] > left:
                    continue
                if not unify(heads[r, 1], heads[r, 2], x, y, entities)[0]:
                    continue
                _copy(goals, level, n)
                n, found = resolve_rule(
                    goals,
                    child,
                    n,
                    term[level],
                    heads,
                    body,
                    body_len,
                    variables,
                    r,
                    entities,
                    bound,
                    names,
                )
                path[level, 0], path[level, 1], path[level, 2], path[level, 3] = RULE, r, -1, -1
            nodes += 1
            if nodes > max_nodes:
                return proofs, False
            if n > 0:
                # With as many goals as steps only facts can follow: too cheap to remember.
                cheap = left - 1 == n or mode >= ALL
                if cheap or _remember(table, goals, child, n, found, left - 1, stamp):
                    level = child
                    count[level], term[level], spans[level, 3] = n, found, -1
            elif child == limit:
                if mode == ANSWERS:
                    slot = min(found, entities)
                    if seen[slot]:
                        continue
                    seen[slot] = True
                if proofs == lengths.size:
                    return proofs, False
                for place in range(limit):
                    steps[proofs, place] = path[place]
                lengths[proofs] = limit
                answers[proofs] = found
                proofs += 1
                if mode == FIRST:
                    return proofs, True
    return proofs, True


@kernel
def _copy(goals: Ints, level: int, n: int) -> None:
    for i in range(n):
        for c in range(3):
            goals[level + 1, i, c] = goals[level, i, c]


@kernel
def _among(hidden: Ints, s: int, p: int, o: int) -> bool:
    for i in range(hidden.shape[0]):
        if hidden[i, 1] == p and hidden[i, 0] == s and hidden[i, 2] == o:
            return True
    return False


@kernel
def _remember(table: Ints, goals: Ints, g: int, n: int, answer: int, left: int, stamp: int) -> bool:
    """Put a state into the table; False if it stands there already.

    A row of `table` [rows, depth + 2, 3] is the goals; (stamp, steps left, goals); the answer.
    """
    key = np.uint64(left) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(answer)
    for i in range(n):
        for c in range(3):
            key = (key ^ np.uint64(goals[g, i, c])) * np.uint64(0x100000001B3)
            key ^= key >> np.uint64(29)
    mask = np.uint64(table.shape[0] - 1)
    about = table.shape[1] - 2
    for probe in range(PROBES):
        row = np.int64((key + np.uint64(probe)) & mask)
        if table[row, about, 0] != stamp:
            table[row, about, 0], table[row, about, 1], table[row, about, 2] = stamp, left, n
            table[row, about + 1, 0] = answer
            for i in range(n):
                for c in range(3):
                    table[row, i, c] = goals[g, i, c]
            return True
        if (
            table[row, about, 1] == left
            and table[row, about, 2] == n
            and table[row, about + 1, 0] == answer
            and same_state(table, row, goals, g, n)
        ):
            return False
    return True
