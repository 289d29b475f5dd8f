"""Tasks of reasoning-gym as a gym inside this process: its questions, answers and verifiers.

Difficulty is the level of the task's own curriculum in that package, spread over 0 to 1. A task
without levels has no difficulty.
"""

import asyncio
import contextlib
import difflib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from batchwright import rng
from batchwright.data.rows.sample import encode_row
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch, NoServer, need
from batchwright.streaming.protocols import LocalStream
from batchwright.streaming.sample import EpisodeStatus, SampleSource, StreamMetrics, StreamSample

if TYPE_CHECKING:
    from batchwright.calls import Pool

__all__ = ["AnswerPolicy", "ReasoningGymStream", "model_answers"]

AnswerPolicy = Callable[[Sequence[str]], Sequence[str | None]]
"""Answers to questions, in order; None where there is none."""

CHUNK = 500
"""Questions of one data set of the package; some make all of theirs at once."""
ASKED = 32
"""Questions that a policy gets at once."""
MOST_SKIPPED = 100
HASHED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Tasks whose questions depend on the order of Python's sets, which differs by process."""


@dataclass
class _Task:
    """A task with the settings of each of its levels that the package accepts."""

    name: str
    levels: dict[int, Any]
    difficulties: dict[int, float | None]
    made: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """The data set in use of each level, with the number of its chunk."""

    def level(self, asked: tuple[float, float], drawn: int) -> int:
        """One of the levels in the range; the nearest to its middle if there is none."""
        low, high = asked
        within = [k for k, d in self.difficulties.items() if d is None or low <= d <= high]
        if within:
            return within[drawn % len(within)]
        middle = (low + high) / 2
        return min(self.difficulties, key=lambda k: abs((self.difficulties[k] or 0.0) - middle))

    def dataset(self, level: int, chunk: int, seed: int) -> Any:
        if self.made.get(level, (None,))[0] != chunk:
            kind = need("reasoning_gym.factory", extra="gym").DATASETS[self.name][0]
            key = rng.key(seed, f"reasoning/{self.name}", level, chunk) % 2**31
            self.made[level] = chunk, kind(replace(self.levels[level], seed=key, size=CHUNK))
        return self.made[level][1]


@dataclass(frozen=True, slots=True)
class _Question:
    number: int
    task: _Task
    level: int
    dataset: Any
    entry: Mapping[str, Any]


class ReasoningGymStream(LocalStream):
    """Questions of `tasks` in turn, each answered by `policy` and scored by the task's verifier.

    A sample is a question, masked, and its answer, in the loss. The reward is the verifier's
    score from 0 to 1; a score of 1 is a success. `policy` "answer" gives the package's own
    answer; `model_answers` asks a model. A question without an answer becomes no sample and is
    counted.

    Question k is a function of seed, tasks, difficulty range and k. `difficulty_range` may be
    set between two iterations. `num_samples` None is endless. What the package cannot make or
    score is an error, or skipped and counted.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        tokenizer: Tokenizer | str = "bytes",
        policy: Literal["answer"] | AnswerPolicy = "answer",
        *,
        num_samples: int | None = None,
        difficulty_range: tuple[float, float] = (0.0, 1.0),
        seed: int = 42,
        on_bad_row: Literal["fail", "skip"] = "fail",
    ) -> None:
        low, high = difficulty_range
        if not 0.0 <= low <= high <= 1.0:
            raise ConfigError(f"difficulty_range must ascend within 0 to 1, got ({low}, {high})")
        if isinstance(policy, str) and policy != "answer":
            raise ConfigError(f"policy must be 'answer' or a function, got {policy!r}")
        if not tasks or isinstance(tasks, str):
            raise ConfigError(f"tasks must be names of reasoning-gym tasks, got {tasks!r}")
        self.tasks = [_opened(name) for name in tasks]
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.policy = policy
        self.num_samples = num_samples
        self.difficulty_range = difficulty_range
        self.seed = seed
        self.metrics = StreamMetrics()
        self._skips = on_bad_row == "skip"
        self._position = 0
        self._skipped_in_a_row = 0

    def __iter__(self) -> Iterator[StreamSample]:
        while block := self._block():
            yield from self._give(block, self._answers(block))
        self._position = 0

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        # In threads: a question may take seconds to make, and a model to answer.
        while block := await asyncio.to_thread(self._block):
            answers = await asyncio.to_thread(self._answers, block)
            for sample in self._give(block, answers):
                yield sample
        self._position = 0

    def _block(self) -> list[_Question | BadRow]:
        """The next questions; none at the end."""
        size = 1 if self.policy == "answer" else ASKED
        last = self._position + size
        if self.num_samples is not None:
            last = min(last, self.num_samples)
        return [self._question(number) for number in range(self._position, last)]

    def _question(self, number: int) -> _Question | BadRow:
        turn, which = divmod(number, len(self.tasks))
        task = self.tasks[which]
        drawn = rng.key(self.seed, "reasoning/level", number)
        level = task.level(self.difficulty_range, drawn)
        chunk, place = divmod(turn, CHUNK)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                dataset = task.dataset(level, chunk, self.seed)
                return _Question(number, task, level, dataset, dataset[place])
        except Exception as error:
            # Whatever the package raises: what it cannot make is no sample.
            return BadRow(_refused("made", task.name, level, error))

    def _answers(self, block: Sequence[_Question | BadRow]) -> list[str | None]:
        asked = [found for found in block if isinstance(found, _Question)]
        if isinstance(self.policy, str):
            given: Sequence[str | None] = [_own_answer(question) for question in asked]
        else:
            given = self.policy([question.entry["question"] for question in asked])
            if len(given) != len(asked):
                raise Mismatch(f"the policy gave {len(given)} answers to {len(asked)} questions")
        answers = iter(given)
        return [next(answers) if isinstance(q, _Question) else None for q in block]

    def _give(
        self, block: Sequence[_Question | BadRow], answers: Sequence[str | None]
    ) -> Iterator[StreamSample]:
        for question, answer in zip(block, answers, strict=True):
            sample = question if isinstance(question, BadRow) else self._sample(question, answer)
            self._position += 1
            if isinstance(sample, BadRow):
                self._skip(sample)
                continue
            self._skipped_in_a_row = 0
            self.metrics.record_sample(sample)
            self.metrics.record_episode(bool(sample.success))
            yield sample

    def _sample(self, question: _Question, answer: str | None) -> StreamSample | BadRow:
        name, entry = question.task.name, question.entry
        if answer is None:
            return BadRow(f"question {question.number} of {name} got no answer")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                score = float(question.dataset.score_answer(answer, entry))
        except Exception as error:
            return BadRow(_refused("scored", name, question.level, error))
        row = {"prompt": entry["question"], "completion": answer}
        episode = f"{name}-{question.level}-{question.number}"
        success = score >= 1.0
        return StreamSample.from_sample(
            encode_row(row, self.tokenizer, episode),
            dataset_id=f"reasoning_gym/{name}",
            source=SampleSource.GYM,
            episode_id=episode,
            episode_status=EpisodeStatus.SUCCESS if success else EpisodeStatus.FAILURE,
            step_index=0,
            total_steps=1,
            reward=score,
            difficulty=question.task.difficulties[question.level],
            success=success,
        )

    def _skip(self, error: BadRow) -> None:
        self.metrics.record_error()
        self._skipped_in_a_row += 1
        if not self._skips:
            raise error
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise BadRow(f"{MOST_SKIPPED} questions in a row became no sample; the last: {error}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self._settings(),
            "position": self._position,
            "metrics": self.metrics.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if dict(state["settings"]) != self._settings():
            raise Mismatch(
                f"the state is of a reasoning-gym stream with {state['settings']}, this one has "
                f"{self._settings()}; make it with the settings it was saved with"
            )
        self._position = int(state["position"])
        self.metrics = StreamMetrics(**state["metrics"])

    def _settings(self) -> dict[str, Any]:
        return {
            "tasks": [task.name for task in self.tasks],
            "tokenizer": self.tokenizer.fingerprint,
            "difficulty_range": list(self.difficulty_range),
            "num_samples": self.num_samples,
            "seed": self.seed,
        }


def model_answers(pool: "Pool", model: str, **parameters: Any) -> AnswerPolicy:
    """A policy that asks a model through `pool`; a call that failed is no answer.

    `parameters` go into the requests, such as `temperature` and `max_tokens`.
    """
    from batchwright.calls import Done, chat

    def answers(questions: Sequence[str]) -> list[str | None]:
        outcomes = pool.map([chat(model, question, **parameters) for question in questions])
        if outcomes and not any(outcomes):
            raise NoServer(f"all {len(outcomes)} questions failed; the first: {outcomes[0]}")
        return [o.text.strip() if isinstance(o, Done) else None for o in outcomes]

    return answers


def _opened(name: str) -> _Task:
    factory = need("reasoning_gym.factory", extra="gym")
    known = sorted(factory.DATASETS.keys() - {"composite"})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see its gallery for the names"
        raise ConfigError(f"reasoning-gym has no task {name!r} among its {len(known)}; {hint}")
    if name in HASHED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"reasoning-gym makes other questions of {name} in every process unless the "
            f"environment variable PYTHONHASHSEED is set; set it to 0, or leave out the task"
        )
    if not factory.has_curriculum(name):
        return _Task(name, {0: factory.DATASETS[name][1]()}, {0: None})
    coaching = need("reasoning_gym.coaching.base_curriculum", extra="gym")
    context = coaching.DefaultCurriculumContext(coaching.RangeAttributeMode.UPPER_BOUND)
    curriculum = factory.create_curriculum(name)
    count = max((len(part.levels) for part in curriculum.attributes.values()), default=1)
    levels = {}
    for level in range(count):
        curriculum.set_global_level(level)
        # Some levels contradict the task's own settings, which are asserted.
        with contextlib.suppress(AssertionError, ValueError):
            settings = curriculum.generate_configuration(context=context)
            if hasattr(settings, "validate"):
                settings.validate()
            levels[level] = settings
    if not levels:
        raise ConfigError(f"reasoning-gym refuses every level of its own task {name}; leave it out")
    spread = {level: level / (count - 1) if count > 1 else None for level in levels}
    return _Task(name, levels, spread)


def _own_answer(question: _Question) -> str:
    answer = question.entry["answer"]
    if not isinstance(answer, str):
        raise ConfigError(
            f"reasoning-gym has a verifier for {question.task.name}, but no answer of its own to "
            f"learn from; play it with a model, or leave it out"
        )
    return answer


def _refused(done: str, name: str, level: int, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return (
        f"reasoning-gym: a question of {name} at level {level} could not be {done}: "
        f"{type(error).__name__}: {reason}; skip such questions, or choose another difficulty"
    )
