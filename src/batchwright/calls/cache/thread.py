"""The cache of an event loop: what takes a moment is done at once, all else by a thread of its own.

A commit without a sync is some writes to the system's own memory, and quicker than telling a thread
about it. Reading, waiting for other processes and syncing to the disk are the thread's. Every
method returns a future of the loop at once, and raises there what the disk raised.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from batchwright.calls.cache.entries import Row
from batchwright.calls.cache.store import Cache
from batchwright.calls.outcome import Done

__all__ = ["CacheThread"]

LEASE_S = 30.0
"""How long a lease holds; the engine renews it in time, and that of an exited process ends."""

CHECKPOINT_ROWS = 1024
"""Rows and leases written at once before the thread syncs them to the disk."""
SLOW_S, SLOW_FOR_S = 0.02, 10.0
"""A write at once that took the loop so long leaves the next ones to the thread, for a while."""

T = TypeVar("T")
Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class CacheThread:
    """A cache as the loop of a pool uses it; all methods are called on that loop."""

    def __init__(self, store: Cache, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self.writes = store.mode != "replay"
        self._owner = store.owner
        self._loop = loop
        self._unsynced = 0
        self._syncing: asyncio.Future[None] | None = None
        self._slow_until = 0.0
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        threading.Thread(
            target=_serve, args=(self._work, loop), name="batchwright-cache", daemon=True
        ).start()

    def get(self, keys: Sequence[bytes]) -> "asyncio.Future[dict[bytes, Done]]":
        """The responses that are here."""
        return self._run(lambda: self.store.get_many(keys))

    def lease(self, keys: Sequence[bytes]) -> "asyncio.Future[set[bytes]]":
        """The calls that this process may make and no other will, renewed if it has them."""
        if self._at_once(len(keys), lambda: self.store.lease_at_once(keys, self._owner, LEASE_S)):
            return self._done(set(keys))
        return self._run(lambda: self.store.lease_many(keys, self._owner, LEASE_S))

    def put(self, rows: Sequence[Row], released: Sequence[bytes]) -> "asyncio.Future[None]":
        """Done when the rows survive `kill -9`; `released` leases end without a response."""
        if not released and self._at_once(len(rows), lambda: self.store.put_at_once(rows)):
            return self._done(None)

        def write() -> None:
            self.store.put_rows(rows)
            if released:
                self.store.release(*released, owner=self._owner)

        return self._run(write)

    async def close(self, close_store: bool) -> None:
        """End the thread after what it was given."""
        if close_store:
            await self._run(self.store.close)
        self._work.put(None)

    def _at_once(self, rows: int, write: Callable[[], bool]) -> bool:
        """Whether it is written already."""
        begun = self._loop.time()
        # Until it is synced the thread writes, after that: a log that grows meanwhile would not be
        # whole in the file, and so never begin anew.
        syncing = self._syncing is not None and not self._syncing.done()
        if syncing or begun < self._slow_until or not write():
            return False
        now = self._loop.time()
        if now - begun > SLOW_S:
            self._slow_until = now + SLOW_FOR_S
        self._unsynced += rows
        if self._unsynced >= CHECKPOINT_ROWS:
            self._unsynced = 0
            self._syncing = self._run(self.store.checkpoint)
        return True

    def _done(self, result: T) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        future.set_result(result)
        return future

    def _run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        self._work.put((work, future))
        return future


def _serve(waiting: "queue.SimpleQueue[Work | None]", loop: asyncio.AbstractEventLoop) -> None:
    while (one := waiting.get()) is not None:
        work, future = one
        try:
            result = work()
        except Exception as error:
            # Broad on purpose: a thread that ended here would let everyone wait for ever.
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)
