"""Query mutation by the names of its models: one environment alone, and many that step together."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchwright.calls.pool import Pool
from batchwright.envs.query_mutation.env import MutationPipelines
from batchwright.envs.query_mutation.models import (
    DIM,
    ask_mutator,
    ask_target,
    check_server,
    find_model,
    hashed,
    rate_by,
)
from batchwright.envs.questions import load_questions
from batchwright.errors import ConfigError, Mismatch

__all__ = ["BatchedQueryMutationEnv", "QueryMutationEnv"]


@dataclass(kw_only=True)
class QueryMutationEnv:
    """One question being rewritten until a target model answers it; no server before `reset`.

    Models are named as by `batchwright train query-mutator`: `qwen2.5:3b` of Ollama, `URL#NAME`,
    `local:smollm2`, `sim`. Alone it takes one call at a time; `BatchedQueryMutationEnv` steps many.

    >>> env = QueryMutationEnv(target_model="sim", seed=1)
    >>> env.reset().shape
    (268,)
    >>> features, reward, done, info = env.step(6)
    >>> info["operator"], info["valid"]
    ('politeness', True)
    >>> env.close()
    """

    target_model: str = "local:smollm2"
    mutator_model: str = ""
    """Default: the target model."""
    dataset: str = "shipped"
    """As of `load_questions`, its train split."""
    per_episode_max_steps: int = 2
    cost: float = 0.02
    """Reward penalty for each rewriting."""
    least_similarity: float = 0.3
    temperature: float = 0.7
    max_tokens: int = 64
    deadline_s: float = 600.0
    seed: int = 42

    def __post_init__(self) -> None:
        self._alone: BatchedQueryMutationEnv | None = None

    def reset(self) -> NDArray[np.float32]:
        """Begin the next episode; features [d]."""
        if self._alone is None:
            self._alone = BatchedQueryMutationEnv([self], batch_size=1)
        features: NDArray[np.float32] = self._alone.batch_reset()[0]
        return features

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, dict[str, Any]]:
        """Apply an operator by its number: features, reward, whether the episode ended, info.

        An episode that ended is followed by the next one at once: the features are its first.
        """
        if self._alone is None:
            raise ConfigError("step before reset; call reset() first")
        features, rewards, dones, infos = self._alone.batch_step([action])
        return features[0], float(rewards[0]), bool(dones[0]), infos[0]

    def close(self) -> None:
        if self._alone is not None:
            self._alone.close()
            self._alone = None


class BatchedQueryMutationEnv(MutationPipelines):
    """Many `QueryMutationEnv` that step together, with `batch_size` calls in flight at a server.

    They are made alike, and differ in their questions by their place; the first one lives the same
    life as it does alone. `batch_size=1` makes one call at a time, `"auto"` as many as the server
    sustains.

    >>> envs = BatchedQueryMutationEnv([QueryMutationEnv(target_model="sim")] * 4, batch_size=8)
    >>> envs.batch_reset().shape
    (4, 268)
    >>> features, rewards, dones, infos = envs.batch_step([6, 2, 1, 10])
    >>> [info["operator"] for info in infos], dones.tolist()
    (['politeness', 'shorten', 'expand', 'stop'], [False, False, False, True])
    >>> envs.close()
    """

    def __init__(
        self, envs: Sequence[QueryMutationEnv], batch_size: int | Literal["auto"] = 8
    ) -> None:
        if not envs:
            raise ConfigError("got no environments; pass at least one QueryMutationEnv")
        made = envs[0]
        for field in fields(made):
            found = {getattr(env, field.name) for env in envs}
            if len(found) > 1:
                raise Mismatch(
                    f"environments that step together are made alike, got {len(found)} values of "
                    f"{field.name}; make those with other settings a batch of their own"
                )
        self._pools: dict[str, Pool] = {}
        target = self._open(made, "qa", made.target_model, batch_size)
        mutator = self._open(made, "mutator", made.mutator_model or made.target_model, batch_size)
        super().__init__(
            load_questions(made.dataset, "train"),
            ask_mutator(*mutator, made.temperature, made.max_tokens),
            ask_target(*target, made.max_tokens),
            rate_by(),
            len(envs),
            run=target[0].run,
            embed=hashed,
            dim=DIM,
            max_steps=made.per_episode_max_steps,
            least_similarity=made.least_similarity,
            cost=made.cost,
            seed=made.seed,
        )

    def _open(
        self, made: QueryMutationEnv, role: str, model: str, batch_size: int | Literal["auto"]
    ) -> tuple[Pool, str]:
        endpoint, name = find_model(model, role, made.dataset)
        if endpoint.name not in self._pools:
            self._pools[endpoint.name] = Pool(
                endpoint, limit=batch_size, deadline_s=made.deadline_s
            )
        pool = self._pools[endpoint.name]
        pool.run(check_server(endpoint, name))
        return pool, name

    def close(self) -> None:
        """Close the connections to the models."""
        for pool in self._pools.values():
            pool.close()
