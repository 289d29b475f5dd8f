"""The curriculum by success rate: where it begins, when it moves, and where it stops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ConfigError
from batchwright.streaming import DifficultyBin, ReplayBuffer, StreamSample, SuccessRateCurriculum

TENTHS = st.integers(0, 10).map(lambda tenth: tenth / 10)


def solved(successes: int, judged: int) -> list[DifficultyBin]:
    return [DifficultyBin(0.0, 1.0, judged, judged, successes)]


@given(
    bounds=st.tuples(TENTHS, TENTHS).map(sorted),
    rates=st.lists(st.integers(0, 100), max_size=40),
)
def test_the_range_stays_within_its_bounds_and_moves_by_a_tenth(
    bounds: list[float], rates: list[int]
) -> None:
    lowest, highest = bounds
    curriculum = SuccessRateCurriculum(lowest, highest)
    current = curriculum.first
    assert current[0] == lowest
    for rate in rates:
        low, high = curriculum.following(current, solved(rate, 100))
        assert lowest <= low <= high <= highest
        assert abs(low - current[0]) < 0.11
        assert high - low == pytest.approx(min(0.2, highest - lowest))
        if rate >= 80:
            assert low >= current[0]
        elif rate <= 50:
            assert low <= current[0]
        else:
            assert (low, high) == current
        current = (low, high)


def test_it_climbs_to_the_hardest_and_back() -> None:
    curriculum = SuccessRateCurriculum()
    up = [curriculum.first]
    for _ in range(20):
        up.append(curriculum.following(up[-1], solved(9, 10) + solved(19, 20)))
    down = [up[-1]]
    for _ in range(20):
        down.append(curriculum.following(down[-1], solved(0, 20)))

    assert (up[0], up[-1]) == ((0.0, 0.2), (0.8, 1.0))
    assert down[-1] == curriculum.first
    assert len(set(up)) == len(set(down)) == 9


def test_few_samples_move_nothing() -> None:
    curriculum = SuccessRateCurriculum(min_judged=20)
    assert curriculum.following((0.3, 0.5), solved(19, 19)) == (0.3, 0.5)
    assert curriculum.following((0.3, 0.5), []) == (0.3, 0.5)
    assert curriculum.following((0.3, 0.5), solved(20, 20)) == (0.4, 0.6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lowest": 0.5, "highest": 0.4},
        {"highest": 1.1},
        {"lower_at": 0.8, "raise_at": 0.8},
        {"width": 0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="got"):
        SuccessRateCurriculum(**wrong)


def test_the_buffer_knows_how_the_last_samples_went() -> None:
    buffer = ReplayBuffer()
    for number in range(40):
        buffer.add(
            StreamSample(
                input_ids=[1, 2],
                loss_mask=[0, 1],
                sample_id=str(number),
                dataset_id="d",
                source="gym",
                difficulty=0.25,
                success=number >= 30,
            )
        )

    assert [part.success_rate for part in buffer.difficulty_stats(1)] == [0.25]
    assert [part.success_rate for part in buffer.difficulty_stats(1, last=10)] == [1.0]
    assert [part.samples for part in buffer.difficulty_stats(1, last=0)] == [0]
