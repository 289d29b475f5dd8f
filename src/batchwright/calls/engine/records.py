"""What an engine leaves behind: a line a second in the event log, limits for the next run."""

from collections.abc import Sequence
from typing import Any

from batchwright.calls.engine.endpoint import Lane, remember
from batchwright.calls.engine.stats import Ledger
from batchwright.errors import CannotWrite
from batchwright.events import EventLog

__all__ = ["Records"]


class Records:
    """Tells an event log about the calls of some lanes; without a log it tells nothing."""

    def __init__(self, events: EventLog | None, ledger: Ledger, lanes: Sequence[Lane]) -> None:
        self._events = events
        self._ledger = ledger
        self._lanes = lanes
        self.since = 0.0
        """When the time began that the next line is about."""
        self._told: dict[str, int] = {}

    def changes(self) -> None:
        """Every change of a limit, with its reason."""
        for lane in self._lanes:
            for change in lane.limit.take_changes():
                told = {"from": change.before, "to": change.after, "why": change.why}
                self._event("limit", endpoint=lane.endpoint.name, **told)

    def calls(self, now: float) -> None:
        """What happened since the last line, if anything did."""
        if self._events is None:
            return
        self.changes()
        ledger = self._ledger
        counts = {
            "sent": ledger.sent,
            "hit": ledger.hits,
            "dedup": ledger.shared,
            "retry": ledger.retries,
            "failed": ledger.failed.total(),
            "done": ledger.done,
        }
        new = {name: n - self._told.get(name, 0) for name, n in counts.items()}
        window, self.since = now - self.since, now
        if not any(new.values()):
            return
        self._told = counts
        p50, p99 = ledger.quantiles(0.5, 0.99)
        self._event(
            "calls",
            window_s=round(window, 3),
            **new,
            p50=p50,
            p99=p99,
            in_flight=sum(lane.in_flight for lane in self._lanes),
            cost=ledger.cost,
        )

    def limits(self) -> None:
        """Keep the limits that were found for the next run; writes a file, so not on the loop."""
        learned = {
            lane.endpoint.address: lane.limit.state_dict() for lane in self._lanes if lane.learns
        }
        if learned and self._ledger.done > self._ledger.hits:
            remember(learned)

    def _event(self, kind: str, /, **fields: Any) -> None:
        if self._events is None:
            return
        try:
            self._events.write(kind, **fields)
        except (CannotWrite, ValueError):
            # A log that cannot be written, or is closed already, must not stop the calls.
            self._events = None
