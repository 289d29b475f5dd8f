"""The settings of a prover's training. Light to import: the command's help is made from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from batchwright.errors import ConfigError
from batchwright.train.run import RunConfig

__all__ = ["ProverConfig"]


@dataclass(frozen=True, kw_only=True)
class ProverConfig(RunConfig):
    """What to prove by which rules, and how the prover learns."""

    REQUIRED: ClassVar = ("data",)
    CHANGEABLE: ClassVar = ("save_every", "stop_after")

    data: str = ""
    """The folder with train.txt, valid.txt and test.txt."""
    rules: Path | None = None
    """A file of rules; those that are chains of 1 to 3 edges are used."""
    mine: bool = False
    """Mine the rules from train.txt; the default if no --rules are given."""
    length: int = 2
    """Longest body of a mined rule in edges, 1 to 3."""
    most: int = 300
    """Mined rules to keep for each relation, the best."""
    min_confidence: float = 0.01
    """Lowest confidence of a mined rule."""

    n_envs: int = 256
    """Parallel environments: the batch size of the rollout."""
    n_eval_envs: int = 256
    """Parallel environments in evaluations on valid."""
    num_steps: int = 8
    """Rollout length: steps of each environment between two updates."""

    clone_updates: int = 40
    """Behaviour cloning: rollouts in which shortest proofs are imitated."""
    clone_questions: int = 2000
    """Train queries that the exhaustive prover proves for behaviour cloning; 0: all."""
    clone_lr: float = 0.03
    """Learning rate of behaviour cloning (Adam)."""

    ppo_steps: int = 100_000
    """PPO steps of all environments together; 0: no PPO."""
    curriculum: bool = True
    """Curriculum over proof depth: start with short proofs, one step more in each part of PPO."""
    negatives: int = 0
    """0: query p(h, ?) and penalise wrong answers; else classify triples as true or false, with
    this many corrupted ones after each."""
    reward: Literal[
        "proved", "proved_signed", "correct", "cautious", "balanced", "balanced_end"
    ] = "proved_signed"
    """Reward at the end of an episode; see the guide."""
    end_action: bool = True
    """Allow the policy to give up a query."""
    kge: Path | None = None
    """A run of `train kge` as potential for reward shaping in PPO; needs --negatives."""
    lr: float = 0.05
    """PPO learning rate, annealed to zero in each part."""
    ppo_epochs: int = 4
    """PPO epochs: passes over each rollout."""
    minibatches: int = 4
    """Minibatches in a pass."""
    gamma: float = 0.99
    """Discount factor."""
    clip: float = 0.2
    """PPO clip range."""
    entropy_coef: float = 0.01
    """Entropy bonus coefficient."""

    passes: int = 8
    """Passes of exact policy gradients over train queries, each with its own fact hidden."""
    pass_questions: int = 60_000
    """Queries in a pass, others in each; 0: all."""
    rate: float = 0.5
    """Adagrad learning rate of exact policy gradients."""

    eval_every: int = 10
    """Rounds (updates or passes) between evaluations on valid, besides the end of every part."""
    eval_triples: int = 700
    """Valid triples in an evaluation, evenly spread over the file; 0: all."""
    seed: int = 0
    """Random seed of the order of queries and of the policy's actions."""
    run_dir: Path = Path("runs/prover")
    """The folder to write the run to."""
    save_every: int = 10
    """Rounds between checkpoints."""
    stop_after: int = 0
    """Save and stop after this many rounds of this call, to be resumed; 0: run to the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "most", "n_envs", "n_eval_envs", "num_steps", "ppo_epochs", "minibatches")
        self.at_least(1, "eval_every", "save_every")
        self.at_least(0, "clone_updates", "clone_questions", "ppo_steps", "negatives", "passes")
        self.at_least(0, "pass_questions", "eval_triples", "stop_after", "entropy_coef")
        self.above_zero("clone_lr", "lr", "rate", "clip")
        self.from_0_to_1("gamma", "min_confidence")
        if self.rules is not None and self.mine:
            raise ConfigError("--rules and --mine exclude each other; give one of them")
        if self.kge is not None and not self.negatives:
            raise ConfigError("--kge shapes rewards of true and false triples; give --negatives")

    @property
    def ask(self) -> Literal["tail", "truth"]:
        """The query of PPO's episodes: p(h, ?), or whether a triple is true."""
        return "truth" if self.negatives else "tail"

    def named(self) -> Self:
        super().named()
        if not (self.clone_updates or self.ppo_steps or self.passes):
            raise ConfigError(
                "nothing to do: --clone-updates, --ppo-steps and --passes are all 0; raise one"
            )
        return self
