"""A plan as the training data of transformers' Trainer, of TRL's SFTTrainer and of their kin.

    trainer = PlanTrainer(model=model, args=args, plan="plan", read=source, tokenizer=tokenizer)
    trainer.train(resume_from_checkpoint=True)

    class PlanSFTTrainer(PlanTrainerMixin, SFTTrainer): ...

The plan is shared among the ranks by the plan itself, so the loader never meets Accelerate, which
would share it out once more: `split_batches`, `dispatch_batches` and `even_batches` have no say
in it. A resumed run begins at its step without planning or reading what lies before it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchwright.batching.collate import SampleReader
from batchwright.batching.plan.plan import BatchPlan
from batchwright.data.rows import Row
from batchwright.data.rows.source import Source
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadLoss, ConfigError, Mismatch, need
from batchwright.integrations.torch import (
    Loaded,
    MicrobatchKey,
    PlanBatchSampler,
    PlanCollate,
    PlanDataset,
)

for package in ("transformers", "accelerate", "datasets"):
    need(package, extra="hf")

from datasets import Dataset  # noqa: E402 - only now are they known to be there
from torch.utils.data import DataLoader  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from batchwright.train.attention import Backend, choose_backend, use_backend  # noqa: E402

__all__ = ["PlanPosition", "PlanTrainer", "PlanTrainerMixin"]

if TYPE_CHECKING:
    _Trainer = Any  # what stands behind the mixin is some Trainer, and transformers has no types
else:
    _Trainer = object


class PlanTrainerMixin(_Trainer):  # type: ignore[misc]
    """In front of a Trainer class, makes `plan` what it trains on, and nothing else.

    `read` and `tokenizer` are those of `PlanDataset`. `attention` holds packed samples apart while
    training; evaluation and whatever comes afterwards have the attention the model came with.

    The arguments of the Trainer rule as ever, how many epochs included. Only what a batch is
    stands in the plan: `per_device_train_batch_size`, shuffling and columns have no meaning here.
    """

    def __init__(
        self,
        *args: Any,
        plan: BatchPlan | Path | str,
        read: SampleReader | Sequence[Row] | Source | Sequence[Source],
        tokenizer: Tokenizer | None = None,
        attention: Backend | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        # SFTTrainer wants to see a row of the data, and would tokenise or pack what it is given.
        # This row says that both are done.
        row = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        super().__init__(*args, train_dataset=row, **settings)
        whole = plan if isinstance(plan, BatchPlan) else BatchPlan.load(plan)
        self.plan = whole.shard(self.args.process_index, self.args.world_size)
        _agree(self, self.plan)
        self._samples = PlanDataset(plan, read, tokenizer)
        self._backend = choose_backend(attention, self.args.device)
        self._own_attention = self.model.config._attn_implementation
        self.add_callback(PlanPosition(self.plan.whole_fingerprint, self.plan.step_microbatches))

    def get_train_dataloader(self) -> "DataLoader[Any]":
        """The microbatches of this rank, in the order of the plan."""
        if self.plan.config.layout == "packed":
            use_backend(self.model, self._backend)
        return _PlanLoader(
            self._samples,
            batch_sampler=_StepSampler(self.plan),
            collate_fn=_ModelInputs(self.plan),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def train(self, *args: Any, **settings: Any) -> Any:
        try:
            return super().train(*args, **settings)
        finally:
            self.model.set_attn_implementation(self._own_attention)

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        """As ever: its batches are padded rows, which attention for packed ones may misread."""
        training = self.model.config._attn_implementation
        self.model.set_attn_implementation(self._own_attention)
        try:
            return super().evaluation_loop(*args, **settings)
        finally:
            self.model.set_attn_implementation(training)

    def get_batch_samples(self, *args: Any, **settings: Any) -> tuple[list[Any], Any]:
        """The microbatches of a step and how many of its tokens carry loss, over all ranks."""
        batches, count = super().get_batch_samples(*args, **settings)
        if batches and not count:
            # The Trainer would divide by zero, and by default it hides a loss that is NaN.
            raise BadLoss(
                f"step {self.state.global_step + 1}: none of its tokens carries loss; "
                f"check the loss masks of the data"
            )
        return batches, count

    def num_examples(self, dataloader: "DataLoader[Any]") -> int:
        """Samples of an epoch; the throughput in the log follows from it."""
        if isinstance(dataloader, _PlanLoader):
            return len(self.plan.ids) - len(self.plan.skipped)
        return int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step on average; with `max_steps` the throughput follows from this."""
        return round((len(self.plan.ids) - len(self.plan.skipped)) / self.plan.num_steps())


class PlanTrainer(PlanTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer on a plan."""


class PlanPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Notes in trainer_state.json what the steps of a checkpoint counted, and resumes by it."""

    def __init__(self, plan: str, step_microbatches: int) -> None:
        self.plan = plan
        self.step_microbatches = step_microbatches

    def state(self) -> dict[str, Any]:
        """What the Trainer saves; it is the same on every rank and for any number of them."""
        return {"args": vars(self).copy(), "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **shown: Any) -> None:
        noted = state.stateful_callbacks.get(type(self).__name__)
        if noted is None:
            raise Mismatch(
                "this checkpoint was not made on a plan, so nothing tells where in it to go on; "
                "load its model and start a new run"
            )
        skips = not args.ignore_data_skip
        shown["train_dataloader"].batch_sampler.go_to(
            state.global_step, **noted["args"], skips=skips
        )


class _StepSampler(PlanBatchSampler):
    """Begins at an optimizer step.

    A resumed Trainer draws the batches that are done and drops them. Those are empty here, so
    that going to the millionth costs no more than going to the first.
    """

    _dropped = 0

    def go_to(self, global_step: int, plan: str, step_microbatches: int, skips: bool) -> None:
        here = self._plan.step_microbatches
        epoch, step = divmod(global_step, self._plan.num_steps())
        step *= skips
        at = {"plan": plan, "epoch": epoch, "microbatch": step * here, "offset": 0}
        self.load_state_dict({**self.state_dict(), **at})
        if step_microbatches != here:
            raise Mismatch(
                f"the checkpoint counts steps of {step_microbatches} microbatches, here they have "
                f"{here}; go on with as many ranks, or train on a plan whose step_size is a number"
            )
        self._dropped = step * _share(self._plan)

    def __iter__(self) -> Iterator[list[MicrobatchKey]]:
        dropped, self._dropped = self._dropped, 0
        yield from itertools.repeat([], dropped)
        yield from super().__iter__()


class _PlanLoader(DataLoader[Loaded]):
    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls this; it never draws an epoch to its end, where samplers go on."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class _ModelInputs(PlanCollate):
    def __call__(self, loaded: list[Loaded]) -> dict[str, Any]:
        batch = super().__call__(loaded)
        return {name: batch[name] for name in batch.keys() - {"microbatch", "segment_ids"}}


def _share(plan: BatchPlan) -> int:
    """Microbatches of one rank in an optimizer step."""
    assert plan.shard_of is not None
    return -(-plan.step_microbatches // plan.shard_of.world_size)


def _agree(trainer: Any, plan: BatchPlan) -> None:
    """Refuse settings under which the Trainer would take other steps than the plan."""
    args, share = trainer.args, _share(plan)
    if args.gradient_accumulation_steps != share:
        raise ConfigError(
            f"a step of the plan is {share} microbatches a rank (step_size="
            f"{plan.config.step_size!r} on {args.world_size} ranks), gradient_accumulation_steps "
            f"is {args.gradient_accumulation_steps}; set it to {share}, or build the plan with "
            f"step_size={args.gradient_accumulation_steps * args.world_size}"
        )
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        raise ConfigError(
            "the forward of this model takes no num_items_in_batch, so its loss would be a mean of "
            "means; give a compute_loss_func that divides by it"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices=False weighs tokens by the rank they fall on, and a "
            "filler has none to divide by; leave it True"
        )
    if args.n_gpu > 1 or trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        raise ConfigError(
            "a plan gives each process batches of its own, which neither DataParallel nor tensor, "
            "context and sequence parallelism know; start one process a device with torchrun"
        )
    steps = args.max_steps / plan.num_steps() if args.max_steps > 0 else args.num_train_epochs
    sizes = {plan.num_microbatches(epoch) for epoch in range(math.ceil(steps))}
    if len(sizes) > 1:
        raise ConfigError(
            f"the epochs of this plan have {min(sizes)} to {max(sizes)} microbatches, and the "
            f"Trainer counts on equal ones; choose a pack_mode that does not shuffle before packing"
        )
