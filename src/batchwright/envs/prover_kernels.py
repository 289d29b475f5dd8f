"""The prover environment on arrays: one flat numba kernel that acts, ends, begins and observes.

For every slot it applies the action, and then observes; where the episode ended, it moves what it
saw to the final buffers, begins the next episode and observes once more. Successors are never
built to be looked at: a candidate is a row that says which fact or rule would be used, and only
the chosen one is applied.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.logic.kernels import found
from batchwright.logic.search import FACT, RULE
from batchwright.logic.unify import (
    GROUND,
    LOOPS,
    PAIRS,
    SUBJECTS,
    Program,
    place,
    resolve_fact,
    resolve_rule,
    same_state,
    span,
    unify,
)
from batchwright.permutation import mix, permute

__all__ = ["END", "NEXT", "advance", "expert_actions", "random_actions"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

NEXT, END = 2, 3
"""Kinds of candidates after FACT and RULE: turn to the next page, and give up."""

RESET, LOOK, IDLE = -2, -3, -4
"""Not actions: begin an episode, observe again, leave the slot alone."""

# Columns of `slots`, one row for each environment.
COUNT, ANSWER, DEPTH, PAGE, EPISODE, INDEX, LABEL, ACTIVE, FILLED, MORE, STEPS, CUT = range(12)
HEAD, PREDICATE, TAIL = 12, 13, 14
"""The triple that the episode is about; for an open query with the answer that is looked for."""
SIDE, FINAL = 15, 16
"""The open argument (0: none, 1: head, 2: tail), and rows in use in the final buffers."""
SLOT_COLUMNS = 17

# Columns of `ended`: what is known of an episode when it ends.
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

DRAWS = 32
"""Random corruptions tried before the entities are gone through one by one."""


@kernel
def advance(
    prog: Program,
    known_ptr: Ints,
    known_obj: Ints,
    inverse: Ints,
    queries: Ints,
    labels: Bools,
    config: Longs,
    rewards: NDArray[np.float32],
    actions: Longs,
    slots: Longs,
    goals: Ints,
    history: Ints,
    counters: Longs,
    scratch: Ints,
    candidates: Ints,
    mask: Bools,
    n_valid: Longs,
    query: Ints,
    reward: NDArray[np.float32],
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    ended: Longs,
    final_goals: Ints,
    final_candidates: Ints,
    final_mask: Bools,
    final_n_valid: Longs,
    final_query: Ints,
) -> None:
    """Act in every slot; `actions` may also hold RESET, LOOK and IDLE."""
    ps_ptr, ps_sub, ps_obj, po_ptr, po_sub, loop_ptr, loop_sub = prog[:7]
    heads, body, body_len, variables, by_head, head_ptr = prog[7:]
    entities, depth = config[C_ENTITIES], config[C_DEPTH]
    room, width = goals.shape[1], candidates.shape[1]
    page_size = width - 2
    bound, names = scratch[0], scratch[1]
    trial = np.empty((1, room, 3), np.int32)
    skip_s, skip_o = np.empty(depth + 4, np.int32), np.empty(depth + 4, np.int32)
    skip_at = np.empty(depth + 4, np.int64)
    for b in range(slots.shape[0]):
        action = actions[b]
        if action == IDLE:
            reward[b] = 0.0
            terminated[b] = truncated[b] = False
            continue
        active = slots[b, ACTIVE] != 0
        reward[b] = 0.0
        terminated[b] = truncated[b] = False
        ended[b, E_INVALID] = ended[b, E_PROVEN] = 0
        past = b * (depth + 1)
        begin = action == RESET
        valid[b] = active and not begin
        n, answer = slots[b, COUNT], slots[b, ANSWER]
        level = slots[b, DEPTH]
        failed = False
        gave_up = False
        if action >= -1:
            if not active:
                continue
            slots[b, STEPS] += 1
            if action < 0 or action >= width or not mask[b, action]:
                counters[INVALID] += 1
                ended[b, E_INVALID] = 1
                failed = True
            elif action == width - 1:
                failed = gave_up = True
            elif action == width - 2:
                slots[b, PAGE] += 1
            else:
                if candidates[b, action, 0] == FACT:
                    s, o = candidates[b, action, 2], candidates[b, action, 3]
                    n, answer = resolve_fact(goals, b, n, answer, s, o, entities, names)
                else:
                    n, answer = resolve_rule(
                        goals,
                        b,
                        n,
                        answer,
                        heads,
                        body,
                        body_len,
                        variables,
                        candidates[b, action, 1],
                        entities,
                        bound,
                        names,
                    )
                level += 1
                slots[b, COUNT], slots[b, ANSWER], slots[b, DEPTH] = n, answer, level
                slots[b, PAGE] = 0
                _keep(history, past + level, goals, b, n, answer)
        # Twice at most: the state that the action led to, and the first one of the next episode.
        while True:
            if begin:
                _begin(slots, b, goals, counters, config, queries, labels, known_ptr, known_obj)
                active = slots[b, ACTIVE] != 0
                n, answer, level = slots[b, COUNT], slots[b, ANSWER], np.int64(0)
                _keep(history, past, goals, b, n, answer)
                _ask(query, slots, b)
            total = np.int64(0)
            filled = np.int64(0)
            cut = np.int64(0)
            more = False
            if n > 0 and not failed:
                p, x, y = goals[b, 0, 0], goals[b, 0, 1], goals[b, 0, 2]
                kind, low, count = span(ps_ptr, ps_obj, po_ptr, loop_ptr, entities, p, x, y)
                start = slots[b, PAGE] * page_size
                stop = start + page_size
                if slots[b, SIDE] != 0 and level == 0:
                    # The known answers of an open query are not what is asked for.
                    count = 0
                skips = 0
                if count > 0:
                    # The query itself and its inverse never help in its own proof.
                    hs, hp, ho = slots[b, HEAD], slots[b, PREDICATE], slots[b, TAIL]
                    for turn in range(2):
                        if turn == 1:
                            hs, hp, ho = ho, np.int64(inverse[hp]), hs
                        if (
                            hp == p
                            and (x >= entities or x == hs)
                            and (y >= entities or y == ho)
                            and (kind != LOOPS or hs == ho)
                        ):
                            skip_s[skips] = hs
                            skip_o[skips] = ho
                            skips += 1
                    if n > 1:
                        for h in range(past, past + level):
                            if history[h, room, 0] == n - 1 and history[h, 0, 0] == goals[b, 1, 0]:
                                same, s, o = _needed(
                                    goals, b, n, answer, history, h, entities, names
                                )
                                if same:
                                    skip_s[skips] = s
                                    skip_o[skips] = o
                                    skips += 1
                places = 0
                slow = False
                for i in range(skips):
                    if skip_s[i] >= 0 and skip_o[i] >= 0:
                        at = place(
                            ps_ptr,
                            ps_obj,
                            po_sub,
                            loop_sub,
                            entities,
                            kind,
                            low,
                            count,
                            p,
                            skip_s[i],
                            skip_o[i],
                        )
                        if at >= 0:
                            places = _insert(skip_at, places, at)
                    elif kind == PAIRS and (skip_s[i] >= 0 or skip_o[i] >= 0):
                        slow = True
                    else:
                        # Whatever the fact, the same visited state would follow.
                        count = places = 0
                        slow = False
                        break
                usable = count - places
                if slow:
                    usable = 0
                    for at in range(low, low + count):
                        if not _skipped(ps_sub, ps_obj, at, skip_s, skip_o, skips):
                            usable += 1
                if kind == GROUND and usable:
                    if start == 0:
                        _write(candidates, mask, b, 0, FACT, p, x, y)
                        filled = 1
                    total = 1
                for j in range(head_ptr[p], head_ptr[p + 1]):
                    r = by_head[j]
                    ok, v0, t0, v1, t1 = unify(heads[r, 1], heads[r, 2], x, y, entities)
                    if not ok:
                        continue
                    size = n - 1 + body_len[r]
                    if size > room:
                        cut += 1
                        continue
                    first = body[r, 0, 0] if body_len[r] > 0 else goals[b, min(1, room - 1), 0]
                    back = False
                    for h in range(past, past + level + 1):
                        if size > 0 and history[h, room, 0] == size and history[h, 0, 0] == first:
                            for i in range(n):
                                for c in range(3):
                                    trial[0, i, c] = goals[b, i, c]
                            _, after = resolve_rule(
                                trial,
                                0,
                                n,
                                answer,
                                heads,
                                body,
                                body_len,
                                variables,
                                r,
                                entities,
                                bound,
                                names,
                            )
                            if after == history[h, room, 1] and same_state(
                                trial, 0, history, h, size
                            ):
                                back = True
                                break
                    if back:
                        continue
                    if start <= total < stop:
                        s = t0 if x == v0 else x
                        o = t0 if y == v0 else y
                        s = t1 if s == v1 else s
                        o = t1 if o == v1 else o
                        _write(candidates, mask, b, filled, RULE, r, s, o)
                        filled += 1
                    total += 1
                if kind != GROUND:
                    # Facts number `first` to `last` of the usable ones stand on this page.
                    begin_at = max(start - total, 0)
                    end_at = min(stop - total, usable)
                    total += usable
                    at = low + begin_at
                    passed = 0
                    if slow:
                        at = low
                        for _ in range(begin_at):
                            while _skipped(ps_sub, ps_obj, at, skip_s, skip_o, skips):
                                at += 1
                            at += 1
                    else:
                        while passed < places and skip_at[passed] <= at:
                            at += 1
                            passed += 1
                    for _ in range(end_at - begin_at):
                        if slow:
                            while _skipped(ps_sub, ps_obj, at, skip_s, skip_o, skips):
                                at += 1
                        while passed < places and skip_at[passed] == at:
                            at += 1
                            passed += 1
                        if kind == SUBJECTS:
                            _write(candidates, mask, b, filled, FACT, p, po_sub[at], y)
                        elif kind == LOOPS:
                            s = loop_sub[at]
                            _write(candidates, mask, b, filled, FACT, p, s, s)
                        else:
                            _write(candidates, mask, b, filled, FACT, p, ps_sub[at], ps_obj[at])
                        filled += 1
                        at += 1
                more = total > stop
            if slots[b, PAGE] == 0 and action != LOOK:
                counters[CUTS] += cut
            for k in range(filled, slots[b, FILLED]):
                _erase(candidates, mask, b, k)
            slots[b, CUT], slots[b, FILLED], slots[b, MORE] = cut, filled, more
            n_valid[b] = total
            stuck = n > 0 and total == 0
            # A first state with no way on is shown all the same: giving up is its one action.
            _option(candidates, mask, b, width - 2, NEXT, more)
            _option(candidates, mask, b, width - 1, END, config[C_END] != 0 or total == 0)
            if begin or action == LOOK:
                break
            proven = n == 0 and not failed
            over = proven or failed or (stuck and cut == 0)
            stopped = not over and (stuck or level >= depth)
            if not (over or stopped):
                break
            terminated[b] = over
            truncated[b] = stopped
            if over:
                right = slots[b, LABEL] != 0
                if proven and slots[b, SIDE] != 0:
                    right = _correct(slots, b, ps_ptr, ps_obj, entities)
                if proven:
                    reward[b] = rewards[0] if right else rewards[2]
                elif right:
                    reward[b] = rewards[1]
                else:
                    reward[b] = rewards[3] + (rewards[4] if gave_up else np.float32(0.0))
            counters[PROVEN] += proven
            counters[TRUNCATED] += stopped
            counters[FINISHED] += 1
            ended[b, E_PROVEN] = proven
            ended[b, E_EPISODE] = slots[b, EPISODE]
            ended[b, E_INDEX] = slots[b, INDEX]
            ended[b, E_LABEL] = slots[b, LABEL]
            ended[b, E_ANSWER] = answer if answer < entities else -1
            ended[b, E_DEPTH] = level
            ended[b, E_STEPS] = slots[b, STEPS]
            for i in range(room):
                for c in range(3):
                    final_goals[b, i, c] = goals[b, i, c]
            for c in range(3):
                final_query[b, c] = query[b, c]
            # Only a truncated state has a future: of others no candidate is shown but END.
            kept = filled if stopped else 0
            for k in range(kept):
                for c in range(4):
                    final_candidates[b, k, c] = candidates[b, k, c]
                final_mask[b, k] = True
            for k in range(kept, slots[b, FINAL]):
                _erase(final_candidates, final_mask, b, k)
            slots[b, FINAL] = kept
            _option(final_candidates, final_mask, b, width - 2, NEXT, stopped and more)
            _option(final_candidates, final_mask, b, width - 1, END, True)
            final_n_valid[b] = total if stopped else 0
            begin = True
            failed = False


@kernel
def random_actions(slots: Longs, mask: Bools, key: int, out: Longs) -> None:
    """A uniform choice inside the mask, the same for (key, episode, step) in any slot."""
    width = mask.shape[1]
    for b in range(slots.shape[0]):
        filled, more = slots[b, FILLED], slots[b, MORE]
        options = filled + more + mask[b, width - 1]
        pick = _below(_episode_key(key, slots[b, EPISODE]), slots[b, STEPS], options)
        if pick < filled:
            out[b] = pick
        elif pick == filled and more != 0:
            out[b] = width - 2
        else:
            out[b] = width - 1


@kernel
def expert_actions(
    slots: Longs, candidates: Ints, mask: Bools, lengths: Ints, steps: Ints, lost: Bools, out: Longs
) -> None:
    """The action that follows a known proof: -1 where none is known for this state.

    Queries that have no proof, and corrupted ones, are to be given up.
    """
    width = mask.shape[1]
    for b in range(slots.shape[0]):
        out[b] = -1
        if slots[b, ACTIVE] == 0 or lost[b]:
            continue
        index, level = slots[b, INDEX], slots[b, DEPTH]
        if slots[b, LABEL] == 0 or lengths[index] == 0:
            out[b] = width - 1 if mask[b, width - 1] else -1
        elif level < lengths[index]:
            kind, number = steps[index, level, 0], steps[index, level, 1]
            s, o = steps[index, level, 2], steps[index, level, 3]
            for k in range(slots[b, FILLED]):
                if (
                    candidates[b, k, 0] == kind
                    and candidates[b, k, 1] == number
                    and (kind == RULE or (candidates[b, k, 2] == s and candidates[b, k, 3] == o))
                ):
                    out[b] = k
                    break
            if out[b] < 0 and slots[b, MORE] != 0:
                out[b] = width - 2


@kernel
def _begin(
    slots: Longs,
    b: int,
    goals: Ints,
    counters: Longs,
    config: Longs,
    queries: Ints,
    labels: Bools,
    known_ptr: Ints,
    known_obj: Ints,
) -> None:
    """Put the next episode of the stream into a slot; what it is depends on its number only."""
    number = counters[BEGUN]
    entities, ratio, ask = config[C_ENTITIES], config[C_RATIO], config[C_ASK]
    total = queries.shape[0]
    for i in range(slots[b, COUNT]):
        goals[b, i, 0] = goals[b, i, 1] = goals[b, i, 2] = -1
    slots[b, DEPTH] = slots[b, PAGE] = slots[b, STEPS] = slots[b, SIDE] = 0
    if config[C_ONCE] != 0 and number >= total:
        slots[b, ACTIVE] = slots[b, COUNT] = slots[b, LABEL] = 0
        slots[b, EPISODE] = slots[b, INDEX] = slots[b, ANSWER] = -1
        slots[b, HEAD] = slots[b, PREDICATE] = slots[b, TAIL] = -1
        return
    counters[BEGUN] += 1
    positive = number // (1 + ratio)
    wrong = number - positive * (1 + ratio)
    index = number
    if config[C_ONCE] == 0:
        epoch = positive // total
        index = permute(positive - epoch * total, total, mix(config[C_KEY], epoch))
    h, p, t = np.int64(queries[index, 0]), queries[index, 1], np.int64(queries[index, 2])
    label = labels[index]
    if wrong:
        side = (positive * ratio + wrong - 1) & 1
        key = _episode_key(config[C_KEY], number)
        ok, h, t = _corrupted(h, p, t, side, entities, known_ptr, known_obj, key)
        # Where every entity is a right answer there is nothing to corrupt: the truth is asked.
        label = label and not ok
    side = ask
    if ask == ASK_BOTH:
        side = 1 + (number & 1)
    slots[b, ACTIVE] = slots[b, COUNT] = 1
    slots[b, EPISODE], slots[b, INDEX], slots[b, LABEL] = number, index, label
    slots[b, HEAD], slots[b, PREDICATE], slots[b, TAIL] = h, p, t
    slots[b, SIDE] = side
    goals[b, 0, 0] = p
    goals[b, 0, 1] = entities if side == ASK_HEAD else h
    goals[b, 0, 2] = entities if side == ASK_TAIL else t
    slots[b, ANSWER] = t if side == TRUTH else entities


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
                other = _below(key, 2 * draw + turn, entities)
            else:
                other = (other + 1) % entities
            if side == 0:
                a = other
            else:
                c = other
            if not found(ptr, obj, entities, a, p, c):
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
    return found(ps_ptr, ps_obj, entities, h, slots[b, PREDICATE], t)


@kernel
def _ask(query: Ints, slots: Longs, b: int) -> None:
    query[b, 0] = -1 if slots[b, SIDE] == ASK_HEAD else slots[b, HEAD]
    query[b, 1] = slots[b, PREDICATE]
    query[b, 2] = -1 if slots[b, SIDE] == ASK_TAIL else slots[b, TAIL]


@kernel
def _keep(history: Ints, row: int, goals: Ints, b: int, n: int, answer: int) -> None:
    """Write a state into the history: its goals, then their number and the answer."""
    for i in range(n):
        for c in range(3):
            history[row, i, c] = goals[b, i, c]
    last = history.shape[1] - 1
    history[row, last, 0], history[row, last, 1] = n, answer


@kernel
def _needed(
    goals: Ints, b: int, n: int, answer: int, history: Ints, h: int, entities: int, names: Ints
) -> tuple[bool, int, int]:
    """The fact (s, o) that would lead from state `b` back to `h`; -1: any entity will do."""
    x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
    s = x if x < entities else np.int64(-1)
    o = y if y < entities else np.int64(-1)
    names[:] = -1
    following = entities
    last = history.shape[1] - 1
    # After the terms of the goals comes the answer.
    for k in range(2, 2 * n + 1):
        i, c = k >> 1, 1 + (k & 1)
        if i < n:
            term, old = np.int64(goals[b, i, c]), np.int64(history[h, i - 1, c])
            if goals[b, i, 0] != history[h, i - 1, 0]:
                return False, np.int64(-1), np.int64(-1)
        else:
            term, old = np.int64(answer), np.int64(history[h, last, 1])
        if term < entities:
            same = term == old
        elif term == x:
            same = old < entities and (s < 0 or s == old)
            s = old
        elif term == y:
            same = old < entities and (o < 0 or o == old)
            o = old
        else:
            if names[term - entities] < 0:
                names[term - entities] = following
                following += 1
            same = names[term - entities] == old
        if not same:
            return False, np.int64(-1), np.int64(-1)
    if x == y and x >= entities:
        o = s
    return True, s, o


@kernel
def _skipped(ps_sub: Ints, ps_obj: Ints, at: int, skip_s: Ints, skip_o: Ints, skips: int) -> bool:
    for i in range(skips):
        if (skip_s[i] < 0 or skip_s[i] == ps_sub[at]) and (
            skip_o[i] < 0 or skip_o[i] == ps_obj[at]
        ):
            return True
    return False


@kernel
def _insert(places: Longs, count: int, at: int) -> int:
    """Put `at` into the ascending `places` unless it stands there; how many there are now."""
    i = count
    while i > 0 and places[i - 1] >= at:
        if places[i - 1] == at:
            return count
        i -= 1
    for j in range(count, i, -1):
        places[j] = places[j - 1]
    places[i] = at
    return count + 1


@kernel
def _write(
    rows: Ints, mask: Bools, b: int, k: int, kind: int, number: int, first: int, second: int
) -> None:
    rows[b, k, 0], rows[b, k, 1], rows[b, k, 2], rows[b, k, 3] = kind, number, first, second
    mask[b, k] = True


@kernel
def _erase(rows: Ints, mask: Bools, b: int, k: int) -> None:
    rows[b, k, 0] = rows[b, k, 1] = rows[b, k, 2] = rows[b, k, 3] = -1
    mask[b, k] = False


@kernel
def _option(rows: Ints, mask: Bools, b: int, k: int, kind: int, offered: bool) -> None:
    rows[b, k, 0] = kind if offered else -1
    mask[b, k] = offered


@kernel
def _episode_key(key: int, episode: int) -> int:
    return mix(mix(key, np.uint64(0xE915)), np.uint64(episode))


@kernel
def _below(key: int, counter: int, bound: int) -> int:
    high = mix(key, np.uint64(counter)) >> np.uint64(32)
    return np.int64((high * np.uint64(bound)) >> np.uint64(32))
