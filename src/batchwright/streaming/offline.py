"""A data set as a stream of samples that can be resumed at any sample."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np

from batchwright import rng
from batchwright.data.rows import Row
from batchwright.data.rows.sample import encode_rows
from batchwright.data.rows.source import OnBadRow, open_source
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.data.tokenizers.tokenizer import ByteTokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch
from batchwright.permutation import permute_many
from batchwright.streaming.protocols import LocalStream, check_state, metrics_of, position_of
from batchwright.streaming.sample import SampleSource, StreamMetrics, StreamSample

__all__ = ["AsyncOfflineDatasetStream", "OfflineDatasetStream"]

BLOCK = 64
"""Rows that are read and tokenised together."""

CARRIED = (
    *("reward", "success", "episode_id", "episode_status", "step_index", "total_steps"),
    *("segment_ids", "timestamp", "priority"),
)
"""Keys of a row that become fields of its sample."""


class OfflineDatasetStream(LocalStream):
    """Samples of JSONL, Parquet or a Hugging Face data set, in file order or shuffled.

    `tokenizer` is one, or its name; None reads rows that have `input_ids` already. Samples
    outside `min_length` to `max_length`, and those for which a filter is false, are skipped and
    counted; `transforms` are applied to the others, in order. Every epoch is shuffled anew, and
    no order is held in memory.
    """

    def __init__(
        self,
        path: Any,
        dataset_id: str | None = None,
        *,
        tokenizer: Tokenizer | str | None = None,
        min_length: int = 1,
        max_length: int = 8192,
        shuffle: bool = False,
        seed: int = 42,
        filters: Sequence[Callable[[StreamSample], bool]] = (),
        transforms: Sequence[Callable[[StreamSample], StreamSample]] = (),
        on_bad_row: OnBadRow = "fail",
    ) -> None:
        if not 1 <= min_length <= max_length:
            raise ConfigError(
                f"min_length must be from 1 to max_length={max_length:,}, got {min_length:,}"
            )
        self._source = open_source(path)
        self.dataset_id = dataset_id or self._source.name
        self._ready_only = tokenizer is None
        named = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._tokenizer = named or _AnyIds()
        self._lengths = range(min_length, max_length + 1)
        self._shuffle, self._seed = shuffle, seed
        self._filters, self._transforms = filters, transforms
        self._on_bad_row = on_bad_row
        self.metrics = StreamMetrics()
        self.epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """Rows of the data set, before any filter."""
        return len(self._source)

    def __iter__(self) -> Iterator[StreamSample]:
        while block := self._read_block():
            yield from self._give(block)
        self._next_epoch()

    def reset(self) -> None:
        """Restart at epoch 0."""
        self.epoch = self._position = 0
        self.metrics = StreamMetrics()

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "OfflineDatasetStream",
            "rows": len(self._source),
            "fingerprint": self._fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self.epoch,
            "position": self._position,
            "metrics": self.metrics.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = ("rows", "fingerprint", "shuffle", "seed", "epoch", "position", "metrics")
        check_state(state, "OfflineDatasetStream", "kind", *names)
        for name, mine in (
            ("rows", len(self._source)),
            ("shuffle", self._shuffle),
            ("seed", self._seed),
        ):
            if state[name] != mine:
                raise Mismatch(
                    f"the state is of a stream with {name}={state[name]}, this one has {mine}; "
                    f"open the data with the settings it was saved with"
                )
        if state["fingerprint"] != self._fingerprint:
            raise Mismatch(
                f"{self._source.name} has changed since the state was taken, though it has as many "
                f"rows; restore the data, or begin without the state"
            )
        epoch, metrics = position_of(state, "epoch"), metrics_of(state)
        self._position = position_of(state, "position", len(self._source))
        self.epoch, self.metrics = epoch, metrics

    @cached_property
    def _fingerprint(self) -> str:
        # A whole file is read for it, so once.
        return self._source.fingerprint

    def _next_epoch(self) -> None:
        self.epoch, self._position = self.epoch + 1, 0

    def _read_block(self) -> list[tuple[int, Row | BadRow]]:
        """The next rows with their numbers; empty at the end of the epoch."""
        n = len(self._source)
        stop = min(self._position + BLOCK, n)
        if not self._shuffle:
            return list(self._source.chunk(self._position, stop).rows())
        places = np.arange(self._position, stop)
        key = np.uint64(rng.key(self._seed, "streaming/offline", self.epoch))
        items = permute_many(places, np.full(len(places), n), np.full(len(places), key))
        return [(item, self._row(item)) for item in items.tolist()]

    def _row(self, item: int) -> Row | BadRow:
        try:
            return self._source[item]
        except BadRow as error:
            return error

    def _give(self, block: list[tuple[int, Row | BadRow]]) -> Iterator[StreamSample]:
        checked = [(item, self._checked(row)) for item, row in block]
        rows = dict(block)
        for item, outcome in encode_rows(checked, self._tokenizer):
            sample: StreamSample | BadRow = BadRow("")
            try:
                if isinstance(outcome, BadRow):
                    raise outcome
                sample = StreamSample.from_sample(outcome, **self._fields(rows[item]))
            except BadRow as error:
                self._bad(item, error)
            self._position += 1
            if isinstance(sample, BadRow):
                continue
            if sample.length not in self._lengths or not all(f(sample) for f in self._filters):
                self.metrics.record_filtered()
                continue
            for transform in self._transforms:
                sample = transform(sample)
                if not isinstance(sample, StreamSample):
                    raise ConfigError(
                        f"a transform must return a StreamSample, "
                        f"{getattr(transform, '__name__', transform)} returned "
                        f"{type(sample).__name__}; use a filter to leave samples out"
                    )
            self.metrics.record_sample(sample)
            last = sample.total_steps is None or sample.step_index == sample.total_steps - 1
            if sample.success is not None and last:
                self.metrics.record_episode(sample.success)
            yield sample

    def _checked(self, row: Row | BadRow) -> Row | BadRow:
        if not isinstance(row, BadRow) and self._ready_only and row.get("input_ids") is None:
            return BadRow("has no input_ids, and the stream has no tokenizer; name one")
        return row

    def _fields(self, row: Row | BadRow) -> dict[str, Any]:
        assert not isinstance(row, BadRow)
        fields: dict[str, Any] = {"source": SampleSource.OFFLINE}
        if row.get("dataset_id") is None:
            fields["dataset_id"] = self.dataset_id
        fields.update({name: row[name] for name in CARRIED if row.get(name) is not None})
        if isinstance(difficulty := row.get("difficulty"), float) and not isfinite(difficulty):
            # For plans it counts as unknown; here it is refused as a reward that is no number.
            fields["difficulty"] = difficulty
        return fields

    def _bad(self, item: int, error: BadRow) -> None:
        if self._on_bad_row == "fail":
            text = str(error)
            place = self._source.where(item)
            raise BadRow(text if text.startswith(place) else f"{place}: {text}") from None
        self.metrics.record_error()


class AsyncOfflineDatasetStream(OfflineDatasetStream):
    """The same stream for `async for`; files are read in a thread, so the event loop is free."""

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        while block := await asyncio.to_thread(self._read_block):
            for sample in self._give(block):
                yield sample
        self._next_epoch()


class _AnyIds(ByteTokenizer):
    """For rows that are tokens already, of whatever vocabulary."""

    vocab_size = 2**31
