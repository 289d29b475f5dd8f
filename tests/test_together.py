"""Several processes on one cache or one output; clocks that jump and locks that stay."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Cache, Done, Pool, chat
from batchwright.calls import pool as pool_module
from batchwright.calls.cache import process_id, store
from raw_server import RawServer, Seen

COMMAND = Path(sys.executable).parent / "batchwright"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_API_KEY", "http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def question(number: int):
    return chat("m", f"question {number}", temperature=0)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_neither_grants_a_lease_twice_nor_keeps_one(
    jump_s, tmp_path, monkeypatch
):
    now = time.time
    with Cache(tmp_path / "calls.db") as cache:
        keys = [question(1).key, question(2).key]
        assert cache.lease_many(keys, "a", 60) == set(keys)
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        assert cache.lease_many(keys, "b", 60) == set()
        # A lease that ended is granted at once, whatever the clock says.
        assert cache.lease_many(keys[:1], "a", -0.001) == {keys[0]}
        assert cache.lease_many(keys, "b", 60) == {keys[0]}
        cache.prune(max_bytes=2**40)
        assert cache.lease_many(keys, "c", 60) == set()


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_neither_empties_nor_stops_a_rate_limit(jump_s, monkeypatch):
    now, sent = time.time, []

    async def answer(seen: Seen) -> None:
        sent.append(time.monotonic())
        if len(sent) == 5:
            monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        await seen.answer()

    per_s, burst = 20, 20
    began = time.monotonic()
    with RawServer(answer) as server:
        with Pool(server.url, rpm=60 * per_s, remember=False) as pool:
            assert all(isinstance(one, Done) for one in pool.map([question(n) for n in range(10)]))
        # Another that shares the limit, and begins after the jump.
        with Pool(server.url, rpm=60 * per_s, remember=False) as pool:
            more = [question(n) for n in range(10, 40)]
            assert all(isinstance(one, Done) for one in pool.map(more))
    assert len(sent) == 40
    # No more than the rate and one burst: a bucket that the jump had filled would let 40 through.
    assert sent[-1] - began >= 0.99 * (len(sent) - burst) / per_s


def test_a_lease_of_another_clock_is_none(tmp_path):
    with Cache(tmp_path / "calls.db") as cache:
        key = question(1).key
        assert cache.lease_many([key], "a", 2 * store.MOST_LEASE_S)
        assert cache.lease_many([key], "b", 60) == {key}


def test_a_process_that_cannot_be_looked_at_has_not_exited(monkeypatch):
    owner = process_id.new_owner()
    assert not process_id.has_exited(owner)

    def refused(*_: object, **__: object) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refused)
    assert not process_id.has_exited(owner)
    boot, space, _, started, number = owner.split()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert process_id.has_exited(f"{boot} {space} {gone.pid} {started} {number}")


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_cache_that_another_process_has_locked_does_not_hold_the_calls(
    lock, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(pool_module, "LOCKED_S", 0.2)
    path = tmp_path / "calls.db"
    Cache(path).close()

    async def quick(seen: Seen) -> None:
        await seen.answer()

    other = sqlite3.connect(path, isolation_level=None)
    with RawServer(quick) as server:
        other.execute(lock)
        begun = time.monotonic()
        with Pool(server.url, limit=4, deadline_s=4.0, cache=path) as pool:
            first = pool.map(question(i) for i in range(30))
            errors = pool.stats()["cache_errors"]
            other.execute("ROLLBACK")
            # Two waits of a minute before this was bounded, and one for each group of calls.
            assert time.monotonic() - begun < 60
            time.sleep(2.1)
            second = pool.map(question(i) for i in range(30, 40))
        assert all(isinstance(one, Done) for one in (*first, *second))
        assert errors > 0
        assert "responses are not cached" in caplog.text
        with Pool(server.url, limit=4, cache=path) as pool:
            pool.map(question(i) for i in range(30, 40))
            assert pool.stats()["hits"] == 10
    other.close()


def run(folder: Path, url: str, name: str, *more: str) -> subprocess.Popen[str]:
    words = ["calls", "run", "-i", "prompts.jsonl", "-o", name, "--endpoint", url, "--model", "m"]
    return subprocess.Popen(
        [COMMAND, *words, "--temperature", "0", "-q", "--format", "json", *more],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def prompts(folder: Path, count: int) -> None:
    rows = [json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(count)]
    (folder / "prompts.jsonl").write_text("".join(rows))


def test_four_commands_on_one_cache_pay_every_prompt_once_and_say_what_they_hedge(tmp_path):
    """A straggler that is sent again is the one way to pay twice, and it is counted."""
    prompts(tmp_path, 120)

    async def straggling(seen: Seen) -> None:
        if seen.text == "question 119" and not seen.before:
            await asyncio.sleep(3.0)
        await asyncio.sleep(0.005)
        await seen.answer()

    cache = ("--cache", "cache.db", "--batch-size", "8")
    with RawServer(straggling) as server:
        commands = [run(tmp_path, server.url, f"{i}.jsonl", *cache) for i in range(4)]
        found = [json.loads(command.communicate()[0]) for command in commands]
        paid = Counter(seen.text for seen in server.seen)
    assert [command.returncode for command in commands] == [0] * 4
    hedges = sum(one["calls"]["hedges"] for one in found)
    assert sum(paid.values()) == 120 + hedges == sum(one["calls"]["sent"] for one in found)
    assert len(paid) == 120
    assert len({(tmp_path / f"{i}.jsonl").read_text() for i in range(4)}) == 1


@pytest.mark.slow
def test_no_hedge_pays_a_straggler_once(tmp_path):
    prompts(tmp_path, 60)

    async def straggling(seen: Seen) -> None:
        if seen.text == "question 59" and not seen.before:
            await asyncio.sleep(2.0)
        await seen.answer()

    for flags, most in (((), 61), (("--no-hedge",), 60)):
        with RawServer(straggling) as server:
            command = run(tmp_path, server.url, f"{most}.jsonl", "--batch-size", "8", *flags)
            found = json.loads(command.communicate()[0])
            assert len(server.seen) == 60 + found["calls"]["hedges"] <= most + 2 * (most == 61)
    assert found["calls"]["hedges"] == 0


def test_two_commands_on_one_output_are_not_both_let_in(tmp_path):
    prompts(tmp_path, 3)
    release = threading.Event()

    async def held(seen: Seen) -> None:
        await asyncio.to_thread(release.wait)
        await seen.answer()

    with RawServer(held) as server:
        first = run(tmp_path, server.url, "out.jsonl")
        while not server.seen:
            time.sleep(0.01)
        second = run(tmp_path, server.url, "out.jsonl")
        _, error = second.communicate()
        release.set()
        first.communicate()
        asked = Counter(seen.text for seen in server.seen)
    assert (first.returncode, second.returncode) == (0, 1)
    assert "another process is writing out.jsonl" in error
    assert set(asked.values()) == {1}
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_half_a_character_in_an_answer_is_written_as_json_that_anybody_reads(tmp_path, call):
    async def broken(seen: Seen) -> None:
        await seen.answer("a \ud800 b")

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    with RawServer(broken) as server:
        line = f"calls run -i prompts.jsonl -o out.jsonl -e {server.url} -m m -q"
        for _ in range(2):
            assert call(line, tmp_path).code == 0
    rows = [json.loads(row) for row in (tmp_path / "out.jsonl").read_bytes().decode().splitlines()]
    assert [row["text"] for row in rows] == ["a \ud800 b"] * 2
