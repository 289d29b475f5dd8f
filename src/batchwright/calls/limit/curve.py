"""Where goodput stops growing with the calls in flight, estimated from noisy measurements.

Goodput against concurrency, both on a logarithmic scale, is close to a broken stick for any model
server: it rises with some slope up to the knee, and is flat or falls beyond it. `Curve` holds the
measurements and the posterior over such sticks. There is no target latency, so a batching server,
whose calls get slower long before its goodput stops growing, is not misread.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Curve", "Knee"]

STEP = 0.04
"""Resolution on the logarithmic scale: the next bin has 4 percent more calls in flight."""
REACH = 0.45
"""How far outside the measurements a knee is searched for, on the logarithmic scale."""
RISES, FALLS = (1.0, 0.75, 0.5), (0.0, -0.3, -0.7)
"""Slopes below the knee: in proportion, or less where calls slow each other down; and above it:
a queue, and two degrees of thrashing."""
_RISE, _FALL = (np.repeat(RISES, len(FALLS)), np.tile(FALLS, len(RISES)))
CROWDING = 0.15
"""More calls in flight must bring at least this share of their growth as goodput."""
FLAT = -0.15
"""Slopes above the knee from this on count as flat."""
FLOOR = 0.02
"""Least standard deviation of a measurement: servers drift."""


class Knee(NamedTuple):
    """The limit of least expected loss, and the estimate of the knee."""

    limit: float
    low: float
    high: float
    """Likely knees lie between these."""
    fall: float
    """The slope above the knee; 0 for a server that only queues."""

    @property
    def flat(self) -> bool:
        """Whether more calls than the knee cost hardly any goodput."""
        return self.fall > FLAT


class _Belief(NamedTuple):
    knees: NDArray[np.float64]
    """Candidate knees, as logarithms."""
    heights: NDArray[np.float64]
    """[knee, shape] logarithm of the goodput at the knee."""
    weights: NDArray[np.float64]
    """[knee, shape] posterior probability of each stick."""
    variance: float
    """Of the heights."""


class Curve:
    """Goodput measured at different numbers of calls in flight, and the sticks that explain it.

    >>> curve = Curve()
    >>> for in_flight, rate in [(4, 4.0), (8, 8.0), (12, 10.1), (16, 9.9)]:
    ...     curve.add(in_flight, calls=1000, seconds=1000 / rate)
    >>> 9 < curve.knee().limit < 11
    True
    """

    def __init__(self, noise: float = 0.6) -> None:
        self.noise = noise
        """Standard deviation that one call adds to a rate: the variation of the latencies."""
        self.rounds = 0
        """How many measurements there were; 0 if all have decayed."""
        self.bounds = (0.0, math.inf)
        """Knees are searched for between these; ignored where measurements lie outside."""
        self._bins: dict[int, tuple[float, float]] = {}
        self._belief: _Belief | None = None

    def __len__(self) -> int:
        return len(self._bins)

    def add(self, in_flight: float, calls: float, seconds: float) -> None:
        """`calls` responses came in `seconds` with `in_flight` calls in flight."""
        place = round(math.log(in_flight) / STEP)
        before = self._bins.get(place, (0.0, 0.0))
        self._bins[place] = (before[0] + calls, before[1] + seconds)
        self.rounds += 1
        self._belief = None

    def decay(self, factor: float) -> None:
        """Scale the weight of all measurements; what counts less than one call is dropped."""
        scaled = {place: (c * factor, s * factor) for place, (c, s) in self._bins.items()}
        self._bins = {place: pair for place, pair in scaled.items() if pair[0] >= 1.0}
        self.rounds = self.rounds if self._bins else 0
        self._belief = None

    @property
    def highest(self) -> float:
        """The most calls in flight that were measured."""
        return math.exp(max(self._bins) * STEP)

    @property
    def width(self) -> float:
        """The range of the measured levels, on the logarithmic scale."""
        return (max(self._bins) - min(self._bins)) * STEP if self._bins else 0.0

    def evidence(self, low: float, high: float) -> float:
        """How many calls were measured with `low` to `high` in flight."""
        first, last = math.log(low) / STEP, math.log(high) / STEP
        return sum(calls for place, (calls, _) in self._bins.items() if first <= place <= last)

    def expect(self, in_flight: float) -> tuple[float, float]:
        """Logarithm of the expected goodput with so many calls, and its standard deviation."""
        belief = self._weigh()
        apart = math.log(in_flight) - belief.knees[:, None]
        guess = belief.heights + _stick(apart)[..., 0]
        mean = float((belief.weights * guess).sum())
        variance = float((belief.weights * (guess - mean) ** 2).sum()) + belief.variance
        return mean, math.sqrt(variance)

    def knee(self) -> Knee:
        """The best limit under the posterior."""
        belief = self._weigh()
        knees, weights = belief.knees, belief.weights
        apart = knees[:, None] - knees  # [limit, knee]
        # Below the knee goodput is lost; above it too if it falls, and crowding has a cost.
        below = np.maximum(-apart, 0.0) @ (weights @ _RISE)
        above = np.maximum(apart, 0.0) @ (weights @ (CROWDING - _FALL))
        sums = np.cumsum(weights.sum(axis=1))
        low, high = np.interp((0.1, 0.9), sums, knees)
        best = float(knees[np.argmin(below + above)])
        fall = float((weights @ _FALL).sum())
        return Knee(math.exp(best), math.exp(low), math.exp(high), fall)

    def _weigh(self) -> _Belief:
        if self._belief is None:
            places = sorted(self._bins)
            x = np.array(places) * STEP
            calls, seconds = np.array([self._bins[place] for place in places]).T
            trust = 1.0 / (self.noise**2 / calls + FLOOR**2)
            first = max(x[0] - REACH, min(x[-1], math.log(max(1e-9, self.bounds[0]))))
            last = max(first, min(x[-1] + REACH, max(x[0], math.log(self.bounds[1]))))
            knees = np.arange(first, last + STEP / 2, STEP)
            # [knee, shape, bin]
            rest = np.log(calls / seconds) - _stick(x - knees[:, None])
            heights = (rest @ trust) / trust.sum()
            misses = ((rest - heights[..., None]) ** 2) @ trust
            weights = np.exp(-0.5 * (misses - misses.min()))
            variance = 1.0 / float(trust.sum())
            self._belief = _Belief(knees, heights, weights / weights.sum(), variance)
        return self._belief

    def rows(self) -> list[list[float]]:
        """[calls in flight, responses, seconds] of every bin."""
        bins = sorted(self._bins.items())
        return [[math.exp(place * STEP), calls, seconds] for place, (calls, seconds) in bins]

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]], noise: float) -> "Curve":
        """The curve that has these `rows`."""
        curve = cls(noise)
        for in_flight, calls, seconds in rows:
            curve.add(in_flight, calls, seconds)
        return curve


def _stick(apart: NDArray[np.float64]) -> NDArray[np.float64]:
    """[knee, n] logarithmic distances from the knee to [knee, shape, n] heights above it."""
    below, above = np.minimum(apart, 0.0), np.maximum(apart, 0.0)
    sticks: NDArray[np.float64] = _RISE[:, None] * below[:, None] + _FALL[:, None] * above[:, None]
    return sticks
