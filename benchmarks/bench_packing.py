"""Pack lengths into bins: seconds, bins and memory, beside the packers other trainers use.

Timed for each contender is one call from its own input form to its own output form:

    batchwright    int32 array -> bins as two arrays (checks, bounds, sort and expansion included)
    LightBinPack   list of ints -> list of lists
    Axolotl        int32 array -> list of lists, its groups of 100,000, one process
    TRL binning    arrow table whose rows have lengths but no contents -> bins (peers.trl_binning)
    TRL dataset    datasets.Dataset with int8 tokens -> packed Dataset, default windows of 1,000
    naive          list of ints -> list of lists, the textbook loop

Only TRL's last line moves tokens; all others decide which sample goes where. Ratios are of `busy`
seconds (see common.Measured), so that a call of a minute does not suffer from other people's work
where a call of a millisecond escapes it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing import kernels
from batchwright.batching.packing.bins import Packing, pack_lengths, verify_packing
from common import CAPACITY, Contender, Measured, Report, arguments, lengths_of, measure
from peers import lightbinpack, trl_binning, trl_dataset

Lengths = NDArray[np.int32]
OURS = "batchwright"
TRL = "TRL bfd, binning only"
TRL_WHOLE = "TRL pack_dataset bfd, moves tokens"
COLUMNS = (
    *("", "seconds", "busy s", "x ours", "bins", "bins / L2", "efficiency %", "bytes/sample"),
    "first s",
)
NAIVE_MOST = 10_000
TOKENS_MOST = 1_000_000
SLOW_S = 12.0
"""Whoever would take longer for a call, by a smaller size, is not measured at that size."""


def ours(lengths: Lengths) -> Callable[[], Packing]:
    return lambda: pack_lengths(lengths, CAPACITY)


def ours_optimal(lengths: Lengths) -> Callable[[], Packing]:
    return lambda: pack_lengths(lengths, CAPACITY, mode="optimal")


def light(name: str) -> Callable[[Lengths], Callable[[], list[list[int]]]]:
    def prepare(lengths: Lengths) -> Callable[[], list[list[int]]]:
        pack, listed = lightbinpack(name), lengths.tolist()
        return lambda: pack(listed, CAPACITY)

    return prepare


def axolotl(lengths: Lengths) -> Callable[[], list[list[int]]]:
    from axolotl.utils.samplers.multipack import pack_parallel

    # Group and bin sizes are Axolotl's defaults; one process, as everybody else here.
    return lambda: pack_parallel(lengths, CAPACITY, 100_000, 200, num_processes=1)


def trl_bins(lengths: Lengths) -> Callable[[], list[list[int]]]:
    return trl_binning(lengths, CAPACITY)


def trl_whole(lengths: Lengths) -> Callable[[], Any]:
    from trl import pack_dataset

    dataset = trl_dataset(lengths)
    # Without a cache file, or the second call would read the first one's result.
    options = {"keep_in_memory": True, "load_from_cache_file": False}
    return lambda: pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=options)


def naive(lengths: Lengths) -> Callable[[], list[list[int]]]:
    values = lengths.tolist()

    def first_fit_decreasing() -> list[list[int]]:
        bins: list[list[int]] = []
        free: list[int] = []
        for item in sorted(range(len(values)), key=lambda i: -values[i]):
            for b, space in enumerate(free):
                if space >= values[item]:
                    bins[b].append(item)
                    free[b] -= values[item]
                    break
            else:
                bins.append([item])
                free.append(CAPACITY - values[item])
        return bins

    return first_fit_decreasing


def check_ours(lengths: Lengths, packing: Packing) -> Mapping[str, Any]:
    proof = verify_packing(packing, lengths)
    return {"bins": proof.bins, "method": packing.method, "bound": packing.lower_bound}


def check_lists(lengths: Lengths, bins: list[list[int]]) -> Mapping[str, Any]:
    """Every item once, no bin too full."""
    items = np.concatenate([np.asarray(b, np.int64) for b in bins])
    assert np.array_equal(np.sort(items), np.arange(len(lengths)))
    sizes = np.fromiter(map(len, bins), np.int64, len(bins))
    tokens = np.add.reduceat(lengths[items].astype(np.int64), np.cumsum(sizes) - sizes)
    assert tokens.max() <= CAPACITY
    return {"bins": len(bins)}


def check_table(lengths: Lengths, packed: Any) -> Mapping[str, Any]:
    """A packed data set does not tell which rows went where: no bin too full, no token lost."""
    parts = packed.data.column("seq_lengths").combine_chunks()
    values = parts.values.to_numpy().astype(np.int64)
    tokens = np.add.reduceat(values, parts.offsets.to_numpy()[:-1])
    assert tokens.max() <= CAPACITY
    assert tokens.sum() == lengths.sum(dtype=np.int64)
    return {"bins": len(packed)}


CONTENDERS = (
    Contender(OURS, ours, check_ours),
    Contender("LightBinPack obfd (C++)", light("obfd"), check_lists),
    Contender("LightBinPack bfd (C++)", light("bfd"), check_lists),
    Contender("Axolotl pack_parallel", axolotl, check_lists),
    Contender(TRL, trl_bins, check_lists),
    Contender(TRL_WHOLE, trl_whole, check_table),
    Contender("naive first-fit-decreasing", naive, check_lists),
)


@numba.njit
def bins_item_by_item(descending: Lengths, capacity: int) -> int:
    """Bins of best-fit-decreasing, one item at a time, by a plain scan over the free spaces."""
    free = np.zeros(capacity + 1, np.int64)  # open bins by free space
    bins = 0
    for length in descending:
        space = length
        while space <= capacity and free[space] == 0:
            space += 1
        if space > capacity:
            bins += 1
            space = capacity
        else:
            free[space] -= 1
        free[space - length] += 1
    return bins


def compare(report: Report, name: str, n: int, earlier: dict[str, float]) -> dict[str, Measured]:
    """One data set at one size. `earlier` holds seconds per sample seen at smaller sizes."""
    lengths, small = lengths_of(name, n), lengths_of(name, 1000)
    hist = np.bincount(lengths, minlength=CAPACITY + 1)
    _, bound = kernels.lower_bounds(hist, CAPACITY)
    useful = int(lengths.sum(dtype=np.int64))
    limit = report.args.limit
    found: dict[str, Measured] = {}
    for contender in CONTENDERS:
        peer = contender.name.split()[0]
        if peer in report.missing or (peer == "naive" and n > NAIVE_MOST):
            continue
        if contender.name == TRL_WHOLE and n > TOKENS_MOST:
            found[contender.name] = Measured(
                contender.name, reason="not run, its tokens and copies fill over 20 GB"
            )
            continue
        expected = earlier.get(contender.name, 0.0) * n
        if expected > SLOW_S:
            found[contender.name] = Measured(
                contender.name, reason=f"not run, about {expected:,.0f} s by its smaller size"
            )
            continue
        got = measure(contender, lengths, small, limit_s=limit)
        if "NotFoundError" in got.reason or "ImportError" in got.reason:
            report.not_measured(peer, got.reason)
            continue
        found[contender.name] = got
        if got.seconds is not None:
            earlier[contender.name] = got.seconds / n
    base = found[OURS].busy or float("nan")
    rows: list[list[Any]] = []
    for got in found.values():
        if got.seconds is None or got.busy is None or got.extra_bytes is None:
            rows.append([got.name, got.reason, *[None] * 7])
            continue
        bins = got.summary["bins"]
        rows.append(
            [
                got.name,
                got.seconds,
                got.busy,
                got.busy / base,
                bins,
                f"{bins / bound:.5f}",
                100 * useful / (bins * CAPACITY),
                got.extra_bytes / n if n >= 1_000_000 else None,
                got.first_seconds,
            ]
        )
    report.table(f"{name}, {n:,} lengths, bins of {CAPACITY:,}", COLUMNS, rows)
    return found


def equal_bins(report: Report, sizes: list[int]) -> bool:
    rows = []
    for n in sizes:
        for name in ("lognormal", "mixture", "hard"):
            lengths = lengths_of(name, n)
            plain = bins_item_by_item(-np.sort(-lengths), CAPACITY)
            rows.append([f"{name}, {n:,}", plain, pack_lengths(lengths, CAPACITY).num_bins])
    report.table(
        "best-fit-decreasing item by item, and ours on the histogram",
        ("", "bins item by item", "bins ours"),
        rows,
    )
    return all(plain == mine for _, plain, mine in rows)


def hard_with_optimal(report: Report, n: int) -> float | None:
    """The programme reads a histogram, so its seconds hardly grow with n."""
    lengths = lengths_of("hard", n)
    contender = Contender("optimal", ours_optimal, check_ours)
    got = measure(contender, lengths, lengths[:1000], limit_s=600.0, runs=2)
    if got.seconds is None:
        report.not_measured("optimal", got.reason)
        return None
    default = pack_lengths(lengths, CAPACITY)
    bins = got.summary["bins"]
    efficiency: float = 100 * default.tokens / (bins * CAPACITY)
    bound = got.summary["bound"]
    report.table(
        f"hard, {n:,} lengths",
        ("mode", "seconds", "made by", "bins", "bins / bound", "efficiency %"),
        [
            [
                "best_fit_decreasing",
                None,
                default.method,
                default.num_bins,
                f"{default.num_bins / bound:.5f}",
                100 * default.efficiency,
            ],
            [
                "optimal",
                got.seconds,
                got.summary["method"],
                bins,
                f"{bins / bound:.5f}",
                efficiency,
            ],
        ],
    )
    return efficiency


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("packing", args)
    sizes = [10_000, 100_000] if args.quick else [10_000, 100_000, 1_000_000, 10_000_000]
    found: dict[tuple[str, int], dict[str, Measured]] = {}
    for name in ("lognormal", "mixture", "hard"):
        earlier: dict[str, float] = {}
        for n in sizes:
            if n == NAIVE_MOST and name != "lognormal":
                continue
            found[name, n] = compare(report, name, n, earlier)
    same = equal_bins(report, [n for n in (100_000, 1_000_000) if n in sizes])
    optimal = hard_with_optimal(report, sizes[-1] if args.quick else 1_000_000)

    for name in ("lognormal", "mixture", "hard"):
        at_1m = found.get((name, 1_000_000), {})
        trl, mine = (at_1m.get(way, Measured(way)).busy for way in (TRL, OURS))
        ratio = trl / mine if trl and mine else None
        report.target(f"{name}, 1M: times faster than TRL's binning", ratio, least=500.0)
        largest = found.get((name, 10_000_000), {}).get(OURS, Measured(OURS))
        report.target(f"{name}, 10M: seconds", largest.seconds, most=1.0)
        extra = None if largest.extra_bytes is None else largest.extra_bytes / 1e7
        report.target(f"{name}, 10M: bytes per sample", extra, most=40.0)
    report.target("same bins as item by item (1 is yes)", float(same), least=1.0)
    report.target("hard set, optimal: efficiency %", optimal, least=97.5)
    report.close()


if __name__ == "__main__":
    main()
