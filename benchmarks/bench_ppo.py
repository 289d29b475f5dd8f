"""PPO end to end: steps a second and return reached, beside Stable-Baselines3 and TorchRL.

CartPole: everybody has 8 environments, the same networks (two of 64 x 64, tanh) and the same
settings, those of rl-baselines3-zoo for CartPole: 32 steps a rollout, 20 epochs of one minibatch,
gamma 0.98, lambda 0.8, learning rate 1e-3 falling to 0. Peers run Gymnasium's CartPole-v1, we run
ours, which has the same dynamics. A second table has ours at more environments and usual settings.

Prover: WN18RR from the data folder with 22 rules (symmetry and transitivity of each relation),
256 queries at once. The peer is TorchRL's Collector, GAE and ClipPPOLoss over the same
environment with the same networks.

Steps a second are of `busy` seconds (see common.Measured): the machine may be shared. Return is
the mean of the last 20 episodes of training. It differs so much between seeds that three of them
order nobody; how well 20,000 steps are used is compared over 32, by the mean of all episodes too.
"""

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import Contender, Measured, Report, arguments, measure

DATA = Path(os.environ.get("BATCHWRIGHT_DATA", Path(__file__).parents[2] / "shared" / "data"))


class Given(NamedTuple):
    steps: int
    seed: int = 0
    num_envs: int = 8
    num_steps: int = 32
    epochs: int = 20
    minibatches: int = 1
    lr: float = 1e-3
    gamma: float = 0.98
    lam: float = 0.8


Result = tuple[int, list[float]]
"""Steps made, and the returns of the episodes in order."""


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def learned(env: Any, given: Given) -> Callable[[], Result]:
    from batchwright.rl import PPO, PPOConfig, policy_for

    one_thread()
    config = PPOConfig(
        total_steps=given.steps,
        num_steps=given.num_steps,
        epochs=given.epochs,
        minibatches=given.minibatches,
        lr=given.lr,
        gamma=given.gamma,
        lam=given.lam,
        entropy_coef=0.0,
        # Of half the mean squared error, which the peers weigh whole by 0.5.
        value_coef=1.0,
        # As the peers do; by default ours clips each network's gradient by itself.
        clip_together=True,
        seed=given.seed,
    )
    learner = PPO(env, policy_for(env, seed=given.seed), config)

    def call() -> Result:
        returns: list[float] = []
        collect = learner.runner.collect

        def noting(policy: Any) -> Any:
            rollout = collect(policy)
            returns.extend(rollout.episode_returns)
            return rollout

        learner.runner.collect = noting  # type: ignore[method-assign]
        learner.learn()
        return learner.steps, returns

    return call


def ours(given: Given) -> Callable[[], Result]:
    from batchwright.envs import CartPole

    return learned(CartPole(given.num_envs, seed=given.seed), given)


def sb3(given: Given) -> Callable[[], Result]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    one_thread()
    learner = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", given.num_envs, seed=given.seed),
        n_steps=given.num_steps,
        batch_size=given.num_envs * given.num_steps // given.minibatches,
        n_epochs=given.epochs,
        gamma=given.gamma,
        gae_lambda=given.lam,
        ent_coef=0.0,
        learning_rate=lambda left: left * given.lr,
        seed=given.seed,
        device="cpu",
        stats_window_size=10**9,
    )

    def call() -> Result:
        learner.learn(given.steps)
        return learner.num_timesteps, [e["r"] for e in learner.ep_info_buffer or []]

    return call


def torchrl_learned(env: Any, policy: Any, names: list[str], given: Given) -> Callable[[], Result]:
    """TorchRL's collector, GAE and loss around networks that take the arrays `names`."""
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    class Net(nn.Module):
        def __init__(self, actor: bool) -> None:
            super().__init__()
            self.net = policy.actor if actor else nn.ModuleList([policy.critic, policy.head])
            self.is_actor = actor

        def forward(self, *arrays: torch.Tensor) -> torch.Tensor:
            mask = arrays[names.index("mask")]
            lead = mask.shape[:-1]
            obs = {n: a.reshape(-1, *a.shape[len(lead) :]) for n, a in zip(names, arrays)}  # noqa: B905
            if self.is_actor:
                return self.net.point(obs, self.net.state(obs)).reshape(mask.shape)
            critic, head = self.net
            return head(critic.state(obs)).reshape(*lead, 1)

    actor = ProbabilisticActor(
        TensorDictModule(Net(True), names, ["logits"]),
        in_keys=["logits", "mask"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(Net(False), names)
    per_update = given.num_envs * given.num_steps
    updates = -(-given.steps // per_update)
    collector = Collector(
        env,
        actor,
        frames_per_batch=per_update,
        total_frames=updates * per_update,
        auto_register_policy_transforms=False,
    )
    # Without vmap: the prover's networks compute only what is not padding.
    advantage = GAE(gamma=given.gamma, lmbda=given.lam, value_network=critic, deactivate_vmap=True)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=given.lr, eps=1e-5)

    def call() -> Result:
        returns: list[float] = []
        running = np.zeros(given.num_envs)
        made = 0
        for number, data in enumerate(collector):
            optimizer.param_groups[0]["lr"] = given.lr * (1 - number / updates)
            rewards = data["next", "reward"][..., 0].numpy().T
            done = data["next", "done"][..., 0].numpy().T
            for reward, over in zip(rewards, done, strict=True):
                running += reward
                returns.extend(running[over])
                running[over] = 0.0
            for _ in range(given.epochs):
                with torch.no_grad():
                    advantage(data)
                flat = data.reshape(-1)
                for rows in torch.randperm(len(flat)).tensor_split(given.minibatches):
                    losses = loss_module(flat[rows])
                    loss = losses["loss_objective"] + losses["loss_critic"]
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                    optimizer.step()
            made += data.numel()
        collector.shutdown()
        return made, returns

    return call


def torchrl(given: Given) -> Callable[[], Result]:
    import torch
    from torchrl.data import Binary
    from torchrl.envs import GymEnv, SerialEnv, TransformedEnv
    from torchrl.envs.transforms import Compose, RenameTransform, TensorDictPrimer

    from batchwright.envs import CartPole
    from batchwright.rl import policy_for

    one_thread()
    torch.manual_seed(given.seed)
    serial = SerialEnv(
        given.num_envs, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)
    )
    always = Binary(n=2, shape=(2,), dtype=torch.bool)
    env = TransformedEnv(
        serial,
        Compose(
            RenameTransform(["observation"], ["features"]),
            TensorDictPrimer({"mask": always}, default_value=1, expand_specs=True),
        ),
    )
    env.set_seed(given.seed)
    policy = policy_for(CartPole(1), seed=given.seed)
    return torchrl_learned(env, policy, ["features", "mask"], given)


def torchrl_ours(given: Given) -> Callable[[], Result]:
    import torch

    from batchwright.envs import CartPole
    from batchwright.envs.torchrl import TorchRLEnv
    from batchwright.rl import policy_for

    one_thread()
    torch.manual_seed(given.seed)
    env = CartPole(given.num_envs, seed=given.seed)
    return torchrl_learned(
        TorchRLEnv(env), policy_for(env, seed=given.seed), ["features", "mask"], given
    )


def prover_env(given: Given) -> Any:
    from batchwright.envs import ProverEnv
    from batchwright.logic import Facts, load_graph, parse_rules

    graph = load_graph(DATA / "kg" / "wn18rr")
    facts = Facts.of(graph.train, graph.vocab)
    names = graph.vocab.predicates
    text = "\n".join(f"{p}(X, Y) :- {p}(Y, X).\n{p}(X, Y) :- {p}(X, Z), {p}(Z, Y)." for p in names)
    rules = parse_rules(text, graph.vocab)
    return ProverEnv(
        facts, rules, graph.train, given.num_envs, seed=given.seed, negatives=1, depth=6
    )


def prover(given: Given) -> Callable[[], Result]:
    return learned(prover_env(given), given)


def torchrl_prover(given: Given) -> Callable[[], Result]:
    import torch

    from batchwright.envs.torchrl import TorchRLEnv
    from batchwright.rl import policy_for

    one_thread()
    torch.manual_seed(given.seed)
    env = prover_env(given)
    names = ["goals", "candidates", "mask", "query"]
    return torchrl_learned(TorchRLEnv(env), policy_for(env, seed=given.seed), names, given)


def outcome(given: Given, result: Result) -> Mapping[str, Any]:
    steps, returns = result
    assert steps >= given.steps
    if not returns:
        return {"steps": steps, "return": None, "whole": None}
    last, whole = float(np.mean(returns[-20:])), float(np.mean(returns))
    return {"steps": steps, "return": last, "whole": whole}


def compare(
    report: Report, title: str, contenders: list[Contender], given: Given, small: Given, seeds: int
) -> dict[str, float]:
    """A table of one problem; steps a second of each contender, the best of the seeds."""
    rows: list[list[Any]] = []
    speeds: dict[str, float] = {}
    for contender in contenders:
        got: list[Measured] = []
        for seed in range(seeds):
            one = measure(
                contender, given._replace(seed=seed), small, limit_s=report.args.limit, runs=1
            )
            if one.busy is None:
                report.not_measured(f"{contender.name} ({title})", one.reason)
                break
            got.append(one)
        if not got:
            continue
        speeds[contender.name] = max(g.summary["steps"] / (g.busy or np.nan) for g in got)
        reached = [g.summary["return"] for g in got if g.summary["return"] is not None]
        rows.append(
            [
                contender.name,
                round(speeds[contender.name]),
                speeds[contender.name] / speeds.get(contenders[0].name, np.nan),
                float(np.mean(reached)) if reached else None,
                float(np.min(reached)) if reached else None,
            ]
        )
    columns = ("", "steps/s", "x ours", "return, mean", "return, worst seed")
    report.table(f"{title}, {given.steps:,} steps, {seeds} seeds", columns, rows)
    return speeds


def efficiency(report: Report, contenders: list[Contender], given: Given, seeds: int) -> None:
    """How well each learns from few steps: a table over many seeds, and ours over the second's."""
    rows, means = [], []
    for contender in contenders:
        found = [
            measure(
                contender, given._replace(seed=seed), Given(512), limit_s=report.args.limit, runs=1
            )
            for seed in range(seeds)
        ]
        if any(one.busy is None for one in found):
            report.not_measured(f"{contender.name} (sample efficiency)", found[0].reason)
            return
        row: list[Any] = [contender.name]
        for key in ("whole", "return"):
            values = [one.summary[key] for one in found if one.summary[key] is not None]
            wide = 1.96 * np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
            row += [float(np.mean(values)), wide]
        means.append(row[1:3])
        rows.append([*row, sum(one.busy or 0.0 for one in found) / seeds])
    columns = (
        *("", "return, all episodes", "95 % +-", "return, last 20", "95 % +-"),
        "busy seconds a run",
    )
    title = f"CartPole, sample efficiency: {given.steps:,} steps, {seeds} seeds"
    report.table(title, columns, rows)
    (mine, mine_wide), (theirs, theirs_wide) = means
    wide = float(np.hypot(mine_wide, theirs_wide)) if mine_wide is not None else 0.0
    apart = (theirs - mine) / wide if wide else None
    report.target(
        f"CartPole, {given.steps:,} steps: what {contenders[1].name} returns more over all "
        f"episodes, in 95 % intervals of the difference",
        apart,
        most=1.0,
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0])
    args.set_defaults(limit=600.0)
    parsed = args.parse_args()
    report = Report("ppo", parsed)
    for package in ("torchrl", "tensordict", "stable-baselines3", "gymnasium"):
        try:
            report.stamp["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            report.not_measured(package, "not installed")
    seeds = 1 if parsed.quick else 3
    steps = 512 if parsed.smoke else 5_000 if parsed.quick else 60_000

    mine = "batchwright"
    pole = compare(
        report,
        "CartPole, 8 environments",
        [
            Contender(mine, ours, outcome),
            Contender("Stable-Baselines3 PPO, DummyVecEnv", sb3, outcome),
            Contender("TorchRL, SerialEnv of GymEnv", torchrl, outcome),
            Contender("TorchRL over batchwright's CartPole", torchrl_ours, outcome),
        ],
        Given(steps),
        Given(512),
        seeds,
    )
    efficiency(
        report,
        [
            Contender(mine, ours, outcome),
            Contender("Stable-Baselines3 PPO, DummyVecEnv", sb3, outcome),
        ],
        Given(512 if parsed.smoke else 5_000 if parsed.quick else 20_000),
        2 if parsed.quick else 32,
    )
    for num_envs in (8,) if parsed.smoke else (8, 64, 256):
        usual = Given(
            8_192 if parsed.smoke else 40_000 if parsed.quick else 400_000,
            num_envs=num_envs,
            num_steps=128,
            epochs=4,
            minibatches=4,
            lr=2.5e-3,
            gamma=0.99,
            lam=0.95,
        )
        small = usual._replace(steps=num_envs * 128)
        if num_envs == 8:
            usual = usual._replace(steps=usual.steps // 4, lr=1e-3)
        contenders = [Contender(mine, ours, outcome)]
        if num_envs == 8:
            contenders.append(Contender("Stable-Baselines3 PPO, DummyVecEnv", sb3, outcome))
        compare(
            report,
            f"CartPole, {num_envs} environments, 128 steps, 4 epochs of 4 minibatches",
            contenders,
            usual,
            small,
            seeds if num_envs == 8 else 1,
        )
    if (DATA / "kg" / "wn18rr").is_dir():
        proofs = Given(
            32_768 if parsed.quick else 262_144,
            num_envs=256,
            num_steps=64,
            epochs=2,
            minibatches=8,
            gamma=0.99,
            lam=0.95,
        )
        proving = compare(
            report,
            "Prover on WN18RR, 256 environments",
            [
                Contender(mine, prover, outcome),
                Contender("TorchRL over batchwright's prover", torchrl_prover, outcome),
            ],
            proofs,
            proofs._replace(steps=256 * 64),
            1,
        )
    else:
        proving = {}
        report.not_measured("prover", f"no {DATA.name}/kg/wn18rr; set BATCHWRIGHT_DATA")

    def ratio(speeds: dict[str, float], peer: str) -> float | None:
        found = [v for name, v in speeds.items() if name.startswith(peer)]
        return speeds[mine] / max(found) if found and mine in speeds else None

    report.target("CartPole: steps/s over Stable-Baselines3's", ratio(pole, "Stable"), least=1.0)
    report.target("CartPole: steps/s over TorchRL's", ratio(pole, "TorchRL"), least=1.0)
    report.target("prover: steps/s over TorchRL's", ratio(proving, "TorchRL"), least=1.0)
    report.close()


if __name__ == "__main__":
    main()
