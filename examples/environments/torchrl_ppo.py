"""Train on BatchedVecEnv with TorchRL's collector, GAE and ClipPPOLoss: `python torchrl_ppo.py`.

Who is related to whom in the shipped family graph is asked as r(x, ?), the fact itself hidden, and
an episode is rewarded for a right answer. It prints the mean return before and after.
"""

import sys

import torch
from torchrl.collectors import Collector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from batchwright.envs import BatchedVecEnv
from batchwright.integrations.torchrl import actor_critic
from batchwright.logic import load_graph, parse_rules
from batchwright.logic.loaders import shipped_graph
from batchwright.rl import policy_for


def main(frames: int = 40_000, batch_size: int = 64, num_steps: int = 16) -> tuple[float, float]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    graph = load_graph("family")
    rules = parse_rules(shipped_graph("family") / "rules.txt", graph.vocab)
    env = BatchedVecEnv(
        graph.facts, rules, graph.train, batch_size,
        ask="tail", depth=4, goals=3, max_candidates=64, reward="proved_signed",
    )  # fmt: skip
    assert env.batch_size[0] == batch_size
    actor, critic = actor_critic(env, policy_for(env, width=32))
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.02)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
    per_batch = batch_size * num_steps
    frames = -(-frames // per_batch) * per_batch
    collector = Collector(
        env, actor, frames_per_batch=per_batch, total_frames=frames,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    returns: list[float] = []
    try:
        for data in collector:
            done = data["next", "done"]
            returns.append(float(data["next", "reward"].sum() / done.sum().clamp(min=1)))
            for _ in range(2):
                with torch.no_grad():
                    advantage(data)
                flat = data.reshape(-1)
                for part in flat[torch.randperm(len(flat))].chunk(4):
                    losses = loss_module(part)
                    total = losses["loss_objective"] + losses["loss_critic"]
                    total = total + losses["loss_entropy"]
                    optimizer.zero_grad()
                    total.backward()
                    torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                    optimizer.step()
    finally:
        collector.shutdown()
    part = max(1, len(returns) // 8)
    first, last = (sum(some) / part for some in (returns[:part], returns[-part:]))
    print(f"mean return of an episode: {first:.3f} at first, {last:.3f} at last")
    return first, last


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
