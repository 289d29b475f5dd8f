"""What the prover environment keeps in memory, by name: arrays, and the columns of some of them."""

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.prover.blocks import Block, allocate, view

__all__ = ["Memory", "Task", "memory"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

CHUNK = 256
"""Slots that go through all stages of a step together: what they hold stays in a near cache."""

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


class Task(NamedTuple):
    """What is proved, from what and by which rules; no step changes it. `Program` comes first."""

    ps_ptr: Annotated[Ints, 1]
    ps_sub: Annotated[Ints, 1]
    ps_obj: Annotated[Ints, 1]
    po_ptr: Annotated[Ints, 1]
    po_sub: Annotated[Ints, 1]
    loop_ptr: Annotated[Ints, 1]
    loop_sub: Annotated[Ints, 1]
    head: Annotated[Ints, 2]
    body: Annotated[Ints, 3]
    body_len: Annotated[Ints, 1]
    variables: Annotated[Ints, 1]
    by_head: Annotated[Ints, 1]
    head_ptr: Annotated[Ints, 1]
    plans: Annotated[Ints, 3]
    known_ptr: Annotated[Ints, 1]
    """`ps_ptr` and `ps_obj` of all that is true: corruptions are none of it."""
    known_obj: Annotated[Ints, 1]
    inverse: Annotated[Ints, 1]
    queries: Annotated[Ints, 2]
    labels: Annotated[Bools, 1]
    rewards: Annotated[Floats, 1]
    config: Annotated[Longs, 1]


class Memory(NamedTuple):
    """What steps read and write, one row for each of the B slots where nothing else is said."""

    slots: Annotated[Longs, 2]
    goals: Annotated[Ints, 3]
    query: Annotated[Ints, 2]
    candidates: Annotated[Ints, 3]
    mask: Annotated[Bools, 2]
    n_valid: Annotated[Longs, 1]
    reward: Annotated[Floats, 1]
    terminated: Annotated[Bools, 1]
    truncated: Annotated[Bools, 1]
    valid: Annotated[Bools, 1]
    ended: Annotated[Longs, 2]
    final_goals: Annotated[Ints, 3]
    """What an episode showed last, as `final_obs` has it."""
    final_query: Annotated[Ints, 2]
    final_candidates: Annotated[Ints, 3]
    final_mask: Annotated[Bools, 2]
    final_n_valid: Annotated[Longs, 1]
    history: Annotated[Ints, 3]
    """The states of the episode so far, `depth + 1` rows for each slot."""
    lost: Annotated[Bools, 1]
    """Whether the episode has left its teacher's path."""
    phi: Annotated[Floats, 1]
    """The potential of the state that is shown."""
    counters: Annotated[Longs, 1]
    chosen: Annotated[Ints, 2]
    """From here on, scratch: nothing in it outlives a step."""
    live: Annotated[Words, 1]
    fresh: Annotated[Words, 1]
    order: Annotated[Words, 2]
    scratch: Annotated[Ints, 2]


def memory(num_envs: int, goals: int, width: int, depth: int, scratch: int) -> Block:
    """An empty block of the layout `Memory`; kernels write terms into `scratch` places."""
    shown = {
        "goals": (num_envs, goals, 3),
        "query": (num_envs, 3),
        "candidates": (num_envs, width, 4),
        "mask": (num_envs, width),
        "n_valid": (num_envs,),
    }
    one_each = ("reward", "terminated", "truncated", "valid", "lost", "phi", "live", "fresh")
    shapes = {
        **shown,
        **{f"final_{name}": shape for name, shape in shown.items()},
        **dict.fromkeys(one_each, (num_envs,)),
        "slots": (num_envs, TRACES + depth + 1),
        "ended": (num_envs, ENDED_COLUMNS),
        "history": (num_envs * (depth + 1), goals + 1, 3),
        "counters": (COUNTERS,),
        "chosen": (num_envs, 4),
        "order": (2, CHUNK),
        "scratch": (2, scratch),
    }
    block = allocate(Memory, shapes)
    own = view(Memory, block)
    padded = (own.goals, own.query, own.candidates, own.history)
    for array in (*padded, own.final_goals, own.final_query, own.final_candidates):
        array[...] = -1
    # What a terminated state shows: there is nothing left to do but to end.
    own.final_mask[:, GIVE_UP] = True
    own.final_candidates[:, GIVE_UP, 0] = END
    return block
