"""Calls made by verl's own reward loop, beside the same calls through a RayPool; for bench_ray.py.

    .venv-verl/bin/python benchmarks/verl_loop.py URL COUNT TURNS

Runs in the environment that tests/verl_venv.py makes, in a Ray cluster of two cores that it starts.
verl's RewardLoopManager has two workers; each of them awaits one call for each of its samples, by a
session of its own, as the loop itself calls a reward model. Prints the least seconds of each as
JSON. The workers import this file for its reward function, and nothing else of it.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

WIDTH = 4


async def judged(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **_: Any
) -> float:
    """One call for one sample; `ground_truth` is the server's address."""
    message = {"role": "user", "content": solution_str}
    body = {"model": "sim", "messages": [message], "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{ground_truth}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        found = await response.json()
        return float(len(found["choices"][0]["message"]["content"]))


def tokenizer_in(folder: Path) -> Any:
    """A word for each digit, so that every response can be another one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "question", *(f"n{n}" for n in range(1000))]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.save_pretrained(folder)
    return made


def questions(draw: int, count: int) -> list[str]:
    return [f"question n{draw} n{n // 1000} n{n % 1000}" for n in range(count)]


def data_of(tokenizer: Any, texts: list[str], url: str) -> Any:
    """A batch as verl's rollout leaves it: one prompt token, then the response."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    count = len(texts)
    responses = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    mask = torch.ones(count, 1 + WIDTH, dtype=torch.long)
    batch = {
        "prompts": torch.full((count, 1), 3),
        "responses": responses,
        "attention_mask": mask,
        "response_mask": mask[:, 1:],
    }
    arrays = {}
    for name, one in (
        ("data_source", "bench"),
        ("reward_model", {"ground_truth": url, "style": "rule"}),
        ("extra_info", {}),
    ):
        arrays[name] = np.empty(count, dtype=object)
        arrays[name][:] = [one if isinstance(one, str) else dict(one) for _ in range(count)]
    return DataProto(batch=TensorDict(batch, batch_size=count), non_tensor_batch=arrays)


def main(url: str, count: int, turns: int) -> None:
    import ray
    from hydra import compose, initialize_config_module
    from verl.experimental.reward_loop.reward_loop import (
        RewardLoopManager,
        migrate_legacy_reward_impl,
    )

    from batchwright.calls import chat
    from batchwright.integrations.ray import RayPool

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    draws = iter(range(1000))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_in(Path(folder))
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[
                    "reward.num_workers=2",
                    "reward.reward_manager.name=naive",
                    f"reward.custom_reward_function.path={Path(__file__).resolve()}",
                    "reward.custom_reward_function.name=judged",
                    f"actor_rollout_ref.model.path={folder}",
                ],
            )
        loop = RewardLoopManager(migrate_legacy_reward_impl(config))
        pool = RayPool(url, limit=64, hedge=False)

        def verl() -> float:
            data = data_of(tokenizer, questions(next(draws), count), url)
            start = time.perf_counter()
            found = loop.compute_rm_score(data)
            seconds = time.perf_counter() - start
            assert (found.batch["rm_scores"].sum(-1) > 0).all()
            return seconds

        def ours() -> float:
            requests = [chat("sim", text, temperature=0) for text in questions(next(draws), count)]
            start = time.perf_counter()
            outcomes = pool.map(requests)
            seconds = time.perf_counter() - start
            assert all(outcomes)
            return seconds

        verl()
        ours()
        times = [(verl(), ours()) for _ in range(turns)]
        pool.shutdown()
    ray.shutdown()
    theirs, own = zip(*times, strict=True)
    print(json.dumps({"verl": min(theirs), "RayPool": min(own)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
