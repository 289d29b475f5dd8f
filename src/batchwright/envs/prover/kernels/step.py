"""The prover environment on arrays: one kernel is the whole step of every slot.

`advance` applies the actions, looks at the states they led to, finishes the episodes that came to
an end, begins new ones in their slots and looks at those. Each part goes over a list of slots, a
block of them at a time, so that reads from all over the graph overlap. Successors are never built
to be looked at: a candidate is a row that says which fact or rule would be used, and only the
chosen one is applied.
"""

# Kernels say int where numba has its own 64-bit integers; only numba could tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np

from batchwright.envs.prover.kernels.act import act
from batchwright.envs.prover.kernels.episodes import begin, finish
from batchwright.envs.prover.kernels.look import look
from batchwright.envs.prover.layout import one, three, two
from batchwright.envs.prover.slots import (
    ACTIVE,
    C_DEPTH,
    COUNT,
    CUT,
    CUTS,
    DEPTH,
    E_ANSWER,
    E_DEPTH,
    E_EPISODE,
    E_INDEX,
    E_INVALID,
    E_LABEL,
    E_PROVEN,
    E_STEPS,
    ENDING,
    EPISODE,
    FILLED,
    FIRST,
    GAVE_UP,
    GIVE_UP,
    GOES_ON,
    INDEX,
    LABEL,
    LOOK,
    MORE,
    PAGE,
    RESET,
    STEPS,
    TURN,
    WAS_INVALID,
    Bools,
    Ints,
    Longs,
    episode_key,
)
from batchwright.jit import kernel
from batchwright.logic.prove.search import RULE
from batchwright.logic.prove.unify import Program
from batchwright.permutation import below

__all__ = ["advance", "expert_actions", "random_actions"]


BLOCK = 256
"""Slots that go through all parts of a step together: what they hold stays in a near cache."""


@kernel
def advance(table: Longs, actions: Longs, commands: bool) -> None:
    """Act in every slot; with `commands`, `actions` may also hold RESET, LOOK and IDLE.

    `table` stands for the arrays that `arrays` of the environment lists, in that order.
    """
    prog = Program(
        *(one(table, 0, np.int32), one(table, 1, np.int32), one(table, 2, np.int32)),
        *(one(table, 3, np.int32), one(table, 4, np.int32), one(table, 5, np.int32)),
        *(one(table, 6, np.int32), two(table, 7, np.int32), three(table, 8, np.int32)),
        *(one(table, 9, np.int32), one(table, 10, np.int32), one(table, 11, np.int32)),
        one(table, 12, np.int32),
    )
    plans = three(table, 13, np.int32)
    known_ptr, known_obj = one(table, 14, np.int32), one(table, 15, np.int32)
    inverse, queries = one(table, 16, np.int32), two(table, 17, np.int32)
    labels, config = one(table, 18, np.bool_), one(table, 19, np.int64)
    rewards, slots = one(table, 20, np.float32), two(table, 21, np.int64)
    goals, history = three(table, 22, np.int32), three(table, 23, np.int32)
    counters, scratch = one(table, 24, np.int64), two(table, 25, np.int32)
    live, fresh = one(table, 26, np.uint32), one(table, 27, np.uint32)
    chosen, candidates = two(table, 28, np.int32), three(table, 29, np.int32)
    mask, n_valid = two(table, 30, np.bool_), one(table, 31, np.int64)
    query, reward = two(table, 32, np.int32), one(table, 33, np.float32)
    terminated, truncated = one(table, 34, np.bool_), one(table, 35, np.bool_)
    valid, ended = one(table, 36, np.bool_), two(table, 37, np.int64)
    final_goals, final_candidates = three(table, 38, np.int32), three(table, 39, np.int32)
    final_mask, final_n_valid = two(table, 40, np.bool_), one(table, 41, np.int64)
    final_query, order = two(table, 42, np.int32), two(table, 43, np.uint32)
    width = mask.shape[1]
    total = slots.shape[0]
    for start in range(0, total, BLOCK):
        alive = 0
        begun = 0
        for b in range(start, min(start + BLOCK, total)):
            # Negative numbers mean something only to the environment itself.
            action = actions[b] if commands else max(actions[b], -1)
            reward[b] = 0.0
            terminated[b] = truncated[b] = False
            # Of the episode acted in, also where it goes on: nothing is left from an earlier one.
            ended[b, E_INVALID] = ended[b, E_PROVEN] = 0
            ended[b, E_EPISODE], ended[b, E_INDEX] = slots[b, EPISODE], slots[b, INDEX]
            ended[b, E_LABEL], ended[b, E_ANSWER] = slots[b, LABEL], -1
            ended[b, E_DEPTH] = ended[b, E_STEPS] = 0
            valid[b] = slots[b, ACTIVE] != 0 and action >= -1
            if action == RESET:
                fresh[begun] = b
                begun += 1
            elif valid[b] or action == LOOK:
                slots[b, ENDING] = GOES_ON
                if valid[b]:
                    slots[b, STEPS] += 1
                    if action < 0 or action >= width or not mask[b, action]:
                        slots[b, ENDING] = WAS_INVALID
                    elif action == GIVE_UP:
                        slots[b, ENDING] = GAVE_UP
                    elif action == TURN:
                        slots[b, PAGE] += 1
                live[alive] = b
                alive += 1
        # Read in this short loop, the rows of many slots are waited for at once.
        for i in range(alive):
            if slots[live[i], ENDING] == GOES_ON and actions[live[i]] >= FIRST:
                for c in range(4):
                    chosen[i, c] = candidates[live[i], np.uint64(actions[live[i]]), c]
        act(prog, plans, live, alive, chosen, actions, slots, goals, history, scratch, config)
        look(
            *(prog, plans, live, alive, slots, goals, history, inverse, config, scratch),
            *(candidates, mask, n_valid),
        )
        for i in range(alive):
            b = live[i]
            if commands and actions[b] == LOOK:
                continue
            if slots[b, PAGE] == 0:
                counters[CUTS] += slots[b, CUT]
            ended[b, E_DEPTH], ended[b, E_STEPS] = slots[b, DEPTH], slots[b, STEPS]
            failed = slots[b, ENDING] != GOES_ON
            proven = slots[b, COUNT] == 0 and not failed
            stuck = n_valid[b] == 0
            over = proven or failed or (stuck and slots[b, CUT] == 0)
            stopped = not over and (stuck or slots[b, DEPTH] >= config[C_DEPTH])
            if over or stopped:
                terminated[b], truncated[b] = over, stopped
                ended[b, E_PROVEN] = proven
                ended[b, E_INVALID] = slots[b, ENDING] == WAS_INVALID
                fresh[begun] = b
                begun += 1
        finish(
            *(prog, fresh, begun, slots, goals, candidates, mask, n_valid, query, rewards, config),
            *(counters, reward, terminated, truncated, ended),
            *(final_goals, final_candidates, final_mask, final_n_valid, final_query),
        )
        begin(
            *(fresh, begun, slots, goals, history, counters, config, queries, labels),
            *(known_ptr, known_obj, query, order),
        )
        look(
            *(prog, plans, fresh, begun, slots, goals, history, inverse, config, scratch),
            *(candidates, mask, n_valid),
        )
        for i in range(begun):
            counters[CUTS] += slots[fresh[i], CUT]


@kernel
def random_actions(slots: Longs, mask: Bools, key: int, out: Longs) -> None:
    """A uniform choice inside the mask, the same for (key, episode, step) in any slot."""
    for b in range(slots.shape[0]):
        ends, more = np.int64(mask[b, GIVE_UP]), slots[b, MORE]
        options = ends + more + slots[b, FILLED] - FIRST
        pick = below(episode_key(key, slots[b, EPISODE]), slots[b, STEPS], options)
        if pick < ends:
            out[b] = GIVE_UP
        elif pick < ends + more:
            out[b] = TURN
        else:
            out[b] = FIRST + pick - ends - more


@kernel
def expert_actions(
    slots: Longs, candidates: Ints, mask: Bools, lengths: Ints, steps: Ints, lost: Bools, out: Longs
) -> None:
    """The action that follows a known proof: -1 where none is known for this state.

    Queries that have no proof, and corrupted ones, are to be given up.
    """
    for b in range(slots.shape[0]):
        out[b] = -1
        if slots[b, ACTIVE] == 0 or lost[b]:
            continue
        index, level = slots[b, INDEX], slots[b, DEPTH]
        if slots[b, LABEL] == 0 or lengths[index] == 0:
            out[b] = GIVE_UP if mask[b, GIVE_UP] else -1
        elif level < lengths[index]:
            kind, number = steps[index, level, 0], steps[index, level, 1]
            s, o = steps[index, level, 2], steps[index, level, 3]
            for k in range(FIRST, slots[b, FILLED]):
                if (
                    candidates[b, k, 0] == kind
                    and candidates[b, k, 1] == number
                    and (kind == RULE or (candidates[b, k, 2] == s and candidates[b, k, 3] == o))
                ):
                    out[b] = k
                    break
            if out[b] < 0 and slots[b, MORE] != 0:
                out[b] = TURN
