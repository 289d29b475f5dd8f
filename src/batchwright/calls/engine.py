"""The heart of the pool: jobs in a queue, lanes that take them, one outcome for each.

Everything here runs on the background loop, so nothing needs a lock. A lane at work is a few
tasks that take one job after another: no task, no timer and no log line is made for a job that
goes well. There are no chunks and no barriers; a slot that becomes free takes the next job.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchwright.calls.accounting import Ledger, estimate_tokens, estimate_usage
from batchwright.calls.background import aside
from batchwright.calls.budget import ErrorBudget, Failures
from batchwright.calls.keeper import LEASE_S, Keeper
from batchwright.calls.lane import Lane, remember
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source
from batchwright.calls.request import Request
from batchwright.calls.retry import Retry
from batchwright.errors import BudgetExceeded, CannotWrite
from batchwright.events import EventLog

__all__ = ["Engine", "Job", "Rules", "Sink"]

TICK_S = 0.05
LEASE_POLL_S = 0.1
"""How often calls that another process is making are looked for in the cache."""
HEDGE_FROM = 16
"""So many answers must be known before one can be called late."""
HEDGE_SHARE = 0.05
"""At most this share of all tries are hedges."""
REMEMBER_S = 30.0


class Sink(Protocol):
    """Who waits for outcomes. Called on the loop, exactly once for each index."""

    born: float
    stopped: bool
    """What comes after is not wanted any more."""

    def deliver(self, index: int, outcome: Outcome) -> None: ...

    def abort(self, error: Exception) -> None:
        """The pool gives up; what is still open is delivered as cancelled."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a pool treats its calls."""

    deadline_s: float
    retry: Retry
    hedge: bool = True
    max_cost: float | None = None
    budget: ErrorBudget | None = None
    remember: bool = True


class Job:
    """One call to make, for everyone who asked for it."""

    __slots__ = (
        *("begun", "born", "deadline", "estimate", "expiry", "key", "last", "leased", "number"),
        *("over", "rejects", "request", "runs", "timer", "tries", "waiters"),
    )

    def __init__(
        self, request: Request, key: bytes | None, number: int, sink: Sink, index: int
    ) -> None:
        self.request = request
        self.key = key
        self.number = number
        self.born = sink.born
        self.waiters = [(sink, index)]
        self.runs: list[_Run] = []
        self.over = False
        self.leased = False
        self.last: Failed | None = None
        self.tries = self.rejects = 0
        self.begun = self.deadline = 0.0
        self.estimate = 0
        self.timer: asyncio.TimerHandle | None = None
        self.expiry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """One try under way."""

    lane: Lane
    task: "asyncio.Task[None]"
    started: float
    hedge: bool
    dropped: bool = False

    def drop(self) -> None:
        """Nobody wants the answer any more."""
        if not self.dropped:
            self.dropped = True
            self.task.cancel()


@dataclass(slots=True)
class _Second:
    """What the last record of calls has already told."""

    at: float = 0.0
    told: dict[str, int] = field(default_factory=dict)


class Engine:
    """Takes jobs to lanes and outcomes to those who wait."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: Sequence[Lane],
        rules: Rules,
        ledger: Ledger,
        keeper: Keeper | None,
        events: EventLog | None,
    ) -> None:
        self.loop = loop
        self.lanes = lanes
        self.rules = rules
        self.ledger = ledger
        self.keeper = keeper
        self.events = events
        self.queue: deque[Job] = deque()
        """Ready to be sent."""
        self.unleased: deque[Job] = deque()
        """Not in the cache; another process may be making the same call."""
        self.elsewhere: dict[bytes, Job] = {}
        """Another process is making these."""
        self.live: set[Job] = set()
        self.flights: dict[bytes, Job] = {}
        """Exact jobs by key: an equal request joins instead of being sent."""
        self.flying: dict[Job, _Run] = {}
        """Jobs under way, the longest first."""
        self.failures = Failures(rules.budget) if rules.budget else None
        self.closed = False
        self.out_of_money = False
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking = False
        self._wake: list[float] = []
        self._leasing = False
        self._progress_at = 0.0
        self._last_failed: Failed | None = None
        self._leased_at = self._polled_at = self._remembered_at = 0.0
        self._second = _Second()

    # What the pool calls.

    def submit(self, sink: Sink, items: Iterable[tuple[int, Request]]) -> None:
        """Take requests; each will be delivered to the sink once."""
        looked: list[Job] = []
        for index, request in items:
            self.ledger.asked += 1
            key = None
            if self.closed or sink.stopped:
                failed = _cancelled("the pool is closed" if self.closed else "it was cancelled")
                self.ledger.failure(failed)
                sink.deliver(index, failed)
                continue
            if request.exact:
                key = request.key
                known = self.flights.get(key)
                if known is not None:
                    known.waiters.append((sink, index))
                    continue
            self._numbers += 1
            job = Job(request, key, self._numbers, sink, index)
            self.live.add(job)
            if key is not None:
                self.flights[key] = job
                if self.keeper is not None:
                    looked.append(job)
                    continue
            self.queue.append(job)
        if looked and self.keeper is not None:
            keys = [job.key for job in looked if job.key is not None]
            self.keeper.look(keys, lambda found: self._looked(looked, found))
        self._tick_on()
        self.dispatch()

    def cancel(self, sink: Sink | None, why: str) -> None:
        """End everything that a sink (or, for None, anyone) still waits for."""
        for job in list(self.live):
            if job.over:
                # Its answer is on the way to the cache, and then to its callers.
                continue
            mine = [waiter for waiter in job.waiters if sink is None or waiter[0] is sink]
            if not mine:
                continue
            job.waiters = [waiter for waiter in job.waiters if waiter not in mine]
            if not job.waiters:
                self._end(job)
            failed = _cancelled(why, job)
            for one, index in mine:
                self.ledger.failure(failed)
                one.deliver(index, failed)
        self._purge()

    def _purge(self) -> None:
        """Forget what is over; elsewhere it is skipped when its turn comes."""
        for waiting in (self.queue, self.unleased):
            if any(job.over for job in waiting):
                left = [job for job in waiting if not job.over]
                waiting.clear()
                waiting.extend(left)

    def abort(self, error: Exception) -> None:
        """Give up altogether and say why to everyone who waits."""
        for sink in {waiter[0] for job in self.live for waiter in job.waiters}:
            sink.abort(error)
        self.cancel(None, "the run was stopped")

    async def close(self, close_cache: bool) -> None:
        """Cancel what is open, commit what came back, end the sessions."""
        if self.closed:
            return
        self.closed = True
        self.cancel(None, "the pool was closed")
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self.keeper is not None:
            await self.keeper.close(close_cache)
        self._record(self.loop.time())
        await aside(self._remember)
        for lane in self.lanes:
            if lane.transport is not None:
                await lane.transport.close()

    def stats(self) -> dict[str, Any]:
        if self.keeper is not None:
            self.ledger.cache_errors = self.keeper.errors
        now = self.loop.time()
        self._purge()
        return {
            **self.ledger.as_dict(),
            "queued": len(self.queue) + len(self.unleased) + len(self.elsewhere),
            "in_flight": sum(lane.in_flight for lane in self.lanes),
            "endpoints": [lane.as_dict(now) for lane in self.lanes],
        }

    # From the queue to a lane.

    def dispatch(self) -> None:
        """Send as much as the lanes take."""
        queue = self.queue
        if self.unleased and len(queue) < self._appetite():
            self._lease()
        while queue:
            now = self.loop.time()
            lane = self._free(now)
            if lane is None:
                return
            job = self._take(lane, now)
            if job is not None:
                lane.in_flight += 1
                self._launch(lane, job, hedge=False)
            elif lane.blocked_until <= now:
                # The money waits for what is under way; no other lane would do better.
                return

    def _free(self, now: float, but: Lane | None = None) -> Lane | None:
        """The least loaded lane that takes a call now."""
        best, least = None, 1.0
        for lane in self.lanes:
            most = lane.limit.limit
            if lane.in_flight >= most or lane is but:
                continue
            until = lane.closed_until(now)
            if until > now:
                self._wake_at(until)
            elif lane.in_flight / most < least:
                best, least = lane, lane.in_flight / most
        return best

    def _take(self, lane: Lane, now: float) -> Job | None:
        """The next job for a lane that is free; None if its rates or the money do not allow it."""
        queue = self.queue
        while queue:
            job = queue.popleft()
            if job.over:
                continue
            if self.rules.max_cost is not None and self._spent(job):
                return None
            if lane.rates is not None:
                job.estimate = estimate_tokens(job.request, self.ledger.mean_answer_tokens)
                wait = lane.rates.reserve(job.estimate, now)
                if wait > 0:
                    queue.appendleft(job)
                    lane.blocked_until = now + wait
                    self._wake_at(lane.blocked_until)
                    return None
            return job
        return None

    def _launch(self, lane: Lane, job: Job, *, hedge: bool) -> None:
        self._keep(self._work(lane, job, hedge))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            # A lane that cannot open, or a mistake in this package: nobody may wait for ever.
            self.abort(error)

    async def _work(self, lane: Lane, job: Job | None, hedge: bool) -> None:
        """Take jobs for a lane until there is none or the limit has come down."""
        while job is not None:
            await self._attempt(lane, job, hedge)
            job, hedge = None, False
            if self.unleased and len(self.queue) < self._appetite():
                self._lease()
            if not self.queue:
                return
            now = self.loop.time()
            if lane.in_flight < lane.limit.limit and lane.closed_until(now) <= now:
                job = self._take(lane, now)
                if job is not None:
                    lane.in_flight += 1
            if self.queue and lane.in_flight < lane.limit.limit:
                # The limit has gone up.
                self.dispatch()

    async def _attempt(self, lane: Lane, job: Job, hedge: bool) -> None:
        """One try, and what follows from it."""
        now = self.loop.time()
        if not job.deadline:
            job.begun, job.deadline = now, now + self.rules.deadline_s
        task = asyncio.current_task()
        assert task is not None
        run = _Run(lane, task, now, hedge)
        job.runs.append(run)
        if not hedge:
            self.flying[job] = run
        self.ledger.sent += 1
        lane.limit.on_start(now, lane.in_flight)
        outcome: Outcome | None = None
        try:
            async with asyncio.timeout_at(job.deadline):
                transport = lane.transport or await lane.open()
                outcome = await transport.send(job.request)
        except TimeoutError:
            outcome = Failed(Kind.TIMEOUT, f"no answer within {self.rules.deadline_s:g} s")
        except asyncio.CancelledError:
            if not run.dropped:
                raise
            task.uncancel()
        finally:
            now = self.loop.time()
            if outcome is not None:
                lane.learn(now, now - run.started, outcome)
            lane.in_flight -= 1
            job.runs.remove(run)
            if not hedge:
                self.flying.pop(job, None)
        if outcome is not None and not run.dropped:
            self._settle(lane, job, run, outcome, now)

    def _settle(self, lane: Lane, job: Job, run: _Run, outcome: Outcome, now: float) -> None:
        """An answer ends a job; a failure may be tried again."""
        seconds = now - run.started
        if isinstance(outcome, Done):
            self.ledger.answered(job.request, outcome, seconds)
            job.tries += 1
            if lane.rates is not None and outcome.usage is not None:
                lane.rates.settle(job.estimate, outcome.usage.total)
            self._progress_at = now
            _stamp(outcome, now - job.begun, job, lane, "hedge" if run.hedge else "live")
            job.over = True
            for other in job.runs:
                other.drop()
            if self.keeper is not None and self.keeper.writes and job.key is not None:
                job.leased = False
                self.keeper.put(job.request, outcome, lambda: self._finish(job, outcome))
            else:
                object.__setattr__(outcome, "raw", None)
                self._finish(job, outcome)
            return
        if outcome.kind is Kind.RATE_LIMITED:
            job.rejects += 1
            self.ledger.rejects += 1
            self._tell_changes()
        else:
            job.tries += 1
        self._last_failed = job.last = outcome
        if job.runs:
            # Its twin is still under way.
            return
        wait = self.rules.retry.wait_s(
            outcome,
            tries=job.tries,
            rejects=job.rejects,
            left_s=job.deadline - now,
            number=job.number,
        )
        if wait is None:
            self._finish(job, _final(outcome, now - job.begun, job, lane))
            return
        self.ledger.retries += 1
        other_lane = self._free(now, but=lane) if len(self.lanes) > 1 else None
        if other_lane is not None and other_lane.rates is None:
            other_lane.in_flight += 1
            self._launch(other_lane, job, hedge=False)
            return
        if job.expiry is None:
            job.expiry = self.loop.call_at(job.deadline, self._expire, job)
        job.timer = self.loop.call_later(wait, self._again, job)

    def _again(self, job: Job) -> None:
        job.timer = None
        if not job.over:
            self.queue.appendleft(job)
            self.dispatch()

    def _expire(self, job: Job) -> None:
        """The deadline of a job that waits for its next try; one under way has its own clock."""
        if job.over or job.runs:
            return
        # Not `or`: a failure is false in a condition.
        last = job.last if job.last is not None else Failed(Kind.TIMEOUT, "no endpoint took it")
        text = f"the deadline of {self.rules.deadline_s:g} s is over; the last try: {last.error}"
        seconds = self.loop.time() - job.begun
        failed = Failed(last.kind, text, last.status, seconds, job.tries + job.rejects)
        self._finish(job, failed)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """Tell everyone who waits for a job."""
        waiters = job.waiters
        self._end(job)
        shared = outcome
        exceeded = False
        for place, (sink, index) in enumerate(waiters):
            if isinstance(outcome, Failed):
                self.ledger.failure(outcome)
            else:
                self.ledger.done += 1
                if place:
                    self.ledger.shared += 1
                    if shared is outcome:
                        shared = _copy(outcome, "shared")
            if self.failures is not None:
                exceeded |= self.failures.add(outcome)
            sink.deliver(index, shared if place else outcome)
        if exceeded and self.failures is not None:
            sentence = self.failures.sentence()
            self.failures.clear()
            self.abort(BudgetExceeded(f"{sentence}; answers that came back are kept in the cache"))

    def _end(self, job: Job) -> None:
        job.over = True
        self.live.discard(job)
        for handle in (job.timer, job.expiry):
            if handle is not None:
                handle.cancel()
        for run in job.runs:
            run.drop()
        if job.key is not None:
            if self.flights.get(job.key) is job:
                del self.flights[job.key]
            self.elsewhere.pop(job.key, None)
            if job.leased and self.keeper is not None:
                self.keeper.release(job.key)

    # The cache, and other processes.

    def _looked(self, jobs: Sequence[Job], found: dict[bytes, Done]) -> None:
        """The cache has answered: hits are done, the others go on."""
        assert self.keeper is not None
        for job in jobs:
            if job.over or job.key is None:
                continue
            done = found.get(job.key)
            if done is not None:
                self._hit(job, done)
            elif self.keeper.writes:
                self.unleased.append(job)
            else:
                self.queue.append(job)
        self.dispatch()

    def _hit(self, job: Job, done: Done, source: Source = "cache") -> None:
        if source == "cache":
            self.ledger.hits += 1
        else:
            self.ledger.shared += 1
        self._finish(job, done if done.source == source else _copy(done, source))

    def _appetite(self) -> int:
        """How many jobs should be ready: two for each slot, so that none waits for the cache."""
        return max(32, 2 * sum(lane.limit.limit for lane in self.lanes))

    def _lease(self) -> None:
        """Ask for the right to make the next calls; another process may share our cache and list.

        Only a few at a time, or the first process would hold them all and the second only wait.
        """
        if self._leasing or self.keeper is None:
            return
        jobs: list[Job] = []
        most = self._appetite()
        while self.unleased and len(jobs) < most:
            job = self.unleased.popleft()
            if not job.over:
                jobs.append(job)
        if jobs:
            self._leasing = True
            keys = [job.key for job in jobs if job.key is not None]
            self.keeper.lease(keys, lambda granted: self._granted(jobs, granted))

    def _granted(self, jobs: Sequence[Job], granted: set[bytes]) -> None:
        self._leasing = False
        assert self.keeper is not None
        for job in jobs:
            assert job.key is not None
            if job.over:
                if job.key in granted:
                    self.keeper.release(job.key)
            elif job.key in granted:
                job.leased = True
                self.queue.append(job)
            else:
                self.elsewhere[job.key] = job
        self.dispatch()

    def _poll(self) -> None:
        """Look for answers to calls that other processes are making."""
        assert self.keeper is not None
        jobs = list(self.elsewhere.values())
        self.elsewhere.clear()
        keys = [job.key for job in jobs if job.key is not None]

        def looked(found: dict[bytes, Done]) -> None:
            for job in jobs:
                done = found.get(job.key) if job.key is not None else None
                if job.over:
                    continue
                if done is not None:
                    self._hit(job, done, "shared")
                else:
                    # Its maker may have failed or died; then the lease is ours.
                    self.unleased.append(job)
            self.dispatch()

        self.keeper.look(keys, looked)

    # Time.

    def _wake_at(self, when: float) -> None:
        """Dispatch again at this moment."""
        if when == float("inf") or (self._wake and self._wake[0] <= when):
            return
        heapq.heappush(self._wake, when)
        self.loop.call_at(when, self._woken)

    def _woken(self) -> None:
        now = self.loop.time()
        while self._wake and self._wake[0] <= now + 1e-3:
            heapq.heappop(self._wake)
        self.dispatch()

    def _tick_on(self) -> None:
        if not self._ticking and self.live:
            self._ticking = True
            self._second.at = self.loop.time()
            self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        self._ticking = False
        if self.queue:
            self._purge()
            self._give_up(now)
            self.dispatch()
        elif self.rules.hedge and self.flying and not self.unleased:
            self._hedge(now)
        if self.elsewhere and now - self._polled_at >= LEASE_POLL_S:
            self._polled_at = now
            self._poll()
        if self.keeper is not None and now - self._leased_at >= LEASE_S / 3:
            self._leased_at = now
            keys = [job.key for job in self.live if job.leased and job.key is not None]
            if keys:
                self.keeper.lease(keys, lambda _: None)
        if now - self._second.at >= 1.0 or not self.live:
            self._record(now)
        if now - self._remembered_at >= REMEMBER_S:
            self._remembered_at = now
            self._keep(aside(self._remember))
        if self.live:
            self._ticking = True
            self.loop.call_later(TICK_S, self._tick)

    def _give_up(self, now: float) -> None:
        """End what was never sent, once nothing has come back for a whole deadline.

        A job's own clock starts when it is first sent: in a long queue on a healthy server
        nobody is late. On a dead one everybody is, after the same time.
        """
        if not self.queue or any(lane.blocked_until > now for lane in self.lanes):
            return
        since = now - self.rules.deadline_s
        if self._progress_at > since or min(job.born for job in self.queue) > since:
            return
        last = self._last_failed
        kind = last.kind if last is not None else Kind.TIMEOUT
        why = f": {last.error}" if last is not None else ""
        text = f"not sent; nothing came back for {self.rules.deadline_s:g} s{why}"
        for job in [job for job in self.queue if not job.over and not job.deadline]:
            if job.born <= since:
                self._finish(job, Failed(kind, text, None, now - job.born, 0))
        self._purge()

    def _hedge(self, now: float) -> None:
        """Send stragglers a second time; the queue is empty, so the slots are free anyway."""
        ledger = self.ledger
        if ledger.measured < HEDGE_FROM or self.out_of_money:
            return
        (p95,) = ledger.quantiles(0.95)
        late = 2 * (p95 or 0.0)
        for job, run in list(self.flying.items()):
            if now - run.started <= late or ledger.hedges >= 2 + HEDGE_SHARE * ledger.sent:
                return
            if len(job.runs) > 1 or job.over or not run.lane.endpoint.remote:
                continue
            lane = self._free(now, but=run.lane) or self._free(now)
            if lane is None:
                return
            if lane.rates is not None or not lane.endpoint.remote:
                continue
            ledger.hedges += 1
            lane.in_flight += 1
            self._launch(lane, job, hedge=True)

    # Money, records, memory.

    def _spent(self, job: Job) -> bool:
        """Whether the money does not allow another call now.

        What is under way counts as the mean of what came back, or before that as estimated. While
        something is under way this is put off; after that the rest is given up for good.
        """
        most, ledger = self.rules.max_cost, self.ledger
        assert most is not None
        under_way = sum(lane.in_flight for lane in self.lanes)
        each = ledger.mean_cost or ledger.price(job.request, estimate_usage(job.request))
        if not self.out_of_money and ledger.cost + (under_way + 1) * each <= most:
            return False
        if under_way and not self.out_of_money:
            self.queue.appendleft(job)
            return True
        self.out_of_money = True
        why = (
            f"max_cost={most:g} is reached, {ledger.cost:.6g} were spent and the next call would "
            f"cost about {each:.2g}; raise it and run again, what came back is kept"
        )
        waiting = [job, *self.queue, *self.unleased]
        self.queue.clear()
        self.unleased.clear()
        for one in waiting:
            if not one.over and not one.runs:
                self._finish(one, _cancelled(why, one))
        return True

    def _tell_changes(self) -> None:
        for lane in self.lanes:
            for change in lane.limit.take_changes():
                told = {"from": change.before, "to": change.after, "why": change.why}
                self._event("limit", endpoint=lane.endpoint.name, **told)

    def _record(self, now: float) -> None:
        """One line a second about the calls."""
        if self.events is None:
            return
        self._tell_changes()
        ledger = self.ledger
        counts = {
            "sent": ledger.sent,
            "hit": ledger.hits,
            "dedup": ledger.shared,
            "retry": ledger.retries,
            "failed": ledger.failed.total(),
            "done": ledger.done,
        }
        told = self._second.told
        new = {name: n - told.get(name, 0) for name, n in counts.items()}
        window = now - self._second.at
        self._second.at = now
        if not any(new.values()):
            return
        self._second.told = counts
        p50, p99 = ledger.quantiles(0.5, 0.99)
        self._event(
            "calls",
            window_s=round(window, 3),
            **new,
            p50=p50,
            p99=p99,
            in_flight=sum(lane.in_flight for lane in self.lanes),
            cost=ledger.cost,
        )

    def _event(self, kind: str, /, **fields: Any) -> None:
        if self.events is None:
            return
        try:
            self.events.write(kind, **fields)
        except (CannotWrite, ValueError):
            # A log that cannot be written, or is closed already, must not stop the calls.
            self.events = None

    def _remember(self) -> None:
        if not self.rules.remember:
            return
        learned = {
            lane.endpoint.address: lane.limit.state_dict() for lane in self.lanes if lane.learns
        }
        if learned and self.ledger.done > self.ledger.hits:
            remember(learned)


def _stamp(done: Done, seconds: float, job: Job, lane: Lane, source: Source) -> None:
    """Write down how an answer came; it was made for this call and nobody has seen it yet."""
    put = object.__setattr__
    put(done, "seconds", seconds)
    put(done, "tries", job.tries + job.rejects)
    put(done, "endpoint", lane.endpoint.name)
    put(done, "source", source)


def _copy(done: Done, source: Source) -> Done:
    return Done(
        *(done.text, done.body, done.finish, done.usage, done.seconds, done.tries),
        source=source,
        endpoint=done.endpoint,
    )


def _final(failed: Failed, seconds: float, job: Job, lane: Lane) -> Failed:
    return Failed(
        *(failed.kind, failed.error, failed.status, seconds, job.tries + job.rejects),
        endpoint=lane.endpoint.name,
        retry_after_s=failed.retry_after_s,
    )


def _cancelled(why: str, job: Job | None = None) -> Failed:
    return Failed(Kind.CANCELLED, why, tries=job.tries + job.rejects if job else 0)
