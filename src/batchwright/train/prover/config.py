"""The settings of a prover's training. Light to import: the command's help is made from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchwright.errors import ConfigError
from batchwright.train.settings import flag

__all__ = ["ProverConfig"]


@dataclass(frozen=True, kw_only=True)
class ProverConfig:
    """What to prove by which rules, and how the prover learns."""

    data: str = ""
    """The folder with train.txt, valid.txt and test.txt."""
    rules: Path | None = None
    """A file of rules; those that are chains of 1 to 3 edges are used."""
    mine: bool = False
    """Mine the rules from train.txt; done as well if no rules are given."""
    length: int = 2
    """Edges of the longest mined body, 1 to 3."""
    most: int = 300
    """Mined rules to keep for each relation, the best."""
    min_confidence: float = 0.01
    """Least confidence of a mined rule."""

    n_envs: int = 256
    """Questions in proof at once: the batch size of the environment."""
    n_eval_envs: int = 256
    """The same when valid questions are asked."""
    num_steps: int = 8
    """Steps of each environment between two updates."""

    clone_updates: int = 40
    """Rollouts in which shortest proofs are imitated."""
    clone_questions: int = 2000
    """Train questions that the exhaustive prover proves for it; 0: all."""
    clone_lr: float = 0.03
    """Learning rate of imitation."""

    ppo_steps: int = 100_000
    """Steps of all environments together that PPO learns from; 0: none."""
    curriculum: bool = True
    """Begin with short proofs, and allow one step more in each part of the PPO steps."""
    negatives: int = 0
    """0: ask p(h, ?) and let wrong answers count against; else ask whether triples are true, this
    many corrupted ones after each."""
    reward: Literal[
        "proved", "proved_signed", "correct", "cautious", "balanced", "balanced_end"
    ] = "proved_signed"
    """What the end of an episode is worth; see the guide."""
    end_action: bool = True
    """Whether a question can be given up."""
    kge: Path | None = None
    """An embedding whose opinion of goals shapes the rewards of PPO; used with --negatives."""
    lr: float = 0.05
    """Learning rate of PPO, falling to zero in each part."""
    ppo_epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Minibatches of a pass."""
    gamma: float = 0.99
    """Discount of later rewards."""
    clip: float = 0.2
    """How far a probability may move in one update."""
    entropy_coef: float = 0.01
    """Weight of staying undecided."""

    passes: int = 8
    """Passes of exact policy gradients over train questions, each with its own fact hidden."""
    pass_questions: int = 60_000
    """Questions of a pass, other ones in each; 0: all."""
    rate: float = 0.5
    """Rate of Adagrad in these passes."""

    eval_every: int = 10
    """Rounds (updates or passes) between rankings of valid, besides the end of every part."""
    eval_triples: int = 700
    """Valid triples to rank, spread over all; 0: all."""
    seed: int = 0
    """Of the order of questions and of the choices of the policy."""
    run_dir: Path = Path("runs/prover")
    """Where everything is written."""
    save_every: int = 10
    """Rounds between checkpoints."""
    stop_after: int = 0
    """Save and stop after this many rounds of this call, to be resumed; 0: run to the end."""

    def __post_init__(self) -> None:
        for name in (
            *("most", "n_envs", "n_eval_envs", "num_steps", "ppo_epochs", "minibatches"),
            *("eval_every", "save_every"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 1 or more")
        for name in (
            *("clone_updates", "clone_questions", "ppo_steps", "negatives", "passes"),
            *("pass_questions", "eval_triples", "stop_after", "entropy_coef"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 0 or more")
        for name in ("clone_lr", "lr", "rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not a number above 0")
        for name in ("gamma", "min_confidence"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not from 0 to 1")
        if self.rules is not None and self.mine:
            raise ConfigError("--rules and --mine exclude each other; give one of them")
        if self.kge is not None and not self.negatives:
            raise ConfigError(
                "--kge shapes rewards of triples that are asked for truth; give --negatives too"
            )

    @property
    def ask(self) -> Literal["tail", "truth"]:
        """What PPO's episodes ask."""
        return "truth" if self.negatives else "tail"

    def named(self) -> "ProverConfig":
        """Itself, if it says what to train on and to do something."""
        if not self.data:
            raise ConfigError("no --data; name a folder of triples, or go on by --resume RUN")
        if not (self.clone_updates or self.ppo_steps or self.passes):
            raise ConfigError("nothing to do: --clone-updates, --ppo-steps and --passes are all 0")
        return self
