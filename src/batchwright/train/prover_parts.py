"""The three ways in which a prover learns: imitation, PPO and exact policy gradients.

Each does one round at a time, says what it measured, and can be saved and restored to the bit.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright import rng
from batchwright.envs.prover import BatchedVecEnv
from batchwright.errors import ConfigError
from batchwright.logic.kge import Kge
from batchwright.logic.prove import prove_all
from batchwright.permutation import permutation
from batchwright.rl.policy import Policy, choose
from batchwright.rl.ppo import PPO, PPOConfig
from batchwright.train.asking import Asked
from batchwright.train.policy_kernels import learn
from batchwright.train.proverconfig import ProverConfig
from batchwright.train.rule_policy import RuleActor

__all__ = ["Cloning", "Learner", "Passes", "Practice", "ask_once", "kge_potential"]

Ints = NDArray[np.int32]
Metrics = dict[str, float]

SMALL_SQUARE = 1e-2
"""What Adagrad's sums begin with, so that the first slopes do not move a rule by a whole rate."""


class Learner(Protocol):
    """One part of the training."""

    def step(self) -> Metrics: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Cloning:
    """Imitate the shortest proofs that the exhaustive prover finds, and give up what has none."""

    def __init__(
        self, asked: Asked, policy: Policy, questions: Ints, config: ProverConfig
    ) -> None:
        some = _some(questions, config.clone_questions, config.seed, "prover/clone")
        teacher = prove_all(some, asked.facts, asked.rules, asked.depth, inverse=asked.inverse)
        self.provable = teacher.share
        self._steps, self._policy = config.num_steps, policy
        self._env = _env(
            asked, some, config.n_envs, config.seed, negatives=config.negatives, teacher=teacher
        )
        self._optimizer = torch.optim.Adam(policy.actor.parameters(), lr=config.clone_lr)

    def step(self) -> Metrics:
        losses, agreed, taught = [], 0, 0
        obs = self._env.step(np.full(self._env.num_envs, -9)).obs if False else self._look()
        for _ in range(self._steps):
            wanted = self._env.expert_actions()
            known = np.flatnonzero(wanted >= 0)
            if len(known):
                seen = {name: torch.from_numpy(array[known]) for name, array in obs.items()}
                logits = self._policy.logits(seen)
                target = torch.from_numpy(wanted[known])
                loss = torch.nn.functional.cross_entropy(logits, target)
                self._optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                self._optimizer.step()
                losses.append(float(loss.detach()))
                agreed += int((logits.argmax(-1) == target).sum())
                taught += len(known)
            obs = self._env.step(wanted).obs
        return {
            "loss": float(np.mean(losses)) if losses else 0.0,
            "agreement": agreed / max(1, taught),
            "provable": self.provable,
        }
