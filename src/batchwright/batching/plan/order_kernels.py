"""From a place in the length order to the sample that stands there in a given epoch.

Samples are sorted longest first. The order is divided into classes: the buckets, or the
lengths. Every epoch permutes the samples inside each class by a counter-based function, so a
batch is found by following its own positions and nothing else.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import mix, mix_many, permute, permute_many, permute_run, unpermute

__all__ = [
    "cut_by_budget",
    "draw_bins",
    "draw_range",
    "draw_ranges",
    "draw_settled_bins",
    "find_bin",
    "pack_costs",
    "range_costs",
    "range_costs_by_numpy",
    "settle",
    "settle_all",
    "unsettle",
]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@kernel
def settle(position: int, class_offsets: Longs, key: np.uint64) -> int:
    """Where the sample comes from that stands at `position` in the epoch of `key`."""
    which = np.searchsorted(class_offsets, position, side="right") - 1
    low = class_offsets[which]
    size = class_offsets[which + 1] - low
    return low + permute(position - low, size, mix(key, np.uint64(which)))


@kernel
def unsettle(origin: int, class_offsets: Longs, key: np.uint64) -> int:
    """The position at which the sample of `origin` stands: the inverse of `settle`."""
    which = np.searchsorted(class_offsets, origin, side="right") - 1
    low = class_offsets[which]
    size = class_offsets[which + 1] - low
    return low + unpermute(origin - low, size, mix(key, np.uint64(which)))


@kernel
def _length_at(origin: int, distinct_offsets: Longs, low: int, high: int) -> int:
    """Which of the distinct lengths from `low` to before `high` a sample has."""
    while high - low > 1:
        middle = (low + high) // 2
        if distinct_offsets[middle] <= origin:
            low = middle
        else:
            high = middle
    return low


@kernel
def draw_range(
    start: int,
    size: int,
    key: np.uint64,
    class_offsets: Longs,
    items: Ints,
    starts: Ints,
    distinct: Ints,
    distinct_offsets: Longs,
) -> tuple[Ints, Ints, Ints]:
    """Items, starts and lengths of the samples at positions start .. start + size - 1."""
    out_items = np.empty(size, np.int32)
    out_starts = np.zeros(size, np.int32)
    out_lengths = np.empty(size, np.int32)
    order = np.empty(size, np.int64)
    position, end = start, start + size
    which = np.searchsorted(class_offsets, start, side="right") - 1
    while position < end:
        low, high = class_offsets[which], class_offsets[which + 1]
        here = min(end, high) - position
        permute_run(position - low, high - low, mix(key, np.uint64(which)), order[:here])
        longest = np.searchsorted(distinct_offsets, low, side="right") - 1
        shortest = np.searchsorted(distinct_offsets, high - 1, side="right")
        for offset in range(here):
            at, origin = position - start + offset, low + order[offset]
            out_items[at] = items[origin]
            if starts.size:
                out_starts[at] = starts[origin]
            out_lengths[at] = distinct[_length_at(origin, distinct_offsets, longest, shortest)]
        position += here
        which += 1
    return out_items, out_starts, out_lengths


@kernel
def draw_bins(
    first: int,
    count: int,
    bins_key: np.uint64,
    key: np.uint64,
    class_offsets: Longs,
    items: Ints,
    starts: Ints,
    distinct: Ints,
    bin_starts: Longs,
    entry_offsets: Longs,
    entry_position: Longs,
    entry_count: Ints,
    entry_class: Ints,
) -> tuple[Ints, Ints, Ints, Ints]:
    """The samples of `count` packed rows from slot `first` on, and where each row begins."""
    num_bins = bin_starts[-1]
    row_offsets = np.zeros(count + 1, np.int32)
    bins = np.empty(count, np.int64)
    intervals = np.empty(count, np.int64)
    for row in range(count):
        bins[row] = permute(first + row, num_bins, bins_key)
        intervals[row] = np.searchsorted(bin_starts, bins[row], side="right") - 1
        segments = 0
        for entry in range(entry_offsets[intervals[row]], entry_offsets[intervals[row] + 1]):
            segments += entry_count[entry]
        row_offsets[row + 1] = row_offsets[row] + segments
    size = row_offsets[count]
    out_items = np.empty(size, np.int32)
    out_starts = np.zeros(size, np.int32)
    out_lengths = np.empty(size, np.int32)
    at = 0
    for row in range(count):
        inside = bins[row] - bin_starts[intervals[row]]
        for entry in range(entry_offsets[intervals[row]], entry_offsets[intervals[row] + 1]):
            base = entry_position[entry] + inside * entry_count[entry]
            # Classes of a packed layout are the distinct lengths. An entry of an optimal packing
            # may continue into shorter ones.
            which = np.int64(entry_class[entry])
            while base >= class_offsets[which + 1]:
                which += 1
            low = class_offsets[which]
            size = class_offsets[which + 1] - low
            class_key = mix(key, np.uint64(which))
            for position in range(base, base + entry_count[entry]):
                while position >= class_offsets[which + 1]:
                    which += 1
                    low = class_offsets[which]
                    size = class_offsets[which + 1] - low
                    class_key = mix(key, np.uint64(which))
                origin = low + permute(position - low, size, class_key)
                out_items[at] = items[origin]
                if starts.size:
                    out_starts[at] = starts[origin]
                out_lengths[at] = distinct[which]
                at += 1
    return out_items, out_starts, out_lengths, row_offsets


@kernel
def settle_all(class_offsets: Longs, key: np.uint64) -> Ints:
    """`settle` of every position."""
    out = np.empty(class_offsets[-1], np.int32)
    longest = 0
    for which in range(class_offsets.size - 1):
        longest = max(longest, class_offsets[which + 1] - class_offsets[which])
    order = np.empty(longest, np.int64)
    for which in range(class_offsets.size - 1):
        low = class_offsets[which]
        size = class_offsets[which + 1] - low
        permute_run(0, size, mix(key, np.uint64(which)), order[:size])
        for at in range(size):
            out[low + at] = low + order[at]
    return out


@kernel
def draw_ranges(
    first: int,
    stop: int,
    shuffle: bool,
    batches_key: np.uint64,
    key: np.uint64,
    batch_start: Longs,
    batch_size: Ints,
    class_offsets: Longs,
    items: Ints,
    starts: Ints,
    distinct: Ints,
    distinct_offsets: Longs,
) -> tuple[Ints, Ints, Ints, Longs, Longs]:
    """`draw_range` of the padded batches first .. stop - 1; the bounds of each, and its class."""
    count = batch_start.size
    batches = np.empty(stop - first, np.int64)
    classes = np.empty(stop - first, np.int64)
    bounds = np.zeros(stop - first + 1, np.int64)
    largest = 0
    for number in range(stop - first):
        index = first + number
        batch = permute(index, count, batches_key) if shuffle else count - 1 - index
        batches[number] = batch
        bounds[number + 1] = bounds[number] + batch_size[batch]
        largest = max(largest, batch_size[batch])
    size = bounds[-1]
    out_items = np.empty(size, np.int32)
    out_starts = np.zeros(size, np.int32)
    out_lengths = np.empty(size, np.int32)
    # Samples of one class have lengths near each other: only those are searched.
    length_of_class = np.searchsorted(distinct_offsets, class_offsets, side="right") - 1
    # Batches as they stand in the sorted samples, so that what a class reads stays in the cache.
    by_place = np.argsort(batches, kind="mergesort")
    order, own = np.empty(largest, np.int64), np.empty(0, np.int32)
    ready, whole = -1, False
    for nth in range(by_place.size):
        number = by_place[nth]
        position, at = batch_start[batches[number]], bounds[number]
        end = position + batch_size[batches[number]]
        which = np.searchsorted(class_offsets, position, side="right") - 1
        classes[number] = which
        while position < end:
            # As many as are of one class, which is all of them but for a sorted layout.
            low, high = class_offsets[which], class_offsets[which + 1]
            here = min(end, high) - position
            shortest = min(length_of_class[which + 1] + 1, distinct.size)
            if which != ready:
                ready, wanted, after = which, here, nth + 1
                while after < by_place.size and batch_start[batches[by_place[after]]] < high:
                    wanted += batch_size[batches[by_place[after]]]
                    after += 1
                # Where most of a class is wanted, all of it is put in order at once.
                whole = wanted * 2 >= high - low
                if whole:
                    if order.size < high - low:
                        order = np.empty(high - low, np.int64)
                    if own.size < high - low:
                        own = np.empty(high - low, np.int32)
                    permute_run(0, high - low, mix(key, np.uint64(which)), order[: high - low])
                    for length in range(length_of_class[which], shortest):
                        begin = max(low, distinct_offsets[length])
                        for at_length in range(begin, min(high, distinct_offsets[length + 1])):
                            own[at_length - low] = distinct[length]
            if whole:
                run = order[position - low : position - low + here]
                for offset in range(here):
                    out_lengths[at + offset] = own[run[offset]]
            else:
                run = order[:here]
                permute_run(position - low, high - low, mix(key, np.uint64(which)), run)
                for offset in range(here):
                    length = _length_at(
                        low + run[offset], distinct_offsets, length_of_class[which], shortest
                    )
                    out_lengths[at + offset] = distinct[length]
            for offset in range(here):
                out_items[at + offset] = items[low + run[offset]]
            if starts.size:
                for offset in range(here):
                    out_starts[at + offset] = starts[low + run[offset]]
            position += here
            at += here
            which += 1
    return out_items, out_starts, out_lengths, bounds, classes


@kernel
def draw_settled_bins(
    first: int,
    count: int,
    bins_key: np.uint64,
    settled: Ints,
    class_offsets: Longs,
    items: Ints,
    starts: Ints,
    distinct: Ints,
    bin_starts: Longs,
    entry_offsets: Longs,
    entry_position: Longs,
    entry_count: Ints,
    entry_class: Ints,
) -> tuple[Ints, Ints, Ints, Longs]:
    """`draw_bins` where `settle_all` has been done."""
    num_bins = bin_starts[-1]
    row_offsets = np.zeros(count + 1, np.int64)
    bins = np.empty(count, np.int64)
    permute_run(first, num_bins, bins_key, bins)
    intervals = np.searchsorted(bin_starts, bins, side="right") - 1
    for row in range(count):
        segments = 0
        for entry in range(entry_offsets[intervals[row]], entry_offsets[intervals[row] + 1]):
            segments += entry_count[entry]
        row_offsets[row + 1] = row_offsets[row] + segments
    size = row_offsets[count]
    out_items = np.empty(size, np.int32)
    out_starts = np.zeros(size, np.int32)
    out_lengths = np.empty(size, np.int32)
    at = 0
    for row in range(count):
        inside = bins[row] - bin_starts[intervals[row]]
        for entry in range(entry_offsets[intervals[row]], entry_offsets[intervals[row] + 1]):
            base = entry_position[entry] + inside * entry_count[entry]
            which = np.int64(entry_class[entry])
            for position in range(base, base + entry_count[entry]):
                while position >= class_offsets[which + 1]:
                    which += 1
                origin = settled[position]
                out_items[at] = items[origin]
                if starts.size:
                    out_starts[at] = starts[origin]
                out_lengths[at] = distinct[which]
                at += 1
    return out_items, out_starts, out_lengths, row_offsets


@kernel
def find_bin(
    position: int,
    bin_starts: Longs,
    entry_offsets: Longs,
    entry_position: Longs,
    entry_count: Ints,
) -> tuple[int, int]:
    """The bin that holds `position`, and its place among the bin's segments."""
    for interval in range(bin_starts.size - 1):
        bins = bin_starts[interval + 1] - bin_starts[interval]
        before = 0
        for entry in range(entry_offsets[interval], entry_offsets[interval + 1]):
            ahead = position - entry_position[entry]
            count = entry_count[entry]
            if 0 <= ahead < bins * count:
                return bin_starts[interval] + ahead // count, before + ahead % count
            before += count
    return -1, -1


@kernel
def cut_by_budget(widths: Longs, class_offsets: Longs, token_budget: int) -> Longs:
    """Cut positions into runs whose padded size fits `token_budget`.

    `widths[c]` is the width of class c, falling with c. A run is padded to its first, widest
    class, so each run takes as many samples as that width allows: the fewest runs possible.
    """
    total = class_offsets[-1]
    runs = 0
    starts = np.empty(1, np.int64)
    # Counted first, then written: an array for the worst case would hold one run a sample.
    for write in (False, True):
        if write:
            starts = np.empty(runs + 1, np.int64)
        runs = 0
        position = 0
        which = 0
        while position < total:
            while class_offsets[which + 1] <= position:
                which += 1
            if write:
                starts[runs] = position
            runs += 1
            position += max(1, token_budget // widths[which])
    starts[runs] = total
    return starts


@kernel
def range_costs(
    first: int,
    stop: int,
    shuffle: bool,
    batches_key: np.uint64,
    key: np.uint64,
    batch_start: Longs,
    batch_size: Ints,
    class_offsets: Longs,
    class_width: Ints,
    align: int,
    distinct: Ints,
    distinct_offsets: Longs,
    linear: int,
    quadratic: int,
) -> Longs:
    """linear * tokens + quadratic * tokens^2 of padded batches first .. stop - 1 of an epoch."""
    count = batch_start.size
    out = np.empty(stop - first, np.int64)
    for index in range(first, stop):
        batch = permute(index, count, batches_key) if shuffle else count - 1 - index
        start = batch_start[batch]
        which = np.searchsorted(class_offsets, start, side="right") - 1
        width = np.int64(class_width[which])
        if width == 0:
            longest = 0
            for offset in range(batch_size[batch]):
                origin = settle(start + offset, class_offsets, key)
                length_class = np.searchsorted(distinct_offsets, origin, side="right") - 1
                longest = max(longest, distinct[length_class])
            width = np.int64((longest + align - 1) // align * align)
        out[index - first] = batch_size[batch] * (linear * width + quadratic * width * width)
    return out


def range_costs_by_numpy(
    first: int,
    stop: int,
    shuffle: bool,
    batches_key: np.uint64,
    key: np.uint64,
    batch_start: Longs,
    batch_size: Ints,
    class_offsets: Longs,
    class_width: Ints,
    align: int,
    distinct: Ints,
    distinct_offsets: Longs,
    linear: int,
    quadratic: int,
) -> Longs:
    """`range_costs` for as long as numba is not worth loading."""
    batch, count = np.arange(first, stop), np.full(stop - first, batch_start.size)
    if shuffle:
        batch = permute_many(batch, count, np.full(stop - first, batches_key))
    else:
        batch = count - 1 - batch
    start, size = batch_start[batch], batch_size[batch].astype(np.int64)
    width = class_width[np.searchsorted(class_offsets, start, side="right") - 1].astype(np.int64)
    unknown = np.flatnonzero(width == 0)
    if unknown.size:
        ends = np.cumsum(size[unknown])
        begins = ends - size[unknown]
        position = np.repeat(start[unknown] - begins, size[unknown]) + np.arange(ends[-1])
        which = np.searchsorted(class_offsets, position, side="right") - 1
        low, high = class_offsets[which], class_offsets[which + 1]
        keys = mix_many(key, which.astype(np.uint64))
        origin: Longs = permute_many(position - low, high - low, keys) + low
        length = distinct[np.searchsorted(distinct_offsets, origin, side="right") - 1]
        width[unknown] = -(-np.maximum.reduceat(length, begins) // align) * align
    return size * (linear * width + quadratic * width * width)


@kernel
def pack_costs(
    first: int,
    stop: int,
    rows: int,
    width: int,
    bins_key: np.uint64,
    class_offsets: Longs,
    distinct: Ints,
    bin_starts: Longs,
    entry_offsets: Longs,
    entry_position: Longs,
    entry_count: Ints,
    linear: int,
    quadratic: int,
) -> Longs:
    """linear * width + quadratic * sum of length^2 over the rows of packed batches."""
    num_bins = bin_starts[-1]
    out = np.zeros(stop - first, np.int64)
    for index in range(first, stop):
        for slot in range(index * rows, min((index + 1) * rows, num_bins)):
            bin_ = permute(slot, num_bins, bins_key)
            interval = np.searchsorted(bin_starts, bin_, side="right") - 1
            inside = bin_ - bin_starts[interval]
            out[index - first] += linear * width
            for entry in range(entry_offsets[interval], entry_offsets[interval + 1]):
                position = entry_position[entry] + inside * entry_count[entry]
                left = np.int64(entry_count[entry])
                which = np.searchsorted(class_offsets, position, side="right") - 1
                while left > 0:
                    # As many as have this length; optimal packing may continue with shorter ones.
                    here = min(left, class_offsets[which + 1] - position)
                    length = np.int64(distinct[which])
                    out[index - first] += quadratic * here * length * length
                    left -= here
                    position += here
                    which += 1
    return out
