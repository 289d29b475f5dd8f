"""A prioritized replay buffer over arrays: add, sample, update and evict in O(log n)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from batchwright import rng
from batchwright.errors import ConfigError, Mismatch, UnknownSample
from batchwright.streaming import sumtree
from batchwright.streaming.protocols import check_state
from batchwright.streaming.rows import (
    REPLAYED,
    ROW,
    Contents,
    arrays_of,
    batch_of,
    id_of,
    ids_of,
    pack,
    unpack,
)
from batchwright.streaming.sample import StreamSample, StreamSettings, real_number, whole_number

if TYPE_CHECKING:
    from batchwright.streaming.replay_files import Saved

__all__ = [
    "BufferEvictionPolicy",
    "DifficultyBin",
    "ReplayBatch",
    "ReplayBuffer",
    "ReplayBufferConfig",
]

RENEWED = 3
"""Of `_dirty`: the sample itself changed, not only its numbers (1), since the last save."""

MOST_PRIORITY = 1e100

MOST_REPLAYS = 2**61
"""As many again can be drawn before a count is more than `StreamSample` takes."""


class BufferEvictionPolicy(StrEnum):
    """Which sample a full buffer evicts for a new one."""

    FIFO = "fifo"
    """The oldest."""
    PRIORITY = "priority"
    """The one of lowest priority; among equals the oldest."""
    RANDOM = "random"
    """Any, uniformly."""


class ReplayBufferConfig(StreamSettings):
    """Capacity, eviction and sampling of a replay buffer."""

    max_size: int = Field(default=100_000, ge=1, le=2**30)
    """Most samples held."""
    eviction_policy: BufferEvictionPolicy = BufferEvictionPolicy.FIFO
    priority_alpha: float = Field(default=0.6, ge=0.0, le=2.0)
    """A sample is drawn with probability proportional to priority ** alpha; 0 is uniform."""
    priority_beta: float = Field(default=0.4, ge=0.0, le=1.0)
    """Exponent of the importance weights: 1 corrects the bias of prioritized sampling fully."""
    seed: int = 42
    min_samples_before_sampling: int = Field(default=1, ge=1)
    default_priority: float = Field(default=1.0, ge=0.0, le=MOST_PRIORITY)
    """Priority of a sample that is added without one of its own."""


@dataclass(frozen=True, slots=True)
class DifficultyBin:
    """The samples of a buffer whose difficulty is in [low, high); the last bin includes 1."""

    low: float
    high: float
    samples: int
    judged: int
    """Samples whose success is known."""
    successes: int

    @property
    def success_rate(self) -> float | None:
        """Successes over judged samples; None if none was judged."""
        return self.successes / self.judged if self.judged else None


class ReplayBatch(Sequence[StreamSample]):
    """Samples of a buffer as they were when drawn, even if they have been evicted since.

    A sequence of `StreamSample`, each made on access; the arrays are there at once.
    """

    __slots__ = ("contents", "rows", "slots", "weights")

    def __init__(
        self,
        rows: NDArray[np.void],
        contents: Contents,
        slots: NDArray[np.int64],
        weights: NDArray[np.float64],
    ) -> None:
        self.rows = rows
        """The numbers of each sample, a structured array."""
        self.contents = contents
        """The tokens and texts of each sample."""
        self.slots = slots
        self.weights = weights
        """Importance weights, at most 1; all 1 for uniform sampling."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.ascontiguousarray(self.rows["length"])

    @property
    def serials(self) -> NDArray[np.int64]:
        """The number of each sample in the order they were added to the buffer, from 0."""
        return np.ascontiguousarray(self.rows["serial"])

    @property
    def priorities(self) -> NDArray[np.float64]:
        return np.ascontiguousarray(self.rows["priority"])

    @property
    def rewards(self) -> NDArray[np.float64]:
        """NaN where there is none."""
        return np.ascontiguousarray(self.rows["reward"])

    @property
    def difficulties(self) -> NDArray[np.float64]:
        """NaN where there is none."""
        return np.ascontiguousarray(self.rows["difficulty"])

    @property
    def sample_ids(self) -> list[str]:
        return ids_of(self.rows, self.contents)

    def take(self, which: ArrayLike) -> "ReplayBatch":
        """The samples at these places, or where a mask is true."""
        chosen = np.asarray(which)
        places = np.flatnonzero(chosen) if chosen.dtype == bool else chosen.astype(np.int64)
        return ReplayBatch(
            self.rows[places],
            self.contents[places],
            self.slots[places],
            self.weights[places],
        )

    def __len__(self) -> int:
        return len(self.contents)

    @overload
    def __getitem__(self, item: int) -> StreamSample: ...
    @overload
    def __getitem__(self, item: slice) -> "ReplayBatch": ...
    def __getitem__(self, item: int | slice) -> "StreamSample | ReplayBatch":
        if isinstance(item, slice):
            return self.take(np.arange(len(self))[item])
        return unpack(self.rows[item], self.contents[item])

    def __repr__(self) -> str:
        return f"ReplayBatch({len(self):,} samples, {int(self.rows['length'].sum()):,} tokens)"


class ReplayBuffer:
    """Prioritized experience replay for off-policy and online training.

    Samples stand in slots 0 .. size - 1. A sum tree over priority ** alpha draws in
    O(log n), a tournament tree finds what to evict in O(1). Every draw is a function of the
    seed and the number of the draw, so a restored buffer continues exactly.

    >>> buffer = ReplayBuffer(ReplayBufferConfig(max_size=2))
    >>> for name in "abc":
    ...     buffer.add(StreamSample(input_ids=[1, 2], loss_mask=[0, 1], sample_id=name,
    ...                             dataset_id="demo", source="offline"))
    >>> sorted(sample.sample_id for sample in buffer.snapshot())
    ['b', 'c']
    >>> batch = buffer.sample(8)
    >>> buffer.update_priorities(batch, [0.5] * 8), buffer
    (8, ReplayBuffer(2 of 2 samples, 3 added, 1 evicted, fifo))
    """

    def __init__(self, config: ReplayBufferConfig | None = None) -> None:
        self.config = config or ReplayBufferConfig()
        self._sample_key = np.uint64(rng.key(self.config.seed, "replay/sample"))
        self._evict_key = np.uint64(rng.key(self.config.seed, "replay/evict"))
        self._by_priority = self.config.eviction_policy is BufferEvictionPolicy.PRIORITY
        self._size = self.total_added = self.total_evicted = self.draws = 0
        try:
            self._allocate()
        except MemoryError:
            raise ConfigError(
                f"max_size={self.config.max_size:,} needs more memory than there is; choose less"
            ) from None
        self.saved: Saved | None = None
        """Where it was last saved in parts."""

    def _allocate(self) -> None:
        most = self.config.max_size
        leaves = 1 << max(1, (most - 1).bit_length())
        self._rows = np.zeros(most, ROW)
        self._contents: Contents = np.empty(most, object)
        # A slot, or a set of them where several samples have one id: no list to go through.
        self._places: dict[str, int | set[int]] = {}
        self._tree = np.zeros(2 * leaves)
        random = self.config.eviction_policy is BufferEvictionPolicy.RANDOM
        self._first = np.zeros(0 if random else 2 * leaves, np.int64)
        self._dirty = np.zeros(most, np.uint8)
        # Views of single columns: to make one costs more than an update.
        self._priorities: NDArray[np.float64] = self._rows["priority"]
        self._serials: NDArray[np.int64] = self._rows["serial"]
        self._replays: NDArray[np.int64] = self._rows["replay_count"]

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_empty(self) -> bool:
        return self._size == 0

    @property
    def is_full(self) -> bool:
        return self._size == self.config.max_size

    @property
    def can_sample(self) -> bool:
        """Whether it holds `min_samples_before_sampling` samples."""
        return self._size >= self.config.min_samples_before_sampling

    def add(self, sample: StreamSample, priority: float | None = None) -> None:
        """Add a sample; a full buffer evicts one first, by its policy.

        Without `priority` the sample's own counts if it was given one, else the default. Two
        samples of one id are two entries. What is refused changes nothing.
        """
        if not isinstance(sample, StreamSample):
            raise ConfigError(f"add takes a StreamSample, got {type(sample).__name__}")
        if priority is None:
            given = "priority" in sample.model_fields_set
            priority = sample.priority if given else self.config.default_priority
        priority = _priority(priority)
        weight = self._weight(priority)
        row, content = pack(sample, priority, self.total_added)
        if sample.replay_count > MOST_REPLAYS:
            raise ConfigError(
                f"replay_count must be at most 2**61 in a buffer, which counts on from it, "
                f"got {sample.replay_count}"
            )
        slot = self._size
        if slot < self.config.max_size:
            self._size += 1
        else:
            slot = self._victim()
            self._forget(slot)
            self.total_evicted += 1
        self._rows[slot] = row
        self._contents[slot] = content
        self._dirty[slot] = RENEWED
        self._register(sample.sample_id, slot)
        self.total_added += 1
        sumtree.place(
            self._tree,
            self._first,
            self._priorities,
            self._serials,
            self._by_priority,
            slot,
            weight,
        )

    def add_batch(self, samples: Iterable[StreamSample]) -> None:
        """Add samples one after the other."""
        for sample in samples:
            self.add(sample)

    def sample(
        self, n: int, *, replace: bool = True, uniform: bool = False, beta: float | None = None
    ) -> ReplayBatch:
        """Draw `n` samples in proportion to priority ** alpha, or with equal probability.

        The importance weights are (size * probability) ** -beta, divided by the largest of the
        batch. With replacement sampling is stratified: a sample is drawn n * probability times,
        give or take one. Without replacement each draw is proportional to what is left. Every
        draw increments the sample's `replay_count`.
        """
        n = self._checked_draw(n, replace)
        beta = self.config.priority_beta if beta is None else real_number("beta", beta, 0.0, 1.0)
        slots = np.empty(n, np.int64)
        if uniform:
            sumtree.draw_uniform(self._size, self._sample_key, self.draws, not replace, slots)
        elif not self._tree[1] > 0.0:
            raise ConfigError(
                f"all {self._size:,} samples have priority 0: nothing to sample by priority; "
                f"update the priorities or pass uniform=True"
            )
        elif replace:
            sumtree.draw_proportional(self._tree, self._sample_key, self.draws, slots)
        else:
            found = sumtree.draw_distinct(self._tree, self._sample_key, self.draws, slots)
            if found < n:
                raise ConfigError(
                    f"cannot sample {n:,} without replacement: {found:,} have a priority above 0; "
                    f"sample fewer, or pass replace=True"
                )
        self.draws += 1
        weights = np.empty(n)
        sumtree.mark(self._tree, slots, self._replays, self._dirty, weights)
        if uniform or beta == 0.0:
            weights[:] = 1.0
        else:
            # size and the total weight cancel in the division by the largest.
            weights = (weights / weights.min()) ** -beta
        rows = self._rows.take(slots)
        rows["source"] = REPLAYED
        return ReplayBatch(rows, self._contents[slots], slots, weights)

    def sample_uniform(self, n: int) -> ReplayBatch:
        """Draw `n` samples uniformly, without replacement."""
        return self.sample(n, replace=False, uniform=True)

    def update_priority(self, sample_id: str, priority: float) -> bool:
        """Set the priority of every sample with this id; False if there is none."""
        number = _priority(priority)
        slots = np.array(self._slots_of(sample_id), np.int64)
        given = np.full(len(slots), number)
        return self._update(slots, self._serials[slots], given) > 0

    def update_priorities(self, batch: ReplayBatch, priorities: ArrayLike) -> int:
        """Set one priority for each sample of a batch; returns how many were still there.

        Samples evicted since are skipped, even if their slots hold new ones. For a sample that
        was drawn twice the last priority counts. A batch of another buffer is refused.
        """
        if not isinstance(batch, ReplayBatch):
            raise ConfigError(
                f"update_priorities takes the batch that was drawn, got {type(batch).__name__}"
            )
        given = _priorities(priorities)
        if given.shape != (len(batch),):
            raise ConfigError(
                f"got priorities of shape {given.shape} for a batch of {len(batch):,} samples; "
                f"give one number for each"
            )
        if not (given.min(initial=0.0) >= 0.0 and given.max(initial=0.0) <= MOST_PRIORITY):
            _priority(float(given[~((given >= 0.0) & (given <= MOST_PRIORITY))][0]))
        here = self._still_here(batch)
        done = self._update(batch.slots, batch.serials, given)
        if done < len(batch):
            done += self._update_moved(batch, given, here)
        return done

    def _still_here(self, batch: ReplayBatch) -> NDArray[np.bool_]:
        """Which samples of a batch stand where they stood; `Mismatch` if it is not of this buffer.

        Serial numbers are only those of one buffer: what stands under one must be the sample.
        """
        serials = batch.serials
        near = np.clip(batch.slots, 0, max(0, self._size - 1))
        here: NDArray[np.bool_] = (near == batch.slots) & (self._serials[near] == serials)
        here &= near < self._size
        foreign = here & (self._contents[near] != batch.contents)
        if foreign.any() or serials.max(initial=-1) >= self.total_added:
            raise Mismatch(
                "the batch was drawn from another buffer; update the one it was drawn from"
            )
        return here

    def _update(
        self, slots: NDArray[np.int64], serials: NDArray[np.int64], given: NDArray[np.float64]
    ) -> int:
        return int(
            sumtree.place_many(
                self._tree,
                self._first,
                self._priorities,
                self._serials,
                self._by_priority,
                self._dirty,
                self._size,
                slots,
                serials,
                given,
                given**self.config.priority_alpha,
            )
        )

    def _update_moved(
        self, batch: ReplayBatch, given: NDArray[np.float64], here: NDArray[np.bool_]
    ) -> int:
        """Update samples of a batch that stand in another slot since, because one was evicted."""
        serials = batch.serials
        moved = [
            (slot, place)
            for place in np.flatnonzero(~here).tolist()
            for slot in self._slots_of(id_of(batch.rows[place], batch.contents[place]))
            if self._serials[slot] == serials[place]
            and self._contents[slot] == batch.contents[place]
        ]
        if not moved:
            return 0
        slots, places = np.array(moved, np.int64).T
        return self._update(np.ascontiguousarray(slots), serials[places], given[places])

    def find(self, serials: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of the samples with these serial numbers, -1 for those that are gone."""
        held = self._serials[: self._size]
        if not len(held):
            return np.full(len(serials), -1, np.int64)
        order = np.argsort(held)
        at = order[np.minimum(np.searchsorted(held, serials, sorter=order), len(held) - 1)]
        return np.where(held[at] == serials, at, -1)

    def evict(self, n: int = 1) -> int:
        """Evict up to `n` samples by the policy; returns how many were evicted."""
        n = whole_number("n", n, 0)
        done = 0
        while done < n and self._size:
            self._remove(self._victim())
            self.total_evicted += 1
            done += 1
        return done

    def clear(self) -> None:
        """Remove every sample; the counters continue."""
        self.total_evicted += self._size
        self._size = 0
        self._allocate()
        self.saved = None

    def snapshot(self) -> ReplayBatch:
        """Every sample as it is now, slot by slot, not marked as replayed."""
        return self.at(np.arange(self._size))

    def at(self, slots: NDArray[np.int64]) -> ReplayBatch:
        """The samples of these slots as they are now, not marked as replayed."""
        return ReplayBatch(
            self._rows.take(slots), self._contents[slots], slots, np.ones(len(slots))
        )

    def get_all(self) -> list[StreamSample]:
        """Every sample, slot by slot."""
        return list(self.snapshot())

    def filter(self, keep: Callable[[StreamSample], bool]) -> list[StreamSample]:
        """The samples for which `keep` is true."""
        return [sample for sample in self.snapshot() if keep(sample)]

    def filter_by_difficulty(
        self, min_difficulty: float = 0.0, max_difficulty: float = 1.0
    ) -> ReplayBatch:
        """The samples of known difficulty from `min_difficulty` to `max_difficulty`."""
        found = self.snapshot()
        difficulty = found.rows["difficulty"]
        return found.take((difficulty >= min_difficulty) & (difficulty <= max_difficulty))

    def difficulty_stats(self, bins: int = 10, *, last: int | None = None) -> list[DifficultyBin]:
        """Samples and success rate by difficulty, for curricula; of the `last` added, or of all.

        Samples of unknown difficulty are in no bin.
        """
        if bins < 1:
            raise ConfigError(f"bins must be at least 1, got {bins}")
        rows = self._rows[: self._size]
        if last is not None:
            rows = rows[rows["serial"] >= self.total_added - last]
        known = rows[~np.isnan(rows["difficulty"])]
        which = np.minimum((known["difficulty"] * bins).astype(np.int64), bins - 1)
        counts = [
            np.bincount(which[chosen], minlength=bins).tolist()
            for chosen in (known["success"] > -2, known["success"] >= 0, known["success"] == 1)
        ]
        return [
            DifficultyBin(number / bins, (number + 1) / bins, *column)
            for number, column in enumerate(zip(*counts, strict=True))
        ]

    @property
    def success_rate(self) -> float | None:
        """Successes over the samples whose success is known; None if none is."""
        success = self._rows["success"][: self._size]
        judged = int((success >= 0).sum())
        return int((success == 1).sum()) / judged if judged else None

    @property
    def mean_difficulty(self) -> float | None:
        return _mean(self._rows["difficulty"][: self._size])

    @property
    def mean_reward(self) -> float | None:
        return _mean(self._rows["reward"][: self._size])

    def state_dict(self) -> dict[str, Any]:
        """The whole buffer as numbers and arrays, for a training checkpoint."""
        return {
            "config": self.config.model_dump(mode="json"),
            "counters": self.counters(),
            "samples": arrays_of(self._rows[: self._size], self._contents[: self._size]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buffer from `state`; `Mismatch` if its config differs."""
        check_state(state, "ReplayBuffer", "config", "counters", "samples")
        if dict(state["config"]) != self.config.model_dump(mode="json"):
            raise Mismatch(
                "the state is of a replay buffer with another config; "
                "make the buffer with the config it was saved with"
            )
        rows, contents = batch_of(state["samples"])
        self.restore(rows, contents, state["counters"])

    def unsaved(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots with a new sample since the last save in parts, and with new numbers only."""
        dirty = self._dirty[: self._size]
        return np.flatnonzero(dirty == RENEWED), np.flatnonzero(dirty == 1)

    def mark_saved(self, saved: "Saved") -> None:
        """Track changes from here on."""
        self._dirty[:] = 0
        self.saved = saved

    def counters(self) -> dict[str, int]:
        """The counters that sampling and eviction depend on, besides the samples."""
        names = ("size", "total_added", "total_evicted", "draws")
        return {name: int(getattr(self, name)) for name in names}

    def restore(
        self, rows: NDArray[np.void], contents: Contents, counters: Mapping[str, int]
    ) -> None:
        """Hold these samples, slot by slot, with these counters."""
        added, evicted = int(counters["total_added"]), int(counters["total_evicted"])
        serials = rows["serial"]
        if (
            not len(rows) == len(contents) == counters["size"] <= self.config.max_size
            or added - evicted != len(rows)
            or len(np.unique(serials)) != len(rows)
            or (len(rows) and not 0 <= serials.min() <= serials.max() < added)
        ):
            raise Mismatch(
                f"the counters {dict(counters)} contradict the {len(rows):,} samples of the state"
            )
        self._allocate()
        self._size = len(rows)
        self.total_added, self.total_evicted = added, evicted
        self.draws = int(counters["draws"])
        self._rows[: len(rows)] = rows
        self._contents[: len(rows)] = contents
        for slot, name in enumerate(ids_of(rows, contents)):
            self._register(name, slot)
        self._dirty[: len(rows)] = RENEWED
        weights = self._priorities[: len(rows)] ** self.config.priority_alpha
        sumtree.rebuild(
            self._tree,
            self._first,
            self._priorities,
            self._serials,
            self._by_priority,
            weights,
        )
        self.saved = None

    def to_dict(self) -> dict[str, Any]:
        """The content of `buffer.json`."""
        from batchwright.streaming.replay_files import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ReplayBuffer":
        """The buffer that `to_dict` describes."""
        from batchwright.streaming.replay_files import from_dict

        return from_dict(data, "the dictionary")

    def save(self, path: Path | str, *, keep: int = 1) -> Path:
        """Write the buffer, whole or not at all; the name says how.

        `*.json` is readable, `*.safetensors` is fast, and any other name is a folder to which
        every save adds only what has changed since the one before. Of its full parts, which are
        written now and then, the newest `keep` stay, each with the changes that follow it.
        """
        from batchwright.streaming.replay_files import save_buffer

        return save_buffer(self, Path(path), keep)

    @classmethod
    def load(cls, path: Path | str, *, part: int | None = None) -> "ReplayBuffer":
        """The last state that was saved at `path`; `BadFile` if any of it is cut or damaged.

        Of a folder, `part` is the number of the part (`saved.number`) whose state is wanted.
        """
        from batchwright.streaming.replay_files import load_buffer

        return load_buffer(Path(path), part)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[StreamSample]:
        return iter(self.snapshot())

    def __getitem__(self, sample_id: str) -> StreamSample:
        """The newest sample of this id."""
        slots = self._slots_of(sample_id)
        if not slots:
            raise UnknownSample(f"no sample has the id {sample_id!r} among {self._size:,}")
        slot = max(slots, key=lambda slot: int(self._serials[slot]))
        return unpack(self._rows[slot], self._contents[slot])

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._places

    def __repr__(self) -> str:
        return (
            f"ReplayBuffer({self._size:,} of {self.config.max_size:,} samples, "
            f"{self.total_added:,} added, {self.total_evicted:,} evicted, "
            f"{self.config.eviction_policy})"
        )

    def _weight(self, priority: float) -> float:
        # As an array, because the powers of arrays and of numbers differ in the last bit on some
        # processors, and a buffer that is loaded computes all at once.
        return float((np.array([priority]) ** self.config.priority_alpha)[0])

    def _checked_draw(self, n: int, replace: bool) -> int:
        n = whole_number("n", n, 1)
        if not self.can_sample:
            raise ConfigError(
                f"the buffer holds {self._size:,} samples, sampling needs at least "
                f"{self.config.min_samples_before_sampling:,} "
                f"(min_samples_before_sampling); add more first"
            )
        if not replace and n > self._size:
            raise ConfigError(
                f"cannot sample {n:,} of {self._size:,} without replacement; "
                f"sample fewer, or pass replace=True"
            )
        return n

    def _victim(self) -> int:
        if self._first.size:
            return int(self._first[1]) - 1
        return int(sumtree.evicted_at_random(self._evict_key, self.total_evicted, self._size))

    def _forget(self, slot: int) -> None:
        """Take a sample out of the ids."""
        name = id_of(self._rows[slot], self._contents[slot])
        there = self._places[name]
        if isinstance(there, set) and len(there) > 1:
            there.remove(slot)
        else:
            del self._places[name]

    def _register(self, name: str, slot: int) -> None:
        """Let a sample be found by its id."""
        there = self._places.setdefault(name, slot)
        if isinstance(there, set):
            there.add(slot)
        elif there != slot:
            self._places[name] = {there, slot}

    def _slots_of(self, name: str) -> list[int]:
        """The slots of the samples of this id, in order."""
        there = self._places.get(name)
        if there is None:
            return []
        return sorted(there) if isinstance(there, set) else [there]

    def _remove(self, slot: int) -> None:
        """Empty a slot; the last sample moves into it, so that slots stay dense."""
        last = self._size - 1
        self._forget(slot)
        trees = (self._tree, self._first, self._priorities, self._serials, self._by_priority)
        if slot != last:
            self._register(id_of(self._rows[last], self._contents[last]), slot)
            self._forget(last)
            self._rows[slot] = self._rows[last]
            self._contents[slot] = self._contents[last]
            self._dirty[slot] = RENEWED
        sumtree.remove(*trees, last)
        if slot != last:
            weight = self._weight(float(self._priorities[slot]))
            sumtree.place(*trees, slot, weight)
        self._contents[last] = None
        self._size = last


def _priority(given: Any) -> float:
    return real_number("priority", given, 0.0, MOST_PRIORITY)


def _priorities(given: ArrayLike) -> NDArray[np.float64]:
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        array = np.asarray(given)
        if array.dtype.kind in "fiubO":
            return array.astype(np.float64)
    raise ConfigError(
        f"priorities must be one number for each sample of the batch, got {type(given).__name__}"
    )


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
