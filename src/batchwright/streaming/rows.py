"""How a buffer stores a sample: a row of numbers, and one byte string for tokens and ids.

The bytes are the token ids (int32, little-endian), the segment ids if there are any, the loss
mask (a byte a token), then sample id, dataset id and episode id in UTF-8.
"""

import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, BadRow
from batchwright.streaming.sample import MOST, EpisodeStatus, SampleSource, StreamSample

__all__ = [
    "REPLAYED",
    "ROW",
    "Contents",
    "arrays_of",
    "batch_of",
    "check_rows",
    "columns_of",
    "contents_of",
    "id_of",
    "ids_of",
    "pack",
    "rows_of",
    "unpack",
]

ROW = np.dtype(
    [
        ("serial", np.int64),
        ("priority", np.float64),
        ("replay_count", np.int64),
        ("reward", np.float64),
        ("difficulty", np.float64),
        ("timestamp", np.int64),
        ("length", np.int32),
        ("sample_id_bytes", np.int32),
        ("dataset_id_bytes", np.int32),
        ("episode_id_bytes", np.int32),
        ("step_index", np.int32),
        ("total_steps", np.int32),
        ("source", np.int8),
        ("episode_status", np.int8),
        ("success", np.int8),
        ("segmented", np.int8),
    ],
    align=True,
)
"""Numbers of a sample; NaN, -1 and, for the timestamp, the least number stand for None."""

Contents = NDArray[np.object_]
"""The bytes of many samples."""

NEVER = -(2**63)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SOURCES = tuple(SampleSource)
STATUSES = tuple(EpisodeStatus)
_SOURCE = {source: number for number, source in enumerate(SOURCES)}
_STATUS = {status: number for number, status in enumerate(STATUSES)}
REPLAYED = _SOURCE[SampleSource.REPLAY]
NAN = float("nan")
MOST_FLOAT = sys.float_info.max


def pack(sample: StreamSample, priority: float, serial: int) -> tuple[tuple[Any, ...], bytes]:
    """The row and the bytes of a sample; `BadRow` for one that could not be read again."""
    _check(sample)
    name, dataset = sample.sample_id.encode(), sample.dataset_id.encode()
    episode = b"" if sample.episode_id is None else sample.episode_id.encode()
    segments = b"" if sample.segment_ids is None else sample.segment_ids.tobytes()
    content = b"".join(
        (
            sample.input_ids.tobytes(),
            segments,
            sample.loss_mask.tobytes(),
            name,
            dataset,
            episode,
        )
    )
    row = (
        serial,
        priority,
        sample.replay_count,
        NAN if sample.reward is None else sample.reward,
        NAN if sample.difficulty is None else sample.difficulty,
        NEVER if sample.timestamp is None else _microseconds(sample.timestamp),
        len(sample.input_ids),
        len(name),
        len(dataset),
        -1 if sample.episode_id is None else len(episode),
        -1 if sample.step_index is None else sample.step_index,
        -1 if sample.total_steps is None else sample.total_steps,
        _SOURCE[sample.source],
        -1 if sample.episode_status is None else _STATUS[sample.episode_status],
        -1 if sample.success is None else sample.success,
        bool(segments),
    )
    return row, content


def _check(sample: StreamSample) -> None:
    """Refuse a sample that was made past its own checks, as by `model_construct`."""
    try:
        ids, mask, segments = sample.input_ids, sample.loss_mask, sample.segment_ids
        arrays: list[tuple[NDArray[Any], type]] = [(ids, np.int32), (mask, np.uint8)]
        arrays += [] if segments is None else [(segments, np.int32)]
        sound = (
            all(array.dtype == dtype and array.shape == (len(ids),) for array, dtype in arrays)
            and len(ids) > 0
            and ids.min() >= 0
            and mask.max() <= 1
            and (segments is None or segments.min() >= 0)
            and _within(sample.reward, float, -MOST_FLOAT, MOST_FLOAT)
            and _within(sample.difficulty, float, 0.0, 1.0)
            and _within(sample.step_index, int, 0, MOST)
            and _within(sample.total_steps, int, 0, MOST)
            and sample.replay_count is not None
            and _within(sample.replay_count, int, 0, 2**62)
            and _within(sample.success, bool, 0, 1)
            and sample.source in _SOURCE
            and (sample.episode_status is None or sample.episode_status in _STATUS)
            and sample.sample_id != ""
            and (sample.timestamp is None or sample.timestamp.tzinfo is not None)
        )
        for text in (sample.sample_id, sample.dataset_id, sample.episode_id or ""):
            text.encode()
    except (AttributeError, TypeError, UnicodeEncodeError):
        sound = False
    if not sound:
        # The checks of a new sample say what is wrong.
        fields = StreamSample.model_fields
        StreamSample(**{name: getattr(sample, name) for name in fields if hasattr(sample, name)})
        raise BadRow(
            f"sample {getattr(sample, 'sample_id', None)!r} cannot be used: a field is of another "
            f"type than StreamSample(...) makes it"
        )


def _within(value: Any, kind: type[float], low: float, high: float) -> bool:
    return value is None or (type(value) is kind and bool(low <= value <= high))


def unpack(row: np.void, content: bytes) -> StreamSample:
    """The sample of a row and its bytes; its priority is the one of the buffer."""
    (
        _,
        priority,
        replay_count,
        reward,
        difficulty,
        timestamp,
        length,
        name_bytes,
        dataset_bytes,
        episode_bytes,
        step_index,
        total_steps,
        source,
        status,
        success,
        segmented,
    ) = row.item()
    # Made of checked parts, so not checked again: that would take most of the time.
    mask = 4 * length * (1 + segmented)
    name = mask + length
    dataset = name + name_bytes
    episode = dataset + dataset_bytes
    return StreamSample.model_construct(
        {"priority"},
        input_ids=np.frombuffer(content, np.int32, length),
        loss_mask=np.frombuffer(content, np.uint8, length, mask),
        segment_ids=np.frombuffer(content, np.int32, length, 4 * length) if segmented else None,
        sample_id=content[name:dataset].decode(),
        dataset_id=content[dataset:episode].decode(),
        source=SOURCES[source],
        timestamp=None if timestamp == NEVER else EPOCH + timedelta(microseconds=timestamp),
        episode_id=None if episode_bytes < 0 else content[episode:].decode(),
        episode_status=None if status < 0 else STATUSES[status],
        step_index=None if step_index < 0 else step_index,
        total_steps=None if total_steps < 0 else total_steps,
        reward=None if reward != reward else reward,
        difficulty=None if difficulty != difficulty else difficulty,
        success=None if success < 0 else bool(success),
        replay_count=replay_count,
        priority=priority,
    )


def id_of(row: np.void, content: bytes) -> str:
    """The sample id, without making the sample."""
    start = int(row["length"]) * (5 + 4 * int(row["segmented"]))
    return content[start : start + int(row["sample_id_bytes"])].decode()


def ids_of(rows: NDArray[np.void], contents: Contents) -> list[str]:
    """`id_of` of many samples, several times as fast."""
    starts = rows["length"].astype(np.int64) * (5 + 4 * rows["segmented"].astype(np.int64))
    ends = starts + rows["sample_id_bytes"]
    places = zip(contents, starts.tolist(), ends.tolist(), strict=True)
    return [content[start:end].decode() for content, start, end in places]


def arrays_of(rows: NDArray[np.void], contents: Contents) -> dict[str, NDArray[Any]]:
    """One array for each column, and the bytes of all samples end to end."""
    return {**columns_of(rows), "content": np.frombuffer(b"".join(contents.tolist()), np.uint8)}


def columns_of(rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    """One array for each column."""
    return {name: np.ascontiguousarray(rows[name]) for name in ROW.names or ()}


def batch_of(arrays: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.void], Contents]:
    """The inverse of `arrays_of`; `BadFile` if the arrays do not fit together."""
    rows = rows_of(arrays)
    if "content" not in arrays:
        raise BadFile("a replay buffer needs the array content, which is not there")
    ends = np.cumsum(_sizes(rows))
    raw = np.ascontiguousarray(arrays["content"], np.uint8).tobytes()
    needed = int(ends[-1]) if len(ends) else 0
    if len(raw) != needed:
        raise BadFile(f"the replay buffer has {len(raw):,} bytes of samples, not {needed:,}")
    places = [0, *ends.tolist()]
    return rows, contents_of([raw[a:b] for a, b in pairwise(places)])


def contents_of(listed: list[bytes]) -> Contents:
    """Strings of bytes as an array of objects, from which many are taken far faster."""
    contents = np.empty(len(listed), object)
    contents[:] = listed
    return contents


def rows_of(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.void]:
    """The rows whose columns are given; `BadFile` if one is missing or out of range."""
    names = ROW.names or ()
    missing = [name for name in names if name not in arrays]
    if missing:
        raise BadFile(f"a replay buffer needs the array {missing[0]}, which is not there")
    if any(np.shape(arrays[name]) != (len(arrays["serial"]),) for name in names):
        raise BadFile("the arrays of the replay buffer differ in length")
    rows = np.zeros(len(arrays["serial"]), ROW)
    for name in names:
        rows[name] = arrays[name]
    check_rows(rows)
    return rows


def _sizes(rows: NDArray[np.void]) -> NDArray[np.int64]:
    tokens = rows["length"].astype(np.int64) * (5 + 4 * rows["segmented"].astype(np.int64))
    texts = rows["sample_id_bytes"].astype(np.int64) + rows["dataset_id_bytes"]
    sizes: NDArray[np.int64] = tokens + texts + np.maximum(rows["episode_id_bytes"], 0)
    return sizes


def check_rows(rows: NDArray[np.void]) -> None:
    """Refuse numbers that no buffer writes: they would be read as something else."""
    allowed = {
        "priority": (0.0, 1e100),
        "replay_count": (0, 2**62),
        "length": (1, 2**31 - 1),
        "sample_id_bytes": (1, 2**31 - 1),
        "dataset_id_bytes": (0, 2**31 - 1),
        "episode_id_bytes": (-1, 2**31 - 1),
        "source": (0, len(SOURCES) - 1),
        "episode_status": (-1, len(STATUSES) - 1),
        "success": (-1, 1),
        "segmented": (0, 1),
    }
    for name, (low, high) in allowed.items():
        column = rows[name]
        if len(column) and not low <= column.min() <= column.max() <= high:
            raise BadFile(f"the column {name} of the replay buffer holds numbers out of range")


def _microseconds(when: datetime) -> int:
    return (when - EPOCH) // timedelta(microseconds=1)
