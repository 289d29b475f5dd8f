"""Whether a step would lead back to a state that its episode has already been in, exactly."""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np

from batchwright.envs.prover.kernels.plans import AS_X, AS_Y, SHIFT, TERMS, TO_X, TO_Y
from batchwright.envs.prover.layout import Ints
from batchwright.jit import kernel

__all__ = ["fold", "leads_to", "mark", "needed", "same_as", "sort", "trace"]


@kernel
def leads_to(
    plans: Ints,
    body: Ints,
    r: int,
    kind: int,
    length: int,
    goals: Ints,
    b: int,
    n: int,
    answer: int,
    entities: int,
    history: Ints,
    h: int,
) -> bool:
    """Whether rule `r` leads from state `b` to the state `h`, by its plan."""
    x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
    shift = np.int64(plans[r, kind, SHIFT])
    to_x, to_y = np.int64(plans[r, kind, TO_X]), np.int64(plans[r, kind, TO_Y])
    if answer >= entities:
        answer = to_x if answer == x else to_y if answer == y else answer + shift
    if history[h, 0, 0] != n - 1 + length or history[h, 0, 1] != answer:
        return False
    for k in range(length):
        if history[h, k + 1, 0] != body[r, k, 0]:
            return False
        for c in range(2):
            term = np.int64(plans[r, kind, TERMS + 2 * k + c])
            term = x if term == AS_X else y if term == AS_Y else term
            if history[h, k + 1, 1 + c] != term:
                return False
    for k in range(1, n):
        if history[h, k + length, 0] != goals[b, k, 0]:
            return False
        for c in range(1, 3):
            term = np.int64(goals[b, k, c])
            if term >= entities:
                term = to_x if term == x else to_y if term == y else term + shift
            if history[h, k + length, c] != term:
                return False
    return True


@kernel
def same_as(state: Ints, size: int, answer: int, history: Ints, h: int) -> bool:
    if history[h, 0, 0] != size or history[h, 0, 1] != answer:
        return False
    for k in range(size):
        for c in range(3):
            if state[0, k, c] != history[h, k + 1, c]:
                return False
    return True


@kernel
def needed(
    goals: Ints, b: int, n: int, answer: int, history: Ints, h: int, entities: int
) -> tuple[bool, int, int]:
    """The fact (s, o) that would lead from state `b` back to `h`; -1: any entity will do."""
    if history[h, 0, 0] != n - 1:
        return False, np.int64(-1), np.int64(-1)
    x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
    s = x if x < entities else np.int64(-1)
    o = y if y < entities else np.int64(-1)
    # The variables of the first goal come before all others in the numbering.
    gone = np.int64(x >= entities) + np.int64(y >= entities and y != x)
    # After the terms of the goals comes the answer.
    for k in range(2, 2 * n + 1):
        i, c = k >> 1, 1 + (k & 1)
        if i < n:
            term, old = np.int64(goals[b, i, c]), np.int64(history[h, i, c])
            if goals[b, i, 0] != history[h, i, 0]:
                return False, np.int64(-1), np.int64(-1)
        else:
            term, old = np.int64(answer), np.int64(history[h, 0, 1])
        if term < entities:
            same = term == old
        elif term == x:
            same = old < entities and (s < 0 or s == old)
            s = old
        elif term == y:
            same = old < entities and (o < 0 or o == old)
            o = old
        else:
            same = term - gone == old
        if not same:
            return False, np.int64(-1), np.int64(-1)
    if x == y and x >= entities:
        o = s
    return True, s, o


@kernel
def fold(value: int) -> int:
    """20 bits of an entity or a variable, for `trace`."""
    return ((value * 0x9E3779B1) >> 12) & 0xFFFFF


@kernel
def sort(size: int, p: int) -> int:
    """22 bits of the size of a state and the predicate of its first goal, for `trace`."""
    return ((size * 0x85EBCA6B + p * 0xC2B2AE35) >> 9) & 0x3FFFFF


@kernel
def trace(size: int, p: int, x: int, y: int) -> int:
    """What is kept of a visited state: states that differ in it differ, others may be the same."""
    return sort(size, p) << 40 | fold(x) << 20 | fold(y)


@kernel
def mark(made: int) -> int:
    """One of 64 bits, chosen by a trace."""
    return np.int64(1) << ((made >> 40 ^ made >> 23 ^ made) & 63)
