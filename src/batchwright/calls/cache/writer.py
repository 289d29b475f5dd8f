"""The cache beside the loop: asked in batches, written in group commits, on a thread of its own.

The loop never waits for the disk. What cannot be written is given to its caller all the same:
a full disk costs the next run money, not this one its answers.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from batchwright.calls.cache.store import Cache, Row
from batchwright.calls.outcome import Done
from batchwright.calls.request import Request
from batchwright.errors import CannotWrite

__all__ = ["Keeper"]

GROUP_S = 0.004
"""How long an answer waits for others to be committed with; nothing beside a model's seconds."""
GROUP = 128
"""So many answers do not wait any longer."""
LEASE_S = 30.0
"""A lease is prolonged three times in this; that of a dead process ends at once."""

Work = tuple[Callable[[], Any], Callable[[Any, Exception | None], None]]

log = logging.getLogger(__name__)


class Keeper:
    """Runs a cache for the engine on `loop`; all methods are called there, none of them blocks."""

    def __init__(
        self, cache: Cache, loop: asyncio.AbstractEventLoop, fail: Callable[[Exception], None]
    ) -> None:
        self._cache = cache
        self._loop = loop
        self._fail = fail
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._work,), name="batchwright-cache", daemon=True
        )
        self._thread.start()
        self._group: list[tuple[Row | None, Callable[[], None]]] = []
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
        # Made here and not on the thread: what holds the interpreter there stops the loop.
        row = self._cache.row(request, done)
        object.__setattr__(done, "raw", None)
        self._group.append((row, then))
        if row is None:
            # The lease does not end with it.
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
        ended = self._loop.create_future()
        self._run(self._cache.close if close_cache else lambda: None, ended.set_result)
        await ended
        self._work.put(None)

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
            self._cache.put_rows([row for row, _ in group if row is not None])
            if released:
                self._cache.release(*released, owner=self._cache.owner)

        def written(_: None) -> None:
            self._busy = False
            if self._group or self._released:
                self._soon()
            for _row, then in group:
                then()

        self._run(write, written, None)

    def _run(
        self, work: Callable[[], Any], then: Callable[[Any], None], otherwise: Any = None
    ) -> None:
        """Do `work` on the thread and `then` on the loop, with `otherwise` if the disk refuses.

        What makes the whole cache useless, such as a damaged file, ends the run instead.
        """

        def ended(result: Any, error: Exception | None) -> None:
            self._loop.call_soon_threadsafe(self._ended, then, result, error, otherwise)

        self._work.put((work, ended))

    def _ended(
        self, then: Callable[[Any], None], result: Any, error: Exception | None, otherwise: Any
    ) -> None:
        if error is None:
            then(result)
            return
        if isinstance(error, CannotWrite):
            if not self.errors:
                log.warning("answers are not kept: %s", error)
            self.errors += 1
        else:
            self._fail(error)
        # Whatever it was, nobody may wait for ever.
        then(otherwise)


def _serve(waiting: "queue.SimpleQueue[Work | None]") -> None:
    while (one := waiting.get()) is not None:
        work, ended = one
        try:
            result = work()
        except Exception as error:
            # Broad on purpose: whatever it is, it is handed to the loop, which tells everyone
            # who waits; a thread that ended here would let them wait for ever.
            ended(None, error)
        else:
            ended(result, None)
