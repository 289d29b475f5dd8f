"""Supervised fine-tuning on a batch plan, top to bottom.

    rows -> tokens -> plan -> steps of microbatches -> loss -> step -> run directory

An online run has its steps from a stream of episodes instead; see `online.py`.

The loss of a step is the sum over all tokens that carry loss, over all its microbatches on
all ranks, divided by their number. So neither the shape of the batches, nor gradient
accumulation, nor the number of ranks changes the gradient. Dropout is seeded by the step, so a
resumed run repeats what an uninterrupted one does.
"""

import inspect
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from batchwright import rng
from batchwright.batching import BatchPlan
from batchwright.batching.collation import CollatedBatch
from batchwright.checkpoint import Checkpoint
from batchwright.data.rows.sample import IGNORE
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadFile, BadLoss, Mismatch, MissingFile, need, one_line
from batchwright.files import atomic_folder
from batchwright.models.adapter import (
    Adapter,
    attach,
    base_weights,
    check_base,
    find_adapter,
    name_base,
)
from batchwright.models.folder import seal_model
from batchwright.models.transformers import (
    context_length,
    load_model,
    tokenizer_for,
    write_tokenizer,
)
from batchwright.streaming.protocols import AsyncSampleStream
from batchwright.train import ranks
from batchwright.train.attention import choose_backend, packed_inputs, use_backend
from batchwright.train.run import STOPS, Run
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.isolation import refuse_leaks
from batchwright.train.sft.online import OnlineSteps
from batchwright.train.sft.planned import PlannedSteps, batches_of, check_context
from batchwright.train.sft.prepare import (
    Prepared,
    prepare,
    refuse_early,
    tokenizer_of,
)
from batchwright.train.sft.restore import Parts, open_parts, restore, telling_what_to_remove
from batchwright.train.sft.state import load_state, training_state
from batchwright.train.tracking import Tracker, Tracking
from batchwright.world import World

__all__ = ["SftResult", "Tracker", "learning_rate", "microbatch_loss", "train_sft"]


@dataclass(frozen=True, slots=True)
class SftResult:
    """What a run did, in this call."""

    run_dir: Path
    finished: bool
    """False if it was stopped and can be resumed."""
    stopped_by: str | None
    """SIGTERM, SIGUSR1, Ctrl-C or --stop-after, of any rank; None if it is finished."""
    step: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    useful_tokens: int
    padded_tokens: int
    seconds: float
    data_wait_s: float
    backend: str
    tracker_failures: int = 0
    """Calls of trackers that raised; training went on without them."""
    steps_without_loss: int = 0
    """Steps of which no token carries loss; they changed nothing."""
    worlds: tuple[int, ...] = ()
    """Numbers of workers in turn, of a run that Ray started again whenever they changed."""
    counts: dict[str, int] | None = None
    """What the plan counted: samples planned, skipped, truncated and split."""
    online: dict[str, Any] | None = None
    """What an online run took from its stream, by the end of this call."""

    @property
    def ullage(self) -> float | None:
        """The share of the capacity that held no sample: 1 - useful / capacity."""
        return 1 - self.useful_tokens / self.padded_tokens if self.padded_tokens else None


def train_sft(
    config: SftConfig,
    *,
    resume: bool = False,
    trackers: Sequence[Tracker] | Callable[[Path], Sequence[Tracker]] = (),
    progress: Callable[[int, int, float], None] | None = None,
    preparing: Callable[[int, int], None] | None = None,
    stream: Callable[[Tokenizer], AsyncSampleStream] | None = None,
    stop: Callable[[], str | None] | None = None,
) -> SftResult:
    """Train, or resume the run in `config.run_dir`.

    Ctrl-C, SIGTERM or SIGUSR1 on any rank ends the step and saves; a second Ctrl-C stops at once.
    What stopped it is in the result: after SIGTERM, it is for the caller to exit. Where no signal
    arrives, `stop` of the first rank names one of `STOPS`, or None, after each step.
    `progress` is called with steps done, steps in all (0: endless) and the loss. An online run
    learns from the `stream` that is made of the tokenizer, by default from the one that `config`
    names. `trackers` may be made of the run directory, which is numbered. One that cannot start
    is an error before anything is trained; one that fails later is counted and logged once.
    """
    world = World.detect()
    refuse_early(config, world, resume)
    main = world.rank == 0
    adapter = find_adapter(config.model)
    if adapter is not None:
        config = config.of_adapter(adapter.rank, adapter.alpha)
    device = ranks.device_of(config.device, world)
    backend = choose_backend(config.attention, device)
    with ranks.joined(world, device), ExitStack() as open_things:

        def agree(number: int) -> int:
            return int(ranks.summed([float(number)], world, device)[0])

        asked = stop if main else None
        run = Run(config, resume=resume, writes=main, agree=agree, asked=asked)
        open_things.enter_context(run)
        config = replace(config, run_dir=run.folder)
        launch = agree(secrets.randbits(52) if main else 0) if world.size > 1 else 0
        first = ranks.FirstRank(run.folder, world, launch)
        open_things.enter_context(first)
        open_things.enter_context(telling_what_to_remove(run.folder))
        trackers = trackers(config.run_dir) if callable(trackers) else trackers
        if found := run.latest():
            with found.restoring():
                _refuse_shorter(run, config, found)
        base = adapter.base if adapter else config.model
        model, own, _ = load_model(base, device=device, dtype=torch.float32)
        if adapter:
            # Now, not when it is attached: rows would be tokenised for nothing.
            check_base(model, adapter)
            own = tokenizer_for(adapter.tokenizer)
        tokenizer = tokenizer_of(config, own, model)

        def tokenised(done: int, total: int) -> None:
            first.progress(done, total)
            if preparing is not None:
                preparing(done, total)

        if main:
            if not resume:
                prepare(config, tokenizer, world.size, tokenised)
            parts = _restored(config, tokenizer, found, tokenised)
            first.ready()
        else:
            first.wait(lambda: run.stop(0))
            parts = open_parts(config)

        train, held_out = parts
        if held_out:
            check_context(held_out, context_length(model))
        source: PlannedSteps | OnlineSteps
        if config.online:
            source = OnlineSteps(
                config,
                run,
                tokenizer,
                vocabulary=model.get_input_embeddings().weight.shape[0],
                context=context_length(model),
                stream=stream(tokenizer) if stream else None,
            )
        else:
            assert train is not None
            check_context(train, context_length(model))
            source = PlannedSteps(config, train, world, tokenizer.pad_id)
        open_things.callback(source.close)
        dtype = _dtype(config, device)
        attention = "causal rows"
        if source.packed:
            attention = backend
            use_backend(model, backend)
            with _autocast(device, dtype):
                refuse_leaks(model, backend, device)
        keeps = _takes_logits_to_keep(model)
        weights = base_weights(model) if config.lora_rank else ""
        if adapter:
            model = attach(model, adapter)
        elif config.lora_rank:
            model = _with_adapters(model, config)
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        bare = model
        model = ranks.spread(model, world, device, fsdp=config.fsdp)
        optimizer = _optimizer(model, config)

        step = begun_at = 0
        if found:
            with found.restoring():
                source.load(found, load_state(found, bare, optimizer))
            step = begun_at = found.step
            # Weights and moments once more, which would stay in memory until the end.
            found = None
        elif isinstance(source, OnlineSteps):
            source.fill()
        total = source.total
        tracking = Tracking(trackers if main else (), run)
        open_things.callback(tracking.finish)
        tracking.start({k: str(v) for k, v in vars(config).items()})
        run.start(
            step=step,
            steps=0 if config.endless else total,
            world=world.size,
            device=str(device),
            attention=attention,
            **source.facts(),
        )

        first_loss = loss = None
        useful = padded = without_loss = 0
        waited = 0.0
        began = time.perf_counter()

        stopping: str | None = None

        def state() -> dict[str, Any]:
            trained = training_state(bare, optimizer, source.position)
            return {**trained, **source.state()}

        def save() -> None:
            run.save(step, state, keep=config.keep)

        def interrupted() -> bool:
            """Whether a signal has reached any rank, which is not waited for an evaluation with."""
            nonlocal stopping
            stopping = _strongest(ranks.summed(_flags(run.stop(0)), world, device)) or stopping
            return stopping in STOPS[:3]

        def evaluate() -> float | None:
            if held_out is None:
                return None
            model.eval()
            value = _evaluate(model, held_out, world, device, keeps, dtype, interrupted)
            ranks.reshard(model, world)
            model.train()
            if value is not None:
                run.event("eval", step=step, loss=value)
                tracking.log(step, {"eval/loss": value})
            return value

        def refused(why: str, ready: Sequence[CollatedBatch], sentence: str) -> BadLoss:
            """Save the state of the last good step, and say which samples follow it."""
            save()
            run.event("stop", step=step, why=why, samples=_names(ready))
            return BadLoss(f"step {step + 1}: {sentence}")

        model.train()
        steps = source.steps(lambda: run.stop(step - begun_at) is not None, preparing)
        open_things.callback(steps.close)
        while step < total:
            start = time.perf_counter()
            try:
                ready = next(steps, None)
            except Exception as error:
                if config.online or (isinstance(error, BadFile) and step > begun_at):
                    # Whatever befell the stream or the tokens, the run resumes where it was.
                    save()
                    run.event("stop", step=step, why="no samples", error=one_line(error))
                raise
            if ready is None:
                stopping = run.stop(step - begun_at)
                break
            wait = time.perf_counter() - start

            count = sum(batch.num_loss_tokens for batch in ready)
            (counted,) = ranks.summed([float(count)], world, device)
            _set_rate(optimizer, learning_rate(config, step, total))
            _seed(config.seed, step, world.rank)
            loss_sum = torch.zeros((), device=device, dtype=torch.float64)
            for number, batch in enumerate(ready, start=1):
                with ranks.syncing(model, number == len(ready)), _autocast(device, dtype):
                    part = microbatch_loss(model, batch, device, keeps)
                    # Gradients are averaged over the ranks, and the sum is what is wanted.
                    torch.autograd.backward(part * (world.size / max(counted, 1)))
                loss_sum += part.detach()
            norm = ranks.clip(model, config.clip)
            totals = [
                float(loss_sum),
                float(sum(b.token_count for b in ready if b.weight)),
                float(sum(b.batch_size * b.max_len for b in ready)),
                # The clock of the first rank says when to save.
                float(main and run.due()),
                # A signal may have reached one rank and not another; all stop together.
                *_flags(run.stop(step + 1 - begun_at)),
            ]
            # Each rank fills its own places, and the sum has those of all.
            alone = [0.0] * (2 * world.size)
            alone[world.rank] = float(sum(b.batch_size * b.max_len for b in ready))
            alone[world.size + world.rank] = wait
            summed, tokens, capacity, due, *rest = ranks.summed(totals + alone, world, device)
            stops, by_rank = rest[: -2 * world.size], rest[-2 * world.size :]
            stopping = _strongest(stops)
            if counted:
                loss = summed / counted
            if not (math.isfinite(summed) and math.isfinite(norm)):
                raise refused(
                    "loss is not finite",
                    ready,
                    f"the loss is {loss} and the gradient norm {norm} on samples {_names(ready)}; "
                    f"the state before it is saved, start a new run with a lower --lr or without "
                    f"these samples",
                )
            if counted:
                optimizer.step()
            else:
                # Pieces of split samples may be without loss; there is nothing to learn from.
                without_loss += 1
            optimizer.zero_grad(set_to_none=True)

            step += 1
            place = source.finish_step(step)
            seconds = time.perf_counter() - start
            first_loss = loss if first_loss is None else first_loss
            useful, padded, waited = useful + int(tokens), padded + int(capacity), waited + wait
            metrics = {
                "loss": loss if counted else None,
                "lr": optimizer.param_groups[0]["lr"],
                "grad_norm": norm,
                "tokens": int(tokens),
                "padded": int(capacity),
                "loss_tokens": int(counted),
                "useful": tokens / capacity,
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "data_wait_s": wait,
            }
            run.event("step", step=step, **place, **metrics, **_by_rank(by_rank, world))
            logged = metrics | (place if config.online else {})
            numbers = {name: float(v) for name, v in logged.items() if v is not None}
            tracking.log(step, {f"train/{name}": value for name, value in numbers.items()})
            if progress and main:
                progress(step, 0 if config.endless else total, math.nan if loss is None else loss)
            if config.eval_every and step % config.eval_every == 0 and step < total:
                evaluate()
            if stopping and step < total:
                break
            if due or (config.save_every and step % config.save_every == 0):
                save()

        finished, eval_loss = step >= total or source.ended, None
        # A finished run to which nothing was added is left as it is.
        if not (finished and run.is_left(begun_at, step, "model")):
            save()
            if finished and held_out:
                eval_loss = evaluate()
                finished = eval_loss is not None
            if finished or config.endless:
                _export(bare, config, main, adapter, weights)
            if finished:
                run.finish(step)
        result = SftResult(
            run_dir=config.run_dir,
            finished=finished,
            stopped_by=None if finished else stopping,
            step=step,
            first_loss=first_loss,
            last_loss=loss,
            eval_loss=eval_loss,
            useful_tokens=useful,
            padded_tokens=padded,
            seconds=time.perf_counter() - began,
            data_wait_s=waited,
            backend=attention,
            tracker_failures=tracking.failures,
            steps_without_loss=without_loss,
            counts=None if isinstance(source, OnlineSteps) else source.counts(),
            online=source.summary(),
        )
        why = "stream ended" if source.ended else "done" if finished else "stopped"
        run.event(
            "stop",
            step=step,
            why=why,
            by=result.stopped_by,
            loss=loss,
            ullage=result.ullage,
            tracker_failures=tracking.failures,
        )
        return result


def _by_rank(values: list[float], world: World) -> dict[str, list[float]]:
    """Tokens that each rank computed and seconds it waited for data, if there are several."""
    if world.size == 1:
        return {}
    return {"rank_padded": values[: world.size], "rank_data_wait_s": values[world.size :]}


def microbatch_loss(
    model: Any,
    batch: CollatedBatch,
    device: torch.device,
    keeps: bool = True,
) -> torch.Tensor:
    """The sum of the loss over the tokens of `batch` that carry it.

    Packed samples go through the model end to end in one row, isolated by the backend that
    `use_backend` set. Padded rows need no mask: padding follows its sample, where causal
    attention never looks. With `keeps`, logits are computed only where a label needs them, which
    saves most of the memory.
    """
    ids, labels = _tensor(batch.input_ids, device), _tensor(batch.labels, device)
    inputs: dict[str, Any] = {"use_cache": False}
    if _is_packed(batch):
        real = _tensor(batch.segment_ids, device) >= 0
        ids, labels = ids[real][None], labels[real][None]
        bounds = torch.from_numpy(batch.cu_seqlens).to(device)
        positions = _tensor(batch.position_ids, device)[real][None]
        inputs = packed_inputs(bounds, positions)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    wanted = (targets != IGNORE).any(0).nonzero()[:, 0]
    if not len(wanted):
        # A filler has no targets, but every rank must run the same backward pass.
        wanted = torch.zeros(1, dtype=torch.long, device=device)
    if keeps:
        logits = model(input_ids=ids, logits_to_keep=wanted, **inputs).logits
    else:
        logits = model(input_ids=ids, **inputs).logits[:, wanted]
    flat = logits.float().reshape(-1, logits.shape[-1])
    aims = targets[:, wanted].reshape(-1)
    return F.cross_entropy(flat, aims, ignore_index=IGNORE, reduction="sum")


def learning_rate(config: SftConfig, step: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`.

    >>> config = SftConfig(model="tiny", data="x", lr=1.0, warmup_steps=2, schedule="linear")
    >>> [round(learning_rate(config, step, 6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    if config.chosen_schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * share))
    return config.lr * (1 - share) if config.chosen_schedule == "linear" else config.lr


def _evaluate(
    model: Any,
    data: Prepared,
    world: World,
    device: torch.device,
    keeps: bool,
    dtype: torch.dtype,
    interrupted: Callable[[], bool],
) -> float | None:
    """Mean loss over the held-out tokens that carry it; None if it was interrupted."""
    ready = data.plan
    if world.size <= ready.num_microbatches():
        ready = ready.shard(world.rank, world.size)
    # With fewer microbatches than ranks, every rank takes them all, and the mean is the same.
    loss = count = 0.0
    with torch.no_grad():
        for step in ready.iter_steps(epochs=1):
            if interrupted():
                return None
            for batch in batches_of(step, data, 0):
                with _autocast(device, dtype):
                    loss += float(microbatch_loss(model, batch, device, keeps))
                count += batch.num_loss_tokens
    loss, count = ranks.summed([loss, count], world, device)
    if not count:
        raise BadLoss("no token of the held-out data carries loss; check its loss masks")
    return loss / count


def _flags(stop: str | None) -> list[float]:
    """A cause to stop as numbers that ranks can add."""
    return [float(stop == name) for name in STOPS]


def _strongest(counts: Sequence[float]) -> str | None:
    """The most pressing cause that any rank has."""
    return next((name for name, count in zip(STOPS, counts, strict=True) if count), None)


def _refuse_shorter(run: Run, config: SftConfig, found: Checkpoint) -> None:
    """Refuse to resume with fewer steps or epochs than are behind the checkpoint."""
    if config.max_steps:
        run.no_less("max_steps", config.max_steps, found.step)
    if not config.online:
        at = found.state["position"]
        epochs = config.epochs
        with suppress(BadFile, MissingFile):
            # One that cannot be read is made again, and is the plan of the checkpoint then.
            epochs = epochs or BatchPlan.load(config.run_dir / "plan").num_epochs
        if epochs:
            run.no_less("epochs", epochs, at["epoch"] + (at["microbatch_idx"] > 0))


def _restored(
    config: SftConfig,
    tokenizer: Tokenizer,
    found: Checkpoint | None,
    progress: Callable[[int, int], None],
) -> Parts:
    """What the run trains and is evaluated on; made again if it is damaged or gone."""
    try:
        return open_parts(config)
    except (BadFile, MissingFile, Mismatch):
        restore(config, tokenizer, found, progress)
    return open_parts(config)


def _takes_logits_to_keep(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _with_adapters(model: Any, config: SftConfig) -> Any:
    peft = need("peft", extra="train")
    _seed(config.seed, -1, 0)
    adapters = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, adapters)


def _optimizer(model: torch.nn.Module, config: SftConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _seed(seed: int, step: int, rank: int) -> None:
    torch.manual_seed(rng.key(seed, "sft/dropout", step, rank))


def _dtype(config: SftConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    if dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def _is_packed(batch: CollatedBatch) -> bool:
    return len(batch.cu_seqlens) - 1 != batch.batch_size


def _tensor(array: "NDArray[np.int32]", device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, torch.long)


def _names(batches: Sequence[CollatedBatch]) -> str:
    ids = [name for batch in batches if batch.weight for name in batch.sample_ids]
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")


def _export(model: Any, config: SftConfig, main: bool, adapter: Adapter | None, base: str) -> None:
    """Write the trained model as transformers saves it; an adapter with what it was trained on."""
    # All ranks: sharded weights are gathered, tied ones once.
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    gathered: dict[int | str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        same = parameters.get(name, name)
        if same not in gathered:
            gathered[same] = ranks.gathered(value)
        weights[name] = gathered[same]
    if not main:
        return
    from transformers.utils import logging

    logging.disable_progress_bar()
    marker = "adapter_config.json" if config.lora_rank else "config.json"
    with atomic_folder(config.run_dir / "model", marker) as folder:
        model.save_pretrained(folder, state_dict=weights)
        if config.lora_rank:
            name_base(folder, adapter.base if adapter else config.model, base)
        write_tokenizer(folder, adapter.tokenizer if adapter else config.model, config.tokenizer)
        seal_model(folder)
