"""Samples over ranks with equal counts: how far the heaviest rank is from the bound.

The cost of a sample is 24576 * l + l * l, the estimate verl uses for a 7B model. The bound is the
mean load of a rank, or the costliest sample with the cheapest ones beside it if that is more:
nobody can be below. Timed is one assignment, from the costs (an int64 array for us, a list for
verl) to the rank of each sample or the samples of each rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.plan.shards import balance
from common import Contender, Report, arguments, lengths_of, measure
from peers import function_of

Given = tuple[NDArray[np.int64], int]


def costs_of(name: str, n: int, capacity: int, draw: int) -> NDArray[np.int64]:
    lengths = lengths_of(name, n, capacity, draw).astype(np.int64)
    return 24576 * lengths + lengths * lengths


def ours(given: Given) -> Callable[[], NDArray[np.int32]]:
    costs, world = given
    return lambda: balance(costs, world)


def round_robin(given: Given) -> Callable[[], NDArray[np.int64]]:
    costs, world = given
    return lambda: np.arange(len(costs)) % world


def karmarkar_karp(given: Given) -> Callable[[], list[list[int]]]:
    # The module imports ray and a GPU stack on the way; the function needs neither.
    (partition,) = function_of("verl", "utils/seqlen_balancing.py", "karmarkar_karp")
    costs, world = given[0].tolist(), given[1]
    return lambda: partition(costs, world, equal_size=True)


def summary(given: Given, result: Any) -> Mapping[str, Any]:
    costs, world = given
    if isinstance(result, list):
        rank_of = np.full(len(costs), -1)
        for rank, items in enumerate(result):
            rank_of[items] = rank
    else:
        rank_of = result
    assert np.all(np.bincount(rank_of, minlength=world) == len(costs) // world)
    load = np.zeros(world, np.int64)
    np.add.at(load, rank_of, costs)
    assert load.sum() == costs.sum()
    ordered = np.sort(costs)
    forced = int(ordered[-1] + ordered[: len(costs) // world - 1].sum())
    bound = max(-(-int(costs.sum()) // world), forced)
    return {"ratio": int(load.max()) / bound}


WAYS = (
    Contender("batchwright balance", ours, summary),
    Contender("round robin", round_robin, summary),
    Contender("verl Karmarkar-Karp", karmarkar_karp, summary),
)


def compare(
    report: Report, name: str, capacity: int, n: int, world: int, draws: int
) -> float | None:
    """The worst of several draws for each way."""
    rows, worst_of_ours = [], None
    for way in WAYS:
        if way.name in report.missing:
            continue
        ratios, seconds = [], []
        for draw in range(draws):
            given = costs_of(name, n, capacity, draw), world
            got = measure(way, given, (given[0][:16], 4), limit_s=report.args.limit, patience_s=1.0)
            if got.seconds is None:
                report.not_measured(way.name, got.reason)
                break
            ratios.append(got.summary["ratio"])
            seconds.append(got.busy or got.seconds)
        else:
            rows.append([way.name, np.mean(ratios), max(ratios), 1000 * np.median(seconds)])
            if way.name.startswith("batchwright"):
                worst_of_ours = max(ratios)
    report.table(
        f"{name} to {capacity:,}: {n:,} samples over {world} ranks, {draws} draws",
        ("", "max load / bound, mean", "worst", "milliseconds"),
        rows,
    )
    return worst_of_ours


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("balance", args)
    draws = 3 if args.quick else 10
    for name, capacity in (("lognormal", 2048), ("mixture", 2048), ("long", 32_768)):
        worst = compare(report, name, capacity, 1024, 64, draws)
        report.target(f"{name}, 1024 over 64: worst max load / bound", worst, most=1.02)
    if not args.quick:
        compare(report, "lognormal", 2048, 8192, 64, 2)
        compare(report, "lognormal", 2048, 8192, 512, 2)
    report.close()


if __name__ == "__main__":
    main()
