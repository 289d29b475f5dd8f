"""TRL's own trainers call our reward functions, with a judge behind a real server."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from batchwright.calls.simulator import RunningSimulator, Simulator
from batchwright.errors import BadRow, Mismatch
from batchwright.integrations.trl import AsyncRewardFunction, RewardFunction
from batchwright.rewards import RewardsConfig, group_advantages

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WORDS = [f"w{number}" for number in range(28)]
JUDGE = {
    "kind": "judge",
    "models": ["sim-judge"],
    "template": "Score: N from 0 to 10 for {response} .",
}
UNHEARD = ("w3", "w4", "w5", "w6")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningSimulator]:
    """A judge that says nothing of texts with certain words."""
    faults = {f" {word} ": "empty" for word in UNHEARD}
    with Simulator(knee=64, latency_s=0.001, script=faults).running() as url:
        yield url


def config_of(url: str, **more: Any) -> RewardsConfig:
    return RewardsConfig.of({"part": [JUDGE], "endpoints": [f"{url}/v1"], **more})


def tokenizer_of() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=31, num_attention_heads=2, max_position_embeddings=64, **shape)
    )


def data_of(rows: int = 4) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"{WORDS[row]} w9", "ground_truth": f"w{row}"} for row in range(rows)]
    )


def trained(kind: type, config: type, reward: Any, folder: Path) -> Any:
    """Two steps of a trainer; its loop and its logs are as TRL made them."""
    torch.set_num_threads(1)
    arguments = config(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=4,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    trainer = kind(
        model=model_of(),
        reward_funcs=reward,
        args=arguments,
        train_dataset=data_of(),
        processing_class=tokenizer_of(),
    )
    trainer.train()
    return trainer


@pytest.mark.training
@pytest.mark.parametrize("wrapped", [RewardFunction, AsyncRewardFunction])
@pytest.mark.parametrize(
    ("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"]
)
def test_a_failing_judge_leaves_its_samples_out_of_a_step_that_goes_on(
    kind: type, config: type, wrapped: type, server: RunningSimulator, tmp_path: Path
) -> None:
    reward = wrapped(config_of(server))
    try:
        trainer = trained(kind, config, reward, tmp_path)
    finally:
        reward.close()

    logs = trainer._logs
    rewards = torch.tensor(logs["rewards"]["batchwright"], dtype=torch.float64)
    heard = [set(UNHEARD).isdisjoint(text.split()) for text in logs["completion"]]
    failed = ~torch.tensor(heard)
    # TRL keeps what its last step saw.
    assert len(rewards) == 8
    assert 0 < failed.sum() < 7
    assert torch.equal(rewards.isnan(), failed)
    advantages = torch.tensor(logs["advantages"], dtype=torch.float64)
    assert advantages.isfinite().all()
    assert (advantages[failed] == 0).all()
    if kind is GRPOTrainer:
        # What TRL makes of it is what ours would be, but for its larger epsilon.
        ours, _ = group_advantages(rewards, [0] * 8, ~failed, epsilon=1e-4)
        torch.testing.assert_close(advantages, torch.tensor(ours), atol=1e-3, rtol=1e-3)
    steps = [row for row in trainer.state.log_history if "loss" in row]
    assert len(steps) == 2
    assert steps[-1]["batchwright/missing"] == failed.double().mean().item()
    assert list(logs["extra"]["valid"]) == heard
    assert set(logs["extra"]["why"]) == {"", "empty"}


def test_messages_and_texts_are_scored_alike_and_columns_are_found_by_name() -> None:
    parts = [{"kind": "numeric", "datasets": ["sums"]}, {"kind": "exact", "datasets": ["words"]}]
    reward = RewardFunction(RewardsConfig.of({"part": parts}))
    columns = {"answer": ["4", "Rome"], "data_source": ["sums", "words"], "trainer_state": None}
    texts = ["so 4", "rome."]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    prompts = [[{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "Where?"}]]

    assert reward(prompts=prompts, completions=messages, **columns) == [1.0, 1.0]
    assert reward(["2+2?", "Where?"], texts, completion_ids=[[1], [2]], **columns) == [1.0, 1.0]
    with pytest.raises(Mismatch, match="'answer': 1"):
        reward(["2+2?", "Where?"], texts, answer=["4"])
    with pytest.raises(BadRow, match="a response that is int"):
        reward(["2+2?"], [4], answer=["4"])


def test_a_template_sees_the_prompt_and_every_column(server: RunningSimulator) -> None:
    part = {**JUDGE, "template": "Score: N\n{prompt} {level} {response}"}
    reward = RewardFunction(config_of(server, part=[part]))
    try:
        assert reward(["2+2?"], ["4"], level=[3])[0] is not None
        with pytest.raises(BadRow, match=r"uses \{level\}"):
            reward(["2+2?"], ["4"])
    finally:
        reward.close()


@pytest.mark.parametrize("wrapped", [RewardFunction, AsyncRewardFunction])
def test_it_travels_to_other_processes_after_it_was_used(
    wrapped: type, server: RunningSimulator
) -> None:
    async def scores(reward: Any) -> list[float | None]:
        found = reward(["w1", "w2"], ["w5", "w6"], ground_truth=["a", "b"])
        return await found if asyncio.iscoroutine(found) else found

    reward = wrapped(config_of(server), name="judge")
    first = asyncio.run(scores(reward))
    other = pickle.loads(pickle.dumps(reward))
    try:
        assert asyncio.run(scores(other)) == first
        assert other.__name__ == "judge"
    finally:
        reward.close()
        other.close()
