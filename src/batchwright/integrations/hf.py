"""A batch plan as the training data of transformers' Trainer, TRL's SFTTrainer and subclasses.

    trainer = PlanTrainer(model=model, args=args, plan="plan", read=source, tokenizer=tokenizer)
    trainer.train(resume_from_checkpoint=True)

    class PlanSFTTrainer(PlanTrainerMixin, SFTTrainer): ...

The plan itself shards batches over the ranks, so the loader is not prepared by Accelerate, which
would shard it again: `split_batches`, `dispatch_batches` and `even_batches` have no effect. A
resumed run starts at its step without planning or reading anything before it.
"""

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchwright.batching.collation import SampleReader
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

from datasets import Dataset  # noqa: E402 - after the check that they are installed
from torch.utils.data import DataLoader  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from batchwright.train.attention import Backend, choose_backend, use_backend  # noqa: E402
from batchwright.train.sft.isolation import refuse_leaks  # noqa: E402

__all__ = ["PlanPosition", "PlanTrainer", "PlanTrainerMixin"]

if TYPE_CHECKING:
    _Trainer = Any  # the class behind the mixin is some Trainer, and transformers is untyped
else:
    _Trainer = object


class PlanTrainerMixin(_Trainer):  # type: ignore[misc]
    """Makes a Trainer class train on `plan`, and changes nothing else.

    `read` and `tokenizer` are those of `PlanDataset`. `attention` isolates packed samples during
    training; evaluation and everything after training use the model's original attention.

    Before it trains on packed rows the model is tested: a sample that changes the logits of another
    raises `Mismatch`, unless `leaks` is "allow", which tests nothing. Weights that a process does
    not hold (on the meta device, or partitioned by DeepSpeed) cannot be tested, which is a warning.

    The Trainer's arguments apply as usual, including the number of epochs. Only the batches come
    from the plan: `per_device_train_batch_size`, shuffling and columns have no effect.
    """

    def __init__(
        self,
        *args: Any,
        plan: BatchPlan | Path | str,
        read: SampleReader | Sequence[Row] | Source | Sequence[Source],
        tokenizer: Tokenizer | None = None,
        attention: Backend | Literal["auto"] = "auto",
        leaks: Literal["refuse", "allow"] = "refuse",
        **settings: Any,
    ) -> None:
        if leaks not in ("refuse", "allow"):
            raise ConfigError(f"leaks must be refuse or allow, got {leaks!r}")
        # SFTTrainer looks at a row of the data, and would tokenize and pack the data set. This row
        # shows that both are done.
        row = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        super().__init__(*args, train_dataset=row, **settings)
        whole = plan if isinstance(plan, BatchPlan) else BatchPlan.load(plan)
        self.plan = whole.shard(self.args.process_index, self.args.world_size)
        _check(self, self.plan)
        self._samples = PlanDataset(plan, read, tokenizer)
        self._backend = choose_backend(attention, self.args.device)
        self._leaks = leaks
        self._own_attention = self.model.config._attn_implementation
        self.add_callback(PlanPosition(self.plan.whole_fingerprint, self.plan.step_microbatches))

    def get_train_dataloader(self) -> "DataLoader[Any]":
        """The microbatches of this rank, in the order of the plan."""
        if self.plan.config.layout == "packed":
            use_backend(self.model, self._backend)
            if self._leaks == "refuse":
                self._refuse_leaks()
        return _PlanLoader(
            self._samples,
            batch_sampler=_StepSampler(self.plan),
            collate_fn=_ModelInputs(self.plan),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _refuse_leaks(self) -> None:
        if any(weight.is_meta or not weight.numel() for weight in self.model.parameters()):
            warnings.warn(
                "this process does not hold the weights of the model, so whether packed samples "
                "change each other was not tested; run `batchwright pack verify` on the model",
                stacklevel=2,
            )
            return
        with self.compute_loss_context_manager():
            refuse_leaks(
                self.model,
                self._backend,
                next(self.model.parameters()).device,
                seq_idx=True,
                way_out="use another `attention` for this model, train it on a plan whose layout "
                "is not packed, or let samples of a row see each other by leaks='allow'",
            )

    def train(self, *args: Any, **settings: Any) -> Any:
        try:
            return super().train(*args, **settings)
        finally:
            self.model.set_attn_implementation(self._own_attention)

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        """Evaluate with the original attention: the packed one may misread padded batches."""
        training = self.model.config._attn_implementation
        self.model.set_attn_implementation(self._own_attention)
        try:
            return super().evaluation_loop(*args, **settings)
        finally:
            self.model.set_attn_implementation(training)

    def get_batch_samples(self, *args: Any, **settings: Any) -> tuple[list[Any], Any]:
        """The microbatches of a step, and how many of its tokens carry loss over all ranks."""
        batches, count = super().get_batch_samples(*args, **settings)
        if batches and not count:
            # The Trainer would divide by zero, and by default it hides a loss that is NaN.
            raise BadLoss(
                f"step {self.state.global_step + 1}: none of its tokens carries loss; "
                f"check the loss masks of the data"
            )
        return batches, count

    def num_examples(self, dataloader: "DataLoader[Any]") -> int:
        """Samples per epoch, from which the Trainer computes the logged throughput."""
        if isinstance(dataloader, _PlanLoader):
            return len(self.plan.ids) - len(self.plan.skipped)
        return int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Mean samples per step, from which the throughput is computed with `max_steps`."""
        return round((len(self.plan.ids) - len(self.plan.skipped)) / self.plan.num_steps())


class PlanTrainer(PlanTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer on a plan."""


class PlanPosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Stores the plan and its step size in trainer_state.json, and resumes from it."""

    def __init__(self, plan: str, step_microbatches: int) -> None:
        self.plan = plan
        self.step_microbatches = step_microbatches

    def state(self) -> dict[str, Any]:
        """What the Trainer saves: the same on every rank and for any number of ranks."""
        return {"args": vars(self).copy(), "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **shown: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise Mismatch(
                "this checkpoint was not trained on a plan, so it has no position to resume from; "
                "load its model and start a new run"
            )
        skips = not args.ignore_data_skip
        shown["train_dataloader"].batch_sampler.go_to(
            state.global_step, **saved["args"], skips=skips
        )


class _StepSampler(PlanBatchSampler):
    """Starts at an optimizer step.

    A resumed Trainer draws and drops the batches before it. They are empty here, so that resuming
    at the millionth step costs no more than at the first.
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
                f"the checkpoint has {step_microbatches} microbatches per step, now there are "
                f"{here}; resume with as many ranks, or use a plan whose step_size is a number"
            )
        self._dropped = step * _share(self._plan)

    def __iter__(self) -> Iterator[list[MicrobatchKey]]:
        dropped, self._dropped = self._dropped, 0
        yield from itertools.repeat([], dropped)
        yield from super().__iter__()


class _PlanLoader(DataLoader[Loaded]):
    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls this; it never exhausts an epoch, where the sampler would advance."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class _ModelInputs(PlanCollate):
    def __call__(self, loaded: list[Loaded]) -> dict[str, Any]:
        batch = super().__call__(loaded)
        return {name: batch[name] for name in batch.keys() - {"microbatch", "segment_ids"}}


def _share(plan: BatchPlan) -> int:
    """Microbatches per rank in an optimizer step."""
    assert plan.shard_of is not None
    return -(-plan.step_microbatches // plan.shard_of.world_size)


def _check(trainer: Any, plan: BatchPlan) -> None:
    """Reject settings with which the optimizer steps would differ from those of the plan."""
    args, share = trainer.args, _share(plan)
    if args.gradient_accumulation_steps != share:
        raise ConfigError(
            f"gradient_accumulation_steps must be {share}, the plan's microbatches per rank and "
            f"step (step_size={plan.config.step_size!r} on {args.world_size} ranks), got "
            f"{args.gradient_accumulation_steps}; change it, or build the plan with "
            f"step_size={args.gradient_accumulation_steps * args.world_size}"
        )
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        raise ConfigError(
            "the forward of this model takes no num_items_in_batch, so its loss would be a mean of "
            "means; pass a compute_loss_func that divides by it"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices must be True, got False: tokens would be weighted by "
            "their rank, and a filler has none to divide by"
        )
    if args.n_gpu > 1 or trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        raise ConfigError(
            "a plan gives each process its own batches, which DataParallel and tensor, context and "
            "sequence parallelism do not support; start one process per device with torchrun"
        )
    steps = args.max_steps / plan.num_steps() if args.max_steps > 0 else args.num_train_epochs
    sizes = {plan.num_microbatches(epoch) for epoch in range(math.ceil(steps))}
    if len(sizes) > 1:
        raise ConfigError(
            f"the epochs of this plan have {min(sizes)} to {max(sizes)} microbatches, and the "
            f"Trainer needs equal ones; choose a pack_mode that does not shuffle before packing"
        )
