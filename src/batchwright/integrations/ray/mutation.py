"""Environments of query mutation as actors of a Ray cluster, which step for one learner.

    learner -> (state of one environment, action) -> actor -> RayPool -> model servers
            <- its turn and its next state        <-

An actor keeps nothing of an environment: a step that was lost with it is made again by another one,
from the same state and with the same seeds. Responses that were cached by then are not paid again.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from batchwright import __version__
from batchwright.calls import Pool
from batchwright.envs.query_mutation.env import MutationPipelines, Turn, _State
from batchwright.errors import BatchwrightError, need, one_line
from batchwright.integrations.ray.cluster import raised_there, same_version
from batchwright.integrations.ray.pool import RayPool
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.query_mutator.loop import build_env
from batchwright.train.query_mutator.models import Models, open_models

__all__ = ["RayPipelines", "on_workers", "ray_pool"]

TRIES = 3
"""Actors that one step may be lost with before the run ends."""


def ray_pool(*endpoints: Any, cache: Any, events: Any = None, **settings: Any) -> Pool:
    """In the place of `Pool`: that of the cluster, with the cache of the run."""
    return RayPool(*endpoints, cache=cache, **settings)


class RayPipelines(MutationPipelines):
    """Environments whose steps are made by actors; their states are the learner's.

    Same seeds and same responses give the same steps as in one process.
    """

    lost = 0
    """Steps that were begun on an actor which was lost, and made again on another."""
    _ray: Any
    _told: tuple[str, QueryMutatorConfig, str]
    _actors: list[Any]
    _models: Models

    async def act(self, env: int, action: int) -> tuple[Turn, bool, _State]:
        turn, ended, last, state = await self._there(env, "act", action)
        self._states[env] = state
        if self._on_turn is not None:
            self._on_turn(turn)
        return turn, ended, last

    async def _begin(self, state: _State, env: int) -> None:
        begun = await self._there(env, "begin")
        for one in fields(_State):
            setattr(state, one.name, getattr(begun, one.name))

    async def _there(self, env: int, method: str, *given: Any) -> Any:
        """What an actor makes of the state of an environment, with what it counted on the way."""
        errors = self._ray.exceptions
        worker = env % len(self._actors)
        for tried in range(1, TRIES + 1):
            if self._actors[worker] is None:
                made = self._ray.remote(_Steps).options(num_cpus=1, max_concurrency=1000)
                self._actors[worker] = made.remote(*self._told)
            actor = self._actors[worker]
            try:
                call = getattr(actor, method).remote(env, self._states[env], *given)
                found, counts, reasons, notes, used = await call
            except errors.RayTaskError as error:
                raise raised_there(error) from None
            except errors.RayActorError as error:
                self.lost += 1
                if self._actors[worker] is actor:
                    self._actors[worker] = None
                if tried == TRIES:
                    raise BatchwrightError(
                        f"a step of environment {env} was lost with its actor {TRIES} times: "
                        f"{one_line(error)[:300]}; what is saved can be resumed"
                    ) from None
                continue
            self.counts += counts
            self.reasons += reasons
            for place, why in notes.items():
                self._note(place, why)
            self._models.used.update(used)
            return found
        raise AssertionError

    def close(self) -> None:
        """End the actors."""
        for actor in filter(None, self._actors):
            self._ray.kill(actor)
        self._actors = [None] * len(self._actors)


@contextmanager
def on_workers(
    workers: int,
    config: QueryMutatorConfig,
    models: Models,
    folder: Path,
    on_turn: Callable[[Turn], object],
) -> Iterator[MutationPipelines]:
    """The environments of a run on `workers` actors, which end with the block."""
    env = build_env(config, models, on_turn=on_turn, made=RayPipelines)
    assert isinstance(env, RayPipelines)
    env._ray, env._models = need("ray", extra="ray"), models
    env._told = (__version__, replace(config, save_dir=folder), str(folder.absolute()))
    env._actors = [None] * workers
    # The pools of the cluster start where their cache is.
    for pool in models.pools:
        pool.check()
    try:
        yield env
    finally:
        env.close()
        for pool in models.pools:
            assert isinstance(pool, RayPool)
            pool.shutdown()


class _Notes(dict[str, str]):
    """The failures of one step, to be written down by the learner."""

    def known(self, place: str) -> None:
        return None

    note = dict.__setitem__


class _Steps:
    """The actor: one step of one environment at a time, of as many as are asked for at once."""

    def __init__(self, version: str, config: QueryMutatorConfig, folder: str) -> None:
        self._version = version
        self._open = ExitStack()
        models = open_models(config, Path(folder), pool=ray_pool, check=False)
        self._models = self._open.enter_context(models)
        self._env = build_env(config, self._models)

    def _one(self, env: int, state: _State) -> MutationPipelines:
        """An environment of its own for one step, so that what it counts is of that step alone."""
        # Not where the actor is made: one that cannot be made counts as lost.
        same_version(self._version)
        one = copy.copy(self._env)
        one.counts, one.reasons, one._failures = Counter(), Counter(), _Notes()
        one._states = {env: state}  # type: ignore[assignment]
        return one

    async def act(self, env: int, state: _State, action: int) -> Any:
        one = self._one(env, state)
        turn, ended, last = await one.act(env, action)
        return (turn, ended, last, state), *self._told(one)

    async def begin(self, env: int, state: _State) -> Any:
        one = self._one(env, state)
        await one._begin(state, env)
        return state, *self._told(one)

    def _told(self, one: MutationPipelines) -> tuple[Any, ...]:
        used = Counter(self._models.used)
        self._models.used.clear()
        assert isinstance(one._failures, _Notes)
        return one.counts, one.reasons, dict(one._failures), used
