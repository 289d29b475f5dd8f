"""An endpoint at work: its transport, its limit, its health and its rates."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.engine.breaker import Breaker
from batchwright.calls.outcome import Done, Kind, Outcome
from batchwright.errors import CannotWrite, ConfigError
from batchwright.files import write_atomic
from batchwright.models import registry as models

if TYPE_CHECKING:
    from batchwright.calls.limit.auto import Limit
    from batchwright.calls.limit.rates import RateBuckets
    from batchwright.calls.wire.http import Transport

__all__ = ["Lane", "limit_for", "memory_path", "remember", "remembered"]

SILENT = {Kind.TIMEOUT, Kind.UNREACHABLE}
BAD = {Kind.TIMEOUT, Kind.UNREACHABLE, Kind.TRUNCATED, Kind.HTTP_5XX, Kind.BAD_BODY}
"""What an unhealthy server sends, or does not; a refusal with a reason comes from a healthy one."""


@dataclass(slots=True, eq=False)
class Lane:
    """What the engine knows about one endpoint."""

    endpoint: Endpoint
    limit: "Limit"
    learns: bool
    """Whether the limit is found, not given, and so is worth remembering."""
    rates: "RateBuckets | None" = None
    alone: bool = False
    """Whether there is no other endpoint to go to."""
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    blocked_until: float = 0.0
    """When the rates allow the next call."""
    transport: "Transport | None" = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> "Transport":
        """The transport, made at the first call."""
        from batchwright.calls.wire.http import connect

        async with self._opening:
            if self.transport is None:
                self.transport = await connect(self.endpoint)
        return self.transport

    def closed_until(self, now: float) -> float:
        """When the next call may go, other calls apart; `now` or earlier if at once."""
        until = max(self.limit.pause_until, self.blocked_until)
        if self.breaker.open_until is not None:
            if self.in_flight:
                # The probe is under way; its end is what everybody waits for.
                return float("inf")
            until = max(until, self.breaker.open_until)
        return until

    def learn(self, now: float, seconds: float, outcome: Outcome) -> None:
        """What one try says about the endpoint; it still counts as in flight."""
        if isinstance(outcome, Done):
            self.limit.on_done(now, seconds, self.in_flight, True)
            self.breaker.on_good()
        elif outcome.kind is Kind.RATE_LIMITED:
            self.limit.on_reject(now, self.in_flight, outcome.retry_after_s)
            self.breaker.on_good()
        else:
            self.limit.on_done(now, seconds, self.in_flight, False)
            # Where nobody else could be asked, one that answers at all is not set aside: calls
            # that it never answers well would wait for each other's probes.
            if outcome.kind in (SILENT if self.alone else BAD):
                self.breaker.on_bad(now)
            else:
                self.breaker.on_good()

    def as_dict(self, now: float) -> dict[str, Any]:
        aside = self.breaker.open_until is not None
        return {
            "endpoint": self.endpoint.name,
            "in_flight": self.in_flight,
            "limit": self.limit.limit,
            "set_aside": aside,
            "times_set_aside": self.breaker.opened,
            "paused_s": round(max(0.0, self.limit.pause_until - now), 3),
        }


def limit_for(
    endpoint: Endpoint, given: "Literal['auto'] | int | Limit", remember: bool
) -> "tuple[Limit, bool]":
    """The limit of an endpoint by what a pool was given, and whether it is a found one.

    With `remember` an automatic limit begins where an earlier run left it.
    """
    from batchwright.calls.limit.auto import AutoLimit, FixedLimit

    if not isinstance(given, str | int):
        return given, False
    if isinstance(given, int):
        if given < 1:
            raise ConfigError(f"limit={given} is not possible; give 1 or more")
        return FixedLimit(given), False
    if given != "auto":
        raise ConfigError(f"limit={given!r} is not known; give 'auto' or a number")
    if not endpoint.remote:
        # While one batch runs, the next one gathers.
        return FixedLimit(2 * endpoint.batch), False
    limit = AutoLimit()
    state = remembered(endpoint) if remember else None
    if state is not None:
        try:
            limit.load_state_dict(state)
        except (KeyError, TypeError, ValueError):
            # Written by another version; what it knew is learned again.
            limit = AutoLimit()
    return limit, True


def memory_path() -> Path:
    """Where limits that were found are kept for the next run."""
    return models.home() / "limits.json"


def remembered(endpoint: Endpoint) -> dict[str, Any] | None:
    """What an earlier run learned about an endpoint; None if nothing readable is there."""
    try:
        known = json.loads(memory_path().read_bytes())
        state = known[endpoint.address]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if isinstance(state, dict) else None


def remember(states: dict[str, dict[str, Any]]) -> None:
    """Keep what was learned; other endpoints' entries stay. A hint only, so a full disk is fine."""
    try:
        known = json.loads(memory_path().read_bytes())
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    text = json.dumps({**known, **states}, indent=1, sort_keys=True)
    try:
        write_atomic(memory_path(), text.encode() + b"\n")
    except CannotWrite:
        return
