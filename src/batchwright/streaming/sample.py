"""One sample of a stream with its provenance, and the metrics of a stream."""

import contextlib
import operator
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from batchwright.data.rows.sample import Sample
from batchwright.errors import BadRow, ConfigError

__all__ = [
    "EpisodeStatus",
    "SampleSource",
    "StreamMetrics",
    "StreamSample",
    "StreamSettings",
    "first_reason",
    "real_number",
    "whole_number",
]

MOST = 2**31 - 1


class SampleSource(StrEnum):
    """Where a sample came from."""

    OFFLINE = "offline"
    """A file."""
    GYM = "gym"
    """An episode that a gym scored: a server, or a verifier in this process."""
    REPLAY = "replay"
    """Drawn from a replay buffer."""
    SYNTHETIC = "synthetic"
    """Generated, for tests and demonstrations."""


class EpisodeStatus(StrEnum):
    """How far an episode came."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    FAILURE = "failure"
    TIMEOUT = "timeout"
    ERROR = "error"


def _integers(value: Any, dtype: type[np.generic], most: int) -> NDArray[Any]:
    array: NDArray[Any] = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise ValueError("must be a list of integers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= most:
        raise ValueError(f"must hold integers from 0 to {most:,}")
    # An array over bytes cannot be changed by anybody, so it needs no copy.
    base: object = array.base
    if array.dtype == dtype and isinstance(base, bytes):
        return array
    return np.frombuffer(array.astype(dtype).tobytes(), dtype)


def _utc(value: datetime | None) -> datetime | None:
    # Files hold microseconds of one time zone; a time without a zone is local time.
    return None if value is None else value.astimezone(UTC)


def _listed(array: NDArray[Any]) -> list[int]:
    return [int(number) for number in array.tolist()]


Tokens = Annotated[
    NDArray[np.int32],
    PlainValidator(lambda value: _integers(value, np.int32, MOST)),
    PlainSerializer(_listed),
]
Mask = Annotated[
    NDArray[np.uint8],
    PlainValidator(lambda value: _integers(value, np.uint8, 1)),
    PlainSerializer(_listed),
]


def first_reason(error: ValidationError) -> str:
    """The first thing pydantic objects to, as one line: `name=value: reason`."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{name}={shown}: {reason}" if name else reason


def real_number(name: str, value: Any, low: float, high: float) -> float:
    """`value`, of whatever number type, as a float from `low` to `high`; else `ConfigError`."""
    number = float("nan")
    # A string would become a number, an array of one be taken for its entry.
    if not isinstance(value, str | bytes | np.complexfloating) and not getattr(value, "ndim", 0):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
    # As Python floats: a type of fewer bits would round the bounds to infinity.
    if not low <= number <= high:
        bounds = f"from {low:g} to {high:g}".replace("e+", "e")
        raise ConfigError(f"{name} must be {bounds}, got {value!r}")
    return number


def whole_number(name: str, value: Any, low: int | None = None) -> int:
    """`value`, of whatever integer type, as an int of at least `low`; else `ConfigError`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r}") from None
    if low is not None and number < low:
        raise ConfigError(f"{name} must be at least {low}, got {number}")
    return number


class StreamSample(BaseModel):
    """An immutable sample: tokens, loss mask, where it came from, how its episode went.

    `input_ids` and `loss_mask` are read-only arrays, so that a buffer of a million samples holds
    4 bytes a token. What is unknown is None, never 0.

    >>> sample = StreamSample(input_ids=[5, 6, 7], loss_mask=[0, 1, 1], sample_id="a",
    ...                       dataset_id="demo", source="offline")
    >>> sample.length, sample.num_loss_tokens, sample.with_replay().replay_count
    (3, 2, 1)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    input_ids: Tokens
    loss_mask: Mask
    """1 where the loss counts the token."""
    segment_ids: Tokens | None = None
    sample_id: str = Field(min_length=1)
    dataset_id: str
    source: SampleSource
    timestamp: Annotated[datetime | None, AfterValidator(_utc)] = None
    """When it was made, in UTC; None if that was not recorded."""
    episode_id: str | None = None
    episode_status: EpisodeStatus | None = None
    step_index: int | None = Field(None, ge=0, le=MOST)
    """Place in its episode, from 0."""
    total_steps: int | None = Field(None, ge=0, le=MOST)
    reward: float | None = Field(None, allow_inf_nan=False)
    difficulty: float | None = Field(None, ge=0.0, le=1.0)
    success: bool | None = None
    replay_count: int = Field(0, ge=0, le=2**62)
    """How often it was drawn from a replay buffer."""
    priority: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    """Initial sampling priority in a replay buffer."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            name = fields.get("sample_id")
            raise BadRow(f"sample {name!r} cannot be used: {first_reason(error)}") from None

    @model_validator(mode="after")
    def _one_value_a_token(self) -> "StreamSample":
        if not len(self.input_ids):
            raise ValueError("input_ids is empty; a sample has at least one token")
        if len(self.loss_mask) != len(self.input_ids):
            raise ValueError(
                f"loss_mask has {len(self.loss_mask)} entries for {len(self.input_ids)} input_ids"
            )
        if self.segment_ids is not None and len(self.segment_ids) != len(self.input_ids):
            raise ValueError(
                f"segment_ids has {len(self.segment_ids)} entries for "
                f"{len(self.input_ids)} input_ids"
            )
        return self

    @classmethod
    def from_sample(cls, sample: Sample, **fields: Any) -> "StreamSample":
        """A sample of the data engine, with `fields` to say where it came from."""
        known: dict[str, Any] = {"dataset_id": sample.dataset_id, "difficulty": sample.difficulty}
        return cls(
            input_ids=sample.input_ids,
            loss_mask=sample.loss_mask,
            sample_id=sample.sample_id,
            **{name: value for name, value in known.items() if value is not None} | fields,
        )

    def to_sample(self) -> Sample:
        """The same tokens as the data engine's collate takes them."""
        return Sample(
            self.input_ids, self.loss_mask, self.sample_id, self.dataset_id, self.difficulty
        )

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum(dtype=np.int64))

    @property
    def is_gym_sample(self) -> bool:
        return self.source is SampleSource.GYM

    @property
    def is_replay(self) -> bool:
        return self.source is SampleSource.REPLAY or self.replay_count > 0

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed, checked as a new sample is; `BadRow` if it is none."""
        if not update:
            return super().model_copy(deep=deep)
        made = type(self)(**{**dict(self), **update})
        given = self.model_fields_set | update.keys()
        object.__setattr__(made, "__pydantic_fields_set__", given)
        return made

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # Nothing in it can be changed, so nothing needs a copy of its own.
        return self.__copy__()

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # numpy makes arrays that can be changed when it unpickles.
        fields = state["__dict__"]
        frozen = {
            name: np.frombuffer(value.tobytes(), value.dtype)
            for name, value in fields.items()
            if isinstance(value, np.ndarray)
        }
        super().__setstate__({**state, "__dict__": {**fields, **frozen}})

    def with_replay(self) -> "StreamSample":
        """A copy that is marked as replayed once more; everything else stays."""
        return self.model_copy(
            update={"source": SampleSource.REPLAY, "replay_count": self.replay_count + 1}
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StreamSample):
            return NotImplemented
        return all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
            for mine, theirs in (
                (getattr(self, name), getattr(other, name)) for name in type(self).model_fields
            )
        )

    def __hash__(self) -> int:
        return hash((self.sample_id, self.dataset_id, self.length, self.replay_count))

    def __repr__(self) -> str:
        more = [
            f"{name}={value}"
            for name in ("episode_id", "reward", "difficulty", "success", "replay_count")
            if (value := getattr(self, name))
        ]
        parts = [self.sample_id, f"{self.length} tokens", self.source, *more]
        return f"StreamSample({', '.join(parts)})"

    __str__ = __repr__


class StreamMetrics(BaseModel):
    """Counts and means of a stream; the mean of nothing is None.

    >>> metrics = StreamMetrics()
    >>> metrics.record_episode(success=True)
    >>> metrics.success_rate, metrics.mean_reward
    (1.0, None)
    """

    model_config = ConfigDict(extra="forbid")

    samples_produced: int = 0
    samples_filtered: int = 0
    """Skipped by a filter or for their length."""
    samples_errored: int = 0
    """Rows that could not be read and were skipped."""
    episodes_completed: int = 0
    episodes_successful: int = 0
    episodes_failed: int = 0
    total_tokens: int = 0
    loss_tokens: int = 0
    min_length_seen: int | None = None
    max_length_seen: int | None = None
    difficulty_sum: float = 0.0
    difficulty_count: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0

    def record_sample(self, sample: StreamSample) -> None:
        """Count a sample that the stream yields."""
        length = sample.length
        self.samples_produced += 1
        self.total_tokens += length
        self.loss_tokens += sample.num_loss_tokens
        self.min_length_seen = min(self.min_length_seen or length, length)
        self.max_length_seen = max(self.max_length_seen or length, length)
        if sample.difficulty is not None:
            self.difficulty_sum += sample.difficulty
            self.difficulty_count += 1
        if sample.reward is not None:
            self.reward_sum += sample.reward
            self.reward_count += 1

    def record_filtered(self) -> None:
        self.samples_filtered += 1

    def record_error(self) -> None:
        self.samples_errored += 1

    def record_episode(self, success: bool) -> None:
        """Count a completed episode."""
        self.episodes_completed += 1
        self.episodes_successful += success
        self.episodes_failed += not success

    @property
    def samples_total(self) -> int:
        """Samples produced or filtered."""
        return self.samples_produced + self.samples_filtered

    @property
    def filter_rate(self) -> float | None:
        return _mean(self.samples_filtered, self.samples_total)

    @property
    def success_rate(self) -> float | None:
        return _mean(self.episodes_successful, self.episodes_completed)

    @property
    def mean_length(self) -> float | None:
        return _mean(self.total_tokens, self.samples_produced)

    @property
    def mean_difficulty(self) -> float | None:
        return _mean(self.difficulty_sum, self.difficulty_count)

    @property
    def mean_reward(self) -> float | None:
        return _mean(self.reward_sum, self.reward_count)

    def to_dict(self) -> dict[str, Any]:
        """Every count and every mean, for a log."""
        names = ("filter_rate", "success_rate", "mean_length", "mean_difficulty", "mean_reward")
        return {**self.model_dump(), **{name: getattr(self, name) for name in names}}


class StreamSettings(BaseModel):
    """Frozen settings whose errors are one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(first_reason(error)) from None


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
