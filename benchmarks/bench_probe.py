"""`calls probe` on servers drawn at random: is the concurrency it names right, and is it sure?

Servers are those of `limit_families.py` with a knee that stays, in virtual time, so the numbers are
the same on every machine. Right is what lies within a factor of 1.25 of the smallest concurrency
that reaches 95 % of the best throughput, by the server's own law. The seeds are from 1000 on, which
were never used to tune the search; `--tuning` takes those below.
"""

import contextlib
import math
import statistics
from dataclasses import replace

from batchwright.calls.limit.knee import NEAR, WITHIN, KneeSearch
from common import Report, arguments
from limit_families import JUDGING, draw
from limit_world import KINDS, World, run

MOST = 512
BUDGETS = (500, 2000, 8000)


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


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tuning", action="store_true", help="the worlds used for tuning")
    args = parser.parse_args()
    if args.tuning:
        args.no_save = True
    report = Report("probe", args)
    first = 0 if args.tuning else JUDGING
    seeds = range(first, first + (15 if args.quick else 100))
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
