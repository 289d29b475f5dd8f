"""How many calls may be in flight: a fixed number, or as many as the server turns out to bear."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batchwright.calls.knee import Curve, Knee, Round
from batchwright.errors import ConfigError, Mismatch

__all__ = ["AutoLimit", "Change", "FixedLimit", "Limit"]

VERSION = 1
HISTORY = 256

GROWTH = 2.0
"""Factor of the ramp; less where goodput grew by less."""
RAMP_SHARE, RAMP_CALLS = 0.6, 12
"""A step of the ramp is judged when this share of the limit has ended, and so many calls."""
PAYS = 0.25
"""The ramp goes on if goodput grew by the growth of the limit to this power."""
EXIT = 1.25
"""Where the ramp ends: above its last good step, by this and by what goodput grew since."""
HOLD_CALLS, PROBE_CALLS, DIVE_CALLS = 48, 72, 32
"""Calls that a round needs, if it is not more that the limit asks for."""
PROBE_ROUNDS = 1.5
UP, DOWN = 1.2, 0.83
"""Factors of the probes."""
LOPSIDED = 1.3
"""Likely knees lie this much more below the limit than above when a deep probe down is due."""
DOWN_EVERY, DOWN_EVERY_THRASHING = 5, 12
"""One probe of so many goes down; a thrashing server shows without any that its knee came down."""
SKIP_UP, SKIP_DOWN = 0.6, 0.5
"""Shares of the limit that end uncounted after it went up or down."""
GAP_ROUNDS, GAP_CALLS = 8, 40
"""Calls between two probes: so many times the limit, and so many more."""
CLEAR, CLEAR_UP = 2.0, 4.0
"""Log likelihood ratios at which a probe is over: as expected, and as if the knee had moved."""
TEST_SHARE, TEST_CALLS = 0.35, 16
"""A probe is not judged before this share of the limit has ended, and so many calls."""
PAID = 0.9
"""The slope that a moved knee is expected to show in a probe."""
SURPRISE, SURPRISE_SIGMAS = 0.12, 3.0
"""How far a round must be from what was expected to be doubted, on the logarithmic scale."""
YOUNG = 4
"""With fewer rounds than these, nothing is expected yet."""
LATE = 1.5
"""A round that takes so many times the expected time is judged before its end."""
MEMORY_CALLS = 4000.0
"""Measurements fade to a third in so many calls."""
SURE = 1.5
"""The search is over when the likely knees are at most this factor apart."""
Phase = Literal["ramp", "dive", "hold", "probe", "doubt", "climb"]


@dataclass(frozen=True, slots=True)
class Change:
    """The limit moved at time `t`, and why."""

    t: float
    before: int
    after: int
    why: str


class Limit(Protocol):
    """What a pool asks before a call and tells after it.

    Times are seconds of any monotonic clock. `in_flight` counts the calls at the server, the one
    that begins or ends included; a call that waits for its next try is not at the server.
    """

    @property
    def limit(self) -> int:
        """Calls allowed in flight now."""

    @property
    def pause_until(self) -> float:
        """No call may begin before this time."""

    def on_start(self, now: float, in_flight: int) -> None:
        """A call was sent."""

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        """A call was answered after `seconds`, or failed for another reason than a reject."""

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        """The server refused a call because there are too many (429, 503)."""

    def take_changes(self) -> list[Change]:
        """The changes since the last time this was asked."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with what an earlier run learned."""


class FixedLimit:
    """Always `n` calls; it waits only where rejects come without answers between them.

    >>> FixedLimit(8).limit
    8
    """

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ConfigError(f"a limit of {n} calls in flight is not possible; give 1 or more")
        self.limit = n
        self.pause_until = 0.0
        self._rejects = 0

    def on_start(self, now: float, in_flight: int) -> None:
        pass

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


class AutoLimit:
    """Finds the server's knee by its goodput, and follows it.

    ramp    double while goodput grows with it
    dive    halve while goodput does not suffer; when it has fallen, or the start was too high
    hold    stay at the knee that the measurements tell
    probe   a little more or less for a moment, to see whether the knee has moved
    doubt   measure again what was far from expected, before believing it
    climb   above the number at which the server rejected, a few calls more at a time

    A reject says that this many calls are one too many: the limit goes just below, once for each
    burst of them and to no less than half. While the caller does not fill the limit, nothing is
    learned and nothing moves. A pure state machine: the same calls give the same limits.

    >>> limit = AutoLimit()
    >>> limit.limit
    16
    >>> limit.on_reject(now=0.1, in_flight=13, retry_after_s=None)
    >>> limit.limit
    12
    """

    def __init__(self, start: int = 16, least: int = 1, most: int = 4096) -> None:
        if not 1 <= least <= most:
            raise ConfigError(f"least={least}, most={most} is not possible; 1 <= least <= most")
        self.least = least
        self.most = most
        self.start = max(least, min(most, start))
        self.pause_until = 0.0
        self.history: deque[Change] = deque(maxlen=HISTORY)
        """The last changes. One entry a burst of rejects; a single call more that was tried
        above the ceiling is noted only if it was let in."""
        self._fresh: deque[Change] = deque(maxlen=HISTORY)
        self._forget()

    def _forget(self) -> None:
        self._limit = self.start
        self._base = float(self.start)
        self._phase: Phase = "ramp"
        self._curve = Curve()
        self._sure = False
        self._latency_s = 0.0
        self._rung: tuple[float, float, float] | None = None
        """Limit, goodput and seconds of the last step of a ramp or dive."""
        self._gap = 1
        self._calm = 0
        self._probes = 0
        self._doubt = 0.0
        self._undecided = False
        self._ceiling: int | None = None
        """The most calls that the server did not reject, once it did."""
        self._trial: int | None = None
        """Calls that ended since one more than the ceiling was let in."""
        self._trial_gap = 1
        self._since_trial = 0
        self._climb_from = 0
        self._burst: Change | None = None
        self._burst_until = -math.inf
        self._burst_floor = 0
        self._round = Round(None, 0)

    def __repr__(self) -> str:
        return f"AutoLimit({self._limit}, {self._phase}, {self.least} to {self.most})"

    @property
    def limit(self) -> int:
        return self._limit

    def take_changes(self) -> list[Change]:
        taken = list(self._fresh)
        self._fresh.clear()
        return taken

    def on_start(self, now: float, in_flight: int) -> None:
        pass

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        if self._burst is not None and now > self._burst_until:
            self._note(None)
        if ok:
            self._latency_s += (seconds - self._latency_s) * (0.05 if self._latency_s else 1.0)
        limit, stretch = self._limit, self._round
        if in_flight < 0.8 * limit - 1:
            if stretch.full:
                self._begin(None)
            return
        if not stretch.full:
            if in_flight > limit:
                stretch.begun = now  # the limit went down; the calls above it end first
                return
            stretch.full = True
            if stretch.begun is None:
                stretch.begun = now - seconds
        if not ok and seconds < 0.5 * self._latency_s:
            stretch.quick += 1
            if stretch.quick > 2 + 0.1 * stretch.ended:
                self._begin(None)
            return
        if self._tries_ceiling(now):
            return
        if stretch.skip:
            stretch.skip -= 1
            stretch.begun = now
            if not stretch.skip and len(self._curve):
                expected, spread = self._curve.expect(limit)
                stretch.late_s = LATE * math.exp(spread - expected)
            return
        stretch.count(seconds, in_flight, ok)
        if self._phase == "ramp":
            self._on_ramp(now)
        elif self._phase == "climb":
            if stretch.ended >= max(4, 0.5 * limit):
                self._on_climbed(now)
        else:
            self._on_round(now)

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        if self._trial is not None:
            self._trial, self._since_trial = None, 0
            self._trial_gap = min(4, 2 * self._trial_gap)
            self._limit -= 1
            if in_flight > self._limit:
                return
        if now > self._burst_until:
            self._note(None)
            self._burst_until = now + max(self._latency_s, 0.05)
            self._burst_floor = max(self.least, self._limit // 2)
        bearable = max(self.least, in_flight - 1)
        if bearable < self._burst_floor:
            # Fewer calls are refused as well: it is not their number alone.
            bearable = self._burst_floor
            wait = 0.5 * (self._latency_s or 0.2) if retry_after_s is None else retry_after_s
            self.pause_until = max(self.pause_until, now + wait)
        if bearable < self._limit:
            before = self._limit if self._burst is None else self._burst.before
            self._burst = Change(now, before, bearable, "429 burst")
            self._limit = self._ceiling = bearable
            self._base = float(bearable)
            self._phase = "hold"
            self._rung = None
            self._gap = max(2, self._gap)
            self._trial_gap, self._since_trial = 1, 0
            self._begin(now)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "limit": self._base,
            "ceiling": self._ceiling,
            "latency_s": self._latency_s,
            "noise": self._curve.noise,
            "curve": self._curve.rows(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise Mismatch(
                f"a limit's memory of version {state.get('version')!r} cannot be read; "
                f"this is version {VERSION}, leave the memory out and it is learned again"
            )
        self._forget()
        rows = [[float(value) for value in row] for row in state["curve"]]
        numbers = [float(state["limit"]), float(state["noise"])]
        numbers += [value for row in rows for value in row]
        if not all(0 < value < math.inf for value in numbers):
            raise Mismatch("a limit's memory has numbers that are not positive; leave it out")
        self._base = max(float(self.least), min(float(self.most), float(state["limit"])))
        self._limit = round(self._base)
        self._ceiling = None if state["ceiling"] is None else max(self._limit, state["ceiling"])
        self._latency_s = max(0.0, float(state["latency_s"]))
        self._curve = Curve.of(rows, float(state["noise"]))
        # The server may have changed since; but it is known well enough to be surprised.
        self._curve.fade(0.5)
        self._curve.rounds = YOUNG if len(self._curve) else 0
        if len(self._curve) or self._ceiling is not None:
            self._phase = "hold"
            self._gap = 4
        self._begin(None)

    def _note(self, change: Change | None) -> None:
        """Write down a burst that is over, and a change."""
        for one in (self._burst, change):
            if one is not None and one.before != one.after:
                self.history.append(one)
                self._fresh.append(one)
        self._burst = None

    def _begin(self, now: float | None, down: bool = False) -> None:
        """Count anew; `now` is None if the caller does not fill the limit."""
        # After idling all calls begin together, and end in a wave that says little.
        share = 1.0 if now is None else SKIP_DOWN if down else SKIP_UP
        passing = self._phase in ("ramp", "climb")
        self._undecided = False
        self._round = Round(now, 0 if passing else math.ceil(share * self._limit))

    def _move(self, now: float, level: float, why: str, phase: Phase) -> None:
        before = self._limit if self._trial is None else self._limit - 1
        self._limit = max(self.least, min(self.most, round(level)))
        self._note(Change(now, before, self._limit, why))
        self._phase = phase
        self._trial = None
        self._begin(now, down=self._limit < before)

    def _on_ramp(self, now: float) -> None:
        limit, stretch, rung = self._limit, self._round, self._rung
        need = max(RAMP_CALLS, RAMP_SHARE * limit)
        elapsed = stretch.elapsed(now)
        overdue = rung is not None and elapsed > 1.5 * rung[2] and stretch.ended > 4
        if stretch.ended < need and not overdue:
            return
        rate = stretch.rate(now)
        growth = GROWTH
        if rung is not None and rung[0] < limit:
            before, rate_before, _ = rung
            growth = max(1.3, min(GROWTH, 1.05 * rate / rate_before))
            slope = math.log(rate / rate_before) / math.log(limit / before)
            if slope < PAYS:
                if slope < -0.2 or overdue or stretch.ended >= 2 * need:
                    self._end_ramp(now, before, rate / rate_before)
                return
        self._base = float(limit)
        if limit >= self.most:
            self._move(now, limit, "", "hold")
            return
        self._rung = (limit, rate, elapsed)
        self._move(now, limit * growth, "ramp: goodput grows", "ramp")

    def _end_ramp(self, now: float, before: float, ratio: float) -> None:
        self._rung = None
        self._gap, self._calm = 1, 0
        if before <= self.start:
            self._base = before
            self._move(now, before, "ramp over at once", "dive")
            return
        # Where goodput even fell, the knee is nearer to the good step than to the bad one.
        top = self._limit if ratio > 0.9 else math.sqrt(before * self._limit)
        self._curve.bounds = (before / 1.25, top)
        self._base = max(before, min(0.9 * self._limit, EXIT * ratio * before))
        self._move(now, self._base, "ramp over: goodput grew no more", "hold")

    def _on_round(self, now: float) -> None:
        """Judge a round of dive, hold, probe or doubt when there is enough of it."""
        limit, phase, stretch = self._limit, self._phase, self._round
        need: float = max(HOLD_CALLS, limit)
        if phase == "probe":
            need = max(PROBE_CALLS, PROBE_ROUNDS * limit)
        elif phase == "dive":
            need = max(DIVE_CALLS, limit)
        elif phase == "doubt" and self._doubt < 0:
            need = max(16, 0.35 * limit)
        ended, elapsed = stretch.ended, stretch.elapsed(now)
        enough = ended >= need or (ended >= 8 and elapsed > need * stretch.late_s)
        if phase == "probe" and (not enough or (self._undecided and ended < 2 * need)):
            if ended % 8 or not self._decided(now) or self._round is not stretch:
                return
        elif not enough:
            return
        noise = min(1.5, max(0.4, stretch.variation))
        self._curve.noise += 0.1 * (noise - self._curve.noise)
        if phase == "dive":
            self._on_dive(now)
            return
        if self._curve.rounds >= YOUNG and self._surprised(now):
            return
        if phase == "doubt":
            self._phase = "hold" if limit == round(self._base) else "probe"
        self._curve.fade(math.exp(-ended / MEMORY_CALLS))
        self._curve.add(stretch.level, max(0.5, stretch.good), elapsed)
        self._settle(now)

    def _surprised(self, now: float) -> bool:
        """Whether a round is far from what was expected; the second time it is believed."""
        stretch = self._round
        expected, spread = self._curve.expect(stretch.level)
        apart = math.log(stretch.rate(now)) - expected
        noise = math.hypot(self._curve.noise / math.sqrt(stretch.ended), spread)
        if self._phase == "doubt":
            noise *= 0.6
            if apart * self._doubt < 0:
                return False
        if abs(apart) <= max(SURPRISE, SURPRISE_SIGMAS * noise):
            return False
        if self._phase == "doubt":
            self._changed(now)
        else:
            self._phase, self._doubt = "doubt", apart
            stretch.again(now)
        return True

    def _changed(self, now: float) -> None:
        """The knee has moved: what was measured before says nothing about it."""
        stretch = self._round
        level, rate, elapsed = stretch.level, stretch.rate(now), stretch.elapsed(now)
        self._curve = Curve(self._curve.noise)
        self._curve.add(level, max(0.5, stretch.good), elapsed)
        self._gap, self._calm = 1, 0
        if self._doubt > 0:
            # A step of the ramp sees its new calls end only in part.
            self._rung = (level, 0.7 * rate, elapsed)
            self._move(now, self._limit * GROWTH, "goodput rose", "ramp")
        else:
            self._rung = (level, rate, elapsed)
            self._move(now, self._limit * 0.5, "goodput fell", "dive")

    def _on_dive(self, now: float) -> None:
        stretch, rung = self._round, self._rung
        level, rate, elapsed = stretch.level, stretch.rate(now), stretch.elapsed(now)
        self._curve.add(level, max(0.5, stretch.good), elapsed)
        if rung is not None:
            before, rate_before, _ = rung
            cost = math.log(rate_before / rate) - 0.25 * math.log(max(1.0, before / level))
            if cost > 0 or self._limit <= self.least or self._curve.knee().limit > 0.95 * level:
                self._rung = None
                self._phase = "probe"
                self._settle(now)
                return
        self._rung = (level, rate, elapsed)
        self._move(now, self._limit * 0.5, "fewer calls do as much", "dive")

    def _decided(self, now: float) -> bool:
        """Whether a probe is already clear: as expected, or as if the knee had moved."""
        stretch, base, curve = self._round, self._base, self._curve
        self._undecided = False
        if curve.rounds < YOUNG:
            return False
        if stretch.ended < max(TEST_CALLS, TEST_SHARE * self._limit):
            return False
        apart = math.log(stretch.level / base)
        if abs(apart) < 0.05:
            return False
        expected, spread = curve.expect(stretch.level)
        moved = curve.expect(base)[0] + (PAID * apart if apart > 0 else 0.0)
        seen = math.log(stretch.rate(now))
        variance = curve.noise**2 / stretch.ended + (spread**2 if seen > expected else 0.0)
        likelier = ((seen - expected) ** 2 - (seen - moved) ** 2) / (2 * variance)
        if apart > 0 and likelier > CLEAR_UP and moved > expected:
            self._doubt = 1.0
            self._changed(now)
            return True
        self._undecided = apart > 0 and likelier > -CLEAR
        return likelier < -CLEAR

    def _settle(self, now: float) -> None:
        """Go where the curve says the knee is, or probe whether it still is there."""
        knee = self._curve.knee()
        best = max(float(self.least), min(float(self.most), knee.limit))
        if self._ceiling is not None:
            best = min(best, float(self._ceiling))
        at_ceiling = self._ceiling is not None and round(best) >= self._ceiling
        before, self._base = self._base, best
        self._sure = at_ceiling or knee.high < SURE * knee.low
        if self._phase == "probe":
            steady = abs(math.log(best / before)) <= 0.08
            self._gap = min(64, 2 * self._gap) if steady else 1
            self._calm = 0
            if self._limit > before:
                why = "probe up paid" if best > 1.05 * before else "probe up did not pay"
            else:
                why = (
                    "probe down cost nothing" if best < 0.95 * before else "probe down cost goodput"
                )
            self._move(now, best, why, "hold")
            return
        if self._sure:
            self._curve.bounds = (0.0, math.inf)
        self._calm += self._round.ended
        period = GAP_ROUNDS * self._limit + GAP_CALLS
        if knee.fall > -0.15:
            period //= 2  # where goodput does not fall above the knee, probes cost nothing
        period = min(period, self._gap * max(HOLD_CALLS, self._limit))
        if self._calm >= (4 * period if at_ceiling else period):
            self._calm = 0
            target = self._target(best, at_ceiling, knee)
            if self.least <= target <= self.most and target != round(best):
                self._move(now, target, "probe up" if target > best else "probe down", "probe")
                return
        if round(best) != self._limit:
            self._move(now, best, "knee seen", "hold")
        else:
            self._round.again(now)

    def _target(self, best: float, at_ceiling: bool, knee: Knee) -> int:
        """The level of the next probe: on the side of which less is known, else mostly up."""
        below = self._curve.evidence(0.55 * best, 0.93 * best)
        above = self._curve.evidence(1.07 * best, 1.8 * best)
        lost = not self._sure and best * best > LOPSIDED * knee.low * knee.high
        if at_ceiling or lost:
            up = False
        elif min(below, above) < 0.5 * PROBE_CALLS:
            up = below > above
        else:
            self._probes += 1
            thrashes = self._sure and knee.fall < -0.15
            every = DOWN_EVERY_THRASHING if thrashes else DOWN_EVERY
            up = self._probes % every != 0
        if not up:
            factor = max(0.6, min(DOWN, knee.low / best)) if lost else DOWN
            return round(min(best - 1, best * factor))
        target = min(max(best + 1, best * UP), 1.35 * self._curve.highest)
        return round(target if self._ceiling is None else min(target, self._ceiling))

    def _tries_ceiling(self, now: float) -> bool:
        """At the ceiling, let in one call more from time to time: is it still rejected?"""
        limit = self._limit
        if self._trial is not None:
            self._trial += 1
            if self._trial < max(4, 0.5 * limit):
                return False
            self._ceiling = self._climb_from = limit
            self._trial_gap = 1
            self._move(now, limit + 2, "no reject above the ceiling", "climb")
            return True
        self._since_trial += 1
        due = self._since_trial >= self._trial_gap * limit
        if due and limit == self._ceiling and self._phase == "hold" and limit < self.most:
            self._trial = 0
            self._limit = limit + 1
        return False

    def _on_climbed(self, now: float) -> None:
        limit = self._limit
        self._base = float(limit)
        if limit >= 1.25 * self._climb_from or limit >= self.most:
            # That much more has room for a ramp, which looks at goodput too.
            self._ceiling = None
            self._rung = None
            self._curve = Curve(self._curve.noise)
            self._move(now, limit * GROWTH, "no reject far above the ceiling", "ramp")
            return
        self._ceiling = limit
        step = 2 * (limit - self._climb_from + 1)
        self._move(now, limit + step, "no reject above the ceiling", "climb")
