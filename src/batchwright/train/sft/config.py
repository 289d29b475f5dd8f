"""The settings of a fine-tuning run. Light to import: the command's help is made from it."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

from batchwright.errors import ConfigError
from batchwright.train.run import RunConfig

__all__ = ["SftConfig"]

_PLANNED = (
    *("layout", "token_budget", "bucket_edges", "pack", "pack_max_len", "pack_mode"),
    *(
        "segment_multiple",
        "group_by",
        "cost_column",
        "overflow",
        "no_loss",
        "step_size",
        "grad_accum",
    ),
)
"""Settings that a plan already holds."""
_GYM = ("gym_host", "gym_port", "gym_transport", "gym_connections")
_ONLINE = (
    *("online_source", *_GYM, "online_tasks", "online_policy", "buffer_size", "online_window"),
    *("online_fresh", "online_min_samples", "online_train_on", "curriculum"),
    *("difficulty_min", "difficulty_max"),
)
"""Settings of an online run."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """What to train, on what, and how."""

    REQUIRED: ClassVar = ("model", "data")
    CHANGEABLE: ClassVar = (
        *("epochs", "max_steps", "stop_after", "save_every", "save_minutes"),
        *("eval_every", "keep", "track"),
        # Where weights stand, not what is trained: a checkpoint fits any number of ranks.
        "fsdp",
        # A server may come back at another address.
        *_GYM,
    )

    model: str = ""
    """tiny, smollm2, a transformers folder or a hub id."""
    data: tuple[str, ...] = ()
    """JSONL (.gz, .zst), Parquet, a folder or hf:NAME[:SPLIT]; several, or shares as FILE=0.7."""

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
    segment_multiple: int = 1
    """Pad every sample to a multiple of this, for context parallel or FP8."""
    group_by: str | None = None
    """Column of the rows: those of equal value share a microbatch, and are held out together."""
    cost_column: str | None = None
    """Column of the rows: tokens to add to a sample's length in the budget, as of its images."""
    overflow: Literal["error", "skip", "truncate", "split"] = "error"
    """What to do with a sample that is too long for a row."""
    no_loss: Literal["error", "skip"] = "error"
    """What to do with a sample without a token that carries loss."""
    step_size: int = 0
    """Microbatches in an optimizer step over all ranks; 0: --grad-accum times the ranks."""
    grad_accum: int = 1
    """Gradient accumulation: microbatches of each rank in an optimizer step."""

    epochs: int = 0
    """Passes over the data; 0: as many as --batchplan has, else one."""
    max_steps: int = 0
    """Stop after this many optimizer steps; 0: no limit, which online means until Ctrl-C."""
    stop_after: int = 0
    """Save and stop after this many steps of this call, to be resumed; 0: run to the end."""
    lr: float = 1e-4
    """Peak learning rate."""
    schedule: Literal["auto", "cosine", "linear", "constant"] = "auto"
    """Learning rate after warm-up; auto: cosine, or constant online without --max-steps."""
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

    online: bool = False
    """Learn from a stream of episodes, through a replay buffer; --data fills the buffer first."""
    online_source: Literal["gym", "mock", "reasoning-gym"] = "gym"
    """Where episodes come from: a gym server, tasks of reasoning-gym, or sums without a server."""
    gym_host: str = "localhost"
    """Host of the gym server."""
    gym_port: int = 8023
    """Port of the gym server."""
    gym_transport: Literal["telnet", "tcp", "websocket"] = "telnet"
    """What carries the lines of the gym server."""
    gym_connections: int = 1
    """Episodes that are played at once on the gym server."""
    online_tasks: str = ""
    """Tasks of reasoning-gym or puzzles of the gym server, with commas between."""
    online_policy: str = ""
    """hint or random in a gym, answer in reasoning-gym, or a model: ollama:NAME, URL#NAME."""
    buffer_size: int = 100_000
    """Most samples in the replay buffer; a full one evicts the oldest."""
    online_window: int = 100
    """Microbatches that are planned over one snapshot of the buffer."""
    online_fresh: int = 100
    """Samples, to the end of an episode, that are taken from the stream before each window."""
    online_min_samples: int = 100
    """Samples to train on that the buffer must hold before a window is planned."""
    online_train_on: Literal["success", "all"] = "success"
    """Train on samples of solved episodes only, or on all; rows of --data are always trained."""
    curriculum: Literal["none", "success-rate"] = "none"
    """success-rate: from easy to hard, as fast as episodes are solved."""
    difficulty_min: float = 0.0
    """Lowest difficulty to ask for."""
    difficulty_max: float = 1.0
    """Highest difficulty to ask for."""

    eval_data: str | None = None
    """Held-out rows to evaluate on, in any form that --data takes."""
    eval_fraction: float = 0.0
    """Share of the data that is held out by a hash of the id, without --eval-data."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""

    run_dir: Path = Path("runs/sft-{n}")
    """The folder to write the run to; {n} stands for the next free number."""
    save_every: int = 0
    """Steps between checkpoints, besides those by time; 0: by time only."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, or 50 times what one takes if that is more; 0: none by time."""
    keep: int = 2
    """Checkpoints to keep; older ones are removed once a newer one is written."""
    track: tuple[str, ...] = ()
    """Experiment tracker besides events.jsonl: tensorboard, wandb or mlflow."""
    tokenizer: str | None = None
    """Tokenizer; default: the model's own."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """Stop at a row that cannot be read, or skip and count it."""
    loss_on: Literal["all-turns", "last-turn", "everything"] = "all-turns"
    """Loss on every assistant turn and response, only on the last turn, or on all tokens."""
    ignore_column: tuple[str, ...] = ()
    """Leave this column of text out of the rows; repeatable."""
    ids: Literal["auto", "ignore", "require"] = "auto"
    """Sample ids: those of the rows where they have one, their numbers, or refuse rows without."""
    repeated_ids: Literal["fail", "skip"] = "fail"
    """Stop at rows with the same id, or keep the first and count the others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.data
        if isinstance(given, str):
            object.__setattr__(self, "data", (given,) if given else ())
        self.at_least(1, "token_budget", "pack_max_len", "segment_multiple", "grad_accum", "keep")
        self.at_least(0, "epochs", "step_size", "max_steps", "warmup_steps", "eval_every")
        self.at_least(0, "save_every", "stop_after", "weight_decay", "clip", "lora_rank")
        self.at_least(0, "lora_alpha", "save_minutes")
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
        self.at_least(1, "buffer_size", "online_window", "online_fresh", "online_min_samples")
        self.at_least(1, "gym_port", "gym_connections")
        self.from_0_to_1("difficulty_min", "difficulty_max")
        if self.difficulty_min > self.difficulty_max:
            raise ConfigError(
                f"--difficulty-min must be at most --difficulty-max, got {self.difficulty_min} "
                f"and {self.difficulty_max}"
            )
        if self.endless and self.schedule in ("cosine", "linear"):
            raise ConfigError(
                f"--schedule {self.schedule} needs the number of steps; give --max-steps, or "
                f"--schedule constant"
            )
        if self.batchplan:
            self.refuse_planned(self._changed())

    @property
    def endless(self) -> bool:
        """Whether nothing but Ctrl-C or the end of its stream ends the run."""
        return self.online and not self.max_steps

    @property
    def chosen_schedule(self) -> Literal["cosine", "linear", "constant"]:
        """The schedule that --schedule comes to."""
        if self.schedule == "auto":
            return "constant" if self.endless else "cosine"
        return self.schedule

    @property
    def required(self) -> tuple[str, ...]:
        if not self.online:
            return self.REQUIRED
        return ("model", *(("online_tasks",) if self.online_source == "reasoning-gym" else ()))

    def of_adapter(self, rank: int, alpha: float) -> "SftConfig":
        """The settings of a run that trains on an adapter of this rank and alpha."""
        for name, own in (("lora_rank", rank), ("lora_alpha", alpha)):
            given = getattr(self, name)
            if given not in (own, getattr(SftConfig, name)):
                raise ConfigError(
                    f"{self.flag(name)} must be {own:g}, that of the adapter {self.model}, which "
                    f"is trained on, got {given:g}; leave it out, or merge the adapter first: "
                    f"batchwright models merge {self.model} -o FOLDER"
                )
        return replace(self, lora_rank=rank, lora_alpha=alpha)

    def refuse_ignored(self, given: Iterable[str] = ()) -> None:
        """Refuse settings of a new run that another setting would make without effect.

        Besides those that differ from their defaults, those that were `given` as they are.
        """
        if self.step_size and self.grad_accum != 1:
            raise ConfigError(
                f"--step-size {self.step_size} and --grad-accum {self.grad_accum} both say how "
                f"many microbatches a step has; give one of them"
            )
        if self.cost_column is not None and self.overflow == "split":
            raise ConfigError(
                "--overflow split cannot divide the costs of --cost-column; choose error, skip "
                "or truncate"
            )
        if 0 < self.max_steps < self.warmup_steps:
            raise ConfigError(
                f"--warmup-steps {self.warmup_steps} is more than --max-steps {self.max_steps}, so "
                f"--lr would never be reached; warm up for fewer steps, or train for more"
            )
        ignored = self._ignored()
        for name in (*self._changed(), *given):
            if name in ignored:
                raise ConfigError(f"{self.flag(name)} {ignored[name]}")

    def _ignored(self) -> dict[str, str]:
        """Settings that have no effect beside the others, and why."""
        layout = self.chosen_layout
        why: dict[str, str] = {}
        if layout != "bucketed":
            why["bucket_edges"] = (
                f"is for the bucketed layout, got {layout}; leave it out, or choose "
                f"--layout bucketed"
            )
        if layout != "packed":
            other = f"is for the packed layout, got {layout}; leave it out, or add --pack"
            why |= dict.fromkeys(("pack_max_len", "pack_mode"), other)
        if not self.lora_rank and not (Path(self.model) / "adapter_config.json").is_file():
            why["lora_alpha"] = "has no effect without --lora-rank; add it, or leave it out"
        if not (self.eval_data or self.eval_fraction):
            why["eval_every"] = (
                "has no effect without --eval-data or --eval-fraction; add one, or leave it out"
            )
        if not self.online:
            return why | dict.fromkeys(_ONLINE, "has no effect without --online; add it")
        offline = (
            *("batchplan", "epochs", "eval_fraction", "pack_mode", "segment_multiple", "fsdp"),
            *("group_by", "cost_column"),
        )
        why |= dict.fromkeys(offline, "has no effect with --online; leave one of them out")
        only = f"has no effect with --online-source {self.online_source}; leave it out"
        if self.online_source != "gym":
            why |= dict.fromkeys(_GYM, only)
        if self.online_source == "mock":
            why |= dict.fromkeys(("online_tasks", "online_policy"), only)
        return why

    def _changed(self) -> list[str]:
        """The settings that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

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
