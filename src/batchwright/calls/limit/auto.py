"""Finds the concurrency a server sustains from its goodput, and follows it."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from batchwright.calls.limit.ceiling import Ceiling
from batchwright.calls.limit.curve import Curve
from batchwright.calls.limit.deadline import DEADLINE_S, QueueTime, start_for
from batchwright.calls.limit.fixed import Change
from batchwright.calls.limit.probes import Probes
from batchwright.calls.limit.ramp import Ramp
from batchwright.calls.limit.window import (
    Step,
    Window,
    far_from_expected,
    probe_verdict,
    scatter,
)
from batchwright.errors import ConfigError, Mismatch

__all__ = ["AutoLimit"]

VERSION = 1
HISTORY = 256

FIRST_GROWTH, GROWTH, GROWTH_IN_PART = 4.0, 2.0, 1.6
"""Factors of the ramp: from up to 4 calls, and where goodput grew in full and in part."""
EXIT = 1.0
"""Where the ramp ends: its last good step times this and the growth of goodput since."""
BEYOND = 1.1
"""A knee above this times the end of a ramp is not searched for until the search is over."""
SHORT = 3.0
"""Bursts that the caller has too few calls for, until rounds have to do without."""
DIVE = 0.6
"""Factor of a dive, after a first step that depends on how much goodput fell."""
HOLD_CALLS, PROBE_CALLS, DIVE_CALLS, DOUBT_CALLS = 12, 16, 8, 8
"""Calls that a window needs, or as many as the limit if that is more."""
DOUBT_SHARE = 0.35
"""The share of the limit that is enough to confirm a fall."""
ALARM, SLOW_ALARM = 6.0, 1.5
"""CUSUM statistics of counts and latencies from which the latest calls count as a fall."""
HEADROOM = 1.25
"""Limit above the knee where that costs no goodput: if the knee moves up, goodput shows it."""
SKIP_UP, SKIP_DOWN = 1.0, 1.0
"""Shares of the limit that are not counted after it went up or down."""
YOUNG = 4
"""With fewer windows than these, there is no expectation yet."""
NARROW = 0.08
"""Levels closer than this on the logarithmic scale show no slope."""
FIRST_CALLS, LAST_CALLS = 3, 64
"""Latencies that a ramp needs to begin, and the most that it uses."""
MEMORY_CALLS = 4000.0
"""Measurements decay to a third in so many calls."""
Phase = Literal["ramp", "dive", "hold", "probe", "doubt", "climb"]


class AutoLimit:
    """Finds the server's knee by its goodput, and follows it.

    ramp    start small, double while goodput grows with it
    dive    go down while goodput does not fall; after a drop, or if the start was too high
    hold    stay at the estimated knee
    probe   a little more or less for a moment, to see whether the knee has moved
    doubt   measure an unexpected window again before acting on it
    climb   a few calls at a time above the number at which the server rejected

    A rejection means that this many calls are one too many: the limit goes just below, once for
    each burst of them and to no less than half. Whatever goodput says, no more calls are allowed
    than end well inside `deadline_s` if the server queues them, and a call that was not answered by
    then brings the limit down at once. While the caller does not fill the limit, nothing is learned
    and nothing moves. A pure state machine: the same calls give the same limits.

    >>> limit = AutoLimit(start=16)
    >>> limit.on_reject(now=0.1, in_flight=13, retry_after_s=None)
    >>> limit.limit
    12
    """

    def __init__(
        self,
        start: int | None = None,
        least: int = 1,
        most: int = 4096,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if not 1 <= least <= most:
            raise ConfigError(f"a limit needs 1 <= least <= most, got least={least}, most={most}")
        self.least = least
        self.most = most
        self.deadline_s = deadline_s
        self.start = max(least, min(most, start_for(deadline_s) if start is None else start))
        self.pause_until = 0.0
        self.history: deque[Change] = deque(maxlen=HISTORY)
        """The last changes. One entry for a burst of rejections; a single call tried above the
        ceiling is recorded only if it was accepted."""
        self._fresh: deque[Change] = deque(maxlen=HISTORY)
        self.forget()

    def forget(self) -> None:
        """Begin as a new limit does, without what was learned."""
        self._limit = self.start
        self._base = float(self.start)
        self._phase: Phase = "ramp"
        self._curve = Curve()
        self._latency_s = 0.0
        self._queue = QueueTime(self.deadline_s)
        self._took: deque[float] = deque(maxlen=LAST_CALLS)
        """The last latencies, but for those of a ramp."""
        self._ramp: Ramp | None = None
        """None until a ramp has measured where it begins."""
        self._moved_at = 0.0
        """When the limit went to where it is."""
        self._short = 0.0
        """Bursts and rounds that the caller had too few calls for, one after the other."""
        self._ended_again = False
        self._ended_at = 0.0
        """Where the last ramp ended; 0 if that is settled, or something has changed."""
        self._last_step: Step | None = None
        """The last finished step of a dive."""
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
        quick = not ok and seconds < 0.5 * self._latency_s
        if not ok and seconds > 0.9 * self.deadline_s:
            self._queue.on_timeout(in_flight)
        if not self._fills(now, seconds, in_flight):
            return
        if quick:
            window.quick += 1
            if window.quick > 2 + 0.1 * window.ended:
                self._begin(None)
            return
        self._queue.on_end(seconds, in_flight)
        if self._within_deadline(now) or self._tries_ceiling(now):
            return
        if self._phase == "ramp":
            self._on_ramp(now, seconds, in_flight, ok)
            return
        if ok:
            self._took.append(seconds)
        if window.skip:
            # In a dive the calls that were sent under a higher limit say nothing about this one.
            if self._phase != "dive" or now - seconds >= self._moved_at - 1e-9:
                window.skip -= 1
            window.watch(now, seconds, in_flight, ok)
            window.begun = now
            if window.alarm > ALARM and window.slow_alarm > SLOW_ALARM:
                window.skip = 0  # it fell meanwhile; the next calls tell how far
            if not window.skip and len(self._curve):
                expected, spread = self._curve.expect(self._limit)
                window.usual = math.exp(expected - spread) / self._limit
            return
        window.count(now, seconds, in_flight, ok)
        if self._phase == "climb":
            if window.ended >= max(4, 0.5 * self._limit):
                self._on_climbed(now)
        else:
            self._on_round(now)

    def _fills(self, now: float, seconds: float, in_flight: int) -> bool:
        """Whether the caller fills the limit; only then does a call say anything about it."""
        limit, window = self._limit, self._window
        if in_flight < 0.8 * limit - 1:
            if self._phase == "ramp":
                if self._ramp is not None:
                    return True
                self._begin(None)
            elif self._phase == "climb":
                self._begin(now if in_flight > 1 else None)
            elif window.full:
                # Waves that are shorter than a round would never be counted.
                self._short += window.skip > 0
                window.pause(0 if self._short >= SHORT else limit)
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
        self.forget()
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
        if self._latency_s:
            self._queue.on_end(self._latency_s, self._limit)
        self._curve = Curve.of(rows, float(state["noise"]))
        known = self._curve.evidence(0.5, float(self.most)) >= HOLD_CALLS
        # The server may have changed since, but enough is known to notice it.
        self._curve.decay(0.5)
        self._curve.rounds = YOUNG if len(self._curve) else 0
        if known or self._ceiling.height is not None:
            self._phase = "hold"
            self._probes.gap = 4
        self._begin(None)

    def _within(self, level: float) -> float:
        return max(float(self.least), min(float(self.most), level, self._queue.most))

    def _within_deadline(self, now: float) -> bool:
        """Whether the limit had to come down, because calls would wait too long for the server."""
        if self._window.skip or self._limit <= max(self.least, self._queue.most):
            return False
        self._base = self._within(min(self._base, DIVE * self._limit))
        self._last_step = None
        self._curve = Curve(self._curve.noise)
        self._move(now, self._base, "the queue would take too much of the deadline", "hold")
        return True

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
        self._ramp = None
        self._ceiling.end_trial(rejected=False)
        self._moved_at = now
        self._begin(now, down=self._limit < before)
        if phase == "probe" and self._limit > before and self._curve.rounds >= YOUNG:
            expected, spread = self._curve.expect(self._limit)
            self._window.usual = math.exp(expected - spread) / self._limit

    def _on_ramp(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        """Measure where the ramp begins, then raise the limit while that pays."""
        limit, ramp = self._limit, self._ramp
        if ramp is None:
            if ok:
                self._took.append(seconds)
            if len(self._took) >= FIRST_CALLS:
                if not len(self._curve):
                    self._curve.add(limit, len(self._took), sum(self._took) / limit)
                self._raise(now, Ramp.of(self._took), FIRST_GROWTH if limit <= 4 else GROWTH)
            return
        if not ramp.on_end(now - seconds, in_flight, ok):
            # The caller has no calls for it. Once it fills the limit again, so does the ramp; but
            # if it never has enough of them, rounds have to tell what its bursts cannot.
            self._short += 1.0 if ramp.new >= 0.25 * ramp.level else 0.25
            if self._short >= SHORT:
                self._base = self._within(min(limit, ramp.level + max(0, ramp.new) + 1))
                self._move(now, self._base, "ramp: too few calls", "hold")
                return
            self._move(now, ramp.level, "ramp: too few calls", "ramp")
            self._begin(None)
            return
        verdict, gain = ramp.verdict(now)
        if verdict != "open":
            self._short = 0.0
        if verdict == "no":
            self._end_ramp(now, ramp, gain)
        elif verdict != "open":
            ramp.advance(gain)
            growth = GROWTH if verdict == "paid" else GROWTH_IN_PART
            # The caller may have had fewer calls than were allowed: no more than those have paid.
            self._raise(now, ramp, growth, ramp.level + ramp.new)

    def _raise(self, now: float, ramp: Ramp, growth: float, reached: int | None = None) -> None:
        """The next step of a ramp, or its end at the most that is allowed."""
        before = self._limit if reached is None else reached
        self._base = float(before)
        limit = round(self._within(max(before + 1, before * growth)))
        if limit <= before:
            self._move(now, before, "", "hold")
            return
        self._move(now, limit, "ramp: goodput grows", "ramp")
        self._ramp = ramp
        ramp.step(now, before, limit)

    def _ramp_again(self, now: float) -> None:
        """A ramp from here; where no call has been answered yet, its latencies come first."""
        if self._took:
            self._raise(now, Ramp.of(self._took), GROWTH)
        else:
            self._move(now, self._limit, "", "ramp")

    def _end_ramp(self, now: float, ramp: Ramp, gain: float) -> None:
        """Stay near the last step that paid; the rounds that follow tell the knee."""
        self._probes.restart()
        if ramp.level <= self.start:
            self._base = float(ramp.level)
            self._move(now, self._base, "ramp over at once", "dive")
            return
        self._base = self._within(max(ramp.level, min(0.9 * self._limit, EXIT * gain * ramp.level)))
        # One burst may be mistaken; what two have told, the rounds need not be told by a third.
        again = ramp.level <= BEYOND * self._ended_at
        self._ended_again = again
        self._curve.bounds = (0.0, min(self._limit, BEYOND * self._base) if again else self._limit)
        self._ended_at = float(ramp.level)
        self._move(now, self._base, "ramp over: goodput grew no more", "hold")

    def _on_round(self, now: float) -> None:
        """Judge a window of dive, hold, probe or doubt when it has enough calls."""
        limit, phase, window = self._limit, self._phase, self._window
        falls = window.alarm > ALARM and window.slow_alarm > SLOW_ALARM and phase != "dive"
        if falls and (phase != "doubt" or window.ended >= 8):
            if phase == "doubt" and self._doubt < 0:
                self._changed(now)
            else:
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
            if ended % max(1, min(8, limit // 4)):
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
        self._learn()
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

    def _learn(self) -> None:
        """Add the window to the curve, weighted by its variance."""
        window, noise = self._window, self._curve.noise
        weight = (noise / scatter(window.ended, self._limit, noise)) ** 2 / window.ended
        good = max(0.5, window.good)
        self._curve.add(window.level, weight * good, weight * good / window.rate)

    def _changed(self, now: float) -> None:
        """The knee has moved: forget the measurements, ramp up or dive."""
        window = self._window
        expected, _ = self._curve.expect(window.level)
        # Latencies show a fall late, so responses are counted.
        fell = self._doubt < 0
        counted = max(1, window.good) / window.elapsed(now)
        rate = min(window.rate, counted) if fell else window.rate
        self._last_step = Step(window.level, rate)
        self._curve = Curve(self._curve.noise)
        self._curve.add(window.level, window.ended, window.ended / rate)
        self._probes.restart()
        self._ended_at, self._ended_again = 0.0, False
        if fell:
            # Goodput falls as much as the knee where calls queue, and more where they thrash.
            share = max(0.25, min(0.7, (rate / math.exp(expected)) ** 0.75))
            self._move(now, self._limit * share, "goodput fell", "dive")
        else:
            self._ramp_again(now)

    def _on_dive(self, now: float) -> None:
        level, before = self._window.level, self._last_step
        step = Step(level, self._window.rate)
        self._learn()
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
        tried = self._ended_again and self._curve.highest <= 1.25 * self._ended_at
        if best > 1.1 * self._curve.highest and self._took and not tried:
            self._raise(now, Ramp.of(self._took), GROWTH_IN_PART)
            return
        there = round(best) == self._limit or abs(math.log(best / self._limit)) < 0.09
        if there and probes.due(self._limit, knee, at_ceiling):
            target = probes.target(best, self.least, height, knee, self._curve)
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
            self._curve = Curve(self._curve.noise)
            self._ramp_again(now)
            return
        self._ceiling.height = limit
        step = 2 * (limit - begun + 1)
        self._move(now, limit + step, "no reject above the ceiling", "climb")
