"""Resolving the first goals of many slots, each with the fact or rule of its candidate."""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np

from batchwright.envs.prover.blocks import Block, view
from batchwright.envs.prover.kernels.plans import AS_X, AS_Y, SHIFT, TERMS, TO_X, TO_Y, USABLE
from batchwright.envs.prover.kernels.visited import mark, trace
from batchwright.envs.prover.layout import (
    ANSWER,
    C_DEPTH,
    C_ENTITIES,
    COUNT,
    DEPTH,
    ENDING,
    FIRST,
    GOES_ON,
    PAGE,
    SEEN,
    TRACES,
    Longs,
    Memory,
    Task,
)
from batchwright.jit import kernel
from batchwright.logic.prove.search import FACT
from batchwright.logic.prove.unify import (
    GROUND,
    LOOPS,
    OBJECTS,
    PAIRS,
    SUBJECTS,
    resolve_rule,
)

__all__ = ["act"]


@kernel
def act(task: Block, memory: Block, alive: int, actions: Longs) -> None:
    """Resolve the first goal of the `live` slots by the rows `chosen` of their candidates.

    The goals of a state stand in `history` too, behind a row (count, answer, -1).
    """
    given, own = view(Task, task), view(Memory, memory)
    heads, body, body_len, variables = given.head, given.body, given.body_len, given.variables
    plans, entities, depth = given.plans, given.config[C_ENTITIES], given.config[C_DEPTH]
    slots, goals, history = own.slots, own.goals, own.history
    live, chosen, bound, names = own.live, own.chosen, own.scratch[0], own.scratch[1]
    for i in range(alive):
        b = live[i]
        if actions[b] < FIRST or slots[b, ENDING] != GOES_ON:
            continue
        n, answer = slots[b, COUNT], slots[b, ANSWER]
        x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
        if chosen[i, 0] == FACT:
            s, o = np.int64(chosen[i, 2]), np.int64(chosen[i, 3])
            # Variables are numbered as they appear, those of the first goal before all others.
            gone = np.int64(x >= entities) + np.int64(y >= entities and y != x)
            n -= 1
            for k in range(n):
                goals[b, k, 0] = goals[b, k + 1, 0]
                for c in range(1, 3):
                    term = np.int64(goals[b, k + 1, c])
                    if term >= entities:
                        term = s if term == x else o if term == y else term - gone
                    goals[b, k, c] = term
            goals[b, n, 0] = goals[b, n, 1] = goals[b, n, 2] = -1
            if answer >= entities:
                answer = s if answer == x else o if answer == y else answer - gone
        else:
            r = np.int64(chosen[i, 1])
            if x < entities:
                kind = GROUND if y < entities else OBJECTS
            elif y < entities:
                kind = SUBJECTS
            else:
                kind = LOOPS if x == y else PAIRS
            if plans[r, kind, USABLE]:
                length = np.int64(body_len[r])
                shift, to_x = np.int64(plans[r, kind, SHIFT]), np.int64(plans[r, kind, TO_X])
                to_y = np.int64(plans[r, kind, TO_Y])
                if length == 0:
                    for k in range(1, n):
                        for c in range(3):
                            goals[b, k - 1, c] = goals[b, k, c]
                    goals[b, n - 1, 0] = goals[b, n - 1, 1] = goals[b, n - 1, 2] = -1
                else:
                    for k in range(n - 1, 0, -1):
                        goals[b, k + length - 1, 0] = goals[b, k, 0]
                        for c in range(1, 3):
                            term = np.int64(goals[b, k, c])
                            if term >= entities:
                                term = to_x if term == x else to_y if term == y else term + shift
                            goals[b, k + length - 1, c] = term
                    for k in range(length):
                        goals[b, k, 0] = body[r, k, 0]
                        for c in range(2):
                            term = np.int64(plans[r, kind, TERMS + 2 * k + c])
                            goals[b, k, 1 + c] = x if term == AS_X else y if term == AS_Y else term
                    if answer >= entities:
                        if answer == x:
                            answer = to_x
                        elif answer == y:
                            answer = to_y
                        else:
                            answer += shift
                n += length - 1
            else:
                n, answer = resolve_rule(
                    *(goals, b, n, answer, heads, body, body_len, variables, r, entities),
                    *(bound, names),
                )
        slots[b, COUNT], slots[b, ANSWER] = n, answer
        slots[b, DEPTH] += 1
        slots[b, PAGE] = 0
        row = np.int64(b) * (depth + 1) + slots[b, DEPTH]
        history[row, 0, 0], history[row, 0, 1] = n, answer
        if n > 0:
            p, x, y = goals[b, 0, 0], np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
            made = trace(n, p, x, y)
            slots[b, TRACES + slots[b, DEPTH]] = made
            slots[b, SEEN] |= mark(made)
        for k in range(n):
            for c in range(3):
                history[row, k + 1, c] = goals[b, k, c]
