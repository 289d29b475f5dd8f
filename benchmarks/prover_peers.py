"""The steps of the prover environment by other means: a loop over dictionaries, plain torch."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

GOALS, K, DEPTH = 6, 64, 8
Run = Callable[[], tuple[int, int]]
"""Makes the steps; gives their number and how many proofs came of them."""


class Given(NamedTuple):
    graph: Any
    rules: Any
    num_envs: int
    steps: int
    """Steps of all environments together, at least."""


def turns(given: Given) -> int:
    return max(2, -(-given.steps // given.num_envs))


def python_loop(given: Given) -> Run:
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


def torch_eager(given: Given) -> Run:
    """All environments at once in whole-array operations of torch, plainly written.

    Left out: hiding the query after the root, visited states, pages beyond K, inverses, goals with
    two variables, final observations.
    """
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
    places, slots, columns = torch.arange(K - 2), torch.arange(GOALS), torch.arange(3)

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
        count = torch.where(fresh, 0, count)
        at = low[:, None] + places
        count = count.clamp_max(K - 2)
        at = at.clamp_max(len(ps_obj) - 1)
        values = torch.where(known_x[:, None], ps_obj[at], po_sub[at])
        values = torch.where(ground[:, None], yc[:, None], values)
        number = head_ptr[p + 1] - head_ptr[p]
        mask = (places < (count + number)[:, None]).clone()
        return goals, count, number, values, mask

    def derive(seen: tuple[Any, ...], names: Any, pick: Any) -> tuple[Any, Any]:
        """The goals after the candidate of each environment, and how many there are."""
        goals, count, _, values, _ = seen
        by_fact = pick < count
        value = values.gather(1, pick[:, None])[:, :, None]
        x, y = goals[:, 0, 1, None, None], goals[:, 0, 2, None, None]
        name = torch.where(x < n, y, x)
        bind = by_fact[:, None, None] & (goals == name) & (columns > 0) & (name >= n)
        rest = torch.where(bind, value, goals)
        at = head_ptr[goals[:, 0, 0].clamp_min(0)] + pick - count
        rule = by_head[at.clamp(0, len(length) - 1)]
        size = torch.where(by_fact, 0, length[rule])
        chosen = body[rule]
        terms = chosen[..., 1:]
        base = n + 2 + names[:, None, None]
        made = torch.where(terms == n, x, torch.where(terms == n + 1, y, base + terms - n))
        new = torch.cat([chosen[..., :1], made], -1)[:, slots.clamp_max(body.shape[1] - 1)]
        shift = (slots - size[:, None])[..., None]
        moved = rest.gather(1, (shift + 1).clamp(0, GOALS - 1).expand(-1, -1, 3))
        left = (goals[:, :, 0] >= 0).sum(1) - 1 + size
        after = torch.where(shift < 0, new, moved)
        return torch.where((slots < left[:, None])[..., None], after, -1), left

    start = torch.arange(b) % len(queries)
    fresh = torch.ones(b, dtype=torch.bool)
    seen = look(first(start), fresh)
    held = {"query": start, "depth": torch.zeros(b).long(), "names": torch.zeros(b).long()}

    def step() -> int:
        nonlocal seen
        total = seen[1] + seen[2]
        pick, there = (torch.rand(b) * total).long().clamp_max(K - 3), total > 0
        after, left = derive(seen, held["names"], pick)
        held["depth"] += 1
        held["names"] += torch.where(pick < seen[1], 0, 3)
        proven = (left == 0) & there
        stuck = (left > GOALS) | ~there
        seen = look(after, ~fresh)
        stuck |= ((seen[1] + seen[2]) == 0) & ~proven
        done = proven | stuck | (held["depth"] >= DEPTH)
        held["query"] = torch.where(done, (held["query"] + b) % len(queries), held["query"])
        held["depth"] = torch.where(done, 0, held["depth"])
        held["names"] = torch.where(done, 0, held["names"])
        shown = torch.where(done[:, None, None], first(held["query"]), after)
        seen = look(shown, done)
        return int(proven.sum())

    def run() -> tuple[int, int]:
        proven = sum(step() for _ in range(turns(given)))
        return turns(given) * b, proven

    return run
