"""Fine-tuning: useful tokens a second beside a plain loop and TRL, the cost of the data, the loss.

Every contender trains one epoch over the same samples, tokenised beforehand, from the same
weights, in float32 with AdamW, clipping at norm 1 and the same number of threads:

    plain loop     8 rows in random order, padded to the longest, attention mask, mean loss
    TRL padded     SFTTrainer, the same 8 rows in the same order; and grouped by length
    TRL packed     SFTTrainer, packing=True: best-fit-decreasing rows of `width` tokens, one row
                   at a time (rows in one batch would share one dense mask), accumulated to a step
    batchwright    train_sft, bucketed, sorted and packed, microbatches of `budget` tokens

`width` is the longest sample rounded up to a power of two, `budget` about the useful tokens of 8
rows and at least `width`, so that all take optimizer steps of about the same size. TRL runs
without activation checkpointing and with its default fused AdamW; torch's own AdamW is not fused.

The clock runs from before the first batch is fetched to the end of the last step. Loading the
model, tokenising, planning and packing come before and are shown apart. A short run over other
samples warms each process up. Contenders take turns, and the best turn of each counts. Useful
tokens are those of samples; padding is what the model computes beside them. Time of the
processor is shown as well, because on a shared machine it is the steadier of the two.
"""

import contextlib
import json
import os
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.batching import BatchPlanBuilder, collate
from batchwright.data.source import open_source
from batchwright.data.tokens import TokenStore
from batchwright.errors import BatchwrightError
from batchwright.rng import stream
from batchwright.train.config import SftConfig
from batchwright.train.models import load_model, tokenizer_for
from batchwright.train.prepare import batching_config, open_prepared
from batchwright.train.sft import train_sft
from bench_tokenize import data_file
from common import SEED, Contender, Measured, Report, arguments, measure

ROWS = 8
PLAIN = f"plain loop, {ROWS} rows padded"
TRL_PADDED = f"TRL padded, {ROWS} rows"
TRL_GROUPED = f"TRL padded, {ROWS} rows by length"
TRL_PACKED = "TRL packed"
LAYOUTS = ("bucketed", "sorted", "packed")
IGNORE = -100
RATE = 1e-4

COLUMNS = (
    *("", "useful tok/s", "x plain", "tok/cpu s", "x plain (cpu)"),
    *("padding %", "steps", "attention", "peak GB", "before s"),
)


@dataclass(frozen=True)
class Task:
    """Samples for one model: as a file for us, as lists for the others."""

    model: str
    name: str
    file: Path
    tokens: list[list[int]]
    labels: list[list[int]]
    threads: int

    @property
    def useful(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def width(self) -> int:
        return _power_of_two(max(map(len, self.tokens)))

    @property
    def budget(self) -> int:
        return max(self.width, _power_of_two(ROWS * self.useful // len(self.tokens)))

    @property
    def order(self) -> NDArray[np.int64]:
        return stream(SEED, "benchmark/sft order", len(self.tokens)).permutation(len(self.tokens))

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.name}: {len(self.tokens)} samples, {self.useful:,} tokens, "
            f"longest {max(map(len, self.tokens)):,}; width {self.width:,}, budget {self.budget:,}"
        )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass
class Laps:
    """The clocks at the beginning of the first step and at the end of each; a tracker of ours."""

    called: float = field(default_factory=time.perf_counter)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    waited: float = 0.0

    def lap(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def start(self, config: Mapping[str, Any]) -> None:
        self.lap()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lap()
        self.losses.append(metrics["train/loss"])
        self.waited += metrics["train/data_wait_s"]

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class Epoch:
    """What one contender did in one epoch."""

    seconds: float
    cpu_s: float
    before_s: float
    steps: int
    useful: int
    computed: int
    """Tokens that went through the model."""
    attention: str
    waited: float = 0.0

    @classmethod
    def of(cls, laps: Laps, useful: int, computed: int, attention: str) -> "Epoch":
        return cls(
            seconds=laps.wall[-1] - laps.wall[0],
            cpu_s=laps.cpu[-1] - laps.cpu[0],
            before_s=laps.wall[0] - laps.called,
            steps=len(laps.wall) - 1,
            useful=useful,
            computed=computed,
            attention=attention,
            waited=laps.waited,
        )


def settings(task: Task, layout: str, run: Path, **more: Any) -> SftConfig:
    given: dict[str, Any] = {
        "model": task.model,
        "data": str(task.file),
        "layout": layout,
        "token_budget": task.budget,
        "pack_max_len": task.width,
        "lr": RATE,
        "schedule": "constant",
        "clip": 1.0,
        "dtype": "float32",
        "device": "cpu",
        "run_dir": run,
        "keep": 1,
    }
    return SftConfig(**(given | more))


def ours(layout: str) -> Contender:
    def call(task: Task) -> Epoch:
        torch.set_num_threads(task.threads)
        laps = Laps()
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            done = train_sft(settings(task, layout, Path(folder) / "run"), trackers=[laps])
        packed = layout == "packed"
        # Packed rows lose their padding before they reach the model.
        computed = done.useful_tokens if packed else done.padded_tokens
        how = done.backend if packed else "sdpa, causal"
        return Epoch.of(laps, done.useful_tokens, computed, how)

    return Contender(f"batchwright {layout}", lambda task: lambda: call(task), summary)


def plain() -> Contender:
    def call(task: Task) -> Epoch:
        torch.set_num_threads(task.threads)
        laps = Laps()
        model = load_model(task.model).model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        useful = computed = 0
        laps.lap()
        for first in range(0, len(task.tokens), ROWS):
            batch = padded(task, task.order[first : first + ROWS])
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            useful += int(batch["attention_mask"].sum())
            computed += batch["input_ids"].numel()
            laps.lap()
        return Epoch.of(laps, useful, computed, model.config._attn_implementation)

    return Contender(PLAIN, lambda task: lambda: call(task), summary)


def padded(task: Task, items: Sequence[int] | NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Rows as a plain loop makes them: padded behind to the longest."""
    width = max(len(task.tokens[item]) for item in items)
    ids = torch.zeros((len(items), width), dtype=torch.long)
    labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    for row, item in enumerate(items):
        size = len(task.tokens[item])
        ids[row, :size] = torch.tensor(task.tokens[item])
        labels[row, :size] = torch.tensor(task.labels[item])
        mask[row, :size] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trl(name: str) -> Contender:
    def call(task: Task) -> Epoch:
        from datasets import Dataset, disable_progress_bars
        from transformers import PrinterCallback, TrainerCallback
        from transformers.utils import logging
        from trl import SFTConfig as TrlConfig
        from trl import SFTTrainer

        torch.set_num_threads(task.threads)
        logging.set_verbosity_error()
        disable_progress_bars()
        laps = Laps()
        seen = {"useful": 0, "computed": 0}

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                laps.lap()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                laps.lap()

        class Counting(SFTTrainer):  # type: ignore[misc]
            def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                tokens = inputs["input_ids"].numel()
                mask = inputs.get("attention_mask")
                seen["computed"] += tokens
                seen["useful"] += tokens if mask is None else int(mask.sum())
                return super().training_step(model, inputs, *args, **kwargs)

        packed = name == TRL_PACKED
        order = {TRL_PADDED: "sequential", TRL_GROUPED: "group_by_length"}
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            args = TrlConfig(
                output_dir=folder,
                use_cpu=True,
                packing=packed,
                max_length=task.width,
                per_device_train_batch_size=1 if packed else ROWS,
                gradient_accumulation_steps=task.budget // task.width if packed else 1,
                train_sampling_strategy=order.get(name, "random"),
                learning_rate=RATE,
                lr_scheduler_type="constant",
                num_train_epochs=1,
                bf16=False,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            rows = [
                {"input_ids": task.tokens[item], "labels": task.labels[item]} for item in task.order
            ]
            trainer = Counting(
                model=load_model(task.model).model,
                args=args,
                train_dataset=Dataset.from_list(rows),
                processing_class=stub_tokenizer(),
                callbacks=[Clock()],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        how = trainer.model.config._attn_implementation
        how = f"{how}, dense mask" if packed else how
        return Epoch.of(laps, seen["useful"], seen["computed"], how)

    return Contender(name, lambda task: lambda: call(task), summary)


def stub_tokenizer() -> Any:
    """SFTTrainer wants a tokenizer to know the padding by; the rows are tokenised already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>"))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def summary(task: Task, epoch: Epoch) -> Mapping[str, Any]:
    # Other samples would make the comparison void.
    assert epoch.useful == task.useful, f"{epoch.useful} of {task.useful} tokens were trained on"
    return asdict(epoch)


def compare(report: Report, task: Task, small: Task, rounds: int) -> dict[str, Epoch]:
    """All contenders in turn, `rounds` times; the best turn of each."""
    contenders = [plain()]
    if find_spec("trl") is None:
        report.not_measured("TRL", "No module named 'trl'")
    else:
        contenders += [trl(name) for name in (TRL_PADDED, TRL_GROUPED, TRL_PACKED)]
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


def ratio(best: Mapping[str, Epoch], other: str, clock: str = "seconds") -> float | None:
    """How many times faster than `other` we train packed."""
    mine, theirs = best.get("batchwright packed"), best.get(other)
    if mine is None or theirs is None:
        return None
    return float(getattr(theirs, clock) / getattr(mine, clock))


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
            lengths = TokenStore.build(open_source(config.data), tokenizer, run / "tokens").lengths
            tokenise = lap()
            BatchPlanBuilder(lengths, batching_config(config, 1)).build(1).save(run / "plan")
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
) -> tuple[float, float]:
    """Worst shares of a step in %: waiting for data, and making batches even if nobody waits."""
    rows: list[list[Any]] = []
    waits, makes = [], []
    for layout in LAYOUTS:
        epoch = best.get(f"batchwright {layout}")
        got = measure(data_work(layout), task, small, limit_s=600.0, runs=3)
        if epoch is None or got.reason:
            report.not_measured(f"data of {layout} ({task.model}, {task.name})", got.reason)
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
    return max(waits, default=float("nan")), max(makes, default=float("nan"))


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
                "batchwright packed": packed_losses(task, run, steps, 42),
                f"plain loop, {ROWS} rows padded": padded_losses(task, run, steps, ROWS),
                "plain loop, row by row": padded_losses(task, run, steps, 1),
                "batchwright packed, other seed": packed_losses(
                    task, Path(folder) / "other", steps, 43
                ),
            }

    return Contender("same loss", lambda task: lambda: call(task), lambda _, losses: losses)


def compare_losses(report: Report, task: Task, small: Task, steps: int) -> float | None:
    """Largest difference between packed and padded over that of other samples, in one step."""
    got = measure(same_loss(steps), task, small, limit_s=3600.0, runs=1)
    if got.reason:
        report.not_measured(f"same loss ({task.model})", got.reason)
        return None
    losses = {name: np.array(values) for name, values in got.summary.items()}
    mine = losses["batchwright packed"]
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
    other = float(np.abs(losses["batchwright packed, other seed"] - mine).max())
    report.table(
        f"{task.model}, {task.name}: loss of each step on the same samples a step; padded by 8 and "
        f"row by row differ by {rounding:.1e}, other samples by {other:.1e}",
        ("", "steps", "first loss", "last loss", "largest difference"),
        rows,
    )
    return float(np.abs(one - mine).max()) / other


def long_tail(folder: Path, model: str, n: int, longest: int, threads: int) -> Task:
    """Random printable text, lognormal lengths: the middle one about 120 tokens, few long ones."""
    random = stream(SEED, "benchmark/long tail", n)
    lengths = np.clip(random.lognormal(np.log(120), 1.0, n), 8, longest).astype(int)
    letters = np.array(list(string.ascii_letters + string.digits + " .,;:!?" + " " * 12))
    texts = ["".join(random.choice(letters, 4 * length)) for length in lengths]
    encoded = tokenizer_for(model).encode_batch(texts, special=False)
    rows = [
        {"input_ids": [int(token) for token in ids[:length]]}
        for ids, length in zip(encoded, lengths, strict=True)
    ]
    name = "long tail" if longest == 2048 else f"long tail cut at {longest:,}"
    return task_of(folder, model, name, rows, threads)


def gsm8k(folder: Path, model: str, n: int, threads: int) -> Task:
    lines = data_file().read_text().splitlines()
    chosen = stream(SEED, "benchmark/gsm8k rows", n).choice(len(lines), n, replace=False)
    rows = [json.loads(lines[item]) for item in chosen]
    return task_of(folder, model, "GSM8K", rows, threads)


def task_of(
    folder: Path, model: str, name: str, rows: Sequence[Mapping[str, Any]], threads: int
) -> Task:
    place = folder / f"{model}-{name}-{len(rows)}"
    place.mkdir()
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = TokenStore.build(open_source(str(file)), tokenizer_for(model), place / "tokens")
    samples = [store(item) for item in range(len(store))]
    return Task(
        model=model,
        name=name,
        file=file,
        tokens=[sample.input_ids.tolist() for sample in samples],
        labels=[
            np.where(sample.loss_mask, sample.input_ids, IGNORE).tolist() for sample in samples
        ],
        threads=threads,
    )


def small_of(folder: Path, model: str, threads: int) -> Task:
    rows = [{"input_ids": list(range(32, 32 + 24 + number))} for number in range(2 * ROWS)]
    return task_of(folder, model, "warm-up", rows, threads)


@contextlib.contextmanager
def tasks_of(
    report: Report, model: str, sizes: tuple[int, int], longest: int
) -> Iterator[tuple[list[Task], Task] | None]:
    """GSM8K, if it is here, and the long tail; None if the model is not here."""
    threads = report.args.threads
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        try:
            small = small_of(folder, model, threads)
        except (BatchwrightError, ImportError) as error:
            report.not_measured(model, str(error))
            yield None
            return
        tasks = []
        if data_file().is_file():
            tasks.append(gsm8k(folder, model, sizes[0], threads))
        else:
            report.not_measured("GSM8K", "no text/gsm8k_train.jsonl; set BATCHWRIGHT_DATA")
        tasks.append(long_tail(folder, model, sizes[1], longest, threads))
        yield tasks, small


def run_model(
    report: Report, model: str, sizes: tuple[int, int], longest: int, rounds: int, loss_steps: int
) -> None:
    with tasks_of(report, model, sizes, longest) as found:
        for task in found[0] if found else ():
            best = compare(report, task, found[1], rounds)
            waited, made = compare_data_work(report, task, found[1], best)
            where = f"{model}, {task.name}"
            if task.name != "GSM8K":
                faster = ratio(best, PLAIN)
                report.target(f"{where}: packed, times the plain loop", faster, least=1.5)
            against = ratio(best, TRL_PACKED)
            report.target(f"{where}: packed, times TRL packed", against, least=1.0)
            report.target(f"{where}: waiting for data, % of a step", waited, most=1.0)
            report.target(f"{where}: batch specs and collation, % of a step", made, most=1.0)
        if found:
            share = compare_losses(report, found[0][-1], found[1], loss_steps)
            what = "packed against padded loss, share of what other samples change"
            report.target(f"{model}: {what}", share, most=0.1)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for everybody")
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument("--model", choices=("tiny", "smollm2"), help="only this one")
    args = parser.parse_args()
    # Before the first child is forked: it would otherwise have torch's threads without its own.
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    report = Report("sft", args)
    print(f"{args.threads} thread(s)")
    if find_spec("trl") is not None:
        # Once here instead of once in every child.
        from trl import SFTTrainer  # noqa: F401
    wanted: Callable[[str], bool] = lambda name: args.model in (None, name)  # noqa: E731
    if wanted("tiny"):
        sizes, rounds = ((32, 64), 1) if args.quick else ((128, 256), 3)
        steps = 6 if args.quick else 30
        run_model(report, "tiny", sizes, 2048, args.rounds or rounds, steps)
    if wanted("smollm2") and args.quick:
        report.not_measured("smollm2", "not with --quick")
    elif wanted("smollm2"):
        run_model(report, "smollm2", (32, 48), 1024, args.rounds or 1, 3)
    report.close()


if __name__ == "__main__":
    main()
