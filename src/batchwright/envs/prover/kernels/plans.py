"""What a rule makes of a goal, worked out beforehand for each way the goal's arguments can be.

Variables are numbered as they appear, so the atoms of a rule's body come out the same for every
goal of one kind, up to the entities of the goal, and the variables of the goals behind it keep
their order: their numbers move by a constant.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.prove.unify import GROUND, LOOPS, OBJECTS, SUBJECTS

__all__ = ["AS_X", "AS_Y", "KINDS", "SHIFT", "TERMS", "TO_X", "TO_Y", "USABLE", "plan"]

Ints = NDArray[np.int32]

KINDS = 5
"""Of goals: GROUND, OBJECTS, SUBJECTS, PAIRS and LOOPS."""

# Columns of a plan; from TERMS on stand two for each atom of the body.
USABLE, SHIFT, TO_X, TO_Y, TERMS = range(5)
"""Whether there is a plan; what is added to the numbers of other variables; what becomes of the
goal's own variables."""

AS_X, AS_Y = -1, -2
"""Terms of a plan that are the goal's entities."""


@kernel
def plan(head: Ints, body: Ints, body_len: Ints, entities: int) -> Ints:
    """The plans [R, KINDS, TERMS + 2 M] of rules with bodies of up to M atoms.

    There is none where the head has a constant or the same variable twice, or where a variable
    of the goal does not occur in the body: the general unifier is for those.
    """
    rules, most = body.shape[0], body.shape[1]
    out = np.zeros((rules, KINDS, TERMS + 2 * most), np.int32)
    names = np.empty(2 * most + 2, np.int32)
    for r in range(rules):
        if head[r, 1] < entities or head[r, 2] < entities or head[r, 1] == head[r, 2]:
            continue
        for kind in range(KINDS):
            names[:] = -1
            open_x = kind not in (GROUND, OBJECTS)
            open_y = kind not in (GROUND, SUBJECTS)
            following = entities
            for i in range(body_len[r]):
                for c in range(2):
                    term = body[r, i, 1 + c]
                    at = TERMS + 2 * i + c
                    if kind == LOOPS and term == head[r, 2]:
                        term = head[r, 1]
                    if term < entities:
                        out[r, kind, at] = term
                    elif term == head[r, 1] and not open_x:
                        out[r, kind, at] = AS_X
                    elif term == head[r, 2] and not open_y:
                        out[r, kind, at] = AS_Y
                    else:
                        if names[term - entities] < 0:
                            names[term - entities] = following
                            following += 1
                        out[r, kind, at] = names[term - entities]
            x, y = head[r, 1] - entities, head[r, 2] - entities
            if kind == LOOPS:
                y = x
            if (open_x and names[x] < 0) or (open_y and names[y] < 0):
                continue
            goes = int(open_x) + int(open_y) - int(kind == LOOPS)
            out[r, kind, USABLE] = 1
            out[r, kind, SHIFT] = following - entities - goes
            out[r, kind, TO_X], out[r, kind, TO_Y] = names[x], names[y]
    return out
