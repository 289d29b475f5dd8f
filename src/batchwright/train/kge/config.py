"""The settings of an embedding's training. Light to import: the command's help is made from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from batchwright.errors import ConfigError
from batchwright.train.run import RunConfig

__all__ = ["KgeConfig"]

ALL_UP_TO = 5000
"""Entities up to which a softmax over all of them is as fast as a sampled one."""


@dataclass(frozen=True, kw_only=True)
class KgeConfig(RunConfig):
    """What to embed, and how."""

    REQUIRED: ClassVar = ("data",)
    CHANGEABLE: ClassVar = ("epochs", "save_every", "save_minutes", "stop_after", "threads")

    data: str = ""
    """The folder with train.txt, valid.txt and test.txt."""
    model: Literal["transe", "distmult", "complex", "rotate"] = "complex"
    """Embedding model: TransE, DistMult, ComplEx or RotatE; ComplEx is best on most graphs."""
    rank: int = 200
    """Embedding dimension (complex numbers in ComplEx and RotatE)."""
    epochs: int = 60
    """Passes over the triples, each queried for its head and for its tail."""
    batch_size: int = 256
    """Queries in one optimizer step."""
    answers: int = 1
    """Train triples that ask the same (an entity and a relation) are one query with up to this many
    answers, scored once: less work where queries have many answers."""
    lr: float = 0.1
    """Adagrad learning rate."""
    average: float = 0.0
    """Epochs over which the tables that are measured and kept are averaged, recent steps weighing
    most; 0: the tables as the last step left them. It allows a higher --lr."""
    penalty: float = 0.05
    """N3 regularisation weight; raise it for small graphs, lower it where the model underfits."""
    relation_weight: float = 0.0
    """Weight of the auxiliary relation prediction loss (ComplEx and DistMult)."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch's float32 matmul precision in training; "medium" multiplies in bfloat16, two to three
    times as fast on processors that have it. MRR is measured in float32 whatever it is."""
    negatives: int = -1
    """Negative entities sampled in each step; 0: all, -1: all up to 5,000 entities, else 4,000."""

    eval_every: int = 5
    """Epochs between evaluations of MRR on valid; the best epoch is kept. 0: keep the last."""
    eval_triples: int = 1500
    """Valid triples in an evaluation, evenly spread over the file; 0: all."""
    patience: int = 0
    """Early stopping: evaluations without a better MRR before training stops; 0: never."""

    seed: int = 0
    """Random seed of initialisation, order and negative sampling."""
    threads: int = 1
    """Processor threads; more than one is slower on a shared machine."""
    run_dir: Path = Path("runs/kge-{n}")
    """The folder to write the run to; {n} stands for the next free number."""
    save_every: int = 5
    """Epochs between checkpoints, besides those by time; 0: by time only."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, or 50 times what one takes if that is more; 0: none by time."""
    stop_after: int = 0
    """Save and stop after this many steps of this call, to be resumed; 0: run to the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "rank", "epochs", "batch_size", "answers", "threads")
        self.at_least(0, "eval_every", "eval_triples", "patience", "save_every", "stop_after")
        self.at_least(0, "save_minutes")
        self.at_least(0, "penalty", "relation_weight", "average")
        self.at_least(-1, "negatives")
        if not 0 < self.lr < 100:
            raise ConfigError(f"--lr must be above 0 and below 100, got {self.lr}")
        if self.relation_weight and self.model in ("transe", "rotate"):
            raise ConfigError(
                f"--relation-weight needs --model complex or distmult, got {self.model}; "
                f"leave it out"
            )

    def num_negatives(self, num_entities: int) -> int:
        """How many negative entities are sampled in a step; 0 if all entities are scored."""
        wanted = self.negatives
        if wanted < 0:
            wanted = 0 if num_entities <= ALL_UP_TO else 4000
        return wanted if wanted < num_entities else 0
