"""Proximal policy optimization (PPO), top to bottom.

    rollout [T, B] -> values -> advantages -> epochs of minibatches -> metrics -> checkpoint

Invalid steps never enter the loss, the advantage statistics or the metrics, and no advantage is
estimated through them. Action masks apply in the rollout and in the update. Every random number
is named by the seed and a counter, so a killed and resumed run ends bit-identical to one that was
not interrupted.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from batchwright import rng
from batchwright.checkpoint import Checkpoint, latest, save_checkpoint
from batchwright.envs.api import Env, Wrapper, array_env
from batchwright.errors import BadLoss, ConfigError, Mismatch, MissingFile
from batchwright.permutation import permutation
from batchwright.rl.gae import gae
from batchwright.rl.policy import Policy
from batchwright.rl.rollout import Collector, Rollout, RolloutStopped, Runner

__all__ = ["PPO", "PPOConfig"]

Metrics = dict[str, float]
MEASURED = (
    *("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"),
    *("actor_grad_norm", "critic_grad_norm"),
)
"""Measured on each minibatch; the means over an update are reported under `losses/`."""


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """The hyperparameters of PPO; the defaults suit small discrete problems."""

    total_steps: int = 100_000
    """Environment steps over all environments, rounded up to whole rollouts."""
    num_steps: int = 128
    """Rollout length: steps of each environment between updates."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Minibatches per pass."""
    lr: float = 2.5e-4
    anneal_lr: bool = True
    """Linear decay of the learning rate to zero over the run."""
    gamma: float = 0.99
    """Discount factor."""
    lam: float = 0.95
    """Lambda of generalized advantage estimation (GAE)."""
    clip: float = 0.2
    """PPO clip range of the probability ratio."""
    value_clip: float | None = None
    """Clip range of the value function loss; None: no clipping."""
    value_coef: float = 0.5
    """Value loss coefficient; the loss is half the mean squared error."""
    entropy_coef: float = 0.01
    """Entropy bonus coefficient."""
    final_entropy_coef: float | None = None
    """Linear schedule of `entropy_coef` to this value over the run; None: constant."""
    max_grad_norm: float = 0.5
    """Gradient clipping norm."""
    clip_together: bool = False
    """Clip the gradients of actor and critic as one, as Stable-Baselines3 and TorchRL do; False:
    each by itself, so that large errors of an untrained critic do not scale the actor's down."""
    target_kl: float | None = None
    """Early stopping: end an update at a minibatch with a larger approximate KL divergence."""
    normalize_advantages: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("total_steps", "num_steps", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "clip", "max_grad_norm", "value_clip", "target_kl"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


class PPO:
    """A policy in training, and all that its next update depends on.

    The environment may be wrapped for TorchRL or Gymnasium; it is stepped on its arrays.
    `runner` collects the rollouts; another `Collector` than the default can step environments
    in another way.
    """

    def __init__(
        self,
        env: Env | Wrapper,
        policy: Policy,
        config: PPOConfig,
        *,
        runner: Callable[..., Collector] = Runner,
    ) -> None:
        self.config = config
        self.env: Env = array_env(env)
        self.policy = policy
        self.runner = runner(self.env, config.num_steps, seed=config.seed)
        actor = [p for p in policy.actor.parameters() if p.requires_grad]
        critic = [
            p for n in (policy.critic, policy.head) for p in n.parameters() if p.requires_grad
        ]
        self._networks = [actor, critic]
        self.optimizer = torch.optim.Adam(actor + critic, lr=config.lr, eps=1e-5, fused=True)
        self.updates = 0

    @property
    def steps_per_update(self) -> int:
        return self.config.num_steps * self.env.num_envs

    @property
    def total_updates(self) -> int:
        return -(-self.config.total_steps // self.steps_per_update)

    @property
    def steps(self) -> int:
        """Environment steps so far, over all environments."""
        return self.updates * self.steps_per_update

    def learn(
        self,
        *,
        on_update: Callable[["PPO", Metrics], object] | None = None,
        save_to: Path | None = None,
        save_every: int = 10,
        keep: int = 2,
        stop: Callable[[], bool] = lambda: False,
    ) -> Metrics:
        """Update until `total_steps` are done or `stop()` is true; the metrics of the last update.

        With `save_to`, a checkpoint is written every `save_every` updates, at the end and on stop;
        the newest `keep` are kept. `on_update` gets the learner and the metrics of each update.
        A runner that stops during a rollout ends it as well, before that update.
        """
        metrics: Metrics = {}
        while self.updates < self.total_updates:
            try:
                metrics = self.step()
            except RolloutStopped:
                if save_to:
                    self.save(save_to, keep=keep)
                break
            if on_update:
                on_update(self, metrics)
            stopping = stop()
            over = stopping or self.updates == self.total_updates
            if save_to and (over or self.updates % save_every == 0):
                self.save(save_to, keep=keep)
            if stopping:
                break
        return metrics

    def step(self) -> Metrics:
        """One rollout and one update."""
        start = time.perf_counter()
        rollout = self.runner.collect(self.policy)
        collected = time.perf_counter() - start
        metrics = self._charts(rollout) | self.update(rollout)
        seconds = time.perf_counter() - start
        metrics["charts/SPS"] = self.steps_per_update / seconds
        metrics["charts/rollout_s"] = collected
        metrics["charts/update_s"] = seconds - collected
        return metrics

    def update(self, rollout: Rollout) -> Metrics:
        """Train on a rollout: `epochs` passes over its valid steps in shuffled minibatches."""
        config, device = self.config, self.policy.device
        progress = self.updates / self.total_updates
        lr = config.lr * (1.0 - progress) if config.anneal_lr else config.lr
        entropy_coef = config.entropy_coef
        if config.final_entropy_coef is not None:
            entropy_coef += (config.final_entropy_coef - entropy_coef) * progress
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics: Metrics = {"charts/learning_rate": lr, "charts/entropy_coef": entropy_coef}

        advantages_TB, returns_TB = gae(
            rollout.rewards,
            rollout.values,
            rollout.last_value,
            rollout.terminated,
            rollout.truncated,
            config.gamma,
            config.lam,
            rollout.final_values,
            rollout.valid,
        )
        steps = np.flatnonzero(rollout.valid)
        if not len(steps):
            # Nothing to train on. A run in which every call fails is stopped by the error budget
            # of the environment, not here.
            self.updates += 1
            return metrics
        if not np.isfinite(returns_TB.ravel()[steps]).all():
            raise BadLoss(
                f"update {self.updates + 1}: a reward or a value is not finite; "
                f"check_env(env) finds out whether the environment is the cause"
            )
        metrics["losses/explained_variance"] = _explained(
            rollout.values.ravel()[steps], returns_TB.ravel()[steps]
        )

        if config.normalize_advantages and len(steps) > 1:
            used = advantages_TB.ravel()[steps]
            advantages_TB = (advantages_TB - used.mean()) / (used.std() + np.float32(1e-8))

        def flat(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.reshape(-1, *array.shape[2:])).to(device)

        obs = {name: flat(array) for name, array in rollout.obs.items()}
        rest = [flat(rollout.actions), flat(rollout.logp), flat(advantages_TB), flat(returns_TB)]
        rest.append(flat(rollout.values))
        count = min(config.minibatches, len(steps))
        bounds = [len(steps) * n // count for n in range(count + 1)]

        parts: list[Tensor] = []
        stopped = False
        for epoch in range(config.epochs):
            key = np.uint64(rng.key(config.seed, "minibatches", self.updates, epoch))
            order = torch.from_numpy(steps[permutation(len(steps), key)]).to(device)
            # Shuffled once per epoch, so that a minibatch is a slice.
            obs_E = {name: tensor[order] for name, tensor in obs.items()}
            rest_E = [tensor[order] for tensor in rest]
            for start, end in pairwise(bounds):
                seen = {name: tensor[start:end] for name, tensor in obs_E.items()}
                action, old_logp, advantage, target, old_value = (t[start:end] for t in rest_E)
                logp_all = torch.log_softmax(self.policy.logits(seen), -1)
                logp = logp_all.gather(-1, action[:, None]).squeeze(-1)
                # Masked actions have probability exactly 0, so they add nothing.
                entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
                value = self.policy.value(seen)

                log_ratio = logp - old_logp
                ratio = log_ratio.exp()
                with torch.no_grad():
                    moved = ratio - 1.0
                    kl = (moved - log_ratio).mean()
                    clipped = (moved.abs() > config.clip).float().mean()
                if config.target_kl is not None and float(kl) > config.target_kl:
                    stopped = True
                    break

                bounded = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
                policy_loss = -torch.min(advantage * ratio, advantage * bounded).mean()
                error = (value - target).square()
                if config.value_clip is not None:
                    change = (value - old_value).clamp(-config.value_clip, config.value_clip)
                    error = torch.max(error, (old_value + change - target).square())
                value_loss = 0.5 * error.mean()
                loss = policy_loss + config.value_coef * value_loss - entropy_coef * entropy

                self.optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(loss)
                norms = self._clip()
                norm = math.hypot(*map(float, norms))
                if not math.isfinite(norm):
                    raise BadLoss(
                        f"update {self.updates + 1}: the loss is {loss.item()}, its gradient norm "
                        f"{norm}; start again with a lower learning rate"
                    )
                self.optimizer.step()
                measured = (policy_loss, value_loss, entropy, kl, clipped, *norms)
                parts.append(torch.stack([m.detach() for m in measured]))
            if stopped:
                break
        self.updates += 1
        if parts:
            means = torch.stack(parts).mean(0).tolist()
            metrics |= {f"losses/{n}": mean for n, mean in zip(MEASURED, means, strict=True)}
        metrics["losses/minibatches"] = float(len(parts))
        return metrics

    def _clip(self) -> list[Tensor]:
        """Bound the gradient; the norms of actor and critic before that."""
        most, networks = self.config.max_grad_norm, self._networks
        if not self.config.clip_together:
            return [clip_grad_norm_(net, most) for net in networks]
        norms = [get_total_norm([p.grad for p in net if p.grad is not None]) for net in networks]
        both = torch.linalg.vector_norm(torch.stack(norms))
        clip_grads_with_norm_([p for net in networks for p in net], most, both)
        return norms

    def save(self, folder: Path, *, keep: int = 2) -> Path:
        """Write a checkpoint of the policy, optimizer and environment to `folder`."""
        names = {id(p): name for name, p in self.policy.named_parameters()}
        optimizer = {names[id(p)]: dict(s) for p, s in self.optimizer.state.items()}
        state = {
            "config": asdict(self.config),
            "updates": self.updates,
            "policy": dict(self.policy.state_dict()),
            "optimizer": optimizer,
            "runner": self.runner.state_dict(),
        }
        return save_checkpoint(folder, self.updates, state, keep=keep)

    def resume(self, folder: Path) -> None:
        """Continue from the newest whole checkpoint in `folder`, of a run with the same config."""
        found = latest(folder)
        if found is None:
            raise MissingFile(f"no checkpoint in {folder}; check the path, or start a new run")
        self.restore(found)

    def restore(self, found: Checkpoint) -> None:
        """Continue from this checkpoint, of a run with the same config."""
        with found.restoring():
            self._restore(found)

    def _restore(self, found: Checkpoint) -> None:
        path, state = found.path, found.state
        given = asdict(self.config)
        for name, value in state["config"].items():
            if given.get(name) != value:
                raise Mismatch(
                    f"{path} was written with {name}={value}, got {given.get(name)}; "
                    f"resume with the same configuration"
                )
        own = self.policy.state_dict()
        shapes = {name: tuple(t.shape) for name, t in own.items()}
        if shapes != {name: array.shape for name, array in state["policy"].items()}:
            raise Mismatch(f"{path} has a policy of other shapes; build it as the run did")
        self.policy.load_state_dict({n: torch.from_numpy(a) for n, a in state["policy"].items()})
        for name, parameter in self.policy.named_parameters():
            if name in state["optimizer"]:
                self.optimizer.state[parameter] = {
                    key: torch.from_numpy(array).to(parameter.device)
                    for key, array in state["optimizer"][name].items()
                }
        self.runner.load_state_dict(state["runner"])
        self.updates = int(state["updates"])

    def _charts(self, rollout: Rollout) -> Metrics:
        charts = {
            "charts/global_step": float(self.steps + self.steps_per_update),
            "charts/episodes": float(len(rollout.episode_returns)),
            "charts/invalid_steps": float((~rollout.valid).sum()),
        }
        if rollout.episode_returns:
            charts["charts/episodic_return"] = float(np.mean(rollout.episode_returns))
            charts["charts/episodic_length"] = float(np.mean(rollout.episode_lengths))
        return charts


def _explained(values: NDArray[np.float32], returns: NDArray[np.float32]) -> float:
    """The fraction of the variance of the returns that the values explain; NaN without variance."""
    spread = float(np.var(returns))
    return 1.0 - float(np.var(returns - values)) / spread if spread else float("nan")
