"""Predict the steps, tokens and memory of a run without training."""

import dataclasses
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from batchwright.data.rows.notes import untaught_ends
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import ConfigError
from batchwright.models.adapter import find_adapter
from batchwright.models.transformers import context_length, load_model
from batchwright.train.attention import choose_backend, use_backend
from batchwright.train.ranks import device_of
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.planned import PlannedSteps, check_context
from batchwright.train.sft.prepare import mixture_of, open_prepared, prepare, tokenizer_of
from batchwright.world import World

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run will do: counts are exact, memory is an estimate."""

    steps: int
    microbatches: int
    useful_tokens: int
    padded_tokens: int
    ullage: float
    parameters: int
    trained: int
    memory_bytes: int
    bad_rows: int
    """Rows that cannot be read, left out."""
    without_loss: int
    """Samples of which no token carries loss, left out."""
    counts: dict[str, int]
    """What the plan counted: samples planned, skipped, truncated and split."""
    note: str | None = None
    """What the rows and the chat template do not teach, where they leave something out."""


def predict(config: SftConfig) -> Prediction:
    """Tokenise and plan in a temporary folder, and read the prediction off the plan.

    What a run would refuse before its first step is refused, but for what only weights can tell:
    whether packed samples leak into each other, and whether an adapter's base has changed.
    """
    if config.online:
        raise ConfigError("an --online run cannot be predicted; leave out --dry-run")
    world = World.detect()
    backend = choose_backend(config.attention, device_of(config.device, world))
    adapter = find_adapter(config.model)
    if adapter:
        config = config.of_adapter(adapter.rank, adapter.alpha)
    base = adapter.base if adapter else config.model
    model, own, info = load_model(base, device="meta", dtype=torch.float32)
    tokenizer = tokenizer_of(config, own, model)
    with tempfile.TemporaryDirectory() as folder:
        # Linked, not shared: the temporary folder may be on a disk without room for a copy.
        config = dataclasses.replace(config, run_dir=Path(folder))
        prepare(config, tokenizer, world.size, lend=True)
        data = open_prepared(Path(folder))
        assert data is not None
        held_out = open_prepared(Path(folder), "eval_")
        for part in (data, held_out) if held_out else (data,):
            check_context(part, context_length(model))
        if PlannedSteps(config, data, world, tokenizer.pad_id).packed:
            use_backend(model, backend)
        plan = data.plan.shard(0, world.size)
        epochs = range(config.epochs or plan.num_epochs)
        steps = sum(plan.num_steps(epoch) for epoch in epochs)
        useful = sum(plan.useful_tokens(epoch) for epoch in epochs)
        padded = sum(plan.padded_tokens(epoch) for epoch in epochs)
        if config.max_steps and config.max_steps < steps:
            steps = config.max_steps
            taken = list(islice(data.plan.iter_steps(epochs=len(epochs)), steps))
            batches = [batch for step in taken for batch in step.microbatches]
            useful = sum(int(batch.tokens.sum()) for batch in batches)
            padded = sum(batch.padded_tokens for batch in batches)
        elif plan.costs_N is not None:
            # Costs take up place, but nothing is trained on there.
            shown = (batch for epoch in epochs for batch in data.plan.iter_epoch(epoch))
            useful = sum(int(batch.tokens.sum()) for batch in shown)
        microbatches = plan.num_microbatches()
        bad_rows, counts = data.skipped, dataclasses.asdict(plan.shown)
    trained = _trained(model, config)
    return Prediction(
        steps=steps,
        microbatches=microbatches,
        useful_tokens=useful,
        padded_tokens=padded,
        ullage=1 - useful / padded,
        parameters=info.parameters,
        trained=trained,
        memory_bytes=_memory(model, config, info.parameters, trained),
        bad_rows=bad_rows,
        without_loss=counts["skipped_no_loss"],
        counts=counts,
        note=_note(config, tokenizer),
    )


def _note(config: SftConfig, tokenizer: Tokenizer) -> str | None:
    paths, _ = mixture_of(config.data)
    if any(Path(path).is_fifo() for path in paths):
        # A pipe can be read once, and that was for the plan.
        return None
    said = (
        untaught_ends(open_source(path, config.ignore_column, config.ids), tokenizer)
        for path in paths
    )
    return next(filter(None, said), None)


def _trained(model: torch.nn.Module, config: SftConfig) -> int:
    if not config.lora_rank:
        return sum(p.numel() for p in model.parameters())
    linear = (m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings()  # type: ignore[operator]
    return sum(config.lora_rank * (m.in_features + m.out_features) for m in linear if m is not head)


def _memory(model: torch.nn.Module, config: SftConfig, parameters: int, trained: int) -> int:
    """Bytes of weights, gradients, Adam moments, activations, logits and their gradient."""
    shape = model.config.get_text_config()  # type: ignore[union-attr, operator]
    hidden, layers = int(shape.hidden_size), int(shape.num_hidden_layers)
    # The backward pass needs about 34 activations of hidden size of each layer; with activation
    # checkpointing one, and those of the layer that is being recomputed.
    kept = hidden * (layers + 34 if config.activation_checkpointing else layers * 34)
    logits = 2 * int(shape.vocab_size)
    return 4 * (parameters + 3 * trained + config.token_budget * (kept + logits))
