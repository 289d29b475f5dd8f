"""The cache beside the loop: asked in batches, written in group commits, on a thread of its own.

The loop never waits for the disk. What cannot be written is given to its caller all the same:
a full disk costs the next run money, not this one its answers.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from batchwright.calls.cache import Cache
from batchwright.calls.outcome import Done
from batchwright.calls.request import Request
from batchwright.errors import BatchwrightError, CannotWrite

__all__ = ["Keeper"]

GROUP_S = 0.004
"""How long an answer waits for others to be committed with; nothing beside a model's seconds."""
GROUP = 128
"""So many answers do not wait any longer."""
LEASE_S = 30.0
"""A lease is prolonged three times in this; that of a dead process ends at once."""

log = logging.getLogger(__name__)


class Keeper:
    """Runs a cache for the engine on `loop`; all methods are called there, none of them blocks."""

    def __init__(
        self, cache: Cache, loop: asyncio.AbstractEventLoop, fail: Callable[[Exception], None]
    ) -> None:
        self._cache = cache
        self._loop = loop
        self._fail = fail
        self._thread = ThreadPoolExecutor(1, "batchwright-cache")
        self._group: list[tuple[Request, Done, Callable[[], None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        self._released: list[bytes] = []
        self.writes = cache.mode != "replay"
        self.errors = 0

    def look(self, keys: Sequence[bytes], then: Callable[[dict[bytes, Done]], None]) -> None:
        """Ask for answers; `then` gets those that are here."""
        self._run(lambda: self._cache.get_many(keys), then, {})

    def lease(self, keys: Sequence[bytes], then: Callable[[set[bytes]], None]) -> None:
        """Ask for the right to make calls, so that no other process makes them as well."""
        cache = self._cache
        # Where nothing can be written nobody else writes either: all may be called.
        self._run(lambda: cache.lease_many(keys, cache.owner, LEASE_S), then, set(keys))

    def release(self, key: bytes) -> None:
        """Give a lease back without an answer, with the next group."""
        self._released.append(key)
        self._soon()

    def put(self, request: Request, done: Done, then: Callable[[], None]) -> None:
        """Keep an answer; `then` is called when it survives `kill -9`."""
        self._group.append((request, done, then))
        if done.finish not in (None, "stop"):
            # The cache may not keep it, and then the lease does not end with it.
            self._released.append(request.key)
        if len(self._group) >= GROUP and not self._busy:
            self._commit()
        else:
            self._soon()

    async def close(self, close_cache: bool) -> None:
        """Commit what waits, then end the thread."""
        while self._group or self._released or self._busy:
            if not self._busy:
                self._commit()
            await asyncio.sleep(0.001)
        if close_cache:
            await self._loop.run_in_executor(self._thread, self._cache.close)
        self._thread.shutdown(wait=False)

    def _soon(self) -> None:
        if self._timer is None and not self._busy:
            self._timer = self._loop.call_later(GROUP_S, self._commit)

    def _commit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        group, self._group = self._group, []
        released, self._released = self._released, []
        self._busy = True

        def write() -> None:
            if group:
                self._cache.put_many([(request, done) for request, done, _ in group])
            if released:
                self._cache.release_many(released, self._cache.owner)

        def written(_: None) -> None:
            self._busy = False
            if self._group or self._released:
                self._soon()
            for _request, _done, then in group:
                then()

        self._run(write, written, None)

    def _run(
        self, work: Callable[[], Any], then: Callable[[Any], None], otherwise: Any = None
    ) -> None:
        """Do `work` on the thread and `then` on the loop, with `otherwise` if the disk refuses.

        What makes the whole cache useless, such as a damaged file, ends the run instead.
        """

        def job() -> None:
            try:
                result = work()
            except CannotWrite as error:
                self._loop.call_soon_threadsafe(self._refused, error, then, otherwise)
            except BatchwrightError as error:
                self._loop.call_soon_threadsafe(self._fail, error)
                self._loop.call_soon_threadsafe(then, otherwise)
            else:
                self._loop.call_soon_threadsafe(then, result)

        self._thread.submit(job).add_done_callback(self._ended)

    def _ended(self, future: "Future[None]") -> None:
        error = future.exception()
        if isinstance(error, Exception):
            # Not one of ours: a mistake in this package must not leave callers waiting.
            self._loop.call_soon_threadsafe(self._fail, error)

    def _refused(self, error: CannotWrite, then: Callable[[Any], None], otherwise: Any) -> None:
        if not self.errors:
            log.warning("answers are not kept: %s", error)
        self.errors += 1
        then(otherwise)
