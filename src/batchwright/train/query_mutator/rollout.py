"""Rollouts in which no environment waits for another: each takes its next step when it is ready.

The policy acts on whichever environments are waiting at that moment. Actions are sampled with the
same random numbers as by the plain `Runner`, so the same responses of the models give the same
rollout.
"""

import asyncio
from collections.abc import Callable

import numpy as np
import torch

from batchwright.envs.api import Obs
from batchwright.envs.query_mutation.env import MutationPipelines
from batchwright.errors import BatchwrightError
from batchwright.rl.policy import Policy, choose
from batchwright.rl.rollout import Finals, Rollout, RolloutStopped, Runner

__all__ = ["OverlappingRunner"]


class OverlappingRunner(Runner):
    """A runner for environments whose step time is the latency of model servers."""

    env: MutationPipelines

    def fill(self, out: Rollout, obs: Obs, policy: Policy) -> tuple[Obs, Finals]:
        env = self.env
        env.run(self._step_all(out, policy))
        out.truncated[:] = False
        rows = [env.observation(b) for b in range(env.num_envs)]
        return {name: np.concatenate([row[name] for row in rows]) for name in out.obs}, []

    async def _step_all(self, out: Rollout, policy: Policy) -> None:
        actor = _Actor(out, policy, self.action_key)
        steps = (self._step_one(b, out, actor) for b in range(self.env.num_envs))
        if not all(await asyncio.gather(*steps)):
            raise RolloutStopped

    async def _step_one(self, b: int, out: Rollout, actor: "_Actor") -> bool:
        """All steps of one environment, as fast as its own calls allow; False if it was stopped.

        Steps that have begun end first: their calls are paid for, and so they are cached.
        """
        for t in range(len(out.actions)):
            if self.stop is not None and self.stop():
                return False
            for name, row in self.env.observation(b).items():
                out.obs[name][t, b] = row[0]
            await actor.act(t, b)
            turn, ended, _ = await self.env.act(b, int(out.actions[t, b]))
            out.rewards[t, b] = turn.gain if turn.valid else 0.0
            out.valid[t, b], out.terminated[t, b] = turn.valid, ended
        return True


class _Actor:
    """Samples the actions of all waiting environments together, once per turn of the event loop."""

    def __init__(self, out: Rollout, policy: Policy, action_key: Callable[[int], int]) -> None:
        self._out, self._policy, self._action_key = out, policy, action_key
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def act(self, t: int, b: int) -> None:
        """Wait until `actions[t, b]` and `logp[t, b]` are written."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._act_on_waiting)
        self._waiting.append((t, b, done))
        await done

    def _act_on_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        failure: BatchwrightError | None = None
        try:
            for t in sorted({t for t, _, _ in waiting}):
                self._sample(t, [b for at, b, _ in waiting if at == t])
        except BatchwrightError as error:
            # Raised in a callback, it would only be logged, and the environments wait forever.
            failure = error
        for _, _, done in waiting:
            if done.done():
                continue
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

    def _sample(self, t: int, rows: list[int]) -> None:
        # All rows, although some are not ready: a random number belongs to its row.
        out, device = self._out, self._policy.device
        seen = {n: torch.from_numpy(a[t].copy()).to(device) for n, a in out.obs.items()}
        with torch.inference_mode():
            logits = self._policy.logits(seen)
        mask = np.ones_like(out.obs["mask"][t])
        mask[rows] = out.obs["mask"][t][rows]
        actions, logp = choose(logits, mask, self._action_key(t))
        out.actions[t, rows], out.logp[t, rows] = actions[rows], logp[rows]
