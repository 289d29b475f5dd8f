"""Rollouts in which no environment waits for another: each takes its next step when it is ready.

The policy acts on whichever environments are waiting at that moment. The action of environment
b at its step t is drawn with the same numbers as in an ordinary rollout, so for the same answers
of the models both kinds come to the same steps.
"""

import asyncio

import numpy as np
import torch

from batchwright import rng
from batchwright.envs.query_mutation.env import BatchedQueryMutationEnv
from batchwright.rl.policy import Policy, choose
from batchwright.rl.rollout import Rollout, Runner

__all__ = ["OverlappingRunner"]


class OverlappingRunner(Runner):
    """A runner for environments whose steps take as long as other people's servers."""

    def __init__(self, env: BatchedQueryMutationEnv, num_steps: int, *, seed: int = 0) -> None:
        super().__init__(env, num_steps, seed=seed)
        self._mutation = env

    def collect(self, policy: Policy, *, greedy: bool = False) -> Rollout:
        out, env = self._rollout, self._mutation
        if self._obs is None:
            self._obs = env.reset()
        env.run(self._live_all(out, policy, greedy))
        out.truncated[:] = False
        out.episode_returns, out.episode_lengths = [], []
        for t in range(len(out.actions)):
            self._count(out, t, out.terminated[t])
        self.step += len(out.actions)
        rows = [env.observation(b) for b in range(env.num_envs)]
        self._obs = {name: np.concatenate([row[name] for row in rows]) for name in out.obs}
        return self._valued(policy, [])

    async def _live_all(self, out: Rollout, policy: Policy, greedy: bool) -> None:
        chooser = _Chooser(self, out, policy, greedy)
        await asyncio.gather(*(self._live(b, out, chooser) for b in range(self.env.num_envs)))

    async def _live(self, b: int, out: Rollout, chooser: "_Chooser") -> None:
        """All steps of one environment, as fast as its own calls allow."""
        for t in range(len(out.actions)):
            for name, row in self._mutation.observation(b).items():
                out.obs[name][t, b] = row[0]
            await chooser.chosen(t, b)
            turn, ended, _ = await self._mutation.act(b, int(out.actions[t, b]))
            known = bool(np.isfinite(turn.gain))
            out.rewards[t, b] = turn.gain if known else 0.0
            out.valid[t, b], out.terminated[t, b] = known, ended


class _Chooser:
    """Chooses for all environments that wait, once a turn of the event loop."""

    def __init__(self, runner: Runner, out: Rollout, policy: Policy, greedy: bool) -> None:
        self._first, self._seed = runner.step, runner._seed
        self._out, self._policy, self._greedy = out, policy, greedy
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def chosen(self, t: int, b: int) -> None:
        """Wait until `actions[t, b]` and `logp[t, b]` are there."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._choose)
        self._waiting.append((t, b, done))
        await done

    def _choose(self) -> None:
        waiting, self._waiting = self._waiting, []
        out = self._out
        for t in sorted({t for t, _, _ in waiting}):
            rows = [b for at, b, _ in waiting if at == t]
            # All rows, although some are not ready: the numbers to draw by belong to places.
            seen = {
                n: torch.from_numpy(a[t].copy()).to(self._policy.device) for n, a in out.obs.items()
            }
            with torch.inference_mode():
                logits = self._policy.logits(seen)
            mask = np.ones_like(out.obs["mask"][t])
            mask[rows] = out.obs["mask"][t][rows]
            key = None if self._greedy else rng.key(self._seed, "act", self._first + t)
            actions, logp = choose(logits, mask, key)
            out.actions[t, rows], out.logp[t, rows] = actions[rows], logp[rows]
        for _, _, done in waiting:
            if not done.done():
                done.set_result(None)
