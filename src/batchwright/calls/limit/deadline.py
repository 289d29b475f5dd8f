"""Calls that a server may queue without any of them missing its deadline."""

import math
from dataclasses import dataclass

__all__ = ["DEADLINE_S", "QueueTime", "start_for"]

DEADLINE_S = 600.0
"""Default deadline of a call: a local model may take minutes for a long response."""

SHARE = 0.4
"""The share of the deadline that a call may be expected to take: the rest is for slower ones."""
START = 4
"""Calls in flight before anything is known, with a generous deadline."""
SLOW_S = 20.0
"""Twice the time that a call to a slow local model takes."""


def start_for(deadline_s: float) -> int:
    """Calls that even a slow server answers one after the other inside the deadline.

    >>> start_for(600), start_for(60), start_for(5)
    (4, 3, 1)
    """
    return max(1, min(START, int(deadline_s / SLOW_S)))


@dataclass(slots=True)
class QueueTime:
    """How long calls take, and so how many may be in flight.

    If the server only queues, twice the calls take twice as long (Little's law): with `n` in
    flight that take `s` seconds, `n / s` end each second, and `m` calls take `m s / n` seconds. So
    many are allowed that this is `SHARE` of the deadline at most. A server that still has free
    slots is faster than that, shows it at the next step, and then more are allowed.

    >>> queue = QueueTime(deadline_s=60)
    >>> queue.on_end(seconds=12.0, in_flight=4)
    >>> queue.most
    8
    """

    deadline_s: float
    _seconds: float = 0.0
    _in_flight: float = 0.0

    def on_end(self, seconds: float, in_flight: int) -> None:
        """A call ended; `in_flight` includes it."""
        share = 2.0 / (1.0 + max(8, in_flight)) if self._seconds else 1.0
        self._seconds += (seconds - self._seconds) * share
        self._in_flight += (in_flight - self._in_flight) * share

    def on_timeout(self, in_flight: int) -> None:
        """A call was in the queue for the whole deadline: with so many, all of them are late."""
        self._seconds = max(self._seconds, self.deadline_s)
        self._in_flight = min(self._in_flight or in_flight, in_flight)

    @property
    def most(self) -> float:
        """Calls that may be in flight; infinite before the first has ended."""
        if not self._seconds:
            return math.inf
        most = SHARE * self.deadline_s * self._in_flight / self._seconds
        return max(1.0, math.floor(min(most, 1e9)))
