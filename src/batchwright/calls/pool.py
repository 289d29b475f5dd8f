"""Requests in, outcomes out, in order: the pool that scripts, notebooks and trainers hold.

    request -> cache -> limit -> endpoint -> outcome

The work is done by `engine.py` on the background loop; here are the ways to hand it over and to
wait: `map` and `for` in plain code, `amap`, `call` and `async for` on any event loop.
"""

import asyncio
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from batchwright import models
from batchwright.calls.accounting import Ledger, Prices
from batchwright.calls.background import Background, background
from batchwright.calls.budget import WHOLE_BATCH, ErrorBudget
from batchwright.calls.endpoints import Endpoint
from batchwright.calls.engine import Engine, Rules
from batchwright.calls.lane import Lane, remembered
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.calls.retry import Retry
from batchwright.errors import BudgetExceeded, ConfigError
from batchwright.events import EventLog

if TYPE_CHECKING:
    from batchwright.calls.cache import Cache
    from batchwright.calls.limit import Limit

__all__ = ["Interrupted", "Pool", "Progress", "Stream"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called now and then with the calls done and the calls known so far."""

WINDOW = 1024
"""Requests taken from an iterator ahead of the answers, or twice the limit if that is more."""
CHUNK = 256
"""Requests handed over at a time; the first chunk is small, so that work begins at once."""
PROGRESS_S = 0.1
FLUSH_S = 20.0
"""How long the first Ctrl-C waits for what has come back to be kept."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `Pool.map`: what came back is in `outcomes`, the rest is `cancelled` there."""

    outcomes: Sequence[Outcome] = ()


class Pool:
    """Calls to one or several endpoints, as many at a time as they bear.

    Every request ends as exactly one outcome, in order: `Done`, or `Failed` with its kind, within
    `deadline_s` seconds of its first try; retries and waits are inside. A request that cannot be
    sent at all fails once nothing has come back for `deadline_s`. With a `cache` an answer is on
    disk before the caller has it, equal exact requests are made once, in this process and in all
    that share the file, and a run that was killed goes on where it was.

    `limit` is the number of calls in flight for each endpoint: a number, an object of
    `batchwright.calls.limit`, or "auto", which finds out and is remembered between runs (unless
    `remember` is False). `rpm` and `tpm` hold for each endpoint and all processes of this user.
    `prices` are dollars for a million tokens, (in, out) by model; `max_cost` stops sending.

    >>> from batchwright.calls import chat
    >>> with Pool(Endpoint(lambda requests: ["4"] * len(requests))) as pool:
    ...     [outcome.text for outcome in pool.map([chat("m", "2+2?"), chat("m", "1+3?")])]
    ['4', '4']
    """

    def __init__(
        self,
        *endpoints: Endpoint | str,
        limit: "Literal['auto'] | int | Limit" = "auto",
        deadline_s: float = 60.0,
        tries: int = 5,
        cache: "str | os.PathLike[str] | Cache | None" = None,
        budget: ErrorBudget | None = None,
        hedge: bool = True,
        rpm: float | None = None,
        tpm: float | None = None,
        prices: Prices | None = None,
        max_cost: float | None = None,
        events: EventLog | None = None,
        remember: bool = True,
        seed: int = 0,
    ) -> None:
        self.endpoints = tuple(e if isinstance(e, Endpoint) else Endpoint(e) for e in endpoints)
        if not self.endpoints:
            raise ConfigError("a pool needs an endpoint; give an address or Endpoint(function)")
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) != len(names):
            raise ConfigError(f"two endpoints have one name among {names}; give each another")
        for endpoint in self.endpoints:
            endpoint.api_key()
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s={deadline_s} is not possible; give a number above 0")
        if max_cost is not None and not prices:
            raise ConfigError("max_cost needs prices; give prices={model: (in, out)} a million")
        if not isinstance(limit, str | int) and len(self.endpoints) > 1:
            raise ConfigError(
                "one limit object cannot serve several endpoints; give limit='auto' or a number"
            )
        self._limit = limit
        self._rates = (rpm, tpm)
        self._prices = dict(prices or {})
        self._events = events
        self._rules = Rules(deadline_s, Retry(tries, seed=seed), hedge, max_cost, budget, remember)
        self._cache, self._own_cache = _opened(cache)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._background: Background | None = None
        self._closed = False
        # A wrong limit is to be known here, not at the first call.
        for endpoint in self.endpoints:
            self._lane(endpoint)

    def map(
        self, requests: Iterable[Request], *, progress: Progress | None = None
    ) -> list[Outcome]:
        """Make all calls and give their outcomes in the order of the requests.

        Ctrl-C once stops sending, keeps what came back and raises `Interrupted`; twice stops now.
        """
        wake = threading.Event()
        batch = _Batch(self._started(), wake.set, ordered=True)
        source = self._checked(requests)
        total = len(requests) if isinstance(requests, Sized) else 0
        try:
            while batch.feed(source):
                _wait(batch, wake, batch.room, total, progress)
            _wait(batch, wake, batch.all_done, total, progress)
        except KeyboardInterrupt:
            self._stop(batch, wake, "stopped by Ctrl-C")
            interrupted = Interrupted()
            interrupted.outcomes = batch.results
            raise interrupted from None
        except BaseException:
            self._stop(batch, wake, "the requests could not be read")
            raise
        if progress is not None:
            progress(batch.done, batch.submitted)
        return self._judged(batch)

    async def amap(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        *,
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """As `map`, on the caller's own event loop; cancelling it cancels the calls."""
        wake = asyncio.Event()
        batch = _Batch(self._started(here=True), _setter(wake), ordered=True)
        total = len(requests) if isinstance(requests, Sized) else 0
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    batch.feed(iter([self._check(request)]))
                    await _await(batch, wake, batch.room, total, progress)
            else:
                source = self._checked(requests)
                while batch.feed(source):
                    await _await(batch, wake, batch.room, total, progress)
                    await asyncio.sleep(0)
            await _await(batch, wake, batch.all_done, total, progress)
        except BaseException:
            batch.cancel("cancelled by its caller")
            raise
        if progress is not None:
            progress(batch.done, batch.submitted)
        return self._judged(batch)

    def stream(self, requests: Iterable[Request]) -> "Stream":
        """(index, outcome) as they come, by `for` or by `async for`; leaving early cancels."""
        return Stream(self, self._checked(requests))

    async def call(self, request: Request) -> Outcome:
        """One call, from any event loop."""
        running = self._started(here=True)
        loop = asyncio.get_running_loop()
        sink = _One(loop, loop.create_future(), running[0].loop is loop)
        running[0].soon(running[1].submit, sink, [(0, self._check(request))])
        try:
            return await sink.future
        except asyncio.CancelledError:
            running[0].soon(running[1].cancel, sink, "cancelled by its caller")
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's own loop from plain code; inside it, `await pool.call`."""
        running = self._started()
        future = asyncio.run_coroutine_threadsafe(work, running[0].loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel(self) -> None:
        """End every open call as `cancelled`; whoever waits gets what came back before."""
        if self._engine is not None and self._background is not None:
            self._background.soon(self._engine.cancel, None, "cancelled by Pool.cancel")

    def stats(self) -> dict[str, Any]:
        """Counts, latencies, tokens, money, and the state of each endpoint."""
        running, engine = self._started(here=True)
        if running.here:
            return engine.stats()

        async def stats() -> dict[str, Any]:
            return engine.stats()

        return asyncio.run_coroutine_threadsafe(stats(), running.loop).result()

    def close(self) -> None:
        """Cancel what is open, keep what came back, give sockets and files back."""
        with self._lock:
            self._closed = True
            engine, running = self._engine, self._background
            self._engine = None
        if engine is None or running is None or running.pid != os.getpid():
            if self._own_cache and self._cache is not None:
                self._cache.close()
            return
        if not running.thread.is_alive():
            return
        future = asyncio.run_coroutine_threadsafe(engine.close(self._own_cache), running.loop)
        if not running.here:
            future.result()

    def abort(self, error: Exception) -> None:
        """On the loop: give up, with an error for everyone who waits."""
        if self._engine is not None:
            self._engine.abort(error)

    def forget(self) -> None:
        """After a fork: leave everything to the parent and begin anew."""
        self._lock = threading.Lock()
        if self._engine is not None:
            # For ever: closing its sockets here would take them out of the parent's selector.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        names = ", ".join(repr(endpoint.name) for endpoint in self.endpoints)
        return f"Pool({names}, limit={self._limit!r}, cache={self._cache!r})"

    def _started(self, here: bool = False) -> tuple[Background, Engine]:
        """The engine of this process, made when first asked for, anew after a fork."""
        running = self._background
        engine = self._engine
        if engine is None or running is None or running.pid != os.getpid():
            with self._lock:
                running, engine = self._start()
        if running.here and not here:
            raise ConfigError(
                "map, run and for wait, and this code runs on the pool's own loop, which would "
                "wait for itself; use await pool.amap, await pool.call or async for"
            )
        return running, engine

    def _start(self) -> tuple[Background, Engine]:
        if self._closed:
            raise ConfigError("this pool is closed; make another one")
        running = background()
        if self._engine is not None and self._background is running:
            return running, self._engine
        if any(endpoint.remote for endpoint in self.endpoints):
            # Importing aiohttp takes a while, which is nobody's deadline to lose.
            import_module("batchwright.calls.transport")
        keeper = None
        if self._cache is not None:
            from batchwright.calls.keeper import Keeper

            keeper = Keeper(self._cache, running.loop, lambda error: engine.abort(error))
        lanes = [self._lane(endpoint, True) for endpoint in self.endpoints]
        ledger = Ledger(self._prices)
        engine = Engine(running.loop, lanes, self._rules, ledger, keeper, self._events)
        self._engine, self._background = engine, running
        running.at_exit.add(self)
        weakref.finalize(self, _forgotten, running, engine, self._own_cache).atexit = False
        return running, engine

    def _lane(self, endpoint: Endpoint, begin: bool = False) -> Lane:
        from batchwright.calls.limit import AutoLimit, FixedLimit

        limit: Limit
        learns = False
        if self._limit == "auto":
            if endpoint.remote:
                limit, learns = AutoLimit(), self._rules.remember
                state = remembered(endpoint) if learns and begin else None
                if state is not None:
                    try:
                        limit.load_state_dict(state)
                    except (KeyError, TypeError, ValueError):
                        # Written by another version; what it knew is learned again.
                        limit = AutoLimit()
            else:
                # While one batch runs, the next one gathers.
                limit = FixedLimit(2 * endpoint.batch)
        elif isinstance(self._limit, str):
            raise ConfigError(f"limit={self._limit!r} is not known; give 'auto' or a number")
        elif isinstance(self._limit, int):
            if self._limit < 1:
                raise ConfigError(f"limit={self._limit} is not possible; give 1 or more")
            limit = FixedLimit(self._limit)
        else:
            limit = self._limit
        rates = None
        if begin and self._rates != (None, None):
            from batchwright.calls.rates import RateBuckets

            rates = RateBuckets(models.home() / "rates.db", *self._rates, name=endpoint.name)
        return Lane(endpoint, limit, learns, rates)

    def _checked(self, requests: Iterable[Request]) -> Iterator[Request]:
        return map(self._check, requests)

    def _check(self, request: Request) -> Request:
        if not isinstance(request, Request):
            raise ConfigError(
                f"a pool takes requests, not a {type(request).__name__}; write chat(model, prompt)"
            )
        if request.body.get("stream"):
            raise ConfigError("answers come whole; leave `stream` out of the request")
        if self._rules.max_cost is not None and request.model not in self._prices:
            raise ConfigError(
                f"there is no price for the model {request.model!r} to hold max_cost by; "
                f"prices has {sorted(self._prices)}"
            )
        return request

    def _stop(self, batch: "_Batch", wake: threading.Event, why: str) -> None:
        """Cancel a batch and wait until what came back is kept."""
        batch.cancel(why)
        end = time.monotonic() + FLUSH_S
        while not batch.ready(batch.all_done) and time.monotonic() < end:
            wake.wait(0.05)

    def _judged(self, batch: "_Batch") -> list[Outcome]:
        if batch.error is not None:
            raise batch.error
        results = batch.results
        if self._rules.budget is not None and len(results) >= WHOLE_BATCH:
            failed = [r for r in results if isinstance(r, Failed) and r.kind is not Kind.CANCELLED]
            if len(failed) == len(results):
                raise BudgetExceeded(
                    f"all {len(failed):,} calls of a batch failed, the first with "
                    f"{failed[0].kind}: {failed[0].error}"
                )
        return results


class Stream:
    """Outcomes in order of completion, each with the index of its request."""

    def __init__(self, pool: Pool, source: Iterator[Request]) -> None:
        self._pool = pool
        self._source: Iterator[Request] | None = source
        self._batch: _Batch | None = None
        self._wake: threading.Event | asyncio.Event | None = None

    def __iter__(self) -> Iterator[tuple[int, Outcome]]:
        return self

    def __next__(self) -> tuple[int, Outcome]:
        if self._batch is None:
            event = threading.Event()
            self._batch = _Batch(self._pool._started(), event.set, ordered=False)
            self._wake = event
        batch, wake = self._batch, self._wake
        assert isinstance(wake, threading.Event)
        try:
            while not self._fed(batch):
                _wait(batch, wake, batch.something, 0, None)
        except KeyboardInterrupt:
            self._pool._stop(batch, wake, "stopped by Ctrl-C")
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
            self._batch = _Batch(self._pool._started(here=True), _setter(event), ordered=False)
            self._wake = event
        batch, wake = self._batch, self._wake
        assert isinstance(wake, asyncio.Event)
        try:
            while not self._fed(batch):
                await _await(batch, wake, batch.something, 0, None)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _fed(self, batch: "_Batch") -> bool:
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


class _Batch:
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
        self._until: Callable[[], bool] | None = None

    @property
    def window(self) -> int:
        return max(WINDOW, 2 * sum(lane.limit.limit for lane in self.engine.lanes))

    def feed(self, source: Iterator[Request]) -> bool:
        """Hand over some requests; False when there are no more."""
        if self.stopped:
            return False
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
        return self.submitted - self.done <= self.window // 2

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


class _One:
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
        elif not self.loop.is_closed():
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


_PENDING = Failed(Kind.CANCELLED, "not made", tries=0)


def _wait(
    batch: _Batch,
    wake: threading.Event,
    until: Callable[[], bool],
    total: int,
    progress: Progress | None,
) -> None:
    while True:
        wake.clear()
        if batch.ready(until):
            return
        if progress is not None:
            progress(batch.done, max(total, batch.submitted))
        wake.wait(PROGRESS_S if progress is not None else None)


async def _await(
    batch: _Batch,
    wake: asyncio.Event,
    until: Callable[[], bool],
    total: int,
    progress: Progress | None,
) -> None:
    while True:
        wake.clear()
        if batch.ready(until):
            return
        waiting: Awaitable[object] = wake.wait()
        if progress is None:
            await waiting
            continue
        progress(batch.done, max(total, batch.submitted))
        try:
            await asyncio.wait_for(waiting, PROGRESS_S)
        except TimeoutError:
            continue


def _setter(event: asyncio.Event) -> Callable[[], None]:
    loop = asyncio.get_running_loop()

    def set_soon() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return set_soon


def _opened(given: "str | os.PathLike[str] | Cache | None") -> "tuple[Cache | None, bool]":
    """The cache, and whether it is the pool's own to close."""
    if given is None:
        return None, False
    from batchwright.calls.cache import Cache

    if isinstance(given, Cache):
        return given, False
    return Cache(Path(given)), True


def _forgotten(running: Background, engine: Engine, own_cache: bool) -> None:
    """A pool that nobody holds any more closes itself."""
    if running.pid == os.getpid() and running.thread.is_alive() and not engine.closed:
        asyncio.run_coroutine_threadsafe(engine.close(own_cache), running.loop)
