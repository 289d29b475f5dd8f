"""The learned policy and baselines on held-out questions, with confidence intervals and cost.

Everything is chosen on train and valid questions; every strategy answers the same test questions
once, so differences are paired. Each may rewrite a question as often as the policy may, and uses
as many rewritings of those as served it best on valid or train questions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright import rng
from batchwright.envs.query_mutation.env import MutationPipelines, Turn
from batchwright.envs.query_mutation.operators import NOOP, STOP, Operator
from batchwright.envs.questions import Question
from batchwright.train.query_mutator.models import Models

__all__ = [
    "Choose",
    "Comparison",
    "Robustness",
    "Strategy",
    "Versus",
    "compare_strategies",
    "paired_interval",
]

RESAMPLES = 5000
"""Bootstrap resamples of a confidence interval."""
Floats = NDArray[np.float64]
MakeEnv = Callable[..., MutationPipelines]


class Choose(Protocol):
    """A strategy: from features [N, d] and the step number to an operator for each question."""

    def __call__(self, features: NDArray[np.float32], step: int) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """One strategy to rewrite questions, and its result on the test questions."""

    name: str
    plan: str
    """Its operators, if they are fixed."""
    accuracy: float
    gain: float
    """In accuracy, over the original wordings."""
    low: float
    high: float
    """95 % confidence interval of the gain, by bootstrap over questions."""
    questions: int
    invalid: int
    """Questions excluded because a call failed."""
    invalid_steps: int
    reasons: dict[str, int]
    """Invalid steps by reason, as in the transcripts."""
    rewritings: float
    """Rewritings of a question, in the mean; rejected ones are counted too."""
    calls: int
    tokens: int
    calls_per_point: float | None
    """Calls per question and percentage point gained; None without a gain."""
    tokens_per_point: float | None


@dataclass(frozen=True, slots=True)
class Versus:
    """The policy compared with the baseline that has the highest accuracy on the test questions.

    That baseline is selected by what it is compared with, so the comparison favours the baseline.
    """

    baseline: str
    gain: float
    """Of the policy over the baseline, in accuracy."""
    low: float
    high: float
    """95 % confidence interval of the gain, by bootstrap over questions."""
    questions: int
    """Those that both have a score for."""


@dataclass(frozen=True, slots=True)
class Robustness:
    """How much the target's accuracy depends on the wording."""

    original: float
    mean: float
    """Over all rewritings that passed the guard."""
    worst: float
    """Fraction of questions answered correctly in every wording."""
    best: float
    """Fraction of questions answered correctly in at least one."""
    drop: float | None
    """1 - mean / original."""
    by_operator: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """All strategies, the target's robustness, and every step that was taken."""

    strategies: tuple[Strategy, ...]
    versus: Versus | None
    """None without a policy, or if it has no score."""
    robustness: Robustness
    turns: dict[str, list[Turn]] = field(repr=False)


@dataclass(frozen=True)
class _Episodes:
    scores: Floats
    """Final score of each question; NaN if a call failed."""
    turns: list[Turn]
    calls: int
    tokens: int


def compare_strategies(
    models: Models,
    make_env: MakeEnv,
    splits: dict[str, Sequence[Question]],
    policy: Choose | None,
    *,
    seed: int,
    bandit_episodes: int = 500,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare the policy with identity, random, best single operator, greedy plan and bandit.

    `splits` has train, valid and test questions; `make_env(questions, num_envs, order=...)` builds
    environments on them.
    """
    test = make_env(splits["test"])
    operators, most = test.operators, test.max_steps
    stop, noop = operators.index(STOP), operators.index(NOOP)
    asking = [n for n, operator in enumerate(operators) if operator.asks]
    done, total = 0, 1 + most + most * len(asking) * 2 + most + 6 + len(asking)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(min(done, total), total)

    def play(split: str, choose: Choose) -> _Episodes:
        played = _play(models, make_env(splits[split]), choose)
        tick()
        return played

    def on_valid(choose: Choose) -> float:
        scores = play("valid", choose).scores
        return float(np.nanmean(scores)) if np.isfinite(scores).any() else -1.0

    times = max(range(1, most + 1), key=lambda k: on_valid(_random(seed, asking, k, stop)))
    single = max(
        ([n] * k for k in range(1, most + 1) for n in asking),
        key=lambda plan: on_valid(_fixed(plan, stop)),
    )
    greedy = _greedy(on_valid, asking, most, stop)
    bandit = _thompson(make_env, splits["train"], seed, bandit_episodes, noop, tick)
    chosen: dict[str, tuple[str, Choose]] = {
        "identity": ("original wording", _fixed([], stop)),
        "random": (" then ".join(["any operator"] * times), _random(seed, asking, times, stop)),
        "best single": (_named(single, operators), _fixed(single, stop)),
        "greedy plan": (_named(greedy, operators), _fixed(greedy, stop)),
        "bandit": (_named(bandit, operators), _fixed(bandit, stop)),
    }
    if policy is not None:
        chosen["ppo"] = ("chosen per question", policy)
    played = {name: play("test", choose) for name, (_, choose) in chosen.items()}
    identity = played["identity"].scores
    asks = {operators[n].name for n in asking}
    strategies = tuple(
        _strategy(name, chosen[name][0], found, identity, asks, seed)
        for name, found in played.items()
    )
    alone = {operators[n].name: play("test", _fixed([n], stop)) for n in asking}
    turns = {name: found.turns for name, found in played.items()}
    turns |= {f"only {name}": found.turns for name, found in alone.items()}
    return Comparison(strategies, _versus(played, seed), _robustness(identity, alone), turns)


def paired_interval(differences: Floats, seed: int) -> tuple[float, float]:
    """95 % bootstrap confidence interval of the mean of paired differences.

    >>> low, high = paired_interval(np.array([1.0, 0.0, 1.0, 1.0]), seed=0)
    >>> 0.0 <= low <= 0.75 <= high <= 1.0
    True
    """
    size = len(differences)
    if not size:
        return float("nan"), float("nan")
    drawn = rng.stream(seed, "bootstrap", size)
    # As many resamples at a time as fit in a few megabytes.
    rows = max(1, 1_000_000 // size)
    means = [
        differences[drawn.integers(0, size, (min(rows, RESAMPLES - start), size))].mean(1)
        for start in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def _play(models: Models, env: MutationPipelines, choose: Choose) -> _Episodes:
    """One episode of every question with one strategy."""
    before = Counter(models.used)
    stop = env.operators.index(STOP)
    features = env.reset()["features"]
    going = np.ones(env.num_envs, np.bool_)
    scores = np.full(env.num_envs, np.nan)
    clean = np.ones(env.num_envs, np.bool_)
    turns: list[Turn] = []
    for step in range(env.max_steps):
        actions = np.where(going, choose(features, step), stop)
        taken = env.step(actions)
        clean &= ~going | taken.valid
        scores = np.where(going, taken.info["score"], scores)
        names = ("question", "operator", "wording", "answer", "why")
        for b in np.flatnonzero(going).tolist():
            texts = {name: str(taken.info[name][b]) for name in names}
            score = float(taken.info["score"][b])
            gain = float(taken.reward[b]) if taken.valid[b] else float("nan")
            turns.append(Turn(env=b, episode=0, step=step + 1, score=score, gain=gain, **texts))
        going &= ~taken.done
        features = taken.obs["features"]
        if not going.any():
            break
    spent = Counter(models.used)
    spent.subtract(before)
    calls = spent["mutator_calls"] + spent["target_calls"]
    return _Episodes(np.where(clean, scores, np.nan), turns, calls, spent["tokens"])


def _greedy(
    worth: Callable[[Choose], float], asking: Sequence[int], most: int, stop: int
) -> list[int]:
    """A plan of at most `most` operators, the best next one appended while it helps."""
    plan: list[int] = []
    reached = worth(_fixed(plan, stop))
    for _ in range(most):
        found = [(worth(_fixed([*plan, n], stop)), -n) for n in asking]
        value, number = max(found)
        if value <= reached:
            break
        plan, reached = [*plan, -number], value
    return plan


def _thompson(
    make_env: MakeEnv,
    questions: Sequence[Question],
    seed: int,
    episodes: int,
    noop: int,
    tick: Callable[[], None],
) -> list[int]:
    """A plan by Thompson sampling on train questions, one operator after the other.

    Each place of the plan gets `episodes` questions of its own, rewritten by the plan so far; the
    plan ends where no operator is better than none.
    """
    width = min(32, len(questions))
    env = make_env(questions, width, order="drawn")
    arms = [n for n, operator in enumerate(env.operators) if operator.asks] + [noop]
    plan: list[int] = []
    env.reset()
    while len(plan) < env.max_steps:
        right, wrong = np.ones(len(arms)), np.ones(len(arms))
        for round_ in range(max(1, episodes // width)):
            for operator in plan:
                env.step(np.full(width, operator))
            drawn = rng.stream(seed, "bandit", len(plan), round_)
            pulled = drawn.beta(right, wrong, (width, len(arms))).argmax(1)
            taken = env.step(np.array(arms)[pulled])
            score = taken.info["score"].astype(float)
            for arm, value, valid in zip(pulled, score, taken.valid, strict=True):
                if valid and np.isfinite(value):
                    right[arm] += value
                    wrong[arm] += 1 - value
            # Every round has questions of its own.
            if len(plan) + 1 < env.max_steps:
                env.reset()
        tick()
        best = arms[int((right / (right + wrong)).argmax())]
        if best == noop:
            break
        plan.append(best)
    return plan


def _fixed(plan: Sequence[int], stop: int) -> Choose:
    def choose(features: NDArray[np.float32], step: int) -> NDArray[np.int64]:
        return np.full(len(features), plan[step] if step < len(plan) else stop, np.int64)

    return choose


def _random(seed: int, asking: Sequence[int], times: int, stop: int) -> Choose:
    def choose(features: NDArray[np.float32], step: int) -> NDArray[np.int64]:
        if step >= times:
            return np.full(len(features), stop, np.int64)
        drawn = rng.stream(seed, "random way", step).integers(0, len(asking), len(features))
        return np.asarray(asking)[drawn]

    return choose


def _named(plan: Sequence[int], operators: Sequence[Operator]) -> str:
    return " then ".join(operators[n].name for n in plan) or "original wording"


def _versus(played: dict[str, _Episodes], seed: int) -> Versus | None:
    """The policy against the best baseline, paired by question."""
    scores = {name: found.scores for name, found in played.items()}
    policy = scores.pop("ppo", None)
    if policy is None:
        return None
    both = {name: np.isfinite(policy) & np.isfinite(found) for name, found in scores.items()}
    scored = [name for name in scores if both[name].any()]
    if not scored:
        return None
    # By the difference on common questions; the first of equal ones, which are listed by cost.
    best = min(scored, key=lambda name: (policy - scores[name])[both[name]].mean())
    differences = (policy - scores[best])[both[best]]
    low, high = paired_interval(differences, seed)
    return Versus(best, float(differences.mean()), low, high, len(differences))


def _strategy(
    name: str, plan: str, found: _Episodes, identity: Floats, asks: set[str], seed: int
) -> Strategy:
    both = np.isfinite(found.scores) & np.isfinite(identity)
    differences = (found.scores - identity)[both]
    low, high = paired_interval(differences, seed)
    gain = float(differences.mean()) if len(differences) else float("nan")
    count = len(found.scores)
    points = 100 * gain
    return Strategy(
        name=name,
        plan=plan,
        accuracy=float(found.scores[both].mean()) if both.any() else float("nan"),
        gain=gain,
        low=low,
        high=high,
        questions=int(both.sum()),
        invalid=int((~both).sum()),
        invalid_steps=sum(not turn.valid for turn in found.turns),
        reasons=dict(sorted(Counter(t.why for t in found.turns if not t.valid).items())),
        rewritings=sum(turn.operator in asks for turn in found.turns) / count,
        calls=found.calls,
        tokens=found.tokens,
        calls_per_point=found.calls / count / points if points > 0 else None,
        tokens_per_point=found.tokens / count / points if points > 0 else None,
    )


def _robustness(identity: Floats, single: dict[str, _Episodes]) -> Robustness:
    """Over the original wording and every rewriting that passed the guard."""
    table = [identity]
    by_operator = {}
    for name, found in single.items():
        kept = np.array([turn.why != "guard" for turn in found.turns if turn.step == 1])
        scores = np.where(kept, found.scores, np.nan)
        if np.isfinite(scores).any():
            by_operator[name] = float(np.nanmean(scores))
            table.append(scores)
    everything = np.stack(table)
    there = np.isfinite(everything)
    scored = there.any(0)
    lowest = np.where(there, everything, np.inf).min(0)[scored]
    highest = np.where(there, everything, -np.inf).max(0)[scored]
    original = float(np.nanmean(identity)) if np.isfinite(identity).any() else float("nan")
    rewritten = everything[1:]
    mean = float(np.nanmean(rewritten)) if np.isfinite(rewritten).any() else float("nan")
    return Robustness(
        original=original,
        mean=mean,
        worst=float((lowest >= 0.5).mean()),
        best=float((highest >= 0.5).mean()),
        drop=1 - mean / original if original > 0 else None,
        by_operator=by_operator,
    )
