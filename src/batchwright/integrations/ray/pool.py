"""One pool for a whole Ray cluster: one limit, one cache and one spending cap for every worker.

    worker -> group of requests -> named actor -> Pool -> server
           <- outcomes in order <-

Everybody who makes a `RayPool` with the same settings, on any node and in any job of the cluster,
calls through the same actor. Ray places it and starts it again when its node is lost. What a
caller had sent by then and not got back is sent to the next one: with a cache, responses that were
on disk are not paid for again.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from batchwright import __version__
from batchwright.calls import Endpoint, ErrorBudget, Outcome, Pool, Request
from batchwright.calls.engine.waiting import Batch
from batchwright.calls.limit.deadline import DEADLINE_S
from batchwright.calls.loop import Background, background, in_thread
from batchwright.calls.outcome import Failed, Kind
from batchwright.errors import ConfigError, NoServer, need, one_line
from batchwright.fingerprint import digest
from batchwright.integrations.ray.cluster import join, raised_there, same_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchwright.calls.engine.dispatch import Sink

__all__ = ["RayPool"]

NAMESPACE = "batchwright"
"""Of the actors. Every job has a namespace of its own; the actors are shared in this one."""
GROUP = 64
"""Requests that travel in one message, which costs more than a call does."""
AT_ONCE = 20_000
"""Groups that an actor takes at a time; its pool decides how many calls are in flight."""
PAUSE_S = 0.5
"""Between two tries to reach an actor that was lost."""
START_S = 120.0
"""How long the start of an actor is waited for: its node may have to import much first."""
IDLE_S = 600.0
"""An actor without calls ends after this time; the next caller starts another one."""


class RayPool(Pool):
    """A `Pool` that all processes of a Ray cluster share: same methods, same outcomes.

    The settings are those of `Pool`; equal settings are one pool, and `name` can separate two.
    Limit, rates, spending cap and cache count for the whole cluster, and equal exact requests of
    all callers are made once. `cache` is a path on the node of the actor: put it where all nodes
    see it. Ray is asked to start the actor on the node of its first caller, but may choose another
    one, and does if a node is lost; `stats()["node"]` tells which.
    API keys are read by the actor, from the environment of its node; they never travel.

    Joins the cluster of RAY_ADDRESS at the first call, unless `ray.init` was called before. The
    actor outlives its callers by `idle_s` seconds. A lost actor is started again, and requests that
    found none for `deadline_s` seconds fail as `unreachable`.
    """

    def __init__(
        self,
        *endpoints: Endpoint | str,
        limit: Literal["auto"] | int = "auto",
        deadline_s: float = DEADLINE_S,
        tries: int = 5,
        cache: str | os.PathLike[str] | None = None,
        budget: ErrorBudget | None = None,
        hedge: bool = True,
        rpm: float | None = None,
        tpm: float | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
        max_cost: float | None = None,
        model_max_tokens: Mapping[str, int] | None = None,
        name: str = "",
        idle_s: float = IDLE_S,
    ) -> None:
        self._ray = need("ray", extra="ray")
        if not idle_s > 0:
            raise ConfigError(f"idle_s must be above 0, got {idle_s}")
        self._settings: dict[str, Any] = {
            "limit": limit,
            "deadline_s": deadline_s,
            "tries": tries,
            "budget": budget,
            "hedge": hedge,
            "rpm": rpm,
            "tpm": tpm,
            "prices": dict(prices or {}),
            "max_cost": max_cost,
            "model_max_tokens": dict(model_max_tokens or {}),
        }
        if not isinstance(limit, str | int):
            raise ConfigError("the limit of a RayPool is 'auto' or a number, not an object")
        super().__init__(*endpoints, **self._settings)
        if any(endpoint.function is not None for endpoint in self.endpoints):
            raise ConfigError("a RayPool takes addresses and local models, not functions")
        self._settings["cache"] = None if cache is None else os.path.abspath(cache)
        self._idle_s = idle_s
        told = [[repr(getattr(one, field)) for field in one.__slots__] for one in self.endpoints]
        same = {key: repr(value) for key, value in self._settings.items()}
        self.name = f"pool-{digest(name, told, same)[:16]}"
        """Of the actor, in the namespace `batchwright`."""

    def stats(self) -> dict[str, Any]:
        """As `Pool.stats`, of all callers since the actor started; `caller` counts those from here.

        `node` is the id of the node that the actor is on. Blocks; from an event loop, use a thread.
        """
        engine = self._started(here=True)[1]
        assert isinstance(engine, _Groups)
        return {**self._ask("stats"), "caller": engine.counts()}

    def check(self, requests: Sequence[Request] = ()) -> None:
        """As `Pool.check`, from the node of the actor."""
        self._started(here=True)
        self._ask("check", list(requests))

    def shutdown(self) -> None:
        """End the actor for all callers; the next call of anybody starts another one."""
        self.close()
        if self._ray.is_initialized():
            with suppress(ValueError):
                actor = self._ray.get_actor(self.name, namespace=NAMESPACE)
                self._ray.kill(actor, no_restart=True)

    def __repr__(self) -> str:
        names = ", ".join(repr(endpoint.name) for endpoint in self.endpoints)
        return f"RayPool({names}, limit={self._limit!r}, cache={self._settings['cache']!r})"

    def _ask(self, method: str, *given: Any) -> Any:
        """What a method of the actor returns; an actor that is being started again is waited for.

        Raises:
            NoServer: there is none for two minutes.
        """
        errors = self._ray.exceptions
        end = time.monotonic() + START_S
        died = 0
        while True:
            try:
                left = max(1.0, end - time.monotonic())
                return self._ray.get(getattr(self._actor(), method).remote(*given), timeout=left)
            except errors.RayTaskError as error:
                raise raised_there(error) from None
            except (errors.RayActorError, errors.GetTimeoutError) as error:
                # One that was idle may have ended just now; one that cannot start dies each time.
                died += isinstance(error, errors.ActorDiedError)
                if time.monotonic() > end or died > 2:
                    raise NoServer(
                        f"the pool of the cluster does not start: {one_line(error)[:300]}; "
                        f"batchwright and its dependencies must be installed on every node"
                    ) from None
            time.sleep(PAUSE_S)

    def _check_keys(self) -> None:
        # The actor reads the keys.
        return None

    def _start(self) -> tuple[Background, Any]:
        if self._closed:
            raise ConfigError("this pool is closed; make another one")
        running = background()
        if self._engine is not None and self._background is running:
            return running, self._engine
        if not self._ray.is_initialized():
            join()
        version = self._ask("open")
        same_version(__version__, version, node="the node of the pool")
        engine = _Groups(self, running.loop)
        self._engine, self._background = engine, running
        running.at_exit.add(self)
        return running, engine

    def _actor(self) -> Any:
        """The actor of these settings, started if there is none."""
        ray = self._ray
        with suppress(ValueError):
            return ray.get_actor(self.name, namespace=NAMESPACE)
        node = ray.get_runtime_context().get_node_id()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        owner = ray.remote(_Owner).options(
            name=self.name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=AT_ONCE,
            num_cpus=0,
            scheduling_strategy=here,
        )
        return owner.remote(self.endpoints, self._settings, self.name, self._idle_s)


class _Groups:
    """In place of an engine: takes requests to the actor in groups, and its outcomes back."""

    def __init__(self, pool: RayPool, loop: asyncio.AbstractEventLoop) -> None:
        self.closed = False
        self.most_in_flight = 0
        """As the actor said last."""
        self._ray = pool._ray
        self._find = pool._actor
        self._deadline_s = pool._settings["deadline_s"]
        self._draws = pool._settings["cache"] is not None
        self._loop = loop
        self._actor = pool._actor()
        self._open: dict[asyncio.Task[None], Sink] = {}
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def submit(self, sink: "Sink", items: Iterable[tuple[int, Request]]) -> None:
        """Take requests; each is delivered to the sink once."""
        given = list(items)
        self._counts["asked"] += len(given)
        for start in range(0, len(given), GROUP):
            task = self._loop.create_task(self._group(sink, given[start : start + GROUP]))
            self._open[task] = sink
            task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _group(self, sink: "Sink", items: list[tuple[int, Request]]) -> None:
        outcomes: Sequence[Outcome]
        try:
            if self.closed or sink.stopped:
                raise asyncio.CancelledError
            outcomes = await self._outcomes([self._named(request) for _, request in items])
        except asyncio.CancelledError:
            outcomes = [Failed(Kind.CANCELLED, "it was cancelled", tries=0)] * len(items)
        except Exception as error:
            # Broad on purpose: whatever it is, it ends the run of those who wait for it.
            sink.abort(error)
            outcomes = [Failed(Kind.CANCELLED, "the run was stopped", tries=0)] * len(items)
        for (index, _), outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Failed):
                self._failed[outcome.kind] += 1
            else:
                self._counts[outcome.source] += 1
            sink.deliver(index, outcome)

    async def _outcomes(self, requests: list[Request]) -> list[Outcome]:
        """What the actor says, or the next one if it is lost before it has said so."""
        errors = self._ray.exceptions
        lost_at: float | None = None
        while True:
            actor = self._actor
            answer = None
            try:
                answer = actor.answer.remote(requests)
                found: list[Outcome]
                found, self.most_in_flight = await answer
                return found
            except asyncio.CancelledError:
                if answer is not None and self._ray.is_initialized():
                    self._ray.cancel(answer)
                raise
            except errors.TaskCancelledError:
                raise asyncio.CancelledError from None
            except errors.RayTaskError as error:
                raise raised_there(error) from None
            except errors.RayActorError as error:
                now = self._loop.time()
                lost_at = now if lost_at is None else lost_at
                self._counts["lost_groups"] += 1
                if now - lost_at > self._deadline_s:
                    why = f"the pool's actor was lost and did not come back: {one_line(error)}"
                    return [Failed(Kind.UNREACHABLE, why, seconds=now - lost_at)] * len(requests)
            await asyncio.sleep(PAUSE_S)
            if self._actor is actor:
                found_again = await in_thread(self._find)
                if self._actor is actor:
                    self._actor = found_again

    def _named(self, request: Request) -> Request:
        """A random request with a draw of its own, so that a response on disk is found again."""
        if request.exact or not self._draws:
            return request
        draw = int.from_bytes(os.urandom(7))
        return Request(request.kind, request.body, draw, request.salt)

    def cancel(self, sink: "Sink | None", why: str) -> None:
        """End everything that a sink (or, for None, anyone) still waits for."""
        for task, waits in list(self._open.items()):
            if sink is None or waits is sink:
                task.cancel()

    def counts(self) -> dict[str, Any]:
        """Outcomes of this process by their source, and failures by kind."""
        names = ("asked", "live", "cache", "shared", "lost_groups")
        counts = {name: self._counts[name] for name in names}
        return {**counts, **self._counts, "failed_by_kind": dict(self._failed)}

    def stats(self) -> dict[str, Any]:
        """Those of this process alone."""
        return self.counts()

    def abort(self, error: Exception) -> None:
        """Give up altogether and tell everyone who waits why."""
        for sink in set(self._open.values()):
            sink.abort(error)
        self.cancel(None, "the run was stopped")

    async def close(self, close_cache: bool) -> None:
        """Cancel what is open; the actor stays for others."""
        self.closed = True
        self.cancel(None, "the pool was closed")
        if self._open:
            await asyncio.wait(self._open)


class _Owner:
    """The actor: a pool that is opened by its first use, and again after a restart."""

    def __init__(
        self, endpoints: Sequence[Endpoint], settings: dict[str, Any], name: str, idle_s: float
    ) -> None:
        self._endpoints = endpoints
        self._settings = settings
        self._pool: Pool | None = None
        self._used = time.monotonic()
        self._busy = 0
        threading.Thread(target=self._end_idle, args=(name, idle_s), daemon=True).start()

    def _opened(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(*self._endpoints, **self._settings)
        return self._pool

    @contextmanager
    def _at_work(self) -> "Iterator[Pool]":
        self._busy += 1
        try:
            yield self._opened()
        finally:
            self._busy -= 1
            self._used = time.monotonic()

    async def open(self) -> str:
        """The version of the package here; what is wrong with the settings is known by now."""
        with self._at_work():
            return __version__

    async def answer(self, requests: list[Request]) -> tuple[list[Outcome], int]:
        """Outcomes in order, and how many calls may be in flight by now."""
        with self._at_work() as pool:
            running = pool._started(here=True)
            batch = Batch(running, pool._priced(), ordered=True)
            # Whether every call of many failed is for the caller to say, who knows the whole batch.
            outcomes = await batch.run_async(requests, None, strict=False)
            return outcomes, running[1].most_in_flight

    async def check(self, requests: list[Request]) -> None:
        with self._at_work() as pool:
            await asyncio.to_thread(pool.check, requests)

    async def stats(self) -> dict[str, Any]:
        import ray

        with self._at_work() as pool:
            counts = await asyncio.to_thread(pool.stats)
        return {**counts, "node": ray.get_runtime_context().get_node_id()}

    def _end_idle(self, name: str, idle_s: float) -> None:
        import ray

        while self._busy or time.monotonic() - self._used < idle_s:
            time.sleep(idle_s / 20)
        if self._pool is not None:
            self._pool.close()
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
