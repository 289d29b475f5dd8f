"""The prover environment on arrays: numba kernels that act, look, finish and begin.

`advance` is the step: it applies the actions, looks at the states they led to, finishes the
episodes that came to an end, begins new ones in their slots and looks at those. Each part goes
over a list of slots, so that reads from all over the graph overlap. Successors are never built to
be looked at: a candidate is a row that says which fact or rule would be used, and only the chosen
one is applied.
"""

# Kernels say int where numba has its own 64-bit integers; only numba could tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

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
ENDING, SIZES = 20, 21
"""How the last action tried to end the episode, and bits for the sizes of states it was at."""
SLOT_COLUMNS = 22

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
    lists: Ints,
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
    live, fresh = lists[0], lists[1]
    width = mask.shape[1]
    alive = 0
    begun = 0
    for b in range(slots.shape[0]):
        reward[b] = 0.0
        terminated[b] = truncated[b] = False
        # Of the episode acted in, also where it goes on: nothing may be left from an earlier one.
        ended[b, E_INVALID] = ended[b, E_PROVEN] = 0
        ended[b, E_EPISODE], ended[b, E_INDEX] = slots[b, EPISODE], slots[b, INDEX]
        ended[b, E_LABEL], ended[b, E_ANSWER] = slots[b, LABEL], -1
        ended[b, E_DEPTH] = ended[b, E_STEPS] = 0
        valid[b] = slots[b, ACTIVE] != 0 and actions[b] >= -1
        if actions[b] == RESET:
            fresh[begun] = b
            begun += 1
        elif valid[b] or actions[b] == LOOK:
            slots[b, ENDING] = GOES_ON
            if valid[b]:
                slots[b, STEPS] += 1
                if actions[b] < 0 or actions[b] >= width or not mask[b, actions[b]]:
                    slots[b, ENDING] = WAS_INVALID
                elif actions[b] == GIVE_UP:
                    slots[b, ENDING] = GAVE_UP
                elif actions[b] == TURN:
                    slots[b, PAGE] += 1
            live[alive] = b
            alive += 1
    _act(prog, live, alive, actions, slots, goals, history, scratch, candidates, config)
    _look(
        *(prog, live, alive, slots, goals, history, inverse, config, scratch),
        *(candidates, mask, n_valid),
    )
    for i in range(alive):
        b = live[i]
        if actions[b] == LOOK:
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
    _finish(
        *(prog, fresh, begun, slots, goals, candidates, mask, n_valid, query, rewards, config),
        *(counters, reward, terminated, truncated, ended),
        *(final_goals, final_candidates, final_mask, final_n_valid, final_query),
    )
    _begin(
        *(fresh, begun, slots, goals, history, counters, config, queries, labels),
        *(known_ptr, known_obj, query),
    )
    _look(
        *(prog, fresh, begun, slots, goals, history, inverse, config, scratch),
        *(candidates, mask, n_valid),
    )
    for i in range(begun):
        counters[CUTS] += slots[fresh[i], CUT]


@kernel
def _act(
    prog: Program,
    live: Ints,
    alive: int,
    actions: Longs,
    slots: Longs,
    goals: Ints,
    history: Ints,
    scratch: Ints,
    candidates: Ints,
    config: Longs,
) -> None:
    """Resolve the first goal of the listed slots as their actions say."""
    entities, depth = config[C_ENTITIES], config[C_DEPTH]
    # Taken out once: a field of a tuple counts its references each time it is named.
    heads, body, body_len, variables = prog.head, prog.body, prog.body_len, prog.variables
    last = history.shape[1] - 1
    bound, names = scratch[0], scratch[1]
    for i in range(alive):
        b = live[i]
        action = actions[b]
        if action < FIRST or slots[b, ENDING] != GOES_ON:
            continue
        n, answer = slots[b, COUNT], slots[b, ANSWER]
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
        slots[b, COUNT], slots[b, ANSWER] = n, answer
        slots[b, DEPTH] += 1
        slots[b, PAGE] = 0
        slots[b, SIZES] |= np.int64(1) << min(n, 63)
        row = b * (depth + 1) + slots[b, DEPTH]
        for k in range(n):
            for c in range(3):
                history[row, k, c] = goals[b, k, c]
        history[row, last, 0], history[row, last, 1] = n, answer


@kernel
def _look(
    prog: Program,
    listed: Ints,
    total: int,
    slots: Longs,
    goals: Ints,
    history: Ints,
    inverse: Ints,
    config: Longs,
    scratch: Ints,
    candidates: Ints,
    mask: Bools,
    n_valid: Longs,
) -> None:
    """List the successors of the listed slots: the page of them that each slot is at."""
    ps_ptr, ps_sub, ps_obj, po_ptr, po_sub, loop_ptr, loop_sub = prog[:7]
    heads, body, body_len, variables, by_head, head_ptr = prog[7:]
    entities, depth = config[C_ENTITIES], config[C_DEPTH]
    room, width = goals.shape[1], candidates.shape[1]
    page_size = width - FIRST
    bound, names = scratch[0], scratch[1]
    trial = np.empty((1, room, 3), np.int32)
    skip_s, skip_o = np.empty(depth + 4, np.int32), np.empty(depth + 4, np.int32)
    skip_at = np.empty(depth + 4, np.int64)
    for i in range(total):
        b = listed[i]
        if slots[b, COUNT] > 0:
            kind, low, count = span(
                ps_ptr,
                ps_obj,
                po_ptr,
                loop_ptr,
                entities,
                goals[b, 0, 0],
                goals[b, 0, 1],
                goals[b, 0, 2],
            )
            slots[b, KIND], slots[b, LOW], slots[b, SPAN] = kind, low, count
    for i in range(total):
        b = listed[i]
        n, answer, level = slots[b, COUNT], slots[b, ANSWER], slots[b, DEPTH]
        past = b * (depth + 1)
        sizes = slots[b, SIZES]
        found = np.int64(0)
        filled = np.int64(FIRST)
        cut = np.int64(0)
        more = False
        if n > 0 and slots[b, ENDING] == GOES_ON:
            kind, low, count = slots[b, KIND], slots[b, LOW], slots[b, SPAN]
            p, x, y = goals[b, 0, 0], goals[b, 0, 1], goals[b, 0, 2]
            start = slots[b, PAGE] * page_size
            stop = start + page_size
            if slots[b, SIDE] != 0 and level == 0:
                # The known answers of an open query are not what is asked for.
                count = 0
            skips = 0
            if count > 0:
                # The query itself and its inverse never help in its own proof.
                hs, hp, ho = slots[b, HEAD], slots[b, PREDICATE], slots[b, TAIL]
                for _ in range(2):
                    if (
                        hp == p
                        and (x >= entities or x == hs)
                        and (y >= entities or y == ho)
                        and (kind != LOOPS or hs == ho)
                    ):
                        skip_s[skips] = hs
                        skip_o[skips] = ho
                        skips += 1
                    hs, hp, ho = ho, np.int64(inverse[slots[b, PREDICATE]]), hs
                if n > 1 and (sizes >> min(n - 1, 63)) & 1:
                    for h in range(past, past + level):
                        if history[h, room, 0] == n - 1 and history[h, 0, 0] == goals[b, 1, 0]:
                            same, s, o = _needed(goals, b, n, answer, history, h, entities, names)
                            if same:
                                skip_s[skips] = s
                                skip_o[skips] = o
                                skips += 1
            places = 0
            slow = False
            if kind == GROUND and skips:
                count = 0
                skips = 0
            for k in range(skips):
                if skip_s[k] >= 0 and skip_o[k] >= 0:
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
                        skip_s[k],
                        skip_o[k],
                    )
                    if at >= 0:
                        places = _insert(skip_at, places, at)
                elif kind == PAIRS and (skip_s[k] >= 0 or skip_o[k] >= 0):
                    slow = True
                else:
                    # Whatever the fact, the same visited state would follow.
                    count = 0
                    places = 0
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
                    _write(candidates, mask, b, filled, FACT, p, x, y)
                    filled += 1
                found = 1
            for j in range(head_ptr[p], head_ptr[p + 1]):
                r = by_head[j]
                s, o = x, y
                # A head of two different variables, as nearly all have, unifies with anything.
                if heads[r, 1] < entities or heads[r, 2] <= heads[r, 1]:
                    ok, v0, t0, v1, t1 = unify(heads[r, 1], heads[r, 2], x, y, entities)
                    if not ok:
                        continue
                    s = t0 if s == v0 else s
                    o = t0 if o == v0 else o
                    s = t1 if s == v1 else s
                    o = t1 if o == v1 else o
                size = n - 1 + body_len[r]
                if size > room:
                    cut += 1
                    continue
                back = False
                if size > 0 and (sizes >> min(size, 63)) & 1:
                    # A rule with no body leaves the goals behind the first one.
                    first = body[r, 0, 0] if body_len[r] > 0 else goals[b, 1, 0]
                    for h in range(past, past + level + 1):
                        if history[h, room, 0] != size or history[h, 0, 0] != first:
                            continue
                        # Entities keep their names, so most rules are told by their first atom.
                        if body_len[r] > 0 and (
                            _differs(
                                body[r, 0, 1],
                                heads[r, 1],
                                heads[r, 2],
                                s,
                                o,
                                history[h, 0, 1],
                                entities,
                            )
                            or _differs(
                                body[r, 0, 2],
                                heads[r, 1],
                                heads[r, 2],
                                s,
                                o,
                                history[h, 0, 2],
                                entities,
                            )
                        ):
                            continue
                        for k in range(n):
                            for c in range(3):
                                trial[0, k, c] = goals[b, k, c]
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
                        if after == history[h, room, 1] and same_state(trial, 0, history, h, size):
                            back = True
                            break
                if back:
                    continue
                if start <= found < stop:
                    _write(candidates, mask, b, filled, RULE, r, s, o)
                    filled += 1
                found += 1
            if kind != GROUND:
                # Facts number `skipped` to `last` of the usable ones stand on this page.
                skipped = max(start - found, 0)
                last = min(stop - found, usable)
                found += usable
                at = low + skipped
                passed = 0
                if slow:
                    at = low
                    for _ in range(skipped):
                        while _skipped(ps_sub, ps_obj, at, skip_s, skip_o, skips):
                            at += 1
                        at += 1
                else:
                    while passed < places and skip_at[passed] <= at:
                        at += 1
                        passed += 1
                for _ in range(last - skipped):
                    if slow:
                        while _skipped(ps_sub, ps_obj, at, skip_s, skip_o, skips):
                            at += 1
                    while passed < places and skip_at[passed] == at:
                        at += 1
                        passed += 1
                    if kind == SUBJECTS:
                        _write(candidates, mask, b, filled, FACT, p, po_sub[at], y)
                    elif kind == LOOPS:
                        _write(candidates, mask, b, filled, FACT, p, loop_sub[at], loop_sub[at])
                    else:
                        _write(candidates, mask, b, filled, FACT, p, ps_sub[at], ps_obj[at])
                    filled += 1
                    at += 1
            more = found > stop
        for k in range(filled, slots[b, FILLED]):
            _erase(candidates, mask, b, k)
        slots[b, CUT], slots[b, FILLED], slots[b, MORE] = cut, filled, more
        n_valid[b] = found
        # A first state with no way on is shown all the same: giving up is its one action.
        _option(candidates, mask, b, TURN, NEXT, more)
        _option(candidates, mask, b, GIVE_UP, END, config[C_END] != 0 or found == 0)


@kernel
def _finish(
    prog: Program,
    listed: Ints,
    total: int,
    slots: Longs,
    goals: Ints,
    candidates: Ints,
    mask: Bools,
    n_valid: Longs,
    query: Ints,
    rewards: NDArray[np.float32],
    config: Longs,
    counters: Longs,
    reward: NDArray[np.float32],
    terminated: Bools,
    truncated: Bools,
    ended: Longs,
    final_goals: Ints,
    final_candidates: Ints,
    final_mask: Bools,
    final_n_valid: Longs,
    final_query: Ints,
) -> None:
    """Reward the listed slots whose episode is over, and keep what they showed last."""
    entities = config[C_ENTITIES]
    ps_ptr, ps_obj = prog.ps_ptr, prog.ps_obj
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
                _erase(final_candidates, final_mask, b, k)
            slots[b, FINAL] = kept
            _option(final_candidates, final_mask, b, TURN, NEXT, stopped and slots[b, MORE] != 0)
        final_n_valid[b] = n_valid[b] if stopped else 0


@kernel
def _begin(
    listed: Ints,
    count: int,
    slots: Longs,
    goals: Ints,
    history: Ints,
    counters: Longs,
    config: Longs,
    queries: Ints,
    labels: Bools,
    known_ptr: Ints,
    known_obj: Ints,
    query: Ints,
) -> None:
    """Put the next episodes of the stream into the listed slots, in the order of the slots.

    What an episode is depends on its number only.
    """
    entities, ratio, ask = config[C_ENTITIES], config[C_RATIO], config[C_ASK]
    total = queries.shape[0]
    last = history.shape[1] - 1
    for i in range(count):
        b = listed[i]
        for k in range(slots[b, COUNT]):
            goals[b, k, 0] = goals[b, k, 1] = goals[b, k, 2] = -1
        slots[b, DEPTH] = slots[b, PAGE] = slots[b, STEPS] = slots[b, SIDE] = 0
        slots[b, ENDING] = GOES_ON
        slots[b, SIZES] = 2
        number = counters[BEGUN]
        if config[C_ONCE] != 0 and number >= total:
            slots[b, ACTIVE] = slots[b, COUNT] = slots[b, LABEL] = 0
            slots[b, EPISODE] = slots[b, INDEX] = slots[b, ANSWER] = -1
            slots[b, HEAD] = slots[b, PREDICATE] = slots[b, TAIL] = -1
            query[b, 0] = query[b, 1] = query[b, 2] = -1
            continue
        counters[BEGUN] += 1
        positive, wrong = number, np.int64(0)
        if ratio:
            positive = number // (1 + ratio)
            wrong = number - positive * (1 + ratio)
        index = number
        if config[C_ONCE] == 0:
            epoch = positive // total
            index = permute(positive - epoch * total, total, mix(config[C_KEY], epoch))
        h, p, t = np.int64(queries[index, 0]), queries[index, 1], np.int64(queries[index, 2])
        label = labels[index]
        if wrong:
            turn = (positive * ratio + wrong - 1) & 1
            key = _episode_key(config[C_KEY], number)
            ok, h, t = _corrupted(h, p, t, turn, entities, known_ptr, known_obj, key)
            # Where every entity is a right answer nothing can be corrupted: the truth is asked.
            label = label and not ok
        side = ask
        if ask == ASK_BOTH:
            side = 1 + (number & 1)
        slots[b, ACTIVE] = slots[b, COUNT] = 1
        slots[b, EPISODE], slots[b, INDEX], slots[b, LABEL] = number, index, label
        slots[b, HEAD], slots[b, PREDICATE], slots[b, TAIL] = h, p, t
        slots[b, SIDE] = side
        slots[b, ANSWER] = t if side == TRUTH else entities
        goals[b, 0, 0] = query[b, 1] = p
        goals[b, 0, 1] = entities if side == ASK_HEAD else h
        goals[b, 0, 2] = entities if side == ASK_TAIL else t
        query[b, 0] = -1 if side == ASK_HEAD else h
        query[b, 2] = -1 if side == ASK_TAIL else t
        row = b * (config[C_DEPTH] + 1)
        for c in range(3):
            history[row, 0, c] = goals[b, 0, c]
        history[row, last, 0], history[row, last, 1] = 1, slots[b, ANSWER]


@kernel
def random_actions(slots: Longs, mask: Bools, key: int, out: Longs) -> None:
    """A uniform choice inside the mask, the same for (key, episode, step) in any slot."""
    for b in range(slots.shape[0]):
        ends, more = np.int64(mask[b, GIVE_UP]), slots[b, MORE]
        options = ends + more + slots[b, FILLED] - FIRST
        pick = _below(_episode_key(key, slots[b, EPISODE]), slots[b, STEPS], options)
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
def _needed(
    goals: Ints, b: int, n: int, answer: int, history: Ints, h: int, entities: int, names: Ints
) -> tuple[bool, int, int]:
    """The fact (s, o) that would lead from state `b` back to `h`; -1: any entity will do."""
    x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
    s = x if x < entities else np.int64(-1)
    o = y if y < entities else np.int64(-1)
    for k in range(names.size):
        names[k] = -1
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
def _differs(term: int, h0: int, h1: int, s: int, o: int, seen: int, entities: int) -> bool:
    """Whether a rule's `term` becomes an entity other than `seen` when its head is (s, o)."""
    if term == h0:
        term = s
    elif term == h1:
        term = o
    return term < entities and term != seen


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
