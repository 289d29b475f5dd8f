"""Proof that two runs saw the same batches: fingerprints, verification, differences."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.builder import BatchPlanBuilder, LengthSource
from batchwright.batching.plan.canonical import canonical_order
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.plan import BatchPlan
from batchwright.batching.sampler import BatchSpec
from batchwright.data.lengths import Lengths
from batchwright.errors import BadFile, Mismatch
from batchwright.files import existing, write_atomic
from batchwright.fingerprint import canonical, digest

__all__ = [
    "BatchFingerprint",
    "PlanDiff",
    "compute_batch_fingerprint",
    "diff_plans",
    "verify_batch_fingerprint",
    "verify_plan",
]


@dataclass(frozen=True, slots=True)
class BatchFingerprint:
    """Identity of a sequence of batches: samples, their order and every shape."""

    fingerprint: str
    """The first 16 hexadecimal digits of `full_hash`."""
    full_hash: str
    num_batches: int
    total_samples: int
    total_tokens: int
    config_hash: str = ""
    version: int = 1

    def save(self, path: Path | str) -> None:
        write_atomic(Path(path), (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path | str) -> "BatchFingerprint":
        path = existing(Path(path), "batch fingerprint")
        try:
            fields = json.loads(path.read_bytes())
            loaded = cls(**fields)
        except (ValueError, TypeError) as error:
            raise BadFile(f"{path} is not a batch fingerprint: {error}") from None
        texts = (loaded.fingerprint, loaded.full_hash, loaded.config_hash)
        numbers = (loaded.num_batches, loaded.total_samples, loaded.total_tokens)
        if not all(isinstance(text, str) for text in texts) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise BadFile(f"{path} is not a batch fingerprint: {fields}")
        return loaded


def compute_batch_fingerprint(
    batches: Iterable[MicrobatchSpec | BatchSpec],
    config: BatchingConfig | None = None,
    n_batches: int | None = None,
) -> BatchFingerprint:
    """Fingerprint of all batches, or of the first `n_batches`.

    >>> batch = BatchSpec(("a", "b"), bucket_id=0, max_length=8, token_count=12)
    >>> compute_batch_fingerprint([batch]).fingerprint
    '...'
    """
    hasher = hashlib.sha256(b"batchwright.batches.1")
    count = samples = tokens = 0
    for batch in islice(batches, n_batches):
        hasher.update(canonical(_content(batch)))
        count += 1
        samples += len(batch.samples if isinstance(batch, MicrobatchSpec) else batch.sample_ids)
        tokens += batch.token_count
    full = hasher.hexdigest()
    config_hash = "" if config is None else digest(config.model_dump(mode="json"))[:16]
    return BatchFingerprint(full[:16], full, count, samples, tokens, config_hash)


def verify_batch_fingerprint(
    batches: Iterable[MicrobatchSpec | BatchSpec], expected: BatchFingerprint | str
) -> tuple[bool, str]:
    """Whether the batches have the expected fingerprint (or a prefix of it), and a sentence."""
    wanted = expected if isinstance(expected, str) else expected.full_hash
    first = None if isinstance(expected, str) else expected.num_batches
    seen = compute_batch_fingerprint(batches, n_batches=first)
    if wanted and seen.full_hash.startswith(wanted):
        return True, f"{seen.num_batches:,} batches have the fingerprint {seen.fingerprint}"
    return False, (
        f"{seen.num_batches:,} batches have the fingerprint {seen.fingerprint}, "
        f"expected {wanted[:16] or 'nothing: the expected fingerprint is empty'}"
    )


def verify_plan(plan: BatchPlan, lengths: LengthSource | Mapping[str, LengthSource]) -> BatchPlan:
    """Build the plan again from `lengths` and compare; `Mismatch` names the first difference."""
    weights = {name: weight for name, _, weight in plan.sources} or None
    if weights is None:
        _same_data(plan, Lengths.of(lengths))  # type: ignore[arg-type]
    builder = BatchPlanBuilder(lengths, plan.config, weights=weights)
    builder.difficulty = _difficulty_for(plan, builder.lengths)
    again = builder.build(plan.num_epochs)
    if weights is None:
        # Hashes that contradict each other were refused above; an unknown one fits any.
        again = replace(again, dataset_hash=plan.dataset_hash, tokenizer_hash=plan.tokenizer_hash)
    if plan.shard_of is not None:
        shard = plan.shard_of
        again = again.shard(shard.rank, shard.world_size, balance=shard.balance)
    if again.fingerprint == plan.fingerprint:
        return again
    where = _first_difference(plan, again)
    place = "" if where is None else f": epoch {where[0]}, microbatch {where[1]} is the first"
    raise Mismatch(
        f"the plan {plan.fingerprint[:16]} does not follow from these lengths, which give "
        f"{again.fingerprint[:16]}{place}; open the lengths it was built from, or build it again"
    )


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """How two plans differ."""

    same: bool
    config: dict[str, tuple[Any, Any]]
    """Settings that differ, with both values."""
    first: tuple[int, int] | None
    """Epoch and index of the first microbatch that differs."""
    only_left: int
    only_right: int
    """Samples that only one of the plans has."""
    moved: int
    """Samples of both that stand in another microbatch of epoch 0."""


def diff_plans(left: BatchPlan, right: BatchPlan) -> PlanDiff:
    """Compare two plans by settings, batches and samples."""
    mine, theirs = left.config.model_dump(mode="json"), right.config.model_dump(mode="json")
    config = {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}
    for name in ("num_epochs", "dataset_hash", "tokenizer_hash", "sources", "shard_of"):
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            config[name] = (a, b)
    if left.fingerprint == right.fingerprint and left.num_epochs == right.num_epochs:
        return PlanDiff(True, config, None, 0, 0, 0)
    here, there = _microbatch_of(left), _microbatch_of(right)
    both = here.keys() & there.keys()
    return PlanDiff(
        same=False,
        config=config,
        first=_first_difference(left, right),
        only_left=len(here) - len(both),
        only_right=len(there) - len(both),
        moved=sum(here[sample] != there[sample] for sample in both),
    )


def _content(batch: MicrobatchSpec | BatchSpec) -> list[Any]:
    if isinstance(batch, BatchSpec):
        return [list(batch.sample_ids), batch.bucket_id, batch.max_length, batch.token_count]
    return [
        list(batch.samples),
        batch.bucket_id,
        batch.max_len,
        batch.token_count,
        batch.starts.tolist(),
        batch.lengths.tolist(),
        batch.row_offsets.tolist(),
        batch.weight,
    ]


def _same_data(plan: BatchPlan, lengths: Lengths) -> None:
    for what in ("tokenizer_hash", "dataset_hash"):
        planned, given = getattr(plan, what), getattr(lengths, what)
        if planned != given and "unknown" not in (planned, given):
            raise Mismatch(
                f"the plan was built for {what} {planned[:16]}, these lengths have {given[:16]}; "
                f"open the lengths it was built from, or build the plan again"
            )
    if len(lengths) != plan.counts.samples:
        raise Mismatch(
            f"the plan was built for {plan.counts.samples:,} samples, these lengths have "
            f"{len(lengths):,}; open the lengths it was built from, or build the plan again"
        )


def _difficulty_for(plan: BatchPlan, lengths: Lengths) -> NDArray[np.float64] | None:
    """The plan's difficulties in the order of `lengths`, which may name the samples otherwise."""
    if plan.difficulty is None or len(lengths) != len(plan.ids):
        return plan.difficulty
    theirs, mine = canonical_order(lengths.ids), canonical_order(plan.ids)
    moved = np.empty_like(plan.difficulty)
    every = slice(None)
    moved[every if theirs is None else theirs] = plan.difficulty[every if mine is None else mine]
    return moved


def _first_difference(left: BatchPlan, right: BatchPlan) -> tuple[int, int] | None:
    for epoch in range(min(left.num_epochs, right.num_epochs)):
        mine, theirs = iter(left.iter_epoch(epoch)), iter(right.iter_epoch(epoch))
        index = 0
        while True:
            a, b = next(mine, None), next(theirs, None)
            if a is None and b is None:
                break
            if a is None or b is None or a != b:
                return epoch, index
            index += 1
    if left.num_epochs != right.num_epochs:
        return min(left.num_epochs, right.num_epochs), 0
    return None


def _microbatch_of(plan: BatchPlan) -> dict[str, tuple[int, ...]]:
    """The microbatches of epoch 0 in which each sample stands."""
    where: dict[str, tuple[int, ...]] = {}
    for batch in plan.iter_epoch(0):
        if not batch.weight:
            continue
        for sample in np.unique(batch.items):
            name = plan.ids[int(sample)]
            where[name] = (*where.get(name, ()), batch.index)
    return where
