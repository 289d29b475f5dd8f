"""The model `tiny`: random weights over bytes, bit-identical everywhere; for demos and tests."""

from typing import Any

from batchwright import rng
from batchwright.errors import need

__all__ = ["tiny"]


def tiny() -> Any:
    """A Llama of a million parameters over bytes, each weight seeded by its name.

    A uniform number minus a half, times one constant, is rounded once, so the weights are
    bit-identical on any processor; normal ones would pass through logarithms that differ.
    """
    import torch

    transformers = need("transformers", extra="local")
    config = transformers.LlamaConfig(
        # The 258 ids of the `bytes` tokenizer, rounded up to a multiple of 64.
        vocab_size=320,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(config)
    spread = config.initializer_range * 12**0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                generator = torch.Generator().manual_seed(rng.key(0, f"tiny {name}"))
                weight.copy_((torch.rand(weight.shape, generator=generator) - 0.5) * spread)
    return model.eval()
