"""Resume deep inside an epoch: seconds and bytes from opening the run to the batches of a step.

A run of a million samples (100,000 with --quick) stands before step 10,000 (1,000). Each way
runs in a process that has planned nothing yet, so that loading compiled code counts, and with
the files of the run dropped from the system's cache. The same once more in the same process
stands beside it. What is timed, from the opening of plan and tokens:

    batchwright           plan, its fingerprint against the checkpoint's, batches of the step
    train_sft             the real thing with `tiny`: model, checkpoint, plan, until the batches
                          of the first step are there, and until it is done; imports excluded
    plans replayed        the steps before are planned and thrown away, nothing of them is read
    batches replayed      the steps before are planned, read and laid out, as loaders do that
                          know no position
    accelerate            skip_first_batches over torch's DataLoader with as many rows in a batch
                          on average: the sampler is replayed, skipped rows are not read
    StatefulDataLoader    torchdata's, the same batches, from the state it had before the step
    MosaicML Streaming    StreamingDataLoader over the same rows in its own shards, from its state

The last three pad random rows: they plan nothing, and check neither data nor position. Theirs is
one batch on one rank. Imports of torch, of transformers and of the peers are not timed; numba's
is, where one of ours loads it.

The first two also where samples have names of their own instead of row numbers. Bytes read are
those of the token files that are in the system's cache afterwards, whole pages of 4 KiB.
"""

import ctypes
import json
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchwright.batching import BatchPlanBuilder, CheckpointPosition, Step, collate
from batchwright.checkpoint import latest
from batchwright.data.ids import Ids
from batchwright.data.tokens import TokenStore
from batchwright.data.tokens.store import LARGE
from batchwright.models.transformers import load_model, tokenizer_for
from batchwright.rng import stream
from batchwright.sealed import SUMS
from batchwright.train.run import Run as TrainingRun
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft
from batchwright.train.sft.prepare import Prepared, batching_config, open_prepared
from batchwright.train.sft.state import training_state
from common import SEED, Contender, Report, arguments, measure, write_store
from peers import mosaic_streaming

READ = tuple(f"tokens/{name}{end}.bin" for name in LARGE for end in ("", SUMS))
BYTES_PER_TOKEN = 5
PARTS = (
    "open plan and tokens",
    "check fingerprint and checkpoint",
    "find step",
    "lay out",
)
NAMED = ", named"
STATE = "loader.pt"
SHARDS = "mosaic"


@dataclass(frozen=True)
class Run:
    """A run directory and the step it stands before."""

    config: SftConfig
    step: int
    tokens: int
    """Of all samples."""

    @property
    def folder(self) -> Path:
        return self.config.run_dir


def make_run(config: SftConfig, n: int, step: int, named: bool) -> None:
    """Tokens, plan and a checkpoint, as `train_sft` leaves them; texts are random letters."""
    folder = config.run_dir
    random = stream(SEED, "benchmark/resume", n)
    lengths = np.clip(random.lognormal(np.log(80), 0.6, n), 4, 512).astype(np.int32)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    tokens = int(offsets[-1])
    tokenizer = tokenizer_for("tiny")
    block = random.integers(32, 127, 1_000_003).astype(np.int32)
    arrays: dict[str, Any] = {
        "tokens": np.resize(block, tokens),
        "mask": np.ones(tokens, np.uint8),
        "offsets": offsets,
        "loss": np.stack([np.ones(n), np.diff(offsets) - 1], axis=1).astype(np.int32),
        "content": np.zeros(n, np.uint64),
    }
    if named:
        pairs = Ids.of(f"row-{number * 7919 % n:09d}" for number in range(n)).arrays
        assert pairs is not None
        arrays["id_offsets"], arrays["id_data"] = pairs
    write_store(folder / "tokens", arrays, tokenizer.fingerprint)
    store = TokenStore(folder / "tokens")
    plan = BatchPlanBuilder(store.lengths, batching_config(config, 1)).build(1)
    plan.save(folder / "plan")
    model = load_model("tiny").model
    at = CheckpointPosition(0, step * plan.step_microbatches, step, plan.whole_fingerprint)
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainingRun(config) as started:
        started.start()
        started.save(step, lambda: training_state(model, optimizer, at), keep=1)


def forget(run: Run) -> None:
    """Take the run's files out of the system's cache, and steps out that were trained here."""
    for path in (run.folder / "checkpoints").glob("step_*"):
        if path.name != f"step_{run.step:08d}":
            shutil.rmtree(path)
    for path in run.folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the system's cache."""
    with path.open("rb") as file:
        # Private and writable: only from such a buffer does ctypes give the address.
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    pages = -(-len(mapped) // mmap.PAGESIZE)
    state = (ctypes.c_ubyte * pages)()
    view = ctypes.c_char.from_buffer(mapped)
    size = ctypes.c_size_t(len(mapped))
    failed = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(ctypes.addressof(view)), size, state
    )
    del view
    mapped.close()
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in state) * mmap.PAGESIZE


Result = dict[str, Any]


def contender(
    name: str,
    work: Callable[[Run], Result],
    ready: Callable[[], Any] = lambda: None,
    files: tuple[str, ...] = READ,
) -> Contender:
    """`work` may tell `seconds` itself, if the end of the call is not what counts.

    What `ready` imports is not timed. The `files` are those whose bytes are counted.
    """
    calls: list[Result] = []

    def prepare(run: Run) -> Callable[[], None]:
        ready()
        forget(run)
        return lambda: call(run)

    def call(run: Run) -> None:
        start = time.perf_counter()
        result = work(run)
        calls.append({"seconds": time.perf_counter() - start, **result})

    def summary(run: Run, _: object) -> Mapping[str, Any]:
        paths = [path for pattern in files for path in run.folder.glob(pattern)]
        return {"first": calls[0], "again": calls[1], "read": sum(map(cached_bytes, paths))}

    return Contender(name, prepare, summary)


def opened(run: Run) -> Prepared:
    data = open_prepared(run.folder)
    assert data is not None
    return data


def laid_out(data: Prepared, step: Step) -> Result:
    tokens = [collate(batch, data.read, pad_id=256).token_count for batch in step.microbatches]
    return {"asked": BYTES_PER_TOKEN * sum(tokens), "first": step.first}


def seek(run: Run) -> Result:
    parts = [time.perf_counter()]
    data = opened(run)
    parts.append(time.perf_counter())
    found = latest(run.folder / "checkpoints")
    assert found is not None
    at = CheckpointPosition(**found.state["position"])
    plan = data.plan.shard(0, 1)
    assert at.plan == plan.whole_fingerprint
    parts.append(time.perf_counter())
    step = next(plan.steps_from(at))
    parts.append(time.perf_counter())
    result = laid_out(data, step)
    parts.append(time.perf_counter())
    return {**result, "parts": dict(zip(PARTS, np.diff(parts).tolist(), strict=True))}


def replay_plans(run: Run) -> Result:
    data = opened(run)
    return laid_out(data, next(islice(data.plan.iter_steps(), run.step, None)))


def replay_batches(run: Run) -> Result:
    data = opened(run)
    for step in islice(data.plan.iter_steps(), run.step + 1):
        result = laid_out(data, step)
    return result


def padded_rows(samples: list[Any]) -> torch.Tensor:
    from torch.nn.utils.rnn import pad_sequence

    tensors = [torch.tensor(sample.input_ids) for sample in samples]
    return pad_sequence(tensors, batch_first=True)


def rows_per_batch(run: Run) -> int:
    """As many as a microbatch of the plan has on average."""
    samples = len(TokenStore(run.folder / "tokens"))
    return round(samples / opened(run).plan.num_microbatches())


def random_batches(kind: Any, run: Run, store: Any, collate_fn: Callable[..., Any]) -> Any:
    """A loader of shuffled rows."""
    return kind(
        store,
        batch_size=rows_per_batch(run),
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED),
        collate_fn=collate_fn,
    )


def accelerate_skips(run: Run) -> Result:
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader

    items = _Items(TokenStore(run.folder / "tokens"))
    loader = random_batches(DataLoader, run, items, padded_rows)
    batch = next(iter(skip_first_batches(loader, run.step)))
    return {"asked": 4 * int((batch > 0).sum())}


def stateful_loader(run: Run) -> Result:
    from torchdata.stateful_dataloader import StatefulDataLoader

    items = _Items(TokenStore(run.folder / "tokens"))
    loader = random_batches(StatefulDataLoader, run, items, padded_rows)
    loader.load_state_dict(torch.load(run.folder / STATE, weights_only=False))
    batch = next(iter(loader))
    return {"asked": 4 * int((batch > 0).sum())}


def save_state(run: Run) -> None:
    """The state of torchdata's loader before the step; what it read on the way is no matter."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return
    numbers = range(len(TokenStore(run.folder / "tokens")))
    loader = random_batches(StatefulDataLoader, run, numbers, len)
    for _ in islice(loader, run.step):
        pass
    torch.save(loader.state_dict(), run.folder / STATE)


def streaming_loader(run: Run, rows: int) -> Any:
    base = mosaic_streaming()
    # One process after the other reads the same folder: what the last one shared is stale.
    base.util.clean_stale_shared_memory()
    data = base.StreamingDataset(
        local=str(run.folder / SHARDS),
        shuffle=True,
        shuffle_seed=SEED,
        num_canonical_nodes=1,
        batch_size=rows,
    )
    return base.StreamingDataLoader(data, batch_size=rows, collate_fn=padded_arrays)


def padded_arrays(samples: list[Any]) -> torch.Tensor:
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([torch.from_numpy(s["tokens"].copy()) for s in samples], batch_first=True)


def streaming_resumes(run: Run) -> Result:
    rows = rows_per_batch(run)
    loader = streaming_loader(run, rows)
    loader.load_state_dict(json.loads((run.folder / SHARDS / STATE).read_text()))
    batch = next(iter(loader))
    return {"asked": 4 * int((batch > 0).sum())}


def write_shards(run: Run) -> None:
    """The rows in Streaming's own format, and its state before the step."""
    try:
        base = mosaic_streaming()
    except ImportError:
        return
    store = TokenStore(run.folder / "tokens")
    columns = {"tokens": "ndarray:int32"}
    with base.MDSWriter(out=str(run.folder / SHARDS), columns=columns) as writer:
        for item in range(len(store)):
            writer.write({"tokens": np.asarray(store(item).input_ids, np.int32)})
    rows = rows_per_batch(run)
    state = streaming_loader(run, rows).dataset.state_dict(rows * run.step, from_beginning=True)
    (run.folder / SHARDS / STATE).write_text(json.dumps(state))


@dataclass(frozen=True)
class _Items:
    store: TokenStore

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, item: int) -> Any:
        return self.store(item)


class FirstStep:
    """A tracker that looks at the clock when the first step is done."""

    def __init__(self) -> None:
        self.called = time.perf_counter()

    def start(self, config: Mapping[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.done = time.perf_counter() - self.called
        self.ready = self.done - metrics["train/seconds"] + metrics["train/data_wait_s"]
        self.asked = BYTES_PER_TOKEN * int(metrics["train/tokens"])

    def finish(self) -> None:
        pass


def train(run: Run) -> Result:
    """Resume, one step, save; only what comes before the end of the step is of interest."""
    torch.set_num_threads(1)
    clock = FirstStep()
    train_sft(run.config, resume=True, trackers=[clock])
    assert clock.step == run.step + 1
    return {"asked": clock.asked, "seconds": clock.ready, "step done": clock.done}


SEEK, TRAIN = "batchwright", "train_sft, tiny"
OTHERS = {
    "plans replayed": replay_plans,
    "batches replayed": replay_batches,
}
PEERS: dict[str, tuple[Any, ...]] = {
    "accelerate skip_first_batches": (accelerate_skips, lambda: import_module("accelerate")),
    "torchdata StatefulDataLoader": (
        stateful_loader,
        lambda: import_module("torchdata.stateful_dataloader"),
    ),
    "MosaicML Streaming": (streaming_resumes, mosaic_streaming, (f"{SHARDS}/*.mds",)),
}


def compare(report: Report, run: Run, named: str, found: dict[str, Mapping[str, Any]]) -> None:
    ways: dict[str, tuple[Any, ...]] = {SEEK + named: (seek,), TRAIN + named: (train,)}
    if not named:
        ways |= {name: (work,) for name, work in OTHERS.items()} | PEERS
    for name, how in ways.items():
        # The run itself is the warm-up: the first call of a process is what a resume is.
        got = measure(contender(name, *how), run, run, limit_s=600.0, runs=1, warm=False)
        if got.reason:
            report.not_measured(name, got.reason)
        else:
            found[name] = got.summary


def show(report: Report, run: Run, found: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        [
            name,
            got["first"]["seconds"],
            got["again"]["seconds"],
            got["first"].get("step done"),
            got["first"]["asked"] / 1e6,
            got["read"] / 1e6,
        ]
        for name, got in found.items()
    ]
    total = BYTES_PER_TOKEN * run.tokens / 1e6
    report.table(
        f"to the batches of step {run.step:,}; {total:,.0f} MB of tokens and masks",
        ("", "seconds", "again", "step done", "MB asked for", "MB read"),
        rows,
    )
    parts = {name: got["first"]["parts"] for name, got in found.items() if "parts" in got["first"]}
    report.table(
        "where the seconds go",
        ("", *parts),
        [[part, *(each[part] for each in parts.values())] for part in PARTS],
    )


def in_child(work: Callable[..., None], *given: Any) -> None:
    """So that this process has no compiled code to hand on."""
    child = multiprocessing.get_context("fork").Process(target=work, args=given)
    child.start()
    child.join()
    if child.exitcode != 0:
        raise SystemExit(f"{work.__name__} failed, see above")


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    report = Report("resume", args)
    # Imports the model's classes, once for all children; nothing of it is compiled.
    load_model("tiny")
    n, step = (100_000, 1_000) if args.quick else (1_000_000, 10_000)
    found: dict[str, Mapping[str, Any]] = {}
    for named in ("", NAMED):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            config = SftConfig(
                model="tiny", data="unused", layout="packed", run_dir=Path(folder), stop_after=1
            )
            in_child(make_run, config, n, step, bool(named))
            size = (Path(folder) / "tokens" / "mask.bin").stat().st_size
            run = Run(config, step, size)
            if not named:
                in_child(save_state, run)
                in_child(write_shards, run)
            compare(report, run, named, found)
    show(report, run, found)
    for named in ("", NAMED):
        for what, words in ((SEEK, "data of the step"), (TRAIN, "until its first step begins")):
            got = found.get(what + named)
            seconds = got["first"]["seconds"] if got else None
            report.target(f"{what}{named}: seconds, {words}", seconds, most=1.0)
    got = found.get(SEEK)
    share = 100 * got["read"] / (BYTES_PER_TOKEN * run.tokens) if got else None
    report.target("batchwright: % of the token files that was read", share, most=1.0)
    report.close()


if __name__ == "__main__":
    main()
