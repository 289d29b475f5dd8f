import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.buckets import BucketSpec, BucketStats
from batchwright.errors import ConfigError


@st.composite
def specs(draw: st.DrawFn) -> BucketSpec:
    widths = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=8)))
    min_length = draw(st.integers(1, widths[0]))
    return BucketSpec(tuple(widths[:-1]), widths[-1], min_length)


@settings(max_examples=100, deadline=None)
@given(specs(), st.lists(st.integers(1, 260), max_size=40))
def test_a_sample_goes_to_the_first_bucket_wide_enough(
    spec: BucketSpec, lengths: list[int]
) -> None:
    ids = spec.get_bucket_ids(lengths).tolist()

    assert ids == [spec.get_bucket_id(length) for length in lengths]
    for length, bucket in zip(lengths, ids, strict=True):
        wide = [k for k, edge in enumerate(spec.edges) if edge >= length]
        assert bucket == (wide[0] if wide else len(spec.edges))


@settings(max_examples=100, deadline=None)
@given(specs())
def test_ranges_cover_every_length_that_is_not_skipped_once(spec: BucketSpec) -> None:
    covered = []
    for bucket in range(spec.num_buckets):
        low, high = spec.get_bucket_range(bucket)
        assert high == spec.get_bucket_max_length(bucket)
        assert spec.get_bucket_id(low) == spec.get_bucket_id(high) == bucket
        covered += range(low, high + 1)

    assert covered == [n for n in range(1, 300) if not spec.should_skip(n)]


@given(st.integers(1, 5000), st.integers(1, 12))
def test_equal_buckets_differ_by_at_most_one_token(max_length: int, num_buckets: int) -> None:
    if num_buckets > max_length:
        with pytest.raises(ConfigError):
            BucketSpec.from_max_length(max_length, num_buckets)
        return
    spec = BucketSpec.from_max_length(max_length, num_buckets)

    sizes = np.diff((0, *spec.widths))
    assert spec.num_buckets == num_buckets
    assert spec.overflow_max == max_length
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    ("edges", "overflow_max", "min_length", "words"),
    [
        ((256, 128), 512, 1, "edge 128 after 256"),
        ((128, 128), 512, 1, "strictly ascending"),
        ((0, 128), 512, 1, "at least 1"),
        ((128, 512), 512, 1, "greater than the last bucket edge 512, got 512"),
        ((), 0, 1, "overflow_max must be between 1 and .*, got 0"),
        ((), 2**31, 1, "2147483647"),
        ((128,), 512, 0, "min_length must be between 1 and 128.*, got 0"),
        ((128,), 512, 129, "got 129"),
        ((12.5,), 512, 1, "must be integers"),
        (("128",), 512, 1, "must be integers"),
        (None, 512, 1, "must be integers"),
    ],
)
def test_a_bad_spec_is_refused_with_what_was_seen(edges, overflow_max, min_length, words) -> None:
    with pytest.raises(ConfigError, match=words):
        BucketSpec(edges, overflow_max, min_length)


@pytest.mark.parametrize("bucket", [-1, 3])
def test_a_bucket_that_is_not_there_is_named(bucket: int) -> None:
    spec = BucketSpec((4, 8), 16)

    with pytest.raises(ConfigError, match=f"between 0 and 2 .*got {bucket}"):
        spec.get_bucket_max_length(bucket)
    with pytest.raises(ConfigError, match="between 0 and 2"):
        spec.get_bucket_range(bucket)


def test_lists_and_numpy_numbers_make_the_same_spec_as_a_tuple() -> None:
    spec = BucketSpec(list(np.array([128, 256])), np.int64(512))

    assert spec == BucketSpec((128, 256), 512)
    assert hash(spec) == hash(BucketSpec((128, 256), 512))
    assert type(spec.overflow_max) is int


def test_the_default_is_the_documented_one() -> None:
    assert BucketSpec.default() == BucketSpec((128, 256, 512, 1024), overflow_max=2048)


def test_an_empty_bucket_has_no_efficiency() -> None:
    empty = BucketStats()

    assert (empty.efficiency, empty.padding_ratio, empty.avg_length) == (None, None, None)


def test_a_full_bucket_has_no_padding() -> None:
    stats = BucketStats(sample_count=4, total_tokens=32, padded_tokens=32)

    assert (stats.efficiency, stats.padding_ratio, stats.avg_length) == (1.0, 0.0, 8.0)
