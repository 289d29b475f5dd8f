"""Whatever a server or a disk does: one typed outcome a request, in order and in time."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Done, Endpoint, ErrorBudget, Failed, Kind, Pool, chat
from batchwright.calls.cache.store import Cache
from batchwright.errors import BatchwrightError, BudgetExceeded
from raw_server import RawServer, Seen, answer, reply

DEADLINE_S = 3.0


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def questions(n: int, **parameters):
    return [chat("m", f"question {i} of the test", temperature=0, **parameters) for i in range(n)]


def made(pool: Pool, requests) -> list:
    """The outcomes, after everything that holds of any of them was checked."""
    start = time.monotonic()
    outcomes = pool.map(requests)
    assert len(outcomes) == len(requests)
    # Twice the deadline: once for what was sent, once for what never could be. The minute on top
    # is what a busy machine may add; without deadlines this would never end.
    assert time.monotonic() - start < 2 * DEADLINE_S + 60
    for request, outcome in zip(requests, outcomes, strict=True):
        asked = request.body["messages"][0]["content"]
        if isinstance(outcome, Done):
            assert outcome.text == f"re: {asked}"
        else:
            assert isinstance(outcome, Failed)
            assert outcome.error
            assert "\n" not in outcome.error
            assert asked not in outcome.error
    # A try that was given up is let go of by the loop in a moment.
    while (stats := pool.stats())["in_flight"] and time.monotonic() - start < 120:
        time.sleep(0.01)
    assert stats["in_flight"] == stats["queued"] == 0
    assert stats["asked"] == stats["done"] + stats["failed"]
    return outcomes


def pool_of(*targets, **settings) -> Pool:
    return Pool(*targets, **{"limit": 8, "deadline_s": DEADLINE_S, "hedge": False, **settings})


def kinds(outcomes) -> Counter:
    return Counter("done" if outcome else str(outcome.kind) for outcome in outcomes)


def closed_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_refused_connection_is_unreachable_for_all_within_the_deadline():
    with pool_of(f"http://127.0.0.1:{closed_port()}/v1", deadline_s=1.0) as pool:
        outcomes = made(pool, questions(40))

    assert kinds(outcomes) == {"unreachable": 40}
    assert any("refused" in outcome.error.lower() for outcome in outcomes)


def test_a_name_that_does_not_resolve_is_unreachable():
    with pool_of("http://no-such-host.invalid:8000/v1", tries=2, deadline_s=2.0) as pool:
        outcomes = made(pool, questions(3))

    assert kinds(outcomes) == {"unreachable": 3}


def test_429_costs_time_but_no_tries_and_the_server_is_left_alone_while_it_asks_for_it():
    times: list[float] = []

    async def handler(seen: Seen) -> None:
        times.append(time.monotonic())
        if len(times) <= 8:
            await seen.reply(429, {"error": {"message": "slow down"}}, Retry_After="0.4")
        else:
            await seen.answer()

    with RawServer(handler) as server, pool_of(server.url, tries=1) as pool:
        outcomes = made(pool, questions(8))
        stats = pool.stats()

    assert kinds(outcomes) == {"done": 8}
    assert times[8] - times[7] >= 0.35
    assert stats["rejects"] == 8


def test_429_without_retry_after_is_waited_for_with_growing_pauses():
    async def handler(seen: Seen) -> None:
        await (seen.reply(429) if seen.before < 4 else seen.answer())

    with RawServer(handler) as server, pool_of(server.url, tries=1) as pool:
        outcomes = made(pool, questions(5))

    assert kinds(outcomes) == {"done": 5}
    assert {outcome.tries for outcome in outcomes} == {5}


def test_endless_429_ends_as_rate_limited_within_the_deadline():
    async def handler(seen: Seen) -> None:
        await seen.reply(429, {"error": {"message": "no"}})

    with RawServer(handler) as server, pool_of(server.url, deadline_s=0.8) as pool:
        outcomes = made(pool, questions(20))

    assert kinds(outcomes) == {"rate_limited": 20}


def test_an_account_without_money_is_not_asked_again():
    async def handler(seen: Seen) -> None:
        await seen.reply(429, {"error": {"message": "no", "code": "insufficient_quota"}})

    with RawServer(handler) as server, pool_of(server.url) as pool:
        outcomes = made(pool, questions(2))
        assert len(server.seen) == 2

    assert kinds(outcomes) == {"http_4xx": 2}


def test_a_burst_of_500_is_waited_out():
    async def handler(seen: Seen) -> None:
        await (seen.reply(500, b"oops") if seen.before < 2 else seen.answer())

    with RawServer(handler) as server, pool_of(server.url) as pool:
        outcomes = made(pool, questions(20))
        stats = pool.stats()

    assert kinds(outcomes) == {"done": 20}
    assert stats["sent"] == 60
    assert stats["retries"] == 40


def test_a_hanging_server_times_out_and_nobody_else_waits_for_it():
    async def handler(seen: Seen) -> None:
        if "question 3 " in seen.text:
            await asyncio.sleep(60)
        await seen.answer()

    with RawServer(handler) as server, pool_of(server.url, deadline_s=0.6) as pool:
        outcomes = made(pool, questions(20))

    assert kinds(outcomes) == {"done": 19, "timeout": 1}
    assert outcomes[3].kind is Kind.TIMEOUT
    assert outcomes[3].seconds > 0.5


async def _cut(seen: Seen) -> None:
    whole = reply(body=answer(f"re: {seen.text}"))
    await seen.send(whole[: len(whole) - 40])
    seen.writer.close()


async def _reset_inside(seen: Seen) -> None:
    await seen.send(reply(body=answer("x" * 500))[:200])
    await asyncio.sleep(0.01)
    seen.reset()


async def _reset_before(seen: Seen) -> None:
    seen.reset()


async def _drip(seen: Seen) -> None:
    for byte in reply(body=answer(f"re: {seen.text}")):
        await seen.send(bytes([byte]))
        await asyncio.sleep(0.1)


def _says(body, **headers):
    async def handler(seen: Seen) -> None:
        await seen.reply(body=body, **headers)

    return handler


FAULTS = {
    "cut body": (_cut, Kind.TRUNCATED),
    "reset mid-body": (_reset_inside, Kind.TRUNCATED),
    "reset before the answer": (_reset_before, Kind.UNREACHABLE),
    "HTML with 200": (_says(b"<html>sign in</html>", Content_Type="text/html"), Kind.BAD_BODY),
    "bad JSON": (_says(b'{"choices": [{"mess'), Kind.BAD_BODY),
    "no body": (_says(b" "), Kind.BAD_BODY),
    "not UTF-8": (_says(b'{"choices": "\xff\xfe"}'), Kind.BAD_BODY),
    "empty content": (_says(answer("")), Kind.EMPTY),
    "only spaces": (_says(answer(" \n ")), Kind.EMPTY),
    "null content": (_says(answer(None)), Kind.EMPTY),
    "another shape": (_says({"answer": "4"}), Kind.BAD_BODY),
    "a list": (_says([1, 2]), Kind.BAD_BODY),
    "content of another type": (_says(answer({"a": 1})), Kind.BAD_BODY),
    "no choices": (_says({"choices": []}), Kind.BAD_BODY),
    "an error with 200": (_says({"error": {"message": "out of memory"}}), Kind.BAD_BODY),
    "slow drip": (_drip, Kind.TIMEOUT),
    "404": (lambda seen: seen.reply(404, {"error": {"message": "no model"}}), Kind.HTTP_4XX),
    "401": (lambda seen: seen.reply(401, {"error": {"message": "who?"}}), Kind.HTTP_4XX),
    "500": (lambda seen: seen.reply(500, b"oops"), Kind.HTTP_5XX),
    "503": (lambda seen: seen.reply(503, b"no backend"), Kind.HTTP_5XX),
    "redirect": (lambda seen: seen.reply(302, b"", Location="http://x/"), Kind.HTTP_4XX),
    "not HTTP": (lambda seen: seen.send(b"SSH-2.0-OpenSSH_9\r\n\r\n"), Kind.BAD_BODY),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_one_call_has_its_kind_and_spares_the_others(fault):
    spoil, kind = FAULTS[fault]

    async def handler(seen: Seen) -> None:
        await (spoil(seen) if "question 4 " in seen.text else seen.answer())

    with RawServer(handler) as server, pool_of(server.url, deadline_s=1.0, tries=2) as pool:
        outcomes = made(pool, questions(9))

    assert kinds(outcomes) == {"done": 8, str(kind): 1}
    assert outcomes[4].kind is kind


def test_passing_faults_of_every_kind_are_healed_by_trying_again():
    passing = ["cut body", "reset mid-body", "reset before the answer", "HTML with 200", "bad JSON"]
    spoils = [FAULTS[name][0] for name in [*passing, "empty content", "500", "503"]]

    async def handler(seen: Seen) -> None:
        if seen.before == 0:
            await spoils[int(seen.text.split()[1]) % len(spoils)](seen)
        else:
            await seen.answer()

    with RawServer(handler) as server, pool_of(server.url) as pool:
        outcomes = made(pool, questions(3 * len(spoils)))

    assert kinds(outcomes) == {"done": 3 * len(spoils)}


def test_a_server_that_is_killed_and_comes_back_loses_nothing_and_keeps_the_order():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.02)
        await seen.answer()

    first = RawServer(handler)
    second = None
    with first, pool_of(first.url, deadline_s=8.0) as pool:
        requests = questions(60)
        results: list = [None] * 60
        for done, (index, outcome) in enumerate(pool.stream(requests)):
            results[index] = outcome
            if done == 10:
                first._do(first._stop())
                second = RawServer(handler, port=first.port)
                # It comes back while the calls are under way.
                pool._background.loop.call_soon_threadsafe(
                    pool._background.loop.call_later, 0.5, second.__enter__
                )
    assert second is not None
    second.__exit__()

    assert kinds(results) == {"done": 60}
    assert [r.text for r in results] == [f"re: question {i} of the test" for i in range(60)]


def test_a_dead_endpoint_is_set_aside_and_the_other_one_does_the_work():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.002)
        await seen.answer()

    with (
        RawServer(handler) as server,
        pool_of(server.url, f"http://127.0.0.1:{closed_port()}/v1") as pool,
    ):
        outcomes = made(pool, questions(200))
        dead = pool.stats()["endpoints"][1]

    assert kinds(outcomes) == {"done": 200}
    assert {outcome.endpoint for outcome in outcomes} == {server.url}
    assert dead["set_aside"]
    assert len(server.seen) == 200


def test_the_load_is_shared_by_healthy_endpoints():
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.01)
        await seen.answer()

    with RawServer(handler) as one, RawServer(handler) as two, pool_of(one.url, two.url) as pool:
        outcomes = made(pool, questions(80))

    assert kinds(outcomes) == {"done": 80}
    assert min(len(one.seen), len(two.seen)) >= 20
    assert max(one.most_open, two.most_open) <= 8


def test_keys_go_to_the_server_and_nowhere_else(monkeypatch, tmp_path, caplog):
    key = "sk-secret-0123456789abcdef"
    monkeypatch.setenv("JUDGE_KEY", key)

    async def handler(seen: Seen) -> None:
        said = f"bad key {seen.headers['authorization']} for {seen.text}"
        if "question 0 " in seen.text:
            await seen.answer()
        elif "question 1 " in seen.text:
            await seen.reply(401, {"error": {"message": said}})
        else:
            await seen.reply(500, said.encode())

    from batchwright.events import EventLog

    path = tmp_path / "calls.db"
    with (
        RawServer(handler) as server,
        EventLog(tmp_path / "events.jsonl") as events,
        pool_of(
            Endpoint(server.url, key_env="JUDGE_KEY"), cache=path, events=events, tries=1
        ) as pool,
    ):
        outcomes = made(pool, questions(3))
        shown = repr(pool) + repr(outcomes) + json.dumps(pool.stats()) + caplog.text
        assert {seen.headers["authorization"] for seen in server.seen} == {f"Bearer {key}"}

    assert kinds(outcomes) == {"done": 1, "http_4xx": 1, "http_5xx": 1}
    assert key not in shown
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert key.encode() not in file.read_bytes()


def test_too_many_failures_stop_the_run_with_a_table_of_kinds():
    async def handler(seen: Seen) -> None:
        bad = int(seen.text.split()[1]) % 5 == 4 if "question" in seen.text else False
        await (seen.reply(404) if bad else seen.answer())

    with (
        RawServer(handler) as server,
        pool_of(server.url, budget=ErrorBudget(0.1, window=20), limit=2) as pool,
    ):
        with pytest.raises(
            BudgetExceeded, match=r"3 of the last \d+ calls failed, 2 allowed: 3 htt"
        ):
            pool.map(questions(500))
        assert len(server.seen) < 100
        # The pool itself goes on.
        assert pool.map([chat("m", "one more")])[0]


def test_a_full_disk_costs_no_answers(tmp_path, caplog):
    async def handler(seen: Seen) -> None:
        await seen.answer()

    class Tight(Cache):
        """A cache whose file may not grow: what SQLite then raises is what a full disk does."""

        def put_rows(self, rows):
            self.tighten(self._database)
            return super().put_rows(rows)

        def put_at_once(self, rows):
            self.tighten(self._at_once)
            return super().put_at_once(rows)

        def tighten(self, database):
            with database.reading() as connection:
                pages = connection.execute("PRAGMA page_count").fetchone()[0]
                connection.execute(f"PRAGMA max_page_count = {pages}")

    with Tight(tmp_path / "calls.db") as cache, RawServer(handler) as server:
        with pool_of(server.url, cache=cache) as pool:
            outcomes = made(pool, questions(300))
            assert pool.stats()["cache_errors"] > 0

        assert kinds(outcomes) == {"done": 300}
        assert len(server.seen) == 300
    assert len([r for r in caplog.records if "no space is left" in r.message]) == 1


LIMITED = """
import resource, sys
from batchwright.calls import Pool, chat
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Pool(sys.argv[1], limit=8, cache=sys.argv[2], remember=False) as pool:
    outcomes = pool.map([chat("m", f"q{i} " + "long " * 200, temperature=0) for i in range(300)])
    print(sum(map(bool, outcomes)), pool.stats()["cache_errors"] > 0)
"""


def test_a_file_that_may_not_grow_costs_no_answers_either(tmp_path):
    async def handler(seen: Seen) -> None:
        await seen.answer()

    with RawServer(handler) as server:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, server.url, tmp_path / "calls.db"],
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert done.stdout.split() == ["300", "True"], done.stderr


def test_a_damaged_cache_is_an_error_and_not_a_hang(tmp_path):
    (tmp_path / "calls.db").write_bytes(b"no database" * 1000)

    with pytest.raises(BatchwrightError, match=r"calls\.db"):
        pool_of("http://127.0.0.1:1/v1", cache=tmp_path / "calls.db")


TWIN = """
import sys
from batchwright.calls import Pool, chat
requests = [chat("m", f"question {i}", temperature=0) for i in range(150)]
with Pool(sys.argv[1], limit=8, cache=sys.argv[2], remember=False, hedge=False) as pool:
    outcomes = pool.map(requests)
    assert [o.text for o in outcomes] == [f"re: question {i}" for i in range(150)]
    print(pool.stats()["sent"])
"""


def test_two_processes_with_one_cache_make_every_call_once(tmp_path):
    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.01)
        await seen.answer()

    with RawServer(handler) as server:
        command = [sys.executable, "-c", TWIN, server.url, tmp_path / "calls.db"]
        twins = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        sent = [int(twin.communicate(timeout=60)[0]) for twin in twins]

        assert [twin.returncode for twin in twins] == [0, 0, 0]
        assert sum(sent) == len(server.seen) == 150
        assert set(server.counts.values()) == {1}


KILLED = """
import os, random, signal, sys, time
from batchwright.calls import Pool, chat
import batchwright.calls.wire.http

url, cache, log, n, kills = sys.argv[1:4] + [int(a) for a in sys.argv[4:6]]
draw = random.Random(7)

def child():
    requests = [chat("m", f"question {i}", temperature=0) for i in range(n)]
    with open(log, "ab", buffering=0) as file:
        pool = Pool(url, limit=8, cache=cache, remember=False, hedge=False)
        for index, outcome in pool.stream(requests):
            # What the caller has seen is written before anything else can happen.
            file.write(f"{index} {outcome.text}\\n".encode())
        pool.close()
    os._exit(0)

for round in range(kills + 1):
    pid = os.fork()
    if pid == 0:
        child()
    if round < kills:
        time.sleep(draw.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
    code = os.waitpid(pid, 0)[1]
sys.exit(os.waitstatus_to_exitcode(code))
"""


def killed_often(tmp_path: Path, n: int, kills: int) -> None:
    """Kill a client again and again; nothing that it was given may be paid for a second time."""
    acknowledged: Counter[str] = Counter()
    log = tmp_path / "log"
    log.touch()

    async def handler(seen: Seen) -> None:
        given = log.read_text()
        if f" re: {seen.text}\n" in given:
            acknowledged[seen.text] += 1
        await asyncio.sleep(0.005)
        await seen.answer()

    with RawServer(handler) as server:
        paths = [server.url, str(tmp_path / "calls.db"), str(log)]
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *paths, str(n), str(kills)],
            capture_output=True,
            text=True,
            timeout=600,
        )

    assert done.returncode == 0, done.stderr
    assert acknowledged == {}
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert all(text == f"re: question {index}" for index, text in lines)
    assert {int(index) for index, _ in lines} == set(range(n))
    with sqlite3.connect(tmp_path / "calls.db") as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    file.close()


@pytest.mark.slow
def test_a_client_killed_fifty_times_pays_nothing_twice_that_it_was_given(tmp_path):
    killed_often(tmp_path, n=400, kills=50)


@pytest.mark.slow
def test_a_client_killed_five_hundred_times_pays_nothing_twice(tmp_path):
    killed_often(tmp_path, n=4000, kills=500)
