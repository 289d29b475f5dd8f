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

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.envs.api import ArraySpec, Obs, Step, as_actions, require_state
from batchwright.envs.prover import layout
from batchwright.envs.prover.blocks import Block, aligned, pack, view
from batchwright.envs.prover.kernels import step as prover_kernels
from batchwright.envs.prover.kernels.plans import plan
from batchwright.envs.prover.layout import Memory, Task
from batchwright.envs.prover.settings import (
    ASKS,
    CODES,
    REWARDS,
    Ask,
    Ended,
    auto_batch,
    check_settings,
    checked,
    inverses,
    scheme,
    truths,
)
from batchwright.errors import ConfigError, Mismatch, one_line
from batchwright.fingerprint import digest, digest_array
from batchwright.logic.facts import Facts
from batchwright.logic.prove.proofs import Shortest
from batchwright.logic.prove.search import FACT, RULE
from batchwright.logic.prove.unify import program, scratch_size
from batchwright.logic.rules import Rules
from batchwright.rng import key

__all__ = ["END", "FACT", "NEXT", "REWARDS", "RULE", "ProverEnv"]

F = TypeVar("F", bound=Callable[..., Any])

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

END, NEXT = layout.END, layout.NEXT

COUNTERS = ("begun", "invalid", "cut", "proven", "truncated", "finished")

ENDED = {
    "proven": layout.E_PROVEN,
    "invalid": layout.E_INVALID,
    "episode_index": layout.E_EPISODE,
    "query_index": layout.E_INDEX,
    "label": layout.E_LABEL,
    "answer": layout.E_ANSWER,
    "depth": layout.E_DEPTH,
    "steps": layout.E_STEPS,
}
"""The columns that `Step.info` shows of the episode that was acted in."""
FLAGS = ("proven", "invalid", "label")

STATE = ("slots", "goals", "query", "history", "counters", "lost", "phi")
"""The arrays of `Memory` that the next step depends on."""


def _alone(method: F) -> F:
    """Refuse a second thread: kernels run without the interpreter's lock, on the same arrays."""

    @functools.wraps(method)
    def guarded(self: "ProverEnv", *args: Any, **kwargs: Any) -> Any:
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                "this environment is in use by another thread; give each thread a copy of its own"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy.release()

    return cast(F, guarded)


class ProverEnv:
    """`batch_size` proofs in one process, with masks, same-step reset and exact resume.

    Episode number n is a function of (seed, n) alone: which query, whether it is corrupted and
    how. Slots take the next number when they are free, so a run has the same episodes whatever
    its batch size. Of `1 + negatives` episodes in a row the first is a query, and the others are
    the same query with a corrupted head or tail, alternately, that is not known to be true.

    `ask` makes queries open: "tail" asks p(h, X), "head" p(X, t), "both" alternates. The facts
    that answer them directly are not offered, and the episode is right if the answer it finds is
    a fact. With `once`, every query is asked exactly once, in order; a slot that has nothing left
    to do shows an empty state, and its steps are not `valid`.

    The query's own fact is hidden for the whole proof, and so is its inverse where `inverse`
    declares one. An action outside the mask ends the episode as unproved and is counted. Copies
    and pickles are environments of their own, at the same place in the same episodes.

    `reward` is a name of `REWARDS`, or a function from the episodes that ended in a step, as
    `Ended`, to their rewards.

    `batch_size="auto"` leaves room in memory for PPO with rollouts of `rollout` steps; 0: for the
    environment alone.
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
        reward: str | int | Callable[[Ended], ArrayLike] = "balanced",
        end_action: bool = True,
        ask: Ask = "truth",
        once: bool = False,
        labels: ArrayLike | None = None,
        known: Facts | None = None,
        inverse: Ints | None = None,
        teacher: Shortest | None = None,
        potential: Callable[[Ints], NDArray[Any]] | None = None,
        gamma: float = 0.99,
        rollout: int = 128,
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
                f"the teacher has proofs for {len(teacher.lengths):,} queries, not for the "
                f"{len(self.queries):,} of this environment; call prove_all on the same ones"
            )
        self._rewards = CODES if callable(reward) else scheme(reward, negatives)
        self._reward = reward if callable(reward) else None
        self._truths = truths(facts, self.queries[self.labels], negatives, known)
        self.inverse = inverses(facts, inverse)
        self._config = np.zeros(layout.CONFIG, np.int64)
        self._config[: layout.CONFIG - 1] = (
            facts.num_entities,
            negatives,
            once,
            ASKS[ask],
            end_action,
            depth,
        )
        self._config[layout.C_KEY] = np.uint64(key(seed, "prover")).astype(np.int64)
        self._shape = (goals, max_candidates, depth)
        if batch_size == "auto":
            batch_size = auto_batch(*self._shape, rollout)
        self._num_envs = batch_size
        if not isinstance(self._num_envs, int | np.integer) or self._num_envs < 1:
            raise ConfigError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        if not 0 <= gamma <= 1:
            raise ConfigError(f"gamma must be from 0 to 1, got {gamma}")
        self._busy = threading.RLock()
        self._task = self._packed()
        self._memory = self._allocated()
        self._open()
        self.reset()

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def num_actions(self) -> int:
        return self._shape[1]

    @property
    def num_predicates(self) -> int:
        return self.facts.num_predicates

    @property
    def num_rules(self) -> int:
        return len(self.rules)

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
        """Episodes begun, proven, truncated and finished; invalid actions; successors cut."""
        return dict(zip(COUNTERS, self._own.counters.tolist(), strict=True))

    @property
    def active(self) -> Bools:
        """Which slots have an episode; with `once`, all false when every query was asked."""
        return np.asarray(self._own.slots[:, layout.ACTIVE] != 0)

    @property
    def observation(self) -> Obs:
        """What every slot shows now, as `reset` and `step` return it."""
        return self._obs

    @property
    def filled(self) -> NDArray[np.int64]:
        """[B]: in each row of the candidates shown now all from this one on are padding."""
        return np.maximum(self._own.slots[:, layout.FILLED], layout.FIRST)

    @property
    def episode(self) -> NDArray[np.int64]:
        """The number of the episode in each slot, -1 for none."""
        return self._own.slots[:, layout.EPISODE].copy()

    @_alone
    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        """Begin new episodes in the chosen slots, or start the whole stream from its beginning."""
        own = self._own
        if where is None:
            own.counters[:] = 0
            chosen = np.ones(self._num_envs, np.bool_)
        else:
            chosen = np.asarray(where, np.bool_).reshape(self._num_envs)
        self._command(np.where(chosen, layout.RESET, layout.IDLE))
        own.lost[chosen] = False
        if self._potential is not None:
            own.phi[chosen] = self._values(own.goals)[chosen]
        return self._obs

    @_alone
    def set_seed(self, seed: int) -> None:
        """What the next `reset` begins is the stream of episodes of this seed."""
        self._config[layout.C_KEY] = np.uint64(key(seed, "prover")).astype(np.int64)
        view(Task, self._task).config[...] = self._config

    @_alone
    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        """Resolve the first goal of every slot as its action says."""
        own = self._own
        given = as_actions(actions, self._num_envs)
        if self._teacher is not None:
            # An episode that leaves the teacher's path has no expert action until it ends.
            own.lost[:] |= given != self.expert_actions()
        prover_kernels.advance(self._task, self._memory, given, False)
        if self._teacher is not None:
            own.lost[own.terminated | own.truncated] = False
        if self._reward is not None:
            self._call_reward()
        if self._potential is not None:
            self._shape_rewards()
        info = {**self._ended, **{name: self._ended[name] != 0 for name in FLAGS}}
        return Step(
            self._obs,
            own.reward,
            own.terminated,
            own.truncated,
            own.valid,
            self._final,
            info,
        )

    @_alone
    def ask_anew(self, queries: ArrayLike) -> Obs:
        """Put as many other queries in place of the present ones, and start from their beginning.

        For evaluations that go through many queries in one environment.
        """
        asked = checked(queries, self.facts, self.rules)
        if asked.shape != self.queries.shape or self._config[layout.C_RATIO] or self._teacher:
            raise ConfigError(
                f"an environment without negatives and teacher takes as many queries as it has, "
                f"{len(self.queries):,}, got {len(asked):,}; build another one"
            )
        self.queries = asked
        view(Task, self._task).queries[...] = asked
        return self.reset()

    @_alone
    def copy_slots(self, source: NDArray[np.integer[Any]]) -> None:
        """Let slot b continue the episode of slot `source[b]` from what is observed there."""
        own, num_envs = self._own, self._num_envs
        rows = np.ascontiguousarray(source, np.int64).reshape(num_envs)
        moved = np.flatnonzero(rows != np.arange(num_envs))
        rows, final = rows[moved], own.slots[moved, layout.FINAL]
        for name in ("slots", "goals", "query", "lost", "phi", "candidates", "mask", "n_valid"):
            array = getattr(own, name)
            array[moved] = array[rows]
        history = own.history.reshape(num_envs, -1)
        history[moved] = history[rows]
        # The rows in use in the buffers of last observations, which stay.
        own.slots[moved, layout.FINAL] = final

    @_alone
    def random_actions(self, seed: int = 0) -> NDArray[np.int64]:
        """Uniform choices inside the mask, keyed by episode and step, not by slot."""
        out = np.empty(self._num_envs, np.int64)
        prover_kernels.random_actions(self._memory, _random_key(seed), out)
        return out

    @_alone
    def expert_actions(self) -> NDArray[np.int64]:
        """What the teacher would do; -1 where it has none, as after an action not its own.

        It follows its shortest proof, and gives up corrupted queries and those without a proof.
        """
        if self._teacher is None:
            raise ConfigError("this environment has no teacher; give it teacher=prove_all(...)")
        out = np.empty(self._num_envs, np.int64)
        teacher = self._teacher
        prover_kernels.expert_actions(self._memory, teacher.lengths, teacher.steps, out)
        return out

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on; an environment of the same settings can resume."""
        return {
            "program": self._fingerprint(),
            **{name: getattr(self._own, name).copy() for name in STATE},
        }

    @_alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_state(state, ("program", *STATE))
        if state["program"] != self._fingerprint():
            raise Mismatch(
                "the saved environment had other facts, rules, queries or settings; "
                "build this one with the same"
            )
        if len(state["slots"]) != self._num_envs:
            raise Mismatch(
                f"the saved environment has {len(state['slots']):,} slots, this one "
                f"{self._num_envs:,}; give it the same batch_size"
            )
        saved = {name: np.asarray(state[name]) for name in STATE}
        self._check_state(saved)
        self._memory = self._allocated()
        self._open()
        for name, array in saved.items():
            getattr(self._own, name)[...] = array
        # The buffers of observations are empty again, whatever they held then.
        self._own.slots[:, [layout.FILLED, layout.FINAL]] = 0
        self._command(np.full(self._num_envs, layout.LOOK))

    @_alone
    def __getstate__(self) -> dict[str, Any]:
        """What a copy, a pickle or another process needs: blocks hold it all, views are remade."""
        state = self.__dict__.copy()
        for name in ("_task", "_own", "_obs", "_final", "_ended", "_busy"):
            del state[name]
        return state | {"_memory": self._memory.copy()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._busy = threading.RLock()
        self._task = self._packed()
        self._memory = aligned(len(state["_memory"]))
        self._memory[:] = state["_memory"]
        self._open()

    def __repr__(self) -> str:
        goals, width, depth = self._shape
        sizes = f"K={width}, goals={goals}, depth={depth}"
        return f"ProverEnv({self._num_envs:,} of {len(self.queries):,} queries, {sizes})"

    def _check_state(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Refuse a state by which the kernels would read or write beyond their arrays."""
        goals, width, depth = self._shape
        entities, predicates = self.facts.num_entities, self.facts.num_predicates
        for name, array in saved.items():
            own = getattr(self._own, name)
            if array.shape != own.shape or array.dtype.kind != own.dtype.kind:
                raise Mismatch(
                    f"{name} of the saved environment is {array.dtype} {list(array.shape)}, and "
                    f"{own.dtype} {list(own.shape)} is needed; take another checkpoint"
                )
        slots, count = saved["slots"], saved["slots"][:, layout.COUNT]
        atoms = saved["goals"][np.arange(goals) < count[:, None]]
        pages = (len(self.facts) + len(self.rules)) // (width - layout.FIRST)
        for name, values, low, high in (
            ("number of goals", count, 0, goals),
            ("depth", slots[:, layout.DEPTH], 0, depth - 1),
            ("page", slots[:, layout.PAGE], 0, pages),
            ("query", slots[:, layout.INDEX], -1, len(self.queries) - 1),
            ("predicate", slots[:, layout.PREDICATE], -1, predicates - 1),
            ("entity", slots[:, [layout.HEAD, layout.TAIL]], -1, entities - 1),
            ("answer", slots[:, layout.ANSWER], -1, self.num_terms - 1),
            ("predicate", atoms[:, 0], 0, predicates - 1),
            ("term", atoms[:, 1:], 0, self.num_terms - 1),
            ("predicate", saved["query"][:, 1], -1, predicates - 1),
            ("term", saved["query"][:, ::2], -1, self.num_terms - 1),
            ("counter", saved["counters"], 0, 2**62),
        ):
            if values.size and not low <= values.min() <= values.max() <= high:
                raise Mismatch(
                    f"the saved environment holds a {name} from {values.min():,} to "
                    f"{values.max():,}, and {low:,} to {high:,} are possible; take another "
                    f"checkpoint"
                )

    def _packed(self) -> Block:
        """What no step changes, for the kernels."""
        facts, rules = self.facts, self.rules
        return pack(
            Task(
                *program(facts, rules),
                plans=plan(rules.head, rules.body, rules.body_len, facts.num_entities),
                known_ptr=self._truths.ps_ptr,
                known_obj=self._truths.ps_obj,
                inverse=self.inverse,
                queries=self.queries,
                labels=self.labels,
                rewards=self._rewards,
                config=self._config,
            )
        )

    def _allocated(self) -> Block:
        """What steps write, empty."""
        room = scratch_size(self._shape[0], self.rules)
        return layout.memory(self._num_envs, *self._shape, room)

    def _open(self) -> None:
        """Name the arrays of the block: what is shown is the memory that kernels write."""
        self._own = view(Memory, self._memory)
        names = ("goals", "candidates", "mask", "n_valid", "query")
        self._obs: Obs = {name: getattr(self._own, name) for name in names}
        self._final: Obs = {name: getattr(self._own, f"final_{name}") for name in names}
        columns = {name: self._own.ended[:, column] for name, column in ENDED.items()}
        self._ended = {**columns, "cut": self._own.slots[:, layout.CUT]}

    def _command(self, actions: NDArray[np.int64]) -> None:
        """Do what RESET, LOOK and IDLE say."""
        prover_kernels.advance(self._task, self._memory, actions, True)

    def _call_reward(self) -> None:
        """Put what the function says of the episodes that ended in place of their codes."""
        assert self._reward is not None
        own = self._own
        rows = np.flatnonzero((own.terminated | own.truncated) & own.valid)
        if not len(rows):
            return
        code, ended = own.reward[rows].astype(np.int64), own.ended[rows]
        proved, cut = ended[:, layout.E_PROVEN] != 0, own.truncated[rows]
        given = Ended(
            proved=proved,
            label=np.where(cut, ended[:, layout.E_LABEL] != 0, (code == 1) | (code == 2)),
            depth=ended[:, layout.E_DEPTH].copy(),
            steps=ended[:, layout.E_STEPS].copy(),
            truncated=cut.copy(),
            invalid=ended[:, layout.E_INVALID] != 0,
            answer=ended[:, layout.E_ANSWER].copy(),
            query_index=ended[:, layout.E_INDEX].copy(),
        )
        returned = self._reward(given)
        try:
            found = np.asarray(returned, np.float32)
        except (TypeError, ValueError):
            got = f"{type(returned).__name__} {one_line(repr(returned))[:60]}"
        else:
            if found.shape == rows.shape and np.isfinite(found).all():
                own.reward[rows] = found
                return
            got = f"{found.dtype} of shape {list(found.shape)}"
        raise ConfigError(
            f"the reward function must return {len(rows)} finite numbers, one for each episode "
            f"that ended, got {got}"
        )

    def _shape_rewards(self) -> None:
        """Add gamma * phi(next) - phi(now), phi of an end being 0: no best policy changes."""
        own = self._own
        phi = self._values(own.goals)
        following = np.where(own.terminated, np.float32(0.0), phi)
        if own.truncated.any():
            cut = np.flatnonzero(own.truncated)
            following[cut] = self._values(own.final_goals[cut])
        shaped = np.float32(self._gamma) * following - own.phi
        own.reward[:] += np.where(own.valid, shaped, np.float32(0.0))
        own.phi[:] = phi

    def _values(self, goals: Ints) -> NDArray[np.float32]:
        """The potential of states: that of their first goal, as a triple with -1 for variables."""
        assert self._potential is not None
        first = goals[:, 0]
        terms = np.where(first[:, 1:] < self.facts.num_entities, first[:, 1:], -1)
        triples = np.stack([terms[:, 0], first[:, 0], terms[:, 1]], axis=1).astype(np.int32)
        return np.asarray(self._potential(triples), np.float32).reshape(len(triples))

    def _fingerprint(self) -> str:
        parts = [self.queries, self.labels, self._config, self._rewards, self.inverse]
        parts += [*program(self.facts, self.rules), self._truths.ps_ptr, self._truths.ps_obj]
        by = self._reward
        named = [] if by is None else [f"{by.__module__}.{getattr(by, '__qualname__', by)}"]
        return digest(list(self._shape), [digest_array(part) for part in parts], *named)


@functools.lru_cache(maxsize=64)
def _random_key(seed: int) -> int:
    # Half of it, because kernels count in signed integers.
    return key(seed, "prover/random") >> 1
