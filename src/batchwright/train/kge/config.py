"""The settings of an embedding's training. Light to import: the command's help is made from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchwright.errors import ConfigError
from batchwright.train.settings import flag, from_toml, to_toml

__all__ = ["KgeConfig"]

ALL_UP_TO = 5000
"""Entities up to which a softmax over all of them is as quick as one over a part."""


@dataclass(frozen=True, kw_only=True)
class KgeConfig:
    """What to embed, and how."""

    data: str = ""
    """The folder with train.txt, valid.txt and test.txt."""
    model: Literal["transe", "distmult", "complex", "rotate"] = "complex"
    """Which embedding; complex does best on most graphs."""
    rank: int = 200
    """Numbers of an entity (complex ones in complex and rotate); more is slower and finer."""
    epochs: int = 60
    """Passes over the facts, each asked from both ends."""
    batch_size: int = 256
    """Questions of one step."""
    lr: float = 0.1
    """Rate of Adagrad."""
    penalty: float = 0.05
    """Weight of the N3 penalty; more for small graphs, less where it underfits."""
    relation_weight: float = 0.0
    """Weight of guessing the relation as well (complex and distmult)."""
    negatives: int = -1
    """Entities drawn as wrong answers for each step; 0: all, -1: all up to 5,000, else 4,000."""

    eval_every: int = 5
    """Epochs between rankings of the valid part; the best of them is kept. 0: keep the last."""
    eval_triples: int = 1500
    """Valid triples to rank, spread over all; 0: all."""
    patience: int = 0
    """Rankings without a gain after which to stop; 0: never."""

    seed: int = 0
    """Of the first tables, the order and the drawn entities."""
    threads: int = 1
    """Processor threads; more than one is slower on a shared machine."""
    run_dir: Path = Path("runs/kge")
    """Where everything is written."""
    save_every: int = 5
    """Epochs between checkpoints; 0: only at the end and on Ctrl-C."""
    stop_after: int = 0
    """Save and stop after this many steps of this call, to be resumed; 0: run to the end."""

    def __post_init__(self) -> None:
        for name in ("rank", "epochs", "batch_size", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 1 or more")
        for name in ("eval_every", "eval_triples", "patience", "save_every", "stop_after"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 0 or more")
        if not 0 < self.lr < 100:
            raise ConfigError(f"--lr {self.lr} is not a number above 0 and below 100")
        for name in ("penalty", "relation_weight"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not 0 or more")
        if self.negatives < -1:
            raise ConfigError(f"--negatives {self.negatives} is not -1 (choose), 0 (all) or more")
        if self.relation_weight and self.model in ("transe", "rotate"):
            raise ConfigError(
                f"--relation-weight needs complex or distmult, not {self.model}; leave it out"
            )

    def named(self) -> "KgeConfig":
        """Itself, if it says on what to train."""
        if not self.data:
            raise ConfigError("no --data; name a folder of triples, or go on by --resume RUN")
        return self

    def drawn(self, num_entities: int) -> int:
        """How many wrong answers are drawn for a step; 0 if all entities are scored."""
        wanted = self.negatives
        if wanted < 0:
            wanted = 0 if num_entities <= ALL_UP_TO else 4000
        return wanted if wanted < num_entities else 0

    def to_toml(self) -> str:
        """The settings as `config.toml`."""
        return to_toml(self)

    @classmethod
    def load(cls, path: Path) -> "KgeConfig":
        """Read a `config.toml`."""
        return from_toml(cls, path)
