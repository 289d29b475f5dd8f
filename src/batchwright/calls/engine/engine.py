"""The life of a request, top to bottom: every step from `submit` to `_finish` is decided here.

    submit    join an equal call in flight, or get what it said before; else look in the cache, or
              go to the queue
    _look     the cache has the response: finish; else ask for a lease
    _lease    this process may make the call: to the queue; another one makes it: look again later
    _dispatch a free slot takes the next job of the queue
    _attempt  one try at a server, cut off at the deadline
    _settle   a response goes to the cache, a failure is retried or is the outcome
    _commit   responses are on disk before anybody has them
    _finish   the outcome goes to everyone who waits for it

Cache, dispatch, wire, retry rules and budgets return data and call nothing here. Everything runs
on the background loop, so nothing needs a lock.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from batchwright.calls.cache.entries import Row
from batchwright.calls.cache.limits import save_limits
from batchwright.calls.cache.thread import CacheThread
from batchwright.calls.engine.budgets import ErrorBudget, Failures, Ledger, SpendingCap
from batchwright.calls.engine.dispatch import Attempt, Dispatch, Job, Send, Sink, Spent, Wait
from batchwright.calls.engine.endpoint import Upstream
from batchwright.calls.engine.retry import Retry
from batchwright.calls.engine.stats import Stats, StatsLog
from batchwright.calls.loop import in_thread
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source
from batchwright.calls.request import Request
from batchwright.errors import BudgetExceeded, CannotWrite
from batchwright.events import EventLog

__all__ = ["Engine", "Rules"]

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK_S = 0.05
DEADLINE_SOON_S = 0.2
"""Deadlines as near as this have a timer; the others are looked at with every tick."""
COMMIT_S = 0.008
"""How long a response waits for others to be committed with, if any are in flight; a model takes
far longer."""
COMMIT_ROWS = 128
"""So many responses are committed without waiting for more."""
POLL_S = 0.1
"""How often calls that another process is making are looked up in the cache."""
RENEW_LEASES_S = 10.0
UNREACHABLE_S = 60.0
"""How long a server that cannot be reached is waited for."""
SAVE_LIMITS_S = 30.0
SILENT_SHARE = 0.25
"""After this share of the deadline without any response, a limit that is found allows one more."""
MEMORY_RESPONSES, MEMORY_BYTES = 4096, 16 * 2**20
"""Exact responses that a pool without a cache remembers: so many, of so many bytes together."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a pool treats its calls."""

    deadline_s: float
    retry: Retry
    hedge: bool = True
    max_cost: float | None = None
    budget: ErrorBudget | None = None
    remember: bool = True
    ledger: Ledger | None = None


class Engine:
    """Takes requests to endpoints and outcomes to those who wait."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        upstreams: Sequence[Upstream],
        rules: Rules,
        stats: Stats,
        cache: CacheThread | None,
        events: EventLog | None,
        scope: str,
    ) -> None:
        self.loop = loop
        self.upstreams = upstreams
        self.closed = False
        self._rules = rules
        self._scope = scope
        self._stats = stats
        self._log = StatsLog(events, stats, upstreams)
        self._failures = Failures(rules.budget) if rules.budget else None
        cap = None if rules.max_cost is None else SpendingCap(rules.max_cost, stats)
        self._dispatcher = Dispatch(upstreams, stats, cap)
        self._queue = self._dispatcher.queue
        self._live: set[Job] = set()
        self._by_key: dict[bytes, Job] = {}
        """Exact jobs by key: an equal request joins instead of being sent."""
        self._numbers = 0
        self._models: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking = False
        self._wake: asyncio.TimerHandle | None = None
        self._response_at = 0.0
        """When the last response came."""
        self._last_failure: Failed | None = None
        self._limits_saved_at = 0.0

        self._cache = cache
        self._memory: OrderedDict[bytes, tuple[Done, int]] = OrderedDict()
        """Exact responses that are not on disk, with their sizes, the oldest first."""
        self._memory_bytes = 0
        self._unleased: deque[Job] = deque()
        """Not in the cache; another process may be making the same call."""
        self._elsewhere: dict[bytes, Job] = {}
        """Another process is making these calls."""
        self._leasing = False
        self._uncommitted: list[tuple[Job, Done, Row | None]] = []
        self._released: list[bytes] = []
        """Leases to give back with the next commit."""
        self._committing = False
        self._polled_at = self._renewed_at = 0.0

    @property
    def most_in_flight(self) -> int:
        """Calls in flight that the limits of all endpoints allow now."""
        return sum(one.limit.limit for one in self.upstreams)

    def submit(self, sink: Sink, items: Iterable[tuple[int, Request]]) -> None:
        """Take requests; each is delivered to the sink once, or the sink gets an error."""
        try:
            self._submit(sink, items)
        except Exception as error:
            # Broad on purpose: those that were not taken are known to nobody else.
            sink.abort(error)
            raise

    def _submit(self, sink: Sink, items: Iterable[tuple[int, Request]]) -> None:
        to_look_up: list[Job] = []
        scope = self._scope
        unwritten = self._cache is None or not self._cache.writes
        for index, request in items:
            self._stats.asked += 1
            if request.model not in self._models:
                self._meet(request.model)
            if self.closed or sink.stopped:
                failed = _cancelled("the pool is closed" if self.closed else "it was cancelled")
                self._stats.failure(failed)
                sink.deliver(index, failed)
                continue
            key = request.scoped(scope).key if request.exact else None
            twin = None if key is None else self._by_key.get(key)
            if twin is not None:
                twin.waiters.append((sink, index))
                continue
            if key is not None and (unwritten or self._memory):
                known = self._recall(sink, key, index)
                if known is not None:
                    self._stats.hits += 1
                    self._stats.done += 1
                    sink.deliver(index, _copied(known, "cache"))
                    continue
            self._numbers += 1
            job = Job(request, key, self._numbers, sink.born, [(sink, index)])
            self._live.add(job)
            if key is not None:
                self._by_key[key] = job
            if key is None or self._cache is None:
                self._queue.append(job)
            else:
                to_look_up.append(job)
        if to_look_up:
            self._spawn(self._look(to_look_up, "cache"))
        self._start_ticking()
        self._dispatch()

    def _meet(self, model: str) -> None:
        self._models.add(model)
        for upstream in self.upstreams:
            upstream.meet(model)

    def _recall(self, sink: Sink, key: bytes, index: int) -> Done | None:
        """An exact response of this pool that is not on disk, so that it is not paid for twice."""
        known = sink.earlier(key, index)
        if known is None and key in self._memory:
            known = self._memory[key][0]
        return known

    def _remember(self, key: bytes, done: Done, size: int) -> None:
        self._memory_bytes += size - self._memory.pop(key, (done, 0))[1]
        self._memory[key] = done, size
        while self._memory_bytes > MEMORY_BYTES or len(self._memory) > MEMORY_RESPONSES:
            _, (_, size) = self._memory.popitem(last=False)
            self._memory_bytes -= size

    async def _look(self, jobs: Sequence[Job], source: Literal["cache", "shared"]) -> None:
        """Finish what is in the cache; the rest needs a lease, or is sent if nothing is written."""
        assert self._cache is not None
        found = await self._ask_cache(self._cache.get(_keys(jobs)), {})
        for job in jobs:
            if job.over or job.key is None:
                continue
            done = found.get(job.key)
            if done is None:
                # If another process was making the call, it failed or has exited.
                (self._unleased if self._cache.writes else self._queue).append(job)
            elif source == "cache":
                self._stats.hits += 1
                self._finish(job, done)
            else:
                self._stats.shared += 1
                self._finish(job, _copied(done, "shared"))
        self._dispatch()

    def _lease_more(self) -> None:
        """Get more jobs ready to be sent if few are."""
        if self._unleased and not self._leasing and len(self._queue) < self._target_queue_size():
            self._leasing = True
            self._spawn(self._lease())

    def _target_queue_size(self) -> int:
        """How many jobs should be ready: two for each slot, so that none waits for the cache."""
        return max(32, 2 * sum(upstream.limit.limit for upstream in self.upstreams))

    async def _lease(self) -> None:
        """Ask for the right to make the next calls: other processes may share cache and list.

        Only a few at a time, or the first process would hold them all and the second only wait.
        """
        assert self._cache is not None
        jobs: list[Job] = []
        most = self._target_queue_size()
        while self._unleased and len(jobs) < most:
            job = self._unleased.popleft()
            if not job.over:
                jobs.append(job)
        keys = _keys(jobs)
        granted = await self._ask_cache(self._cache.lease(keys), set(keys))
        self._leasing = False
        for job, key in zip(jobs, keys, strict=True):
            if key not in granted:
                if not job.over:
                    self._elsewhere[key] = job
            elif job.over:
                self._release(key)
            else:
                job.leased = True
                self._queue.append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Fill the free slots."""
        self._lease_more()
        while self._queue:
            move = self._dispatcher.next(self.loop.time())
            if isinstance(move, Send):
                self._start_slot(move.upstream, move.job)
            else:
                self._hold_back(move)
                return

    def _hold_back(self, move: Wait | Spent | None) -> None:
        """Nothing can be sent now: dispatch again later, or give up what was never sent."""
        if isinstance(move, Wait):
            if self._wake is not None:
                if self._wake.when() <= move.until:
                    return
                self._wake.cancel()
            self._wake = self.loop.call_at(move.until, self._woken)
        elif isinstance(move, Spent):
            unsent = [*self._queue, *self._unleased]
            self._queue.clear()
            self._unleased.clear()
            for job in unsent:
                if not job.over and not job.attempts:
                    self._finish(job, _cancelled(move.why, job))

    def _woken(self) -> None:
        self._wake = None
        self._dispatch()

    def _start_slot(self, upstream: Upstream, job: Job, *, hedge: bool = False) -> None:
        upstream.in_flight += 1
        self._spawn(self._slot(upstream, job, hedge))

    async def _slot(self, upstream: Upstream, job: Job, hedge: bool) -> None:
        """Send one job after another, until there is none or the limit has come down.

        No task, no timer and no log line is made for a job that goes well, and there are no
        chunks and no barriers: a slot that becomes free takes the next job.
        """
        while True:
            await self._attempt(upstream, job, hedge)
            self._lease_more()
            if not self._queue:
                return
            now = self.loop.time()
            following = None
            if upstream.has_room(now):
                following = self._dispatcher.take(upstream, now)
                if isinstance(following, Job):
                    upstream.in_flight += 1
                else:
                    self._hold_back(following)
            if self._queue and upstream.in_flight < upstream.limit.limit:
                # The limit has gone up.
                self._dispatch()
            if not isinstance(following, Job):
                return
            job, hedge = following, False

    async def _attempt(self, upstream: Upstream, job: Job, hedge: bool) -> None:
        """One try; the deadline of a job counts from its first one."""
        now = self.loop.time()
        first = not job.deadline
        if first:
            job.begun, job.deadline = now, now + self._rules.deadline_s
        task = asyncio.current_task(self.loop)
        assert task is not None
        attempt = Attempt(upstream, task, now, hedge, upstream.answered + upstream.in_flight - 1)
        if not first or job.deadline <= now + DEADLINE_SOON_S:
            attempt.timer = self.loop.call_at(job.deadline, attempt.expire)
        job.attempts.append(attempt)
        if not hedge:
            self._dispatcher.in_flight[job] = attempt
        self._stats.sent += 1
        outcome: Outcome | None = None
        try:
            transport = upstream.transport or await upstream.connect()
            if self._rules.ledger is not None:
                self._rules.ledger.reserve(job.request, self._stats.most_cost(job.request))
            attempt.sent = True
            outcome = await transport.send(job.request)
        except asyncio.CancelledError:
            if not (attempt.dropped or attempt.late):
                raise
            while task.cancelling():
                task.uncancel()
            if attempt.late:
                outcome = self._cut_off(job, attempt)
        finally:
            now = self.loop.time()
            if attempt.timer is not None:
                attempt.timer.cancel()
            if outcome is not None and not attempt.hung:
                upstream.learn(now, now - attempt.started, outcome, job.number)
            self._stats.busy_s += now - attempt.started
            upstream.in_flight -= 1
            job.attempts.remove(attempt)
            if attempt.sent and not isinstance(outcome, Done):
                self._unpaid(job.request, None if attempt.late else outcome)
            self._dispatcher.ended(job, attempt)
            if job.held and not hedge:
                self._dispatcher.release(job)
        if outcome is not None and not attempt.dropped:
            self._settle(job, attempt, outcome, now)

    def _cut_off(self, job: Job, attempt: Attempt) -> Failed:
        """The failure of a try that got no response in time.

        A last try that the deadline left a moment for says less than the failures before it: a
        server that was busy for minutes did not time out.
        """
        now, last = self.loop.time(), job.last_failure
        moment = now - attempt.started < (now - job.begun) / 2
        if last is not None and moment and not attempt.hung:
            return Failed(last.kind, self._over(last), last.status)
        return Failed(Kind.TIMEOUT, self._why_late(attempt))

    def _unpaid(self, request: Request, outcome: Failed | None) -> None:
        """A try has ended without a response: nobody bills it, or it is not known who does."""
        if outcome is None or not outcome.free:
            self._stats.unanswered(request)
        elif self._rules.ledger is not None:
            self._rules.ledger.release(request)

    def _why_late(self, attempt: Attempt) -> str:
        """Whether a try hangs, waits in the server's queue, or nobody is there."""
        seconds = self.loop.time() - attempt.started
        text = f"no response within {seconds:.3g} s"
        if attempt.overtaken:
            return f"{text}, while {attempt.overtaken:,} calls sent later were answered: it hangs"
        if attempt.upstream.answered and attempt.upstream.nearly_idle:
            return f"{text}, with hardly another call at the server: it hangs"
        if attempt.upstream.answered and self._response_at > attempt.started:
            return (
                f"{text}: it was still in the server's queue; allow fewer calls in flight, or more "
                f"time"
            )
        return f"{text}, nor to any other call"

    def _settle(self, job: Job, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """A response ends a job; a failure may be retried."""
        if isinstance(outcome, Done):
            self._stats.responded(job.request, outcome, now - attempt.started)
            job.tries += 1
            rates = attempt.upstream.rates
            if rates is not None and outcome.usage is not None:
                rates.settle(job.estimate, outcome.usage.total)
            self._response_at = now
            job.over = True
            for other in job.attempts:
                other.drop()
            self._keep(job, outcome, _as_outcome(outcome, job, attempt, now))
            return
        if outcome.kind is Kind.RATE_LIMITED:
            job.rejects += 1
            self._stats.rejects += 1
            self._log.write_changes()
        elif attempt.upstream.is_down(now, outcome):
            # It costs time, as a rejection does, but none of the tries of this call.
            job.rejects += 1
        else:
            job.tries += 1
        self._last_failure = job.last_failure = outcome
        if not job.attempts:
            # Otherwise its hedge, or what it hedges, is still in flight.
            self._retry_or_fail(job, attempt.upstream, outcome, now)

    def _retry_or_fail(self, job: Job, upstream: Upstream, failed: Failed, now: float) -> None:
        """Try again, at once at another endpoint or here after a wait, or end the job as failed."""
        wait_s = self._rules.retry.wait_s(
            failed,
            tries=job.tries,
            rejects=job.rejects,
            left_s=job.deadline - now,
            number=job.number,
        )
        if wait_s is None:
            self._finish(job, _as_failure(failed, job, upstream, now))
            return
        self._stats.retries += 1
        if len(self.upstreams) > 1 and self._rules.max_cost is None:
            # Under a spending cap it goes back to the queue, where the cap is asked.
            other = self._dispatcher.least_loaded(now, but=upstream)
            if isinstance(other, Upstream) and other.rates is None:
                self._start_slot(other, job)
                return
        if job.deadline_timer is None:
            job.deadline_timer = self.loop.call_at(job.deadline, self._fail_at_deadline, job)
        job.retry_timer = self.loop.call_later(wait_s, self._retry, job)

    def _retry(self, job: Job) -> None:
        job.retry_timer = None
        if not job.over:
            self._queue.appendleft(job)
            self._dispatch()

    def _fail_at_deadline(self, job: Job) -> None:
        """End a job that waits for its next try; a try in flight has a timer of its own."""
        if job.over or job.attempts:
            return
        last = job.last_failure
        # Not `or`: a failure is false in a condition.
        last = Failed(Kind.TIMEOUT, "no endpoint took it") if last is None else last
        seconds, tries = self.loop.time() - job.begun, job.tries + job.rejects
        self._finish(job, Failed(last.kind, self._over(last), last.status, seconds, tries))

    def _over(self, last: Failed) -> str:
        return f"the deadline of {self._rules.deadline_s:g} s is over; the last try: {last.error}"

    def _keep(self, job: Job, response: Done, done: Done) -> None:
        """Put a response into the next commit; without a cache the job is finished."""
        if self._cache is None or not self._cache.writes or job.key is None:
            if job.key is not None:
                self._remember(job.key, done, _size(response))
            self._finish(job, done)
            return
        # Made here and not on the cache's thread: whoever holds the interpreter stops the loop.
        row = self._cache.store.row(job.request.scoped(self._scope), response)
        job.leased = False
        self._uncommitted.append((job, done, row))
        if row is None:
            self._remember(job.key, done, _size(response))
            # The lease does not end with the insert.
            self._release(job.key)
        self._commit_soon()

    def _release(self, key: bytes) -> None:
        """Give a lease back without a response, with the next commit."""
        self._released.append(key)
        self._commit_soon()

    def _commit_soon(self) -> None:
        if not self._committing:
            self._committing = True
            self._spawn(self._commit())

    async def _commit(self) -> None:
        """Write responses in groups; each job is finished when its group survives `kill -9`."""
        assert self._cache is not None
        while self._uncommitted or self._released:
            if len(self._uncommitted) < COMMIT_ROWS and self._dispatcher.in_flight:
                await asyncio.sleep(COMMIT_S)
            group, self._uncommitted = self._uncommitted, []
            released, self._released = self._released, []
            rows = [row for _, _, row in group if row is not None]
            errors = self._stats.cache_errors
            await self._ask_cache(self._cache.put(rows, released), None)
            if self._stats.cache_errors > errors:
                for job, done, row in group:
                    if job.key is not None and row is not None:
                        self._remember(job.key, done, len(row[4]))
            for job, done, _ in group:
                self._finish(job, done)
        self._committing = False

    def _finish(self, job: Job, outcome: Outcome) -> None:
        waiters = job.waiters
        self._end(job)
        error = self._over_budget(outcome, waiters)
        shared = outcome
        for place, (sink, index) in enumerate(waiters):
            if isinstance(outcome, Failed):
                self._stats.failure(outcome)
            else:
                self._stats.done += 1
                if place:
                    self._stats.shared += 1
                    if shared is outcome:
                        shared = _copied(outcome, "shared")
            sink.deliver(index, shared if place else outcome)
        if error is not None:
            self.abort(error)

    def _over_budget(
        self, outcome: Outcome, waiters: Sequence[tuple[Sink, int]]
    ) -> BudgetExceeded | None:
        """Count an outcome; the error, already with those who wait, if it was one too many."""
        failures = self._failures
        if failures is None:
            return None
        exceeded = False
        for _ in waiters:
            exceeded |= failures.add(outcome)
        if not exceeded:
            return None
        error = BudgetExceeded(f"{failures.summary()}; responses that came back are in the cache")
        failures.clear()
        for sink, _ in waiters:
            sink.abort(error)
        return error

    def _end(self, job: Job) -> None:
        """Let go of everything that belongs to a job."""
        job.over = True
        self._live.discard(job)
        for timer in (job.retry_timer, job.deadline_timer):
            if timer is not None:
                timer.cancel()
        for attempt in job.attempts:
            attempt.drop()
        key = job.key
        if key is not None:
            if self._by_key.get(key) is job:
                del self._by_key[key]
            self._elsewhere.pop(key, None)
            if job.leased:
                self._release(key)

    def cancel(self, sink: Sink | None, why: str) -> None:
        """End everything that a sink (or, for None, anyone) still waits for."""
        for job in list(self._live):
            if job.over:
                # Its response is on the way to the cache, and then to its callers.
                continue
            mine = [waiter for waiter in job.waiters if sink is None or waiter[0] is sink]
            if not mine:
                continue
            job.waiters = [waiter for waiter in job.waiters if waiter not in mine]
            if not job.waiters:
                self._end(job)
            failed = _cancelled(why, job)
            for one, index in mine:
                self._stats.failure(failed)
                one.deliver(index, failed)
        self._purge()

    def abort(self, error: Exception) -> None:
        """Give up altogether and tell everyone who waits why."""
        for sink in {waiter[0] for job in self._live for waiter in job.waiters}:
            sink.abort(error)
        self.cancel(None, "the run was stopped")

    async def close(self, close_cache: bool) -> None:
        """Cancel what is open, commit what came back, close connections and files."""
        if self.closed:
            return
        self.closed = True
        self.cancel(None, "the pool was closed")
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._cache is not None:
            await self._cache.close(close_cache)
        self._log.write_calls(self.loop.time())
        await self._save_limits()
        for upstream in self.upstreams:
            if upstream.transport is not None:
                await upstream.transport.close()
            if upstream.rates is not None:
                upstream.rates.close()

    def stats(self) -> dict[str, Any]:
        """Counts, latencies, tokens, cost, and the state of each endpoint."""
        self._purge()
        now = self.loop.time()
        return {
            **self._stats.as_dict(),
            "queued": len(self._queue) + len(self._unleased) + len(self._elsewhere),
            "in_flight": sum(upstream.in_flight for upstream in self.upstreams),
            "endpoints": [upstream.as_dict(now) for upstream in self.upstreams],
        }

    def _purge(self) -> None:
        """Forget what is over; elsewhere it is skipped when its turn comes."""
        for jobs in (self._queue, self._unleased):
            left = [job for job in jobs if not job.over]
            if len(left) < len(jobs):
                jobs.clear()
                jobs.extend(left)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the loop; `close` waits for it, and its error ends the run."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            # An endpoint that cannot connect, or a bug in this package: nobody may wait for ever.
            self.abort(error)

    async def _ask_cache(self, work: Awaitable[T], otherwise: T) -> T:
        """What the cache returns, or `otherwise`.

        A full disk costs the next run money, not this one its responses. A cache that is
        unusable, say damaged, ends the run.
        """
        try:
            return await work
        except CannotWrite as error:
            if not self._stats.cache_errors:
                log.warning("responses are not cached: %s", error)
            self._stats.cache_errors += 1
        except Exception as error:
            # Broad on purpose: whatever it is, everyone who waits is told.
            self.abort(error)
        return otherwise

    def _start_ticking(self) -> None:
        if not self._ticking and self._live:
            self._ticking = True
            self._log.since = self.loop.time()
            self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self.closed:
            # Nothing waits any more, and `close` would not wait for what began here.
            return
        now = self.loop.time()
        idle = not self._queue and not self._unleased
        if self._queue:
            self._give_up_unsent(now)
            self._dispatch()
            self._send_past_silence(now)
        self._watch_cache(now)
        self._watch_deadlines(now)
        for attempt in self._dispatcher.hanging(now, self._rules.retry.tries):
            self._stats.given_up += 1
            attempt.give_up()
        if idle and self._rules.hedge:
            self._hedge(now)
        if now - self._log.since >= 1.0 or not self._live:
            self._log.write_calls(now)
        if self._rules.remember and now - self._limits_saved_at >= SAVE_LIMITS_S:
            self._limits_saved_at = now
            self._spawn(self._save_limits())
        if self._live:
            self._ticking = True
            self.loop.call_later(TICK_S, self._tick)

    def _give_up_unsent(self, now: float) -> None:
        """Fail what was never sent, once nothing has come back for a whole deadline.

        A job's own deadline counts from its first try: in a long queue on a healthy server
        nobody is late. On a dead one everybody is, after the same time; on one that cannot be
        reached even after a minute.
        """
        last = self._last_failure
        patience = self._rules.deadline_s
        away = last is not None and last.kind is Kind.UNREACHABLE
        if away:
            patience = min(patience, UNREACHABLE_S)
        since = now - patience
        if self._response_at > since:
            return
        if any(upstream.blocked_until > now for upstream in self.upstreams):
            return
        kind = last.kind if last is not None else Kind.TIMEOUT
        why = f": {last.error}" if last is not None else ""
        text = f"nothing came back for {patience:g} s{why}"
        for job in list(self._queue):
            if job.over or job.born > since:
                continue
            if not job.deadline:
                self._finish(job, Failed(kind, f"not sent; {text}", None, now - job.born, 0))
            elif away:
                tries = job.tries + job.rejects
                self._finish(job, Failed(kind, text, None, now - job.begun, tries))
        self._purge()

    def _send_past_silence(self, now: float) -> None:
        """Send one call more than allowed where all that are allowed have been silent for long.

        The calls in flight may hang, all of them if there is one: without another call nobody
        would know. A server that is merely slow has one call more in its queue. A number that the
        caller gave is never exceeded.
        """
        since = now - SILENT_SHARE * self._rules.deadline_s
        for upstream in self.upstreams:
            full = upstream.learns and upstream.in_flight == upstream.limit.limit
            if not full or upstream.quiet_since > since:
                continue
            tries = self._dispatcher.in_flight.values()
            started = max((one.started for one in tries if one.upstream is upstream), default=now)
            if started > since or upstream.closed_until(now) > now:
                continue
            job = self._dispatcher.take(upstream, now)
            if isinstance(job, Job):
                self._start_slot(upstream, job)

    def _watch_cache(self, now: float) -> None:
        """Look again for what other processes are calling, and renew the leases on our calls."""
        if self._cache is None:
            return
        if self._elsewhere and now - self._polled_at >= POLL_S:
            self._polled_at = now
            jobs = list(self._elsewhere.values())
            self._elsewhere.clear()
            self._spawn(self._look(jobs, "shared"))
        if now - self._renewed_at >= RENEW_LEASES_S:
            self._renewed_at = now
            keys = _keys(job for job in self._live if job.leased)
            if keys:
                self._spawn(self._renew(keys))

    async def _renew(self, keys: list[bytes]) -> None:
        assert self._cache is not None
        await self._ask_cache(self._cache.lease(keys), set())

    def _watch_deadlines(self, now: float) -> None:
        """Set a timer for each deadline that comes near."""
        for job, attempt in self._dispatcher.in_flight.items():
            if attempt.timer is not None:
                continue
            if job.deadline > now + DEADLINE_SOON_S:
                # First tries start in the order of their deadlines, all others have a timer.
                break
            attempt.timer = self.loop.call_at(job.deadline, attempt.expire)

    def _hedge(self, now: float) -> None:
        """Send stragglers a second time; nothing else waits, so the slots are free anyway."""
        for job in self._dispatcher.stragglers(now):
            slow = job.attempts[0].upstream
            upstream = self._dispatcher.least_loaded(now, but=slow)
            if not isinstance(upstream, Upstream):
                upstream = self._dispatcher.least_loaded(now)
            if not isinstance(upstream, Upstream):
                return
            if upstream.rates is None and upstream.endpoint.remote:
                self._stats.hedges += 1
                self._start_slot(upstream, job, hedge=True)

    async def _save_limits(self) -> None:
        """Save the limits that were found for the next run, if it is to remember them."""
        if not self._rules.remember:
            return
        learned = {
            upstream.endpoint.address: upstream.learned()
            for upstream in self.upstreams
            if upstream.learns
        }
        if learned and self._stats.done > self._stats.hits:
            await in_thread(lambda: save_limits(learned))


def _keys(jobs: Iterable[Job]) -> list[bytes]:
    return [job.key for job in jobs if job.key is not None]


def _size(response: Done) -> int:
    """About how many bytes a response has; exactly if it came over the wire."""
    if response.raw is not None:
        return len(response.raw)
    return len(response.text) + 10 * sum(map(len, response.vectors))


def _as_outcome(response: Done, job: Job, attempt: Attempt, now: float) -> Done:
    """A response as the outcome of its job: without its raw bytes, with how it came."""
    return Done(
        *(response.text, response.body, response.finish, response.usage),
        seconds=now - job.begun,
        tries=job.tries + job.rejects,
        source="hedge" if attempt.hedge else "live",
        endpoint=attempt.upstream.endpoint.name,
    )


def _copied(done: Done, source: Source) -> Done:
    """The same response, for somebody who got it in another way."""
    return Done(
        *(done.text, done.body, done.finish, done.usage, done.seconds, done.tries),
        source=source,
        endpoint=done.endpoint,
    )


def _as_failure(failed: Failed, job: Job, upstream: Upstream, now: float) -> Failed:
    """The last failure of a job as its outcome."""
    return Failed(
        *(failed.kind, failed.error, failed.status, now - job.begun, job.tries + job.rejects),
        endpoint=upstream.endpoint.name,
        retry_after_s=failed.retry_after_s,
    )


def _cancelled(why: str, job: Job | None = None) -> Failed:
    """The outcome of a job that nobody wants, or can be paid for, any more."""
    return Failed(Kind.CANCELLED, why, tries=job.tries + job.rejects if job else 0)
