"""How sample lengths become batches: one frozen object, every field of which changes the plan."""

import math
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from batchwright.batching.buckets import BucketSpec
from batchwright.batching.packing.modes import PackingMode
from batchwright.errors import ConfigError

__all__ = ["BatchingConfig", "BatchingMode", "Layout", "Overflow", "PadPolicy"]

Layout = Literal["bucketed", "sorted", "packed"]
Overflow = Literal["error", "skip", "truncate", "split"]


class PadPolicy(StrEnum):
    """How wide a padded batch is."""

    PAD_TO_BUCKET = "pad_to_bucket"
    """The bucket's upper edge: few distinct shapes, so few recompilations."""
    PAD_TO_MAX = "pad_to_max"
    """The longest sample of the batch: fewest padding tokens."""


class BatchingMode(StrEnum):
    """A preset of defaults; a field that is given overrides it."""

    PREDICTABLE = "predictable"
    """Fixed shapes, buckets in order from short to long: easy to debug."""
    THROUGHPUT = "throughput"
    """Narrowest batches in shuffled order: what training wants."""


_MODE_DEFAULTS: dict[BatchingMode, dict[str, Any]] = {
    BatchingMode.PREDICTABLE: {
        "pad_policy": PadPolicy.PAD_TO_BUCKET,
        "interleave_buckets": False,
    },
    BatchingMode.THROUGHPUT: {
        "pad_policy": PadPolicy.PAD_TO_MAX,
        "interleave_buckets": True,
    },
}


class BatchingConfig(BaseModel):
    """How sample lengths become batches.

    >>> BatchingConfig(token_budget=8192).pad_policy
    <PadPolicy.PAD_TO_MAX: 'pad_to_max'>
    >>> BatchingConfig.predictable(seed=1).interleave_buckets
    False
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: BatchingMode = BatchingMode.THROUGHPUT
    """Which defaults hold for `pad_policy` and `interleave_buckets`."""
    layout: Layout = "bucketed"
    """Group by bucket, by exact length, or join samples into full rows."""
    token_budget: int = Field(4096, gt=0, lt=2**31)
    """Padded tokens allowed in one microbatch."""
    bucket_edges: tuple[int, ...] = (128, 256, 512, 1024)
    """Upper lengths of the buckets (layout bucketed); the last bucket ends at `overflow_max`."""
    overflow_max: int = Field(2048, gt=0, lt=2**31)
    """Longest sample of a padded layout; a longer one follows `overflow`."""
    overflow: Overflow = "error"
    """What happens to a sample longer than `overflow_max`, the budget or `pack_max_length`."""
    no_loss: Literal["error", "skip"] = "error"
    """What happens to a sample of which no planned token carries loss, where lengths say so."""
    min_length: int = Field(1, gt=0)
    """Shorter samples are skipped and counted."""
    pad_policy: PadPolicy = PadPolicy.PAD_TO_MAX
    """How wide a padded batch is."""
    align: int = Field(1, gt=0)
    """Widths are rounded up to a multiple of this."""
    segment_multiple: int = Field(1, gt=0, lt=2**31)
    """Every sample is padded to a multiple of this, on its own, as context parallelism and FP8
    need it: `cu_seqlens` and widths are multiples."""
    pack_max_length: int = Field(2048, gt=0, lt=2**31)
    """Width of a packed row (layout packed)."""
    pack_mode: PackingMode = PackingMode.BEST_FIT_DECREASING
    """How rows are packed. Modes that take samples as they come shuffle them anew every epoch, and
    their plans are written out; the others are virtual."""
    pack_max_segments: int | None = Field(None, gt=0)
    """Most samples in one packed row; None is no limit."""
    seed: int = 42
    drop_last: bool = False
    """Leave out the last, partial batch of each bucket (layout bucketed); counted."""
    interleave_buckets: bool = True
    """Shuffle batches over the whole epoch; otherwise bucket after bucket, short to long."""
    step_size: int | Literal["world"] = "world"
    """Microbatches in one optimizer step over all ranks; "world" is one a rank."""
    curriculum_stages: int = Field(10, gt=0)
    """Stages from easy to hard when a difficulty is given to the builder."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # One line instead of pydantic's paragraph.
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
            seen, bounds = first["input"], first.get("ctx", {})
            if "gt" in bounds:
                raise ConfigError(
                    f"{name} must be at least {bounds['gt'] + 1}, got {seen}"
                ) from None
            if "lt" in bounds:
                most = bounds["lt"] - 1
                raise ConfigError(f"{name} must be at most {most:,}, got {seen}") from None
            prefix = f"{name}={seen!r}: " if name else ""
            raise ConfigError(prefix + first["msg"].removeprefix("Value error, ")) from None

    @classmethod
    def predictable(cls, **fields: Any) -> "BatchingConfig":
        """Fixed shapes in a fixed bucket order."""
        return cls(mode=BatchingMode.PREDICTABLE, **fields)

    @classmethod
    def throughput(cls, **fields: Any) -> "BatchingConfig":
        """Narrowest batches in shuffled order."""
        return cls(mode=BatchingMode.THROUGHPUT, **fields)

    @model_validator(mode="before")
    @classmethod
    def _mode_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        mode = BatchingMode(data.get("mode", BatchingMode.THROUGHPUT))
        fitting: dict[str, Any] = {}
        budget = data.get("token_budget")
        if isinstance(budget, int):
            # Only what was given can contradict a small budget; defaults give way to it.
            edges = cls.model_fields["bucket_edges"].default
            widest = cls.model_fields["pack_max_length"].default
            fitting["bucket_edges"] = tuple(edge for edge in edges if edge < budget)
            fitting["pack_max_length"] = max(1, min(widest, budget))
        return {**_MODE_DEFAULTS[mode], **fitting, **data}

    @model_validator(mode="after")
    def _consistent(self) -> "BatchingConfig":
        if isinstance(self.step_size, int) and self.step_size < 1:
            raise ConfigError(f"step_size must be at least 1 or 'world', got {self.step_size}")
        if self.drop_last and self.layout != "bucketed":
            raise ConfigError(
                f"drop_last is for layout bucketed, got layout {self.layout}, which has no "
                f"partial batches; leave it out"
            )
        if self.min_length > self.limit:
            raise ConfigError(
                f"min_length must be at most {self.limit:,}, the longest sample a batch can "
                f"hold, got {self.min_length:,}"
            )
        if self.layout == "bucketed":
            widest = self._fit(self.bucket_edges[-1]) if self.bucket_edges else 0
            if widest > self.token_budget:
                raise ConfigError(
                    f"bucket edge {self.bucket_edges[-1]:,} makes rows wider than "
                    f"token_budget={self.token_budget:,}; raise the budget or drop the edge"
                )
            _ = self.bucket_spec
        if self.layout == "packed" and self._fit(self.pack_max_length) > self.token_budget:
            raise ConfigError(
                f"pack_max_length must be at most token_budget={self.token_budget:,}, got "
                f"{self.pack_max_length:,}; raise the budget or narrow the rows"
            )
        return self

    @property
    def limit(self) -> int:
        """The longest sample a batch can hold; longer ones follow `overflow`."""
        multiple = self.segment_multiple
        if self.layout == "packed":
            if self.pack_max_length < multiple:
                raise ConfigError(
                    f"pack_max_length must be at least segment_multiple={multiple:,}, "
                    f"got {self.pack_max_length:,}"
                )
            return self.pack_max_length // multiple * multiple
        align = self.width_multiple
        widest = self.token_budget // align * align
        if widest == 0:
            what = "align" if align == self.align else "segment_multiple"
            raise ConfigError(
                f"token_budget must be at least {what}={align:,}, got {self.token_budget:,}"
            )
        return min(self.overflow_max, widest)

    @property
    def width_multiple(self) -> int:
        """Widths are multiples of this."""
        return math.lcm(self.align, self.segment_multiple)

    def room(self, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens that samples take up in a row: their lengths, rounded up."""
        multiple = self.segment_multiple
        if multiple == 1:
            return lengths
        return -(-lengths // np.int32(multiple)) * np.int32(multiple)

    @property
    def bucket_spec(self) -> BucketSpec:
        """The buckets this config draws, the last one ending at `limit`."""
        limit = self.limit
        edges = self.bucket_edges
        # An edge at the limit leaves nothing for an overflow bucket: it is the last bucket itself.
        if edges and edges[-1] == limit:
            edges = edges[:-1]
        return BucketSpec(edges=edges, overflow_max=limit, min_length=self.min_length)

    def get_pad_length(self, bucket_id: int, max_in_batch: int) -> int:
        """The width of a batch of this bucket whose longest sample has `max_in_batch` tokens."""
        if self.pad_policy is PadPolicy.PAD_TO_BUCKET and bucket_id >= 0:
            return self._fit(self.bucket_spec.get_bucket_max_length(bucket_id))
        return self._fit(max_in_batch)

    def _fit(self, length: int) -> int:
        return -(-length // self.width_multiple) * self.width_multiple
