"""Plans on disk: what was saved comes back, and damage never goes unnoticed."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.errors import BadFile, BatchwrightError, ConfigError, MissingFile

KINDS = ["bucketed", "sorted", "packed", "optimal", "split", "numbered", "curriculum", "mixture"]
KINDS += ["groups", "costs"]


def make(kind: str, seed: int = 42, num_epochs: int = 2) -> BatchPlan:
    layout = kind if kind in ("bucketed", "sorted", "packed") else "packed"
    config = BatchingConfig(
        layout="bucketed" if kind in ("split", "curriculum") else layout,
        token_budget=128,
        bucket_edges=(16, 32),
        overflow_max=50,
        pack_max_length=50,
        pack_mode="optimal" if kind == "optimal" else "best_fit_decreasing",
        overflow="split" if kind == "split" else "skip",
        seed=seed,
    )
    lengths = {f"ü{i}": (i * 37) % 61 + 1 for i in range(40)}
    if kind == "numbered":
        return BatchPlanBuilder(np.array(list(lengths.values())), config).build(num_epochs)
    if kind == "curriculum":
        difficulty = [i % 7 for i in range(40)]
        return BatchPlanBuilder(lengths, config, difficulty=difficulty).build(num_epochs)
    if kind == "groups":
        groups = [i // 3 for i in range(40)]
        return BatchPlanBuilder(lengths, config, groups=groups).build(num_epochs)
    if kind == "costs":
        return BatchPlanBuilder(lengths, config, costs=list(range(40))).build(num_epochs)
    if kind == "mixture":
        sources = {"a": lengths, "b": {"x": 3, "y": 4}}
        return BatchPlanBuilder(sources, config, weights={"a": 1.0, "b": 1.5}).build(num_epochs)
    return BatchPlanBuilder(lengths, config).build(num_epochs)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    plan = make(kind)
    assert plan.save(str(tmp_path / "plan")) == tmp_path / "plan"
    loaded = BatchPlan.load(str(tmp_path / "plan"))

    assert loaded.fingerprint == plan.fingerprint
    assert loaded.config == plan.config
    assert loaded.counts == plan.counts
    assert loaded.ids == plan.ids
    assert loaded.num_epochs == plan.num_epochs
    assert loaded.sources == plan.sources
    assert (loaded.dataset_hash, loaded.tokenizer_hash) == (plan.dataset_hash, plan.tokenizer_hash)
    assert np.array_equal(loaded.skipped, plan.skipped)
    for epoch in range(2):
        assert list(loaded.iter_epoch(epoch)) == list(plan.iter_epoch(epoch))
        assert loaded.costs(epoch).tolist() == plan.costs(epoch).tolist()
    assert loaded.explain(plan.ids[3]) == plan.explain(plan.ids[3])
    assert repr(loaded) == repr(plan)
    checked = BatchPlan.load(tmp_path / "plan", check=True)
    assert checked.fingerprint == plan.fingerprint
    assert list(checked.iter_epoch(1)) == list(plan.iter_epoch(1))
    # Mapped, not read: nothing can be written through the arrays.
    assert not any(array.flags.writeable for array in loaded.order.arrays().values())


def test_a_plan_can_be_saved_over_itself_and_over_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    make("curriculum").save(path)
    plan = make("numbered")
    plan.save(path)
    fresh = plan.save(tmp_path / "fresh")

    assert contents(path) == contents(fresh)
    loaded = BatchPlan.load(path)
    loaded.save(path)
    assert contents(path) == contents(fresh)
    assert list(loaded.iter_epoch(1)) == list(plan.iter_epoch(1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "plan"]


def test_saving_spares_folders_that_are_not_plans(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"precious")

    with pytest.raises(ConfigError):
        make("sorted").save(tmp_path)
    with pytest.raises(ConfigError):
        make("sorted").export(tmp_path)
    with pytest.raises(ConfigError):
        make("sorted").save_shards(2, tmp_path)
    assert contents(tmp_path) == {"photo.jpg": b"precious"}


SAVE = """
import sys
from batchwright.batching import BatchingConfig, BatchPlanBuilder
from pathlib import Path
for layout in ("bucketed", "sorted", "packed"):
    lengths = {f"s{i}": i * 37 % 61 + 1 for i in range(50)}
    config = BatchingConfig(layout=layout, token_budget=128, bucket_edges=(16, 32), overflow_max=64,
                            pack_max_length=64)
    BatchPlanBuilder(lengths, config).build(2).save(Path(sys.argv[1]) / layout)
    plan = BatchPlanBuilder(lengths, config, difficulty=[i % 3 for i in range(50)]).build(2)
    plan.save(Path(sys.argv[1]) / f"{layout}-curriculum")
"""


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / seed)], env=environ, check=True)

    assert len(contents(tmp_path / "1")) > 20
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def survives(path: Path, whole: str) -> None:
    """Open and use a damaged plan: it is refused in one sentence, or it is the plan it was."""
    try:
        same = BatchPlan.load(path, check=True).fingerprint == whole
    except (BadFile, MissingFile) as error:
        same = "\n" not in str(error)
    assert same
    # Damage to a big array may wait until it is read, but using the plan must not crash.
    try:
        plan = BatchPlan.load(path)
        for batch in plan.iter_epoch(0):
            _ = batch.samples
        plan.costs(0)
        assert plan.fingerprint
        plan.explain(plan.ids[0])
    except BatchwrightError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plans")
    return {kind: make(kind).save(root / kind) for kind in ("bucketed", "packed", "curriculum")}


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["bucketed", "packed", "curriculum"]),
    st.integers(0, 10**6),
    st.sampled_from(["flip", "cut", "grow", "delete", "empty", "folder"]),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
def test_damage_to_any_file_is_one_sentence(
    saved: dict[str, Path], kind: str, which: int, how: str, at: int, flip: int
) -> None:
    original = saved[kind]
    whole = json.loads((original / "manifest.json").read_bytes())["fingerprint"]
    names = sorted(p.name for p in original.iterdir() if p.stat().st_size)
    # The manifest is the most delicate, so every other time it is the one.
    name = "manifest.json" if which % 2 else names[which // 2 % len(names)]
    path = original.parent / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)
    file = path / name
    raw = bytearray(file.read_bytes())
    place = at % len(raw)
    if how == "flip":
        raw[place] ^= flip
    elif how == "cut":
        del raw[place:]
    elif how == "grow":
        raw[place:place] = bytes([flip])
    elif how == "empty":
        raw.clear()
    if how in ("delete", "folder"):
        file.unlink()
        if how == "folder":
            file.mkdir()
    else:
        file.write_bytes(raw)

    survives(path, whole)
    if how in ("cut", "grow") and name != "manifest.json":
        with pytest.raises(BadFile):
            BatchPlan.load(path)


@pytest.mark.parametrize("kind", ["bucketed", "packed", "curriculum"])
def test_every_array_is_checked(kind: str, saved: dict[str, Path], tmp_path: Path) -> None:
    for file in sorted(saved[kind].glob("*.bin")):
        if not file.stat().st_size:
            continue
        path = tmp_path / file.stem
        shutil.copytree(saved[kind], path)
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 0x80
        (path / file.name).write_bytes(raw)
        with pytest.raises(BadFile, match=file.name):
            BatchPlan.load(path, check=True)
    # What steers reading without bounds checks is refused on opening already.
    for name in ("class_offsets", "batch_start", "bin_starts", "entry_position", "batch_rows"):
        if (tmp_path / name).exists():
            with pytest.raises(BadFile, match=name):
                BatchPlan.load(tmp_path / name)


@pytest.mark.parametrize("name", ["items", "id_data"])
def test_the_fingerprint_of_a_saved_plan_is_told_only_if_its_files_have_it(
    name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "plan"
    shutil.copytree(saved["packed"], path)
    whole = BatchPlan.load(path)
    assert whole.sealed is not None
    worked_out = dataclasses.replace(whole)
    assert worked_out.sealed is None
    assert whole.fingerprint == worked_out.fingerprint
    assert whole.shard(1, 2).fingerprint == worked_out.shard(1, 2).fingerprint
    assert whole.shard(1, 2).whole_fingerprint == worked_out.fingerprint
    other = dataclasses.replace(whole, dataset_hash="another")
    assert other.fingerprint != whole.fingerprint

    raw = bytearray((path / f"{name}.bin").read_bytes())
    raw[-1] ^= 1
    (path / f"{name}.bin").write_bytes(raw)
    with pytest.raises(BadFile, match=f"{name}.bin does not match its checksum"):
        BatchPlan.load(path).shard(0, 2).whole_fingerprint  # noqa: B018


def test_folders_that_are_no_plans_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.write_text("hello")
    foreign = tmp_path / "foreign"
    foreign.mkdir()

    with pytest.raises(MissingFile):
        BatchPlan.load(tmp_path / "none")
    for path in (empty, file):
        with pytest.raises(BadFile):
            BatchPlan.load(path)
    for text in (
        "",
        "null",
        "[]",
        '"x"',
        "3",
        "{}",
        '{"name": "extension", "version": 3}',
        "NaN",
        "\xff",
    ):
        (foreign / "manifest.json").write_text(text, encoding="latin-1")
        with pytest.raises(BadFile) as caught:
            BatchPlan.load(foreign)
        assert "\n" not in str(caught.value)


def test_another_version_says_so(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved["packed"], tmp_path / "plan")
    manifest = tmp_path / "plan" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 5', '"version": 6', 1))

    with pytest.raises(BadFile, match="format version 6"):
        BatchPlan.load(tmp_path / "plan")


def test_a_full_disk_leaves_the_older_plan(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from batchwright.batching import BatchPlanBuilder
from batchwright.errors import CannotWrite
old = BatchPlanBuilder(np.full(40, 7)).build()
new = BatchPlanBuilder(np.full(40_000, 7)).build()
old.save(sys.argv[1])
new.fingerprint
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    new.save(sys.argv[1])
except CannotWrite as error:
    print("refused", "\\n" not in str(error))
"""
    path = tmp_path / "plan"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )

    assert done.stdout.split() == ["refused", "True"], done.stderr
    assert BatchPlan.load(path, check=True).counts.samples == 40
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize("kind", ["bucketed", "packed", "curriculum"])
def test_shards_come_back_as_ranks(kind: str, tmp_path: Path) -> None:
    plan = make(kind)
    for world in (3, 2):
        paths = plan.save_shards(world, tmp_path / "ranks", balance="round_robin")
        assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == [p.name for p in paths]
        for rank, path in enumerate(paths):
            shard = plan.shard(rank, world, balance="round_robin")
            loaded = BatchPlan.load(path)
            assert loaded.shard_of == shard.shard_of
            assert loaded.fingerprint == shard.fingerprint
            assert list(loaded.iter_epoch(1)) == list(shard.iter_epoch(1))
            BatchPlan.load(path, check=True)
    before = contents(tmp_path)
    for world in (0, -1, plan.num_microbatches() + 1):
        with pytest.raises(ConfigError):
            plan.save_shards(world, tmp_path / "ranks")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["bucketed", "packed", "mixture"])
def test_an_export_says_all_in_text(kind: str, tmp_path: Path) -> None:
    plan = make(kind).shard(0, 2)
    plan.export(tmp_path / "text")
    plan.export(tmp_path / "text")

    meta = json.loads((tmp_path / "text" / "meta.json").read_text())
    assert meta["fingerprint"] == plan.fingerprint
    assert BatchingConfig(**meta["config"]) == plan.config
    assert meta["counts"]["samples"] == plan.counts.samples
    assert meta["shard"] == {"rank": 0, "world_size": 2, "balance": "cost"}
    for epoch in range(2):
        lines = (tmp_path / "text" / f"epoch_{epoch}.jsonl").read_text().splitlines()
        head, *rows = map(json.loads, lines)
        batches = list(plan.iter_epoch(epoch))
        assert head["num_microbatches"] == len(rows) == len(batches)
        assert head["total_samples"] == sum(len(b.items) for b in batches if b.weight)
        assert head["total_tokens"] == sum(b.token_count for b in batches if b.weight)
        for row, batch in zip(rows, batches, strict=True):
            assert row["samples"] == list(batch.samples)
            packs: Any = None if batch.packs is None else [list(pack) for pack in batch.packs]
            assert row["packs"] == packs
            assert row["lengths"] == batch.lengths.tolist()
            assert row["starts"] == batch.starts.tolist()
            assert (row["index"], row["bucket_id"]) == (batch.index, batch.bucket_id)
            assert (row["max_len"], row["weight"]) == (batch.max_len, batch.weight)


def test_the_files_of_a_plan_never_change(tmp_path: Path) -> None:
    """The layout of the folder is a promise: other programs read it."""
    path = make("packed").save(tmp_path / "plan")
    seal = hashlib.sha256()
    for name, raw in sorted(contents(path).items()):
        seal.update(f"{name}:{len(raw)}:".encode() + raw)

    assert seal.hexdigest() == ("eebab875d98d9e64b12faed363a3d98b16b606be5d60f40178ab8055febd35ab")
