"""GRPO with TRL and our reward: a sample whose judge failed is masked, and the step continues.

    python trl_grpo.py --model FOLDER_OR_HUB_ID --data questions.jsonl --config trl.toml

A row of the data has `prompt` and `answer` (or `ground_truth`); other columns can be used in the
judge's template.
"""

import argparse

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from batchwright.integrations.trl import AsyncRewardFunction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--config", default="trl.toml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="grpo")
    args = parser.parse_args()

    reward = AsyncRewardFunction(args.config)
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=64,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
    )
    trainer.train()
    trainer.save_model()
    reward.close()


if __name__ == "__main__":
    main()
