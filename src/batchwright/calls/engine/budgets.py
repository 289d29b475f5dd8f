"""When a run is stopped: too many failures, or the spending cap."""

from collections import Counter, deque
from dataclasses import dataclass

from batchwright.calls.engine.stats import Stats, estimate_usage
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.errors import ConfigError

__all__ = ["WHOLE_BATCH", "ErrorBudget", "Failures", "SpendingCap"]

WHOLE_BATCH = 8
"""A batch of at least so many calls that all failed is over any budget."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """At most `fraction` of the last `window` calls may fail, nor all of a batch.

    Fewer calls than `window` may have the same number of failures, so that the first failure of
    a run does not end it. Cancelled calls do not count.
    """

    fraction: float = 0.02
    window: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ConfigError(
                f"the fraction of an error budget must be in [0, 1), got {self.fraction}"
            )
        if self.window < 1:
            raise ConfigError(
                f"the window of an error budget must be at least 1, got {self.window}"
            )

    @property
    def allowed(self) -> int:
        return int(self.fraction * self.window)


class Failures:
    """The last outcomes against an error budget.

    >>> failures = Failures(ErrorBudget(0.5, window=2))
    >>> failures.add(Failed(Kind.TIMEOUT, "60 s")), failures.add(Failed(Kind.EMPTY, "no text"))
    (False, True)
    >>> failures.summary()
    '2 of the last 2 calls failed, 1 allowed: 1 timeout, 1 empty; the last error: no text'
    """

    def __init__(self, budget: ErrorBudget) -> None:
        self.budget = budget
        self._last: deque[Kind | None] = deque()
        self._kinds: Counter[Kind] = Counter()
        self._error = ""

    def add(self, outcome: Outcome) -> bool:
        """Count an outcome; True if the budget is exceeded now."""
        kind = outcome.kind if isinstance(outcome, Failed) else None
        if kind is Kind.CANCELLED:
            return False
        self._last.append(kind)
        if isinstance(outcome, Failed):
            self._kinds[outcome.kind] += 1
            self._error = outcome.error
        if len(self._last) > self.budget.window:
            gone = self._last.popleft()
            if gone is not None:
                self._kinds[gone] -= 1
        return kind is not None and self._kinds.total() > self.budget.allowed

    def summary(self) -> str:
        """How many failed, and of which kinds."""
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self._kinds.most_common() if n)
        return (
            f"{self._kinds.total():,} of the last {len(self._last):,} calls failed, "
            f"{self.budget.allowed:,} allowed: {kinds}; the last error: {self._error}"
        )

    def clear(self) -> None:
        """Start over, after the budget was exceeded and reported."""
        self._last.clear()
        self._kinds.clear()


class SpendingCap:
    """At most `max_cost` dollars for the calls that `stats` counts.

    A call in flight counts as the mean cost so far, or as estimated before the first response,
    so only responses longer than usual can exceed the cap, and not by much.
    """

    def __init__(self, max_cost: float, stats: Stats) -> None:
        self.max_cost = max_cost
        self.reached = False
        """No call is sent any more, whatever the ones in flight turn out to cost."""
        self._stats = stats

    def allows(self, request: Request, in_flight: int) -> bool:
        """Whether this call fits under the cap next to those in flight."""
        spent = self._stats.cost + (in_flight + 1) * self._cost_per_call(request)
        return not self.reached and spent <= self.max_cost

    def close(self, request: Request) -> str:
        """Stop spending, because nothing is in flight and the next call is too much; the reason."""
        self.reached = True
        return (
            f"the spending cap max_cost={self.max_cost:g} is reached: {self._stats.cost:.6g} "
            f"spent, the next call would cost about {self._cost_per_call(request):.2g}; raise it "
            f"and run again, finished calls are kept"
        )

    def _cost_per_call(self, request: Request) -> float:
        stats = self._stats
        return stats.mean_cost or stats.price(request, estimate_usage(request))
