"""Every format that is read back: one small example of each, and how its reader sees it.

A reader gives a value to compare. `kept` says which other values are right: of a log that was cut,
its first records; of a cache in which a row was damaged, the other rows.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.batching import (
    BatchingConfig,
    BatchPlan,
    BatchPlanBuilder,
    BatchReader,
    BatchWriter,
    CheckpointPosition,
)
from batchwright.batching.plan.proofs import BatchFingerprint
from batchwright.calls.batch_api import Journal, Part
from batchwright.calls.cache.limits import load_limit, save_limits
from batchwright.calls.cache.rates import RateFile
from batchwright.calls.cache.store import Cache
from batchwright.calls.engine.stats import Prices
from batchwright.calls.outcome import Done, Usage
from batchwright.calls.promptfile import Answers, Spent, read_answers, read_prompts
from batchwright.calls.request import chat
from batchwright.checkpoint import latest, load_checkpoint, save_checkpoint
from batchwright.data.lengths import LengthCache
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from batchwright.data.tokens import TokenStore, make_store
from batchwright.errors import BadFile
from batchwright.events import EventLog, read_events
from batchwright.files import read_regular
from batchwright.lines import checked_lines
from batchwright.logic.mine.mining import write_rules
from batchwright.logic.rules import parse_rules
from batchwright.logic.vocab import Vocab
from batchwright.models.folder import check_model, seal_model
from batchwright.report.rollouts import turns_of
from batchwright.streaming import ReplayBuffer, ReplayBufferConfig, StreamSample
from batchwright.train.kge.config import KgeConfig
from batchwright.train.prover.config import ProverConfig
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.run import Run
from batchwright.train.sft.config import SftConfig

Value = Any
Kept = Callable[[Value, Value], bool]


@dataclasses.dataclass(frozen=True)
class Format:
    """One format: makes an example in a folder, and reads it."""

    make: Callable[[Path], None]
    read: Callable[[Path], Value]
    kept: Kept = lambda seen, whole: False
    only: tuple[str, ...] = ()
    """The files to damage; all of them if it is empty."""
    crafted: bool = False
    """Whether it is changed and sealed again: then anything may be read, but nothing may break."""


def first_ones(seen: Value, whole: Value) -> bool:
    return bool(seen == whole[: len(seen)])


def some_of(seen: Value, whole: Value) -> bool:
    return all(whole.get(key) == value for key, value in seen.items())


def _lengths() -> dict[str, int]:
    return {f"ü{i}": (i * 37) % 61 + 1 for i in range(60)}


def _plan(layout: str, **more: Any) -> BatchPlan:
    config = BatchingConfig(
        layout=layout,  # type: ignore[arg-type]
        token_budget=128,
        bucket_edges=(16, 32),
        overflow_max=64,
        pack_max_length=64,
    )
    return BatchPlanBuilder(_lengths(), config, **more).build(2)


def _batches_of(plan: BatchPlan) -> Value:
    seen: list[Any] = [plan.num_epochs, plan.dataset_hash, plan.tokenizer_hash, str(plan.config)]
    for epoch in range(min(2, plan.num_epochs)):
        for batch in plan.iter_epoch(epoch):
            seen.append((batch.samples, batch.max_len, batch.starts.tolist(), batch.weight))
            seen.append((batch.lengths.tolist(), batch.row_offsets.tolist(), batch.bucket_id))
        seen.append(plan.costs(epoch).tolist())
    if plan.num_epochs < 1000:
        seen.append([dataclasses.astuple(place) for place in plan.explain(plan.ids[3])])
    return repr(seen)


def _plans(layout: str, **more: Any) -> Format:
    return Format(
        lambda folder: print(_plan(layout, **more).save(folder / "plan")),
        lambda folder: _batches_of(BatchPlan.load(folder / "plan")),
    )


def _cache(folder: Path, suffix: str) -> None:
    with LengthCache.create(folder / f"lengths{suffix}", tokenizer_hash="t") as cache:
        for number, (name, length) in enumerate(_lengths().items()):
            cache.add(name, length, f"{number + 1:016x}")


def _read_cache(folder: Path, suffix: str) -> Value:
    cache = LengthCache.load(folder / f"lengths{suffix}")
    return repr((list(cache), cache.tokenizer_hash, cache.dataset_hash))


def _journal(folder: Path) -> None:
    try:
        with LengthCache.create(folder / "lengths.jsonl", tokenizer_hash="t") as cache:
            for name, length in _lengths().items():
                cache.add(name, length)
                if len(cache) % 20 == 0:
                    cache._flush()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass


def _rows(folder: Path) -> Path:
    rows = [{"id": f"r{n}", "text": "otters count tokens " * (n % 7 + 1)} for n in range(40)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _tokens(folder: Path) -> None:
    source, tokenizer = open_source(str(_rows(folder))), load_tokenizer("bytes")
    make_store(source, tokenizer, workers=1)[0].link(folder / "store")


def _read_tokens(folder: Path) -> Value:
    store = TokenStore(folder / "store")
    samples = [store(item) for item in range(len(store))]
    said = (store.lengths, store.entries.content.tolist(), store.entries.rows)
    return repr(
        [(s.sample_id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples] + [said]
    )


def _batches(folder: Path) -> None:
    plan = _plan("packed")
    samples = {
        name: {"input_ids": np.arange(length), "loss_mask": np.ones(length, np.uint8)}
        for name, length in _lengths().items()
    }
    BatchWriter(plan, samples, folder / "batches", per_file=4).write_all()


def _read_batches(folder: Path) -> Value:
    reader = BatchReader(folder / "batches")
    seen: list[Any] = [reader.fingerprint, reader.num_epochs]
    for epoch in range(reader.num_epochs):
        for batch in reader.iter_epoch(epoch):
            for field in dataclasses.fields(batch):
                value = getattr(batch, field.name)
                seen.append(value.tolist() if isinstance(value, np.ndarray) else value)
    return repr(seen)


STATE = {
    "weights": {"w": np.arange(400, dtype=np.float32), "b": np.ones((3, 5))},
    "at": {"step": 3, "loss": 0.5, "names": ["a", "b"], "none": None},
}


def _checkpoint(folder: Path) -> None:
    for step in (1, 2):
        save_checkpoint(folder / "checkpoints", step, {**STATE, "number": step})


def _state(found: Any) -> Value:
    if found is None:
        return None
    # What was crafted may have anything there: a trainer says so, see `Checkpoint.restoring`.
    weights = {name: np.asarray(one).tolist() for name, one in found.state["weights"].items()}
    rest = {name: value for name, value in found.state.items() if name != "weights"}
    return repr((found.step, sorted(weights.items()), sorted(rest.items())))


def _kge(folder: Path) -> None:
    from batchwright.logic.kge import Kge, KgeShape, save_kge

    save_kge(folder / "model", Kge.new(KgeShape("complex", 4, 20, 3), 1), epoch=3, entities="x")


def _read_kge(folder: Path) -> Value:
    from batchwright.logic.kge import load_kge

    kge, more = load_kge(folder / "model")
    return repr((kge.shape, kge.entities.tolist(), kge.steps.tolist(), sorted(more.items())))


def _runs(config: Any) -> Format:
    def make(folder: Path) -> None:
        with Run(dataclasses.replace(config, **{config.FOLDER: folder / "run"})) as run:
            run.start(step=0)

    def read(folder: Path) -> Value:
        return repr(
            dataclasses.replace(type(config).of_run(folder / "run"), **{config.FOLDER: "."})
        )

    return Format(make, read, only=("config.toml", "stamp.json"))


VOCAB = Vocab.of([f"e{n}" for n in range(30)], ["parent", "child", "sibling"])
RULES = "\n".join(
    f"r{n}:0.{n + 1}:parent(A,B), child(B,{'C' if n % 2 else 'e1'}) -> sibling(A,B)"
    for n in range(12)
)


def _rules(folder: Path) -> None:
    write_rules(folder / "rules.txt", parse_rules(RULES, VOCAB), VOCAB, "rules of a test")


def _read_rules(folder: Path) -> Value:
    rules = parse_rules(folder / "rules.txt", VOCAB)
    return [rules.text(r, VOCAB) for r in range(len(rules))]


def _events(folder: Path) -> None:
    with EventLog(folder / "events.jsonl") as log:
        for step in range(20):
            log.write("step", step=step, loss=1 / (step + 1), note='a } and " more')


def _read_events(folder: Path) -> Value:
    return [(e.t, e.kind, dict(e.fields)) for e in read_events(folder / "events.jsonl")]


def _prompts(folder: Path) -> Any:
    path = folder / "prompts.jsonl"
    if not path.exists():
        rows = [{"id": n, "prompt": f"question {n}"} for n in range(15)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(path, "m", {"temperature": 0})


def _answers(folder: Path) -> None:
    prompts = _prompts(folder)
    with Answers(folder / "answers.jsonl", prompts) as answers:
        for index in range(12):
            answers.add(index, Done(f"answer {index}", {}, "stop", Usage(3, index)))


def _read_answers(folder: Path) -> Value:
    return [row for _, row in read_answers(folder / "answers.jsonl", _prompts(folder))]


PRICES: Prices = {"m": (1.0, 2.0)}


def _spent(folder: Path) -> None:
    prompts = _prompts(folder)
    spent = Spent(folder / "answers.jsonl", PRICES, prompts, [])
    for index, prompt in enumerate(prompts):
        spent.reserve(prompt.request, 0.5)
        spent.add(prompt, Done("x", {}, "stop", Usage(3, index)), own_cache=False)


def _read_spent(folder: Path) -> Value:
    return sorted(Spent(folder / "answers.jsonl", PRICES, [], []).paid)


def _sample(number: int) -> StreamSample:
    return StreamSample(
        input_ids=[number, 5, 6],
        loss_mask=[0, 1, 1],
        sample_id=f"s{number}",
        dataset_id="d",
        source="offline",
        reward=number / 7,
    )


def _replay(folder: Path, name: str) -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=60))
    for turn in range(3):
        for number in range(20 if turn == 0 else 3):
            buffer.add(_sample(100 * turn + number))
        buffer.save(folder / name)


def _read_replay(folder: Path, name: str) -> Value:
    return json.dumps(ReplayBuffer.load(folder / name).to_dict(), default=str)


def _replays(name: str) -> Format:
    return Format(
        lambda folder: _replay(folder, name),
        lambda folder: _read_replay(folder, name),
        # Without its newest changes a folder is an older state, as after a kill.
        kept=lambda seen, whole: name == "buffer" and _added(seen) in (20, 23),
    )


def _added(text: str) -> int:
    return int(json.loads(text)["total_added"])


def _requests() -> list[Any]:
    return [chat("m", f"question {n}", temperature=0) for n in range(40)]


def _calls(folder: Path) -> None:
    with Cache(folder / "calls.db") as cache:
        body = {"choices": [{"message": {"content": "x" * 300}, "finish_reason": "stop"}]}
        cache.put_many([(r, Done("x" * 300, body, "stop")) for r in _requests()])


def _read_calls(folder: Path) -> Value:
    with Cache(folder / "calls.db") as cache:
        found = cache.get_many([request.key for request in _requests()])
        cache.export(folder / "export.jsonl")
        cache.stats()
    rows = [json.loads(line) for line in (folder / "export.jsonl").read_text().splitlines()]
    (folder / "export.jsonl").unlink()
    exported = {f"export {row['key']}": repr(row) for row in rows}
    return {**{key.hex(): done.text for key, done in found.items()}, **exported}


def _rates(folder: Path) -> None:
    rates = RateFile(folder / "rates.db")
    for name in ("http://a", "http://b"):
        with rates.locked(name) as times:
            times[:] = [12.5, 77.25]
    rates.close()


def _read_rates(folder: Path) -> Value:
    rates = RateFile(folder / "rates.db")
    found = []
    for name in ("http://a", "http://b"):
        with rates.locked(name) as times:
            found.append(list(times))
    rates.close()
    return found


def _limits(folder: Path) -> None:
    save_limits({"http://a": {"limit": 32}, "http://b": {"limit": 7}})


def _read_limits(folder: Path) -> Value:
    return [load_limit("http://a"), load_limit("http://b")]


def _model(folder: Path) -> None:
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / "model" / name).write_bytes(name.encode() * 100)
    seal_model(folder / "model")


def _read_model(folder: Path) -> Value:
    # What all loaders of weights do first.
    check_model(folder / "model")
    files = sorted((folder / "model").iterdir())
    # Of the manifest only its meaning counts: a space more is no damage.
    return {path.name: path.read_bytes() for path in files if path.name != "manifest.json"}


def _transcript(folder: Path) -> None:
    rows = [{"env": n % 3, "episode": n, "reward": n / 7, "said": "ü } x"} for n in range(12)]
    lines = (json.dumps(row, ensure_ascii=False).encode() for row in rows)
    (folder / "000001.jsonl").write_bytes(checked_lines(lines))


def _read_transcript(folder: Path) -> Value:
    path = folder / "000001.jsonl"
    seen = list(turns_of(path, read_regular(path)))
    if None in seen:
        raise BadFile("lines cannot be read")
    return seen


def _batch_list(folder: Path) -> None:
    journal = Journal(folder / "answers.jsonl", "http://a")
    for number in range(5):
        part = Part(f"part {number}", "/v1/chat/completions", [f"r{number}", "x"])
        journal.begin(part)
        journal.uploaded(part, f"file-{number}")
        journal.created(part, f"batch-{number}")


def _read_batch_list(folder: Path) -> Value:
    return Journal(folder / "answers.jsonl", "http://a")._rows


FORMATS: dict[str, Format] = {
    "lengths.jsonl": Format(lambda f: _cache(f, ".jsonl"), lambda f: _read_cache(f, ".jsonl")),
    "lengths.safetensors": Format(
        lambda f: _cache(f, ".safetensors"), lambda f: _read_cache(f, ".safetensors")
    ),
    "lengths journal": Format(
        _journal,
        lambda f: LengthCache.load_or_create(f / "lengths.jsonl", "t").get_all(),
        some_of,
    ),
    "plan packed": _plans("packed"),
    "plan sorted": _plans("sorted"),
    "plan bucketed": _plans("bucketed"),
    "plan curriculum": _plans("bucketed", difficulty=[n % 7 for n in range(60)]),
    "shards": Format(
        lambda f: print(_plan("bucketed").save_shards(2, f / "shards")),
        lambda f: [_batches_of(BatchPlan.load(f / "shards" / f"rank_{r}")) for r in (0, 1)],
    ),
    "tokens": Format(_tokens, _read_tokens),
    "batches": Format(_batches, _read_batches),
    "checkpoint": Format(
        _checkpoint, lambda f: _state(load_checkpoint(f / "checkpoints" / "step_00000002"))
    ),
    # The older one, if the newest is damaged, which a run says.
    "checkpoints": Format(
        _checkpoint,
        lambda f: _state(latest(f / "checkpoints")),
        lambda seen, whole: seen == whole.replace("(2, ", "(1, ").replace("r', 2)", "r', 1)"),
    ),
    "embedding": Format(_kge, _read_kge),
    "model": Format(_model, _read_model),
    "position": Format(
        lambda f: CheckpointPosition(1, 20, 300, "p" * 64).save(f / "position.json"),
        lambda f: CheckpointPosition.load(f / "position.json"),
    ),
    "fingerprint": Format(
        lambda f: BatchFingerprint("f" * 16, "f" * 64, 10, 20, 30).save(f / "print.json"),
        lambda f: BatchFingerprint.load(f / "print.json"),
    ),
    "run of sft": _runs(SftConfig(model="tiny", data="rows.jsonl")),
    "run of kge": _runs(KgeConfig(data="graph")),
    "run of prover": _runs(ProverConfig(data="graph")),
    "run of query-mutator": _runs(QueryMutatorConfig(mutator_model="m", target_model="t")),
    "rules": Format(_rules, _read_rules),
    "events": Format(_events, _read_events, first_ones),
    "answers": Format(_answers, _read_answers, first_ones),
    "spent": Format(_spent, _read_spent, lambda seen, whole: set(seen) <= set(whole)),
    "transcript": Format(_transcript, _read_transcript, first_ones),
    "list of batches": Format(_batch_list, _read_batch_list, first_ones),
    "replay.json": _replays("buffer.json"),
    "replay.safetensors": _replays("buffer.safetensors"),
    "replay folder": _replays("buffer"),
    "calls.db": Format(_calls, _read_calls, some_of),
    "rates.db": Format(_rates, _read_rates),
    # What is damaged there is learned again.
    "limits": Format(_limits, _read_limits, lambda seen, whole: seen == [None, None]),
}


SEALED = ("plan", "shards", "tokens", "batches", "checkpoint", "embedding")
FORMATS |= {
    f"crafted {name}": dataclasses.replace(format, kept=lambda seen, whole: True, crafted=True)
    for name, format in FORMATS.items()
    if name.startswith(SEALED)
}
