"""Proving as an environment: B queries at once, each step resolves the first goal of each.

An action picks one of the page of candidates that `obs["candidates"]` lists. Rows are
(kind, number, first, second), of these kinds:

    END   -1         -1       -1       give up: the query is not true; always action 0
    NEXT  -1         -1       -1       show the next page; always action 1, costs no depth
    FACT  predicate  subject  object   use this fact: the goal's variables become its entities
    RULE  rule       term     term     use this rule: the terms are the goal's, unified with it

A page holds K - 2 successors from action 2 on: first the fact of a ground goal, then rules in the
order of their file, then the facts of an open goal in ascending order. `n_valid` counts the
successors on all pages, so nothing is lost to K. Two bounds exist: `goals`, which leaves out rules
whose body has no room (counted in `cut`), and `depth`, which truncates. Successors that lead back
to a state of the same episode are left out as well, compared exactly.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.envs.api import ArraySpec, Obs, Step
from batchwright.envs.prover import slots as core
from batchwright.envs.prover.kernels import step as prover_kernels
from batchwright.envs.prover.kernels.plans import plan
from batchwright.envs.prover.layout import carve, table_of
from batchwright.envs.prover.settings import (
    ASKS,
    REWARDS,
    Ask,
    auto_batch,
    check_settings,
    checked,
    scheme,
)
from batchwright.errors import ConfigError, Mismatch
from batchwright.fingerprint import digest, digest_array
from batchwright.logic.facts import Facts
from batchwright.logic.prove.proofs import Shortest
from batchwright.logic.prove.search import FACT, RULE
from batchwright.logic.prove.unify import program, scratch_size
from batchwright.logic.rules import Rules
from batchwright.rng import key

__all__ = ["END", "FACT", "NEXT", "REWARDS", "RULE", "BatchedVecEnv"]

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

END, NEXT = core.END, core.NEXT

COUNTERS = ("begun", "invalid", "cut", "proven", "truncated", "finished")


class BatchedVecEnv:
    """`batch_size` proofs in one process, with masks, same-step reset and exact resume.

    Episode number n is a function of (seed, n) alone: which query, whether it is corrupted and
    how. Slots take the next number when they are free, so a run sees the same episodes whatever
    its batch size. Of `1 + negatives` episodes in a row the first asks a query, and the others
    ask the same query with another head or tail, in turn, that is not known to be true.

    `ask` makes queries open: "tail" asks p(h, X), "head" p(X, t), "both" one after the other.
    The facts that answer them directly are not offered, and the episode is right if the answer it
    finds is a fact. With `once`, every query is asked exactly once, in order; a slot that has
    nothing left to do shows an empty state, and its steps are not `valid`.

    The query's own fact is hidden for the whole proof, and so is its inverse where `inverse`
    declares one. An action outside the mask ends the episode as unproved and is counted.
    """

    def __init__(
        self,
        facts: Facts,
        rules: Rules,
        queries: ArrayLike,
        batch_size: int | Literal["auto"] = "auto",
        *,
        seed: int = 0,
        depth: int = 8,
        max_candidates: int = 64,
        goals: int = 6,
        negatives: int = 0,
        reward: str | int = "balanced",
        end_action: bool = True,
        ask: Ask = "truth",
        once: bool = False,
        labels: ArrayLike | None = None,
        known: Facts | None = None,
        inverse: Ints | None = None,
        teacher: Shortest | None = None,
        potential: Callable[[Ints], NDArray[Any]] | None = None,
        gamma: float = 0.99,
    ) -> None:
        self.facts, self.rules = facts, rules
        self.queries = checked(queries, facts, rules)
        self.labels = np.ones(len(self.queries), np.bool_)
        if labels is not None:
            self.labels = np.ascontiguousarray(labels, np.bool_)
        self._potential, self._gamma, self._teacher = potential, gamma, teacher
        check_settings(
            len(self.queries), self.labels, depth, max_candidates, goals, negatives, ask, once
        )
        if teacher is not None and len(teacher.lengths) != len(self.queries):
            raise Mismatch(
                f"the teacher knows {len(teacher.lengths):,} queries, and there are "
                f"{len(self.queries):,}; let it prove the same ones"
            )
        self._rewards = scheme(reward, negatives)
        self._program = program(facts, rules)
        self._plans = plan(rules.head, rules.body, rules.body_len, facts.num_entities)
        # Corruptions must not be true, and neither the facts nor the queries are to be missed.
        truths = facts
        if negatives and known is None:
            every = np.concatenate([facts.triples, self.queries[self.labels]])
            truths = Facts.of(every, facts)
        elif known is not None:
            truths = known
        self._truths = truths
        self.inverse = np.full(facts.num_predicates, -1, np.int32)
        if inverse is not None:
            self.inverse = np.ascontiguousarray(inverse, np.int32)
        self._config = np.zeros(core.CONFIG, np.int64)
        self._config[: core.CONFIG - 1] = (
            facts.num_entities,
            negatives,
            once,
            ASKS[ask],
            end_action,
            depth,
        )
        self._config[core.C_KEY] = np.uint64(key(seed, "prover")).astype(np.int64)
        self._shape = (goals, max_candidates, depth)
        self._num_envs = auto_batch(*self._shape) if batch_size == "auto" else int(batch_size)
        if self._num_envs < 1:
            raise ConfigError(f"batch_size is {batch_size}; at least one environment is needed")
        self._allocate()
        self.reset()

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def num_actions(self) -> int:
        return self._shape[1]

    @property
    def num_terms(self) -> int:
        """Rows that a table of terms needs: entities, then variables."""
        return self.facts.num_entities + 2 * self._shape[0] + 1

    @property
    def spec(self) -> Mapping[str, ArraySpec]:
        goals, width, _ = self._shape
        terms = max(self.num_terms, self.facts.num_predicates)
        rows = max(terms, len(self.rules), END + 1)
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        return {
            "goals": ArraySpec((goals, 3), int32, terms),
            "candidates": ArraySpec((width, 4), int32, rows),
            "mask": ArraySpec((width,), np.dtype(np.bool_)),
            "n_valid": ArraySpec((), int64, len(self.facts) + len(self.rules) + 1),
            "query": ArraySpec((3,), int32, terms),
        }

    @property
    def counters(self) -> dict[str, int]:
        """Episodes begun, proven, truncated and finished, invalid actions, successors cut."""
        return dict(zip(COUNTERS, self._counters.tolist(), strict=True))

    @property
    def active(self) -> Bools:
        """Which slots have an episode; with `once`, all false when every query was asked."""
        return np.asarray(self._slots[:, core.ACTIVE] != 0)

    @property
    def episode(self) -> NDArray[np.int64]:
        """The number of the episode in each slot, -1 for none: a key for anything random in it."""
        return self._slots[:, core.EPISODE].copy()

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        """Begin new episodes in the chosen slots, or start the whole stream from its beginning."""
        if where is None:
            self._counters[:] = 0
            chosen = np.ones(self._num_envs, np.bool_)
        else:
            chosen = np.asarray(where, np.bool_).reshape(self._num_envs)
        self._command(np.where(chosen, core.RESET, core.IDLE))
        self._lost[chosen] = False
        if self._potential is not None:
            self._phi[chosen] = self._values(self._obs["goals"])[chosen]
        return self._obs

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        """Resolve the first goal of every slot as its action says."""
        given = np.ascontiguousarray(actions, np.int64).reshape(self._num_envs)
        if self._teacher is not None:
            # Who leaves the teacher's path is not taught until the next episode.
            self._lost |= given != self.expert_actions()
        prover_kernels.advance(self._table, given, False)
        if self._teacher is not None:
            self._lost[self._terminated | self._truncated] = False
        if self._potential is not None:
            self._shape_rewards()
        ended = self._ended
        info = {
            "proven": ended[:, core.E_PROVEN] != 0,
            "invalid": ended[:, core.E_INVALID] != 0,
            "episode": ended[:, core.E_EPISODE],
            "query_index": ended[:, core.E_INDEX],
            "label": ended[:, core.E_LABEL] != 0,
            "answer": ended[:, core.E_ANSWER],
            "depth": ended[:, core.E_DEPTH],
            "steps": ended[:, core.E_STEPS],
            "cut": self._slots[:, core.CUT],
        }
        return Step(
            self._obs,
            self._reward,
            self._terminated,
            self._truncated,
            self._valid,
            self._final,
            info,
        )

    def random_actions(self, seed: int = 0) -> NDArray[np.int64]:
        """Uniform choices inside the mask, keyed by episode and step, not by slot."""
        out = np.empty(self._num_envs, np.int64)
        number = _random_key(seed)
        prover_kernels.random_actions(self._slots, self._obs["mask"], number, out)
        return out

    def expert_actions(self) -> NDArray[np.int64]:
        """What the teacher would do; -1 where it does not know, as after an action not its own.

        It follows its shortest proof, and gives up corrupted queries and those without a proof.
        """
        if self._teacher is None:
            raise ConfigError("this environment has no teacher; give it teacher=prove_all(...)")
        out = np.empty(self._num_envs, np.int64)
        prover_kernels.expert_actions(
            self._slots,
            self._obs["candidates"],
            self._obs["mask"],
            self._teacher.lengths,
            self._teacher.steps,
            self._lost,
            out,
        )
        return out

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on; an environment built alike goes on from it."""
        return {
            "program": self._fingerprint(),
            "slots": self._slots.copy(),
            "goals": self._obs["goals"].copy(),
            "query": self._obs["query"].copy(),
            "history": self._history.copy(),
            "counters": self._counters.copy(),
            "lost": self._lost.copy(),
            "phi": self._phi.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["program"] != self._fingerprint():
            raise Mismatch(
                "the saved environment had other facts, rules, queries or settings; "
                "build it as it was built then"
            )
        if np.shape(state["slots"]) != self._slots.shape:
            raise Mismatch(
                f"the saved environment has {len(state['slots']):,} slots, this one "
                f"{self._num_envs:,}; give it the same batch_size"
            )
        self._allocate()
        for name, array in (
            ("slots", self._slots),
            ("goals", self._obs["goals"]),
            ("query", self._obs["query"]),
            ("history", self._history),
            ("counters", self._counters),
            ("lost", self._lost),
            ("phi", self._phi),
        ):
            array[...] = np.asarray(state[name])
        # The buffers of observations are empty again, whatever they held then.
        self._slots[:, [core.FILLED, core.FINAL]] = 0
        self._command(np.full(self._num_envs, core.LOOK))

    def __repr__(self) -> str:
        goals, width, depth = self._shape
        sizes = f"K={width}, goals={goals}, depth={depth}"
        return f"BatchedVecEnv({self._num_envs:,} of {len(self.queries):,} queries, {sizes})"

    def _allocate(self) -> None:
        goals, width, depth = self._shape
        b = self._num_envs
        shown = [
            *(((b, goals, 3), np.int32), ((b, width, 4), np.int32), ((b, width), np.bool_)),
            *(((b,), np.int64), ((b, 3), np.int32)),
        ]
        # One state after the other, `depth + 1` for each slot.
        states = (b * (depth + 1), goals + 1, 3)
        (
            self._slots,
            self._ended,
            self._chosen,
            self._lists,
            self._reward,
            self._phi,
            flags,
            self._history,
            *arrays,
        ) = carve(
            ((b, core.TRACES + depth + 1), np.int64),
            ((b, core.ENDED_COLUMNS), np.int64),
            ((b, 4), np.int32),
            ((2, b), np.uint32),
            ((b,), np.float32),
            ((b,), np.float32),
            ((4, b), np.bool_),
            (states, np.int32),
            *shown,
            *shown,
        )
        self._terminated, self._truncated, self._valid, self._lost = flags
        self._order = np.zeros((2, prover_kernels.BLOCK), np.uint32)
        self._counters = np.zeros(core.COUNTERS, np.int64)
        self._scratch = np.zeros((2, scratch_size(goals, self.rules)), np.int32)
        names = ("goals", "candidates", "mask", "n_valid", "query")
        buffers: list[Obs] = [
            dict(zip(names, part, strict=True)) for part in (arrays[:5], arrays[5:])
        ]
        for array in (self._history, *arrays):
            if array.dtype == np.int32:
                array[...] = -1
        self._obs, self._final = buffers
        # What a terminated state shows: there is nothing left to do but to end.
        self._final["mask"][:, core.GIVE_UP] = True
        self._final["candidates"][:, core.GIVE_UP, 0] = END
        # The table holds addresses: its arrays must live as long.
        self._held = self._arrays()
        self._table = table_of(self._held)

    def _arrays(self) -> list[NDArray[Any]]:
        """What `advance` reads and writes, in its order."""
        obs, final = self._obs, self._final
        return [
            *(*self._program, self._plans, self._truths.ps_ptr, self._truths.ps_obj),
            *(self.inverse, self.queries, self.labels, self._config, self._rewards),
            *(self._slots, obs["goals"], self._history, self._counters, self._scratch),
            *(*self._lists, self._chosen, obs["candidates"], obs["mask"], obs["n_valid"]),
            *(obs["query"], self._reward, self._terminated, self._truncated, self._valid),
            *(self._ended, final["goals"], final["candidates"], final["mask"], final["n_valid"]),
            *(final["query"], self._order),
        ]

    def _command(self, actions: NDArray[np.int64]) -> None:
        """Do what RESET, LOOK and IDLE say."""
        prover_kernels.advance(self._table, actions, True)

    def _shape_rewards(self) -> None:
        """Add gamma * phi(next) - phi(now), phi of an end being 0: no best policy changes."""
        phi = self._values(self._obs["goals"])
        following = np.where(self._terminated, np.float32(0.0), phi)
        if self._truncated.any():
            cut = np.flatnonzero(self._truncated)
            following[cut] = self._values(self._final["goals"][cut])
        shaped = np.float32(self._gamma) * following - self._phi
        self._reward += np.where(self._valid, shaped, np.float32(0.0))
        self._phi[:] = phi

    def _values(self, goals: Ints) -> NDArray[np.float32]:
        """The potential of states: that of their first goal, as a triple with -1 for variables."""
        assert self._potential is not None
        first = goals[:, 0]
        terms = np.where(first[:, 1:] < self.facts.num_entities, first[:, 1:], -1)
        triples = np.stack([terms[:, 0], first[:, 0], terms[:, 1]], axis=1).astype(np.int32)
        return np.asarray(self._potential(triples), np.float32).reshape(len(triples))

    def _fingerprint(self) -> str:
        parts = [self.queries, self.labels, self._config, self._rewards, self.inverse]
        parts += [*self._program, self._truths.ps_ptr, self._truths.ps_obj]
        return digest(list(self._shape), [digest_array(part) for part in parts])


@lru_cache(maxsize=64)
def _random_key(seed: int) -> int:
    # Half of it, because kernels count in signed integers.
    return key(seed, "prover/random") >> 1
