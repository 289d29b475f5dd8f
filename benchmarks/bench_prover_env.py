"""Steps a second of the prover environment on WN18RR, and of other ways to run the same steps.

Every way resolves the first goal with a fact or a rule, chosen at random among the valid ones, and
begins the next query in the same step. Ours alone also hides the query in the whole proof, leaves
out visited states, pages through successors beyond K and keeps final observations: the plain loop
and the torch version, written for this comparison, cut at K and hide the query at its root only.
So their steps are cheaper than ours, and the ratios are on the safe side. All run on one thread,
and their seconds are the lesser of processor and wall time, the least of many short calls: on a
busy machine wall time would measure the others. Of TorchRL's SerialEnv and ParallelEnv only the
rollout is timed, on the wall because its work is spread over processes, after one that warms up:
starting and closing their workers takes far longer than the steps. Here load flatters us.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import Contender, Report, arguments, measure

HERE = Path(__file__).parent
DATA = Path(os.environ.get("BATCHWRIGHT_DATA", HERE / "../../shared/data"))
GOALS, K, DEPTH = 6, 64, 8
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
OURS, TENSORDICT, LOOP, TORCH = (
    "batchwright core",
    "through TensorDict",
    "python dicts",
    "torch eager",
)
SERIAL, PARALLEL = "TorchRL SerialEnv", "TorchRL ParallelEnv"


class Given(NamedTuple):
    graph: Any
    rules: Any
    num_envs: int
    steps: int
    """Steps of all environments together, at least."""


def ours_env(given: Given, num_envs: int | None = None, seed: int = 0) -> Any:
    from batchwright.envs import BatchedVecEnv

    graph = given.graph
    settings = {"depth": DEPTH, "goals": GOALS, "max_candidates": K, "end_action": False}
    count = num_envs or given.num_envs
    return BatchedVecEnv(graph.facts, given.rules, graph.train, count, seed=seed, **settings)


def turns(given: Given) -> int:
    return max(2, -(-given.steps // given.num_envs))


def core(given: Given) -> Callable[[], tuple[int, int]]:
    env = ours_env(given)

    def run() -> tuple[int, int]:
        for _ in range(turns(given)):
            env.step(env.random_actions())
        return turns(given) * given.num_envs, env.counters["proven"]

    return run


def tensordict(given: Given) -> Callable[[], tuple[int, int]]:
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


def python_loop(given: Given) -> Callable[[], tuple[int, int]]:
    """Each environment by itself, on dictionaries of facts."""
    import random

    graph, n = given.graph, given.graph.vocab.num_entities
    tails: dict[tuple[int, int], list[int]] = defaultdict(list)
    heads: dict[tuple[int, int], list[int]] = defaultdict(list)
    facts = set()
    for h, p, t in graph.facts.triples.tolist():
        tails[p, h].append(t)
        heads[p, t].append(h)
        facts.add((p, h, t))
    rules: dict[int, list[Any]] = defaultdict(list)
    for r in range(len(given.rules)):
        head, body = given.rules.clause(r)
        rules[head[0]].append(body)
    queries = graph.train.tolist()
    draw = random.Random(0)

    class Slot:
        def __init__(self, at: int) -> None:
            self.at = at
            self.begin()

        def begin(self) -> None:
            h, p, t = queries[self.at % len(queries)]
            self.at += given.num_envs
            self.goals, self.fresh, self.depth = [(p, h, t)], 0, 0
            self.found: list[int] = []
            self.rules = rules[p]

        def look(self) -> None:
            p, x, y = self.goals[0]
            if x < n and y < n:
                self.found = [y] if (p, x, y) in facts else []
            elif x < n:
                self.found = tails.get((p, x), [])
            else:
                self.found = heads.get((p, y), []) if y < n else []
            self.rules = rules[p]

        def step(self) -> bool:
            found = min(len(self.found), K - 2)
            total = found + len(self.rules)
            pick = draw.randrange(total) if total else -1
            (_, x, y), rest = self.goals[0], self.goals[1:]
            failed = total == 0
            if not failed and pick < found:
                value, name = self.found[pick], y if x < n else x
                self.goals = [
                    (q, value if a == name else a, value if b == name else b) for q, a, b in rest
                ]
            elif not failed:
                body = self.rules[pick - found]
                base = n + 2 + self.fresh
                new = [
                    (q, *(x if v == n else y if v == n + 1 else base + v for v in (a, b)))
                    for q, a, b in body
                ]
                self.fresh += 3
                failed = len(new) + len(rest) > GOALS
                self.goals = [*new, *rest]
            self.depth += 1
            proven = not self.goals
            if not (proven or failed):
                self.look()
                failed = self.depth >= DEPTH or not (self.found or self.rules)
            if proven or failed:
                self.begin()
            return proven

    slots = [Slot(b) for b in range(given.num_envs)]

    def run() -> tuple[int, int]:
        proven = 0
        for _ in range(turns(given)):
            for slot in slots:
                proven += slot.step()
        return turns(given) * given.num_envs, proven

    return run


def torch_eager(given: Given) -> Callable[[], tuple[int, int]]:
    """All environments at once in whole-array operations of torch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts, rules, n, b = (
        given.graph.facts,
        given.rules,
        given.graph.vocab.num_entities,
        given.num_envs,
    )

    def tensor(array: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).long()

    ps_ptr, ps_obj, po_ptr, po_sub = map(
        tensor, (facts.ps_ptr, facts.ps_obj, facts.po_ptr, facts.po_sub)
    )
    triples = facts.triples.astype(np.int64)
    keys = tensor((triples[:, 1] * n + triples[:, 0]) * n + triples[:, 2])
    by_head, head_ptr = tensor(rules.by_head), tensor(rules.head_ptr)
    body, length = tensor(rules.body), tensor(rules.body_len)
    queries = tensor(given.graph.train)
    places, slots = torch.arange(K - 2), torch.arange(GOALS)

    def first(index: Any) -> Any:
        goals = torch.full((b, GOALS, 3), -1)
        goals[:, 0] = queries[index][:, [1, 0, 2]]
        return goals

    def look(goals: Any, fresh: Any) -> tuple[Any, ...]:
        p, x, y = goals[:, 0, 0].clamp_min(0), goals[:, 0, 1], goals[:, 0, 2]
        known_x, known_y = x < n, y < n
        xc, yc = x.clamp(0, n - 1), y.clamp(0, n - 1)
        key = (p * n + xc) * n + yc
        at = torch.searchsorted(keys, key).clamp_max(len(keys) - 1)
        ground = known_x & known_y
        low = torch.where(known_x, ps_ptr[p * n + xc], po_ptr[p * n + yc])
        high = torch.where(known_x, ps_ptr[p * n + xc + 1], po_ptr[p * n + yc + 1])
        count = torch.where(ground, (keys[at] == key).long(), high - low)
        count = torch.where(known_x | known_y, count, 0)
        count = torch.where(fresh, 0, count).clamp_max(K - 2)
        index = (low[:, None] + places).clamp_max(len(ps_obj) - 1)
        values = torch.where(known_x[:, None], ps_obj[index], po_sub[index])
        values = torch.where(ground[:, None], yc[:, None], values)
        number = head_ptr[p + 1] - head_ptr[p]
        mask = (places < (count + number)[:, None]).clone()
        return goals, count, number, values, mask

    start = torch.arange(b) % len(queries)
    seen = look(first(start), torch.ones(b, dtype=torch.bool))
    held = {"query": start, "depth": torch.zeros(b).long(), "names": torch.zeros(b).long()}

    def step() -> int:
        nonlocal seen
        goals, count, number, values, _ = seen
        total = count + number
        pick = (torch.rand(b) * total).long().clamp_max(K - 3)
        by_fact = pick < count
        value = values.gather(1, pick[:, None])[:, :, None]
        x, y = goals[:, 0, 1], goals[:, 0, 2]
        name = torch.where(x < n, y, x)[:, None, None]
        bind = by_fact[:, None, None] & (goals == name) & (torch.arange(3) > 0) & (name >= n)
        rest = torch.where(bind, value, goals)
        rule = by_head[
            (head_ptr[goals[:, 0, 0].clamp_min(0)] + pick - count).clamp(0, len(length) - 1)
        ]
        size = torch.where(by_fact, 0, length[rule])
        terms = body[rule][:, :, 1:]
        base = n + 2 + held["names"][:, None, None]
        made = torch.where(
            terms == n,
            x[:, None, None],
            torch.where(terms == n + 1, y[:, None, None], base + terms - n),
        )
        new = torch.cat([body[rule][:, :, :1], made], 2)
        shift = slots[None] - size[:, None]
        moved = rest.gather(1, (shift + 1).clamp(0, GOALS - 1)[:, :, None].expand(-1, -1, 3))
        left = (goals[:, :, 0] >= 0).sum(1) - 1 + size
        after = torch.where(
            (shift < 0)[:, :, None], new[:, slots.clamp_max(new.shape[1] - 1)], moved
        )
        after = torch.where((slots[None] < left[:, None])[:, :, None], after, -1)
        held["depth"] += 1
        held["names"] += torch.where(by_fact, 0, 3)
        proven = (left == 0) & (total > 0)
        stuck = (left > GOALS) | (total == 0)
        seen = look(after, torch.zeros(b, dtype=torch.bool))
        stuck |= ((seen[1] + seen[2]) == 0) & ~proven
        done = proven | stuck | (held["depth"] >= DEPTH)
        held["query"] = torch.where(done, (held["query"] + b) % len(queries), held["query"])
        held["depth"] = torch.where(done, 0, held["depth"])
        held["names"] = torch.where(done, 0, held["names"])
        seen = look(torch.where(done[:, None, None], first(held["query"]), after), done)
        return int(proven.sum())

    def run() -> tuple[int, int]:
        proven = sum(step() for _ in range(turns(given)))
        return turns(given) * b, proven

    return run


def summary(given: Given, result: tuple[Any, ...]) -> Mapping[str, Any]:
    steps, proven, *seconds = result
    return {"steps": steps, "proven": proven, "seconds": seconds[0] if seconds else None}


WAYS: tuple[tuple[str, Callable[[Given], Any], dict[int, int]], ...] = (
    (OURS, core, {1: 20_000, 16: 200_000, 256: 400_000, 4096: 400_000}),
    (TENSORDICT, tensordict, {1: 500, 16: 8_000, 256: 50_000, 4096: 400_000}),
    (LOOP, python_loop, {1: 20_000, 16: 40_000, 256: 100_000, 4096: 100_000}),
    (TORCH, torch_eager, {1: 500, 16: 8_000, 256: 50_000, 4096: 100_000}),
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
    report.target("core / torch eager, B=4096", _ratio(top, speed.get((TORCH, 4096))), least=20.0)
    at_256 = _ratio(speed.get((OURS, 256)), speed.get((TORCH, 256)))
    report.target("core / torch eager, B=256", at_256, least=20.0)
    report.target(
        "through TensorDict, B=4096: steps/s of processor time",
        speed.get((TENSORDICT, 4096)),
        least=2e5,
    )
    report.target(
        "core, B=16 / ParallelEnv", _ratio(speed.get((OURS, 16)), best_parallel), least=100.0
    )
    report.close()


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


if __name__ == "__main__":
    main()
