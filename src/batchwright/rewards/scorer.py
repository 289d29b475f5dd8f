"""A configured reward, ready to score: makes its pool on first use, in whatever process that is."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from batchwright.calls import Endpoint, ErrorBudget, Pool
from batchwright.errors import BadReward
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.reward import Response, Reward
from batchwright.rewards.score import ascore_all, score_all

__all__ = ["Scorer"]

Column = float | str | bool


class Scorer:
    """Scores by a configuration. It can be sent to other processes: each opens its own pool."""

    def __init__(self, config: RewardsConfig) -> None:
        self.config = config
        self._pool: Pool | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "_pool": None, "_pid": 0}

    @property
    def pool(self) -> Pool | None:
        """The pool of this process; None if no part asks a model."""
        if not self.config.endpoints:
            return None
        if self._pool is None or self._pid != os.getpid():
            config = self.config
            budget = ErrorBudget(config.error_budget, 1000) if config.error_budget else None
            self._pid = os.getpid()
            self._pool = Pool(
                *(Endpoint(url, key_env=config.key_env) for url in config.endpoints),
                limit=config.batch_size,
                cache=config.cache,
                deadline_s=config.deadline_s,
                budget=budget,
            )
        return self._pool

    def score(self, responses: Iterable[Response]) -> list[Reward]:
        """Rewards in the order of the responses."""
        return score_all(responses, self.config.part, self.pool)

    async def ascore(self, responses: Iterable[Response]) -> list[Reward]:
        """The same from inside an event loop."""
        return await ascore_all(responses, self.config.part, self.pool)

    def columns(
        self, rewards: Sequence[Reward], missing: Missing | None = None
    ) -> list[dict[str, Column]]:
        """One row a reward, all with the same columns: `score`, `valid`, `why` and the parts.

        What an invalid reward becomes is the caller's choice: an error, NaN (`mask`) or a
        number. `valid` and `why` say what happened in each case.

        Raises:
            BadReward: a reward is invalid and `missing` is `raise`.
        """
        policy = self.config.missing if missing is None else missing
        spoilt = [number for number, reward in enumerate(rewards) if not reward.valid]
        if spoilt and policy == "raise":
            first = rewards[spoilt[0]]
            error = next(part.error for part in first.parts.values() if not part.valid)
            raise BadReward(
                f"{len(spoilt)} of {len(rewards)} rewards are missing, the first is sample "
                f"{spoilt[0]}: {first.why}, {error}; choose missing = mask or a number to go on"
            )
        return [self._row(reward, policy) for reward in rewards]

    def close(self) -> None:
        """End the pool of this process, if there is one."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None

    def _row(self, reward: Reward, policy: Missing) -> dict[str, Column]:
        nan = float("nan")
        score = reward.value
        if not reward.valid and isinstance(policy, int | float):
            score = float(policy)
        row: dict[str, Column] = {"score": score, "valid": reward.valid, "why": reward.why}
        for rule in self.config.part:
            part = reward.parts.get(rule.column)
            name = f"{rule.column}_reward"
            row.setdefault(name, nan)
            if part is not None:
                row[name] = rule.weight * part.value
            for fact in rule.fact_names:
                found = None if part is None else part.facts.get(fact)
                column = f"{rule.column}_{fact}"
                if found is not None:
                    row[column] = found if isinstance(found, str) else float(found)
                row.setdefault(column, nan)
        return row
