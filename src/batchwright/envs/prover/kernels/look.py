"""Listing the successors of many slots: which facts and rules resolve the first goal of each."""

# Kernels annotate numba's 64-bit integers as int; only numba can tell them apart.
# mypy: disable-error-code="arg-type, assignment, return-value, no-any-return"

import numpy as np

from batchwright.envs.prover.blocks import Block, view
from batchwright.envs.prover.kernels.plans import AS_X, AS_Y, TERMS, USABLE
from batchwright.envs.prover.kernels.visited import (
    fold,
    leads_to,
    mark,
    needed,
    same_as,
    sort,
    trace,
)
from batchwright.envs.prover.layout import (
    AHEAD,
    ANSWER,
    C_DEPTH,
    C_END,
    C_ENTITIES,
    COUNT,
    CUT,
    DEPTH,
    END,
    ENDING,
    FILLED,
    FIRST,
    GIVE_UP,
    GOES_ON,
    HEAD,
    KIND,
    LOW,
    MORE,
    NEXT,
    PAGE,
    PREDICATE,
    SEEN,
    SPAN,
    TAIL,
    TRACES,
    TURN,
    Bools,
    Ints,
    Longs,
    Memory,
    Task,
    Words,
)
from batchwright.jit import kernel
from batchwright.logic.facts import lower_bound
from batchwright.logic.prove.search import FACT, RULE
from batchwright.logic.prove.unify import (
    GROUND,
    LOOPS,
    OBJECTS,
    PAIRS,
    SUBJECTS,
    place,
    resolve_rule,
    unify,
)
from batchwright.logic.rows import group_span, row_span

__all__ = ["erase", "look", "option", "write"]

SORT, FOLD = 0x3FFFFF << 40, 0xFFFFF
"""The bits of a trace for `sort` and for one `fold`."""


@kernel
def look(task: Block, memory: Block, listed: Words, total: int) -> None:
    """List the successors of the listed slots: the page of them that each slot is at."""
    given, own = view(Task, task), view(Memory, memory)
    ps_ptr, ps_sub, ps_obj = given.ps_ptr, given.ps_sub, given.ps_obj
    po_ptr, po_sub = given.po_ptr, given.po_sub
    loop_ptr, loop_sub = given.loop_ptr, given.loop_sub
    heads, body, body_len, variables = given.head, given.body, given.body_len, given.variables
    by_head, head_ptr, plans, inverse = given.by_head, given.head_ptr, given.plans, given.inverse
    entities, depth = given.config[C_ENTITIES], given.config[C_DEPTH]
    end_action = given.config[C_END] != 0
    slots, goals, history = own.slots, own.goals, own.history
    candidates, mask, n_valid = own.candidates, own.mask, own.n_valid
    bound, names = own.scratch[0], own.scratch[1]
    room = goals.shape[1]
    page_size = mask.shape[1] - FIRST
    trial = np.empty((1, room, 3), np.int32)
    skip_s, skip_o = np.empty(depth + 4, np.int32), np.empty(depth + 4, np.int32)
    skip_at = np.empty(depth + 4, np.int64)
    _spans(listed, total, slots, goals, entities, ps_ptr, ps_obj, po_ptr, po_sub, loop_ptr)
    for i in range(total):
        b = listed[i]
        n = slots[b, COUNT]
        found = np.int64(0)
        filled = touched = np.int64(FIRST)
        cut = np.int64(0)
        more = False
        if n > 0 and slots[b, ENDING] == GOES_ON:
            answer, level = slots[b, ANSWER], slots[b, DEPTH]
            past = np.int64(b) * (depth + 1)
            kind, low, count = slots[b, KIND], slots[b, LOW], slots[b, SPAN]
            p = np.int64(goals[b, 0, 0])
            x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
            start = slots[b, PAGE] * page_size
            stop = start + page_size
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
                if n > 1:
                    # What stays of the second goal must be in the trace of a visited state.
                    known, care = sort(n - 1, goals[b, 1, 0]) << 40, SORT
                    if goals[b, 1, 1] < entities:
                        known, care = known | fold(goals[b, 1, 1]) << 20, care | FOLD << 20
                    if goals[b, 1, 2] < entities:
                        known, care = known | fold(goals[b, 1, 2]), care | FOLD
                    for h in range(level):
                        if (slots[b, TRACES + h] & care) != known:
                            continue
                        same, s, o = needed(goals, b, n, answer, history, past + h, entities)
                        if same:
                            skip_s[skips] = s
                            skip_o[skips] = o
                            skips += 1
            places = np.int64(0)
            slow = False
            if kind == GROUND and skips:
                count = 0
                skips = 0
            few = (
                kind in (OBJECTS, SUBJECTS)
                and start == 0
                and count + head_ptr[p + 1] - head_ptr[p] <= page_size
            )
            for k in range(skips):
                if few and skip_s[k] >= 0 and skip_o[k] >= 0:
                    # Met below, where the facts are written.
                    continue
                if skip_s[k] >= 0 and skip_o[k] >= 0:
                    at = place(
                        *(ps_ptr, ps_obj, po_sub, loop_sub, entities, kind, low, count, p),
                        *(skip_s[k], skip_o[k]),
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
                    write(candidates, mask, b, filled, FACT, p, x, y)
                    filled += 1
                found = 1
            for j in range(head_ptr[p], head_ptr[p + 1]):
                r = np.int64(by_head[j])
                length = np.int64(body_len[r])
                size = n - 1 + length
                s, o = x, y
                back = False
                if plans[r, kind, USABLE] and length > 0:
                    if size > room:
                        cut += 1
                        continue
                    # The first atom tells most states apart: its variables are the first ones.
                    first, second = plans[r, kind, TERMS], plans[r, kind, TERMS + 1]
                    s0 = x if first == AS_X else y if first == AS_Y else np.int64(first)
                    o0 = x if second == AS_X else y if second == AS_Y else np.int64(second)
                    made = trace(size, body[r, 0, 0], s0, o0)
                    if slots[b, SEEN] & mark(made):
                        for h in range(level + 1):
                            if slots[b, TRACES + h] == made and leads_to(
                                *(plans, body, r, kind, length, goals, b, n, answer, entities),
                                *(history, past + h),
                            ):
                                back = True
                                break
                else:
                    ok, v0, t0, v1, t1 = unify(heads[r, 1], heads[r, 2], x, y, entities)
                    if not ok:
                        continue
                    if size > room:
                        cut += 1
                        continue
                    s = t0 if s == v0 else s
                    o = t0 if o == v0 else o
                    s = t1 if s == v1 else s
                    o = t1 if o == v1 else o
                    if size > 0:
                        for k in range(n):
                            for c in range(3):
                                trial[0, k, c] = goals[b, k, c]
                        _, after = resolve_rule(
                            *(trial, 0, n, answer, heads, body, body_len, variables, r),
                            *(entities, bound, names),
                        )
                        for h in range(past, past + level + 1):
                            back = back or same_as(trial, size, after, history, h)
                if back:
                    continue
                if start <= found < stop:
                    write(candidates, mask, b, filled, RULE, r, s, o)
                    filled += 1
                found += 1
            if few:
                # All fit on this page. A row that is not to be there is written over by the next.
                touched = filled + count
                for at in range(low, low + count):
                    s, o = x, y
                    if kind == OBJECTS:
                        o = np.int64(ps_obj[at])
                    else:
                        s = np.int64(po_sub[at])
                    write(candidates, mask, b, filled, FACT, p, s, o)
                    keep = True
                    for k in range(skips):
                        keep &= (s != skip_s[k]) | (o != skip_o[k])
                    filled += keep
                found = filled - FIRST
            elif kind != GROUND:
                # Facts number `skipped` to `last` of the usable ones stand on this page.
                skipped = min(max(start - found, 0), usable)
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
                    s, o = x, y
                    if kind == OBJECTS:
                        o = np.int64(ps_obj[at])
                    elif kind == SUBJECTS:
                        s = np.int64(po_sub[at])
                    elif kind == LOOPS:
                        s = o = np.int64(loop_sub[at])
                    else:
                        s, o = np.int64(ps_sub[at]), np.int64(ps_obj[at])
                    write(candidates, mask, b, filled, FACT, p, s, o)
                    filled += 1
                    at += 1
            more = found > stop
        for k in range(filled, max(touched, slots[b, FILLED])):
            erase(candidates, mask, b, k)
        slots[b, CUT], slots[b, FILLED], slots[b, MORE] = cut, filled, more
        n_valid[b] = found
        # A first state without successors is shown all the same: giving up is its one action.
        option(candidates, mask, b, TURN, NEXT, more)
        option(candidates, mask, b, GIVE_UP, END, end_action or found == 0)


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
def _spans(
    listed: Words,
    total: int,
    slots: Longs,
    goals: Ints,
    entities: int,
    ps_ptr: Ints,
    ps_obj: Ints,
    po_ptr: Ints,
    po_sub: Ints,
    loop_ptr: Ints,
) -> None:
    """Find the facts that unify with the first goals, in short loops whose reads overlap.

    A first state needs none: the fact it asks for is hidden, and so are the known answers of an
    open query.
    """
    for i in range(total):
        b = listed[i]
        kind, low, high = GROUND, np.int64(0), np.int64(0)
        if slots[b, DEPTH] > 0 and slots[b, COUNT] > 0:
            p = np.int64(goals[b, 0, 0])
            x, y = np.int64(goals[b, 0, 1]), np.int64(goals[b, 0, 2])
            if x < entities:
                kind = GROUND if y < entities else OBJECTS
                low, high = row_span(ps_ptr, p * entities + x)
            elif y < entities:
                kind = SUBJECTS
                low, high = row_span(po_ptr, p * entities + y)
            elif x == y:
                kind = LOOPS
                low, high = row_span(loop_ptr, p)
            else:
                kind = PAIRS
                low, high = group_span(ps_ptr, p, entities)
        elif slots[b, COUNT] > 0:
            x, y = goals[b, 0, 1], goals[b, 0, 2]
            kind = OBJECTS if y >= entities else SUBJECTS if x >= entities else GROUND
        slots[b, KIND], slots[b, LOW], slots[b, SPAN] = kind, low, high - low
    for i in range(total):
        b = listed[i]
        if slots[b, SPAN] > 0:
            low = slots[b, LOW]
            if slots[b, KIND] == GROUND:
                high = low + slots[b, SPAN]
                y = goals[b, 0, 2]
                at = lower_bound(ps_obj, low, high, y)
                slots[b, SPAN] = at < high and ps_obj[at] == y
            else:
                # Read now, it is near when the candidates are written.
                slots[b, AHEAD] = po_sub[low] if slots[b, KIND] == SUBJECTS else ps_obj[low]


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
