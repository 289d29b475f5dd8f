"""The steps of the prover environment in torch as fast as torch can, for rules of one shape."""

from typing import Any

import numpy as np

from prover_peers import DEPTH, GOALS, Given, K, Run, turns

PLACES = K - 2
"""Candidates on a page: two actions are for giving up and turning it."""
LEVELS, CLOSED = GOALS + 2, 1
"""Numbers of goals that the tables know, and the trace of a candidate that is never offered."""


def torch_tuned(given: Given) -> Run:
    """All environments at once in whole-array operations of torch, with the same candidates."""
    import torch

    prover = TorchProver(given)

    @torch.inference_mode()
    def run() -> tuple[int, int]:
        proven = sum(int(prover.step(prover.pick()).sum()) for _ in range(turns(given)))
        return turns(given) * given.num_envs, proven

    return run


class TorchProver:
    """B proofs at once; `mask` and `values` [B, K - 2] say what each may do next.

    The query's own fact is never offered, nor a rule that makes too many goals, nor a candidate
    that leads to a state that its episode has been in, up to the names of variables: these are
    the candidates of our own environment. Left out: pages beyond K, inverses, facts for goals with
    two variables, and final observations; rules must have heads p(X, Y) and no p(Z, Z) in bodies.

    The first goal stands by itself, the others in a stack with the last one at the bottom: what
    a step leaves alone stays in place. A variable is called by its lowest place, so that equal
    states are equal numbers. Their sum with random weights is the trace of a state; as it is
    linear in the terms, no successor has to be made for its trace. Products often stand for
    `where`, which takes several times as long on a CPU.
    """

    def __init__(self, given: Given) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.torch, self.b = torch, given.num_envs
        self.n, self.preds = given.graph.vocab.num_entities, given.graph.facts.num_predicates
        self.longest = int(given.rules.body_len.max())
        self.most = int(np.diff(given.rules.head_ptr).max())
        height = 3 * (GOALS + self.longest - 1)
        self.weights = torch.randint(-(2**62), 2**62, (height,))
        self._index_rules(given.rules)
        # Variables are numbered after the entities.
        self.stride = self.n + height
        self._index_facts(given.graph.facts, given.graph.train.astype(np.int64).T)
        self.prefixes = torch.arange(PLACES) < torch.arange(PLACES + 1)[:, None]
        self.minus = torch.full((self.b * (PLACES + self.most),), -1, dtype=torch.int32)
        self.starts = torch.arange(self.b, dtype=torch.int32) * PLACES
        self.offsets = torch.arange(3 * self.longest)[:, None]

        def zeros(*shape: int, dtype: Any = torch.int32) -> Any:
            return torch.zeros(*shape, dtype=dtype)

        self.first, self.rest = zeros(3, self.b), zeros(height, self.b) - 1
        self.sources, self.values = zeros(4, self.b), zeros(self.b, PLACES)
        self.bound, self.local = zeros(height, self.b) > 0, zeros(2, self.b) > 0
        self.depth, self.left, self.top, self.name = zeros(4, self.b)
        self.count, self.total, self.open = zeros(3, self.b)
        # Of the last states in turn; 0 where they were those of another episode.
        self.visited, self.at = zeros(DEPTH + 2, self.b, dtype=torch.int64) + CLOSED, 0
        self.traces = self.visited[:-1]
        self.after_rule = zeros(self.most, self.b, dtype=torch.int64)
        self.after_fact = zeros(2, self.b, dtype=torch.int64)
        self.held = zeros(self.asked.shape[1], self.b)
        self.query = torch.arange(-self.b, 0, dtype=torch.int32) % self.num_queries
        self.mask = self._begin(self.left == 0, torch.zeros(0, dtype=torch.int64))

    def _tensor(self, array: Any, dtype: Any = np.int32) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(array, dtype))

    def _index_facts(self, facts: Any, queries: Any) -> None:
        """Facts by (predicate, subject), then by (predicate, object), with none for variables."""
        n = self.n
        spans = np.zeros((2, 2, self.preds, self.stride), np.int64)
        for i, ptr in enumerate((facts.ps_ptr, facts.po_ptr)):
            spans[0, i, :, :n] = ptr[:-1].reshape(-1, n) + i * len(facts.ps_obj)
            spans[1, i, :, :n] = np.diff(ptr).reshape(-1, n)
        self.low, self.size = self._tensor(spans.reshape(2, -1))
        self.entities = self._tensor(np.concatenate([facts.ps_obj, facts.po_sub]))
        h, p, t = facts.triples.astype(np.int64).T
        keys, turned = (p * n + h) * n + t, np.sort((p * n + t) * n + h)
        # One more at the end, so that a search never leaves them.
        self.keys = self._tensor(np.append(keys, 2**62), np.int64)
        h, p, t = queries
        by_subject = np.searchsorted(keys, (p * n + h) * n + t)
        by_object = np.searchsorted(turned, (p * n + t) * n + h) + len(keys)
        # A query that is no fact has nothing to hide: no goal has its predicate.
        hidden = np.where(self.keys.numpy()[by_subject] == (p * n + h) * n + t, p, -1)
        number = np.minimum(self.number.numpy()[p], PLACES)
        self.asked = self._tensor(
            np.stack([p, h, t, number, hidden, by_subject, by_object, 0 * p], 1)
        )
        self.num_queries = len(h)
        root = self.asked[:, :3].T.long()
        # No goals at all have this trace, and not 0.
        nothing = int(self.torch.randint(1, 2**62, ()))
        self.roots = ((root + 1) * self.weights[:3, None]).sum(0) + nothing
        self.root_rules = self._after_rules(root, root[1:] < 0, root[0] * 0 + 1, nothing)
        # p(a, b) :- p(b, a) leads from p(a, a) to itself.
        self.shut = self.root_rules == self.roots
        self.asked[:, 7] = self.shut.any(0)

    def _index_rules(self, rules: Any) -> None:
        """A column for each rule of each predicate; column 0 is for facts, which have no body."""
        n, tall = self.n, 3 * self.longest
        self.number = self._tensor(np.diff(rules.head_ptr))
        # How many goals more, what x and y are called if they are new, then the body.
        columns = np.full((3 + tall, 1 + self.preds * self.most), -1)
        # What is added to a number of the body: nothing, x, y or the height of the stack.
        sources = np.zeros((tall, columns.shape[1]), np.int64)
        # The trace after rule j is linear in x and y, for each predicate, height and kind of goal:
        # which of its arguments are variables that stand nowhere else. Junk where no rule is; the
        # last part says where there would be too many goals.
        weights = self.weights.tolist()
        shape = (4, self.most, self.preds, LEVELS, 4)
        linear = np.zeros(shape, np.int64)
        linear[0] = self.torch.randint(-(2**62), 2**62, shape[1:]).numpy()
        for p in range(self.preds):
            for j, r in enumerate(rules.by_head[rules.head_ptr[p] : rules.head_ptr[p + 1]]):
                head, atoms = rules.clause(int(r))
                assert tuple(head[1:]) == (n, n + 1), "heads are p(X, Y)"
                assert all(a < n or a != b for _, a, b in atoms), "no goal becomes p(Z, Z)"
                column, line = 1 + p * self.most + j, [v for atom in atoms[::-1] for v in atom]
                called = {v: n + i for i, v in reversed([*enumerate(line)]) if i % 3 and v >= n}
                names = [called.get(n, 0), called.get(n + 1, 0)]
                columns[:3, column] = len(atoms) - 1, *names
                for k, v in enumerate(line):
                    variable = k % 3 > 0 and v >= n
                    sources[k, column] = min(v - n + 1, 3) if variable else 0
                    columns[3 + k, column] = (v > n + 1) * called[v] if variable else v
                for left, kind in np.ndindex(LEVELS, 4):
                    terms = [0, 0, 0, left + len(atoms) - 1 > GOALS]
                    if not 0 < left <= GOALS:
                        continue
                    top = 3 * left - 3
                    for k in range(len(line)):
                        w, source = weights[top + k], int(sources[k, column])
                        terms[0] += w * (int(columns[3 + k, column]) + 1)
                        if source == 3:
                            terms[0] += w * top
                        elif source and kind >> (source - 1) & 1:
                            terms[0] += w * (names[source - 1] + top)
                        elif source:
                            terms[source] += w
                    linear[:, j, p, left, kind] = [(t + 2**63) % 2**64 - 2**63 for t in terms]
        self.columns, self.body_sources = self._tensor(columns), self._tensor(sources, np.int64)
        self.linear = self._tensor(linear.reshape(4 * self.most, -1), np.int64)

    def _after_rules(self, first: Any, local: Any, left: Any, rest: Any) -> Any:
        """The traces [most, B] of the states that rules lead to, `CLOSED` for too many goals."""
        kind = self.torch.add(first[0] * (4 * LEVELS), left, alpha=4)
        kind = kind.add_(local[0]).add_(local[1], alpha=2).clamp_min_(0)
        table = self.linear.gather(1, kind.expand(len(self.linear), -1))
        after, by_x, by_y, too_many = table.chunk(4)
        after.addcmul_(by_x, first[1]).addcmul_(by_y, first[2]).add_(rest)
        return after.masked_fill_(too_many > 0, CLOSED)

    def pick(self) -> Any:
        """Uniform choices inside the mask."""
        torch = self.torch
        pick = (torch.rand(self.b) * self.open).int()
        # Few masks have holes: there the pick-th open place is looked for.
        rows = ((self.open < self.total) & (self.open > 0)).nonzero().view(-1)
        upto = self.mask.index_select(0, rows).cumsum(1, dtype=torch.uint8)
        place = (upto <= pick.index_select(0, rows)[:, None]).sum(1, dtype=torch.int32)
        return pick.index_copy_(0, rows, place)

    def step(self, pick: Any) -> Any:
        """Resolve the first goals, begin anew where an episode ended; which were proven."""
        there = self.open > 0
        self._resolve(pick)
        self.depth += 1
        empty = self.left == 0
        ended = empty | (self.depth >= DEPTH) | ~there
        rows, closed = self._closed(*self._look(ended))
        self.open = self.total.index_add(0, rows, self.minus[: len(rows)])
        self.mask = self._begin(ended | (self.open <= 0), closed)
        return empty & there

    def _resolve(self, pick: Any) -> None:
        """Replace the first goal by the body of a rule, or its variable by that of a fact."""
        torch, p, top = self.torch, self.first[0], self.top
        rule = pick - self.count
        fact = rule < 0
        value = self.values.view(-1).index_select(0, self.starts + pick)
        start, slope = self.after_fact.unbind(0)
        by_rule = self.after_rule.gather(0, rule.clamp_min(0).long()[None])[0]
        self.at = (self.at + 1) % len(self.traces)
        torch.where(fact, start + slope * value, by_rule, out=self.traces[self.at])
        self.rest += self.bound * ((value - self.name) * fact)
        column = ((p * self.most + rule + 1) * ~fact).long()
        table = self.columns.gather(1, column.expand(len(self.columns), -1))
        sources = self.body_sources.gather(1, column.expand(len(self.body_sources), -1))
        self.sources[3] = top
        torch.where(self.local, table[1:3] + top, self.first[1:], out=self.sources[1:3])
        body = self.sources.gather(0, sources)
        body += table[3:]
        self.rest.scatter_(0, top + self.offsets, body)
        self.left += table[0]

    def _look(self, ended: Any) -> tuple[Any, Any, Any]:
        """Take out the first goals and write the facts for them to `values`."""
        torch, n, rest = self.torch, self.n, self.rest
        self.top = top = 3 * self.left - 3
        self.spot = top.clamp_min(0) + self.offsets[:3]
        self.first = rest.gather(0, self.spot)
        rest.scatter_(0, self.spot, -1)
        p, x, y = self.first.unbind(0)
        variable, self.local = self.first[1:] >= n, self.first[1:] >= top + n
        open_x, open_y = variable.unbind(0)
        row = torch.where(open_x, y + self.preds * self.stride, x)
        row = (row + p * self.stride).clamp_min_(0)
        going = ~ended
        low, count = self.low.index_select(0, row), self.size.index_select(0, row) * going
        fixed = ~(open_x | open_y)
        ground = ((count > 0) & fixed).nonzero().view(-1)
        gp, gx, gy = self.first.index_select(1, ground).long().unbind(0)
        key = (gp * n + gx) * n + gy
        at = torch.searchsorted(self.keys, key, out_int32=True)
        low.index_copy_(0, ground, at)
        count.index_copy_(0, ground, (self.keys.index_select(0, at) == key).int())
        hidden, by_subject, by_object = self.held[4:7].unbind(0)
        same_x, same_y = ((self.first[1:] == self.held[1:3]) | variable).unbind(0)
        hides = (p == hidden) & same_x & same_y & (count > 0)
        count -= hides.int()
        count.clamp_max_(PLACES)
        rows = torch.repeat_interleave(count)
        skipped = self.starts - count.cumsum(0, dtype=torch.int32) + count
        to = skipped.index_select(0, rows) + torch.arange(len(rows))
        source = (low - self.starts).index_select(0, rows) + to
        # Facts from the hidden one on move up by one.
        hole = torch.where(hides, torch.where(open_x, by_object, by_subject), 2**30)
        source += source >= hole.index_select(0, rows)
        found = self.entities.index_select(0, source)
        self.values.view(-1).index_copy_(0, to, found)
        # Entities are never in the stack under such a number.
        self.name = torch.maximum(x, y).add_(fixed, alpha=2**24)
        self.bound = rest == self.name
        self.count = count
        number = self.number.index_select(0, p.clamp_min(0))
        self.total = (count + number).clamp_max_(PLACES) * going
        return rows, to, found

    def _closed(self, rows: Any, to: Any, found: Any) -> tuple[Any, Any]:
        """The rows and places of candidates that lead back or make too many goals."""
        torch = self.torch
        first = self.first.long()
        weights = self.weights.take(self.spot)
        rest = self.traces[self.at] - ((first + 1) * weights).sum(0)
        slope = (self.bound * self.weights[:, None]).sum(0)
        self.after_fact = torch.stack([rest - slope * self.name, slope])
        self.after_rule = self._after_rules(first, self.local, self.left, rest)
        start, slope = self.after_fact.index_select(1, rows).unbind(0)
        back = self.traces.index_select(1, rows) == start + slope * found
        back = back.nonzero()[:, 1]
        rule, _, by_rule = (self.after_rule[:, None] == self.visited).nonzero().unbind(1)
        place = self.count.index_select(0, by_rule) + rule
        keep = (place < PLACES).nonzero().view(-1)
        by_rule, place = by_rule.index_select(0, keep), place.index_select(0, keep)
        by_fact, to = rows.index_select(0, back), to.index_select(0, back)
        return torch.cat([by_fact, by_rule]), torch.cat([to, by_rule * PLACES + place])

    def _begin(self, done: Any, closed: Any) -> Any:
        """Begin the next query where `done`; the mask, with these places closed elsewhere."""
        begun, keep = done.nonzero().view(-1), ~done
        query = (self.query.index_select(0, begun) + self.b) % self.num_queries
        self.query.index_copy_(0, begun, query)
        asked = self.asked.index_select(0, query).t()
        self.rest |= -done.int()
        self.first.index_copy_(1, begun, asked[:3])
        self.held.index_copy_(1, begun, asked)
        self.local &= keep
        self.left.masked_fill_(done, 1)
        self.depth *= keep
        self.count *= keep
        self.top *= keep
        mask = self.prefixes.index_select(0, self.total)
        self.total.index_copy_(0, begun, asked[3])
        mask.view(-1).index_fill_(0, closed, False)
        mask.index_copy_(0, begun, self.prefixes.index_select(0, asked[3]))
        self.open.index_copy_(0, begun, asked[3])
        self.traces *= keep
        self.traces[self.at].index_copy_(0, begun, self.roots.index_select(0, query))
        self.after_rule.index_copy_(1, begun, self.root_rules.index_select(1, query))
        shut = asked[7].nonzero().view(-1)
        if len(shut):
            rule, at = self.shut.index_select(1, query[shut]).nonzero().unbind(1)
            rows = begun[shut[at]]
            self.open.index_add_(0, rows, self.minus[: len(rows)])
            mask.view(-1).index_fill_(0, rows * PLACES + rule, False)
        return mask
