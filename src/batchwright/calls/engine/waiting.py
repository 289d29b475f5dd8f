"""Requests that were submitted together, and the ways to wait for their outcomes."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from itertools import islice
from math import inf
from typing import Any, Protocol, Self

from batchwright.calls.engine.budgets import WHOLE_BATCH
from batchwright.calls.engine.dispatch import Sink
from batchwright.calls.engine.stats import Stats
from batchwright.calls.loop import Background
from batchwright.calls.outcome import Done, Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.errors import BudgetExceeded, ConfigError

__all__ = ["AnyEngine", "Batch", "Interrupted", "One", "Progress", "Stream", "check"]

Progress = Callable[[int, int], None]
"""Called now and then with the calls done and the calls known so far."""

WINDOW = 1024
"""Requests taken from an iterator ahead of the responses, or twice the limit if that is more."""
FIRST_CHUNK, CHUNK = 32, 256
"""Requests submitted at a time; the first chunk is small, so that work starts at once."""
PROGRESS_S = 0.1
FLUSH_S = 20.0
"""How long the first Ctrl-C, or an error, waits for what has come back to be committed."""
_PENDING = Failed(Kind.CANCELLED, "not made", tries=0)


AGAIN = "a pool with a cache has the responses of exact requests and makes only the other calls"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `Pool.map`: what came back is in `outcomes`, the rest is `cancelled` there."""

    def __init__(self, said: str = "", outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(said)
        self.outcomes = outcomes


def check(request: Request, priced: Stats | None) -> Request:
    """Refuse what cannot be sent; under a spending cap, also what `priced` does not bound."""
    if not isinstance(request, Request):
        raise ConfigError(
            f"a pool takes requests, got a {type(request).__name__}; write chat(model, prompt)"
        )
    if request.body.get("stream"):
        raise ConfigError("streamed responses are not supported; leave out `stream`")
    if priced is not None:
        if request.model not in priced.prices:
            raise ConfigError(
                f"max_cost needs a price for every model, and {request.model!r} has none; "
                f"prices has {sorted(priced.prices)}"
            )
        if priced.most_cost(request) == inf:
            raise ConfigError(
                "max_cost needs a bound for every call, and this request has none: give it "
                "max_tokens, or the pool model_max_tokens={model: tokens}; images, stored "
                "conversations and tools of the server have none"
            )
    return request


class AnyEngine(Protocol):
    """What a pool submits to: the engine of this process, or one elsewhere."""

    closed: bool

    @property
    def most_in_flight(self) -> int:
        """Calls in flight that its limits allow now."""

    def submit(self, sink: Sink, items: Iterable[tuple[int, Request]]) -> None: ...

    def cancel(self, sink: Sink | None, why: str) -> None: ...

    def abort(self, error: Exception) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    async def close(self, close_cache: bool) -> None: ...


class Batch:
    """Requests submitted together. Fed by the caller's thread, delivered to by the loop."""

    def __init__(
        self,
        running: tuple[Background, AnyEngine],
        priced: Stats | None,
        *,
        ordered: bool,
    ) -> None:
        self.background, self.engine = running
        self.changed: Callable[[], object] = bool
        """Wakes the one who waits, from the loop's thread."""
        self.born = self.background.loop.time()
        self.results: list[Outcome] = []
        self.out: deque[tuple[int, Outcome]] = deque()
        self.submitted = self.done = self.taken = 0
        self.error: Exception | None = None
        self.stopped = False
        self._give_up_at = inf
        """After an error, what has not come back by then never will."""
        self._first: dict[bytes, int] = {}
        """Where in the results the response to a key is."""
        self._priced = priced
        self._ordered = ordered
        self._chunk = FIRST_CHUNK
        self._half = WINDOW // 2
        self._until: Callable[[], bool] | None = None

    def run(
        self, requests: Iterable[Request], progress: Progress | None, strict: bool
    ) -> list[Outcome]:
        """Make all calls and wait for them; `strict` raises if every call of many failed."""
        wake = threading.Event()
        self.changed = wake.set
        source = iter(requests)
        total = len(requests) if isinstance(requests, Sized) else 0
        try:
            while self.feed(source):
                self.wait(wake, self._has_room, total, progress)
            self.wait(wake, self._all_done, total, progress)
        except KeyboardInterrupt:
            self.stop(wake, "stopped by Ctrl-C")
            back = sum(isinstance(one, Done) for one in self.results)
            raise Interrupted(
                f"stopped by Ctrl-C: {back:,} of {max(total, self.submitted):,} responses came "
                f"back and are in `outcomes` of this exception; {AGAIN}",
                self.results,
            ) from None
        except BaseException:
            self.stop(wake, "the requests could not be read")
            raise
        return self._judged(progress, strict)

    async def run_async(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        progress: Progress | None,
        strict: bool,
    ) -> list[Outcome]:
        """As `run`, on the caller's own event loop; cancelling it cancels the calls."""
        wake = asyncio.Event()
        self.changed = _threadsafe_set(wake)
        total = len(requests) if isinstance(requests, Sized) else 0
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    self.feed(iter([request]))
                    await self.wait_async(wake, self._has_room, total, progress)
            else:
                source = iter(requests)
                while self.feed(source):
                    await self.wait_async(wake, self._has_room, total, progress)
                    await asyncio.sleep(0)
            await self.wait_async(wake, self._all_done, total, progress)
        except BaseException:
            self.cancel("cancelled by its caller")
            raise
        return self._judged(progress, strict)

    @property
    def window(self) -> int:
        return max(WINDOW, 2 * self.engine.most_in_flight)

    def feed(self, source: Iterator[Request]) -> bool:
        """Submit some requests; False when there are no more."""
        if self.stopped:
            return False
        # Not for every response: the limits do not change that quickly.
        self._half = self.window // 2
        size, self._chunk = self._chunk, CHUNK
        priced = self._priced
        taken = [check(request, priced) for request in islice(source, size)]
        if taken:
            start = self.submitted
            self.submitted += len(taken)
            if self._ordered:
                self.results += [_PENDING] * len(taken)
            items = list(enumerate(taken, start))
            self.background.loop.call_soon_threadsafe(self.engine.submit, self, items)
        return len(taken) == size

    def cancel(self, why: str) -> None:
        self.stopped = True
        if self.background.pid == os.getpid() and not self.background.loop.is_closed():
            self.background.loop.call_soon_threadsafe(self.engine.cancel, self, why)

    def stop(self, wake: threading.Event, why: str) -> None:
        """Cancel, and wait until what came back is committed."""
        self.cancel(why)
        end = time.monotonic() + FLUSH_S
        while not self._ready(self._all_done) and time.monotonic() < end:
            wake.wait(0.05)

    def earlier(self, key: bytes, index: int) -> Done | None:
        if not self._ordered:
            # A stream does not have what it gave away.
            return None
        found = self.results[self._first.setdefault(key, index)]
        if isinstance(found, Done):
            return found
        self._first[key] = index
        return None

    def deliver(self, index: int, outcome: Outcome) -> None:
        if self._ordered:
            self.results[index] = outcome
        else:
            self.out.append((index, outcome))
        # Last, because the other thread takes it as the sign that all the rest is there.
        self.done += 1
        # Looked up once: the other thread may take it back at any moment.
        until = self._until
        if until is not None and until():
            self.changed()

    def abort(self, error: Exception) -> None:
        self._give_up_at = min(self._give_up_at, time.monotonic() + FLUSH_S)
        self.error, self.stopped = error, True
        self.changed()

    def take(self) -> tuple[int, Outcome]:
        self.taken += 1
        return self.out.popleft()

    def has_outcome(self) -> bool:
        return bool(self.out)

    def wait(
        self,
        wake: threading.Event,
        until: Callable[[], bool],
        total: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Block until the condition holds; `wake` is set by `changed`."""
        while True:
            wake.clear()
            if self._ready(until):
                return
            if progress is not None:
                progress(self.done, max(total, self.submitted))
            often = progress is not None or self.error is not None
            wake.wait(PROGRESS_S if often else None)

    async def wait_async(
        self,
        wake: asyncio.Event,
        until: Callable[[], bool],
        total: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """As `wait`, on the caller's own event loop."""
        while True:
            wake.clear()
            if self._ready(until):
                return
            if progress is not None:
                progress(self.done, max(total, self.submitted))
            elif self.error is None:
                await wake.wait()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), PROGRESS_S)

    def _ready(self, until: Callable[[], bool]) -> bool:
        """Whether it holds; if not, the next delivery that makes it hold calls `changed`.

        After an error it is enough that everything is back, or that it was waited for: an error
        of this package may have lost the rest, and nobody is to wait for that for ever.
        """
        self._until = until
        over = self.error is not None and (self._all_done() or time.monotonic() > self._give_up_at)
        if until() or over:
            self._until = None
            return True
        return False

    def _has_room(self) -> bool:
        return self.submitted - self.done <= self._half

    def _all_done(self) -> bool:
        return self.done == self.submitted

    def _judged(self, progress: Progress | None, strict: bool) -> list[Outcome]:
        """The outcomes, unless the pool gave up or, if `strict`, every call of many failed."""
        if progress is not None:
            progress(self.done, self.submitted)
        if self.error is not None:
            raise self.error
        results = self.results
        if strict and len(results) >= WHOLE_BATCH:
            failed = [r for r in results if isinstance(r, Failed) and r.kind is not Kind.CANCELLED]
            if len(failed) == len(results):
                raise BudgetExceeded(
                    f"all {len(failed):,} calls of a batch failed, the first with "
                    f"{failed[0].kind}: {failed[0].error}"
                )
        return results


class Stream:
    """Outcomes in order of completion, each with the index of its request."""

    def __init__(
        self,
        started: Callable[[bool], tuple[Background, AnyEngine]],
        requests: Iterable[Request],
        priced: Stats | None,
    ) -> None:
        self._started = started
        self._source: Iterator[Request] | None = iter(requests)
        self._priced = priced
        self._batch: Batch | None = None
        self._wake: threading.Event | asyncio.Event | None = None

    def __iter__(self) -> Iterator[tuple[int, Outcome]]:
        return self

    def __next__(self) -> tuple[int, Outcome]:
        if self._batch is None:
            event = threading.Event()
            self._batch = Batch(self._started(False), self._priced, ordered=False)
            self._batch.changed, self._wake = event.set, event
        batch, wake = self._batch, self._wake
        assert isinstance(wake, threading.Event)
        try:
            while not self._fed(batch):
                batch.wait(wake, batch.has_outcome)
        except KeyboardInterrupt as stopped:
            batch.stop(wake, "stopped by Ctrl-C")
            # The same exception, because of a subclass Python does not end as Ctrl-C ends it.
            stopped.args = (
                f"stopped by Ctrl-C: {batch.taken:,} outcomes were given out before; {AGAIN}",
            )
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
            self._batch = Batch(self._started(True), self._priced, ordered=False)
            self._batch.changed, self._wake = _threadsafe_set(event), event
        batch, wake = self._batch, self._wake
        assert isinstance(wake, asyncio.Event)
        try:
            while not self._fed(batch):
                await batch.wait_async(wake, batch.has_outcome)
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            batch.cancel("cancelled by its caller")
            raise
        return batch.take()

    def close(self) -> None:
        """Cancel what has not come back yet."""
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


class One:
    """A single call and the future that waits for it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Outcome]", direct: bool
    ) -> None:
        self.loop = loop
        self.future = future
        self.direct = direct
        self.born = time.monotonic()
        self.stopped = False
        self.error: Exception | None = None

    def earlier(self, key: bytes, index: int) -> Done | None:
        return None

    def deliver(self, index: int, outcome: Outcome) -> None:
        if self.direct:
            self._set(outcome)
        else:
            # A loop that was closed meanwhile has nobody waiting.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._set, outcome)

    def abort(self, error: Exception) -> None:
        self.error = error
        self.deliver(0, _PENDING)

    def _set(self, outcome: Outcome) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(outcome)


def _threadsafe_set(event: asyncio.Event) -> Callable[[], None]:
    """Sets an event of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def set_soon() -> None:
        # A loop that was closed meanwhile has nobody waiting.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_soon
