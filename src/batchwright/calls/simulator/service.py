"""How many calls a simulated server serves at once, and how fast: four kinds, no clock inside.

    queue     K at once, the others wait
    reject    K at once, the others are rejected
    thrash    all at once; above K everything slows down by (n / K)^1.5
    batch     K at once, the others wait; a step takes .4 + .6 n / K of its full time

All calls in service advance at one common speed, so one number, the work done since the start
by a call that was always there, determines when every call is finished.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Literal, TypeVar

__all__ = ["Bucket", "Job", "ServerKind", "Service"]

ServerKind = Literal["queue", "reject", "thrash", "batch"]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """Work of a call in one or more parts, each in seconds at full speed."""

    call: T
    parts: Sequence[float]
    part: int = 0
    state: Literal["new", "waiting", "serving", "over"] = "new"


@dataclass(slots=True)
class Service(Generic[T]):
    """Who is served, who waits and who is rejected. Times are seconds of the caller's clock."""

    kind: ServerKind
    schedule: Sequence[tuple[float, int]]
    """The knee from each time on; the first time is 0."""
    start: float = 0.0
    serving: int = 0
    peak: int = 0
    """The most calls that were ever served at once."""
    _waiting: deque[Job[T]] = field(default_factory=deque)
    _absent: int = 0
    """How many of those that wait have left."""
    _heap: list[tuple[float, int, Job[T]]] = field(default_factory=list)
    _done: float = 0.0
    """Seconds of work at full speed of a call that was there from the start."""
    _now: float = 0.0
    _number: int = 0

    def __post_init__(self) -> None:
        self._now = self.start

    @property
    def waiting(self) -> int:
        return len(self._waiting) - self._absent

    def knee(self, now: float) -> int:
        """How many calls the server sustains at `now`."""
        if len(self.schedule) == 1:
            return self.schedule[0][1]
        return [knee for since, knee in self.schedule if self.start + since <= now][-1]

    def full(self, now: float) -> bool:
        """Whether a call that comes now is rejected."""
        return self.kind == "reject" and self.serving >= self.knee(now)

    def arrive(self, job: Job[T], now: float) -> None:
        """Accept a call; call `due` before, so that the state is up to date."""
        self._advance(now)
        job.state = "waiting"
        self._waiting.append(job)
        self._admit()

    def leave(self, job: Job[T], now: float) -> None:
        """A client left: its slot is free at once."""
        self._advance(now)
        if job.state == "waiting":
            self._absent += 1
        elif job.state == "serving":
            # Its entry in the heap is skipped when its time comes.
            self.serving -= 1
        job.state = "over"
        self._admit()

    def due(self, now: float) -> list[tuple[Job[T], int]]:
        """The parts that are finished by `now`, in order; slots that became free are filled.

        A slot is free from the moment its call ended, not from the moment of this call: being
        late costs no throughput.
        """
        found: list[tuple[Job[T], int]] = []
        while (moment := self.next_time()) is not None and moment <= now:
            self._advance(moment)
            if not self._heap or self._finish(self._heap[0][0]) > moment:
                self._admit()  # the knee has moved
                continue
            goal, _, job = heapq.heappop(self._heap)
            if job.state != "serving":
                continue
            found.append((job, job.part))
            job.part += 1
            if job.part < len(job.parts):
                self._push(job, goal)
            else:
                job.state = "over"
                self.serving -= 1
                self._admit()
        self._advance(now)
        return found

    def next_time(self) -> float | None:
        """When something happens next: a part is finished, or the knee moves."""
        while self._heap and self._heap[0][2].state != "serving":
            heapq.heappop(self._heap)
        soonest = self._finish(self._heap[0][0]) if self._heap else inf
        if len(self.schedule) > 1 and (self.serving or self._waiting):
            moves = (self.start + since for since, _ in self.schedule)
            soonest = min(soonest, *(move for move in moves if move > self._now), inf)
        return None if soonest == inf else soonest

    def _speed(self) -> float:
        if self.kind == "queue" or self.kind == "reject":
            return 1.0
        load = self.serving / self.knee(self._now)
        if self.kind == "batch":
            return 1.0 / (0.4 + 0.6 * load)
        return float(load**-1.5) if load > 1.0 else 1.0

    def _finish(self, goal: float) -> float:
        return self._now + max(0.0, goal - self._done) / self._speed()

    def _advance(self, now: float) -> None:
        if now > self._now:
            self._done += (now - self._now) * self._speed()
            self._now = now

    def _admit(self) -> None:
        """Serve those who wait while there are slots."""
        room = inf if self.kind == "thrash" else self.knee(self._now)
        while self._waiting and self.serving < room:
            job = self._waiting.popleft()
            if job.state != "waiting":
                self._absent -= 1
                continue
            job.state = "serving"
            self.serving += 1
            self._push(job, self._done)
        self.peak = max(self.peak, self.serving)

    def _push(self, job: Job[T], start: float) -> None:
        self._number += 1
        heapq.heappush(self._heap, (start + job.parts[job.part], self._number, job))


@dataclass(slots=True)
class Bucket:
    """A token bucket: units per minute, of which `burst_s` seconds' worth can be saved up."""

    per_minute: float
    burst_s: float
    _level: float = inf
    _now: float = 0.0

    def wait(self, units: float, now: float) -> float:
        """Seconds until `units` may be taken; 0 is now.

        >>> bucket = Bucket(per_minute=120, burst_s=1)
        >>> [bucket.wait(1, now=0), bucket.take(2), bucket.wait(1, now=0)]
        [0.0, None, 0.5]
        """
        most = self.per_minute * self.burst_s / 60.0
        self._level = min(most, self._level + (now - self._now) * self.per_minute / 60.0)
        self._now = now
        # More than the bucket ever holds goes through when it is full, or it never could.
        missing = min(units, most) - self._level
        return max(0.0, missing * 60.0 / self.per_minute)

    def take(self, units: float) -> None:
        self._level -= units
