"""Streams: what they give, what they count, and that they continue where they were stopped."""

import asyncio
import copy
import json
import pickle
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import streaming
from batchwright.checkpoint import load_checkpoint, save_checkpoint
from batchwright.data.rows.source import open_source
from batchwright.errors import BadRow, ConfigError, Mismatch
from batchwright.streaming import (
    AsyncOfflineDatasetStream,
    AsyncSampleStream,
    EpisodeStatus,
    MockGymStream,
    OfflineDatasetStream,
    SampleSource,
    SampleStream,
    StreamMetrics,
    StreamSample,
    merge,
    prefetch,
    rate_limit,
    shuffle,
)
from batchwright.streaming.combine import Give, Pull, Wait

DOCUMENT_NAMES = """
StreamSample StreamMetrics SampleStream AsyncSampleStream OfflineDatasetStream
AsyncOfflineDatasetStream MockGymStream ReplayBuffer ReplayBufferConfig BufferEvictionPolicy
RollingBatchPlanWindow WindowConfig GymConfig GymEpisodeStream
"""


@pytest.mark.parametrize("name", DOCUMENT_NAMES.split())
def test_names_of_the_document_come_from_streaming(name):
    assert name in streaming.__all__
    assert getattr(streaming, name).__name__ == name


def sample(**fields):
    given = {"sample_id": "a", "dataset_id": "test", "source": "gym"}
    return StreamSample(**{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]} | given | fields)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        {
            "id": f"r{number}",
            "input_ids": list(range(1000, 1001 + number % 7)),
            "difficulty": number % 10 / 10,
            "reward": number / 2,
            "success": number % 2 == 0,
        }
        for number in range(150)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ids(stream):
    return [sample.sample_id for sample in stream]


async def collected(stream):
    return [sample async for sample in stream]


def test_a_sample_cannot_be_changed():
    source = np.array([1, 2, 3])
    made = sample(input_ids=source)
    source[0] = 99

    assert made.input_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        made.input_ids[0] = 5
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        made.input_ids.flags.writeable = True
    with pytest.raises(ValueError, match="frozen"):
        made.reward = 1.0


def test_with_replay_marks_a_copy_and_nothing_else():
    made = sample(reward=0.5, timestamp=datetime(2026, 1, 1, tzinfo=UTC))
    again = made.with_replay().with_replay()

    assert (made.source, made.replay_count, made.is_replay) == (SampleSource.GYM, 0, False)
    assert (again.source, again.replay_count, again.is_replay) == (SampleSource.REPLAY, 2, True)
    changed = {"source", "replay_count"}
    assert again.model_dump(exclude=changed) == made.model_dump(exclude=changed)


def test_a_sample_survives_json():
    made = sample(
        timestamp=datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2))),
        episode_status="success",
        segment_ids=[0, 0, 1],
    )
    again = StreamSample(**json.loads(made.model_dump_json()))

    assert again == made
    assert hash(again) == hash(made)
    assert again.timestamp.tzinfo is UTC or again.timestamp.utcoffset() == timedelta()
    assert again.episode_status is EpisodeStatus.SUCCESS
    assert again != made.with_replay()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_ids": [], "loss_mask": []}, "at least one token"),
        ({"input_ids": [1, -2, 3]}, "integers from 0 to 2,147,483,647"),
        ({"input_ids": [1, 2**31, 3]}, "integers from 0 to"),
        ({"input_ids": [1.5, 2.0, 3.0]}, "must be a list of integers"),
        ({"input_ids": "abc"}, "must be a list of integers"),
        ({"loss_mask": [0, 1]}, "loss_mask has 2 entries for 3 input_ids"),
        ({"loss_mask": [0, 1, 2]}, "integers from 0 to 1"),
        ({"segment_ids": [0]}, "segment_ids has 1 entries"),
        ({"difficulty": 1.5}, "difficulty=1.5"),
        ({"reward": float("nan")}, "reward=nan"),
        ({"priority": -1}, "priority=-1"),
        ({"sample_id": ""}, "sample_id=''"),
        ({"sample_id": "\ud800"}, "valid string"),
        ({"source": "dream"}, "source='dream'"),
        ({"colour": "red"}, "colour='red'"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused_in_one_line(fields, reason):
    with pytest.raises(BadRow) as caught:
        sample(**fields)

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metrics_count_what_is_known_and_leave_the_rest_out():
    metrics = StreamMetrics()
    assert (metrics.mean_length, metrics.success_rate, metrics.filter_rate) == (None, None, None)
    metrics.record_sample(sample(reward=1.0))
    metrics.record_sample(sample(difficulty=0.4))
    metrics.record_filtered()
    metrics.record_episode(success=True)
    metrics.record_episode(success=False)

    assert (metrics.mean_reward, metrics.mean_difficulty, metrics.mean_length) == (1.0, 0.4, 3.0)
    assert (metrics.success_rate, metrics.samples_total) == (0.5, 3)
    assert metrics.to_dict()["filter_rate"] == pytest.approx(1 / 3)
    assert metrics.loss_tokens == 4


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_offline_stream_gives_every_row_once_an_epoch(rows, shuffled):
    stream = OfflineDatasetStream(rows, "demo", shuffle=shuffled)
    first, second = list(stream), list(stream)

    assert isinstance(stream, SampleStream)
    names = [f"r{number}" for number in range(150)]
    assert sorted(ids(first)) == sorted(ids(second)) == sorted(names)
    assert (ids(first) == names) is (not shuffled)
    assert (ids(first) == ids(second)) is (not shuffled)
    known = first[ids(first).index("r7")]
    assert (known.length, known.reward, known.difficulty, known.success) == (1, 3.5, 0.7, False)
    assert (known.source, known.dataset_id) == (SampleSource.OFFLINE, "demo")
    assert known.input_ids[0] == 1000
    assert stream.metrics.samples_produced == 300
    assert stream.metrics.success_rate == 0.5
    assert stream.epoch == 2
    stream.reset()
    assert ids(stream) == ids(first)


def test_async_for_and_for_give_the_same(rows):
    for shuffled in (False, True):
        plain = list(OfflineDatasetStream(rows, shuffle=shuffled))
        for kind in (OfflineDatasetStream, AsyncOfflineDatasetStream):
            stream = kind(rows, shuffle=shuffled)
            assert isinstance(stream, AsyncSampleStream)
            assert asyncio.run(collected(stream)) == plain
            assert stream.metrics.samples_produced == 150


def test_filters_and_lengths_leave_out_and_count_and_transforms_change(rows):
    stream = OfflineDatasetStream(
        rows,
        min_length=2,
        max_length=5,
        filters=[lambda s: s.success],
        transforms=[StreamSample.with_replay, lambda s: s.model_copy(update={"reward": 9.0})],
    )
    given = list(stream)

    assert {s.length for s in given} == {2, 3, 4, 5}
    assert all(s.success and s.is_replay and s.reward == 9.0 for s in given)
    expected = sum(2 <= 1 + n % 7 <= 5 and n % 2 == 0 for n in range(150))
    assert len(given) == expected == stream.metrics.samples_produced
    assert stream.metrics.samples_filtered == 150 - expected


def test_text_needs_a_tokenizer_and_says_so(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "2+2=", "completion": "4"}\n{"input_ids": [70000]}\n')

    with pytest.raises(BadRow, match=r"text.jsonl:1: has no input_ids"):
        list(OfflineDatasetStream(path))
    (first,) = OfflineDatasetStream(path, tokenizer="bytes", on_bad_row="skip")
    assert first.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path):
    path = tmp_path / "bad.jsonl"
    good = '{"input_ids": [1, 2]}\n'
    path.write_text(good + "{broken\n" + '{"input_ids": [1], "difficulty": 3.0}\n' + good)

    for shuffled in (False, True):
        with pytest.raises(BadRow, match=r"^bad.jsonl:\d: |/bad.jsonl:\d: "):
            list(OfflineDatasetStream(path, shuffle=shuffled))
        stream = OfflineDatasetStream(path, shuffle=shuffled, on_bad_row="skip")
        assert sorted(ids(stream)) == ["0", "3"]
        assert stream.metrics.samples_errored == 2


def resumed_at_every_sample(make):
    """The samples of a stream that is saved, thrown away and restored before each of them."""
    given, stream = [], make()
    while True:
        again = make()
        again.load_state_dict(json.loads(json.dumps(stream.state_dict(), default=as_list)))
        stream = again
        one = next(iter(stream), None)
        if one is None:
            return given, stream
        given.append(one)


def as_list(array):
    return {"dtype": array.dtype.str, "values": array.tolist()}


def test_offline_state_continues_at_every_sample(rows):
    def make():
        return OfflineDatasetStream(rows, shuffle=True, filters=[lambda s: s.length > 2])

    straight = make()
    given, stream = resumed_at_every_sample(make)

    assert given == list(straight)
    assert stream.state_dict() == straight.state_dict()


def test_offline_state_of_other_data_is_refused(rows, tmp_path):
    state = OfflineDatasetStream(rows).state_dict()
    (tmp_path / "few.jsonl").write_text('{"input_ids": [1]}\n')

    with pytest.raises(Mismatch, match="rows=150"):
        OfflineDatasetStream(tmp_path / "few.jsonl").load_state_dict(state)
    with pytest.raises(Mismatch, match="seed=42"):
        OfflineDatasetStream(rows, seed=1).load_state_dict(state)


def test_the_mock_gym_is_the_same_every_time_and_says_what_it_is():
    first, second = list(MockGymStream(num_episodes=30)), MockGymStream(num_episodes=30)

    assert first == list(second) == list(second) == asyncio.run(collected(second))
    assert first != list(MockGymStream(num_episodes=30, seed=1))
    assert {s.source for s in first} == {SampleSource.SYNTHETIC}
    assert second.metrics.episodes_completed == 90
    for number in range(30):
        episode = first[5 * number : 5 * number + 5]
        success = episode[0].success
        assert {s.episode_id for s in episode} == {f"mock_{number:04d}"}
        assert [s.reward for s in episode] == [0, 0, 0, 0, float(success)]
        assert [s.step_index for s in episode] == [0, 1, 2, 3, 4]
        for s in episode:
            text = bytes(s.input_ids[:-1].astype(np.uint8)).decode()
            a, b, answer = (int(n) for n in text.split(":")[1].replace("=", "+").split("+"))
            assert (answer == a + b) is (success or s.step_index < 4)


def test_the_mock_gym_keeps_to_its_settings():
    easy = list(MockGymStream(num_episodes=50, difficulty_range=(0.0, 0.2), success_rate=1.0))
    assert all(s.difficulty <= 0.2 and s.success for s in easy)
    rate = MockGymStream(num_episodes=400, steps_per_episode=1, success_rate=0.7)
    list(rate)
    assert abs(rate.metrics.success_rate - 0.7) < 0.12
    for wrong in ({"success_rate": 2}, {"num_episodes": 0}, {"difficulty_range": (0.5, 0.2)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            MockGymStream(**wrong)


def test_mock_state_continues_at_every_sample():
    def make():
        return MockGymStream(num_episodes=6)

    given, stream = resumed_at_every_sample(make)
    straight = make()
    assert given == list(straight)
    assert stream.metrics == straight.metrics
    with pytest.raises(Mismatch, match="mock gym"):
        MockGymStream(num_episodes=7).load_state_dict(straight.state_dict())


def mocks(*sizes):
    return [
        MockGymStream(num_episodes=size, steps_per_episode=1, seed=k)
        for k, size in enumerate(sizes)
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 15), st.integers(1, 5)), min_size=1, max_size=4))
def test_merged_streams_keep_their_order_and_their_shares(parts):
    streams = mocks(*(size for size, _ in parts))
    weights = [weight for _, weight in parts]
    given = list(merge(*streams, weights=weights))
    alone = [list(stream) for stream in mocks(*(size for size, _ in parts))]

    owner = {id: k for k, part in enumerate(alone) for id in map(key, part)}
    for k, part in enumerate(alone):
        assert [s for s in given if owner[key(s)] == k] == part
    counts = Counter()
    for done, one in enumerate(given, start=1):
        counts[owner[key(one)]] += 1
        if any(counts[k] == len(part) for k, part in enumerate(alone)):
            break
        for k, weight in enumerate(weights):
            assert abs(counts[k] - done * weight / sum(weights)) <= len(parts)


def key(sample):
    return sample.sample_id, tuple(sample.input_ids.tolist()), sample.difficulty


def test_merge_is_the_same_for_async_for_and_refuses_bad_weights():
    plain = list(merge(*mocks(5, 9, 2), weights=[1, 2, 1]))

    assert asyncio.run(collected(merge(*mocks(5, 9, 2), weights=[1, 2, 1]))) == plain
    again = merge(*mocks(5, 9, 2), weights=[1, 2, 1])
    assert list(again) == list(again) == plain
    for weights in ([1], [1, 0, 1], [1, float("nan"), 1]):
        with pytest.raises(ConfigError, match="one positive number for each of the 3"):
            merge(*mocks(1, 1, 1), weights=weights)
    with pytest.raises(ConfigError, match="no streams"):
        merge()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
def test_a_shuffle_buffer_loses_nothing_and_reaches_as_far_as_it_is_long(n, size, seed):
    (stream,) = mocks(n)
    given = ids(shuffle(stream, size, seed))

    assert sorted(given) == sorted(ids(mocks(n)[0]))
    for place, name in enumerate(given):
        # A sample cannot come before it was read.
        assert int(name.split("_")[1]) < place + size
    if size == 1:
        assert given == ids(mocks(n)[0])


def test_every_order_of_a_small_shuffle_comes_equally_often():
    times = Counter(tuple(ids(shuffle(mocks(3)[0], 3, seed))) for seed in range(1200))

    assert len(times) == 6
    assert all(abs(count - 200) < 5 * (1200 * 5 / 36) ** 0.5 for count in times.values())


@pytest.mark.parametrize("kind", ["merge", "shuffle", "both", "rate", "prefetch"])
def test_combined_state_continues_at_every_sample(kind, tmp_path):
    def make():
        if kind == "merge":
            return merge(*mocks(5, 9, 2), weights=[1, 2, 1])
        if kind == "shuffle":
            return shuffle(mocks(20)[0], 6)
        if kind == "both":
            return shuffle(merge(*mocks(8, 8)), 5)
        if kind == "rate":
            return rate_limit(mocks(10)[0], 1e9)
        return prefetch(mocks(10)[0], size=3)

    straight, given, stream = list(make()), [], make()
    for step in range(len(straight) + 1):
        # Through a real checkpoint, as a trainer would keep it.
        save_checkpoint(tmp_path, step, stream.state_dict())
        stream = make()
        stream.load_state_dict(load_checkpoint(tmp_path / f"step_{step:08d}").state)
        source = iter(stream)
        one = next(source, None)
        source.close()
        if one is not None:
            given.append(one)

    assert given == straight


def test_a_rate_limit_waits_before_it_asks():
    now = 0.0
    program = rate_limit(mocks(1)[0], 4.0, clock=lambda: now).program()
    samples = iter(mocks(20)[0])
    step, times = next(program), []
    while len(times) < 12:
        if isinstance(step, Wait):
            now += step.seconds
            step = program.send(None)
        elif isinstance(step, Pull):
            # A source that is slow for a while does not earn a burst.
            now += 1.0 if len(times) == 5 else 0.01
            step = program.send(next(samples))
        else:
            assert isinstance(step, Give)
            times.append(now)
            step = program.send(None)

    gaps = np.diff(times)
    assert gaps[:4] == pytest.approx(0.25)
    assert gaps[4] == pytest.approx(1.24)
    assert all(gap >= 0.25 - 1e-9 or gap == pytest.approx(0.01) for gap in gaps[5:])
    assert sum(gaps[5:] < 0.2) <= 1
    with pytest.raises(ConfigError, match="per_second must be above 0"):
        rate_limit(mocks(1)[0], 0)


class Counted(MockGymStream):
    """A mock gym that tells how many samples it has made."""

    made = 0

    def __iter__(self):
        for one in super().__iter__():
            self.made += 1
            yield one


def test_a_full_queue_makes_the_producer_wait():
    stream = Counted(num_episodes=40)
    source = iter(prefetch(stream, size=7))
    for taken in range(1, 60):
        next(source)
        # One more may be in the producer's hands.
        assert stream.made <= taken + 7 + 1
    source.close()
    assert threading.active_count() == 1 or not any(
        thread.name.endswith("(_work)") for thread in threading.enumerate()
    )


def test_a_full_queue_makes_an_async_producer_wait():
    stream = Counted(num_episodes=40)

    async def run():
        ahead = prefetch(stream, size=7)
        source = aiter(ahead)
        for taken in range(1, 60):
            await anext(source)
            await asyncio.sleep(0)
            assert stream.made <= taken + 7 + 1
        await source.aclose()
        assert len(asyncio.all_tasks()) == 1
        assert ahead.most_queued <= 7

    asyncio.run(run())


def test_leaving_a_prefetched_stream_loses_no_sample():
    straight = list(MockGymStream(num_episodes=8))
    ahead = prefetch(MockGymStream(num_episodes=8), size=9)
    given = []
    for take in (3, 10, 1):
        source = iter(ahead)
        given += [next(source) for _ in range(take)]
        source.close()

    async def more():
        source = aiter(ahead)
        found = [await anext(source) for _ in range(5)]
        await source.aclose()
        return found

    given += asyncio.run(more())
    assert given + list(ahead) == straight
    assert ahead.metrics.samples_produced == len(straight)


def test_prefetch_gives_everything_in_each_streams_order():
    for collect in (list, lambda stream: asyncio.run(collected(stream))):
        given = collect(prefetch(*mocks(30, 20, 10), size=4))
        assert len(given) == 60
        for alone in mocks(30, 20, 10):
            names = {key(s) for s in list(alone)}
            assert [key(s) for s in given if key(s) in names] == [key(s) for s in alone]


class Failing(MockGymStream):
    def __iter__(self):
        yield from list(super().__iter__())[:3]
        raise BadRow("the fourth row is torn")


@pytest.mark.parametrize("others", [0, 2])
def test_an_error_of_a_stream_reaches_the_consumer_and_stops_the_others(others):
    streams = [Failing(), *(Counted(num_episodes=10_000) for _ in range(others))]

    with pytest.raises(BadRow, match="the fourth row is torn"):
        list(prefetch(*streams, size=2))
    with pytest.raises(BadRow, match="the fourth row is torn"):
        asyncio.run(collected(prefetch(*streams, size=2)))
    assert all(stream.made < 50_000 for stream in streams[1:])


def test_waiting_for_a_slow_stream_uses_no_processor():
    release = threading.Event()

    class Slow(MockGymStream):
        def __iter__(self):
            release.wait(timeout=30)
            yield from super().__iter__()

    timer = threading.Timer(0.5, release.set)
    timer.start()
    before = time.process_time()
    assert next(iter(prefetch(Slow(), size=1))) is not None
    # A loop that asks again and again would use all of the half second.
    assert time.process_time() - before < 0.25
    timer.join()


def test_settings_of_a_queue_are_checked():
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        prefetch(mocks(1)[0], size=0)
    with pytest.raises(ConfigError, match="no streams"):
        prefetch()
    with pytest.raises(ConfigError, match="buffer_size must be at least 1"):
        shuffle(mocks(1)[0], 0)
    with pytest.raises(Mismatch, match="2 streams, here are 1"):
        prefetch(mocks(1)[0]).load_state_dict(prefetch(*mocks(1, 1)).state_dict())


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"input_ids": [1, 2]}, "loss_mask has 3 entries for 2 input_ids"),
        ({"loss_mask": np.ones(4)}, "must be a list of integers"),
        ({"difficulty": 5.0}, "difficulty=5.0"),
        ({"replay_count": 2**70}, "replay_count="),
        ({"colour": "red"}, "colour='red'"),
    ],
)
def test_a_changed_copy_is_checked_as_a_new_sample(update, reason):
    with pytest.raises(BadRow, match=reason):
        sample().model_copy(update=update)


def test_a_changed_copy_has_the_types_of_a_sample_and_what_was_given_before():
    made = sample(priority=2.0).model_copy(update={"input_ids": np.arange(3), "reward": 1})
    assert made.input_ids.dtype == np.int32
    assert not made.input_ids.flags.writeable
    assert type(made.reward) is float
    assert {"priority", "reward"} <= made.model_fields_set
    assert "priority" not in sample().model_copy(update={"reward": 1}).model_fields_set


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda made: pickle.loads(pickle.dumps(made)),
        lambda made: made.model_copy(deep=True),
        lambda made: made.model_copy(update={"reward": 1.0}, deep=True),
        lambda made: copy.deepcopy([made])[0],
    ],
)
def test_copies_of_a_sample_cannot_be_changed(copied):
    made = sample(segment_ids=[0, 0, 1], reward=1.0)
    again = copied(made)
    assert again == made
    assert again.model_fields_set == made.model_fields_set
    for array in (again.input_ids, again.loss_mask, again.segment_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            array.flags.writeable = True


def test_a_stream_does_not_continue_on_data_that_changed(rows):
    stream = OfflineDatasetStream(rows)
    next(iter(stream))
    state = stream.state_dict()
    rows.write_text(rows.read_text().replace('"r7"', '"x7"'))

    other = OfflineDatasetStream(rows)
    with pytest.raises(Mismatch, match="has changed since the state was taken, though it has as"):
        other.load_state_dict(state)
    assert other.state_dict()["position"] == 0


STREAMS = {
    "OfflineDatasetStream": OfflineDatasetStream,
    "MockGymStream": lambda rows: MockGymStream(num_episodes=2),
    "Merged": lambda rows: merge(OfflineDatasetStream(rows)),
    "Shuffled": lambda rows: shuffle(OfflineDatasetStream(rows)),
    "RateLimited": lambda rows: rate_limit(OfflineDatasetStream(rows), 9.0),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_state_that_lacks_a_key_or_is_of_another_stream_is_refused_by_name(kind, rows):
    stream = STREAMS[kind](rows)
    state = stream.state_dict()
    for name in state:
        with pytest.raises(Mismatch, match=f"the state has no '{name}', so it is not .* {kind}"):
            stream.load_state_dict({key: state[key] for key in state if key != name})
    for other in STREAMS.keys() - {kind}:
        with pytest.raises(Mismatch, match=f"the state is of a {other}, this is a {kind}"):
            stream.load_state_dict(STREAMS[other](rows).state_dict())
    with pytest.raises(Mismatch, match="is a dictionary, got list"):
        stream.load_state_dict([1])
    with pytest.raises(Mismatch, match="metrics of the state cannot be read"):
        stream.load_state_dict({**state, "metrics": {"colour": 1}})
    stream.load_state_dict(state)


@pytest.mark.parametrize("kind", ["OfflineDatasetStream", "MockGymStream"])
@pytest.mark.parametrize("position", [-1, 151, 1.5, None])
def test_a_position_outside_the_stream_is_refused(kind, position, rows):
    stream = STREAMS[kind](rows)
    with pytest.raises(Mismatch, match="position of the state must be"):
        stream.load_state_dict({**stream.state_dict(), "position": position})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_episodes": 2.5}, "num_episodes must be an integer, got 2.5"),
        ({"num_episodes": 0}, "num_episodes must be at least 1, got 0"),
        ({"steps_per_episode": "5"}, "steps_per_episode must be an integer, got '5'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"success_rate": float("nan")}, "success_rate must be from 0 to 1, got nan"),
        ({"difficulty_range": (0.0, "1")}, "difficulty_range must be from 0 to 1, got '1'"),
    ],
)
def test_the_mock_gym_refuses_settings_of_other_types(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        MockGymStream(**fields)


def test_a_transform_returns_a_sample(rows):
    with pytest.raises(ConfigError, match="a transform must return a StreamSample, print returned"):
        list(OfflineDatasetStream(rows, transforms=[print]))


def test_only_streams_are_combined():
    with pytest.raises(ConfigError, match="a list is no stream of samples"):
        merge([1, 2])
    with pytest.raises(ConfigError, match=r"buffer_size must be an integer, got 2.5"):
        shuffle(MockGymStream(), 2.5)


@pytest.mark.parametrize("field", ["difficulty", "reward"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_row_whose_number_is_not_finite_is_a_bad_row(field, value, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"input_ids": [1]}}\n{{"input_ids": [2], "{field}": {value}}}\n')

    with pytest.raises(BadRow, match=r"rows.jsonl:2: .*"):
        list(OfflineDatasetStream(path))
    stream = OfflineDatasetStream(path, on_bad_row="skip")
    assert len(list(stream)) == stream.metrics.samples_errored == 1


def test_the_way_out_of_an_unused_column_is_one_for_python_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "explanation": "c"}\n')

    with pytest.raises(BadRow, match=r'in Python with open_source\(path, \["explanation"\]\)'):
        list(OfflineDatasetStream(path, tokenizer="bytes"))
    assert list(OfflineDatasetStream(open_source(path, ["explanation"]), tokenizer="bytes"))
