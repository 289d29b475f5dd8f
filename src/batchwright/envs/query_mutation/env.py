"""Rewriting questions so that a target model answers them: N pipelines through the call pool.

    choose an operator -> mutator rewrites -> guard -> target answers -> score -> embed

Each environment runs its own pipeline, so a slow one holds up no other until the step ends.
The reward of a step is how much better the answer became, minus its cost; so the sum over an
episode is the gain of the final wording over the original one, and stopping costs nothing.
A failed call gives what was there before (the wording) or a fixed message (the answer), and the
step is marked invalid: it is counted and never learned from.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.calls.outcome import Outcome
from batchwright.envs.api import ArraySpec, Obs, Step
from batchwright.envs.query_mutation.operators import NOOP, OPERATORS, STOP, Operator, rewritten
from batchwright.envs.questions import Question
from batchwright.errors import ConfigError, Mismatch
from batchwright.rng import key

__all__ = ["NO_ANSWER", "BatchedQueryMutationEnv", "Failures", "Rate", "Runs", "Score", "Turn"]

NO_ANSWER = "(no answer came)"
"""What stands for the answer of a call that failed."""

Ask = Callable[[str, int], Awaitable[Outcome]]
"""A model: a prompt and a seed in, an outcome out."""
Embed = Callable[[Sequence[str]], Awaitable[NDArray[np.float32]]]
"""Texts in, vectors of length 1 out, one a row."""


class Score(NamedTuple):
    """How right an answer is, from 0 to 1; `why` names a failure, and the value is then NaN."""

    value: float
    why: str = ""


class Rate(Protocol):
    """Compares an answer with the question's reference."""

    async def __call__(self, question: Question, wording: str, answer: str) -> Score: ...


class Failures(Protocol):
    """Which calls of a run failed, so that a run without servers can fail in the same places."""

    def known(self, place: str) -> str | None:
        """The kind of failure at a place of an earlier run; None: it is to be found out."""
        ...

    def note(self, place: str, why: str) -> None:
        """What happened at a place; empty: it went well."""
        ...


class Runs(Protocol):
    """Runs a coroutine to its end on the loop that owns the sockets: `Pool.run`."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one environment, as it is written to transcripts."""

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
    """Empty, `guard` for a rewriting that was turned down, or the kind of a failure."""


@dataclass(slots=True)
class _Place:
    """Where one environment stands."""

    episode: int = -1
    step: int = 0
    item: int = 0
    wording: str = ""
    operator: int = -1
    score: float = float("nan")
    vector: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    origin: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))


class BatchedQueryMutationEnv:
    """N questions being rewritten at once; an action is the choice of an operator.

    `features` are the embedding of the current wording, the share of steps used, and which
    operator came last: nothing that would not be known for a question without a reference.
    Questions, crossover partners and the seeds of mutator calls depend on (seed, environment,
    episode, step) alone, so equal answers make equal runs. With `order="each"`, environment b
    has question b and stays where its episode ended: that is how policies are compared.
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
            raise ConfigError("there is no question; give a data set with at least one")
        if order == "each" and num_envs > len(questions):
            raise ConfigError(f"{len(questions)} questions cannot be one each for {num_envs}")
        if num_envs < 1 or max_steps < 1:
            raise ConfigError(f"{num_envs} environments of {max_steps} steps; give 1 or more")
        self.questions, self.operators = tuple(questions), tuple(operators)
        self.max_steps, self.cost, self.least_similarity = max_steps, cost, least_similarity
        self.counts: Counter[str] = Counter()
        """Steps, guarded rewritings and failures by kind since the beginning."""
        self._ask_mutator, self._ask_target, self._rate = mutator, target, reward
        self.run, self._embed, self._dim, self._seed = run, embed, dim, seed
        self._on_turn, self._failures, self._order = on_turn, failures, order
        self._places = [_Place() for _ in range(num_envs)]

    @property
    def num_envs(self) -> int:
        return len(self._places)

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
        """New questions everywhere; features [N, d]."""
        return self.reset()["features"]

    def batch_step(
        self, actions: Sequence[int] | NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """`step` in the older form: features, rewards, dones, and one dictionary an environment."""
        step = self.step(np.asarray(actions))
        infos = [
            {name: column[b] for name, column in step.info.items()} for b in range(self.num_envs)
        ]
        for info, valid in zip(infos, step.valid.tolist(), strict=True):
            info["valid"] = valid
        return step.obs["features"], step.reward, step.done, infos

    def reset(self, where: NDArray[np.bool_] | None = None) -> Obs:
        chosen = range(self.num_envs) if where is None else np.flatnonzero(where).tolist()

        async def begin() -> None:
            await asyncio.gather(*(self._begin(self._places[b], b) for b in chosen))

        self.run(begin())
        return self._observe(self._places)

    def step(self, actions: NDArray[np.integer[Any]]) -> Step:
        given = np.asarray(actions)
        if given.shape != (self.num_envs,):
            raise Mismatch(f"{given.shape} actions for {self.num_envs} environments; give one each")

        async def act() -> list[tuple[Turn, bool, _Place]]:
            return await asyncio.gather(*(self.act(b, int(a)) for b, a in enumerate(given)))

        done = self.run(act())
        turns = [turn for turn, _, _ in done]
        ended = np.array([end for _, end, _ in done])
        gains = np.array([turn.gain for turn in turns], np.float32)
        valid = np.isfinite(gains)
        return Step(
            obs=self._observe(self._places),
            reward=np.where(valid, gains, np.float32(0)),
            terminated=ended,
            truncated=np.zeros(self.num_envs, np.bool_),
            valid=valid,
            final_obs=self._observe([place for _, _, place in done]),
            info={
                "score": np.array([turn.score for turn in turns]),
                **{
                    name: np.array([getattr(turn, name) for turn in turns], dtype=object)
                    for name in ("question", "operator", "wording", "answer", "why")
                },
            },
        )

    async def act(self, env: int, action: int) -> tuple[Turn, bool, _Place]:
        """One step of one environment: its turn, whether the episode ended, and its last place.

        An action that is no operator counts as `noop`.
        """
        place = self._places[env]
        operator = self.operators[action] if 0 <= action < self.num_actions else NOOP
        if not 0 <= action < self.num_actions:
            self.counts["invalid_action"] += 1
        question = self.questions[place.item]
        before = place.score
        wording, vector, why = await self._rewrite(place, env, operator)
        answer, score = "", Score(before)
        if operator is not STOP and why != "guard":
            answer, score = await self._answer(place, env, place.step + 1, wording)
        why = why or score.why
        failed = bool(why) and why != "guard"
        gain = float("nan") if failed else score.value - before
        if operator.asks:
            gain -= self.cost
        place.wording, place.vector, place.operator = wording, vector, action
        place.score = float("nan") if score.why else score.value
        place.step += 1
        turn = Turn(
            *(env, place.episode, place.step, question.question, operator.name),
            *(wording, answer, place.score, gain, why),
        )
        self.counts["steps"] += 1
        if not np.isfinite(gain):
            self.counts["invalid"] += 1
        if why:
            self.counts[why] += 1
        if self._on_turn is not None:
            self._on_turn(turn)
        last = replace(place)
        ended = operator is STOP or place.step >= self.max_steps
        if ended and self._order == "drawn":
            await self._begin(place, env)
        return turn, ended, last

    def observation(self, env: int) -> Obs:
        """What one environment sees, [1, ...]."""
        return self._observe([self._places[env]])

    def state_dict(self) -> dict[str, Any]:
        return {
            "places": [
                {name: v for name, v in asdict(p).items() if name not in ("vector", "origin")}
                for p in self._places
            ],
            "vectors": np.stack([p.vector for p in self._places]),
            "origins": np.stack([p.origin for p in self._places]),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["places"]) != self.num_envs:
            raise Mismatch(
                f"the state is of {len(state['places'])} environments, there are {self.num_envs}"
            )
        rows = zip(state["places"], state["vectors"], state["origins"], strict=True)
        self._places = [
            _Place(**place, vector=np.array(vector), origin=np.array(origin))
            for place, vector, origin in rows
        ]
        self.counts = Counter(state["counts"])

    async def _begin(self, place: _Place, env: int) -> None:
        """The next question of an environment, answered as it stands."""
        place.episode += 1
        place.step, place.operator = 0, -1
        place.item = env
        if self._order == "drawn":
            place.item = key(self._seed, "question", env, place.episode) % len(self.questions)
        place.wording = self.questions[place.item].question
        (vectors, (_, score)) = await asyncio.gather(
            self._embed([place.wording]), self._answer(place, env, 0, place.wording)
        )
        place.vector = place.origin = vectors[0]
        place.score = float("nan") if score.why else score.value
        if score.why:
            self.counts[score.why] += 1

    async def _rewrite(
        self, place: _Place, env: int, operator: Operator
    ) -> tuple[str, NDArray[np.float32], str]:
        """The new wording and its vector; the old ones, and why, if there is none."""
        kept = place.wording, place.vector
        if not operator.asks:
            return *kept, ""
        counters = (env, place.episode, place.step)
        other = key(self._seed, "other", *counters) % len(self.questions)
        prompt = operator.prompt(place.wording, self.questions[other].question)
        text, why = await self._mutated(prompt, "/".join(map(str, counters)), *counters)
        if text is None:
            return *kept, why
        question = self.questions[place.item]
        (vector,) = await self._embed([text])
        near = float(vector @ place.origin) >= self.least_similarity
        if near and not _leaks(text, question):
            return text, vector, ""
        return *kept, "guard"

    async def _mutated(self, prompt: str, at: str, *counters: int) -> tuple[str | None, str]:
        where = f"mutator/{at}"
        why = self._known(where)
        text = None
        if why is None:
            seed = key(self._seed, "mutate", *counters) % 2**31
            outcome = await self._ask_mutator(prompt, seed)
            text = rewritten(outcome.text) if outcome else None
            why = "" if text else f"mutator_{'parse' if outcome else outcome.kind}"
            self._note(where, why)
        return text, why

    async def _answer(self, place: _Place, env: int, step: int, wording: str) -> tuple[str, Score]:
        where = f"target/{env}/{place.episode}/{step}"
        why = self._known(where)
        if why:
            return NO_ANSWER, Score(float("nan"), why)
        outcome = await self._ask_target(wording, 0)
        if outcome:
            score = await self._rate(self.questions[place.item], wording, outcome.text)
        else:
            score = Score(float("nan"), f"target_{outcome.kind}")
        self._note(where, score.why)
        return outcome.text if outcome else NO_ANSWER, score

    def _known(self, where: str) -> str | None:
        return None if self._failures is None else self._failures.known(where)

    def _note(self, where: str, why: str) -> None:
        if self._failures is not None:
            self._failures.note(where, why)

    def _observe(self, places: Sequence[_Place]) -> Obs:
        features = np.zeros((len(places), self._dim + 1 + self.num_actions), np.float32)
        for row, place in zip(features, places, strict=True):
            row[: self._dim] = place.vector
            row[self._dim] = place.step / self.max_steps
            if 0 <= place.operator < self.num_actions:
                row[self._dim + 1 + place.operator] = 1.0
        return {"features": features, "mask": np.ones((len(places), self.num_actions), np.bool_)}


def _leaks(wording: str, question: Question) -> bool:
    """Whether a rewriting gives the answer away that the question does not."""
    answer = f" {_words(question.answer)} "
    return answer in f" {_words(wording)} " and answer not in f" {_words(question.question)} "


def _words(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
