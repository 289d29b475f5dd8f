"""When an endpoint is set aside, and when it is tried again."""

from dataclasses import dataclass, field

__all__ = ["Breaker"]


@dataclass(slots=True)
class Breaker:
    """Sets an endpoint aside after `most_bad` failures in a row, then lets single calls probe it.

    The pauses between probes double from `first_s` to `most_s`; one good answer ends it all.
    A pure state machine: times are seconds of any clock, given as arguments.

    >>> breaker = Breaker(most_bad=2)
    >>> breaker.on_bad(0.0); breaker.on_bad(0.1)
    >>> breaker.allows(0.2, in_flight=0), breaker.allows(1.0, in_flight=0)
    (False, True)
    """

    most_bad: int = 5
    first_s: float = 0.5
    most_s: float = 5.0
    open_until: float | None = None
    """None while the endpoint is in use."""
    opened: int = 0
    """How often the endpoint was set aside."""
    _bad: int = 0
    _pause_s: float = field(default=0.0)

    def allows(self, now: float, in_flight: int) -> bool:
        """Whether one more call may go; while it is set aside, one at a time after each pause."""
        if self.open_until is None:
            return True
        return in_flight == 0 and now >= self.open_until

    def on_good(self) -> None:
        """The server answered, be it with a refusal."""
        self._bad = 0
        self.open_until = None

    def on_bad(self, now: float) -> None:
        """Nothing came back that a healthy server would send."""
        self._bad += 1
        if self.open_until is None:
            if self._bad >= self.most_bad:
                self.opened += 1
                self._pause_s = self.first_s
                self.open_until = now + self._pause_s
        elif now >= self.open_until:
            # The probe failed. Calls that were under way when it opened say nothing new.
            self._pause_s = min(self.most_s, 2 * self._pause_s)
            self.open_until = now + self._pause_s
