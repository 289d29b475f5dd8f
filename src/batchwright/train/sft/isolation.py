"""Test on a given model that samples of a packed row do not attend to each other."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from batchwright import rng
from batchwright.errors import ConfigError, Mismatch
from batchwright.models.transformers import context_length, load_model
from batchwright.train.attention import Backend, choose_backend, packed_inputs, use_backend

__all__ = ["IsolationProof", "refuse_leaks", "verify_isolation"]

TOLERANCE = 1e-3
"""Packed and alone, logits of a sample may differ by rounding: sums have another order."""

WAY_OUT = "use another --attention for this model, or train it without --pack"


@dataclass(frozen=True, slots=True)
class IsolationProof:
    """How far logits changed when each sample in turn was perturbed."""

    backend: str
    device: str
    lengths: tuple[int, ...]
    own: tuple[float, ...]
    """Of the perturbed sample itself: not zero, or nothing was tested."""
    others: tuple[float, ...]
    """Of all others: exactly zero."""
    against_alone: float
    """Largest difference of logits between a sample in the row and the same sample alone."""


def verify_isolation(
    name: str, attention: str = "auto", *, segments: int = 5, tokens: int = 256, seed: int = 0
) -> IsolationProof:
    """Perturb each sample of a packed row in turn; `Mismatch` if another one's logits change."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer, _ = load_model(name, device=device, dtype=torch.float32)
    model.eval()
    backend = choose_backend(attention, device, training=False)
    context = context_length(model)
    if segments < 2 or tokens < 2 * segments or (context is not None and tokens > context):
        raise ConfigError(
            f"{segments} samples in {tokens} tokens cannot be tested; give at least 2 samples, at "
            f"least 2 tokens for each, and at most the model's context of {context} tokens"
        )
    draw = rng.stream(seed, "isolation")
    cuts = sorted(draw.choice(tokens - segments, segments - 1, replace=False) + 1)
    bounds = [0, *(int(c) + i for i, c in enumerate(cuts, start=1)), tokens]
    lengths = tuple(b - a for a, b in itertools.pairwise(bounds))
    row = torch.from_numpy(draw.integers(0, min(tokenizer.vocab_size, 256), tokens)).to(device)
    alone = _alone(model, row, bounds)
    use_backend(model, backend)
    logits = _packed(model, bounds, device)
    own, others = _moved(logits, row, bounds, min(tokenizer.vocab_size, 256))
    proof = IsolationProof(
        backend=backend,
        device=str(device),
        lengths=lengths,
        own=tuple(own),
        others=tuple(others),
        against_alone=float((logits(row) - alone).abs().max()),
    )
    if not min(own) > 0:
        raise Mismatch(
            f"perturbing a sample of {name} changed its own logits by {min(own)}, so nothing can "
            f"be tested; check the model's weights"
        )
    _no_leak(f"{backend} attention", others)
    if proof.against_alone > TOLERANCE:
        raise Mismatch(
            f"{backend} attention changes the model: packed and alone, logits differ by "
            f"{proof.against_alone:.3g}, more than {TOLERANCE}; use another --attention"
        )
    return proof


def refuse_leaks(
    model: Any,
    backend: Backend,
    device: torch.device,
    *,
    seq_idx: bool = False,
    way_out: str = WAY_OUT,
) -> None:
    """A quick test before training: layers other than attention may mix tokens as well.

    `seq_idx` says that training passes it, as transformers' flattening collator does: some
    state-space layers keep samples apart by it. The model is tested in evaluation mode.

    Raises:
        Mismatch: a sample changed the logits of another; the sentence ends with `way_out`.
        ConfigError: the model's output has no logits to compare.
    """
    bounds = [0, 5, 12]
    vocabulary = min(16, model.config.get_text_config().vocab_size)
    row = torch.arange(2, 14, device=device) % vocabulary
    training = model.training
    model.eval()
    try:
        _, others = _moved(_packed(model, bounds, device, seq_idx), row, bounds, vocabulary)
    finally:
        model.train(training)
    _no_leak(f"{type(model).__name__} with {backend} attention", others, way_out)


def _packed(
    model: Any, bounds: list[int], device: torch.device, seq_idx: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from the tokens of a packed row to their logits."""
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    positions = torch.cat([torch.arange(n, device=device) for n in sizes])[None]
    limits = torch.tensor(bounds, dtype=torch.int32, device=device)
    more = {}
    if seq_idx:
        samples = torch.arange(len(sizes), dtype=torch.int32, device=device)
        more["seq_idx"] = samples.repeat_interleave(torch.tensor(sizes, device=device))[None]

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = model(ids[None], **packed_inputs(limits, positions), **more)
        if getattr(out, "logits", None) is None:
            raise ConfigError(
                f"the output of {type(model).__name__} has no logits, so whether packed samples "
                f"change each other cannot be tested; use a model that returns them, or rows that "
                f"are not packed"
            )
        found: torch.Tensor = out.logits[0]
        return found

    return logits


def _moved(
    logits: Callable[[torch.Tensor], torch.Tensor],
    row: torch.Tensor,
    bounds: list[int],
    vocabulary: int,
) -> tuple[list[float], list[float]]:
    """How far logits change when each sample in turn is perturbed: its own, and all others."""
    before = logits(row)
    own, others = [], []
    for first, last in itertools.pairwise(bounds):
        changed = row.clone()
        # Every token changes, so the logits of whatever attends to the sample change.
        changed[first:last] = (changed[first:last] + 1) % vocabulary
        moved = (logits(changed) - before).abs().amax(1)
        own.append(float(moved[first:last].max()))
        moved[first:last] = 0
        others.append(float(moved.max()))
    return own, others


def _no_leak(what: str, others: list[float], way_out: str = WAY_OUT) -> None:
    leaky = [number for number, moved in enumerate(others) if moved > 0]
    if leaky:
        raise Mismatch(
            f"{what} leaks: perturbing sample {leaky[0]} of {len(others)} changed "
            f"the logits of others by {others[leaky[0]]:.3g}; {way_out}"
        )


def _alone(model: Any, row: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Logits of each sample alone, with the model's own attention."""
    with torch.no_grad():
        parts = [
            model(row[None, a:b], use_cache=False).logits[0] for a, b in itertools.pairwise(bounds)
        ]
    return torch.cat(parts)
