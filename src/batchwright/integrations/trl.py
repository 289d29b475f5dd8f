"""Reward functions for TRL's GRPO and RLOO trainers; a reward that is missing is None there.

    trainer = GRPOTrainer(..., reward_funcs=AsyncRewardFunction("rewards.toml"))

TRL leaves a sample out of its group's mean and deviation if *every* reward function gave None for
it; beside a second function, None counts as 0. So put all parts into one configuration and hand
TRL this one function: then a missing part makes a missing sample.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.errors import Mismatch
from batchwright.rewards.config import RewardsConfig
from batchwright.rewards.files import response_of
from batchwright.rewards.reward import Response, Reward, words
from batchwright.rewards.scorer import Scorer

__all__ = ["AsyncRewardFunction", "RewardFunction", "responses_of"]

_NOT_COLUMNS = {"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}


class _Scores:
    """What both functions share: TRL's columns to responses, rewards to numbers and gaps."""

    def __init__(
        self, config: RewardsConfig | str | Path, *, name: str = "batchwright", extra: bool = True
    ) -> None:
        settings = config if isinstance(config, RewardsConfig) else RewardsConfig.load(config)
        self.scorer = Scorer(settings)
        self.extra = extra
        # TRL shows this name in its logs.
        self.__name__ = name

    def close(self) -> None:
        """End the pool of this process."""
        self.scorer.close()

    def _numbers(self, rewards: Sequence[Reward], columns: Mapping[str, Any]) -> list[float | None]:
        log_metric: Callable[[str, float], None] | None = columns.get("log_metric")
        log_extra: Callable[[str, list[Any]], None] | None = columns.get("log_extra")
        if log_metric is not None and rewards:
            missing = sum(not reward.valid for reward in rewards)
            log_metric(f"{self.__name__}/missing", missing / len(rewards))
        if log_extra is not None and self.extra:
            rows = self.scorer.columns(rewards, missing="mask")
            for column in rows[0] if rows else ():
                if column != "score":
                    log_extra(column, [row[column] for row in rows])
        return [reward.value if reward.valid else None for reward in rewards]


class RewardFunction(_Scores):
    """Scores a batch for TRL; all calls of the batch are in flight together.

    Columns of the data set are found by their names: the truth as `ground_truth`, `answer`,
    `truth`, `reference` or `label`, the data set as `dataset` or `data_source`; all others can be
    used in templates. It can be sent to other processes, each opens its own pool.

    >>> from batchwright.rewards import RewardsConfig
    >>> reward = RewardFunction(RewardsConfig.of({"part": [{"kind": "numeric"}]}))
    >>> reward(["2+2?", "1+1?"], ["It is 4.", "3"], answer=["4", "none"])
    [1.0, None]
    """

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        rewards = self.scorer.score(responses_of(prompts, completions, columns))
        return self._numbers(rewards, columns)


class AsyncRewardFunction(_Scores):
    """The same as a coroutine, for which TRL's loop does not stand still."""

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        rewards = await self.scorer.ascore(responses_of(prompts, completions, columns))
        return self._numbers(rewards, columns)


def responses_of(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> list[Response]:
    """What TRL hands over as responses; texts and lists of messages are both understood.

    Raises:
        Mismatch: prompts or a column have another length than the completions.
    """
    given = {"prompt": list(prompts), "response": list(completions)}
    for name, values in columns.items():
        if name not in _NOT_COLUMNS and isinstance(values, list | tuple):
            given.setdefault(name, list(values))
    sizes = {name: len(values) for name, values in given.items()}
    if len(set(sizes.values())) > 1:
        raise Mismatch(f"the columns of a batch differ in length: {sizes}; give one entry a sample")
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    return [response_of({**row, "response": words(row["response"])}) for row in rows]
