"""Outcomes as they come, by `for` or by `async for`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from batchwright.calls.engine.engine import Engine
from batchwright.calls.engine.loop import Background
from batchwright.calls.engine.waiting import Batch, setter
from batchwright.calls.outcome import Outcome
from batchwright.calls.request import Request

__all__ = ["Stream"]


class Stream:
    """Outcomes in order of completion, each with the index of its request."""

    def __init__(
        self,
        started: Callable[[bool], tuple[Background, Engine]],
        source: Iterator[Request],
    ) -> None:
        self._started = started
        self._source: Iterator[Request] | None = source
        self._batch: Batch | None = None
        self._wake: threading.Event | asyncio.Event | None = None

    def __iter__(self) -> Iterator[tuple[int, Outcome]]:
        return self

    def __next__(self) -> tuple[int, Outcome]:
        if self._batch is None:
            event = threading.Event()
            self._batch = Batch(self._started(False), event.set, ordered=False)
            self._wake = event
        batch, wake = self._batch, self._wake
        assert isinstance(wake, threading.Event)
        try:
            while not self._fed(batch):
                batch.wait(wake, batch.something)
        except KeyboardInterrupt:
            batch.stop(wake, "stopped by Ctrl-C")
            raise
        except StopIteration:
            raise
        except BaseException:
            batch.cancel("the requests could not be read")
            raise
        return batch.take()

    def __aiter__(self) -> AsyncIterator[tuple[int, Outcome]]:
        return self

    async def __anext__(self) -> tuple[int, Outcome]:
        if self._batch is None:
            event = asyncio.Event()
            self._batch = Batch(self._started(True), setter(event), ordered=False)
            self._wake = event
        batch, wake = self._batch, self._wake
        assert isinstance(wake, asyncio.Event)
        try:
            while not self._fed(batch):
                await batch.await_(wake, batch.something)
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            batch.cancel("cancelled by its caller")
            raise
        return batch.take()

    def close(self) -> None:
        """Cancel what has not come yet."""
        if self._batch is not None:
            self._batch.cancel("the stream was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _fed(self, batch: Batch) -> bool:
        """Keep the window full; whether an outcome is there. StopIteration at the end of all."""
        if batch.error is not None:
            raise batch.error
        # A slow reader holds the senders back as well: what was not taken counts as open.
        room = batch.submitted - batch.taken <= batch.window // 2
        if self._source is not None and room and not batch.feed(self._source):
            self._source = None
        if batch.out:
            return True
        if self._source is None and batch.taken == batch.submitted:
            raise StopIteration
        return False
