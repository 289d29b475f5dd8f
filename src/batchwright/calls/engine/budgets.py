"""How many failures a run may have before it is stopped."""

from collections import Counter, deque
from dataclasses import dataclass

from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.errors import ConfigError

__all__ = ["ErrorBudget", "Failures"]

WHOLE_BATCH = 8
"""A batch of at least so many calls that failed altogether is over any budget."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """At most `fraction` of the last `window` calls may fail, nor all of a batch.

    Fewer calls than `window` have the same number of failures free, so that the first failure
    of a run does not end it. Cancelled calls do not count.
    """

    fraction: float = 0.02
    window: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1 or self.window < 1:
            raise ConfigError(
                f"an error budget of {self.fraction} of {self.window} calls is not possible; "
                f"give a fraction from 0 to below 1 and a window of 1 or more"
            )

    @property
    def allowed(self) -> int:
        return int(self.fraction * self.window)


class Failures:
    """The last outcomes against a budget.

    >>> failures = Failures(ErrorBudget(0.5, window=2))
    >>> failures.add(Failed(Kind.TIMEOUT, "60 s")), failures.add(Failed(Kind.EMPTY, "no text"))
    (False, True)
    >>> failures.sentence()
    '2 of the last 2 calls failed and 1 may: 1 timeout, 1 empty; the last one: no text'
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

    def sentence(self) -> str:
        """What failed, as a table in words."""
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self._kinds.most_common() if n)
        return (
            f"{self._kinds.total():,} of the last {len(self._last):,} calls failed and "
            f"{self.budget.allowed:,} may: {kinds}; the last one: {self._error}"
        )

    def clear(self) -> None:
        """Begin anew, after the budget was exceeded and said so."""
        self._last.clear()
        self._kinds.clear()
