"""When a run is stopped: too many failures, or the spending cap."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from batchwright.calls.engine.stats import Stats
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.errors import ConfigError

__all__ = ["WHOLE_BATCH", "ErrorBudget", "Failures", "Ledger", "SpendingCap"]

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


class Ledger(Protocol):
    """Where a try is written down before it is sent, so that `kill -9` does not make it free."""

    def reserve(self, request: Request, cost: float) -> None:
        """A try is about to be sent that costs at most so much; inf if there is no bound."""

    def release(self, request: Request) -> None:
        """A try of the request is not billed."""


class SpendingCap:
    """At most `max_cost` dollars for the calls that `stats` counts.

    A call in flight counts with the most it may cost: a token for each byte of its prompt, and its
    `max_tokens` or what the model gives at most. A try whose response never came goes on counting
    like that; one that was refused is free.
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

    def hold(self, request: Request) -> float | None:
        """What a call may cost, held for it from now on; None if it does not fit under the cap."""
        stats = self._stats
        cost = stats.most_cost(request)
        if self.reached or stats.cost + stats.unsettled_cost + self.held + cost > self.max_cost:
            return None
        self.held += cost
        return cost

    def close(self, request: Request) -> str:
        """Stop spending, because nothing is in flight and the next call is too much; the reason."""
        stats = self._stats
        stats.capped = True
        open_ = f", {stats.unsettled_cost:.6g} may be" if stats.unsettled_cost else ""
        return (
            f"the spending cap max_cost={self.max_cost:g} is reached: {stats.cost:.6g} spent{open_}"
            f", the next call may cost {stats.most_cost(request):.2g}; raise it and run again, "
            f"finished calls are kept"
        )
