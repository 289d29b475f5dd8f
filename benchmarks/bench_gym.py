"""Gym episodes a second with 1, 16 and 64 connections, and a day of a stream in virtual time.

Server and client run on this machine, each in a process of its own, and the servers are single
processes too: where the client's CPU share is low, the server is what limits it. The policy
follows hints, so that each move is two exchanges; the second table has one that takes 50 ms for
a move, as a model would, and there connections pay.

The day is played in an event loop whose clock jumps to the next timer, against the session of
our own server without a socket. A move takes ten seconds; once an hour the server is down for a
minute, and every episode that it was in is lost. The samples go into a buffer that is full after
a few hours; from then on memory must stay where it is.
"""

import asyncio
import json
import os
import resource
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchwright.errors import NoServer
from batchwright.streaming import GymConfig, GymEpisodeStream, ReplayBuffer, ReplayBufferConfig
from batchwright.streaming.gym import GymServer, Turn
from batchwright.streaming.gym.dialects import Dialect, LineJson
from batchwright.streaming.gym.server import HELLO, Session
from common import Report, arguments

BIN = Path(sys.executable).parent
REAL = shutil.which("chuk-puzzles-server", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")

SERVERS = (
    ("batchwright gym serve", "tcp"),
    *(("chuk-puzzles-gym", transport) for transport in ("telnet", "tcp", "websocket")),
)
THINKING_S = 0.05


@contextmanager
def running(words: list[Any], port: int) -> Iterator[int]:
    """A server as a process; its port, once somebody listens there."""
    # The packages of this process must not reach a server with an environment of its own.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or words[0].parent == BIN}
    silent = subprocess.DEVNULL
    process = subprocess.Popen(words, env=environ, stdout=silent, stderr=silent)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def servers() -> Iterator[tuple[str, str, list[Any], int]]:
    """Name, transport, command line and port of each server."""
    for name, transport in SERVERS:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words: list[Any] = [BIN / "batchwright", "gym", "serve", "--port", str(port)]
        if name == "chuk-puzzles-gym":
            launcher = Path(REAL or "").with_name("server-launcher")
            words = [launcher, "chuk_puzzles_gym.server:ArcadeHandler", "--host", "127.0.0.1"]
            words += ["--port", str(port), "--transport", transport]
        yield name, transport, words, port


def rates(report: Report, connections: tuple[int, ...], episodes: int) -> None:
    """Ours and the real server, with a policy that answers at once and with one that thinks."""
    columns = ("server", "connections", "episodes/s", "moves/s", "client CPU share")
    for thinking_s in (0.0, THINKING_S):
        rows: list[list[Any]] = []
        for name, transport, words, port in servers():
            if REAL is None and name == "chuk-puzzles-gym":
                report.not_measured(name, "not installed")
                continue
            if thinking_s and transport != "tcp":
                continue
            with running(words, port):
                for count in connections:
                    # A single connection that thinks is slow, and as exact with fewer episodes.
                    share = episodes if count > 1 or not thinking_s else episodes // 8
                    got = played(port, transport, count, share, thinking_s)
                    rows.append([f"{name}, {transport}", count, *got])
        report.table(f"episodes, {1000 * thinking_s:.0f} ms of thinking a move", columns, rows)
        for name in dict.fromkeys(row[0] for row in rows if thinking_s):
            first, *_, last = [row[2] for row in rows if row[0] == name]
            what = f"{name}, thinking: gain of {connections[-1]} connections over one"
            report.target(what, last / first, least=4.0)


def played(
    port: int, transport: str, connections: int, episodes: int, thinking_s: float
) -> tuple[float, ...]:
    config = GymConfig(host="127.0.0.1", port=port, transport=transport, output_mode="normal")
    stream = GymEpisodeStream(
        config, policy=Thinking(thinking_s), num_episodes=episodes, connections=connections
    )
    wall, cpu = time.perf_counter(), time.process_time()
    moves = sum(1 for _ in stream)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert stream.status_counts["error"] + stream.status_counts["timeout"] == 0, stream.last_error
    return episodes / wall, moves / wall, cpu / wall


class Thinking:
    """A policy that follows hints, after a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def act(self, turn: Turn) -> str | None:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return await turn.hint()


class Jumping(selectors.DefaultSelector):
    """A selector that does not wait: the clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.now += timeout
        return ready


class Memory:
    """Our server's session without a socket; down in the first minute of every hour."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._session = Session(GymServer())
        self._replies: deque[str] = deque()

    async def send(self, *lines: str) -> None:
        self._replies.extend(json.dumps(self._session.reply(line)) for line in lines)

    async def receive(self) -> str:
        await asyncio.sleep(0.01)
        if self._loop.time() % 3600 < 60:
            raise NoServer("down for maintenance")
        return self._replies.popleft()

    async def unasked(self) -> str:
        return self._replies[0] if self._replies else ""

    async def close(self) -> None:
        pass


class Simulated(GymEpisodeStream):
    """A stream whose connections are in memory."""

    reconnects = 0

    async def _open(self) -> Dialect:
        self.reconnects += 1
        loop = asyncio.get_running_loop()
        if loop.time() % 3600 < 60:
            raise NoServer("down for maintenance")
        return LineJson(Memory(loop), self.config, HELLO)


def resident_mb() -> float:
    # Not the peak: the servers above were measured in this process too.
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


async def day(hours: float, connections: int) -> dict[str, Any]:
    loop, start = asyncio.get_running_loop(), time.perf_counter()
    config = GymConfig(output_mode="normal", max_retries=8)
    stream = Simulated(config, policy=Thinking(10.0), connections=connections)
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=5000))
    filled_mb, most_tasks = 0.0, 0
    async for sample in stream:
        buffer.add(sample)
        most_tasks = max(most_tasks, len(asyncio.all_tasks()))
        if not filled_mb and loop.time() > hours * 3600 / 4:
            filled_mb = resident_mb()
        if loop.time() > hours * 3600:
            break
    counts = stream.status_counts
    return {
        "virtual hours": loop.time() / 3600,
        "seconds": time.perf_counter() - start,
        "samples": stream.metrics.samples_produced,
        "in the buffer": len(buffer),
        "episodes scored": stream.metrics.episodes_completed,
        "episodes lost": counts["error"] + counts["timeout"],
        "connections tried": stream.reconnects,
        "most tasks": most_tasks,
        "resident MB after a quarter": filled_mb,
        "resident MB at the end": resident_mb(),
    }


def simulated(hours: float, connections: int) -> dict[str, Any]:
    selector = Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(day(hours, connections))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("gym", args)
    episodes = 8 if args.smoke else 32 if args.quick else 128
    rates(report, (1, 4) if args.smoke else (1, 16) if args.quick else (1, 16, 64), episodes)
    found = simulated(0.5 if args.smoke else 4.0 if args.quick else 24.0, 8)
    report.table("a day in virtual time, 8 connections", ("", "value"), found.items())
    growth = found["resident MB at the end"] - found["resident MB after a quarter"]
    report.target("MB of memory gained after the first quarter", growth, most=10.0)
    report.target("most tasks at once", found["most tasks"], most=2 * 8 + 2)
    report.close()


if __name__ == "__main__":
    main()
