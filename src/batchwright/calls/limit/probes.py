"""When to probe whether the server's knee has moved, and with how many calls in flight."""

from dataclasses import dataclass

from batchwright.calls.limit.curve import Curve, Knee

__all__ = ["Probes"]

UP, DOWN = 1.2, 0.83
"""Factors of the probes."""
LOPSIDED = 1.3
"""A deep probe down is due when likely knees lie this much more below the limit than above."""
DOWN_EVERY, DOWN_EVERY_THRASHING = 5, 12
"""One probe of so many goes down; a thrashing server shows a lower knee without any."""
GAP_ROUNDS, GAP_CALLS, AT_CEILING = 5, 25, 6
"""Calls between two probes: so many times the limit, and so many more; more at the ceiling."""
FEWEST_CALLS = 48
"""Calls between two probes at least, while little is known."""
KNOWN_CALLS = 36
"""Measured calls that a side of the limit needs to be known."""
LONGEST_GAP = 64
SURE = 1.5
"""The search is over when the likely knees are at most this factor apart."""


@dataclass(slots=True)
class Probes:
    """The schedule of probes: soon after a change, then seldom; up or down, where less is known."""

    gap: int = 1
    """Rounds between two probes; doubles with every one that shows nothing new."""
    calm: int = 0
    """Calls that ended since the last one."""
    sure: bool = False
    """Whether the search is over."""
    _count: int = 0

    def restart(self) -> None:
        """Something changed: probe soon."""
        self.gap, self.calm = 1, 0

    def record(self, limit: int, before: float, best: float, steady: bool) -> str:
        """Count a probe from `before` to `limit` that left `best` as the best limit; its result."""
        self.gap = min(LONGEST_GAP, 2 * self.gap) if steady else 1
        self.calm = 0
        if limit > before:
            return "probe up paid" if best > 1.05 * before else "probe up did not pay"
        return "probe down cost nothing" if best < 0.95 * before else "probe down cost goodput"

    def weigh(self, knee: Knee, at_ceiling: bool) -> bool:
        """Whether the search is over, as far as `knee` shows."""
        self.sure = at_ceiling or knee.high < SURE * knee.low
        return self.sure

    def due(self, limit: int, knee: Knee, at_ceiling: bool) -> bool:
        period = GAP_ROUNDS * limit + GAP_CALLS
        if knee.flat:
            period //= 2  # where goodput does not fall above the knee, probes cost nothing
        period = min(period, self.gap * max(FEWEST_CALLS, limit))
        return self.calm >= (AT_CEILING * period if at_ceiling else period)

    def target(self, best: float, least: int, height: int | None, knee: Knee, curve: Curve) -> int:
        """The limit of the next probe: on the side of which less is known, else mostly up.

        No probe goes below `least`, nor above `height`, the ceiling.
        """
        self.calm = 0
        # Of a few calls the next number is further away than any of these shares.
        below = curve.evidence(max(0.5, min(0.55 * best, round(best) - 1.1)), 0.93 * best)
        above = curve.evidence(1.07 * best, max(1.8 * best, round(best) + 1.1))
        lost = not self.sure and best * best > LOPSIDED * knee.low * knee.high
        if height is not None and round(best) >= height:
            up = False
        elif round(best) <= least:
            up = True
        elif lost:
            up = False
        elif min(below, above) < KNOWN_CALLS:
            up = below > above
        else:
            self._count += 1
            thrashes = self.sure and not knee.flat
            up = self._count % (DOWN_EVERY_THRASHING if thrashes else DOWN_EVERY) != 0
        if not up:
            factor = max(0.6, min(DOWN, knee.low / best)) if lost else DOWN
            return round(min(best - 1, best * factor))
        # One more call is always within reach, or a limit of 1 would stay there for ever.
        reach = max(curve.highest + 1, 1.35 * curve.highest)
        target = min(max(best + 1, best * UP), reach)
        return round(target if height is None else min(target, height))
