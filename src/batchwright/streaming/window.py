"""Rolling windows: batch plans over snapshots of a replay buffer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from batchwright import rng
from batchwright.batching.collation import CollatedBatch, collate
from batchwright.batching.config import BatchingConfig, Layout, Overflow
from batchwright.batching.plan.builder import BatchPlanBuilder
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.plan import BatchPlan
from batchwright.data.ids import Ids
from batchwright.data.lengths import Lengths
from batchwright.errors import ConfigError, Mismatch
from batchwright.streaming.protocols import check_state
from batchwright.streaming.replay import ReplayBatch, ReplayBuffer
from batchwright.streaming.rows import arrays_of, batch_of, columns_of, contents_of, rows_of
from batchwright.streaming.sample import StreamSettings

__all__ = ["RollingBatchPlanWindow", "WindowConfig", "WindowState"]

FIXED = ("length", "segmented", "sample_id_bytes", "dataset_id_bytes", "episode_id_bytes")
"""What a sample keeps for as long as it is in a buffer, and what its bytes are read by."""


class WindowConfig(StreamSettings):
    """How many microbatches a window has, and how they are made."""

    window_microbatches: int = Field(default=1000, ge=1)
    """Microbatches of every window, exactly."""
    min_samples: int = Field(default=100, ge=1)
    """Samples the buffer must hold before a window is built."""
    overlap_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Part of a window that repeats the last microbatches of the one before, rounded down."""
    token_budget: int = Field(default=4096, gt=0)
    """Padded tokens allowed in one microbatch."""
    bucket_edges: tuple[int, ...] = (128, 256, 512, 1024)
    overflow_max: int = Field(default=2048, gt=0)
    layout: Layout = "bucketed"
    """`bucketed`, `sorted` or `packed`, as in `BatchingConfig`."""
    pack_max_length: int = Field(default=2048, gt=0)
    overflow: Overflow = "error"
    """What becomes of a sample that is too long; `WindowState` counts what was skipped."""
    seed: int = 42

    @model_validator(mode="after")
    def _plannable(self) -> "WindowConfig":
        self.batching(0)
        return self

    @property
    def overlap_microbatches(self) -> int:
        """Microbatches that a window repeats from the one before."""
        # As it was written: 0.29 of 100 is 29, though 0.29 * 100 is a little less.
        return int(Fraction(repr(self.overlap_fraction)) * self.window_microbatches)

    def batching(self, window_id: int) -> BatchingConfig:
        """The settings of one window's plan."""
        own = {"window_microbatches", "min_samples", "overlap_fraction", "seed"}
        # Only what was given: defaults of the planner give way to a small token budget.
        given = self.model_dump(exclude_unset=True, exclude=own)
        return BatchingConfig(**given, seed=rng.key(self.seed, "window", window_id))


@dataclass(frozen=True, slots=True)
class WindowState:
    """What a window is made of and how far it is consumed."""

    window_id: int
    snapshot_size: int
    """Samples of the snapshot."""
    snapshot_total_added: int
    """Samples that the buffer had ever seen by then."""
    plan_microbatches: int
    overlap_microbatches: int
    """Of these, how many repeat the window before."""
    plan_fingerprint: str
    skipped: int
    """Samples of the snapshot that are in no microbatch because of their length."""
    microbatches_consumed: int

    @property
    def is_exhausted(self) -> bool:
        return self.microbatches_consumed >= self.plan_microbatches

    @property
    def progress(self) -> float:
        return self.microbatches_consumed / self.plan_microbatches


@dataclass(frozen=True)
class _Window:
    """One window: a plan over the first samples, and microbatches of the window before."""

    number: int
    samples: ReplayBatch
    """The snapshot, then those of the carried microbatches."""
    fresh: int
    """How many of the samples are the snapshot."""
    ids: Ids
    plan: BatchPlan
    carried: tuple[MicrobatchSpec, ...]
    total_added: int

    def microbatch(self, index: int) -> MicrobatchSpec:
        if index < len(self.carried):
            spec = self.carried[index]
        else:
            # The plan is virtual: it goes on, newly shuffled, for as many epochs as are needed.
            spec = self.plan.batch(*divmod(index - len(self.carried), self.plan.num_microbatches()))
        return replace(spec, epoch=self.number, index=index, ids=self.ids)


class RollingBatchPlanWindow:
    """Windows of exactly `window_microbatches` microbatches over a changing replay buffer.

    A window is planned over a snapshot, so later additions and evictions do not affect it. If
    the snapshot fills fewer microbatches, it is repeated in a new order; if it fills more, the
    window takes some of them at random. The order is a function of the samples, the seed and
    the number of the window.

    >>> from batchwright.streaming import MockGymStream
    >>> buffer = ReplayBuffer()
    >>> buffer.add_batch(MockGymStream(num_episodes=40))
    >>> config = WindowConfig(window_microbatches=10, overlap_fraction=0.2, token_budget=512)
    >>> window = RollingBatchPlanWindow(buffer, config)
    >>> state = window.build_next_window()
    >>> len(list(window.iter_current())), window.should_build_next
    (10, True)
    """

    def __init__(self, buffer: ReplayBuffer, config: WindowConfig | None = None) -> None:
        self.buffer = buffer
        self.config = config or WindowConfig()
        self.total_windows = 0
        self.total_microbatches = 0
        """Microbatches consumed, over all windows."""
        self._window: _Window | None = None
        self._consumed = 0

    @property
    def has_window(self) -> bool:
        return self._window is not None

    @property
    def can_build_window(self) -> bool:
        """Whether the buffer holds `min_samples` samples."""
        return self.buffer.size >= self.config.min_samples

    @property
    def should_build_next(self) -> bool:
        """Whether the current window, if there is one, is consumed and another can be built."""
        return self.can_build_window and self.remaining_microbatches == 0

    @property
    def remaining_microbatches(self) -> int:
        return self.config.window_microbatches - self._consumed if self._window else 0

    @property
    def current_plan(self) -> BatchPlan | None:
        """The plan of the snapshot, without the microbatches carried over."""
        return self._window.plan if self._window else None

    @property
    def current_state(self) -> WindowState | None:
        window = self._window
        if window is None:
            return None
        return WindowState(
            window_id=window.number,
            snapshot_size=window.fresh,
            snapshot_total_added=window.total_added,
            plan_microbatches=self.config.window_microbatches,
            overlap_microbatches=len(window.carried),
            plan_fingerprint=window.plan.fingerprint,
            skipped=len(window.plan.skipped),
            microbatches_consumed=self._consumed,
        )

    def build_next_window(self, samples: ReplayBatch | None = None) -> WindowState:
        """Plan the next window over a snapshot of the buffer, or over `samples` of it.

        `samples` may be drawn by priority (`buffer.sample`) or chosen for a curriculum
        (`buffer.filter_by_difficulty`). The first window has no overlap.
        """
        if samples is None:
            if not self.can_build_window:
                raise ConfigError(
                    f"the buffer holds {self.buffer.size:,} samples, a window needs "
                    f"{self.config.min_samples:,} (min_samples); add more first"
                )
            samples = self.buffer.snapshot()
        if not isinstance(samples, ReplayBatch):
            raise ConfigError(
                f"samples must be a ReplayBatch, as buffer.sample or "
                f"buffer.filter_by_difficulty give it, got {type(samples).__name__}"
            )
        if not len(samples):
            raise ConfigError("there are no samples to plan a window over; give at least one")
        overlap = self.config.overlap_microbatches if self._window else 0
        last = range(self.config.window_microbatches - overlap, self.config.window_microbatches)
        carried = [self._window.microbatch(index) for index in last] if self._window else []
        old = self._window.samples if self._window else samples
        joined, moved = _joined(samples, old, carried)
        self._window = self._built(
            self.total_windows, joined, len(samples), moved, self.buffer.total_added
        )
        self.total_windows += 1
        self._consumed = 0
        state = self.current_state
        assert state is not None
        return state

    def iter_current(self) -> Iterator[MicrobatchSpec]:
        """The remaining microbatches; their `items` are positions in `current_samples`."""
        window = self._window
        while window is not None and window is self._window and self.remaining_microbatches:
            spec = window.microbatch(self._consumed)
            self._consumed += 1
            self.total_microbatches += 1
            yield spec

    def iter_current_with_samples(self) -> Iterator[tuple[MicrobatchSpec, ReplayBatch]]:
        """The remaining microbatches, each with its samples in order."""
        for spec in self.iter_current():
            yield spec, self.current_samples.take(spec.items)

    @property
    def current_samples(self) -> ReplayBatch:
        """The samples of the window, those carried over last."""
        if self._window is None:
            raise ConfigError("there is no window yet; call build_next_window first")
        return self._window.samples

    def collate(self, microbatch: MicrobatchSpec, *, pad_id: int = 0) -> CollatedBatch:
        """A microbatch of the current window as arrays."""
        samples = self.current_samples
        return collate(microbatch, lambda item: samples[item].to_sample(), pad_id=pad_id)

    def discard_current(self) -> None:
        """Drop the current window; the next one has no overlap."""
        self._window = None
        self._consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Position and window; of the samples, only those that the buffer has lost since.

        Restore it together with the buffer's state of the same moment.
        """
        state: dict[str, Any] = {
            "config": self.config.model_dump(mode="json", exclude_unset=True),
            "total_windows": self.total_windows,
            "total_microbatches": self.total_microbatches,
            "consumed": self._consumed,
        }
        if self._window is None:
            return state
        window = self._window
        lost = self.buffer.find(window.samples.serials) < 0
        gone = window.samples.take(lost)
        return {
            **state,
            "window": {
                "number": window.number,
                "fresh": window.fresh,
                "total_added": window.total_added,
                "fingerprint": window.plan.fingerprint,
                "weights": window.samples.weights,
                "rows": columns_of(window.samples.rows),
                "lost": arrays_of(gone.rows, gone.contents),
                "carried": _carried_arrays(window.carried),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; the buffer must have been restored before."""
        names = ("config", "total_windows", "total_microbatches", "consumed")
        check_state(state, "RollingBatchPlanWindow", *names)
        if dict(state["config"]) != self.config.model_dump(mode="json", exclude_unset=True):
            raise Mismatch(
                "the state is of a rolling window with another config; "
                "make the window with the config it was saved with"
            )
        self.total_windows = int(state["total_windows"])
        self.total_microbatches = int(state["total_microbatches"])
        self._consumed = int(state["consumed"])
        self._window = None
        saved = state.get("window")
        if saved is None:
            return
        samples = _restored(self.buffer, saved)
        window = self._built(
            int(saved["number"]),
            samples,
            int(saved["fresh"]),
            _carried(saved["carried"]),
            int(saved["total_added"]),
        )
        if window.plan.fingerprint != saved["fingerprint"]:
            raise Mismatch(
                "the window was planned over other samples than the buffer holds now; "
                "restore the buffer that was saved together with it"
            )
        self._window = window

    def _built(
        self,
        number: int,
        samples: ReplayBatch,
        fresh: int,
        carried: list[MicrobatchSpec],
        total_added: int,
    ) -> _Window:
        names = _names(samples[:fresh])
        lengths = Lengths(samples.lengths[:fresh], Ids.of(names))
        plan = BatchPlanBuilder(lengths, self.config.batching(number)).build()
        ids = Ids.of([*names, *samples[fresh:].sample_ids])
        cut_at = plan.config.limit if plan.config.overflow in ("truncate", "split") else None
        specs = tuple(replace(spec, cut_at=cut_at) for spec in carried)
        return _Window(number, samples, fresh, ids, plan, specs, total_added)


def _joined(
    fresh: ReplayBatch, old: ReplayBatch, carried: list[MicrobatchSpec]
) -> tuple[ReplayBatch, list[MicrobatchSpec]]:
    """The snapshot with the samples of carried microbatches behind, and those pointing at them."""
    if not carried:
        return fresh, []
    used = np.unique(np.concatenate([spec.items for spec in carried]))
    taken = old.take(used)
    joined = ReplayBatch(
        np.concatenate([fresh.rows, taken.rows]),
        np.concatenate([fresh.contents, taken.contents]),
        np.concatenate([fresh.slots, taken.slots]),
        np.concatenate([fresh.weights, taken.weights]),
    )
    places = [len(fresh) + np.searchsorted(used, spec.items) for spec in carried]
    return joined, [
        replace(spec, items=place.astype(np.int32))
        for spec, place in zip(carried, places, strict=True)
    ]


def _restored(buffer: ReplayBuffer, saved: Mapping[str, Any]) -> ReplayBatch:
    """The samples of a saved window, from the buffer or from the state itself."""
    rows = rows_of(saved["rows"])
    lost_rows, lost = batch_of(saved["lost"])
    contents = dict(zip(lost_rows["serial"].tolist(), lost, strict=True))
    slots = buffer.find(rows["serial"])
    held = buffer.snapshot()
    listed = []
    for row, slot in zip(rows, slots.tolist(), strict=True):
        serial = int(row["serial"])
        if serial not in contents:
            if slot < 0 or any(row[name] != held.rows[slot][name] for name in FIXED):
                raise Mismatch(
                    f"sample {serial} of the saved window is not in the buffer; "
                    f"restore the buffer that was saved together with it"
                )
            contents[serial] = held.contents[slot]
        listed.append(contents[serial])
    return ReplayBatch(rows, contents_of(listed), slots, np.asarray(saved["weights"], np.float64))


def _names(samples: ReplayBatch) -> list[str]:
    """The sample ids, made different where they are not: a plan knows samples by their ids."""
    names = samples.sample_ids
    if len(set(names)) == len(names):
        return names
    numbered = zip(names, samples.serials.tolist(), strict=True)
    return [f"{name}#{serial}#{place}" for place, (name, serial) in enumerate(numbered)]


def _carried_arrays(carried: tuple[MicrobatchSpec, ...]) -> dict[str, NDArray[Any]]:
    def joined(name: str) -> NDArray[np.int32]:
        empty = np.empty(0, np.int32)
        return np.concatenate([empty, *(getattr(spec, name) for spec in carried)])

    return {
        **{name: joined(name) for name in ("items", "starts", "lengths", "row_offsets")},
        "segments": np.array([len(spec.items) for spec in carried], np.int64),
        "rows": np.array([spec.batch_size for spec in carried], np.int64),
        "bucket_id": np.array([spec.bucket_id for spec in carried], np.int64),
        "max_len": np.array([spec.max_len for spec in carried], np.int64),
    }


def _carried(arrays: Mapping[str, NDArray[Any]]) -> list[MicrobatchSpec]:
    segment = np.concatenate([[0], np.cumsum(arrays["segments"])]).astype(int)
    row = np.concatenate([[0], np.cumsum(arrays["rows"] + 1)]).astype(int)
    return [
        MicrobatchSpec(
            epoch=0,
            index=k,
            bucket_id=int(arrays["bucket_id"][k]),
            max_len=int(arrays["max_len"][k]),
            items=arrays["items"][segment[k] : segment[k + 1]],
            starts=arrays["starts"][segment[k] : segment[k + 1]],
            lengths=arrays["lengths"][segment[k] : segment[k + 1]],
            row_offsets=arrays["row_offsets"][row[k] : row[k + 1]],
            ids=Ids.numbered(0),
        )
        for k in range(len(arrays["segments"]))
    ]
