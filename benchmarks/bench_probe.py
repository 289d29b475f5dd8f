"""`calls probe` on servers drawn at random: is the concurrency it names right, and is it sure?

Servers are those of `limit_families.py` with a knee that stays, in virtual time, so the numbers are
the same on every machine. Right is what lies within a factor of 1.25 of the smallest concurrency
that reaches 95 % of the best throughput, by the server's own law. The seeds are from 1000 on, which
were never used to tune the search; `--tuning` takes those below.

`--live` asks a real llama.cpp server with 1 and 4 slots. Its law is not known, so calls at each of
some levels are measured beside it, in rounds that take turns; there the machine matters.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

from batchwright.calls import Endpoint, Pool, chat
from batchwright.calls.limit.knee import NEAR, WITHIN, KneeSearch
from batchwright.calls.probe import probe
from bench_real import served
from common import Report, arguments
from limit_families import JUDGING, draw
from limit_world import KINDS, World, run

MOST = 512
BUDGETS = (500, 2000, 8000)
LIVE_LEVELS = {1: (1, 2, 3), 4: (1, 2, 3, 4, 6, 8)}
"""Calls in flight that are measured, by the slots of the server."""
LIVE_ROUNDS, LIVE_CALLS, LIVE_SECONDS = 6, 16, 90.0
LIVE_TOKENS = 12


class Over(Exception):
    """The search needs no more calls."""


class Searching(KneeSearch):
    """Ends the run in virtual time with the search."""

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        super().on_done(now, seconds, in_flight, ok)
        if self.over:
            raise Over

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        super().on_reject(now, in_flight, retry_after_s)
        if self.over:
            raise Over


def right_answer(world: World) -> int:
    """The smallest concurrency with 95 % of the best throughput, by the server's law."""
    knee = world.knees[0]
    base = world.base if world.kind == "batch" else 1.0
    best = range(1, knee + 1)
    return next(n for n in best if n / (base + (1 - base) * n / knee) >= NEAR * knee - 1e-9)


def search(world: World, budget: int) -> KneeSearch:
    found = Searching(MOST, max_calls=budget)
    with contextlib.suppress(Over):
        run(replace(world, calls=2 * budget, wave=0), found)
    return found


def measured(url: str, levels: tuple[int, ...]) -> dict[int, float]:
    """Responses per second at each level, the median over rounds."""
    rates: dict[int, list[float]] = {level: [] for level in levels}
    for round_ in range(LIVE_ROUNDS):
        # In both orders, because the machine changes meanwhile.
        for level in levels if round_ % 2 else levels[::-1]:
            texts = [f"{round_} {level} {n} rivers and stones. Go on." for n in range(LIVE_CALLS)]
            given = [chat("smollm2", text, max_tokens=LIVE_TOKENS) for text in texts]
            with Pool(Endpoint(url), limit=level, hedge=False, remember=False) as pool:
                begun = time.perf_counter()
                outcomes = pool.map(given)
                seconds = time.perf_counter() - begun
            assert all(outcomes)
            rates[level].append(len(given) / seconds)
    return {level: statistics.median(found) for level, found in rates.items()}


def smallest(rates: Mapping[int, float]) -> float:
    """The smallest concurrency with 95 % of the best rate, between levels by interpolation."""
    enough = NEAR * max(rates.values())
    levels = sorted(rates)
    for below, level in zip([0, *levels], levels, strict=False):
        if rates[level] >= enough:
            before = rates.get(below, 0.0)
            return max(1.0, below + (level - below) * (enough - before) / (rates[level] - before))
    raise AssertionError("one level is the best")


def live(report: Report, quick: bool) -> None:
    """`calls probe` against llama.cpp."""
    rows, factors = [], []
    for slots in (4,) if quick else (1, 4):
        with served(slots) as server:
            rates = measured(server.url, LIVE_LEVELS[slots])
            found = probe(
                Endpoint(server.url),
                "smollm2",
                most=16,
                max_seconds=LIVE_SECONDS,
                max_tokens=LIVE_TOKENS,
            )
        answer, right = found.answer, smallest(rates)
        factors.append(math.exp(abs(math.log(answer.concurrency / math.ceil(right - 0.05)))))
        shown = ", ".join(f"{level}: {rate:.2f}" for level, rate in rates.items())
        rows.append(
            [
                f"{slots} slots",
                shown,
                f"{right:.1f}",
                answer.concurrency,
                f"{answer.low} to {answer.high}",
                f"{answer.probability:.2f}",
                found.calls,
                found.seconds,
            ]
        )
        print(rows[-1], flush=True)
    columns = ["", "calls per second by calls in flight", "95 % of the best from", "probe names"]
    columns += ["likely", "probability", "calls", "seconds"]
    report.table("calls probe against llama.cpp", columns, rows)
    report.target("factor from the smallest concurrency with 95 %", max(factors), most=WITHIN)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--live", action="store_true", help="against llama.cpp")
    parser.add_argument("--tuning", action="store_true", help="the worlds used for tuning")
    args = parser.parse_args()
    if args.tuning:
        args.no_save = True
    report = Report("probe_live" if args.live else "probe", args)
    if args.live:
        live(report, args.quick)
        report.close()
        return
    first = 0 if args.tuning else JUDGING
    seeds = range(first, first + (1 if args.smoke else 15 if args.quick else 100))
    shares, when_sure = [], []
    for budget in BUDGETS:
        rows = []
        for kind in KINDS:
            factors, sure, calls = [], [], []
            for seed in seeds:
                world = draw(kind, seed)
                found = search(world, budget)
                answer = found.answer
                assert answer is not None
                right = right_answer(world)
                factors.append(abs(math.log(answer.concurrency / right)))
                sure.append(answer.sure)
                calls.append(found.calls)
            near = [factor <= math.log(WITHIN) + 1e-9 for factor in factors]
            both = sum(a and b for a, b in zip(near, sure, strict=True))
            worst = max((f for f, s in zip(factors, sure, strict=True) if s), default=0.0)
            rows.append(
                [
                    kind,
                    100 * statistics.mean(near),
                    100 * statistics.mean(sure),
                    100 * both / max(1, sum(sure)),
                    f"{math.exp(worst):.2f}",
                    round(statistics.median(calls)),
                    max(calls),
                ]
            )
            if budget == BUDGETS[-1]:
                shares.append(100 * statistics.mean(near))
                when_sure.append(100 * both / max(1, sum(sure)))
        columns = ["", "right %", "sure %", "right of the sure %", "worst factor of the sure"]
        columns += ["calls, median", "most"]
        report.table(f"{len(seeds)} servers of each kind, {budget:,} calls at most", columns, rows)
    report.target("right within 1.25, percent, least of the kinds", min(shares), least=90.0)
    report.target("right when sure, percent, least of the kinds", min(when_sure), least=95.0)
    report.close()


if __name__ == "__main__":
    main()
