"""The most calls in flight that a server does not reject, and whether that has moved up."""

import math
from dataclasses import dataclass

__all__ = ["Ceiling"]

LONGEST_GAP = 4
"""One more call is tried at least every so many times the limit."""


@dataclass(slots=True)
class Ceiling:
    """A burst of rejections sets it once; a single call above it, sent now and then, tests it.

    >>> ceiling = Ceiling()
    >>> ceiling.sustained(now=0.0, limit=16, in_flight=13, least=1, burst_s=0.1)
    12
    >>> ceiling.sustained(now=0.0, limit=12, in_flight=3, least=1, burst_s=0.1)
    8
    """

    height: int | None = None
    """None until the server rejects."""
    climb_from: int = 0
    """Where the climb began, once a call above it was accepted."""
    burst_until: float = -math.inf
    _floor: int = 0
    _trial: int | None = None
    """Calls that ended since one above the ceiling was sent."""
    _gap: int = 1
    _since: int = 0

    def sustained(self, now: float, limit: int, in_flight: int, least: int, burst_s: float) -> int:
        """The concurrency the server sustains if it rejected one of `in_flight` calls.

        One fewer; but rejections within `burst_s` of the first belong to one burst, and a burst
        cuts no more than half of the limit that it found.
        """
        if now > self.burst_until:
            self.burst_until = now + burst_s
            self._floor = max(least, limit // 2)
        return max(least, in_flight - 1, self._floor)

    def lower(self, height: int) -> None:
        self.height = height
        self._gap, self._since = 1, 0

    @property
    def on_trial(self) -> bool:
        """Whether one call above the ceiling is allowed."""
        return self._trial is not None

    def try_one_more(self, limit: int, may: bool) -> bool:
        """Count a call that ended under `limit`; whether it is time to allow one more."""
        self._since += 1
        if not may or self._since < self._gap * limit or limit != self.height:
            return False
        self._trial = 0
        return True

    def stands(self, limit: int) -> bool:
        """Count a call that ended during a trial; whether enough did and none was rejected."""
        self._trial = (self._trial or 0) + 1
        if self._trial < max(4, 0.5 * limit):
            return False
        self.height = self.climb_from = limit
        self._gap = 1
        return True

    def end_trial(self, rejected: bool) -> None:
        self._trial = None
        if rejected:
            self._since = 0
            self._gap = min(LONGEST_GAP, 2 * self._gap)
