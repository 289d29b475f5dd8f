"""Requests in, outcomes out, in order: the pool that scripts, notebooks and trainers hold.

    request -> cache -> limit -> endpoint -> outcome

The work is done by `engine.py` on the background loop; here are the ways to hand it over and to
wait: `map` and `for` in plain code, `amap`, `call` and `async for` on any event loop.
"""

import asyncio
import ctypes
import os
import threading
import weakref
from collections.abc import AsyncIterable, Coroutine, Iterable, Iterator, Sized
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.engine.budgets import ErrorBudget
from batchwright.calls.engine.dispatch import Rules
from batchwright.calls.engine.endpoint import Lane, limit_for
from batchwright.calls.engine.engine import Engine
from batchwright.calls.engine.loop import Background, background
from batchwright.calls.engine.retry import Retry
from batchwright.calls.engine.stats import Ledger, Prices
from batchwright.calls.engine.stream import Stream
from batchwright.calls.engine.waiting import Batch, Interrupted, One, Progress, setter
from batchwright.calls.outcome import Outcome
from batchwright.calls.request import Request
from batchwright.errors import ConfigError
from batchwright.events import EventLog
from batchwright.models import registry as models

if TYPE_CHECKING:
    from batchwright.calls.cache.store import Cache
    from batchwright.calls.limit.auto import Limit

__all__ = ["Interrupted", "Pool", "Progress", "Stream"]

T = TypeVar("T")


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
        limit_for(self.endpoints[0], limit, False)

    def map(
        self, requests: Iterable[Request], *, progress: Progress | None = None
    ) -> list[Outcome]:
        """Make all calls and give their outcomes in the order of the requests.

        Ctrl-C once stops sending, keeps what came back and raises `Interrupted`; twice stops now.
        """
        wake = threading.Event()
        batch = Batch(self._started(), wake.set, ordered=True)
        source = self._checked(requests)
        total = len(requests) if isinstance(requests, Sized) else 0
        try:
            while batch.feed(source):
                batch.wait(wake, batch.room, total, progress)
            batch.wait(wake, batch.all_done, total, progress)
        except KeyboardInterrupt:
            batch.stop(wake, "stopped by Ctrl-C")
            interrupted = Interrupted()
            interrupted.outcomes = batch.results
            raise interrupted from None
        except BaseException:
            batch.stop(wake, "the requests could not be read")
            raise
        if progress is not None:
            progress(batch.done, batch.submitted)
        return batch.judged(self._rules.budget is not None)

    async def amap(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        *,
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """As `map`, on the caller's own event loop; cancelling it cancels the calls."""
        wake = asyncio.Event()
        batch = Batch(self._started(here=True), setter(wake), ordered=True)
        total = len(requests) if isinstance(requests, Sized) else 0
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    batch.feed(iter([self._check(request)]))
                    await batch.await_(wake, batch.room, total, progress)
            else:
                source = self._checked(requests)
                while batch.feed(source):
                    await batch.await_(wake, batch.room, total, progress)
                    await asyncio.sleep(0)
            await batch.await_(wake, batch.all_done, total, progress)
        except BaseException:
            batch.cancel("cancelled by its caller")
            raise
        if progress is not None:
            progress(batch.done, batch.submitted)
        return batch.judged(self._rules.budget is not None)

    def stream(self, requests: Iterable[Request]) -> Stream:
        """(index, outcome) as they come, by `for` or by `async for`; leaving early cancels."""
        return Stream(self._started, self._checked(requests))

    async def call(self, request: Request) -> Outcome:
        """One call, from any event loop."""
        running = self._started(here=True)
        loop = asyncio.get_running_loop()
        sink = One(loop, loop.create_future(), running[0].loop is loop)
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

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
            import_module("batchwright.calls.wire.http")
        keeper = None
        if self._cache is not None:
            from batchwright.calls.cache.writer import Keeper

            keeper = Keeper(self._cache, running.loop, lambda error: engine.abort(error))
        lanes = [self._lane(endpoint) for endpoint in self.endpoints]
        ledger = Ledger(self._prices)
        engine = Engine(running.loop, lanes, self._rules, ledger, keeper, self._events)
        self._engine, self._background = engine, running
        running.at_exit.add(self)
        weakref.finalize(self, _forgotten, running, engine, self._own_cache).atexit = False
        return running, engine

    def _lane(self, endpoint: Endpoint) -> Lane:
        limit, found = limit_for(endpoint, self._limit, self._rules.remember)
        rates = None
        if self._rates != (None, None):
            from batchwright.calls.limit.rates import RateBuckets

            rates = RateBuckets(models.home() / "rates.db", *self._rates, name=endpoint.name)
        alone = len(self.endpoints) == 1
        return Lane(endpoint, limit, found and self._rules.remember, rates, alone)

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


def _opened(given: "str | os.PathLike[str] | Cache | None") -> "tuple[Cache | None, bool]":
    """The cache, and whether it is the pool's own to close."""
    if given is None:
        return None, False
    from batchwright.calls.cache.store import Cache

    if isinstance(given, Cache):
        return given, False
    return Cache(Path(given)), True


def _forgotten(running: Background, engine: Engine, own_cache: bool) -> None:
    """A pool that nobody holds any more closes itself."""
    if running.pid == os.getpid() and running.thread.is_alive() and not engine.closed:
        asyncio.run_coroutine_threadsafe(engine.close(own_cache), running.loop)
