"""Training of an embedding on a graph, top to bottom.

    triples -> both directions -> steps -> softmax over entities -> Adagrad -> run directory

Order and negative samples are functions of seed, epoch and step, so a run that was stopped at any
step and resumed has the same tables, bit for bit, as one that was not (on a processor, with the
same number of threads). MRR on valid selects the epoch that is kept; the test part is not read.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright import rng
from batchwright.checkpoint import Checkpoint
from batchwright.errors import BadLoss, ConfigError, Mismatch
from batchwright.fingerprint import digest, digest_array
from batchwright.logic.kge import Kge, KgeScorer, KgeShape, save_kge, softmax_loss, vocab_digest
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.rank.ranking import evenly_spread, rank
from batchwright.permutation import permutation
from batchwright.train.kge.config import KgeConfig
from batchwright.train.run import Run, threads

__all__ = ["KgeResult", "KgeTrainer", "fit_kge", "train_kge"]

Ints = NDArray[np.int32]
Tensor = torch.Tensor
Tables = dict[str, Tensor]
Progress = Callable[[int, int], None]

AVERAGED = 10
"""Every how many steps the tables are added to their average."""


@dataclass(frozen=True, slots=True)
class KgeResult:
    """What a run did, in this call."""

    run_dir: Path
    finished: bool
    """False if it was stopped and can be resumed."""
    stopped_by: str | None
    """SIGTERM, SIGUSR1, Ctrl-C or --stop-after; None if it is finished."""
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
    """Steps done in this epoch."""
    global_step: int = 0
    loss_sum: float = 0.0
    """Over the steps done in this epoch."""
    best_epoch: int = 0
    best_mrr: float | None = None
    without_gain: int = 0
    """Evaluations since the best one."""

    def after_step(self, loss: float) -> "_At":
        return replace(
            self,
            step=self.step + 1,
            global_step=self.global_step + 1,
            loss_sum=self.loss_sum + loss,
        )


@dataclass(slots=True)
class KgeTrainer:
    """The tables, their average, Adagrad's sums of squared gradients, and one step of training."""

    config: KgeConfig
    kge: Kge
    questions: NDArray[np.int64]
    """[2 n, 3]: every triple as (head, step, tail) and, inverse, as (tail, step + P, head)."""
    ptr: NDArray[np.int64]
    """Query q is asked by the rows `ptr[q]` to `ptr[q + 1]`, which differ in their answers."""
    sums: Tables = field(init=False)
    averages: Tables = field(init=False)
    """Empty if the config asks for none."""

    def __post_init__(self) -> None:
        self.averages = _copied(self.kge) if self.config.average else {}
        self.sums = {name: torch.zeros_like(table) for name, table in _tables(self.kge).items()}

    @classmethod
    def of(cls, config: KgeConfig, train: Ints, num_entities: int, preds: int) -> "KgeTrainer":
        if not len(train):
            raise ConfigError("train.txt has no triples; give a graph with at least 1")
        shape = KgeShape(config.model, config.rank, num_entities, preds)
        h, p, t = train.astype(np.int64).T
        both = np.concatenate([np.stack([h, p, t], 1), np.stack([t, p + preds, h], 1)])
        ptr = np.arange(len(both) + 1)
        if config.answers > 1:
            both = both[np.lexsort((both[:, 2], both[:, 1], both[:, 0]))]
            new = np.append(True, (both[1:, :2] != both[:-1, :2]).any(1))
            place = ptr[:-1] - np.maximum.accumulate(np.where(new, ptr[:-1], 0))
            ptr = np.append(np.flatnonzero(place % config.answers == 0), len(both))
        return cls(config, Kge.new(shape, config.seed), both, ptr)

    @property
    def steps_per_epoch(self) -> int:
        return -(-(len(self.ptr) - 1) // self.config.batch_size)

    @property
    def kept(self) -> Kge:
        """What is measured and kept: the average of the tables, if the config asks for one."""
        found = self.averages or _tables(self.kge)
        return Kge(self.kge.shape, found["entities"], found["steps"])

    def order(self, epoch: int) -> NDArray[np.int64]:
        return permutation(
            len(self.ptr) - 1, np.uint64(rng.key(self.config.seed, "kge/order", epoch))
        )

    def step(self, queries: NDArray[np.int64], number: int) -> float:
        """Train on these queries and return the loss; `number` counts steps of the whole run."""
        with _precision(self.config.matmul_precision):
            loss = self._step(queries, number)
        if self.averages and number % AVERAGED == 0:
            # A plain mean at first, so that the beginning does not last.
            share = AVERAGED / (self.config.average * self.steps_per_epoch)
            share = min(1.0, max(share, 1 / (1 + number // AVERAGED)))
            for name, table in _tables(self.kge).items():
                self.averages[name].lerp_(table, share)
        return loss

    def _step(self, queries: NDArray[np.int64], number: int) -> float:
        kge, config = self.kge, self.config
        sizes = self.ptr[queries + 1] - self.ptr[queries]
        first = np.cumsum(sizes) - sizes
        rows = np.repeat(self.ptr[queries] - first, sizes) + np.arange(sizes.sum())
        given, step, answer = torch.from_numpy(self.questions[rows]).T
        candidates, bias, given, answer = self._candidates(given, answer, number)
        # The rows in use are leaves of their own, so that gradients have only those rows.
        entities = kge.entities if candidates is None else kge.entities.index_select(0, candidates)
        entities, steps = entities.detach().requires_grad_(), kge.steps.detach().requires_grad_()
        # One gather for both ends: the gradient of each is a table of all candidates.
        head, tail = entities.index_select(0, torch.cat([given, answer])).chunk(2)
        relation = steps.index_select(0, step)
        asked = torch.from_numpy(first)
        row = torch.from_numpy(np.repeat(np.arange(len(queries)), sizes))
        loss = softmax_loss(
            kge.query(head[asked], relation[asked]), kge.aim(entities), bias, row, answer
        )
        whole = loss
        if config.relation_weight:
            each = torch.arange(len(step))
            between, level = kge.relation_query(head, tail), torch.zeros(len(steps))
            guess = softmax_loss(between, steps, level, each, step)
            whole = whole + config.relation_weight * guess
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
        """Candidate entities with their log-weights, and the questions' indices among them.

        All entities of the batch have weight 1. The sampled negatives stand for all others, so
        each is weighted by the number of others per sample: the sum under the softmax is then, in
        expectation, the sum over all entities.
        """
        n = self.kge.shape.num_entities
        negatives = self.config.num_negatives(n)
        if not negatives:
            return None, torch.zeros(n), given, answer
        own, places = torch.unique(torch.cat([given, answer]), return_inverse=True)
        bits = rng.stream(self.config.seed, "kge/negatives", number).bit_generator
        raw = np.asarray(bits.random_raw(negatives), np.uint64) >> np.uint64(32)
        marked = np.zeros(n, np.bool_)
        marked[((raw * np.uint64(n)) >> np.uint64(32)).astype(np.int64)] = True
        marked[own.numpy()] = False
        others = torch.from_numpy(np.flatnonzero(marked))
        bias = torch.zeros(len(own) + len(others))
        if len(others):
            bias[len(own) :] = math.log((n - len(own)) / len(others))
        return torch.cat([own, others]), bias, places[: len(given)], places[len(given) :]


def train_kge(
    config: KgeConfig, *, resume: bool = False, progress: Progress | None = None
) -> KgeResult:
    """Train, or resume the run in `config.run_dir`; its `model` folder holds the result.

    Ctrl-C, SIGTERM and SIGUSR1 end the step and save; a second Ctrl-C stops at once.
    """
    with Run(config, resume=resume) as run:
        return _train(config, load_graph(Path(config.data)), run, progress)[1]


def fit_kge(
    config: KgeConfig, graph: Graph, progress: Progress | None = None
) -> tuple[Kge, KgeResult]:
    """Train in memory, with no run directory; the tables with the best MRR on valid."""
    with Run(config, in_memory=True) as run:
        return _train(config, graph, run, progress)


def _train(
    config: KgeConfig, graph: Graph, run: Run, progress: Progress | None
) -> tuple[Kge, KgeResult]:
    began = time.perf_counter()
    graph = graph.without_test()
    vocab = graph.vocab
    trainer = KgeTrainer.of(config, graph.train, vocab.num_entities, vocab.num_predicates)
    facts = digest("kge", vocab_digest(graph), digest_array(graph.train))
    at, best = _At(), _copied(trainer.kge)
    if found := run.latest():
        with found.restoring():
            at, best = _restored(found, trainer, facts)
        run.no_less("epochs", config.epochs, at.epoch + (at.step > 0))
    valid = evenly_spread(graph.valid, config.eval_triples)
    per_epoch = trainer.steps_per_epoch
    total = config.epochs * per_epoch
    begun_at, loss = at.global_step, None
    run.start(step=at.global_step, steps=total)

    def state() -> dict[str, Any]:
        return {
            "facts": facts,
            "at": asdict(at),
            "tables": _tables(trainer.kge),
            "sums": trainer.sums,
            "averages": trainer.averages,
            "best": best,
        }

    def save() -> None:
        run.save(at.global_step, state)

    def evaluated(at: _At) -> tuple[_At, Tables]:
        """Measure the tables on valid, if it is time; how far that came, and the best tables."""
        last = at.epoch == config.epochs
        if len(valid) and config.eval_every and (last or at.epoch % config.eval_every == 0):
            mrr = rank(KgeScorer(trainer.kept), valid, graph.known).metrics().mrr
            run.event("eval", epoch=at.epoch, step=at.global_step, mrr=mrr)
            if at.best_mrr is not None and mrr <= at.best_mrr:
                return replace(at, without_gain=at.without_gain + 1), best
            at = replace(at, best_epoch=at.epoch, best_mrr=mrr, without_gain=0)
            return at, _copied(trainer.kept)
        if last:
            return replace(at, best_epoch=at.epoch), _copied(trainer.kept)
        return at, best

    stopping: str | None = None
    with threads(config.threads):
        if at.epoch == config.epochs and not run.is_left(begun_at, at.global_step, "model"):
            # It was to have more epochs, so its last one was not the last.
            at, best = evaluated(at)
        while not (_finished(config, at) or stopping):
            order = trainer.order(at.epoch)
            start, cpu_start = time.perf_counter(), time.process_time()
            while at.step < per_epoch and not stopping:
                first = at.step * config.batch_size
                loss = trainer.step(order[first : first + config.batch_size], at.global_step)
                if not math.isfinite(loss):
                    save()
                    run.event("stop", step=at.global_step, why="loss is not finite")
                    raise BadLoss(
                        f"step {at.global_step + 1}: the loss is {loss}; the state before it is "
                        f"saved, start a new run with a lower --lr"
                    )
                at = at.after_step(loss)
                if progress:
                    progress(at.global_step, total)
                if at.global_step < total:
                    stopping = run.stop(at.global_step - begun_at)
                if run.due() and not stopping:
                    save()
            if at.step < per_epoch:
                break
            loss = at.loss_sum / per_epoch
            at = replace(at, epoch=at.epoch + 1, step=0, loss_sum=0.0)
            run.event(
                "epoch",
                epoch=at.epoch,
                step=at.global_step,
                loss=loss,
                seconds=time.perf_counter() - start,
                cpu_s=time.process_time() - cpu_start,
            )
            at, best = evaluated(at)
            due = config.save_every and at.epoch % config.save_every == 0
            if due and at.epoch < config.epochs:
                save()
        already = run.is_left(begun_at, at.global_step, "model")
        if not already:
            save()
    finished = _finished(config, at)
    kept = Kge(trainer.kge.shape, best["entities"], best["steps"])
    if finished and run.writes and not already:
        save_kge(
            run.folder / "model", kept, graph=graph.name, seed=config.seed, epoch=at.best_epoch,
            valid_mrr=at.best_mrr, entities=vocab_digest(graph),
        )  # fmt: skip
        run.finish(at.global_step)
    why = "done" if finished else "stopped"
    run.event("stop", step=at.global_step, why=why, loss=loss, mrr=at.best_mrr)
    return kept, KgeResult(
        run_dir=run.folder,
        finished=finished,
        stopped_by=None if finished else stopping,
        epoch=at.epoch,
        step=at.global_step,
        loss=loss,
        best_epoch=at.best_epoch,
        best_mrr=at.best_mrr,
        seconds=time.perf_counter() - began,
    )


def _finished(config: KgeConfig, at: _At) -> bool:
    """Whether all epochs are done, or valid has not gained for as long as patience allows."""
    return at.epoch >= config.epochs or 0 < config.patience <= at.without_gain


def _restored(found: Checkpoint, trainer: KgeTrainer, facts: str) -> tuple[_At, Tables]:
    """Set the trainer to a checkpoint; how far that had come, and its best tables."""
    state = found.state
    if state["facts"] != facts:
        raise Mismatch(
            f"{found.path} was trained on other triples than {trainer.config.data} holds; restore "
            f"the graph of the run"
        )
    for name, table in _tables(trainer.kge).items():
        table.copy_(torch.from_numpy(state["tables"][name]))
        trainer.sums[name].copy_(torch.from_numpy(state["sums"][name]))
    for name, table in trainer.averages.items():
        table.copy_(torch.from_numpy(state["averages"][name]))
    best = {name: torch.from_numpy(array) for name, array in state["best"].items()}
    return _At(**state["at"]), best


def _adagrad(
    table: Tensor, sums: Tensor, grad: Tensor | None, lr: float, rows: Tensor | None = None
) -> None:
    """One step of Adagrad, on some distinct rows or on all."""
    assert grad is not None  # the loss always reaches both tables
    if rows is None:
        sums.addcmul_(grad, grad)
        table.addcdiv_(grad, sums.sqrt().add_(1e-10), value=-lr)
        return
    part = sums.index_select(0, rows).addcmul_(grad, grad)
    sums.index_copy_(0, rows, part)
    changed = table.index_select(0, rows).addcdiv_(grad, part.sqrt_().add_(1e-10), value=-lr)
    table.index_copy_(0, rows, changed)


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """torch's float32 matmul precision, for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _tables(kge: Kge) -> Tables:
    return {"entities": kge.entities, "steps": kge.steps}


def _copied(kge: Kge) -> Tables:
    return {name: table.clone() for name, table in _tables(kge).items()}
