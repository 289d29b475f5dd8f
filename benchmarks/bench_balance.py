"""Samples over ranks with equal counts, and the micro-batches of a rank under a token bound.

The cost of a sample is 24576 * l + l * l, the estimate verl uses for a 7B model. The bound is the
mean load of a rank, or the costliest sample with the cheapest ones beside it if that is more:
nobody can be below. Timed is one assignment, from the costs (an int64 array for us, a list for
verl) to the rank of each sample or the samples of each rank.

Micro-batches: the rows of one rank under `max_token_len`. In order closes a micro-batch when the
next row does not fit. verl's is its own `rearrange_micro_batches` from its file, which stops at
the rows of each micro-batch instead of copying tensors; ours are the two calls that
`batchwright.integrations.verl_batching` puts in its place. Over the bound are micro-batches beyond
tokens / max_token_len, rounded up: each is one more pass through the model.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing.balanced import balance_bins, fewest_bins
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


def our_micro_batches(given: Given) -> Callable[[], NDArray[np.int32]]:
    lengths, most = given

    def call() -> NDArray[np.int32]:
        costs = 24576 * lengths + lengths * lengths
        return balance_bins(costs, fewest_bins(lengths, most), lengths, most)

    return call


def in_order(given: Given) -> Callable[[], list[list[int]]]:
    lengths, most = given[0].tolist(), given[1]

    def call() -> list[list[int]]:
        parts: list[list[int]] = [[]]
        used = 0
        for row, length in enumerate(lengths):
            if used + length > most:
                parts.append([])
                used = 0
            parts[-1].append(row)
            used += length
        return parts

    return call


def verls_micro_batches(given: Given) -> Callable[[], list[list[int]]]:
    import torch

    names = ("calculate_workload", "ceildiv", "roundup_divisible", "karmarkar_karp")
    names += ("get_seqlen_balanced_partitions", "rearrange_micro_batches")
    rows_only = SimpleNamespace(index_select_tensor_dict=lambda batch, rows: rows)
    *_, rearrange = function_of(
        "verl",
        "utils/seqlen_balancing.py",
        *names,
        torch=torch,
        dist=torch.distributed,
        tu=rows_only,
    )
    # What it asks of a nested batch are the offsets of its rows.
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(given[0]))))
    ids = SimpleNamespace(is_nested=True, offsets=lambda: offsets)
    return lambda: rearrange({"input_ids": ids}, given[1])[1]


def micro_summary(given: Given, result: Any) -> Mapping[str, Any]:
    lengths, most = given
    if isinstance(result, list):
        bin_of = np.full(len(lengths), -1)
        for number, rows in enumerate(result):
            bin_of[rows] = number
    else:
        bin_of = result
    assert bin_of.min() == 0
    tokens = np.bincount(bin_of, lengths)
    assert tokens.max() <= most
    load = np.bincount(bin_of, 24576 * lengths + lengths * lengths)
    over = len(tokens) - -(-int(lengths.sum()) // most)
    return {"count": len(tokens), "over": over, "imbalance": load.max() / load.mean()}


MICRO_WAYS = (
    Contender("batchwright", our_micro_batches, micro_summary),
    Contender("in order", in_order, micro_summary),
    Contender("verl", verls_micro_batches, micro_summary),
)


MICRO_SETS = (
    ("lognormal", 2048, 128, 4096),
    ("mixture", 2048, 256, 4096),
    ("hard", 2048, 256, 2048),
    ("long", 32_768, 128, 32_768),
    ("long", 32_768, 1024, 65_536),
)


def micro_batches(report: Report, name: str, longest: int, n: int, most: int, draws: int) -> None:
    """Means over several draws for each way, and the ratio of ours to verl's."""
    rows, found = [], {}
    for way in MICRO_WAYS:
        if way.name in report.missing:
            continue
        got = []
        for draw in range(draws):
            given = lengths_of(name, n, longest, draw).astype(np.int64), most
            small = given[0][:16], most
            got.append(measure(way, given, small, limit_s=report.args.limit, patience_s=1.0))
            if got[-1].seconds is None:
                report.not_measured(way.name, got[-1].reason)
                break
        else:
            means = [
                float(np.mean([one.summary[key] for one in got]))
                for key in ("count", "over", "imbalance")
            ]
            seconds = [one.busy or one.seconds or 0.0 for one in got]
            found[way.name] = [means[0], means[2], float(np.median(seconds))]
            rows.append([way.name, *means, 1000 * np.median(seconds)])
    title = f"micro-batches of {most:,} tokens: {n:,} rows, {name} to {longest:,}, {draws} draws"
    report.table(title, ("", "micro-batches", "over the bound", "max / mean", "ms"), rows)
    if "verl" in found and "batchwright" in found:
        ours, verls = found["batchwright"], found["verl"]
        ratios = [a / b for a, b in zip(ours, verls, strict=True)]
        print("  ours / verl: micro-batches {:.4f}, max / mean {:.4f}, time {:.4f}".format(*ratios))
        what = f"micro-batches, {name} to {longest:,}, {most:,} tokens: ours / verl's"
        report.target(what, ratios[0], most=1.0)


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("balance", args)
    draws = 1 if args.smoke else 3 if args.quick else 6
    for name, capacity in (("lognormal", 2048), ("mixture", 2048), ("long", 32_768)):
        worst = compare(report, name, capacity, 1024, 64, draws)
        report.target(f"{name}, 1024 over 64: worst max load / bound", worst, most=1.02)
    if not args.quick:
        compare(report, "lognormal", 2048, 8192, 64, 2)
        compare(report, "lognormal", 2048, 8192, 512, 2)
    draws = 1 if args.smoke else 3 if args.quick else 8
    for name, longest, n, most in MICRO_SETS[: 2 if args.quick else None]:
        micro_batches(report, name, longest, n, most, draws)
    report.close()


if __name__ == "__main__":
    main()
