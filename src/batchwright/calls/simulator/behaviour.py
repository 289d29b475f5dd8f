"""What a simulated server is like: how many it bears, how long it takes, what goes wrong."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Self

from batchwright.calls.request import Request
from batchwright.calls.simulator.answers import MODELS
from batchwright.calls.simulator.questions import (
    RULES,
    Question,
    Target,
    read_questions,
    uniform,
)
from batchwright.calls.simulator.service import ServerKind
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.calls.simulator.process import RunningSimulator

__all__ = ["FAULTS", "Simulator"]

FAULTS = {
    "429": "turned away at once, with Retry-After if it is set",
    "500": "an error at once",
    "503": "an error at once, with Retry-After if it is set",
    "hang": "no answer ever, and the place stays taken until the client leaves",
    "reset": "half of the answer, then a reset of the connection",
    "cut": "half of the answer, then the end of the connection",
    "html": "status 200 and a page instead of JSON",
    "bad_json": "status 200 and half of the JSON",
    "empty": "an answer without a text",
    "wrong_shape": "JSON of another kind",
    "drip": "the answer byte by byte, `drip_s` apart",
    "slow": "the answer after `slow_factor` times its time",
}
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """What the server is like.

    Latencies, faults by chance and answers are drawn from the seed, the request and how often
    it was taken before, never from the order in which requests arrive.
    """

    kind: ServerKind = "queue"
    knee: int | Sequence[tuple[float, int]] = 8
    """Calls it bears at once, or pairs of a second since its start and the knee from then on."""
    latency_s: float = 0.05
    """Mean time of a call that is alone."""
    sigma: float = 0.5
    """Spread of the lognormal latency; 0 for a fixed one."""
    token_s: float = 0.0
    """Time for each token of the answer on top."""
    retry_after_s: float | None = None
    """Sent with 429 and 503; limits by the minute always say how long to wait."""
    rpm: int | None = None
    tpm: int | None = None
    burst_s: float = 60.0
    """How many seconds' worth of unused requests or tokens may be taken at once."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """How often each fault of `FAULTS` strikes."""
    script: Sequence[str | None] | Mapping[str, str | Sequence[str | None]] = ()
    """The fault of the i-th call taken; or, by a part of the prompt, its faults in turn."""
    slow_factor: float = 10.0
    drip_s: float = 0.05
    seed: int = 0
    words: int = 8
    """Length of plain answers."""
    dim: int = 256
    """Length of vectors, unless a request asks for another."""
    models: Sequence[str] = ()
    """More model names, which answer as `sim` does to a plain prompt."""
    questions: Path | Sequence[Question | Mapping[str, str]] = ()
    """What `sim-qa` knows, or the file it stands in."""
    rules: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(RULES))
    """The traits of a wording that `sim-qa` needs to understand it, by category."""
    api_key: str | None = field(default=None, repr=False)
    """If set, calls without it get 401."""

    def __post_init__(self) -> None:
        questions = self.questions
        if isinstance(questions, Path | str):
            known = read_questions(Path(questions))
        else:
            known = tuple(q if isinstance(q, Question) else _question(q) for q in questions)
        schedule = ((0.0, self.knee),) if isinstance(self.knee, int) else tuple(self.knee)
        object.__setattr__(self, "questions", known)
        object.__setattr__(self, "knee", tuple((float(t), int(k)) for t, k in schedule))
        self._check()

    @property
    def schedule(self) -> tuple[tuple[float, int], ...]:
        assert isinstance(self.knee, tuple)
        return self.knee

    def target(self) -> Target:
        """The model behind `sim-qa`: what it understands, and the best plan for each question.

        Built anew each time, from all questions: keep it.
        """
        assert isinstance(self.questions, tuple)
        return Target(self.questions, self.rules)

    @property
    def model_names(self) -> tuple[str, ...]:
        return (*MODELS, *self.models)

    def fault_of(self, prompt: str, key: bytes, seen: int, number: int) -> str | None:
        """The fault that strikes the `number`-th call, whose request was `seen` times before."""
        if isinstance(self.script, Mapping):
            for part, planned in self.script.items():
                if part in prompt:
                    turns = [planned] * (seen + 1) if isinstance(planned, str) else planned
                    return turns[seen] if seen < len(turns) else None
        elif number < len(self.script):
            return self.script[number]
        if not self.faults:
            return None
        left = uniform(self.seed, "fault", key, seen)
        for name, chance in self.faults.items():
            left -= chance
            if left < 0.0:
                return name
        return None

    def seconds_of(self, key: bytes, seen: int, tokens: int) -> float:
        """How long a call takes on a server of its own."""
        seconds = self.latency_s
        if self.sigma > 0.0 and seconds > 0.0:
            drawn = NORMAL.inv_cdf(max(uniform(self.seed, "latency", key, seen), 1e-12))
            # Less half the variance: the mean stays what it is called, whatever the spread.
            seconds *= 2.718281828459045 ** (self.sigma * (drawn - self.sigma / 2.0))
        return seconds + self.token_s * tokens

    @contextmanager
    def running(
        self, *, port: int = 0, unix: Path | None = None, in_thread: bool = False
    ) -> "Iterator[RunningSimulator]":
        """Serve until the block ends, in a process of its own unless `in_thread`."""
        from batchwright.calls.simulator.process import running

        with running(self, port=port, unix=unix, in_thread=in_thread) as url:
            yield url

    def in_process(self) -> Callable[[Sequence[Request]], list[dict[str, Any]]]:
        """The models as a plain function of requests: no server, no latency, no faults."""
        from batchwright.calls.simulator.answers import Models

        return Models(self).answer_all

    def to_json(self) -> str:
        """Everything it is, for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def _check(self) -> None:
        times = [since for since, _ in self.schedule]
        if not times or times[0] != 0.0 or times != sorted(set(times)):
            raise ConfigError(
                f"the knee's times are {times}; they must begin with 0 and grow, "
                f"as in knee=[(0, 60), (10, 20)]"
            )
        if self.kind not in ("queue", "reject", "thrash", "batch"):
            raise ConfigError(f"kind={self.kind!r} is none of queue, reject, thrash, batch")
        small = {"knee": min(knee for _, knee in self.schedule), "rpm": self.rpm, "tpm": self.tpm}
        for name, value in small.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("latency_s", "sigma", "token_s", "drip_s", "slow_factor"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        planned = {*self.faults, *_scripted(self.script)}
        if unknown := sorted(planned - FAULTS.keys()):
            raise ConfigError(f"there is no fault {unknown[0]!r}; there are: {', '.join(FAULTS)}")
        chances = list(self.faults.values())
        if any(chance < 0 for chance in chances) or sum(chances) > 1.0 + 1e-9:
            raise ConfigError(
                f"the chances of faults are {chances}; none may be negative, their sum at most 1"
            )
        self.target()  # the rules are checked there


def _question(given: Mapping[str, str]) -> Question:
    try:
        more = {name: given.get(name, "") for name in ("category", "id")}
        return Question(given["question"], given["answer"], **more)
    except KeyError as error:
        raise ConfigError(f"a question has no {error}; it needs question and answer") from None


def _scripted(script: Sequence[str | None] | Mapping[str, str | Sequence[str | None]]) -> set[str]:
    parts = list(script.values()) if isinstance(script, Mapping) else [script]
    named = [[part] if isinstance(part, str) else part for part in parts]
    return {fault for faults in named for fault in faults if fault is not None}
