"""Training of an embedding on a graph, top to bottom.

    triples -> both directions -> steps -> softmax over entities -> Adagrad -> run directory

Order and drawn entities are functions of seed, epoch and step, so a run that was stopped at any
step and resumed comes to the same tables, bit for bit, as one that was not (on a processor, with
the same number of threads). The valid part chooses which epoch is kept; the test part is not read.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright import rng
from batchwright.errors import BadFile, BadLoss, ConfigError, Mismatch
from batchwright.events import EventLog
from batchwright.files import write_atomic
from batchwright.logic.kge import (
    Kge,
    KgeScorer,
    KgeShape,
    load_kge,
    read_tables,
    save_kge,
    softmax_loss,
    write_tables,
)
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.rank.accept import Accepted, accept, asks_kge
from batchwright.logic.rank.ranking import rank
from batchwright.logic.rules import Rules, parse_rules
from batchwright.permutation import permutation
from batchwright.sealed import Kind
from batchwright.train.kge.config import KgeConfig
from batchwright.train.stamp import write_stamp
from batchwright.train.stopping import interrupts
from batchwright.world import World

__all__ = [
    "KgeResult",
    "KgeTrainer",
    "fit_kge",
    "load_scorer",
    "read_rules",
    "train_kge",
    "vocab_digest",
]

Ints = NDArray[np.int32]
Tensor = torch.Tensor
CHECKPOINT = Kind("batchwright.kge-checkpoint", 1, "checkpoint", "start the run anew")


@dataclass(frozen=True, slots=True)
class KgeResult:
    """What a run did, in this call."""

    run_dir: Path
    finished: bool
    """False if it was stopped and can be resumed."""
    epoch: int
    step: int
    loss: float | None
    best_epoch: int
    best_mrr: float | None
    """On the valid part; None if there is none."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _At:
    """How far a run has come; with the tables, all that a resumed run needs."""

    epoch: int = 0
    step: int = 0
    """Steps done of this epoch."""
    global_step: int = 0
    loss_sum: float = 0.0
    """Of the steps done of this epoch."""
    best_epoch: int = 0
    best_mrr: float | None = None
    without_gain: int = 0


@dataclass(slots=True)
class KgeTrainer:
    """The tables, the sums of squares that Adagrad keeps, and one step of training."""

    config: KgeConfig
    kge: Kge
    questions: NDArray[np.int64]
    """[2 n, 3]: every triple as (head, step, tail) and, reversed, as (tail, step + P, head)."""
    sums: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        tables = {"entities": self.kge.entities, "steps": self.kge.steps}
        self.sums = {name: torch.zeros_like(table) for name, table in tables.items()}

    @classmethod
    def of(cls, config: KgeConfig, train: Ints, num_entities: int, preds: int) -> "KgeTrainer":
        if not len(train):
            raise ConfigError("there are no triples to train on")
        shape = KgeShape(config.model, config.rank, num_entities, preds)
        h, p, t = train.astype(np.int64).T
        both = np.concatenate([np.stack([h, p, t], 1), np.stack([t, p + preds, h], 1)])
        return cls(config, Kge.new(shape, config.seed), both)

    @property
    def steps_an_epoch(self) -> int:
        return -(-len(self.questions) // self.config.batch_size)

    def order(self, epoch: int) -> NDArray[np.int64]:
        return permutation(
            len(self.questions), np.uint64(rng.key(self.config.seed, "kge/order", epoch))
        )

    def step(self, rows: NDArray[np.int64], number: int) -> float:
        """Train on these questions; `number` is the step's over the whole run. The loss."""
        kge, config = self.kge, self.config
        given, step, answer = torch.from_numpy(self.questions[rows]).T
        candidates, bias, given, answer = self._candidates(given, answer, number)
        # The rows in play are leaves of their own, so that gradients are as small as they are.
        entities = kge.entities if candidates is None else kge.entities[candidates]
        entities, steps = entities.detach().requires_grad_(), kge.steps.detach().requires_grad_()
        head, relation, tail = entities[given], steps[step], entities[answer]
        loss = softmax_loss(kge.query(head, relation), kge.aim(entities), bias, answer)
        whole = loss
        if config.relation_weight:
            guess = kge.relation_query(head, tail) @ steps.T
            whole = whole + config.relation_weight * torch.nn.functional.cross_entropy(guess, step)
        if config.penalty:
            whole = whole + config.penalty * kge.penalty(head, relation, tail)
        value = float(loss.detach())
        if not math.isfinite(value):
            return value
        torch.autograd.backward(whole)
        with torch.no_grad():
            _adagrad(kge.entities, self.sums["entities"], entities.grad, config.lr, candidates)
            _adagrad(kge.steps, self.sums["steps"], steps.grad, config.lr)
        return value

    def _candidates(
        self, given: Tensor, answer: Tensor, number: int
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Entities to choose from with their log-weights, and the questions' places among them.

        All entities of the batch count once. Those drawn besides stand for all others, so each
        counts as many times as there are others for one drawn: the sum under the softmax is then,
        on average, the sum over all entities.
        """
        n = self.kge.shape.num_entities
        drawn = self.config.drawn(n)
        if not drawn:
            return None, torch.zeros(n), given, answer
        own, places = torch.unique(torch.cat([given, answer]), return_inverse=True)
        bits = rng.stream(self.config.seed, "kge/negatives", number).bit_generator
        raw = np.asarray(bits.random_raw(drawn), np.uint64) >> np.uint64(32)
        marked = np.zeros(n, np.bool_)
        marked[((raw * np.uint64(n)) >> np.uint64(32)).astype(np.int64)] = True
        marked[own.numpy()] = False
        others = torch.from_numpy(np.flatnonzero(marked))
        bias = torch.zeros(len(own) + len(others))
        if len(others):
            bias[len(own) :] = math.log((n - len(own)) / len(others))
        return torch.cat([own, others]), bias, places[: len(given)], places[len(given) :]


def train_kge(
    config: KgeConfig,
    *,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> KgeResult:
    """Train, or go on with the run in `config.run_dir`; its `model` folder holds the result.

    Ctrl-C once ends the step and saves; a second one stops at once.
    """
    config = config.named()
    run = config.run_dir
    if not resume and (run / "config.toml").exists():
        raise ConfigError(
            f"{run} holds a run already; go on with --resume {run} or give another --run-dir"
        )
    graph = load_graph(Path(config.data))
    trainer, at, best = _begun(config, graph)
    if resume:
        trainer, at, best = _resumed(config, trainer, best)
    else:
        write_stamp(run, seed=config.seed, world=World.detect())
        write_atomic(run / "config.toml", config.to_toml().encode())
    return _loop(config, graph, trainer, at, best, run, progress, resumed=resume)


def fit_kge(
    config: KgeConfig, graph: Graph, progress: Callable[[int, int], None] | None = None
) -> tuple[Kge, KgeResult]:
    """Train in memory, with no run directory; the tables that did best on the valid part."""
    trainer, at, best = _begun(config, graph)
    result = _loop(config, graph, trainer, at, best, None, progress)
    return Kge(trainer.kge.shape, best["entities"], best["steps"]), result


def _begun(config: KgeConfig, graph: Graph) -> tuple[KgeTrainer, _At, dict[str, Tensor]]:
    vocab = graph.vocab
    trainer = KgeTrainer.of(config, graph.train, vocab.num_entities, vocab.num_predicates)
    return trainer, _At(), _copied(trainer.kge)


def _loop(
    config: KgeConfig,
    graph: Graph,
    trainer: KgeTrainer,
    at: _At,
    best: dict[str, Tensor],
    run: Path | None,
    progress: Callable[[int, int], None] | None,
    *,
    resumed: bool = False,
) -> KgeResult:
    valid = _spread(graph.valid, config.eval_triples)
    per_epoch = trainer.steps_an_epoch
    total = config.epochs * per_epoch
    began, began_at, loss = time.perf_counter(), at.global_step, None

    with ExitStack() as open_things:
        log = EventLog(run / "events.jsonl") if run else None
        if log:
            open_things.callback(log.close)
            log.write("resume" if resumed else "start", step=at.global_step, steps=total)
        open_things.enter_context(_threads(config.threads))
        interrupted = open_things.enter_context(interrupts())

        def save() -> None:
            if run:
                _save(run / "checkpoint", trainer, at, best, config)

        stopping = enough = False
        while at.epoch < config.epochs and not (stopping or enough):
            order = trainer.order(at.epoch)
            start, worked = time.perf_counter(), time.process_time()
            while at.step < per_epoch and not stopping:
                first = at.step * config.batch_size
                loss = trainer.step(order[first : first + config.batch_size], at.global_step)
                if not math.isfinite(loss):
                    save()
                    if log:
                        log.write("stop", step=at.global_step, why="loss is not finite")
                    raise BadLoss(
                        f"step {at.global_step + 1}: the loss is {loss}; the state before it is "
                        f"saved, start anew with a lower --lr"
                    )
                at = replace(
                    at,
                    step=at.step + 1,
                    global_step=at.global_step + 1,
                    loss_sum=at.loss_sum + loss,
                )
                if progress:
                    progress(at.global_step, total)
                reached = config.stop_after and at.global_step - began_at >= config.stop_after
                stopping = bool(interrupted() or reached) and at.global_step < total
            if at.step < per_epoch:
                break
            loss = at.loss_sum / per_epoch
            at = replace(at, epoch=at.epoch + 1, step=0, loss_sum=0.0)
            if log:
                log.write(
                    "epoch",
                    epoch=at.epoch,
                    step=at.global_step,
                    loss=loss,
                    seconds=time.perf_counter() - start,
                    cpu_s=time.process_time() - worked,
                )
            last = at.epoch == config.epochs
            if len(valid) and config.eval_every and (last or at.epoch % config.eval_every == 0):
                mrr = rank(KgeScorer(trainer.kge), valid, graph.known).metrics().mrr
                if log:
                    log.write("eval", epoch=at.epoch, step=at.global_step, mrr=mrr)
                if at.best_mrr is None or mrr > at.best_mrr:
                    at = replace(at, best_epoch=at.epoch, best_mrr=mrr, without_gain=0)
                    best.update(_copied(trainer.kge))
                else:
                    at = replace(at, without_gain=at.without_gain + 1)
                enough = bool(config.patience and at.without_gain >= config.patience)
            elif last:
                best.update(_copied(trainer.kge))
                at = replace(at, best_epoch=at.epoch)
            if config.save_every and at.epoch % config.save_every == 0 and not last:
                save()
        finished = at.epoch >= config.epochs or enough
        save()
        if run and finished:
            kept = Kge(trainer.kge.shape, best["entities"], best["steps"])
            save_kge(
                run / "model", kept, graph=graph.name, seed=config.seed, epoch=at.best_epoch,
                valid_mrr=at.best_mrr, entities=vocab_digest(graph),
            )  # fmt: skip
        if log:
            why = "done" if finished else "stopped"
            log.write("stop", step=at.global_step, why=why, loss=loss, mrr=at.best_mrr)
        seconds = time.perf_counter() - began
        where = run or Path()
        return KgeResult(
            where, finished, at.epoch, at.global_step, loss, at.best_epoch, at.best_mrr, seconds
        )


def load_scorer(path: Path, graph: Graph) -> KgeScorer:
    """The embedding of a run or model folder, if its rows are those of this graph."""
    folder = path / "model" if (path / "config.toml").exists() else path
    kge, more = load_kge(folder)
    if more.get("entities") != vocab_digest(graph):
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
    from batchwright.fingerprint import digest

    return digest("vocab", list(graph.vocab.entities), list(graph.vocab.predicates))


def _adagrad(
    table: Tensor, sums: Tensor, grad: Tensor | None, lr: float, rows: Tensor | None = None
) -> None:
    """One step of Adagrad, on some distinct rows or on all."""
    assert grad is not None  # the loss always reaches both tables
    if rows is None:
        sums.addcmul_(grad, grad)
        table.addcdiv_(grad, sums.sqrt().add_(1e-10), value=-lr)
        return
    part = sums[rows].addcmul_(grad, grad)
    sums[rows] = part
    table[rows] = table[rows].addcdiv_(grad, part.sqrt_().add_(1e-10), value=-lr)


def _copied(kge: Kge) -> dict[str, Tensor]:
    return {"entities": kge.entities.clone(), "steps": kge.steps.clone()}


def _spread(triples: Ints, most: int) -> Ints:
    """At most `most` of the triples, evenly spread over the file."""
    if not most or len(triples) <= most:
        return triples
    return triples[np.linspace(0, len(triples) - 1, most).astype(np.int64)]


def _save(
    path: Path, trainer: KgeTrainer, at: _At, best: dict[str, Tensor], config: KgeConfig
) -> None:
    tables = {
        **_copied(trainer.kge),
        **{f"sums.{name}": table for name, table in trainer.sums.items()},
        **{f"best.{name}": table for name, table in best.items()},
    }
    with CHECKPOINT.replacing(path) as folder:
        write_tables(folder / "tables.safetensors", tables)
        CHECKPOINT.write(folder, {"at": asdict(at), "shape": asdict(trainer.kge.shape)})


def _resumed(
    config: KgeConfig, trainer: KgeTrainer, best: dict[str, Tensor]
) -> tuple[KgeTrainer, _At, dict[str, Tensor]]:
    path = config.run_dir / "checkpoint"
    if not path.exists():
        # A run that was killed before its first checkpoint begins again, and comes to the same.
        return trainer, _At(), best
    fields = CHECKPOINT.read(path)
    tables = read_tables(path / "tables.safetensors", CHECKPOINT)
    if fields["shape"] != asdict(trainer.kge.shape):
        raise Mismatch(
            f"the checkpoint {path} is of {fields['shape']}, the run of "
            f"{asdict(trainer.kge.shape)}; restore the graph of the run"
        )
    try:
        trainer.kge.entities.copy_(tables["entities"])
        trainer.kge.steps.copy_(tables["steps"])
        for name, table in trainer.sums.items():
            table.copy_(tables[f"sums.{name}"])
        best = {name: tables[f"best.{name}"] for name in best}
        return trainer, _At(**fields["at"]), best
    except (KeyError, TypeError, RuntimeError) as error:
        raise BadFile(f"the checkpoint {path} lacks {error}; start the run anew") from None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
