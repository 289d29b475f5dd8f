"""What holds inside verl's own environment, where this file is run by test_integration_verl.py."""

import asyncio
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl lives in an environment of its own")

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import (
    RewardLoopManager,
    RewardLoopWorker,
    migrate_legacy_reward_impl,
)
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.reward_manager import get_reward_manager_cls as legacy_manager_cls

import batchwright.integrations.verl as ours
from batchwright.calls.simulator import Simulator
from batchwright.errors import BadReward, ConfigError
from batchwright.rewards import group_advantages

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "rewards"
TRUTH = "[true, false, true]"
WORDS = ["<pad>", "<eos>", "<unk>", "It", "is", "correct", "incorrect", "nobody", "hears"]
ANSWERS = [f"<measurements>[{a}]</measurements>" for a in ("true,false,true", "true,true,true")]
SAMPLES = [
    f"It is correct {ANSWERS[0]}",
    f"It is incorrect {ANSWERS[1]}",
    f"nobody hears {ANSWERS[0]}",
    f"It is correct {ANSWERS[1]}",
]
LABELS = [True, False, True, False]
# Format 1, correctness 3 or 2, and the monitor's -1 if it is right, which it is but for the last.
SCORES = [3.0, 2.0, math.nan, 4.0]


REWARDS = """
endpoints = ["{url}/v1"]
[[part]]
kind = "format"
[[part]]
kind = "correctness"
[[part]]
kind = "monitor"
model = "sim-judge"
"""


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with Simulator(latency_s=0.002, script={"nobody hears": "500"}).running() as url:
        yield url


@pytest.fixture(autouse=True)
def documented(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's environment, with the simulator for OpenAI."""
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server}/v1")
    monkeypatch.setenv("MONITOR_MODEL_NAME", "sim-judge")
    monkeypatch.setenv("MONITOR_CACHE", "false")


@pytest.fixture
def rewards_file(server: str, tmp_path: Path) -> Path:
    path = tmp_path / "rewards.toml"
    path.write_text(REWARDS.format(url=server))
    return path


def tokenizer_of() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*WORDS, *ANSWERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def data_of(tokenizer: PreTrainedTokenizerFast, samples: list[str] = SAMPLES) -> DataProto:
    """Prompts padded on the left, responses on the right, as verl's rollout leaves them."""
    n, prompt, width = len(samples), 3, 8
    responses = torch.zeros(n, width, dtype=torch.long)
    mask = torch.zeros(n, prompt + width, dtype=torch.long)
    mask[:, 1:prompt] = 1
    for row, text in enumerate(samples):
        ids = tokenizer(text)["input_ids"]
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, prompt : prompt + len(ids)] = 1
    batch = {
        "prompts": torch.full((n, prompt), 3),
        "responses": responses,
        "attention_mask": mask,
        "response_mask": mask[:, prompt:],
    }
    objects = {
        "data_source": ["diamonds-seed0"] * n,
        "reward_model": [{"ground_truth": TRUTH, "style": "rule"} for _ in range(n)],
        "extra_info": [{"is_correct": LABELS[row % 4], "index": row} for row in range(n)],
        "raw_prompt": [[{"role": "user", "content": "What was measured?"}] for _ in range(n)],
        "uid": ["a"] * n,
    }
    arrays = {}
    for name, values in objects.items():
        arrays[name] = np.empty(n, dtype=object)
        arrays[name][:] = values
    return DataProto(batch=TensorDict(batch, batch_size=n), non_tensor_batch=arrays)


def config_of(*overrides: str) -> Any:
    """verl's real configuration with our overrides, as its entry point makes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=list(overrides))
    return migrate_legacy_reward_impl(config)


def overrides_of(name: str) -> list[str]:
    """The lines of an example, without comments."""
    lines = (EXAMPLES / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def legacy_manager_of(missing: Any) -> Any:
    path = EXAMPLES / "rewards.py"
    config = config_of(
        f"custom_reward_function.path={path}", "custom_reward_function.name=compute_score"
    )
    function = get_custom_reward_fn(config)
    return legacy_manager_cls("batch")(
        tokenizer=tokenizer_of(), num_examine=0, compute_score=function, missing=missing
    )


def test_verls_batch_manager_finds_the_function_by_path_and_name() -> None:
    """The document's way: `reward_manager: batch` and a function found by path and name."""
    data = data_of(tokenizer_of())
    found = legacy_manager_of("mask")(data, return_dict=True)
    rewards, columns = found["reward_tensor"], found["reward_extra_info"]

    lengths = data.batch["response_mask"].sum(-1)
    last = rewards[torch.arange(4), lengths - 1]
    torch.testing.assert_close(last, torch.tensor(SCORES), equal_nan=True)
    assert columns["valid"] == [True, True, False, True]
    assert columns["why"] == ["", "", "http_5xx", ""]
    assert {len(values) for values in columns.values()} == {4}
    assert columns["monitor_correctness"][:2] == [1.0, 1.0]


def test_a_missing_reward_is_an_error_or_the_number_that_was_chosen() -> None:
    with pytest.raises(BadReward, match="1 of 4 rewards are missing"):
        legacy_manager_of(None)(data_of(tokenizer_of()))
    found = legacy_manager_of(-1.5)(data_of(tokenizer_of()), return_dict=True)
    assert found["reward_extra_info"]["score"] == [3.0, 2.0, -1.5, 4.0]
    assert found["reward_extra_info"]["valid"][2] is False
    assert found["reward_tensor"].sum(-1).tolist() == [3.0, 2.0, -1.5, 4.0]


def worker_of(config: Any) -> Any:
    """verl's worker as Ray would make it, without its tokenizer's path and without Ray."""
    worker = object.__new__(RewardLoopWorker)
    worker.config = config
    worker.reward_manager = load_reward_manager(config, tokenizer_of())
    return worker


def scored(config: Any, data: DataProto) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return await worker_of(config).compute_score_batch(data)

    return asyncio.run(run())


def test_the_manager_is_loaded_by_importlib_and_scores_in_verls_loop(rewards_file: Path) -> None:
    """The manager by importlib, through verl's own loading and its worker's loop."""
    config = config_of(*overrides_of("verl_manager.txt"))
    config.reward.batchwright.config = str(rewards_file)
    outputs = scored(config, data_of(tokenizer_of()))
    np.testing.assert_allclose([row["reward_score"] for row in outputs], SCORES)
    columns = [row["reward_extra_info"] for row in outputs]
    assert len({tuple(row) for row in columns}) == 1
    assert [row["valid"] for row in columns] == [True, True, False, True]
    assert config.algorithm.adv_estimator == "batchwright_grpo"
    # verl assembles the batch from the keys of sample 0 and numpy arrays of each.
    assert all(np.array([row[key] for row in columns]).shape == (4,) for key in columns[0])


def test_the_prompt_is_part_of_the_response() -> None:
    item = data_of(tokenizer_of())[0]
    response = ours.response_of_item(item, "text")
    assert response.prompt == "What was measured?"
    assert (response.truth, response.dataset) == (TRUTH, "diamonds-seed0")
    assert response.extra["is_correct"] is True


def test_verls_naive_manager_awaits_our_function() -> None:
    """verl's own manager awaits our function: it is a real `async def`."""
    config = config_of(*overrides_of("verl_function.txt"))
    function = get_custom_reward_fn(config)
    assert inspect.iscoroutinefunction(function)
    outputs = scored(config, data_of(tokenizer_of()))
    np.testing.assert_allclose([row["reward_score"] for row in outputs], SCORES)


def test_a_function_beside_the_manager_is_refused() -> None:
    path = EXAMPLES / "rewards.py"
    config = config_of(
        *overrides_of("verl_manager.txt"), f"reward.custom_reward_function.path={path}"
    )
    with pytest.raises(ConfigError, match="never calls it"):
        load_reward_manager(config, tokenizer_of())


def advantages_of(estimator: Any, rewards: list[float], groups: list[str], **more: Any) -> Any:
    data = data_of(tokenizer_of(), [SAMPLES[0]] * len(rewards))
    data.non_tensor_batch["uid"] = np.array(groups, dtype=object)
    scores = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
    lengths = data.batch["response_mask"].sum(-1)
    scores[torch.arange(len(rewards)), lengths - 1] = torch.tensor(rewards)
    data.batch["token_level_rewards"] = scores
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": more.get("scale", True)})
    keys = [f"{group}_{row}_0" for row, group in enumerate(groups)]
    settings = {
        "adv_estimator": estimator,
        "norm_adv_by_std_in_grpo": more.get("scale", True),
        "config": config,
    }
    one = compute_advantage(data, **settings).batch["advantages"].clone()
    # The present trainer comes by this way.
    other = compute_advantage_for_multi_trajectories(data, batch_keys=keys, **settings)
    torch.testing.assert_close(one, other.batch["advantages"], equal_nan=True)
    return one


def test_advantages_are_verls_for_valid_samples_and_nothing_for_invalid_ones() -> None:
    assert get_adv_estimator_fn(ours.ESTIMATOR) is ours.grpo_of_valid
    groups = [*"aaaa", *"bbbb", *"cc", "d"]
    whole = [1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 1.0, 3.0]
    for scale in (True, False):
        theirs = advantages_of(AdvantageEstimator.GRPO, whole, groups, scale=scale)
        torch.testing.assert_close(
            advantages_of(ours.ESTIMATOR, whole, groups, scale=scale), theirs
        )

    nan = math.nan
    holes = [1.0, nan, 0.5, 0.0, nan, nan, nan, nan, 0.0, nan, 3.0]
    found = advantages_of(ours.ESTIMATOR, holes, groups)
    assert found.isfinite().all()
    first = found[:, 0]
    expected, usable = group_advantages(holes, groups)
    # A group of one is verl's own case; all others are as ours.
    np.testing.assert_allclose(first[:10], expected[:10], atol=1e-5)
    assert not first[:10][~torch.tensor(usable[:10])].any()
    # The stock estimator would lose the whole group.
    assert advantages_of(AdvantageEstimator.GRPO, holes, groups)[:4].isnan().any()


@pytest.mark.parametrize("on", ["here", "ray"])
def test_rays_workers_score_a_batch_for_the_trainer(
    on: str, server: Any, rewards_file: Path, tmp_path: Path
) -> None:
    """From verl's manager through two of its Ray workers to the advantages of its trainer.

    With `on = "ray"` both call their judge through one pool of the cluster.
    """
    import ray

    rewards_file.write_text(f'on = "{on}"\n{rewards_file.read_text()}')
    server.reset()
    tokenizer_of().save_pretrained(tmp_path / "tokenizer")
    config = config_of(
        *overrides_of("verl_manager.txt"),
        "reward.num_workers=2",
        f"actor_rollout_ref.model.path={tmp_path / 'tokenizer'}",
    )
    config.reward.batchwright.config = str(rewards_file)
    data = data_of(tokenizer_of(), SAMPLES + SAMPLES[:1])
    for left in reversed(range(20)):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            # Ray gives its processes half a minute to start, however busy the machine is.
            ray.shutdown()
            if not left:
                raise
    try:
        found = RewardLoopManager(config).compute_rm_score(data)
    finally:
        ray.shutdown()
    np.testing.assert_allclose(found.batch["rm_scores"].sum(-1), [*SCORES, SCORES[0]])
    if on == "ray":
        # The first sample comes twice, to a worker each.
        assert server.stats()["repeated"] == 0
    assert found.non_tensor_batch["valid"].tolist() == [True, True, False, True, True]
    data.batch["token_level_rewards"] = found.batch["rm_scores"]
    advantages = compute_advantage(
        data, adv_estimator=config.algorithm.adv_estimator, config=config.algorithm
    ).batch["advantages"]
    expected, _ = group_advantages([*SCORES, SCORES[0]], [0] * 5)
    np.testing.assert_allclose(advantages[:, 0], expected, atol=1e-5)
