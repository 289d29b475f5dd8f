"""Jobs that wait, and which of them goes to which endpoint next."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from batchwright.calls.engine.budgets import SpendingCap
from batchwright.calls.engine.endpoint import Upstream
from batchwright.calls.engine.stats import Stats, estimate_usage
from batchwright.calls.outcome import Done, Failed, Outcome
from batchwright.calls.request import Request

__all__ = ["Attempt", "Dispatch", "Job", "Send", "Sink", "Spent", "Wait"]

HEDGE_FROM = 16
"""So many latencies must be known before a call can be called late."""
OVERTAKEN = 4
"""Calls sent later that must have been answered before a try hangs, for each one in flight."""
SILENT, SILENT_ALONE = 8, 2
"""Or so many times the longest try without any response of the endpoint: with other calls at it,
and with so few that none of them waits for another."""
YOUNG = 16
"""Before so many responses, one call that was sent later and answered first is enough."""
HEDGE_SHARE = 0.05
"""At most this share of all tries are hedges."""


class Sink(Protocol):
    """Who waits for outcomes. Called on the loop, exactly once for each index."""

    born: float
    stopped: bool
    """Further requests are not wanted any more."""

    def deliver(self, index: int, outcome: Outcome) -> None: ...

    def earlier(self, key: bytes, index: int) -> Done | None:
        """The response to an equal request that it has; else this is noted as the first one."""

    def abort(self, error: Exception) -> None:
        """The pool gives up; what is still open is delivered as cancelled."""


@dataclass(slots=True, eq=False)
class Job:
    """One call to make, for everyone who asked for it."""

    request: Request
    key: bytes | None
    """The request's key if it is exact, so that its response may be shared and cached."""
    number: int
    born: float
    waiters: list[tuple[Sink, int]]
    attempts: "list[Attempt]" = field(default_factory=list)
    """Tries in flight: none, one, or two when it is hedged."""
    over: bool = False
    """Nothing more is to be sent: answered, failed for good or cancelled."""
    leased: bool = False
    """Whether other processes that share the cache leave this call to us."""
    last_failure: Failed | None = None
    tries: int = 0
    rejects: int = 0
    begun: float = 0.0
    deadline: float = 0.0
    """Counts from the first try; 0 before it."""
    estimate: int = 0
    """Tokens that were reserved for it."""
    held: float = 0.0
    """Dollars that the spending cap holds for the try in flight."""
    retry_timer: asyncio.TimerHandle | None = None
    deadline_timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """One try in flight."""

    upstream: Upstream
    task: "asyncio.Task[None]"
    started: float
    hedge: bool
    overtaken_from: int = 0
    """Beyond so many responses of the endpoint, each is to a call that was sent later."""
    dropped: bool = False
    late: bool = False
    sent: bool = False
    """The request is on its way to the server."""
    hung: bool = False
    """Cut off before the deadline, because calls sent later were answered."""
    timer: asyncio.TimerHandle | None = None
    """Cancels it at the deadline."""

    @property
    def overtaken(self) -> int:
        """How many calls that were sent later were answered first, at least."""
        return max(0, self.upstream.answered - self.overtaken_from)

    def drop(self) -> None:
        """Cancel it, because nobody wants the response any more."""
        if not self.dropped:
            self.dropped = True
            self.task.cancel()

    def expire(self) -> None:
        """Cancel it, because the deadline is here and the response is not."""
        self.late = True
        self.task.cancel()

    def give_up(self) -> None:
        """Cancel it as a try that hangs; the call may be tried again."""
        self.hung = True
        self.expire()


class Send(NamedTuple):
    """This job may go to this endpoint now."""

    job: Job
    upstream: Upstream


class Wait(NamedTuple):
    """Nothing may be sent before this time."""

    until: float


class Spent(NamedTuple):
    """The spending cap is reached: what was never sent is not going to be."""

    why: str


class Dispatch:
    """The queue of jobs that are ready to be sent, and the rules of who is next."""

    def __init__(
        self, upstreams: Sequence[Upstream], stats: Stats, cap: SpendingCap | None
    ) -> None:
        self.queue: deque[Job] = deque()
        self.in_flight: dict[Job, Attempt] = {}
        """Jobs at a server and the first of their tries there, the oldest first."""
        self._upstreams = upstreams
        self._stats = stats
        self._cap = cap

    def next(self, now: float) -> Send | Wait | Spent | None:
        """What to do with the head of the queue; None if it waits for a call in flight."""
        while self.queue:
            upstream = self.least_loaded(now)
            if not isinstance(upstream, Upstream):
                return upstream
            job = self.take(upstream, now)
            if isinstance(job, Job):
                return Send(job, upstream)
            if not isinstance(job, Wait):
                return job
            # The rate limit of this endpoint is used up; another one may be free.
        return None

    def least_loaded(self, now: float, but: Upstream | None = None) -> Upstream | Wait | None:
        """The endpoint with the most free slots, or when the first one that is paused resumes."""
        best, least, resumes = None, 1.0, float("inf")
        for upstream in self._upstreams:
            limit = upstream.limit.limit
            if upstream.in_flight >= limit or upstream is but:
                continue
            until = upstream.closed_until(now)
            if until > now:
                resumes = min(resumes, until)
            elif upstream.in_flight / limit < least:
                best, least = upstream, upstream.in_flight / limit
        if best is not None:
            return best
        return Wait(resumes) if resumes < float("inf") else None

    def take(self, upstream: Upstream, now: float) -> Job | Wait | Spent | None:
        """The next job for an endpoint with a free slot, unless rate limit or cap forbid it."""
        queue = self.queue
        while queue:
            job = queue.popleft()
            if job.over:
                continue
            if self._cap is not None:
                in_flight = sum(one.in_flight for one in self._upstreams)
                held = self._cap.hold(job.request)
                if held is None:
                    queue.appendleft(job)
                    # What is in flight may turn out to cost less than it counts for.
                    waits = in_flight and not self._cap.reached
                    return None if waits else Spent(self._cap.close(job.request))
                job.held = held
            if upstream.rates is not None:
                mean = self._stats.mean_completion_tokens
                job.estimate = estimate_usage(job.request, mean).total
                wait = upstream.rates.reserve(job.estimate, now)
                if wait > 0:
                    self.release(job)
                    queue.appendleft(job)
                    upstream.blocked_until = now + wait
                    return Wait(upstream.blocked_until)
            return job
        return None

    def ended(self, job: Job, attempt: Attempt) -> None:
        """A try has ended; if a hedge of it goes on, that one may hang as well."""
        if self.in_flight.get(job) is attempt:
            del self.in_flight[job]
            if job.attempts:
                self.in_flight[job] = job.attempts[0]

    def release(self, job: Job) -> None:
        """A try of a job has ended, or is not made: the cap no longer holds what it may cost."""
        if self._cap is not None:
            self._cap.held -= job.held
            job.held = 0.0

    def hanging(self, now: float, most_tries: int) -> Iterator[Attempt]:
        """Tries that take far longer than calls do, while the server answers calls sent later.

        In the queue of a server that is merely slow nobody is overtaken by many, so nothing is
        sent twice there. If it has gone silent, one call at a time is sent again, and sooner where
        there is hardly another call that it could wait for. A further try of a call may take twice
        as long, the last one all the time there is; and no more than 4 and one in twenty tries are
        given up. A call that is hedged hangs when its hedge does.

        All calls at an endpoint that is silent while another one answers go there, and it is set
        aside. If it never answered, it is given the time of the slowest other.
        """
        stats = self._stats
        if not self.in_flight:
            return
        allowed = {upstream: upstream.try_s() for upstream in self._upstreams}
        most = max((one for one in allowed.values() if one < inf), default=inf)
        least = min(allowed.values())
        for job, first in list(self.in_flight.items()):
            if now - first.started <= least:
                return  # the others are younger still
            if job.over:
                continue
            attempt = job.attempts[-1]
            upstream, age = attempt.upstream, now - attempt.started
            try_s = allowed[upstream] if upstream.answered else most
            if age <= try_s * 2.0**job.tries or job.tries + 1 >= most_tries:
                continue
            alone = upstream.answered and upstream.nearly_idle
            since = max(upstream.quiet_since, attempt.started)
            silent = now - since > (SILENT_ALONE if alone else SILENT) * try_s
            if silent and self._answers_but(upstream, since):
                upstream.breaker.trip(now)
                yield from list(job.attempts)
                continue
            if stats.given_up >= 4 + HEDGE_SHARE * stats.sent:
                continue
            young = upstream.answered < YOUNG
            enough = 1 if young else OVERTAKEN * max(2, upstream.in_flight)
            if silent or first.overtaken >= enough:
                upstream.quiet_since = now
                yield from list(job.attempts)

    def _answers_but(self, silent: Upstream, since: float) -> bool:
        """Whether another endpoint has answered since then."""
        return any(
            one is not silent and one.answered and one.quiet_since > since
            for one in self._upstreams
        )

    def stragglers(self, now: float) -> Iterator[Job]:
        """Calls to a server that take over twice the 95th percentile, the longest first.

        Count hedges in the statistics as they are sent: there are no more stragglers once they
        are 2 and one in twenty tries. There are none with a spending cap: each is paid for.
        """
        stats = self._stats
        if stats.measured < HEDGE_FROM or self._cap is not None:
            return
        (p95,) = stats.quantiles(0.95)
        late_s = 2 * (p95 or 0.0)
        for job, attempt in list(self.in_flight.items()):
            if now - attempt.started <= late_s or stats.hedges >= 2 + HEDGE_SHARE * stats.sent:
                return
            if len(job.attempts) == 1 and not job.over and attempt.upstream.endpoint.remote:
                yield job
