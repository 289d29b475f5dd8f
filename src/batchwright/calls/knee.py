"""Where goodput stops growing with the calls in flight, told from noisy measurements.

Goodput against concurrency, both on a logarithmic scale, is close to a broken stick for any model
server: it rises with some slope up to the knee and is flat or falls behind it. `Curve` keeps what
was measured and weighs every stick against it; there is no target for the latency, so a batching
server, whose calls get slower long before its goodput stops growing, is not misread.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Curve", "Knee"]

STEP = 0.04
"""Resolution on the logarithmic scale; 4 percent more calls in flight are the next bin."""
RISES = (1.0, 0.75, 0.5)
"""Slopes below the knee: in proportion, or less where calls slow each other down."""
FALLS = (0.0, -0.3, -0.7)
"""Slopes above the knee: a queue, and two degrees of thrashing."""
CROWDING = 0.2
"""More calls in flight must bring at least this share of their growth as goodput."""
NOISE = 0.7
"""Spread of one call's share of a rate: the coefficient of variation of latencies, rounded up."""
FLOOR = 0.02
"""No measurement is trusted closer than this: servers wander."""
REACH = 0.45
"""How far outside of what was measured a knee is looked for; on the logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Knee:
    """The limit of least expected loss, and how far the knee may be from it."""

    limit: float
    low: float
    high: float
    fall: float


class Curve:
    """Goodput measured at different numbers of calls in flight."""

    def __init__(self, noise: float = NOISE) -> None:
        self.noise = noise
        self.measurements = 0
        self._cached = None
        self.low: float | None = None
        self.high: float | None = None
        self._bins: dict[int, tuple[float, float]] = {}  # calls and seconds

    def __len__(self) -> int:
        return len(self._bins)

    def add(self, in_flight: float, calls: float, seconds: float) -> None:
        """`calls` answers came in `seconds` while `in_flight` calls were on their way."""
        self._cached = None
        self.measurements += 1
        place = round(math.log(in_flight) / STEP)
        before = self._bins.get(place, (0.0, 0.0))
        self._bins[place] = (before[0] + calls, before[1] + seconds)

    def fade(self, share: float) -> None:
        """Trust everything `share` as much as until now; what is worth less than a call goes."""
        self._bins = {
            place: (calls * share, seconds * share)
            for place, (calls, seconds) in self._bins.items()
            if calls * share >= 1.0
        }

    @property
    def highest(self) -> float:
        return math.exp(max(self._bins) * STEP)

    def evidence(self, low: float, high: float) -> float:
        """Calls measured with `low` to `high` of them in flight."""
        first, last = math.log(low) / STEP, math.log(high) / STEP
        return sum(calls for place, (calls, _) in self._bins.items() if first <= place <= last)

    def _weigh(self):
        if self._cached is None:
            self._cached = self._weigh_now()
        return self._cached

    def _weigh_now(self):
        places = sorted(self._bins)
        x = np.array(places) * STEP
        calls, seconds = np.array([self._bins[place] for place in places]).T
        y = np.log(calls / seconds)
        weight = 1.0 / (self.noise**2 / calls + FLOOR**2)
        first, last = x[0] - REACH, x[-1] + REACH
        if self.low is not None:
            first = min(max(first, math.log(self.low)), x[-1])
        if self.high is not None:
            last = max(min(last, math.log(self.high)), x[0] )
        knees = np.arange(first, last + STEP / 2, STEP)
        rise, fall = (g.ravel() for g in np.meshgrid(RISES, FALLS))
        apart = x - knees[:, None]
        below, above = np.minimum(apart, 0.0), np.maximum(apart, 0.0)
        # [knees, shapes, bins]
        rest = y - rise[:, None] * below[:, None] - fall[:, None] * above[:, None]
        mean = (rest @ weight) / weight.sum()
        miss = ((rest - mean[..., None]) ** 2) @ weight
        belief = np.exp(-0.5 * (miss - miss.min()))
        belief /= belief.sum()
        return knees, rise, fall, mean, belief, 1 / weight.sum()

    def expect(self, in_flight: float) -> tuple[float, float]:
        """Logarithm of the goodput expected with `in_flight` calls, and its standard deviation."""
        knees, rise, fall, mean, belief, var = self._weigh()
        apart = math.log(in_flight) - knees[:, None]
        guess = mean + rise * np.minimum(apart, 0) + fall * np.maximum(apart, 0)
        centre = float((belief * guess).sum())
        return centre, math.sqrt(float((belief * (guess - centre) ** 2).sum()) + var)

    def knee(self) -> Knee:
        """Weigh all sticks by how well they explain the curve, and choose for the average one."""
        knees, rise, fall, mean, belief, _ = self._weigh()
        # What a limit at x loses if the knee is at k: log goodput, and the price of crowding.
        apart = knees[:, None] - knees  # [limits, knees]
        up, down = np.maximum(-apart, 0.0), np.maximum(apart, 0.0)
        loss = up @ (belief @ rise) + down @ (belief @ (CROWDING - fall))
        sums = np.cumsum(belief.sum(axis=1))
        low, high = np.interp((0.1, 0.9), sums, knees)
        return Knee(float(np.exp(knees[loss.argmin()])), math.exp(low), math.exp(high), float((belief @ fall).sum()))

    def state(self) -> list[list[float]]:
        """[calls in flight, calls, seconds] of each bin."""
        rows = sorted(self._bins.items())
        return [[round(math.exp(p * STEP), 3), round(c, 3), round(s, 6)] for p, (c, s) in rows]

    @classmethod
    def load(cls, rows: list[Any]) -> "Curve":
        curve = cls()
        for in_flight, calls, seconds in rows:
            curve.add(float(in_flight), float(calls), float(seconds))
        return curve
