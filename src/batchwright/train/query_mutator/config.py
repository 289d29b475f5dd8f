"""The settings of a query-mutation run. Light to import: the command's help is made from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Parameter

from batchwright.errors import ConfigError
from batchwright.train.run import RunConfig

__all__ = ["QueryMutatorConfig", "width_of"]


@dataclass(frozen=True, kw_only=True)
class QueryMutatorConfig(RunConfig):
    """Which models rewrite and answer, and how the policy learns."""

    FOLDER: ClassVar = "save_dir"
    CHANGEABLE: ClassVar = (
        *("save_interval", "save_minutes", "log_interval", "stop_after", "track"),
        # How calls are made, not what is asked: responses are cached, and the steps the same.
        *("use_batching", "batch_size", "overlap", "deadline_s", "error_budget"),
    )

    dataset: str = "shipped"
    """shipped, or JSONL, Parquet or hf:NAME with question and answer."""
    target_model: str = "local:smollm2"
    """Model that answers: a name of Ollama such as qwen2.5:3b, URL#NAME, local:smollm2, local:PATH
    or sim."""
    mutator_model: str = ""
    """Model that rewrites questions; default: the target model."""
    judge_model: str = ""
    """LLM judge for --reward-type llm-judge; default: the target model."""
    embedder: str = "ngrams"
    """Embedding model: ngrams (built in), local:minilm, or a model of an endpoint."""
    endpoint: tuple[str, ...] = ()
    """Server that has the models with plain names, instead of Ollama; several share the load."""
    reward_type: Literal[
        "match", "numeric", "exact", "contains", "cosine-similarity", "llm-judge"
    ] = "match"
    """Reward of an answer; match: numbers by value, other answers as whole words."""
    operators: Path | None = None
    """A TOML file with [[operator]] tables of your own."""

    num_processes: int = 16
    """Parallel environments."""
    num_steps: int = 8
    """Rollout length: steps of each environment between two updates."""
    num_env_steps: int = 2048
    """Total steps of all environments together, in whole rollouts; one rollout is the least."""
    per_episode_max_steps: int = 2
    """Episode length: rewritings of one question at most."""
    use_batching: Annotated[bool, Parameter(negative="--no-batching")] = True
    """Make calls concurrently; --no-batching makes one at a time."""
    batch_size: str = "auto"
    """Calls in flight at each server; auto: as many as it sustains."""
    overlap: bool = True
    """Let environments run ahead of each other within a rollout; the steps are the same."""

    ppo_epoch: int = 4
    """PPO epochs: passes over each rollout."""
    num_mini_batch: int = 4
    """Minibatches in a pass."""
    lr: float = 3e-3
    """Adam learning rate, annealed to zero."""
    gamma: float = 0.99
    """Discount factor."""
    clip_param: float = 0.2
    """PPO clip range."""
    entropy_coef: float = 0.02
    """Entropy bonus coefficient."""
    value_loss_coef: float = 0.5
    """Value loss coefficient."""
    max_grad_norm: float = 0.5
    """Gradient clipping: largest gradient norm."""
    cost: float = 0.02
    """Reward penalty for each rewriting."""
    least_similarity: float = 0.3
    """Lowest cosine similarity to the question at which a rewriting is accepted."""
    seed: int = 42
    """Random seed of questions, rewritings, initialisation and actions."""

    temperature: float = 0.7
    """Sampling temperature of the mutator; the target answers at 0."""
    max_tokens: int = 64
    """Token limit of a rewriting and of an answer."""
    deadline_s: Annotated[float, Parameter(name="--deadline")] = 600.0
    """Timeout of a call in seconds, its retries included."""
    error_budget: float = 0.2
    """Error rate of the last 200 calls at which the run stops."""

    save_dir: Path = Path("runs/query-mutator-{n}")
    """The folder to write the run to, cached responses included; {n} stands for the next free
    number."""
    save_interval: int = 5
    """Updates between checkpoints, besides those by time."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, or 50 times what one takes if that is more; 0: none by time."""
    log_interval: int = 1
    """Updates between records in the log."""
    track: tuple[str, ...] = ()
    """Experiment tracker besides events.jsonl: tensorboard, wandb or mlflow."""
    stop_after: int = 0
    """Save and stop after this many updates of this call, to be resumed; 0: run to the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "num_processes", "num_steps", "num_env_steps", "per_episode_max_steps")
        self.at_least(1, "ppo_epoch", "num_mini_batch", "max_tokens", "save_interval")
        self.at_least(1, "log_interval")
        self.at_least(0, "save_minutes")
        self.at_least(0, "entropy_coef", "value_loss_coef", "cost", "temperature", "stop_after")
        self.above_zero("lr", "clip_param", "max_grad_norm", "deadline_s", "error_budget")
        self.from_0_to_1("gamma")
        rollout = self.num_processes * self.num_steps
        if self.num_env_steps < rollout:
            raise ConfigError(
                f"--num-env-steps must be at least {rollout}, one rollout of --num-processes "
                f"{self.num_processes} times --num-steps {self.num_steps}, got "
                f"{self.num_env_steps}; lower one of those two for a shorter run"
            )
        width_of(self)


def width_of(config: QueryMutatorConfig) -> int | Literal["auto"]:
    """The number of calls in flight that the flags ask for."""
    if not config.use_batching:
        return 1
    if config.batch_size == "auto":
        return "auto"
    try:
        width = int(config.batch_size)
    except ValueError:
        width = 0
    if width < 1:
        raise ConfigError(f"--batch-size must be auto or at least 1, got {config.batch_size}")
    return width
