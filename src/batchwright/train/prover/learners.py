"""The three learners of a prover: behaviour cloning, PPO and supervised passes.

Each does one round at a time, returns its metrics, and resumes from a saved state to the same bits.
"""

import importlib.util
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from batchwright import rng
from batchwright.envs.prover.settings import Ended
from batchwright.errors import ConfigError, one_line
from batchwright.files import existing
from batchwright.logic.kge import Kge
from batchwright.logic.prove.proofs import prove_all
from batchwright.permutation import permutation
from batchwright.rl.policy import Policy, choose
from batchwright.rl.ppo import PPO, PPOConfig
from batchwright.train.prover.config import REWARD_NAMES, ProverConfig
from batchwright.train.prover.episodes import Episodes
from batchwright.train.prover.kernels import learn
from batchwright.train.prover.policy import RuleActor
from batchwright.train.prover.program import Asked

__all__ = [
    "Asking",
    "Cloning",
    "Learner",
    "Passes",
    "Potential",
    "Practice",
    "ask_once",
    "kge_potential",
    "reward_of",
]

Ints = NDArray[np.int32]
Metrics = dict[str, float]
Result = TypeVar("Result")
Potential = Callable[[Ints], NDArray[Any]]
"""The potential of goals, given as triples with -1 for variables."""

SMALL_SQUARE = 1e-2
"""Initial accumulator of Adagrad, so that the first gradients do not move a rule by a full step."""


class Learner(Protocol):
    """One phase of the training."""

    def step(self) -> Metrics: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Cloning:
    """Behaviour cloning of the shortest proofs that exhaustive search finds."""

    def __init__(self, asked: Asked, policy: Policy, questions: Ints, config: ProverConfig) -> None:
        some = _some(questions, config.clone_questions, config.seed, "prover/clone", 0)
        # A query that takes longer to prove is not cloned.
        teacher = prove_all(
            some, asked.facts, asked.rules, asked.depth, inverse=asked.inverse, max_nodes=10**6
        )
        self.provable = teacher.share
        self._num_steps, self._policy = config.num_steps, policy
        self._env = asked.env(
            some,
            config.num_envs,
            seed=config.seed,
            ask="truth",
            negatives=config.negatives,
            teacher=teacher,
        )
        self._optimizer = torch.optim.Adam(policy.actor.parameters(), lr=config.clone_lr)

    def step(self) -> Metrics:
        env = self._env
        losses: list[float] = []
        agreed = taught = 0
        obs = env.reset(np.zeros(env.num_envs, np.bool_))
        for _ in range(self._num_steps):
            wanted = env.expert_actions()
            known = np.flatnonzero(wanted >= 0)
            if len(known):
                seen = {name: torch.from_numpy(array[known]) for name, array in obs.items()}
                target = torch.from_numpy(wanted[known])
                logits = self._policy.logits(seen)
                loss = torch.nn.functional.cross_entropy(logits, target)
                self._optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                self._optimizer.step()
                losses.append(float(loss.detach()))
                agreed += int((logits.argmax(-1) == target).sum())
                taught += len(known)
            obs = env.step(wanted).obs
        return {
            "loss": float(np.mean(losses)) if losses else 0.0,
            "agreement": agreed / max(1, taught),
            "provable": self.provable,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "env": self._env.state_dict(),
            "optimizer": _moments(self._optimizer, self._policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._env.load_state_dict(state["env"])
        _restore(self._optimizer, self._policy, state["optimizer"])


class Practice:
    """PPO in the environment, with proofs of at most `depth` steps."""

    def __init__(
        self,
        asked: Asked,
        policy: Policy,
        questions: Ints,
        config: ProverConfig,
        depth: int,
        updates: int,
        potential: Potential | None = None,
    ) -> None:
        recipe = config.recipe
        self._env = asked.env(
            questions,
            config.num_envs,
            seed=rng.key(config.seed, "prover/depth", depth) >> 1,
            ask=config.ask,
            depth=depth,
            negatives=config.negatives,
            reward=reward_of(config.reward),
            end_action=config.end_action,
            potential=potential,
            gamma=config.gamma,
        )
        self._depth = depth
        self._ppo = PPO(
            self._env,
            policy,
            PPOConfig(
                total_steps=updates * config.num_steps * config.num_envs,
                num_steps=config.num_steps,
                epochs=recipe.ppo_epochs,
                minibatches=config.minibatches,
                lr=recipe.lr,
                gamma=config.gamma,
                clip=config.clip,
                entropy_coef=recipe.entropy_coef,
                seed=rng.key(config.seed, "prover/ppo", depth) >> 1,
            ),
        )

    def step(self) -> Metrics:
        before = self._env.counters
        metrics = self._ppo.step()
        # The first rollout resets the environment and its counters with it.
        gained = {
            name: count - (before[name] if count >= before[name] else 0)
            for name, count in self._env.counters.items()
        }
        metrics["proved"] = gained["proven"] / max(1, gained["finished"])
        return metrics | {"depth": float(self._depth)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self._ppo.updates,
            "runner": self._ppo.runner.state_dict(),
            "optimizer": _moments(self._ppo.optimizer, self._ppo.policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ppo.updates = int(state["updates"])
        self._ppo.runner.load_state_dict(state["runner"])
        _restore(self._ppo.optimizer, self._ppo.policy, state["optimizer"])


class Passes:
    """Supervised passes: the likelihood of known answers is maximised, summed over all proofs."""

    def __init__(self, asked: Asked, policy: Policy, questions: Ints, config: ProverConfig) -> None:
        self._asked, self._questions, self._config = asked, questions, config
        self._actor = cast(RuleActor, policy.actor)
        self._done = 0
        self._logits = self._actor.rules.detach().numpy().astype(np.float64)
        self._squares = np.full(len(self._logits), SMALL_SQUARE)

    def step(self) -> Metrics:
        config, chains, steps = self._config, self._asked.chains, self._asked.steps
        some = _some(self._questions, config.pass_questions, config.seed, "prover/pass", self._done)
        loss, counted = learn(
            self._asked.as_steps(some), chains.ptr, chains.bodies, chains.lengths, steps.ptr,
            steps.ends, steps.num_entities, steps.num_predicates, config.rate, self._logits,
            self._squares,
        )  # fmt: skip
        # Only the logits among the rules of a query were learned: keep their total probability, or
        # that of giving up would change.
        before = self._actor.rules.detach().numpy().astype(np.float64)
        for low, high in pairwise(chains.ptr.tolist()):
            if high > low:
                part = slice(low, high)
                self._logits[part] += _joined(before[part]) - _joined(self._logits[part])
        with torch.no_grad():
            self._actor.rules.copy_(torch.from_numpy(self._logits))
        self._done += 1
        return {"loss": loss, "provable": counted / max(1, len(some))}

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "logits": self._logits, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = int(state["done"])
        self._logits[:], self._squares[:] = state["logits"], state["squares"]


class Asking(NamedTuple):
    """The outcome of asking queries once."""

    proved: float
    """Share of queries for which a proof of any answer was found."""
    right: float
    """Share of queries answered with the entity of the triple."""


def ask_once(
    asked: Asked,
    policy: Policy,
    triples: Ints,
    num_envs: int,
    ask: str,
    *,
    seed: int = 0,
    episodes: Episodes | None = None,
) -> Asking:
    """Ask both queries of every triple once, each answered by one sample of the policy.

    `episodes` follows some of them.
    """
    questions = asked.questions(triples)
    if episodes is not None:
        episodes.follow(questions)
    env = asked.env(questions, min(num_envs, len(questions)), ask=ask, once=True)
    obs = env.reset()
    proved = right = turn = 0
    while env.active.any():
        with torch.inference_mode():
            logits = policy.logits({name: torch.from_numpy(a) for name, a in obs.items()})
        mask = obs["mask"].copy()
        mask[~env.active, 0] = True
        actions, _ = choose(logits, mask, rng.key(seed, "prover/ask", turn))
        chosen = None if episodes is None else episodes.chosen(obs, actions)
        step = env.step(actions)
        if episodes is not None and chosen is not None:
            episodes.took(chosen, step, questions)
        proven = step.info["proven"]
        wanted = questions[step.info["query_index"][proven], 2]
        proved += int(proven.sum())
        right += int((step.info["answer"][proven] == wanted).sum())
        obs = step.obs
        turn += 1
    return Asking(proved / len(questions), right / len(questions))


def kge_potential(kge: Kge, preds: int) -> Potential:
    """The sigmoid of an embedding's score of a goal; 0 for goals that are not ground.

    `preds` is how many predicates the asked graph has; if these are more than the embedding's, the
    others are what it accepts of its own.
    """
    own = kge.shape.num_predicates

    def values(goals: Ints) -> NDArray[np.float32]:
        found = np.zeros(len(goals), np.float32)
        ground = np.flatnonzero((goals >= 0).all(axis=1))
        if len(ground):
            x, predicate, y = torch.from_numpy(goals[ground].astype(np.int64)).T
            inverse = (predicate // preds) % 2 == 1
            head, tail = torch.where(inverse, y, x), torch.where(inverse, x, y)
            with torch.no_grad():
                query = kge.query(kge.entities[head], kge.steps[predicate % preds % own])
                scores = (query * kge.aim(kge.entities[tail])).sum(-1)
            found[ground] = torch.sigmoid(scores).numpy()
        return found

    return values


def reward_of(name: str) -> str | Callable[[Ended], ArrayLike]:
    """A name of `REWARDS`, or the function that FILE.py:function names."""
    if name in REWARD_NAMES:
        return name
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward", existing(Path(file), "reward file"))
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    load = spec.loader.exec_module
    _of_the_user(file, lambda: load(module))
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{file} has no function {function!r}; name one after the colon")

    def rewards(ended: Ended) -> ArrayLike:
        return _of_the_user(file, lambda: cast(Callable[[Ended], ArrayLike], found)(ended))

    return rewards


def _of_the_user(file: str, run: Callable[[], Result]) -> Result:
    """What `run` returns; an error in the user's file is told as one of that file."""
    try:
        return run()
    except Exception as error:  # code of the user may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [at.lineno for at in frames if at.filename.endswith(file)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        at = f"{file}, line {line}" if line else file
        raise ConfigError(
            f"{at}: {type(error).__name__}: {one_line(error)}; the function of --reward takes the "
            f"episodes that ended and returns a number for each"
        ) from error


def _some(questions: Ints, most: int, seed: int, purpose: str, number: int) -> Ints:
    """At most `most` queries in a random order; 0: all of them."""
    order = permutation(len(questions), np.uint64(rng.key(seed, purpose, number)))
    return np.ascontiguousarray(questions[order[: most or None]])


def _joined(logits: NDArray[np.float64]) -> float:
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum()))


def _moments(optimizer: torch.optim.Optimizer, policy: Policy) -> dict[str, Any]:
    names = {id(p): name for name, p in policy.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in optimizer.state.items()}


def _restore(optimizer: torch.optim.Optimizer, policy: Policy, saved: Mapping[str, Any]) -> None:
    for name, parameter in policy.named_parameters():
        if name in saved:
            moments: dict[str, Tensor] = {
                key: torch.from_numpy(array) for key, array in saved[name].items()
            }
            optimizer.state[parameter] = moments
