"""A configured reward, ready to score: makes its pool on first use, in whatever process that is."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence

from batchwright.calls import Cache, Endpoint, ErrorBudget, Outcome, Pool, Request
from batchwright.calls.wire.discovery import check_any, check_first
from batchwright.errors import BadReward, NoServer
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.reward import Response, Reward
from batchwright.rewards.score import needed, plan_work

__all__ = ["Scorer"]

Column = float | str | bool


class Scorer:
    """Scores by a configuration. It can be sent to other processes: each opens its own pool.

    Until one call was answered, a server that cannot be reached, or a key or a model that it
    does not know, is `NoServer`; later the samples it concerns are invalid.

    >>> scorer = Scorer(RewardsConfig.of({"part": [{"kind": "numeric"}]}))
    >>> scorer.score([Response("4", "4")])[0].value
    1.0
    """

    def __init__(self, config: RewardsConfig) -> None:
        self.config = config
        self._pool: Pool | None = None
        self._pid = 0
        self._answered = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Scorer"], tuple[RewardsConfig]]:
        return type(self), (self.config,)

    @property
    def pool(self) -> Pool | None:
        """The pool of this process; None if no endpoint is named."""
        if not self.config.endpoints:
            return None
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                config = self.config
                self._pid = os.getpid()
                self._pool = Pool(
                    *(Endpoint(url, key_env=config.key_env) for url in config.endpoints),
                    limit=config.batch_size,
                    cache=config.cache,
                    deadline_s=config.deadline_s,
                    budget=ErrorBudget(config.error_budget) if config.error_budget else None,
                )
            return self._pool

    def score(
        self,
        responses: Iterable[Response],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Reward]:
        """Rewards in the order of the responses; `progress` is told of the calls."""
        work = plan_work(responses, self.config.part)
        return work.rewards(self.ask(work.requests, progress))

    async def ascore(self, responses: Iterable[Response]) -> list[Reward]:
        """The same from inside an event loop; samples that are scored at once share the pool."""
        work = plan_work(responses, self.config.part)
        if not work.requests:
            return work.rewards([])
        pool = needed(self.pool, work.requests)
        if not self._answered:
            await asyncio.to_thread(self._knock, pool, work.requests)
        return work.rewards(self._seen(await pool.amap(work.requests)))

    def ask(
        self,
        requests: Sequence[Request],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Outcome]:
        """The outcomes of requests, in order."""
        if not requests:
            return []
        pool = needed(self.pool, requests)
        if not self._answered:
            self._knock(pool, requests)
        return self._seen(pool.map(requests, progress=progress))

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
            error = next(part.error for part in first.parts.values() if part.why == first.why)
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

    def _knock(self, pool: Pool, requests: Sequence[Request]) -> None:
        try:
            pool.run(check_any(pool.endpoints))
        except NoServer:
            # What is kept already needs no server.
            if self.config.cache is None or not self.config.cache.exists():
                raise
            with Cache(self.config.cache) as cache:
                kept = cache.get_many([request.key for request in requests])
            if any(request.key not in kept for request in requests):
                raise

    def _seen(self, outcomes: list[Outcome]) -> list[Outcome]:
        if not self._answered:
            self._answered = check_first(outcomes)
        return outcomes

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
