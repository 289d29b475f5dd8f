"""Keep packed samples apart: each attends to itself and nothing else.

Tokens of a microbatch stand end to end in one row, without padding. Which backend holds the
samples apart is named in the run log; `pack verify` proves it on the model at hand.
"""

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F

from batchwright.errors import ConfigError

__all__ = ["Backend", "choose_backend", "packed_inputs", "use_backend"]

Backend = Literal["flash", "segments", "sdpa", "flex"]

_SEGMENTS = "batchwright_segments"
_IMPLEMENTATIONS: dict[str, str] = {
    "flash": "flash_attention_2",
    "segments": _SEGMENTS,
    "sdpa": "sdpa",
    "flex": "flex_attention",
}


def choose_backend(asked: str, device: torch.device, *, training: bool = True) -> Backend:
    """The backend to use, or a sentence on why the one asked for is not possible.

    flash: one varlen kernel over all samples (CUDA and flash-attn). segments: torch's fused
    attention once for each sample, so no work is spent on masked pairs. sdpa: torch's fused
    attention under a dense block mask. flex: FlexAttention's block masks.
    """
    flash = device.type == "cuda" and find_spec("flash_attn") is not None
    if asked == "flash" and not flash:
        raise ConfigError(
            "--attention flash needs CUDA and the flash-attn package; use segments, flex or sdpa"
        )
    if asked == "flex" and training and device.type == "cpu":
        raise ConfigError(
            "FlexAttention has no backward pass on the CPU; use --attention segments or sdpa"
        )
    if asked == "auto":
        if flash:
            return "flash"
        return "flex" if device.type == "cuda" else "segments"
    return asked  # type: ignore[return-value]


def use_backend(model: Any, backend: Backend) -> None:
    """Tell a transformers model to attend by `backend`."""
    from transformers import AttentionInterface

    if backend == "segments":
        AttentionInterface.register(_SEGMENTS, _attend_by_segment)
    model.set_attn_implementation(_IMPLEMENTATIONS[backend])


def packed_inputs(
    cu_seqlens: torch.Tensor, position_ids: torch.Tensor, backend: Backend
) -> dict[str, Any]:
    """What the model is given beside its tokens so that samples stay apart.

    `cu_seqlens` are the bounds of the samples in the row, `position_ids` count from 0 in each.
    """
    inputs: dict[str, Any] = {"position_ids": position_ids, "use_cache": False}
    if backend in ("flash", "segments"):
        longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
        inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
        return inputs
    total = int(cu_seqlens[-1])
    places = torch.arange(total, device=cu_seqlens.device)
    sample = torch.bucketize(places, cu_seqlens[1:].contiguous(), right=True)
    if backend == "sdpa":
        mask = (sample[:, None] == sample[None, :]) & (places[:, None] >= places[None, :])
        inputs["attention_mask"] = mask[None, None]
        return inputs
    from torch.nn.attention.flex_attention import create_block_mask

    def same_sample(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (sample[query] == sample[key]) & (query >= key)

    device = str(cu_seqlens.device)
    inputs["attention_mask"] = create_block_mask(same_sample, None, None, total, total, device)
    return inputs


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
    for refused in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(refused) is not None:
            raise ConfigError(
                f"this model's attention uses {refused}, which the segments backend lacks; "
                f"use --attention flex or sdpa"
            )
    bounds = kwargs.get("cu_seq_lens_q")
    lengths = [query.shape[2]] if bounds is None else torch.diff(bounds).tolist()
    groups = getattr(module, "num_key_value_groups", 1)
    window = kwargs.get("sliding_window")
    outputs = []
    parts = [torch.split(tensor, lengths, 2) for tensor in (query, key, value)]
    for q, k, v in zip(*parts, strict=True):
        tokens = q.shape[2]
        mask = None
        if window is not None and tokens > window:
            places = torch.arange(tokens, device=q.device)
            ahead = places[:, None] - places[None, :]
            mask = (ahead >= 0) & (ahead < window)
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                scale=scaling,
                is_causal=mask is None,
                enable_gqa=groups > 1,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
