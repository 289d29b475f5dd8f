"""Rewards for verl: reward functions, a reward manager, and GRPO without invalid samples.

verl has no invalid reward: it passes one number per sample to the advantage estimator, so an
invalid reward can only be NaN. `missing = "mask"` makes it NaN, and the advantage estimator
`batchwright_grpo` excludes it. With any other estimator NaN spreads to the whole group, so without
`batchwright_grpo` choose `missing = "raise"`, which is the default, or a number.

Importing this module registers manager and estimator, if verl is installed. verl imports it by
`custom_reward_function.path`, by `reward_manager.module.path`, or in every process by
VERL_USE_EXTERNAL_MODULES=batchwright.integrations.verl.
"""

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from batchwright.errors import ConfigError
from batchwright.rewards.compute import acompute_score, compute_score, scorer_for
from batchwright.rewards.reward import Response, message_text

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "ESTIMATOR",
    "MANAGER",
    "acompute_score",
    "compute_score",
    "response_of_item",
]

ESTIMATOR = "batchwright_grpo"
"""`algorithm.adv_estimator=batchwright_grpo`"""
MANAGER = "batchwright"
"""`reward.reward_manager.name` after this module was imported; by importlib: RewardManager."""


def response_of_item(item: Any, text: str) -> Response:
    """One item of verl's DataProto as a response, with its prompt, which reward functions lack."""
    known = item.non_tensor_batch
    extra = dict(known.get("extra_info") or {})
    extra |= dict(known.get("tool_extra_fields") or {})
    extra["num_turns"] = known.get("__num_turns__")
    prompt = known.get("raw_prompt")
    if prompt is None:
        prompt = extra.get("prompt", extra.get("question", ""))
    truth = (known.get("reward_model") or {}).get("ground_truth")
    return Response(
        text, truth, str(known.get("data_source", "")), str(message_text(prompt)), extra
    )


def _settings(config: Any) -> Mapping[str, Any]:
    """The settings under `reward.batchwright`: `config`, a TOML file, and `missing`.

    Raises:
        ConfigError: an unknown key, or a custom reward function, which would never be called.
    """
    reward = config.reward
    found = dict(reward.get("batchwright") or {})
    if unknown := sorted(set(found) - {"config", "missing"}):
        raise ConfigError(f"reward.batchwright has {unknown}; allowed keys: config, missing")
    if (reward.get("custom_reward_function") or {}).get("path"):
        raise ConfigError(
            "custom_reward_function.path is set, and the manager batchwright never calls it; "
            "remove it, or choose the manager naive"
        )
    return found


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # Its parent package is not installed.
        return False


if _installed("verl.experimental.reward_loop.reward_manager"):
    from verl.experimental.reward_loop.reward_manager import register
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    @register(MANAGER)
    class RewardManager(RewardManagerBase):  # type: ignore[misc]
        """Scores each sample when its rollout ends; the samples of a worker share one pool."""

        def __init__(
            self,
            config: Any,
            tokenizer: Any,
            compute_score: Any = None,
            reward_router_address: str | None = None,
            reward_model_tokenizer: Any = None,
        ) -> None:
            super().__init__(config, tokenizer, compute_score)
            given = _settings(config)
            self.missing = given.get("missing")
            self.scorer = scorer_for(given.get("config"))

        async def run_single(self, data: Any) -> dict[str, Any]:
            """The reward of one sample in verl's format: its score and all columns."""
            # Of several sequences the last one is scored, as in verl's other managers.
            item = data[-1:][0]
            ids = item.batch["responses"]
            length = int(item.batch["attention_mask"][-ids.shape[-1] :].sum())
            text = await asyncio.to_thread(
                self.tokenizer.decode, ids[:length], skip_special_tokens=True
            )
            rewards = await self.scorer.ascore([response_of_item(item, text)])
            (row,) = self.scorer.columns(rewards, self.missing)
            return {"reward_score": float(row["score"]), "reward_extra_info": row}

    __all__ += ["RewardManager"]


if _installed("verl"):
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

    @register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
    def grpo_of_valid(
        token_level_rewards: "torch.Tensor",
        response_mask: "torch.Tensor",
        index: "NDArray[np.object_]",
        config: Any = None,
        **_: Any,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """verl's GRPO over the samples with a finite reward; the others get advantage 0.

        So does the only valid sample of a group: there is nothing to compare it with.
        """
        valid = torch.isfinite(token_level_rewards.sum(dim=-1))
        groups: dict[Any, list[int]] = {}
        for row, group in enumerate(index):
            groups.setdefault(group, []).append(row)
        for rows in groups.values():
            if len(rows) > 1 and int(valid[rows].sum()) == 1:
                valid[rows] = False
        advantages = torch.zeros_like(token_level_rewards)
        if valid.any():
            scale = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
            advantages[valid], _ = compute_grpo_outcome_advantage(
                token_level_rewards=token_level_rewards[valid],
                response_mask=response_mask[valid],
                index=index[valid.cpu().numpy()],
                norm_adv_by_std_in_grpo=scale,
            )
        return advantages, advantages

    __all__ += ["grpo_of_valid"]
