"""Steps a second of the prover environment on WN18RR, and of other ways to run the same steps.

Every way resolves the first goal with a fact or a rule, chosen at random among the valid ones,
begins the next query in the same step, and gives the valid candidates of all environments. They
do not all do the same:

    batchwright core    hides the query in the whole proof, leaves out visited states and rules that
                        make too many goals, turns pages beyond K, keeps final observations
    torch eager         plainly written; hides the query at its root only, offers visited states
    torch eager, tuned  the same candidates as ours, except that it cuts at K and offers no facts
                        for a goal with two variables (one state in 40); one number for a candidate
                        where ours has four, visited states by their hash; bound to the shape of
                        these rules, and as fast as we could make it without compiling
    python dicts        like plain torch, one environment after the other
    through TensorDict  our core, into one TensorDict of 32 steps (`rollout_into`)
    TorchRL rollout     our core under TorchRL's own `env.rollout(32, break_when_any_done=False)`
    PPO's rollout       our core under our own PPO's runner: observations kept, actions sampled
                        from logits, episodes counted; the network is left out

Over thousands of environments the price of a torch operation hardly counts any more, so that the
tuned version comes near to ours; over few it is all that counts. All run on one thread, and their
seconds are the lesser of processor and wall time, the least of many short calls: on a busy machine
wall time would measure the others. Of TorchRL's SerialEnv and ParallelEnv only the rollout is
timed, on the wall because its work is spread over processes, after one that warms up: starting and
closing their workers takes far longer than the steps. Here load flatters us.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import Contender, Report, arguments, measure
from prover_peers import DEPTH, GOALS, Given, K, Run, python_loop, torch_eager, turns
from prover_torch import torch_tuned

HERE = Path(__file__).parent
DATA = Path(os.environ.get("BATCHWRIGHT_DATA", HERE / "../../shared/data"))
RULES = """
_hypernym(X,Y) :- _hypernym(X,Z), _hypernym(Z,Y).
_hypernym(X,Y) :- _derivationally_related_form(X,Z), _hypernym(Z,Y).
_hypernym(X,Y) :- _verb_group(X,Z), _hypernym(Z,Y).
_derivationally_related_form(X,Y) :- _derivationally_related_form(Y,X).
_verb_group(X,Y) :- _verb_group(Y,X).
_similar_to(X,Y) :- _similar_to(Y,X).
_also_see(X,Y) :- _also_see(Y,X).
_also_see(X,Y) :- _similar_to(X,Z), _also_see(Z,Y).
_member_meronym(X,Y) :- _hypernym(Z,X), _member_meronym(Z,Y).
_has_part(X,Y) :- _has_part(X,Z), _has_part(Z,Y).
_instance_hypernym(X,Y) :- _instance_hypernym(X,Z), _hypernym(Z,Y).
_synset_domain_topic_of(X,Y) :- _hypernym(X,Z), _synset_domain_topic_of(Z,Y).
_member_of_domain_region(X,Y) :- _member_of_domain_region(X,Z), _derivationally_related_form(Z,Y).
_member_of_domain_usage(X,Y) :- _member_of_domain_usage(X,Z), _derivationally_related_form(Z,Y).
"""
OURS, TENSORDICT, ROLLOUT, RUNNER, LOOP, TORCH, TUNED = (
    "batchwright core",
    "through TensorDict",
    "TorchRL rollout",
    "PPO's rollout",
    "python dicts",
    "torch eager",
    "torch eager, tuned",
)
SERIAL, PARALLEL = "TorchRL SerialEnv", "TorchRL ParallelEnv"


def ours_env(given: Given, num_envs: int | None = None, seed: int = 0) -> Any:
    from batchwright.envs import ProverEnv

    graph = given.graph
    settings = {"depth": DEPTH, "goals": GOALS, "max_candidates": K, "end_action": False}
    count = num_envs or given.num_envs
    return ProverEnv(graph.facts, given.rules, graph.train, count, seed=seed, **settings)


def core(given: Given) -> Run:
    env = ours_env(given)

    def run() -> tuple[int, int]:
        for _ in range(turns(given)):
            env.step(env.random_actions())
        return turns(given) * given.num_envs, env.counters["proven"]

    return run


def tensordict(given: Given) -> Run:
    import torch

    from batchwright.envs.torchrl import TorchRLEnv

    torch.set_num_threads(1)
    env = TorchRLEnv(ours_env(given))
    length = min(turns(given), 32)
    out = env.allocate(length)

    def policy(shown: Any) -> Any:
        return torch.from_numpy(env.env.random_actions())

    def run() -> tuple[int, int]:
        done = 0
        while done < given.steps:
            env.rollout_into(out, policy)
            done += length * given.num_envs
        return done, env.env.counters["proven"]

    return run


def torchrl_rollout(given: Given) -> Run:
    import torch

    from batchwright.envs.torchrl import TorchRLEnv

    torch.set_num_threads(1)
    env = TorchRLEnv(ours_env(given))
    length = min(turns(given), 32)

    def policy(td: Any) -> Any:
        return td.set("action", torch.from_numpy(env.env.random_actions()))

    def run() -> tuple[int, int]:
        done = 0
        while done < given.steps:
            env.rollout(length, policy, break_when_any_done=False)
            done += length * given.num_envs
        return done, env.env.counters["proven"]

    return run


class NoNetwork:
    """Every action is as likely as any other, and nothing has a value."""

    device = "cpu"

    def __init__(self, num_envs: int, num_actions: int) -> None:
        import torch

        self.zeros = torch.zeros
        self.equal = torch.zeros(num_envs, num_actions)

    def logits(self, shown: Any) -> Any:
        return self.equal

    def value(self, shown: Any) -> Any:
        return self.zeros(len(shown["mask"]))


def runner(given: Given) -> Run:
    import torch

    from batchwright.rl import Runner

    torch.set_num_threads(1)
    env = ours_env(given)
    length = min(turns(given), 32)
    policy: Any = NoNetwork(given.num_envs, env.num_actions)
    collecting = Runner(env, length)

    def run() -> tuple[int, int]:
        done = 0
        while done < given.steps:
            collecting.collect(policy)
            done += length * given.num_envs
        return done, env.counters["proven"]

    return run


def torchrl_workers(kind: str) -> Callable[[Given], Callable[[], tuple[int, int, float]]]:
    def prepare(given: Given) -> Callable[[], tuple[int, int, float]]:
        import torch
        from torchrl.envs import ParallelEnv, SerialEnv

        from batchwright.envs.torchrl import TorchRLEnv

        torch.set_num_threads(1)

        def make() -> TorchRLEnv:
            return TorchRLEnv(ours_env(given, 1))

        def run() -> tuple[int, int, float]:
            more = {"mp_start_method": "fork"} if kind == PARALLEL else {}
            envs = (ParallelEnv if kind == PARALLEL else SerialEnv)(given.num_envs, make, **more)
            try:
                envs.rollout(3, break_when_any_done=False)
                best = float("inf")
                for _ in range(3):
                    start = time.perf_counter()
                    taken = envs.rollout(turns(given), break_when_any_done=False)
                    best = min(best, time.perf_counter() - start)
            finally:
                # Left open, its processes would hang at exit.
                envs.close()
            return int(taken.batch_size.numel()), 0, best

        return run

    return prepare


def summary(given: Given, result: tuple[Any, ...]) -> Mapping[str, Any]:
    steps, proven, *seconds = result
    return {"steps": steps, "proven": proven, "seconds": seconds[0] if seconds else None}


WAYS: tuple[tuple[str, Callable[[Given], Any], dict[int, int]], ...] = (
    (OURS, core, {1: 20_000, 16: 200_000, 256: 400_000, 4096: 400_000}),
    (TENSORDICT, tensordict, {1: 500, 16: 8_000, 256: 50_000, 4096: 400_000}),
    (ROLLOUT, torchrl_rollout, {16: 8_000, 256: 50_000, 4096: 400_000}),
    (RUNNER, runner, {16: 8_000, 256: 50_000, 4096: 400_000}),
    (LOOP, python_loop, {1: 20_000, 16: 40_000, 256: 100_000, 4096: 100_000}),
    (TORCH, torch_eager, {1: 500, 16: 8_000, 256: 50_000, 4096: 100_000}),
    (TUNED, torch_tuned, {1: 500, 16: 8_000, 256: 50_000, 4096: 100_000}),
    (SERIAL, torchrl_workers(SERIAL), {1: 400, 4: 800, 16: 1_600}),
    (PARALLEL, torchrl_workers(PARALLEL), {2: 400, 4: 800}),
)
"""Each way with the sizes it is run at, and about how many steps in all."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    args = parser.parse_args()
    report = Report("prover_env", args)
    folder = DATA / "kg" / "wn18rr"
    if not folder.is_dir():
        report.not_measured("WN18RR", f"no {folder.name} data; set BATCHWRIGHT_DATA")
        report.close()
        return
    from batchwright.logic import load_graph, parse_rules

    graph = load_graph(folder)
    assert len(graph.facts)
    rules = parse_rules(RULES, graph.vocab)
    speed: dict[tuple[str, int], float] = {}
    rows: list[list[Any]] = []
    for name, prepare, sizes in WAYS:
        for size, steps in sizes.items():
            if args.smoke and size > 16:
                continue
            given = Given(graph, rules, size, max(size, steps // (4 if args.quick else 1)))
            small = given._replace(steps=size)
            contender = Contender(name, prepare, summary)
            # The rollouts with workers repeat by themselves.
            runs = 2 if args.quick or name in (SERIAL, PARALLEL) else 15
            got = measure(contender, given, small, limit_s=args.limit, runs=runs)
            taken = got.summary.get("seconds") or got.busy
            if taken is None:
                report.not_measured(f"{name}, B={size}", got.reason)
                continue
            speed[name, size] = got.summary["steps"] / taken
            rows.append([f"{name}, B={size:,}", speed[name, size], got.summary["steps"]])
    base = {size: speed.get((OURS, size)) for size in (1, 16, 256, 4096)}
    for row in rows:
        size = int(row[0].rpartition("=")[2].replace(",", ""))
        ours = base.get(size)
        row.append(None if ours is None else ours / row[1])
    columns = ("", "steps/s", "steps run", "x slower than core at this B")
    report.table("WN18RR, random valid actions", columns, rows)

    best_parallel = max((v for (name, _), v in speed.items() if name == PARALLEL), default=None)
    top = speed.get((OURS, 4096))
    report.target("core, B=4096: steps/s of processor time", top, least=3e6)
    for name in (TORCH, TUNED):
        for size in base:
            ratio = _ratio(base[size], speed.get((name, size)))
            report.target(f"core / {name}, B={size}", ratio, least=20.0)
    report.target(
        "through TensorDict, B=4096: steps/s of processor time",
        speed.get((TENSORDICT, 4096)),
        least=2e5,
    )
    report.target(
        "TorchRL rollout, B=4096: steps/s of processor time", speed.get((ROLLOUT, 4096)), least=5e5
    )
    report.target(
        "PPO's rollout, B=4096: share of the core's speed",
        _ratio(speed.get((RUNNER, 4096)), top),
        least=0.5,
    )
    report.target(
        "core, B=16 / ParallelEnv", _ratio(speed.get((OURS, 16)), best_parallel), least=100.0
    )
    report.close()


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


if __name__ == "__main__":
    main()
