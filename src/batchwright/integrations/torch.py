"""A batch plan in torch's `DataLoader`, resumable at every batch.

The sampler names the next microbatch, the dataset reads its samples, the collator makes tensors:

    plan = BatchPlan.load("plan").shard(rank, world_size)
    sampler = PlanBatchSampler(plan)
    loader = DataLoader(PlanDataset(plan, source, tokenizer), batch_sampler=sampler,
                        collate_fn=PlanCollate(plan), num_workers=4)
    for epoch in range(sampler.epoch, plan.num_epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            done = batch.pop("microbatch")
            ...  # train on what is left in batch, scaled by done.weight; save done.state

A loader with workers prefetches batches before the loop trains on them, so the sampler cannot know
what was trained on. Therefore every batch carries the state to save after it. torchdata's
`StatefulDataLoader` does this itself: save its own `state_dict`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.collation import CollatedBatch, SampleReader, collate
from batchwright.batching.plan.microbatch import MicrobatchSpec
from batchwright.batching.plan.plan import BatchPlan
from batchwright.batching.plan.shards import Shard
from batchwright.data.entries import UNKNOWN, hash_of
from batchwright.data.ids import Ids
from batchwright.data.reader import PlanRows, other_rows
from batchwright.data.rows import Row
from batchwright.data.rows.sample import IGNORE, Sample, content_hash
from batchwright.data.rows.source import Source
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch, need

need("torch", extra="train")

import torch  # noqa: E402 - after the check that it is installed
from torch.utils.data import Dataset, Sampler  # noqa: E402

__all__ = ["MicrobatchKey", "PlanBatchSampler", "PlanCollate", "PlanDataset"]

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MicrobatchKey:
    """Names a microbatch for the dataset, and is returned as `batch["microbatch"]`."""

    epoch: int
    index: int
    """Index in the epoch over all ranks: `plan.batch(epoch, index)`."""
    weight: float
    """0 for a filler that gives all ranks the same number of batches, else 1."""
    state: State
    """For `PlanBatchSampler.load_state_dict`, to resume after this microbatch."""


class _Position(NamedTuple):
    """An optimizer step of an epoch, and how many of its microbatches this rank has finished."""

    epoch: int
    microbatch: int
    offset: int


class PlanBatchSampler(Sampler[list[MicrobatchKey]]):
    """The microbatches of one rank, in the order of its plan, for `DataLoader(batch_sampler=...)`.

    One iteration is the rest of an epoch. After it has run to its end the next one is the next
    epoch; one that was interrupted starts again where it started. A loader with workers reaches
    the end before the loop does, so a loop that breaks calls `set_epoch`.

    >>> from batchwright.batching import BatchingConfig, BatchPlanBuilder
    >>> plan = BatchPlanBuilder({"a": 3, "b": 9, "c": 4}, BatchingConfig(token_budget=10,
    ...     bucket_edges=(4,), overflow_max=10)).build(num_epochs=2)
    >>> sampler = PlanBatchSampler(plan)
    >>> ((first,), (second,)) = sampler
    >>> first.index, second.index, sampler.epoch
    (0, 1, 1)
    >>> sampler.load_state_dict(first.state)
    >>> [key.index for key, in sampler]
    [1]
    """

    def __init__(self, plan: BatchPlan, *, epoch: int = 0) -> None:
        plan.num_microbatches(epoch)  # raises if there is no such epoch
        self._plan = plan
        self._start = self._done = _Position(epoch, 0, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the current or next iteration."""
        return self._start.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; inside that epoch, stay at the position."""
        if epoch != self.epoch:
            self._plan.num_microbatches(epoch)
            self._start = self._done = _Position(epoch, 0, 0)

    def __len__(self) -> int:
        """Batches of this rank in the whole current epoch, whatever the position."""
        return len(self._plan.epoch(self.epoch))

    def __iter__(self) -> Iterator[list[MicrobatchKey]]:
        self._done = start = self._start
        skip = start.offset
        for step in self._plan.iter_steps(start.epoch, start.microbatch, epochs=1):
            count = len(step.microbatches)
            for number, batch in enumerate(step.microbatches[skip:], skip + 1):
                at = (step.first, number) if number < count else (step.stop, 0)
                self._done = _Position(start.epoch, *at)
                yield [MicrobatchKey(batch.epoch, batch.index, batch.weight, self.state_dict())]
            skip = 0
        self._start = self._done = _Position(start.epoch + 1, 0, 0)

    def state_dict(self) -> State:
        """The position over all ranks, the same on each.

        After the last microbatch of an epoch it is the end of that epoch: the next iteration is
        empty.
        """
        return {
            "plan": self._plan.whole_fingerprint,
            **self._done._asdict(),
            "world_size": self._shard.world_size,
            "balance": self._shard.balance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that any rank saved.

        Between optimizer steps the number of ranks may change. Inside a step it may not: the rest
        of the step would be sharded differently.
        """
        try:
            plan, ranks = state["plan"], (state["world_size"], state["balance"])
            start = _Position(*(int(state[name]) for name in _Position._fields))
        except (KeyError, TypeError, ValueError):
            raise Mismatch(
                f"not a state of PlanBatchSampler: {state!r:.200}; pass "
                f"batch['microbatch'].state or the result of state_dict()"
            ) from None
        if plan != self._plan.whole_fingerprint:
            raise Mismatch(
                f"the state belongs to plan {plan[:16]}, "
                f"this is {self._plan.whole_fingerprint[:16]}; open the plan it was made with"
            )
        own = (self._shard.world_size, self._shard.balance)
        if start.offset and ranks != own:
            raise Mismatch(
                f"the state is inside a step of {ranks[0]} ranks ({ranks[1]}), now there "
                f"are {own[0]} ({own[1]}); resume with as many, or from a state with offset 0"
            )
        self._start = self._done = start

    @property
    def _shard(self) -> Shard:
        return self._plan.shard_of or Shard()


Loaded = tuple[MicrobatchKey, MicrobatchSpec, dict[int, Sample]]


class PlanDataset(Dataset[Loaded]):
    """Reads the samples of a microbatch for `PlanCollate`.

    `read` is one of

        a function      from the row number to its `Sample`
        rows            a sequence of {"input_ids", optionally "loss_mask" or "labels"}
        a source        of `open_source`, or one for each part of a mixture, with its `tokenizer`

    A source or rows with another content than the plan was built from are refused, if the plan
    knows it: that of lengths without rows does not. Rows of a source that is in no token store
    are compared again as each is read. Of a function, only the number of tokens is compared.

    Forked workers share it with their parent. For spawned ones its arguments are pickled, so a
    lambda does not work; pass `plan` as a folder, and each worker memory-maps it instead of
    receiving a copy.
    """

    def __init__(
        self,
        plan: BatchPlan | Path | str,
        read: SampleReader | Sequence[Row] | Source | Sequence[Source],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._open(plan, read, tokenizer)

    def _open(
        self, plan: Any, read: Any, tokenizer: Any, checked: NDArray[np.uint64] | bool = False
    ) -> None:
        self._plan = plan if isinstance(plan, BatchPlan) else BatchPlan.load(plan)
        if tokenizer is None:
            self._given: tuple[Any, ...] = (plan, read, None, True)
            self._read = _reader(self._plan, read, checked is True)
            return
        rows = _rows_of(self._plan, read, tokenizer)
        if checked is False:
            rows.check(self._plan.dataset_hash)
        elif checked is not True:
            rows.content = checked
        # Workers map the token stores that were found instead of looking for them again, for
        # which the whole data is read, as it is for the comparison with the plan.
        self._given = (plan, rows.parts, tokenizer, True if rows.content is None else rows.content)
        self._read = rows.sample

    def __getitem__(self, key: MicrobatchKey) -> Loaded:
        batch = self._plan.batch(key.epoch, key.index)
        if not key.weight:
            batch = batch.as_filler()
        # A split sample may be in a batch several times; it is read once.
        return key, batch, {item: self._read(item) for item in set(batch.items.tolist())}

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (type(self), *self._given)


def _opened(kind: type[PlanDataset], *given: Any) -> PlanDataset:
    dataset = kind.__new__(kind)
    dataset._open(*given)
    return dataset


class PlanCollate:
    """Tensors of a microbatch, named as the models of transformers take them.

    `rows` gives input_ids, attention_mask, labels, position_ids and segment_ids, each [R, L];
    segment -1 is padding. Rows of a packed plan need a mask built from segment_ids, because
    attention_mask separates samples from padding, not from each other. `flat` concatenates the
    samples without padding, as `DataCollatorWithFlattening` does: input_ids, labels, position_ids
    and seq_idx [1, T], cu_seq_lens_q and _k, max_length_q and _k. `auto` is flat for packed plans.

    `batch["microbatch"]` is a `MicrobatchKey`; pop it, and the rest is for the model. All labels
    of a filler are -100, so its mean loss is NaN: sum losses, and divide by the number of other
    labels in the step over all ranks.

    >>> from torch.utils.data import DataLoader
    >>> from batchwright.batching import BatchingConfig, BatchPlanBuilder
    >>> plan = BatchPlanBuilder({"a": 2, "b": 3}, BatchingConfig(layout="packed", token_budget=8,
    ...     pack_max_length=8)).build()
    >>> rows = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    >>> (batch,) = DataLoader(PlanDataset(plan, rows), batch_sampler=PlanBatchSampler(plan),
    ...     collate_fn=PlanCollate(plan))
    >>> batch["input_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[7, 8, 9, 5, 6]], [0, 3, 5])
    """

    def __init__(
        self,
        plan: BatchPlan,
        pad_id: int = 0,
        format: Literal["auto", "rows", "flat"] = "auto",
    ) -> None:
        if format not in ("auto", "rows", "flat"):
            raise ConfigError(f"format must be auto, rows or flat, got {format!r}")
        if format == "auto":
            format = "flat" if plan.config.layout == "packed" else "rows"
        self._layout = _flat if format == "flat" else _rows
        self._pad_id = pad_id

    def __call__(self, loaded: list[Loaded]) -> dict[str, Any]:
        ((key, batch, samples),) = loaded
        collated = collate(batch, samples.__getitem__, pad_id=self._pad_id)
        return {**self._layout(collated), "microbatch": key}


def _rows(batch: CollatedBatch) -> dict[str, Any]:
    names = ("input_ids", "attention_mask", "labels", "position_ids", "segment_ids")
    return {name: torch.from_numpy(getattr(batch, name)).long() for name in names}


def _flat(batch: CollatedBatch) -> dict[str, Any]:
    useful = batch.segment_ids >= 0
    sequence = np.repeat(np.arange(len(batch.sample_ids)), np.diff(batch.cu_seqlens))

    def flat(values: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values[useful][None]).long()

    cu_seq_lens = torch.from_numpy(batch.cu_seqlens)
    return {
        "input_ids": flat(batch.input_ids),
        "labels": flat(batch.labels),
        "position_ids": flat(batch.position_ids),
        "seq_idx": torch.from_numpy(sequence[None]).int(),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def _rows_of(plan: BatchPlan, read: Any, tokenizer: Tokenizer) -> PlanRows:
    if plan.tokenizer_hash not in ("unknown", tokenizer.fingerprint):
        raise Mismatch(
            f"the plan was built with tokenizer {plan.tokenizer_hash}, {tokenizer.name} is "
            f"{tokenizer.fingerprint}; pass the tokenizer it was built with"
        )
    sources = read if isinstance(read, list | tuple) else [read]
    return PlanRows(sources, plan.ids, [name for name, _, _ in plan.sources], tokenizer)


def _reader(plan: BatchPlan, read: Any, checked: bool) -> SampleReader:
    if callable(read):
        return read  # type: ignore[no-any-return]
    if len(read) != len(plan.ids):
        raise Mismatch(
            f"the plan has {len(plan.ids):,} samples, got {len(read):,} rows; "
            f"pass the rows it was built from"
        )
    if not checked:
        _check_rows(plan, read)
    return _Rows(read, plan.ids)


def _check_rows(plan: BatchPlan, rows: Sequence[Row]) -> None:
    """Refuse rows that are not, in this order, what the plan was built from, if it knows that."""
    if plan.dataset_hash == UNKNOWN:
        return
    content = np.array([content_hash(_plain(row)) for row in rows], np.uint64)
    sources = [(name, size) for name, size, _ in plan.sources]
    seen = hash_of(plan.ids, content, sources)
    if plan.dataset_hash not in (seen, hash_of(plan.ids, np.zeros_like(content), sources)):
        raise other_rows(plan.dataset_hash, seen)


def _plain(row: Row) -> Row:
    """A row whose arrays are lists, as they are in a file."""
    return {key: v.tolist() if hasattr(v, "tolist") else v for key, v in row.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: Sequence[Row]
    ids: Ids

    def __call__(self, item: int) -> Sample:
        row, name = self.rows[item], self.ids[item]
        if "input_ids" not in row:
            raise BadRow(f"row {item} has no input_ids but {sorted(row)}; pass a tokenizer as well")
        tokens = np.asarray(row["input_ids"], np.int32)
        counts = np.ones(len(tokens), bool)
        if row.get("loss_mask") is not None:
            counts = np.asarray(row["loss_mask"]) != 0
        elif row.get("labels") is not None:
            labels = np.asarray(row["labels"])
            counts = labels != IGNORE
            if len(labels) == len(tokens) and (labels != tokens)[counts].any():
                raise BadRow(
                    f"the labels of row {item} are neither its input_ids nor {IGNORE}; "
                    f"labels are not shifted, the model does that"
                )
        if len(counts) != len(tokens):
            raise BadRow(
                f"row {item} has {len(tokens)} input_ids and {len(counts)} labels or mask entries; "
                f"they must be of equal length"
            )
        return Sample(input_ids=tokens, loss_mask=counts.astype(np.uint8), sample_id=name)
