"""Training of a prover on a graph, top to bottom.

    facts, rules -> imitate shortest proofs -> PPO, deeper and deeper -> exact gradients -> ranks

What is proved by is the train part, a question's own fact hidden; what is kept is the policy that
ranks valid best; the test part is not read. Everything random is named by the seed and a counter,
so a run that was killed and resumed ends with the same bits as one that was not.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.errors import ConfigError, Mismatch, MissingFile
from batchwright.events import EventLog
from batchwright.files import write_atomic
from batchwright.fingerprint import digest, digest_array
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.mine.mining import mine, write_rules
from batchwright.logic.rank.ranking import rank
from batchwright.logic.rules import Rules, parse_rules
from batchwright.rl.checkpoint import latest, load_checkpoint, save_checkpoint
from batchwright.rl.policy import Policy
from batchwright.train.kge.loop import _threads, load_scorer, vocab_digest
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.learners import (
    Cloning,
    Learner,
    Passes,
    Potential,
    Practice,
    ask_once,
    kge_potential,
)
from batchwright.train.prover.policy import rule_policy
from batchwright.train.prover.program import Asked
from batchwright.train.prover.scorer import PolicyScorer
from batchwright.train.settings import to_toml
from batchwright.train.stamp import write_stamp
from batchwright.train.stopping import interrupts
from batchwright.world import World

__all__ = ["ProverResult", "fit_prover", "load_prover", "train_prover"]

Ints = NDArray[np.int32]
Progress = Callable[[int, int, str], object]
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProverResult:
    """What a run did, in this call and before it."""

    run_dir: Path
    finished: bool
    """False if it was stopped and can be resumed."""
    rounds: int
    rules: int
    """Rules that are chains and took part."""
    skipped: tuple[str, ...]
    """Names of those that are none."""
    first_proved: float | None
    """Share of valid questions for which one draw of the policy found a proof, before training."""
    proved: float | None
    right: float | None
    """Share of valid questions that one draw answered rightly, with the policy that is kept."""
    first_mrr: float | None
    """On valid, before training."""
    best_mrr: float | None
    best_round: int
    seconds: float


class _Round(NamedTuple):
    """One round of the plan: what is done, and the how-many-eth of its part it is."""

    part: str
    depth: int
    number: int
    of: int


@dataclass(frozen=True, slots=True)
class _At:
    """How far a run has come."""

    round: int = 0
    first_mrr: float | None = None
    first_proved: float | None = None
    best_mrr: float | None = None
    best_round: int = 0
    proved: float | None = None
    right: float | None = None


def train_prover(
    config: ProverConfig, *, resume: bool = False, progress: Progress | None = None
) -> ProverResult:
    """Train, or go on with the run in `config.run_dir`; its `model` folder holds the result.

    Ctrl-C once ends the round and saves; a second one stops at once.
    """
    config = config.named()
    run = config.run_dir
    if not resume and (run / "config.toml").exists():
        raise ConfigError(
            f"{run} holds a run already; go on with --resume {run} or give another --run-dir"
        )
    graph = load_graph(Path(config.data))
    if resume and (run / "rules.txt").exists():
        rules = parse_rules(run / "rules.txt", graph.vocab)
    else:
        rules = _rules(config, graph)
        write_rules(run / "rules.txt", rules, graph.vocab, f"rules of {graph.name}")
    asked, potential = Asked.of(graph, rules), _potential(config, graph)
    if not resume:
        # Last of all: what was refused up to here can be started anew in the same place.
        write_stamp(run, seed=config.seed, world=World.detect())
        write_atomic(run / "config.toml", to_toml(config).encode())
    with EventLog(run / "events.jsonl") as log:
        return _loop(config, graph, asked, potential, run, log, progress)[1]


def fit_prover(
    config: ProverConfig, graph: Graph, rules: Rules, progress: Progress | None = None
) -> tuple[PolicyScorer, ProverResult]:
    """Train in memory, with no run directory; the policy that did best on valid, as a scorer."""
    asked, potential = Asked.of(graph, rules), _potential(config, graph)
    return _loop(config, graph, asked, potential, None, None, progress)


def load_prover(run: Path, graph: Graph) -> PolicyScorer:
    """The trained prover of a run as a scorer, if it was trained on this graph."""
    path = latest(run / "model")
    if path is None:
        raise MissingFile(
            f"no trained prover in {run}; name a finished run of `batchwright train prover`"
        )
    state = load_checkpoint(path)
    if state["vocab"] != vocab_digest(graph):
        raise Mismatch(
            f"the prover {run} was trained on other names than those of {graph.name}; "
            f"evaluate it on the graph it was trained on"
        )
    asked = Asked.of(graph, parse_rules(run / "rules.txt", graph.vocab))
    policy = rule_policy(asked)
    _load(policy, state["policy"], path)
    return PolicyScorer(asked, policy)


def _loop(
    config: ProverConfig,
    graph: Graph,
    asked: Asked,
    potential: Potential | None,
    run: Path | None,
    log: EventLog | None,
    progress: Progress | None,
) -> tuple[PolicyScorer, ProverResult]:
    began = time.perf_counter()
    policy = rule_policy(asked, config.seed)
    questions = asked.questions(graph.train)
    valid = _spread(graph.valid, config.eval_triples)
    plan = _plan(config, asked.depth)
    mark = digest("prover", vocab_digest(graph), digest_array(graph.train))
    at, best, saved = _At(), _copied(policy), None
    if run and (path := latest(run / "checkpoints")):
        state = load_checkpoint(path)
        if state["graph"] != mark:
            raise Mismatch(f"{path} is of other facts than {config.data} holds; restore them")
        at, saved = _At(**state["at"]), state["learner"]
        _load(policy, state["policy"], path)
        best = {name: torch.from_numpy(array) for name, array in state["best"].items()}
    if log:
        log.write(
            "resume" if at.round else "start", round=at.round, rounds=len(plan),
            rules=len(asked.rules) // 2, questions=len(questions),
        )  # fmt: skip

    def note(kind: str, **fields: Any) -> None:
        if log:
            log.write(kind, round=at.round, **fields)

    def judged(at: _At) -> _At:
        """Rank valid with the policy as it stands, and keep it if it is the best so far."""
        if not len(valid):
            best.update(_copied(policy))
            return replace(at, best_round=at.round)
        mrr = rank(PolicyScorer(asked, policy), valid, graph.known).metrics().mrr
        shares = ask_once(asked, policy, valid, config.n_eval_envs, seed=config.seed)
        note("eval", mrr=mrr, **shares._asdict())
        if at.round == 0:
            at = replace(at, first_mrr=mrr, first_proved=shares.proved)
        # Where all rank alike, the one that answers more by itself is better.
        if at.best_mrr is None or (mrr, shares.right) > (at.best_mrr, at.right or 0.0):
            best.update(_copied(policy))
            at = replace(at, best_mrr=mrr, best_round=at.round, **shares._asdict())
        return at

    learner: Learner | None = None
    begun_at, stopping = at.round, False
    # What is computed is small: more threads would only wait for each other.
    with _threads(1), interrupts() as interrupted:
        if at.round == 0:
            at = judged(at)
        while at.round < len(plan) and not stopping:
            here = plan[at.round]
            if learner is None or here.number == 0:
                learner = _learner(here, config, asked, policy, questions, potential)
                if saved is not None and here.number > 0:
                    learner.load_state_dict(saved)
                saved = None
            start = time.perf_counter()
            metrics = learner.step()
            at = replace(at, round=at.round + 1)
            note("round", part=here.part, **metrics, seconds=time.perf_counter() - start)
            last = here.number == here.of - 1
            if last or here.part == "gradients" or at.round % config.eval_every == 0:
                at = judged(at)
            if progress:
                progress(at.round, len(plan), _said(here, metrics, at))
            reached = config.stop_after and at.round - begun_at >= config.stop_after
            stopping = bool(interrupted() or reached) and at.round < len(plan)
            over = stopping or at.round == len(plan)
            if run and (over or at.round % config.save_every == 0):
                state = {
                    "graph": mark,
                    "at": asdict(at),
                    "policy": dict(policy.state_dict()),
                    "best": best,
                    "learner": learner.state_dict(),
                }
                save_checkpoint(run / "checkpoints", at.round, state)
    finished = at.round == len(plan)
    kept = rule_policy(asked)
    kept.load_state_dict(best)
    if run and finished:
        state = {"policy": best, "vocab": vocab_digest(graph), "valid_mrr": at.best_mrr}
        save_checkpoint(run / "model", at.best_round, state, keep=1)
    note("stop", why="done" if finished else "stopped", mrr=at.best_mrr)
    result = ProverResult(
        run_dir=run or Path(),
        finished=finished,
        rounds=at.round,
        rules=len(asked.rules) // 2,
        skipped=asked.chains.skipped,
        first_proved=at.first_proved,
        proved=at.proved,
        right=at.right,
        first_mrr=at.first_mrr,
        best_mrr=at.best_mrr,
        best_round=at.best_round,
        seconds=time.perf_counter() - began,
    )
    return PolicyScorer(asked, kept), result


def _plan(config: ProverConfig, depth: int) -> list[_Round]:
    """Every round of the run, in order; PPO's are shared evenly among the depths."""
    plan = [
        _Round("imitation", depth, n, config.clone_updates) for n in range(config.clone_updates)
    ]
    updates = -(-config.ppo_steps // (config.num_steps * config.n_envs))
    depths = list(range(2, depth + 1)) if config.curriculum else [depth]
    bounds = [updates * i // len(depths) for i in range(len(depths) + 1)]
    for level, low, high in zip(depths, bounds[:-1], bounds[1:], strict=True):
        plan += [_Round("ppo", level, n, high - low) for n in range(high - low)]
    return plan + [_Round("gradients", depth, n, config.passes) for n in range(config.passes)]


def _learner(
    here: _Round,
    config: ProverConfig,
    asked: Asked,
    policy: Policy,
    questions: Ints,
    potential: Potential | None,
) -> Learner:
    if here.part == "imitation":
        return Cloning(asked, policy, questions, config)
    if here.part == "gradients":
        return Passes(asked, policy, questions, config)
    return Practice(asked, policy, questions, config, here.depth, here.of, potential)


def _potential(config: ProverConfig, graph: Graph) -> Potential | None:
    if config.kge is None:
        return None
    return kge_potential(load_scorer(config.kge, graph).kge)


def _rules(config: ProverConfig, graph: Graph) -> Rules:
    if config.rules is not None:
        return parse_rules(config.rules, graph.vocab)
    mined = mine(
        graph.facts,
        graph.vocab,
        length=config.length,
        most=config.most,
        min_confidence=config.min_confidence,
    )
    return mined.rules


def _said(here: _Round, metrics: Mapping[str, float], at: _At) -> str:
    """What stands beside the bar."""
    parts = [here.part]
    if "proved" in metrics:
        parts.append(f"depth {here.depth}, proved {metrics['proved']:.1%}")
    elif "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.3f}")
    if at.best_mrr is not None:
        parts.append(f"best MRR on valid {at.best_mrr:.4f}")
    return ", ".join(parts)


def _copied(policy: Policy) -> Weights:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def _load(policy: Policy, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    if shapes != {name: array.shape for name, array in arrays.items()}:
        raise Mismatch(f"{path} is of another graph or other rules; restore those of the run")
    policy.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})


def _spread(triples: Ints, most: int) -> Ints:
    """At most `most` of the triples, evenly spread over the file."""
    if not most or len(triples) <= most:
        return triples
    return triples[np.linspace(0, len(triples) - 1, most).astype(np.int64)]
