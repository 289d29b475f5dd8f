"""Whether goodput grew, fell or stayed, by the calls that end in a window under one limit.

Counts are noisy, so every verdict is a likelihood ratio test: a few calls are enough where much
has changed, and many are needed where little has.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from batchwright.calls.limit.curve import Curve

__all__ = ["Step", "Window", "far_from_expected", "probe_verdict", "scatter"]

CLEAR, CLEAR_UP = 2.0, 4.0
"""Log likelihood ratios at which a probe is over: as expected, and as if the knee had moved."""
TEST_SHARE, TEST_CALLS = 0.35, 6
"""A probe is not judged before this share of the limit has ended, and so many calls."""
PAID = 0.9
"""The slope that a moved knee is expected to show in a probe."""
SURPRISE, SURPRISE_SIGMAS = 0.12, 3.0
"""How far from the expectation a window must be to be doubted, on the logarithmic scale."""
FALLEN = 0.6
"""The fall that a window tests for, as a share of the usual goodput."""


@dataclass(slots=True)
class Window:
    """The calls that end while the limit stays the same."""

    begun: float | None
    """None if the caller was idle: the first call that ends while the limit is full sets it."""
    skip: int
    """Calls still to end before counting: they were sent under another limit."""
    full: bool = False
    spent: float = 0.0
    """Seconds of counting before the caller paused."""
    ended: int = 0
    good: int = 0
    quick: int = 0
    """Failures that took less time than a response; they say nothing about the load."""
    usual: float = 0.0
    """Expected responses per second and call in flight, at least; 0 if unknown."""
    alarm: float = 0.0
    """CUSUM statistic of the log likelihood ratio that goodput has fallen to `FALLEN`: a sum that
    restarts at 0 whenever it would become negative, so that calls before the fall do not hide
    it."""
    slow_alarm: float = 0.0
    """The same by latencies. Calls that take equally long end in waves with silence between them,
    which only the first takes for a fall."""
    _last: float = 0.0
    _in_flight: int = 0
    _seconds: float = 0.0
    _squares: float = 0.0

    def count(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        self.watch(now, seconds, in_flight, ok)
        self.ended += 1
        self.good += ok
        self._in_flight += max(1, in_flight)
        self._seconds += seconds
        self._squares += seconds * seconds

    def watch(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        """Look for a fall, whether the call counts or not."""
        since = now - (self._last if self.begun is None else max(self.begun, self._last))
        self._last = now
        if self.usual:
            less, usual = ok * math.log(FALLEN), (1 - FALLEN) * self.usual
            self.alarm = max(0.0, self.alarm + usual * since * in_flight + less)
            self.slow_alarm = max(0.0, self.slow_alarm + usual * seconds + less)

    def again(self, now: float) -> None:
        """Count from now on, under the same limit."""
        self.begun, self.spent, self.ended, self.good, self.quick = now, 0.0, 0, 0, 0
        self.alarm = self.slow_alarm = 0.0
        self._in_flight, self._seconds, self._squares = 0, 0.0, 0.0

    def pause(self, skip: int) -> None:
        """The caller no longer fills the limit; once it does, `skip` calls are not counted."""
        if self.ended and self.begun is not None:
            self.spent += max(0.0, self._last - self.begun)
        self.begun, self.full, self.skip = None, False, skip
        self.alarm = self.slow_alarm = 0.0

    def elapsed(self, now: float) -> float:
        """Seconds of counting."""
        return max(1e-9, self.spent + now - (now if self.begun is None else self.begun))

    @property
    def rate(self) -> float:
        """Responses per second by Little's law: calls in flight over their mean latency.

        Unlike a count it does not depend on where the window begins and ends if calls end in
        waves. A window without any response counts as half of one.
        """
        return self.level * max(0.5, self.good) / max(1e-9, self._seconds)

    @property
    def level(self) -> float:
        """Calls in flight, on average."""
        return self._in_flight / self.ended

    @property
    def variation(self) -> float:
        """Coefficient of variation of the latencies."""
        mean = self._seconds / self.ended
        return math.sqrt(max(0.0, self._squares / self.ended - mean * mean)) / max(1e-12, mean)


class Step(NamedTuple):
    """A finished step of a dive."""

    level: float
    rate: float


def scatter(ended: int, limit: int, noise: float) -> float:
    """Standard deviation of the log rate of `ended` calls whose latencies vary by `noise`.

    In a time much shorter than a call, calls end independently of each other; in a longer one
    every end makes room for a call, and only the variation of the latencies is left.

    >>> scatter(100, limit=10_000, noise=0.5) > 1.9 * scatter(100, limit=10, noise=0.5)
    True
    """
    alone = math.exp(-ended / limit)
    return math.sqrt((noise**2 + max(0.0, 1.0 - noise**2) * alone) / ended)


def probe_verdict(
    window: Window, now: float, limit: int, base: float, curve: Curve
) -> Literal["open", "unclear", "as expected", "goodput rose"]:
    """Whether a probe from `base` to `limit` shows what the curve expects, or a moved knee.

    "open" and "unclear" are not over; "unclear" may be a knee that has moved up.
    """
    if window.ended < max(TEST_CALLS, TEST_SHARE * limit):
        return "open"
    apart = math.log(window.level / base)
    if abs(apart) < 0.05:
        return "open"
    expected, spread = curve.expect(window.level)
    moved = curve.expect(base)[0] + max(0.0, PAID * apart)
    seen = math.log(window.rate)
    variance = scatter(window.ended, limit, curve.noise) ** 2
    variance += spread**2 if seen > expected else 0.0
    likelier = ((seen - expected) ** 2 - (seen - moved) ** 2) / (2 * variance)
    if apart > 0 and moved > expected and likelier > CLEAR_UP:
        return "goodput rose"
    if likelier < -CLEAR:
        return "as expected"
    return "unclear" if apart > 0 else "open"


def far_from_expected(
    window: Window, now: float, limit: int, curve: Curve, doubted: float
) -> float:
    """Logarithmic distance of a window from what the curve expects; 0 if it is not far.

    `doubted` is the distance of the window before, or 0: to confirm it takes less, but on the
    same side.
    """
    expected, spread = curve.expect(window.level)
    apart = math.log(window.rate) - expected
    noise = math.hypot(scatter(window.ended, limit, curve.noise), spread)
    sigmas = 0.6 * SURPRISE_SIGMAS if doubted else SURPRISE_SIGMAS
    return apart if apart * doubted >= 0 and abs(apart) > max(SURPRISE, sigmas * noise) else 0.0
