"""`calls run --batch-api`: sent once, paid once at half the price, collected whatever happens."""

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.calls.batch_api import split
from batchwright.calls.simulator import Simulator
from batchwright.cli.app import main
from batchwright.lines import checked_line

MODEL = "sim"
PRICES = "--price-in 10 --price-out 20"


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def write_prompts(folder: Path, *prompts: str) -> None:
    rows = [{"id": f"row-{n}", "prompt": text} for n, text in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(folder: Path, name: str = "answers.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def line(url: str, more: str = "", output: str = "answers.jsonl") -> str:
    at = f"-i prompts.jsonl -o {output} --endpoint {url}/v1 --model {MODEL}"
    return f"calls run {at} --temperature 0 --quiet {more}"


def running(**settings: Any) -> Any:
    return Simulator(**{"latency_s": 0, "batch_s": 0, **settings}).running(in_thread=True)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_batch_gives_what_single_calls_give_at_half_the_price(call, tmp_path, api):
    write_prompts(tmp_path, *(f"question {n}" for n in range(20)), "question 3", "question 3")
    same = f"--api {api} {PRICES} --max-tokens 30 --format json"

    with running() as url:
        single = call(line(url, same, "single.jsonl"), tmp_path)
        dry = call(line(url, f"{same} --batch-api --dry-run"), tmp_path)
        full = call(line(url, f"{same} --dry-run"), tmp_path)
        assert url.stats()["uploads"] == 0
        batched = call(line(url, f"{same} --batch-api"), tmp_path)
        again = call(line(url, f"{same} --batch-api"), tmp_path)
        stats = url.stats()

    assert (single.code, batched.code, again.code) == (0, 0, 0), single.err + batched.err
    assert answers(tmp_path) == answers(tmp_path, "single.jsonl")
    assert (stats["uploads"], stats["batches"], stats["batch_requests"]) == (1, 1, 20)
    assert batched.data["cost"] == pytest.approx(single.data["cost"] / 2)
    assert dry.data["cost_most"] == pytest.approx(full.data["cost_most"] / 2)
    assert batched.data["cost"] <= dry.data["cost_most"]
    assert hidden(tmp_path) == []


def test_every_way_a_request_ends_is_an_outcome_with_its_kind(call, tmp_path):
    write_prompts(tmp_path, "fine", "break", "slow down", "silent", "strange", "stuck", "last")
    script = {"break": "500", "slow down": "429", "silent": "empty", "strange": "wrong_shape"}
    script |= {"stuck": ["hang"]}

    with running(script=script, batch_window_s=0.2) as url:
        first = call(line(url, "--batch-api --format json"), tmp_path)
        found = answers(tmp_path)
        # What failed is sent again where that is asked for, and nothing else.
        again = call(line(url, "--batch-api --retry-failed --format json"), tmp_path)
        stats = url.stats()

    assert (first.code, first.data["failed"], first.data["batches"][0]["status"]) == (
        1,
        5,
        "expired",
    )
    assert [row.get("error") for row in found] == [
        None,
        "http_5xx",
        "rate_limited",
        "empty",
        "bad_body",
        "timeout",
        None,
    ]
    assert "batch_expired" in found[5]["detail"]
    assert "--retry-failed" in first.err
    assert (stats["batches"], again.data["batches"][0]["requests"]) == (2, 5)
    assert again.data["failed"] == 4
    assert answers(tmp_path)[5]["text"]


def test_a_batch_that_the_server_refuses_is_a_failure_of_each_request(call, tmp_path):
    write_prompts(tmp_path, "one", "two")
    with running() as url:
        said = line(url, "--batch-api").replace(f"--model {MODEL}", "--model nobody")
        refused = call(said, tmp_path)
        unknown = call(line(f"{url}/elsewhere", "--batch-api", "other.jsonl"), tmp_path)

    assert refused.code == 1
    assert {row["error"] for row in answers(tmp_path)} == {"http_4xx"}
    assert "model_not_found" in answers(tmp_path)[0]["detail"]
    assert (unknown.code, unknown.err.count("\n")) == (1, 1)
    assert "404" in unknown.err


def test_batches_are_cancelled_on_request_and_the_rest_is_sent_by_the_next_run(call, tmp_path):
    write_prompts(tmp_path, *(f"question {n}" for n in range(6)))
    with running(batch_s=60) as url:
        with forked(line(url, "--batch-api"), tmp_path) as child:
            wait_for(lambda: url.stats()["batches"] == 1)
            wait_for(lambda: '"batch"' in journal(tmp_path))
            os.kill(child, signal.SIGINT)
        # Without batches these would be paid for a second time.
        plain = call(line(url), tmp_path)
        cancelled = call(line(url, "--batch-api --cancel"), tmp_path)
        nothing = call(line(url, "--batch-api --cancel", "other.jsonl"), tmp_path)
        assert url.stats()["batches"] == 1
        with forked(line(url, "--batch-api"), tmp_path) as child:
            wait_for(lambda: url.stats()["batches"] == 2)
            os.kill(child, signal.SIGKILL)
        assert url.stats()["batch_requests"] == 0

    assert (plain.code, cancelled.code, nothing.code) == (1, 1, 1)
    assert "--batch-api" in plain.err
    assert "cancelled" in cancelled.err
    assert "no batches" in nothing.err
    assert answers(tmp_path) == []


def test_a_cap_sends_only_what_it_covers_and_a_higher_one_the_rest(call, tmp_path):
    write_prompts(tmp_path, *(f"question {n}" for n in range(8)))
    asked = "--batch-api --price-in 0 --price-out 20 --max-tokens 12 --format json"

    with running(words=60) as url:
        unbounded = call(line(url, f"--batch-api {PRICES} --max-cost 1"), tmp_path)
        whole = call(line(url, f"{asked} --dry-run"), tmp_path).data["cost_most"]
        few = call(line(url, f"{asked} --max-cost {whole / 3}"), tmp_path)
        sent = url.stats()["batch_requests"]
        rest = call(line(url, f"{asked} --max-cost {whole}"), tmp_path)
        stats = url.stats()

    assert "--model-max-tokens" in unbounded.err
    assert (unbounded.code, few.code, rest.code) == (1, 1, 0), rest.err
    assert "--max-cost" in few.err
    assert sent == 2
    assert few.data["cost"] <= whole / 3
    assert (stats["batch_requests"], len(answers(tmp_path))) == (8, 8)
    assert rest.data["cost"] <= whole


def test_what_a_batch_did_not_cost_is_there_for_the_next_one(call, tmp_path):
    write_prompts(tmp_path, *(f"question {n}" for n in range(8)))
    asked = f"--batch-api {PRICES} --max-tokens 100 --format json"

    with running(words=2) as url:
        whole = call(line(url, f"{asked} --dry-run"), tmp_path).data["cost_most"]
        done = call(line(url, f"{asked} --max-cost {whole / 3}"), tmp_path)
        stats = url.stats()

    assert (done.code, stats["batch_requests"]) == (0, 8)
    assert stats["batches"] > 1
    assert done.data["cost"] <= whole / 3


def test_the_cache_serves_batches_and_batches_fill_it(call, tmp_path):
    write_prompts(tmp_path, *(f"question {n}" for n in range(5)))
    with running() as url:
        assert call(line(url, "--batch-api --cache calls.db", "one.jsonl"), tmp_path).code == 0
        write_prompts(tmp_path, *(f"question {n}" for n in range(7)))
        two = call(line(url, "--batch-api --cache calls.db --format json", "two.jsonl"), tmp_path)
        three = call(line(url, "--cache calls.db", "three.jsonl"), tmp_path)
        stats = url.stats()

    assert (two.code, three.code) == (0, 0)
    assert two.data["hits"] == 5
    assert (stats["batch_requests"], stats["started"]) == (7, 0)
    assert answers(tmp_path, "two.jsonl") == answers(tmp_path, "three.jsonl")


FOREIGN = b'{"batchwright": "calls run --batch-api", "server": "http://else/v1"}'


def test_a_journal_of_something_else_is_refused(call, tmp_path):
    write_prompts(tmp_path, "one", "two")
    journal_file = tmp_path / ".answers.jsonl.batches"
    with running() as url:
        for content, word in (
            (b"my notes\n", "not written by"),
            (checked_line(FOREIGN), "else"),
        ):
            journal_file.write_bytes(content)
            refused = call(line(url, "--batch-api"), tmp_path)
            assert (refused.code, refused.err.count("\n")) == (1, 1)
            assert word in refused.err
            assert journal_file.read_bytes() == content
        assert url.stats()["uploads"] == 0


@pytest.mark.parametrize("flag", ["--rpm 3", "--tpm 3", "--batch-size 4", "--endpoint http://b/v1"])
def test_flags_that_mean_nothing_for_batches_are_refused(call, tmp_path, flag):
    write_prompts(tmp_path, "one")

    refused = call(line("http://127.0.0.1:9", f"--batch-api {flag}"), tmp_path)

    assert refused.code == 1
    assert flag.split()[0] in refused.err


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(1, 5), st.integers(1, 30))
def test_files_hold_all_lines_in_order_within_the_limits_and_are_as_few_as_can_be(sizes, n, size):
    parts = split(sizes, n, size)

    assert [index for part in parts for index in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part) <= n
        assert len(part) == 1 or sum(sizes[index] for index in part) <= size
    # No two neighbours could be one file.
    for one, two in itertools.pairwise(parts):
        first = sizes[two.start]
        assert len(one) == n or sum(sizes[index] for index in one) + first > size


@pytest.mark.slow
def test_more_prompts_than_a_file_takes_go_in_several(call, tmp_path):
    write_prompts(tmp_path, *(f"q{n}" for n in range(50_003)))
    with running(words=1) as url:
        done = call(line(url, "--batch-api --format json"), tmp_path)
        assert done.code == 0, done.err
        assert url.stats()["batch_requests"] == 50_003

    assert [one["requests"] for one in done.data["batches"]] == [50_000, 3]
    assert answers(tmp_path)[-1]["text"].startswith("q50002")


# A run is killed before and after every single request that it makes to the server.


class Proxy:
    """Stands between a run and the simulator; `at` kills the run around its n-th request."""

    def __init__(self, url: str) -> None:
        self._host = url.removeprefix("http://").split(":")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serve = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(serve, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.seen: list[str] = []
        self.at: tuple[int, str] | None = None
        self.child: int | None = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [row for row in head.split(b"\r\n") if row.lower().startswith(b"content-l")]
                body = await reader.readexactly(int(sizes[0].split(b":")[1]) if sizes else 0)
                number = len(self.seen)
                self.seen.append(head.split(b" HTTP")[0].decode())
                self._kill(number, "before")
                theirs, sending = await asyncio.open_connection(*self._host)
                sending.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
                said = await theirs.read()
                sending.close()
                self._kill(number, "after")
                writer.write(said.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                await writer.drain()
                writer.close()
                return
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    def _kill(self, number: int, when: str) -> None:
        if self.at == (number, when) and self.child is not None:
            os.kill(self.child, signal.SIGKILL)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def forked(text: str, folder: Path, started: Callable[[int], None] | None = None) -> Iterator[int]:
    """The command in a child of this process, which is quick to start; waits for its end."""
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        code = 1
        try:
            os.chdir(folder)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            sys.argv = ["batchwright", *text.split()]
            code = main() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(code)
    if started is not None:
        started(child)
    os.write(go, b"x")
    try:
        yield child
    finally:
        os.waitpid(child, 0)
        os.close(ready)
        os.close(go)


def wait_for(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not true():
        pause.wait(0.01)


def journal(folder: Path) -> str:
    path = folder / ".answers.jsonl.batches"
    return path.read_text() if path.exists() else ""


def test_a_run_killed_around_any_request_uploads_and_pays_for_nothing_twice(tmp_path):
    moments = [(number, when) for number in range(4) for when in ("before", "after")]
    killed = []
    for number, when in moments:
        folder = tmp_path / f"{number}-{when}"
        folder.mkdir()
        write_prompts(folder, *(f"question {n}" for n in range(5)))
        with running() as url:
            proxy = Proxy(url)
            proxy.at = (number, when)

            def started(child: int, proxy: Proxy = proxy) -> None:
                proxy.child = child

            asked = line(proxy.url, f"--batch-api {PRICES} --max-tokens 20")
            try:
                with forked(asked, folder, started):
                    pass
                killed.append(len(proxy.seen) > number)
                proxy.at = None
                with forked(asked, folder):
                    pass
            finally:
                proxy.close()
            stats = url.stats()

        assert [row["id"] for row in answers(folder)] == [f"row-{n}" for n in range(5)]
        counts = (stats["uploads"], stats["batches"], stats["batch_requests"], stats["repeated"])
        assert counts == (1, 1, 5, 0), (number, when)
        assert hidden(folder) == []
    assert all(killed)
