"""A simulator at an address: in a process of its own, or in a thread of this one."""

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchwright.calls.simulator.behaviour import Simulator
from batchwright.errors import BatchwrightError, NoServer

__all__ = ["RunningSimulator", "running"]


class RunningSimulator(str):
    """The address of a running simulator, which can also be asked what happened there."""

    pid: int | None = None
    """Its process, if it has one of its own."""
    unix: str | None = None

    def stats(self, calls: bool = False) -> dict[str, Any]:
        """The counts since the start or the last reset; with `calls`, of every request too."""
        return self._ask(f"/simulator/stats{'?calls=1' if calls else ''}")

    def reset(self) -> dict[str, Any]:
        """Forget what was counted, and how often each request was seen."""
        return self._ask("/simulator/reset")

    def _ask(self, path: str) -> dict[str, Any]:
        if self.unix is None:
            connection = http.client.HTTPConnection(self.removeprefix("http://"), timeout=60)
        else:
            connection = http.client.HTTPConnection("localhost", timeout=60)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.unix)
        try:
            connection.request("POST", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer


@contextmanager
def running(
    simulator: Simulator, *, port: int = 0, unix: Path | None = None, in_thread: bool = False
) -> Iterator[RunningSimulator]:
    """Serve on 127.0.0.1 until the block ends; port 0 takes a free one, `unix` a socket file.

    The server runs in a process of its own, so that a benchmark does not share an interpreter
    with it; it ends when this process does, however that happens.
    """
    if in_thread:
        with _in_thread(simulator, port, unix) as url:
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
            process.stdin.write(f"{simulator.to_json()}\n{json.dumps(place)}\n")
            process.stdin.flush()
            said = process.stdout.readline().strip()
            if not said.startswith(("http:", "unix:")):
                raise NoServer(said or "the simulator's process ended before it could serve")
            url = _address(said)
            url.pid = process.pid
            yield url
        finally:
            # It may be dead already: tests kill it.
            process.kill()


@contextmanager
def _in_thread(simulator: Simulator, port: int, unix: Path | None) -> Iterator[RunningSimulator]:
    from batchwright.calls.simulator.server import Server

    server = Server(simulator)
    ready = threading.Event()
    said: list[str | BatchwrightError] = []

    def started(url: str) -> None:
        said.append(url)
        ready.set()

    def serve() -> None:
        try:
            server.run(port, unix, started)
        except BatchwrightError as error:
            said.append(error)
            ready.set()

    thread = threading.Thread(target=serve, name="simulator", daemon=True)
    thread.start()
    ready.wait()
    if isinstance(said[0], BatchwrightError):
        raise said[0]
    try:
        yield _address(said[0])
    finally:
        server.stop()
        thread.join()


def _address(said: str) -> RunningSimulator:
    url = RunningSimulator(said)
    if said.startswith("unix://"):
        url.unix = said.removeprefix("unix://")
    return url
