"""Who plays: a policy that follows hints, one that acts at random, or a model behind a pool."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from batchwright.calls import Pool, chat
from batchwright.errors import ConfigError, NoServer
from batchwright.streaming.gym.dialects import Task

__all__ = [
    "GymPolicy",
    "HintPolicy",
    "ModelPolicy",
    "PolicyName",
    "RandomPolicy",
    "Turn",
    "policy_of",
]

PolicyName = Literal["hint", "random"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a policy may know before it acts."""

    prompt: str
    """Puzzle, grammar of its actions and observation: the prompt of the sample as well."""
    step: int
    random: np.random.Generator
    """A function of the stream's seed, the episode and the step."""
    hint: Callable[[], Awaitable[str | None]]
    """Asks the server for an action; None if it has none to give."""
    task: Task
    """The puzzle, its difficulty and the grammar of its actions."""


class GymPolicy(Protocol):
    """Writes the next action; all that it writes becomes the completion of a sample.

    None gives up: the episode has failed.
    """

    async def act(self, turn: Turn) -> str | None: ...


class HintPolicy:
    """Does what the server's hints say."""

    async def act(self, turn: Turn) -> str | None:
        return await turn.hint()


class RandomPolicy:
    """Any action that fits the grammar."""

    async def act(self, turn: Turn) -> str:
        return turn.task.any_action(turn.random)


class ModelPolicy:
    """A model by a pool of calls; the first line of its response that is not empty is the action.

    A call that fails ends the episode as an error: no action is made up. `parameters` go into
    the request, such as `temperature`.
    """

    def __init__(self, pool: Pool, model: str, **parameters: Any) -> None:
        self._pool, self._model = pool, model
        self._parameters = parameters

    async def act(self, turn: Turn) -> str:
        outcome = await self._pool.call(chat(self._model, turn.prompt, **self._parameters))
        if not outcome:
            raise NoServer(f"the policy's model gave no action: {outcome.error}")
        return outcome.text


def policy_of(policy: GymPolicy | PolicyName) -> GymPolicy:
    """The policy itself, or the one of this name."""
    named: dict[object, type[GymPolicy]] = {"hint": HintPolicy, "random": RandomPolicy}
    if not isinstance(policy, str):
        return policy
    if policy not in named:
        raise ConfigError(f"policy must be {', '.join(map(str, named))} or an object, got {policy}")
    return named[policy]()
