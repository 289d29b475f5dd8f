"""Resume deep inside an epoch: seconds and bytes from opening the run to the batches of a step.

A run of a million samples (100,000 with --quick) stands before step 10,000 (1,000). Each way
starts in a process that has done nothing yet, so that loading compiled code counts, with the
files of the run dropped from the system's cache; the second call in the same process is shown
beside it. What is timed, all from the opening of plan and tokens:

    batchwright           plan, its fingerprint against the checkpoint's, batches of the step
    batchwright, named    the same where samples have names of their own instead of row numbers
    train_sft             all of it with `tiny`: model, checkpoint, plan, until the batches of the
                          first step are there; and until that step is done. Imports are not in it
    plans replayed        the steps before are planned and thrown away, nothing of them is read
    batches replayed      the steps before are planned, read and laid out, as loaders do that
                          know no position
    accelerate            skip_first_batches over torch's DataLoader with as many rows in a batch
                          on average: the sampler is replayed, skipped rows are not read

Bytes are those of the token files that are in the system's cache afterwards. The system reads
ahead, so they are many times what a batch asked for.
"""

import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchwright.batching import BatchPlan, BatchPlanBuilder, CheckpointPosition, Step, collate
from batchwright.data.ids import Ids
from batchwright.data.tokens import STORE, TokenStore
from batchwright.folders import write_array
from batchwright.rng import stream
from batchwright.train import checkpoint
from batchwright.train.config import SftConfig
from batchwright.train.models import load_model, tokenizer_for
from batchwright.train.prepare import Prepared, batching_config, open_prepared
from batchwright.train.sft import train_sft
from common import SEED, Contender, Measured, Report, arguments, measure

READ = ("tokens", "mask")
NAMED = ", named"


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


def make_run(folder: Path, n: int, step: int, *, named: bool) -> Run:
    """Tokens, plan and a checkpoint, as `train_sft` leaves them; texts are random bytes."""
    config = SftConfig(model="tiny", data="unused", layout="packed", run_dir=folder, stop_after=1)
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
    }
    if named:
        pairs = Ids.of(f"row-{number * 7919 % n:09d}" for number in range(n)).arrays
        assert pairs is not None
        arrays["id_offsets"], arrays["id_data"] = pairs
    with STORE.replacing(folder / "tokens") as place:
        files = {name: write_array(place, name, array) for name, array in arrays.items()}
        fields = {"dataset_hash": "made", "tokenizer_hash": tokenizer.fingerprint, "skipped": 0}
        STORE.write(place, {**fields, "files": files})
    store = TokenStore(folder / "tokens")
    plan = BatchPlanBuilder(store.lengths, batching_config(config, 1)).build(1)
    plan.save(folder / "plan")
    model = load_model("tiny").model
    at = CheckpointPosition(0, step * plan.step_microbatches, step, plan.whole_fingerprint)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(folder / "checkpoints", model, optimizer, at, keep=1)
    return Run(config, step, tokens)


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


def contender(name: str, work: Callable[[Run], Result]) -> Contender:
    def prepare(run: Run) -> Callable[[], Result]:
        forget(run)
        return lambda: work(run)

    def summary(run: Run, result: Result) -> Mapping[str, Any]:
        files = [run.folder / "tokens" / f"{name}.bin" for name in READ]
        return {**result, "cached": sum(map(cached_bytes, files))}

    return Contender(name, prepare, summary)


def opened(run: Run) -> Prepared:
    data = open_prepared(run.folder)
    assert data is not None
    return data


def laid_out(data: Prepared, step: Step) -> Result:
    tokens = [collate(batch, data.read, pad_id=256).token_count for batch in step.microbatches]
    return {"asked": 5 * sum(tokens), "first": step.first}


def seek(run: Run) -> Result:
    parts = [time.perf_counter()]
    data = opened(run)
    parts.append(time.perf_counter())
    at = checkpoint.latest(run.folder / "checkpoints").position
    plan = data.plan.shard(0, 1)
    assert at.plan == plan.whole_fingerprint
    parts.append(time.perf_counter())
    step = next(plan.steps_from(at))
    parts.append(time.perf_counter())
    result = laid_out(data, step)
    parts.append(time.perf_counter())
    names = ("open plan and tokens", "check fingerprint and checkpoint", "find step", "lay out")
    return {**result, "parts": dict(zip(names, np.diff(parts).tolist(), strict=True))}


def replay_plans(run: Run) -> Result:
    data = opened(run)
    return laid_out(data, next(islice(data.plan.iter_steps(), run.step, None)))


def replay_batches(run: Run) -> Result:
    data = opened(run)
    for step in islice(data.plan.iter_steps(), run.step + 1):
        result = laid_out(data, step)
    return result


def accelerate_skips(run: Run) -> Result:
    from accelerate import skip_first_batches
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader

    data = opened(run)
    store = TokenStore(run.folder / "tokens")
    plan: BatchPlan = data.plan

    def rows(samples: list[Any]) -> torch.Tensor:
        tensors = [torch.tensor(sample.input_ids) for sample in samples]
        return pad_sequence(tensors, batch_first=True)

    loader: Any = DataLoader(
        _Items(store),  # type: ignore[arg-type]
        batch_size=round(len(store) / plan.num_microbatches()),
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED),
        collate_fn=rows,
    )
    batch = next(iter(skip_first_batches(loader, run.step)))
    return {"asked": 4 * int((batch > 0).sum())}


@dataclass(frozen=True)
class _Items:
    store: TokenStore

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, item: int) -> Any:
        return self.store(item)


class FirstStep:
    """A tracker that looks at the clock when the first step begins and when it is done."""

    def __init__(self) -> None:
        self.called = time.perf_counter()

    def start(self, config: Mapping[str, Any]) -> None:
        self.began = time.perf_counter()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.ready = self.began - self.called + metrics["train/data_wait_s"]
        self.done = time.perf_counter() - self.called
        self.asked = 5 * int(metrics["train/tokens"])

    def finish(self) -> None:
        pass


def train(run: Run) -> Result:
    """Resume, one step, save; only what comes before the end of the step is of interest."""
    torch.set_num_threads(1)
    clock = FirstStep()
    train_sft(run.config, resume=True, trackers=[clock])
    assert clock.step == run.step + 1
    return {"asked": clock.asked, "ready": clock.ready, "done": clock.done}


def compare(report: Report, run: Run, ways: list[Contender]) -> dict[str, Measured]:
    found = {}
    rows: list[list[Any]] = []
    for way in ways:
        # The run itself is the warm-up: the first call of a process is what a resume is.
        got = measure(way, run, run, limit_s=600.0, runs=1)
        if got.seconds is None:
            report.not_measured(way.name, got.reason)
            continue
        found[way.name] = got
        rows.append(
            [
                way.name,
                got.summary.get("ready", got.seconds) if False else got.first_seconds,
                got.seconds,
                got.summary["asked"] / 1e6,
                got.summary["cached"] / 1e6,
            ]
        )
    total = 5 * run.tokens / 1e6
    report.table(
        f"to the batches of step {run.step:,}; token files of {total:,.0f} MB",
        ("", "first call s", "second call s", "MB asked for", "MB read"),
        rows,
    )
    return found


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    report = Report("resume", args)
    n, step = (100_000, 1_000) if args.quick else (1_000_000, 10_000)
    print(n, step)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        pass
    report.close()


if __name__ == "__main__":
    main()
