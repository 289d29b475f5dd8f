"""Packed samples give the logits they give alone, and no sample moves another."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from batchwright.errors import ConfigError, Mismatch
from batchwright.train.attention import Backend, choose_backend, packed_inputs, use_backend
from batchwright.train.sft.isolation import refuse_leaks, verify_isolation

torch.set_num_threads(1)

# FlexAttention imports torch's compiler, which uses parts of torch that are on their way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

CPU = torch.device("cpu")
LENGTHS = (7, 1, 12, 3, 9, 1)
BOUNDS = (0, *itertools.accumulate(LENGTHS))
BACKENDS: tuple[Backend, ...] = ("segments", "sdpa", "flex")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = {**SMALL, "head_dim": 8, "sliding_window": 5}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def mistral() -> Any:
    """Every layer looks back 5 tokens."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**WINDOW))


def gemma3() -> Any:
    """Some layers look back 5 tokens, some all the way."""
    config = transformers.Gemma3TextConfig(
        **WINDOW, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3ForCausalLM(config)


def opt() -> Any:
    """Learned positions, no rotary embedding."""
    config = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=256,
    )
    return transformers.OPTForCausalLM(config)


def gemma2() -> Any:
    """Scores are capped, which torch's fused attention cannot do."""
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**WINDOW))


def falcon() -> Any:
    """Attention written by hand, which takes no backend."""
    config = transformers.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.FalconForCausalLM(config)


def mamba() -> Any:
    """No attention at all: a state runs through the row."""
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    return transformers.MambaForCausalLM(config)


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def row() -> torch.Tensor:
    return torch.randint(2, 97, (BOUNDS[-1],), generator=torch.Generator().manual_seed(1))


def inputs() -> dict[str, Any]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return packed_inputs(torch.tensor(BOUNDS, dtype=torch.int32), positions)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [llama, mistral, gemma3, opt])
def test_a_sample_in_a_row_has_the_logits_it_has_alone(
    make: Callable[[], Any], backend: Backend
) -> None:
    model, ids = made(make), row()
    with torch.no_grad():
        alone = torch.cat(
            [
                model(ids[None, a:b], use_cache=False).logits[0]
                for a, b in itertools.pairwise(BOUNDS)
            ]
        )
        use_backend(model, backend)
        packed = model(ids[None], **inputs()).logits[0]

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [llama, mistral, gemma3, opt])
def test_changing_a_sample_moves_no_other_by_a_single_bit(
    make: Callable[[], Any], backend: Backend
) -> None:
    model, ids = made(make), row()
    use_backend(model, backend)
    with torch.no_grad():
        before = model(ids[None], **inputs()).logits[0]
        for first, last in itertools.pairwise(BOUNDS):
            changed = ids.clone()
            changed[first:last] = (changed[first:last] + 1) % 97
            after = model(changed[None], **inputs()).logits[0]
            moved = (after != before).any(1)
            assert moved[first:last].all()
            assert not moved[:first].any()
            assert not moved[last:].any()


@pytest.mark.parametrize("backend", ["segments", "sdpa"])
@pytest.mark.parametrize("make", [llama, mistral])
def test_gradients_are_those_of_the_samples_alone(
    make: Callable[[], Any], backend: Backend
) -> None:
    model, ids = made(make), row()

    def gradient(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        model.zero_grad()
        run().logsumexp(-1).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    alone = gradient(
        lambda: torch.cat(
            [
                model(ids[None, a:b], use_cache=False).logits[0]
                for a, b in itertools.pairwise(BOUNDS)
            ]
        )
    )
    use_backend(model, backend)
    packed = gradient(lambda: model(ids[None], **inputs()).logits[0])

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_rows_pass_through_a_backend_unchanged(backend: Backend) -> None:
    model = made(mistral)
    rows = row()[:32].reshape(2, 16)
    with torch.no_grad():
        own = model(rows, use_cache=False).logits
        use_backend(model, backend)
        through = model(rows, use_cache=False).logits

    torch.testing.assert_close(through, own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["segments", "sdpa"])
def test_a_backend_refuses_what_it_would_compute_wrongly(backend: Backend) -> None:
    model = made(gemma2)
    use_backend(model, backend)

    with pytest.raises(
        ConfigError, match=f"softcap, which the {backend} backend does not"
    ) as caught:
        model(row()[None], **inputs())
    assert "\n" not in str(caught.value)


def test_flex_computes_capped_scores() -> None:
    model, ids = made(gemma2), row()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        alone = torch.cat(
            [
                model(ids[None, a:b], use_cache=False).logits[0]
                for a, b in itertools.pairwise(BOUNDS)
            ]
        )
        use_backend(model, "flex")
        packed = model(ids[None], **inputs()).logits[0]

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_takes_no_backend_is_refused(backend: Backend) -> None:
    with pytest.raises(ConfigError, match="FalconForCausalLM has a hard-coded attention"):
        use_backend(made(falcon), backend)


def test_a_model_that_leaks_beside_its_attention_is_found_out() -> None:
    model = made(mamba)
    use_backend(model, "segments")

    with pytest.raises(Mismatch, match="leaks"):
        refuse_leaks(model, "segments", CPU)


def test_a_model_that_keeps_samples_apart_passes() -> None:
    model = made(llama)
    use_backend(model, "segments")

    refuse_leaks(model, "segments", CPU)


def test_flash_without_cuda_is_refused() -> None:
    with pytest.raises(ConfigError, match="flash needs CUDA"):
        choose_backend("flash", CPU)


def test_flex_cannot_train_on_the_cpu_but_can_be_verified() -> None:
    with pytest.raises(ConfigError, match="no backward pass on the CPU"):
        choose_backend("flex", CPU)
    assert choose_backend("flex", CPU, training=False) == "flex"


def test_auto_takes_segments_on_the_cpu_and_not_flash_on_cuda_without_its_package() -> None:
    assert choose_backend("auto", CPU) == "segments"
    if not torch.cuda.is_available():
        assert choose_backend("auto", torch.device("cuda")) in ("flash", "flex")


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_proves_isolation_on_tiny(backend: Backend) -> None:
    proof = verify_isolation("tiny", backend, segments=4, tokens=60, seed=3)

    assert proof.backend == backend
    assert len(proof.lengths) == 4
    assert sum(proof.lengths) == 60
    assert min(proof.lengths) >= 1
    assert all(moved > 0 for moved in proof.own)
    assert proof.others == (0.0,) * 4
    assert 0 < proof.against_alone < 1e-5


@pytest.mark.parametrize(("segments", "tokens"), [(1, 50), (6, 11), (3, 10_000)])
def test_verify_refuses_rows_that_prove_nothing(segments: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="cannot be tested"):
        verify_isolation("tiny", segments=segments, tokens=tokens)


def attend_to_everything_before(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention that knows nothing of samples."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def test_verify_finds_an_attention_that_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchwright.train import attention

    monkeypatch.setattr(attention, "_attend_by_segment", attend_to_everything_before)

    with pytest.raises(
        Mismatch, match="segments attention leaks: perturbing sample 0 of 5"
    ) as found:
        verify_isolation("tiny", "segments")
    assert "\n" not in str(found.value)


def test_verify_finds_an_attention_that_changes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart, but each token sees itself alone."""
    from batchwright.train import attention

    def attend_to_itself(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        repeated = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return repeated.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(attention, "_attend_by_segment", attend_to_itself)

    with pytest.raises(Mismatch, match="changes the model"):
        verify_isolation("tiny", "segments")


def test_training_refuses_an_attention_that_leaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from batchwright.train import attention
    from batchwright.train.sft.config import SftConfig
    from batchwright.train.sft.loop import train_sft

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(8)))
    config = SftConfig(
        model="tiny",
        data=str(data),
        pack=True,
        pack_max_len=64,
        token_budget=64,
        run_dir=tmp_path / "run",
    )
    monkeypatch.setattr(attention, "_attend_by_segment", attend_to_everything_before)

    with pytest.raises(Mismatch, match="leaks"):
        train_sft(config)
    # Nothing began, so the same place can be used again.
    monkeypatch.undo()
    assert train_sft(config).finished
