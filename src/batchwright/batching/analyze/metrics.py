"""Padding efficiency and shapes of batches.

A ratio with nothing to divide by is None and is shown as "-".
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from batchwright.batching.buckets import BucketStats

__all__ = ["BatchMetrics", "BatchShapeHistogram", "ascii_bars", "ratio", "shown"]


@dataclass(slots=True)
class BatchShapeHistogram:
    """How often each shape (rows, width) occurs; a compiler builds one program for each.

    >>> shapes = BatchShapeHistogram()
    >>> shapes.add(32, 128, count=9)
    >>> shapes.add(16, 256)
    >>> print(shapes.to_ascii(width=18))
    32 x 128 | ################## 9 (90.0%)
    16 x 256 | ##                 1 (10.0%)
    """

    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, rows: int, width: int, count: int = 1) -> None:
        self.counts[rows, width] += count

    @property
    def num_shapes(self) -> int:
        return len(self.counts)

    @property
    def total(self) -> int:
        """Batches of all shapes."""
        return self.counts.total()

    def most_common(self, n: int | None = None) -> list[tuple[tuple[int, int], int]]:
        """The `n` commonest shapes with their counts; equal counts in the order of the shape."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:n]

    def to_ascii(self, width: int = 50, n: int = 20) -> str:
        """A bar for each of the `n` commonest shapes."""
        shown = self.most_common(n)
        labels = [f"{rows} x {columns}" for (rows, columns), _ in shown]
        lines = ascii_bars(labels, [count for _, count in shown], width, whole=self.total)
        if self.num_shapes > n:
            lines.append(f"and {self.num_shapes - n:,} more shapes")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BatchMetrics:
    """Tokens, samples and time of some batches, and what follows from them.

    `total_tokens` are useful, `padded_tokens` are rows times width, `loss_tokens` are those the
    loss counts.

    >>> metrics = BatchMetrics(total_tokens=750, padded_tokens=1000, total_samples=8)
    >>> metrics.efficiency, metrics.ullage, metrics.skip_rate, metrics.tokens_per_second
    (0.75, 0.25, 0.0, None)
    """

    total_tokens: int = 0
    padded_tokens: int = 0
    loss_tokens: int = 0
    total_samples: int = 0
    skipped_samples: int = 0
    total_batches: int = 0
    total_time_seconds: float = 0.0
    bucket_stats: Mapping[int, BucketStats] = field(default_factory=dict)
    shape_histogram: BatchShapeHistogram = field(default_factory=BatchShapeHistogram)

    @classmethod
    def of(
        cls,
        batches: Iterable[Any],
        *,
        loss_tokens: int = 0,
        skipped_samples: int = 0,
        total_time_seconds: float = 0.0,
    ) -> "BatchMetrics":
        """Count batches of any kind that know their shape.

        Each has `batch_size`, `max_len` or `max_length`, `token_count` and `bucket_id`. One with
        `items` holds that many samples (packed rows hold several, a split sample counts once a
        piece); any other holds one a row. A filler, of `weight` 0, adds padding only.
        """
        per_bucket: dict[int, tuple[int, int, int]] = {}
        shapes = BatchShapeHistogram()
        for batch in batches:
            rows = int(batch.batch_size)
            width = int(batch.max_len if hasattr(batch, "max_len") else batch.max_length)
            samples = len(batch.items) if hasattr(batch, "items") else rows
            useful = int(batch.token_count)
            if getattr(batch, "weight", 1.0) == 0:
                samples = useful = 0
            shapes.add(rows, width)
            before = per_bucket.get(int(batch.bucket_id), (0, 0, 0))
            per_bucket[int(batch.bucket_id)] = (
                before[0] + samples,
                before[1] + useful,
                before[2] + rows * width,
            )
        stats = {bucket: BucketStats(*per_bucket[bucket]) for bucket in sorted(per_bucket)}
        return cls(
            total_tokens=sum(s.total_tokens for s in stats.values()),
            padded_tokens=sum(s.padded_tokens for s in stats.values()),
            loss_tokens=loss_tokens,
            total_samples=sum(s.sample_count for s in stats.values()),
            skipped_samples=skipped_samples,
            total_batches=shapes.total,
            total_time_seconds=total_time_seconds,
            bucket_stats=stats,
            shape_histogram=shapes,
        )

    @property
    def efficiency(self) -> float | None:
        """Useful tokens over padded tokens."""
        return ratio(self.total_tokens, self.padded_tokens)

    @property
    def ullage(self) -> float | None:
        """The empty part of the capacity: 1 - useful / capacity."""
        return ratio(self.padded_tokens - self.total_tokens, self.padded_tokens)

    @property
    def padding_waste(self) -> float | None:
        """Another name for `ullage`."""
        return self.ullage

    @property
    def loss_efficiency(self) -> float | None:
        """Tokens the loss counts, over padded tokens."""
        return ratio(self.loss_tokens, self.padded_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """Useful tokens a second."""
        return ratio(self.total_tokens, self.total_time_seconds)

    @property
    def effective_tokens_per_second(self) -> float | None:
        """Tokens the loss counts, a second."""
        return ratio(self.loss_tokens, self.total_time_seconds)

    @property
    def avg_batch_size(self) -> float | None:
        """Samples in a batch, on average."""
        return ratio(self.total_samples, self.total_batches)

    @property
    def skip_rate(self) -> float | None:
        """The share of all samples that was left out."""
        return ratio(self.skipped_samples, self.total_samples + self.skipped_samples)

    def to_dict(self) -> dict[str, Any]:
        """Counts and the figures that follow, ready for JSON."""
        shapes = [[*shape, count] for shape, count in self.shape_histogram.most_common()]
        return {
            **{name: getattr(self, name) for name in _COUNTS + _FIGURES},
            "bucket_stats": {
                str(bucket): {**asdict(s), "efficiency": s.efficiency, "avg_length": s.avg_length}
                for bucket, s in self.bucket_stats.items()
            },
            "shapes": shapes,
        }

    def summary(self) -> str:
        """The figures, one a line.

        >>> print(BatchMetrics(total_tokens=750, padded_tokens=1000, total_batches=2).summary())
        batches          2
        samples          0 (0 skipped)
        tokens           750 useful of 1,000 padded
        efficiency       75.0%
        ullage           25.0%
        samples a batch  0.0
        batch shapes     0
        """
        lines = [
            ("batches", f"{self.total_batches:,}"),
            ("samples", f"{self.total_samples:,} ({self.skipped_samples:,} skipped)"),
            ("tokens", f"{self.total_tokens:,} useful of {self.padded_tokens:,} padded"),
            ("efficiency", shown(self.efficiency, ".1%")),
            ("ullage", shown(self.ullage, ".1%")),
            ("samples a batch", shown(self.avg_batch_size, ",.1f")),
            ("batch shapes", f"{self.shape_histogram.num_shapes:,}"),
        ]
        if self.loss_tokens:
            loss = f"{self.loss_tokens:,} ({shown(self.loss_efficiency, '.1%')} of padded)"
            lines.append(("loss tokens", loss))
        if self.total_time_seconds:
            lines.append(("tokens a second", shown(self.tokens_per_second, ",.0f")))
        return "\n".join(f"{name:<17}{value}" for name, value in lines)

    def bucket_summary(self) -> str:
        """A line for each bucket."""
        lines = [f"{'bucket':>6} {'samples':>12} {'mean length':>12} {'efficiency':>11}"]
        for bucket, stats in self.bucket_stats.items():
            mean = shown(stats.avg_length, ",.1f")
            efficiency = shown(stats.efficiency, ".1%")
            lines.append(f"{bucket:>6} {stats.sample_count:>12,} {mean:>12} {efficiency:>11}")
        return "\n".join(lines)


_COUNTS = (
    "total_tokens",
    "padded_tokens",
    "loss_tokens",
    "total_samples",
    "skipped_samples",
    "total_batches",
    "total_time_seconds",
)
_FIGURES = (
    "efficiency",
    "ullage",
    "loss_efficiency",
    "tokens_per_second",
    "effective_tokens_per_second",
    "avg_batch_size",
    "skip_rate",
)


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`, or None when there is no whole."""
    return part / whole if whole else None


def shown(value: float | None, form: str) -> str:
    """`value` in the given format, or "-" when there is none."""
    return "-" if value is None else format(value, form)


def ascii_bars(
    labels: Sequence[str], counts: Sequence[int], width: int, *, whole: int
) -> list[str]:
    """One line of '#' for each count, the largest `width` long; a count above 0 is never blank."""
    name = max(map(len, labels), default=0)
    digits = max((len(f"{count:,}") for count in counts), default=0)
    largest = max(counts, default=0)
    lines = []
    for label, count in zip(labels, counts, strict=True):
        bar = "#" * (max(1, round(width * count / largest)) if count else 0)
        share = shown(ratio(count, whole), ".1%")
        lines.append(f"{label:>{name}} | {bar:<{width}} {count:>{digits},} ({share})")
    return lines
