"""From a queue of jobs to the lanes, and again if a try fails.

A lane at work is a few tasks that take one job after another: no task, no timer and no log line is
made for a job that goes well. There are no chunks and no barriers; a slot that becomes free takes
the next job.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchwright.calls.engine.budgets import ErrorBudget
from batchwright.calls.engine.endpoint import Lane
from batchwright.calls.engine.hedging import stragglers
from batchwright.calls.engine.job import Job, Run, cancelled, final, stamp
from batchwright.calls.engine.purse import Purse
from batchwright.calls.engine.records import Records
from batchwright.calls.engine.retry import Retry
from batchwright.calls.engine.stats import Ledger, estimate_tokens
from batchwright.calls.outcome import Done, Failed, Kind, Outcome

__all__ = ["Desk", "Rules", "Sender"]

SOON_S = 0.2
"""Deadlines as near as this have a timer; the others are looked at with every tick."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a pool treats its calls."""

    deadline_s: float
    retry: Retry
    hedge: bool = True
    max_cost: float | None = None
    budget: ErrorBudget | None = None
    remember: bool = True


class Desk(Protocol):
    """Whom the jobs come from and go back to."""

    def refill(self) -> None:
        """There is room for more jobs in the queue."""

    def answered(self, job: Job, done: Done) -> None: ...

    def finish(self, job: Job, outcome: Outcome) -> None: ...

    def unsent(self) -> list[Job]:
        """Take away all jobs that have not come to the queue yet."""

    def abort(self, error: Exception) -> None: ...


class Sender:
    """Sends the jobs of `queue`. Lives on the loop, as everything that it calls."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: Sequence[Lane],
        rules: Rules,
        ledger: Ledger,
        records: Records,
        desk: Desk,
    ) -> None:
        self.queue: deque[Job] = deque()
        """Ready to be sent."""
        self.flying: dict[Job, Run] = {}
        """Jobs under way, the longest first."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.progress_at = 0.0
        """When the last answer came."""
        self.last_failed: Failed | None = None
        self._loop = loop
        self._lanes = lanes
        self._rules = rules
        self._ledger = ledger
        self._records = records
        self._desk = desk
        self._purse = None if rules.max_cost is None else Purse(rules.max_cost, ledger)
        self._wake: list[float] = []

    def dispatch(self) -> None:
        """Send as much as the lanes take."""
        self._desk.refill()
        while self.queue:
            now = self._loop.time()
            lane = self._free(now)
            if lane is None:
                return
            job = self._take(lane, now)
            if job is not None:
                self._launch(lane, job, hedge=False)
            elif lane.blocked_until <= now:
                # The money waits for what is under way; no other lane would do better.
                return

    def tick(self, now: float, idle: bool) -> None:
        """See to the deadlines that come near, and hedge if no job waits."""
        for job, run in self.flying.items():
            if run.timer is not None:
                continue
            if job.deadline > now + SOON_S:
                # First tries start in the order of their deadlines, all others have a timer.
                break
            run.timer = self._loop.call_at(job.deadline, run.expire)
        if idle and self._rules.hedge and (self._purse is None or not self._purse.empty):
            self._hedge(now)

    def _hedge(self, now: float) -> None:
        """Send stragglers a second time; nobody waits, so the slots are free anyway."""
        for job, run in stragglers(self.flying, self._ledger, now):
            lane = self._free(now, but=run.lane) or self._free(now)
            if lane is None:
                return
            if lane.rates is None and lane.endpoint.remote:
                self._ledger.hedges += 1
                self._launch(lane, job, hedge=True)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the loop; closing waits for it, and its error ends the run."""
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            # A lane that cannot open, or a mistake in this package: nobody may wait for ever.
            self._desk.abort(error)

    def _free(self, now: float, but: Lane | None = None) -> Lane | None:
        """The least loaded lane that takes a call now."""
        best, least = None, 1.0
        for lane in self._lanes:
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
            if self._purse is not None and not self._paid(job, self._purse):
                return None
            if lane.rates is not None:
                job.estimate = estimate_tokens(job.request, self._ledger.mean_answer_tokens)
                wait = lane.rates.reserve(job.estimate, now)
                if wait > 0:
                    queue.appendleft(job)
                    lane.blocked_until = now + wait
                    self._wake_at(lane.blocked_until)
                    return None
            return job
        return None

    def _paid(self, job: Job, purse: Purse) -> bool:
        """Whether there is money for a job. If not it waits for the calls under way; after them
        all that were never sent are given up."""
        under_way = sum(lane.in_flight for lane in self._lanes)
        if purse.allows(job.request, under_way):
            return True
        if under_way and not purse.empty:
            self.queue.appendleft(job)
            return False
        why = purse.close(job.request)
        waiting = [job, *self.queue, *self._desk.unsent()]
        self.queue.clear()
        for one in waiting:
            if not one.over and not one.runs:
                self._desk.finish(one, cancelled(why, one))
        return False

    def _launch(self, lane: Lane, job: Job, *, hedge: bool) -> None:
        lane.in_flight += 1
        self.keep(self._work(lane, job, hedge))

    async def _work(self, lane: Lane, job: Job | None, hedge: bool) -> None:
        """Take jobs for a lane until there is none or the limit has come down."""
        while job is not None:
            await self._attempt(lane, job, hedge)
            job, hedge = None, False
            self._desk.refill()
            if not self.queue:
                return
            now = self._loop.time()
            if lane.in_flight < lane.limit.limit and lane.closed_until(now) <= now:
                job = self._take(lane, now)
                if job is not None:
                    lane.in_flight += 1
            if self.queue and lane.in_flight < lane.limit.limit:
                # The limit has gone up.
                self.dispatch()

    async def _attempt(self, lane: Lane, job: Job, hedge: bool) -> None:
        """One try, and what follows from it."""
        now = self._loop.time()
        first = not job.deadline
        if first:
            job.begun, job.deadline = now, now + self._rules.deadline_s
        task = asyncio.current_task(self._loop)
        assert task is not None
        run = Run(lane, task, now, hedge)
        if not first or job.deadline <= now + SOON_S:
            run.timer = self._loop.call_at(job.deadline, run.expire)
        job.runs.append(run)
        if not hedge:
            self.flying[job] = run
        self._ledger.sent += 1
        lane.limit.on_start(now, lane.in_flight)
        outcome: Outcome | None = None
        try:
            transport = lane.transport or await lane.open()
            outcome = await transport.send(job.request)
        except asyncio.CancelledError:
            if not (run.dropped or run.late):
                raise
            while task.cancelling():
                task.uncancel()
            if run.late:
                outcome = Failed(Kind.TIMEOUT, f"no answer within {self._rules.deadline_s:g} s")
        finally:
            now = self._loop.time()
            if run.timer is not None:
                run.timer.cancel()
            if outcome is not None:
                lane.learn(now, now - run.started, outcome)
            lane.in_flight -= 1
            job.runs.remove(run)
            if not hedge:
                self.flying.pop(job, None)
        if outcome is not None and not run.dropped:
            self._settle(lane, job, run, outcome, now)

    def _settle(self, lane: Lane, job: Job, run: Run, outcome: Outcome, now: float) -> None:
        """An answer ends a job; a failure may be tried again."""
        if isinstance(outcome, Done):
            self._ledger.answered(job.request, outcome, now - run.started)
            job.tries += 1
            if lane.rates is not None and outcome.usage is not None:
                lane.rates.settle(job.estimate, outcome.usage.total)
            self.progress_at = now
            stamp(outcome, now - job.begun, job, run)
            job.over = True
            for other in job.runs:
                other.drop()
            self._desk.answered(job, outcome)
            return
        if outcome.kind is Kind.RATE_LIMITED:
            job.rejects += 1
            self._ledger.rejects += 1
            self._records.changes()
        else:
            job.tries += 1
        self.last_failed = job.last = outcome
        if not job.runs:
            # Otherwise its twin is still under way.
            self._retry(lane, job, outcome, now)

    def _retry(self, lane: Lane, job: Job, failed: Failed, now: float) -> None:
        wait = self._rules.retry.wait_s(
            failed,
            tries=job.tries,
            rejects=job.rejects,
            left_s=job.deadline - now,
            number=job.number,
        )
        if wait is None:
            self._desk.finish(job, final(failed, now - job.begun, job, lane))
            return
        self._ledger.retries += 1
        other = self._free(now, but=lane) if len(self._lanes) > 1 else None
        if other is not None and other.rates is None:
            self._launch(other, job, hedge=False)
            return
        if job.expiry is None:
            job.expiry = self._loop.call_at(job.deadline, self._expire, job)
        job.timer = self._loop.call_later(wait, self._again, job)

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
        text = f"the deadline of {self._rules.deadline_s:g} s is over; the last try: {last.error}"
        seconds = self._loop.time() - job.begun
        failed = Failed(last.kind, text, last.status, seconds, job.tries + job.rejects)
        self._desk.finish(job, failed)

    def _wake_at(self, when: float) -> None:
        """Dispatch again at this moment."""
        if when == float("inf") or (self._wake and self._wake[0] <= when):
            return
        heapq.heappush(self._wake, when)
        self._loop.call_at(when, self._woken)

    def _woken(self) -> None:
        now = self._loop.time()
        while self._wake and self._wake[0] <= now + 1e-3:
            heapq.heappop(self._wake)
        self.dispatch()
