"""Embeddings of a knowledge graph: TransE, DistMult, ComplEx and RotatE as one matrix product.

Every model is written as two vectors whose product is the score: a `query` made of an entity and
a step, and an `aim` made of the entity that is queried. So all entities are scored by one matrix
product, and training by a softmax over all of them, or over a sample, is the same code. The
two translating models use the squared distance, which ranks as the distance does:

    -|q - e|^2 = 2 q.e - |e|^2 - |q|^2 = (2 q, -|q|^2, 1) . (e, 1, -|e|^2)

Each predicate p is a step, and its reverse a step of its own (p + P): p(?, t) is asked as the
reverse of p from t. That is the reciprocal form, in which these models do best.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.checkpoint import read_arrays, write_arrays
from batchwright.errors import BadFile, ConfigError, Mismatch
from batchwright.fingerprint import digest
from batchwright.logic.loaders import Graph
from batchwright.logic.rank.accept import Accepted, accept, asks_kge
from batchwright.logic.rank.ranking import Side
from batchwright.logic.rules import Rules, parse_rules
from batchwright.rng import stream
from batchwright.sealed import SealedFolder

__all__ = [
    "MODELS",
    "Kge",
    "KgeScorer",
    "KgeShape",
    "Model",
    "load_kge",
    "load_scorer",
    "read_rules",
    "save_kge",
    "softmax_loss",
    "vocab_digest",
]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Tensor = torch.Tensor

Model = Literal["transe", "distmult", "complex", "rotate"]
MODELS: tuple[Model, ...] = ("transe", "distmult", "complex", "rotate")

FOLDER = SealedFolder(
    "batchwright.kge", 1, "embedding", "train it again with `batchwright train kge`"
)
TABLES = "tables.safetensors"

ROWS = 256
"""Queries whose scores are made at once in training: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class KgeShape:
    """Which model, and how large."""

    model: Model
    rank: int
    """Numbers of an entity; ComplEx and RotatE have as many complex ones."""
    num_entities: int
    num_predicates: int

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(
                f"unknown embedding model {self.model!r}; choose one of {', '.join(MODELS)}"
            )
        if min(self.rank, self.num_entities, self.num_predicates) < 1:
            raise ConfigError(
                f"rank, entities and predicates must each be at least 1, got {self.rank}, "
                f"{self.num_entities} and {self.num_predicates}"
            )

    @property
    def is_complex(self) -> bool:
        return self.model in ("complex", "rotate")

    @property
    def entity_width(self) -> int:
        return 2 * self.rank if self.is_complex else self.rank

    @property
    def step_width(self) -> int:
        # RotatE turns each number by an angle.
        return self.rank if self.model == "rotate" else self.entity_width


class Kge:
    """Two tables, of entities [N, d] and of steps [2 P, k], and how to score with them."""

    def __init__(self, shape: KgeShape, entities: Tensor, steps: Tensor) -> None:
        for name, table, rows, width in (
            ("entities", entities, shape.num_entities, shape.entity_width),
            ("steps", steps, 2 * shape.num_predicates, shape.step_width),
        ):
            if tuple(table.shape) != (rows, width):
                raise Mismatch(
                    f"the table of {name} is {tuple(table.shape)}, and a {shape.model} of rank "
                    f"{shape.rank} has {(rows, width)}; it belongs to another graph or model"
                )
        self.shape = shape
        self.entities = entities
        self.steps = steps

    @classmethod
    def new(cls, shape: KgeShape, seed: int) -> "Kge":
        """Random tables, the same for the same seed on every machine."""

        def normal(purpose: str, rows: int, width: int) -> Tensor:
            drawn = stream(seed, purpose).standard_normal((rows, width), np.float32)
            return torch.from_numpy(drawn)

        entities = normal("kge/entities", shape.num_entities, shape.entity_width)
        steps = normal("kge/steps", 2 * shape.num_predicates, shape.step_width)
        if shape.model == "rotate":
            # Angles from the whole circle, entities of length about one.
            return cls(shape, entities / math.sqrt(2 * shape.rank), steps * math.pi)
        # Small products break the symmetry of a few entities; many break it by themselves.
        scale = 1e-1 if shape.num_entities <= 1000 else 1e-2
        if shape.model == "transe":
            scale = 1 / math.sqrt(shape.rank)
        return cls(shape, entities * scale, steps * scale)

    def query(self, entity: Tensor, step: Tensor) -> Tensor:
        """The query vectors of rows of the tables; their product with `aim` is the score."""
        model = self.shape.model
        if model == "distmult":
            return entity * step
        if model == "complex":
            return _times(entity, step)
        if model == "transe":
            return _far(entity + step)
        return _far(_times(entity, torch.cat([step.cos(), step.sin()], -1)))

    def aim(self, entity: Tensor) -> Tensor:
        """The other factor of the score, for rows of the table of entities."""
        if self.shape.model in ("distmult", "complex"):
            return entity
        square = entity.square().sum(-1, keepdim=True)
        return torch.cat([entity, torch.ones_like(square), -square], -1)

    def relation_query(self, entity: Tensor, other: Tensor) -> Tensor:
        """The vector of two entities whose product with a step is the score."""
        if self.shape.model == "distmult":
            return entity * other
        if self.shape.model != "complex":
            raise ConfigError(
                f"{self.shape.model} cannot predict relations; use complex or distmult"
            )
        (ar, ai), (br, bi) = entity.chunk(2, -1), other.chunk(2, -1)
        return torch.cat([ar * br + ai * bi, ar * bi - ai * br], -1)

    def penalty(self, entity: Tensor, step: Tensor, other: Tensor) -> Tensor:
        """N3: the mean over triples of the sum of cubed absolute values of all three factors."""
        parts = (entity, other) if self.shape.model == "rotate" else (entity, step, other)
        return torch.stack([self._cubes(part) for part in parts]).sum()

    def _cubes(self, rows: Tensor) -> Tensor:
        if not self.shape.is_complex:
            return rows.abs().pow(3).sum(-1).mean()
        real, imaginary = rows.chunk(2, -1)
        return (real.square() + imaginary.square()).pow(1.5).sum(-1).mean()


class KgeScorer:
    """Log-probabilities of all entities, by a softmax over them."""

    def __init__(self, kge: Kge) -> None:
        self.kge = kge
        with torch.no_grad():
            self._aims = kge.aim(kge.entities).contiguous()
        self.num_entities, self.num_predicates = kge.shape.num_entities, kge.shape.num_predicates

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        kge = self.kge
        step = predicates.astype(np.int64) + (0 if side == "tail" else kge.shape.num_predicates)
        with torch.no_grad():
            entity = kge.entities[torch.from_numpy(given.astype(np.int64))]
            scores = kge.query(entity, kge.steps[torch.from_numpy(step)]) @ self._aims.T
            # The same for every candidate of a query, so it changes no rank of the embedding, but
            # it makes queries comparable with each other and with proofs.
            scores -= torch.logsumexp(scores, 1, keepdim=True)
        return np.asarray(scores.numpy(), np.float32)


def softmax_loss(query: Tensor, aims: Tensor, bias: Tensor, row: Tensor, target: Tensor) -> Tensor:
    """The mean over i of the cross-entropy of row `row[i]` of the scores at column `target[i]`.

    The scores are `query @ aims.T + bias`; `row` ascends, so that a query with several answers is
    scored once. They are made, used and dropped a block of rows at a time, gradients included:
    they never stand in memory as a whole.
    """
    loss: Tensor = _Softmax.apply(query, aims, bias, row, target)  # type: ignore[no-untyped-call]
    return loss


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, aims: Tensor, bias: Tensor, row: Tensor, target: Tensor
    ) -> Tensor:
        n = len(row)
        to_query, to_aims = torch.empty_like(query), torch.zeros_like(aims)
        loss = torch.zeros((), dtype=torch.float64)
        answers = torch.bincount(row, minlength=len(query))
        ends = [0, *answers.cumsum(0).tolist()]
        product = _product_type()
        if product is not None:
            # Once, and not in each of the three products.
            query, aims = query.to(product), aims.to(product)
        for first in range(0, len(query), ROWS):
            rows, times = query[first : first + ROWS], answers[first : first + ROWS, None]
            own = slice(ends[first], ends[first + len(rows)])
            at, wanted = row[own] - first, target[own]
            scores = torch.addmm(bias, rows, aims.T) if product is None else rows @ aims.T + bias
            scores -= scores.amax(1, keepdim=True)
            right = scores[at, wanted]
            scores.exp_()
            total = scores.sum(1, keepdim=True)
            loss += (times * total.log()).sum() - right.sum()
            scores *= times / (total * n)
            scores.index_put_((at, wanted), torch.full_like(right, -1 / n), accumulate=True)
            if product is None:
                torch.mm(scores, aims, out=to_query[first : first + ROWS])
                to_aims.addmm_(scores.T, rows)
            else:
                scores = scores.to(product)
                to_query[first : first + ROWS] = scores @ aims
                to_aims += scores.T @ rows
        ctx.save_for_backward(to_query, to_aims)
        return (loss / n).to(to_query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_query, to_aims = ctx.saved_tensors
        return to_query * grads[0], to_aims * grads[0], None, None, None


def save_kge(path: Path, kge: Kge, **more: Any) -> None:
    """Write a folder with the tables as safetensors, the shape and `more` as JSON."""
    with FOLDER.replacing(path) as folder:
        tables = {"entities": kge.entities.numpy(), "steps": kge.steps.numpy()}
        write_arrays(folder / TABLES, tables)
        fields = {"shape": asdict(kge.shape), **json.loads(json.dumps(more))}
        FOLDER.write(folder, fields, [TABLES])


def load_kge(path: Path) -> tuple[Kge, dict[str, Any]]:
    """The embedding in a folder, every byte of it checked, and what else was written with it."""
    fields = FOLDER.read(path)
    FOLDER.check_files(path, fields, TABLES)
    tables = read_arrays(path / TABLES, FOLDER)
    for name, table in tables.items():
        if not np.isfinite(table).all():
            raise BadFile(f"{path}/{TABLES} has values in {name} that are not finite; train again")
    try:
        shape = KgeShape(**fields.pop("shape"))
        entities, steps = (torch.from_numpy(tables[name]) for name in ("entities", "steps"))
        kge = Kge(shape, entities, steps)
    except (KeyError, TypeError, ValueError) as error:
        raise FOLDER.damaged(path, f"it is not as embeddings are written: {error}") from None
    own = ("format", "version", "files", "sha256")
    return kge, {k: v for k, v in fields.items() if k not in own}


def load_scorer(path: Path, graph: Graph) -> KgeScorer:
    """The embedding of a run or model folder, if its rows are those of train and valid."""
    folder = path / "model" if (path / "config.toml").exists() else path
    kge, more = load_kge(folder)
    if more.get("entities") != vocab_digest(graph.without_test()):
        raise Mismatch(
            f"the embedding {path} was trained on other names than those of {graph.name}; "
            f"evaluate it on the graph it was trained on"
        )
    return KgeScorer(kge)


def read_rules(
    path: Path, graph: Graph, kge: Path, least: float | None = None
) -> tuple[Rules, Accepted | None]:
    """Rules of a file; if they ask for `p_kge`, also the graph with what the embedding accepts."""
    rules = parse_rules(path, graph.vocab.with_kge())
    if len(asked := asks_kge(rules)):
        return rules, accept(graph, load_scorer(kge, graph), asked, least)
    if least is not None:
        raise ConfigError(f"no rule of {path} asks for a p_kge; leave out what is to be accepted")
    return parse_rules(path, graph.vocab), None


def vocab_digest(graph: Graph) -> str:
    """What an embedding's rows stand for, as one digest."""
    return digest("vocab", list(graph.vocab.entities), list(graph.vocab.predicates))


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The product of complex numbers that stand as (real parts, imaginary parts)."""
    (ar, ai), (br, bi) = a.chunk(2, -1), b.chunk(2, -1)
    return torch.cat([ar * br - ai * bi, ar * bi + ai * br], -1)


def _product_type() -> torch.dtype | None:
    """The type in which factors stand if not in their own."""
    medium = torch.get_float32_matmul_precision() == "medium"
    return torch.bfloat16 if medium and torch.cpu._is_avx512_bf16_supported() else None


def _far(query: Tensor) -> Tensor:
    """The query vector of a squared distance; see the top of this module."""
    square = query.square().sum(-1, keepdim=True)
    return torch.cat([2 * query, -square, torch.ones_like(square)], -1)
