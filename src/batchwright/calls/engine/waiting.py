"""Requests that were handed over together, and the ways to wait for their outcomes."""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice

from batchwright.calls.engine.budgets import WHOLE_BATCH
from batchwright.calls.engine.engine import Engine
from batchwright.calls.engine.loop import Background
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.errors import BudgetExceeded

__all__ = ["Batch", "Interrupted", "One", "Progress", "setter"]

Progress = Callable[[int, int], None]
"""Called now and then with the calls done and the calls known so far."""

WINDOW = 1024
"""Requests taken from an iterator ahead of the answers, or twice the limit if that is more."""
CHUNK = 256
"""Requests handed over at a time; the first chunk is small, so that work begins at once."""
PROGRESS_S = 0.1
FLUSH_S = 20.0
"""How long the first Ctrl-C waits for what has come back to be kept."""
_PENDING = Failed(Kind.CANCELLED, "not made", tries=0)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `Pool.map`: what came back is in `outcomes`, the rest is `cancelled` there."""

    outcomes: Sequence[Outcome] = ()


class Batch:
    """What was handed over together. Fed by the caller's thread, delivered to by the loop."""

    def __init__(
        self, running: tuple[Background, Engine], changed: Callable[[], None], *, ordered: bool
    ) -> None:
        self.background, self.engine = running
        self.changed = changed
        self.born = self.background.loop.time()
        self.results: list[Outcome] = []
        self.out: deque[tuple[int, Outcome]] = deque()
        self.ordered = ordered
        self.submitted = self.done = self.taken = 0
        self.error: Exception | None = None
        self.stopped = False
        self._chunk = 32
        self._half = WINDOW // 2
        self._until: Callable[[], bool] | None = None

    @property
    def window(self) -> int:
        return max(WINDOW, 2 * sum(lane.limit.limit for lane in self.engine.lanes))

    def feed(self, source: Iterator[Request]) -> bool:
        """Hand over some requests; False when there are no more."""
        if self.stopped:
            return False
        # Not for every answer: the limits do not change that quickly.
        self._half = self.window // 2
        size, self._chunk = self._chunk, CHUNK
        taken = list(islice(source, size))
        if taken:
            start = self.submitted
            self.submitted += len(taken)
            if self.ordered:
                self.results += [_PENDING] * len(taken)
            self.background.soon(self.engine.submit, self, list(enumerate(taken, start)))
        return len(taken) == size

    def cancel(self, why: str) -> None:
        self.stopped = True
        if self.background.pid == os.getpid() and not self.background.loop.is_closed():
            self.background.soon(self.engine.cancel, self, why)

    def deliver(self, index: int, outcome: Outcome) -> None:
        if self.ordered:
            self.results[index] = outcome
        else:
            self.out.append((index, outcome))
        # Last, because the other thread takes it as the sign that all the rest is there.
        self.done += 1
        if self._until is not None and self._until():
            self.changed()

    def abort(self, error: Exception) -> None:
        self.error, self.stopped = error, True
        self.changed()

    def take(self) -> tuple[int, Outcome]:
        self.taken += 1
        return self.out.popleft()

    def room(self) -> bool:
        return self.submitted - self.done <= self._half

    def all_done(self) -> bool:
        return self.done == self.submitted

    def something(self) -> bool:
        return bool(self.out)

    def ready(self, until: Callable[[], bool]) -> bool:
        """Whether it is so; if not, the next delivery that makes it so calls `changed`."""
        self._until = until
        if until() or (self.error is not None and self.all_done()):
            self._until = None
            return True
        return False

    def wait(
        self,
        wake: threading.Event,
        until: Callable[[], bool],
        total: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Until it is so; `wake` is what `changed` sets."""
        while True:
            wake.clear()
            if self.ready(until):
                return
            if progress is not None:
                progress(self.done, max(total, self.submitted))
            wake.wait(PROGRESS_S if progress is not None else None)

    async def await_(
        self,
        wake: asyncio.Event,
        until: Callable[[], bool],
        total: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """As `wait`, on the caller's own event loop."""
        while True:
            wake.clear()
            if self.ready(until):
                return
            waiting: Awaitable[object] = wake.wait()
            if progress is None:
                await waiting
                continue
            progress(self.done, max(total, self.submitted))
            try:
                await asyncio.wait_for(waiting, PROGRESS_S)
            except TimeoutError:
                continue

    def stop(self, wake: threading.Event, why: str) -> None:
        """Cancel, and wait until what came back is kept."""
        self.cancel(why)
        end = time.monotonic() + FLUSH_S
        while not self.ready(self.all_done) and time.monotonic() < end:
            wake.wait(0.05)

    def judged(self, strict: bool) -> list[Outcome]:
        """The outcomes, unless the pool gave up or, if `strict`, every call of many failed."""
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

    def deliver(self, index: int, outcome: Outcome) -> None:
        if self.direct:
            self._set(outcome)
        else:
            # A loop that was closed meanwhile has nobody waiting.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._set, outcome)

    def abort(self, error: Exception) -> None:
        self.error = error

    def _set(self, outcome: Outcome) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(outcome)


def setter(event: asyncio.Event) -> Callable[[], None]:
    """Sets an event of the running loop from any thread."""
    loop = asyncio.get_running_loop()

    def set_soon() -> None:
        # A loop that was closed meanwhile has nobody waiting.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_soon
