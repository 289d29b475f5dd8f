"""One call on its way: who waits for it, what was tried, and how it ends."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from batchwright.calls.engine.endpoint import Lane
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source
from batchwright.calls.request import Request

__all__ = ["Job", "Run", "Sink", "as_from", "cancelled", "final", "stamp"]


class Sink(Protocol):
    """Who waits for outcomes. Called on the loop, exactly once for each index."""

    born: float
    stopped: bool
    """What comes after is not wanted any more."""

    def deliver(self, index: int, outcome: Outcome) -> None: ...

    def abort(self, error: Exception) -> None:
        """The pool gives up; what is still open is delivered as cancelled."""


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
        self.runs: list[Run] = []
        self.over = False
        self.leased = False
        self.last: Failed | None = None
        self.tries = self.rejects = 0
        self.begun = self.deadline = 0.0
        self.estimate = 0
        self.timer: asyncio.TimerHandle | None = None
        self.expiry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One try under way."""

    lane: Lane
    task: "asyncio.Task[None]"
    started: float
    hedge: bool
    dropped: bool = False
    late: bool = False
    timer: asyncio.TimerHandle | None = None
    """Ends it at the deadline."""

    def drop(self) -> None:
        """Nobody wants the answer any more."""
        if not self.dropped:
            self.dropped = True
            self.task.cancel()

    def expire(self) -> None:
        """The deadline is here, the answer is not."""
        self.late = True
        self.task.cancel()


def stamp(done: Done, seconds: float, job: Job, run: Run) -> None:
    """Write down how an answer came; it was made for this call and nobody has seen it yet."""
    put = object.__setattr__
    put(done, "seconds", seconds)
    put(done, "tries", job.tries + job.rejects)
    put(done, "endpoint", run.lane.endpoint.name)
    put(done, "source", "hedge" if run.hedge else "live")


def as_from(done: Done, source: Source) -> Done:
    """The same answer, for somebody who got it by another way."""
    return Done(
        *(done.text, done.body, done.finish, done.usage, done.seconds, done.tries),
        source=source,
        endpoint=done.endpoint,
    )


def final(failed: Failed, seconds: float, job: Job, lane: Lane) -> Failed:
    """The last failure of a job, which is the job's own."""
    return Failed(
        *(failed.kind, failed.error, failed.status, seconds, job.tries + job.rejects),
        endpoint=lane.endpoint.name,
        retry_after_s=failed.retry_after_s,
    )


def cancelled(why: str, job: Job | None = None) -> Failed:
    """The end of a job that nobody wants, or can be paid for, any more."""
    return Failed(Kind.CANCELLED, why, tries=job.tries + job.rejects if job else 0)
