"""Model servers and an always hungry client in virtual time, for judging concurrency limits.

A call is a piece of work whose size is drawn from a distribution of mean `latency_s`. A server
works on its calls side by side; what tells the four kinds apart is what happens around the
knee K:

    queue    K at a time, the others wait in line
    reject   K at a time, the others are refused at once, with Retry-After
    thrash   all at once, but above K every one of n calls is slowed down by (n / K) ** `power`
    batch    each of n <= K calls is slowed down to b + (1 - b) n / K of the full batch's pace with
             b the `base`; the others wait in line

The client starts a call whenever the limit allows one. Nothing here looks at a clock or sleeps:
6000 calls take about 0.1 s, and the same arguments give the same numbers on every machine.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from batchwright.calls.limit import Limit
from batchwright.calls.simulator.service import ServerKind
from batchwright.rng import stream

__all__ = [
    "KINDS",
    "DetectingOracle",
    "LateOracle",
    "Law",
    "Oracle",
    "Run",
    "World",
    "detecting_seconds",
    "oracle_seconds",
    "run",
]

Law = Literal["lognormal", "gamma", "uniform", "bimodal"]
KINDS: tuple[ServerKind, ...] = ("queue", "reject", "thrash", "batch")


@dataclass(frozen=True, slots=True)
class World:
    """One server and one load."""

    kind: ServerKind
    knees: tuple[int, ...]
    """The knee moves on to the next one after equal shares of the calls."""
    calls: int = 6000
    latency_s: float = 1.0
    sigma: float = 0.5
    seed: int = 0
    retry_after_s: float | None = 0.5
    holds_slot: bool = False
    """Whether a refused call keeps its place under the limit while it waits, as in clients that
    retry inside a semaphore; else the place goes to the next call at once."""
    wave: int = 0
    """The caller has so many calls at a time and waits for all of them, as a training step does;
    0: it has them all from the beginning."""
    paced_at_start: bool = False
    """Whether a call keeps the pace of the moment it began at, or follows the load."""
    law: Law = "lognormal"
    """The distribution of the work; `sigma` is its coefficient of variation but for lognormal."""
    power: float = 1.5
    base: float = 0.4
    drift: float = 0.0
    """Standard deviation of the server's own slow changes of pace, on the logarithmic scale."""
    deadline_s: float = math.inf
    """A call that is not answered by then leaves, and is lost."""

    def works(self) -> tuple[list[float], list[float]]:
        """The work of each call in seconds, and uniform draws."""
        draws = stream(self.seed, "limit world", round(1000 * self.sigma))
        n, cv = self.calls, self.sigma
        normal = draws.standard_normal(n)
        jitter = draws.random(4096).tolist()
        if self.law == "lognormal":
            sizes = np.exp(cv * normal - cv**2 / 2)
        elif self.law == "gamma":
            sizes = draws.gamma(1 / cv**2, cv**2, n)
        elif self.law == "uniform":
            sizes = 1 + min(1.0, cv) * (2 * draws.random(n) - 1)
        else:  # few long ones among many short ones
            rare = 0.1
            long = 1 + cv * math.sqrt((1 - rare) / rare)
            short = max(0.05, 1 - cv * math.sqrt(rare / (1 - rare)))
            sizes = np.where(draws.random(n) < rare, long, short)
            sizes /= rare * long + (1 - rare) * short
        if self.drift:
            # An autoregression that forgets within some hundred calls.
            steps, pace = draws.standard_normal(n), 0.0
            for i in range(n):
                pace = 0.995 * pace + self.drift * 0.1 * steps[i]
                sizes[i] *= math.exp(pace)
        return (self.latency_s * sizes).tolist(), jitter

    def knee(self, done: int) -> int:
        return self.knees[min(len(self.knees) - 1, done * len(self.knees) // self.calls)]


@dataclass(slots=True)
class Run:
    """What came out."""

    seconds: float = 0.0
    rejects: int = 0
    lost: int = 0
    """Calls that missed their deadline."""
    seconds_in_flight: float = 0.0
    limits: list[tuple[int, int]] = field(default_factory=list)
    """(calls done, limit) at every change."""


class Oracle:
    """A limit that knows the knee: `share` of it, in every phase."""

    def __init__(self, world: World, share: float = 1.0) -> None:
        self.world = world
        self.share = share
        self.done = 0
        self.pause_until = 0.0

    @property
    def limit(self) -> int:
        return max(1, round(self.share * self.world.knee(self.done)))

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        self.done += 1

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        pass


class LateOracle:
    """Knows the knee, but hears of it as late as a limit that has to look for it can.

    Whatever it does, it does once as many calls have ended as were in flight: it goes down to the
    knee after one such round, and up by a factor of two a round, without ever going above it. What
    it falls short of the oracle is the price of the delay alone; what a limit falls short of this
    one is the price of not knowing where the knee is.
    """

    def __init__(self, world: World, start: int) -> None:
        self.world = world
        self.limit = start
        self.pause_until = 0.0
        self._knee, self._done, self._ended = world.knee(0), 0, 0

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        self._done += 1
        self._ended += 1
        knee = self.world.knee(self._done)
        if knee != self._knee:
            self._knee, self._ended = knee, 0
        if self._ended >= min(in_flight, self.limit):
            self.limit, self._ended = min(knee, 2 * self.limit), 0

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        pass


class DetectingOracle:
    """Knows every knee and the law of a thrashing server, but not when the knee moves.

    It begins as `LateOracle` does. A lower knee shows in the calls that end, by `counts` or by
    their latencies, as a CUSUM statistic of the log likelihood ratio that crosses `threshold`. A
    higher one shows in nothing but calls above the present knee: every `gap` rounds it makes
    `probe` times as many until the ratio is clear, and goes back if it was mistaken. The calls of a
    probe that still run count too, with their age: those that end first are the short ones.
    """

    def __init__(
        self, world: World, start: int, threshold: float, counts: bool, probe: float, gap: float
    ) -> None:
        if world.kind != "thrash" or len(world.knees) != 2:
            raise ValueError("a detecting oracle is for thrashing servers whose knee moves once")
        self.world = world
        self.limit = start
        self.pause_until = 0.0
        self.threshold, self.counts, self.probe, self.gap = threshold, counts, probe, gap
        cv = world.sigma
        self._shape = 1 / (math.expm1(cv**2) if world.law == "lognormal" else cv**2)
        self._believed, self._settled, self._probing = 0, False, False
        self._ended, self._sum = 0, 0.0
        self._begun = self._last = 0.0
        self._starts: list[float] = []  # of the calls in flight that began in this probe
        # The share of calls that take longer, as logarithms of both.
        self._logs = np.arange(-5.0, 4.0, 0.02)
        density = self._shape * (self._logs - np.exp(self._logs))
        longer = np.logaddexp.accumulate(density[::-1])[::-1]
        self._longer = longer - longer[0]

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        first, second = self.world.knees
        since, self._last = now - self._last, now
        self._ended += 1
        if not self._settled:
            if self._ended >= min(in_flight, self.limit):
                self.limit, self._ended = min(first, 2 * self.limit), 0
                self._settled = self.limit == first
            return
        usual, other = (first, second) if self._believed == 0 else (second, first)
        slow = self._slowness(in_flight, min(usual, other))
        fast = self._slowness(in_flight, max(usual, other))
        if self._probing:
            clear = self._probed(now, seconds, fast, slow)
            if clear > self.threshold:
                self._go(now, second, believed=1)
            elif clear < -self.threshold:
                self._go(now, first, believed=0)
        elif other < usual:
            # A lower knee: the one that comes, or the one that was left by mistake.
            if now - seconds < self._begun - 1e-9:
                return
            if self.counts:
                ratio = fast / slow
                rate = in_flight / (self.world.latency_s * fast)
                more = math.log(ratio) + (1 - ratio) * rate * since
            else:
                more = self._slower(seconds, fast, slow)
            self._sum = max(0.0, self._sum + more)
            if self._sum > self.threshold:
                self._go(now, other, believed=1 - self._believed)
        elif self._believed == 0 and self._ended >= self.gap * self.limit:
            self._go(now, max(first + 1, round(self.probe * first)), believed=0, probing=True)

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        pass

    def _go(self, now: float, limit: int, believed: int, probing: bool = False) -> None:
        self.limit, self._believed, self._probing = limit, believed, probing
        self._ended, self._sum, self._begun = 0, 0.0, now
        self._starts = [now] * (limit - self.world.knees[0] + 1) if probing else []

    def _probed(self, now: float, seconds: float, fast: float, slow: float) -> float:
        """Log likelihood ratio that the knee is the higher one, by the calls of the probe."""
        if now - seconds >= self._begun - 1e-9:
            self._sum -= self._slower(seconds, fast, slow)
            if self._starts:
                del self._starts[bisect_left(self._starts[:-1], now - seconds - 1e-9)]
        ages = np.log(np.maximum(1e-9, now - np.array(self._starts)) / self.world.latency_s)
        fits = (np.interp(ages - math.log(s), self._logs, self._longer).sum() for s in (fast, slow))
        running = float(np.subtract(*fits))
        self._starts.append(now)  # the caller sends the next one at once
        return self._sum + running

    def _slowness(self, n: int, knee: int) -> float:
        return float(max(1.0, n / knee) ** self.world.power)

    def _slower(self, seconds: float, fast: float, slow: float) -> float:
        """Log likelihood ratio of a latency: slowed down by `slow` rather than `fast`."""
        work = seconds / self.world.latency_s
        return self._shape * (work / fast - work / slow - math.log(slow / fast))


class _Server:
    """Calls at work, their pace, and the line of those that wait."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.knee = world.knee(0)
        self.now = 0.0
        self.worked = 0.0  # work that a call present from the beginning would have got
        self.pace = 1.0
        self.active: list[tuple[float, int, float]] = []  # (worked when finished, call, started)
        self.line: deque[tuple[int, float, float]] = deque()
        self.working: set[int] = set()
        self.gone: set[int] = set()  # they left, and are skipped when their turn comes

    def forward(self, now: float) -> None:
        self.worked += (now - self.now) * self.pace
        self.now = now

    def slowness(self, n: int) -> float:
        over = n / self.knee
        if self.world.kind == "thrash":
            return float(max(1.0, over) ** self.world.power)
        if self.world.kind == "batch":
            # Above the knee only while it shrinks: the calls at work are not thrown out.
            return max(self.world.base + (1 - self.world.base) * over, over)
        return 1.0

    def admit(self, call: int, work: float, started: float) -> bool:
        """Take a call up, into the line or to work; False if it is refused."""
        full = self.world.kind != "thrash" and len(self.working) >= self.knee
        if full and self.world.kind == "reject":
            return False
        if full:
            self.line.append((call, work, started))
        else:
            self._begin(call, work, started)
        return True

    def _begin(self, call: int, work: float, started: float) -> None:
        if self.world.paced_at_start:
            work *= self.slowness(len(self.working) + 1)
        self.working.add(call)
        heapq.heappush(self.active, (self.worked + work, call, started))
        self._repace()

    def _repace(self) -> None:
        n = len(self.working)
        self.pace = 1.0 if self.world.paced_at_start or not n else 1.0 / self.slowness(n)

    def next_end(self) -> float:
        while self.active and self.active[0][1] in self.gone:
            heapq.heappop(self.active)
        if not self.active:
            return math.inf
        return self.now + max(0.0, self.active[0][0] - self.worked) / self.pace

    def finish(self) -> tuple[int, float]:
        self.worked, call, started = heapq.heappop(self.active)
        self.working.remove(call)
        self.fill()
        return call, started

    def leave(self, call: int) -> None:
        """A client that gave up."""
        self.gone.add(call)
        self.working.discard(call)
        self.fill()

    def fill(self) -> None:
        while self.line and len(self.working) < self.knee:
            following = self.line.popleft()
            if following[0] not in self.gone:
                self._begin(*following)
        self._repace()


def run(world: World, limit: "Limit | Oracle | LateOracle | DetectingOracle") -> Run:
    """Make all calls of `world` under `limit`, as fast as it allows."""
    works, jitter = world.works()
    server = _Server(world)
    wave = world.wave or world.calls
    waiting = deque(range(wave))
    refused: list[tuple[float, int]] = []  # on their way back to the client
    later: list[tuple[float, int]] = []  # waiting for their next try
    deadlines: deque[tuple[float, int]] = deque()
    ended: set[int] = set()
    result = Run()
    now, done, in_flight, shown = 0.0, 0, 0, -1
    while done < world.calls:
        held = len(later) if world.holds_slot else 0
        allowed = limit.limit
        if allowed != shown:
            shown = allowed
            result.limits.append((done, shown))
        if waiting and in_flight + held < allowed and now >= limit.pause_until:
            call = waiting.popleft()
            in_flight += 1
            if world.deadline_s < math.inf:
                deadlines.append((now + world.deadline_s, call))
            if not server.admit(call, works[call], now):
                heapq.heappush(refused, (now + 0.02 * world.latency_s, call))
            continue
        end = server.next_end()
        back = refused[0][0] if refused else math.inf
        again = later[0][0] if later else math.inf
        resume = limit.pause_until if waiting and limit.pause_until > now else math.inf
        while deadlines and deadlines[0][1] in ended:
            deadlines.popleft()
        late = deadlines[0][0] if deadlines else math.inf
        before, now = now, min(end, back, again, resume, late)
        result.seconds_in_flight += in_flight * (now - before)
        server.forward(now)
        if now == late and late < end:
            _, call = deadlines.popleft()
            ended.add(call)
            server.leave(call)
            result.lost += 1
            done += 1
            limit.on_done(now, world.deadline_s, in_flight, False)
            in_flight -= 1
            if done % wave == 0:
                waiting.extend(range(done, min(done + wave, world.calls)))
        elif now == end:
            call, started = server.finish()
            ended.add(call)
            done += 1
            knee = world.knee(done)
            if knee != server.knee:
                server.knee = knee
                server.fill()
            limit.on_done(now, now - started, in_flight, True)
            in_flight -= 1
            if done % wave == 0:
                waiting.extend(range(done, min(done + wave, world.calls)))
        elif now == back:
            _, call = heapq.heappop(refused)
            result.rejects += 1
            limit.on_reject(now, in_flight, world.retry_after_s)
            in_flight -= 1
            wait = world.retry_after_s or 0.2 * world.latency_s
            wait *= 1 + 0.5 * jitter[result.rejects % len(jitter)]
            heapq.heappush(later, (now + wait, call))
        elif now == again:
            waiting.appendleft(heapq.heappop(later)[1])
    result.seconds = now
    return result


def oracle_seconds(world: World) -> float:
    """The time of the best limit that knows the knee: a share of it, the same in every phase."""
    return min(run(world, Oracle(world, share)).seconds for share in (0.95, 1.0, 1.05, 1.2))


def detecting_seconds(world: World, start: int) -> float:
    """The time of the best detecting oracle, chosen with hindsight for each world."""
    falls = world.knees[1] < world.knees[0]
    ways: list[tuple[float, bool, float, float]] = (
        [(threshold, counts, 1.0, 1.0) for threshold in (1, 2, 4, 7) for counts in (True, False)]
        if falls
        else [
            (threshold, False, probe, gap)
            for threshold in (1, 2, 4)
            for probe in (1.1, 1.25, 1.6)
            for gap in (1, 2, 4, 8)
        ]
    )
    return min(run(world, DetectingOracle(world, start, *way)).seconds for way in ways)
