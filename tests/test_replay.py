"""The replay buffer: its trees against plain loops, its draws against their shares."""

import bisect
import itertools
import json
import subprocess
import sys
import textwrap
from collections import Counter
from datetime import datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import rng
from batchwright.checkpoint import load_checkpoint, save_checkpoint
from batchwright.errors import BadRow, ConfigError, Mismatch, UnknownSample
from batchwright.jit import interpreted
from batchwright.permutation import mix
from batchwright.streaming import (
    BufferEvictionPolicy,
    ReplayBuffer,
    ReplayBufferConfig,
    SampleSource,
    StreamSample,
    sumtree,
)

PRIORITIES = st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any)
POLICIES = list(BufferEvictionPolicy)


def sample(name, length=3, **fields):
    tokens = np.arange(length) + 7
    given = {"dataset_id": "test", "source": "gym", **fields}
    return StreamSample(input_ids=tokens, loss_mask=tokens % 2, sample_id=str(name), **given)


def filled(priorities, **config):
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=len(priorities), **config))
    for number, priority in enumerate(priorities):
        buffer.add(sample(number), priority)
    return buffer


def same(a, b):
    """Whether two buffers hold the same and will draw the same."""
    return a.get_all() == b.get_all() and a.counters() == b.counters() and trees(a) == trees(b)


def trees(buffer):
    return buffer._tree.tolist(), buffer._first.tolist()


def unit(base, draw, counter):
    with interpreted():
        key = mix(np.uint64(base), np.uint64(draw))
        return float(mix(key, np.uint64(counter)) >> np.uint64(11)) * 2.0**-53


@settings(max_examples=60, deadline=None)
@given(PRIORITIES, st.integers(1, 30), st.integers(0, 5))
def test_proportional_draws_are_the_inverse_of_the_cumulative_priorities(priorities, n, draw):
    buffer = filled(priorities, priority_alpha=1.0)
    buffer.draws = draw
    base = rng.key(buffer.config.seed, "replay/sample")

    drawn = buffer.sample(n).slots

    # Whole numbers add up exactly, so the plain twin may not differ by a single draw.
    ends = list(itertools.accumulate(priorities))
    plain = [bisect.bisect_right(ends, (k + unit(base, draw, k)) / n * ends[-1]) for k in range(n)]
    assert sorted(drawn) == sorted(plain)


@settings(max_examples=60, deadline=None)
@given(PRIORITIES, st.integers(1, 60), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_sample_comes_as_often_as_its_share_says_give_or_take_one(priorities, n, alpha):
    buffer = filled(priorities, priority_alpha=alpha)

    times = Counter(buffer.sample(n).slots.tolist())

    weights = [float(p) ** alpha for p in priorities]
    for slot, weight in enumerate(weights):
        expected = n * weight / sum(weights)
        assert int(expected) - 1 <= times[slot] <= -(-expected // 1) + 1
        assert weight > 0 or not times[slot]


def test_frequencies_over_many_draws_are_the_shares():
    priorities = [5, 1, 0, 3, 0.25, 10]
    buffer = filled(priorities, priority_alpha=1.0)
    times = Counter()
    for _ in range(500):
        times.update(buffer.sample(7).slots.tolist())

    for slot, priority in enumerate(priorities):
        expected = 500 * 7 * priority / sum(priorities)
        # A batch's count varies only in the two strata at its ends: a variance of at most 1/2.
        assert abs(times[slot] - expected) <= 5 * (500 / 2) ** 0.5


def test_draws_without_replacement_have_the_probabilities_of_successive_sampling():
    priorities = [4, 2, 1]
    buffer = filled(priorities, priority_alpha=1.0)
    before = trees(buffer)
    times = Counter(tuple(buffer.sample(2, replace=False).slots.tolist()) for _ in range(4000))

    for a, b in itertools.permutations(range(3), 2):
        left = sum(priorities) - priorities[a]
        share = Fraction(priorities[a], sum(priorities)) * Fraction(priorities[b], left)
        deviation = (4000 * float(share * (1 - share))) ** 0.5
        assert abs(times[a, b] - 4000 * float(share)) < 5 * deviation
    assert sum(times.values()) == 4000
    assert trees(buffer) == before


@settings(max_examples=60, deadline=None)
@given(PRIORITIES, st.data())
def test_draws_without_replacement_differ_and_leave_the_tree_as_it_was(priorities, data):
    buffer = filled(priorities)
    positive = [slot for slot, priority in enumerate(priorities) if priority]
    n = data.draw(st.integers(1, len(positive)))
    before = trees(buffer)

    drawn = buffer.sample(n, replace=False).slots.tolist()

    assert len(set(drawn)) == n
    assert set(drawn) <= set(positive)
    assert trees(buffer) == before
    if len(positive) < len(priorities):
        with pytest.raises(ConfigError, match=f"{len(positive)} have a priority above 0"):
            buffer.sample(len(positive) + 1, replace=False)
        assert trees(buffer) == before


@pytest.mark.parametrize("size", [1, 5, 64, 65, 300])
def test_uniform_draws_know_no_priority(size):
    buffer = filled([0] * size)

    assert sorted(buffer.sample_uniform(size).slots) == list(range(size))
    times = Counter()
    for _ in range(400):
        times.update(buffer.sample(size, uniform=True).slots.tolist())
    assert all(abs(times[slot] - 400) < 6 * 20 for slot in range(size))
    assert buffer.sample(3, uniform=True).weights.tolist() == [1.0] * 3


@settings(max_examples=60, deadline=None)
@given(PRIORITIES, st.integers(1, 40), st.floats(0, 1))
def test_importance_weights_are_those_of_the_paper(priorities, n, beta):
    buffer = filled(priorities, priority_alpha=0.7)

    batch = buffer.sample(n, beta=beta)

    share = np.array(priorities, float) ** 0.7
    share /= share.sum()
    plain = (len(priorities) * share[batch.slots]) ** -beta
    assert batch.weights == pytest.approx(plain / plain.max())


leaf_values = st.lists(st.floats(0, 1e6), min_size=1, max_size=33)


@settings(max_examples=60, deadline=None)
@given(leaf_values, st.sampled_from([True, False]), st.integers(0, 2**60))
def test_compiled_kernels_equal_the_interpreted_ones(values, by_priority, base):
    def run():
        n = len(values)
        leaves = 1 << max(1, (n - 1).bit_length())
        tree, first = np.zeros(2 * leaves), np.zeros(2 * leaves, np.int64)
        priorities, serials = np.array(values), np.arange(n)[::-1].copy()
        dirty, replays = np.zeros(n, np.uint8), np.zeros(n, np.int64)
        given = (tree, first, priorities, serials, by_priority)
        for slot in range(n):
            sumtree.place(*given, slot, values[slot])
        grown = tree.tolist(), first.tolist()
        sumtree.rebuild(*given, priorities)
        assert (tree.tolist(), first.tolist()) == grown
        slots = np.zeros(9, np.int64)
        seen = [grown]
        if tree[1] > 0:
            sumtree.draw_proportional(tree, np.uint64(base), 3, slots)
            seen.append(slots.tolist())
            few = np.zeros(min(4, n), np.int64)
            seen.append((sumtree.draw_distinct(tree, np.uint64(base), 4, few), few.tolist()))
        for distinct in (True, False):
            many = np.zeros(n, np.int64)
            sumtree.draw_uniform(n, np.uint64(base), 5, distinct, many)
            seen.append(many.tolist())
        seen.append(sumtree.evicted_at_random(np.uint64(base), 6, n))
        weights = np.zeros(9)
        sumtree.mark(tree, slots, replays, dirty, weights)
        seen.append((replays.tolist(), dirty.tolist(), weights.tolist()))
        changed, expected = np.array([0, n - 1, n, -1]), np.array([n - 1, 5, 0, 0])
        new = np.array([2.0, 3.0, 4.0, 5.0])
        seen.append(sumtree.place_many(*given, dirty, n, changed, expected, new, new))
        sumtree.remove(*given, n - 1)
        return [*seen, tree.tolist(), first.tolist(), priorities.tolist()]

    compiled = run()
    with interpreted():
        assert run() == compiled


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("update"), st.integers(0, 30), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(1, 3)),
        st.tuples(st.just("sample"), st.integers(1, 4)),
    ),
    max_size=60,
)


def apply(buffer, number, operation):
    """Do one operation; what it gave."""
    kind, *values = operation
    if kind == "add":
        return buffer.add(sample(number), values[0])
    if kind == "update":
        return buffer.update_priority(str(values[0]), values[1])
    if kind == "evict":
        return buffer.evict(values[0])
    if not buffer.size:
        return None
    batch = buffer.sample(values[0], uniform=not buffer._tree[1] > 0)
    return list(batch), batch.weights.tolist()


def model_after(operations, size, policy):
    """A list of [id, priority], oldest first: what a buffer of this policy holds."""
    held, evicted = [], 0

    def victim():
        if policy is BufferEvictionPolicy.FIFO:
            return 0
        return min(range(len(held)), key=lambda k: held[k][1])

    for number, (kind, *values) in enumerate(operations):
        if kind == "add":
            if len(held) == size:
                del held[victim()]
                evicted += 1
            held.append([str(number), values[0]])
        elif kind == "update":
            for entry in held:
                if entry[0] == str(values[0]):
                    entry[1] = values[1]
        elif kind == "evict":
            for _ in range(min(values[0], len(held))):
                del held[victim()]
                evicted += 1
    return held, evicted


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(1, 9), st.sampled_from(["fifo", "priority"]))
def test_eviction_follows_a_plain_list(operations, size, policy):
    policy = BufferEvictionPolicy(policy)
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=size, eviction_policy=policy))
    for number, operation in enumerate(operations):
        apply(buffer, number, operation)

    held, evicted = model_after(operations, size, policy)
    snapshot = buffer.snapshot()
    oldest_first = snapshot.take(np.argsort(snapshot.serials))
    found = zip(oldest_first.sample_ids, oldest_first.priorities.tolist(), strict=True)
    assert [list(pair) for pair in found] == held
    assert buffer.total_evicted == evicted
    assert buffer.total_added - evicted == buffer.size == len(held)
    assert all(name in buffer for name, _ in held)
    weights = snapshot.priorities**buffer.config.priority_alpha
    assert buffer._tree[1] == pytest.approx(weights.sum())


def test_random_eviction_takes_every_slot_equally_often():
    buffer = filled([1] * 8, eviction_policy="random")
    times = Counter()
    for number in range(8, 4008):
        before = set(buffer.snapshot().sample_ids)
        slots = {name: slot for slot, name in enumerate(buffer.snapshot().sample_ids)}
        buffer.add(sample(number))
        (gone,) = before - set(buffer.snapshot().sample_ids)
        times[slots[gone]] += 1

    assert all(abs(times[slot] - 500) < 5 * (4000 * 7 / 64) ** 0.5 for slot in range(8))


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, st.integers(1, 9), st.sampled_from(POLICIES))
def test_a_state_taken_at_any_step_continues_as_if_nothing_had_happened(operations, size, policy):
    config = ReplayBufferConfig(max_size=size, eviction_policy=policy)
    straight, taken = ReplayBuffer(config), ReplayBuffer(config)
    for number, operation in enumerate(operations):
        other = ReplayBuffer(config)
        other.load_state_dict(taken.state_dict())
        taken = other

        assert apply(taken, number, operation) == apply(straight, number, operation)
        assert same(taken, straight)


def test_a_training_checkpoint_holds_a_buffer(tmp_path):
    buffer = filled([1, 5, 2], eviction_policy="priority")
    buffer.sample(4)
    save_checkpoint(tmp_path, 7, {"replay": buffer.state_dict()})
    restored = ReplayBuffer(buffer.config)
    restored.load_state_dict(load_checkpoint(tmp_path / "step_00000007").state["replay"])

    assert same(restored, buffer)
    assert restored.sample(5).sample_ids == buffer.sample(5).sample_ids


def test_a_state_of_another_buffer_is_refused():
    state = filled([1, 2]).state_dict()

    with pytest.raises(Mismatch, match="another config"):
        ReplayBuffer().load_state_dict(state)
    wrong = {**state, "counters": {**state["counters"], "total_added": 5}}
    with pytest.raises(Mismatch, match="contradict the 2 samples"):
        filled([1, 2]).load_state_dict(wrong)


def test_a_batch_stays_what_it_was_when_its_samples_are_evicted():
    buffer = filled([1, 1])
    batch = buffer.sample(4)
    shown = [(s.sample_id, s.input_ids.tolist()) for s in batch]
    for number in range(2, 6):
        buffer.add(sample(number, length=9))

    assert [(s.sample_id, s.input_ids.tolist()) for s in batch] == shown
    assert buffer.update_priorities(batch, [9.0] * 4) == 0
    assert buffer.snapshot().priorities.tolist() == [1.0, 1.0]


def test_drawn_samples_are_marked_and_counted_and_stored_ones_keep_their_source():
    buffer = filled([1])
    first, second = buffer.sample(2)[0], buffer.sample(1)[0]

    assert (first.source, first.replay_count, first.is_replay) == (SampleSource.REPLAY, 2, True)
    assert second.replay_count == 3
    (held,) = buffer.get_all()
    assert (held.source, held.replay_count) == (SampleSource.GYM, 3)


def test_a_sample_that_moved_because_another_was_evicted_still_gets_its_priority():
    buffer = filled([1, 2, 3, 4])
    batch = buffer.snapshot()
    buffer.evict()

    assert buffer.update_priorities(batch, [10, 20, 30, 40]) == 3
    assert {s.sample_id: s.priority for s in buffer} == {"1": 20, "2": 30, "3": 40}


def test_of_a_sample_drawn_twice_the_last_priority_counts():
    buffer = filled([1])

    assert buffer.update_priorities(buffer.sample(3), [5, 6, 7]) == 3
    assert buffer["0"].priority == 7


def test_two_samples_of_one_id_are_two_entries():
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=3))
    for length in (1, 2, 3):
        buffer.add(sample("twin", length))

    assert buffer.update_priority("twin", 5.0)
    assert buffer.snapshot().priorities.tolist() == [5.0] * 3
    assert buffer["twin"].length == 3
    buffer.add(sample("other"))
    buffer.add(sample("other"))
    assert [s.length for s in buffer if s.sample_id == "twin"] == [3]
    buffer.evict(3)
    assert "twin" not in buffer
    assert not buffer.update_priority("twin", 1.0)


def test_a_sample_brings_its_own_priority_or_gets_the_default():
    buffer = ReplayBuffer(ReplayBufferConfig(default_priority=3.0))
    buffer.add(sample("default"))
    buffer.add(sample("own", priority=1.0))
    buffer.add(sample("given", priority=1.0), 2.0)

    assert [s.priority for s in buffer] == [3.0, 1.0, 2.0]


samples = st.builds(
    sample,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.integers(1, 9),
    dataset_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    source=st.sampled_from(["offline", "gym", "replay", "synthetic"]),
    # The first and the last day there are have no time in some other zones.
    timestamp=st.none() | st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31)),
    episode_id=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    episode_status=st.none() | st.sampled_from(["pending", "success", "error"]),
    step_index=st.none() | st.integers(0, 2**31 - 1),
    total_steps=st.none() | st.integers(0, 2**31 - 1),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    difficulty=st.none() | st.floats(0, 1),
    success=st.none() | st.booleans(),
    replay_count=st.integers(0, 9),
    priority=st.floats(0, 1e100),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(samples, max_size=5))
def test_a_sample_comes_out_of_a_buffer_as_it_went_in(added):
    buffer = ReplayBuffer()
    buffer.add_batch(added)

    assert buffer.get_all() == added
    assert json.dumps(buffer.to_dict())
    assert same(ReplayBuffer.from_dict(buffer.to_dict()), buffer)


def test_segments_are_kept():
    added = sample("a", 4, segment_ids=[0, 0, 1, 1])
    buffer = ReplayBuffer()
    buffer.add(added)

    assert buffer["a"].segment_ids.tolist() == [0, 0, 1, 1]
    assert buffer["a"] == added


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.booleans()), max_size=30))
def test_statistics_equal_those_of_a_plain_loop(pairs):
    buffer = ReplayBuffer()
    for number, (difficulty, success) in enumerate(pairs):
        buffer.add(sample(number, difficulty=difficulty, success=success))

    for number, found in enumerate(buffer.difficulty_stats(bins=4)):
        inside = [s for d, s in pairs if d is not None and min(int(d * 4), 3) == number]
        judged = [s for s in inside if s is not None]
        assert (found.low, found.high) == (number / 4, (number + 1) / 4)
        assert (found.samples, found.judged, found.successes) == (
            len(inside),
            len(judged),
            sum(judged),
        )
        assert found.success_rate == (sum(judged) / len(judged) if judged else None)
    judged = [s for _, s in pairs if s is not None]
    known = [d for d, _ in pairs if d is not None]
    assert buffer.success_rate == (sum(judged) / len(judged) if judged else None)
    assert buffer.mean_difficulty == (pytest.approx(sum(known) / len(known)) if known else None)
    assert buffer.mean_reward is None
    assert len(buffer.filter_by_difficulty(0.25, 0.5)) == sum(0.25 <= d <= 0.5 for d in known)


def test_clear_forgets_the_samples_and_keeps_the_counters():
    buffer = filled([1, 2, 3])
    buffer.clear()

    assert buffer.is_empty
    assert (buffer.total_added, buffer.total_evicted) == (3, 3)
    buffer.add(sample("new"))
    assert buffer.sample(2).sample_ids == ["new", "new"]


def test_what_cannot_be_drawn_says_why():
    buffer = ReplayBuffer(ReplayBufferConfig(min_samples_before_sampling=2))
    buffer.add(sample("a"), 0)
    with pytest.raises(ConfigError, match="holds 1 samples, sampling needs at least 2"):
        buffer.sample(1)
    buffer.add(sample("b"), 0)
    with pytest.raises(ConfigError, match="all 2 samples have priority 0"):
        buffer.sample(1)
    with pytest.raises(ConfigError, match="cannot sample 3 of 2 without replacement"):
        buffer.sample_uniform(3)
    with pytest.raises(ConfigError, match="n must be at least 1, got 0"):
        buffer.sample(0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"priority must be from 0 to 1e100"):
            buffer.update_priority("a", wrong)
        with pytest.raises(ConfigError, match=r"priority must be from 0 to 1e100"):
            buffer.update_priorities(buffer.snapshot(), [1.0, wrong])
        with pytest.raises(ConfigError, match=r"priority must be from 0 to 1e100"):
            buffer.add(sample("c"), wrong)
    with pytest.raises(ConfigError, match="give one number for each"):
        buffer.update_priorities(buffer.snapshot(), [1.0])
    with pytest.raises(UnknownSample, match="no sample has the id 'z' among 2"):
        buffer["z"]
    with pytest.raises(ConfigError, match="max_size=0"):
        ReplayBufferConfig(max_size=0)


def test_a_batch_reads_like_a_list():
    batch = filled([1, 2, 3]).snapshot()

    assert [s.sample_id for s in batch] == batch.sample_ids == ["0", "1", "2"]
    assert batch[1:].sample_ids == ["1", "2"]
    assert batch[-1].sample_id == "2"
    assert batch.lengths.tolist() == [3, 3, 3]
    assert repr(batch) == "ReplayBatch(3 samples, 9 tokens)"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [float, np.float16, np.float32, np.float64, np.array, Decimal])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1"])
def test_a_priority_that_is_no_finite_number_from_0_is_refused_in_every_type(kind, value):
    buffer = filled([1, 2])
    bad = kind(float(value)) if kind is np.array else kind(value)
    for call in (
        lambda: buffer.add(sample("new"), bad),
        lambda: buffer.add_batch([sample("new").model_construct(priority=bad)]),
        lambda: buffer.update_priority("0", bad),
        lambda: buffer.update_priorities(buffer.snapshot(), [1.0, bad]),
    ):
        with pytest.raises(ConfigError, match="priority must be from 0 to 1e"):
            call()
    assert buffer.snapshot().priorities.tolist() == [1, 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", ["1", b"1", None, 1j, np.complex64(1), [1.0], np.ones(1), 10**400])
def test_a_priority_that_is_no_number_is_refused(bad):
    buffer = filled([1, 2])
    with pytest.raises(ConfigError, match="priority must be"):
        buffer.update_priority("0", bad)
    with pytest.raises(ConfigError, match="priorit"):
        buffer.update_priorities(buffer.snapshot(), [1.0, bad])
    assert buffer.snapshot().priorities.tolist() == [1, 2]


def test_priorities_may_be_tensors():
    torch = pytest.importorskip("torch")
    buffer = filled([1, 2])
    buffer.add(sample("new"), torch.tensor(3.0))
    buffer.update_priorities(buffer.snapshot(), torch.tensor([4.0, 5.0]))
    assert sorted(buffer.snapshot().priorities) == [4, 5]
    with pytest.raises(ConfigError, match="priority must be"):
        buffer.add(sample("new"), torch.tensor(float("inf")))


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": np.arange(3)},
        {"input_ids": np.arange(-1, 2, dtype=np.int32)},
        {"input_ids": [1, 2, 3]},
        {"input_ids": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8)},
        {"loss_mask": np.ones(2, np.uint8)},
        {"loss_mask": np.full(3, 2, np.uint8)},
        {"segment_ids": np.zeros(2, np.int32)},
        {"difficulty": 5.0},
        {"reward": float("nan")},
        {"reward": "1"},
        {"step_index": 1.5},
        {"replay_count": 2**70},
        {"replay_count": 2**63 - 1},
        {"replay_count": 2**62},
        {"replay_count": None},
        {"source": "dream"},
        {"sample_id": "\ud800"},
        {"sample_id": ""},
        {"timestamp": "now"},
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_sample_made_past_its_checks_is_refused_and_changes_nothing(fields, size):
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=size))
    buffer.add(sample("a"))
    before = buffer.to_dict()
    made = StreamSample.model_construct(**{**dict(sample("b")), **fields})
    with pytest.raises((BadRow, ConfigError)):
        buffer.add(made)
    assert buffer.to_dict() == before
    buffer.add(sample("c"))
    assert "c" in ReplayBuffer.from_dict(buffer.to_dict())


def test_the_largest_replay_count_can_be_drawn_and_saved(tmp_path):
    buffer = ReplayBuffer()
    buffer.add(sample("a", replay_count=2**61))
    assert buffer.sample(9)[0].replay_count == 2**61 + 9
    for name in ("b.json", "b.safetensors"):
        assert same(ReplayBuffer.load(buffer.save(tmp_path / name)), buffer)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan"), np.float32("inf"), "1"])
def test_a_beta_out_of_range_is_refused_and_nothing_is_drawn(beta):
    buffer = filled([1, 2])
    before = buffer.to_dict()
    with pytest.raises(ConfigError, match="beta must be from 0 to 1, got"):
        buffer.sample(2, beta=beta)
    assert buffer.to_dict() == before


@settings(max_examples=40, deadline=None)
@given(
    mine=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    theirs=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    evicted=st.integers(0, 3),
)
def test_a_batch_of_another_buffer_never_changes_a_sample_that_is_not_in_it(mine, theirs, evicted):
    a, b = ReplayBuffer(), ReplayBuffer()
    a.add_batch(sample(name) for name in mine)
    b.add_batch(sample(name) for name in theirs)
    b.evict(evicted)
    names = a.snapshot().sample_ids
    before = b.snapshot()
    try:
        a_batch = a.snapshot()
        b.update_priorities(a_batch, np.full(len(a_batch), 9.0))
    except Mismatch:
        assert b.snapshot().priorities.tolist() == before.priorities.tolist()
    changed = b.snapshot().priorities == 9.0
    for serial, name in zip(before.serials[changed], before.take(changed).sample_ids, strict=True):
        assert names[serial] == name


def test_a_batch_can_update_a_restored_buffer_but_no_other():
    buffer = filled([1, 2, 3])
    batch = buffer.sample(8)
    again = ReplayBuffer.from_dict(buffer.to_dict())
    assert again.update_priorities(batch, [4.0] * 8) == 8
    other = ReplayBuffer()
    other.add_batch(sample(f"other {number}") for number in range(3))
    with pytest.raises(Mismatch, match="drawn from another buffer"):
        other.update_priorities(batch, [4.0] * 8)
    with pytest.raises(ConfigError, match="takes the batch that was drawn, got list"):
        buffer.update_priorities([1, 2], [1.0, 1.0])


@pytest.mark.parametrize("n", [2.0, "2", None, -1])
def test_numbers_of_samples_are_integers(n):
    buffer = filled([1, 2])
    for call in (buffer.sample, buffer.sample_uniform, buffer.evict):
        with pytest.raises(ConfigError, match="n must be"):
            call(n)
    assert len(buffer) == 2
    assert len(buffer.sample(np.int32(2))) == 2


@pytest.mark.parametrize("wrong", [{"sample_id": "a"}, None, "a"])
def test_only_a_sample_can_be_added(wrong):
    with pytest.raises(ConfigError, match="add takes a StreamSample, got"):
        ReplayBuffer().add(wrong)


def test_a_buffer_that_does_not_fit_memory_says_so():
    code = """
        import resource
        from batchwright.errors import ConfigError
        from batchwright.streaming import ReplayBuffer, ReplayBufferConfig
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
        try:
            ReplayBuffer(ReplayBufferConfig(max_size=2**30))
        except ConfigError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("max_size=1,073,741,824 needs more memory than there is")
