"""Fine-tuning: useful tokens a second beside a plain loop and TRL, the cost of the data, the loss.

Every contender trains one epoch over the same samples, tokenised beforehand, from the same
weights, in float32 with AdamW, clipping at norm 1 and the same number of threads:

    plain loop     8 rows in random order, padded to the longest, attention mask, mean loss
    TRL padded     SFTTrainer on the same 8 rows in the same order
    TRL packed     SFTTrainer, packing=True: best-fit-decreasing rows of `width` tokens, one row
                   at a time (rows in one batch would share one dense mask), accumulated to a step
    batchwright    train_sft, bucketed, sorted and packed, microbatches of `budget` tokens

`width` is the longest sample rounded up to a power of two. `budget` is so many whole rows as hold
about the tokens of 8 samples, so all take optimizer steps of about the same size. TRL runs without
activation checkpointing and otherwise as it comes, with its fused AdamW; all others have torch's
default one.

The clock runs from before the first batch is fetched to the end of the last step. Loading the
model, tokenising, planning and packing come before and are shown apart. A short run over other
samples warms each process up. Contenders take turns, and the best turn of each counts. Useful
tokens are those of samples; padding is what the model computes beside them. Seconds of the
processor are shown as well: with one thread they are what the wall clock would show if nobody
else was at work, so it is by them that speeds are judged; with more threads, by the wall clock.
"""

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchwright.batching import BatchPlanBuilder, collate
from batchwright.data.rows.sample import IGNORE
from batchwright.data.rows.source import open_source
from batchwright.data.tokens import make_store
from batchwright.errors import BatchwrightError
from batchwright.models.transformers import load_model
from batchwright.train.sft.loop import train_sft
from batchwright.train.sft.prepare import batching_config, open_prepared
from bench_tokenize import data_file
from common import Contender, Measured, Report, arguments, measure
from sft_ways import (
    PLAIN,
    RATE,
    ROWS,
    TRL_PACKED,
    TRL_PADDED,
    Epoch,
    Laps,
    Task,
    gsm8k,
    long_tail,
    ours,
    padded,
    plain,
    settings,
    trl,
    warm_up,
)

LAYOUTS = ("bucketed", "sorted", "packed")
PACKED = "batchwright packed"
COLUMNS = (
    *("", "useful tok/s", "x plain", "tok/cpu s", "x plain (cpu)"),
    *("padding %", "steps", "attention", "peak GB", "before s"),
)


def compare(report: Report, task: Task, small: Task, rounds: int) -> dict[str, Epoch]:
    """All contenders in turn, `rounds` times; the best turn of each."""
    contenders = [plain()]
    if find_spec("trl") is None:
        report.not_measured("TRL", "No module named 'trl'")
    else:
        contenders += [trl(name) for name in (TRL_PADDED, TRL_PACKED)]
    contenders += [ours(layout) for layout in LAYOUTS]
    turns: dict[str, list[Measured]] = {way.name: [] for way in contenders}
    for _ in range(rounds):
        for way in contenders:
            got = measure(way, task, small, limit_s=max(report.args.limit, 3600.0), runs=1)
            if got.reason:
                report.not_measured(f"{way.name} ({task.model}, {task.name})", got.reason)
            else:
                turns[way.name].append(got)
    best: dict[str, Epoch] = {}
    rows: list[list[Any]] = []
    for name, measured in turns.items():
        if not measured:
            continue
        epochs = [Epoch(**got.summary) for got in measured]
        fastest = min(epochs, key=lambda epoch: epoch.seconds)
        best[name] = epoch = replace(fastest, cpu_s=min(e.cpu_s for e in epochs))
        against = best.get(PLAIN, epoch)
        rows.append(
            [
                name,
                epoch.useful / epoch.seconds,
                against.seconds / epoch.seconds,
                epoch.useful / epoch.cpu_s,
                against.cpu_s / epoch.cpu_s,
                100 * (1 - epoch.useful / epoch.computed),
                epoch.steps,
                epoch.attention,
                max(got.extra_bytes or 0 for got in measured) / 1e9,
                epoch.before_s,
            ]
        )
    report.table(str(task), COLUMNS, rows)
    return best


def ratio(best: Mapping[str, Epoch], other: str, threads: int) -> float | None:
    """How many times faster than `other` we train packed."""
    mine, theirs = best.get(PACKED), best.get(other)
    if mine is None or theirs is None:
        return None
    return theirs.cpu_s / mine.cpu_s if threads == 1 else theirs.seconds / mine.seconds


@dataclass(frozen=True)
class DataWork:
    """Seconds of the data's part of one epoch, all of it on one thread."""

    load_s: float
    tokenise_s: float
    plan_s: float
    open_s: float
    specs_s: float
    collate_s: float
    steps: int


def data_work(layout: str) -> Contender:
    """Everything that is not the model, done by itself: tokens, plan, batches."""

    def call(task: Task) -> DataWork:
        torch.set_num_threads(task.threads)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            run = Path(folder)
            config = settings(task, layout, run)
            clock = [time.perf_counter()]

            def lap() -> float:
                clock.append(time.perf_counter())
                return clock[-1] - clock[-2]

            tokenizer = load_model(task.model).tokenizer
            load = lap()
            store = make_store(open_source(config.data), tokenizer)[0]
            store.link(run / "tokens")
            tokenise = lap()
            BatchPlanBuilder(store.lengths, batching_config(config, 1)).build(1).save(run / "plan")
            plan = lap()
            data = open_prepared(run)
            assert data is not None
            opened = lap()
            specs = collation = 0.0
            steps = 0
            for step in data.plan.shard(0, 1).iter_steps():
                specs += lap()
                for batch in step.microbatches:
                    collate(batch, data.read, pad_id=tokenizer.pad_id)
                collation += lap()
                steps += 1
        return DataWork(load, tokenise, plan, opened, specs, collation, steps)

    return Contender(layout, lambda task: lambda: call(task), lambda _, work: asdict(work))


def compare_data_work(
    report: Report, task: Task, small: Task, best: Mapping[str, Epoch]
) -> tuple[float | None, float | None]:
    """Worst shares of a step in %: waiting for data, and making batches even if nobody waits."""
    rows: list[list[Any]] = []
    waits, makes = [], []
    for layout in LAYOUTS:
        epoch = best.get(f"batchwright {layout}")
        got = measure(data_work(layout), task, small, limit_s=600.0, runs=3)
        if epoch is None or got.reason:
            why = got.reason or "it was not trained on"
            report.not_measured(f"data of {layout} ({task.model}, {task.name})", why)
            continue
        work = DataWork(**got.summary)
        waits.append(100 * epoch.waited / epoch.seconds)
        makes.append(100 * (work.specs_s + work.collate_s) / epoch.seconds)
        rows.append(
            [
                layout,
                work.load_s,
                work.tokenise_s,
                work.plan_s,
                work.open_s,
                1e3 * work.specs_s / work.steps,
                1e3 * work.collate_s / work.steps,
                1e3 * epoch.seconds / epoch.steps,
                makes[-1],
                waits[-1],
            ]
        )
    report.table(
        f"{task.model}, {task.name}: seconds before the run, milliseconds of a step",
        (
            *("", "load s", "tokenise s", "plan s", "open s"),
            *("batch specs ms", "collate ms", "step ms", "specs+collate %", "waited %"),
        ),
        rows,
    )
    return max(waits, default=None), max(makes, default=None)


def packed_losses(task: Task, run: Path, steps: int, seed: int) -> list[float]:
    laps = Laps()
    train_sft(settings(task, "packed", run, max_steps=steps, seed=seed), trackers=[laps])
    return laps.losses


def padded_losses(task: Task, run: Path, steps: int, rows: int) -> list[float]:
    """The steps of the run's plan by a plain loop: `rows` padded samples at a time."""
    data = open_prepared(run)
    assert data is not None
    model = load_model(task.model).model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for _, step in zip(range(steps), data.plan.iter_steps(), strict=False):
        items = [int(item) for batch in step.microbatches for item in batch.items]
        # Another order than the plan's: within a step it must not matter.
        items.sort()
        count = sum(label != IGNORE for item in items for label in task.labels[item][1:])
        total = 0.0
        for first in range(0, len(items), rows):
            batch = padded(task, items[first : first + rows])
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return losses


def same_loss(steps: int) -> Contender:
    def call(task: Task) -> dict[str, list[float]]:
        torch.set_num_threads(task.threads)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            run = Path(folder) / "run"
            return {
                PACKED: packed_losses(task, run, steps, 42),
                PLAIN: padded_losses(task, run, steps, ROWS),
                "plain loop, row by row": padded_losses(task, run, steps, 1),
                f"{PACKED}, other seed": packed_losses(task, Path(folder) / "other", steps, 43),
            }

    return Contender("same loss", lambda task: lambda: call(task), lambda _, losses: losses)


def compare_losses(report: Report, task: Task, small: Task, steps: int) -> float | None:
    """Largest difference between packed and padded over that of other samples, in one step."""
    got = measure(same_loss(steps), task, small, limit_s=3600.0, runs=1)
    if got.reason:
        report.not_measured(f"same loss ({task.model})", got.reason)
        return None
    losses = {name: np.array(values) for name, values in got.summary.items()}
    mine = losses[PACKED]
    rows = [
        [
            name,
            len(values),
            f"{values[0]:.6f}",
            f"{values[-1]:.6f}",
            float(np.abs(values - mine).max()) if values is not mine else None,
        ]
        for name, values in losses.items()
    ]
    one, each = losses[PLAIN], losses["plain loop, row by row"]
    rounding = float(np.abs(one - each).max())
    other = float(np.abs(losses[f"{PACKED}, other seed"] - mine).max())
    report.table(
        f"{task.model}, {task.name}: loss of each step on the same samples a step; padded by 8 and "
        f"row by row differ by {rounding:.1e}, other samples by {other:.1e}",
        ("", "steps", "first loss", "last loss", "largest difference"),
        rows,
    )
    return float(np.abs(one - mine).max()) / other


def tasks_of(
    report: Report, folder: Path, model: str, sizes: tuple[int, int], longest: int
) -> list[Task]:
    """GSM8K, if it is here, and the long tail."""
    threads = report.args.threads
    tasks = [long_tail(folder, model, sizes[1], longest, threads)]
    if data_file().is_file():
        return [gsm8k(folder, model, sizes[0], threads), *tasks]
    report.not_measured("GSM8K", "no text/gsm8k_train.jsonl; set BATCHWRIGHT_DATA")
    return tasks


def run_model(
    report: Report, model: str, sizes: tuple[int, int], longest: int, rounds: int, loss_steps: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        try:
            small = warm_up(Path(name), model, report.args.threads)
        except (BatchwrightError, ImportError) as error:
            report.not_measured(model, str(error))
            return
        for task in tasks_of(report, Path(name), model, sizes, longest):
            best = compare(report, task, small, rounds)
            waited, made = compare_data_work(report, task, small, best)
            where = f"{model}, {task.name}"
            if task.name != "GSM8K":
                faster = ratio(best, PLAIN, task.threads)
                report.target(f"{where}: packed, times plain", faster, least=1.5)
            faster = ratio(best, TRL_PACKED, task.threads)
            report.target(f"{where}: packed, times TRL packed", faster, least=1.0)
            report.target(f"{where}: waiting for data, % of a step", waited, most=1.0)
            report.target(f"{where}: planning and collation, % of a step", made, most=1.0)
        share = compare_losses(report, task, small, loss_steps)
        what = "packed against padded loss, share of what other samples change"
        report.target(f"{model}: {what}", share, most=0.1)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for everybody")
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument("--model", choices=("tiny", "smollm2"), help="only this one")
    args = parser.parse_args()
    # Before the first fork, or children would be told of threads that they do not have.
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    report = Report("sft", args)
    report.stamp["threads"] = args.threads
    report.stamp["versions"]["transformers"] = metadata.version("transformers")
    print(f"threads: {args.threads}")
    if find_spec("trl") is not None:
        # Once here instead of once in every child.
        from trl import SFTTrainer  # noqa: F401
    if args.model != "smollm2":
        sizes, rounds, steps = ((16, 32), 1, 4) if args.quick else ((64, 128), 3, 20)
        if args.smoke:
            sizes, rounds, steps = (4, 4), 1, 1
        run_model(report, "tiny", sizes, 2048, args.rounds or rounds, steps)
    if args.quick:
        report.not_measured("smollm2", "not with --quick")
    elif args.model != "tiny":
        # Some 60 tokens a second and 2 MB of activations a token: few samples, none very long.
        run_model(report, "smollm2", (16, 32), 512, args.rounds or 1, 3)
    report.close()


if __name__ == "__main__":
    main()
