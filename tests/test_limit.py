"""The limit finds the knee of every kind of server, follows it, and never leaves its bounds."""

import importlib.util
import itertools
import json
import math
import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls.limit import AutoLimit, Change, FixedLimit, Limit
from batchwright.calls.limit import auto as limits
from batchwright.calls.limit.curve import Curve
from batchwright.errors import ConfigError, Mismatch


def _world() -> Any:
    """The simulated servers of the benchmark, which is no package."""
    path = Path(__file__).parent.parent / "benchmarks" / "limit_world.py"
    spec = importlib.util.spec_from_file_location("limit_world", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["limit_world"] = module
    spec.loader.exec_module(module)
    return module


world = _world()
KINDS = ("queue", "reject", "thrash", "batch")

events = st.lists(
    st.tuples(
        st.sampled_from(["done", "done", "done", "failed", "reject"]),
        st.floats(0.0, 3.0),  # time since the last event
        st.floats(0.0, 10.0),  # latency
        st.floats(0.0, 1.3),  # share of the limit in flight
        st.sampled_from([None, 0.0, 0.5, 20.0]),
    ),
    max_size=400,
)


def play(limit: Limit, script: list[Any], start: float = 0.0) -> Iterator[int]:
    """Feed a script of events, and give the limit after each."""
    now = start
    for what, later, seconds, share, retry_after_s in script:
        now += later
        in_flight = max(1, round(share * limit.limit))
        if what == "reject":
            limit.on_reject(now, in_flight, retry_after_s)
        else:
            limit.on_done(now, seconds, in_flight, what == "done")
        yield limit.limit


def share_of_oracle(kind: str, limit: AutoLimit, knees: tuple[int, ...], **more: Any) -> float:
    """Throughput in percent of a limit that knows the knee."""
    given = world.World(kind, knees, **more)
    return 100 * world.run(given, world.Oracle(given)).seconds / world.run(given, limit).seconds


@given(events, st.integers(1, 50), st.integers(0, 50), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_the_limit_never_leaves_its_bounds(
    script: list[Any], least: int, more: int, start: int
) -> None:
    limit = AutoLimit(start, least, least + more)
    assert least <= limit.limit <= least + more
    for now in play(limit, script):
        assert least <= now <= least + more
    for change in limit.history:
        assert least <= change.after <= least + more
        assert change.why


@given(events, st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_same_events_give_the_same_limits(script: list[Any], start: int) -> None:
    one, two = AutoLimit(start), AutoLimit(start)
    assert list(play(one, script)) == list(play(two, script))
    assert one.history == two.history
    assert one.state_dict() == two.state_dict()


@given(events, events)
@settings(max_examples=40, deadline=None)
def test_what_was_learned_survives_json_and_goes_on_the_same(
    script: list[Any], later: list[Any]
) -> None:
    first = AutoLimit()
    list(play(first, script))
    text = json.dumps(first.state_dict(), allow_nan=False)
    one, two = AutoLimit(), AutoLimit(start=99)
    list(play(two, later))  # what it knew before is gone
    for limit in (one, two):
        limit.load_state_dict(json.loads(text))
    assert one.limit == two.limit == round(json.loads(text)["limit"])
    assert list(play(one, later, 1e6)) == list(play(two, later, 1e6))


def test_no_order_of_outages_rejects_and_restarts_is_an_error() -> None:
    for seed in range(600):
        play_phases(random.Random(seed))


def play_phases(draw: random.Random) -> None:
    """Servers that answer, fail, do either or reject one after the other, and restarts between."""
    limit, now = AutoLimit(deadline_s=draw.choice([2, 30, 120])), 0.0
    for _ in range(6):
        phase = draw.choice(["done", "failed", "either", "reject", "restart"])
        latency_s, knee = draw.choice([0.01, 0.05, 1.0]), draw.choice([1, 2, 5, 30])
        if phase == "restart":
            learned = json.loads(json.dumps(limit.state_dict()))
            limit, now = AutoLimit(deadline_s=30), now + 100
            limit.load_state_dict(learned)
            continue
        for _ in range(draw.choice([5, 12, 40, 200])):
            n = limit.limit
            now += latency_s / n * draw.uniform(0.5, 1.5)
            if phase == "reject" and n > knee and draw.random() < 0.5:
                limit.on_reject(now, n, draw.choice([None, 0.1]))
            else:
                ok = phase in ("done", "reject") or (phase == "either" and draw.random() < 0.5)
                limit.on_done(now, latency_s * draw.uniform(0.5, 1.5), n, ok)
            assert limit.least <= limit.limit <= limit.most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begins_at", [1, 2, 3])
def test_a_limit_that_learned_to_be_small_finds_more_slots_again(kind: str, begins_at: int) -> None:
    learned = AutoLimit(start=begins_at, most=begins_at)
    world.run(world.World(kind, (begins_at,), calls=1500, seed=5), learned)
    limit = AutoLimit()
    limit.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    assert limit.limit <= begins_at + 1
    # It must not stay: every limit is within reach of the next one.
    world.run(world.World(kind, (24,), calls=3000, seed=6), limit)
    assert limit.limit >= 16


@pytest.mark.parametrize("calls", [1, 5, 20, 60, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_short_run_is_worth_something_and_harms_nothing(
    kind: str, calls: int
) -> None:
    first, second = AutoLimit(), AutoLimit()
    world.run(world.World(kind, (30,), calls=calls), first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert share_of_oracle(kind, second, (30,), calls=2000, seed=1) > 75


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 5), st.floats(0, 0.7)), max_size=300))
@settings(max_examples=40, deadline=None)
def test_a_caller_that_does_not_fill_the_limit_moves_nothing(idle: list[Any]) -> None:
    limit = AutoLimit(start=40)
    script = [("done", later, seconds, share, None) for later, seconds, share in idle]
    assert set(play(limit, script)) <= {40}
    assert not limit.history


@given(st.integers(2, 64), st.floats(0.0, 0.04), st.sampled_from([None, 0.5, 3.0]))
@settings(max_examples=60, deadline=None)
def test_a_burst_of_rejects_cuts_once_to_what_was_borne_and_at_most_by_half(
    borne: int, spread_s: float, retry_after_s: float | None
) -> None:
    limit = AutoLimit(start=64)
    for in_flight in range(64, borne, -1):
        limit.on_reject(spread_s * (64 - in_flight) / 64, in_flight, retry_after_s)
    assert limit.limit == max(borne, 32)
    if borne < 32 and retry_after_s is not None:
        assert limit.pause_until >= retry_after_s
    limit.on_done(5.0, 1.0, borne, True)
    cuts = [change for change in limit.take_changes() if change.why == "429 burst"]
    assert [(cut.before, cut.after) for cut in cuts] == [(64, max(borne, 32))] * (borne < 64)


def test_retry_after_stops_everybody_only_when_fewer_calls_are_refused_too() -> None:
    limit = AutoLimit(start=60)
    limit.on_reject(1.0, 60, 30.0)
    limit.on_reject(1.0, 59, 30.0)
    assert limit.pause_until <= 1.0
    limit.on_reject(1.0, 10, 30.0)
    assert limit.pause_until == 31.0


def test_failures_that_come_at_once_say_nothing_about_the_load() -> None:
    limit = AutoLimit(start=16)
    now = 0.0
    for _ in range(8):
        now += 0.1
        limit.on_done(now, 1.0, 16, True)
    before = limit.limit
    for _ in range(500):
        now += 0.01
        limit.on_done(now, 0.01, before, False)
    assert limit.limit == before


def test_calls_that_time_out_are_lost_goodput_and_bring_the_limit_down() -> None:
    limit = AutoLimit(start=16)
    now = 0.0
    for step in range(3000):  # 60 a second, until above 30 in flight only one in ten is answered
        now += 1 / 60
        crowded = limit.limit > 30 and step % 10 > 0
        limit.on_done(now, 3.0 if crowded else 0.4, limit.limit, not crowded)
    assert limit.limit <= 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("knee", [6, 25, 100])
def test_every_kind_of_server_is_used_well_cold_and_warm(kind: str, knee: int) -> None:
    cold = AutoLimit()
    assert share_of_oracle(kind, cold, (knee,), calls=4000, seed=5) > 82
    warm = AutoLimit()
    warm.load_state_dict(cold.state_dict())
    assert share_of_oracle(kind, warm, (knee,), calls=4000, seed=6) > 88
    if kind != "queue" and kind != "batch":  # more in flight costs those only latency
        assert 0.75 * knee <= warm.state_dict()["limit"] <= 1.3 * knee


@pytest.mark.parametrize("knee", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_probes_of_a_thrashing_server_with_few_slots_cost_little(knee: int, seed: int) -> None:
    cold, warm = AutoLimit(), AutoLimit()
    share_of_oracle("thrash", cold, (knee,), calls=400, seed=seed)
    warm.load_state_dict(cold.state_dict())
    # One call fewer is half of two: a probe has to end as soon as its few calls are clear.
    assert share_of_oracle("thrash", warm, (knee,), calls=400, seed=seed, power=1.7) > 86


@pytest.mark.parametrize("kind", KINDS)
def test_a_knee_that_moves_is_followed_down_and_up(kind: str) -> None:
    limit = AutoLimit()
    given = world.World(kind, (40, 12, 90), calls=9000, seed=3)
    seen = world.run(given, limit).limits
    by_phase = [
        [limit for done, limit in seen if 3000 * i + 2000 <= done < 3000 * (i + 1)]
        for i in range(3)
    ]
    middle = sorted(by_phase[1])[len(by_phase[1]) // 2]
    last = sorted(by_phase[2])[len(by_phase[2]) // 2] if by_phase[2] else limit.limit
    assert 9 <= middle <= 30
    assert last >= 65


@pytest.mark.parametrize("knees", [(40, 12), (12, 40)])
@pytest.mark.parametrize("counts", [False, True])
def test_the_detecting_oracle_of_the_benchmark_notices_the_move_and_nothing_else(
    knees: tuple[int, int], counts: bool
) -> None:
    given = world.World("thrash", knees, calls=3000, sigma=0.4, law="gamma", seed=7)
    found = world.run(given, world.DetectingOracle(given, 4, 7.0, counts, 1.25, 2.0))
    assert found.limits[-1][1] == knees[1]
    assert min(done for done, limit in found.limits if limit == knees[1] and done > 100) >= 1500
    assert found.seconds >= world.run(given, world.Oracle(given)).seconds
    with pytest.raises(ValueError, match="thrashing servers"):
        world.DetectingOracle(world.World("queue", knees), 4, 7.0, counts, 1.25, 2.0)


def limit_after(seen: list[tuple[int, int]], done: int) -> int:
    return [limit for at, limit in seen if at <= done][-1]


@pytest.mark.parametrize("seed", range(6))
def test_a_thrashing_server_whose_knee_collapses_is_relieved_at_once(seed: int) -> None:
    given = world.World("thrash", (90, 22), calls=4000, seed=seed)
    seen = world.run(given, AutoLimit()).limits
    assert limit_after(seen, 1999) > 65
    # 90 calls and more are in flight at that moment, and first have to end.
    assert limit_after(seen, 2060) < 55
    assert limit_after(seen, 2600) < 35


@pytest.mark.parametrize("kind", ["queue", "batch"])
@pytest.mark.parametrize("seed", range(3))
def test_where_it_costs_nothing_the_limit_has_headroom_that_shows_a_risen_knee(
    kind: str, seed: int
) -> None:
    given = world.World(kind, (20, 120), calls=6000, seed=seed)
    seen = world.run(given, AutoLimit()).limits
    held = sorted(limit_after(seen, done) for done in range(2000, 3000))[500]  # not the probes
    assert 20 <= held <= 45
    assert max(limit_after(seen, done) for done in range(3000, 3400)) > 90


def test_a_batching_server_is_not_misread_by_its_rising_latency() -> None:
    given = world.World("batch", (80,), calls=6000, seed=4)
    limit = AutoLimit()
    done = world.run(given, limit)
    # Alone, a call takes 0.4 of what it takes at the knee; latency rules stop far below it.
    assert done.seconds_in_flight / done.seconds > 0.8 * 80


def test_rejects_stay_rare_and_a_lost_ceiling_is_found_again() -> None:
    limit = AutoLimit()
    given = world.World("reject", (50, 10, 50), calls=6000, seed=8)
    done = world.run(given, limit)
    assert done.rejects < 0.1 * given.calls
    assert limit.state_dict()["ceiling"] == 50


def test_waves_of_calls_teach_as_well_as_a_stream() -> None:
    limit = AutoLimit()
    assert share_of_oracle("thrash", limit, (20,), wave=128, seed=2) > 88
    assert 16 <= limit.state_dict()["limit"] <= 25


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wave", [24, 32, 64])
def test_a_caller_that_pauses_after_few_calls_is_not_held_below_them(kind: str, wave: int) -> None:
    for seed in range(3):
        limit = AutoLimit()
        assert share_of_oracle(kind, limit, (60,), wave=wave, calls=2000, seed=seed) > 85
        assert limit.limit >= min(wave, 32)


@pytest.mark.parametrize("seed", range(3))
def test_what_short_waves_tell_adds_up(seed: int) -> None:
    # A wave is over before a round is: only together do waves show that 16 calls are too many.
    limit = AutoLimit()
    assert share_of_oracle("thrash", limit, (8,), wave=32, calls=4000, seed=seed) > 88
    assert limit.limit <= 12


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_told_once_and_they_follow_each_other(kind: str) -> None:
    limit = AutoLimit()
    told: list[Change] = []
    for calls in (2000, 2000):
        world.run(world.World(kind, (10, 5, 20), calls=calls, seed=calls), limit)
        told += limit.take_changes()
    assert limit.take_changes() == []
    assert told == list(limit.history)
    assert all(before.after == after.before for before, after in pairwise(told))
    assert "probe down" in {change.why for change in told}


def test_the_history_keeps_the_last_changes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HISTORY", 7)
    short = AutoLimit()
    world.run(world.World("thrash", (10,), calls=3000), short)
    monkeypatch.undo()
    long = AutoLimit()
    world.run(world.World("thrash", (10,), calls=3000), long)
    assert list(short.history) == short.take_changes() == list(long.history)[-7:]


def test_a_number_is_a_ceiling_below_which_rejects_bring_it_and_it_comes_back() -> None:
    limit: Limit = FixedLimit(8)
    for in_flight in (8, 7, 6):
        limit.on_reject(0.0, in_flight, 5.0)
    assert (limit.limit, limit.pause_until) == (5, 0.0)
    now = 1.0
    for _ in range(100):
        now += 0.1
        limit.on_done(now, 0.1, limit.limit, True)
    assert limit.limit == 8
    assert limit.take_changes()[0].after == 7
    limit.load_state_dict(limit.state_dict())
    assert limit.take_changes() == []


def test_a_number_pauses_only_for_a_server_that_rejects_fewer_calls_too() -> None:
    limit = FixedLimit(64)
    limit.on_reject(1.0, 60, 30.0)
    assert limit.pause_until <= 1.0
    limit.on_reject(1.0, 3, 30.0)
    assert limit.pause_until == 31.0
    assert limit.limit >= 8


@given(events, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_a_number_is_never_exceeded_nor_below_one(script: list[Any], n: int) -> None:
    limit = FixedLimit(n)
    for now in play(limit, script):
        assert 1 <= now <= n


@pytest.mark.parametrize("knee", [5, 40])
@pytest.mark.parametrize("number", [60, 200])
def test_a_number_above_what_a_server_accepts_costs_little(knee: int, number: int) -> None:
    given = world.World("reject", (knee,), calls=3000, retry_after_s=None)
    done = world.run(given, FixedLimit(number))
    assert world.run(given, world.Oracle(given)).seconds / done.seconds > 0.9
    assert done.rejects < 0.25 * given.calls


class Semaphore(FixedLimit):
    """The usual pattern: a refused call keeps its place while it waits."""

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("knee", [1, 4, 12, 40])
def test_a_number_is_never_slower_than_a_semaphore_of_that_number(kind: str, knee: int) -> None:
    for number in (1, 4, 16, 60):
        took: dict[bool, list[float]] = {False: [], True: []}
        rejects = {False: 0, True: 0}
        for seed, semaphore in itertools.product(range(4), took):
            limit: Limit = Semaphore(number) if semaphore else FixedLimit(number)
            given = world.World(
                kind, (knee,), calls=500, seed=seed, retry_after_s=None, holds_slot=semaphore
            )
            done = world.run(given, limit)
            took[semaphore].append(done.seconds)
            rejects[semaphore] += done.rejects
        # Which call comes last is chance.
        assert sum(took[False]) <= 1.01 * sum(took[True]), number
        assert rejects[False] <= rejects[True], number


@pytest.mark.parametrize("deadline_s", [60.0, 600.0])
@pytest.mark.parametrize("latency_s", [0.5, 3.0, 10.0])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_no_call_is_lost_that_a_limit_at_the_knee_would_not_lose(
    slots: int, latency_s: float, deadline_s: float
) -> None:
    for kind in ("queue", "thrash", "batch"):
        given = world.World(
            kind, (slots,), calls=200, latency_s=latency_s, sigma=0.3, deadline_s=deadline_s
        )
        at_knee = world.run(given, world.Oracle(given)).lost
        limit = AutoLimit(deadline_s=deadline_s)
        assert world.run(given, limit).lost <= at_knee
        again = AutoLimit(deadline_s=deadline_s)
        again.load_state_dict(limit.state_dict())
        assert world.run(given, again).lost <= at_knee


def test_a_timeout_brings_the_limit_down_at_once() -> None:
    limit = AutoLimit(start=16, deadline_s=30.0)
    limit.on_done(30.0, 30.0, 16, False)
    assert limit.limit <= 8


@pytest.mark.parametrize(("least", "most"), [(0, 10), (5, 4)])
def test_impossible_bounds_are_refused(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"least={least}, most={most}"):
        AutoLimit(least=least, most=most)
    with pytest.raises(ConfigError, match="limit must be at least 1, got 0"):
        FixedLimit(0)


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 99},
        {"limit": math.nan},
        {"noise": -1.0},
        {"curve": [[8.0, 0.0, 1.0]]},
        {"curve": [[8.0, 1.0]]},
        {"curve": "x"},
        {"latency_s": "slow"},
    ],
)
def test_a_memory_that_cannot_be_right_is_refused(broken: dict[str, Any]) -> None:
    state = AutoLimit().state_dict() | broken
    with pytest.raises((ValueError, TypeError)):
        AutoLimit().load_state_dict(state)
    with pytest.raises(Mismatch):
        AutoLimit().load_state_dict({})


@given(
    st.floats(3, 500),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from([0.0, -0.5]),
    st.floats(1e-3, 1e3),
)
@settings(max_examples=40, deadline=None)
def test_a_curve_that_is_a_stick_shows_its_knee(
    knee: float, rise: float, fall: float, scale: float
) -> None:
    curve = Curve()
    for step in range(-8, 9):
        in_flight = knee * 1.1**step
        if in_flight < 1:
            continue
        rate = scale * (in_flight / knee) ** (rise if step < 0 else fall)
        curve.add(in_flight, 5000, 5000 / rate)
    found = curve.knee()
    assert 0.85 * knee < found.limit < 1.2 * knee
    assert found.low <= 1.1 * knee
    assert found.high >= 0.9 * knee
    expected, spread = curve.expect(knee)
    assert abs(expected - math.log(scale)) < 0.06
    assert spread < 0.05
