"""Answers that were acknowledged are there whatever happens, and no other answer ever is."""

import asyncio
import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import Done, Failed, Kind, Request, Usage, chat, complete, embed
from batchwright.calls.cache.process_id import has_exited, new_owner
from batchwright.calls.cache.sqlite import filesystem
from batchwright.calls.cache.store import Cache
from batchwright.calls.cache.thread import CacheThread
from batchwright.calls.wire.openai import decode
from batchwright.cli.calls.cache import cache as app
from batchwright.errors import BadFile, CannotWrite, ConfigError, MissingFile

HELPERS = textwrap.dedent(
    """
    import os, random, signal, sys, time
    from batchwright.calls import Done, chat
    from batchwright.calls.cache import Cache

    def question(number):
        return chat("m", f"question {number}", temperature=0)

    def answer(number, pad=0):
        text = f"answer {number}" + "." * pad
        return Done(text, {"choices": [{"message": {"content": text}}]})
    """
)
space: dict[str, Any] = {}
exec(HELPERS, space)
question, answer = space["question"], space["answer"]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "calls.db") as cache:
        yield cache


def start(script: str, *arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
    """Another process with the helpers; its lines on stdout are read by `lines`."""
    return subprocess.Popen(
        [sys.executable, "-c", HELPERS + textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        **more,
    )


def ended(process: subprocess.Popen[bytes]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.decode()


def whole(path: Path) -> dict[bytes, str]:
    """Every answer in a file by its short key, read with SQLite alone after it checked itself."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = connection.execute("SELECT key, answer FROM entries").fetchall()
    return {
        key: json.loads(value)["body"]["choices"][0]["message"]["content"] for key, value in rows
    }


texts = st.text(st.characters(codec=None, categories=None), min_size=1)
bodies = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
answers = st.builds(
    Done,
    text=texts,
    body=st.dictionaries(
        st.sampled_from(["choices", "usage", "id", "system_fingerprint"]) | st.text(),
        bodies,
        max_size=4,
    ),
    finish=st.none()
    | st.sampled_from(["stop", "tool_calls"])
    | texts.filter(lambda t: t != "length"),
    usage=st.none() | st.builds(Usage, st.integers(0, 2**40), st.integers(0, 2**40)),
)


@given(st.lists(st.tuples(texts, answers), max_size=4))
@settings(max_examples=20, deadline=None)
def test_an_answer_comes_back_as_it_was_in_every_script(pairs: list[tuple[str, Done]]) -> None:
    entries = [(chat("m", prompt, temperature=0), done) for prompt, done in pairs]
    with tempfile.TemporaryDirectory() as folder:
        with Cache(f"{folder}/calls.db", cut_off="keep") as cache:
            assert cache.put_many(entries) == len(entries)
        with Cache(f"{folder}/calls.db", cut_off="keep") as again:
            found = again.get_many([request.key for request, _ in entries])
            written = again.export(f"{folder}/out.jsonl")
        lines = Path(f"{folder}/out.jsonl").read_text().splitlines()

    first: dict[bytes, Done] = {}
    for request, done in entries:
        first.setdefault(request.key, done)
    assert found.keys() == first.keys()
    for key, done in first.items():
        got = found[key]
        assert (got.text, got.body, got.finish, got.usage) == (
            done.text,
            done.body,
            done.finish,
            done.usage,
        )
        assert (got.source, got.tries, got.seconds) == ("cache", 0, 0.0)
    assert written == len(lines) == len(first)
    for line in map(json.loads, lines):
        request = Request(line["kind"], line["request"], line["draw"], line["salt"])
        assert line["key"] == request.key.hex()
        assert line["text"] == first[request.key].text
        assert line["body"] == first[request.key].body


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ('{"id": 1, "choices": [{"message": {"content": "\\u00e4 ä 🦦"}}]}', True),
        ('{\n  "choices": [\n{"message": {"content": "\\ud83d"}, "finish_reason": "stop"}]}', True),
        ('{"id": 1, "id": 2, "choices": [{"message": {"content": "a"}}], "usage": {}}', True),
        ('{"choices": [{"message": {"content": "a"}, "finish_reason": 3}], "usage": [1]}', True),
        ('{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 2.5}}', True),
        ('{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": null}}', True),
        ('{"choices": [{"message": {"content": "a"}, "logprobs": NaN}]}', False),
        ('{"choices": [{"message": {"content": "a"}, "logprobs": -Infinity}]}', False),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le"])
def test_what_a_server_sent_is_kept_as_it_was_read(
    cache: Cache, sent: str, kept: bool, encoding: str
) -> None:
    request = chat("m", "anything", temperature=0)
    done = decode(request, 200, {}, sent.encode(encoding))

    assert isinstance(done, Done)
    assert cache.put_many([(request, done)]) == kept
    if kept:
        found = cache.get_many([request.key])[request.key]
        assert (found.text, found.body, found.finish, found.usage) == (
            *(done.text, done.body, done.finish, done.usage),
        )
        assert found.raw is None


@pytest.mark.parametrize(
    ("request_", "sent"),
    [
        (
            complete("m", "a", temperature=0),
            '{"choices": [{"text": "b", "message": {"content": "c"}}]}',
        ),
        (embed("m", "a"), '{"choices": [{"text": "b"}], "data": [{"embedding": [1.0]}]}'),
    ],
)
def test_the_text_is_that_of_the_kind_of_call_also_from_the_cache(
    cache: Cache, request_: Request, sent: str
) -> None:
    done = decode(request_, 200, {}, sent.encode())

    assert isinstance(done, Done)
    assert done.text == ("b" if request_.kind == "complete" else "")
    assert cache.put_many([(request_, done)]) == 1
    assert cache.get_many([request_.key])[request_.key].text == done.text


def test_only_whole_answers_to_exact_requests_are_kept(tmp_path: Path) -> None:
    exact = chat("m", "2+2?", temperature=0)
    said = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    second_cut = {"choices": [*said["choices"], {"text": "x", "finish_reason": "length"}]}
    refused: list[tuple[Request, Done | Failed]] = [
        (exact, Failed(Kind.TIMEOUT, "no answer in 60 s")),
        (exact, Done("", {"choices": [{"message": {"content": ""}}]}, "stop")),
        (exact, Done("4", {"choices": [{"message": {"content": "4"}}]}, "length")),
        (exact, Done("4", said, "content_filter")),
        (exact, Done("4", second_cut, "stop")),
        (exact, Done("4", {"logprob": float("nan")}, "stop")),
        (exact, Done("4", {"odd": object()}, "stop")),
        (chat("m", "2+2?"), Done("4", said, "stop")),
        (embed("m", "text"), Done("", {"data": []})),
    ]
    call = {"choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}}]}
    kept: list[tuple[Request, Done]] = [
        (exact, Done("4", said, "stop")),
        (chat("m", "2+2?", draw=7), Done("4", said, "stop")),
        (chat("m", "use a tool", seed=1), Done("", call, "tool_calls")),
        (complete("m", "2+2=", temperature=0), Done("4", {"choices": [{"text": "4"}]})),
        (embed("m", "text"), Done("", {"data": [{"index": 0, "embedding": [0.5]}]})),
    ]
    with Cache(tmp_path / "calls.db", cut_off="skip") as cache:
        assert cache.put_many(refused) == 0
        assert cache.stats().entries == 0
        assert cache.put_many([*refused, *kept]) == len(kept)
        found = cache.get_many([request.key for request, _ in kept])
        assert [found[request.key].body for request, _ in kept] == [done.body for _, done in kept]
        assert found[kept[-1][0].key].vectors == [[0.5]]


def test_a_cut_off_answer_is_kept_and_marked_but_not_given_to_who_skips_them(
    tmp_path: Path,
) -> None:
    request, path = question(1), tmp_path / "calls.db"
    cut = Done(
        "ans", {"choices": [{"message": {"content": "ans"}, "finish_reason": "length"}]}, "length"
    )
    with Cache(path) as keeping, Cache(path, cut_off="skip") as skipping:
        assert skipping.put_many([(request, cut)]) == 0
        assert keeping.put_many([(request, cut)]) == 1
        found = keeping.get_many([request.key])[request.key]
        assert (found.text, found.finish, found.cut_off) == ("ans", "length", True)
        keeping.export(tmp_path / "all.jsonl")
        assert json.loads((tmp_path / "all.jsonl").read_text())["cut_off"] is True
        assert skipping.get_many([request.key]) == {}
        assert skipping.lease_many([request.key], "me", 60)
        skipping.put_many([(request, answer(1))])
        assert keeping.get_many([request.key])[request.key].text == "answer 1"


def test_the_first_answer_stays(cache: Cache) -> None:
    cache.put_many([(question(1), answer(1)), (question(1), answer(2))])
    cache.put_many([(question(1), answer(3))])

    assert cache.get_many([question(1).key])[question(1).key].text == "answer 1"


def test_many_keys_at_once_are_found_or_missed_each_for_itself(cache: Cache) -> None:
    cache.put_many([(question(n), answer(n)) for n in range(0, 1000, 2)])

    found = cache.get_many([question(n).key for n in range(1000)] * 2)

    assert {key: done.text for key, done in found.items()} == {
        question(n).key: f"answer {n}" for n in range(0, 1000, 2)
    }
    assert (cache.hits, cache.misses, cache.damaged) == (500, 500, 0)


KILLED = """
    path, log, lives = sys.argv[1], sys.argv[2], int(sys.argv[3])
    draw = random.Random(5)
    heard, told = os.pipe()

    def write(number):
        cache = Cache(path)
        os.write(told, b".")
        with open(log, "ab", buffering=0) as file:
            while True:
                numbers = range(number, number + 1 + number % 7)
                cache.put_many([(question(n), answer(n, n % 5 * 3000)) for n in numbers])
                file.write((" ".join(map(str, numbers)) + "\\n").encode())
                number = numbers.stop

    for life in range(lives):
        pid = os.fork()
        if pid == 0:
            write(life * 1_000_000)
        if life % 5:
            # Otherwise it may be killed while it opens the file.
            os.read(heard, 1)
        time.sleep(draw.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print(life, flush=True)
    """


@pytest.mark.parametrize("lives", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, lives: int) -> None:
    path, log = tmp_path / "calls.db", tmp_path / "log"
    ended(start(KILLED, path, log, lives))

    acknowledged = {int(word) for word in log.read_text().split()}
    with Cache(path) as cache:
        found = cache.get_many([question(n).key for n in acknowledged])
        assert cache.damaged == 0
    assert {question(n).key: f"answer {n}" for n in acknowledged} == {
        key: done.text.rstrip(".") for key, done in found.items()
    }
    assert len(acknowledged) > 100
    known = whole(path)
    assert all(text.startswith("answer ") for text in known.values())


def test_four_processes_write_overlapping_keys_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    script = """
        mine = int(sys.argv[2])
        with Cache(sys.argv[1]) as cache:
            for start in range(mine * 50, mine * 50 + 400, 10):
                numbers = range(start, start + 10)
                cache.get_many([question(n).key for n in numbers])
                assert cache.put_many([(question(n), answer(n)) for n in numbers]) == 10
                assert len(cache.get_many([question(n).key for n in numbers])) == 10
        """
    for process in [start(script, path, number) for number in range(4)]:
        ended(process)

    assert whole(path) == {question(n).key[:16]: f"answer {n}" for n in range(550)}
    assert not Path(f"{path}-wal").exists()


def test_processes_that_begin_a_cache_at_the_same_moment_all_get_it(tmp_path: Path) -> None:
    script = """
        folder, begin = sys.argv[1], float(sys.argv[2])
        for number in range(100):
            while time.time() < begin + number * 0.02:
                pass
            Cache(f"{folder}/{number}.db").close()
        """
    begin = time.time() + 2.0
    for process in [start(script, tmp_path, begin) for _ in range(3)]:
        ended(process)


def test_of_many_processes_one_makes_the_call(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    script = """
        calls = []
        with Cache(sys.argv[1]) as cache:
            for number in range(30):
                key = question(number).key
                while not cache.get_many([key]):
                    if cache.lease_many([key], cache.owner, 60):
                        calls.append(number)
                        time.sleep(0.002)
                        cache.put_many([(question(number), answer(number))])
                    else:
                        time.sleep(0.001)
        print(*calls)
        """
    outs = [ended(process) for process in [start(script, path) for _ in range(3)]]

    assert sorted(int(word) for out in outs for word in out.split()) == list(range(30))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["get", "put", "lease", "release", "reopen"]),
            st.sets(st.integers(0, 3), min_size=1),
        ),
        max_size=20,
    )
)
@settings(max_examples=60, deadline=None)
def test_two_connections_know_at_once_what_the_other_did(steps: list[Any]) -> None:
    held: dict[int, int] = {}
    kept: set[int] = set()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        caches = [opened.enter_context(Cache(Path(folder, "calls.db"))) for _ in range(2)]
        for who, what, numbers in steps:
            cache, keys = caches[who], {n: question(n).key for n in numbers}
            if what == "get":
                assert set(cache.get_many(list(keys.values()))) == {keys[n] for n in kept & numbers}
            elif what == "put":
                cache.put_many([(question(n), answer(n)) for n in numbers])
                kept |= numbers
                held = {n: owner for n, owner in held.items() if n not in numbers}
            elif what == "lease":
                free = {n for n in numbers - kept if held.get(n, who) == who}
                granted = cache.lease_many(list(keys.values()), cache.owner, 60)
                assert granted == {keys[n] for n in free}
                held |= dict.fromkeys(free, who)
            elif what == "release":
                cache.release(*keys.values(), owner=cache.owner)
                held = {n: o for n, o in held.items() if n not in numbers or o != who}
            else:
                cache.close()


def test_a_lease_is_for_one_owner_until_it_ends(cache: Cache) -> None:
    key, other = question(1).key, question(2).key

    assert cache.lease_many([key], "a", 60)
    assert not cache.lease_many([key], "b", 60)
    assert cache.lease_many([key], "a", 60)
    assert cache.lease_many([key, other], "b", 60) == {other}
    cache.release(key, owner="b")
    assert not cache.lease_many([key], "b", 60)
    cache.release(key, other, owner="a")
    assert cache.lease_many([key], "b", -1.0)
    assert cache.lease_many([key], "a", 60)
    cache.put_many([(question(1), answer(1))])
    assert not cache.lease_many([key], "a", 60)
    assert not cache.lease_many([key], "b", 60)


def test_leases_of_one_statement_read_the_clock_once(cache: Cache) -> None:
    """The clock is a function in Python, and each call may wait for the interpreter's lock."""
    keys = [question(n).key for n in range(100)]

    for _ in ("taken", "renewed"):
        assert cache.lease_many(keys, "a", 60) == set(keys)

        with contextlib.closing(sqlite3.connect(cache.path)) as connection:
            assert connection.execute(
                "SELECT count(*), count(DISTINCT until) FROM leases"
            ).fetchall() == [(100, 1)]


@pytest.mark.parametrize("count", [5, 300])
def test_an_answer_ends_its_lease_and_nobody_gets_another(cache: Cache, count: int) -> None:
    """By one statement for a few, by a transaction for many."""
    requests = [chat("m", f"{n}?", temperature=0) for n in range(count)]
    keys = {request.key for request in requests}
    body = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    assert cache.lease_many(list(keys), "a", 60) == keys
    assert cache.lease_many(list(keys), "a", 60) == keys
    first = requests[0]

    assert cache.put_many([(r, Done("4", body, "stop")) for r in requests[1:]]) == count - 1

    with contextlib.closing(sqlite3.connect(cache.path)) as connection:
        assert connection.execute("SELECT key FROM leases").fetchall() == [(first.key[:16],)]
    assert cache.lease_many(list(keys), "a", 60) == {first.key}


def test_the_lease_of_a_process_that_died_can_be_taken_at_once(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    process = start(
        """
        cache = Cache(sys.argv[1])
        print(len(cache.lease_many([question(1).key], cache.owner, 3600)), flush=True)
        time.sleep(60)
        """,
        path,
    )
    with process, Cache(path) as cache:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert not cache.lease_many([question(1).key], cache.owner, 60)
        # Killed and not yet waited for: its pid is still taken.
        process.kill()
        for _ in range(500):
            if cache.lease_many([question(1).key], cache.owner, 60):
                break
            time.sleep(0.01)
        else:
            pytest.fail("the lease was not given up")


def test_only_those_owners_count_as_exited_that_certainly_have() -> None:
    boot, space, pid, started, number = new_owner().split()

    assert not has_exited(f"{boot} {space} {pid} {started} {number}")
    assert has_exited(f"{boot} {space} {pid} {int(started) - 1} {number}")
    assert has_exited(f"another-boot {space} {pid} {started} {number}")
    assert not has_exited(f"{boot} pid:[1] 999999999 1 {number}")
    assert not has_exited("somebody")
    assert not has_exited("")


def test_a_fork_has_a_connection_and_an_owner_of_its_own(tmp_path: Path) -> None:
    out = ended(
        start(
            """
            import threading
            cache = Cache(sys.argv[1])
            cache.put_many([(question(0), answer(0))])
            assert cache.get_many([question(0).key])
            owner, stop = cache.owner, threading.Event()
            def busy():
                number = 10**6
                while not stop.is_set():
                    cache.put_many([(question(number), answer(number))])
                    number += 1
            thread = threading.Thread(target=busy)
            thread.start()
            children = []
            for child in range(1, 6):
                pid = os.fork()
                if pid == 0:
                    assert cache.owner != owner
                    assert cache.get_many([question(0).key])
                    # Long enough for the parent to have closed its side.
                    for n in range(20):
                        cache.put_many([(question(child * 100 + n), answer(child * 100 + n))])
                        time.sleep(0.01)
                    cache.close()
                    os._exit(0)
                children.append(pid)
            stop.set()
            thread.join()
            cache.close()
            assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
            with Cache(sys.argv[1]) as cache:
                keys = [question(c * 100 + n).key for c in range(1, 6) for n in range(20)]
                print(len(cache.get_many(keys)), cache.stats().hits)
            """,
            tmp_path / "calls.db",
        )
    )

    # One hit by each of the six, and those hundred.
    assert out.split() == ["100", "106"]


def test_threads_share_a_cache(cache: Cache) -> None:
    def work(mine: int) -> None:
        for n in range(mine * 20, mine * 20 + 40):
            cache.put_many([(question(n), answer(n))])
            assert cache.get_many([question(n).key])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert cache.stats().entries == 100
    assert cache.hits == 160


def test_damage_anywhere_is_never_a_wrong_answer(tmp_path: Path) -> None:
    source, path = tmp_path / "whole.db", tmp_path / "torn.db"
    entries = [(question(n), answer(n, n * 37 % 900)) for n in range(120)]
    with Cache(source) as cache:
        cache.put_many(entries)
    content, draw = source.read_bytes(), random.Random(11)
    right = {request.key: done.text for request, done in entries}
    seen = {"damaged": 0, "refused": 0, "missed": 0}
    for turn in range(60):
        torn = bytearray(content)
        start = draw.randrange(len(torn))
        for place in range(start, min(start + draw.choice([1, 1, 8, 512]), len(torn))):
            torn[place] ^= draw.randrange(1, 256)
        path.write_bytes(torn)
        try:
            with Cache(path) as cache:
                found = cache.get_many(list(right))
                assert all(right[key] == done.text for key, done in found.items())
                seen["damaged"] += cache.damaged > 0
                seen["missed"] += len(found) < len(right)
                cache.export(tmp_path / "out.jsonl")
                for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
                    assert right[bytes.fromhex(line["key"])] == line["text"]
                cache.stats()
                if turn % 3 == 0:
                    cache.lease_many(list(right), "me", 60)
                    cache.put_many(entries)
                    assert all(right[k] == d.text for k, d in cache.get_many(list(right)).items())
        except BadFile:
            seen["refused"] += 1
        for side in ("-wal", "-shm"):
            Path(f"{path}{side}").unlink(missing_ok=True)
    assert min(seen.values()) > 2


def test_a_damaged_answer_is_called_again_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    with Cache(path) as cache:
        cache.put_many([(question(n), answer(n)) for n in range(3)])
    path.write_bytes(path.read_bytes().replace(b"answer 1", b"answer 7"))

    with Cache(path) as cache:
        keys = [question(n).key for n in range(3)]
        assert set(cache.get_many(keys)) == {keys[0], keys[2]}
        assert (cache.damaged, cache.stats().damaged) == (1, 1)
        assert cache.lease_many(keys, "me", 60) == {keys[1]}
        cache.put_many([(question(n), answer(n)) for n in range(3)])
        assert [cache.get_many(keys)[key].text for key in keys] == [
            "answer 0",
            "answer 1",
            "answer 2",
        ]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda path: path.write_bytes(b"no database at all, but a text of some length" * 50),
            "damaged",
        ),
        (lambda path: path.write_bytes(b"short"), "damaged"),
        (lambda path: foreign(path, "CREATE TABLE mine(x)"), "not a call cache"),
        (lambda path: foreign(path, "PRAGMA application_id = 7"), "not a call cache"),
        (lambda path: (Cache(path).close(), foreign(path, "PRAGMA user_version = 1")), "format 1"),
        (lambda path: (Cache(path).close(), foreign(path, "DROP TABLE entries")), "no such table"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_not_touched(
    tmp_path: Path, spoil: Any, words: str
) -> None:
    path = tmp_path / "calls.db"
    spoil(path)
    before = path.read_bytes()

    for mode in ("use", "replay"):
        with pytest.raises(BadFile, match=words) as caught, Cache(path, mode=mode) as cache:  # type: ignore[arg-type]
            cache.get_many([question(1).key])
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def foreign(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


def test_an_empty_file_becomes_a_cache(tmp_path: Path) -> None:
    (tmp_path / "calls.db").touch()
    with Cache(tmp_path / "calls.db") as cache:
        assert cache.put_many([(question(1), answer(1))]) == 1


def test_a_folder_or_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        Cache(tmp_path)
    with pytest.raises(ConfigError, match="got 'yes'"):
        Cache(tmp_path / "calls.db", cut_off="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 'record'"):
        Cache(tmp_path / "calls.db", mode="record")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="cannot make a folder"):
        Cache(tmp_path / "file" / "calls.db")


def test_a_cassette_is_only_read_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    with pytest.raises(MissingFile, match="no call cache"):
        Cache(path, mode="replay")
    with Cache(path) as cache:
        cache.put_many([(question(1), answer(1))])
    before = path.read_bytes()

    with Cache(path, mode="replay") as cassette:
        found = cassette.get_many([question(1).key, question(2).key])
        assert [done.text for done in found.values()] == ["answer 1"]
        assert (cassette.mode, cassette.misses) == ("replay", 1)
        with pytest.raises(ConfigError, match="read-only"):
            cassette.put_many([(question(2), answer(2))])
        with pytest.raises(ConfigError, match="read-only"):
            cassette.lease_many([question(2).key], "me", 1)
        with pytest.raises(ConfigError, match="read-only"):
            cassette.prune(model="m")
        assert cassette.stats().entries == 1
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["calls.db"]


def test_a_cassette_sees_what_a_killed_writer_left_unfolded(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    process = start(
        """
        Cache(sys.argv[1]).put_many([(question(1), answer(1))])
        os.kill(os.getpid(), 9)
        """,
        path,
    )
    process.communicate()
    assert process.returncode == -signal.SIGKILL

    with Cache(path, mode="replay") as cassette:
        assert cassette.get_many([question(1).key])[question(1).key].text == "answer 1"


def test_a_read_only_folder_can_be_read_but_not_written() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.db"
        with Cache(path) as cache:
            cache.put_many([(question(1), answer(1))])
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        process = start(
            """
            from batchwright.errors import CannotWrite
            if os.getuid() == 0:
                # Root may write anywhere.
                os.seteuid(65534)
            with Cache(sys.argv[1], mode="replay") as cache:
                print(cache.get_many([question(1).key])[question(1).key].text)
            try:
                with Cache(sys.argv[1]) as cache:
                    cache.put_many([(question(2), answer(2))])
            except CannotWrite as error:
                print(error)
            """,
            path,
        )
        said, sentence = ended(process).splitlines()
        Path(folder).chmod(0o755)
    assert said == "answer 1"
    assert "read-only" in sentence


def test_a_full_disk_is_a_sentence_and_what_was_kept_can_still_be_read(tmp_path: Path) -> None:
    out = ended(
        start(
            """
            import resource
            from batchwright.errors import CannotWrite
            with Cache(sys.argv[1]) as cache:
                cache.put_many([(question(n), answer(n)) for n in range(20)])
                resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
                kept = 20
                try:
                    while True:
                        cache.put_many([(question(kept), answer(kept, 5000))])
                        kept += 1
                except CannotWrite as error:
                    print(error)
                assert len(cache.get_many([question(n).key for n in range(kept + 5)])) == kept
                assert kept > 30
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                cache.put_many([(question(kept), answer(kept))])
                assert len(cache.get_many([question(n).key for n in range(kept + 5)])) == kept + 1
            """,
            tmp_path / "calls.db",
        )
    )
    assert len(out.splitlines()) == 1
    assert str(tmp_path / "calls.db") in out


def test_a_really_full_disk_too(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        with Cache(small / "calls.db") as cache:
            kept = 0
            with contextlib.suppress(CannotWrite):
                while kept < 1000:
                    cache.put_many([(question(kept), answer(kept, 5000))])
                    kept += 1
            with pytest.raises(CannotWrite, match="no space is left"):
                cache.put_many([(question(kept), answer(kept, 50_000))])
            assert len(cache.get_many([question(n).key for n in range(kept + 5)])) == kept > 10
    finally:
        subprocess.run(["umount", small], check=True)


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:20 / /proc rw - proc proc rw
30 22 0:44 / /home rw - nfs4 server:/export/home rw,vers=4.2
31 30 0:45 / /home/me/my\040disk rw - xfs /dev/sdb1 rw
32 22 0:46 / /mnt/cloud rw - fuse.sshfs me@there: rw
33 22 0:47 / /data rw - ext4 /dev/sdc1 rw
34 33 0:48 / /data rw master:5 propagate_from:2 - lustre lustre@tcp:/x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/calls.db", "ext4"),
        ("/home/me/calls.db", "nfs4"),
        ("/homework/calls.db", "ext4"),
        ("/home/me/my disk/calls.db", "xfs"),
        ("/mnt/cloud/a/calls.db", "fuse.sshfs"),
        ("/data/calls.db", "lustre"),
    ],
)
def test_the_filesystem_of_a_path_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert filesystem(Path(path), MOUNTS) == kind


def test_this_folder_is_on_a_filesystem_that_is_told(tmp_path: Path) -> None:
    assert filesystem(tmp_path, Path("/proc/self/mountinfo").read_text()) not in ("", "proc")
    assert filesystem(Path("/proc/self"), Path("/proc/self/mountinfo").read_text()) == "proc"


def test_a_network_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = filesystem(tmp_path.resolve(), Path("/proc/self/mountinfo").read_text())
    monkeypatch.setattr("batchwright.calls.cache.sqlite.NETWORK", f"nfs {kind}")

    with pytest.raises(ConfigError, match=f"network filesystem \\({kind}\\)"):
        Cache(tmp_path / "calls.db")
    assert not (tmp_path / "calls.db").exists()


def test_pruning_removes_by_age_model_and_size(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    with Cache(path) as cache:
        for model in ("small", "large"):
            cache.put_many(
                [(chat(model, str(n), temperature=0), answer(n, 500)) for n in range(400)]
            )
        foreign(path, "UPDATE entries SET at = at - 86400 * id WHERE model = 'small'")
        with pytest.raises(ConfigError, match="an age, a size or a model"):
            cache.prune()
        assert cache.prune(older_than_s=86400 * 300.5) == 100
        assert cache.prune(older_than_s=86400 * 290.5, model="large") == 0
        assert cache.stats().models == {"large": 400, "small": 300}
        assert cache.prune(model="small") == 300
        before = cache.stats().file_bytes
        removed = cache.prune(max_bytes=before // 2)
        assert path.stat().st_size <= before // 2
        assert path.stat().st_size > before // 2 * 0.8
        # The oldest went, the newest stayed.
        keys = [chat("large", str(n), temperature=0).key for n in range(400)]
        assert set(cache.get_many(keys)) == set(keys[removed:])
        cache.prune(max_bytes=0)
        assert cache.stats().entries == 0


def test_hits_are_counted_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    for expected in (0, 2, 4):
        with Cache(path) as cache:
            assert cache.stats().hits == expected
            cache.put_many([(question(n), answer(n)) for n in range(2)])
            cache.get_many([question(n).key for n in range(3)])
            assert cache.stats().hits == expected + 2


def test_nothing_but_the_call_is_in_the_file(tmp_path: Path) -> None:
    done = Done(
        "4", {"choices": [{"message": {"content": "4"}}]}, endpoint="https://secret-host/v1"
    )
    with Cache(tmp_path / "calls.db") as cache:
        cache.put_many([(question(1), done)])
        cache.export(tmp_path / "out.jsonl")

    for path in tmp_path.iterdir():
        assert b"secret-host" not in path.read_bytes()


def test_the_commands_count_prune_and_export(tmp_path: Path, call: Callable[..., Any]) -> None:
    with Cache(tmp_path / "calls.db") as cache:
        cache.put_many([(question(n), answer(n)) for n in range(1500)])
        cache.get_many([question(1).key])

    told = call("calls cache stats calls.db --format json", tmp_path).data
    assert (told["entries"], told["models"], told["hits"]) == (1500, {"m": 1500}, 1)
    text = call("calls cache stats calls.db", tmp_path).out
    assert "1,500" in text

    out = call("calls cache export calls.db -o out.jsonl -q --format json", tmp_path)
    assert (out.code, out.data["written"], out.data["damaged"]) == (0, 1500, 0)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [f"answer {n}" for n in range(1500)]
    assert lines[3]["request"] == question(3).body

    half = told["file_bytes"] // 2
    pruned = call(f"calls cache prune calls.db --max-size {half}B --format json", tmp_path).data
    assert 0 < pruned["removed"] < 1500
    assert pruned["file_bytes"] <= half
    gone = call("calls cache prune calls.db --older-than 0s", tmp_path)
    assert f"removed {1500 - pruned['removed']:,} of" in gone.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stats none.db", "no call cache at none.db"),
        ("prune none.db --model m", "no call cache at none.db"),
        ("export none.db -o out.jsonl", "no call cache at none.db"),
        ("prune calls.db", "needs an age, a size or a model"),
        ("prune calls.db --older-than soon", "cannot parse the age 'soon'"),
        ("prune calls.db --max-size 3X", "cannot parse the size '3X'"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    tmp_path: Path, call: Callable[..., Any], line: str, words: str
) -> None:
    Cache(tmp_path / "calls.db").close()

    outcome = call(f"calls cache {line}", tmp_path)

    assert (outcome.code, outcome.out) == (1, "")
    assert words in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert app.name == ("cache",)


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=30))
def test_what_is_done_at_once_is_what_the_other_way_does(steps) -> None:
    """Leases and puts at once or not, in any order, of two owners: the same end of both files."""
    with tempfile.TemporaryDirectory() as folder:
        plain, quick = Cache(f"{folder}/plain.db"), Cache(f"{folder}/quick.db")
        with plain, quick:
            for number, puts, second in steps:
                request, owner = question(number), "b" if second else "a"
                if puts:
                    row = plain.row(request, answer(number))
                    assert row is not None
                    plain.put_rows([row])
                    if not quick.put_at_once([row]):
                        quick.put_rows([row])
                else:
                    granted = plain.lease_many([request.key], owner, 60)
                    mine = quick.lease_at_once([request.key], owner, 60)
                    assert mine <= bool(granted)
                    if not mine:
                        assert quick.lease_many([request.key], owner, 60) == granted
        found = []
        for name in ("plain", "quick"):
            with contextlib.closing(sqlite3.connect(f"{folder}/{name}.db")) as connection:
                found.append(
                    (
                        connection.execute(
                            "SELECT key, answer FROM entries ORDER BY key"
                        ).fetchall(),
                        connection.execute("SELECT key, owner FROM leases ORDER BY key").fetchall(),
                    )
                )
        assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, 2, 3, 100, 128, 129, 300])
def test_many_are_leased_and_put_at_once(cache: Cache, count: int) -> None:
    keys = [question(n).key for n in range(count)]
    rows = [row for n in range(count) if (row := cache.row(question(n), answer(n)))]
    assert cache.lease_at_once(keys, "a", 60)
    assert cache.lease_at_once(keys, "a", 60)
    assert not cache.lease_at_once(keys[-1:], "b", 60)
    assert cache.put_at_once(rows)
    assert not cache.put_at_once(rows)
    assert len(cache.get_many(keys)) == count
    assert not cache.lease_at_once(keys[:1], "b", 60)


def test_at_once_nobody_waits_for_the_lock_of_somebody_else(cache: Cache) -> None:
    row = cache.row(question(1), answer(1))
    assert row is not None
    with contextlib.closing(sqlite3.connect(cache.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        assert not cache.put_at_once([row])
        assert not cache.lease_at_once([question(2).key], "a", 60)
        assert time.monotonic() - begun < 5
        other.execute("ROLLBACK")
    assert cache.put_at_once([row])
    assert cache.lease_at_once([question(2).key], "a", 60)
    assert cache.get_many([question(1).key])


def test_what_is_put_at_once_does_not_let_the_log_grow(tmp_path: Path) -> None:
    async def put_all() -> None:
        thread = CacheThread(cache, asyncio.get_running_loop())
        for start in range(0, 12_000, 100):
            rows = [cache.row(question(n), answer(n)) for n in range(start, start + 100)]
            await thread.put([row for row in rows if row is not None], [])
        await thread.close(close_store=False)

    with Cache(tmp_path / "calls.db") as cache:
        asyncio.run(put_all())
        # Without a pause between the groups, and so with none in which the log could be emptied.
        assert Path(f"{cache.path}-wal").stat().st_size < 16 * 2**20
        assert len(cache.get_many([question(n).key for n in range(12_000)])) == 12_000


def test_a_cache_opens_while_somebody_holds_the_file_and_waits_for_it(tmp_path: Path) -> None:
    with Cache(tmp_path / "calls.db") as first:
        first.put_many([(question(1), answer(1))])
    other = sqlite3.connect(tmp_path / "calls.db", isolation_level=None, check_same_thread=False)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.5, other.close)
    timer.start()
    try:
        with Cache(tmp_path / "calls.db") as second:
            assert second.get_many([question(1).key])
            row = second.row(question(2), answer(2))
            assert row is not None
            assert second.put_at_once([row]) or second.put_rows([row]) == 1
    finally:
        timer.join()
