"""Token buckets let through exactly what they say, alone or shared by processes."""

import contextlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls.cache.store import Cache
from batchwright.calls.engine.endpoint import SharedRateLimit
from batchwright.calls.limit.rates import Bucket, RateLimit
from batchwright.errors import BadFile, ConfigError

rates = st.floats(0.5, 1e7)
bursts = st.floats(0.01, 120.0)
pauses = st.floats(0.0, 5.0)
SLACK = 1e-6
"""What rounding of times may add, as a share."""


def admitted(
    bucket: Bucket, steps: list[tuple[float, float]], begin: float
) -> list[tuple[float, float]]:
    """When each amount was taken by somebody who asks after a pause and waits as told."""
    now, taken = begin, []
    for pause, amount in steps:
        now += pause
        wait = bucket.wait(amount, now)
        if wait > 0:
            before = bucket.full_at
            # A moment too early is too early, and asking takes nothing.
            assert bucket.wait(amount, now + wait / 2) > 0
            assert bucket.full_at == before
            now += wait
            assert bucket.wait(amount, now) == 0.0
        bucket.take(amount, now)
        taken.append((now, amount))
    return taken


@given(
    rates, bursts, st.lists(st.tuples(pauses, st.floats(0.1, 1e6)), max_size=25), st.floats(0, 1e9)
)
@settings(max_examples=100, deadline=None)
def test_no_window_holds_more_than_rate_and_burst_and_the_wait_told_is_enough(
    per_minute: float, burst_s: float, steps: list[tuple[float, float]], begin: float
) -> None:
    taken = admitted(Bucket(per_minute, burst_s), steps, begin)

    burst = per_minute / 60 * burst_s
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window = taken[last][0] - taken[first][0]
            amount = sum(part for _, part in taken[first : last + 1])
            most = max(burst, *(part for _, part in taken[first : last + 1]))
            # The clock itself has steps; at 1e9 seconds they are a tenth of a microsecond.
            steps_s = math.ulp(taken[last][0]) * 4 * len(taken)
            allowed = per_minute / 60 * (window + steps_s) + most
            assert amount <= allowed * (1 + SLACK)


@given(st.floats(1, 1e6), st.integers(1, 60), st.integers(20, 200))
@settings(max_examples=50, deadline=None)
def test_who_never_rests_gets_the_whole_rate(per_minute: float, burst_s: int, n: int) -> None:
    unit = per_minute / 60
    taken = admitted(Bucket(per_minute, burst_s), [(0.0, unit)] * n, 0.0)

    assert taken[-1][0] == pytest.approx(max(0, n - burst_s), abs=1e-6)


@given(
    st.lists(
        st.tuples(pauses, st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=30
    ),
    st.floats(100, 1e6),
)
@settings(max_examples=60, deadline=None)
def test_settled_at_once_it_is_as_if_the_true_count_had_been_known(
    steps: list[tuple[float, int, int]], tpm: float
) -> None:
    guessing, knowing = Bucket(tpm), Bucket(tpm)
    now = 1000.0
    for pause, estimate, actual in steps:
        now += pause
        guessing.take(estimate, now)
        guessing.correct(actual - estimate)
        knowing.take(actual, now)
        # One that is full may be full since earlier, which nobody can tell.
        assert max(guessing.full_at, now) == pytest.approx(max(knowing.full_at, now), abs=1e-6)


@pytest.mark.parametrize("error", [0.25, 1.0, 4.0])
def test_wrong_estimates_do_not_change_how_many_tokens_go_through(error: float) -> None:
    actual, tpm, now, taken = 500.0, 60_000.0, 0.0, 0.0
    rates = RateLimit(tpm=tpm)
    while now < 600.0:
        wait = rates.reserve(actual * error, now)
        now += wait
        if wait == 0.0:
            taken += actual
            rates.settle(actual * error, actual)

    assert taken == pytest.approx(tpm * 10, rel=0.02)


def test_both_limits_hold_and_a_refusal_takes_from_neither() -> None:
    rates = RateLimit(rpm=600, tpm=6000, burst_s=1)

    assert rates.reserve(100, now=0.0) == 0.0
    assert rates.reserve(100, now=0.0) == 1.0
    assert [rates.reserve(0, now=0.0) for _ in range(9)] == [0.0] * 9
    assert rates.reserve(0, now=0.0) == pytest.approx(0.1)
    rates.settle(100, 50)
    assert rates.reserve(50, now=0.1) == 0.0


def test_what_is_larger_than_the_bucket_goes_through_and_is_paid_off() -> None:
    rates = RateLimit(tpm=60)

    assert rates.reserve(30, now=0.0) == 0.0
    assert rates.reserve(1, now=0.0) == 30.0
    assert rates.reserve(1, now=30.0) == 0.0


@pytest.mark.parametrize("rpm", [0.1, 1.0, 7.0, 60.0, 90.0])
def test_a_slow_rate_still_lets_one_request_go(rpm: float) -> None:
    rates = RateLimit(rpm=rpm)

    assert rates.reserve(0, now=5.0) == 0.0
    wait = rates.reserve(0, now=5.0)
    assert wait == pytest.approx(60 / rpm * (1 if rpm <= 60 else 0.5))
    assert rates.reserve(0, now=5.0 + wait) == 0.0


def test_without_limits_nothing_waits() -> None:
    rates = RateLimit()

    assert [rates.reserve(10**9, now=0.0) for _ in range(3)] == [0.0] * 3
    rates.settle(5, 10)


@pytest.mark.parametrize("wrong", [{"rpm": 0}, {"tpm": -5}, {"rpm": math.inf}, {"tpm": math.nan}])
def test_an_impossible_rate_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be a finite number above 0"):
        RateLimit(**wrong)


def shared(path: Path, name: str, **limits: float) -> contextlib.closing[SharedRateLimit]:
    return contextlib.closing(SharedRateLimit(path, name, **limits))


def test_endpoints_of_different_names_do_not_share(tmp_path: Path) -> None:
    path = tmp_path / "rates.db"
    with shared(path, "a", rpm=60) as one, shared(path, "b", rpm=60) as other:
        assert (one.reserve(0, now=0.0), other.reserve(0, now=0.0)) == (0.0, 0.0)
        with shared(path, "a", rpm=60) as again:
            assert again.reserve(0, now=0.25) == 0.75


def test_one_that_knows_only_one_limit_leaves_the_other_alone(tmp_path: Path) -> None:
    path = tmp_path / "rates.db"
    with shared(path, "a", rpm=60, tpm=60) as both, shared(path, "a", rpm=60) as requests:
        assert both.reserve(10, now=0.0) == 0.0
        assert requests.reserve(0, now=1.0) == 0.0
        requests.settle(5, 50)
        assert both.reserve(1, now=2.0) == 8.0


def test_a_cache_is_no_rate_limit_file(tmp_path: Path) -> None:
    Cache(tmp_path / "calls.db").close()
    with pytest.raises(BadFile, match="not a rate limit file"):
        SharedRateLimit(tmp_path / "calls.db", "a", rpm=1)


def test_four_processes_together_stay_within_the_limit(tmp_path: Path) -> None:
    script = """
import contextlib, sys, time
from batchwright.calls.engine.endpoint import SharedRateLimit
rates = SharedRateLimit(sys.argv[1], "server", rpm=6000, tpm=120_000, burst_s=0.2)
with contextlib.closing(rates):
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + 1.5
    while (now := time.monotonic()) < end:
        wait = rates.reserve(10, now)
        if wait == 0.0:
            print(repr(now))
            rates.settle(10, 15)
        else:
            time.sleep(min(wait, 0.05))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / "rates.db"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    outs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4

    times = [float(line) for out in outs for line in out.split()]
    # Tokens are the narrower limit: 2,000 a second, in calls of 15.
    assert len(times) * 15 <= (max(times) - min(times) + 0.2) * 2000 + 15
    assert all(out for out in outs)
