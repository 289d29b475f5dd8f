"""Requests and tokens a minute: buckets that fill at a fixed rate, shared by processes if asked."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from batchwright.calls.cache.owners import boot_id
from batchwright.calls.cache.sqlite import Database
from batchwright.errors import ConfigError

__all__ = ["Bucket", "RateBuckets"]

APPLICATION_ID = 0x62775261
VERSION = 1
SCHEMA = """
CREATE TABLE buckets(
    name TEXT PRIMARY KEY, boot TEXT NOT NULL, requests REAL NOT NULL, tokens REAL NOT NULL)
"""


@dataclass(slots=True)
class Bucket:
    """Allows `per_minute` things a minute, and `burst_s` seconds' worth of them at once.

    In any `w` seconds at most `per_minute / 60 * w` go through, plus the burst: what the bucket
    holds, or one thing if that is larger. There is no clock inside: times are arguments.

    >>> bucket = Bucket(per_minute=60, burst_s=2)
    >>> [bucket.wait(1, now=0.0) or bucket.take(1, now=0.0) for _ in range(3)]
    [None, None, 1.0]
    >>> bucket.wait(1, now=1.0)
    0.0
    """

    per_minute: float
    burst_s: float = 1.0
    full_at: float = -math.inf
    """When the bucket will be full again if nothing more is taken; all there is to remember."""

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; exactly that long is long enough."""
        if self.full_at <= now:
            return 0.0
        # What is larger than the bucket waits for a full one, and is paid off afterwards.
        ready = self.full_at + min(self._seconds(amount) - self.burst_s, 0.0)
        if ready <= now:
            return 0.0
        wait = ready - now
        while now + wait < ready:
            wait = math.nextafter(wait, math.inf)
        return wait

    def take(self, amount: float, now: float) -> None:
        """Take `amount` without asking; the bucket may be left in debt."""
        self.full_at = max(self.full_at, now) + self._seconds(amount)

    def correct(self, amount: float) -> None:
        """Take so much more, or give so much back if it is negative."""
        self.full_at += self._seconds(amount)

    def _seconds(self, amount: float) -> float:
        return amount * 60.0 / self.per_minute


class RateBuckets:
    """Limits on requests (`rpm`) and tokens (`tpm`) a minute; None is no limit.

    With a `path`, every process on this machine that names the same file and the same `name` (say
    of the endpoint) draws from the same buckets, and `now` must be `time.monotonic()`, which is
    one clock for all of them. A call then reads and writes a small file, about 0.1 ms. Without a
    path, use it from one thread.

    >>> rates = RateBuckets(None, rpm=60)
    >>> rates.reserve(0, now=0.0), rates.reserve(0, now=0.25), rates.reserve(0, now=1.0)
    (0.0, 0.75, 0.0)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        rpm: float | None = None,
        tpm: float | None = None,
        name: str = "",
        burst_s: float = 1.0,
    ) -> None:
        for flag, value in (("rpm", rpm), ("tpm", tpm), ("burst_s", burst_s)):
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"{flag}={value} is not possible; give a number above 0")
        # A bucket holds one request at least, or a slow rate would never let one go.
        self._requests = Bucket(rpm, max(burst_s, 60.0 / rpm)) if rpm is not None else None
        self._tokens = Bucket(tpm, burst_s) if tpm is not None else None
        self._name = name
        self._database = (
            Database(path, "file of rates", SCHEMA, APPLICATION_ID, VERSION)
            if path is not None and (rpm is not None or tpm is not None)
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, tokens_estimate: float, now: float) -> float:
        """Take one request and its tokens, 0.0; or take nothing, and say how long to wait."""
        with self._shared():
            wait = 0.0
            if self._requests is not None:
                wait = self._requests.wait(1, now)
            if self._tokens is not None:
                wait = max(wait, self._tokens.wait(tokens_estimate, now))
            if wait == 0.0:
                if self._requests is not None:
                    self._requests.take(1, now)
                if self._tokens is not None:
                    self._tokens.take(tokens_estimate, now)
        return wait

    def settle(self, estimate: float, actual: float) -> None:
        """Put the tokens that the server counted in the place of those that were reserved.

        What is given back after the bucket has been full in between comes on top of the limit.
        """
        if self._tokens is not None and actual != estimate:
            with self._shared():
                self._tokens.correct(actual - estimate)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    @contextlib.contextmanager
    def _shared(self) -> Iterator[None]:
        """Hold the buckets alone, as they are in the file."""
        if self._database is None:
            yield
            return
        buckets = (self._requests, self._tokens)
        with self._database.writing() as connection:
            # The clock begins anew with the machine, and so do the buckets.
            row = connection.execute(
                "SELECT requests, tokens FROM buckets WHERE name = ? AND boot = ?",
                (self._name, boot_id()),
            ).fetchone()
            before = row or (-math.inf, -math.inf)
            for bucket, full_at in zip(buckets, before, strict=True):
                if bucket is not None:
                    bucket.full_at = full_at
            yield
            after = tuple(
                full_at if bucket is None else bucket.full_at
                for bucket, full_at in zip(buckets, before, strict=True)
            )
            if after != before:
                connection.execute(
                    "INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)",
                    (self._name, boot_id(), *after),
                )
