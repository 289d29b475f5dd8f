"""Batches as files: NPZ without pickle, found at random, checked when read."""

import asyncio
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchReader,
    BatchWriter,
    CollatedBatch,
    collate,
)
from batchwright.data.rows.sample import Sample
from batchwright.errors import BadFile, ConfigError, Mismatch, MissingFile, UnknownSample

LENGTHS = {f"ü{i}": (i * 37) % 61 + 1 for i in range(40)}


def make(layout: str = "packed", overflow: str = "split", seed: int = 42) -> BatchPlan:
    config = BatchingConfig(
        layout=layout,
        token_budget=128,
        bucket_edges=(16,),
        overflow_max=50,
        pack_max_length=50,
        overflow=overflow,
        seed=seed,
    )
    return BatchPlanBuilder(LENGTHS, config).build(2)


def read(item: int) -> Sample:
    n = list(LENGTHS.values())[item]
    ids = np.arange(n, dtype=np.int32) + item * 1000
    return Sample(ids, np.array([at % 3 > 0 for at in range(n)], np.uint8), str(item))


def same(a: CollatedBatch, b: CollatedBatch) -> bool:
    return all(
        np.array_equal(getattr(a, field.name), getattr(b, field.name))
        and type(getattr(a, field.name)) is type(getattr(b, field.name))
        for field in fields(CollatedBatch)
    )


@pytest.mark.parametrize("layout", ["bucketed", "sorted", "packed"])
@pytest.mark.parametrize("per_file", [1, 3, 64])
def test_batches_come_back_as_they_were(layout: str, per_file: int, tmp_path: Path) -> None:
    plan = make(layout)
    seen: list[tuple[int, int]] = []
    writer = BatchWriter(plan, read, tmp_path / "out", pad_id=7, per_file=per_file)
    reader = writer.write_all(progress=lambda done, total: seen.append((done, total)))

    assert seen[-1] == (reader.num_batches(0) + reader.num_batches(1),) * 2
    reader = BatchReader(tmp_path / "out")
    assert reader.num_epochs == 2
    reader.verify_fingerprint(plan)
    for epoch in (1, 0):
        expected = [collate(b, read, pad_id=7) for b in plan.iter_epoch(epoch)]
        assert reader.num_batches(epoch) == len(expected)
        stored = list(reader.iter_epoch(epoch))
        assert all(map(same, stored, expected))
        assert len(stored) == len(expected)
        for index in reversed(range(len(expected))):
            assert same(reader.get_batch(epoch, index), expected[index])

    async def gathered() -> list[CollatedBatch]:
        return [batch async for batch in reader.iter_epoch(0)]

    assert all(map(same, asyncio.run(gathered()), reader.iter_epoch(0)))
    files = sorted((tmp_path / "out").rglob("*.npz"))
    assert reader.check_files() == len(files)
    for file in files:
        with np.load(file, allow_pickle=False) as stored_arrays:
            assert all(stored_arrays[name].dtype != object for name in stored_arrays.files)


def test_a_shard_writes_its_own_part_with_fillers(tmp_path: Path) -> None:
    plan = make("sorted").shard(1, 4, balance="round_robin")
    reader = BatchWriter(plan, read, tmp_path / "rank_1").write_all()

    batches = list(reader.iter_epoch(0))
    assert [b.index for b in batches] == [b.index for b in plan.iter_epoch(0)]
    assert [b.weight for b in batches] == [b.weight for b in plan.iter_epoch(0)]
    assert all(b.num_loss_tokens == 0 for b in batches if not b.weight)


def test_samples_may_come_from_a_mapping(tmp_path: Path) -> None:
    by_id = {name: read(item) for item, name in enumerate(LENGTHS)}
    as_dicts = {
        name: {"input_ids": s.input_ids.tolist(), "loss_mask": s.loss_mask.tolist()}
        for name, s in by_id.items()
    }
    readers = [
        BatchWriter(make(), source, tmp_path / str(number)).write_all()
        for number, source in enumerate((read, by_id, as_dicts))
    ]

    for other in readers[1:]:
        assert all(map(same, other.iter_epoch(1), readers[0].iter_epoch(1)))
    del as_dicts["ü3"]
    with pytest.raises(UnknownSample, match="ü3"):
        BatchWriter(make(), as_dicts, tmp_path / "fourth").write_all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


def test_samples_longer_than_planned_are_refused_unless_the_plan_cut_them(tmp_path: Path) -> None:
    short = dict.fromkeys(LENGTHS, 50)
    for overflow in ("error", "skip"):
        config = BatchingConfig(
            token_budget=128, bucket_edges=(16,), overflow_max=50, overflow=overflow
        )
        plan = BatchPlanBuilder(short, config).build()
        longer = {name: {"input_ids": [1] * 70} for name in short}
        with pytest.raises(Mismatch):
            BatchWriter(plan, longer, tmp_path / "out").write_all()
    assert not list(tmp_path.iterdir())


def test_an_error_while_reading_is_not_called_a_full_disk(tmp_path: Path) -> None:
    def gone(item: int) -> Sample:
        raise MissingFile("no data at rows.jsonl; check the path")

    with pytest.raises(MissingFile, match="rows"):
        BatchWriter(make(), gone, tmp_path / "out").write_all()
    with pytest.raises(ConfigError):
        BatchWriter(make(), read, tmp_path / "out", per_file=0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batches") / "out"
    BatchWriter(make(), read, path, per_file=5).write_all()
    return path


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["flip", "cut", "delete"]),
    st.integers(0, 10**7),
    st.integers(1, 255),
)
def test_damage_to_any_file_is_one_sentence(
    written: Path, which: int, how: str, at: int, flip: int
) -> None:
    path = written.parent / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(written, path)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    file = files[which % len(files)]
    raw = bytearray(file.read_bytes())
    if how == "flip":
        raw[at % len(raw)] ^= flip
    elif how == "cut":
        del raw[at % len(raw) :]
    if how == "delete":
        file.unlink()
    else:
        file.write_bytes(raw)

    try:
        reader = BatchReader(path)
        reader.check_files()
        # Only white space of the manifest can change without any meaning.
        assert file.name == "manifest.json"
        assert reader.fingerprint == BatchReader(written).fingerprint
    except BadFile as error:
        assert "\n" not in str(error)  # noqa: PT017
    if how != "flip" and file.name != "manifest.json":
        epoch = int(file.parent.name[-1])
        with pytest.raises(BadFile):
            list(BatchReader(path).iter_epoch(epoch))


def test_what_is_not_there_is_named(written: Path, tmp_path: Path) -> None:
    reader = BatchReader(written)

    for epoch, index in [(0, reader.num_batches(0)), (0, -1), (2, 0), (-1, 0)]:
        with pytest.raises(UnknownSample):
            reader.get_batch(epoch, index)
    with pytest.raises(Mismatch, match="come from plan"):
        reader.verify_fingerprint(make(seed=1))
    with pytest.raises(MissingFile):
        BatchReader(tmp_path / "none")
    with pytest.raises(BadFile):
        BatchReader(tmp_path)
    make().save(tmp_path / "plan")
    with pytest.raises(BadFile):
        BatchReader(tmp_path / "plan")
    with pytest.raises(BadFile):
        BatchPlan.load(written)
