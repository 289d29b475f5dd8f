"""What was tokenised once serves every command: kept, listed, pruned, read, mixed, planned."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.data import ids as ids_module
from batchwright.data import open_source, sample_reader
from batchwright.data.ids import Ids
from batchwright.data.lengths import LengthCache, Lengths
from batchwright.data.measure import build_lengths
from batchwright.data.rows.sample import encode_row
from batchwright.data.rows.source import row_ranges
from batchwright.data.tokenizers import ByteTokenizer, load_tokenizer
from batchwright.data.tokens import TokenStore, kept_stores, make_store
from batchwright.errors import ConfigError, NoLoss
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.prepare import open_prepared, prepare

COMMAND = Path(sys.executable).parent / "batchwright"

BYTES = load_tokenizer("bytes")
WORDS = ("otters", "hold", "hands", "while", "they", "sleep", "on", "the", "water")


def rows_of(n: int, name: str = "r") -> list[dict[str, Any]]:
    return [{"id": f"{name}{i}", "text": " ".join(WORDS[: i % 9 + 1])} for i in range(n)]


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class CountingTokenizer(ByteTokenizer):
    """Counts the texts it tokenises, in whatever thread."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    @property
    def texts(self) -> int:
        return sum(self._sizes)

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        self._sizes.append(len(texts))
        return super().encode_batch(texts, special=special)


def test_a_plans_samples_come_from_the_store_and_are_those_of_the_rows(tmp_path: Path) -> None:
    rows = rows_of(300)
    path = written(tmp_path / "rows.jsonl", rows)
    lengths = build_lengths(path, BYTES, tmp_path / "l.jsonl").cache.lengths
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout="sorted")).build()
    counting = CountingTokenizer()

    read = sample_reader([open_source(path)], counting, plan.ids)
    for item in range(len(rows)):
        expected = encode_row(rows[item], BYTES, "")
        found = read(item)
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.loss_mask.tolist() == expected.loss_mask.tolist()
        assert found.sample_id == expected.sample_id
    assert counting.texts == 0


def test_rows_that_have_moved_since_are_still_found_without_a_store(tmp_path: Path) -> None:
    rows = rows_of(50)
    path = written(tmp_path / "rows.jsonl", rows)
    lengths = build_lengths(path, BYTES, tmp_path / "l.jsonl").cache.lengths
    written(path, [{"id": "new", "text": "first now"}, *rows[::-1]])
    counting = CountingTokenizer()

    read = sample_reader([open_source(path)], counting, lengths.ids)
    assert [read(item).sample_id for item in range(50)] == [row["id"] for row in rows]
    assert read(7).input_ids.tolist() == encode_row(rows[7], BYTES, "").input_ids.tolist()
    assert counting.texts == 51


def test_runs_share_their_tokens_with_the_store_and_outlive_it(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    written(tmp_path / "rows.jsonl", rows_of(40))
    assert call("data lengths build -d rows.jsonl -t bytes -o l.jsonl", tmp_path).code == 0
    (kept,) = call("data tokens ls --format json", tmp_path).data["stores"]
    assert (kept["source"], kept["samples"], kept["state"]) == ("rows.jsonl", 40, "finished")
    config = SftConfig(model="tiny", data=str(tmp_path / "rows.jsonl"), run_dir=tmp_path / "run")
    prepare(config, counting := CountingTokenizer(), world_size=1)
    assert counting.texts == 0

    said = call("data tokens prune --older-than 0s --dry-run --format json", tmp_path).data
    assert said["removed"] == [kept["key"]]
    assert len(kept_stores()) == 1
    assert "stay with the runs" in call(f"data tokens prune {kept['key'][:6]}", tmp_path).out
    assert kept_stores() == []
    opened = open_prepared(tmp_path / "run")
    assert opened is not None
    assert opened.read(0).sample_id == "r0"
    assert call("data tokens ls", tmp_path).out.startswith("0 token stores")


def test_a_store_that_is_being_built_is_not_pruned(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", rows_of(600)))
    seen: list[Any] = []

    def meanwhile(done: int, total: int) -> None:
        stores = call("data tokens ls --format json", tmp_path).data["stores"]
        assert {store["state"] for store in stores} == {"building"}
        for flags in ("--older-than 0s", "--max-size 0B"):
            said = call(f"data tokens prune {flags} --format json", tmp_path)
            seen.append(said.data["removed"])
        named = call(f"data tokens prune {stores[0]['key']}", tmp_path)
        assert "another process is building the token store" in named.err

    store, made = make_store(source, BYTES, workers=1, progress=meanwhile)
    assert (len(store), made) == (600, 600)
    assert seen
    assert not any(seen)
    # What a killed build left may go.
    (store.path.parent / f"ab12-{'f' * 16}.partial").mkdir()
    left = call("data tokens prune --older-than 0s --format json", tmp_path).data["removed"]
    assert sorted(left) == sorted([store.path.name, f"ab12-{'f' * 16}.partial"])


def test_stores_are_listed_while_others_come_and_go(tmp_path: Path) -> None:
    kept = make_store(open_source(written(tmp_path / "rows.jsonl", rows_of(5))), BYTES)[0].path
    passing = kept.with_name("ab12-0123456789abcdef.partial")
    coming = "import os, sys\nwhile True: os.mkdir(sys.argv[1]); os.rmdir(sys.argv[1])"
    seen: list[set[str]] = []
    other = subprocess.Popen([sys.executable, "-S", "-c", coming, passing])
    try:
        while len(seen) < 200 or sum(passing.name in keys for keys in seen) < 30:
            assert other.poll() is None
            seen.append({store.key for store in kept_stores()})
    finally:
        other.kill()
        other.wait()
    assert all(kept.name in keys for keys in seen)


def test_what_to_prune_must_be_said(tmp_path: Path, call: Callable[..., Any]) -> None:
    nothing = call("data tokens prune", tmp_path)
    unknown = call("data tokens prune ffff", tmp_path)

    assert (nothing.code, unknown.code) == (1, 1)
    assert "give --older-than or --max-size" in nothing.err
    assert "0 token stores have a key that begins with 'ffff'" in unknown.err


def test_the_longest_unused_stores_go_first(tmp_path: Path, call: Callable[..., Any]) -> None:
    for number in range(3):
        store, _ = make_store(
            open_source(written(tmp_path / f"{number}.jsonl", rows_of(20 + number))), BYTES
        )
        os.utime(store.path / "manifest.json", (number, number))
    sizes = {store.source: store.size_bytes for store in kept_stores()}
    assert [*sizes] == ["2.jsonl", "1.jsonl", "0.jsonl"]
    line = f"data tokens prune --max-size {sizes['2.jsonl']}B"

    assert call(line, tmp_path).code == 0
    assert [store.source for store in kept_stores()] == ["2.jsonl"]


def test_a_damaged_store_is_made_again_and_never_copied_from(tmp_path: Path) -> None:
    rows = rows_of(60)
    path = written(tmp_path / "rows.jsonl", rows)
    store, _ = make_store(open_source(path), BYTES)
    raw = bytearray((store.path / "tokens.bin").read_bytes())
    raw[0] ^= 1
    (store.path / "tokens.bin").write_bytes(bytes(raw))
    written(path, [*rows, {"id": "new", "text": "one more"}])
    grown, tokenised = make_store(open_source(path), BYTES)

    assert tokenised == 61
    assert grown(0).input_ids.tolist() == encode_row(rows[0], BYTES, "").input_ids.tolist()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_store_after_any_change_is_the_one_of_a_fresh_build(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("changes")
    rows = rows_of(data.draw(st.integers(1, 30)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_TOKENS", str(folder / "kept"))
        path = written(folder / "rows.jsonl", rows)
        make_store(open_source(path), BYTES)
        changed = data.draw(st.permutations(rows))[: data.draw(st.integers(1, len(rows)))]
        changed = [dict(row) for row in changed]
        for place in data.draw(st.sets(st.integers(0, len(changed) - 1))):
            changed[place]["text"] += "!"
        added = rows_of(data.draw(st.integers(0, 5)), "new")
        source = open_source(written(path, [*changed, *added]))
        after, _ = make_store(source, BYTES)
        patch.setenv("BATCHWRIGHT_TOKENS", str(folder / "fresh"))
        fresh, tokenised = make_store(source, BYTES)

    assert tokenised == len(changed) + len(added)
    for file in fresh.path.iterdir():
        assert (after.path / file.name).read_bytes() == file.read_bytes()


def test_ids_can_be_ignored_or_required(tmp_path: Path, call: Callable[..., Any]) -> None:
    rows = [{"id": "a", "text": "x"}, {"text": "no id"}, {"id": "a", "text": "again"}]
    written(tmp_path / "rows.jsonl", rows)
    line = "data lengths build -d rows.jsonl -t bytes -o l.jsonl"

    repeated = call(line, tmp_path)
    assert repeated.code == 1
    assert "'a', at rows.jsonl:1 and rows.jsonl:3" in repeated.err
    assert "--ids ignore or --repeated-ids skip" in repeated.err
    required = call(f"{line} --ids require", tmp_path)
    assert required.code == 1
    assert "rows.jsonl:2: has no id" in required.err
    assert call(f"{line} --ids ignore", tmp_path).code == 0
    assert list(LengthCache.load(tmp_path / "l.jsonl").lengths.ids) == ["0", "1", "2"]
    skipped = call(f"{line} --repeated-ids skip --format json", tmp_path).data
    assert (skipped["samples"], skipped["repeated"]) == (2, 1)
    assert list(LengthCache.load(tmp_path / "l.jsonl").lengths.ids) == ["a", "1"]
    # Kept by content, the store does not make another policy forget its own.
    assert call(line, tmp_path).err == repeated.err


def test_repeated_ids_are_the_first_of_their_rows_in_batches_too(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    rows = [{"id": "a", "text": "first"}, {"id": "b", "text": "b"}, {"id": "a", "text": "other"}]
    written(tmp_path / "rows.jsonl", rows)
    data = "-d rows.jsonl -t bytes"
    call(f"data lengths build {data} -o l.jsonl --repeated-ids skip", tmp_path)
    call("data batchplan build -l l.jsonl -o plan", tmp_path)
    assert call(f"data batch generate -p plan {data} -o batches", tmp_path).code == 0
    with np.load(next((tmp_path / "batches").rglob("*.npz"))) as batch:
        arrays = {name: batch[name] for name in batch.files}

    tokens = np.concatenate([a.reshape(-1) for n, a in arrays.items() if n.endswith("input_ids")])
    assert bytes(tokens[tokens < 256].astype(np.uint8)).count(b"other") == 0


def test_an_empty_name_of_data_is_refused(tmp_path: Path) -> None:
    words = ["data", "lengths", "build", "-d", "", "-t", "bytes", "-o", "l.jsonl"]
    said = subprocess.run(
        [sys.executable, "-m", "batchwright", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 1
    assert "the name of the data is empty" in said.stderr


def test_a_pipe_is_read_once_and_for_all(tmp_path: Path, call: Callable[..., Any]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = "".join(json.dumps(row) + "\n" for row in rows_of(500))
    writer = threading.Thread(target=pipe.write_text, args=(content,))
    writer.start()
    piped = call("data lengths build -d pipe -t bytes -o piped.jsonl", tmp_path)
    writer.join()
    (tmp_path / "rows.jsonl").write_text(content)
    call("data lengths build -d rows.jsonl -t bytes -o l.jsonl", tmp_path)

    assert piped.code == 0, piped.err
    assert (tmp_path / "piped.jsonl").read_bytes() == (tmp_path / "l.jsonl").read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(content.encode()),))
    writer.start()
    squeezed = call("data lengths build -d pipe -t bytes -o squeezed.jsonl", tmp_path)
    writer.join()
    assert squeezed.code == 0, squeezed.err
    assert (tmp_path / "squeezed.jsonl").read_bytes() == (tmp_path / "l.jsonl").read_bytes()
    device = call("data lengths build -d /dev/zero -t bytes -o l.jsonl", tmp_path)
    assert device.code == 1
    assert "/dev/zero is a device" in device.err


MUTE: list[dict[str, Any]] = [
    {"id": "plain", "text": "otters hold hands"},
    {"id": "mute", "input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
    {"id": "late", "prompt": "x" * 40, "completion": "y"},
]


def test_one_of_a_thing_is_said_in_the_singular(tmp_path: Path, call: Callable[..., Any]) -> None:
    written(tmp_path / "rows.jsonl", [{"text": "a"}])
    said = [
        call(line, tmp_path).out
        for line in (
            "data lengths build -d rows.jsonl -t bytes -o l.jsonl",
            "data batchplan build -l l.jsonl -b 64 -e 1 -o plan",
            "data batchplan export -p plan -o text",
            "data batching histogram -c l.jsonl",
            "data batch generate -p plan -d rows.jsonl -t bytes -o batches",
            "data rows show rows.jsonl -t bytes",
            "data tokens ls",
            "data tokens prune --max-size 0B",
        )
    ]
    assert "1 sample, 2 tokens -> l.jsonl" in said[0]
    assert "removed 1 token store, freed" in said[-1]
    for text in said:
        assert not re.search(r"(?<![\w.,])1 \w*s\b", text), text


def test_samples_without_loss_are_refused_or_left_out_and_counted(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    written(tmp_path / "rows.jsonl", MUTE)
    measured = call("data lengths build -d rows.jsonl -t bytes -o l.jsonl --format json", tmp_path)
    assert measured.data["without_loss"] == 1
    line = "data batchplan build -l l.jsonl -b 64 --overflow-max 64 --bucket-edges 32"

    refused = call(f"{line} --dry-run", tmp_path)
    assert refused.code == 1
    assert "1 of 3 samples have no token with loss, the first is 'mute'" in refused.err
    dry = call(f"{line} --dry-run --no-loss skip", tmp_path)
    assert "skipped 1 sample without a token that carries loss" in dry.out
    assert call(f"{line} --no-loss skip -o plan", tmp_path).code == 0
    plan = BatchPlan.load(tmp_path / "plan")
    assert plan.counts.skipped_no_loss == 1
    assert plan.explain("mute") == []
    assert call("data batchplan verify -p plan -l l.jsonl", tmp_path).code == 0
    # A prompt that fills the row leaves nothing of the answer.
    cut = "data batchplan build -l l.jsonl -b 32 --overflow-max 32 --bucket-edges 16"
    truncated = call(f"{cut} --overflow truncate --dry-run", tmp_path)
    assert "2 of 3 samples have no token with loss" in truncated.err
    said = call(f"{cut} --overflow truncate --no-loss skip --dry-run", tmp_path)
    assert "skipped 2 samples" in said.out


def test_a_sample_that_is_in_no_batch_has_its_reason(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    rows = [
        *MUTE,
        {"id": "long", "text": "otter " * 40},
        {"id": "mute and long", "input_ids": [5] * 70, "loss_mask": [0] * 70},
        {"id": "short", "text": "o"},
        {"id": "mute and short", "input_ids": [5], "loss_mask": [0]},
    ]
    written(tmp_path / "rows.jsonl", rows)
    assert call("data lengths build -d rows.jsonl -t bytes -o l.jsonl", tmp_path).code == 0
    line = "data batchplan build -l l.jsonl --layout sorted --no-loss skip"
    both = f"{line} -b 64 --overflow-max 64 --overflow skip --min-length 3 -o both"
    cut = f"{line} -b 32 --overflow-max 32 --overflow truncate -o cut"
    assert (call(both, tmp_path).code, call(cut, tmp_path).code) == (0, 0)
    reasons = {
        ("both", "mute"): ("no_loss", "none of its tokens carries loss (no-loss skip)"),
        ("both", "long"): ("long", "it is longer than 64 tokens (overflow skip)"),
        ("both", "mute and long"): ("long", "it is longer than 64 tokens (overflow skip)"),
        ("both", "short"): ("short", "it is shorter than 3 tokens"),
        ("both", "mute and short"): ("short", "it is shorter than 3 tokens"),
        ("cut", "late"): ("no_loss", "none of its first 32 tokens carries loss (no-loss skip)"),
        ("cut", "mute"): ("no_loss", "none of its first 32 tokens carries loss (no-loss skip)"),
    }
    for (plan, name), (reason, sentence) in reasons.items():
        found = BatchPlan.load(tmp_path / plan)
        assert found.why_skipped(name) == reason
        if " " not in name:
            words = f"data batchplan explain {name} -p {plan}"
            assert call(words, tmp_path).out.endswith(f"\n  in no batch: {sentence}\n")
            assert call(f"{words} --format json", tmp_path).data["reason"] == reason
    assert (
        call("data batchplan explain plain -p both --format json", tmp_path).data["reason"] is None
    )
    assert BatchPlan.load(tmp_path / "cut").why_skipped("long") is None


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    weights=st.tuples(st.sampled_from([0.1, 0.5, 1.0, 2.5]), st.sampled_from([0.1, 0.5, 1.0])),
    epochs=st.integers(1, 3),
    overflow=st.sampled_from(["skip", "truncate", "split"]),
    data=st.data(),
)
def test_a_mixture_counts_the_samples_that_it_shows(
    sizes: tuple[int, int],
    weights: tuple[float, float],
    epochs: int,
    overflow: Any,
    data: st.DataObject,
) -> None:
    lengths = {
        name: data.draw(st.lists(st.integers(1, 40), min_size=size, max_size=size))
        for name, size in zip("ab", sizes, strict=True)
    }
    sources = {k: {f"{n}": length for n, length in enumerate(v)} for k, v in lengths.items()}
    config = BatchingConfig(layout="sorted", token_budget=32, overflow=overflow, overflow_max=32)
    refused = ""
    try:
        builder = BatchPlanBuilder(sources, config, weights=dict(zip("ab", weights, strict=True)))
        plan = builder.build(epochs)
    except ConfigError as error:
        refused = str(error)
    if refused:
        assert re.search("shows none|is empty|were skipped", refused)
        return
    trained = {
        name for epoch in range(epochs) for batch in plan.epoch(epoch) for name in batch.samples
    }
    true = {f"{k}/{name}": n for k, own in sources.items() for name, n in own.items()}
    over = [name for name, length in true.items() if length > 32]
    counts = plan.shown

    if overflow == "skip":
        assert len(trained) == counts.samples - counts.skipped_long
        assert counts.planned_tokens == sum(true[name] for name in trained)
        assert counts.skipped_long <= len(over)
        if min(weights) >= 1:
            assert counts == plan.counts
    else:
        changed = counts.truncated if overflow == "truncate" else counts.split
        assert (len(trained), changed) == (counts.samples, sum(name in trained for name in over))
        assert counts.tokens == sum(true[name] for name in trained)


@pytest.mark.parametrize("layout", ["sorted", "packed", "bucketed"])
def test_costs_of_a_column_hide_no_sample_without_loss(
    tmp_path: Path, call: Callable[..., Any], layout: str
) -> None:
    rows = [
        {"id": "one", "input_ids": [5], "images": 100},
        {"id": "good", "input_ids": [5, 6, 7, 8], "images": 100},
        {"id": "mute", "input_ids": [1, 2], "labels": [-100, -100], "images": 7},
        {"id": "cut", "input_ids": [1] * 60, "loss_mask": [0] * 30 + [1] * 30, "images": 100},
    ]
    written(tmp_path / "rows.jsonl", rows)
    call("data lengths build -d rows.jsonl -t bytes -o l.jsonl", tmp_path)
    line = f"data batchplan build -l l.jsonl -b 120 --overflow-max 120 --layout {layout} -o plan"
    line += " -d rows.jsonl --cost-column images --overflow truncate"
    line += " --bucket-edges 110" if layout == "bucketed" else ""

    assert "3 of 4 samples have no token with loss" in call(line, tmp_path).err
    assert call(f"{line} --no-loss skip", tmp_path).code == 0
    plan = BatchPlan.load(tmp_path / "plan")
    assert [plan.ids[int(item)] for batch in plan.epoch(0) for item in batch.items] == ["good"]


@settings(max_examples=60, deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=12),
    overflow=st.sampled_from(["truncate", "split", "skip"]),
    layout=st.sampled_from(["bucketed", "sorted", "packed"]),
)
def test_no_planned_sample_is_without_loss_and_none_with_loss_is_missing(
    masks: list[list[int]], overflow: Any, layout: Any
) -> None:
    lengths = np.array([len(mask) for mask in masks], np.int32)
    carries = [[place for place, one in enumerate(mask) if one and place] for mask in masks]
    loss = [
        [found[0] if found else len(mask), len(found)]
        for found, mask in zip(carries, masks, strict=True)
    ]
    measured = Lengths(lengths, Ids.numbered(len(masks)), loss=np.array(loss, np.int32))
    config = BatchingConfig(
        layout=layout,
        token_budget=10,
        overflow_max=10,
        pack_max_length=10,
        bucket_edges=(5,),
        overflow=overflow,
        no_loss="skip",
    )
    heard = set()
    for item, found in enumerate(carries):
        within = found if overflow == "split" or len(masks[item]) <= 10 else []
        if overflow == "truncate":
            within = [place for place in found if place < 10]
        heard |= {item} if within else set()
    if not heard:
        with pytest.raises(Exception, match=r"all .* samples were skipped"):
            BatchPlanBuilder(measured, config).build()
        return
    plan = BatchPlanBuilder(measured, config).build()

    planned = {int(item) for batch in plan.epoch(0) for item in batch.items}
    assert planned == heard
    cut = sum(len(masks[item]) > 10 for item in heard)
    assert plan.counts.truncated == (cut if overflow == "truncate" else 0)
    assert plan.counts.split == (cut if overflow == "split" else 0)


def test_lengths_that_know_nothing_of_loss_are_planned_as_they_are() -> None:
    plan = BatchPlanBuilder({"a": 1, "b": 2}, BatchingConfig()).build()

    assert plan.counts.skipped_no_loss == 0
    mute = Lengths(np.array([2], np.int32), Ids.of(["a"]), loss=np.array([[2, 0]], np.int32))
    with pytest.raises(NoLoss, match="1 of 1 samples"):
        BatchPlanBuilder(mute, BatchingConfig()).build()


def mixed(tmp_path: Path, data: tuple[str, ...], **settings: Any) -> BatchPlan:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    config = SftConfig(model="tiny", data=data, run_dir=run, **settings)
    prepare(config, BYTES, world_size=1)
    opened = open_prepared(run)
    assert opened is not None
    for batch in opened.plan.epoch(0):
        for item in batch.items:
            name, _, id = opened.plan.ids[int(item)].partition("/")
            sample = opened.read(int(item))
            (row,) = [r for r in rows_of(200, name[0]) if r["id"] == id]
            assert sample.input_ids.tolist() == encode_row(row, BYTES, "").input_ids.tolist()
            assert sample.sample_id == f"{name}/{id}"
    return opened.plan


def test_a_mixture_has_its_shares_and_shows_no_sample_twice(tmp_path: Path) -> None:
    math = written(tmp_path / "math.jsonl", rows_of(140, "m"))
    chat = written(tmp_path / "chat.jsonl", rows_of(200, "c"))
    plan = mixed(tmp_path, (f"{math}=0.7", f"{chat}=0.3"), epochs=2, eval_fraction=0.0)

    for epoch in range(2):
        shown = [plan.ids[int(item)] for batch in plan.epoch(epoch) for item in batch.items]
        assert len(shown) == len(set(shown))
        assert sum(id.startswith("math/") for id in shown) == 140
        assert sum(id.startswith("chat/") for id in shown) == 60
    first, second = (
        {plan.ids[int(i)] for batch in plan.epoch(epoch) for i in batch.items} for epoch in (0, 1)
    )
    assert first != second


def test_what_is_held_out_of_a_mixture_is_not_trained_and_is_read(tmp_path: Path) -> None:
    math = written(tmp_path / "math.jsonl", rows_of(60, "m"))
    chat = written(tmp_path / "chat.jsonl", rows_of(60, "c"))
    plan = mixed(tmp_path, (f"{math}=0.5", f"{chat}=0.5"), eval_fraction=0.3)
    held_out = open_prepared(tmp_path / "run", "eval_")
    assert held_out is not None

    trained = {plan.ids[i] for i in range(len(plan.ids))}
    held = {held_out.plan.ids[i] for i in range(len(held_out.plan.ids))}
    assert not trained & held
    both = {f"{name}/{name[0]}{i}" for name in ("math", "chat") for i in range(60)}
    assert trained | held == both
    rows = {row["id"]: row for row in [*rows_of(60, "m"), *rows_of(60, "c")]}
    for item in range(len(held)):
        sample = held_out.read(item)
        expected = encode_row(rows[sample.sample_id.partition("/")[2]], BYTES, "")
        assert sample.input_ids.tolist() == expected.input_ids.tolist()


def test_a_mixture_planned_before_is_trained(tmp_path: Path, call: Callable[..., Any]) -> None:
    for name in ("math", "chat"):
        written(tmp_path / f"{name}.jsonl", rows_of(30, name[0]))
        call(f"data lengths build -d {name}.jsonl -t bytes -o {name}.lengths.jsonl", tmp_path)
    line = "data batchplan build -l math.lengths.jsonl -l chat.lengths.jsonl --weight 1 --weight 1"
    assert call(f"{line} -o plan", tmp_path).code == 0
    data = tuple(str(tmp_path / f"{name}.jsonl") for name in ("math", "chat"))
    plan = mixed(tmp_path, data, batchplan=tmp_path / "plan")

    assert plan.fingerprint == BatchPlan.load(tmp_path / "plan").fingerprint


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (("a.jsonl=0.7", "b.jsonl"), "1 of 2 --data have a share"),
        (("a.jsonl=much", "b.jsonl=1"), "the share must be a number above 0, got 'much'"),
        (("a.jsonl=0", "b.jsonl=1"), "must be a number above 0"),
        (("a.jsonl=1", "./a.jsonl=1"), "needs a name of its own"),
        (("a.jsonl=1", "nowhere.jsonl=1"), "no data at nowhere.jsonl"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "b.jsonl", "sub/a.jsonl"):
        written(tmp_path / name, rows_of(3))
    with pytest.raises(Exception, match=reason):
        prepare(SftConfig(model="tiny", data=data, run_dir=tmp_path / "run"), BYTES, world_size=1)


def test_sources_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    for name in ("math", "chat"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "train.jsonl", rows_of(9, name[0]))
    data = tuple(f"{tmp_path}/{name}/train.jsonl=0.5" for name in ("math", "chat"))
    prepare(SftConfig(model="tiny", data=data, run_dir=tmp_path / "run"), BYTES, world_size=1)
    plan = BatchPlan.load(tmp_path / "run" / "plan")

    assert {plan.ids[i].partition("/")[0] for i in range(18)} == {"math-train", "chat-train"}


def test_nulls_that_arrow_fills_in_are_not_in_the_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": "a", "tools": [{"p": {"x": 1}}]}, {"id": "b", "tools": [{"p": {"y": 2}}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = open_source(tmp_path / "rows.parquet")

    assert [source[0], source[1]] == rows
    assert [row for _, row in source.chunk(0, 2).rows()] == rows


def test_a_file_with_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "lr=0.1", rows_of(3))
    prepare(SftConfig(model="tiny", data=str(path), run_dir=tmp_path / "run"), BYTES, world_size=1)

    assert len(TokenStore(tmp_path / "run" / "tokens")) == 3


@settings(max_examples=60, deadline=None)
@given(
    here=st.lists(st.text(max_size=3), max_size=20),
    wanted=st.lists(st.text(max_size=3), max_size=20),
    numbered=st.tuples(st.booleans(), st.booleans()),
)
def test_places_are_those_of_a_search_by_hand(
    here: list[str], wanted: list[str], numbered: tuple[bool, bool]
) -> None:
    mine = [str(n) for n in range(len(here))] if numbered[0] else here
    theirs = [str(n) for n in range(len(wanted))] if numbered[1] else wanted
    expected = [mine.index(id) if id in mine else -1 for id in theirs]

    assert Ids.of(mine).places(Ids.of(theirs)).tolist() == expected


def test_ids_whose_keys_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_key(self: Ids) -> Any:
        return np.zeros(len(self), np.uint64)

    monkeypatch.setattr(ids_module.Ids, "keys", one_key)
    monkeypatch.setattr(ids_module, "_keys_by_numpy", lambda o, d: np.zeros(len(o) - 1, np.uint64))
    monkeypatch.setattr(ids_module, "_key", lambda *_: np.uint64(0))

    assert Ids.of(["a", "b", "c"]).places(Ids.of(["c", "d", "a"])).tolist() == [2, -1, 0]


def test_rows_are_read_together_only_as_far_as_they_are_not_too_large(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "text": "x" * (9_000_000 if n % 7 == 0 else 10)} for n in range(40)]
    one = written(tmp_path / "a.jsonl", rows[:20])
    source = open_source([one, written(tmp_path / "b.jsonl", rows[20:])], ["nothing"])
    ranges = list(row_ranges(source, 16))

    assert [item for start, stop in ranges for item in range(start, stop)] == [*range(40)]
    assert max(stop - start for start, stop in ranges) <= 16
    sizes = [source.size_of(start, stop) for start, stop in ranges]
    assert max(sizes) < 33_600_000 < sum(sizes)
    # As large as can be, and a row that is larger alone by itself.
    assert len(ranges) < 12


@pytest.mark.slow
def test_rows_with_ids_in_a_file_of_more_than_2_gib_work_everywhere(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    # Few long rows, most of whose bytes are a column that is left out.
    path = tmp_path / "large.jsonl"
    filler = "x" * 1_000_000
    with path.open("w") as file:
        for number in range(2600):
            row = {"id": f"r{number}", "text": f"otter {number}", "filler": filler}
            file.write(json.dumps(row) + "\n")
    assert path.stat().st_size > 2.5e9
    data = "-d large.jsonl -t bytes --ignore-column filler"
    for line in (
        f"data lengths build {data} -o l.jsonl",
        "data batchplan build -l l.jsonl -o plan",
        f"data batch generate -p plan {data} -o batches",
        "data tokens prune --older-than 0s",
        f"data batch generate -p plan {data} -o again",
    ):
        env = {**environ, "BATCHWRIGHT_TOKENS": os.environ["BATCHWRIGHT_TOKENS"]}
        process = subprocess.Popen([COMMAND, *line.split()], cwd=tmp_path, env=env)
        # Of this command or the largest of its workers, in KiB: the file is never held whole.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, line
        assert used.ru_maxrss < 1_200_000, line
    lengths = LengthCache.load(tmp_path / "l.jsonl").lengths
    assert lengths.ids[2599] == "r2599"
