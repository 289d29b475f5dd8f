"""The prover environment on arrays: one kernel is the whole step of every slot.

`advance` applies the actions, looks at the states they led to, finishes the episodes that came to
an end, begins new ones in their slots and looks at those. Each part goes over a list of slots, a
block of them at a time, so that reads from all over the graph overlap. Successors are never built
to be looked at: a candidate is a row that says which fact or rule would be used, and only the
chosen one is applied.
"""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np

from batchwright.envs.prover.blocks import Block, stamp, view
from batchwright.envs.prover.kernels.act import act
from batchwright.envs.prover.kernels.episodes import begin, episode_key, finish
from batchwright.envs.prover.kernels.look import look
from batchwright.envs.prover.layout import (
    ACTIVE,
    C_DEPTH,
    CHUNK,
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
    Ints,
    Longs,
    Memory,
    Task,
)
from batchwright.jit import kernel
from batchwright.logic.prove.search import RULE
from batchwright.permutation import below

__all__ = ["advance", "expert_actions", "random_actions"]

STAMPS = stamp(Task), stamp(Memory)
"""What the machine code in the cache was compiled for."""


@kernel
def advance(task: Block, memory: Block, actions: Longs, commands: bool) -> None:
    """Act in every slot; with `commands`, `actions` may also hold RESET, LOOK and IDLE.

    `task` and `memory` are blocks of the layouts `Task` and `Memory`.
    """
    if task[0] != STAMPS[0] or memory[0] != STAMPS[1]:
        raise RuntimeError("compiled for another layout of memory; delete the __pycache__ folders")
    own, config = view(Memory, memory), view(Task, task).config
    slots, counters, live, fresh = own.slots, own.counters, own.live, own.fresh
    chosen, candidates, mask, n_valid = own.chosen, own.candidates, own.mask, own.n_valid
    reward, terminated, truncated = own.reward, own.terminated, own.truncated
    valid, ended = own.valid, own.ended
    width = mask.shape[1]
    total = slots.shape[0]
    for start in range(0, total, CHUNK):
        # Typed: numba would compile every stage for the literal 0 as well.
        alive, begun = np.int64(0), np.int64(0)
        for b in range(start, min(start + CHUNK, total)):
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
        act(task, memory, alive, actions)
        look(task, memory, live, alive)
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
        finish(task, memory, begun)
        begin(task, memory, begun)
        look(task, memory, fresh, begun)
        for i in range(begun):
            counters[CUTS] += slots[fresh[i], CUT]


@kernel
def random_actions(memory: Block, key: int, out: Longs) -> None:
    """A uniform choice inside the mask, the same for (key, episode, step) in any slot."""
    own = view(Memory, memory)
    slots, mask = own.slots, own.mask
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
def expert_actions(memory: Block, lengths: Ints, steps: Ints, out: Longs) -> None:
    """The action that follows a known proof: -1 where none is known for this state.

    Queries that have no proof, and corrupted ones, are to be given up.
    """
    own = view(Memory, memory)
    slots, candidates, mask, lost = own.slots, own.candidates, own.mask, own.lost
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
