"""A sample of the episodes of an evaluation, as proof trees that people read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.envs.api import Step
from batchwright.envs.prover.env import END, NEXT
from batchwright.files import write_atomic
from batchwright.lines import checked_lines
from batchwright.logic.prove.proofs import OPEN, Node, Proof
from batchwright.logic.rules import Rules
from batchwright.logic.vocab import Vocab
from batchwright.train.prover.program import Asked

__all__ = ["SHOWN", "Episodes"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

SHOWN = 16
"""Episodes of one evaluation that are kept, evenly spread over its queries."""


class Episodes:
    """Follows the episodes of some queries while they are asked once each.

    `rules` and `vocab` are those of the graph: the proofs are shown in its own names.
    """

    def __init__(self, asked: Asked, rules: Rules, vocab: Vocab, shown: int = SHOWN) -> None:
        self._asked, self._rules, self._vocab, self._shown = asked, rules, vocab, shown
        self._followed: set[int] = set()
        self._steps: dict[int, list[tuple[int, int, int, int]]] = {}
        self._pages: dict[int, int] = {}
        self._rows: list[dict[str, Any]] = []

    def follow(self, questions: Ints) -> None:
        """Begin: these are asked."""
        places = np.linspace(0, len(questions) - 1, min(self._shown, len(questions))).round()
        self._followed = {int(place) for place in places}
        self._steps, self._pages, self._rows = {}, {}, []

    def chosen(self, obs: Mapping[str, NDArray[Any]], actions: Longs) -> tuple[Ints, Ints]:
        """What the actions choose, and the queries: to be copied before the step writes anew."""
        rows = np.arange(len(actions))
        return obs["candidates"][rows, actions].copy(), obs["query"].copy()

    def took(self, chosen: tuple[Ints, Ints], step: Step, questions: Ints) -> None:
        """Take what was chosen as the next step of each episode that is followed."""
        for b in np.flatnonzero(step.valid).tolist():
            index = int(step.info["query_index"][b])
            if index not in self._followed:
                continue
            kind, *rest = chosen[0][b].tolist()
            taken = self._steps.setdefault(index, [])
            if kind == NEXT:
                self._pages[index] = self._pages.get(index, 0) + 1
            elif kind != END:
                taken.append((kind, *rest))
            if step.terminated[b] or step.truncated[b]:
                why = "gave up" if kind == END else "too deep" if step.truncated[b] else "stuck"
                self._end(b, index, chosen[1][b].tolist(), step, questions, why)

    def _end(
        self, b: int, index: int, query: list[int], step: Step, questions: Ints, why: str
    ) -> None:
        info, n = step.info, self._vocab.num_entities
        x, predicate, y = query
        atom = (predicate, *(term if 0 <= term < n else n for term in (x, y)))
        proved, answer = bool(info["proven"][b]), int(info["answer"][b])
        proof = Proof(atom, answer, tuple(self._steps[index]))  # type: ignore[arg-type]
        self._rows.append(
            {
                "env": b,
                "episode": index,
                "step": 1,
                "question": self._atom(atom),
                "proved": proved,
                "right": proved and answer == int(questions[index, 2]),
                "answer": self._vocab.term(answer) if proved else None,
                "expected": self._vocab.term(int(questions[index, 2])),
                "reward": float(step.reward[b]),
                "depth": int(info["depth"][b]),
                "pages": self._pages.get(index, 0),
                "why": "" if proved else why,
                "proof": self._plain(proof.tree(self._asked.rules)),
            }
        )

    def _atom(self, atom: tuple[int, ...]) -> str:
        """An atom of the program in the names of the graph; X is what is asked for."""
        kind, predicate = divmod(atom[0], self._vocab.num_predicates)
        n = self._vocab.num_entities
        x, y = ("X" if term == n else self._vocab.term(term) for term in atom[1:])
        return f"{self._vocab.predicates[predicate]}({f'{y}, {x}' if kind % 2 else f'{x}, {y}'})"

    def _plain(self, node: Node) -> dict[str, Any]:
        if node.rule == OPEN:
            by = "open"
        elif node.rule is not None:
            by = self._rules.names[int(self._asked.chains.origin[node.rule]) // 2]
        else:
            own = self._vocab.accepts(node.atom[0] % self._vocab.num_predicates)
            by = "embedding" if own else "fact"
        leaf = node.rule in (None, OPEN)
        return {
            "goal": self._atom(node.atom),
            "by": by if leaf else f"rule {by}",
            "children": [self._plain(child) for child in node.children],
        }

    def write(self, path: Path) -> None:
        """Write the episodes, one a line, in the order of their queries."""
        rows = sorted(self._rows, key=lambda row: row["episode"])
        lines = (json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") for row in rows)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, checked_lines(lines))
