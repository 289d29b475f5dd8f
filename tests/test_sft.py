"""The loop: one loss whatever the layout, exact resume, and what a run leaves behind."""

import dataclasses
import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, collate
from batchwright.data.measure import build_lengths
from batchwright.data.rows.sample import Sample, encode_row
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from batchwright.data.tokens import make_store
from batchwright.errors import (
    BadFile,
    BadLoss,
    BatchwrightError,
    ConfigError,
    Mismatch,
    NoLoss,
    OversizedSample,
)
from batchwright.events import read_events
from batchwright.models.transformers import load_model
from batchwright.train.attention import use_backend
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import learning_rate, microbatch_loss, train_sft
from batchwright.train.sft.predict import predict

torch.set_num_threads(1)

CPU = torch.device("cpu")
BYTES = load_tokenizer("bytes")
WORDS = ("the", "quick", "otter", "counts", "tokens", "while", "it", "dives")


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "id": f"s{seed}-{number:02d}",
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 9))),
            "completion": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 9))),
        }
        for number in range(count)
    ]


def written(path: Path, given: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    """Some twenty short samples, a handful of steps."""
    return SftConfig(
        model="tiny",
        data=written(tmp_path / "train.jsonl", rows(20)),
        layout="packed",
        pack_max_len=128,
        token_budget=256,
        lr=1e-3,
        warmup_steps=2,
        run_dir=tmp_path / "run",
    )


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The last record of each step."""
    found = {
        e.fields["step"]: dict(e.fields)
        for e in read_events(run / "events.jsonl")
        if e.kind == "step"
    }
    return [found[step] for step in sorted(found)]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in steps_of(run)]


def newest(run: Path, part: str = "model") -> dict[str, torch.Tensor]:
    """The arrays of the newest checkpoint under this name."""
    folder = max((run / "checkpoints").glob("step_*"))
    found = load_file(folder / "arrays.safetensors")
    return {k.removeprefix(f"{part}/"): v for k, v in found.items() if k.startswith(f"{part}/")}


def same_weights(a: Path, b: Path) -> bool:
    for part in ("model", "optimizer"):
        one, other = newest(a, part), newest(b, part)
        if one.keys() != other.keys() or not all(torch.equal(one[k], other[k]) for k in one):
            return False
    return True


def gradient(run: Path) -> torch.Tensor:
    """The gradient of a run of one step: AdamW's first moment is a tenth of it."""
    moments = newest(run, "optimizer")
    named = sorted(name for name in moments if name.endswith("/exp_avg"))
    return torch.cat([moments[name].double().flatten() * 10 for name in named])


def elsewhere(config: SftConfig, name: str, **changes: Any) -> SftConfig:
    return dataclasses.replace(config, run_dir=config.run_dir.parent / name, **changes)


def by_hand(model: Any, samples: list[Sample]) -> tuple[float, int]:
    """Sum of the loss over response tokens and their number, token by token."""
    total, count = 0.0, 0
    for sample in samples:
        ids = sample.input_ids.tolist()
        with torch.no_grad():
            scores = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        for place in range(1, len(ids)):
            if sample.loss_mask[place]:
                total -= float(scores[place - 1, ids[place]])
                count += 1
    return total, count


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "pack_max_length": 128},
    "sorted": {"layout": "sorted"},
    "bucketed": {"layout": "bucketed", "bucket_edges": (32, 64), "overflow_max": 256},
    "one by one": {"layout": "packed", "pack_max_length": 128, "pack_max_segments": 1},
    "multiples": {"layout": "packed", "pack_max_length": 128, "segment_multiple": 16},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_loss_of_its_samples_one_at_a_time(
    tmp_path: Path, layout: str
) -> None:
    store = make_store(open_source(written(tmp_path / "rows.jsonl", rows(20))), BYTES)[0]
    model = load_model("tiny").model
    expected, count = by_hand(model, [store(item) for item in range(len(store))])
    plan = BatchPlanBuilder(
        store.lengths, BatchingConfig(token_budget=256, **LAYOUTS[layout])
    ).build()
    if plan.config.layout == "packed":
        use_backend(model, "segments")
    batches = [collate(batch, store, pad_id=256) for batch in plan.iter_epoch(0)]
    with torch.no_grad():
        found = sum(float(microbatch_loss(model, batch, CPU)) for batch in batches)

    assert sum(batch.num_loss_tokens for batch in batches) == count
    assert found / count == pytest.approx(expected / count, abs=1e-5)


@pytest.mark.parametrize("keeps", [True, False])
def test_logits_are_made_where_they_are_wanted_and_the_loss_is_the_same(
    tmp_path: Path, keeps: bool
) -> None:
    model = load_model("tiny").model
    samples = [encode_row(row, BYTES, str(n)) for n, row in enumerate(rows(6))]
    plan = BatchPlanBuilder(
        {s.sample_id: len(s) for s in samples}, BatchingConfig(layout="sorted", token_budget=999)
    ).build()
    order = {name: number for number, name in enumerate(plan.ids)}
    by_item = {order[s.sample_id]: s for s in samples}
    (batch,) = (collate(b, by_item.__getitem__) for b in plan.iter_epoch(0))
    with torch.no_grad():
        found = float(microbatch_loss(model, batch, CPU, keeps))

    assert found == pytest.approx(by_hand(model, samples)[0], rel=1e-5)


@pytest.mark.parametrize("layout", ["packed", "sorted"])
def test_a_filler_adds_neither_loss_nor_gradient(tmp_path: Path, layout: str) -> None:
    store = make_store(open_source(written(tmp_path / "rows.jsonl", rows(5))), BYTES)[0]
    model = load_model("tiny").model
    plan = BatchPlanBuilder(
        store.lengths, BatchingConfig(token_budget=256, **LAYOUTS[layout])
    ).build()
    if layout == "packed":
        use_backend(model, "segments")
    filler = collate(plan.batch(0, 0).as_filler(), store)
    loss = microbatch_loss(model, filler, CPU)
    loss.backward()

    assert filler.num_loss_tokens == 0
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


SORTED: dict[str, Any] = {"layout": "sorted", "pack_max_len": 2048}
"""Another layout than that of the fixture, without the width of its packed rows."""

GROUPINGS: dict[str, dict[str, Any]] = {
    "sorted": {**SORTED, "token_budget": 4096},
    "bucketed": {**SORTED, "layout": "bucketed", "bucket_edges": "32,64", "step_size": 99},
    "small microbatches": {"token_budget": 128, "step_size": 99},
    "accumulated": {"token_budget": 256, "grad_accum": 99},
    "padded and accumulated": {**SORTED, "token_budget": 128, "grad_accum": 99},
    "dense mask": {"attention": "sdpa", "token_budget": 512, "step_size": 99},
    "checkpointed": {"activation_checkpointing": True, "token_budget": 512, "step_size": 99},
}


def test_neither_shape_nor_accumulation_changes_the_gradient(config: SftConfig) -> None:
    config = dataclasses.replace(config, clip=0.0, token_budget=4096)
    whole = train_sft(config)
    expected = gradient(config.run_dir)
    assert whole.step == 1
    assert expected.norm() > 1
    for name, changes in GROUPINGS.items():
        other = elsewhere(config, name.replace(" ", "_"), **changes)
        result = train_sft(other)
        (record,) = steps_of(other.run_dir)

        assert result.step == 1, name
        assert result.first_loss == pytest.approx(whole.first_loss, abs=1e-5), name
        assert record["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5), name
        torch.testing.assert_close(gradient(other.run_dir), expected, atol=1e-5, rtol=0)


def test_the_first_loss_is_that_of_the_response_tokens_by_hand(config: SftConfig) -> None:
    config = dataclasses.replace(config, token_budget=4096)
    result = train_sft(config)
    samples = [encode_row(row, BYTES, "") for row in rows(20)]
    total, count = by_hand(load_model("tiny").model, samples)
    (record,) = steps_of(config.run_dir)

    assert result.first_loss == pytest.approx(total / count, abs=1e-5)
    assert record["loss_tokens"] == count < sum(len(s) for s in samples) == record["tokens"]


def test_a_run_learns_and_says_so(config: SftConfig) -> None:
    config = dataclasses.replace(config, epochs=3)
    told: list[tuple[int, int, float]] = []
    result = train_sft(config, progress=lambda done, all_, loss: told.append((done, all_, loss)))
    records = steps_of(config.run_dir)

    assert result.finished
    assert result.first_loss is not None
    assert result.last_loss is not None
    assert result.last_loss < result.first_loss - 0.3
    assert [r["loss"] for r in records] == [loss for _, _, loss in told]
    assert told[-1][:2] == (result.step, result.step)
    assert result.useful_tokens == sum(r["tokens"] for r in records)
    assert result.padded_tokens == sum(r["padded"] for r in records)
    assert result.ullage == 1 - result.useful_tokens / result.padded_tokens
    assert result.backend == "segments"


def test_a_run_directory_holds_everything(config: SftConfig) -> None:
    result = train_sft(config)
    run = config.run_dir
    kinds = [event.kind for event in read_events(run / "events.jsonl")]

    assert sorted(p.name for p in run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "events.jsonl",
        "finished.json",
        "model",
        "plan",
        "stamp.json",
        "tokens",
    ]
    assert SftConfig.load(run / "config.toml") == config
    stamp = json.loads((run / "stamp.json").read_text())
    assert stamp["seed"] == 42
    assert stamp["world"] == 1
    assert stamp["versions"]["torch"] == torch.__version__
    assert str(Path.home()) not in (run / "stamp.json").read_text()
    assert kinds == ["start", *["step"] * result.step, "stop"]
    for number, record in enumerate(steps_of(run), start=1):
        assert record["step"] == number
        assert record.keys() >= {
            "loss",
            "lr",
            "grad_norm",
            "tokens",
            "padded",
            "useful",
            "tokens_per_s",
            "data_wait_s",
            "epoch",
            "first",
        }
        assert record["useful"] == record["tokens"] / record["padded"] <= 1
    *_, stop = read_events(run / "events.jsonl")
    assert stop.fields["why"] == "done"
    assert stop.fields["ullage"] == pytest.approx(result.ullage)


def test_the_trained_model_opens_in_transformers(config: SftConfig) -> None:
    from transformers import AutoModelForCausalLM

    train_sft(config)
    model = AutoModelForCausalLM.from_pretrained(config.run_dir / "model")
    trained = newest(config.run_dir)

    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("layout", ["packed", "sorted"])
def test_a_stopped_run_goes_on_to_the_bit(config: SftConfig, layout: Any) -> None:
    changes = SORTED if layout == "sorted" else {}
    config = dataclasses.replace(config, **changes, epochs=2, weight_decay=0.1)
    whole = train_sft(config)
    assert whole.step > 6
    for stop in (1, whole.step // 2, whole.step - 1):
        part = elsewhere(config, f"stop{stop}", stop_after=stop)
        stopped = train_sft(part)
        assert not stopped.finished
        assert stopped.step == stop
        assert not (part.run_dir / "model").exists()
        rest = train_sft(dataclasses.replace(part, stop_after=0), resume=True)

        assert rest.finished
        assert losses(part.run_dir) == losses(config.run_dir)
        assert same_weights(part.run_dir, config.run_dir)
    assert whole.last_loss == rest.last_loss


def test_a_run_in_many_pieces_is_still_the_same(config: SftConfig) -> None:
    config = dataclasses.replace(config, epochs=2, eval_fraction=0.3, eval_every=2)
    whole = train_sft(config)
    pieces = elsewhere(config, "pieces", stop_after=2)
    result = train_sft(pieces)
    while not result.finished:
        result = train_sft(pieces, resume=True)

    assert losses(pieces.run_dir) == losses(config.run_dir)
    assert same_weights(pieces.run_dir, config.run_dir)
    assert result.eval_loss == whole.eval_loss


def test_dropout_goes_on_to_the_bit_as_well(config: SftConfig, dropping: Path) -> None:
    config = dataclasses.replace(
        config, model=str(dropping), tokenizer="bytes", lora_rank=2, **SORTED
    )
    whole = train_sft(config)
    part = elsewhere(config, "part", stop_after=2)
    train_sft(part)
    train_sft(dataclasses.replace(part, stop_after=0), resume=True)
    other_seed = elsewhere(config, "seed", seed=43, max_steps=1, warmup_steps=1)
    train_sft(other_seed)

    assert whole.step > 3
    assert losses(part.run_dir) == losses(config.run_dir)
    assert same_weights(part.run_dir, config.run_dir)


@pytest.fixture
def dropping(tmp_path: Path) -> Path:
    """`tiny` as a folder, with dropout in its attention."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    model = load_model("tiny").model
    model.config.attention_dropout = 0.3
    folder = tmp_path / "dropping"
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(299)} | {"</s>": 299}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def test_dropout_drops(config: SftConfig, dropping: Path) -> None:
    config = dataclasses.replace(config, max_steps=1, warmup_steps=1)
    without = train_sft(config)
    dropped = train_sft(elsewhere(config, "with", model=str(dropping), tokenizer="bytes"))

    assert dropped.first_loss != pytest.approx(without.first_loss, abs=1e-6)


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(config: SftConfig) -> None:
    config = dataclasses.replace(config, save_every=2, keep=3)
    train_sft(config)
    part = elsewhere(config, "part", stop_after=5)
    train_sft(part)
    kept = sorted(p.name for p in (part.run_dir / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000004", "step_00000005"]
    torn = part.run_dir / "checkpoints" / "step_00000005" / "arrays.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    train_sft(dataclasses.replace(part, stop_after=0), resume=True)
    resumed = [e for e in read_events(part.run_dir / "events.jsonl") if e.kind == "resume"]

    assert resumed[0].fields["step"] == 4
    assert "step_00000005" in resumed[0].fields["passed_over"][0]
    assert losses(part.run_dir) == losses(config.run_dir)
    assert same_weights(part.run_dir, config.run_dir)


def test_checkpoints_of_other_settings_plans_and_models_are_refused(config: SftConfig) -> None:
    part = dataclasses.replace(config, stop_after=1)
    train_sft(part)
    seed = elsewhere(config, "seed", stop_after=1, seed=7)
    train_sft(seed)
    with Path(config.data[0]).open("a") as rows:
        rows.write('{"prompt": "more", "completion": " rows"}\n')
    plan = elsewhere(config, "plan", stop_after=1)
    train_sft(plan)

    for other, why in ((seed, "is of another run"), (plan, "belongs to plan")):
        shutil.rmtree(config.run_dir / "checkpoints")
        shutil.copytree(other.run_dir / "checkpoints", config.run_dir / "checkpoints")
        with pytest.raises(Mismatch, match=why):
            train_sft(part, resume=True)
    with pytest.raises(BatchwrightError):
        train_sft(elsewhere(config, "nothing"), resume=True)


def test_more_epochs_can_be_added_to_a_finished_run(config: SftConfig) -> None:
    config = dataclasses.replace(config, schedule="constant", warmup_steps=0)
    whole = train_sft(elsewhere(config, "whole", epochs=2))
    first = train_sft(config)
    again = train_sft(config, resume=True)
    second = train_sft(dataclasses.replace(config, epochs=2), resume=True)

    assert again.finished
    assert again.step == first.step
    assert again.first_loss is None
    assert second.step == whole.step == 2 * first.step
    assert losses(config.run_dir) == losses(config.run_dir.parent / "whole")


def test_max_steps_ends_a_run(config: SftConfig) -> None:
    result = train_sft(dataclasses.replace(config, max_steps=2, epochs=9))

    assert result.finished
    assert result.step == 2
    assert (config.run_dir / "model" / "config.json").is_file()


def test_adapters_train_alone_and_go_on_to_the_bit(config: SftConfig) -> None:
    config = dataclasses.replace(config, lora_rank=2, lr=1e-2)
    whole = train_sft(config)
    part = elsewhere(config, "part", stop_after=3)
    train_sft(part)
    train_sft(dataclasses.replace(part, stop_after=0), resume=True)
    names = newest(config.run_dir).keys()

    assert whole.last_loss is not None
    assert whole.first_loss is not None
    assert whole.last_loss < whole.first_loss
    assert names
    assert all("lora_" in name for name in names)
    assert (config.run_dir / "model" / "adapter_config.json").is_file()
    assert predict(config).trained == sum(w.numel() for w in newest(config.run_dir).values())
    assert losses(part.run_dir) == losses(config.run_dir)
    assert same_weights(part.run_dir, config.run_dir)


def test_saved_adapters_give_the_trained_model(config: SftConfig) -> None:
    from peft import PeftModel

    config = dataclasses.replace(
        config,
        lora_rank=2,
        lr=1e-2,
        eval_data=written(config.run_dir.parent / "e.jsonl", rows(5, 1)),
    )
    result = train_sft(config)
    model = PeftModel.from_pretrained(load_model("tiny").model, config.run_dir / "model").eval()
    total, count = by_hand(model, [encode_row(row, BYTES, "") for row in rows(5, 1)])

    assert result.eval_loss == pytest.approx(total / count, abs=1e-5)


def test_held_out_loss_is_that_of_the_final_model_on_the_rows_by_hand(config: SftConfig) -> None:
    from transformers import AutoModelForCausalLM

    given = rows(7, 1)
    config = dataclasses.replace(
        config, eval_data=written(config.run_dir.parent / "eval.jsonl", given), eval_every=2
    )
    result = train_sft(config)
    model = AutoModelForCausalLM.from_pretrained(config.run_dir / "model")
    total, count = by_hand(model, [encode_row(row, BYTES, "") for row in given])
    told = [e.fields for e in read_events(config.run_dir / "events.jsonl") if e.kind == "eval"]

    assert result.eval_loss == pytest.approx(total / count, abs=1e-5)
    assert [fields["step"] for fields in told] == [*range(2, result.step, 2), result.step]
    assert told[-1]["loss"] == result.eval_loss < told[0]["loss"]


def planned(run: Path, part: str = "") -> set[str]:
    plan = BatchPlan.load(run / f"{part}plan")
    return {name for batch in plan.iter_epoch(0) for name in batch.samples}


def test_the_same_samples_are_held_out_whatever_the_order_and_none_is_trained_on(
    config: SftConfig,
) -> None:
    config = dataclasses.replace(config, eval_fraction=0.3, max_steps=1, warmup_steps=1)
    turned = written(config.run_dir.parent / "turned.jsonl", rows(20)[::-1])
    more = written(config.run_dir.parent / "more.jsonl", [*rows(9, 5), *rows(20)])
    held = []
    for name, data in (("a", config.data[0]), ("b", turned), ("c", more)):
        run = elsewhere(config, name, data=data)
        assert train_sft(run).eval_loss is not None
        trained, out = planned(run.run_dir), planned(run.run_dir, "eval_")
        assert not trained & out
        assert trained | out >= {row["id"] for row in rows(20)}
        held.append(out & {row["id"] for row in rows(20)})

    assert held[0] == held[1] == held[2]
    assert 1 <= len(held[0]) <= 12


@pytest.mark.parametrize(("share", "left"), [(1e-9, "evaluate"), (1 - 1e-9, "train")])
def test_a_share_that_leaves_nothing_is_refused(config: SftConfig, share: float, left: str) -> None:
    with pytest.raises(ConfigError, match=f"nothing to {left} on"):
        train_sft(dataclasses.replace(config, eval_fraction=share))


def test_what_an_earlier_attempt_held_out_is_forgotten(config: SftConfig) -> None:
    with pytest.raises(OversizedSample):
        train_sft(
            dataclasses.replace(
                config, eval_data=config.data[0], pack_max_len=8, token_budget=8, overflow="error"
            )
        )
    (config.run_dir / "eval_plan").mkdir(exist_ok=True)
    result = train_sft(config)

    assert result.eval_loss is None


SCHEDULES = ("cosine", "linear", "constant")


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    lr=st.floats(1e-6, 10),
)
def test_the_learning_rate_rises_then_falls_and_stays_inside(
    schedule: Any, total: int, warmup: int, lr: float
) -> None:
    config = SftConfig(lr=lr, schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(config, step, total) for step in range(total)]
    rising, rest = rates[:warmup], rates[warmup:]

    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates)
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(rest))
    if rest:
        assert rest[0] == pytest.approx(lr)
    if schedule == "constant":
        assert set(rest) <= {lr}
    elif len(rest) > 1:
        assert rest[-1] < lr


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.5 * (1 + math.cos(math.pi * 0.99)))])
def test_cosine_ends_near_zero(schedule: Any, last: float) -> None:
    config = SftConfig(lr=1.0, schedule=schedule)

    assert learning_rate(config, 99, 100) == pytest.approx(last)
    assert learning_rate(config, 100, 100) == pytest.approx(0, abs=1e-12)
    assert learning_rate(config, 50, 100) == pytest.approx(0.5)


def test_the_rate_in_the_log_is_the_schedules(config: SftConfig) -> None:
    result = train_sft(config)
    expected = [learning_rate(config, step, result.step) for step in range(result.step)]

    assert [record["lr"] for record in steps_of(config.run_dir)] == expected


def test_decay_pulls_on_matrices_and_leaves_norms_alone(config: SftConfig) -> None:
    config = dataclasses.replace(config, max_steps=1, warmup_steps=0, lr=1e-2)
    train_sft(config)
    decayed = elsewhere(config, "decayed", weight_decay=0.5)
    train_sft(decayed)
    start = dict(load_model("tiny").model.named_parameters())
    plain, pulled = newest(config.run_dir), newest(decayed.run_dir)

    assert {w.ndim for w in plain.values()} == {1, 2}
    for name, weight in plain.items():
        pull = 1e-2 * 0.5 * start[name].detach() if weight.ndim == 2 else 0
        torch.testing.assert_close(pulled[name], weight - pull, atol=1e-7, rtol=0)


def test_the_gradient_is_clipped_and_the_log_has_the_norm_before(config: SftConfig) -> None:
    config = dataclasses.replace(config, max_steps=1, warmup_steps=1, clip=0.25)
    train_sft(config)
    free = elsewhere(config, "free", clip=0.0)
    train_sft(free)
    (record,) = steps_of(config.run_dir)

    assert record["grad_norm"] == pytest.approx(float(gradient(free.run_dir).norm()), rel=1e-5)
    assert record["grad_norm"] > 1
    assert float(gradient(config.run_dir).norm()) == pytest.approx(0.25, rel=1e-4)


def test_bfloat16_runs_close_by_and_keeps_weights_in_float32(config: SftConfig) -> None:
    train_sft(config)
    half = elsewhere(config, "half", dtype="bfloat16")
    train_sft(half)

    assert losses(half.run_dir) != losses(config.run_dir)
    assert np.allclose(losses(half.run_dir), losses(config.run_dir), atol=0.05)
    assert {w.dtype for w in newest(half.run_dir).values()} == {torch.float32}


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 3},
        {**SORTED, "step_size": 3},
        {**SORTED, "layout": "bucketed", "bucket_edges": "32,64", "grad_accum": 2, "epochs": 2},
        {"max_steps": 2},
        {"eval_fraction": 0.3},
    ],
)
def test_a_prediction_is_exact_and_writes_nothing(config: SftConfig, changes: Any) -> None:
    config = dataclasses.replace(config, **changes)
    expected = predict(config)
    assert not config.run_dir.exists()
    result = train_sft(config)

    assert result.step == expected.steps
    if not config.max_steps:
        assert result.useful_tokens == expected.useful_tokens
        assert result.padded_tokens == expected.padded_tokens
        assert result.ullage == pytest.approx(expected.ullage)
    assert expected.parameters == expected.trained == 1_025_152
    assert expected.memory_bytes > 4 * 4 * expected.parameters


@pytest.mark.parametrize("mode", ["greedy", "first_fit", "best_fit", "optimal"])
def test_every_pack_mode_trains_every_sample_once_an_epoch(config: SftConfig, mode: Any) -> None:
    config = dataclasses.replace(config, pack_mode=mode, epochs=2)
    result = train_sft(config)
    tokens = sum(len(encode_row(row, BYTES, "")) for row in rows(20))

    assert result.finished
    assert result.useful_tokens == 2 * tokens


def test_long_samples_are_cut_or_split_as_asked(config: SftConfig) -> None:
    lengths = [len(encode_row(row, BYTES, "")) for row in rows(20)]
    config = dataclasses.replace(config, pack_max_len=64, token_budget=256)
    assert max(lengths) > 64
    expected = {
        "truncate": sum(min(length, 64) for length in lengths),
        "split": sum(lengths),
        "skip": sum(length for length in lengths if length <= 64),
    }
    for policy, tokens in expected.items():
        run = elsewhere(config, policy, overflow=policy)
        assert train_sft(run).useful_tokens == tokens
    with pytest.raises(OversizedSample):
        train_sft(config)


def following(config: SftConfig, plan: Path, **more: Any) -> SftConfig:
    """The same run on a plan, which has a layout of its own."""
    own = {"layout": "auto", "token_budget": 4096, "pack_max_len": 2048}
    return dataclasses.replace(config, batchplan=plan, **own, **more)  # type: ignore[arg-type]


def test_a_plan_built_before_is_followed(config: SftConfig, tmp_path: Path) -> None:
    lengths = build_lengths(config.data[0], BYTES, tmp_path / "lengths.jsonl").cache.lengths
    built = BatchingConfig(layout="packed", pack_max_length=128, token_budget=256, step_size=2)
    plan = BatchPlanBuilder(lengths, built).build(2)
    plan.save(tmp_path / "plan")
    given = following(config, tmp_path / "plan", epochs=2)
    train_sft(given)
    own = elsewhere(config, "own", step_size=2, epochs=2)
    train_sft(own)

    assert [r["first"] for r in steps_of(given.run_dir)] == [
        step.first for step in plan.iter_steps()
    ]
    assert losses(given.run_dir) == losses(own.run_dir)


def test_a_plan_for_rows_in_another_order_reads_the_right_rows(
    config: SftConfig, tmp_path: Path
) -> None:
    turned = written(tmp_path / "turned.jsonl", rows(20)[::-1])
    lengths = build_lengths(turned, BYTES, tmp_path / "lengths.jsonl").cache.lengths
    built = BatchingConfig(layout="packed", pack_max_length=128, token_budget=256, step_size=1)
    BatchPlanBuilder(lengths, built).build().save(tmp_path / "plan")
    train_sft(following(config, tmp_path / "plan"))
    own = elsewhere(config, "own")
    train_sft(own)

    assert losses(config.run_dir) == losses(own.run_dir)


def test_a_plan_for_other_data_or_another_tokenizer_is_refused_with_both_fingerprints(
    config: SftConfig, tmp_path: Path
) -> None:
    built = BatchingConfig(layout="packed", pack_max_length=128, token_budget=256)
    own = build_lengths(config.data[0], BYTES, tmp_path / "own.jsonl").cache.lengths
    other = build_lengths(
        written(tmp_path / "other.jsonl", rows(20, 3)), BYTES, tmp_path / "others.jsonl"
    ).cache.lengths
    foreign = dataclasses.replace(own, tokenizer_hash="feedfacefeedface")
    for number, (lengths, kind) in enumerate(((other, "data"), (foreign, "tokenizer"))):
        BatchPlanBuilder(lengths, built).build().save(tmp_path / f"plan{number}")
        with pytest.raises(Mismatch, match=f"for {kind} ") as caught:
            train_sft(following(config, tmp_path / f"plan{number}"))
        name = f"{'dataset' if kind == 'data' else kind}_hash"
        assert getattr(lengths, name) in str(caught.value)
        assert getattr(own, name) in str(caught.value)
    # What was refused left no run behind: the same place can be used.
    assert train_sft(config).finished


def test_a_sample_over_the_models_context_is_refused(config: SftConfig, tmp_path: Path) -> None:
    long = [*rows(3), {"id": "long", "text": "x" * 9000}]
    train = dataclasses.replace(
        config,
        data=written(tmp_path / "long.jsonl", long),
        pack_max_len=10_000,
        token_budget=10_000,
    )
    held_out = dataclasses.replace(config, eval_data=train.data[0])
    for refused in (train, held_out):
        with pytest.raises(ConfigError, match=r"9,001 tokens, the model takes 8,192"):
            train_sft(refused)
    assert train_sft(dataclasses.replace(train, overflow="skip", pack_max_len=128)).finished


def test_samples_without_loss_are_left_out_and_a_step_without_loss_changes_nothing(
    config: SftConfig, tmp_path: Path
) -> None:
    # Samples of 40 tokens fill a microbatch each; the one that is masked is the last to come.
    ready = [{"id": f"r{n}", "input_ids": [n + 1] * 40, "loss_mask": [1] * 40} for n in range(6)]
    mute = {"id": "mute", "input_ids": [9] * 40, "loss_mask": [1] + [0] * 39}
    config = dataclasses.replace(
        config, data=written(tmp_path / "r.jsonl", [*ready, mute]), token_budget=40, pack_max_len=40
    )
    with pytest.raises(NoLoss, match=r"1 of 7 samples .* loss, the first is 'mute'"):
        train_sft(config)
    skipping = dataclasses.replace(config, no_loss="skip", run_dir=tmp_path / "skipping")
    without = dataclasses.replace(
        config, data=(written(tmp_path / "six.jsonl", ready),), run_dir=tmp_path / "six"
    )
    assert train_sft(skipping).last_loss == train_sft(without).last_loss

    # The middle piece of a split sample carries no loss; a step of it alone teaches nothing.
    mask = [1] * 40 + [0] * 40 + [1] * 40
    split = {"id": "split", "input_ids": [9] * 120, "loss_mask": mask}
    parted = dataclasses.replace(
        config,
        data=(written(tmp_path / "split.jsonl", [split]),),
        overflow="split",
        run_dir=tmp_path / "parted",
    )
    result = train_sft(parted)
    records = [e.fields for e in read_events(parted.run_dir / "events.jsonl") if e.kind == "step"]
    assert (result.step, result.steps_without_loss) == (3, 1)
    assert sorted(record["loss_tokens"] for record in records) == [0, 39, 39]
    assert [record["loss"] is None for record in records].count(True) == 1


def test_a_loss_that_is_not_a_number_stops_saves_and_names_its_samples(config: SftConfig) -> None:
    config = dataclasses.replace(config, lr=1e30, warmup_steps=0, clip=0.0, schedule="constant")
    with pytest.raises(BadLoss) as caught:
        train_sft(config)
    message = str(caught.value)
    (place,) = re.findall(
        r"^step (\d+): the loss is \S+ and the gradient norm (?:nan|inf)", message
    )
    done = int(place) - 1

    assert done >= 1
    assert len(losses(config.run_dir)) == done
    assert all(math.isfinite(loss) for loss in losses(config.run_dir))
    assert "\n" not in message
    assert max((config.run_dir / "checkpoints").iterdir()).name == f"step_{done:08d}"
    plan = BatchPlan.load(config.run_dir / "plan")
    culprits = plan.batch(0, done).samples
    assert all(name in message for name in culprits[:8])
    # The saved state is the one before: going on meets the same step again.
    with pytest.raises(BadLoss, match=f"^step {place}:"):
        train_sft(config, resume=True)


def test_a_model_that_is_broken_from_the_start_is_stopped_at_step_one(
    config: SftConfig, dropping: Path
) -> None:
    from safetensors.torch import save_file

    weights = load_file(dropping / "model.safetensors")
    weights["model.norm.weight"][0] = math.inf
    save_file(weights, dropping / "model.safetensors", {"format": "pt"})
    config = dataclasses.replace(config, model=str(dropping), tokenizer="bytes", **SORTED)

    with pytest.raises(BadLoss, match=r"^step 1: the loss is"):
        train_sft(config)
    assert [p.name for p in (config.run_dir / "checkpoints").iterdir()] == ["step_00000000"]


def test_a_folder_that_holds_a_run_is_left_alone(config: SftConfig) -> None:
    train_sft(config)
    before = {p: p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file()}

    with pytest.raises(ConfigError, match="already holds a run; resume it with --resume"):
        train_sft(config)
    assert {p: p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file()} == before


def test_rows_that_are_bad_stop_the_run_or_are_counted(config: SftConfig, tmp_path: Path) -> None:
    data = written(tmp_path / "bad.jsonl", [*rows(6), {"id": "none"}])
    config = dataclasses.replace(config, data=data)
    with pytest.raises(BatchwrightError, match=r"bad\.jsonl:7"):
        train_sft(config)
    train_sft(dataclasses.replace(config, on_bad_row="skip"))
    start = next(iter(read_events(config.run_dir / "events.jsonl")))

    assert start.fields["skipped_rows"] == 1


def test_one_rank_cannot_shard(config: SftConfig) -> None:
    with pytest.raises(ConfigError, match="torchrun"):
        train_sft(dataclasses.replace(config, fsdp=True))
    assert train_sft(config).finished


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=9),
    "data": st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=9),
    "lr": st.floats(1e-300, 1e30),
    "clip": st.floats(0, 1e300),
    "bucket_edges": st.none() | st.just("1,2"),
    "pack": st.booleans(),
    "epochs": st.integers(1, 2**40),
    "track": st.lists(st.sampled_from(["tensorboard", "wandb"]), max_size=2).map(tuple),
    "run_dir": st.sampled_from([Path("runs/a b"), Path("läufe/\U0001f9a6"), Path('q"\\')]),
    "batchplan": st.none() | st.just(Path("plan")),
}


@settings(max_examples=100, deadline=None)
@given(
    fields=st.fixed_dictionaries({}, optional=FIELDS).filter(
        # A plan has its own layout, and settings that contradict it are refused.
        lambda fields: (
            not (fields.get("batchplan") and (fields.get("pack") or fields.get("bucket_edges")))
        )
    )
)
def test_settings_come_back_from_their_file(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    config = SftConfig(**fields)
    file = tmp_path_factory.getbasetemp() / "config.toml"
    file.write_bytes(config.to_toml().encode())

    assert SftConfig.load(file) == config


@pytest.mark.parametrize(
    "content", ["lr = ", 'modle = "tiny"\n', b"\xff\xfe", "lr = -1.0\n", "epochs = -1\n"]
)
def test_a_file_of_settings_that_is_wrong_is_one_sentence(
    tmp_path: Path, content: str | bytes
) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises((BadFile, ConfigError)) as caught:
        SftConfig.load(file)
    assert "\n" not in str(caught.value)


def wrong_settings() -> Iterator[dict[str, Any]]:
    for name in ("token_budget", "pack_max_len", "grad_accum", "keep"):
        yield {name: 0}
    for name in (
        "epochs",
        "step_size",
        "max_steps",
        "warmup_steps",
        "eval_every",
        "save_every",
        "stop_after",
    ):
        yield {name: -1}
    for name in ("weight_decay", "clip", "lora_rank", "lora_alpha", "lr"):
        yield from ({name: -1}, {name: math.nan}, {name: math.inf})
    yield {"lr": 0.0}
    yield {"eval_fraction": 1.0}
    yield {"eval_fraction": 0.1, "eval_data": "x"}
    yield {"eval_fraction": 0.1, "batchplan": Path("x")}
    yield {"pack": True, "layout": "sorted"}
    yield {"batchplan": Path("x"), "step_size": 2}
    yield {"batchplan": Path("x"), "pack": True}
    yield {"batchplan": Path("x"), "token_budget": 512}


@pytest.mark.parametrize("fields", list(wrong_settings()), ids=str)
def test_settings_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SftConfig(**fields)
    assert "\n" not in str(caught.value)


def test_the_same_run_twice_is_the_same(config: SftConfig) -> None:
    train_sft(config)
    again = elsewhere(config, "again")
    torch.manual_seed(1234)
    train_sft(again)

    assert losses(again.run_dir) == losses(config.run_dir)
    assert same_weights(again.run_dir, config.run_dir)


def test_a_new_run_refuses_settings_without_effect_from_python_too(config: SftConfig) -> None:
    idle = {"bucket_edges": "32,64", "online_window": 7}
    for name, value in idle.items():
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} "):
            train_sft(dataclasses.replace(config, **{name: value}))
    with pytest.raises(ConfigError, match=r"^--pack-max-len is for the packed layout, got sorted"):
        train_sft(dataclasses.replace(config, layout="auto"))
    assert not config.run_dir.exists()


def test_paths_may_be_given_as_text(config: SftConfig) -> None:
    given: Any = str(config.run_dir)
    result = train_sft(dataclasses.replace(config, run_dir=given, max_steps=1, warmup_steps=1))

    assert result.run_dir == config.run_dir
    assert SftConfig.load(config.run_dir / "config.toml").run_dir == config.run_dir


def test_a_prediction_hears_the_tokenizer(config: SftConfig, dropping: Path) -> None:
    own = dataclasses.replace(config, model=str(dropping), tokenizer="bytes")
    assert predict(own).useful_tokens == predict(config).useful_tokens
    with pytest.raises(ConfigError, match="use the model's own tokenizer"):
        predict(dataclasses.replace(config, tokenizer="gpt2"))
