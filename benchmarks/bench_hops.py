"""How far one request travels through the code: files entered and changes of file.

A hop is a call or a return that moves control from one file of a package to another one of the
same package; all threads count, the work of other packages does not. The request is answered by
the shipped simulator on a connection that is open already, and the least of several requests
counts, because the pool's clock ticks beside some of them.

    batchwright            Pool.map of one exact request, limit 4
    batchwright + cache    the same with a cache on disk: look-up, lease, send, commit
    ... auto limit         the same with limit="auto", which learns from every response
    ... cache hit          the same request again
    httpx                  AsyncClient.post and response.json, its files and those of httpcore
    aiohttp                ClientSession.post and response.json
"""

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import aiohttp

import batchwright
from batchwright.calls import Pool, chat
from batchwright.calls.simulator import Simulator
from common import Report, arguments

REQUESTS = 8
PATH = "/v1/chat/completions"
BODY = {"model": "sim", "messages": [{"role": "user", "content": "2+2?"}], "temperature": 0}


class Walk:
    """A profile function that follows control through the files of some packages."""

    def __init__(self, *packages: ModuleType) -> None:
        self.roots = tuple(f"{Path(str(one.__file__)).parent}/" for one in packages)
        self.on = False
        self.restart()

    def restart(self) -> None:
        self.files: set[str] = set()
        self.hops = 0
        self._at: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, given: Any) -> None:
        if not self.on or event not in ("call", "return"):
            return
        at: FrameType | None = frame
        if event == "return":
            # Back to the nearest caller that is one of the package's own.
            at = frame.f_back
            while at is not None and not at.f_code.co_filename.startswith(self.roots):
                at = at.f_back
        if at is None or not at.f_code.co_filename.startswith(self.roots):
            return
        name, thread = at.f_code.co_filename, threading.get_ident()
        if self._at.get(thread) != name:
            self.hops += thread in self._at
            self._at[thread] = name
            self.files.add(name)

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """For this thread and those that are started inside."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def shortest(self, call: Callable[[int], object]) -> list[int]:
        """Files and hops of the shortest of several calls, after one that does not count."""
        call(-1)
        found = []
        for number in range(REQUESTS):
            self.restart()
            self.on = True
            call(number)
            self.on = False
            found.append([len(self.files), self.hops])
        return min(found, key=lambda pair: pair[1])


def ours(walk: Walk, url: str, **settings: Any) -> list[int]:
    again = settings.pop("again", False)

    def call(number: int) -> None:
        prompt = "2+2?" if again else f"2+{number}?"
        (outcome,) = pool.map([chat("sim", prompt, temperature=0)])
        assert outcome

    with walk.profiling(), Pool(url, remember=False, **settings) as pool:
        return walk.shortest(call)


async def peer(walk: Walk, post: Callable[[], Awaitable[object]]) -> list[int]:
    found = []
    for number in range(REQUESTS + 1):
        walk.restart()
        walk.on = number > 0
        await post()
        walk.on = False
        found.append([len(walk.files), walk.hops])
    return min(found[1:], key=lambda pair: pair[1])


async def with_httpx(url: str) -> list[int]:
    import httpcore
    import httpx

    walk = Walk(httpx, httpcore)
    async with httpx.AsyncClient() as client:

        async def post() -> None:
            (await client.post(url, json=BODY)).json()

        with walk.profiling():
            return await peer(walk, post)


async def with_aiohttp(url: str) -> list[int]:
    walk = Walk(aiohttp)
    async with aiohttp.ClientSession() as session:

        async def post() -> None:
            async with session.post(url, json=BODY) as response:
                await response.json()

        with walk.profiling():
            return await peer(walk, post)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    report = Report("hops", args)
    rows: list[list[Any]] = []
    with (
        tempfile.TemporaryDirectory() as home,
        Simulator(knee=1000, latency_s=0.0, sigma=0.0).running() as url,
    ):
        os.environ["BATCHWRIGHT_HOME"] = home
        # The background thread is started with the first pool and keeps its profile function.
        walk = Walk(batchwright)
        cases: dict[str, dict[str, Any]] = {
            "batchwright": {"limit": 4},
            "batchwright + cache": {"limit": 4, "cache": f"{home}/1.db"},
            "batchwright + cache, auto limit": {"limit": "auto", "cache": f"{home}/2.db"},
            "batchwright + cache, cache hit": {"limit": 4, "cache": f"{home}/3.db", "again": True},
        }
        for name, settings in cases.items():
            rows.append([name, *ours(walk, str(url), **settings)])
        for name, work in {"httpx": with_httpx, "aiohttp": with_aiohttp}.items():
            try:
                rows.append([name, *asyncio.run(work(f"{url}{PATH}"))])
            except ImportError as error:
                report.not_measured(name, str(error))
    report.table("one request", ["", "files", "hops"], rows)
    report.target("hops with the cache", rows[1][2], most=64)
    report.close()


if __name__ == "__main__":
    main()
