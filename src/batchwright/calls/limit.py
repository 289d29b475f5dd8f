"""How many calls may be in flight: a fixed number, or what the server turns out to bear."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batchwright.calls.knee import Curve
from batchwright.errors import ConfigError

__all__ = ["AutoLimit", "Change", "FixedLimit", "Limit"]

HISTORY = 256
Phase = Literal["ramp", "dive", "hold", "probe", "doubt", "climb"]


@dataclass(frozen=True, slots=True)
class Change:
    """The limit moved, and why."""

    t: float
    before: int
    after: int
    why: str


class Limit(Protocol):
    @property
    def limit(self) -> int: ...

    @property
    def pause_until(self) -> float: ...

    def on_start(self, now: float, in_flight: int) -> None: ...

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None: ...

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None: ...

    def take_changes(self) -> list[Change]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedLimit:
    pass


class AutoLimit:
    GROW = 2.0
    RAMP_SHARE = 0.5
    RAMP_LEAST = 12
    PAYS = 0.4
    EXIT = 1.25
    HOLD_CALLS = 48
    PROBE_CALLS = 72
    DIVE_CALLS = 32
    PROBE_ROUNDS = 1.5
    DIVE_ROUNDS = 1.0
    SKIP = 0.6
    UP = 1.2
    DOWN = 0.83
    GAP_ROUNDS = 6
    GAP_CALLS = 40
    LLR = 3.0
    LLR_UP = 5.0
    H1 = 0.9
    TEST_SHARE = 0.35
    DOWN_EVERY = 5
    SKIP_DOWN = 0.5
    FADE_CALLS = 4000.0
    SURPRISE = 0.12
    SIGMAS = 2.5
    SURE = 1.35
    LATE = 1.5

    def __init__(self, start: int = 16, least: int = 1, most: int = 4096) -> None:
        self._start = start
        self._least = least
        self._most = most
        self._limit = start
        self._base = float(start)
        self._phase: Phase = "ramp"
        self.pause_until = 0.0
        self._noise = 0.6
        self._curve = Curve(self._noise)
        self._ceiling: int | None = None
        self._gap = 1
        self._calm = 0
        self._sure = False
        self._cycle = 0
        self._trial: int | None = None
        self._trial_gap = 1
        self._trial_wait = 0
        self._climb_from = 0
        self._rung: tuple[float, float, float] | None = None  # limit, rate, seconds
        self._latency = 0.0
        self._burst_until = -math.inf
        self._burst_floor = 0
        self._burst: Change | None = None
        self.history: deque[Change] = deque(maxlen=HISTORY)
        self._fresh: deque[Change] = deque(maxlen=HISTORY)
        self._begin(None)

    @property
    def limit(self) -> int:
        return self._limit

    def _note(self, change: Change) -> None:
        if self._burst is not None:
            burst, self._burst = self._burst, None
            self._note(burst)
        if change.before != change.after:
            self.history.append(change)
            self._fresh.append(change)

    def take_changes(self) -> list[Change]:
        taken = list(self._fresh)
        self._fresh.clear()
        return taken

    def _begin(self, now: float | None) -> None:
        self._calls = self._sum = 0
        self._s1 = self._s2 = 0.0
        self._open = False
        self._t0 = now
        self._filled = False
        self._skip = 0 if self._phase in ("ramp", "climb") else math.ceil(self.SKIP * self._limit)
        self._late_s = math.inf

    def _move(self, now: float, level: float, why: str, phase: Phase) -> None:
        self._phase = phase
        down = level < self._limit
        after = max(self._least, min(self._most, round(level)))
        self._note(Change(now, self._limit, after, why))
        self._limit = after
        self._trial = None
        self._begin(now)
        if down and self._skip:
            self._skip = math.ceil(self.SKIP_DOWN * after)

    def on_start(self, now: float, in_flight: int) -> None:
        pass

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        if self._burst is not None and now > self._burst_until:
            burst, self._burst = self._burst, None
            self._note(burst)
        if not ok:
            return
        self._latency += (seconds - self._latency) * (0.05 if self._latency else 1.0)
        limit = self._limit
        if in_flight > limit:
            if not self._filled:
                self._t0 = now
                return
        elif in_flight < 0.8 * limit - 1:
            if self._filled:
                self._begin(None)
            return
        if not self._filled:
            self._filled = True
            if self._t0 is None:
                self._t0 = now - seconds
        if self._trial is not None:
            self._trial += 1
            if self._trial >= max(4, 0.5 * limit):
                self._ceiling = limit
                self._climb_from = limit
                self._trial_gap = 1
                self._move(now, limit + 2, "no reject above the ceiling", "climb")
                return
        else:
            self._trial_wait += 1
            if (
                limit == self._ceiling
                and self._phase == "hold"
                and self._trial_wait >= self._trial_gap * limit
                and limit < self._most
            ):
                self._trial = 0
                self._limit = limit = limit + 1
        if self._skip > 0:
            self._skip -= 1
            self._t0 = now
            if not self._skip and len(self._curve):
                expected, spread = self._curve.expect(limit)
                self._late_s = self.LATE / math.exp(expected - spread)
            return
        self._calls += 1
        self._sum += in_flight
        self._s1 += seconds
        self._s2 += seconds * seconds
        elapsed = now - self._t0
        if self._phase == "ramp":
            self._on_ramp(now, elapsed)
        elif self._phase == "climb":
            if self._calls >= max(4, 0.5 * limit):
                self._on_climbed(now)
        else:
            self._on_steady(now, elapsed)

    def _on_ramp(self, now: float, elapsed: float) -> None:
        limit = self._limit
        need = max(self.RAMP_LEAST, self.RAMP_SHARE * limit)
        overdue = self._rung is not None and elapsed > 1.5 * self._rung[2] and self._calls > 4
        if self._calls < need and not overdue:
            return
        rate = self._calls / elapsed
        if self._rung is not None:
            before, rate_before, _ = self._rung
            pays = math.log(rate / rate_before) / math.log(limit / before)
            if pays < self.PAYS:
                if pays > -0.2 and self._calls < 2 * need and not overdue:
                    return
                self._over(now, before, rate / rate_before)
                return
        self._rung = (limit, rate, elapsed)
        self._base = limit
        if limit >= self._most:
            self._move(now, limit, "", "hold")
            return
        self._move(now, limit * self.GROW, "ramp: goodput grows", "ramp")

    def _over(self, now: float, before: float, ratio: float) -> None:
        limit = self._limit
        self._rung = None
        self._gap = 1
        self._calm = 0
        if before <= self._start:
            self._base = before
            self._move(now, before, "ramp over at once", "dive")
            return
        self._curve.low = before / 1.25
        self._curve.high = limit
        self._base = max(before, min(0.9 * limit, self.EXIT * ratio * before))
        self._move(now, self._base, "ramp over: goodput stopped growing", "hold")

    def _on_steady(self, now: float, elapsed: float) -> None:
        limit, phase, calls = self._limit, self._phase, self._calls
        if phase == "hold":
            need = max(self.HOLD_CALLS, limit)
        elif phase == "probe":
            need = max(self.PROBE_CALLS, self.PROBE_ROUNDS * limit)
        elif phase == "dive":
            need = max(self.DIVE_CALLS, self.DIVE_ROUNDS * limit)
        elif self._doubt > 0:
            need = max(self.HOLD_CALLS, limit)
        else:
            need = max(16, 0.35 * limit)
        if calls < need and (elapsed < need * self._late_s or calls < 8):
            if phase != "probe" or calls % 8 or not self._tested(now, elapsed):
                return
            if self._phase != "probe":
                return
        elif phase == "probe" and calls < 2 * need and self._open:
            if calls % 8 or not self._tested(now, elapsed):
                return
            if self._phase != "probe":
                return
        rate = calls / elapsed
        level = self._sum / calls
        mean = self._s1 / calls
        cv = math.sqrt(max(0.0, self._s2 / calls - mean * mean)) / mean
        self._noise += 0.1 * (min(1.5, max(0.4, cv)) - self._noise)
        self._curve.noise = self._noise
        if phase == "dive":
            self._on_dive(now, level, rate, elapsed)
            return
        if self._curve.measurements >= 3:
            expected, spread = self._curve.expect(level)
            apart = math.log(rate) - expected
            noise = math.hypot(self._curve.noise / math.sqrt(calls), spread)
            if phase == "doubt":
                noise *= 0.6
                if apart * self._doubt < 0:
                    apart = 0.0
            if abs(apart) > max(self.SURPRISE, self.SIGMAS * noise):
                if phase == "doubt":
                    self._changed(now, level, rate, elapsed)
                else:
                    self._phase = "doubt"
                    self._doubt = apart
                    self._calls = self._sum = 0
                    self._s1 = self._s2 = 0.0
                    self._t0 = now
                return
        if phase == "doubt":
            self._phase = phase = "hold" if limit == round(self._base) else "probe"
        self._curve.fade(math.exp(-calls / self.FADE_CALLS))
        self._curve.add(level, calls, elapsed)
        self._settle(now)

    def _tested(self, now: float, elapsed: float) -> bool:
        """Whether a probe is decided."""
        limit, calls = self._limit, self._calls
        self._open = False
        if not self._sure or self._curve.measurements < 4 or calls < max(16, self.TEST_SHARE * limit):
            return False
        level = self._sum / calls
        up = limit > self._base
        if (up and level < 1.05 * self._base) or (not up and level > 0.95 * self._base):
            return False
        expected, spread = self._curve.expect(level)
        other = self._curve.expect(self._base)[0] + (self.H1 * math.log(level / self._base) if up else 0.0)
        seen = math.log(calls / elapsed)
        var = self._curve.noise**2 / calls + (spread ** 2 if seen > expected else 0.0)
        llr = ((seen - expected)**2 - (seen - other)**2) / (2 * var)
        if up and llr > self.LLR_UP and other > expected:
            self._doubt = 1.0
            self._changed(now, level, calls / elapsed, elapsed)
            return True
        self._open = llr > -self.LLR
        return not self._open

    def _changed(self, now: float, level: float, rate: float, elapsed: float) -> None:
        self._curve = Curve(self._noise)
        self._curve.add(level, self._calls, elapsed)
        self._gap = 1
        self._calm = 0
        if self._doubt > 0:
            self._rung = (level, 0.7 * rate, elapsed)
            self._move(now, self._limit * self.GROW, "goodput rose", "ramp")
        else:
            self._rung = (level, rate, elapsed)
            self._move(now, self._limit * 0.5, "goodput fell", "dive")

    def _on_dive(self, now: float, level: float, rate: float, elapsed: float) -> None:
        self._curve.add(level, self._calls, elapsed)
        if self._rung is not None:
            before, rate_before, _ = self._rung
            paid = math.log(rate_before / rate) / math.log(before / level) if level < before else 1.0
            if paid > 0.25 or self._curve.knee().limit > 0.95 * level:
                self._phase = "probe"
                self._rung = None
                self._settle(now)
                return
        if self._limit <= self._least:
            self._phase = "hold"
            self._settle(now)
            return
        self._rung = (level, rate, elapsed)
        self._move(now, self._limit * 0.5, "fewer calls do as much", "dive")

    def _settle(self, now: float) -> None:
        knee = self._curve.knee()
        best = max(self._least, min(self._most, knee.limit))
        if self._ceiling is not None:
            best = min(best, self._ceiling)
        moved = abs(math.log(best / self._base))
        self._base = best
        at_ceiling = self._ceiling is not None and round(best) >= self._ceiling
        sure = self._sure = at_ceiling or knee.high / knee.low < self.SURE
        if self._phase == "probe":
            self._calm = 0
            self._gap = 1 if moved > 0.08 or not sure else min(64, 2 * self._gap)
            self._move(now, best, "probe over", "hold")
            return
        self._calm += self._calls
        if sure:
            self._curve.low = self._curve.high = None
        period = self.GAP_ROUNDS * self._limit + self.GAP_CALLS
        if knee.fall > -0.15:
            period *= 0.5
        period = min(self._gap * max(self.HOLD_CALLS, self._limit), period)
        if self._calm >= (4 * period if at_ceiling else period):
            self._calm = 0
            below = self._curve.evidence(0.55 * best, 0.93 * best)
            above = self._curve.evidence(1.07 * best, 1.8 * best)
            if at_ceiling:
                side = -1
            elif min(below, above) < 0.5 * self.PROBE_CALLS:
                side = -1 if below <= above else 1
            else:
                self._cycle = (self._cycle + 1) % self.DOWN_EVERY
                side = 1 if self._cycle else -1
            target = max(best + 1, best * self.UP) if side > 0 else min(best - 1, best * self.DOWN)
            target = min(target, 1.35 * self._curve.highest)
            if self._ceiling is not None:
                target = min(target, self._ceiling)
            if target >= self._least and round(target) != round(best):
                self._move(now, target, "probe up" if side > 0 else "probe down", "probe")
                return
        if round(best) != self._limit:
            self._move(now, best, "knee", "hold")
            return
        self._calls = self._sum = 0
        self._s1 = self._s2 = 0.0
        self._t0 = now

    def _on_climbed(self, now: float) -> None:
        self._ceiling = self._limit
        self._base = self._limit
        if self._limit >= 1.25 * self._climb_from:
            self._rung = None
            self._curve = Curve(self._noise)
            self._ceiling = None
            self._move(now, self._limit * self.GROW, "climbed", "ramp")
            return
        step = 2 * (self._limit - self._climb_from + 1)
        self._move(now, self._limit + step, "no reject above the ceiling", "climb")

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        if self._trial is not None:
            self._trial = None
            self._trial_wait = 0
            self._trial_gap = min(4, 2 * self._trial_gap)
            self._limit -= 1
            if in_flight > self._limit:
                return
        wait = retry_after_s if retry_after_s is not None else 0.5 * (self._latency or 0.2)
        if now > self._burst_until:
            self._burst_until = now + max(self._latency, 0.05)
            self._burst_floor = max(self._least, self._limit // 2)
        target = max(self._least, in_flight - 1)
        if target < self._burst_floor:
            target = self._burst_floor
            self.pause_until = max(self.pause_until, now + wait)
        if target < self._limit:
            self._ceiling = target
            self._base = float(target)
            self._phase = "hold"
            self._trial_wait = 0
            self._trial_gap = 1
            self._gap = max(self._gap, 2)
            before = self._limit
            if self._burst is not None:
                before = self._burst.before
            self._burst = Change(now, before, target, "429 burst")
            self._limit = target
            self._begin(now)

    def state_dict(self) -> dict[str, Any]:
        return {
            "base": self._base, "ceiling": self._ceiling, "latency": self._latency, "noise": self._noise,
            "curve": self._curve.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._base = state["base"]
        self._limit = max(self._least, min(self._most, round(self._base)))
        self._ceiling = state["ceiling"]
        self._latency = state["latency"]
        self._curve = Curve.load(state["curve"])
        self._noise = state["noise"]
        self._curve.noise = self._noise
        self._curve.measurements = 3
        self._curve.fade(0.5)
        self._phase = "hold"
        self._gap = 4
        self._begin(None)
