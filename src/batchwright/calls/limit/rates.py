"""Requests and tokens per minute as token buckets."""

import math
from dataclasses import dataclass

from batchwright.errors import ConfigError

__all__ = ["Bucket", "RateLimit"]


@dataclass(slots=True)
class Bucket:
    """A token bucket: `per_minute` units a minute, and `burst_s` seconds' worth at once.

    In any `w` seconds at most `per_minute / 60 * w` units go through, plus the burst: what the
    bucket holds, or one request if that is larger. Times are arguments of the caller's clock.

    >>> bucket = Bucket(per_minute=60, burst_s=2)
    >>> [bucket.wait(1, now=0.0) or bucket.take(1, now=0.0) for _ in range(3)]
    [None, None, 1.0]
    >>> bucket.wait(1, now=1.0)
    0.0
    """

    per_minute: float
    burst_s: float = 1.0
    full_at: float = -math.inf
    """When the bucket will be full again if nothing more is taken; its whole state."""

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; exactly that long is long enough."""
        if self.full_at <= now:
            return 0.0
        # What is larger than the bucket waits for a full one and leaves it in debt.
        ready = self.full_at + min(self._seconds(amount) - self.burst_s, 0.0)
        if ready <= now:
            return 0.0
        wait = ready - now
        while now + wait < ready:
            wait = math.nextafter(wait, math.inf)
        return wait

    def take(self, amount: float, now: float) -> None:
        """Take `amount` unconditionally; the bucket may be left in debt."""
        self.full_at = max(self.full_at, now) + self._seconds(amount)

    def correct(self, amount: float) -> None:
        """Take `amount` more, or give back if it is negative."""
        self.full_at += self._seconds(amount)

    def _seconds(self, amount: float) -> float:
        return amount * 60.0 / self.per_minute


class RateLimit:
    """Limits on requests (`rpm`) and tokens (`tpm`) per minute; None is no limit.

    >>> rate = RateLimit(rpm=60)
    >>> rate.reserve(0, now=0.0), rate.reserve(0, now=0.25), rate.reserve(0, now=1.0)
    (0.0, 0.75, 0.0)
    """

    def __init__(
        self, rpm: float | None = None, tpm: float | None = None, burst_s: float = 1.0
    ) -> None:
        for name, value in (("rpm", rpm), ("tpm", tpm), ("burst_s", burst_s)):
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"{name} must be a finite number above 0, got {value}")
        # A bucket holds one request at least, or a slow rate would never let one go.
        self._requests = Bucket(rpm, max(burst_s, 60.0 / rpm)) if rpm is not None else None
        self._tokens = Bucket(tpm, burst_s) if tpm is not None else None

    def reserve(self, tokens: float, now: float) -> float:
        """Take one request and its estimated tokens, 0.0; or take nothing and return the wait."""
        wait = 0.0
        if self._requests is not None:
            wait = self._requests.wait(1, now)
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait(tokens, now))
        if wait == 0.0:
            if self._requests is not None:
                self._requests.take(1, now)
            if self._tokens is not None:
                self._tokens.take(tokens, now)
        return wait

    def settle(self, estimate: float, actual: float) -> None:
        """Replace the tokens that were reserved by those that the server counted.

        What is given back after the bucket was full in between comes on top of the limit.
        """
        if self._tokens is not None:
            self._tokens.correct(actual - estimate)

    def full_at(self) -> tuple[float | None, float | None]:
        """When the buckets of requests and tokens are full again; None where there is no limit."""
        buckets = (self._requests, self._tokens)
        requests, tokens = (None if bucket is None else bucket.full_at for bucket in buckets)
        return requests, tokens

    def set_full_at(self, requests: float, tokens: float) -> None:
        """Continue from buckets as another process left them."""
        if self._requests is not None:
            self._requests.full_at = requests
        if self._tokens is not None:
            self._tokens.full_at = tokens
