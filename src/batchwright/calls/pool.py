"""The pool that scripts, notebooks and trainers hold: requests in, outcomes out, in order.

    request -> cache -> limit -> endpoint -> outcome

`engine/engine.py` does the work on the background loop. Here are the ways to submit and to wait:
`map` and `for` in plain code, `amap`, `call` and `async for` on any event loop.
"""

import asyncio
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterable, Coroutine, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

from batchwright.calls.cache.store import Cache
from batchwright.calls.cache.thread import CacheThread
from batchwright.calls.endpoints import Endpoint, scope_of
from batchwright.calls.engine.budgets import ErrorBudget, Ledger
from batchwright.calls.engine.endpoint import SharedRateLimit, Upstream, limit_for
from batchwright.calls.engine.engine import Engine, Rules
from batchwright.calls.engine.retry import Retry
from batchwright.calls.engine.stats import Prices, Stats
from batchwright.calls.engine.waiting import (
    AnyEngine,
    Batch,
    Interrupted,
    One,
    Progress,
    Stream,
    check,
)
from batchwright.calls.limit.deadline import DEADLINE_S
from batchwright.calls.limit.fixed import Limit
from batchwright.calls.loop import Background, background, forgets_after_fork, unforked
from batchwright.calls.outcome import Outcome
from batchwright.calls.request import Request
from batchwright.calls.wire.discovery import check_any
from batchwright.errors import ConfigError, NoServer
from batchwright.events import EventLog
from batchwright.models import registry as models

__all__ = ["Interrupted", "Pool", "Progress", "Stream"]

T = TypeVar("T")
log = logging.getLogger(__name__)

LOCKED_S = 5.0
"""A cache file that another process has locked is waited for, so long or half of the deadline."""


class Pool:
    """Calls to one or several endpoints, with as many in flight as they sustain.

    Every request ends as exactly one outcome, in order: `Done`, or `Failed` with its kind, within
    `deadline_s` seconds of its first try, retries and waits included. A try that hangs while calls
    sent later are answered is cut off earlier and made again, elsewhere if possible. A request that
    cannot be sent at all fails once nothing has come back for `deadline_s`, or for a minute if the
    server cannot be reached. With a `cache` a response is on
    disk before the caller has it, equal exact requests are made once, in this process and in all
    that share the file, and a run that was killed resumes where it was.

    `limit` is the number of calls in flight for each endpoint: a number, below which rejections
    bring it until they end, an object of `batchwright.calls.limit`, or "auto", which finds it and
    starts from it in the next run (unless `remember` is False). `rpm` and `tpm` hold for each
    endpoint and all processes of this user. `prices` are dollars for a million tokens, (prompt,
    completion) by model; `max_cost` is a spending cap: a call is sent only if it cannot exceed it,
    with a token for each byte of its prompt and `max_tokens` (or, without, the `model_max_tokens`
    of its model), beside all that are in flight and those whose response never came. A call without
    such a bound is refused. A `ledger` hears of every try before it is sent.

    >>> from batchwright.calls import chat
    >>> with Pool(Endpoint(lambda requests: ["4"] * len(requests))) as pool:
    ...     [outcome.text for outcome in pool.map([chat("m", "2+2?"), chat("m", "1+3?")])]
    ['4', '4']
    """

    def __init__(
        self,
        *endpoints: Endpoint | str,
        limit: Literal["auto"] | int | Limit = "auto",
        deadline_s: float = DEADLINE_S,
        tries: int = 5,
        cache: str | os.PathLike[str] | Cache | None = None,
        budget: ErrorBudget | None = None,
        hedge: bool = True,
        rpm: float | None = None,
        tpm: float | None = None,
        prices: Prices | None = None,
        max_cost: float | None = None,
        model_max_tokens: Mapping[str, int] | None = None,
        ledger: Ledger | None = None,
        events: EventLog | None = None,
        remember: bool = True,
        seed: int = 0,
    ) -> None:
        for given in endpoints:
            if not isinstance(given, Endpoint | str):
                raise ConfigError(
                    f"an endpoint is an address or an Endpoint, got {type(given).__name__}; "
                    f"write Pool(a, b), or Pool(*endpoints) with a list"
                )
        self.endpoints = tuple(e if isinstance(e, Endpoint) else Endpoint(e) for e in endpoints)
        if not self.endpoints:
            raise ConfigError("a pool needs an endpoint; give an address or Endpoint(function)")
        names = [endpoint.name for endpoint in self.endpoints]
        if len(set(names)) != len(names):
            raise ConfigError(f"endpoints must have different names, got {names}; give name=...")
        self._check_keys()
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0, got {deadline_s}")
        if max_cost is not None and not max_cost >= 0:
            raise ConfigError(f"max_cost must be at least 0, got {max_cost}")
        if max_cost is not None and not prices:
            raise ConfigError(
                "max_cost needs prices; give prices={model: (prompt, completion)} per million"
            )
        if not isinstance(limit, str | int) and len(self.endpoints) > 1:
            raise ConfigError(
                "one limit object cannot serve several endpoints; give limit='auto' or a number"
            )
        self._limit = limit
        self._rates = (rpm, tpm)
        self._prices = dict(prices or {})
        self._most_tokens = dict(model_max_tokens or {})
        self._events = events
        retry = Retry(tries, seed=seed)
        self._rules = Rules(deadline_s, retry, hedge, max_cost, budget, remember, ledger)
        self._own_cache = cache is not None and not isinstance(cache, Cache)
        self._cache = cache if cache is None or isinstance(cache, Cache) else Cache(Path(cache))
        for one in self.endpoints:
            if one.nameless and self._cache is not None and self._cache.mode == "use":
                log.warning(
                    "no later run finds the cached responses of %s: a lambda, a closure, a "
                    "partial, a method or an object may be another model then; give it a name, "
                    "as in Endpoint(function, name='judge')",
                    one.name,
                )
        self._lock = threading.Lock()
        self._engine: AnyEngine | None = None
        self._background: Background | None = None
        self._closed = False
        forgets_after_fork[id(self)] = self
        # A wrong limit is to be known here, not at the first call.
        limit_for(self.endpoints[0], limit)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a Pool cannot be sent to another process; make one there, when it is first used"
        )

    def map(
        self, requests: Iterable[Request], *, progress: Progress | None = None
    ) -> list[Outcome]:
        """Make all calls and return their outcomes in the order of the requests.

        Ctrl-C once stops sending, commits what came back and raises `Interrupted`; twice stops
        at once.
        """
        batch = Batch(self._started(), self._priced(), ordered=True)
        return batch.run(requests, progress, strict=self._rules.budget is not None)

    async def amap(
        self,
        requests: Iterable[Request] | AsyncIterable[Request],
        *,
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """As `map`, on the caller's own event loop; cancelling it cancels the calls."""
        batch = Batch(self._started(here=True), self._priced(), ordered=True)
        return await batch.run_async(requests, progress, strict=self._rules.budget is not None)

    def stream(self, requests: Iterable[Request]) -> Stream:
        """(index, outcome) as they complete, by `for` or `async for`; leaving early cancels."""
        return Stream(self._started, requests, self._priced())

    async def call(self, request: Request) -> Outcome:
        """One call, from any event loop."""
        running, engine = self._started(here=True)
        loop = asyncio.get_running_loop()
        sink = One(loop, loop.create_future(), running.loop is loop)
        items = [(0, check(request, self._priced()))]
        running.loop.call_soon_threadsafe(engine.submit, sink, items)
        try:
            return await sink.future
        except asyncio.CancelledError:
            why = "cancelled by its caller"
            running.loop.call_soon_threadsafe(engine.cancel, sink, why)
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pool's own loop from plain code; inside it, `await pool.call`."""
        running, _ = self._started()
        future = asyncio.run_coroutine_threadsafe(work, running.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel(self) -> None:
        """End every open call as `cancelled`; whoever waits gets what came back before."""
        engine, running = self._engine, self._background
        if engine is not None and running is not None:
            running.loop.call_soon_threadsafe(engine.cancel, None, "cancelled by Pool.cancel")

    def check(self, requests: Sequence[Request] = ()) -> None:
        """Look whether a server is there, unless there is a cached response to each request.

        Raises:
            NoServer: none of the endpoints accepts a connection.
        """
        try:
            self.run(check_any(self.endpoints))
        except NoServer:
            if self._cache is None or not requests:
                raise
            scope = scope_of(self.endpoints)
            keys = [request.scoped(scope).key for request in requests]
            found = self._cache.get_many(keys)
            if any(key not in found for key in keys):
                raise

    def stats(self) -> dict[str, Any]:
        """Counts, latencies, tokens, cost, and the state of each endpoint."""
        running, engine = self._started(here=True)
        if running.here:
            return engine.stats()

        async def stats() -> dict[str, Any]:
            return engine.stats()

        return asyncio.run_coroutine_threadsafe(stats(), running.loop).result()

    def close(self) -> None:
        """Cancel what is open, commit what came back, close connections and files."""
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
        """After a fork: leave everything to the parent and start over."""
        self._lock = threading.Lock()
        if self._engine is not None:
            # For ever: closing its sockets here would take them out of the parent's selector.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._engine))
        self._engine = self._background = None

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

    def _check_keys(self) -> None:
        """A key that is missing is to be known here, not at the first call."""
        for endpoint in self.endpoints:
            endpoint.api_key()

    def _priced(self) -> Stats | None:
        """What bounds the cost of a call under a spending cap; None without one."""
        return None if self._rules.max_cost is None else Stats(self._prices, self._most_tokens)

    def _started(self, here: bool = False) -> tuple[Background, AnyEngine]:
        """The engine of this process, made at the first call, and again after a fork."""
        running = self._background
        engine = self._engine
        if engine is None or running is None or running.pid != os.getpid():
            with unforked(), self._lock:
                running, engine = self._start()
        if running.here and not here:
            raise ConfigError(
                "map, run and for block, and this code runs on the pool's own event loop, which "
                "would deadlock; use await pool.amap, await pool.call or async for"
            )
        return running, engine

    def _start(self) -> tuple[Background, AnyEngine]:
        if self._closed:
            raise ConfigError("this pool is closed; make another one")
        running = background()
        if self._engine is not None and self._background is running:
            return running, self._engine
        # Importing aiohttp takes a while, which is nobody's deadline to lose; and it is not to be
        # imported by the loop, where a fork would interrupt it, nor what it needs to find a host.
        import_module("batchwright.calls.wire.http")
        import_module("encodings.idna")
        upstreams = [self._upstream(endpoint) for endpoint in self.endpoints]
        if self._cache is not None:
            # Who locks the file must not hold the calls much longer than they may take.
            self._cache.wait_at_most(max(LOCKED_S, self._rules.deadline_s / 2))
        cache = None if self._cache is None else CacheThread(self._cache, running.loop)
        stats = Stats(self._prices, self._most_tokens)
        scope = scope_of(self.endpoints)
        engine = Engine(running.loop, upstreams, self._rules, stats, cache, self._events, scope)
        self._engine, self._background = engine, running
        running.at_exit.add(self)
        weakref.finalize(self, _forgotten, running, engine, self._own_cache).atexit = False
        return running, engine

    def _upstream(self, endpoint: Endpoint) -> Upstream:
        rules = self._rules
        limit, learns = limit_for(endpoint, self._limit, rules.deadline_s)
        rates = None
        if self._rates != (None, None):
            rates = SharedRateLimit(models.home() / "rates.db", endpoint.name, *self._rates)
        alone = len(self.endpoints) == 1
        upstream = Upstream(endpoint, limit, learns, rates, alone)
        if learns and rules.remember:
            upstream.recall()
        return upstream


def _forgotten(running: Background, engine: AnyEngine, own_cache: bool) -> None:
    """A pool that nobody holds any more closes itself."""
    if running.pid == os.getpid() and running.thread.is_alive() and not engine.closed:
        asyncio.run_coroutine_threadsafe(engine.close(own_cache), running.loop)
