"""The settings of a fine-tuning run. Light to import: the command's help is made from it."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from batchwright.errors import ConfigError
from batchwright.train.run import RunConfig

__all__ = ["SftConfig"]

_PLANNED = (
    *("layout", "token_budget", "bucket_edges", "pack", "pack_max_len", "pack_mode"),
    *("overflow", "step_size", "grad_accum"),
)
"""Settings that a plan already holds."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """What to train, on what, and how."""

    REQUIRED: ClassVar = ("model", "data")
    CHANGEABLE: ClassVar = (
        *("epochs", "max_steps", "stop_after", "save_every", "eval_every", "keep", "track"),
        # Where weights stand, not what is trained: a checkpoint fits any number of ranks.
        "fsdp",
    )

    model: str = ""
    """tiny, smollm2, a transformers folder or a hub id."""
    data: str = ""
    """JSONL (.gz, .zst), Parquet, a folder of them, a saved HF dataset or hf:NAME[:SPLIT]."""

    batchplan: Path | None = None
    """A saved batch plan; without it, one is built from the flags below."""
    layout: Literal["auto", "bucketed", "sorted", "packed"] = "auto"
    """auto: packed with --pack, bucketed with --bucket-edges, else sorted."""
    token_budget: int = 4096
    """Padded tokens in one microbatch."""
    bucket_edges: str | None = None
    """Upper lengths of the buckets, as 128,256,512."""
    pack: bool = False
    """Pack samples into full rows, isolated from each other by attention."""
    pack_max_len: int = 2048
    """Length of a packed row in tokens; longer samples follow --overflow."""
    pack_mode: Literal["best_fit_decreasing", "optimal", "first_fit", "best_fit", "greedy"] = (
        "best_fit_decreasing"
    )
    """Bin packing algorithm."""
    overflow: Literal["error", "skip", "truncate", "split"] = "error"
    """What to do with a sample that is too long for a row."""
    step_size: int = 0
    """Microbatches in an optimizer step over all ranks; 0: --grad-accum times the ranks."""
    grad_accum: int = 1
    """Gradient accumulation: microbatches of each rank in an optimizer step."""

    epochs: int = 0
    """Passes over the data; 0: as many as --batchplan has, else one."""
    max_steps: int = 0
    """Stop after this many optimizer steps; 0: no limit."""
    stop_after: int = 0
    """Save and stop after this many steps of this call, to be resumed; 0: run to the end."""
    lr: float = 1e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after warm-up."""
    warmup_steps: int = 0
    """Steps of linear learning rate warm-up."""
    weight_decay: float = 0.0
    """AdamW weight decay of matrices; biases and norms have none."""
    clip: float = 1.0
    """Gradient clipping: largest gradient norm; 0: no clipping."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast precision; auto: bfloat16 where the accelerator supports it, else float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    lora_rank: int = 0
    """LoRA rank: train adapters of this rank instead of the weights; 0: full fine-tuning."""
    lora_alpha: float = 16.0
    """LoRA alpha: the adapters are scaled by alpha / rank."""
    attention: Literal["auto", "flash", "segments", "sdpa", "flex"] = "auto"
    """Attention backend that isolates packed samples; auto: the fastest that is available."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    fsdp: bool = False
    """Shard weights over the ranks (FSDP2) instead of replicating them (DDP)."""
    seed: int = 42
    """Random seed of the plan's order, of dropout and of LoRA initialisation."""

    eval_data: str | None = None
    """Held-out rows to evaluate on, in any form that --data takes."""
    eval_fraction: float = 0.0
    """Share of the data that is held out by a hash of the id, without --eval-data."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""

    run_dir: Path = Path("runs/sft")
    """The folder to write the run to."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: int = 2
    """Checkpoints to keep; older ones are removed once a newer one is written."""
    track: tuple[str, ...] = ()
    """Experiment tracker besides events.jsonl: tensorboard, wandb or mlflow."""
    tokenizer: str | None = None
    """Tokenizer; default: the model's own."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """Stop at a row that cannot be read, or skip and count it."""

    def __post_init__(self) -> None:
        self.at_least(1, "token_budget", "pack_max_len", "grad_accum", "keep")
        self.at_least(0, "epochs", "step_size", "max_steps", "warmup_steps", "eval_every")
        self.at_least(0, "save_every", "stop_after", "weight_decay", "clip", "lora_rank")
        self.at_least(0, "lora_alpha")
        # The optimizer computes in 32 bits; a rate like 1e38 would overflow there.
        if not 0 < self.lr <= 1e30:
            raise ConfigError(f"--lr must be above 0 and at most 1e30, got {self.lr}")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                f"--eval-fraction must be from 0 to below 1, got {self.eval_fraction}"
            )
        if self.eval_fraction and (self.eval_data or self.batchplan):
            raise ConfigError(
                "--eval-fraction holds out samples of the data that a plan covers; "
                "give either it, or --eval-data and --batchplan"
            )
        if self.pack and self.layout not in ("auto", "packed"):
            raise ConfigError(f"--pack contradicts --layout {self.layout}; give one of them")
        if self.batchplan:
            defaults = {field.name: field.default for field in fields(self)}
            self.refuse_planned(n for n in _PLANNED if getattr(self, n) != defaults[n])

    def refuse_ignored(self) -> None:
        """Refuse settings of a new run that another setting would make without effect."""
        if self.bucket_edges and self.chosen_layout != "bucketed":
            raise ConfigError(
                f"--bucket-edges is for the bucketed layout, got {self.chosen_layout}; leave it "
                f"out, or choose --layout bucketed"
            )
        if self.step_size and self.grad_accum != 1:
            raise ConfigError(
                f"--step-size {self.step_size} and --grad-accum {self.grad_accum} both say how "
                f"many microbatches a step has; give one of them"
            )

    @classmethod
    def refuse_planned(cls, given: Iterable[str]) -> None:
        """Refuse settings that a saved plan already has."""
        for name in given:
            if name in _PLANNED:
                raise ConfigError(
                    f"{cls.flag(name)} is part of the plan that --batchplan names; "
                    f"build the plan with it, or leave one of them out"
                )

    @property
    def chosen_layout(self) -> Literal["bucketed", "sorted", "packed"]:
        """The layout that --layout, --pack and --bucket-edges come to."""
        if self.layout != "auto":
            return self.layout
        if self.pack:
            return "packed"
        return "bucketed" if self.bucket_edges else "sorted"
