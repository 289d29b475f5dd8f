"""Proofs: what is the same verifies, what differs is named."""

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import (
    BatchFingerprint,
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchSpec,
    compute_batch_fingerprint,
    verify_batch_fingerprint,
)
from batchwright.data.lengths import Lengths
from batchwright.errors import BadFile, Mismatch, MissingFile

LENGTHS = {f"s{i}": (i * 37) % 61 + 1 for i in range(80)}
DIFFICULTY = [float(i * 7 % 19) for i in range(80)]


def make(
    lengths: Any = LENGTHS, difficulty: Any = None, num_epochs: int = 2, **fields: Any
) -> BatchPlan:
    settings_ = {"token_budget": 128, "bucket_edges": (16, 32), "overflow_max": 64, **fields}
    config = BatchingConfig(**{"pack_max_length": 64, **settings_})
    return BatchPlanBuilder(lengths, config, difficulty=difficulty).build(num_epochs)


@pytest.mark.parametrize("layout", ["bucketed", "sorted", "packed"])
@pytest.mark.parametrize("difficulty", [None, DIFFICULTY])
def test_a_plan_verifies_against_its_own_lengths_in_any_order(
    layout: str, difficulty: Any, tmp_path: Path
) -> None:
    plan = make(layout=layout, difficulty=difficulty)
    plan.verify(LENGTHS)
    shuffled = list(LENGTHS)
    random.Random(1).shuffle(shuffled)
    other_order = {name: LENGTHS[name] for name in shuffled}
    plan.verify(other_order)
    plan.shard(1, 3).verify(other_order)
    BatchPlan.load(plan.save(tmp_path / "plan")).verify(other_order)


def test_a_mixture_verifies_against_its_sources() -> None:
    sources = {"a": LENGTHS, "b": {"x": 3, "y": 40}}
    config = BatchingConfig(layout="sorted", token_budget=128)
    plan = BatchPlanBuilder(sources, config, weights={"a": 1.0, "b": 1.5}).build(2)

    plan.verify(sources)
    plan.verify(dict(reversed(sources.items())))
    with pytest.raises(Mismatch):
        plan.verify({"a": LENGTHS, "b": {"x": 3, "y": 41}})


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["bucketed", "sorted", "packed"]),
    st.sampled_from(sorted(LENGTHS)),
    st.integers(1, 64),
    st.booleans(),
)
def test_the_first_different_microbatch_is_named(
    layout: str, name: str, length: int, shown: bool
) -> None:
    plan = make(layout=layout)
    other = {**LENGTHS, name: length}
    if LENGTHS[name] == length:
        plan.verify(other)
        return
    with pytest.raises(Mismatch) as caught:
        plan.verify(other)
    again = make(other, layout=layout)
    expected = None
    for epoch in range(2):
        mine, theirs = list(plan.iter_epoch(epoch)), list(again.iter_epoch(epoch))
        pairs = zip(mine, theirs, strict=False)
        differing = [i for i, (a, b) in enumerate(pairs) if a != b]
        if differing or len(mine) != len(theirs):
            expected = (epoch, min([*differing, min(len(mine), len(theirs))]))
            break
    assert expected is not None
    assert f"epoch {expected[0]}, microbatch {expected[1]} is the first" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lengths_of_other_data_are_refused_by_name() -> None:
    base = Lengths.of(LENGTHS)
    measured = Lengths(base.values, base.ids, dataset_hash="d1", tokenizer_hash="t1")
    plan = make(measured)

    plan.verify(measured)
    # What is not known contradicts nothing.
    plan.verify(LENGTHS)
    plan.verify(Lengths(base.values, base.ids, tokenizer_hash="t1"))
    make(LENGTHS).verify(measured)
    with pytest.raises(Mismatch, match="tokenizer_hash t1"):
        plan.verify(Lengths(base.values, base.ids, dataset_hash="d1", tokenizer_hash="t2"))
    with pytest.raises(Mismatch, match="dataset_hash d1"):
        plan.verify(Lengths(base.values, base.ids, dataset_hash="d2", tokenizer_hash="t1"))
    with pytest.raises(Mismatch, match="80 samples"):
        plan.verify({**LENGTHS, "one more": 3})
    renamed = {("x" if name == "s5" else name): n for name, n in LENGTHS.items()}
    with pytest.raises(Mismatch):
        plan.verify(renamed)


def test_a_diff_names_settings_and_counts_what_moved() -> None:
    plan = make()
    same = plan.diff(make())
    assert same.same
    assert (same.config, same.first, same.moved) == ({}, None, 0)

    other = make(seed=43, token_budget=256, interleave_buckets=False)
    told = plan.diff(other)
    assert not told.same
    assert told.config == {
        "seed": (42, 43),
        "token_budget": (128, 256),
        "interleave_buckets": (True, False),
    }
    assert told.first is not None
    place = {n: b.index for b in plan.iter_epoch(0) for n in b.samples}
    there = {n: b.index for b in other.iter_epoch(0) for n in b.samples}
    assert told.moved == sum(place[name] != there[name] for name in LENGTHS)
    assert (told.only_left, told.only_right) == (0, 0)

    fewer = make({name: n for name, n in LENGTHS.items() if name not in ("s1", "s2")} | {"new": 5})
    assert (plan.diff(fewer).only_left, plan.diff(fewer).only_right) == (2, 1)
    longer = plan.diff(make(num_epochs=3))
    assert (longer.same, longer.config, longer.first) == (False, {"num_epochs": (2, 3)}, (2, 0))
    # A filler is not a place where a sample stands.
    world = next(w for w in range(2, 9) if plan.num_microbatches() % w)
    part = plan.shard(world - 1, world, balance="round_robin")
    batches = list(part.iter_epoch(0))
    assert any(not batch.weight for batch in batches)
    mine = {name for batch in batches if batch.weight for name in batch.samples}
    assert plan.shard(0, 1).diff(part).only_left == len(LENGTHS) - len(mine)


def spec(names: str, width: int = 8, bucket: int = 0, tokens: int = 5) -> BatchSpec:
    return BatchSpec(tuple(names), bucket, width, tokens)


def test_a_batch_fingerprint_sees_order_boundaries_and_shapes() -> None:
    lists = [
        [],
        [spec("ab"), spec("c")],
        [spec("a"), spec("bc")],
        [spec("abc")],
        [spec("c"), spec("ab")],
        [spec("ba"), spec("c")],
        [spec("ab", width=9), spec("c")],
        [spec("ab", bucket=1), spec("c")],
        [spec("ab", tokens=6), spec("c")],
        [BatchSpec(("a,b",), 0, 8, 5), spec("c")],
        [spec("ab"), spec("c"), spec("c")],
    ]
    prints = [compute_batch_fingerprint(batches) for batches in lists]

    assert len({p.full_hash for p in prints}) == len(lists)
    assert [p.num_batches for p in prints[:4]] == [0, 2, 2, 1]
    assert (prints[1].total_samples, prints[1].total_tokens) == (3, 10)
    assert prints[1] == compute_batch_fingerprint(iter(lists[1]))
    assert prints[1].fingerprint == prints[1].full_hash[:16]
    for layout in ("bucketed", "packed"):
        plan = make(layout=layout)
        epochs = {compute_batch_fingerprint(plan.iter_epoch(e)).full_hash for e in (0, 1, 0)}
        assert len(epochs) == 2


def test_a_batch_fingerprint_never_changes() -> None:
    told = compute_batch_fingerprint(make(layout="packed").iter_epoch(0), BatchingConfig())

    assert (told.fingerprint, told.config_hash) == ("97d012e4b3a8e7f5", "18c1b672114f212e")


def test_a_prefix_of_the_batches_can_be_verified(tmp_path: Path) -> None:
    plan = make()
    early = compute_batch_fingerprint(plan.iter_epoch(0), plan.config, n_batches=3)
    early.save(tmp_path / "print.json")
    loaded = BatchFingerprint.load(tmp_path / "print.json")

    assert loaded == early
    assert loaded.num_batches == 3
    assert verify_batch_fingerprint(plan.iter_epoch(0), loaded)[0]
    assert verify_batch_fingerprint(list(plan.iter_epoch(0))[:3], loaded.fingerprint)[0]
    for wrong in (plan.iter_epoch(1), list(plan.iter_epoch(0))[:2], []):
        fine, told = verify_batch_fingerprint(wrong, loaded)
        assert not fine
        assert loaded.fingerprint in told
    assert not verify_batch_fingerprint(plan.iter_epoch(0), "")[0]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_a_damaged_fingerprint_never_verifies_other_batches(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("print") / "print.json"
    compute_batch_fingerprint([spec("ab"), spec("c")]).save(path)
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= flip
    path.write_bytes(raw[: at % len(raw)] if cut else raw)

    with contextlib.suppress(BadFile):
        fine, told = verify_batch_fingerprint([spec("a"), spec("bc")], BatchFingerprint.load(path))
        assert not fine
        assert "\n" not in told


def test_files_that_are_no_fingerprints_are_named(tmp_path: Path) -> None:
    path = tmp_path / "print.json"
    with pytest.raises(MissingFile):
        BatchFingerprint.load(path)
    fields = '"num_batches": 1, "total_samples": 1, "total_tokens": 1'
    for text in ("", "[]", "{}", "7", '{"fingerprint": 1, "full_hash": null, ' + fields + "}"):
        path.write_text(text)
        with pytest.raises(BadFile):
            BatchFingerprint.load(path)


def test_arrays_and_mappings_prove_the_same() -> None:
    values = np.array(list(LENGTHS.values()))
    plan = make(values)

    plan.verify({str(i): int(n) for i, n in enumerate(values)})
    assert plan.diff(make({str(i): int(values[i]) for i in reversed(range(80))})).same
