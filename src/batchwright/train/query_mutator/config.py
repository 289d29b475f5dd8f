"""The settings of a query-mutation run. Light to import: the command's help is made from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from batchwright.errors import ConfigError
from batchwright.train.settings import flag

__all__ = ["QueryMutatorConfig", "width_of"]


@dataclass(frozen=True, kw_only=True)
class QueryMutatorConfig:
    """Who rewrites, who answers, and how the agent learns."""

    dataset: str = "shipped"
    """shipped, or JSONL, Parquet or hf:NAME with question and answer."""
    target_model: str = "local:smollm2"
    """Who answers: ollama:NAME, URL#NAME, local:smollm2, local:PATH, sim; a plain name with
    --endpoint."""
    mutator_model: str = ""
    """Who rewrites; default: the target model."""
    judge_model: str = ""
    """Who judges, for --reward-type llm-judge; default: the target model."""
    embedder: str = "ngrams"
    """ngrams (built in), local:minilm, or a model of an endpoint."""
    endpoint: tuple[str, ...] = ()
    """Servers that share the calls to models with plain names; may be given several times."""
    reward_type: Literal[
        "match", "numeric", "exact", "contains", "cosine-similarity", "llm-judge"
    ] = "match"
    """match: numbers by value, other answers as whole words."""
    operators: Path | None = None
    """A TOML file with [[operator]] tables of your own."""

    num_processes: int = 16
    """Environments at once."""
    num_steps: int = 8
    """Steps of each environment between two updates."""
    num_env_steps: int = 2048
    """Steps of all environments together."""
    per_episode_max_steps: int = 2
    """Rewritings of one question at most."""
    use_batching: Annotated[bool, Parameter(negative="--no-batching")] = True
    """Calls at the same time; --no-batching makes one after the other."""
    batch_size: str = "auto"
    """Calls in flight at each server, or auto."""
    overlap: bool = True
    """Environments run ahead of each other within a rollout; the steps are the same."""

    ppo_epoch: int = 4
    """Passes over each rollout."""
    num_mini_batch: int = 4
    """Minibatches of a pass."""
    lr: float = 3e-3
    """Learning rate of Adam, falling to zero."""
    gamma: float = 0.99
    """Discount of later rewards."""
    clip_param: float = 0.2
    """How far a probability may move in one update."""
    entropy_coef: float = 0.02
    """Weight of staying undecided."""
    value_loss_coef: float = 0.5
    """Weight of the value's error."""
    max_grad_norm: float = 0.5
    """Largest gradient norm."""
    cost: float = 0.02
    """What a rewriting costs, in points of the reward."""
    least_similarity: float = 0.3
    """Rewritings whose embedding is further from the question's are turned down."""
    seed: int = 42
    """Of questions, rewritings, the policy and its choices."""

    temperature: float = 0.7
    """Of the mutator; the target answers at 0."""
    max_tokens: int = 64
    """Longest rewriting and answer."""
    deadline_s: Annotated[float, Parameter(name="--deadline")] = 120.0
    """Seconds for a call with all its retries."""
    error_budget: float = 0.2
    """Share of failed calls, of the last 200, at which the run stops."""

    save_dir: Path = Path("runs/query-mutator")
    """Where everything is written, the answers of the models too."""
    save_interval: int = 5
    """Updates between checkpoints."""
    log_interval: int = 1
    """Updates between lines of the log."""

    def __post_init__(self) -> None:
        for name in (
            *("num_processes", "num_steps", "num_env_steps", "per_episode_max_steps", "ppo_epoch"),
            *("num_mini_batch", "max_tokens", "save_interval", "log_interval"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 1 or more")
        for name in ("lr", "clip_param", "max_grad_norm", "deadline_s", "error_budget"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not a number above 0")
        for name in ("entropy_coef", "value_loss_coef", "cost", "temperature"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 0 or more")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"--gamma {self.gamma} is not from 0 to 1")
        width_of(self)


def width_of(config: QueryMutatorConfig) -> int | Literal["auto"]:
    """Calls in flight that the flags ask for."""
    if not config.use_batching:
        return 1
    if config.batch_size == "auto":
        return "auto"
    try:
        width = int(config.batch_size)
    except ValueError:
        width = 0
    if width < 1:
        raise ConfigError(f"--batch-size {config.batch_size} is neither auto nor 1 or more")
    return width
