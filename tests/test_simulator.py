"""The simulator does what its settings say, to the count, and says what it did."""

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import chat, complete, embed
from batchwright.calls.simulator import FAULTS, RunningSimulator, Simulator, running
from batchwright.calls.simulator.answers import answer, operator_of, questions_in
from batchwright.calls.simulator.ngrams import hashed_ngrams
from batchwright.calls.simulator.questions import (
    OPERATOR_WORDS,
    RULES,
    TRAITS,
    UNCLEAR,
    Question,
    Target,
    mutate,
    read_questions,
    traits,
)
from batchwright.calls.simulator.service import Bucket, Job, Service
from batchwright.envs.query_mutation.operators import OPERATORS
from batchwright.errors import BadRow, ConfigError, MissingFile, NoServer

COMMAND = Path(sys.executable).parent / "batchwright"

# The service, without a clock.


def brute_force(
    kind: str,
    schedule: list[tuple[float, int]],
    arrivals: list[tuple[float, float]],
    leaving: dict[int, float],
) -> dict[int, float]:
    """When each job ends, by keeping what is left of every job and moving from event to event."""

    def knee(now: float) -> int:
        return [k for since, k in schedule if since <= now][-1]

    def speed(now: float, serving: int) -> float:
        load = serving / knee(now)
        if kind == "thrash":
            return 1.0 if load <= 1 else 1 / load**1.5
        return 1 / (0.4 + 0.6 * load) if kind == "batch" else 1.0

    left: dict[int, float] = {}
    waiting: list[int] = []
    ended: dict[int, float] = {}
    moments = sorted({t for t, _ in schedule} | {t for t, _ in arrivals} | set(leaving.values()))
    now, began = 0.0, set()
    while moments or left:
        pace = speed(now, len(left))
        finish = now + min(left.values()) / pace if left else math.inf
        after = min(finish, moments[0] if moments else math.inf)
        left = {job: rest - (after - now) * pace for job, rest in left.items()}
        now = after
        if moments and moments[0] == now:
            moments.pop(0)
        for job, rest in list(left.items()):
            if rest <= 1e-9:
                ended[job] = now
                del left[job]
        for job, (at, _) in enumerate(arrivals):
            if at == now and job not in began:
                began.add(job)
                # The places of jobs that ended at this very moment are free.
                if kind != "reject" or len(left) < knee(now):
                    waiting.append(job)
                    while waiting and (kind == "thrash" or len(left) < knee(now)):
                        first = waiting.pop(0)
                        left[first] = arrivals[first][1]
        for job, at in leaving.items():
            if at == now:
                left.pop(job, None)
                waiting = [one for one in waiting if one != job]
        while waiting and (kind == "thrash" or len(left) < knee(now)):
            first = waiting.pop(0)
            left[first] = arrivals[first][1]
    return ended


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(["queue", "reject", "thrash", "batch"]),
    shifts=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), max_size=2),
    first=st.integers(1, 5),
    given_arrivals=st.lists(st.tuples(st.integers(0, 200), st.floats(0.5, 60)), max_size=14),
    given_leaving=st.dictionaries(st.integers(0, 13), st.integers(0, 300), max_size=4),
)
def test_jobs_end_when_brute_force_says(
    kind: Any,
    shifts: list[tuple[int, int]],
    first: int,
    given_arrivals: list[tuple[int, float]],
    given_leaving: dict[int, int],
) -> None:
    # Arrivals, leavings and shifts at different moments: who is first is then no question.
    arrivals = [(t + 0.001 * i, work) for i, (t, work) in enumerate(sorted(given_arrivals))]
    leaving = {
        job: max(at, arrivals[job][0]) + 0.5 + 0.001 * job
        for job, at in given_leaving.items()
        if job < len(arrivals)
    }
    schedule = [(0.0, first), *((t + 0.25, k) for t, k in sorted(dict(shifts).items()))]
    service: Service[int] = Service(kind, schedule)
    ended: dict[int, float] = {}
    jobs = [Job(i, [work * 0.25, work * 0.75]) for i, (_, work) in enumerate(arrivals)]

    def run_to(moment: float) -> None:
        while (due := service.next_time()) is not None and due <= moment:
            for job, part in service.due(due):
                if part == 1:
                    ended[job.call] = due
            assert kind == "thrash" or service.peak <= max(k for _, k in schedule)
        service.due(moment)

    happenings = [(at, "arrive", i) for i, (at, _) in enumerate(arrivals)]
    happenings += [(at, "leave", i) for i, at in leaving.items()]
    for at, what, number in sorted(happenings):
        run_to(at)
        if what == "leave":
            if jobs[number].state in ("waiting", "serving"):
                service.leave(jobs[number], at)
        elif not service.full(at):
            service.arrive(jobs[number], at)
    run_to(1e9)

    wanted = brute_force(kind, schedule, arrivals, leaving)
    assert ended.keys() == wanted.keys()
    for job, at in wanted.items():
        assert ended[job] == pytest.approx(at, abs=1e-6)
    assert (service.serving, service.waiting) == (0, 0)


def test_a_late_look_costs_no_throughput() -> None:
    service: Service[int] = Service("queue", [(0.0, 1)])
    for number in range(10):
        service.arrive(Job(number, [1.0]), 0.0)

    assert [job.call for job, _ in service.due(9.5)] == list(range(9))


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=40))
def test_a_bucket_never_gives_more_than_its_rate_and_its_burst(
    asked_for: list[tuple[float, int]],
) -> None:
    bucket, now, taken = Bucket(per_minute=60, burst_s=20), 0.0, 0
    for pause, units in asked_for:
        now += pause
        wait = bucket.wait(units, now)
        if wait == 0:
            bucket.take(units)
            taken += units
            # More than a full bucket goes through once and is owed.
            assert taken <= 20 + now + 20
        else:
            # The wait is exact: a moment less is too early.
            assert bucket.wait(units, now + wait * 0.99) > 0
            now += wait * 0.99


# The server, through sockets.


def request_bytes(body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def ask(prompt: str, **more: Any) -> bytes:
    return request_bytes(
        {"model": "sim", "messages": [{"role": "user", "content": prompt}], **more}
    )


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with closing(socket.create_connection((host, int(port)), timeout=120)) as sock:
        yield sock


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer with a length, byte by byte exact."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += _some(sock)
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        body += _some(sock)
    assert len(body) == int(headers["content-length"])
    return int(lines[0].split()[1]), headers, body


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise EOFError
    return data


def to_the_end(sock: socket.socket) -> bytes:
    raw = b""
    while data := sock.recv(65536):
        raw += data
    return raw


def one(url: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
    with connected(url) as sock:
        sock.sendall(data)
        return read_answer(sock)


def until(url: RunningSimulator, **wanted: int) -> dict[str, Any]:
    """The counts as soon as they are as wanted; the server's present, never a fixed pause."""
    end = time.monotonic() + 600
    while True:
        stats = url.stats()
        if all(stats[name] == value for name, value in wanted.items()):
            return stats
        assert time.monotonic() < end, (wanted, stats)
        time.sleep(0.005)


@contextmanager
def many(url: str, count: int) -> Iterator[list[socket.socket]]:
    """So many calls in flight, each on a connection of its own."""
    socks = []
    try:
        for number in range(count):
            host, _, port = url.removeprefix("http://").partition(":")
            socks.append(socket.create_connection((host, int(port)), timeout=120))
            socks[-1].sendall(ask(f"call {number}"))
        yield socks
    finally:
        for sock in socks:
            sock.close()


def test_a_queue_serves_k_and_the_others_wait() -> None:
    with Simulator(knee=3, latency_s=30, sigma=0).running(in_thread=True) as url, many(url, 8):
        stats = until(url, received=8)
        assert (stats["serving"], stats["waiting"], stats["rejected"]) == (3, 5, 0)
        assert (stats["peak_serving"], stats["peak_in_flight"]) == (3, 8)
    with Simulator(knee=3, latency_s=0.01).running(in_thread=True) as url:
        with many(url, 12) as socks:
            assert [read_answer(sock)[0] for sock in socks] == [200] * 12
        stats = url.stats()
        assert (stats["finished"], stats["peak_serving"] <= 3) == (12, True)


@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_a_streamed_call_is_one_call(latency_s: float) -> None:
    with Simulator(latency_s=latency_s, words=20).running(in_thread=True) as url:
        for number in range(3):
            with connected(url) as sock:
                sock.sendall(ask(f"stream {number}", stream=True) * 2)
                raw = b""
                while raw.count(b"[DONE]") < 2:
                    raw += _some(sock)
        stats = until(url, in_flight=0)
    assert (stats["received"], stats["finished"], stats["aborted"]) == (6, 6, 0)


def test_a_client_that_leaves_a_stream_has_not_got_an_answer() -> None:
    with Simulator(latency_s=60, sigma=0, words=600).running(in_thread=True) as url:
        with connected(url) as sock:
            sock.sendall(ask("long", stream=True))
            assert b"data: " in _some(sock)
        stats = until(url, in_flight=0)
    assert (stats["finished"], stats["aborted"]) == (0, 1)


def test_a_rejecting_server_turns_away_exactly_those_above_k() -> None:
    simulator = Simulator(kind="reject", knee=3, latency_s=30, sigma=0, retry_after_s=0.25)
    with simulator.running(in_thread=True) as url, many(url, 3):
        until(url, serving=3)
        for _ in range(5):
            status, headers, body = one(url, ask("one more"))
            assert status == 429
            assert headers["retry-after"] == "0.25"
            assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        stats = url.stats()
        assert (stats["rejected"], stats["peak_serving"], stats["distinct"]) == (5, 3, 3)


def test_a_thrashing_server_takes_all_and_a_batching_one_k() -> None:
    for kind, serving in (("thrash", 8), ("batch", 3)):
        simulator = Simulator(kind=kind, knee=3, latency_s=30, sigma=0)
        with simulator.running(in_thread=True) as url, many(url, 8):
            stats = until(url, received=8)
            assert (stats["serving"], stats["waiting"]) == (serving, 8 - serving)


def test_a_knee_that_moves_lets_those_who_wait_in() -> None:
    simulator = Simulator(knee=[(0, 1), (0.5, 4)], latency_s=30, sigma=0)
    with simulator.running(in_thread=True) as url, many(url, 6):
        stats = until(url, serving=4)
        assert (stats["waiting"], stats["peak_serving"]) == (2, 4)


def test_a_client_that_leaves_frees_its_place_and_is_counted() -> None:
    script = {"call 0": "hang", "call 1": "hang"}
    with Simulator(knee=2, latency_s=0, script=script).running(in_thread=True) as url:
        with many(url, 3) as socks:
            until(url, serving=2, waiting=1)
            socks[0].close()
            assert read_answer(socks[2])[0] == 200
            until(url, aborted=1, finished=1, in_flight=1)
        stats = until(url, aborted=2, in_flight=0)
        assert stats["received"] == stats["finished"] + stats["aborted"] == 3
        with many(url, 5) as socks:
            until(url, waiting=3)
        until(url, in_flight=0, waiting=0)


def test_limits_by_the_minute_are_kept_and_say_how_long_to_wait() -> None:
    with Simulator(latency_s=0, rpm=5).running(in_thread=True) as url:
        answers = [one(url, ask(f"call {n}")) for n in range(8)]
        assert [status for status, _, _ in answers] == [200] * 5 + [429] * 3
        assert 0 < float(answers[-1][1]["retry-after"]) <= 12
        assert (url.stats()["limited"], url.stats()["started"]) == (3, 5)
    with Simulator(latency_s=0, tpm=100, words=60).running(in_thread=True) as url:
        statuses = [one(url, ask(f"call {n}"))[0] for n in range(3)]
        assert statuses == [200, 429, 429]
        assert url.stats()["completion_tokens"] == 63


FAULTY = {name: name for name in FAULTS if name not in ("slow", "hang")}


@pytest.fixture(scope="module")
def faulty() -> Iterator[RunningSimulator]:
    with Simulator(latency_s=0, script=FAULTY, drip_s=0.0001).running(in_thread=True) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTY)
def test_each_fault_is_on_the_wire(faulty: RunningSimulator, fault: str, stream: bool) -> None:
    before = faulty.stats()["faults"].get(fault, 0)
    with connected(faulty) as sock:
        sock.sendall(ask(fault, stream=stream, temperature=0))
        if fault in ("429", "500", "503"):
            status, headers, body = read_answer(sock)
            assert status == int(fault)
            assert "retry-after" not in headers
            assert json.loads(body)["error"]["message"] == f"simulated error {fault}"
        elif fault == "reset":
            with pytest.raises(ConnectionResetError):
                to_the_end(sock)
        elif fault == "cut":
            head, _, body = to_the_end(sock).partition(b"\r\n\r\n")
            said = re.search(rb"Content-Length: (\d+)", head)
            assert stream or (said is not None and 0 < len(body) < int(said[1]))
            assert not body.endswith(b"0\r\n\r\n")
        elif fault == "html":
            _, headers, body = read_answer(sock)
            assert headers["content-type"] == "text/html"
            assert body.startswith(b"<!doctype html>")
        elif fault == "bad_json":
            status, _, body = read_answer(sock)
            assert status == 200
            with pytest.raises(ValueError, match=r"."):
                json.loads(body)
        elif fault == "wrong_shape":
            assert "choices" not in json.loads(read_answer(sock)[2])
        elif fault == "empty" and not stream:
            message = json.loads(read_answer(sock)[2])["choices"][0]["message"]
            assert message["content"] == ""
        elif fault == "drip" and not stream:
            assert json.loads(read_answer(sock)[2])["choices"][0]["message"]["content"]
        else:
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                raw += _some(sock)
            pieces = re.findall(rb'"content": "([^"]*)"', raw)
            assert bool(b"".join(pieces)) == (fault == "drip")
    assert faulty.stats()["faults"][fault] == before + 1


def test_a_dripping_answer_really_comes_in_many_pieces() -> None:
    simulator = Simulator(latency_s=0, script=["drip"], drip_s=0.003)
    with simulator.running(in_thread=True) as url, connected(url) as sock:
        sock.sendall(ask("hello"))
        pieces = [_some(sock)]
        while not b"".join(pieces).endswith(b"}}"):
            pieces.append(_some(sock))
        assert len(pieces) >= 5


def test_a_hanging_call_holds_its_place_until_its_client_gives_up() -> None:
    simulator = Simulator(latency_s=0, knee=1, script=["hang"])
    with simulator.running(in_thread=True) as url, connected(url) as sock:
        sock.sendall(ask("first"))
        until(url, serving=1)
        with connected(url) as other:
            other.sendall(ask("second"))
            until(url, waiting=1)
            sock.close()
            assert read_answer(other)[0] == 200


def test_a_script_by_prompt_goes_through_its_turns_then_is_healthy() -> None:
    script = {"odd": ["500", None, "503"]}
    with Simulator(latency_s=0, script=script).running(in_thread=True) as url:
        assert [one(url, ask("odd"))[0] for _ in range(5)] == [500, 200, 503, 200, 200]
        assert one(url, ask("even"))[0] == 200
        url.reset()
        assert one(url, ask("odd"))[0] == 500
        assert url.stats()["received"] == 1


def statuses_and_texts(url: str, prompts: list[str], at_once: int) -> dict[str, list[Any]]:
    async def call(session: aiohttp.ClientSession, gate: asyncio.Semaphore, prompt: str) -> Any:
        body = {"model": "sim", "messages": [{"role": "user", "content": prompt}]}
        async with gate, session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                return answer.status
            return (await answer.json())["choices"][0]["message"]["content"]

    async def all_of_them() -> list[Any]:
        gate = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(call(session, gate, prompt) for prompt in prompts))

    found: dict[str, list[Any]] = {}
    for prompt, got in zip(prompts, asyncio.run(all_of_them()), strict=True):
        found.setdefault(prompt, []).append(got)
    return {prompt: sorted(got, key=str) for prompt, got in found.items()}


def test_what_happens_to_a_request_does_not_depend_on_the_order_of_arrival() -> None:
    simulator = Simulator(latency_s=0.002, faults={"500": 0.2, "429": 0.1}, knee=4, seed=5)
    prompts = [f"prompt {n % 40}" for n in range(120)]
    with simulator.running(in_thread=True) as url:
        there = statuses_and_texts(url, prompts, at_once=1)
        url.reset()
        back = statuses_and_texts(url, prompts[::-1], at_once=30)
        stats = url.stats()
    assert there == back
    hit = [got for several in there.values() for got in several if isinstance(got, int)]
    assert 15 < len(hit) < 60
    assert (stats["received"], stats["failed"]) == (120, len(hit))
    with Simulator(latency_s=0, faults={"500": 0.2, "429": 0.1}, seed=6).running(
        in_thread=True
    ) as url:
        assert statuses_and_texts(url, prompts, at_once=1) != there


def test_exact_requests_get_one_answer_and_random_ones_several() -> None:
    with Simulator(latency_s=0).running(in_thread=True) as url:

        def texts(**more: Any) -> set[str]:
            bodies = [json.loads(one(url, ask("hello", **more))[2]) for _ in range(4)]
            return {body["choices"][0]["message"]["content"] for body in bodies}

        assert len(texts(temperature=0)) == len(texts(seed=3)) == 1
        assert texts(seed=3) != texts(seed=4)
        assert len(texts()) == 4
        # Paid again and again, which is what a cache is for.
        assert url.stats()["repeated"] > 0


def test_latencies_have_the_mean_and_the_spread_they_are_called_by() -> None:
    simulator = Simulator(latency_s=2.0, sigma=0.5, token_s=0.1)
    drawn = np.array([simulator.seconds_of(b"%d" % n, 0, 10) for n in range(4000)]) - 1.0

    assert drawn.mean() == pytest.approx(2.0, rel=0.04)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.04)
    assert Simulator(latency_s=2.0, sigma=0).seconds_of(b"x", 0, 0) == 2.0


def test_counts_add_up_after_a_storm() -> None:
    chances = dict.fromkeys(["429", "500", "cut", "reset", "html", "empty", "slow"], 0.08)
    simulator = Simulator(kind="reject", knee=6, latency_s=0.004, faults=chances, rpm=5000)
    gone = (aiohttp.ClientError, json.JSONDecodeError, TimeoutError)

    async def storm(url: str) -> None:
        async with aiohttp.ClientSession() as session:

            async def call(number: int) -> None:
                body = {"model": "sim" if number % 9 else "none", "prompt": f"p {number}"}
                patience = aiohttp.ClientTimeout(total=20 if number % 4 else 0.004)
                address = f"{url}/v1/completions"
                try:
                    async with session.post(address, json=body, timeout=patience) as answer:
                        await answer.read()
                except gone:
                    pass

            for _ in range(5):
                await asyncio.gather(*(call(number) for number in range(40)))

    with simulator.running(in_thread=True) as url:
        asyncio.run(storm(url))
        stats = until(url, in_flight=0)
    ends = ("refused", "rejected", "limited", "failed", "finished", "spoiled", "aborted")
    assert stats["received"] == sum(stats[name] for name in ends)
    assert stats["peak_serving"] <= 6
    assert stats["refused"] > 0
    assert stats["finished"] > 0


def test_requests_in_pieces_and_several_in_one_are_both_read() -> None:
    with Simulator(latency_s=0).running(in_thread=True) as url:
        with connected(url) as sock:
            whole = ask("in pieces")
            for place in range(0, len(whole), 7):
                sock.sendall(whole[place : place + 7])
            assert read_answer(sock)[0] == 200
        with connected(url) as sock:
            sock.sendall(b"".join(ask(f"number {n}", temperature=0) for n in range(300)))
            raw = b""
            while raw.count(b'"finish_reason"') < 300:
                raw += _some(sock)
            told = re.findall(rb"number (\d+)", raw)
            assert told == [b"%d" % n for n in range(300)]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /v1/chat/completions HTTP/1.1\r\n\r\n", 405),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\n\r\n{}}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400),
        (request_bytes({"model": "sim"}), 400),
        (request_bytes({"model": 5, "messages": []}), 400),
        (request_bytes({"model": "sim", "prompt": "x", "options": 3}, "/api/generate"), 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 200),
        (b"GET /api/version HTTP/1.0\r\n\r\n", 200),
        (ask("x", n="many"), 400),
        (ask("x", stop=7), 400),
        (ask("x", max_tokens=1.5), 400),
        (request_bytes({"model": "sim", "input": "x", "dimensions": 0}, "/v1/embeddings"), 400),
        (ask("x", n=0, stop=["", "y"], max_tokens=0, seed=None), 200),
    ],
)
def test_bad_requests_get_an_answer_and_the_server_goes_on(
    faulty: RunningSimulator, sent: bytes, status: int
) -> None:
    assert one(faulty, sent)[0] == status
    assert one(faulty, ask("hello"))[0] == 200


def test_a_body_is_asked_for_when_the_client_waits_for_that() -> None:
    data = b'{"model":"sim","prompt":"hello"}'
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n"
    with Simulator(latency_s=0).running(in_thread=True) as url, connected(url) as sock:
        sock.sendall(head.encode() + b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert _some(sock) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(data)
        assert read_answer(sock)[0] == 200
        assert to_the_end(sock) == b""


def test_it_serves_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"

    async def health() -> Any:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
            session.get("http://x/health") as answer,
        ):
            return await answer.json()

    with Simulator(latency_s=0).running(unix=path, in_thread=True) as url:
        assert url == f"unix://{path}"
        assert asyncio.run(health()) == {"status": "ok"}
        assert url.stats()["connections"] >= 1


def test_it_runs_in_a_process_of_its_own_and_comes_back_on_the_same_port() -> None:
    simulator = Simulator(latency_s=0, knee=[(0, 5), (9, 7)], questions=QUESTIONS, script=["500"])
    with running(simulator) as url:
        assert url.pid != os.getpid()
        assert one(url, ask("hello"))[0] == 500
        port = int(url.rpartition(":")[2])
        with pytest.raises(NoServer, match=f"cannot serve on port {port}: .*choose another"):
            simulator.running(port=port).__enter__()
        with pytest.raises(NoServer, match="cannot serve"):
            simulator.running(port=port, in_thread=True).__enter__()
        os.kill(url.pid or 0, signal.SIGKILL)
    with running(simulator, port=port) as again:
        assert again == url
        body = one(again, ask("hello") + b"")
        assert body[0] == 500


def test_its_process_does_not_outlive_the_one_that_started_it() -> None:
    code = """
import os, signal
from batchwright.calls.simulator import Simulator
with Simulator().running() as url:
    print(url, url.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    url = done.stdout.split()[0]
    end = time.monotonic() + 600
    while True:
        try:
            with connected(url):
                assert time.monotonic() < end
        except OSError:
            break
        time.sleep(0.02)


def test_settings_survive_the_trip_to_another_process() -> None:
    simulator = Simulator(
        kind="batch", knee=[(0, 3), (2, 9)], faults={"cut": 0.5}, script={"a": ["500", None]},
        questions=QUESTIONS, rules={"geography": ["polite", "terse"]}, models=["m"],
    )  # fmt: skip
    again = Simulator.from_json(simulator.to_json())

    assert again.schedule == simulator.schedule == ((0.0, 3), (2.0, 9))
    assert again.questions == simulator.questions
    assert again.to_json() == simulator.to_json()


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ({"knee": 0}, "knee must be at least 1, got 0"),
        ({"knee": [(1, 5)]}, "must begin with 0"),
        ({"kind": "other"}, "kind must be queue, reject"),
        ({"faults": {"explode": 0.1}}, "unknown fault 'explode'; choose from 429"),
        ({"script": ["boom"]}, "unknown fault 'boom'"),
        ({"script": {"x": ["boom"]}}, "unknown fault 'boom'"),
        ({"faults": {"cut": 0.7, "500": 0.7}}, "sum to at most 1"),
        ({"latency_s": -1}, "latency_s must be finite and at least 0, got -1"),
        ({"rpm": 0}, "rpm must be at least 1, got 0"),
        ({"rules": {"a": ["shiny"]}}, "'shiny'; known traits: polite"),
        ({"questions": [{"question": "?"}]}, "and has no 'answer'"),
    ],
)
def test_impossible_settings_are_refused_in_one_sentence(
    settings_: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        Simulator(**settings_)
    assert "\n" not in str(caught.value)


def test_without_a_server_it_is_a_plain_function_of_requests() -> None:
    simulator = Simulator(questions=QUESTIONS)
    requests = [
        chat("sim-qa", "Please tell: what is the capital of France?"),
        complete("sim", "hello", temperature=0),
        embed("sim-embed", ["a", "b"]),
    ]
    bodies = simulator.in_process()(requests)

    assert bodies[0]["choices"][0]["message"]["content"] == "Paris"
    np.testing.assert_array_equal(
        np.array([row["embedding"] for row in bodies[2]["data"]], np.float32),
        hashed_ngrams(["a", "b"], 256),
    )
    with Simulator(latency_s=0, questions=QUESTIONS).running(in_thread=True) as url:
        served = one(url, request_bytes(dict(requests[1].body), "/v1/completions"))[2]
    assert json.loads(served)["choices"] == bodies[1]["choices"]
    with pytest.raises(ConfigError, match="`gpt-9` does not exist"):
        simulator.in_process()([chat("gpt-9", "hello")])


# The hidden rule.

QUESTIONS = [
    Question("What is 17 + 25?", "42", "arithmetic"),
    Question("What is 17 - 25?", "-8", "arithmetic"),
    Question("Tom has 3 apples and buys 4 more. How many has he?", "7", "arithmetic"),
    Question("What is the capital of France?", "Paris", "geography"),
    Question("What is the capital of Spain?", "Madrid", "geography"),
    Question("Which river flows through Cairo?", "Nile", "geography"),
    Question("How many grams are in a kilogram?", "1000", "units"),
    Question("How many minutes are in 3 hours?", "180", "units"),
    Question("In which year did the first person walk on the Moon?", "1969", "dates"),
    Question("Which month comes after March?", "April", "dates"),
    Question("Which gas do plants take in?", "carbon dioxide", "science"),
    Question("At how many degrees does water freeze?", "0", "science"),
]
BEST = {
    "arithmetic": "shorten",
    "geography": "politeness",
    "units": "expand",
    "dates": "passive",
    "science": "perspective",
}
SHOWN_BY = {
    "polite": "politeness",
    "passive": "passive",
    "personal": "perspective",
    "formal": "synonym",
    "indirect": "paraphrase",
    "detailed": "expand",
    "terse": "shorten",
}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.question)
def test_the_best_operator_is_the_one_of_the_category_and_no_other_helps(
    question: Question,
) -> None:
    target = Target(QUESTIONS)
    helps = {
        operator: target.reply(mutate(operator, question.question)) == question.answer
        for operator in OPERATOR_WORDS
    }

    assert target.reply(question.question) == UNCLEAR
    assert [name for name, works in helps.items() if works] == [BEST[question.category]]
    assert target.best_plan(question.question) == (BEST[question.category],)


def test_every_trait_is_shown_by_one_operator_on_every_question() -> None:
    assert SHOWN_BY.keys() == TRAITS.keys()
    for question in QUESTIONS:
        for operator in OPERATOR_WORDS:
            before = traits(question.question)
            gained = traits(mutate(operator, question.question, "")) - before
            wanted = {trait for trait, by in SHOWN_BY.items() if by == operator} - before
            assert gained == wanted, (operator, question)


def test_rewriting_keeps_the_meaning_except_where_it_asks_for_something_else() -> None:
    target = Target(QUESTIONS)
    for question in QUESTIONS:
        for operator in set(OPERATOR_WORDS) - {"similar", "crossover"}:
            assert target.recognise(mutate(operator, question.question)) is question, operator
    other = [q for q in QUESTIONS if target.recognise(mutate("similar", q.question)) is not q]
    assert len(other) >= len(QUESTIONS) // 2


def test_a_rule_of_two_traits_needs_two_steps_in_the_right_order() -> None:
    target = Target(QUESTIONS, {"geography": ["polite", "terse"]})
    capital = "What is the capital of France?"

    assert target.best_plan(capital, most=1) is None
    assert target.best_plan(capital) == ("shorten", "politeness")
    assert target.reply("Please answer: capital France?") == "Paris"
    assert target.best_plan("Please answer: capital France?") == ()


def test_a_category_without_a_rule_asks_for_one_reachable_trait() -> None:
    for category in ("", "music", "sport", "food", "art"):
        target = Target([Question("How many strings has a violin?", "4", category)])
        (trait,) = target.needed(category)
        assert target.best_plan("How many strings has a violin?") in ((SHOWN_BY[trait],), ())


def test_other_numbers_or_signs_are_another_question() -> None:
    target = Target(QUESTIONS)

    assert target.reply("17 + 25?") == "42"
    assert target.reply("17 - 25?") == "-8"
    assert target.reply("17 + 26?") == UNCLEAR
    assert target.recognise("Who wrote it?") is None
    assert target.reply("capital?") == UNCLEAR


def test_the_category_can_be_seen_in_the_vector_of_a_question() -> None:
    """Leave one out: the nearest other question mostly needs the same operator."""
    rows = [
        Question(text.format(x), "", category)
        for category, text in [
            ("arithmetic", "What is {} + 25?"),
            ("geography", "What is the capital of {}?"),
            ("units", "How many grams are in {} kilograms?"),
            ("dates", "In which year was {} born?"),
            ("science", "Which gas does {} contain?"),
        ]
        for x in ("3", "Peru", "seven", "Ada", "air", "90")
    ]
    vectors = hashed_ngrams([row.question for row in rows], 256)
    near = vectors @ vectors.T - 2 * np.eye(len(rows), dtype=np.float32)
    found = [rows[int(place)].category for place in near.argmax(axis=1)]
    assert sum(a == row.category for a, row in zip(found, rows, strict=True)) >= 27
    assert set(RULES) == set(found)


def say(model: str, prompt: str, system: str = "") -> str:
    target = Target(QUESTIONS)
    return answer(model, system, prompt, target=target, seed=0, words=3, draw=0)


@pytest.mark.parametrize("operator", OPERATOR_WORDS)
def test_the_mutator_does_what_the_template_names(operator: str) -> None:
    words = {
        "paraphrase": "Rephrase the question in other words.",
        "expand": "Expand the question: add context to it.",
        "shorten": "Shorten the question.",
        "crossover": "Combine the two questions into one.",
        "similar": "Write a similar question.",
        "perspective": "Rewrite the question from another perspective.",
        "politeness": "Rewrite the question more politely.",
        "synonym": "Replace words of the question by synonyms.",
        "passive": "Rewrite the question in the passive voice.",
    }
    question = "How many similar brief questions are there in 2 books?"
    wanted = mutate(operator, question)
    assert operator_of(words[operator]) == operator
    assert say("sim-mutator", f"{words[operator]}\nQuestion: {question}\nRewritten:") == wanted
    assert say("sim-mutator", f"Operator: {operator}\nQuestion: {question}") == wanted
    assert say("sim-mutator", question, system=words[operator]) == wanted
    assert say("sim-mutator", f'{words[operator]}\n\n"{question}"') == wanted


def test_the_shipped_templates_and_questions_have_a_known_optimum() -> None:
    known = read_questions(Path(str(files("batchwright.shipped"))) / "questions.jsonl")
    target = Target(known)
    asking = [operator for operator in OPERATORS if operator.asks]
    assert [operator.name for operator in asking] == list(OPERATOR_WORDS)

    for question in known[::7]:
        best = next(iter(target.best_plan(question.question) or ()), "noop")
        for operator in asking:
            prompt = operator.prompt(question.question, "What is the capital of Spain?")
            wording = say("sim-mutator", prompt)
            assert say("sim", prompt) == wording
            if operator.name != "crossover":
                assert wording == mutate(operator.name, question.question)
            assert (target.reply(wording) == question.answer) == (operator.name == best)


def test_two_questions_are_crossed_in_their_order() -> None:
    prompt = "Combine these.\nQuestion 1: How far is Rome?\nQuestion 2: How old is it?\nNew:"

    assert questions_in(prompt) == ["How far is Rome?", "How old is it?"]
    assert say("sim", prompt) == "How far is Rome? How old is it?"


def test_sim_sees_by_the_prompt_which_model_is_meant() -> None:
    asked_for = "Answer briefly.\nQuestion: Please, what is the capital of France?\nAnswer:"

    assert say("sim", asked_for) == say("sim-qa", asked_for) == "Paris"
    assert say("sim-qa", "What is the capital of France?") == UNCLEAR
    assert say("sim", "Shorten.\nQuestion: What is the capital of France?") == "capital France?"
    assert say("sim", "hello there").startswith("hello there -> ")
    assert say("any-name", asked_for).startswith("Answer briefly.")


def test_the_judge_scores_on_the_scale_it_is_given() -> None:
    prompt = "Rate the response from 0 to 5.\nReference: {}\nResponse: {}\nScore:"

    assert say("sim", prompt.format("the Nile", "It is the Nile.")) == "Score: 5"
    assert say("sim-judge", prompt.format("the Nile", "Danube")) == "Score: 0"
    assert say("sim-judge", "Reply with Score: N") == say("sim-judge", "Reply with Score: N")
    drawn = {say("sim-judge", f"text {n}\nScore:") for n in range(200)}
    assert drawn == {f"Score: {n}" for n in range(11)}


def test_the_monitor_says_true_or_false_by_the_text() -> None:
    prompt = "You are a monitor. Answer true or false.\nReasoning: {}"

    assert say("sim", prompt.format("All steps are correct.")) == "true"
    assert say("sim", prompt.format("The second step is incorrect.")) == "false"
    assert {say("sim", prompt.format(f"step {n}")) for n in range(30)} == {"true", "false"}


def test_questions_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": q.question, "answer": q.answer, "category": q.category} for q in QUESTIONS]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_questions(path) == tuple(QUESTIONS)
    assert Simulator(questions=path).questions == tuple(QUESTIONS)
    path.write_text(json.dumps(rows[0]) + '\n{"question": "?"}\n')
    with pytest.raises(BadRow, match="line 2 is not a question"):
        read_questions(path)
    with pytest.raises(MissingFile):
        read_questions(tmp_path / "none.jsonl")


# Vectors.


def test_vectors_are_golden() -> None:
    got = hashed_ngrams(["", "What is 2 + 2?", "naïve 東京"], 8)

    wanted = [
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [
            0.26037782430648804,
            0.13018891215324402,
            0.9113224148750305,
            0.0,
            -0.26037782430648804,
            0.13018891215324402,
            0.0,
            0.0,
        ],
        [
            -0.588348388671875,
            -0.1961161345243454,
            -0.1961161345243454,
            -0.1961161345243454,
            0.588348388671875,
            0.3922322690486908,
            -0.1961161345243454,
            0.0,
        ],
    ]
    np.testing.assert_array_equal(got, np.array(wanted, np.float32))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=5), st.integers(2, 64))
def test_vectors_have_length_one_and_ignore_company(texts: list[str], dim: int) -> None:
    together = hashed_ngrams(texts, dim)

    assert together.shape == (len(texts), dim)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_array_equal(hashed_ngrams([text], dim)[0], row)


def test_texts_that_share_words_are_near() -> None:
    near, also, far = hashed_ngrams(
        ["What is the capital of France?", "Tell me the capital of France", "3 kilograms in grams"]
    )
    assert near @ also > 0.5 > near @ far
    with pytest.raises(ConfigError, match="dim must be at least 2, got 1"):
        hashed_ngrams(["a"], 1)


# The command.


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_command_serves_until_ctrl_c_then_prints_the_counts(form: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "Which month is first?", "answer": "January"}')
    words = ["--knee", "0:2,9:4", "--latency", "0", "--fault", "500=1", "--format", form]
    process = subprocess.Popen(
        [COMMAND, "calls", "simulate", *words, "--questions", path, "--model", "mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        url = json.loads(first)["url"] if form == "json" else first.strip()
        assert one(url, ask("hello", model="mine"))[0] == 500
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    if form == "json":
        counts = json.loads(rest)
        assert (counts["received"], counts["faults"]) == (1, {"500": 1})
    else:
        assert re.search(r"received +1\n", rest)


@pytest.mark.parametrize(
    "words", ["--knee many", "--knee 5:3", "--fault cut", "--fault boom=1", "--questions none"]
)
def test_the_command_refuses_in_one_sentence(call: Any, tmp_path: Path, words: str) -> None:
    done = call(f"calls simulate {words}", tmp_path)

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_many_connections_at_once_are_all_served() -> None:
    """In a process of its own: a thread here would share the limit of open files."""
    with Simulator(knee=1000, latency_s=0.01).running() as url:
        prompts = [f"call {n}" for n in range(1500)]
        found = statuses_and_texts(url, prompts, at_once=400)
        stats = url.stats()
    assert all(got[0].startswith(f"{prompt} -> ") for prompt, got in found.items())
    assert (stats["finished"], stats["distinct"], stats["repeated"]) == (1500, 1500, 0)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    with Simulator(latency_s=5).running(in_thread=True) as url, many(url, 3):
        until(url, received=3)
    assert threading.active_count() == before


def test_a_page_whose_name_points_here_is_not_served() -> None:
    with Simulator(latency_s=0).running(in_thread=True) as url, connected(url) as sock:
        asked = ask("Hi")
        hosts = {"127.0.0.1": 200, "localhost:80": 200, "[::1]": 200, "evil.example:80": 403}
        for host in (
            "127.0.0.1.evil.example",
            "localhost.evil.example:8",
            "",
            "127.0.0.1 x",
            "10.0.0.1",
        ):
            hosts[host] = 403
        for host, wanted in hosts.items():
            sock.sendall(asked.replace(b"Host: 127.0.0.1", b"Host: " + host.encode()))
            assert read_answer(sock)[0] == wanted, host
        sock.sendall(asked.replace(b"Host:", b"Host: evil.example\r\nhost:"))
        assert read_answer(sock)[0] == 403
        assert url.stats()["received"] == 3
