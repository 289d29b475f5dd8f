"""Train on a batched environment with Stable-Baselines3: `python sb3_ppo.py`.

CartPole is the environment to copy when writing your own; any other one is given in the same way.
SB3 does not come with batchwright: `pip install stable-baselines3`.
"""

import sys

import torch
from stable_baselines3 import PPO

from batchwright.envs import CartPole
from batchwright.integrations.sb3 import Sb3VecEnv


def main(steps: int = 20_000, num_envs: int = 8) -> float:
    torch.set_num_threads(1)
    env = Sb3VecEnv(CartPole(num_envs))
    model = PPO("MultiInputPolicy", env, n_steps=128, batch_size=256, n_epochs=10, seed=0)
    model.learn(steps)
    obs, total = env.reset(), 0.0
    done = [False] * num_envs
    while not all(done):
        actions, _ = model.predict(obs, deterministic=True)
        obs, rewards, ended, _ = env.step(actions)
        total += sum(reward for reward, over in zip(rewards, done, strict=True) if not over)
        done = [over or bool(now) for over, now in zip(done, ended, strict=True)]
    print(f"mean return of an episode after {steps:,} steps: {total / num_envs:.1f}")
    return total / num_envs


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
