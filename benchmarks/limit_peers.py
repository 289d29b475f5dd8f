"""Other people's rules for a concurrency limit, ported for `bench_limit.py`.

The rules of Netflix's concurrency-limits are those of its default builders, with the bounds
widened to 1 and 1000; Gradient2 and Vegas get averages of windows, as its WindowedLimit gives them.
The seconds in the rules (5 s timeout, 1 s windows, 15 s cool-down) are multiplied by the server's
mean latency, so that no rule suffers from a server that is faster or slower than its authors' own.
All are ports by hand, not the originals: Gradient2 is the version without a tolerance, Vegas probes
at the middle of its jitter, and the threshold of inspect_ai's saturation gate is a guess.
"""

import math
from typing import Any

__all__ = ["Aimd", "Fixed", "Gradient2", "Inspect", "Peer", "Vegas"]


class Peer:
    """What all of them share: no pauses, no memory but their own."""

    pause_until = 0.0

    def __init__(self, limit: float, latency_s: float = 1.0) -> None:
        self.value = limit
        self.unit_s = latency_s

    @property
    def limit(self) -> int:
        return int(self.value)

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        pass

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        pass

    def take_changes(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Fixed(Peer):
    """Sixty, as the comment in somebody's source said."""

    def __init__(self, latency_s: float = 1.0) -> None:
        super().__init__(60, latency_s)


class Aimd(Peer):
    """One more for each answer, a tenth less for each reject or answer after 5 s."""

    def __init__(self, latency_s: float = 1.0) -> None:
        super().__init__(10, latency_s)

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        if seconds > 5 * self.unit_s:
            self._drop()
        elif in_flight * 2 >= self.limit:
            self.value = min(1000, self.limit + 1)

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        self._drop()

    def _drop(self) -> None:
        self.value = max(1, min(self.limit - 1, int(self.limit * 0.9)))


class _Windowed(Peer):
    """Averages over windows of 1 s with ten samples or more."""

    def __init__(self, latency_s: float = 1.0) -> None:
        super().__init__(20, latency_s)
        self._until = 0.0
        self._new()

    def _new(self) -> None:
        self._count, self._sum, self._peak, self._dropped = 0, 0.0, 0, False

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        self._count += 1
        self._sum += seconds
        self._peak = max(self._peak, in_flight)
        self._close(now)

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        self._dropped = True
        self._peak = max(self._peak, in_flight)
        self._close(now)

    def _close(self, now: float) -> None:
        if now <= self._until:
            return
        self._until = now + self.unit_s
        count, total, peak, dropped = self._count, self._sum, self._peak, self._dropped
        self._new()
        if count >= 10:
            self.update(total / count, peak, dropped)

    def update(self, rtt: float, peak: int, dropped: bool) -> None:
        raise NotImplementedError


class Gradient2(_Windowed):
    """The long average of the latency over the short one, plus four."""

    def __init__(self, latency_s: float = 1.0) -> None:
        super().__init__(latency_s)
        self._long, self._seen = 0.0, 0

    def update(self, rtt: float, peak: int, dropped: bool) -> None:
        self._seen += 1
        if self._seen <= 10:
            self._long += (rtt - self._long) / self._seen
        else:
            self._long += (rtt - self._long) * 2 / 601
        if self._long / rtt > 2:
            self._long *= 0.9
        if peak < self.value / 2:
            return
        gradient = max(0.5, min(1.0, self._long / rtt))
        grown = 0.8 * self.value + 0.2 * (self.value * gradient + 4)
        self.value = max(1.0, min(1000.0, grown))


class Vegas(_Windowed):
    """The queue that the least latency ever seen implies, kept between 3 and 6 log10(limit)."""

    def __init__(self, latency_s: float = 1.0) -> None:
        super().__init__(latency_s)
        self._least, self._since = 0.0, 0

    def update(self, rtt: float, peak: int, dropped: bool) -> None:
        self._since += 1
        # Its jitter is between a half and one; the middle keeps the port free of chance.
        if self._since >= 0.75 * 30 * self.value or not self._least or rtt < self._least:
            self._least, self._since = rtt, 0
            return
        log = max(1, int(math.log10(max(1, self.limit))))
        queue = math.ceil(self.value * (1 - self._least / rtt))
        if dropped:
            self.value -= log
        elif peak * 2 < self.value:
            return
        elif queue <= log:
            self.value += 6 * log
        elif queue < 3 * log:
            self.value += log
        elif queue > 6 * log:
            self.value -= log
        self.value = max(1.0, min(1000.0, self.value))


class Inspect(Peer):
    """inspect_ai's rule, 10-20-100: double until the first 429, then AIMD on 429 only."""

    def __init__(self, latency_s: float = 1.0) -> None:
        super().__init__(20, latency_s)
        self._clean, self._rejected, self._cool_until = 0, False, -1.0

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        # Its saturation gate: rounds that did not fill the limit do not count.
        if now < self._cool_until or in_flight < 0.8 * self.limit:
            return
        self._clean += 1
        if self._clean < max(4, self.limit):
            return
        self._clean = 0
        if not self._rejected:
            self.value = min(100, 2 * self.limit)
        else:
            more = self.limit + max(1, round(0.05 * self.limit))
            self.value = min(100, -(-more // 5) * 5)

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        self._clean, self._rejected = 0, True
        if now >= self._cool_until:
            self._cool_until = now + 15 * self.unit_s
            self.value = max(10, int(0.8 * self.limit) // 5 * 5)
