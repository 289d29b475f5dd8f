"""Reward functions for TRL's GRPO and RLOO trainers, where an invalid reward is None.

    trainer = GRPOTrainer(..., reward_funcs=AsyncRewardFunction("rewards.toml"))

TRL excludes a sample from the mean and standard deviation of its group if *every* reward function
returned None for it; with a second function, None counts as 0. So put all parts into one
configuration and pass TRL this one function: then an invalid part excludes the sample.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.errors import Mismatch
from batchwright.rewards.config import RewardsConfig
from batchwright.rewards.files import response_of
from batchwright.rewards.reward import Response, Reward, message_text
from batchwright.rewards.score import Scorer

__all__ = ["AsyncRewardFunction", "RewardFunction", "responses_of"]

_NOT_COLUMNS = {"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}


class _Scores:
    """What both functions share: rewards to TRL's list of numbers and None, and to its logs."""

    def __init__(
        self, config: RewardsConfig | str | Path, *, name: str = "batchwright", extra: bool = True
    ) -> None:
        settings = config if isinstance(config, RewardsConfig) else RewardsConfig.load(config)
        self.scorer = Scorer(settings)
        self.extra = extra
        # The name of the function in the logs of TRL.
        self.__name__ = name

    def close(self) -> None:
        """Close the pool of this process."""
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

    Columns of the data set are found by name: the truth as `ground_truth`, `answer`, `truth`,
    `reference` or `label`, the data set as `dataset` or `data_source`; all others can be used in
    templates. It can be pickled: each process opens its own pool.

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
    """`RewardFunction` as a coroutine, so that TRL runs it concurrently with other functions."""

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        rewards = await self.scorer.ascore(responses_of(prompts, completions, columns))
        return self._numbers(rewards, columns)


def responses_of(
    prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
) -> list[Response]:
    """TRL's arguments as responses; both texts and lists of chat messages are accepted.

    Raises:
        Mismatch: prompts or a column differ in length from the completions.
    """
    given = {"prompt": list(prompts), "response": list(completions)}
    for name, values in columns.items():
        if name not in _NOT_COLUMNS and isinstance(values, list | tuple):
            given.setdefault(name, list(values))
    sizes = {name: len(values) for name, values in given.items()}
    if len(set(sizes.values())) > 1:
        raise Mismatch(f"columns of a batch differ in length: {sizes}; pass one entry per sample")
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    return [response_of({**row, "response": message_text(row["response"])}) for row in rows]
