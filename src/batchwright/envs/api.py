"""The protocol of batched environments: actions [B] in; observations, masks and rewards [B] out.

Every action is the choice of one of K candidates; `obs["mask"]` says which of them can be
chosen. An environment that ends is reset within the same step: `Step.obs` is then the first
observation of its next episode, and `Step.final_obs` the last one of the episode that ended.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import ConfigError, Mismatch

__all__ = [
    "ArraySpec",
    "Env",
    "Obs",
    "Padded",
    "Seeded",
    "Step",
    "Symbolic",
    "Wrapper",
    "array_env",
    "as_actions",
    "require_state",
    "symbolic",
]

Obs = dict[str, NDArray[Any]]
"""Arrays whose first axis is the environment; `mask` [B, K] is always among them."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of an observation, without the axis of the environments."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    high: int | None = None
    """For integers: values lie in [-1, high); -1 is padding."""


@dataclass(slots=True)
class Step:
    """What one step of all environments gave.

    The arrays may be buffers that the next step overwrites: copy what you keep.
    """

    obs: Obs
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    """The episode is over: there is no value to bootstrap from."""
    truncated: NDArray[np.bool_]
    """The episode was cut off, say by a time limit: bootstrap from the value of `final_obs`."""
    valid: NDArray[np.bool_]
    """False where the step must not enter the loss, say because a server failed."""
    final_obs: Obs
    """The last observation, in rows that terminated or were truncated; other rows are undefined."""
    info: Mapping[str, NDArray[Any]]

    @property
    def done(self) -> NDArray[np.bool_]:
        return self.terminated | self.truncated


@runtime_checkable
class Env(Protocol):
    """B environments in one object."""

    @property
    def num_envs(self) -> int: ...

    @property
    def num_actions(self) -> int:
        """K: the width of the mask."""
        ...

    @property
    def spec(self) -> Mapping[str, ArraySpec]:
        """The arrays of an observation."""
        ...

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        """Begin new episodes in the chosen environments, or in all of them."""
        ...

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        """Act in all environments. An action outside the mask is counted and does not raise."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, as arrays and plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`, to the same bits."""
        ...


@runtime_checkable
class Symbolic(Protocol):
    """What an environment adds whose observations are ids of predicates, terms and rules.

    Its `spec` has `goals`, `query` and `candidates` as those of `batchwright.envs.prover`; the
    numbers are the rows of the tables that embed them.
    """

    @property
    def num_predicates(self) -> int: ...

    @property
    def num_terms(self) -> int:
        """Entities and variables."""
        ...

    @property
    def num_rules(self) -> int: ...


@runtime_checkable
class Padded(Protocol):
    """A symbolic environment that says how much of its `candidates` is no padding."""

    @property
    def filled(self) -> NDArray[np.int64]:
        """[B]: in each row of `candidates` all from this one on are -1."""
        ...


@runtime_checkable
class Seeded(Protocol):
    """An environment whose seed can be changed after it was made."""

    def set_seed(self, seed: int) -> None:
        """What the next `reset` begins is that of a new environment of this seed."""
        ...


class Wrapper(Protocol):
    """A wrapper of an environment, such as those for TorchRL and Gymnasium."""

    @property
    def env(self) -> Any: ...


def array_env(env: "Env | Wrapper") -> Env:
    """The environment on arrays inside wrappers for TorchRL or Gymnasium, or the given one."""
    inner: Any = env
    while not isinstance(inner, Env) and hasattr(inner, "env"):
        inner = inner.env
    if not isinstance(inner, Env):
        raise ConfigError(
            f"a {type(env).__name__} is not a batched environment; it must have the methods of "
            f"batchwright.envs.Env"
        )
    return inner


def symbolic(env: Env) -> "Symbolic | None":
    """The environment, or the one that it wraps as `env`, whose ids are rows of tables.

    None if its observations are not those of ids.
    """
    if not {"goals", "query", "candidates"} <= set(env.spec):
        return None
    inner: Any = env
    while not isinstance(inner, Symbolic) and hasattr(inner, "env"):
        inner = inner.env
    return inner if isinstance(inner, Symbolic) else None


def as_actions(actions: ArrayLike, num_envs: int) -> NDArray[np.int64]:
    """One integer for each environment, or an error: a float is a probability by mistake.

    >>> as_actions([1, 0], 2)
    array([1, 0])
    """
    given = np.asarray(actions)
    if given.dtype.kind not in "iub":
        raise ConfigError(f"actions must be integers, got {given.dtype}; pass the chosen numbers")
    if given.shape not in {(num_envs,), (num_envs, 1)}:
        raise Mismatch(
            f"actions must have shape ({num_envs},), got {given.shape}; give one per environment"
        )
    return np.ascontiguousarray(given, np.int64).reshape(num_envs)


def require_state(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a state that lacks something, before any of it is taken."""
    missing = [name for name in names if name not in state]
    if missing:
        raise Mismatch(
            f"the saved state lacks {', '.join(missing)}; pass what state_dict() of the same "
            f"kind of environment returned"
        )
