"""Rewriting questions so that a target model answers them: N pipelines through the call pool.

    choose an operator -> mutator rewrites -> guard -> target answers -> score -> embed

Each environment runs its own pipeline, so a slow one delays no other until the step ends. The
reward of a step is the change of the score minus a cost, so an episode's return is the gain of
its final wording over the original one, and stopping is free. If a call fails, the wording stays
as it was or the answer is `NO_ANSWER`, and the step is marked invalid: it is counted and never
enters the loss.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.calls.outcome import Outcome
from batchwright.calls.queries import NO_ANSWER, mutated_text
from batchwright.envs.api import ArraySpec, Obs, Step, as_actions, require_state
from batchwright.envs.query_mutation.operators import NOOP, OPERATORS, STOP, Operator
from batchwright.envs.questions import Question
from batchwright.errors import ConfigError, Mismatch
from batchwright.rng import key

__all__ = ["Failures", "MutationPipelines", "Rate", "Runs", "Score", "Turn"]

Ask = Callable[[str, int], Awaitable[Outcome]]
"""A model: from a prompt and a seed to an outcome."""
Embed = Callable[[Sequence[str]], Awaitable[NDArray[np.float32]]]
"""An embedder: from texts to unit vectors, one row each."""


class Score(NamedTuple):
    """The score of an answer, from 0 to 1; NaN if scoring failed, and `why` names the failure."""

    value: float
    why: str = ""


class Rate(Protocol):
    """Scores an answer against the question's reference answer."""

    async def __call__(self, question: Question, wording: str, answer: str) -> Score: ...


class Failures(Protocol):
    """Which calls of a run failed, so that a replay fails in the same places."""

    def known(self, place: str) -> str | None:
        """The failure kind that the replayed run had at this place; None: make the call."""
        ...

    def note(self, place: str, why: str) -> None:
        """Record the failure kind at a place; empty for success."""
        ...


class Runs(Protocol):
    """Runs a coroutine on the event loop that owns the connections: `Pool.run`."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one environment, as transcripts record it."""

    env: int
    episode: int
    step: int
    question: str
    operator: str
    wording: str
    answer: str
    score: float
    gain: float
    why: str
    """Why the step is invalid: a failure kind, or `before_` and the kind of the failure that left
    the score before it unknown. Of a valid step: empty, or `guard` for a rejected rewriting."""

    @property
    def valid(self) -> bool:
        return bool(np.isfinite(self.gain))


@dataclass(slots=True)
class _State:
    """The current episode of one environment."""

    episode: int = -1
    step: int = 0
    item: int = 0
    wording: str = ""
    operator: int = -1
    score: float = float("nan")
    why: str = ""
    """Which failure left the score unknown."""
    vector: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    origin: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))


class MutationPipelines:
    """N questions being rewritten at once; an action is the index of an operator.

    `features` are the embedding of the current wording, the fraction of steps used, and the last
    operator, one-hot: nothing that needs a reference answer. Questions, crossover partners and
    mutator seeds depend on (seed, environment, episode, step) alone, so equal responses give
    equal runs. With `order="each"`, environment b gets question b and stops after one episode:
    that is how policies are evaluated.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        mutator: Ask,
        target: Ask,
        reward: Rate,
        num_envs: int,
        *,
        run: Runs,
        embed: Embed,
        dim: int,
        operators: Sequence[Operator] = OPERATORS,
        max_steps: int = 3,
        least_similarity: float = 0.3,
        cost: float = 0.0,
        seed: int = 0,
        order: Literal["drawn", "each"] = "drawn",
        failures: Failures | None = None,
        on_turn: Callable[[Turn], object] | None = None,
    ) -> None:
        if not questions:
            raise ConfigError("got no questions; pass at least one")
        if order == "each" and num_envs > len(questions):
            raise ConfigError(
                f"order='each' needs a question per environment, got {len(questions)} questions "
                f"for {num_envs} environments"
            )
        for name, value in (("num_envs", num_envs), ("max_steps", max_steps)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.questions, self.operators = tuple(questions), tuple(operators)
        self.max_steps, self.cost, self.least_similarity = max_steps, cost, least_similarity
        self.counts: Counter[str] = Counter()
        """Since the start: `steps`, `invalid` ones, rewritings rejected by the `guard`, actions
        out of range (`invalid_action`), and first answers that failed (`failed_starts`)."""
        self.reasons: Counter[str] = Counter()
        """Invalid steps by reason, `Turn.why`."""
        self._ask_mutator, self._ask_target, self._rate = mutator, target, reward
        self.run, self._embed, self._dim, self._seed = run, embed, dim, seed
        self._on_turn, self._failures, self._order = on_turn, failures, order
        self._states = [_State() for _ in range(num_envs)]

    @property
    def num_envs(self) -> int:
        return len(self._states)

    @property
    def num_actions(self) -> int:
        return len(self.operators)

    @property
    def spec(self) -> Mapping[str, ArraySpec]:
        width = self._dim + 1 + self.num_actions
        return {
            "features": ArraySpec((width,), np.dtype(np.float32)),
            "mask": ArraySpec((self.num_actions,), np.dtype(np.bool_)),
        }

    def batch_reset(self) -> NDArray[np.float32]:
        """Reset all environments; features [N, d]."""
        return self.reset()["features"]

    def batch_step(
        self, actions: Sequence[int] | NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """`step` as a tuple: features, rewards, dones, and one info dictionary per environment."""
        step = self.step(np.asarray(actions))
        infos = [
            {name: column[b] for name, column in step.info.items()} for b in range(self.num_envs)
        ]
        for info, valid in zip(infos, step.valid.tolist(), strict=True):
            info["valid"] = valid
        return step.obs["features"], step.reward, step.done, infos

    def set_seed(self, seed: int) -> None:
        """Draw other questions, from the first episode on; responses are those of the models."""
        self._seed = seed
        self._states = [_State() for _ in range(self.num_envs)]

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        chosen = range(self.num_envs) if where is None else np.flatnonzero(where).tolist()

        async def begin() -> None:
            await asyncio.gather(*(self._begin(self._states[b], b) for b in chosen))

        self.run(begin())
        return self._observe(self._states)

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        given = as_actions(actions, self.num_envs)

        async def act() -> list[tuple[Turn, bool, _State]]:
            return await asyncio.gather(*(self.act(b, a) for b, a in enumerate(given.tolist())))

        done = self.run(act())
        turns = [turn for turn, _, _ in done]
        ended = np.array([end for _, end, _ in done])
        gains = np.array([turn.gain for turn in turns], np.float32)
        valid = np.array([turn.valid for turn in turns])
        return Step(
            obs=self._observe(self._states),
            reward=np.where(valid, gains, np.float32(0)),
            terminated=ended,
            truncated=np.zeros(self.num_envs, np.bool_),
            valid=valid,
            final_obs=self._observe([last for _, _, last in done]),
            info={
                "score": np.array([turn.score for turn in turns]),
                **{
                    name: np.array([getattr(turn, name) for turn in turns], dtype=object)
                    for name in ("question", "operator", "wording", "answer", "why")
                },
            },
        )

    async def act(self, env: int, action: int) -> tuple[Turn, bool, _State]:
        """Step one environment: its turn, whether the episode ended, and its state at the end.

        An action out of range is a `noop`, and counted.
        """
        state = self._states[env]
        operator = self.operators[action] if 0 <= action < self.num_actions else NOOP
        if not 0 <= action < self.num_actions:
            self.counts["invalid_action"] += 1
        question = self.questions[state.item]
        before = state.score
        wording, vector, why = await self._rewrite(state, env, operator)
        answer, score = "", Score(before)
        rejected = why == "guard"
        self.counts["guard"] += rejected
        asked = operator is not STOP and not rejected
        if asked:
            answer, score = await self._answer(state, env, state.step + 1, wording)
        failure = score.why if rejected else why or score.why
        if not failure and state.why:
            failure = f"before_{state.why}"
        gain = float("nan") if failure else score.value - before
        if operator.asks:
            gain -= self.cost
        state.wording, state.vector, state.operator = wording, vector, action
        if asked:
            state.score, state.why = score
        state.step += 1
        turn = Turn(
            *(env, state.episode, state.step, question.question, operator.name),
            *(wording, answer, state.score, gain, failure or why),
        )
        self.counts["steps"] += 1
        if not turn.valid:
            self.counts["invalid"] += 1
            self.reasons[turn.why] += 1
        if self._on_turn is not None:
            self._on_turn(turn)
        last = replace(state)
        ended = operator is STOP or state.step >= self.max_steps
        if ended and self._order == "drawn":
            await self._begin(state, env)
        return turn, ended, last

    def observation(self, env: int) -> Obs:
        """The observation of one environment, [1, ...]."""
        return self._observe([self._states[env]])

    def state_dict(self) -> dict[str, Any]:
        return {
            "places": [
                {name: v for name, v in asdict(p).items() if name not in ("vector", "origin")}
                for p in self._states
            ],
            "vectors": np.stack([p.vector for p in self._states]),
            "origins": np.stack([p.origin for p in self._states]),
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_state(state, ("places", "vectors", "origins", "counts", "reasons"))
        if len(state["places"]) != self.num_envs:
            raise Mismatch(
                f"the state has {len(state['places'])} environments, this has {self.num_envs}; "
                f"resume with the same number"
            )
        rows = zip(state["places"], state["vectors"], state["origins"], strict=True)
        self._states = [
            _State(**place, vector=np.array(vector), origin=np.array(origin))
            for place, vector, origin in rows
        ]
        self.counts, self.reasons = Counter(state["counts"]), Counter(state["reasons"])

    async def _begin(self, state: _State, env: int) -> None:
        """Start the next episode: draw a question and score it in its original wording."""
        state.episode += 1
        state.step, state.operator = 0, -1
        state.item = env
        if self._order == "drawn":
            state.item = key(self._seed, "question", env, state.episode) % len(self.questions)
        state.wording = self.questions[state.item].question
        (vectors, (_, score)) = await asyncio.gather(
            self._embed([state.wording]), self._answer(state, env, 0, state.wording)
        )
        state.vector = state.origin = vectors[0]
        state.score, state.why = score
        if score.why:
            self.counts["failed_starts"] += 1

    async def _rewrite(
        self, state: _State, env: int, operator: Operator
    ) -> tuple[str, NDArray[np.float32], str]:
        """The new wording and its embedding; the old ones and why, if there is no new one."""
        kept = state.wording, state.vector
        if not operator.asks:
            return *kept, ""
        counters = (env, state.episode, state.step)
        other = key(self._seed, "other", *counters) % len(self.questions)
        prompt = operator.prompt(state.wording, self.questions[other].question)
        text, why = await self._mutated(prompt, *counters)
        if text is None:
            return *kept, why
        question = self.questions[state.item]
        (vector,) = await self._embed([text])
        near = float(vector @ state.origin) >= self.least_similarity
        if near and not _leaks(text, question):
            return text, vector, ""
        return *kept, "guard"

    async def _mutated(self, prompt: str, *counters: int) -> tuple[str | None, str]:
        where = "/".join(["mutator", *map(str, counters)])
        why = self._known(where)
        text = None
        if why is None:
            seed = key(self._seed, "mutate", *counters) % 2**31
            outcome = await self._ask_mutator(prompt, seed)
            text = mutated_text(outcome.text) if outcome else None
            why = "" if text else f"mutator_{'parse' if outcome else outcome.kind}"
            self._note(where, why)
        return text, why

    async def _answer(self, state: _State, env: int, step: int, wording: str) -> tuple[str, Score]:
        where = f"target/{env}/{state.episode}/{step}"
        why = self._known(where)
        if why:
            return NO_ANSWER, Score(float("nan"), why)
        outcome = await self._ask_target(wording, 0)
        if outcome:
            score = await self._rate(self.questions[state.item], wording, outcome.text)
        else:
            score = Score(float("nan"), f"target_{outcome.kind}")
        self._note(where, score.why)
        return outcome.text if outcome else NO_ANSWER, score

    def _known(self, where: str) -> str | None:
        return None if self._failures is None else self._failures.known(where)

    def _note(self, where: str, why: str) -> None:
        if self._failures is not None:
            self._failures.note(where, why)

    def _observe(self, states: Sequence[_State]) -> Obs:
        features = np.zeros((len(states), self._dim + 1 + self.num_actions), np.float32)
        for row, state in zip(features, states, strict=True):
            row[: self._dim] = state.vector
            row[self._dim] = state.step / self.max_steps
            if 0 <= state.operator < self.num_actions:
                row[self._dim + 1 + state.operator] = 1.0
        return {"features": features, "mask": np.ones((len(states), self.num_actions), np.bool_)}


def _leaks(wording: str, question: Question) -> bool:
    """Whether a wording contains the answer although the original question does not."""
    answer = f" {_words(question.answer)} "
    return answer in f" {_words(wording)} " and answer not in f" {_words(question.question)} "


def _words(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
