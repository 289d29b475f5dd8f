"""The pool against servers that share no code with ours: nothing is lost, nothing is sent twice."""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Kind, Outcome, Pool, Request, chat
from batchwright.events import EventLog, read_events
from foreign_server import Foreign
from raw_server import RawServer, Seen, answer


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def prompts(n: int) -> list[Request]:
    return [chat("m", f"prompt {i}") for i in range(n)]


def run(url: str, n: int, **settings: Any) -> tuple[list[Outcome], dict[str, Any]]:
    with Pool(url, **{"hedge": False, "remember": False, **settings}) as pool:
        outcomes = pool.map(prompts(n))
        return outcomes, pool.stats()


@pytest.mark.parametrize("slots", [1, 4])
def test_auto_loses_nothing_on_a_slow_server_with_few_slots_and_sends_nothing_twice(
    slots: int,
) -> None:
    server = Foreign("queue", slots, seconds=0.05)
    with server.running() as url:
        outcomes, stats = run(url, 40)

    assert all(outcomes)
    assert server.received == stats["sent"] == 40
    assert server.peak == slots


@pytest.mark.parametrize("limit", ["auto", 16, 60])
@pytest.mark.parametrize("slots", [1, 4])
def test_idle_connections_do_not_keep_a_server_with_few_threads_from_the_others(
    slots: int, limit: Any
) -> None:
    server = Foreign("queue", slots, seconds=0.02, threads=slots + 2)
    with server.running() as url:
        outcomes, stats = run(url, 120, limit=limit)

    assert all(outcomes)
    # Else all calls would have waited for that.
    assert server.waited_out == 0
    # A call whose connection gets no thread looks like one that hangs, and few of those are resent.
    assert stats["sent"] <= 120 + 4 + 0.1 * 120


def limits(log: Path) -> list[int]:
    """Every value that the limit was changed to."""
    return [event.fields["to"] for event in read_events(log) if event.kind == "limit"]


@pytest.mark.parametrize(("status", "retry_after"), [(429, None), (429, "0.05"), (503, None)])
@pytest.mark.parametrize("limit", ["auto", 60])
def test_a_server_that_rejects_above_five_loses_no_call(
    limit: Any, status: int, retry_after: str | None, tmp_path: Path
) -> None:
    server = Foreign("reject", 5, seconds=0.02, status=status, retry_after=retry_after)
    with server.running() as url, EventLog(tmp_path / "events.jsonl") as events:
        outcomes, stats = run(url, 150, limit=limit, events=events)

    assert all(outcomes)
    assert server.peak == 5
    # Sixty at a time would be rejected many times a call.
    assert server.rejected == stats["rejects"] < 300
    # A number comes back to itself as soon as nobody is rejected, so its lowest value counts.
    assert min(limits(tmp_path / "events.jsonl")) <= 16
    assert limit == 60 or stats["endpoints"][0]["limit"] <= 16


def test_a_number_is_a_ceiling_that_comes_back_after_rejects(tmp_path: Path) -> None:
    server = Foreign("reject", 3, seconds=0.005)
    with (
        server.running() as url,
        EventLog(tmp_path / "events.jsonl") as events,
        Pool(url, limit=12, hedge=False, events=events) as pool,
    ):
        assert all(pool.map(prompts(60)))
        server.slots = 100
        assert all(pool.map(prompts(300)))
        back = pool.stats()["endpoints"][0]["limit"]

    # It goes up and down between tries of one more, so its lowest value counts, not its last.
    assert min(limits(tmp_path / "events.jsonl")) <= 6
    assert back == max(limits(tmp_path / "events.jsonl")) == 12


def test_a_thrashing_server_is_not_flooded() -> None:
    # Calls take much longer than a busy machine takes to notice that they have ended.
    server = Foreign("thrash", 3, seconds=0.05, power=2.0)
    with server.running() as url:
        outcomes, _ = run(url, 90)

    assert all(outcomes)
    assert server.peak <= 16


def test_a_try_that_hangs_is_made_again_long_before_the_deadline() -> None:
    server = Foreign("queue", 4, seconds=0.01, hang=frozenset({"prompt 30"}))
    with server.running() as url:
        outcomes, stats = run(url, 400, limit=4)

    assert all(outcomes)
    assert outcomes[30].tries == 2
    assert server.received == 401
    assert stats["given_up"] == 1


@pytest.mark.parametrize("limit", ["auto", 4])
@pytest.mark.parametrize("answered", [0, 40])
def test_calls_at_an_endpoint_that_falls_silent_go_to_the_one_that_answers(
    limit: Any, answered: int
) -> None:
    hang = frozenset(f"prompt {n}" for n in range(answered, 200))
    silent = Foreign("queue", 4, seconds=0.02, hang=hang, hangs=200)
    other = Foreign("queue", 4, seconds=0.02)
    # No hedges: they would hide it, and there are none under a spending cap.
    settings: dict[str, Any] = {"hedge": False, "remember": False, "deadline_s": 30.0}
    with (
        silent.running() as first,
        other.running() as second,
        Pool(first, second, limit=limit, **settings) as pool,
    ):
        outcomes = pool.map(prompts(200))
        assert pool.stats()["endpoints"][0]["times_set_aside"] >= 1

    assert all(outcomes)
    assert other.received + silent.received - 200 <= 20


@pytest.mark.parametrize("limit", ["auto", 4])
def test_a_hang_of_the_first_call_costs_no_other_call(limit: Any) -> None:
    server = Foreign("queue", 4, seconds=0.02, hang=frozenset({"prompt 0"}))
    with server.running() as url:
        # Whoever is allowed one call only has to send another to know that the first one hangs.
        outcomes, stats = run(url, 20, limit=limit, deadline_s=8.0)

    assert all(outcomes)
    assert outcomes[0].tries == 2
    assert stats["given_up"] == 1
    assert server.received == 21


def test_a_number_is_not_exceeded_however_long_its_calls_are_silent() -> None:
    server = Foreign("queue", 4, seconds=0.02, hang=frozenset({"prompt 0"}))
    with server.running() as url, Pool(url, limit=1, deadline_s=12.0, hedge=False) as pool:
        waiting = pool.stream(prompts(3))
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(next, waiting)
            # A quarter of the deadline is over by far, and the deadline is not.
            time.sleep(5)
            assert server.received == 1
            waiting.close()
            assert not first.result()[1]


LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@pytest.mark.parametrize("limit", ["auto", 32])
@pytest.mark.parametrize(
    ("status", "told"),
    [
        (503, LOADING),
        (502, "<html><h1>502 Bad Gateway</h1></html>"),
        (500, {"error": "llama runner process has terminated: signal: killed"}),
        (504, {"error": {"message": "upstream request timeout"}}),
    ],
)
def test_a_server_that_restarts_in_the_middle_loses_no_call(
    limit: Any, status: int, told: Any
) -> None:
    server = Foreign("queue", 4, seconds=0.02, away=(status, told, 0.3, 2.5))
    with server.running() as url:
        outcomes, stats = run(url, 200, limit=limit, deadline_s=60.0)

    assert all(outcomes), [str(one) for one in outcomes if not one][:3]
    # It is asked with single calls until it answers.
    assert server.rejected <= 60
    assert stats["endpoints"][0]["times_set_aside"] >= 1


def test_a_server_that_is_still_loading_is_waited_for() -> None:
    server = Foreign("queue", 2, seconds=0.01, away=(503, LOADING, 0.0, 2.5))
    with server.running() as url:
        outcomes, _ = run(url, 20, deadline_s=60.0)

    assert all(outcomes)


def test_a_call_that_a_server_cannot_do_fails_after_its_tries_and_keeps_nobody_waiting() -> None:
    server = Foreign("queue", 4, seconds=0.01, broken=frozenset(f"prompt {i}" for i in (7, 99)))
    with server.running() as url:
        outcomes, stats = run(url, 100, deadline_s=600.0)

    assert [i for i, one in enumerate(outcomes) if not one] == [7, 99]
    assert stats["endpoints"][0]["times_set_aside"] == 0
    assert server.received == 98 + 2 * 5


@pytest.mark.parametrize("hedge", [True, False])
def test_hangs_near_the_end_are_tried_again_though_nothing_is_sent_after_them(hedge: bool) -> None:
    server = Foreign("queue", 4, seconds=0.02, hang=frozenset({"prompt 38", "prompt 39"}))
    with server.running() as url:
        outcomes, _ = run(url, 40, limit=4, deadline_s=30.0, hedge=hedge)

    assert all(outcomes)
    assert server.received <= 44


def test_a_call_hangs_when_its_hedge_hangs_as_well() -> None:
    server = Foreign("queue", 4, seconds=0.02, hang=frozenset({"prompt 39"}), hangs=2)
    with server.running() as url:
        outcomes, _ = run(url, 40, limit=4, deadline_s=30.0, hedge=True)

    assert all(outcomes)


def test_a_server_that_pauses_for_everybody_is_waited_for_and_nothing_is_sent_twice() -> None:
    server = Foreign("queue", 2, seconds=0.005)
    with server.running() as url, Pool(url, limit=8, hedge=False) as pool:
        assert all(pool.map(prompts(60)))
        server.seconds = 1.5  # far more than four times the 99th percentile
        assert all(pool.map(prompts(6)))
        assert pool.stats()["sent"] == 66


def test_a_timeout_says_whether_the_call_hung_or_was_still_in_the_queue() -> None:
    with Foreign("queue", 1, seconds=0.3).running() as url:
        outcomes, _ = run(url, 8, limit=8, deadline_s=1.0, tries=1)
    late = [outcome for outcome in outcomes if not outcome]
    assert late
    assert all(outcome.kind is Kind.TIMEOUT for outcome in late)
    assert any("in the server's queue" in outcome.error for outcome in late)

    with Foreign("queue", 8, seconds=0.01, hang=frozenset({"prompt 2"})).running() as url:
        outcomes, _ = run(url, 30, limit=4, deadline_s=1.0, tries=1)
    assert [outcome.kind for outcome in outcomes if not outcome] == [Kind.TIMEOUT]
    assert "sent later were answered: it hangs" in outcomes[2].error


@pytest.mark.parametrize("usage", [(10**15, 3), (7, -(10**9)), (-5, 2)])
def test_impossible_token_counts_neither_hang_the_pool_nor_earn_money(
    usage: tuple[int, int],
) -> None:
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0)
        await seen.reply(body=answer("yes", usage=usage))

    with (
        RawServer(handler) as server,
        Pool(server.url, limit=2, tpm=600_000, prices={"m": (1.0, 1.0)}, max_cost=1.0) as pool,
    ):
        outcomes = pool.map([chat("m", f"{i}", max_tokens=10) for i in range(20)])
        stats = pool.stats()

    assert all(outcomes)
    assert all(outcome.usage is None for outcome in outcomes)
    assert stats["uncounted"] == 20
    assert 0 < stats["cost"] < 1.0
