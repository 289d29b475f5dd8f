"""The protocol of a concurrency limit, and the simplest one: a fixed number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchwright.errors import ConfigError

__all__ = ["Change", "FixedLimit", "Limit"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the limit at time `t`, and its reason."""

    t: float
    before: int
    after: int
    why: str


class Limit(Protocol):
    """What a pool reads before a call and reports after it.

    Times are seconds of any monotonic clock. `in_flight` counts the calls at the server, the one
    that ends included; a call that waits for its next try is not at the server.
    """

    @property
    def limit(self) -> int:
        """Calls allowed in flight now."""

    @property
    def pause_until(self) -> float:
        """No call may begin before this time."""

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        """A call ended after `seconds`, with a response or a failure other than a rejection."""

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        """The server rejected a call because there are too many (429, 503)."""

    def take_changes(self) -> list[Change]:
        """The changes since the last call of this."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier run learned."""


class FixedLimit:
    """Always `n` calls; it pauses only when rejections come with no response between them.

    >>> FixedLimit(8).limit
    8
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ConfigError(f"limit must be at least 1, got {n}")
        self.limit = n
        self.pause_until = 0.0
        self._rejects = 0

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        self._rejects = 0

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        self._rejects += 1
        if retry_after_s is not None and self._rejects > max(3, self.limit // 4):
            self.pause_until = max(self.pause_until, now + retry_after_s)

    def take_changes(self) -> list[Change]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
