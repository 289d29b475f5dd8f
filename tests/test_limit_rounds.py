"""A window of calls separates growth, falls and noise; bursts set a ceiling, one call tests it."""

import heapq
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls.limit.ceiling import Ceiling
from batchwright.calls.limit.curve import Curve
from batchwright.calls.limit.probes import Probes
from batchwright.calls.limit.ramp import Ramp
from batchwright.calls.limit.window import Window, far_from_expected, probe_verdict, scatter


def steady(rate: float, calls: int, limit: int, ok: bool = True) -> tuple[Window, float]:
    """A round in which calls ended `rate` times a second, without any noise, and its end."""
    window = Window(0.0, 0, full=True)
    for call in range(1, calls + 1):
        window.count(call / rate, limit / rate, limit, ok)
    return window, calls / rate


def known(knee: float, fall: float, scale: float = 1.0) -> Curve:
    """The curve of a server that was measured well on both sides of its knee."""
    curve = Curve()
    for step in range(-5, 6):
        in_flight = knee * 1.1**step
        rate = scale * knee * (in_flight / knee) ** (1.0 if step < 0 else fall)
        curve.add(in_flight, 2000, 2000 / rate)
    return curve


@pytest.mark.parametrize("sigma", [0.4, 0.8])
@pytest.mark.parametrize(("servers", "counted"), [(200, 40), (50, 50), (10, 100)])
def test_scatter_is_that_of_a_server_that_is_always_full(
    sigma: float, servers: int, counted: int
) -> None:
    draws = np.random.default_rng(3)
    variation = math.sqrt(math.exp(sigma**2) - 1)
    busy = [float(end) for end in draws.lognormal(0, sigma, servers)]
    heapq.heapify(busy)
    rates, begun, total = [], 0.0, 400 * counted
    for ended in range(1, total + 1):
        now = heapq.heappop(busy)
        heapq.heappush(busy, now + float(draws.lognormal(0, sigma)))
        if ended % counted == 0:
            rates.append(math.log(counted / (now - begun)))
            begun = now
    seen = statistics.stdev(rates[20:])
    assert 0.6 < scatter(counted, servers, variation) / seen < 1.6


@given(st.floats(0.1, 1000.0), st.integers(0, 400), st.floats(0.05, 0.35))
@settings(max_examples=60, deadline=None)
def test_a_fall_is_noticed_in_a_dozen_calls_however_many_came_before(
    usual: float, before: int, share: float
) -> None:
    window = Window(0.0, 0, full=True, usual=usual / 16)
    now = 0.0
    for _ in range(before):
        now += 1 / usual
        window.count(now, 16 / usual, 16, True)
    assert max(window.alarm, window.slow_alarm) < 1
    for _ in range(12):
        now += 1 / (share * usual)
        window.count(now, 16 / (share * usual), 16, True)
    assert min(window.alarm, window.slow_alarm) > 6


def test_calls_that_end_in_waves_are_no_fall() -> None:
    window = Window(0.0, 0, full=True, usual=1.0)
    for wave in range(1, 30):
        for _ in range(16):  # all of them take one second
            window.count(float(wave), 1.0, 16, True)
            assert window.slow_alarm < 1


def test_the_scatter_of_answers_seldom_looks_like_a_fall() -> None:
    alarms = 0
    for seed in range(200):
        window = Window(0.0, 0, full=True, usual=1.0 / 16)
        # Every end is followed by a new call: quieter than independent ends.
        for now in np.cumsum(np.random.default_rng(seed).gamma(2.0, 0.5, 300)):
            window.count(float(now), 1.0, 16, True)
            alarms += window.alarm > 6
    assert alarms == 0


def test_answers_that_all_fail_are_a_fall() -> None:
    window = Window(0.0, 0, full=True, usual=10.0 / 16)
    for call in range(1, 40):
        window.count(call / 10.0, 1.6, 16, False)
    assert window.alarm > 6


def burst(level: int, slower: float, sigma: float, seed: int, known: int = 64) -> tuple[str, float]:
    """Double the limit of a server whose calls then take `slower` times as long; the verdict on
    the step, and when it came in latencies."""
    draws = np.random.default_rng(seed)
    ramp = Ramp.of(draws.lognormal(-(sigma**2) / 2, sigma, known))
    ramp.step(100.0, level, 2 * level)
    for took in sorted(slower * draws.lognormal(-(sigma**2) / 2, sigma, level)):
        assert ramp.on_end(100.0, 2 * level, ok=True)
        assert ramp.on_end(99.0, 2 * level, ok=True)  # one that was sent before the step
        verdict, gain = ramp.verdict(100.0 + took)
        if verdict != "open":
            assert gain <= 2.0
            return verdict, took
    return "open", took


@pytest.mark.parametrize("sigma", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("level", [16, 64, 256])
def test_a_burst_tells_early_whether_twice_the_calls_pay(level: int, sigma: float) -> None:
    free = [burst(level, 1.0, sigma, seed) for seed in range(40)]
    assert sum(verdict in ("paid", "in part") for verdict, _ in free) >= 38
    full = [burst(level, 2.2, sigma, seed) for seed in range(40)]
    if level >= 64 or sigma < 0.5:
        assert sum(verdict == "no" for verdict, _ in full) >= 28
    thrashing = [burst(level, 4.0, sigma, seed) for seed in range(40)]
    assert sum(verdict == "no" for verdict, _ in thrashing) >= 38
    # Not the slowest call of the burst decides.
    assert statistics.median(took for _, took in free) < 1.2


def test_failures_of_a_burst_are_not_goodput() -> None:
    ramp = Ramp.of([1.0] * 16)
    ramp.step(0.0, 16, 32)
    for _ in range(16):
        ramp.on_end(0.0, 32, ok=False)
    assert ramp.verdict(2.0)[0] == "no"


@given(st.floats(8, 300), st.sampled_from([0.0, -0.5]), st.floats(0.01, 100.0))
@settings(max_examples=40, deadline=None)
def test_a_probe_up_shows_a_moved_knee_and_only_that(
    knee: float, fall: float, scale: float
) -> None:
    curve, limit = known(knee, fall, scale), max(round(1.2 * knee), math.ceil(1.1 * knee))
    calls = max(200, 2 * limit)
    moved, now = steady(scale * limit, calls, limit)
    assert probe_verdict(moved, now, limit, knee, curve) == "goodput rose"
    stayed, now = steady(scale * knee * (limit / knee) ** fall, calls, limit)
    assert probe_verdict(stayed, now, limit, knee, curve) == "as expected"
    few, now = steady(scale * limit, 5, limit)
    assert probe_verdict(few, now, limit, knee, curve) == "open"


@given(st.floats(8, 300), st.floats(0.3, 3.0))
@settings(max_examples=40, deadline=None)
def test_doubt_is_confirmed_on_its_own_side_only(knee: float, ratio: float) -> None:
    curve, limit = known(knee, 0.0), round(knee)
    window, now = steady(ratio * curve.knee().limit, 400, limit)
    apart = far_from_expected(window, now, limit, curve, 0.0)
    if abs(math.log(ratio)) > 0.3:
        assert apart * math.log(ratio) > 0
        assert far_from_expected(window, now, limit, curve, apart) == apart
        assert far_from_expected(window, now, limit, curve, -apart) == 0
    if abs(math.log(ratio)) < 0.04:
        assert not apart


@given(
    st.integers(1, 20),
    st.integers(0, 500),
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 600)), min_size=1, max_size=50),
)
@settings(max_examples=60, deadline=None)
def test_a_burst_takes_half_at_most(
    least: int, more: int, rejects: list[tuple[float, int]]
) -> None:
    ceiling, limit, now, found, until = Ceiling(), least + more, 0.0, 0, -1.0
    for later, in_flight in rejects:
        now += later
        if now > until:
            found, until = limit, now + 0.2
        sustained = ceiling.sustained(now, limit, in_flight, least, 0.2)
        assert sustained >= max(least, found // 2)
        assert sustained <= max(least, found // 2, in_flight - 1)
        limit = min(limit, sustained)


def test_a_ceiling_is_tried_less_often_after_each_reject() -> None:
    ceiling = Ceiling()
    ceiling.lower(10)
    waits = []
    for _ in range(4):
        wait = 1
        while not ceiling.try_one_more(10, may=True):
            wait += 1
        waits.append(wait)
        assert ceiling.on_trial
        ceiling.end_trial(rejected=True)
    assert waits == [10, 20, 40, 40]
    assert not any(ceiling.try_one_more(9, may=True) for _ in range(100))
    assert not any(ceiling.try_one_more(10, may=False) for _ in range(100))
    assert ceiling.try_one_more(10, may=True)
    assert [ceiling.stands(11) for _ in range(6)] == [False] * 5 + [True]
    assert (ceiling.height, ceiling.climb_from) == (11, 11)


@given(st.floats(4, 400), st.sampled_from([0.0, -0.5]), st.none() | st.floats(0.7, 2.0))
@settings(max_examples=60, deadline=None)
def test_probes_stay_below_the_ceiling_and_near_what_was_measured(
    level: float, fall: float, over: float | None
) -> None:
    curve, probes = known(level, fall), Probes()
    knee = curve.knee()
    height = None if over is None else max(2, round(over * level))
    best = knee.limit if height is None else min(knee.limit, float(height))
    probes.weigh(knee, at_ceiling=height is not None and round(best) >= height)
    targets = [probes.target(best, 1, height, knee, curve) for _ in range(24)]
    assert all(target <= (height or math.inf) for target in targets)
    assert all(0.55 * best - 1 <= target <= 1.25 * best + 1 for target in targets)
    assert min(targets) < best
    assert max(targets) > best or height is not None
