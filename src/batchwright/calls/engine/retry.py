"""Whether a failed try is tried again, and after how long.

Everything here is arithmetic: the clock and the waiting belong to the pool.
"""

from dataclasses import dataclass

from batchwright.calls.outcome import Failed, Kind
from batchwright.errors import ConfigError
from batchwright.rng import key

__all__ = ["Retry"]

_AGAIN = {Kind.TIMEOUT, Kind.UNREACHABLE, Kind.TRUNCATED, Kind.HTTP_5XX}
_FEW = {Kind.BAD_BODY: 3, Kind.EMPTY: 2}
"""A server that answers nonsense mostly does so again; these many tries are enough."""
_NEVER = {501, 505}


@dataclass(frozen=True, slots=True)
class Retry:
    """At most `tries` tries; a reject (429) costs time, but not a try.

    Waits double from `base_s` to `most_s` and are spread over their upper half by a counter-based
    stream, so that calls which failed together do not come back together. Retry-After is kept to.
    """

    tries: int = 5
    base_s: float = 0.1
    most_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigError(f"tries={self.tries} is not possible; give 1 or more")

    def wait_s(
        self, failed: Failed, *, tries: int, rejects: int, left_s: float, number: int = 0
    ) -> float | None:
        """Seconds until the next try of call `number`; None if there is none.

        `tries` and `rejects` count what was made so far, this failure included. There is no next
        try when it could only begin after `left_s`, the rest of the deadline.

        >>> from batchwright.calls.outcome import Failed, Kind
        >>> busy = Failed(Kind.RATE_LIMITED, "429", retry_after_s=3.0)
        >>> 3.0 <= Retry().wait_s(busy, tries=0, rejects=99, left_s=60) < 4.0
        True
        >>> Retry().wait_s(busy, tries=0, rejects=1, left_s=2) is None
        True
        >>> Retry().wait_s(Failed(Kind.HTTP_4XX, "404"), tries=1, rejects=0, left_s=60) is None
        True
        """
        reject = failed.kind is Kind.RATE_LIMITED
        if not reject and not self._worth(failed, tries):
            return None
        step = max(1, rejects if reject else tries)
        share = key(self.seed, "retry", number, tries, rejects) / 2**64
        wait = min(self.most_s, self.base_s * 2.0 ** min(step - 1, 30)) * (0.5 + share / 2)
        if failed.retry_after_s is not None:
            # What the server asked for, then a little apart from the others it told the same.
            wait = failed.retry_after_s + min(wait, 0.5)
        return wait if wait < left_s else None

    def _worth(self, failed: Failed, tries: int) -> bool:
        if failed.kind in _FEW:
            return tries < min(self.tries, _FEW[failed.kind])
        if failed.kind not in _AGAIN or failed.status in _NEVER:
            return False
        return tries < self.tries
