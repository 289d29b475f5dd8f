"""A running simulator: a server in a process of its own, in a thread, or a plain function."""

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.calls.request import Request
from batchwright.calls.simulator.answers import Models
from batchwright.calls.simulator.behaviour import Behaviour
from batchwright.errors import BatchwrightError, NoServer

__all__ = ["RunningSimulator", "Simulator", "running"]


class RunningSimulator(str):
    """The address of a running simulator, with its counts."""

    pid: int | None = None
    """Its process, if it has one of its own."""
    unix: str | None = None

    def stats(self, calls: bool = False) -> dict[str, Any]:
        """The counts since the start or the last reset; with `calls`, of every request too."""
        return self._post(f"/simulator/stats{'?calls=1' if calls else ''}")

    def reset(self) -> dict[str, Any]:
        """Reset the counts, and how often each request was seen."""
        return self._post("/simulator/reset")

    def _post(self, path: str) -> dict[str, Any]:
        if self.unix is None:
            connection = http.client.HTTPConnection(self.removeprefix("http://"), timeout=60)
        else:
            connection = http.client.HTTPConnection("localhost", timeout=60)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.unix)
        try:
            connection.request("POST", path)
            body: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator(Behaviour):
    """A model server of known behaviour; `Behaviour` has the settings."""

    @contextmanager
    def running(
        self, *, port: int = 0, unix: Path | None = None, in_thread: bool = False
    ) -> Iterator[RunningSimulator]:
        """Serve until the block ends, in a process of its own unless `in_thread`."""
        with running(self, port=port, unix=unix, in_thread=in_thread) as url:
            yield url

    def in_process(self) -> Callable[[Sequence[Request]], list[dict[str, Any]]]:
        """The models as a plain function of requests: no server, no latency, no faults."""
        return Models(self).respond_all


@contextmanager
def running(
    behaviour: Behaviour, *, port: int = 0, unix: Path | None = None, in_thread: bool = False
) -> Iterator[RunningSimulator]:
    """Serve on 127.0.0.1 until the block ends; port 0 takes a free one, `unix` a socket file.

    The server runs in a process of its own, so that a benchmark does not share an interpreter
    with it; it ends when this process does, however that happens.
    """
    if in_thread:
        with _in_thread(behaviour, port, unix) as url:
            yield url
        return
    code = "from batchwright.calls.simulator.server import child; child()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            place = {"port": port, "unix": None if unix is None else str(unix)}
            process.stdin.write(f"{behaviour.to_json()}\n{json.dumps(place)}\n")
            process.stdin.flush()
            line = process.stdout.readline().strip()
            if not line.startswith(("http:", "unix:")):
                raise NoServer(line or "the simulator's process exited before it could serve")
            url = _address(line)
            url.pid = process.pid
            yield url
        finally:
            # It may have exited already: tests kill it.
            process.kill()


@contextmanager
def _in_thread(behaviour: Behaviour, port: int, unix: Path | None) -> Iterator[RunningSimulator]:
    from batchwright.calls.simulator.server import Server

    server = Server(behaviour)
    ready = threading.Event()
    result: list[str | BatchwrightError] = []

    def started(url: str) -> None:
        result.append(url)
        ready.set()

    def serve() -> None:
        try:
            server.run(port, unix, started)
        except BatchwrightError as error:
            result.append(error)
            ready.set()

    thread = threading.Thread(target=serve, name="simulator", daemon=True)
    thread.start()
    ready.wait()
    if isinstance(result[0], BatchwrightError):
        raise result[0]
    try:
        yield _address(result[0])
    finally:
        server.stop()
        thread.join()


def _address(text: str) -> RunningSimulator:
    url = RunningSimulator(text)
    if text.startswith("unix://"):
        url.unix = text.removeprefix("unix://")
    return url
