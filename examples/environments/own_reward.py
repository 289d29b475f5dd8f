"""Train on BatchedVecEnv with a reward of your own and our PPO: `python own_reward.py`.

The reward is 1 for a right answer, less a tenth for every step of its proof, and -1 for a wrong
one. It prints the mean return before and after.
"""

import sys

import numpy as np
import torch

from batchwright.envs import BatchedVecEnv
from batchwright.envs.prover import Ended
from batchwright.logic import load_graph, parse_rules
from batchwright.logic.loaders import shipped_graph
from batchwright.rl import PPO, PPOConfig, policy_for


def short_and_right(ended: Ended) -> np.ndarray:
    """One number for each episode that ended."""
    right = ended.proved & ended.label
    wrong = ended.proved & ~ended.label
    return right * (1 - 0.1 * ended.depth) - wrong


def main(steps: int = 40_000, batch_size: int = 64) -> tuple[float, float]:
    torch.set_num_threads(1)
    graph = load_graph("family")
    rules = parse_rules(shipped_graph("family") / "rules.txt", graph.vocab)
    env = BatchedVecEnv(
        graph.facts, rules, graph.train, batch_size,
        ask="tail", depth=4, goals=3, max_candidates=64, reward=short_and_right,
    )  # fmt: skip
    config = PPOConfig(
        total_steps=steps, num_steps=16, epochs=2, minibatches=4, lr=3e-3, entropy_coef=0.02
    )
    returns: list[float] = []
    ppo = PPO(env, policy_for(env, width=32), config)
    ppo.learn(on_update=lambda _, metrics: returns.append(metrics["charts/episodic_return"]))
    part = max(1, len(returns) // 8)
    first, last = (sum(some) / part for some in (returns[:part], returns[-part:]))
    print(f"mean return of an episode: {first:.3f} at first, {last:.3f} at last")
    return first, last


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
