import json
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.analyze.metrics import BatchMetrics, BatchShapeHistogram
from batchwright.batching.buckets import BucketStats


@dataclass(frozen=True)
class Padded:
    lengths: tuple[int, ...]
    max_length: int
    bucket_id: int

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Packed:
    batch_size: int
    max_len: int
    token_count: int
    items: tuple[int, ...] = (0,)
    bucket_id: int = -1
    weight: float = 1.0


@st.composite
def padded_batches(draw: st.DrawFn) -> Padded:
    lengths = tuple(draw(st.lists(st.integers(1, 50), min_size=1, max_size=6)))
    return Padded(lengths, max(lengths) + draw(st.integers(0, 9)), draw(st.integers(0, 3)))


@settings(max_examples=80, deadline=None)
@given(st.lists(padded_batches(), max_size=12))
def test_counts_equal_a_plain_sum_over_the_batches(batches: list[Padded]) -> None:
    metrics = BatchMetrics.of(iter(batches), skipped_samples=3)

    useful = sum(sum(b.lengths) for b in batches)
    padded = sum(len(b.lengths) * b.max_length for b in batches)
    assert (metrics.total_tokens, metrics.padded_tokens) == (useful, padded)
    assert metrics.total_samples == sum(len(b.lengths) for b in batches)
    assert metrics.total_batches == metrics.shape_histogram.total == len(batches)
    assert list(metrics.bucket_stats) == sorted({b.bucket_id for b in batches})
    for bucket, stats in metrics.bucket_stats.items():
        inside = [b for b in batches if b.bucket_id == bucket]
        assert stats == BucketStats(
            sum(b.batch_size for b in inside),
            sum(b.token_count for b in inside),
            sum(b.batch_size * b.max_length for b in inside),
        )
    if batches:
        assert metrics.efficiency == useful / padded
        assert abs(metrics.efficiency + metrics.ullage - 1) < 1e-12
        assert metrics.skip_rate == 3 / (metrics.total_samples + 3)


def test_a_packed_row_holds_several_samples() -> None:
    metrics = BatchMetrics.of(
        [Packed(2, 100, 190, items=(4, 9, 2, 7, 5)), Packed(1, 100, 90, items=(1,))]
    )

    assert metrics.total_samples == 6
    assert metrics.padded_tokens == 300
    assert metrics.avg_batch_size == 3.0


def test_a_filler_takes_room_and_adds_nothing() -> None:
    metrics = BatchMetrics.of([Packed(1, 100, 90), Packed(1, 100, 90, weight=0.0)])

    assert metrics.total_samples == 1
    assert metrics.efficiency == 0.45


def test_nothing_to_divide_by_gives_no_figure_instead_of_a_number() -> None:
    metrics = BatchMetrics()

    assert metrics.efficiency is metrics.ullage is metrics.padding_waste is None
    assert metrics.loss_efficiency is metrics.avg_batch_size is metrics.skip_rate is None
    assert metrics.tokens_per_second is metrics.effective_tokens_per_second is None
    assert "efficiency       -" in metrics.summary()


def test_rates_follow_from_time_and_loss_tokens() -> None:
    metrics = BatchMetrics.of([Packed(1, 100, 80)], loss_tokens=40, total_time_seconds=2.0)

    assert metrics.tokens_per_second == 40.0
    assert metrics.effective_tokens_per_second == 20.0
    assert metrics.loss_efficiency == 0.4
    assert "40 (40.0% of padded)" in metrics.summary()
    assert "tokens a second  40" in metrics.summary()


def test_the_dictionary_survives_json() -> None:
    metrics = BatchMetrics.of([Padded((3, 5), 8, 1), Padded((8,), 8, 0)])

    back = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))

    assert back["efficiency"] == 16 / 24
    assert back["bucket_stats"]["1"]["sample_count"] == 2
    assert back["shapes"] == [[1, 8, 1], [2, 8, 1]]


def test_the_bucket_summary_has_a_line_for_each_bucket() -> None:
    metrics = BatchMetrics(bucket_stats={0: BucketStats(1200, 60_000, 80_000), 1: BucketStats()})

    header, first, second = metrics.bucket_summary().splitlines()
    assert header.split() == ["bucket", "samples", "mean", "length", "efficiency"]
    assert first.split() == ["0", "1,200", "50.0", "75.0%"]
    assert second.split() == ["1", "0", "-", "-"]


def test_shapes_come_commonest_first_and_ties_in_order() -> None:
    shapes = BatchShapeHistogram()
    for rows, width in [(8, 64), (4, 128), (4, 128), (2, 256)]:
        shapes.add(rows, width)

    assert shapes.most_common() == [((4, 128), 2), ((2, 256), 1), ((8, 64), 1)]
    assert shapes.most_common(1) == [((4, 128), 2)]
    assert (shapes.num_shapes, shapes.total) == (3, 4)
    assert shapes.to_ascii(n=1).endswith("and 2 more shapes")
    assert shapes.to_ascii().isascii()


def test_no_shapes_draw_nothing() -> None:
    assert BatchShapeHistogram().to_ascii() == ""
