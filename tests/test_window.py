"""Rolling windows: exact counts, honoured overlap, and resumption at every microbatch."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.checkpoint import load_checkpoint, save_checkpoint
from batchwright.errors import ConfigError, Mismatch, OversizedSample
from batchwright.streaming import (
    MockGymStream,
    ReplayBuffer,
    ReplayBufferConfig,
    RollingBatchPlanWindow,
    StreamSample,
    WindowConfig,
)

LAYOUTS = ("bucketed", "sorted", "packed")


def sample(number, length):
    tokens = np.arange(length) + 1000 * number
    return StreamSample(
        input_ids=tokens,
        loss_mask=np.ones(length, int),
        sample_id=f"s{number}",
        dataset_id="test",
        source="gym",
        difficulty=number % 10 / 10,
    )


def filled(lengths, size=None):
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=size or len(lengths)))
    for number, length in enumerate(lengths):
        buffer.add(sample(number, length))
    return buffer


def config_of(layout="bucketed", **fields):
    return WindowConfig(
        **{"min_samples": 1, "token_budget": 64, "layout": layout, "window_microbatches": 7}
        | fields
    )


def shape(microbatch):
    """What a microbatch is, but for its place."""
    return (
        microbatch.samples,
        microbatch.starts.tolist(),
        microbatch.lengths.tolist(),
        microbatch.row_offsets.tolist(),
        microbatch.max_len,
        microbatch.bucket_id,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
    st.integers(1, 12),
    st.floats(0, 0.99),
    st.sampled_from(LAYOUTS),
)
def test_every_window_has_the_asked_number_and_repeats_the_end_of_the_one_before(
    lengths, count, overlap, layout
):
    buffer = filled(lengths, size=50)
    config = config_of(layout, window_microbatches=count, overlap_fraction=overlap)
    window = RollingBatchPlanWindow(buffer, config)
    before = []
    for number in range(3):
        state = window.build_next_window()
        batches = list(window.iter_current())

        assert len(batches) == count == state.plan_microbatches
        assert [batch.index for batch in batches] == list(range(count))
        assert {batch.epoch for batch in batches} == {number}
        assert all(batch.padded_tokens <= 64 for batch in batches)
        carried = math.floor(overlap * count) if number else 0
        assert state.overlap_microbatches == carried
        assert [shape(b) for b in batches[:carried]] == [
            shape(b) for b in before[count - carried :]
        ]
        before = batches
        for extra in range(5):
            buffer.add(sample(1000 * (number + 1) + extra, 1 + extra))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_goes_through_all_samples_before_it_repeats_one(layout):
    buffer = filled([1 + number % 30 for number in range(80)])
    probe = RollingBatchPlanWindow(buffer, config_of(layout))
    probe.build_next_window()
    once = probe.current_plan.num_microbatches()
    config = config_of(layout, window_microbatches=2 * once + 1, overlap_fraction=0)
    window = RollingBatchPlanWindow(buffer, config)
    window.build_next_window()
    batches = list(window.iter_current())

    everything = sorted(f"s{number}" for number in range(80))
    first = [name for batch in batches[:once] for name in batch.samples]
    second = [name for batch in batches[once : 2 * once] for name in batch.samples]
    assert sorted(first) == sorted(second) == everything
    assert first != second


def test_windows_differ_and_are_the_same_for_the_same_seed():
    def run(seed):
        window = RollingBatchPlanWindow(filled([3, 9, 20] * 20), config_of(seed=seed))
        shapes = []
        for _ in range(3):
            window.build_next_window()
            shapes.append([shape(batch) for batch in window.iter_current()])
        return shapes

    assert run(1) == run(1)
    assert run(1) != run(2)
    first, second, third = run(1)
    assert first != second != third


def test_what_is_added_or_evicted_does_not_touch_a_window():
    buffer = filled([5, 6, 7, 8] * 10)
    window = RollingBatchPlanWindow(buffer, config_of(overlap_fraction=0))
    window.build_next_window()
    quiet = RollingBatchPlanWindow(filled([5, 6, 7, 8] * 10), config_of(overlap_fraction=0))
    quiet.build_next_window()
    seen = []
    for microbatch, samples in window.iter_current_with_samples():
        seen.append((shape(microbatch), list(samples)))
        for number in range(20):
            buffer.add(sample(5000 + len(seen) * 20 + number, 3))

    assert seen == [(shape(m), list(s)) for m, s in quiet.iter_current_with_samples()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collated_tokens_are_those_of_the_samples(layout):
    window = RollingBatchPlanWindow(filled([3, 17, 30, 5, 9] * 6), config_of(layout))
    for _ in range(2):
        window.build_next_window()
        for microbatch in window.iter_current():
            batch = window.collate(microbatch, pad_id=-7)
            real = batch.segment_ids >= 0
            assert real.sum() == microbatch.token_count
            assert (batch.input_ids[~real] == -7).all()
            for row, start in enumerate(microbatch.row_offsets[:-1]):
                name = microbatch.samples[start]
                length = int(microbatch.lengths[start])
                expected = 1000 * int(name[1:]) + np.arange(length)
                assert batch.input_ids[row, :length].tolist() == expected.tolist()


def test_a_state_taken_at_every_microbatch_continues_as_if_nothing_had_happened():
    config = config_of("packed", overlap_fraction=0.5, window_microbatches=6)

    def step(buffer, window, number):
        """Consume a microbatch, then let the buffer move on so that old samples are lost."""
        if window.should_build_next:
            window.build_next_window()
        microbatch, samples = next(window.iter_current_with_samples())
        for extra in range(3):
            buffer.add(sample(100 + 3 * number + extra, 1 + (7 * number + extra) % 40))
        return shape(microbatch), list(samples), microbatch.index, microbatch.epoch

    straight = filled([5, 9, 30, 2] * 5)
    window = RollingBatchPlanWindow(straight, config)
    buffer = filled([5, 9, 30, 2] * 5)
    resumed = RollingBatchPlanWindow(buffer, config)
    for number in range(30):
        states = buffer.state_dict(), resumed.state_dict()
        buffer = ReplayBuffer(straight.config)
        buffer.load_state_dict(states[0])
        resumed = RollingBatchPlanWindow(buffer, config)
        resumed.load_state_dict(states[1])

        assert step(buffer, resumed, number) == step(straight, window, number)
        assert resumed.current_state == window.current_state
    assert resumed.total_microbatches == 30


def test_a_training_checkpoint_holds_buffer_and_window(tmp_path):
    buffer = filled([4, 8, 15] * 10)
    window = RollingBatchPlanWindow(buffer, config_of())
    window.build_next_window()
    window.build_next_window()
    next(window.iter_current())
    for number in range(20):
        buffer.add(sample(900 + number, 2))
    state = {"replay": buffer.state_dict(), "window": window.state_dict()}
    save_checkpoint(tmp_path, 1, state)

    loaded = load_checkpoint(tmp_path / "step_00000001").state
    other = ReplayBuffer(buffer.config)
    other.load_state_dict(loaded["replay"])
    restored = RollingBatchPlanWindow(other, config_of())
    restored.load_state_dict(loaded["window"])
    assert [shape(b) for b in restored.iter_current()] == [shape(b) for b in window.iter_current()]


def test_a_window_state_needs_the_buffer_it_was_saved_with():
    window = RollingBatchPlanWindow(filled([4, 8, 15]), config_of())
    window.build_next_window()
    state = window.state_dict()

    with pytest.raises(Mismatch, match="is not in the buffer"):
        RollingBatchPlanWindow(filled([4]), config_of()).load_state_dict(state)
    with pytest.raises(Mismatch, match="is not in the buffer"):
        RollingBatchPlanWindow(filled([4, 9, 15]), config_of()).load_state_dict(state)
    with pytest.raises(Mismatch, match="another config"):
        RollingBatchPlanWindow(filled([4, 8, 15])).load_state_dict(state)


def test_a_window_over_chosen_samples_sees_no_others():
    buffer = filled([5] * 40)
    window = RollingBatchPlanWindow(buffer, config_of("packed", overlap_fraction=0))
    window.build_next_window(buffer.filter_by_difficulty(0.7, 0.9))
    names = {name for batch in window.iter_current() for name in batch.samples}
    assert {int(name[1:]) % 10 for name in names} == {7, 8, 9}

    drawn = buffer.sample(16)
    state = window.build_next_window(drawn)
    assert state.snapshot_size == 16
    seen = [s for _, samples in window.iter_current_with_samples() for s in samples]
    assert {s.sample_id for s in seen} == set(drawn.sample_ids)
    assert all(s.is_replay for s in seen)


def test_samples_of_one_id_are_all_planned():
    buffer = ReplayBuffer()
    for length in (3, 4, 5):
        buffer.add(sample(1, length))
    window = RollingBatchPlanWindow(buffer, config_of("packed", window_microbatches=1))
    window.build_next_window()
    ((_, samples),) = window.iter_current_with_samples()

    assert sorted(s.length for s in samples) == [3, 4, 5]


def test_priorities_can_be_updated_from_a_window():
    buffer = filled([5, 6, 7])
    window = RollingBatchPlanWindow(buffer, config_of("packed", window_microbatches=1))
    window.build_next_window()
    (_, samples), *_ = window.iter_current_with_samples()

    assert buffer.update_priorities(samples, samples.lengths) == 3
    assert [s.priority for s in buffer] == [5, 6, 7]


def test_long_samples_follow_the_policy_and_are_counted():
    buffer = filled([5, 100, 200])
    with pytest.raises(OversizedSample):
        RollingBatchPlanWindow(buffer, config_of()).build_next_window()
    skipping = RollingBatchPlanWindow(buffer, config_of(overflow="skip"))
    assert skipping.build_next_window().skipped == 2
    cutting = RollingBatchPlanWindow(buffer, config_of(overflow="truncate", overlap_fraction=0.5))
    for _ in range(2):
        assert cutting.build_next_window().skipped == 0
        for microbatch in cutting.iter_current():
            assert cutting.collate(microbatch).max_len <= 64


def test_a_window_is_built_when_there_is_enough_and_the_last_is_consumed():
    buffer = ReplayBuffer()
    window = RollingBatchPlanWindow(buffer, config_of(min_samples=3, window_microbatches=2))
    assert not window.should_build_next
    with pytest.raises(ConfigError, match=r"holds 0 samples, a window needs 3"):
        window.build_next_window()
    with pytest.raises(ConfigError, match="there is no window yet"):
        _ = window.current_samples
    buffer.add_batch(MockGymStream(num_episodes=1, steps_per_episode=3))
    assert window.should_build_next
    assert window.build_next_window().progress == 0
    assert not window.should_build_next
    assert len(list(window.iter_current())) == 2
    assert window.should_build_next
    assert window.current_state.is_exhausted
    assert list(window.iter_current()) == []
    window.discard_current()
    assert window.build_next_window().overlap_microbatches == 0


def test_settings_that_no_plan_can_follow_are_refused_at_once():
    with pytest.raises(ConfigError, match="pack_max_length must be at most token_budget=100"):
        WindowConfig(layout="packed", token_budget=100, pack_max_length=200)
    with pytest.raises(ConfigError, match="overlap_fraction=1"):
        WindowConfig(overlap_fraction=1.0)
    assert WindowConfig(token_budget=64).batching(0).limit == 64


@given(percent=st.integers(0, 99), microbatches=st.integers(1, 1000))
def test_the_overlap_is_that_of_the_fraction_as_it_is_written(percent, microbatches):
    config = WindowConfig(overlap_fraction=percent / 100, window_microbatches=microbatches)
    assert config.overlap_microbatches == percent * microbatches // 100


def test_a_window_is_built_over_a_batch_and_restored_from_its_own_state():
    window = RollingBatchPlanWindow(ReplayBuffer())
    with pytest.raises(ConfigError, match=r"samples must be a ReplayBatch, .* got list"):
        window.build_next_window([1, 2])
    for holder in (window, window.buffer):
        state = holder.state_dict()
        for name in state:
            with pytest.raises(Mismatch, match=f"the state has no '{name}'"):
                holder.load_state_dict({key: state[key] for key in state if key != name})
