"""Ways to train one epoch over the same samples: a plain loop, TRL's SFTTrainer, train_sft."""

import json
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchwright.data.rows.sample import IGNORE
from batchwright.data.rows.source import open_source
from batchwright.data.tokens import make_store
from batchwright.models.transformers import load_model, tokenizer_for
from batchwright.rng import stream
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft
from bench_tokenize import data_file
from common import SEED, Contender

__all__ = [
    "PLAIN",
    "RATE",
    "ROWS",
    "TRL_PACKED",
    "TRL_PADDED",
    "Epoch",
    "Laps",
    "Task",
    "gsm8k",
    "long_tail",
    "ours",
    "padded",
    "plain",
    "settings",
    "trl",
    "warm_up",
]

ROWS = 8
PLAIN = f"plain loop, {ROWS} rows padded"
TRL_PADDED = f"TRL padded, {ROWS} rows"
TRL_PACKED = "TRL packed"
RATE = 1e-4


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
    def longest(self) -> int:
        return max(map(len, self.tokens))

    @property
    def width(self) -> int:
        """Of packed rows: the longest sample, rounded up to a power of two."""
        return 1 << (self.longest - 1).bit_length()

    @property
    def budget(self) -> int:
        """Tokens of a step: whole rows, about as many tokens as 8 samples have on average."""
        return self.width * max(1, round(ROWS * self.useful / len(self.tokens) / self.width))

    @property
    def order(self) -> list[int]:
        shuffled = stream(SEED, "benchmark/sft order", len(self.tokens))
        return [int(item) for item in shuffled.permutation(len(self.tokens))]

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.name}: {len(self.tokens)} samples, {self.useful:,} tokens, "
            f"longest {self.longest:,}; packed rows of {self.width:,}, budget {self.budget:,}"
        )


def gsm8k(folder: Path, model: str, n: int, threads: int) -> Task:
    lines = data_file().read_text().splitlines()
    chosen = stream(SEED, "benchmark/gsm8k rows", n).choice(len(lines), n, replace=False)
    return _task(folder, model, "GSM8K", [json.loads(lines[item]) for item in chosen], threads)


def long_tail(folder: Path, model: str, n: int, longest: int, threads: int) -> Task:
    """Random printable text, lognormal lengths: the middle one about 120 tokens, few long ones."""
    random = stream(SEED, "benchmark/long tail", n)
    lengths = np.clip(random.lognormal(np.log(120), 1.0, n), 8, longest).astype(int)
    letters = np.array(list(string.ascii_letters + string.digits + " .,;:!?" + " " * 12))
    # More text than is needed: a token has three letters at most times.
    texts = ["".join(random.choice(letters, 4 * length)) for length in lengths]
    encoded = tokenizer_for(model).encode_batch(texts, special=False)
    rows = [
        {"input_ids": [int(token) for token in ids[:length]]}
        for ids, length in zip(encoded, lengths, strict=True)
    ]
    return _task(folder, model, f"long tail up to {longest:,}", rows, threads)


def warm_up(folder: Path, model: str, threads: int) -> Task:
    """Two steps of short samples."""
    rows = [{"input_ids": list(range(32, 32 + 24 + number))} for number in range(2 * ROWS)]
    return _task(folder, model, "warm-up", rows, threads)


def _task(
    folder: Path, model: str, name: str, rows: Sequence[Mapping[str, Any]], threads: int
) -> Task:
    place = folder / f"{model}, {name}"
    place.mkdir()
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = make_store(open_source(str(file)), tokenizer_for(model))[0]
    samples = [store(item) for item in range(len(store))]
    tokens = [sample.input_ids.tolist() for sample in samples]
    labels = [np.where(sample.loss_mask, sample.input_ids, IGNORE).tolist() for sample in samples]
    return Task(model, name, file, tokens, labels, threads)


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
    waited: float

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
        **({"pack_max_len": task.width} if layout == "packed" else {}),
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
        if layout == "packed":
            # Packed rows lose their padding before they reach the model.
            return Epoch.of(laps, done.useful_tokens, done.useful_tokens, done.backend)
        return Epoch.of(laps, done.useful_tokens, done.padded_tokens, "sdpa, causal")

    return Contender(f"batchwright {layout}", lambda task: lambda: call(task), _checked)


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
            model(**batch, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            useful += int(batch["attention_mask"].sum())
            computed += batch["input_ids"].numel()
            laps.lap()
        how = f"{model.config._attn_implementation}, mask"
        return Epoch.of(laps, useful, computed, how)

    return Contender(PLAIN, lambda task: lambda: call(task), _checked)


def padded(task: Task, items: Sequence[int]) -> dict[str, torch.Tensor]:
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
    packed = name == TRL_PACKED

    def call(task: Task) -> Epoch:
        from datasets import Dataset, disable_progress_bars
        from transformers import PrinterCallback, TrainerCallback
        from transformers.utils import logging
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
                tokens, mask = inputs["input_ids"].numel(), inputs.get("attention_mask")
                seen["computed"] += tokens
                seen["useful"] += tokens if mask is None else int(mask.sum())
                return super().training_step(model, inputs, *args, **kwargs)

        rows = [{"input_ids": task.tokens[i], "labels": task.labels[i]} for i in task.order]
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            trainer = Counting(
                model=load_model(task.model).model,
                args=_trl_settings(task, packed, folder),
                train_dataset=Dataset.from_list(rows),
                processing_class=_stub_tokenizer(),
                callbacks=[Clock()],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        how = f"{trainer.model.config._attn_implementation}, {'dense ' * packed}mask"
        return Epoch.of(laps, seen["useful"], seen["computed"], how)

    return Contender(name, lambda task: lambda: call(task), _checked)


def _trl_settings(task: Task, packed: bool, folder: str) -> Any:
    from trl import SFTConfig as TrlConfig

    return TrlConfig(
        output_dir=folder,
        use_cpu=True,
        packing=packed,
        max_length=task.width,
        per_device_train_batch_size=1 if packed else ROWS,
        gradient_accumulation_steps=task.budget // task.width if packed else 1,
        # The rows come shuffled, in the order the plain loop has them in.
        train_sampling_strategy="random" if packed else "sequential",
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


def _stub_tokenizer() -> Any:
    """SFTTrainer wants a tokenizer to know the padding by; the rows are tokenised already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>"))}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _checked(task: Task, epoch: Epoch) -> Mapping[str, Any]:
    # Other samples would make the comparison void.
    assert epoch.useful == task.useful, f"{epoch.useful} of {task.useful} tokens were trained on"
    return asdict(epoch)
