"""The protocol of a concurrency limit, and the simplest one: a number that is never exceeded."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchwright.errors import ConfigError

__all__ = ["Change", "FixedLimit", "Limit"]

HISTORY = 256
LONGEST_GAP = 4
"""One more call is tried at least every so many times the limit."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the limit at time `t`, and its reason."""

    t: float
    before: int
    after: int
    why: str


class Limit(Protocol):
    """What a pool reads before a call and reports after it.

    Times are seconds of any monotonic clock. `in_flight` counts the calls at the server, the one
    that ends included; a call that waits for its next try is not at the server.
    """

    @property
    def limit(self) -> int:
        """Calls allowed in flight now."""

    @property
    def pause_until(self) -> float:
        """No call may begin before this time."""

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        """A call ended after `seconds`, with a response or a failure other than a rejection."""

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        """The server rejected a call because there are too many (429, 503)."""

    def take_changes(self) -> list[Change]:
        """The changes since the last call of this."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier run learned."""


class FixedLimit:
    """At most `n` calls: rejections bring the limit down below it, and it comes back.

    A burst of rejections cuts once, to what the server held on to and to no less than an eighth.
    After every so many responses as the limit is, one more call is tried, then two more, four
    more; a rejection starts that over.

    >>> limit = FixedLimit(8)
    >>> limit.on_reject(now=0.1, in_flight=6, retry_after_s=None)
    >>> limit.limit
    5
    >>> for n in range(12):
    ...     limit.on_done(1.0 + n, 0.5, in_flight=limit.limit, ok=True)
    >>> limit.limit
    8
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ConfigError(f"limit must be at least 1, got {n}")
        self.most = n
        self.limit = n
        self.pause_until = 0.0
        self._changes: deque[Change] = deque(maxlen=HISTORY)
        self._latency_s = 0.0
        self._burst_until = -math.inf
        self._floor = 1
        self._step, self._gap, self._ended = 1, 1, 0

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        if self.limit == self.most:
            return
        self._latency_s += (seconds - self._latency_s) * (0.1 if self._latency_s else 1.0)
        self._ended += ok and in_flight >= self.limit
        if self._ended >= self._gap * self.limit:
            self._move(now, min(self.most, self.limit + self._step), "no reject")
            self._step *= 2

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        if now > self._burst_until:
            self._burst_until = now + max(self._latency_s, 0.05)
            self._floor = max(1, self.limit // 8)
            # The rarer the more often one more call was rejected, but never given up.
            self._gap = min(LONGEST_GAP, 2 * self._gap) if self._step > 1 else 1
            self._step = 1
        sustained = max(in_flight - 1, self._floor)
        if sustained > max(1, in_flight - 1):
            # Fewer calls are rejected as well: it is not their number alone.
            wait = 0.5 * (self._latency_s or 0.2) if retry_after_s is None else retry_after_s
            self.pause_until = max(self.pause_until, now + wait)
        if sustained < self.limit:
            self._move(now, sustained, "rejected")

    def _move(self, now: float, limit: int, why: str) -> None:
        self._changes.append(Change(now, self.limit, limit, why))
        self.limit, self._ended = limit, 0

    def take_changes(self) -> list[Change]:
        taken = list(self._changes)
        self._changes.clear()
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
