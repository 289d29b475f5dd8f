"""Training of a prover on a graph, top to bottom.

    facts, rules -> behaviour cloning -> PPO, deeper and deeper -> supervised passes -> MRR

Proofs use the train part, with a query's own fact hidden; the policy with the best MRR on valid is
kept; the test part is not read. Every random number is a function of the seed and a counter, so a
run that was killed and resumed ends with the same bits as one that was not.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.checkpoint import Checkpoint, latest, save_checkpoint
from batchwright.envs.prover.settings import auto_batch
from batchwright.errors import ConfigError, Mismatch, MissingFile
from batchwright.fingerprint import digest, digest_array
from batchwright.logic.kge import load_scorer, read_rules, vocab_digest
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.mine.constants import mine_constants
from batchwright.logic.mine.mining import mine, write_rules
from batchwright.logic.rank.ranking import evenly_spread, rank
from batchwright.logic.rules import Rules, parse_rules
from batchwright.rl.policy import Policy
from batchwright.train.prover.answers import (
    Answering,
    AnswerPolicy,
    AnswerScorer,
    Weighed,
    answer_once,
    fit_to_ask,
)
from batchwright.train.prover.config import ProverConfig, phases_said
from batchwright.train.prover.episodes import Episodes
from batchwright.train.prover.learners import (
    Asking,
    Cloning,
    Learner,
    Passes,
    Potential,
    Practice,
    ask_once,
    kge_potential,
    reward_of,
)
from batchwright.train.prover.policy import neural_policy, rule_policy
from batchwright.train.prover.program import Asked
from batchwright.train.prover.scorer import PolicyScorer
from batchwright.train.prover.search import BeamScorer
from batchwright.train.run import Run, threads

__all__ = [
    "Origin",
    "Proofs",
    "ProverResult",
    "Weighting",
    "fit_prover",
    "load_prover",
    "origin_of",
    "train_prover",
]

Ints = NDArray[np.int32]
Progress = Callable[[int, int, str], object]
Weights = dict[str, torch.Tensor]
Proofs = PolicyScorer | BeamScorer | AnswerScorer
Program = Asked | Weighed
AnyPolicy = Policy | AnswerPolicy

Weighting = Literal["kept", "before_ppo", "ppo"]
"""Which policy of a run: the one that it kept, the one that PPO started from, or PPO's best."""

SIZES = ("n_envs", "n_eval_envs")
"""Settings that may be `auto`."""

SEARCHED = 256
"""Queries that the policy answers searches for at once where `n_envs` is `auto`."""

UPDATES = 64
"""Updates that a PPO budget holds where `n_envs` is `auto`: a few large ones learn little."""

FEWEST = 16
"""`n_envs` that `auto` does not go below for them: an update needs some queries."""


@dataclass(frozen=True, slots=True)
class ProverResult:
    """What a run did, in this call and before it."""

    run_dir: Path
    finished: bool
    """False if it was stopped and can be resumed."""
    stopped_by: str | None
    """SIGTERM, SIGUSR1, Ctrl-C or --stop-after; None if it is finished."""
    rounds: int
    n_envs: int
    """Parallel environments: what `auto` came to."""
    ppo_steps: int
    """Steps that PPO took; the last rollout is a whole one."""
    trained_by: tuple[str, ...]
    """The phases that the policy that is kept went through; none: it is untrained."""
    rules: int
    """Rules that are chains and were used."""
    skipped: tuple[str, ...]
    """Names of the rules that are not chains."""
    first_proved: float | None
    """Share of valid queries that one sampled episode proves, before training."""
    proved: float | None
    """The same with the policy that is kept."""
    right: float | None
    """Share of valid queries that one sampled episode of that policy answers correctly."""
    first_mrr: float | None
    """On valid, before training."""
    before_ppo_mrr: float | None
    """On valid, of the policy that PPO started from; None without PPO."""
    after_ppo_mrr: float | None
    """On valid, of the policy that PPO ended with."""
    before_ppo_right: float | None
    """Share of valid queries that one sampled episode answers correctly, before PPO."""
    after_ppo_right: float | None
    """The same after PPO."""
    best_mrr: float | None
    best_round: int
    seconds: float


class _Round(NamedTuple):
    """One round of the plan: its part, and its number among the rounds of that part."""

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
    last_mrr: float | None = None
    last_right: float | None = None
    before_ppo_mrr: float | None = None
    after_ppo_mrr: float | None = None
    before_ppo_right: float | None = None
    after_ppo_right: float | None = None
    ppo_mrr: float | None = None
    ppo_right: float | None = None
    ppo_round: int | None = None
    """The best of PPO's rounds, which need not be the one that is kept."""


class Origin(NamedTuple):
    """Where a policy of a run comes from."""

    round: int
    rounds: dict[str, int]
    """Rounds of each phase that it went through, in order; none: it is untrained."""
    valid_mrr: float | None

    @property
    def words(self) -> str:
        """Such as `imitation, PPO and supervised passes`."""
        return phases_said(self.rounds)


def train_prover(
    config: ProverConfig, *, resume: bool = False, progress: Progress | None = None
) -> ProverResult:
    """Train, or resume the run in `config.run_dir`; its `model` folder holds the result.

    Ctrl-C, SIGTERM and SIGUSR1 end the round and save; a second Ctrl-C stops at once.
    """
    if resume:
        # What was `auto` is a number since the run began.
        began = ProverConfig.of_run(config.run_dir)
        autos = {n: getattr(began, n) for n in SIZES if getattr(config, n) == "auto"}
        config = replace(config, **autos)
    # A function that cannot be loaded is told before there is a run.
    reward_of(config.reward)
    with Run(config, resume=resume) as run:
        config = replace(config, run_dir=run.folder)
        graph = load_graph(Path(config.data)).without_test()
        file = run.folder / "rules.txt"
        begun = resume and file.exists()
        wider, rules = _program(config, graph, file if begun else config.rules)
        if not begun:
            write_rules(file, rules, wider.vocab, f"rules of {graph.name}")
        return _train(config, graph, wider, rules, run, progress)[1]


def fit_prover(
    config: ProverConfig, graph: Graph, rules: Rules, progress: Progress | None = None
) -> tuple[Proofs, ProverResult]:
    """Train in memory, with no run directory; the policy that ranks valid best, as a scorer.

    The test part of the graph is left out; the rules may be over the whole graph's vocabulary.
    """
    with Run(config, in_memory=True) as run:
        seen = graph.without_test()
        return _train(config, seen, seen, rules.over(seen.vocab), run, progress)


def load_prover(
    run: Path, graph: Graph, *, beam: int | None = None, which: Weighting = "kept"
) -> Proofs:
    """The trained prover of a run as a scorer, if it was trained on this graph.

    It scores by beam search, or with a beam of 0 by the exact sum over all proofs, which a neural
    policy does not have; None: as the run was evaluated on valid. `which` is the policy that ranks
    valid best, whatever phase it comes from; the one that PPO started from; or PPO's best.
    """
    graph = graph.without_test()
    found, config = _model(run)
    if found.state["vocab"] != vocab_digest(graph):
        raise Mismatch(
            f"the prover {run} was trained on other names than those of {graph.name}; "
            f"evaluate it on the graph it was trained on"
        )
    if beam is not None:
        config = replace(config, beam=beam)
    wider, rules = _program(config, graph, run / "rules.txt")
    if found.state["rules"] != rules.fingerprint:
        raise Mismatch(f"the prover {run} was trained with other rules than its rules.txt holds")
    asked = _followed(config, wider, rules)
    policy = _policy(config, asked)
    if which != "kept":
        origin_of(run, which)
    _load(policy, found.state["policy" if which == "kept" else which], found.path)
    return _scorer(config, asked, policy)


def origin_of(run: Path, which: Weighting = "kept") -> Origin:
    """The phases that a policy of a finished run went through."""
    found, _ = _model(run)
    origins = found.state.get("origins")
    if origins is None:
        raise Mismatch(
            f"the run {run} does not say by which phases its policy was trained; train it again "
            f"with this version"
        )
    if which not in origins:
        raise ConfigError(
            f"the run {run} took no PPO step, so there is no RL in it: its policy was trained by "
            f"{Origin(**origins['kept']).words}; rank it with --mode prover"
        )
    return Origin(**origins[which])


def _model(run: Path) -> tuple[Checkpoint, ProverConfig]:
    found = latest(run / "model")
    config = ProverConfig.of_run(run) if (run / "config.toml").exists() else None
    if found is None or config is None:
        raise MissingFile(
            f"no trained prover in {run}; give a finished run of `batchwright train prover`"
        )
    return found, config


def _train(
    config: ProverConfig,
    graph: Graph,
    wider: Graph,
    rules: Rules,
    run: Run,
    progress: Progress | None,
) -> tuple[Proofs, ProverResult]:
    """Train on the queries of `graph`; `wider` also has what an embedding accepts as facts."""
    began = time.perf_counter()
    asked = _followed(config, wider, rules)
    potential = _potential(config, graph, wider)
    config = run.config = _sized(config, asked)
    policy = _policy(config, asked)
    train = fit_to_ask(config, graph) if isinstance(asked, Weighed) else graph.train
    questions = asked.questions(train)
    valid = evenly_spread(graph.valid, config.eval_triples)
    plan = _plan(config, asked.depth if isinstance(asked, Asked) else 1)
    facts = digest("prover", vocab_digest(graph), digest_array(wider.train), rules.fingerprint)
    at, best, saved = _At(), _copied(policy), None
    before_ppo: Weights = {}
    practised: Weights = {}
    if found := run.latest():
        with found.restoring():
            before = found.state
            if before["facts"] != facts:
                raise Mismatch(
                    f"{found.path} was trained on other facts or rules than {config.data} and "
                    f"{run.folder / 'rules.txt'} hold; restore those of the run"
                )
            at, saved = _At(**before["at"]), before["learner"]
            _load(policy, before["policy"], found.path)
            best, before_ppo, practised = (
                {name: torch.from_numpy(array) for name, array in before.get(part, {}).items()}
                for part in ("best", "before_ppo", "ppo")
            )
    begun_at, used = at.round, asked.num_rules // 2
    run.start(round=at.round, rounds=len(plan), rules=used, questions=len(questions))
    episodes = None
    if run.writes and isinstance(asked, Asked):
        episodes = Episodes(asked, rules, wider.vocab)

    def evaluated(at: _At) -> _At:
        """Measure the policy on valid, and keep it if it is the best so far."""
        by_ppo = at.round > 0 and plan[at.round - 1].part == "ppo"
        if not len(valid):
            best.update(_copied(policy))
            if by_ppo:
                practised.update(_copied(policy))
                at = replace(at, ppo_round=at.round)
            return replace(at, best_round=at.round)
        scorer = _scorer(config, asked, policy)
        mrr = rank(scorer, valid, graph.known).metrics().mrr
        shares = _asked_once(config, asked, policy, valid, episodes)
        if episodes is not None:
            episodes.write(run.folder / "rollouts" / f"{at.round:06d}.jsonl")
        run.event("eval", round=at.round, mrr=mrr, proofs=scorer.how(), **shares._asdict())
        at = replace(at, last_mrr=mrr, last_right=shares.right)
        if at.round == 0:
            at = replace(at, first_mrr=mrr, first_proved=shares.proved)
        # At equal MRR, the policy that answers more queries by itself is better.
        if at.best_mrr is None or (mrr, shares.right) > (at.best_mrr, at.right or 0.0):
            best.update(_copied(policy))
            at = replace(at, best_mrr=mrr, best_round=at.round, **shares._asdict())
        if by_ppo:
            at = replace(at, after_ppo_mrr=mrr, after_ppo_right=shares.right)
            if at.ppo_mrr is None or (mrr, shares.right) > (at.ppo_mrr, at.ppo_right or 0.0):
                practised.update(_copied(policy))
                at = replace(at, ppo_mrr=mrr, ppo_right=shares.right, ppo_round=at.round)
        return at

    learner: Learner | None = None

    def state() -> dict[str, Any]:
        assert learner is not None
        return {
            "facts": facts,
            "at": asdict(at),
            "policy": policy.state_dict(),
            "best": best,
            "before_ppo": before_ppo,
            "ppo": practised,
            "learner": learner.state_dict(),
        }

    stopping: str | None = None
    # The computations are small: more threads would only wait for each other.
    with threads(1):
        if at.round == 0:
            at = evaluated(at)
        while at.round < len(plan) and not stopping:
            here = plan[at.round]
            if learner is None or here.number == 0:
                learner = _learner(here, config, asked, policy, questions, potential)
                if saved is not None and here.number > 0:
                    learner.load_state_dict(saved)
                saved = None
            if here.part == "ppo" and (at.round == 0 or plan[at.round - 1].part != "ppo"):
                at = replace(at, before_ppo_mrr=at.last_mrr, before_ppo_right=at.last_right)
                before_ppo.update(_copied(policy))
            start = time.perf_counter()
            metrics = learner.step()
            at = replace(at, round=at.round + 1)
            seconds = time.perf_counter() - start
            run.event("round", round=at.round, part=here.part, **metrics, seconds=seconds)
            last = here.number == here.of - 1
            if last or here.part == "supervised" or at.round % config.eval_every == 0:
                at = evaluated(at)
            if progress:
                progress(at.round, len(plan), _said(here, metrics, at))
            if at.round < len(plan):
                stopping = run.stop(at.round - begun_at)
            due = at.round == len(plan) or at.round % config.save_every == 0 or run.due()
            if stopping or due:
                run.save(at.round, state)
    finished = at.round == len(plan)
    if finished and run.writes and not run.is_left(begun_at, at.round, "model"):
        kept = {
            "policy": best,
            **({"before_ppo": before_ppo, "ppo": practised} if practised else {}),
            "origins": {name: each._asdict() for name, each in _origins(plan, at).items()},
            "vocab": vocab_digest(graph),
            "rules": rules.fingerprint,
            "valid_mrr": at.best_mrr,
        }
        save_checkpoint(run.folder / "model", at.best_round, kept, keep=1)
        run.finish(at.round)
    why = "done" if finished else "stopped"
    brought = {n: getattr(at, n) for n in ("before_ppo_mrr", "after_ppo_mrr")}
    run.event("stop", round=at.round, why=why, mrr=at.best_mrr, **brought)
    chosen = _policy(config, asked)
    chosen.load_state_dict(best)
    return _scorer(config, asked, chosen), ProverResult(
        run_dir=run.folder,
        finished=finished,
        stopped_by=stopping,
        rounds=at.round,
        n_envs=config.num_envs,
        ppo_steps=sum(here.part == "ppo" for here in plan[: at.round]) * config.rollout,
        trained_by=tuple(_trained_by(plan, at.best_round)),
        rules=used,
        skipped=asked.skipped,
        first_proved=at.first_proved,
        proved=at.proved,
        right=at.right,
        first_mrr=at.first_mrr,
        before_ppo_mrr=at.before_ppo_mrr,
        after_ppo_mrr=at.after_ppo_mrr,
        before_ppo_right=at.before_ppo_right,
        after_ppo_right=at.after_ppo_right,
        best_mrr=at.best_mrr,
        best_round=at.best_round,
        seconds=time.perf_counter() - began,
    )


def _plan(config: ProverConfig, depth: int) -> list[_Round]:
    """Every round of the run, in order; PPO's are split evenly over the depths."""
    recipe = config.recipe
    plan = [
        _Round("imitation", depth, n, recipe.clone_updates) for n in range(recipe.clone_updates)
    ]
    updates = -(-recipe.ppo_steps // config.rollout)
    depths = list(range(2, depth + 1)) if recipe.curriculum else [depth]
    bounds = [updates * i // len(depths) for i in range(len(depths) + 1)]
    for level, low, high in zip(depths, bounds[:-1], bounds[1:], strict=True):
        plan += [_Round("ppo", level, n, high - low) for n in range(high - low)]
    return plan + [_Round("supervised", depth, n, recipe.passes) for n in range(recipe.passes)]


def _trained_by(plan: list[_Round], rounds: int) -> dict[str, int]:
    """How many of the first rounds are of each phase, in order."""
    return dict(Counter(here.part for here in plan[:rounds]))


def _origins(plan: list[_Round], at: _At) -> dict[Weighting, Origin]:
    """Of the policy that is kept and, if there was PPO, of the two that it is judged by."""
    found: dict[Weighting, Origin] = {
        "kept": Origin(at.best_round, _trained_by(plan, at.best_round), at.best_mrr)
    }
    if at.ppo_round is not None:
        first = [here.part for here in plan].index("ppo")
        found["before_ppo"] = Origin(first, _trained_by(plan, first), at.before_ppo_mrr)
        found["ppo"] = Origin(at.ppo_round, _trained_by(plan, at.ppo_round), at.ppo_mrr)
    return found


def _followed(config: ProverConfig, graph: Graph, rules: Rules) -> Program:
    """The graph and its rules as the policy follows them."""
    return Weighed(graph, rules) if config.policy == "answers" else Asked.of(graph, rules)


def _sized(config: ProverConfig, asked: Program) -> ProverConfig:
    """The settings with numbers of environments where they are `auto`.

    They fit into memory, and a PPO budget that is not small holds `UPDATES` rollouts.
    """
    budget = config.recipe.ppo_steps // (UPDATES * config.steps_each)
    most = max(FEWEST, 1 << max(0, budget.bit_length() - 1))
    if isinstance(asked, Weighed):
        # A search holds one hit for each rule and entity, whose memory grows as it needs.
        return replace(
            config,
            n_envs=min(SEARCHED, most) if config.n_envs == "auto" else config.n_envs,
            n_eval_envs=SEARCHED if config.n_eval_envs == "auto" else config.n_eval_envs,
        )
    shape = asked.goals, asked.width, asked.depth
    if config.n_envs == "auto":
        room = auto_batch(*shape, config.num_steps, config.width)
        size = min(room, most) if config.recipe.ppo_steps else room
        config = replace(config, n_envs=size)
    if config.n_eval_envs == "auto":
        config = replace(config, n_eval_envs=auto_batch(*shape))
    return config


def _policy(config: ProverConfig, asked: Program) -> AnyPolicy:
    if isinstance(asked, Weighed):
        groups = asked.groups() if config.shared else None
        return AnswerPolicy(asked.start(config.start), groups)
    if config.policy == "neural":
        return neural_policy(asked, config.width, config.constant_scale, config.seed)
    return rule_policy(asked, config.seed)


def _scorer(config: ProverConfig, asked: Program, policy: AnyPolicy) -> Proofs:
    if isinstance(asked, Weighed):
        return AnswerScorer(asked, cast(AnswerPolicy, policy))
    policy, beam = cast(Policy, policy), config.recipe.beam
    if not beam:
        return PolicyScorer(asked, policy)
    return BeamScorer(asked, policy, beam, ask=config.ask, num_envs=int(config.n_eval_envs))


def _asked_once(
    config: ProverConfig, asked: Program, policy: AnyPolicy, valid: Ints, episodes: Episodes | None
) -> Asking:
    """Both queries of every triple, each answered by one sample of the policy."""
    if isinstance(asked, Weighed):
        return answer_once(asked, cast(AnswerPolicy, policy), valid, config.seed)
    return ask_once(
        asked,
        cast(Policy, policy),
        valid,
        int(config.n_eval_envs),
        config.ask,
        seed=config.seed,
        episodes=episodes,
    )


def _learner(
    here: _Round,
    config: ProverConfig,
    asked: Program,
    policy: AnyPolicy,
    questions: NDArray[Any],
    potential: Potential | None,
) -> Learner:
    if isinstance(asked, Weighed):
        return Answering(asked, cast(AnswerPolicy, policy), questions, config, here.of)
    policy = cast(Policy, policy)
    if here.part == "imitation":
        return Cloning(asked, policy, questions, config)
    if here.part == "supervised":
        return Passes(asked, policy, questions, config)
    return Practice(asked, policy, questions, config, here.depth, here.of, potential)


def _potential(config: ProverConfig, graph: Graph, wider: Graph) -> Potential | None:
    if config.kge is None or not config.negatives:
        return None
    return kge_potential(load_scorer(config.kge, graph).kge, wider.vocab.num_predicates)


def _program(config: ProverConfig, graph: Graph, file: Path | None) -> tuple[Graph, Rules]:
    """The rules of a file, or mined ones; and the graph, with what an embedding accepts if asked.

    What it accepts depends on the run of the embedding and on valid alone, so it is the same
    whenever the prover is read.
    """
    if file is not None:
        if config.rules is None or config.kge is None:
            return graph, parse_rules(file, graph.vocab)
        rules, accepted = read_rules(file, graph, config.kge, config.accept)
        if accepted is None and not config.negatives:
            raise ConfigError(
                f"no rule of {file} asks for a p_kge, and without --negatives no reward is shaped; "
                f"leave --kge out"
            )
        return (accepted.graph if accepted else graph), rules
    mined = mine(
        graph.train,
        graph.vocab,
        length=config.length,
        most=config.most,
        min_confidence=config.min_confidence,
    )
    rules = mined.rules
    if most := config.recipe.constants:
        rules = rules.plus(mine_constants(graph.train, graph.vocab, most=most))
    if not len(rules):
        edges = "1 edge" if config.length == 1 else f"up to {config.length} edges"
        longer = "" if config.length == 3 else f"--length {config.length + 1}, "
        raise ConfigError(
            f"no rule of {edges} with a confidence of at least {config.min_confidence:g} was "
            f"mined from {graph.name}; give {longer}a lower --min-confidence, or --rules FILE"
        )
    return graph, rules


def _said(here: _Round, metrics: Mapping[str, float], at: _At) -> str:
    """The note next to the progress bar."""
    parts = [here.part]
    if "proved" in metrics:
        depth = "" if "reward" in metrics else f"depth {here.depth}, "
        parts.append(f"{depth}proved {metrics['proved']:.1%}")
    elif "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.3f}")
    if at.best_mrr is not None:
        parts.append(f"best MRR on valid {at.best_mrr:.4f}")
    return ", ".join(parts)


def _copied(policy: AnyPolicy) -> Weights:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def _load(policy: AnyPolicy, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    if shapes != {name: array.shape for name, array in arrays.items()}:
        raise Mismatch(f"{path} is of another graph or other rules; restore those of the run")
    policy.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
