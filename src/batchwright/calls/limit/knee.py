"""Finds the least concurrency with nearly the best throughput, and says how sure that is.

A `KneeSearch` is a concurrency limit that moves in order to measure. It visits a level until so
many calls ended there, compares all measurements with every curve of a family (a rise that may be
bent, a knee, a plateau or a fall), and goes on where the likely curves differ, until they agree on
the answer or the budget is used up. Pure arithmetic, no clock and no I/O.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.calls.limit.fixed import Change
from batchwright.errors import ConfigError

__all__ = ["Answer", "KneeSearch", "Visit"]

NEAR = 0.95
"""A level is good enough with this share of the best throughput."""
WITHIN = 1.25
"""The answer is to be right within this factor."""
SURE = 0.95
"""The search is over once the answer is right within `WITHIN` with this probability."""
CALLS = 16
"""Calls of a visit, or as many as the level if that is more; later visits are longer."""
FEW = 4
"""With fewer calls a visit that was cut short says nothing."""
LONGER = 24
"""A visit is at least the part 1 / LONGER of all calls so far: many visits tell no more."""
CLIMB = 0.15
"""The search goes up while the knee lies above all levels with at least this probability."""
BENDS = (1.0, 0.7, 0.45, 0.3, 0.2, 0.1)
"""Share of a call's time, with a full server, that is there with a single call too: at 1
throughput grows in proportion up to the knee, below it growth gets slower and slower."""
FALLS = (0.0, 0.3, 0.6, 1.0)
"""How fast throughput falls above the knee, as a power."""
DRIFTS = ((0.02, 100.0), (0.06, 200.0), (0.15, 200.0), (0.5, 200.0))
"""Slow changes of the server's pace: standard deviation, and calls after which it is forgotten."""
FAILED = 0.2
"""A level with more failures than this share is too high."""
PLACES = (0.65, 1.0, 1.3)
"""Where to measure more, in multiples of the estimate."""


@dataclass(slots=True)
class Visit:
    """What was measured at one level, from when on it was reached until the next one."""

    level: int
    skip: int
    """Calls still to end before counting."""
    since: float | None = None
    """When the level was reached; calls sent before do not count. None until then."""
    at: float = 0.0
    """Calls that had ended in all when it was over."""
    took: list[float] = field(default_factory=list)
    """Latencies of the responses."""
    lost_s: float = 0.0
    """Seconds that failed calls were in flight."""
    failed: int = 0
    rejected: int = 0
    in_flight: int = 0

    @property
    def ended(self) -> int:
        return len(self.took) + self.failed

    @property
    def rate(self) -> float:
        """Responses per second by Little's law: calls in flight over their mean latency."""
        if not self.took:
            return 0.0
        busy_s = max(1e-9, sum(self.took) + self.lost_s)
        return self.in_flight / self.ended * len(self.took) / busy_s

    @property
    def too_many(self) -> bool:
        """Whether the server does not sustain the level: it rejects, or calls fail."""
        return self.rejected > 1 + 0.05 * self.ended or self.failed > FAILED * max(10, self.ended)


class Answer(NamedTuple):
    """The least concurrency that reaches `NEAR` of the best throughput."""

    concurrency: int
    low: int
    high: int
    """Between these with a probability of 0.9."""
    probability: float
    """That it is right within the factor `WITHIN`."""
    at_most: bool
    """Whether throughput still grows at the highest level that was allowed."""

    @property
    def sure(self) -> bool:
        return self.probability >= SURE


class _Hypotheses:
    """The curves that are compared: every knee with every shape."""

    def __init__(self, most: int) -> None:
        grid = np.unique(np.rint(1.03 ** np.arange(0, math.log(3 * most) / math.log(1.03) + 1)))
        knee, bend, fall = np.meshgrid(grid, BENDS, FALLS, indexing="ij")
        self.knee, self.bend, self.fall = knee.ravel(), bend.ravel(), fall.ravel()
        edges = np.sqrt(grid[1:] * grid[:-1])
        width = np.log(np.append(edges, 1.02 * grid[-1]) / np.append(0.7, edges))
        # Most servers have one slot for each call, up to the knee.
        usual = np.where(self.bend == 1.0, 3.0, 1.0) * np.where(self.fall == 0.0, 2.0, 1.0)
        self.prior = np.log(np.repeat(width, len(BENDS) * len(FALLS)) * usual)
        best = np.minimum(1.0, most / self.knee)
        near = NEAR * best / (self.bend + (1 - self.bend) * best)
        share = near * self.bend / (1 - near * (1 - self.bend))
        self.answer = np.maximum(1.0, np.ceil(share * self.knee - 1e-9))

    def curve(self, level: NDArray[np.float64]) -> NDArray[np.float64]:
        """[hypothesis, level] logarithm of the throughput, up to a constant of the server."""
        over = level / self.knee[:, None]
        bend, below = self.bend[:, None], np.minimum(over, 1.0)
        rise = np.log(below / (bend + (1 - bend) * below))
        curve: NDArray[np.float64] = rise - self.fall[:, None] * np.log(np.maximum(over, 1.0))
        return curve


class KneeSearch:
    """A limit that looks for the server's knee, with 1 to `most` calls in flight.

    >>> search = KneeSearch(most=8)
    >>> while not search.over:  # a server with 3 slots, 1 s a call
    ...     now, n = float(search.calls), search.limit
    ...     search.on_done(now, max(1.0, n / 3), n, ok=True)
    >>> search.answer.concurrency, search.answer.sure
    (3, True)
    """

    def __init__(
        self, most: int = 128, max_calls: float = math.inf, max_seconds: float = math.inf
    ) -> None:
        for name, value in (("most", most), ("max_calls", max_calls), ("max_seconds", max_seconds)):
            if not value >= 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.most, self.max_calls, self.max_seconds = most, max_calls, max_seconds
        self.limit = 1
        self.pause_until = 0.0
        self.calls = 0
        self.over = False
        self.visits: list[Visit] = []
        """Those that are over."""
        self.ceiling: int | None = None
        """The lowest level that the server does not sustain."""
        self._visit = Visit(1, 1, since=-math.inf)
        self._begun: float | None = None
        self._hypotheses = _Hypotheses(most)
        self._weights: NDArray[np.float64] | None = None

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        if self._spent(now, seconds) or in_flight > self.limit:
            return  # the calls above the limit end first
        visit = self._visit
        if visit.since is None:
            visit.since = now
        if now - seconds < visit.since - 1e-9:
            return
        if visit.skip:
            visit.skip -= 1
            visit.failed += not ok
            visit.lost_s += 0.0 if ok else seconds
            visit.in_flight += 0 if ok else in_flight
        else:
            visit.in_flight += in_flight
            if ok:
                visit.took.append(seconds)
            else:
                visit.failed += 1
                visit.lost_s += seconds
        if visit.too_many:
            self._too_many(now)
        elif visit.ended >= max(CALLS, visit.level, self.calls / LONGER):
            self._end_visit(now)

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        if self._spent(now, 0.0) or in_flight > self.limit:
            return
        self._visit.rejected += 1
        if retry_after_s is not None:
            self.pause_until = max(self.pause_until, now + retry_after_s)
        if self._visit.too_many:
            self._too_many(now)

    def _spent(self, now: float, seconds: float) -> bool:
        """Count a call; whether the search is over."""
        self.calls += 1
        if self._begun is None:
            self._begun = now - seconds
        if self.over:
            return True
        if self.calls >= self.max_calls or now - self._begun >= self.max_seconds:
            self.stop()
        return self.over

    def stop(self) -> None:
        """End the search; what the present visit has measured counts."""
        self.over = True
        if len(self._visit.took) >= FEW:
            self.visits.append(self._visit)
            self._visit.at = self.calls - self._visit.ended / 2
            self._weights = None

    def _too_many(self, now: float) -> None:
        level = self._visit.level
        self.ceiling = level if self.ceiling is None else min(level, self.ceiling)
        self._end_visit(now)

    def _end_visit(self, now: float) -> None:
        self._visit.at = self.calls - self._visit.ended / 2
        self.visits.append(self._visit)
        self._weights = None
        if self.ceiling == 1:
            self.over = True
        elif self._good:
            self.over = self._settled()
        if not self.over:
            before, self.limit = self.limit, self._next_level()
            self._visit = Visit(self.limit, self.limit, now if self.limit > before else None)

    @property
    def _highest(self) -> int:
        """The most that the server may be asked to sustain."""
        return self.most if self.ceiling is None else min(self.most, self.ceiling - 1)

    def _settled(self) -> bool:
        enough = len(self.visits) > 3 or self._highest == 1
        return enough and self._above() < CLIMB and self._answer().sure

    def _above(self) -> float:
        """The probability that the knee lies above all levels that were measured."""
        reached = max((one.level for one in self._good), default=0)
        if reached >= self._highest:
            return 0.0
        return float(self._posterior()[self._hypotheses.knee > reached].sum())

    @property
    def _good(self) -> list[Visit]:
        return [one for one in self.visits if one.took and not one.too_many]

    def _next_level(self) -> int:
        reached = max((one.level for one in self._good), default=0)
        if self._above() >= CLIMB:
            ceiling = self.ceiling
            step = 2 * reached if ceiling is None else math.sqrt(max(1, reached) * ceiling)
            return max(reached + 1, min(self._highest, round(step)))
        near = self._answer().concurrency
        places = {max(1, min(self._highest, _away(near, place))) for place in PLACES}
        return min(places, key=lambda level: (self._calls_near(level), level))

    def _calls_near(self, level: int) -> int:
        near = (one for one in self._good if level / 1.1 <= one.level <= 1.1 * level)
        return sum(len(one.took) for one in near)

    @property
    def answer(self) -> Answer | None:
        """What is known by now; None without any level that the server sustains."""
        return self._answer() if self._good else None

    def _answer(self) -> Answer:
        weights, answers = self._posterior(), self._hypotheses.answer
        values, place = np.unique(answers, return_inverse=True)
        shares = np.bincount(place, weights)
        apart = np.abs(np.log(values[:, None] / values))
        right = (apart <= math.log(WITHIN) + 1e-9) @ shares
        best = int(np.argmax(right - 0.2 * (apart @ shares)))
        low, high = np.searchsorted(np.cumsum(shares), (0.05, 0.95))
        grows = float(weights[self._hypotheses.knee > 1.1 * self._highest].sum())
        return Answer(
            round(values[best]),
            round(values[low]),
            round(values[min(high, len(values) - 1)]),
            min(1.0, float(right[best])),
            self.ceiling is None and grows > 0.5,
        )

    def _posterior(self) -> NDArray[np.float64]:
        """The probability of each hypothesis."""
        if self._weights is not None:
            return self._weights
        given, good = self._hypotheses, self._good
        level = np.array([one.in_flight / one.ended for one in good])
        seen = np.log([one.rate for one in good])
        ended = np.array([float(one.ended) for one in good])
        at = np.array([one.at for one in good])
        noise = np.diag(_variation(good) ** 2 / ended + 0.01**2)
        apart = np.abs(at[:, None] - at)
        rest = seen - given.curve(level)
        logs = []
        for deviation, memory in DRIFTS:
            # Of the mean over a visit, which forgets while it lasts.
            longer = np.sqrt(1 + np.outer(ended, ended) / (2 * memory) ** 2)
            covariance = noise + deviation**2 * np.exp(-apart / memory) / np.sqrt(longer)
            precision = np.linalg.inv(covariance)
            whole = precision.sum()
            # The server's speed is unknown and integrated out.
            weighted = rest @ precision
            misses = np.einsum("ij,ij->i", weighted, rest) - weighted.sum(axis=1) ** 2 / whole
            logs.append(-0.5 * (misses + np.linalg.slogdet(covariance)[1] + math.log(whole)))
        log = np.logaddexp.reduce(logs) + given.prior
        if self.ceiling is not None:
            log[given.knee >= max(2, self.ceiling)] = -np.inf
        weights = np.exp(log - log.max())
        self._weights = weights / weights.sum()
        return self._weights

    def take_changes(self) -> list[Change]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _away(level: int, factor: float) -> int:
    """About `factor` times the level, and another one."""
    if factor < 1:
        return min(level - 1, round(level * factor))
    return max(level + 1, round(level * factor)) if factor > 1 else level


def _variation(visits: list[Visit]) -> float:
    """Coefficient of variation of a call's latency, without what comes from waiting in a queue.

    Latencies in a queue vary less than the time of the calls at work, so the visits with the most
    variation count; 8 calls of 0.5 are added, because a few calls tell little about it.
    """
    by_level: dict[int, list[float]] = {}
    for one in visits:
        mean = sum(one.took) / len(one.took)
        by_level.setdefault(one.level, []).extend(each / mean - 1 for each in one.took)
    return max(
        math.sqrt((8 * 0.25 + sum(each * each for each in apart)) / (8 + len(apart)))
        for apart in by_level.values()
    )
