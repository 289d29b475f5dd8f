"""Whether a failed try is retried, and after how long: exponential backoff with jitter.

Pure arithmetic; the engine has the clock and does the waiting.
"""

from dataclasses import dataclass

from batchwright.calls.outcome import Failed, Kind
from batchwright.errors import ConfigError
from batchwright.rng import key

__all__ = ["Retry"]

_RETRIED = {Kind.TIMEOUT, Kind.UNREACHABLE, Kind.TRUNCATED, Kind.HTTP_5XX}
_FEW = {Kind.BAD_BODY: 3, Kind.EMPTY: 2}
"""A server that sends garbage mostly does so again; so many tries are enough."""
_PERMANENT = {501, 505}


@dataclass(frozen=True, slots=True)
class Retry:
    """At most `tries` tries; a rejection (429) costs time, but not a try.

    Waits double from `base_s` to `max_s`, with jitter over their upper half from a counter-based
    random stream, so that calls which failed together do not return together. Retry-After is
    respected.
    """

    tries: int = 5
    base_s: float = 0.1
    max_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigError(f"tries must be at least 1, got {self.tries}")

    def wait_s(
        self, failed: Failed, *, tries: int, rejects: int, left_s: float, number: int = 0
    ) -> float | None:
        """Seconds until the next try of call `number`; None if this failure is final.

        `tries` and `rejects` count those so far, this failure included. A try that could only
        start after `left_s`, the rest of the deadline, is not made.

        >>> from batchwright.calls.outcome import Failed, Kind
        >>> busy = Failed(Kind.RATE_LIMITED, "429", retry_after_s=3.0)
        >>> 3.0 <= Retry().wait_s(busy, tries=0, rejects=99, left_s=60) < 4.0
        True
        >>> Retry().wait_s(busy, tries=0, rejects=1, left_s=2) is None
        True
        >>> Retry().wait_s(Failed(Kind.HTTP_4XX, "404"), tries=1, rejects=0, left_s=60) is None
        True
        """
        rejected = failed.kind is Kind.RATE_LIMITED
        if not rejected and not self._may_retry(failed, tries):
            return None
        step = max(1, rejects if rejected else tries)
        jitter = key(self.seed, "retry", number, tries, rejects) / 2**64
        wait = min(self.max_s, self.base_s * 2.0 ** min(step - 1, 30)) * (0.5 + jitter / 2)
        if failed.retry_after_s is not None:
            # What the server asked for, then a little apart from the others it asked the same.
            wait = failed.retry_after_s + min(wait, 0.5)
        return wait if wait < left_s else None

    def _may_retry(self, failed: Failed, tries: int) -> bool:
        if failed.kind in _FEW:
            return tries < min(self.tries, _FEW[failed.kind])
        if failed.kind not in _RETRIED or failed.status in _PERMANENT:
            return False
        return tries < self.tries
