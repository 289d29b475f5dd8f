"""An endpoint at work: its connections, its concurrency limit, its rate limit and its health."""

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batchwright.calls.cache.limits import load_limit
from batchwright.calls.cache.rates import RateFile
from batchwright.calls.endpoints import Endpoint
from batchwright.calls.limit.auto import AutoLimit
from batchwright.calls.limit.deadline import DEADLINE_S
from batchwright.calls.limit.fixed import FixedLimit, Limit
from batchwright.calls.limit.rates import RateLimit
from batchwright.calls.outcome import Done, Failed, Kind, Outcome
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.calls.wire.http import Transport

__all__ = ["Breaker", "SharedRateLimit", "Upstream", "limit_for"]

LATENCIES = 256
TRY_FACTOR, TRY_LEAST_S = 4.0, 1.0
"""A try may take so many times the 99th percentile, and so many seconds at least."""
TRY_FROM, FEW_FACTOR = 16, 8.0
"""With fewer latencies it may take longer: for n of them, so many nths of the longest more."""

SILENT = {Kind.TIMEOUT, Kind.UNREACHABLE}
MOST_PAUSE_S = 60.0
"""A server that asks for a longer pause is tried again after this: one absurd Retry-After must not
end an endpoint for the rest of a run. The call that was told so fails if its deadline is sooner."""
MOST_DEBT_S = 60.0
"""What servers count over the estimates holds calls back for a minute, the window of their own
limits, and not for as long as an absurd count would take."""
UNHEALTHY = {*SILENT, Kind.TRUNCATED, Kind.HTTP_5XX, Kind.BAD_BODY}
"""What an unhealthy server sends, or does not; a refusal with a reason comes from a healthy one."""
RESTARTING = {500, 502, 503, 504}
"""What a server that restarts sends, or the proxy before it: Ollama whose runner has ended, a
gateway, llama.cpp while it loads."""
OUTAGE_S, OUTAGE_CALLS = 60.0, 3
"""So long after its last response an only endpoint that fails so many calls in a row is taken for
one that restarts; after that, and for fewer, for one that cannot do what it is asked."""


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: opens after `max_failures` in a row, then lets single calls probe.

    The pauses between probes double from `first_s` to `max_s`; one success closes it. Times are
    arguments of the caller's clock.

    >>> breaker = Breaker(max_failures=2)
    >>> breaker.on_failure(0.0); breaker.on_failure(0.1)
    >>> breaker.open_until
    0.6
    """

    max_failures: int = 5
    first_s: float = 0.5
    max_s: float = 5.0
    open_until: float | None = None
    """When the next probe may go; None while the circuit is closed and calls flow."""
    opened: int = 0
    """How often it opened."""
    _failures: int = 0
    _pause_s: float = 0.0

    def on_success(self) -> None:
        """The server answered, possibly with a refusal."""
        self._failures = 0
        self.open_until = None

    def on_failure(self, now: float) -> None:
        """Nothing came back that a healthy server would send."""
        self._failures += 1
        if self.open_until is None:
            if self._failures >= self.max_failures:
                self.opened += 1
                self._pause_s = self.first_s
                self.open_until = now + self._pause_s
        elif now >= self.open_until:
            # The probe failed. Calls that were in flight when it opened say nothing new.
            self._pause_s = min(self.max_s, 2 * self._pause_s)
            self.open_until = now + self._pause_s

    def trip(self, now: float) -> None:
        """Open at once; if it is open already, this was a probe."""
        self._failures = max(self._failures, self.max_failures - 1)
        self.on_failure(now)


class SharedRateLimit:
    """Requests and tokens per minute for every process that names the same file and endpoint.

    `now` must be `time.monotonic()`. A call reads and writes a small file, about 0.1 ms.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        rpm: float | None = None,
        tpm: float | None = None,
        burst_s: float = 1.0,
    ) -> None:
        self._rate = RateLimit(rpm, tpm, burst_s)
        self._counts_tokens = tpm is not None
        self._file = RateFile(path)
        self._name = name

    def reserve(self, tokens: float, now: float) -> float:
        """Take one request and its estimated tokens, 0.0; or take nothing and return the wait."""
        with self._file.locked(self._name) as full_at:
            self._rate.set_full_at(*full_at)
            wait = self._rate.reserve(tokens, now)
            self._save(full_at)
        return wait

    def settle(self, estimate: float, actual: float) -> None:
        """Replace the tokens that were reserved by those that the server counted."""
        if self._counts_tokens and actual != estimate:
            with self._file.locked(self._name) as full_at:
                self._rate.set_full_at(*full_at)
                self._rate.settle(estimate, actual)
                before = full_at[1]
                self._save(full_at)
                full_at[1] = min(full_at[1], max(before, time.monotonic() + MOST_DEBT_S))

    def close(self) -> None:
        self._file.close()

    def _save(self, full_at: list[float]) -> None:
        for place, moment in enumerate(self._rate.full_at()):
            # A process that has no limit on tokens leaves the bucket to those that have.
            if moment is not None:
                full_at[place] = moment


@dataclass(slots=True, eq=False)
class Upstream:
    """What the engine knows about one endpoint."""

    endpoint: Endpoint
    limit: Limit
    learns: bool
    """Whether the limit is found, not given."""
    rates: SharedRateLimit | None = None
    alone: bool = False
    """Whether there is no other endpoint to send to."""
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    blocked_until: float = 0.0
    """When the rate limit allows the next call."""
    answered: int = 0
    """Responses so far."""
    quiet_since: float = 0.0
    """When the last response came, or a try was given up because none came."""
    answered_at: float = 0.0
    """When the last response came."""
    latencies: "deque[float]" = field(default_factory=lambda: deque(maxlen=LATENCIES))
    transport: "Transport | None" = None
    models: set[str] = field(default_factory=set)
    """What it was asked for, here and in the runs that its limit was learned in."""
    _recalled: bool = False
    """Whether the limit is that of an earlier run and nothing was asked for yet."""
    _failing: set[int] = field(default_factory=set)
    """The calls that failed since the last response, as they do while a server restarts."""
    _asked_at: float | None = None
    """When one that never answered first said that it was not ready."""
    _connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def recall(self) -> None:
        """Begin with the limit that an earlier run learned, if there is one."""
        state = load_limit(self.endpoint.address)
        if state is None or not isinstance(self.limit, AutoLimit):
            return
        try:
            self.limit.load_state_dict(state)
            self.models = {*map(str, state.get("models", ()))}
            self._recalled = True
        except (KeyError, TypeError, ValueError):
            # Written by another version; what it knew is learned again.
            self.limit.forget()

    def learned(self) -> dict[str, Any]:
        """What `recall` reads in a later run."""
        return {**self.limit.state_dict(), "models": sorted(self.models)}

    def meet(self, model: str) -> None:
        """It will be asked for this model; the first one tells whether what was recalled holds."""
        model = self.endpoint.model or model
        if self._recalled:
            self._recalled = False
            if model not in self.models and isinstance(self.limit, AutoLimit):
                # Another model at this address may be any number of times slower.
                self.limit.forget()
                self.models.clear()
        self.models.add(model)

    async def connect(self) -> "Transport":
        """The transport, made at the first call."""
        from batchwright.calls.wire.http import connect

        async with self._connecting:
            if self.transport is None:
                self.transport = await connect(self.endpoint)
        return self.transport

    @property
    def nearly_idle(self) -> bool:
        """Whether so few calls are in flight that none of them should wait for another."""
        return self.in_flight <= max(1, self.limit.limit // 4)

    def has_room(self, now: float) -> bool:
        """Whether it takes one more call now."""
        return self.in_flight < self.limit.limit and self.closed_until(now) <= now

    def closed_until(self, now: float) -> float:
        """When the next call may go, whatever is in flight; `now` or earlier if at once."""
        until = max(self.limit.pause_until, self.blocked_until)
        if self.breaker.open_until is not None:
            if self.in_flight:
                # A probe is in flight; everything waits for its end.
                return float("inf")
            until = max(until, self.breaker.open_until)
        return until

    def learn(self, now: float, seconds: float, outcome: Outcome, call: int) -> None:
        """Update limit and breaker by one try of this call, which still counts as in flight."""
        if isinstance(outcome, Done):
            self.answered += 1
            self.quiet_since = self.answered_at = now
            self.latencies.append(seconds)
            self.limit.on_done(now, seconds, self.in_flight, True)
            self.breaker.on_success()
            self._failing.clear()
        elif outcome.kind is Kind.RATE_LIMITED:
            after_s = outcome.retry_after_s
            after_s = after_s if after_s is None else min(after_s, MOST_PAUSE_S)
            self.limit.on_reject(now, self.in_flight, after_s)
            self.breaker.on_success()
        else:
            self.limit.on_done(now, seconds, self.in_flight, False)
            # Without another endpoint, one that answers at all soon stays in use: calls that it
            # never answers well would wait for each other's probes.
            if outcome.kind in (SILENT if self.alone else UNHEALTHY):
                self.breaker.on_failure(now)
            elif not self._may_restart(now, outcome):
                self.breaker.on_success()
            else:
                self._failing.add(call)
                if len(self._failing) >= OUTAGE_CALLS:
                    self.breaker.on_failure(now)

    def is_down(self, now: float, failed: Failed) -> bool:
        """Whether a try failed because the server is restarting: it says nothing of the call."""
        return self.breaker.open_until is not None and self._may_restart(now, failed)

    def _may_restart(self, now: float, failed: Failed) -> bool:
        if failed.status not in RESTARTING or failed.kind is not Kind.HTTP_5XX:
            return False
        if self.answered:
            return now - self.answered_at < OUTAGE_S
        # One that never answered and is said to be loading comes up, perhaps.
        if self._asked_at is None:
            self._asked_at = now
        return failed.status == 503 and now - self._asked_at < OUTAGE_S

    def try_s(self) -> float:
        """How long a try may take if calls sent later are answered; infinite if unknown."""
        known = len(self.latencies)
        if not known:
            return float("inf")
        ordered = sorted(self.latencies)
        # The longest of a few says less about how long calls take.
        factor = TRY_FACTOR + (FEW_FACTOR / known if known < TRY_FROM else 0.0)
        return max(TRY_LEAST_S, factor * ordered[round(0.99 * (known - 1))])

    def as_dict(self, now: float) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint.name,
            "in_flight": self.in_flight,
            "limit": self.limit.limit,
            "set_aside": self.breaker.open_until is not None,
            "times_set_aside": self.breaker.opened,
            "paused_s": round(max(0.0, self.limit.pause_until - now), 3),
        }


def limit_for(
    endpoint: Endpoint,
    given: Literal["auto"] | int | Limit,
    deadline_s: float = DEADLINE_S,
) -> tuple[Limit, bool]:
    """The limit of an endpoint from the `limit` of a pool, and whether it learns from the calls."""
    if not isinstance(given, str | int):
        return given, False
    if isinstance(given, int):
        if given < 1:
            raise ConfigError(f"limit must be at least 1, got {given}")
        return FixedLimit(given), False
    if given != "auto":
        raise ConfigError(f"limit must be 'auto' or a number, got {given!r}")
    if not endpoint.remote:
        # While one batch runs, the next one gathers.
        return FixedLimit(2 * endpoint.batch), False
    return AutoLimit(deadline_s=deadline_s), True
