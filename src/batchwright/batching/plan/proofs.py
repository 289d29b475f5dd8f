"""Proof that two runs saw the same batches: their fingerprints, and where they differ."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.batching.config import BatchingConfig
from batchwright.batching.plan.microbatch import BatchSpec, MicrobatchSpec
from batchwright.errors import BadFile
from batchwright.fingerprint import canonical, digest
from batchwright.sealed import read_sealed_json, write_sealed_json

__all__ = [
    "BatchFingerprint",
    "PlanDiff",
    "compute_batch_fingerprint",
    "first_difference",
    "microbatches_of",
    "verify_batch_fingerprint",
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
        """Write as JSON with a checksum, whole or not at all."""
        write_sealed_json(Path(path), asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> "BatchFingerprint":
        """Read what `save` wrote; `BadFile` if a byte of it has changed."""
        path = Path(path)
        fields = read_sealed_json(path, "batch fingerprint", "compute it again")
        try:
            loaded = cls(**fields)
        except TypeError as error:
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


def first_difference(
    left: Sequence[Iterable[MicrobatchSpec]], right: Sequence[Iterable[MicrobatchSpec]]
) -> tuple[int, int] | None:
    """Epoch and index of the first microbatch in which two lists of epochs differ."""
    for epoch, pair in enumerate(zip(left, right, strict=False)):
        for index, (mine, theirs) in enumerate(zip_longest(*pair)):
            if mine is None or theirs is None or mine != theirs:
                return epoch, index
    return None if len(left) == len(right) else (min(len(left), len(right)), 0)


def microbatches_of(batches: Iterable[MicrobatchSpec]) -> dict[str, tuple[int, ...]]:
    """The microbatches in which each sample stands."""
    where: dict[str, tuple[int, ...]] = {}
    for batch in batches:
        if not batch.weight:
            continue
        for sample in np.unique(batch.items):
            name = batch.ids[int(sample)]
            where[name] = (*where.get(name, ()), batch.index)
    return where


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
