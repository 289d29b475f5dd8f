"""One step of resolution: the numba kernels that unify the first goal and rewrite the rest.

A state is a stack of goals, `goals[g, :n]` of an int32 array [G, A, 3] (predicate, term, term),
and the term `answer` that stands for what was asked. Terms below `entities` are entities; others
are variables, numbered from `entities` in the order in which they appear (the answer last), so that
two states that differ in names of variables only are equal as arrays. The first goal is the one
to resolve. Everything works in place. Kernels take whole arrays and an index rather than views:
each view would count its references, and that takes longer than the step.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.facts import Facts, lower_bound
from batchwright.logic.rows import group_span, row_span
from batchwright.logic.rules import Rules

__all__ = [
    "GROUND",
    "LOOPS",
    "OBJECTS",
    "PAIRS",
    "SUBJECTS",
    "Program",
    "canonical",
    "place",
    "program",
    "resolve_fact",
    "resolve_rule",
    "same_state",
    "scratch_size",
    "span",
    "unify",
]

Ints = NDArray[np.int32]

GROUND, OBJECTS, SUBJECTS, PAIRS, LOOPS = 0, 1, 2, 3, 4
"""How a goal meets the facts: p(a, b), p(a, X), p(X, b), p(X, Y) and p(X, X)."""


class Program(NamedTuple):
    """The arrays of facts and rules that the kernels read."""

    ps_ptr: Ints
    ps_sub: Ints
    ps_obj: Ints
    po_ptr: Ints
    po_sub: Ints
    loop_ptr: Ints
    loop_sub: Ints
    head: Ints
    body: Ints
    body_len: Ints
    variables: Ints
    by_head: Ints
    head_ptr: Ints


def program(facts: Facts, rules: Rules) -> Program:
    """The kernels' view of facts and rules of one vocabulary."""
    return Program(
        *(facts.ps_ptr, facts.ps_sub, facts.ps_obj, facts.po_ptr, facts.po_sub),
        *(facts.loop_ptr, facts.loop_sub, rules.head, rules.body, rules.body_len),
        *(rules.variables, rules.by_head, rules.head_ptr),
    )


def scratch_size(goals: int, rules: Rules) -> int:
    """How long the two scratch arrays must be for states of up to `goals` goals."""
    return 2 * goals + 2 + int(rules.variables.max(initial=0))


@kernel
def span(
    ps_ptr: Ints, ps_obj: Ints, po_ptr: Ints, loop_ptr: Ints, entities: int, p: int, x: int, y: int
) -> tuple[int, int, int]:
    """Which facts unify with p(x, y): the kind of goal, where they begin, how many they are."""
    if x < entities:
        low, high = row_span(ps_ptr, np.int64(p) * entities + x)
        if y >= entities:
            return OBJECTS, low, high - low
        at = lower_bound(ps_obj, low, high, y)
        if at < high and ps_obj[at] == y:
            return GROUND, at, 1
        return GROUND, at, 0
    if y < entities:
        low, high = row_span(po_ptr, np.int64(p) * entities + y)
        return SUBJECTS, low, high - low
    if x == y:
        low, high = row_span(loop_ptr, p)
        return LOOPS, low, high - low
    low, high = group_span(ps_ptr, p, entities)
    return PAIRS, low, high - low


@kernel
def place(
    ps_ptr: Ints,
    ps_obj: Ints,
    po_sub: Ints,
    loop_sub: Ints,
    entities: int,
    kind: int,
    low: int,
    count: int,
    p: int,
    s: int,
    o: int,
) -> int:
    """Where p(s, o) stands in the span [low, low + count) of a goal that it matches, or -1."""
    high = low + count
    if kind == SUBJECTS:
        at = lower_bound(po_sub, low, high, s)
        return at if at < high and po_sub[at] == s else -1
    if kind == LOOPS:
        at = lower_bound(loop_sub, low, high, s)
        return at if at < high and loop_sub[at] == s and s == o else -1
    if kind == PAIRS:
        low, high = row_span(ps_ptr, np.int64(p) * entities + s)
    at = lower_bound(ps_obj, low, high, o)
    return at if at < high and ps_obj[at] == o else -1


@kernel
def unify(h0: int, h1: int, x: int, y: int, entities: int) -> tuple[bool, int, int, int, int]:
    """The most general unifier of a rule's head p(h0, h1) with a goal p(x, y).

    Variables of the two sides are apart. What it does to the goal's variables comes back as two
    replacements to be made one after the other, (variable, term) twice, -1 for none; a variable
    of the head stands for the goal's argument at its place after them.
    """
    v0 = t0 = v1 = t1 = -1
    if h0 < entities:
        if x < entities:
            if x != h0:
                return False, -1, -1, -1, -1
        else:
            v0, t0 = x, h0
            if y == x:
                y = h0
    if h1 < entities:
        if y < entities:
            if y != h1:
                return False, -1, -1, -1, -1
        else:
            v1, t1 = y, h1
    elif h1 == h0 and x != y:
        # The head says that both arguments are one: p(Z, Z).
        if x >= entities:
            v1, t1 = x, y
        elif y >= entities:
            v1, t1 = y, x
        else:
            return False, -1, -1, -1, -1
    return True, v0, t0, v1, t1


@kernel
def resolve_fact(
    goals: Ints, g: int, n: int, answer: int, s: int, o: int, entities: int, names: Ints
) -> tuple[int, int]:
    """Resolve the first goal of state `g` with a fact (s, o); the new count and answer."""
    x, y = goals[g, 0, 1], goals[g, 0, 2]
    for i in range(1, n):
        goals[g, i - 1, 0] = goals[g, i, 0]
        for c in range(1, 3):
            term = goals[g, i, c]
            if term >= entities:
                if term == x:
                    term = s
                elif term == y:
                    term = o
            goals[g, i - 1, c] = term
    if answer >= entities:
        if answer == x:
            answer = s
        elif answer == y:
            answer = o
    _blank(goals, g, n - 1, n)
    if x >= entities or y >= entities:
        answer = canonical(goals, g, n - 1, answer, entities, names)
    return n - 1, answer


@kernel
def resolve_rule(
    goals: Ints,
    g: int,
    n: int,
    answer: int,
    head: Ints,
    body: Ints,
    body_len: Ints,
    variables: Ints,
    r: int,
    entities: int,
    bound: Ints,
    names: Ints,
) -> tuple[int, int]:
    """Resolve the first goal of state `g` with rule `r`, whose head unifies with it.

    Returns the new count and answer. There must be room for `n - 1 + body_len[r]` goals.
    """
    x, y = goals[g, 0, 1], goals[g, 0, 2]
    h0, h1 = head[r, 1], head[r, 2]
    length = body_len[r]
    _, v0, t0, v1, t1 = unify(h0, h1, x, y, entities)
    # No variable of a canonical state has this number or a higher one.
    fresh = entities + 2 * goals.shape[1] + 1
    for v in range(variables[r]):
        bound[v] = fresh + v
    if h0 >= entities:
        bound[h0 - entities] = _replaced(x, v0, t0, v1, t1)
    if h1 >= entities:
        bound[h1 - entities] = _replaced(y, v0, t0, v1, t1)
    if length > 1:
        for i in range(n - 1, 0, -1):
            _move(goals, g, i, i + length - 1, v0, t0, v1, t1)
    else:
        for i in range(1, n):
            _move(goals, g, i, i + length - 1, v0, t0, v1, t1)
    for i in range(length):
        goals[g, i, 0] = body[r, i, 0]
        for c in range(1, 3):
            term = body[r, i, c]
            goals[g, i, c] = bound[term - entities] if term >= entities else term
    count = n - 1 + length
    _blank(goals, g, count, n)
    answer = _replaced(answer, v0, t0, v1, t1)
    return count, canonical(goals, g, count, answer, entities, names)


@kernel
def canonical(goals: Ints, g: int, n: int, answer: int, entities: int, names: Ints) -> int:
    """Number the variables of state `g` in the order they appear; the answer's new name."""
    following = entities
    clean = False
    for i in range(n):
        for c in range(1, 3):
            term = goals[g, i, c]
            if term >= entities:
                if not clean:
                    for k in range(names.size):
                        names[k] = -1
                    clean = True
                if names[term - entities] < 0:
                    names[term - entities] = following
                    following += 1
                goals[g, i, c] = names[term - entities]
    if answer >= entities:
        if not clean:
            return entities
        if names[answer - entities] < 0:
            names[answer - entities] = following
        answer = names[answer - entities]
    return answer


@kernel
def same_state(a: Ints, i: int, b: Ints, j: int, n: int) -> bool:
    """Whether the first `n` goals of state `i` of `a` and of state `j` of `b` are the same."""
    for k in range(n):
        for c in range(3):
            if a[i, k, c] != b[j, k, c]:
                return False
    return True


@kernel
def _replaced(term: int, v0: int, t0: int, v1: int, t1: int) -> int:
    if term == v0:
        term = t0
    if term == v1:
        term = t1
    return term


@kernel
def _move(
    goals: Ints, g: int, source: int, target: int, v0: int, t0: int, v1: int, t1: int
) -> None:
    goals[g, target, 0] = goals[g, source, 0]
    goals[g, target, 1] = _replaced(goals[g, source, 1], v0, t0, v1, t1)
    goals[g, target, 2] = _replaced(goals[g, source, 2], v0, t0, v1, t1)


@kernel
def _blank(goals: Ints, g: int, low: int, high: int) -> None:
    for i in range(low, high):
        goals[g, i, 0] = goals[g, i, 1] = goals[g, i, 2] = -1
