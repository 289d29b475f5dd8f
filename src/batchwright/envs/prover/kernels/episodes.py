"""The two ends of an episode: what it asks, and what its end is worth."""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return, operator"

import numpy as np

from batchwright.envs.prover.blocks import Block, view
from batchwright.envs.prover.kernels.look import erase, option
from batchwright.envs.prover.kernels.visited import mark, trace
from batchwright.envs.prover.layout import (
    ACTIVE,
    ANSWER,
    ASK_BOTH,
    ASK_HEAD,
    ASK_TAIL,
    BEGUN,
    C_ASK,
    C_DEPTH,
    C_ENTITIES,
    C_KEY,
    C_ONCE,
    C_RATIO,
    COUNT,
    DEPTH,
    E_ANSWER,
    E_INVALID,
    E_PROVEN,
    ENDING,
    EPISODE,
    FILLED,
    FINAL,
    FINISHED,
    FIRST,
    GAVE_UP,
    GOES_ON,
    HEAD,
    INDEX,
    INVALID,
    LABEL,
    MORE,
    NEXT,
    PAGE,
    PREDICATE,
    PROVEN,
    SEEN,
    SIDE,
    STEPS,
    TAIL,
    TRACES,
    TRUNCATED,
    TRUTH,
    TURN,
    Ints,
    Longs,
    Memory,
    Task,
    Words,
)
from batchwright.jit import kernel
from batchwright.logic.facts import is_fact
from batchwright.permutation import M32, ROUNDS, SMALL, below, mix, permute

__all__ = ["begin", "episode_key", "finish", "permute_row"]

DRAWS = 32
"""Random corruptions tried before the entities are gone through one by one."""


@kernel
def finish(task: Block, memory: Block, total: int) -> None:
    """Reward the first `total` of the `fresh` slots if their episode is over; keep its last state.

    Slots that only begin anew are among them.
    """
    given, own = view(Task, task), view(Memory, memory)
    ps_ptr, ps_obj, entities = given.ps_ptr, given.ps_obj, given.config[C_ENTITIES]
    rewards, listed, slots, counters = given.rewards, own.fresh, own.slots, own.counters
    goals, query, candidates, n_valid = own.goals, own.query, own.candidates, own.n_valid
    reward, terminated, truncated = own.reward, own.terminated, own.truncated
    ended, final_goals, final_query = own.ended, own.final_goals, own.final_query
    final_candidates, final_mask = own.final_candidates, own.final_mask
    final_n_valid = own.final_n_valid
    room = goals.shape[1]
    for i in range(total):
        b = listed[i]
        stopped = truncated[b]
        if not (stopped or terminated[b]):
            continue
        proven = ended[b, E_PROVEN] != 0
        if not stopped:
            right = slots[b, LABEL] != 0
            if proven and slots[b, SIDE] != 0:
                right = _correct(slots, b, ps_ptr, ps_obj, entities)
            if proven:
                reward[b] = rewards[0] if right else rewards[2]
            elif right:
                reward[b] = rewards[1]
            else:
                reward[b] = rewards[3]
                if slots[b, ENDING] == GAVE_UP:
                    reward[b] += rewards[4]
        counters[PROVEN] += proven
        counters[TRUNCATED] += stopped
        counters[FINISHED] += 1
        counters[INVALID] += ended[b, E_INVALID]
        ended[b, E_ANSWER] = slots[b, ANSWER] if slots[b, ANSWER] < entities else -1
        for k in range(room):
            for c in range(3):
                final_goals[b, k, c] = goals[b, k, c]
        for c in range(3):
            final_query[b, c] = query[b, c]
        # Only a truncated state has a future: of others no candidate is shown but END.
        kept = slots[b, FILLED] if stopped else FIRST
        if kept > FIRST or slots[b, FINAL] > FIRST:
            for k in range(FIRST, kept):
                for c in range(4):
                    final_candidates[b, k, c] = candidates[b, k, c]
                final_mask[b, k] = True
            for k in range(kept, slots[b, FINAL]):
                erase(final_candidates, final_mask, b, k)
            slots[b, FINAL] = kept
            option(final_candidates, final_mask, b, TURN, NEXT, stopped and slots[b, MORE] != 0)
        final_n_valid[b] = n_valid[b] if stopped else 0


@kernel
def begin(task: Block, memory: Block, count: int) -> None:
    """Put the next episodes of the stream into the `fresh` slots, in the order of the slots.

    What an episode is depends on its number only.
    """
    given, own = view(Task, task), view(Memory, memory)
    queries, labels, config = given.queries, given.labels, given.config
    known_ptr, known_obj = given.known_ptr, given.known_obj
    entities, ratio, ask = config[C_ENTITIES], config[C_RATIO], config[C_ASK]
    listed, order, slots, counters = own.fresh, own.order, own.slots, own.counters
    goals, history, query = own.goals, own.history, own.query
    total = queries.shape[0]
    once = config[C_ONCE] != 0
    # Queries come in another order in every epoch; `order` holds as much of it as is wanted.
    held = np.int64(0)
    upto = np.int64(0)
    for i in range(count):
        b = listed[i]
        number = counters[BEGUN]
        index = np.int64(-1)
        if not once or number < total:
            counters[BEGUN] += 1
            index = number
            if not once:
                positive = number // (1 + ratio) if ratio else number
                if positive >= upto:
                    epoch = positive // total
                    held = positive
                    last = (number + count - i - 1) // (1 + ratio)
                    upto = min(last + 1, (epoch + 1) * total)
                    permute_row(
                        *(positive - epoch * total, upto - held, total),
                        *(mix(config[C_KEY], epoch), order[0], order[1]),
                    )
                index = np.int64(order[0, positive - held])
        slots[b, EPISODE], slots[b, INDEX] = number if index >= 0 else np.int64(-1), index
        if index >= 0:
            # Nothing waits for these reads while the next episode's place is worked out.
            slots[b, HEAD], slots[b, TAIL] = queries[index, 0], queries[index, 2]
            slots[b, PREDICATE], slots[b, LABEL] = queries[index, 1], labels[index]
    for i in range(count):
        b = listed[i]
        for k in range(slots[b, COUNT]):
            goals[b, k, 0] = goals[b, k, 1] = goals[b, k, 2] = -1
        slots[b, DEPTH] = slots[b, PAGE] = slots[b, STEPS] = slots[b, SIDE] = 0
        slots[b, ENDING] = GOES_ON
        number, index = slots[b, EPISODE], slots[b, INDEX]
        if index < 0:
            slots[b, ACTIVE] = slots[b, COUNT] = slots[b, LABEL] = 0
            slots[b, ANSWER] = slots[b, HEAD] = slots[b, PREDICATE] = slots[b, TAIL] = -1
            query[b, 0] = query[b, 1] = query[b, 2] = -1
            continue
        h, p, t = slots[b, HEAD], slots[b, PREDICATE], slots[b, TAIL]
        label = slots[b, LABEL] != 0
        if ratio:
            positive = number // (1 + ratio)
            wrong = number - positive * (1 + ratio)
            if wrong:
                turn = (positive * ratio + wrong - 1) & 1
                key = episode_key(config[C_KEY], number)
                ok, h, t = _corrupted(h, p, t, turn, entities, known_ptr, known_obj, key)
                # If every entity is a true answer, nothing can be corrupted: the query stays.
                label = label and not ok
        side = ask
        if ask == ASK_BOTH:
            side = 1 + (number & 1)
        x = entities if side == ASK_HEAD else h
        y = entities if side == ASK_TAIL else t
        slots[b, ACTIVE] = slots[b, COUNT] = 1
        slots[b, LABEL], slots[b, SIDE] = label, side
        slots[b, HEAD], slots[b, TAIL] = h, t
        slots[b, ANSWER] = t if side == TRUTH else entities
        slots[b, TRACES] = trace(1, p, x, y)
        slots[b, SEEN] = mark(slots[b, TRACES])
        goals[b, 0, 0], goals[b, 0, 1], goals[b, 0, 2] = p, x, y
        query[b, 0] = -1 if side == ASK_HEAD else h
        query[b, 1] = p
        query[b, 2] = -1 if side == ASK_TAIL else t
        row = np.int64(b) * (config[C_DEPTH] + 1)
        history[row, 0, 0], history[row, 0, 1] = 1, slots[b, ANSWER]
        history[row, 1, 0], history[row, 1, 1], history[row, 1, 2] = p, x, y


@kernel
def _corrupted(
    h: int, p: int, t: int, side: int, entities: int, ptr: Ints, obj: Ints, key: int
) -> tuple[bool, int, int]:
    """The triple with another head (side 0) or tail that is not known to be true.

    Where the wanted side has none, the other one is tried; False if neither has.
    """
    for turn in range(2):
        a, c = h, t
        other = np.int64(0)
        for draw in range(DRAWS + entities):
            if draw < DRAWS:
                other = below(key, 2 * draw + turn, entities)
            else:
                other = (other + 1) % entities
            if side == 0:
                a = other
            else:
                c = other
            if not is_fact(ptr, obj, entities, a, p, c):
                return True, a, c
        side = 1 - side
    return False, h, t


@kernel
def _correct(slots: Longs, b: int, ps_ptr: Ints, ps_obj: Ints, entities: int) -> bool:
    """Whether the answer of an open query is the one looked for, or another fact."""
    answer, h, t = slots[b, ANSWER], slots[b, HEAD], slots[b, TAIL]
    if answer >= entities:
        return False
    if answer == (h if slots[b, SIDE] == ASK_HEAD else t):
        return bool(slots[b, LABEL] != 0)
    if slots[b, SIDE] == ASK_HEAD:
        h = answer
    else:
        t = answer
    return is_fact(ps_ptr, ps_obj, entities, h, slots[b, PREDICATE], t)


@kernel
def episode_key(key: int, episode: int) -> int:
    return mix(mix(key, np.uint64(0xE915)), np.uint64(episode))


@kernel
def permute_row(first: int, count: int, n: int, key: np.uint64, left: Words, right: Words) -> None:
    """Put `permute(first + i, n, key)` into `left[i]` for every i below `count`.

    The same network as that of `permute`, whose rounds wait for each other. Here the processor
    has other indices to work on meanwhile, and a round's own key is made once for all.
    """
    if n <= SMALL:
        for i in range(count):
            left[i] = permute(first + i, n, key)
        return
    a = np.int64(np.ceil(np.sqrt(np.float64(n))))
    b = (n + a - 1) // a
    for i in range(count):
        left[i] = (first + i) // b
        right[i] = (first + i) - np.int64(left[i]) * b
    for number in range(0, ROUNDS, 2):
        _round(right, left, count, mix(key, np.uint64(number)), a)
        _round(left, right, count, mix(key, np.uint64(number + 1)), b)
    for i in range(count):
        x = np.int64(left[i]) * b + np.int64(right[i])
        # A place beyond n is walked on from, alone.
        left[i] = x if x < n else permute(x, n, key)


@kernel
def _round(given: Words, changed: Words, count: int, key: np.uint64, side: int) -> None:
    """Add to `changed` a keyed hash of `given`, modulo `side`."""
    added, modulus = np.uint32(key & M32), np.uint32(side)
    for i in range(count):
        x = np.uint32(given[i] + added)
        x ^= np.uint32(x >> np.uint32(15))
        x = np.uint32(x * np.uint32(0x2C1B3C6D))
        x ^= np.uint32(x >> np.uint32(12))
        x = np.uint32(x * np.uint32(0x297A2D39))
        x ^= np.uint32(x >> np.uint32(15))
        step = np.uint32((np.uint64(x) * np.uint64(modulus)) >> np.uint64(32))
        x = np.uint32(changed[i] + step)
        changed[i] = np.uint32(x - modulus) if x >= modulus else x
