"""Models load by name, are the same everywhere, and every wrong name is one sentence."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import (
    BadFile,
    BatchwrightError,
    ConfigError,
    Mismatch,
    MissingFile,
    NoTokenizer,
)
from batchwright.models import registry as models
from batchwright.models.transformers import context_length, load_model, tokenizer_for

TINY = "a89f4ce596e985aabcba0e55853dcd79c62e900c3f1a0e6f3b1de17447d38916"
"""SHA-256 of the weights of `tiny`: what is trained from it can be compared over machines."""


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty model folder, an empty hub cache and no hub."""
    from huggingface_hub import constants

    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def weights_hash(model: torch.nn.Module) -> str:
    hasher = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        hasher.update(name.encode() + weight.detach().float().numpy().tobytes())
    return hasher.hexdigest()


def failure(kind: type[BatchwrightError], name: str | Path, **options: str) -> str:
    with pytest.raises(kind) as caught:
        load_model(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def saved(folder: Path, *, words: int = 300) -> Path:
    """A folder as `save_pretrained` writes it, with a tokenizer of `words` words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    load_model("tiny").model.save_pretrained(folder)
    vocabulary = {f"w{number}": number for number in range(words - 1)} | {"</s>": words - 1}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def test_tiny_has_the_same_weights_in_every_process() -> None:
    code = """
import sys, torch
torch.manual_seed(int(sys.argv[1])); torch.set_num_threads(int(sys.argv[1]))
sys.path.insert(0, sys.argv[2])
from test_train_models import load_model, weights_hash
print(weights_hash(load_model("tiny").model))
"""
    command = [sys.executable, "-c", code, "1", str(Path(__file__).parent)]
    other = subprocess.run(command, capture_output=True, text=True, check=True)

    assert weights_hash(load_model("tiny").model) == other.stdout.strip() == TINY


def test_loading_tiny_leaves_the_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_model("tiny")

    assert torch.equal(torch.rand(3), expected)


def test_tiny_begins_at_chance_and_learns() -> None:
    model, tokenizer, info = load_model("tiny")
    text = tokenizer.encode_batch(["hello hello hello"], special=True)
    ids = torch.tensor([[int(id) for id in text[0]]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert losses[0] == pytest.approx(math.log(info.vocabulary), rel=0.05)
    assert losses[-1] < losses[0] - 0.5


def test_tiny_says_what_it_is_made_of() -> None:
    model, _, info = load_model("tiny", dtype=torch.bfloat16)

    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert 1_000_000 < info.parameters < 2_000_000
    assert info.bytes == 2 * info.parameters
    assert context_length(model) == info.context == 8192
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # Positions in half precision would be wrong from 256 on.
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_text_has_ids_that_tiny_knows_and_comes_back(text: str) -> None:
    tokenizer = tokenizer_for("tiny")
    ids = tokenizer.encode_batch([text], special=True)[0]

    assert max([*map(int, ids), tokenizer.pad_id, tokenizer.eos_id or 0]) < 320
    assert tokenizer.decode(ids) == text


def test_a_saved_folder_gives_the_same_model_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    loaded = load_model(folder)

    assert weights_hash(loaded.model) == TINY
    assert loaded.tokenizer.vocab_size == 300
    assert loaded.info.vocabulary == 320
    assert tokenizer_for(folder).fingerprint == loaded.tokenizer.fingerprint


def test_half_precision_is_of_the_parameters_only_in_a_folder_too(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path / "saved"), dtype=torch.bfloat16).model

    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_hub_id_in_the_local_cache_needs_no_hub(tmp_path: Path) -> None:
    place = tmp_path / "hub" / "models--some--model"
    saved(place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")

    assert weights_hash(load_model("some/model").model) == TINY


def test_a_hub_id_that_cannot_be_had_names_the_ways_out() -> None:
    sentence = failure(MissingFile, "nobody/nothing")

    assert "not in the local Hugging Face cache" in sentence
    assert "one of smollm2, tiny, or set HF_HOME" in sentence


def test_the_limit_is_found_under_its_older_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 77, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 4}
    assert context_length(GPT2LMHeadModel(GPT2Config(**sizes))) == 77


def test_a_folder_that_is_no_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    assert "has no config.json" in failure(MissingFile, tmp_path)
    assert "is a file" in failure(ConfigError, saved(tmp_path / "a") / "config.json")
    assert "no model at" in failure(MissingFile, tmp_path / "nowhere")
    (tmp_path / "a" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in failure(MissingFile, tmp_path / "a")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    load_model(folder).model.save_pretrained(folder, max_shard_size="2MB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert weights_hash(load_model(folder).model) == TINY
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.unlink()

    assert f"{shard.name} is missing" in failure(MissingFile, folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "is not an index of weights" in failure(BadFile, folder)


def test_cut_weights_are_refused(tmp_path: Path) -> None:
    weights = saved(tmp_path / "saved") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    assert "cannot be loaded" in failure(BadFile, tmp_path / "saved")


def test_a_weight_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    weights = saved(tmp_path / "saved") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})

    sentence = failure(BadFile, tmp_path / "saved")
    assert "lacks 1 of the model's weights, model.layers.1.mlp.up_proj.weight first" in sentence


def test_a_tokenizer_must_be_there_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has 321 ids" in failure(Mismatch, saved(tmp_path / "saved", words=321))
    (tmp_path / "saved" / "tokenizer.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert "has no tokenizer.json" in failure(NoTokenizer, "saved")


def test_a_model_that_was_not_fetched_names_the_command() -> None:
    assert "batchwright models get smollm2" in failure(MissingFile, "smollm2")


def test_a_device_that_is_not_there_is_refused() -> None:
    assert "unknown device tpu9" in failure(ConfigError, "tiny", device="tpu9")
    assert "device cuda:99 is not available" in failure(ConfigError, "tiny", device="cuda:99")
    with pytest.raises(ConfigError, match=r"cannot be trained in torch\.int8"):
        load_model("tiny", dtype=torch.int8)


@pytest.mark.slow
def test_smollm2_becomes_trainable_once_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="the GGUF loader of transformers needs gguf")
    pytest.importorskip("accelerate", reason="the GGUF loader of transformers needs accelerate")
    models.get("smollm2")
    model, tokenizer, info = load_model("smollm2")

    assert (info.parameters, info.context, info.vocabulary) == (134_515_008, 8192, 49_152)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.prefix) == (49_152, 2, ())
    # One space before a number stands alone, two are one token: digits are split off first.
    decode = load_tokenizer(models.find("smollm2").folder / "transformers").decode
    ids = tokenizer.encode_batch(["7  45"], special=True)[0]
    assert [decode([id]) for id in ids] == ["7", "  ", "4", "5"]

    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.chat.render(asked, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode_batch([prompt], special=True)[0]])
    mask = torch.ones_like(ids)
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :].tolist())

    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    ids = torch.tensor([tokenizer.encode_batch([text], special=True)[0]])
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() < 2.5
    assert all(p.grad is not None for p in model.parameters())

    # The trainable copy stands by itself now.
    models.find("smollm2").place.unlink()
    assert weights_hash(load_model("smollm2").model) == weights_hash(model)


def test_a_model_on_meta_has_every_size_and_reads_no_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    whole = load_model(folder).info
    (folder / "model.safetensors").write_bytes(b"not weights")

    model, _, info = load_model(folder, device="meta")

    assert info == whole
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert load_model("tiny", device="meta").info == load_model("tiny").info
    with pytest.raises(BadFile):
        load_model(folder)
