"""What a slot of the prover environment holds, by the names of its columns."""

# Kernels say int where numba has its own 64-bit integers; only numba could tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import mix

__all__ = ["episode_key", "erase", "fold", "mark", "option", "sort", "trace", "write"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEXT, END = 2, 3
"""Kinds of candidates after FACT and RULE: turn to the next page, and give up."""

GIVE_UP, TURN, FIRST = 0, 1, 2
"""The actions of END and NEXT, and that of the first successor on the page."""

RESET, LOOK, IDLE = -2, -3, -4
"""Not actions: begin an episode, observe again, leave the slot alone."""

# Columns of `slots`, one row for each environment.
COUNT, ANSWER, DEPTH, PAGE, EPISODE, INDEX, LABEL, ACTIVE, FILLED, MORE, STEPS, CUT = range(12)
HEAD, PREDICATE, TAIL = 12, 13, 14
"""The triple that the episode is about; for an open query with the answer that is looked for."""
SIDE, FINAL = 15, 16
"""The open argument (0: none, 1: head, 2: tail), and rows in use in the final buffers."""
KIND, LOW, SPAN = 17, 18, 19
"""The facts that unify with the first goal."""
ENDING, AHEAD = 20, 21
"""How the last action tried to end the episode; the first entity of the span, read early."""
SEEN = 22
"""The `mark` of every state of the episode in one: a successor whose mark is not in it is new."""
TRACES = 23
"""From here on the `trace` of each state of the episode, `depth + 1` of them."""

GOES_ON, GAVE_UP, WAS_INVALID = 0, 1, 2
"""Values of ENDING."""

# Columns of `ended`: what is known of the episode that was acted in; the answer when it ends.
E_PROVEN, E_EPISODE, E_INDEX, E_LABEL, E_ANSWER, E_DEPTH, E_STEPS, E_INVALID = range(8)
ENDED_COLUMNS = 8

# Places in `counters`.
BEGUN, INVALID, CUTS, PROVEN, TRUNCATED, FINISHED = range(6)
COUNTERS = 6

# Places in `config`.
C_ENTITIES, C_RATIO, C_ONCE, C_ASK, C_END, C_DEPTH, C_KEY = range(7)
CONFIG = 7

TRUTH, ASK_HEAD, ASK_TAIL, ASK_BOTH = 0, 1, 2, 3
"""What episodes ask: whether a triple is true, or one of its entities."""


@kernel
def write(
    rows: Ints, mask: Bools, b: int, k: int, kind: int, number: int, first: int, second: int
) -> None:
    rows[b, k, 0], rows[b, k, 1], rows[b, k, 2], rows[b, k, 3] = kind, number, first, second
    mask[b, k] = True


@kernel
def erase(rows: Ints, mask: Bools, b: int, k: int) -> None:
    rows[b, k, 0] = rows[b, k, 1] = rows[b, k, 2] = rows[b, k, 3] = -1
    mask[b, k] = False


@kernel
def option(rows: Ints, mask: Bools, b: int, k: int, kind: int, offered: bool) -> None:
    rows[b, k, 0] = kind if offered else -1
    mask[b, k] = offered


@kernel
def episode_key(key: int, episode: int) -> int:
    return mix(mix(key, np.uint64(0xE915)), np.uint64(episode))


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
