"""Batch plans: build, save, open and any batch of any epoch, beside fairseq and lhotse.

Timed apart, each in its own process, on the lognormal lengths:

    build    int32 array (or ready `Lengths`, or a dict where it says so) -> plan of three epochs
    save     plan -> folder on disk, checksums and fsync included
    open     folder -> plan; the first time in a process, its code loaded, and after that. The
             files stand in the page cache, as they do right after saving
    batch    plan.batch(epoch, index) at random places of a thousand epochs, arrays ready to use;
             each place is visited several times and its best visit counts
    ids      the same and then `.samples`, the ids as strings

    written out   the same build where every epoch is drawn and stored: mixtures, curricula, packing
             by arrival, groups

fairseq and lhotse make the batches of one epoch; beside them stands our plan with every batch of
an epoch made as well, although a run needs no such list. MosaicML Streaming orders rows without
asking how long they are, as many in a batch as fill the budget on average: its padding stands in
the column of the efficiency.
"""

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, PackingMode
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.rng import stream
from common import Contender, Report, arguments, free_memory, lengths_of, measure
from peers import mosaic_streaming

BUDGET = 65_536
EPOCHS = 1000
PLACES = 2000
LAYOUTS = ("bucketed", "sorted", "packed")
HUGE = 100_000_000
COLUMNS = (
    *("layout", "build s", "save s", "MB", "first open ms", "open ms", "batch us", "p99", "ids us"),
    *("samples", "efficiency %", "bytes/sample"),
)


def config(layout: str) -> BatchingConfig:
    return BatchingConfig(layout=layout, token_budget=BUDGET)


def building(layout: str, folder: Path) -> Contender:
    """Build; afterwards save under `folder` and look at what was built."""

    def prepare(lengths: Any) -> Callable[[], BatchPlan]:
        return lambda: BatchPlanBuilder(lengths, config(layout)).build(num_epochs=3)

    def summary(lengths: Any, plan: BatchPlan) -> Mapping[str, Any]:
        saves = []
        for _ in range(3):
            shutil.rmtree(folder, ignore_errors=True)
            start = time.perf_counter()
            plan.save(folder)
            saves.append(time.perf_counter() - start)
        stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return {"save": min(saves), "stored": stored, "efficiency": 100 * plan.efficiency}

    return Contender(layout, prepare, summary)


def opening() -> Contender:
    def prepare(folder: Path) -> Callable[[], BatchPlan]:
        return lambda: BatchPlan.load(folder)

    return Contender("open", prepare, lambda folder, plan: {})


def reading(with_ids: bool) -> Contender:
    """Microseconds of single batches, the places drawn beforehand."""

    def prepare(folder: Path) -> Callable[[], NDArray[np.float64]]:
        plan = BatchPlan.load(folder)
        random = stream(42, "benchmark/places")
        epochs = random.integers(EPOCHS, size=PLACES).tolist()
        places = [int(random.integers(plan.num_microbatches(epoch))) for epoch in epochs]
        best = np.full(PLACES, np.inf)

        def call() -> NDArray[np.float64]:
            spent = []
            for epoch, index in zip(epochs, places, strict=True):
                start = time.perf_counter_ns()
                batch = plan.batch(epoch, index)
                if with_ids:
                    _ = batch.samples
                spent.append(time.perf_counter_ns() - start)
            np.minimum(best, np.array(spent) / 1000, out=best)
            return best

        return call

    def summary(folder: Path, spent: NDArray[np.float64]) -> Mapping[str, Any]:
        plan = BatchPlan.load(folder)
        some = range(min(200, plan.num_microbatches(0)))
        counts = [len(plan.batch(0, index).items) for index in some]
        return {
            "median": float(np.median(spent)),
            "p99": float(np.percentile(spent, 99)),
            "samples": float(np.mean(counts)),
        }

    return Contender("batches", prepare, summary)


def plan_row(
    report: Report, layout: str, lengths: Any, n: int, label: str, runs: int = 5
) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder, few = Path(name) / "plan", Path(name) / "few"
        # The same kind of ids, so that the same code is loaded before the clock starts.
        small = named(1000) if isinstance(lengths, Lengths) else lengths_of("lognormal", 1000)
        BatchPlanBuilder(small, config(layout)).build(3).save(few)
        built = measure(building(layout, folder), lengths, small, runs=runs)
        if built.seconds is None:
            report.not_measured(f"{label}, {layout}", built.reason)
            return None
        opened = measure(opening(), folder, few, runs=21)
        batch = measure(reading(with_ids=False), folder, few, runs=5)
        ids = measure(reading(with_ids=True), folder, few, runs=3)
    for got in (opened, batch, ids):
        if got.seconds is None:
            report.not_measured(f"{label}, {layout}: {got.name}", got.reason)
            return None
    numbers = {
        "build": built.seconds,
        "first open": 1000 * opened.calls[0],
        "batch": batch.summary["median"],
        "p99": batch.summary["p99"],
        "efficiency": built.summary["efficiency"],
    }
    numbers["row"] = [
        layout,
        built.seconds,
        built.summary["save"],
        built.summary["stored"] / 1e6,
        numbers["first open"],
        1000 * float(np.median(opened.calls[1:])),
        numbers["batch"],
        batch.summary["p99"],
        ids.summary["median"],
        batch.summary["samples"],
        numbers["efficiency"],
        (built.extra_bytes or 0) / n,
    ]
    return numbers


def plans(report: Report, n: int, label: str, lengths: Any, runs: int = 5) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS:
        numbers = plan_row(report, layout, lengths, n, label, runs)
        if numbers:
            found[layout] = numbers
    title = f"{label}, budget of {BUDGET:,} tokens"
    report.table(title, COLUMNS, [numbers["row"] for numbers in found.values()])
    return found


def ours_epoch(lengths: NDArray[np.int32]) -> Callable[[], list[Any]]:
    def call() -> list[Any]:
        listed = BatchPlanBuilder(lengths, config("sorted")).build(1).listing(0)
        bounds = listed.row_offsets[listed.batch_rows].tolist()
        return [listed.items[a:b] for a, b in pairwise(bounds)]

    return call


def ours_plan(lengths: NDArray[np.int32]) -> Callable[[], BatchPlan]:
    return lambda: BatchPlanBuilder(lengths, config("sorted")).build(1)


def fairseq(lengths: NDArray[np.int32]) -> Callable[[], list[Any]]:
    from data_utils_fast import batch_by_size_vec

    random = np.random.default_rng(0)
    sizes = lengths.astype(np.int64)

    def call() -> list[Any]:
        # What LanguagePairDataset.ordered_indices, batch_by_size and EpochBatchIterator do.
        shuffled = random.permutation(len(sizes)).astype(np.int64)
        indices = shuffled[np.argsort(sizes[shuffled], kind="mergesort")]
        batches: list[Any] = batch_by_size_vec(indices, sizes[indices], BUDGET, -1, 1)
        random.shuffle(batches)
        return batches

    return call


def mosaic(lengths: NDArray[np.int32]) -> Callable[[], list[Any]]:
    mosaic_streaming()
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    shards = np.array([len(lengths)], np.int64)
    rows = max(1, int(BUDGET / lengths.mean()))

    def call() -> list[Any]:
        # What StreamingDataset does before an epoch, on one rank: shuffled rows, so many a batch.
        places = get_partitions("relaxed", len(lengths), 1, 1, 1, 1, rows).reshape(-1, rows)
        items = get_shuffle("py1e", shards, 1, 0, 0)[places]
        return [batch[there] for batch, there in zip(items, places >= 0, strict=True)]

    return call


def lhotse(lengths: NDArray[np.int32]) -> Callable[[], list[Any]]:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    # It advises lazy cuts, which would have to be parsed; these are ready in memory.
    warnings.simplefilter("ignore")
    cuts = CutSet.from_cuts(
        MonoCut(id=str(i), start=0.0, duration=float(length), channel=0)
        for i, length in enumerate(lengths)
    )

    def call() -> list[Any]:
        sampler = DynamicBucketingSampler(
            cuts, max_duration=float(BUDGET), shuffle=True, seed=0, world_size=1, rank=0
        )
        return list(sampler)

    return call


def epoch_summary(lengths: NDArray[np.int32], batches: Any) -> Mapping[str, Any]:
    if isinstance(batches, BatchPlan):
        return {"batches": batches.num_microbatches(0), "efficiency": 100 * batches.efficiency}
    padded = count = 0
    for batch in batches:
        rows = [int(cut.id) for cut in batch] if not isinstance(batch, np.ndarray) else batch
        chosen = lengths[rows]
        padded += int(chosen.max()) * len(chosen)
        count += len(chosen)
    assert count == len(lengths)
    useful = int(lengths.sum(dtype=np.int64))
    return {"batches": len(batches), "efficiency": 100 * useful / padded}


def peers(report: Report, sizes: list[int]) -> None:
    ways = (
        Contender("batchwright sorted, the plan", ours_plan, epoch_summary),
        Contender("batchwright sorted, every batch of an epoch", ours_epoch, epoch_summary),
        Contender("fairseq batch_by_size (Cython)", fairseq, epoch_summary),
        Contender("MosaicML Streaming, padded rows", mosaic, epoch_summary),
        Contender("lhotse DynamicBucketingSampler", lhotse, epoch_summary),
    )
    for n in sizes:
        lengths, small = lengths_of("lognormal", n), lengths_of("lognormal", 1000)
        rows: list[list[Any]] = []
        base = float("nan")
        busy: dict[str, float | None] = {}
        for way in ways:
            if way.name in report.missing:
                continue
            if way.name.startswith("lhotse") and n > 100_000:
                rows.append([way.name, "not run, it takes seconds for 100,000", *[None] * 4])
                continue
            got = measure(way, lengths, small, limit_s=report.args.limit, runs=5)
            if got.seconds is None:
                report.not_measured(way.name, got.reason)
                continue
            if not rows:
                base = got.busy or base
            summary = got.summary
            busy[way.name] = got.busy
            ratio = (got.busy or base) / base
            rows.append(
                [way.name, got.seconds, got.busy, ratio, summary["batches"], summary["efficiency"]]
            )
        report.table(
            f"lognormal, {n:,} samples: the batches of one epoch",
            ("", "seconds", "busy s", "x ours", "batches", "efficiency %"),
            rows,
        )
        ours, theirs = (busy.get(way.name) for way in ways[1:3])
        ratio = ours / theirs if ours and theirs else None
        report.target(f"{n:,} samples: plan and batches, of fairseq's time", ratio, most=1.0)


def named(n: int) -> Lengths:
    return Lengths(
        lengths_of("lognormal", n),
        Ids.of(f"doc-{i * 2654435761 % 2**32:08x}-{i}" for i in range(n)),
    )


def from_dict(report: Report, n: int) -> None:
    lengths = named(n)
    given = dict(zip(lengths.ids, lengths.values.tolist(), strict=True))
    few = {name: given[name] for name in list(given)[:1000]}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        way = building("bucketed", Path(name) / "plan")
        got = measure(way, given, few, runs=3)
    report.table(
        f"{n:,} samples from a dict of names to lengths",
        ("layout", "build s"),
        [["bucketed", got.seconds if got.seconds is not None else got.reason]],
    )


def written_out(report: Report, n: int) -> None:
    """Plans of three epochs that have to be drawn epoch by epoch, beside a virtual one."""
    half = n // 2
    hardness = stream(42, "benchmark/difficulty").random(n)

    def mixed(lengths: NDArray[np.int32], layout: str) -> BatchPlanBuilder:
        parts = {"a": lengths[:half], "b": lengths[half:]}
        return BatchPlanBuilder(parts, config(layout), weights={"a": 0.7, "b": 1.5})

    def by_arrival(lengths: NDArray[np.int32]) -> BatchPlanBuilder:
        own = config("packed").model_copy(update={"pack_mode": PackingMode.BEST_FIT})
        return BatchPlanBuilder(lengths, own)

    ways: dict[str, Callable[[NDArray[np.int32]], BatchPlanBuilder]] = {
        "virtual, sorted": lambda given: BatchPlanBuilder(given, config("sorted")),
        "virtual, packed": lambda given: BatchPlanBuilder(given, config("packed")),
        "mixture, sorted": lambda given: mixed(given, "sorted"),
        "mixture, packed": lambda given: mixed(given, "packed"),
        "curriculum, packed": lambda given: BatchPlanBuilder(
            given, config("packed"), difficulty=hardness[: len(given)]
        ),
        "packed by arrival": by_arrival,
        "groups of 8, packed": lambda given: BatchPlanBuilder(
            given, config("packed"), groups=np.arange(len(given)) // 8
        ),
    }
    rows = []
    for name, way in ways.items():

        def prepare(
            lengths: NDArray[np.int32],
            way: Callable[[NDArray[np.int32]], BatchPlanBuilder] = way,
        ) -> Callable[[], BatchPlan]:
            return lambda: way(lengths).build(num_epochs=3)

        contender = Contender(name, prepare, lambda _, plan: {"efficiency": 100 * plan.efficiency})
        lengths = lengths_of("lognormal", n)
        got = measure(contender, lengths, lengths[: max(half + 1, 1000)], runs=3)
        if got.busy is None:
            report.not_measured(name, got.reason)
            continue
        rows.append([name, got.seconds, 1e9 * got.busy / (3 * n), got.summary["efficiency"]])
    report.table(
        f"{n:,} samples, three epochs",
        ("", "build s", "ns a sample and epoch", "efficiency %"),
        rows,
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--huge", action="store_true", help="100M samples as well, 12 GB of memory")
    args = parser.parse_args()
    report = Report("plans", args)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for n in [100_000] if args.quick else [1_000_000, 10_000_000]:
        label = f"{n:,} samples, row numbers as ids"
        found[n, "rows"] = plans(report, n, label, lengths_of("lognormal", n))
    n = 100_000 if args.quick else 1_000_000
    found[n, "strings"] = plans(report, n, f"{n:,} samples, strings as ids", named(n))
    from_dict(report, n)
    written_out(report, n)
    if args.huge and free_memory() > 12e9:
        label = f"{HUGE:,} samples, row numbers as ids"
        plans(report, HUGE, label, lengths_of("lognormal", HUGE), runs=2)
    else:
        report.not_measured("100M samples", "ask with --huge, with 12 GB of memory free")
    peers(report, [100_000] if args.quick else [100_000, 1_000_000, 10_000_000])

    for (n, ids), layouts in found.items():
        for layout, numbers in layouts.items():
            name = f"{layout}, {n:,}, ids {ids}"
            report.target(f"{name}: first open, ms", numbers["first open"], most=5.0)
            report.target(f"{name}: any batch, median us", numbers["batch"], most=100.0)
            report.target(f"{name}: any batch, p99 us", numbers["p99"], most=100.0)
            if n == 10_000_000:
                report.target(f"{name}: build, s", numbers["build"], most=1.0)
            if layout == "sorted":
                report.target(f"{name}: efficiency %", numbers["efficiency"], least=99.0)
    report.close()


if __name__ == "__main__":
    main()
