"""Calls that need not be made: the cache has the answer, or another process is getting it."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from batchwright.calls.cache.writer import LEASE_S, Keeper
from batchwright.calls.engine.job import Job, as_from
from batchwright.calls.outcome import Done, Outcome, Source

__all__ = ["Desk", "Sharing"]

POLL_S = 0.1
"""How often calls that another process is making are looked for in the cache."""


class Desk(Protocol):
    """Whom the jobs come from and go back to."""

    def appetite(self) -> int:
        """How many jobs should be ready to be sent."""

    def ready(self, jobs: Iterable[Job]) -> None:
        """These are to be sent, by this process."""

    def found(self, job: Job, outcome: Outcome, source: Source) -> None: ...


class Sharing:
    """Asks the cache before a call, and for the right to make it. Lives on the loop."""

    def __init__(self, keeper: Keeper, desk: Desk) -> None:
        self.keeper = keeper
        self.unleased: deque[Job] = deque()
        """Not in the cache; another process may be making the same call."""
        self.elsewhere: dict[bytes, Job] = {}
        """Another process is making these."""
        self.leasing = False
        """Whether leases are being asked for."""
        self._desk = desk
        self._leased_at = self._polled_at = 0.0

    def look(self, jobs: Sequence[Job]) -> None:
        """Find what is in the cache; the others become ready, a few at a time."""
        keys = [job.key for job in jobs if job.key is not None]
        self.keeper.look(keys, lambda found: self._looked(jobs, found, "cache"))

    def refill(self) -> None:
        """Ask for the right to make the next calls; another process may share our cache and list.

        Only a few at a time, or the first process would hold them all and the second only wait.
        """
        jobs: list[Job] = []
        most = self._desk.appetite()
        while self.unleased and len(jobs) < most:
            job = self.unleased.popleft()
            if not job.over:
                jobs.append(job)
        if jobs:
            self.leasing = True
            keys = [job.key for job in jobs if job.key is not None]
            self.keeper.lease(keys, lambda granted: self._granted(jobs, granted))

    def tick(self, now: float, live: Iterable[Job]) -> None:
        """Ask again for what others make, and prolong the leases of what we make."""
        if self.elsewhere and now - self._polled_at >= POLL_S:
            self._polled_at = now
            jobs = list(self.elsewhere.values())
            self.elsewhere.clear()
            keys = [job.key for job in jobs if job.key is not None]
            self.keeper.look(keys, lambda found: self._looked(jobs, found, "shared"))
        if now - self._leased_at >= LEASE_S / 3:
            self._leased_at = now
            keys = [job.key for job in live if job.leased and job.key is not None]
            if keys:
                self.keeper.lease(keys, lambda _: None)

    def forget(self, job: Job) -> None:
        """A job is over: nobody looks for it, and its lease ends."""
        if job.key is not None:
            self.elsewhere.pop(job.key, None)
            if job.leased:
                self.keeper.release(job.key)

    def _looked(self, jobs: Sequence[Job], found: dict[bytes, Done], source: Source) -> None:
        """Hits are done. A miss of another's call: it may have failed or died, and is ours then."""
        missed: list[Job] = []
        for job in jobs:
            if job.over or job.key is None:
                continue
            done = found.get(job.key)
            if done is None:
                missed.append(job)
            else:
                told = done if done.source == source else as_from(done, source)
                self._desk.found(job, told, source)
        if self.keeper.writes:
            self.unleased += missed
            missed = []
        self._desk.ready(missed)

    def _granted(self, jobs: Sequence[Job], granted: set[bytes]) -> None:
        self.leasing = False
        ours: list[Job] = []
        for job in jobs:
            assert job.key is not None
            if job.over:
                if job.key in granted:
                    self.keeper.release(job.key)
            elif job.key in granted:
                job.leased = True
                ours.append(job)
            else:
                self.elsewhere[job.key] = job
        self._desk.ready(ours)
