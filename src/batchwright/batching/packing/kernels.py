"""Packing on arrays: the numba kernels under `packing` and `optimal`.

Nothing here knows about samples. Lengths are int32 and already validated, a histogram is int64
with `hist[l]` items of length `l`, and a *position* is an item's rank when the longest come first.
Every kernel has a plain-Python twin in the tests that it must equal.
"""

import numpy as np
from numpy.typing import NDArray

from batchwright.jit import kernel
from batchwright.permutation import below

__all__ = [
    "best_fit",
    "best_fit_decreasing",
    "bitset",
    "bitset_add",
    "bitset_discard",
    "bitset_next",
    "expand",
    "first_fit",
    "gather",
    "histogram",
    "lower_bounds",
    "random_rows",
    "sort_descending",
    "spread",
    "stir",
]

UNLIMITED = 2**31 - 1
"""Stands for no `max_segments`: a bin never holds this many items."""

TRIES = 8
"""Pairs that `random_rows` looks at to fill a row to the last token."""

_FEW = 1 << 16
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_LOWEST = np.zeros(64, np.int64)
for _bit in range(64):
    _LOWEST[((0x03F79D71B4CB0A89 << _bit) & (2**64 - 1)) >> 58] = _bit


@kernel
def histogram(lengths: NDArray[np.int32], longest: int) -> NDArray[np.int64]:
    """How many items have each length, shape [longest + 1]."""
    counts = np.zeros(longest + 1, np.int64)
    if longest >= _FEW:
        for i in range(lengths.size):
            counts[lengths[i]] += 1
        return counts
    # Four tables, because a run of equal lengths would wait on the same counter.
    b, c, d = np.zeros_like(counts), np.zeros_like(counts), np.zeros_like(counts)
    even = lengths.size & ~3
    for i in range(0, even, 4):
        counts[lengths[i]] += 1
        b[lengths[i + 1]] += 1
        c[lengths[i + 2]] += 1
        d[lengths[i + 3]] += 1
    for i in range(even, lengths.size):
        counts[lengths[i]] += 1
    return counts + b + c + d


@kernel
def sort_descending(lengths: NDArray[np.int32], hist: NDArray[np.int64]) -> NDArray[np.int32]:
    """Items with the longest first; equal lengths keep their order."""
    cursor = np.empty(hist.size, np.int64)
    position = 0
    for length in range(hist.size - 1, -1, -1):
        cursor[length] = position
        position += hist[length]
    order = np.empty(lengths.size, np.int32)
    for item in range(lengths.size):
        length = lengths[item]
        order[cursor[length]] = item
        cursor[length] += 1
    return order


@kernel
def bitset(capacity: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """An empty set of numbers in [0, capacity] and where each of its levels starts.

    A bit of level k + 1 says that a word of level k is not zero, so the next member of any
    capacity is found in a handful of words (four levels reach 2**24).
    """
    base = np.zeros(8, np.int64)
    levels, words, size = 0, 0, capacity + 1
    while size > 1 or levels == 0:
        size = (size + 63) >> 6
        words += size
        levels += 1
        base[levels] = words
    return np.zeros(words, np.uint64), base[: levels + 1].copy()


@kernel
def bitset_add(words: NDArray[np.uint64], base: NDArray[np.int64], value: int) -> None:
    """Put `value` in the set."""
    for level in range(base.size - 1):
        words[base[level] + (value >> 6)] |= np.uint64(1) << np.uint64(value & 63)
        value >>= 6


@kernel
def bitset_discard(words: NDArray[np.uint64], base: NDArray[np.int64], value: int) -> None:
    """Take `value` out of the set."""
    for level in range(base.size - 1):
        word = base[level] + (value >> 6)
        words[word] &= ~(np.uint64(1) << np.uint64(value & 63))
        if words[word] != np.uint64(0):
            return
        value >>= 6


@kernel
def _lowest(word: np.uint64) -> int:
    """The number of the lowest bit set."""
    return int(_LOWEST[((word & (~word + np.uint64(1))) * _DE_BRUIJN) >> np.uint64(58)])


@kernel
def bitset_next(words: NDArray[np.uint64], base: NDArray[np.int64], value: int) -> int:
    """The smallest member that is `value` or more, or -1."""
    for level in range(base.size - 1):
        word = value >> 6
        if word >= base[level + 1] - base[level]:
            return -1
        rest = words[base[level] + word] >> np.uint64(value & 63)
        if rest != np.uint64(0):
            value += _lowest(rest)
            for below in range(level - 1, -1, -1):
                value = (value << 6) + _lowest(words[base[below] + value])
            return value
        value = word + 1
    return -1


@kernel
def _grown(rows: NDArray[np.int64], used: int) -> NDArray[np.int64]:
    """`rows` with space for one more after `used`."""
    if used < rows.shape[0]:
        return rows
    wider = np.empty((2 * rows.shape[0], rows.shape[1]), np.int64)
    for row in range(used):
        for column in range(rows.shape[1]):
            wider[row, column] = rows[row, column]
    return wider


@kernel
def best_fit_decreasing(
    hist: NDArray[np.int64], capacity: int, max_segments: int, opened: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Best-fit-decreasing on a histogram, as steps (first bin, bins, items per bin).

    Steps take positions in order: step j gives its first bin the next `items per bin` positions,
    its second bin the following ones, and so on. In best fit a bin that took an item of length l
    and still has space for another is the tightest one for it, so equal items fill bin after bin
    and whole ranges of equal bins are filled in one step. The cost depends on the shape of the
    histogram only. Among equally tight bins those changed last go first.

    `opened` lists bins that are there already, in ranges (first bin, bins, items in each, free
    space of each) that end where the new bins begin.
    """
    steps = np.empty((1024, 3), np.int64)
    groups = np.empty((1024, 4), np.int64)  # first bin, bins, items in each, next in the stack
    used_steps, used_groups, unused, bins = 0, 0, -1, 0
    top = np.full(capacity + 1, -1, np.int32)  # by free space: the stack of groups that have it
    words, base = bitset(capacity)
    for j in range(opened.shape[0]):
        bins = max(bins, opened[j, 0] + opened[j, 1])
        free = opened[j, 3]
        if free > 0 and opened[j, 2] < max_segments:
            groups = _grown(groups, used_groups)
            for column in range(3):
                groups[used_groups, column] = opened[j, column]
            groups[used_groups, 3] = top[free]
            bitset_add(words, base, free)
            top[free] = used_groups
            used_groups += 1
    for length in range(min(capacity, hist.size - 1), 0, -1):
        left = hist[length]
        while left > 0:
            steps = _grown(steps, used_steps)
            groups = _grown(groups, used_groups)
            free = bitset_next(words, base, length)
            group = top[free] if free >= 0 else -1
            held = groups[group, 2] if group >= 0 else 0
            if free < 0:
                free = capacity
            each = min(free // length, max_segments - held, left)
            count = left // each
            if group < 0:
                first = bins
                bins += count
            else:
                first = groups[group, 0]
                if count < groups[group, 1]:
                    groups[group, 0] += count
                    groups[group, 1] -= count
                else:
                    count = groups[group, 1]
                    top[free] = groups[group, 3]
                    if top[free] < 0:
                        bitset_discard(words, base, free)
                    groups[group, 3] = unused
                    unused = group
            steps[used_steps, 0], steps[used_steps, 1], steps[used_steps, 2] = first, count, each
            used_steps += 1
            left -= count * each
            free -= each * length
            if free > 0 and held + each < max_segments:
                group = unused
                if group >= 0:
                    unused = groups[group, 3]
                else:
                    group = used_groups
                    used_groups += 1
                if top[free] < 0:
                    bitset_add(words, base, free)
                groups[group, 0], groups[group, 1] = first, count
                groups[group, 2], groups[group, 3] = held + each, top[free]
                top[free] = group
    return steps[:used_steps].copy()


@kernel
def spread(
    bin_starts: NDArray[np.int64],
    steps: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    position: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Steps as entries of the intervals [first, last) they cover, from their `position` on."""
    offsets = np.zeros(bin_starts.size, np.int64)
    for j in range(steps.shape[0]):
        for i in range(first[j], last[j]):
            offsets[i + 1] += 1
    for i in range(1, offsets.size):
        offsets[i] += offsets[i - 1]
    cursor = offsets.copy()
    positions = np.empty(offsets[-1], np.int64)
    counts = np.empty(offsets[-1], np.int32)
    for j in range(steps.shape[0]):
        for i in range(first[j], last[j]):
            positions[cursor[i]] = position[j] + (bin_starts[i] - steps[j, 0]) * steps[j, 2]
            counts[cursor[i]] = steps[j, 2]
            cursor[i] += 1
    return offsets, positions, counts


@kernel
def expand(
    bin_starts: NDArray[np.int64],
    entry_offsets: NDArray[np.int64],
    entry_position: NDArray[np.int64],
    entry_count: NDArray[np.int32],
    order: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Every bin written out: bin b holds `items[offsets[b]:offsets[b + 1]]`."""
    offsets = np.empty(bin_starts[-1] + 1, np.int64)
    items = np.empty(order.size, np.int32)
    offsets[0] = 0
    written = 0
    for interval in range(bin_starts.size - 1):
        for b in range(bin_starts[interval], bin_starts[interval + 1]):
            shift = b - bin_starts[interval]
            for e in range(entry_offsets[interval], entry_offsets[interval + 1]):
                position = entry_position[e] + shift * entry_count[e]
                for j in range(entry_count[e]):
                    items[written] = order[position + j]
                    written += 1
            offsets[b + 1] = written
    return offsets, items


@kernel
def best_fit(
    lengths: NDArray[np.int32], capacity: int, max_segments: int
) -> tuple[NDArray[np.int32], int]:
    """The bin of each item, taken in order: the tightest that fits, of equals the last changed."""
    bins = 0
    bin_of = np.empty(lengths.size, np.int32)
    below = np.empty(lengths.size, np.int32)  # of a bin: the next one in its stack
    held = np.zeros(lengths.size if max_segments < lengths.size else 1, np.int32)
    top = np.full(capacity + 1, -1, np.int32)
    words, base = bitset(capacity)
    for i in range(lengths.size):
        length = int(lengths[i])
        free = bitset_next(words, base, length)
        if free < 0:
            number = bins
            bins += 1
            free = capacity
        else:
            number = int(top[free])
            top[free] = below[number]
            if top[free] < 0:
                bitset_discard(words, base, free)
        bin_of[i] = number
        free -= length
        if max_segments < lengths.size:
            held[number] += 1
            if held[number] == max_segments:
                continue
        if free > 0:
            if top[free] < 0:
                bitset_add(words, base, free)
            below[number] = top[free]
            top[free] = number
    return bin_of, bins


@kernel
def first_fit(
    lengths: NDArray[np.int32], capacity: int, max_segments: int, most_bins: int
) -> tuple[NDArray[np.int32], int]:
    """The bin of each item, taken in order: the first that fits, found in a tree of free spaces."""
    size = 1
    while size < most_bins:
        size <<= 1
    free = np.zeros(2 * size, np.int32)  # node k has children 2k and 2k + 1; leaves are bins
    held = np.zeros(size, np.int32)
    bin_of = np.empty(lengths.size, np.int32)
    bins = 0
    for i in range(lengths.size):
        length = lengths[i]
        if free[1] < length:
            node = size + bins
            bins += 1
            free[node] = capacity
        else:
            node = 1
            while node < size:
                node <<= 1
                if free[node] < length:
                    node += 1
        number = node - size
        bin_of[i] = number
        held[number] += 1
        free[node] -= length
        if held[number] == max_segments:
            free[node] = 0
        node >>= 1
        while node >= 1:
            widest = max(free[2 * node], free[2 * node + 1])
            if free[node] == widest:
                break
            free[node] = widest
            node >>= 1
    return bin_of, bins


@kernel
def gather(bin_of: NDArray[np.int32], bins: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Bins as lists: `items[offsets[b]:offsets[b + 1]]` are those of bin b, in order."""
    offsets = np.zeros(bins + 1, np.int64)
    for i in range(bin_of.size):
        offsets[bin_of[i] + 1] += 1
    for b in range(bins):
        offsets[b + 1] += offsets[b]
    cursor = offsets.copy()
    items = np.empty(bin_of.size, np.int32)
    for i in range(bin_of.size):
        items[cursor[bin_of[i]]] = i
        cursor[bin_of[i]] += 1
    return offsets, items


@kernel
def lower_bounds(hist: NDArray[np.int64], capacity: int) -> tuple[int, int]:
    """Two numbers of bins that no packing can beat: L1 by volume, L2 by Martello and Toth.

    L2 looks at every threshold a: items over capacity - a are alone in their bins, items over half
    never share one, and what the rest (a and longer) cannot fit next to them needs bins of its own.
    """
    count = np.zeros(capacity + 2, np.int64)
    volume = np.zeros(capacity + 2, np.int64)
    for length in range(capacity + 1):
        items = hist[length] if length < hist.size else 0
        count[length + 1] = count[length] + items
        volume[length + 1] = volume[length] + items * length
    l1 = (volume[capacity + 1] + capacity - 1) // capacity
    l2 = l1
    half = capacity // 2
    for a in range(half + 1):
        alone = count[capacity + 1] - count[capacity - a + 1]
        large = count[capacity - a + 1] - count[half + 1]
        beside = large * capacity - (volume[capacity - a + 1] - volume[half + 1])
        rest = max(volume[half + 1] - volume[a] - beside, 0)
        l2 = max(l2, alone + large + (rest + capacity - 1) // capacity)
    return l1, l2


@kernel
def random_rows(
    sizes: NDArray[np.int32],
    counts: NDArray[np.int64],
    capacity: int,
    max_segments: int,
    most_rows: int,
    draws: int,
    key: np.uint64,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rows of random items, filled to the last token: offsets of the rows, and classes of items.

    There are `counts[c]` items of size `sizes[c]`, the longest class first. A row begins with the
    longest item that is left, because later ones fit anywhere. Random items that fit follow, each
    the longest of `draws` draws; the last two are the pair that leaves least free, of `TRIES`.
    More draws save short items for the end, where they fill what is left, but mix less.

    Two empty arrays if it would take more than `most_rows` rows.
    """
    classes = sizes.size
    left = counts.copy()
    tree = _tree(left)
    total, tokens = 0, 0
    for c in range(classes):
        total += counts[c]
        tokens += counts[c] * sizes[c]
    spare = most_rows * capacity - tokens
    row_offsets = np.zeros(most_rows + 1, np.int64)
    items = np.empty(total, np.int32)
    at, rows, drawn, longest = 0, 0, 0, 0
    while at < total:
        while left[longest] == 0:
            longest += 1
        free = capacity
        room = max_segments
        x, y = longest, -1
        while x >= 0:
            for c in (x, y):
                if c >= 0:
                    items[at] = c
                    at += 1
                    left[c] -= 1
                    _tree_take(tree, c)
                    free -= sizes[c]
                    room -= 1
            x, y = -1, -1
            first = _first_fitting(sizes, free) if room > 0 else classes
            before = total - at if first == classes else _tree_sum(tree, first)
            fitting = total - at - before
            best = capacity + 1
            for _ in range(TRIES if fitting > 0 else 0):
                rank = fitting
                for _ in range(draws):
                    drawn += 1
                    rank = min(rank, below(key, drawn, fitting))
                one = _tree_find(tree, before + rank)
                rest = free - sizes[one]
                if room == 1 or (best > capacity and 4 * rest >= capacity):
                    # The row is far from full: no need to look for its last item yet.
                    x, y = one, -1
                    break
                two = _longest_left(tree, left, sizes, rest, one, total - at)
                waste = rest - (sizes[two] if two >= 0 else 0)
                if waste < best:
                    best, x, y = waste, one, two
                if waste == 0:
                    break
        rows += 1
        spare -= free
        if spare < 0 or (rows == most_rows and at < total):
            return np.empty(0, np.int64), np.empty(0, np.int32)
        row_offsets[rows] = at
    return row_offsets[: rows + 1].copy(), items


@kernel
def stir(
    sizes: NDArray[np.int32],
    row_of: NDArray[np.int32],
    rows: int,
    capacity: int,
    tries: int,
    key: np.uint64,
) -> None:
    """Exchange items between rows at random, in place; every row stays in its capacity.

    Item i, the longest first, has size `sizes[i]` and is in row `row_of[i]`. In each of `tries` an
    item of a row with tokens to spare gives its place to one that is longer by no more than those.
    """
    items = sizes.size
    free = np.full(rows, capacity, np.int64)
    longer = np.zeros(capacity + 1, np.int64)  # how many items are longer than each size
    for item in range(items):
        free[row_of[item]] -= sizes[item]
        if sizes[item] > 0:
            longer[sizes[item] - 1] += 1
    for size in range(capacity - 1, -1, -1):
        longer[size] += longer[size + 1]
    for attempt in range(tries):
        short = below(key, 2 * attempt, items)
        row = row_of[short]
        if free[row] == 0:
            continue
        first = longer[min(capacity, sizes[short] + free[row])]
        stop = longer[sizes[short]]
        if first == stop:
            continue
        long = first + below(key, 2 * attempt + 1, stop - first)
        other = row_of[long]
        more = sizes[long] - sizes[short]
        free[row] -= more
        free[other] += more
        row_of[long], row_of[short] = row, other


@kernel
def _longest_left(
    tree: NDArray[np.int64],
    left: NDArray[np.int64],
    sizes: NDArray[np.int32],
    free: int,
    taken: int,
    total: int,
) -> int:
    """The longest class that fits `free` and has an item besides the `taken` one, or -1."""
    first = _first_fitting(sizes, free)
    if first == sizes.size:
        return -1
    before = _tree_sum(tree, first)
    if before == total:
        return -1
    found = _tree_find(tree, before)
    if found == taken and left[taken] == 1:
        return -1 if before + 1 == total else _tree_find(tree, before + 1)
    return found


@kernel
def _first_fitting(sizes: NDArray[np.int32], free: int) -> int:
    """The first of falling `sizes` that is at most `free`."""
    low, high = 0, sizes.size
    while low < high:
        middle = (low + high) // 2
        if sizes[middle] > free:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _tree(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """A Fenwick tree: sums of `counts` whose updates and searches take logarithmic time."""
    tree = np.zeros(counts.size + 1, np.int64)
    for i in range(1, tree.size):
        tree[i] += counts[i - 1]
        parent = i + (i & -i)
        if parent < tree.size:
            tree[parent] += tree[i]
    return tree


@kernel
def _tree_take(tree: NDArray[np.int64], c: int) -> None:
    """One less in class `c`."""
    i = c + 1
    while i < tree.size:
        tree[i] -= 1
        i += i & -i


@kernel
def _tree_sum(tree: NDArray[np.int64], c: int) -> int:
    """Items in the classes before `c`."""
    found = 0
    while c > 0:
        found += tree[c]
        c -= c & -c
    return found


@kernel
def _tree_find(tree: NDArray[np.int64], rank: int) -> int:
    """The class of item `rank`, counted class by class."""
    step = 1
    while 2 * step < tree.size:
        step *= 2
    c = 0
    while step > 0:
        if c + step < tree.size and tree[c + step] <= rank:
            c += step
            rank -= tree[c]
        step >>= 1
    return c
