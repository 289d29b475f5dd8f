"""Mixing: how many pairs of samples stay together from epoch to epoch, and how full batches are.

A pair are two samples of one packed row, or of one padded batch. `kept` are the pairs that two
epochs share, in the mean of all pairs of epochs. `random` is what would be kept if as many pairs
were drawn without regard to lengths: pairs * pairs / all pairs there are. `at least` is a bound
for packed rows: whatever the way to draw epochs independently of each other, with no more rows
than this they share as many pairs in the mean, because few samples fit beside a long one
(`least_kept`). Random rows of the same fullness keep no less than the larger of the two; how much
they keep is seen by exchanging samples of our rows at random for long.
`useful %` are the tokens of samples in the padded matrices, `rows` the packed rows of an epoch,
`s` the seconds in which the batches of an epoch are made.

The orders of others are their rules, written down here in a few lines, for they come with whole
training stacks. Each says what it does:

    MosaicML      samples shuffled anew every epoch, then llm-foundry's `BinPackCollator`
    fairseq       `LanguagePairDataset.ordered_indices`, `batch_by_size`, shuffled batches
    transformers  `LengthGroupedSampler`: windows of 50 batches, each sorted by length
"""

import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching import BatchingConfig, BatchPlanBuilder, pack_lengths
from batchwright.batching.packing import kernels
from batchwright.rng import stream
from common import CAPACITY, Report, arguments, data_folder, lengths_of
from peers import mosaic_streaming

BUDGET = 8192
EPOCHS = 5
EXCHANGES = 1000
Lengths = NDArray[np.int32]
Epoch = list[NDArray[np.int64]]
"""Samples that stand together: of each packed row or of each padded batch."""


def pairs_of(epoch: Epoch, n: int) -> NDArray[np.int64]:
    """All pairs of an epoch as sorted numbers."""
    found = []
    for together in epoch:
        ordered = np.sort(together)
        left, right = np.triu_indices(len(ordered), 1)
        found.append(ordered[left].astype(np.int64) * n + ordered[right])
    return np.sort(np.concatenate(found))


def ours(layout: str, lengths: Lengths) -> Callable[[int], Epoch]:
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout=layout, token_budget=BUDGET)).build(1)

    def epoch(number: int) -> Epoch:
        if layout != "packed":
            return [batch.items for batch in plan.iter_epoch(number)]
        return [
            row
            for batch in plan.iter_epoch(number)
            for row in np.split(batch.items, batch.row_offsets[1:-1])
        ]

    return epoch


def random_best_fit(lengths: Lengths) -> Callable[[int], Epoch]:
    """Every epoch packs its own shuffle by best fit: random rows, at the fullness they have."""

    def epoch(number: int) -> Epoch:
        order = stream(1, "benchmark/random", number).permutation(len(lengths))
        packing = pack_lengths(lengths[order], CAPACITY, "best_fit")
        return [order[row] for row in np.split(packing.items, packing.offsets[1:-1])]

    return epoch


def exchanged(lengths: Lengths) -> Callable[[int], Epoch]:
    """Our rows, then samples exchanged at random between them, `EXCHANGES` tries a sample.

    Random pairing at the fullness of our rows: what they were drawn by is forgotten on the way.
    """
    made = ours("packed", lengths)
    falling = np.argsort(-lengths, kind="stable")
    place = np.argsort(falling, kind="stable")

    def epoch(number: int) -> Epoch:
        rows = made(number)
        row_of = np.empty(len(lengths), np.int32)
        row_of[place[np.concatenate(rows)]] = np.repeat(np.arange(len(rows)), [*map(len, rows)])
        key = np.uint64(stream(1, "benchmark/exchanged", number).integers(2**63))
        tries = EXCHANGES * len(lengths)
        kernels.stir(lengths[falling], row_of, len(rows), CAPACITY, tries, key)
        offsets, items = kernels.gather(row_of, len(rows))
        return [falling[row] for row in np.split(items, offsets[1:-1])]

    return epoch


def mosaic_order(n: int) -> Callable[[int], NDArray[np.int64]]:
    """The order of an epoch that MosaicML Streaming makes of one shard on one node."""
    mosaic_streaming()
    from streaming.base.shuffle import get_shuffle

    shards = np.array([n], np.int64)
    return lambda number: np.asarray(get_shuffle("py1e", shards, 1, 1, number))


def mosaic(lengths: Lengths) -> Callable[[int], Epoch]:
    """Streaming's order; each batch of it is packed by first fit, longest first.

    `BinPackCollator` takes `packing_ratio` times as many samples as a batch has rows, sorts them
    by length, puts each into the first row with space, which then goes to the end of the list,
    gives out the fullest rows and carries the others over. It may drop rows that are left over;
    here all are kept. The ratio is the mean number of samples that fit a row.
    """
    rows = BUDGET // CAPACITY
    take = max(1, int(rows * CAPACITY / lengths.mean()))
    ordered = mosaic_order(len(lengths))

    def epoch(number: int) -> Epoch:
        order = ordered(number)
        made: Epoch = []
        carried: list[tuple[int, list[int]]] = []
        for first in range(0, len(order), take):
            chosen = order[first : first + take]
            for item in chosen[np.argsort(-lengths[chosen], kind="stable")].tolist():
                length = int(lengths[item])
                for at, (free, row) in enumerate(carried):
                    if free >= length:
                        row.append(item)
                        carried.append((free - length, carried.pop(at)[1]))
                        break
                else:
                    carried.append((CAPACITY - length, [item]))
            carried.sort(key=lambda entry: entry[0])
            made += [np.array(row) for _, row in carried[:rows]]
            carried = carried[rows:]
        return made + [np.array(row) for _, row in carried]

    return epoch


def has_mosaic(report: Report) -> bool:
    try:
        mosaic_order(2)
    except ImportError as error:
        report.not_measured("MosaicML", str(error))
    return "MosaicML" not in report.missing


def cut(order: NDArray[np.int64], lengths: Lengths) -> Iterator[NDArray[np.int64]]:
    """Batches of samples in order, each as large as the budget of padded tokens allows."""
    first, widest = 0, 0
    for at, length in enumerate(lengths[order].tolist()):
        if max(widest, length) * (at - first + 1) > BUDGET:
            yield order[first:at]
            first, widest = at, 0
        widest = max(widest, length)
    yield order[first:]


def fairseq(lengths: Lengths) -> Callable[[int], Epoch]:
    """Shuffled once, sorted by length without moving equals, cut by the budget; fixed batches.

    fairseq makes its batches once and shuffles the batches every epoch (`EpochBatchIterator`).
    """
    order = stream(1, "benchmark/fairseq").permutation(len(lengths))
    batches = list(cut(order[np.argsort(lengths[order], kind="stable")], lengths))
    return lambda number: batches


def grouped_by_length(lengths: Lengths) -> Callable[[int], Epoch]:
    """Shuffled; windows of 50 batches are sorted by length and cut by the budget."""
    window = 50 * max(1, int(BUDGET / lengths.mean()))

    def epoch(number: int) -> Epoch:
        order = stream(1, "benchmark/windows", number).permutation(len(lengths))
        parts = [order[at : at + window] for at in range(0, len(order), window)]
        return [
            batch
            for part in parts
            for batch in cut(part[np.argsort(-lengths[part], kind="stable")], lengths)
        ]

    return epoch


def jittered(lengths: Lengths, wanted: float) -> Callable[[int], Epoch]:
    """Sorted by length and noise, as much noise as keeps `wanted` of the tokens useful.

    Random pairing at a given fullness, for padded batches: nothing but near neighbours fits.
    """

    def with_noise(share: float) -> Callable[[int], Epoch]:
        def epoch(number: int) -> Epoch:
            random = stream(1, "benchmark/jitter", number)
            key = lengths * (1 + share * random.random(len(lengths)))
            return list(cut(np.argsort(-key, kind="stable"), lengths))

        return epoch

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        full = useful(with_noise(middle)(0), lengths, packed=False)
        low, high = (middle, high) if full >= wanted else (low, middle)
    return with_noise(low)


def useful(epoch: Epoch, lengths: Lengths, packed: bool) -> float:
    if packed:
        return float(lengths.sum() / (len(epoch) * CAPACITY))
    return float(lengths.sum() / sum(int(lengths[b].max()) * len(b) for b in epoch))


def measured(make: Callable[[int], Epoch], lengths: Lengths, packed: bool) -> dict[str, Any]:
    n = len(lengths)
    make(0)  # what is compiled or loaded once
    start = time.perf_counter()
    epochs = [make(number) for number in range(1, EPOCHS + 1)]
    seconds = (time.perf_counter() - start) / EPOCHS
    for epoch in epochs:
        assert np.array_equal(np.sort(np.concatenate(epoch)), np.arange(n))
        assert not packed or max(int(lengths[row].sum()) for row in epoch) <= CAPACITY
    pairs = [pairs_of(epoch, n) for epoch in epochs]
    both = list(combinations(pairs, 2))
    kept = [len(np.intersect1d(a, b, assume_unique=True)) for a, b in both]
    random = [len(a) * len(b) / (n * (n - 1) / 2) for a, b in both]
    rows = float(np.mean([len(epoch) for epoch in epochs]))
    return {
        "pairs": float(np.mean([len(p) for p in pairs])),
        "kept": float(np.mean(kept)),
        "random": float(np.mean(random)),
        "useful": float(np.mean([100 * useful(epoch, lengths, packed) for epoch in epochs])),
        "rows": rows,
        "least": least_kept(lengths, rows) if packed else None,
        "seconds": seconds,
    }


def least_kept(lengths: Lengths, rows: float) -> float:
    """Pairs that two epochs share at least, in the mean, if they have no more than `rows` rows.

    Let P[i, k] be the probability that i and k share a row; two independent epochs share the sum
    of P squared over all pairs. Whatever is drawn, the others of its row fill what a sample leaves
    but for the waste: sum over k of l[k] P[i, k] = C - l[i] - w[i], where the sum of l[i] w[i] is
    at most C times the waste of all rows. By Cauchy and Schwarz the sum of P[i, k] squared is at
    least (C - l[i] - w[i])^2 over the sum of l[k]^2 of what fits beside i. A pair counts for both
    of its samples: by halves, or for a long one by `share` and for the short one by the rest.
    The waste goes where it makes the bound least.
    """
    size = np.sort(lengths).astype(np.float64)
    gap = CAPACITY - size
    short = int(np.searchsorted(size, CAPACITY / 2, "right"))
    fitting = np.searchsorted(size, gap, "right")
    squares = np.concatenate(([0.0], np.cumsum(size**2)))
    waste = CAPACITY * (rows * CAPACITY - size.sum())
    best = 0.0
    for share in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        weight = squares[fitting] / share
        shorts = np.minimum(fitting[:short], short)
        itself = np.where(np.arange(short) < shorts, size[:short] ** 2, 0.0)
        weight[:short] = 2 * (squares[shorts] - itself)
        weight[:short] += (squares[fitting[:short]] - squares[shorts]) / (1 - share)
        some = weight > 0
        # A sample beside which nothing fits wastes all of its gap.
        left = waste - float(size[~some] @ gap[~some])
        gaps, weights, sizes = gap[some], weight[some], size[some]
        low, high = 0.0, float((gaps / (sizes * weights)).max())
        for _ in range(100):
            middle = (low + high) / 2
            filled = np.minimum(gaps, middle * sizes * weights)
            low, high = (middle, high) if sizes @ (gaps - filled) > left else (low, middle)
        filled = np.minimum(gaps, low * sizes * weights)
        best = max(best, float((filled**2 / weights).sum()))
    return best


def compare(report: Report, name: str, lengths: Lengths) -> None:
    fewest = pack_lengths(lengths, CAPACITY).num_bins
    sorted_full = useful(ours("sorted", lengths)(0), lengths, packed=False)
    ways: list[tuple[str, bool, Callable[[int], Epoch]]] = [
        ("batchwright packed", True, ours("packed", lengths)),
        ("exchanged at random for long", True, exchanged(lengths)),
        ("random order, best fit", True, random_best_fit(lengths)),
        *((("MosaicML", True, mosaic(lengths)),) if has_mosaic(report) else ()),
        ("batchwright sorted", False, ours("sorted", lengths)),
        ("random at the same fullness", False, jittered(lengths, sorted_full)),
        ("fairseq's rule", False, fairseq(lengths)),
        ("transformers' group_by_length", False, grouped_by_length(lengths)),
        ("batchwright bucketed", False, ours("bucketed", lengths)),
    ]
    rows, found = [], {}
    for way, packed, make in ways:
        got = found[way] = measured(make, lengths, packed)
        share = 100 * got["kept"] / got["pairs"]
        ratio = got["kept"] / got["random"]
        rows.append(
            [
                *(way, got["pairs"], got["kept"], share, got["random"], ratio, got["least"]),
                *(got["useful"], got["rows"], got["seconds"]),
            ]
        )
    columns = ("", "pairs", "kept", "kept %", "random", "x random", "at least")
    columns += ("useful %", "rows or batches")
    title = f"{name}, {len(lengths):,} samples, best-fit-decreasing takes {fewest:,} rows"
    report.table(title, (*columns, "s"), rows)
    label = f"{name}, {len(lengths):,}"
    packed_ours, sorted_ours = found["batchwright packed"], found["batchwright sorted"]
    at_same = found["random at the same fullness"]
    long_exchanged = found["exchanged at random for long"]
    report.target(
        f"{label}: packed, kept over random at the same fullness",
        packed_ours["kept"]
        / max(packed_ours["random"], packed_ours["least"], long_exchanged["kept"]),
        most=2.0,
    )
    report.target(
        f"{label}: packed, rows over best fit, %", 100 * packed_ours["rows"] / fewest, most=100.1
    )
    report.target(
        f"{label}: sorted, kept over random at the same fullness",
        sorted_ours["kept"] / at_same["kept"],
        most=2.0,
    )


def text_lengths(path: Path) -> Lengths:
    """Bytes of questions and answers, a real set."""
    import json

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sizes = [len((row["question"] + row["answer"]).encode()) for row in rows]
    return np.clip(sizes, 1, CAPACITY).astype(np.int32)


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("mixing", args)
    for name in ("lognormal", "mixture", "hard"):
        # The largest is drawn as slots of several samples.
        for n in [1000] if args.quick else [1000, 10_000, 100_000]:
            compare(report, name, lengths_of(name, n))
    text = data_folder() / "text" / "gsm8k_train.jsonl"
    if text.exists():
        compare(report, "GSM8K", text_lengths(text)[:1000])
        if not args.quick:
            compare(report, "GSM8K", text_lengths(text))
    else:
        report.not_measured("GSM8K", f"{text} is not there")
    report.close()


if __name__ == "__main__":
    main()
