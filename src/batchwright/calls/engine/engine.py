"""The heart of the pool: requests become jobs, and each ends as one outcome.

    submit -> sharing (cache, other processes) -> sender (lanes, retries) -> finish

Everything here runs on the background loop, so nothing needs a lock.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from batchwright.calls.cache.leases import Sharing
from batchwright.calls.cache.writer import Keeper
from batchwright.calls.engine.budgets import Failures
from batchwright.calls.engine.dispatch import Rules, Sender
from batchwright.calls.engine.endpoint import Lane
from batchwright.calls.engine.job import Job, Sink, as_from, cancelled
from batchwright.calls.engine.loop import aside
from batchwright.calls.engine.records import Records
from batchwright.calls.engine.stats import Ledger
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source
from batchwright.calls.request import Request
from batchwright.errors import BudgetExceeded
from batchwright.events import EventLog

__all__ = ["Engine"]

TICK_S = 0.05
REMEMBER_S = 30.0


class Engine:
    """Takes requests to those who answer and outcomes to those who wait."""

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
        self.closed = False
        self._rules = rules
        self._ledger = ledger
        self._records = Records(events, ledger, lanes)
        self._sender = Sender(loop, lanes, rules, ledger, self._records, self)
        self._sharing = Sharing(keeper, self) if keeper is not None else None
        self._failures = Failures(rules.budget) if rules.budget else None
        self._live: set[Job] = set()
        self._flights: dict[bytes, Job] = {}
        """Exact jobs by key: an equal request joins instead of being sent."""
        self._numbers = 0
        self._ticking = False
        self._remembered_at = 0.0

    def submit(self, sink: Sink, items: Iterable[tuple[int, Request]]) -> None:
        """Take requests; each will be delivered to the sink once."""
        looked: list[Job] = []
        for index, request in items:
            self._ledger.asked += 1
            key = None
            if self.closed or sink.stopped:
                failed = cancelled("the pool is closed" if self.closed else "it was cancelled")
                self._ledger.failure(failed)
                sink.deliver(index, failed)
                continue
            if request.exact:
                key = request.key
                known = self._flights.get(key)
                if known is not None:
                    known.waiters.append((sink, index))
                    continue
            self._numbers += 1
            job = Job(request, key, self._numbers, sink, index)
            self._live.add(job)
            if key is not None:
                self._flights[key] = job
                if self._sharing is not None:
                    looked.append(job)
                    continue
            self._sender.queue.append(job)
        if looked and self._sharing is not None:
            self._sharing.look(looked)
        self._tick_on()
        self._sender.dispatch()

    def cancel(self, sink: Sink | None, why: str) -> None:
        """End everything that a sink (or, for None, anyone) still waits for."""
        for job in list(self._live):
            if job.over:
                # Its answer is on the way to the cache, and then to its callers.
                continue
            mine = [waiter for waiter in job.waiters if sink is None or waiter[0] is sink]
            if not mine:
                continue
            job.waiters = [waiter for waiter in job.waiters if waiter not in mine]
            if not job.waiters:
                self._end(job)
            failed = cancelled(why, job)
            for one, index in mine:
                self._ledger.failure(failed)
                one.deliver(index, failed)
        self._purge()

    def abort(self, error: Exception) -> None:
        """Give up altogether and say why to everyone who waits."""
        for sink in {waiter[0] for job in self._live for waiter in job.waiters}:
            sink.abort(error)
        self.cancel(None, "the run was stopped")

    async def close(self, close_cache: bool) -> None:
        """Cancel what is open, commit what came back, end the sessions."""
        if self.closed:
            return
        self.closed = True
        self.cancel(None, "the pool was closed")
        while self._sender.tasks:
            await asyncio.wait(self._sender.tasks)
        if self._sharing is not None:
            await self._sharing.keeper.close(close_cache)
        self._records.calls(self.loop.time())
        await aside(self._records.limits)
        for lane in self.lanes:
            if lane.transport is not None:
                await lane.transport.close()

    def stats(self) -> dict[str, Any]:
        """Counts, latencies, tokens, money, and the state of each lane."""
        waiting = 0
        self._purge()
        if self._sharing is not None:
            self._ledger.cache_errors = self._sharing.keeper.errors
            waiting = len(self._sharing.unleased) + len(self._sharing.elsewhere)
        now = self.loop.time()
        return {
            **self._ledger.as_dict(),
            "queued": len(self._sender.queue) + waiting,
            "in_flight": sum(lane.in_flight for lane in self.lanes),
            "endpoints": [lane.as_dict(now) for lane in self.lanes],
        }

    # What sharing and sender call.

    def appetite(self) -> int:
        """How many jobs should be ready: two for each slot, so that none waits for the cache."""
        return max(32, 2 * sum(lane.limit.limit for lane in self.lanes))

    def refill(self) -> None:
        """Get more jobs ready if few are."""
        sharing = self._sharing
        if sharing is None or sharing.leasing or not sharing.unleased:
            return
        if len(self._sender.queue) < self.appetite():
            sharing.refill()

    def ready(self, jobs: Iterable[Job]) -> None:
        """These are to be sent."""
        self._sender.queue += jobs
        self._sender.dispatch()

    def unsent(self) -> list[Job]:
        """Take away what has not come to the queue yet."""
        if self._sharing is None:
            return []
        jobs = list(self._sharing.unleased)
        self._sharing.unleased.clear()
        return jobs

    def found(self, job: Job, outcome: Outcome, source: Source) -> None:
        """An answer that nobody had to be paid for."""
        if source == "cache":
            self._ledger.hits += 1
        else:
            self._ledger.shared += 1
        self.finish(job, outcome)

    def answered(self, job: Job, done: Done) -> None:
        """An answer of a server: kept first, then given to those who wait."""
        sharing = self._sharing
        if sharing is not None and sharing.keeper.writes and job.key is not None:
            job.leased = False
            sharing.keeper.put(job.request, done, lambda: self.finish(job, done))
        else:
            object.__setattr__(done, "raw", None)
            self.finish(job, done)

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Tell everyone who waits for a job."""
        waiters = job.waiters
        self._end(job)
        shared = outcome
        error = self._over_budget(outcome, waiters)
        for place, (sink, index) in enumerate(waiters):
            if isinstance(outcome, Failed):
                self._ledger.failure(outcome)
            else:
                self._ledger.done += 1
                if place:
                    self._ledger.shared += 1
                    if shared is outcome:
                        shared = as_from(outcome, "shared")
            sink.deliver(index, shared if place else outcome)
        if error is not None:
            self.abort(error)

    def _over_budget(
        self, outcome: Outcome, waiters: Sequence[tuple[Sink, int]]
    ) -> BudgetExceeded | None:
        """Count an outcome; the error, told to those who wait for it, if it was one too many."""
        failures = self._failures
        if failures is None:
            return None
        exceeded = False
        for _ in waiters:
            exceeded |= failures.add(outcome)
        if not exceeded:
            return None
        error = BudgetExceeded(
            f"{failures.sentence()}; answers that came back are kept in the cache"
        )
        failures.clear()
        for sink, _ in waiters:
            sink.abort(error)
        return error

    def _end(self, job: Job) -> None:
        job.over = True
        self._live.discard(job)
        for handle in (job.timer, job.expiry):
            if handle is not None:
                handle.cancel()
        for run in job.runs:
            run.drop()
        if job.key is not None and self._flights.get(job.key) is job:
            del self._flights[job.key]
        if self._sharing is not None:
            self._sharing.forget(job)

    def _purge(self) -> None:
        """Forget what is over; elsewhere it is skipped when its turn comes."""
        waiting: list[deque[Job]] = [self._sender.queue]
        if self._sharing is not None:
            waiting.append(self._sharing.unleased)
        for jobs in waiting:
            left = [job for job in jobs if not job.over]
            if len(left) < len(jobs):
                jobs.clear()
                jobs.extend(left)

    # Time.

    def _tick_on(self) -> None:
        if not self._ticking and self._live:
            self._ticking = True
            self._records.since = self.loop.time()
            self.loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        self._ticking = False
        idle = not self._sender.queue
        if not idle:
            self._give_up(now)
            self._sender.dispatch()
        if self._sharing is not None:
            idle = idle and not self._sharing.unleased
            self._sharing.tick(now, self._live)
        self._sender.tick(now, idle)
        if now - self._records.since >= 1.0 or not self._live:
            self._records.calls(now)
        if self._rules.remember and now - self._remembered_at >= REMEMBER_S:
            self._remembered_at = now
            self._sender.keep(aside(self._records.limits))
        if self._live:
            self._ticking = True
            self.loop.call_later(TICK_S, self._tick)

    def _give_up(self, now: float) -> None:
        """End what was never sent, once nothing has come back for a whole deadline.

        A job's own clock starts when it is first sent: in a long queue on a healthy server
        nobody is late. On a dead one everybody is, after the same time.
        """
        since = now - self._rules.deadline_s
        if self._sender.progress_at > since:
            return
        if any(lane.blocked_until > now for lane in self.lanes):
            return
        last = self._sender.last_failed
        kind = last.kind if last is not None else Kind.TIMEOUT
        why = f": {last.error}" if last is not None else ""
        text = f"not sent; nothing came back for {self._rules.deadline_s:g} s{why}"
        for job in list(self._sender.queue):
            if not job.over and not job.deadline and job.born <= since:
                self.finish(job, Failed(kind, text, None, now - job.born, 0))
        self._purge()
