"""Attention backends that isolate packed samples: each attends to itself and nothing else.

Tokens of a microbatch are laid end to end in one row, without padding. The backend is named in
the run log; `pack verify` tests the isolation on a given model.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from batchwright.errors import ConfigError
from batchwright.train.devices import has_flash, refuse_attention

__all__ = ["Backend", "choose_backend", "packed_inputs", "use_backend"]

Backend = Literal["flash", "segments", "sdpa", "flex"]

_IMPLEMENTATIONS: dict[str, str] = {
    "flash": "flash_attention_2",
    "segments": "batchwright_segments",
    # Not by their own names: transformers has opinions on which models may use those.
    "sdpa": "batchwright_masked",
    "flex": "batchwright_blocks",
}

_masks: Any = WeakTensorKeyDictionary()
"""Masks by the `cu_seqlens` they were built from, as long as those are in use."""


def choose_backend(wanted: str, device: torch.device, *, training: bool = True) -> Backend:
    """The backend to use; `ConfigError` if the one that is wanted cannot run here.

    flash: one varlen kernel over all samples (CUDA and flash-attn). segments: torch's fused
    attention once for each sample, so no work is spent on masked pairs. sdpa: torch's fused
    attention with a dense block mask. flex: FlexAttention with a sparse block mask.
    """
    cuda = device.type == "cuda"
    refuse_attention(wanted, cuda=cuda, training=training)
    if wanted == "auto":
        if has_flash(cuda=cuda):
            return "flash"
        return "flex" if cuda else "segments"
    return wanted  # type: ignore[return-value]


def use_backend(model: Any, backend: Backend) -> None:
    """Set the attention of a transformers model to `backend`; `ConfigError` if it cannot be."""
    from transformers import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATIONS["segments"], _attend_by_segment)
    AttentionInterface.register(_IMPLEMENTATIONS["sdpa"], _attend_by_mask)
    AttentionInterface.register(_IMPLEMENTATIONS["flex"], _attend_by_blocks)
    wanted = _IMPLEMENTATIONS[backend]
    # A model whose attention is hard-coded only warns, and keeps it.
    if model._can_set_attn_implementation():
        model.set_attn_implementation(wanted)
    if model.config.get_text_config()._attn_implementation != wanted:
        raise ConfigError(
            f"{type(model).__name__} has a hard-coded attention, which cannot isolate packed "
            f"samples; train it without --pack"
        )


def packed_inputs(cu_seqlens: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
    """The model's inputs besides its tokens that isolate packed samples.

    `cu_seqlens` are the bounds of the samples in the row, `position_ids` count from 0 in each.
    """
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return {
        "position_ids": position_ids,
        "use_cache": False,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _attend_by_segment(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample; query, key and value are [1, heads, tokens, width]."""
    _refuse_extras("segments", kwargs)
    bounds = kwargs.get("cu_seq_lens_q")
    lengths = [query.shape[2]] if bounds is None else torch.diff(bounds).tolist()
    window = kwargs.get("sliding_window")
    parts = [torch.split(tensor, lengths, 2) for tensor in (query, key, value)]
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        tokens = q.shape[2]
        mask = None
        if window is not None and tokens > window:
            places = torch.arange(tokens, device=q.device)
            mask = _sees(places[:, None], places[None, :], window)
        outputs.append(_fused(module, q, k, v, mask, dropout, scaling))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _attend_by_mask(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the whole row with a dense mask of the samples."""
    _refuse_extras("sdpa", kwargs)
    window = kwargs.get("sliding_window")

    def dense(sample: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(sample), device=sample.device)
        seen: torch.Tensor = _sees(places[:, None], places[None, :], window)
        return seen & (sample[:, None] == sample[None, :])

    mask = _once_a_row("sdpa", window, query, kwargs.get("cu_seq_lens_q"), dense)
    out = _fused(module, query, key, value, mask, dropout, scaling)
    return out.transpose(1, 2).contiguous(), None


def _attend_by_blocks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FlexAttention over the whole row, which skips blocks without a pair of one sample."""
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.integrations.flex_attention import flex_attention_forward

    window = kwargs.get("sliding_window")

    def sparse(sample: torch.Tensor) -> Any:
        def same_sample(batch: Any, head: Any, q: Any, k: Any) -> Any:
            return (sample[q] == sample[k]) & _sees(q, k, window)

        tokens = len(sample)
        return create_block_mask(same_sample, None, None, tokens, tokens, str(sample.device))

    blocks = _once_a_row("flex", window, query, kwargs.get("cu_seq_lens_q"), sparse)
    with _uncompiled() if query.device.type == "cpu" else nullcontext():
        out: tuple[torch.Tensor, torch.Tensor | None] = flex_attention_forward(
            module, query, key, value, blocks, **kwargs
        )
    return out


@contextmanager
def _uncompiled() -> Iterator[None]:
    """FlexAttention in eager mode: on the CPU it is only tested, and needs no compiler."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def _fused(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=mask is None,
        enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
    )


def _once_a_row(
    backend: str,
    window: int | None,
    query: torch.Tensor,
    bounds: torch.Tensor | None,
    make: Callable[[torch.Tensor], Any],
) -> Any:
    """The mask that `make` builds from the sample of each token; all layers of a row share it."""
    places = torch.arange(query.shape[2], device=query.device)
    if bounds is None:
        return make(torch.zeros_like(places))
    known = _masks.setdefault(bounds, {})
    if (backend, window) not in known:
        sample = torch.bucketize(places, bounds[1:].contiguous(), right=True)
        known[backend, window] = make(sample)
    return known[backend, window]


def _sees(query: Any, key: Any, window: int | None) -> Any:
    """Causal mask: whether a token attends to another, at most `window` tokens back."""
    ahead = query - key
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def _refuse_extras(backend: str, kwargs: dict[str, Any]) -> None:
    for refused in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(refused) is not None:
            raise ConfigError(
                f"this model's attention uses {refused}, which the {backend} backend does not "
                f"support; "
                f"use --attention flex or flash, or train it without --pack"
            )
