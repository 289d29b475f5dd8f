"""The batched prover environment equals a plain one, whatever its batch size and whoever acts."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.envs import BatchedVecEnv, Env, Step
from batchwright.envs.prover import END, NEXT, REWARDS
from batchwright.errors import BadProgram, ConfigError, Mismatch
from batchwright.logic.facts import Facts
from batchwright.logic.loaders import load_graph
from batchwright.logic.prove import prove_all
from batchwright.logic.rules import Rules, parse_rules
from batchwright.logic.vocab import Vocab

sys.path.insert(0, str(Path(__file__).parent))

from plain_prover import Atom, Row, State, canonical, programs, successors
from test_prove import FAMILY, FAMILY_RULES

Program = tuple[Vocab, list[Atom], Rules]
OBS = ("goals", "candidates", "mask", "n_valid", "query")


class PlainEpisode:
    """One episode, written for reading: lists, tuples and the textbook's unification."""

    def __init__(self, env: BatchedVecEnv, triples: set[Atom], b: int, label: bool) -> None:
        self.env, self.triples, self.label = env, triples, label
        self.end_action = bool(env._config[4])
        self.n = env.facts.num_entities
        # The open argument of a query is shown as -1; what it hides is asked of the stream.
        h, p, t = (
            env.queries[env._slots[b, 5]].tolist()
            if -1 in env._obs["query"][b]
            else (env._obs["query"][b].tolist())
        )
        self.target = (h, p, t)
        asked = env._obs["query"][b].tolist()
        self.side = 1 if asked[0] < 0 else 2 if asked[2] < 0 else 0
        inverse = int(env.inverse[p])
        self.hidden = {(h, p, t)} | ({(t, inverse, h)} if inverse >= 0 else set())
        goal = (p, self.n if self.side == 1 else h, self.n if self.side == 2 else t)
        self.state: State = canonical([goal], self.n if self.side else t, self.n)
        self.visited = [self.state]
        self.page = 0

    def options(self) -> tuple[list[tuple[Row, State]], int]:
        """What may follow, and how many successors have no room."""
        goals = self.env.spec["goals"].shape[0]
        every = list(successors(self.state, self.triples, self.env.rules, self.n, self.hidden))
        if self.side and len(self.visited) == 1:
            every = [option for option in every if option[0][0] != 0]
        fitting = [option for option in every if len(option[1][0]) <= goals]
        return (
            [option for option in fitting if option[1] not in self.visited],
            len(every) - len(fitting),
        )

    def check(self, obs: dict[str, Any], b: int, final: bool = False) -> None:
        end_action = self.end_action or final
        options, _ = self.options()
        size = self.env.num_actions - 2
        page = options[self.page * size : (self.page + 1) * size]
        assert obs["n_valid"][b] == len(options)
        goals = [list(atom) for atom in self.state[0]]
        assert obs["goals"][b, : len(goals)].tolist() == goals
        assert (obs["goals"][b, len(goals) :] == -1).all()
        rows = obs["candidates"][b]
        assert rows[2 : len(page) + 2].tolist() == [list(row) for row, _ in page]
        assert (rows[len(page) + 2 :] == -1).all()
        more = len(options) > (self.page + 1) * size
        mask = [True] * len(page) + [False] * (size - len(page))
        ends = end_action or not options
        assert obs["mask"][b].tolist() == [ends, more, *mask]
        assert rows[:2].tolist() == [
            [END if ends else -1, *[-1] * 3],
            [NEXT if more else -1, *[-1] * 3],
        ]

    def act(self, action: int, depth: int) -> tuple[str, bool, bool]:
        """How the episode stands: '' or a reason to end; whether it ended, and was truncated."""
        options, _ = self.options()
        size = self.env.num_actions - 2
        here = options[self.page * size : (self.page + 1) * size]
        if action == 1 and len(options) > (self.page + 1) * size:
            self.page += 1
            return "", False, False
        if not 2 <= action < len(here) + 2:
            offered = self.end_action or not options
            return "end" if action == 0 and offered else "invalid", True, False
        self.state = here[action - 2][1]
        self.visited.append(self.state)
        self.page = 0
        if not self.state[0]:
            return "proven", True, False
        options, cut = self.options()
        if not options:
            return "stuck", cut == 0, cut > 0
        return "", False, len(self.visited) > depth

    def reward(self, reason: str, scheme: tuple[float, ...], negatives: int) -> float:
        right = self.label
        if reason == "proven" and self.side:
            answer = self.state[1]
            h, p, t = self.target
            fact = (answer, p, t) if self.side == 1 else (h, p, answer)
            right = answer < self.n and (fact == self.target or fact in self.triples)
        if reason == "proven":
            return scheme[0] if right else scheme[2]
        if right:
            return scheme[1]
        return scheme[3] / max(negatives, 1) + scheme[4] * (reason == "end")


@settings(max_examples=80, deadline=None)
@given(programs(), st.data())
def test_the_kernels_do_what_plain_python_does(program: Program, data: st.DataObject) -> None:
    vocab, triples, rules = program
    entity, predicate = (
        st.integers(0, vocab.num_entities - 1),
        st.integers(0, vocab.num_predicates - 1),
    )
    queries = data.draw(
        st.lists(st.tuples(entity, predicate, entity), min_size=1, max_size=4), "queries"
    )
    ask = data.draw(st.sampled_from(["truth", "truth", "head", "tail", "both"]), "ask")
    negatives = data.draw(st.integers(0, 2), "negatives") if ask == "truth" else 0
    depth = data.draw(st.integers(1, 5), "depth")
    end_action = data.draw(st.booleans(), "end_action")
    inverse = data.draw(
        st.lists(
            st.integers(-1, vocab.num_predicates - 1),
            min_size=vocab.num_predicates,
            max_size=vocab.num_predicates,
        ),
        "inverse",
    )
    env = BatchedVecEnv(
        Facts.of(triples, vocab),
        rules,
        queries,
        data.draw(st.integers(1, 3), "batch_size"),
        seed=data.draw(st.integers(0, 99), "seed"),
        depth=depth,
        goals=data.draw(st.integers(1, 5), "goals"),
        max_candidates=data.draw(st.integers(3, 8), "K"),
        negatives=negatives,
        ask=ask,
        end_action=end_action,
        reward="balanced_end",
        inverse=np.array(inverse, np.int32),
    )
    known = set(triples) | set(queries)

    def label(b: int) -> bool:
        return bool(ask != "truth" or tuple(env._obs["query"][b].tolist()) in known)

    plain = [PlainEpisode(env, set(triples), b, label(b)) for b in range(env.num_envs)]
    for number in range(12):
        for b in range(env.num_envs):
            plain[b].check(env._obs, b)
        actions = env.random_actions(number)
        if data.draw(st.integers(0, 5), "wild") == 0:
            actions = np.array(
                data.draw(
                    st.lists(st.integers(-9, 9), min_size=env.num_envs, max_size=env.num_envs),
                    "actions",
                )
            )
        step = env.step(actions)
        for b in range(env.num_envs):
            reason, over, stopped = plain[b].act(int(actions[b]), depth)
            stopped = stopped and not over
            assert (step.terminated[b], step.truncated[b]) == (over, stopped)
            expected = plain[b].reward(reason, REWARDS["balanced_end"], negatives) if over else 0.0
            assert step.reward[b] == pytest.approx(expected)
            assert step.info["proven"][b] == (reason == "proven")
            assert step.valid[b]
            if stopped:
                plain[b].check(step.final_obs, b, final=True)
            if over or stopped:
                goals = [list(atom) for atom in plain[b].state[0]]
                assert step.final_obs["goals"][b, : len(goals)].tolist() == goals
                plain[b] = PlainEpisode(env, set(triples), b, label(b))
