"""Finds the concurrency a server sustains from its goodput, and follows it."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from batchwright.calls.limit.ceiling import Ceiling
from batchwright.calls.limit.curve import Curve
from batchwright.calls.limit.fixed import Change
from batchwright.calls.limit.probes import Probes
from batchwright.calls.limit.window import (
    RampStep,
    Window,
    far_from_expected,
    probe_verdict,
    ramp_verdict,
    scatter,
)
from batchwright.errors import ConfigError, Mismatch

__all__ = ["AutoLimit"]

VERSION = 1
HISTORY = 256

GROWTH, GROWTH_IN_PART = 2.0, 1.6
"""Factors of the ramp, where goodput grew in full and in part."""
EXIT = 1.25
"""Where the ramp ends: its last good step times this and the growth of goodput since."""
DIVE = 0.6
"""Factor of a dive, after a first step that depends on how much goodput fell."""
HOLD_CALLS, PROBE_CALLS, DIVE_CALLS, DOUBT_CALLS = 48, 72, 32, 16
"""Calls that a window needs, or as many as the limit if that is more."""
DOUBT_SHARE = 0.35
"""The share of the limit that is enough to confirm a fall."""
ALARM = 6.0
"""CUSUM statistic from which the latest calls of a window count as a fall."""
HEADROOM = 1.15
"""Limit above the knee where that costs no goodput: if the knee moves up, goodput shows it."""
SKIP_UP, SKIP_DOWN = 0.25, 0.4
"""Shares of the limit that are not counted after it went up or down."""
YOUNG = 4
"""With fewer windows than these, there is no expectation yet."""
NARROW = 0.08
"""Levels closer than this on the logarithmic scale show no slope."""
MEMORY_CALLS = 4000.0
"""Measurements decay to a third in so many calls."""
Phase = Literal["ramp", "dive", "hold", "probe", "doubt", "climb"]


class AutoLimit:
    """Finds the server's knee by its goodput, and follows it.

    ramp    double while goodput grows with it
    dive    go down while goodput does not fall; after a drop, or if the start was too high
    hold    stay at the estimated knee
    probe   a little more or less for a moment, to see whether the knee has moved
    doubt   measure an unexpected window again before acting on it
    climb   a few calls at a time above the number at which the server rejected

    A rejection means that this many calls are one too many: the limit goes just below, once for
    each burst of them and to no less than half. While the caller does not fill the limit, nothing
    is learned and nothing moves. A pure state machine: the same calls give the same limits.

    >>> limit = AutoLimit()
    >>> limit.limit
    16
    >>> limit.on_reject(now=0.1, in_flight=13, retry_after_s=None)
    >>> limit.limit
    12
    """

    def __init__(self, start: int = 16, least: int = 1, most: int = 4096) -> None:
        if not 1 <= least <= most:
            raise ConfigError(f"a limit needs 1 <= least <= most, got least={least}, most={most}")
        self.least = least
        self.most = most
        self.start = max(least, min(most, start))
        self.pause_until = 0.0
        self.history: deque[Change] = deque(maxlen=HISTORY)
        """The last changes. One entry for a burst of rejections; a single call tried above the
        ceiling is recorded only if it was accepted."""
        self._fresh: deque[Change] = deque(maxlen=HISTORY)
        self._forget()

    def _forget(self) -> None:
        self._limit = self.start
        self._base = float(self.start)
        self._phase: Phase = "ramp"
        self._curve = Curve()
        self._latency_s = 0.0
        self._last_step: RampStep | None = None
        """The last finished step of a ramp or dive."""
        self._probes = Probes()
        self._doubt = 0.0
        self._ceiling = Ceiling()
        self._burst: Change | None = None
        self._window = Window(None, 0)

    def __repr__(self) -> str:
        return f"AutoLimit({self._limit}, {self._phase}, {self.least} to {self.most})"

    @property
    def limit(self) -> int:
        return self._limit

    def take_changes(self) -> list[Change]:
        taken = list(self._fresh)
        self._fresh.clear()
        return taken

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        if self._burst is not None and now > self._ceiling.burst_until:
            self._note(None)
        if ok:
            self._latency_s += (seconds - self._latency_s) * (0.05 if self._latency_s else 1.0)
        window = self._window
        if not self._fills(now, seconds, in_flight):
            return
        if not ok and seconds < 0.5 * self._latency_s:
            window.quick += 1
            if window.quick > 2 + 0.1 * window.ended:
                self._begin(None)
            return
        if self._tries_ceiling(now):
            return
        if window.skip:
            window.skip -= 1
            window.begun = now
            if not window.skip and len(self._curve):
                expected, spread = self._curve.expect(self._limit)
                window.usual = math.exp(expected - spread)
            return
        window.count(now, seconds, in_flight, ok)
        if self._phase == "ramp":
            self._on_ramp(now)
        elif self._phase == "climb":
            if window.ended >= max(4, 0.5 * self._limit):
                self._on_climbed(now)
        else:
            self._on_round(now)

    def _fills(self, now: float, seconds: float, in_flight: int) -> bool:
        """Whether the caller fills the limit; only then does a call say anything about it."""
        limit, window = self._limit, self._window
        if in_flight < 0.8 * limit - 1:
            if self._phase in ("ramp", "climb"):
                # What these compare must be one window; a caller that pauses begins another.
                self._begin(now if in_flight > 1 else None)
            elif window.full:
                window.pause(limit)
            return False
        if not window.full:
            if in_flight > limit:
                window.begun = now  # the limit went down; the calls above it end first
                return False
            window.full = True
            if window.begun is None:
                window.begun = now - seconds
        return True

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        if self._ceiling.on_trial:
            self._ceiling.end_trial(rejected=True)
            self._limit -= 1
            if in_flight > self._limit:
                return
        if now > self._ceiling.burst_until:
            self._note(None)
        burst_s = max(self._latency_s, 0.05)
        sustained = self._ceiling.sustained(now, self._limit, in_flight, self.least, burst_s)
        if sustained > max(self.least, in_flight - 1):
            # Fewer calls are rejected as well: it is not their number alone.
            wait = 0.5 * (self._latency_s or 0.2) if retry_after_s is None else retry_after_s
            self.pause_until = max(self.pause_until, now + wait)
        if sustained < self._limit:
            before = self._limit if self._burst is None else self._burst.before
            self._burst = Change(now, before, sustained, "429 burst")
            self._ceiling.lower(sustained)
            self._limit, self._base = sustained, float(sustained)
            self._phase = "hold"
            self._last_step = None
            self._probes.gap = max(2, self._probes.gap)
            self._begin(now)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "limit": self._base,
            "ceiling": self._ceiling.height,
            "latency_s": self._latency_s,
            "noise": self._curve.noise,
            "curve": self._curve.rows(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise Mismatch(
                f"the state of a limit has version {state.get('version')!r}, this is version "
                f"{VERSION}; leave it out and it is learned again"
            )
        self._forget()
        rows = [[float(value) for value in row] for row in state["curve"]]
        numbers = [float(state["limit"]), float(state["noise"])]
        numbers += [value for row in rows for value in row]
        if not all(0 < value < math.inf for value in numbers):
            raise Mismatch("the state of a limit has numbers that are not positive; leave it out")
        self._base = self._within(float(state["limit"]))
        self._limit = round(self._base)
        if state["ceiling"] is not None:
            self._ceiling.lower(max(self._limit, state["ceiling"]))
        self._latency_s = max(0.0, float(state["latency_s"]))
        self._curve = Curve.of(rows, float(state["noise"]))
        # The server may have changed since, but enough is known to notice it.
        self._curve.decay(0.5)
        self._curve.rounds = YOUNG if len(self._curve) else 0
        if len(self._curve) or self._ceiling.height is not None:
            self._phase = "hold"
            self._probes.gap = 4
        self._begin(None)

    def _within(self, level: float) -> float:
        return max(float(self.least), min(float(self.most), level))

    def _note(self, change: Change | None) -> None:
        """Record a burst that is over, and a change."""
        for one in (self._burst, change):
            if one is not None and one.before != one.after:
                self.history.append(one)
                self._fresh.append(one)
        self._burst = None

    def _begin(self, now: float | None, down: bool = False) -> None:
        """Start a window; `now` is None if the caller does not fill the limit."""
        # After idling all calls start together, and end in a wave that says little.
        share = 1.0 if now is None else SKIP_DOWN if down else SKIP_UP
        passing = self._phase in ("ramp", "climb")
        self._window = Window(now, 0 if passing else math.ceil(share * self._limit))

    def _move(self, now: float, level: float, why: str, phase: Phase) -> None:
        before = self._limit - self._ceiling.on_trial
        self._limit = round(self._within(level))
        self._note(Change(now, before, self._limit, why))
        self._phase = phase
        self._ceiling.end_trial(rejected=False)
        self._begin(now, down=self._limit < before)

    def _finished_step(self, now: float, level: float) -> RampStep:
        """The window as a finished step of a ramp or dive."""
        window, noise = self._window, self._curve.noise
        variance = scatter(window.ended, self._limit, noise) ** 2
        return RampStep(level, window.rate(now), window.elapsed(now), variance)

    def _on_ramp(self, now: float) -> None:
        limit, step = self._limit, self._last_step
        verdict = ramp_verdict(self._window, now, limit, self._curve.noise, step)
        if verdict == "open":
            return
        if verdict == "did not pay" and step is not None:
            self._end_ramp(now, step.level, self._window.rate(now) / step.rate)
            return
        self._base = float(limit)
        if limit >= self.most:
            self._move(now, limit, "", "hold")
            return
        self._last_step = self._finished_step(now, limit)
        growth = GROWTH if verdict == "paid" else GROWTH_IN_PART
        self._move(now, max(limit + 1, limit * growth), "ramp: goodput grows", "ramp")

    def _end_ramp(self, now: float, before: float, ratio: float) -> None:
        self._last_step = None
        self._probes.restart()
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
        """Judge a window of dive, hold, probe or doubt when it has enough calls."""
        limit, phase, window = self._limit, self._phase, self._window
        falls = window.alarm > ALARM and phase != "dive"
        if falls and phase != "doubt":
            self._phase, self._doubt = "doubt", -1.0
            window.again(now)
            return
        need: float = max(HOLD_CALLS, limit)
        if phase == "probe":
            need = max(PROBE_CALLS, limit)
        elif phase == "dive":
            need = max(DIVE_CALLS, limit)
        elif phase == "doubt" and self._doubt < 0:
            need = 8 if falls else max(DOUBT_CALLS, DOUBT_SHARE * limit)
        ended = window.ended
        if phase == "probe" and self._curve.rounds >= YOUNG:
            if ended % 8:
                return
            verdict = probe_verdict(window, now, limit, self._base, self._curve)
            if verdict == "goodput rose":
                self._doubt = 1.0
                self._changed(now)
                return
            need = {"open": need, "unclear": 2 * need, "as expected": 0}[verdict]
        if ended < need:
            return
        noise = min(1.5, max(0.4, window.variation))
        self._curve.noise += 0.1 * (noise - self._curve.noise)
        if phase == "dive":
            self._on_dive(now)
            return
        if self._curve.rounds >= YOUNG and self._surprised(now):
            return
        if phase == "doubt":
            self._phase = "hold" if limit == round(self._base) else "probe"
        self._curve.decay(math.exp(-ended / MEMORY_CALLS))
        self._learn(now)
        self._settle(now)

    def _surprised(self, now: float) -> bool:
        """Whether a window is far from the expectation; the second in a row is acted on."""
        doubted = self._doubt if self._phase == "doubt" else 0.0
        apart = far_from_expected(self._window, now, self._limit, self._curve, doubted)
        if not apart:
            return False
        if doubted:
            self._changed(now)
        else:
            self._phase, self._doubt = "doubt", apart
            self._window.again(now)
        return True

    def _learn(self, now: float) -> None:
        """Add the window to the curve, weighted by its variance."""
        window, noise = self._window, self._curve.noise
        weight = (noise / scatter(window.ended, self._limit, noise)) ** 2 / window.ended
        good = max(0.5, window.good)
        self._curve.add(window.level, weight * good, weight * window.elapsed(now))

    def _changed(self, now: float) -> None:
        """The knee has moved: forget the measurements, ramp up or dive."""
        level = self._window.level
        expected, _ = self._curve.expect(level)
        step = self._last_step = self._finished_step(now, level)
        self._curve = Curve(self._curve.noise)
        self._learn(now)
        self._probes.restart()
        if self._doubt > 0:
            # Only part of the new calls of a ramp step end in its window.
            self._last_step = step._replace(rate=0.7 * step.rate)
            self._move(now, self._limit * GROWTH, "goodput rose", "ramp")
        else:
            # Goodput falls as much as the knee where calls queue, and more where they thrash.
            share = max(0.25, min(0.7, (step.rate / math.exp(expected)) ** 0.75))
            self._move(now, self._limit * share, "goodput fell", "dive")

    def _on_dive(self, now: float) -> None:
        level, before = self._window.level, self._last_step
        step = self._finished_step(now, level)
        self._learn(now)
        if before is not None:
            allowed = 0.25 * math.log(max(1.0, before.level / level))
            if math.log(before.rate / step.rate) > allowed or self._limit <= self.least:
                self._curve.bounds = (level / 1.1, before.level)
                self._last_step = None
                self._phase = "probe"
                self._settle(now)
                return
        self._last_step = step
        self._move(now, self._limit * DIVE, "fewer calls do as much", "dive")

    def _settle(self, now: float) -> None:
        """Move to the estimated knee, or probe whether it still is there."""
        knee, height, probes = self._curve.knee(), self._ceiling.height, self._probes
        best = self._base if self._curve.width < NARROW else knee.limit
        if knee.flat:
            best *= HEADROOM
        best = self._within(best)
        if height is not None:
            best = min(best, float(height))
        at_ceiling = height is not None and round(best) >= height
        before, self._base = self._base, best
        sure = probes.weigh(knee, at_ceiling)
        if self._phase == "probe":
            steady = abs(math.log(best / before)) <= NARROW
            self._move(now, best, probes.record(self._limit, before, best, steady), "hold")
            return
        if sure:
            self._curve.bounds = (0.0, math.inf)
        probes.calm += self._window.ended
        there = abs(math.log(best / self._limit)) < 0.09
        if there and probes.due(self._limit, knee, at_ceiling):
            target = probes.target(best, height, knee, self._curve)
            if self.least <= target <= self.most and target != round(best):
                self._move(now, target, "probe up" if target > best else "probe down", "probe")
                return
        if round(best) != self._limit:
            self._move(now, best, "knee seen", "hold")
        else:
            self._window.again(now)

    def _tries_ceiling(self, now: float) -> bool:
        """At the ceiling, send one more call from time to time: is it still rejected?"""
        if self._ceiling.on_trial:
            if not self._ceiling.stands(self._limit):
                return False
            self._move(now, self._limit + 2, "no reject above the ceiling", "climb")
            return True
        may = self._phase == "hold" and self._limit < self.most
        if self._ceiling.try_one_more(self._limit, may):
            self._limit += 1
        return False

    def _on_climbed(self, now: float) -> None:
        limit, begun = self._limit, self._ceiling.climb_from
        self._base = float(limit)
        if limit >= 1.25 * begun or limit >= self.most:
            # So far above there is room for a ramp, which looks at goodput too.
            self._ceiling.height = None
            self._last_step = None
            self._curve = Curve(self._curve.noise)
            self._move(now, limit * GROWTH, "no reject far above the ceiling", "ramp")
            return
        self._ceiling.height = limit
        step = 2 * (limit - begun + 1)
        self._move(now, limit + step, "no reject above the ceiling", "climb")
