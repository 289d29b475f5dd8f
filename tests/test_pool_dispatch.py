"""What is sent next is data: a job and its endpoint, a time to wait for, or a spent cap."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.calls import Done, Endpoint, FixedLimit, Outcome, Usage, chat
from batchwright.calls.engine.budgets import SpendingCap
from batchwright.calls.engine.dispatch import Attempt, Dispatch, Job, Send, Spent, Wait
from batchwright.calls.engine.endpoint import SharedRateLimit, Upstream
from batchwright.calls.engine.stats import Stats


class Nobody:
    """A caller that wants nothing."""

    born = 0.0
    stopped = False

    def deliver(self, index: int, outcome: Outcome) -> None: ...

    def abort(self, error: Exception) -> None: ...


def jobs(n: int) -> list[Job]:
    return [Job(chat("m", f"{i}?", max_tokens=10), None, i, 0.0, [(Nobody(), i)]) for i in range(n)]


def upstream(name: str, limit: int, rates: SharedRateLimit | None = None) -> Upstream:
    return Upstream(Endpoint(f"http://{name}/v1"), FixedLimit(limit), False, rates)


def sent(dispatch: Dispatch, now: float) -> Iterator[Send | Wait | Spent | None]:
    """What is to be done one after the other, each call sent staying in flight."""
    while True:
        move = dispatch.next(now)
        yield move
        if not isinstance(move, Send):
            return
        move.upstream.in_flight += 1


def test_the_least_loaded_endpoint_gets_the_next_job_until_all_are_full() -> None:
    small, large = upstream("small", 1), upstream("large", 3)
    dispatch = Dispatch([small, large], Stats(), None)
    waiting = jobs(6)
    dispatch.queue.extend(waiting)

    *moves, last = sent(dispatch, now=0.0)

    assert [move.upstream for move in moves if isinstance(move, Send)] == [small, *[large] * 3]
    assert [move.job for move in moves if isinstance(move, Send)] == waiting[:4]
    assert last is None
    assert list(dispatch.queue) == waiting[4:]


def test_jobs_that_are_over_are_skipped() -> None:
    dispatch = Dispatch([upstream("a", 9)], Stats(), None)
    first, second, third = jobs(3)
    first.over = second.over = True
    dispatch.queue.extend([first, second, third])

    moves = list(sent(dispatch, now=0.0))

    assert [move.job for move in moves if isinstance(move, Send)] == [third]
    assert moves[-1] is None


def test_paused_endpoints_are_waited_for_until_the_first_one_resumes() -> None:
    early, late = upstream("early", 2), upstream("late", 2)
    early.breaker.open_until, late.blocked_until = 3.0, 5.0
    dispatch = Dispatch([late, early], Stats(), None)
    dispatch.queue.extend(jobs(2))

    assert dispatch.next(now=1.0) == Wait(3.0)
    probe = dispatch.next(now=3.0)
    assert isinstance(probe, Send)
    assert probe.upstream is early
    early.in_flight = 1
    # The probe's end is not a time; the other endpoint's is.
    assert dispatch.next(now=3.0) == Wait(5.0)


def test_a_rate_limit_that_is_used_up_leaves_the_jobs_to_the_other_endpoint(tmp_path: Path) -> None:
    with contextlib.closing(SharedRateLimit(tmp_path / "rates.db", "a", rpm=60)) as rates:
        limited, other = upstream("limited", 9, rates), upstream("other", 2)
        other.in_flight = 1
        dispatch = Dispatch([limited, other], Stats(), None)
        dispatch.queue.extend(jobs(5))

        *moves, last = sent(dispatch, now=10.0)

    assert [move.upstream for move in moves if isinstance(move, Send)] == [limited, other]
    assert last == Wait(11.0)
    assert len(dispatch.queue) == 3


def test_under_a_spending_cap_jobs_wait_for_the_calls_in_flight_and_then_it_is_spent() -> None:
    stats = Stats({"m": (0.0, 1e6)})  # a dollar a completion token: ten a call
    server = upstream("a", 9)
    dispatch = Dispatch([server], stats, SpendingCap(25.0, stats))
    waiting = jobs(5)
    dispatch.queue.extend(waiting)

    assert [type(move) for move in sent(dispatch, now=0.0)] == [Send, Send, type(None)]
    # One came back cheaper than it counted for, so there is money for another.
    for number, tokens, expected in ((0, 4, [Send]), (1, 4, []), (2, 8, [])):
        server.in_flight -= 1
        dispatch.release(waiting[number])
        response = Done("x", {}, "stop", Usage(0, tokens))
        stats.responded(waiting[number].request, response, 0.1)
        if server.in_flight:
            moves = [type(move) for move in sent(dispatch, now=0.0)]
            assert moves == [*expected, type(None)]
    # 16 of 25 are spent, and each of the two that wait may cost ten.
    end = dispatch.next(now=0.0)
    assert isinstance(end, Spent)
    assert "max_cost=25" in end.why
    assert "16 spent" in end.why
    assert len(dispatch.queue) == 2


@pytest.mark.parametrize("measured", [15, 16])
def test_a_straggler_takes_twice_the_95th_percentile_of_enough_responses(measured: int) -> None:
    stats = Stats()
    server = upstream("a", 9)
    dispatch = Dispatch([server], stats, None)
    quick, slow = jobs(2)
    for _ in range(measured):
        stats.responded(quick.request, Done("x", {}), 1.0)
    for job, started in ((slow, 0.0), (quick, 1.0)):
        attempt = Attempt(server, None, started, hedge=False)  # type: ignore[arg-type]
        job.attempts.append(attempt)
        dispatch.in_flight[job] = attempt

    assert list(dispatch.stragglers(now=2.0)) == []
    assert list(dispatch.stragglers(now=2.5)) == ([slow] if measured == 16 else [])
