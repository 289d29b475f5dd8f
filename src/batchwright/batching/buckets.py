"""Buckets: ranges of length whose samples are padded to one width."""

import operator
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.data.lengths import LONGEST
from batchwright.errors import ConfigError

__all__ = ["BucketSpec", "BucketStats"]


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Widths to pad to: one bucket for each edge, and a last one up to `overflow_max`.

    A sample goes to the first bucket that is wide enough. Samples shorter than `min_length` or
    longer than `overflow_max` are in no bucket: `should_skip` is true for them, and the
    planner's `overflow` policy decides. With no edges there is a single bucket.

    >>> spec = BucketSpec(edges=(128, 256, 512), overflow_max=1024)
    >>> spec.num_buckets, spec.get_bucket_id(256), spec.get_bucket_range(2)
    (4, 1, (257, 512))
    """

    edges: tuple[int, ...]
    overflow_max: int
    min_length: int = 1

    def __post_init__(self) -> None:
        try:
            edges = tuple(operator.index(edge) for edge in self.edges)
            overflow_max = operator.index(self.overflow_max)
            min_length = operator.index(self.min_length)
        except TypeError:
            raise ConfigError(
                f"bucket edges {self.edges!r} with overflow_max={self.overflow_max!r} and "
                f"min_length={self.min_length!r} must be integers; "
                f"give counts of tokens such as edges=(128, 256), overflow_max=512"
            ) from None
        # Lists and numpy integers are welcome, but equal specs must compare and hash equal.
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "overflow_max", overflow_max)
        object.__setattr__(self, "min_length", min_length)
        _check(edges, overflow_max, min_length)

    @classmethod
    def default(cls) -> "BucketSpec":
        """Powers of two from 128, for models with a context of 2048."""
        return cls(edges=(128, 256, 512, 1024), overflow_max=2048)

    @classmethod
    def from_max_length(cls, max_length: int, num_buckets: int = 4) -> "BucketSpec":
        """`num_buckets` buckets of equal width, the last one ending at `max_length`.

        Equal widths know nothing of the data; `suggest_bucket_edges` does.

        >>> BucketSpec.from_max_length(1000, num_buckets=3)
        BucketSpec(edges=(333, 666), overflow_max=1000, min_length=1)
        """
        if not 1 <= num_buckets <= max_length:
            raise ConfigError(
                f"num_buckets must be between 1 and max_length={max_length}, got {num_buckets}"
            )
        edges = tuple(max_length * k // num_buckets for k in range(1, num_buckets))
        return cls(edges=edges, overflow_max=max_length)

    @property
    def num_buckets(self) -> int:
        """One for each edge, and the overflow bucket."""
        return len(self.edges) + 1

    @property
    def widths(self) -> tuple[int, ...]:
        """What each bucket pads to: the edges, then `overflow_max`."""
        return (*self.edges, self.overflow_max)

    def get_bucket_id(self, length: int) -> int:
        """The first bucket wide enough; whatever exceeds every edge is in the overflow bucket."""
        return bisect_left(self.edges, length)

    def get_bucket_ids(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """`get_bucket_id` of many lengths at once.

        >>> BucketSpec(edges=(4, 8), overflow_max=16).get_bucket_ids([1, 4, 5, 8, 9]).tolist()
        [0, 0, 1, 1, 2]
        """
        edges = np.asarray(self.edges, np.int64)
        return np.searchsorted(edges, np.asarray(lengths), side="left").astype(np.int64)

    def get_bucket_max_length(self, bucket_id: int) -> int:
        """The width of a bucket: its longest sample, and what the others are padded to."""
        return self.widths[self._known(bucket_id)]

    def get_bucket_range(self, bucket_id: int) -> tuple[int, int]:
        """The shortest and the longest length of a bucket, both included."""
        widths = self.widths
        shortest = widths[bucket_id - 1] + 1 if self._known(bucket_id) else self.min_length
        return shortest, widths[bucket_id]

    def should_skip(self, length: int) -> bool:
        """Whether no bucket takes a sample of this length.

        >>> [BucketSpec((4,), overflow_max=8).should_skip(length) for length in (8, 9)]
        [False, True]
        """
        return not self.min_length <= length <= self.overflow_max

    def _known(self, bucket_id: int) -> int:
        if not 0 <= bucket_id < self.num_buckets:
            raise ConfigError(
                f"bucket_id must be between 0 and {self.num_buckets - 1} for these edges, "
                f"got {bucket_id}"
            )
        return bucket_id


@dataclass(frozen=True, slots=True)
class BucketStats:
    """What a bucket holds: samples, their tokens, and the tokens after padding.

    >>> BucketStats(sample_count=2, total_tokens=150, padded_tokens=200).efficiency
    0.75
    """

    sample_count: int = 0
    total_tokens: int = 0
    padded_tokens: int = 0

    @property
    def efficiency(self) -> float | None:
        """Useful tokens over padded ones; None for an empty bucket."""
        return self.total_tokens / self.padded_tokens if self.padded_tokens else None

    @property
    def padding_ratio(self) -> float | None:
        """The share of padding, 1 - efficiency; None for an empty bucket."""
        efficiency = self.efficiency
        return None if efficiency is None else 1.0 - efficiency

    @property
    def avg_length(self) -> float | None:
        """Mean length of a sample; None for an empty bucket."""
        return self.total_tokens / self.sample_count if self.sample_count else None


def _check(edges: tuple[int, ...], overflow_max: int, min_length: int) -> None:
    for before, after in zip((0, *edges), edges, strict=False):
        if after <= before:
            raise ConfigError(
                f"bucket edges must be at least 1 and strictly ascending, got edge {after} after "
                f"{before or 'the start'} in {edges}; sort them and drop repeats"
            )
    if edges and overflow_max <= edges[-1]:
        raise ConfigError(
            f"overflow_max must be greater than the last bucket edge {edges[-1]}, "
            f"got {overflow_max}; raise overflow_max or drop that edge"
        )
    if not 1 <= overflow_max <= LONGEST:
        raise ConfigError(f"overflow_max must be between 1 and {LONGEST}, got {overflow_max}")
    widest_first = (*edges, overflow_max)[0]
    if not 1 <= min_length <= widest_first:
        raise ConfigError(
            f"min_length must be between 1 and {widest_first}, the width of the first bucket, "
            f"got {min_length}"
        )
