"""The pool gives every request one outcome, in order, from any kind of code, and pays once."""

import asyncio
import functools
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import (
    AutoLimit,
    Cache,
    Done,
    Endpoint,
    ErrorBudget,
    Failed,
    FixedLimit,
    Kind,
    Outcome,
    Pool,
    Request,
    batch_encode_queries,
    batch_mutate_queries,
    batch_query_target_model,
    chat,
    embed,
)
from batchwright.calls.cache.limits import limits_path
from batchwright.calls.engine.budgets import Failures
from batchwright.calls.engine.endpoint import Breaker, Upstream
from batchwright.calls.engine.retry import Retry
from batchwright.calls.queries import NO_ANSWER
from batchwright.calls.simulator import Simulator
from batchwright.errors import BudgetExceeded, ConfigError, Mismatch
from batchwright.events import EventLog, read_events
from raw_server import RawServer, Seen, answer


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def quick(seen: Seen) -> None:
    await seen.answer()


async def slower(seen: Seen) -> None:
    await asyncio.sleep(0.01)
    await seen.answer()


def questions(n: int, **parameters):
    return [chat("m", f"question {i}", **{"temperature": 0, **parameters}) for i in range(n)]


def texts(n: int) -> list[str]:
    return [f"re: question {i}" for i in range(n)]


def test_map_keeps_the_order_and_never_exceeds_the_limit():
    async def uneven(seen: Seen) -> None:
        await asyncio.sleep(0.001 * (int(seen.text.split()[1]) * 7 % 13))
        await seen.answer()

    with RawServer(uneven) as server, Pool(server.url, limit=7) as pool:
        outcomes = pool.map(questions(200))

        assert [outcome.text for outcome in outcomes] == texts(200)
        assert server.most_open == 7
        assert len(server.seen) == 200
    first = outcomes[0]
    assert (first.source, first.tries, first.finish) == ("live", 1, "stop")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (7, 3)
    assert first.endpoint == server.url


def test_a_slow_call_holds_nobody_up():
    """A sliding window: with chunks of the limit's size each slow call would hold a chunk."""
    quick_done = 0
    held_up: list[str] = []

    async def handler(seen: Seen) -> None:
        nonlocal quick_done
        if int(seen.text.split()[1]) % 20:
            quick_done += 1
        else:
            # More than there are slots: they can only come past this one.
            wanted = min(quick_done + 15, 190)
            for _ in range(6000):
                if quick_done >= wanted:
                    break
                await asyncio.sleep(0.005)
            else:
                held_up.append(seen.text)
        await seen.answer()

    with (
        RawServer(handler) as server,
        Pool(server.url, limit=10, hedge=False, deadline_s=120) as pool,
    ):
        outcomes = pool.map(questions(200))

    assert all(outcomes)
    assert not held_up


def test_a_generator_is_read_as_far_as_needed_and_in_the_callers_thread():
    threads = set()
    taken = 0

    def requests():
        nonlocal taken
        for request in questions(6000):
            threads.add(threading.current_thread())
            taken += 1
            yield request

    with RawServer(quick) as server, Pool(server.url, limit=4) as pool:
        with pool.stream(requests()) as stream:
            got = list(islice(stream, 20))
        assert taken < 3000

    assert threads == {threading.current_thread()}
    assert all(outcome.text == f"re: question {index}" for index, outcome in got)


def test_an_error_in_the_callers_generator_is_the_callers():
    def requests():
        yield from questions(3)
        raise LookupError("no more")

    with RawServer(quick) as server, Pool(server.url, limit=4) as pool:
        with pytest.raises(LookupError, match="no more"):
            pool.map(requests())
        with pytest.raises(ConfigError, match="got a str"):
            pool.map(["not a request"])
        with pytest.raises(ConfigError, match="stream"):
            pool.map([chat("m", "x", stream=True)])
        assert pool.map(questions(2))[1].text == "re: question 1"
        assert pool.map([]) == []


def test_stream_gives_each_index_once_and_the_quick_ones_first():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.5 if seen.text == "question 0" else 0.0)
        await seen.answer()

    with RawServer(handler) as server, Pool(server.url, limit=5, hedge=False) as pool:
        pairs = list(pool.stream(questions(50)))

    assert sorted(index for index, _ in pairs) == list(range(50))
    assert pairs[-1][0] == 0
    assert all(outcome.text == f"re: question {index}" for index, outcome in pairs)


def test_everything_works_inside_a_running_loop():
    async def ways(pool: Pool) -> None:
        mapped = await pool.amap(questions(30))
        assert [outcome.text for outcome in mapped] == texts(30)
        # Plain `map` too, as in a notebook, where a loop runs already.
        assert [outcome.text for outcome in pool.map(questions(5))] == texts(5)
        streamed = {index: outcome.text async for index, outcome in pool.stream(questions(30))}
        assert streamed == dict(enumerate(texts(30)))
        one, two = await asyncio.gather(*map(pool.call, questions(2)))
        assert (one.text, two.text) == ("re: question 0", "re: question 1")

        async def coming():
            for request in questions(10):
                await asyncio.sleep(0)
                yield request

        assert [outcome.text for outcome in await pool.amap(coming())] == texts(10)

    with RawServer(quick) as server, Pool(server.url, limit=5) as pool:
        asyncio.run(ways(pool))
        # Another loop, the same pool.
        asyncio.run(ways(pool))


def test_run_executes_a_pipeline_on_the_pools_own_loop_and_waiting_there_is_refused():
    async def pipeline(pool: Pool, index: int) -> str:
        first = await pool.call(chat("m", f"step {index}"))
        second = await pool.call(chat("m", first.text))
        return second.text

    async def everything(pool: Pool) -> list[str]:
        with pytest.raises(ConfigError, match=r"await pool\.amap"):
            pool.map(questions(1))
        assert (await pool.amap(questions(3)))[2].text == "re: question 2"
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pipeline(pool, i)) for i in range(20)]
        return [task.result() for task in tasks]

    with RawServer(quick) as server, Pool(server.url, limit=5) as pool:
        assert pool.run(everything(pool)) == [f"re: re: step {i}" for i in range(20)]


def test_threads_share_a_pool():
    results = {}

    with RawServer(slower) as server, Pool(server.url, limit=6) as pool:

        def work(name: int) -> None:
            results[name] = pool.map([chat("m", f"{name} {i}") for i in range(20)])

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.most_open <= 6

    for name, outcomes in results.items():
        assert [outcome.text for outcome in outcomes] == [f"re: {name} {i}" for i in range(20)]


def test_a_forked_child_has_a_loop_of_its_own_and_the_parent_keeps_its():
    def child(pool: Pool, pipe) -> None:
        pipe.send([outcome.text for outcome in pool.map(questions(5))])
        pipe.close()

    with RawServer(quick) as server, Pool(server.url, limit=5) as pool:
        assert [outcome.text for outcome in pool.map(questions(5))] == texts(5)
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(pool, there))
        process.start()
        there.close()
        assert here.recv() == texts(5)
        here.close()
        process.join()
        assert process.exitcode == 0
        process.close()
        assert [outcome.text for outcome in pool.map(questions(5))] == texts(5)


def test_equal_exact_requests_are_one_call_and_random_ones_are_not():
    with RawServer(slower) as server, Pool(server.url, limit=10) as pool:
        exact = pool.map([chat("m", "same", temperature=0)] * 8)
        drawn = pool.map([chat("m", "same", draw=i % 2) for i in range(8)])
        random = pool.map([chat("m", "same")] * 8)
        counts = pool.stats()

    assert Counter(outcome.source for outcome in exact) == {"live": 1, "shared": 7}
    assert Counter(outcome.source for outcome in drawn) == {"live": 2, "shared": 6}
    assert Counter(outcome.source for outcome in random) == {"live": 8}
    assert counts["sent"] == len(server.seen) == 11
    assert counts["shared"] == 13


def test_the_cache_answers_the_second_run_and_only_what_is_exact(tmp_path):
    requests = [*questions(300), *(chat("m", f"random {i}") for i in range(5))]

    with RawServer(quick) as server:
        with Pool(server.url, limit=8, cache=tmp_path / "calls.db") as pool:
            first = pool.map(requests)
        with Pool(server.url, limit=8, cache=tmp_path / "calls.db") as pool:
            second = pool.map(requests)
            counts = pool.stats()

        assert [o.text for o in first] == [o.text for o in second]
        assert len(server.seen) == 305 + 5
    assert Counter(outcome.source for outcome in second) == {"cache": 300, "live": 5}
    assert counts["hits"] == 300


def shout(requests):
    return ["SHOUT"] * len(requests)


class Whisperer:
    def __call__(self, requests):
        return ["whisper"] * len(requests)


def test_a_cached_answer_is_that_of_the_same_model(tmp_path):
    async def handler(seen: Seen) -> None:
        await seen.answer(seen.body["model"])

    def said(*endpoints: Endpoint, model: str = "m") -> tuple[str, str]:
        with Pool(*endpoints, cache=tmp_path / "calls.db") as pool:
            (outcome,) = pool.map([chat(model, "who are you?", temperature=0)])
        return outcome.text, outcome.source

    with RawServer(handler) as one, RawServer(handler) as two:
        # The name that is sent is part of the key, and several names are a key of their own.
        for name in ("m", "a", "b"):
            endpoint = Endpoint(one.url, model=None if name == "m" else name)
            assert said(endpoint) == (name, "live")
            assert said(endpoint) == (name, "cache")
        both = Endpoint(one.url, model="a"), Endpoint(two.url, model="b")
        assert said(*both)[1] == "live"
        assert said(*reversed(both))[1] == "cache"
        # Servers by http share what the same name said, wherever they are.
        assert said(Endpoint(two.url)) == ("m", "cache")
        assert said(Endpoint(two.url), Endpoint(one.url)) == ("m", "cache")
        # Unless somebody says that the weights are others.
        assert said(Endpoint(two.url, identity="new weights")) == ("m", "live")
        assert said(Endpoint(one.url, identity="new weights")) == ("m", "cache")
    # What runs inside this process is known by what it is.
    assert said(Endpoint(shout)) == ("SHOUT", "live")
    assert said(Endpoint(Whisperer())) == ("whisper", "live")
    assert said(Endpoint(shout)) == ("SHOUT", "cache")
    assert said(Endpoint(shout, name="other")) == ("SHOUT", "live")
    assert said(Endpoint(Whisperer(), name="other")) == ("SHOUT", "cache")
    # A stand-in on this machine does not answer for an https service.
    assert Endpoint("https://api.example.com/v1").identity not in ("", Endpoint(one.url).identity)
    assert Endpoint("local:smollm2").identity != Endpoint("local:minilm").identity
    assert Endpoint("local:./a/../b").identity == Endpoint(f"local:{Path.cwd()}/b").identity
    out = tmp_path / "all.jsonl"
    with Cache(tmp_path / "calls.db", mode="replay") as cache:
        assert (cache.export(out), cache.damaged) == (8, 0)


@pytest.mark.parametrize("cache", [True, False])
def test_cut_off_answers_of_exact_requests_are_paid_once_and_marked(cache, tmp_path):
    async def handler(seen: Seen) -> None:
        await seen.reply(body=answer("and so", finish="length"))

    with RawServer(handler) as server:
        with Pool(server.url, cache=tmp_path / "calls.db" if cache else None) as pool:
            outcomes = [pool.map(questions(1))[0] for _ in range(2)]
        if cache:
            with Pool(server.url, cache=tmp_path / "calls.db") as pool:
                outcomes += pool.map(questions(1))
        assert len(server.seen) == 1
    assert {(o.text, o.finish, o.cut_off) for o in outcomes} == {("and so", "length", True)}
    assert [o.source for o in outcomes] == ["live"] + ["cache"] * (len(outcomes) - 1)


def test_one_map_pays_once_for_equal_exact_requests_however_long_it_is(monkeypatch):
    # The first and the last are far apart, and the memory of the pool has lost the first by then.
    monkeypatch.setattr("batchwright.calls.engine.engine.MEMORY_RESPONSES", 10)
    requests = [chat("m", f"q{i % 700}", temperature=0) for i in range(2100)]

    with RawServer(quick) as server, Pool(server.url, limit=32) as pool:
        outcomes = pool.map(requests)
        again = asyncio.run(pool.amap(requests[:1] * 3))
        random = pool.map([chat("m", "q0")] * 3)
        counts = pool.stats()
        assert len(server.seen) == 700 + 1 + 3

    assert [o.text for o in outcomes] == [f"re: q{i % 700}" for i in range(2100)]
    assert "live" not in {o.source for o in outcomes[700:]}
    assert again[0].text == "re: q0"
    assert {o.source for o in random} == {"live"}
    assert counts["done"] == counts["asked"] == 2106
    assert counts["hits"] + counts["shared"] == 1402


def test_nobody_waits_for_ever_for_requests_that_cannot_be_taken(monkeypatch):
    monkeypatch.setattr("batchwright.calls.engine.waiting.FLUSH_S", 0.1)
    broken = chat("m", "q", temperature=0)
    broken.body["temperature"] = np.zeros(2)  # whether it is 0 cannot be said
    requests = [chat("m", "before", temperature=0), broken, chat("m", "after", temperature=0)]
    ways = [
        lambda pool: pool.map(requests),
        lambda pool: pool.map(requests, progress=lambda done, known: None),
        lambda pool: asyncio.run(pool.amap(requests)),
        lambda pool: asyncio.run(pool.call(broken)),
        lambda pool: list(pool.stream(requests)),
    ]
    for way in ways:
        with RawServer(quick) as server, Pool(server.url) as pool:
            with pytest.raises(ValueError, match="ambiguous"):
                way(pool)
            # The pool is as good as before.
            assert pool.map(requests[:1])[0].text == "re: before"


def test_a_pool_without_a_cache_remembers_exact_answers_within_bounds(monkeypatch):
    async def handler(seen: Seen) -> None:
        await seen.answer("x" * (9000 if "long" in seen.text else 10))

    monkeypatch.setattr("batchwright.calls.engine.engine.MEMORY_BYTES", 20_000)
    with RawServer(handler) as server, Pool(server.url, limit=4) as pool:
        for text in ("a", "a", "b", "long 1", "a", "long 2", "b", "long 3"):
            pool.map([chat("m", text, temperature=0)])
        assert [seen.text for seen in server.seen] == ["a", "b", "long 1", "long 2", "long 3"]
        # Two long ones are what fits.
        for text in ("long 3", "a", "long 1"):
            pool.map([chat("m", text, temperature=0)])
        assert [seen.text for seen in server.seen[5:]] == ["a", "long 1"]
        ((_, outcome),) = pool.stream([chat("m", "a", temperature=0)])
        assert outcome.source == "cache"


def test_failures_are_not_remembered():
    async def handler(seen: Seen) -> None:
        await (seen.reply(400, b"no") if seen.before == 0 else seen.answer())

    with RawServer(handler) as server, Pool(server.url, limit=1) as pool:
        first, second = pool.map(questions(1)), pool.map(questions(1))
        assert len(server.seen) == 2
    assert (first[0].kind, second[0].source) == ("http_4xx", "live")


def test_ollama_is_spoken_and_translated():
    async def handler(seen: Seen) -> None:
        if seen.path == "/api/chat":
            assert seen.body["options"] == {"temperature": 0, "num_predict": 9}
            assert seen.body["stream"] is False
            said = {"message": {"role": "assistant", "content": "blue"}, "done": True}
            await seen.reply(body=said | {"prompt_eval_count": 4, "eval_count": 2})
        else:
            assert seen.path == "/api/embed"
            await seen.reply(body={"embeddings": [[1.0, 2.0]], "prompt_eval_count": 3})

    with (
        RawServer(handler) as server,
        Pool(f"ollama://127.0.0.1:{server.port}", limit=2) as pool,
    ):
        sky, vector = pool.map(
            [chat("m", "the sky?", temperature=0, max_tokens=9), embed("m", "sky")]
        )
        refused = pool.map([chat("m", "x", logit_bias={"1": 2})])[0]

    assert (sky.text, sky.usage.total) == ("blue", 6)
    assert sky.body["choices"][0]["message"]["content"] == "blue"
    assert vector.vectors == [[1.0, 2.0]]
    assert refused.kind is Kind.HTTP_4XX
    assert "logit_bias" in refused.error


@pytest.mark.parametrize("cache", [None, "calls.db"])
def test_outcomes_do_not_hold_the_bytes_they_came_as(cache, tmp_path):
    path = tmp_path / cache if cache else None
    with RawServer(quick) as server, Pool(server.url, limit=2, cache=path) as pool:
        outcomes = [*pool.map(questions(3)), *pool.map(questions(3))]

    assert [outcome.raw for outcome in outcomes] == [None] * 6


def test_functions_and_servers_are_one_thing_to_the_pool():
    def function(requests):
        return [
            ValueError("no") if "3" in r.body["messages"][0]["content"] else "yes" for r in requests
        ]

    with Pool(Endpoint(function, batch=4), deadline_s=5, tries=1) as pool:
        outcomes = pool.map(questions(8))

    assert [bool(outcome) for outcome in outcomes] == [i != 3 for i in range(8)]


def test_stragglers_are_sent_a_second_time_when_nothing_else_is_to_do():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(30 if seen.before == 0 and seen.text == "question 30" else 0.005)
        await seen.answer()

    with RawServer(handler) as server, Pool(server.url, limit=8, deadline_s=20) as pool:
        outcomes = pool.map(questions(100))
        counts = pool.stats()

        assert [outcome.text for outcome in outcomes] == texts(100)
        assert outcomes[30].source == "hedge"
        assert (counts["done"], counts["sent"]) == (100, 100 + counts["hedges"])
        assert counts["hedges"] <= 7
        # The loser was cancelled: its connection is gone and its slot is free.
        assert counts["in_flight"] == 0


def test_money_stops_the_sending_and_keeps_what_came_back():
    async def handler(seen: Seen) -> None:
        await seen.reply(body=answer(f"re: {seen.text}", usage=(1000, 1000)))

    # The prompt is free: what it takes at most is not what this server says.
    prices = {"m": (0.0, 4.0)}
    with RawServer(handler) as server:
        with Pool(server.url, limit=4, prices=prices, max_cost=0.1) as pool:
            outcomes = pool.map(questions(200, max_tokens=1000))
            counts = pool.stats()
        # 0.004 a call: 25 of them.
        assert 20 <= len(server.seen) <= 25
        with pytest.raises(ConfigError, match="'other' has none"):
            Pool(server.url, prices=prices, max_cost=1).map([chat("other", "x")])
        with pytest.raises(ConfigError, match="needs prices"):
            Pool(server.url, max_cost=1)
        picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        for request in (chat("m", "x"), chat("m", [{"role": "user", "content": picture}])):
            with pytest.raises(ConfigError, match="needs a bound for every call"):
                Pool(server.url, prices=prices, max_cost=1).map([request])

    done = [outcome for outcome in outcomes if outcome]
    assert len(done) == counts["done"] == len(server.seen)
    assert counts["cost"] == pytest.approx(0.004 * len(done))
    assert counts["cost"] <= 0.1
    rest = [outcome for outcome in outcomes if not outcome]
    assert {outcome.kind for outcome in rest} == {Kind.CANCELLED}
    assert "max_cost=0.1" in rest[0].error


@pytest.mark.parametrize("by", ["request", "model"])
def test_a_spending_cap_is_not_exceeded_by_what_is_in_flight(by):
    lengths = iter([3, 1, 9, 2, 9, 9, 1, 5] * 50)

    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.002)
        await seen.reply(body=answer("x", usage=(20, next(lengths) * 1000)))

    limit = {"max_tokens": 9000} if by == "request" else {}
    known = {"m": 9000} if by == "model" else None
    prices = {"m": (1.0, 1.0)}
    with (
        RawServer(handler) as server,
        Pool(server.url, limit=16, prices=prices, max_cost=0.2, model_max_tokens=known) as pool,
    ):
        pool.map(questions(200, **limit))
        counts = pool.stats()

    assert counts["capped"]
    assert 0.15 < counts["cost"] <= 0.2


@pytest.mark.parametrize("fault", ["refused", "gateway", "cut off", "hangs", "unreadable"])
def test_a_try_without_a_response_counts_as_the_most_it_may_cost(fault):
    async def handler(seen: Seen) -> None:
        if seen.text == "question 1":
            await seen.answer()
        elif fault in ("refused", "gateway"):
            await seen.reply(500 if fault == "refused" else 504, {"error": {"message": "no"}})
        elif fault == "cut off":
            seen.reset()
        elif fault == "hangs":
            await asyncio.sleep(30)
        else:
            await seen.reply(body=b"<html>")

    with (
        RawServer(handler) as server,
        Pool(
            server.url, limit=1, tries=2, deadline_s=1, hedge=False, prices={"m": (0, 100.0)},
            max_cost=0.02,
        ) as pool,
    ):  # fmt: skip
        outcomes = pool.map(questions(2, max_tokens=100))
        counts = pool.stats()
        sent = len(server.seen)

    # Each try may cost 0.01, and the one that was answered cost 0.0003.
    if fault == "refused":
        assert (counts["unsettled"], counts["cost"], sent) == (0, pytest.approx(0.0003), 3)
        assert outcomes[1]
    else:
        assert counts["unsettled"] in (1, 2)
        assert counts["unsettled_cost"] == pytest.approx(0.01 * counts["unsettled"])
        assert counts["cost"] + counts["unsettled_cost"] <= 0.02
        assert sent == counts["unsettled"] + bool(outcomes[1])


def test_cancel_from_another_thread_gives_back_what_came():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0 if int(seen.text.split()[1]) < 10 else 30)
        await seen.answer()

    with RawServer(handler) as server, Pool(server.url, limit=5, hedge=False) as pool:
        timer = threading.Timer(0.4, pool.cancel)
        timer.start()
        outcomes = pool.map(questions(40))
        timer.join()

    assert [bool(outcome) for outcome in outcomes] == [i < 10 for i in range(40)]
    assert {outcome.kind for outcome in outcomes[10:]} == {Kind.CANCELLED}


def test_a_cancelled_task_cancels_its_calls_and_no_others():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(30 if seen.text == "long" else 0.05)
        await seen.answer()

    async def main(pool: Pool) -> None:
        long = asyncio.create_task(pool.amap([chat("m", "long")]))
        other = asyncio.create_task(pool.amap(questions(10)))
        await asyncio.sleep(0.05)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert all(await other)

    with RawServer(handler) as server, Pool(server.url, limit=2, hedge=False) as pool:
        asyncio.run(main(pool))
        assert pool.stats()["in_flight"] == 0


INTERRUPTED = """
import sys
from batchwright.calls import Interrupted, Pool, chat
pool = Pool(sys.argv[1], limit=4, cache=sys.argv[2], remember=False, hedge=False)
try:
    pool.map((chat("m", f"question {i}", temperature=0) for i in range(1000)),
             progress=lambda done, total: print("going", flush=True))
except Interrupted as stop:
    done = sum(map(bool, stop.outcomes))
    print("kept", done, {str(o.kind) for o in stop.outcomes if not o})
pool.close()
"""


def test_ctrl_c_keeps_what_came_back_and_the_next_run_goes_on(tmp_path):
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.02)
        await seen.answer()

    with RawServer(handler) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, server.url, tmp_path / "calls.db"],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            while process.stdout.readline() != "going\n" or len(server.seen) < 20:
                pass
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read().splitlines()
        word, count, kinds = next(line for line in rest if line.startswith("kept")).split(" ", 2)
        assert (word, kinds) == ("kept", "{'cancelled'}")
        paid = len(server.seen)
        # At most what was in flight was paid for and did not come back.
        assert paid - 4 <= int(count) <= paid

        with Pool(server.url, limit=8, cache=tmp_path / "calls.db") as pool:
            outcomes = pool.map(questions(paid))
            assert pool.stats()["hits"] >= int(count)
        assert all(outcomes)


SCRIPT = """
import asyncio, sys
from batchwright.calls import Pool, chat

requests = [chat("m", f"question {i}") for i in range(500)]
pool = Pool(sys.argv[1], limit=4)

async def inside():
    async with pool:
        await pool.amap(requests)

async def pipeline():
    for request in requests:
        await pool.call(request)

print("going", flush=True)
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("pool.map(requests)", r"Interrupted: stopped by Ctrl-C: \d+ of 500 responses came back"),
        ("pool.map(iter(requests))", r"Interrupted: stopped by Ctrl-C: \d+ of 500 responses came"),
        ("with pool: pool.map(requests)", r"Interrupted: stopped by Ctrl-C: \d+ of 500 responses"),
        ("list(pool.stream(requests))", r"KeyboardInterrupt: stopped by Ctrl-C: \d+ outcomes were"),
        ("pool.run(pipeline())", "KeyboardInterrupt"),
        ("asyncio.run(inside())", "KeyboardInterrupt"),
        ("asyncio.run(pool.amap(requests))", "KeyboardInterrupt"),
    ],
)
def test_ctrl_c_in_a_script_ends_it_with_what_was_kept_and_no_noise_of_the_loop(call, told):
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.02)
        await seen.answer()

    with RawServer(handler) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, server.url, call],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            while len(server.seen) < 20:
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[1]
        assert len(server.seen) < 500
    assert process.returncode not in (0, None)
    assert re.search(rf"{told}[^\n]*\n$", said), said
    for noise in ("destroyed", "never retrieved", "never awaited", "Exception ignored"):
        assert noise not in said


class Model:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, requests):
        return [self.weights] * len(requests)

    def answer(self, requests):
        return self(requests)


def of(weights, requests):
    return [weights] * len(requests)


NAMELESS = {
    "lambda": lambda weights: lambda requests: of(weights, requests),
    "partial": lambda weights: functools.partial(of, weights),
    "object": Model,
    "method": lambda weights: Model(weights).answer,
}


@pytest.mark.parametrize("kind", NAMELESS)
def test_functions_that_a_name_does_not_tell_apart_share_no_cached_response(tmp_path, caplog, kind):
    def said(endpoint):
        with Pool(endpoint, cache=tmp_path / "calls.db") as pool:
            (outcome,) = pool.map([chat("m", "who are you?", temperature=0)])
        return outcome.text, outcome.source

    one, two = (Endpoint(NAMELESS[kind](weights)) for weights in ("one", "two"))
    assert [said(one), said(two), said(one)] == [("one", "live"), ("two", "live"), ("one", "cache")]
    assert "give it a name, as in Endpoint(function, name='judge')" in caplog.text
    caplog.clear()
    named = [Endpoint(NAMELESS[kind]("three"), name="judge") for _ in range(2)]
    assert [said(each) for each in named] == [("three", "live"), ("three", "cache")]
    assert not caplog.text


def test_functions_of_two_scripts_share_no_cached_response(tmp_path):
    text = """
from batchwright.calls import Endpoint, Pool, chat
def answer(requests):
    return [NAME] * len(requests)
with Pool(Endpoint(answer), cache="calls.db") as pool:
    (outcome,) = pool.map([chat("m", "who are you?", temperature=0)])
print(outcome.text, outcome.source)
"""
    said = []
    for name in ("one", "two", "one"):
        (tmp_path / f"{name}.py").write_text(text.replace("NAME", repr(name)))
        done = subprocess.run(
            [sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.strip())
    assert said == ["one live", "two live", "one cache"]


def test_the_limit_that_was_found_is_remembered(tmp_path):
    def limit_of(**settings) -> int:
        with Pool(url, **settings) as pool:
            return pool.stats()["endpoints"][0]["limit"]

    with Simulator(knee=4, latency_s=0.01).running() as url:
        with Pool(url) as pool:
            assert all(pool.map([chat("sim", f"q {i}") for i in range(300)]))
        known = json.loads(limits_path().read_text())
        assert list(known) == [f"{url}/v1", "sha256"]
        learned = AutoLimit()
        learned.load_state_dict(known[f"{url}/v1"])

        assert limit_of() == learned.limit
        assert limit_of(remember=False) == AutoLimit().limit
        assert limit_of(limit=9) == 9
        limits_path().write_text("not JSON")
        assert limit_of() == AutoLimit().limit


def test_the_limit_of_another_model_at_an_address_is_not_recalled():
    def first_limit(name, **endpoint) -> int:
        with Pool(Endpoint(url, **endpoint)) as pool:
            assert pool.map([chat(name, f"again {name}")])[0]
            return pool.stats()["endpoints"][0]["limit"]

    with Simulator(knee=64, latency_s=0.01).running() as url:
        with Pool(url) as pool:
            assert all(pool.map([chat("sim", f"q {i}") for i in range(600)]))
            found = pool.stats()["endpoints"][0]["limit"]
        assert found > 1.5 * AutoLimit().limit
        assert first_limit("sim") == found
        assert first_limit("renamed", model="sim") == found
        # One of a hundred times its size would lose what the first one bears.
        assert first_limit("sim-qa") == AutoLimit().limit
        assert first_limit("sim", model="sim-qa") == AutoLimit().limit


def test_nothing_of_a_pool_runs_on_after_it_was_closed():
    with RawServer(quick) as server:
        for _ in range(12):
            with Pool(server.url, limit="auto") as pool:
                assert all(pool.map(questions(3)))
            # Closing saves what was learned; a late tick would save it once more.
            limits_path().unlink()
            time.sleep(0.12)
            assert not limits_path().exists()


def test_requests_a_minute_are_kept_to_by_all_pools_together():
    with RawServer(quick) as server:
        start = time.monotonic()
        # 600 a minute, 10 of them at once: the 16th goes after about 0.6 s.
        with Pool(server.url, limit=8, rpm=600) as one, Pool(server.url, limit=8, rpm=600) as two:
            stream = two.stream(questions(8))
            first = next(stream)
            assert all(one.map(questions(8)))
            rest = list(stream)
        seconds = time.monotonic() - start

    assert first[1]
    assert len(rest) == 7
    assert seconds > 0.4


def test_events_tell_each_second_and_each_change_of_the_limit(tmp_path):
    simulator = Simulator(kind="reject", knee=4, latency_s=0.02, retry_after_s=0.05)
    with (
        simulator.running() as url,
        EventLog(tmp_path / "events.jsonl") as log,
        Pool(url, events=log, remember=False) as pool,
    ):
        assert all(pool.map([chat("sim", f"q {i}") for i in range(150)]))
        counts = pool.stats()
    events = list(read_events(tmp_path / "events.jsonl"))

    limits = [event.fields for event in events if event.kind == "limit"]
    assert limits
    assert all(one["why"] and one["from"] != one["to"] for one in limits)
    calls = [event.fields for event in events if event.kind == "calls"]
    assert sum(one["sent"] for one in calls) == counts["sent"]
    assert sum(one["done"] for one in calls) == 150
    assert sum(one["failed"] for one in calls) == 0
    assert calls[-1]["in_flight"] == 0


def test_progress_ends_with_all_of_all():
    told = []
    with RawServer(slower) as server, Pool(server.url, limit=4) as pool:
        pool.map(questions(60), progress=lambda done, total: told.append((done, total)))

    assert told[-1] == (60, 60)
    assert all(done <= total for done, total in told)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_closed_pool_says_so_and_open_calls_end():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(30)

    with RawServer(handler) as server:
        pool = Pool(server.url, limit=4, hedge=False)
        results = []
        thread = threading.Thread(target=lambda: results.extend(pool.map(questions(10))))
        thread.start()
        while not server.seen:
            time.sleep(0.005)
        pool.close()
        thread.join()
        pool.close()

    assert [outcome.kind for outcome in results] == [Kind.CANCELLED] * 10
    with pytest.raises(ConfigError, match="closed"):
        pool.map(questions(1))


def test_a_high_limit_is_used():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.5)
        await seen.answer()

    with RawServer(handler) as server, Pool(server.url, limit=10_000, hedge=False) as pool:
        assert all(pool.map(questions(400)))
        assert server.most_open > 100


WRONG = {
    "no endpoint": (lambda: Pool(), "needs an endpoint"),
    "a limit of 0": (lambda: Pool("http://h/v1", limit=0), "limit must be at least 1, got 0"),
    "a word for a limit": (lambda: Pool("http://h/v1", limit="fast"), "got 'fast'"),
    "no time": (lambda: Pool("http://h/v1", deadline_s=0), "deadline_s must be above 0"),
    "no tries": (lambda: Pool("http://h/v1", tries=0), "tries must be at least 1"),
    "twice the same": (lambda: Pool("http://h", "http://h/v1"), "different names"),
    "a budget over 1": (lambda: ErrorBudget(1.5), "1.5"),
    "a key that is not set": (lambda: Pool(Endpoint("http://h", key_env="NO_KEY")), "NO_KEY"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_one_sentence(case):
    make, words = WRONG[case]
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20), st.floats(0, 0.9))
@settings(max_examples=60, deadline=None)
def test_a_budget_is_exceeded_when_a_plain_count_says_so(outcomes, window, fraction):
    failures = Failures(ErrorBudget(fraction, window))
    for position, good in enumerate(outcomes, start=1):
        outcome = Done("x", {}) if good else Failed(Kind.TIMEOUT, "late")
        last = outcomes[max(0, position - window) : position]
        assert failures.add(outcome) == (not good and last.count(False) > int(fraction * window))


@given(
    st.sampled_from(sorted(Kind)),
    st.integers(1, 8),
    st.integers(1, 8),
    st.floats(0.01, 100),
    st.one_of(st.none(), st.floats(0, 50)),
)
@settings(max_examples=100, deadline=None)
def test_a_retry_begins_inside_the_deadline_and_after_what_was_asked_for(
    kind, tries, made, left, after
):
    failed = Failed(kind, "x", retry_after_s=after)
    wait = Retry(tries).wait_s(failed, tries=made, rejects=made, left_s=left)

    if wait is not None:
        assert 0 <= wait < left
        assert wait >= (after or 0)
        assert kind is Kind.RATE_LIMITED or made < tries
        assert kind not in (Kind.HTTP_4XX, Kind.CANCELLED)
    elif kind is Kind.RATE_LIMITED:
        assert left <= (after or 0) + 10


def test_calls_that_failed_together_do_not_come_back_together():
    failed = Failed(Kind.HTTP_5XX, "x")
    waits = [Retry().wait_s(failed, tries=3, rejects=0, left_s=60, number=n) for n in range(200)]

    assert len(set(waits)) == 200
    assert max(waits) / min(waits) > 1.8


def test_a_breaker_opens_once_probes_singly_and_closes_at_the_first_success():
    breaker = Breaker(max_failures=3, first_s=1.0, max_s=4.0)
    endpoint = Upstream(Endpoint("http://h/v1"), FixedLimit(60), False, breaker=breaker)

    for now in (0.0, 0.1, 0.2, 0.3, 0.4):
        breaker.on_failure(now)
    assert not endpoint.has_room(1.1)
    assert endpoint.has_room(1.3)
    endpoint.in_flight = 1
    assert not endpoint.has_room(1.3)
    breaker.on_failure(1.3)
    endpoint.in_flight = 0
    assert not endpoint.has_room(3.2)
    assert endpoint.has_room(3.4)
    breaker.on_success()
    endpoint.in_flight = 59
    assert endpoint.has_room(3.4)
    assert breaker.opened == 1


def test_mutations_and_answers_that_failed_are_marked_and_counted():
    async def handler(seen: Seen) -> None:
        if "broken" in seen.text:
            await seen.reply(400, {"error": {"message": "no"}})
        elif "as json" in seen.text:
            await seen.answer(json.dumps({"mutated_query": "new one"}))
        elif "half json" in seen.text:
            await seen.answer('{"mutated_query": "new')
        else:
            await seen.answer("plain new")

    queries = ["a?", "b?", "c?", "d?"]
    prompts = ["as json", "broken", "half json", "plain"]
    with RawServer(handler) as server:
        model = f"{server.url}#m"
        mutated = batch_mutate_queries(queries, prompts, model)
        answered = batch_query_target_model(["one", "broken"], model, batch_size="auto")
        sequential = batch_query_target_model(["one", "two", "three"], model, batch_size=1)
        with pytest.raises(Mismatch):
            batch_mutate_queries(queries, prompts[:2], model)

    assert list(mutated) == ["new one", "b?", "c?", "plain new"]
    assert mutated.valid == (True, False, False, True)
    assert mutated.invalid_count == 2
    assert list(answered) == ["plain new", NO_ANSWER]
    assert (answered.valid, answered.invalid_count) == ((True, False), 1)
    assert sequential.invalid_count == 0


def test_batch_size_is_the_number_of_calls_in_flight():
    for size in (1, 4):
        with RawServer(slower) as server:
            batch_query_target_model(
                [f"q{i}" for i in range(12)], f"{server.url}#m", batch_size=size
            )
            assert server.most_open == size


def test_embeddings_that_failed_are_nan_and_others_are_cut_or_filled():
    import numpy as np

    async def handler(seen: Seen) -> None:
        if seen.body["input"] == "bad":
            await seen.reply(400)
        else:
            await seen.reply(body={"data": [{"index": 0, "embedding": [1.0, 2.0, 3.0]}]})

    with RawServer(handler) as server:
        short = batch_encode_queries(["a", "bad", "b"], 2, f"{server.url}#m")
        long = batch_encode_queries(["a"], 5, f"{server.url}#m")

    assert short.array.dtype == np.float32
    assert short.valid.tolist() == [True, False, True]
    assert short.invalid_count == 1
    assert np.asarray(short)[0].tolist() == [1.0, 2.0]
    assert np.isnan(short[1]).all()
    assert long[0].tolist() == [1.0, 2.0, 3.0, 0.0, 0.0]


def test_a_pool_nobody_closed_leaves_no_noise_behind():
    script = (
        "import sys; from batchwright.calls import Pool, chat\n"
        "pool = Pool(sys.argv[1], limit=2, remember=False)\n"
        "print(pool.map([chat('m', 'question 1')])[0].text)\n"
    )
    with RawServer(quick) as server:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-X", "dev", "-c", script, server.url],
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert (done.returncode, done.stdout, done.stderr) == (0, "re: question 1\n", "")


def test_a_budget_that_the_last_call_exceeds_is_told_to_that_call() -> None:
    def broken(requests: Sequence[Request]) -> list[Exception]:
        return [RuntimeError("down") for _ in requests]

    budget = ErrorBudget(0, window=1)
    with Pool(Endpoint(broken), tries=1, budget=budget, remember=False) as pool:
        with pytest.raises(BudgetExceeded, match="1 of the last 1 calls failed"):
            pool.map([chat("m", "alone")])

        async def one() -> Outcome:
            return await pool.call(chat("m", "alone"))

        with pytest.raises(BudgetExceeded):
            pool.run(one())
