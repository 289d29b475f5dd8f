"""Sample ids as two arrays, offsets and bytes.

Ten million Python strings take most of a gigabyte; the same ids here take their own bytes and
eight more each. Ids that are just the row numbers "0", "1", ... take nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, BadRow, UnknownSample
from batchwright.fingerprint import digest, digest_array
from batchwright.jit import kernel, quicker_without_numba
from batchwright.permutation import mix, mix_many

__all__ = ["Ids"]

Offsets = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SEED = np.uint64(0x6A09E667F3BCC908)
"""The first 64 bits of sqrt(2); any constant would do, but it must never change."""


class Ids:
    """An immutable list of string ids, looked up by position or by id.

    Row numbers are recognised however the ids are made, so equal ids have the same
    representation, digest and keys.

    >>> ids = Ids.of(["a", "b", "c"])
    >>> ids[1], ids.find("c"), len(ids)
    ('b', 2, 3)
    >>> Ids.of(["0", "1"]) == Ids.numbered(2)
    True
    """

    __slots__ = ("_held", "_index", "_keys", "_n", "_prove")

    def __init__(self, n: int, arrays: tuple[Offsets, Bytes] | None) -> None:
        self._n = n
        self._held = arrays
        self._prove: Callable[[], None] | None = None
        self._keys: NDArray[np.uint64] | None = None
        self._index: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None

    @classmethod
    def numbered(cls, n: int) -> "Ids":
        """The ids "0" to str(n - 1), with no storage."""
        return cls(n, None)

    @classmethod
    def of(cls, ids: Iterable[str]) -> "Ids":
        """The given ids, in order; they may repeat (see `first_duplicate`)."""
        return cls.of_blocks([ids])

    @classmethod
    def of_blocks(cls, blocks: Iterable[Iterable[str]]) -> "Ids":
        """The ids of all blocks, which never stand in memory as strings all together."""
        sizes, raw = [np.zeros(1, np.int64)], []
        for block in blocks:
            texts: Sequence[str | bytes] = [*block]
            joined = "".join(texts)  # type: ignore[arg-type]
            if joined.isascii():
                raw.append(joined.encode())
            else:
                texts = _encoded(texts)  # type: ignore[arg-type]
                raw.append(b"".join(texts))
            sizes.append(np.fromiter(map(len, texts), np.int64, len(texts)))
        return cls.from_arrays(
            np.cumsum(np.concatenate(sizes)), np.frombuffer(b"".join(raw), np.uint8)
        )

    @classmethod
    def prefixed(cls, parts: Mapping[str, "Ids"]) -> "Ids":
        """The ids of all parts, each as name/id.

        >>> [*Ids.prefixed({"a": Ids.numbered(2), "b": Ids.of(["x"])})]
        ['a/0', 'a/1', 'b/x']
        """
        sizes, raw = [np.zeros(1, np.int64)], [np.empty(0, np.uint8)]
        for name, ids in parts.items():
            offsets, data = ids.arrays or _numbered(len(ids))
            prefix = np.frombuffer(_encoded([f"{name}/"])[0], np.uint8)
            own = np.diff(offsets) + len(prefix)
            made = np.empty(int(own.sum()), np.uint8)
            begin = np.cumsum(own) - own
            taken = np.zeros(len(made), bool)
            for at, byte in enumerate(prefix):
                made[begin + at] = byte
                taken[begin + at] = True
            made[~taken] = data[offsets[0] : offsets[-1]]
            sizes.append(own)
            raw.append(made)
        return cls.from_arrays(np.cumsum(np.concatenate(sizes)), np.concatenate(raw))

    @classmethod
    def from_arrays(cls, offsets: Offsets, data: Bytes) -> "Ids":
        """Ids over arrays such as `arrays` gives, which may be memory-mapped.

        Only the ends are checked, so opening takes the same time for ten ids and ten million.
        """
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(data):
            raise BadFile("these arrays are not sample ids: the offsets do not span the bytes")
        n = len(offsets) - 1
        # Nearly always the first id tells.
        numbers = not n or (offsets[1] == 1 and data[:1].tobytes() == b"0")
        if numbers and quicker_without_numba(0.3 * n):
            spelled, digits = _numbered(n)
            numbers = np.array_equal(offsets, spelled) and np.array_equal(data, digits)
        elif numbers:
            numbers = _are_row_numbers(offsets, data)
        return cls(n, None if numbers else (offsets, data))

    @property
    def arrays(self) -> tuple[Offsets, Bytes] | None:
        """Offsets [N + 1] and bytes; None when the ids are the row numbers."""
        return self._arrays

    def prove_first(self, prove: Callable[[], None]) -> None:
        """Have mapped arrays checked by `prove`, which may raise, before their first use."""
        if self._held is not None:
            self._prove = prove

    @property
    def _arrays(self) -> tuple[Offsets, Bytes] | None:
        if self._prove is not None and self._held is not None:
            self._prove()
            # Kernels read without bounds checks, and whoever wrote a file may have erred.
            offsets = self._held[0]
            if (offsets[1:] < offsets[:-1]).any():
                raise BadFile("the offsets of the sample ids do not ascend; make them again")
            self._prove = None
        return self._held

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, item: int) -> str:
        if not 0 <= item < self._n:
            raise UnknownSample(f"no item {item} among {self._n:,} samples")
        if self._arrays is None:
            return str(int(item))
        offsets, data = self._arrays
        return _text(data[offsets[item] : offsets[item + 1]].tobytes())

    def __iter__(self) -> Iterator[str]:
        if self._arrays is None:
            yield from map(str, range(self._n))
            return
        offsets, data = self._arrays
        # Offsets come as Python ints in blocks: all at once would be the list we avoid.
        for start in range(0, self._n, 65536):
            ends = offsets[start : start + 65537].tolist()
            block = data[ends[0] : ends[-1]].tobytes()
            if block.isascii():
                text = block.decode()
                yield from (text[a - ends[0] : b - ends[0]] for a, b in pairwise(ends))
            else:
                yield from (_text(block[a - ends[0] : b - ends[0]]) for a, b in pairwise(ends))

    def take(self, items: Iterable[int]) -> list[str]:
        """The ids of these items, in their order."""
        return [self[item] for item in items]

    def find(self, id: str) -> int:
        """The item with this id: the first, if it repeats.

        The first call sorts the 64-bit keys of all ids; later ones are a binary search and one
        comparison of bytes.
        """
        if self._arrays is None:
            if id.isascii() and id.isdigit() and str(int(id)) == id and int(id) < self._n:
                return int(id)
            raise UnknownSample(self._unknown(id))
        offsets, data = self._arrays
        wanted = id.encode("utf-8", "surrogatepass")
        raw = np.frombuffer(wanted, np.uint8)
        if quicker_without_numba(50):
            key = _keys_by_numpy(np.array([0, len(raw)]), raw)[0]
        else:
            key = _key(raw, 0, len(raw))
        keys, order = self._sorted()
        for position in range(int(np.searchsorted(keys, key)), self._n):
            if keys[position] != key:
                break
            item = int(order[position])
            if data[offsets[item] : offsets[item + 1]].tobytes() == wanted:
                return item
        raise UnknownSample(self._unknown(id))

    def places(self, wanted: "Ids") -> NDArray[np.int64]:
        """The item here of each id of `wanted`, the first if it repeats; -1 where it is not here.

        >>> Ids.of(["a", "b"]).places(Ids.of(["b", "c"])).tolist()
        [1, -1]
        """
        if self._arrays is None and wanted._arrays is None:
            numbers = np.arange(len(wanted))
            return np.where(numbers < self._n, numbers, -1)
        keys, order = self._sorted()
        if not self._n:
            return np.full(len(wanted), -1, np.int64)
        sought = wanted.keys()
        at = np.minimum(np.searchsorted(keys, sought), self._n - 1)
        found = np.where(keys[at] == sought, order[at], -1)
        # Keys are 64 bits of a hash: whatever they name is compared byte by byte.
        for item in np.flatnonzero(found >= 0)[~self._same(found, wanted)].tolist():
            try:
                found[item] = self.find(wanted[item])
            except UnknownSample:
                found[item] = -1
        return found

    def keys(self) -> NDArray[np.uint64]:
        """A 64-bit hash of each id, the same on every machine and in every version."""
        if self._keys is None:
            size = 5 * self._n if self._arrays is None else len(self._arrays[1])
            plain = quicker_without_numba(0.05 * (self._n + size / 8))
            if self._arrays is None:
                keys = _keys_by_numpy(*_numbered(self._n)) if plain else _number_keys(self._n)
            else:
                offsets, data = self._arrays
                # The kernel reads without bounds checks, and a mapped file may be damaged.
                if (offsets[1:] < offsets[:-1]).any():
                    raise BadFile("the offsets of the sample ids do not ascend; make them again")
                keys = _keys_by_numpy(offsets, data) if plain else _keys(offsets, data)
            keys.flags.writeable = False
            self._keys = keys
        return self._keys

    def first_duplicate(self) -> tuple[int, int] | None:
        """The first item whose id occurs earlier, as (earlier, item); None if ids are unique."""
        if self._arrays is None:
            return None
        # A plain sort is several times faster than an argsort, and nearly always sufficient.
        keys = np.sort(self.keys())
        if not (keys[1:] == keys[:-1]).any():
            return None
        keys, order = self._sorted()
        first, second = _earliest_pair(keys, order, *self._arrays)
        return (int(first), int(second)) if second >= 0 else None

    def digest(self) -> str:
        """SHA-256 over all ids in order."""
        if self._arrays is None:
            return digest("ids", "numbered", self._n)
        offsets, data = self._arrays
        return digest("ids", digest_array(offsets), digest_array(data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ids):
            return NotImplemented
        if self._n != other._n or (self._arrays is None) != (other._arrays is None):
            return False
        if self._arrays is None or other._arrays is None:
            return True
        mine, theirs = self._arrays, other._arrays
        return np.array_equal(mine[0], theirs[0]) and np.array_equal(mine[1], theirs[1])

    def __hash__(self) -> int:
        return hash((self._n, self.digest()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the index: it is twice the size of the ids and quickly rebuilt.
        return (Ids, (self._n, self._arrays))

    def __repr__(self) -> str:
        if self._n <= 4:
            return f"Ids({', '.join(self)})"
        return f"Ids({self[0]}, {self[1]}, ..., {self[self._n - 1]}; {self._n:,} in all)"

    def _sorted(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        if self._index is None:
            keys = self.keys()
            order = np.argsort(keys, kind="stable")
            self._index = keys[order], order
        return self._index

    def _same(self, found: NDArray[np.int64], wanted: "Ids") -> NDArray[np.bool_]:
        """Whether each id of `wanted` with a place in `found` is spelled like the one there."""
        items = np.flatnonzero(found >= 0)
        mine, my_bytes = self._arrays or _numbered(self._n)
        theirs, their_bytes = wanted._arrays or _numbered(len(wanted))
        places = found[items]
        sizes = np.diff(theirs)[items]
        same: NDArray[np.bool_] = np.diff(mine)[places] == sizes
        for start in range(0, len(items), 65536):
            part = np.flatnonzero(same[start : start + 65536]) + start
            size = sizes[part]
            run = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
            a = my_bytes[np.repeat(mine[places[part]], size) + run]
            b = their_bytes[np.repeat(theirs[items[part]], size) + run]
            owner = np.repeat(part, size)
            same[owner[a != b]] = False
        return same

    def _unknown(self, id: str) -> str:
        return f"no sample with id {id!r} among {self._n:,}"


def _encoded(ids: Iterable[str]) -> list[bytes]:
    try:
        return [id.encode() for id in ids]
    except UnicodeEncodeError as error:
        raise BadRow(f"the sample id {error.object!r} is not valid Unicode") from None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadFile(f"a sample id is not UTF-8: {raw[:40]!r}; the file is damaged") from None


def _numbered(n: int) -> tuple[Offsets, Bytes]:
    """The ids "0" to str(n - 1) written out."""
    data = np.frombuffer("".join(map(str, range(n))).encode(), np.uint8)
    sizes = np.searchsorted(10 ** np.arange(1, 19), np.arange(n), side="right") + 1
    return np.concatenate(([0], np.cumsum(sizes))), data


def _keys_by_numpy(offsets: Offsets, data: Bytes) -> NDArray[np.uint64]:
    """`_keys` a word of every id at a time, for as long as numba is not worth loading."""
    sizes = np.diff(offsets)
    filled = np.concatenate((data, np.zeros(8, np.uint8)))
    # The eight bytes from every place on, and which of them a word of so many bytes keeps.
    words = np.ndarray(len(data) + 1, "<u8", filled, strides=(1,))
    keeps = np.array([(1 << 8 * kept) - 1 for kept in range(9)], np.uint64)
    keys = mix_many(SEED, sizes.astype(np.uint64))
    for at in range(0, int(sizes.max(initial=0)), 8):
        longer = np.flatnonzero(sizes > at) if at else np.flatnonzero(sizes)
        word = words[offsets[longer] + at] & keeps[np.minimum(sizes[longer] - at, 8)]
        keys[longer] = mix_many(keys[longer], word)
    return keys


@kernel
def _key(data: Bytes, start: int, end: int) -> np.uint64:
    """Eight bytes at a time, little-endian, each word folded in by splitmix64's finaliser."""
    # The length goes in first, so that the zero padding of the last word has no effect.
    hash = mix(SEED, np.uint64(end - start))
    for at in range(start, end, 8):
        word = np.uint64(0)
        for byte in range(min(8, end - at)):
            word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
        hash = mix(hash, word)
    return hash


@kernel
def _keys(offsets: Offsets, data: Bytes) -> NDArray[np.uint64]:
    out = np.empty(len(offsets) - 1, np.uint64)
    for item in range(len(out)):
        out[item] = _key(data, offsets[item], offsets[item + 1])
    return out


@kernel
def _write_number(number: int, out: Bytes) -> int:
    """The decimal digits of `number` into `out`; returns how many."""
    size = 1
    rest = number // 10
    while rest:
        size += 1
        rest //= 10
    rest = number
    for at in range(size - 1, -1, -1):
        out[at] = 48 + rest % 10
        rest //= 10
    return size


@kernel
def _number_keys(n: int) -> NDArray[np.uint64]:
    """The keys of the ids "0" to str(n - 1), equal to `_keys` of their bytes."""
    out = np.empty(n, np.uint64)
    digits = np.empty(20, np.uint8)
    for item in range(n):
        out[item] = _key(digits, 0, _write_number(item, digits))
    return out


@kernel
def _are_row_numbers(offsets: Offsets, data: Bytes) -> bool:
    """Whether the ids are "0", "1", ...; stops at the first that is not."""
    digits = np.empty(20, np.uint8)
    at = 0
    for item in range(len(offsets) - 1):
        size = _write_number(item, digits)
        if offsets[item + 1] != at + size or at + size > len(data):
            return False
        for byte in range(size):
            if data[at + byte] != digits[byte]:
                return False
        at += size
    return True


@kernel
def _earliest_pair(
    keys: NDArray[np.uint64], order: NDArray[np.int64], offsets: Offsets, data: Bytes
) -> tuple[int, int]:
    """Of all items that equal an earlier one, the earliest, with the item it equals."""
    first, second = -1, -1
    start = 0
    for end in range(1, len(keys) + 1):
        if end < len(keys) and keys[end] == keys[start]:
            continue
        found = False
        for later in range(start + 1, end):
            b = order[later]
            for earlier in range(start, later):
                a = order[earlier]
                size = offsets[a + 1] - offsets[a]
                same = size == offsets[b + 1] - offsets[b]
                for byte in range(size if same else 0):
                    if data[offsets[a] + byte] != data[offsets[b] + byte]:
                        same = False
                        break
                if same:
                    if second < 0 or b < second:
                        first, second = a, b
                    found = True
                    break
            # Later members of this run of equal keys can only give later pairs.
            if found:
                break
        start = end
    return first, second
