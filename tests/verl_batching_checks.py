"""Our dynamic batching inside verl, in its own environment; run by test_integration_verl.py."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl lives in an environment of its own")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.utils import seqlen_balancing as theirs
from verl.workers.engine import utils as engine

import batchwright.integrations.verl_batching as ours
from batchwright.errors import ConfigError, Mismatch, OversizedSample

OURS = ours.rearrange_micro_batches, ours.get_seqlen_balanced_partitions
ours.use_verl_batching()
VERLS = theirs.rearrange_micro_batches, theirs.get_seqlen_balanced_partitions
WIDTH = 64


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    ours.use_batchwright_batching()
    yield
    ours.use_verl_batching()


def batch_of(rows: int, seed: int = 0, width: int = WIDTH) -> TensorDict:
    """Rows of very different lengths, padded on the left and on the right as verl's are."""
    random = np.random.default_rng(seed)
    mask = torch.zeros(rows, width, dtype=torch.long)
    for row, length in enumerate(random.geometric(4 / width, rows).clip(1, width)):
        first = int(random.integers(0, width - length + 1))
        mask[row, first : first + int(length)] = 1
    ids = torch.from_numpy(random.integers(0, 100, (rows, width)))
    return TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=rows)


def test_ours_stands_wherever_verl_imported_its_own_and_goes_again() -> None:
    ours.use_batchwright_batching()
    assert theirs.rearrange_micro_batches is OURS[0]
    assert engine.rearrange_micro_batches is OURS[0]
    assert ray_trainer.get_seqlen_balanced_partitions is OURS[1]
    for _ in range(2):
        ours.use_verl_batching()
        assert theirs.rearrange_micro_batches is engine.rearrange_micro_batches is VERLS[0]
        assert ray_trainer.get_seqlen_balanced_partitions is VERLS[1]


def test_a_verl_with_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours.use_verl_batching()
    monkeypatch.setattr(theirs, "rearrange_micro_batches", lambda batch, max_token_len: None)
    with pytest.raises(Mismatch, match="verl's rearrange_micro_batches takes batch, max_token_len"):
        ours.use_batchwright_batching()


def test_verl_switches_it_on_in_every_process_by_its_own_variable() -> None:
    script = (
        "from verl.workers.engine import utils; from verl.trainer.ppo import ray_trainer as t;"
        "print(utils.rearrange_micro_batches.__module__, "
        "t.get_seqlen_balanced_partitions.__module__)"
    )
    module = "batchwright.integrations.verl_batching"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": module},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split()[-2:] == [module, module], done.stderr[-2000:]


@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_hold_every_row_once_and_are_never_more_than_verls(seed: int) -> None:
    batch = batch_of(20 + seed, seed)
    bound = WIDTH + 7 * (seed % 5)
    tokens = batch["attention_mask"].sum(1)
    settings: dict[str, Any] = {"max_token_len": bound, "use_dynamic_bsz_balance": bool(seed % 2)}
    if seed % 3 == 1:
        settings["min_num_micro_batch"] = 15
    if seed % 4 == 1:
        settings["num_batches_divided_by"] = 2
    micros, rows = theirs.rearrange_micro_batches(batch, **settings)

    assert sorted(itertools.chain(*rows)) == list(range(len(batch)))
    assert all(row == sorted(row) and row for row in rows)
    assert all(int(tokens[row].sum()) <= bound for row in rows)
    for micro, row in zip(micros, rows, strict=True):
        torch.testing.assert_close(micro["input_ids"], batch["input_ids"][row])
    assert len(rows) >= settings.get("min_num_micro_batch", 1)
    assert len(rows) % settings.get("num_batches_divided_by", 1) == 0
    assert len(rows) <= len(VERLS[0](batch, **settings)[1])
    if settings["use_dynamic_bsz_balance"]:
        loads = [int(theirs.calculate_workload(tokens[row]).sum()) for row in rows]
        top = loads.index(max(loads))
        assert loads[: top + 1] == sorted(loads[: top + 1])
        assert loads[top:] == sorted(loads[top:], reverse=True)


def test_rows_of_a_nested_batch_and_forced_groups_stay_together() -> None:
    padded = batch_of(24, seed=3)
    lengths = padded["attention_mask"].sum(1).tolist()
    nested = torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    batch = TensorDict({"input_ids": nested}, batch_size=24)
    micros, rows = theirs.rearrange_micro_batches(batch, max_token_len=200, force_group_size=4)
    assert sorted(itertools.chain(*rows)) == list(range(24))
    for micro, row in zip(micros, rows, strict=True):
        assert sum(lengths[i] for i in row) <= 200
        assert all(
            row[at : at + 4] == list(range(row[at], row[at] + 4)) for at in range(0, len(row), 4)
        )
        assert micro["input_ids"].offsets().diff().tolist() == [lengths[i] for i in row]


def test_what_cannot_be_split_is_refused() -> None:
    batch = batch_of(8)
    with pytest.raises(AssertionError, match="max_token_len must be greater"):
        theirs.rearrange_micro_batches(batch, max_token_len=WIDTH - 1)
    with pytest.raises(AssertionError, match="divisible by force_group_size"):
        theirs.rearrange_micro_batches(batch, max_token_len=WIDTH, force_group_size=3)
    with pytest.raises(ConfigError, match="9 micro-batches are needed on every rank"):
        theirs.rearrange_micro_batches(batch, max_token_len=WIDTH, min_num_micro_batch=9)
    batch["attention_mask"][:] = 1
    with pytest.raises(OversizedSample, match="a group of 2 rows has 128 tokens"):
        theirs.rearrange_micro_batches(batch, max_token_len=100, force_group_size=2)


def test_verls_restore_brings_a_dynamic_batch_back_in_order() -> None:
    names = np.array([f"row {n}" for n in range(20)], dtype=object)
    data = DataProto(batch=batch_of(20), non_tensor_batch={"name": names})
    micros, rows = theirs.prepare_dynamic_batch(data, max_token_len=100)
    assert [list(micro.non_tensor_batch["name"]) for micro in micros] == [
        [f"row {n}" for n in row] for row in rows
    ]
    together = torch.cat([micro.batch["input_ids"] for micro in micros])
    torch.testing.assert_close(
        theirs.restore_dynamic_batch(together, rows), data.batch["input_ids"]
    )


def test_engines_of_verl_prepare_micro_batches_with_ours() -> None:
    """The way of verl's FSDP and Megatron engines: settings inside the data."""
    from verl.utils import tensordict_utils

    data = batch_of(20)
    tensordict_utils.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=100)
    micros, rows = engine.prepare_micro_batches(data, same_micro_num_in_dp=False)
    expected = OURS[0](batch_of(20), 100)[1]
    assert rows == expected
    assert [len(micro) for micro in micros] == [len(row) for row in rows]


def test_groups_of_a_prompt_stay_on_one_rank() -> None:
    random = np.random.default_rng(0)
    uids = np.repeat(np.arange(16), 4).tolist()
    seqlens = random.integers(1, 500, 64).tolist()
    parts = theirs.get_group_balanced_partitions(seqlens, uids, 4)
    assert sorted(itertools.chain(*parts)) == list(range(64))
    assert all(len(part) == 16 for part in parts)
    assert not set.intersection(*({uids[i] for i in part} for part in parts))


def _rank(rank: int, world: int, folder: str, same: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init-{same}", world_size=world, rank=rank
    )
    ours.use_batchwright_batching()
    batch = batch_of(30 + 20 * rank, seed=rank)
    micros, rows = theirs.rearrange_micro_batches(
        batch, 100, dp_group=dist.group.WORLD, same_micro_num_in_dp=same
    )
    assert sorted(itertools.chain(*rows)) == list(range(len(batch)))
    counts = [None] * world
    dist.all_gather_object(counts, len(micros))
    assert (len(set(counts)) == 1) is same
    # One rank has too few rows for the other: both say so, and none waits for ever.
    small = batch_of(2 if rank else 30, seed=5)
    refused = pytest.raises(ConfigError, match="a rank has 2 groups")
    with refused if same else contextlib.nullcontext():
        theirs.rearrange_micro_batches(
            small, WIDTH, dp_group=dist.group.WORLD, same_micro_num_in_dp=same
        )
    dist.destroy_process_group()


@pytest.mark.parametrize("same", [True, False])
def test_all_ranks_have_as_many_micro_batches_or_all_refuse(tmp_path: Path, same: bool) -> None:
    mp.spawn(_rank, args=(2, str(tmp_path), same), nprocs=2, join=True)
