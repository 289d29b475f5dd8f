"""The settings of a fine-tuning run. Light to import: the command's help is made from it."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from batchwright.errors import ConfigError
from batchwright.train.settings import flag, from_toml, to_toml

__all__ = ["SftConfig"]

_PLANNED = (
    *("layout", "token_budget", "bucket_edges", "pack", "pack_max_len", "pack_mode"),
    *("overflow", "step_size", "grad_accum"),
)
"""Settings that a plan already holds."""


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """What to train, on what, and how."""

    model: str = ""
    """tiny, smollm2, a transformers folder or a hub id."""
    data: str = ""
    """JSONL (.gz, .zst), Parquet, a folder of them, a saved HF dataset or hf:NAME[:SPLIT]."""

    batchplan: Path | None = None
    """A plan built before; otherwise one is built from the flags below."""
    layout: Literal["auto", "bucketed", "sorted", "packed"] = "auto"
    """auto: packed with --pack, bucketed with --bucket-edges, else sorted."""
    token_budget: int = 4096
    """Padded tokens of one microbatch."""
    bucket_edges: str | None = None
    """Upper lengths of the buckets, as 128,256,512."""
    pack: bool = False
    """Join samples into full rows, kept apart by attention."""
    pack_max_len: int = 2048
    """Width of a packed row; longer samples follow --overflow."""
    pack_mode: Literal["best_fit_decreasing", "optimal", "first_fit", "best_fit", "greedy"] = (
        "best_fit_decreasing"
    )
    """How rows are packed."""
    overflow: Literal["error", "skip", "truncate", "split"] = "error"
    """What becomes of a sample that is too long for a row."""
    step_size: int = 0
    """Microbatches of an optimizer step over all ranks; 0: --grad-accum times the ranks."""
    grad_accum: int = 1
    """Microbatches of a rank in one optimizer step."""

    epochs: int = 0
    """Passes over the data; 0: as many as --batchplan has, else one."""
    max_steps: int = 0
    """Stop after this many optimizer steps; 0: no limit."""
    stop_after: int = 0
    """Save and stop after this many steps of this call, to be resumed; 0: run to the end."""
    lr: float = 1e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 0.0
    """Decay of matrices; biases and norms are left alone."""
    clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the accelerator is made for it, else float32."""
    activation_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights; 0: the weights."""
    lora_alpha: float = 16.0
    """Scale of the adapters."""
    attention: Literal["auto", "flash", "segments", "sdpa", "flex"] = "auto"
    """How packed samples are kept apart; auto takes the fastest that is here."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    fsdp: bool = False
    """Shard weights over the ranks (FSDP2) instead of copying them (DDP)."""
    seed: int = 42
    """Of the plan's order and of dropout."""

    eval_data: str | None = None
    """Rows to evaluate on."""
    eval_fraction: float = 0.0
    """Share of the data held out by a hash of the id, where there is no --eval-data."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""

    run_dir: Path = Path("runs/sft")
    """Where everything is written."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: int = 2
    """Checkpoints to keep; older ones are removed once a newer one is safe."""
    track: tuple[str, ...] = ()
    """tensorboard, wandb or mlflow, beside events.jsonl."""
    tokenizer: str | None = None
    """Default: the model's own."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """Stop at a row that cannot be read, or skip and count it."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "pack_max_len", "grad_accum", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 1 or more")
        for name in (
            "epochs",
            "step_size",
            "max_steps",
            "warmup_steps",
            "eval_every",
            "save_every",
            "stop_after",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 0 or more")
        for name in ("weight_decay", "clip", "lora_rank", "lora_alpha"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 0 or more")
        # The optimizer computes in 32 bits; a rate like 1e38 would overflow there.
        if not 0 < self.lr <= 1e30:
            raise ConfigError(f"--lr {self.lr} is not a number above 0 and up to 1e30")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"--eval-fraction {self.eval_fraction} is not from 0 to below 1")
        if self.eval_fraction and (self.eval_data or self.batchplan):
            raise ConfigError(
                "--eval-fraction takes its samples from the data that a plan covers; "
                "give either it, or --eval-data and --batchplan"
            )
        if self.pack and self.layout not in ("auto", "packed"):
            raise ConfigError(f"--pack contradicts --layout {self.layout}; give one of them")
        if self.batchplan:
            defaults = {field.name: field.default for field in fields(self)}
            given = [name for name in _PLANNED if getattr(self, name) != defaults[name]]
            if given:
                raise ConfigError(
                    f"{flag(given[0])} is part of the plan that --batchplan names; "
                    f"build the plan with it, or leave one of them out"
                )

    def named(self) -> "SftConfig":
        """Itself, if it says what to train and on what."""
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ConfigError(f"no --{name}; name one, or go on with a run by --resume RUN")
        return self

    @property
    def chosen_layout(self) -> Literal["bucketed", "sorted", "packed"]:
        if self.layout != "auto":
            return self.layout
        if self.pack:
            return "packed"
        return "bucketed" if self.bucket_edges else "sorted"

    def to_toml(self) -> str:
        """The settings as `config.toml`."""
        return to_toml(self)

    @classmethod
    def load(cls, path: Path) -> "SftConfig":
        """Read a `config.toml`."""
        return from_toml(cls, path)
