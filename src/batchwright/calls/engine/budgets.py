"""When a run is stopped: too many failures, or the spending cap."""

from collections import Counter, deque
from dataclasses import dataclass
from math import ceil

from batchwright.calls.engine.stats import Stats, most_completion
from batchwright.calls.outcome import Failed, Kind, Outcome, Usage
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
    """At most `max_cost` dollars for the responses that `stats` counts.

    A call in flight counts with the most it may cost: its `max_tokens`, and as many prompt tokens
    a byte as were seen so far. Without `max_tokens` it counts as the longest response so far,
    and the first call goes alone; only such calls can exceed the cap. A try that failed is free.
    """

    def __init__(self, max_cost: float, stats: Stats) -> None:
        self.max_cost = max_cost
        self.held = 0.0
        """What the calls in flight may cost."""
        self._stats = stats

    @property
    def reached(self) -> bool:
        """No call is sent any more, whatever the ones in flight turn out to cost."""
        return self._stats.capped

    def hold(self, request: Request, in_flight: int) -> float | None:
        """What a call may cost, held for it from now on; None if it does not fit under the cap."""
        stats = self._stats
        unknown = not stats.responses and most_completion(request) is None
        cost = self._cost(request)
        if self.reached or (unknown and in_flight):
            return None
        if stats.cost + self.held + cost > self.max_cost:
            return None
        self.held += cost
        return cost

    def close(self, request: Request) -> str:
        """Stop spending, because nothing is in flight and the next call is too much; the reason."""
        self._stats.capped = True
        return (
            f"the spending cap max_cost={self.max_cost:g} is reached: {self._stats.cost:.6g} "
            f"spent, the next call may cost {self._cost(request):.2g}; raise it and run again, "
            f"finished calls are kept"
        )

    def _cost(self, request: Request) -> float:
        stats = self._stats
        completion = most_completion(request)
        prompt = len(request.data) * (stats.tokens_per_byte if stats.responses else 1.0)
        tokens = stats.longest if completion is None else completion
        return stats.price(request, Usage(ceil(prompt), tokens))
