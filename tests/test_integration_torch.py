"""Plans behind the real DataLoader, StatefulDataLoader, collator and model."""

import dataclasses
import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    create_segment_attention_mask,
)
from batchwright.data.lengths import LengthCache, Lengths
from batchwright.data.measure import build_lengths
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch, UnknownSample
from batchwright.integrations.torch import PlanBatchSampler, PlanCollate, PlanDataset

pytestmark = [
    # From Python 3.12 on, fork warns wherever a native library has started a thread, as torch has.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torch warns when a loader has more workers than the machine has cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning"),
    # torchdata 0.11 calls this, torch 2.13 wishes it did not.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

VOCABULARY = 50
LAYOUTS = ("bucketed", "sorted", "packed")
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def sample_of(item: int) -> Sample:
    """Tokens that follow from the row number; a third of them counts for no loss."""
    rng = np.random.default_rng(item)
    length = int(rng.integers(2, 30))
    tokens = rng.integers(1, VOCABULARY, length).astype(np.int32)
    return Sample(tokens, (rng.random(length) < 0.7).astype(np.uint8), str(item))


def build(layout: str = "packed", *, n: int = 90, epochs: int = 2, **settings: object) -> BatchPlan:
    lengths = {str(item): len(sample_of(item)) for item in range(n)}
    config = BatchingConfig(
        **{
            "layout": layout,
            "token_budget": 64,
            "bucket_edges": (8, 16),
            "overflow_max": 32,
            "pack_max_length": 32,
            **settings,
        }
    )
    return BatchPlanBuilder(lengths, config).build(epochs)


def loader_of(plan, sampler=None, *, kind=DataLoader, read=sample_of, format="auto", **options):
    return kind(
        PlanDataset(plan, read),
        batch_sampler=sampler or PlanBatchSampler(plan),
        collate_fn=PlanCollate(plan, format=format),
        **options,
    )


def indices(batches) -> list[int]:
    return [batch["microbatch"].index for batch in batches]


def places(loader) -> list[tuple[int, int]]:
    return [(batch["microbatch"].epoch, batch["microbatch"].index) for batch in loader]


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) if torch.is_tensor(left[k]) else left[k] == right[k]
        for k in left
    )


@WORKERS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_epoch_holds_every_token_of_every_sample_once(layout, workers):
    plan = build(layout)
    batches = list(loader_of(plan, format="rows", num_workers=workers))

    assert indices(batches) == list(range(plan.num_microbatches()))
    seen = []
    for batch in batches:
        for tokens, labels, positions, segments, mask in zip(
            *(batch[k] for k in ("input_ids", "labels", "position_ids", "segment_ids")),
            batch["attention_mask"],
            strict=True,
        ):
            assert torch.equal(mask, (segments >= 0).long())
            for segment in range(int(segments.max()) + 1):
                own = segments == segment
                assert torch.equal(positions[own], torch.arange(int(own.sum())))
                seen.append((tokens[own].tolist(), labels[own].tolist()))
    wanted = []
    for sample in map(sample_of, range(90)):
        counted = np.where(sample.loss_mask, sample.input_ids, -100)
        wanted.append((sample.input_ids.tolist(), [-100, *counted[1:].tolist()]))
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flat_batches_are_those_of_the_flattening_collator(layout, with_mask):
    def read(item):
        sample = sample_of(item)
        return sample if with_mask else dataclasses.replace(sample, loss_mask=sample.loss_mask | 1)

    plan = build(layout)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for batch in loader_of(plan, read=read, format="flat"):
        key = batch.pop("microbatch")
        features = []
        for sample in map(read, plan.batch(key.epoch, key.index).items.tolist()):
            feature = {"input_ids": sample.input_ids.tolist()}
            if with_mask:
                counted = np.where(sample.loss_mask, sample.input_ids, -100)
                feature["labels"] = counted.tolist()
            features.append(feature)
        expected = theirs(features)
        assert same(batch, expected)
        for name, value in expected.items():
            assert type(batch[name]) is type(value)
            assert getattr(batch[name], "dtype", None) == getattr(value, "dtype", None)


def test_packed_plans_are_flat_unless_rows_are_asked_for_and_others_are_rows():
    assert "cu_seq_lens_q" in next(iter(loader_of(build("packed"))))
    assert "segment_ids" in next(iter(loader_of(build("sorted"))))
    with pytest.raises(ConfigError, match="must be auto, rows or flat"):
        PlanCollate(build(), format="columns")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def summed_loss(model, labels, **inputs) -> float:
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, :-1].double()
    return float(
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
    )


def loss_one_by_one(model, plan, key) -> float:
    total = 0.0
    for sample in map(sample_of, plan.batch(key.epoch, key.index).items.tolist()):
        tokens = torch.from_numpy(sample.input_ids).long()[None]
        counted = torch.from_numpy(sample.loss_mask).bool()[None]
        total += summed_loss(model, tokens.where(counted, -100), input_ids=tokens)
    return total


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_batches_have_the_loss_of_their_samples_one_by_one(model, attention):
    model.set_attn_implementation(attention)
    plan = build("packed")
    assert any(plan.batch(0, index).packed for index in range(2))
    for rows, flat in itertools.islice(
        zip(loader_of(plan, format="rows"), loader_of(plan, format="flat"), strict=True), 2
    ):
        key = rows.pop("microbatch")
        alone = loss_one_by_one(model, plan, key)

        allowed = torch.from_numpy(create_segment_attention_mask(rows.pop("segment_ids").numpy()))
        # The lowest number rather than -inf: padding attends to nothing, and its softmax is
        # never looked at but must not be NaN.
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        rows["attention_mask"] = mask[:, None]
        assert summed_loss(model, **rows) == pytest.approx(alone, rel=1e-5)

        # transformers itself finds the borders where positions restart.
        flat.pop("microbatch")
        assert summed_loss(model, **flat) == pytest.approx(alone, rel=1e-5)


def test_padded_rows_go_to_the_model_as_they_are(model):
    plan = build("bucketed")
    for batch in itertools.islice(loader_of(plan), 2):
        key = batch.pop("microbatch")
        batch.pop("segment_ids")
        alone = loss_one_by_one(model, plan, key)
        assert summed_loss(model, **batch) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("step_size", ["world", 4, 7])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_share_an_epoch_evenly_and_fillers_count_nothing(world, step_size):
    plan = build(step_size=step_size)
    seen, states = [], []
    for rank in range(world):
        sampler = PlanBatchSampler(plan.shard(rank, world))
        expected = len(sampler)
        batches = list(loader_of(plan, sampler))
        assert len(batches) == expected
        for batch in batches:
            if batch["microbatch"].weight:
                seen.append(batch["microbatch"].index)
            else:
                assert (batch["labels"] == -100).all()
        states.append([batch["microbatch"].state for batch in batches])
    assert sorted(seen) == list(range(plan.num_microbatches()))
    # Whichever rank saves, the state is the same.
    assert all(state == states[0] for state in states)


def test_iterations_follow_the_epochs_and_a_broken_one_begins_again():
    plan = build()
    loader = loader_of(plan)
    sampler = loader.batch_sampler
    epoch = [[(e, i) for i in range(plan.num_microbatches(e))] for e in range(4)]

    next(iter(loader))
    assert [places(loader), places(loader)] == epoch[:2]
    sampler.set_epoch(0)
    assert places(loader) == epoch[0]
    sampler.set_epoch(3)
    sampler.set_epoch(3)
    assert places(loader) == epoch[3]
    with pytest.raises(UnknownSample, match="epoch must be at least 0"):
        sampler.set_epoch(-1)


@WORKERS
@pytest.mark.parametrize("stop", [1, 5, -1])
def test_a_plain_loader_goes_on_exactly_after_the_batch_that_was_trained_on(stop, workers):
    plan = build(step_size=6).shard(1, 2)
    whole = list(loader_of(plan))
    stop %= len(whole) + 1
    loader = loader_of(plan, num_workers=workers)
    *_, last = itertools.islice(loader, stop)
    # The state survives a JSON file and another process.
    state = json.loads(json.dumps(last["microbatch"].state))

    sampler = PlanBatchSampler(pickle.loads(pickle.dumps(plan)))
    sampler.load_state_dict(state)
    # A training loop names the epoch it is in; that must not lose the place inside it.
    sampler.set_epoch(sampler.epoch)
    rest = list(loader_of(plan, sampler, num_workers=workers))
    assert len(rest) == len(whole) - stop
    assert all(itertools.starmap(same, zip(rest, whole[stop:], strict=True)))
    assert places(loader_of(plan, sampler))[0][0] == 1


@WORKERS
@pytest.mark.parametrize("stop", [0, 5, "last", "end"])
def test_a_stateful_loader_goes_on_exactly_with_its_own_state(stop, workers):
    plan = build(step_size=6).shard(0, 2)
    options = {"kind": StatefulDataLoader, "num_workers": workers}
    first, second = ([(e, batch.index) for batch in plan.iter_epoch(e)] for e in range(2))

    loader = loader_of(plan, **options)
    if stop == "end":
        stop = len(places(loader))
        rest = second
    else:
        stop = len(first) if stop == "last" else stop
        running = iter(loader)
        for _ in range(stop):
            next(running)
        rest = first[stop:]
    state = loader.state_dict()

    resumed = loader_of(plan, **options)
    resumed.load_state_dict(state)
    assert places(resumed) == rest
    if rest is not second:
        assert places(resumed) == second


def test_persistent_workers_follow_the_epochs():
    plan = build()
    loader = loader_of(plan, num_workers=1, persistent_workers=True)
    assert [places(loader)[0][0] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("step_size", ["world", 4])
def test_two_ranks_stop_and_three_go_on_with_what_is_left(step_size):
    plan = build(step_size=step_size)
    done = []
    for rank in range(2):
        batches = itertools.islice(loader_of(plan.shard(rank, 2)), 6)
        keys = [batch["microbatch"] for batch in batches]
        done += [key.index for key in keys if key.weight]
    state = keys[-1].state
    assert state["offset"] == 0

    left = []
    for rank in range(3):
        sampler = PlanBatchSampler(plan.shard(rank, 3))
        sampler.load_state_dict(state)
        left += [key.index for (key,) in sampler if key.weight]
    assert sorted(done + left) == list(range(plan.num_microbatches()))

    # And from any step of the three on to one rank alone.
    sampler = PlanBatchSampler(plan.shard(0, 3))
    sampler.load_state_dict(state)
    at_steps = [key.state for (key,) in sampler if key.state["offset"] == 0]
    alone = PlanBatchSampler(plan)
    alone.load_state_dict(at_steps[1])
    assert [key.index for (key,) in alone] == list(
        range(at_steps[1]["microbatch"], plan.num_microbatches())
    )


def test_a_stateful_loader_may_change_the_number_of_ranks_too():
    plan = build()
    first = loader_of(plan.shard(0, 2), kind=StatefulDataLoader)
    for _ in zip(range(6), first, strict=False):
        pass
    left = []
    for rank in range(3):
        loader = loader_of(plan.shard(rank, 3), kind=StatefulDataLoader)
        loader.load_state_dict(first.state_dict())
        left += [batch["microbatch"].index for batch in loader if batch["microbatch"].weight]
    assert sorted(left) == list(range(12, plan.num_microbatches()))


def test_a_state_of_another_plan_or_inside_a_step_of_other_ranks_is_refused():
    plan = build(step_size=4)
    (key,) = next(iter(PlanBatchSampler(plan.shard(0, 2))))
    assert key.state["offset"] == 1

    PlanBatchSampler(plan.shard(1, 2)).load_state_dict(key.state)
    for others in (plan.shard(0, 3), plan.shard(0, 2, balance="round_robin"), plan):
        with pytest.raises(Mismatch, match="inside a step of 2 ranks"):
            PlanBatchSampler(others).load_state_dict(key.state)
    with pytest.raises(Mismatch, match="belongs to plan"):
        PlanBatchSampler(build(seed=1, step_size=4).shard(0, 2)).load_state_dict(key.state)
    for broken in ({}, {**key.state, "epoch": None}, [1]):
        with pytest.raises(Mismatch, match="not a state of PlanBatchSampler"):
            PlanBatchSampler(plan).load_state_dict(broken)


def rows_of(n: int, mark: str | None) -> list[dict]:
    rows = []
    for sample in map(sample_of, range(n)):
        row = {"input_ids": sample.input_ids.tolist()}
        if mark == "loss_mask":
            row["loss_mask"] = sample.loss_mask.tolist()
        if mark == "labels":
            row["labels"] = np.where(sample.loss_mask, sample.input_ids, -100).tolist()
        rows.append(row)
    return rows


@pytest.mark.parametrize("mark", ["loss_mask", "labels"])
def test_rows_give_the_same_batches_as_a_function(mark):
    plan = build()
    by_rows = loader_of(plan, read=rows_of(90, mark))
    assert all(itertools.starmap(same, zip(by_rows, loader_of(plan), strict=True)))


def test_every_token_counts_where_rows_mark_none_but_the_first_of_a_sample():
    plan = build()
    batch = next(iter(loader_of(plan, read=rows_of(90, None))))
    ignored = int((batch["labels"] == -100).sum())
    assert ignored == len(batch["cu_seq_lens_q"]) - 1


def test_rows_that_cannot_be_samples_are_refused_with_the_reason():
    plan = build(n=3, token_budget=512)
    good = rows_of(3, "labels")
    with pytest.raises(Mismatch, match="3 samples, got 2 rows"):
        PlanDataset(plan, good[:2])
    for change, reason in [
        ({"labels": [1]}, "must be of equal length"),
        ({"labels": [0] * len(good[1]["labels"])}, "neither its input_ids nor -100"),
    ]:
        rows = [good[0], {**good[1], **change}, good[2]]
        with pytest.raises(BadRow, match=f"row 1.*{reason}"):
            list(loader_of(plan, read=rows))
    with pytest.raises(BadRow, match="pass a tokenizer"):
        list(loader_of(plan, read=[{"text": "a"}] * 3))


def test_other_tokens_than_planned_are_refused():
    with pytest.raises(Mismatch, match="tokens where the plan expects"):
        list(loader_of(build(), read=lambda item: sample_of(item + 1)))


def test_cut_samples_are_read_once_and_give_their_pieces():
    plan = build("packed", overflow="split", pack_max_length=8, token_budget=16)
    total = sum(len(sample_of(item)) for item in range(90))
    assert sum(batch["input_ids"].shape[1] for batch in loader_of(plan)) == total


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_saved_plan_and_a_source_reach_workers_however_they_start(tmp_path, start):
    texts = ["héllo"[: 1 + n % 5] * (1 + n % 4) for n in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source, tokenizer = open_source(data), load_tokenizer("bytes")
    lengths = [len(text.encode()) + 1 for text in texts]
    measured = dataclasses.replace(
        Lengths.of(np.array(lengths)), tokenizer_hash=tokenizer.fingerprint
    )
    config = BatchingConfig(layout="packed", token_budget=64, pack_max_length=64)
    plan = BatchPlanBuilder(measured, config).build()
    plan.save(tmp_path / "plan")

    dataset = PlanDataset(tmp_path / "plan", source, tokenizer)
    # Places travel, not contents.
    assert len(pickle.dumps(dataset)) < 1000
    loader = DataLoader(
        dataset,
        batch_sampler=PlanBatchSampler(plan),
        collate_fn=PlanCollate(plan, pad_id=tokenizer.pad_id),
        num_workers=1,
        multiprocessing_context=start,
    )
    seen = []
    for batch in loader:
        ends = batch["cu_seq_lens_q"].tolist()
        seen += [tokenizer.decode(batch["input_ids"][0, a:b]) for a, b in itertools.pairwise(ends)]
    assert sorted(seen) == sorted(texts)

    other = dataclasses.replace(plan, tokenizer_hash="another")
    with pytest.raises(Mismatch, match="built with tokenizer another"):
        PlanDataset(other, source, tokenizer)


def test_workers_map_the_token_store_and_do_not_read_the_data_again(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"id": f"r{n}", "text": "otter"}) + "\n" for n in range(9)))
    tokenizer = load_tokenizer("bytes")
    lengths = build_lengths(data, tokenizer, tmp_path / "lengths.jsonl").cache
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout="packed", token_budget=64)).build()
    plan.save(tmp_path / "plan")
    dataset = PlanDataset(tmp_path / "plan", open_source(data), tokenizer)
    packed = pickle.dumps(dataset)
    data.unlink()

    for start in ("fork", "spawn"):
        loader = DataLoader(
            pickle.loads(packed),
            batch_sampler=PlanBatchSampler(plan),
            collate_fn=PlanCollate(plan),
            num_workers=1,
            multiprocessing_context=start,
        )
        assert sum(batch["input_ids"].numel() for batch in loader) == 9 * 6


SEEN = [{"id": f"r{n}", "text": f"row {n:02d} {'otter' * (1 + n % 4)}"} for n in range(24)]


def edited(rows: list[dict], how: str) -> list[dict]:
    """Other content of the same ids and lengths, unless `how` says so."""
    rows = [dict(row) for row in rows]
    if how == "a letter":
        rows[7]["text"] = rows[7]["text"].replace("o", "u")
    elif how == "two texts":
        rows[3]["text"], rows[7]["text"] = rows[7]["text"], rows[3]["text"]
    elif how == "a column":
        rows = [{**row, "page": n} for n, row in enumerate(rows)]
    elif how == "moved and grown":
        rows = [{"id": "more", "text": "more"}, *reversed(rows)]
    return rows


def written(path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(dataset, plan, tokenizer) -> list[str]:
    found = []
    for (key,) in PlanBatchSampler(plan):
        batch = PlanCollate(plan)([dataset[key]])
        ends = batch["cu_seq_lens_q"].tolist()
        found += [tokenizer.decode(batch["input_ids"][0, a:b]) for a, b in itertools.pairwise(ends)]
    return sorted(found)


@pytest.mark.parametrize("how", ["a letter", "two texts", "a column", "moved and grown"])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "mixture"])
def test_a_source_that_is_not_what_the_plan_was_built_from_is_refused_with_both_fingerprints(
    tmp_path, kind, stored, how
):
    tokenizer, end = load_tokenizer("bytes"), "parquet" if kind == "parquet" else "jsonl"
    config = BatchingConfig(layout="packed", token_budget=128, pack_max_length=128)
    data = written(tmp_path / f"data.{end}", SEEN)
    lengths = build_lengths(data, tokenizer, tmp_path / "lengths.jsonl").cache
    if kind == "mixture":
        other = written(tmp_path / "other.jsonl", SEEN[:5])
        others = build_lengths(other, tokenizer, tmp_path / "other.lengths.jsonl").cache
        plan = BatchPlanBuilder(
            {"a": lengths, "b": others}, config, weights={"a": 1.0, "b": 1.0}
        ).build()
    else:
        plan = BatchPlanBuilder(lengths, config).build()

    def opened():
        more = [open_source(tmp_path / "other.jsonl")] if kind == "mixture" else []
        return PlanDataset(plan, [open_source(data), *more], tokenizer)

    before = text_of(opened(), plan, tokenizer)
    written(data, edited(SEEN, how))
    if stored:
        build_lengths(data, tokenizer, tmp_path / "again.jsonl")
    if how == "moved and grown":
        assert text_of(opened(), plan, tokenizer) == before
        return
    with pytest.raises(Mismatch, match=f"for data {plan.dataset_hash}, these rows are [0-9a-f]"):
        opened()


@pytest.mark.parametrize("start", ["here", "spawn"])
def test_a_row_that_changes_while_it_is_trained_on_is_refused_when_it_is_read(tmp_path, start):
    tokenizer, data = load_tokenizer("bytes"), tmp_path / "data.jsonl"
    written(data, SEEN)
    lengths = build_lengths(data, tokenizer, tmp_path / "lengths.jsonl").cache
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout="packed", token_budget=64)).build()
    # Measured where nobody looks, so no token store stands for the rows.
    written(data, edited(SEEN, "moved and grown"))
    dataset = PlanDataset(plan, open_source(data), tokenizer)
    written(data, edited(edited(SEEN, "moved and grown"), "a letter"))
    if start == "spawn":
        dataset = pickle.loads(pickle.dumps(dataset))

    with pytest.raises(Mismatch, match=r"data\.jsonl:8 has changed"):
        text_of(dataset, plan, tokenizer)


def test_rows_that_are_not_what_the_plan_was_built_from_are_refused(tmp_path):
    rows = [{"input_ids": [n + 1, n + 2, n + 3]} for n in range(9)]
    data = written(tmp_path / "rows.jsonl", rows)
    lengths = build_lengths(data, load_tokenizer("bytes"), tmp_path / "lengths.jsonl").cache
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout="packed", token_budget=64)).build()

    for same in (rows, [{"input_ids": np.array(row["input_ids"])} for row in rows]):
        assert len(list(loader_of(plan, read=same))) == plan.num_microbatches()
        pickle.loads(pickle.dumps(PlanDataset(plan, same)))
    for others in ([{"input_ids": [1, 2, 3]}] * 9, rows[::-1]):
        with pytest.raises(Mismatch, match="the plan was built for data"):
            PlanDataset(plan, others)


def test_lengths_without_content_make_a_plan_that_fits_any_rows_of_their_lengths(tmp_path):
    tokenizer, data = load_tokenizer("bytes"), written(tmp_path / "data.jsonl", SEEN)
    config = BatchingConfig(layout="packed", token_budget=64)
    cache = LengthCache.create(tmp_path / "l.jsonl", tokenizer_hash=tokenizer.fingerprint)
    with cache:
        for row in SEEN:
            cache.add(row["id"], len(row["text"]) + 1)
    for lengths in (cache, {row["id"]: len(row["text"]) + 1 for row in SEEN}):
        plan = BatchPlanBuilder(lengths, config).build()
        dataset = PlanDataset(plan, open_source(data), tokenizer)
        assert text_of(dataset, plan, tokenizer) == sorted(row["text"] for row in SEEN)


def test_a_mixture_reads_each_source_under_its_name(tmp_path):
    sizes = {"short": 3, "long": 20}
    sources, lengths = [], {}
    for name, size in sizes.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text((json.dumps({"text": name[0] * size}) + "\n") * 10)
        sources.append(open_source(path))
        lengths[name] = np.full(10, size + 1)
    config = BatchingConfig(layout="packed", token_budget=64, pack_max_length=64)
    weights = {"short": 2.0, "long": 0.5}
    plan = BatchPlanBuilder(lengths, config, weights=weights).build()
    tokenizer = load_tokenizer("bytes")

    loader = DataLoader(
        PlanDataset(plan, sources, tokenizer),
        batch_sampler=PlanBatchSampler(plan),
        collate_fn=PlanCollate(plan),
    )
    texts = [tokenizer.decode(batch["input_ids"][0]) for batch in loader]
    assert sum(text.count("s") for text in texts) == 20 * sizes["short"]
    assert sum(text.count("l") for text in texts) == 5 * sizes["long"]
