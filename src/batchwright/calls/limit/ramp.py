"""Whether more calls in flight pay, told by the calls of one burst before most of them have ended.

Raising the limit sends a burst of new calls. How many of them have ended by now, against how many
would have by the latencies known before, tells how much slower the server got. It is an early
answer, and one that does not mind calls that end in waves because they all take equally long.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Ramp"]

PAYS, IN_PART = 0.7, 0.4
"""A step has paid if calls got slower by the growth of the limit to this power at most: at 1
goodput is the same as before. Above the second it has paid in part."""
SLOWER = (0.0, 0.15, 0.3, 0.45, 0.6, 0.9, 1.05, 1.3, 1.7, 2.5)
"""Powers that are compared."""
CLEAR = 2.0
"""Log likelihood ratio of a verdict."""
ENOUGH = 0.2
"""The share of a burst that must have ended for a step to have paid."""
OVER = 0.8
"""The share of a burst that has ended when there is nothing more to see."""
LATE = 4.0
"""So many times the slowest known latency is long enough for any verdict."""
KNOWN = 16
"""Quantiles of the known latencies that are used."""
SMOOTH = 16.0
"""How sharp the known latencies are: the logarithms of times are scaled by this."""


@dataclass(slots=True)
class Ramp:
    """A ramp in steps: each is a burst of `new` calls on top of `level` that were in flight."""

    took: list[float] = field(default_factory=list)
    """Logarithms of the latencies before the first step, sorted."""
    slow: float = 0.0
    """How much slower than those the calls of the last step were, as a logarithm."""
    level: int = 0
    new: int = 0
    begun: float = 0.0
    ended: int = 0
    failed: int = 0
    sent: bool = False
    """Whether the size of the burst is known: the caller may have had fewer calls."""

    @classmethod
    def of(cls, latencies: Iterable[float]) -> "Ramp":
        took = sorted(math.log(max(1e-9, one)) for one in latencies)
        known = min(len(took), KNOWN)
        return cls([took[(2 * i + 1) * len(took) // (2 * known)] for i in range(known)])

    def step(self, now: float, level: int, limit: int) -> None:
        """The limit was raised from `level` to `limit`."""
        self.level, self.new, self.begun, self.ended, self.failed = level, limit - level, now, 0, 0
        self.sent = False

    def on_end(self, started: float, in_flight: int, ok: bool) -> bool:
        """A call ended; it counts if it is one of the burst. False if there is none to speak of."""
        if not self.sent:
            self.sent, self.new = True, min(self.new, in_flight - self.level)
            if self.new < 0.25 * self.level:
                return False
        tolerance = 0.05 * math.exp(self.slow + self.took[len(self.took) // 2])
        if self.begun - 1e-6 <= started <= self.begun + tolerance:
            self.ended += ok
            self.failed += not ok
        # As the calls beside it end and no others follow, the burst shows less and less.
        return in_flight > 0.5 * self.level

    def verdict(self, now: float) -> tuple[Literal["open", "paid", "in part", "no"], float]:
        """Whether goodput grows with the limit, and how many times it is that of the last step."""
        log_age = math.log(max(1e-9, now - self.begun)) - self.slow
        span = math.log((self.level + self.new) / self.level)
        fits = [self._likelihood(log_age - span * power) for power in SLOWER]
        paid = max(fit for fit, power in zip(fits, SLOWER, strict=True) if power < PAYS)
        best = max(fits)
        power = SLOWER[fits.index(best)]
        gain = math.exp(span * (1 - power))
        apart = paid - max(fit for fit, power in zip(fits, SLOWER, strict=True) if power > PAYS)
        enough = apart < 0 or self.ended >= ENOUGH * self.new
        over = self.ended + self.failed >= OVER * self.new
        late = log_age >= self.took[-1] + math.log(LATE)
        if (abs(apart) < CLEAR or not enough) and not (late or over):
            return "open", gain
        if apart < 0:
            return "no", gain
        return ("paid" if power < IN_PART else "in part"), gain

    def advance(self, gain: float) -> None:
        """The step has paid: from here on its latencies are the usual ones."""
        self.slow += math.log((self.level + self.new) / self.level / gain)

    def _likelihood(self, log_age: float) -> float:
        """Log likelihood of what has ended, if so many end as used to end in that time."""
        share = 0.0
        for one in self.took:
            share += 1 / (1 + math.exp(max(-50.0, min(50.0, SMOOTH * (one - log_age)))))
        share = (share + 0.1) / (len(self.took) + 0.2)
        left = self.new - self.ended - self.failed
        return self.ended * math.log(share) + (left + self.failed) * math.log(1 - share)
