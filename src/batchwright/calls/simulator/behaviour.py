"""The settings of a simulated server: its concurrency, latency, rate limits and faults."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Self

from batchwright.calls.simulator.questions import (
    RULES,
    Question,
    Target,
    read_questions,
    uniform,
)
from batchwright.calls.simulator.service import ServerKind
from batchwright.errors import ConfigError

__all__ = ["FAULTS", "MODELS", "Behaviour"]

MODELS = ("sim", "sim-qa", "sim-mutator", "sim-judge", "sim-embed")

FAULTS = {
    "429": "rejected at once, with Retry-After if it is set",
    "500": "an error at once",
    "503": "an error at once, with Retry-After if it is set",
    "hang": "no response ever, and the slot stays taken until the client leaves",
    "reset": "half of the response, then a reset of the connection",
    "cut": "half of the response, then the end of the connection",
    "html": "status 200 and an HTML page instead of JSON",
    "bad_json": "status 200 and half of the JSON",
    "empty": "a response without a text",
    "wrong_shape": "JSON of another schema",
    "drip": "the response byte by byte, `drip_s` apart",
    "slow": "the response after `slow_factor` times its latency",
}
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What the server is like.

    Latencies, random faults and responses are drawn from the seed, the request and how often
    it was accepted before, never from the order in which requests arrive.
    """

    kind: ServerKind = "queue"
    knee: int | Sequence[tuple[float, int]] = 8
    """Calls it sustains at once, or pairs of (second since its start, knee from then on)."""
    latency_s: float = 0.05
    """Mean latency of a call that is alone."""
    sigma: float = 0.5
    """Sigma of the lognormal latency; 0 for a fixed one."""
    token_s: float = 0.0
    """Additional time per completion token."""
    retry_after_s: float | None = None
    """Sent with 429 and 503; `rpm` and `tpm` always say how long to wait."""
    rpm: int | None = None
    tpm: int | None = None
    burst_s: float = 60.0
    """How many seconds' worth of unused requests or tokens may be used at once."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """The probability of each fault of `FAULTS`."""
    script: Sequence[str | None] | Mapping[str, str | Sequence[str | None]] = ()
    """The fault of the i-th call accepted; or, by a part of the prompt, its faults in turn."""
    slow_factor: float = 10.0
    drip_s: float = 0.05
    seed: int = 0
    words: int = 8
    """Words of a plain response."""
    dim: int = 256
    """Embedding dimension, unless a request sets another."""
    models: Sequence[str] = ()
    """More model names, which respond as `sim` does to a plain prompt."""
    questions: Path | Sequence[Question | Mapping[str, str]] = ()
    """What `sim-qa` knows, or the file that holds it."""
    rules: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(RULES))
    """The traits of a wording that `sim-qa` needs to understand it, by category."""
    context: int | None = None
    """Tokens of every model's context, which end a response and which its lists of models say."""
    batch_s: float = 0.1
    """How long a batch of the Batch API takes, however many lines it has."""
    batch_window_s: float = 86_400.0
    """When a batch that is not done expires."""
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
        """The fault of the `number`-th call, whose request was `seen` times before."""
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
        for name, probability in self.faults.items():
            left -= probability
            if left < 0.0:
                return name
        return None

    def seconds_of(self, key: bytes, seen: int, tokens: int) -> float:
        """How long a call takes when it is alone."""
        seconds = self.latency_s
        if self.sigma > 0.0 and seconds > 0.0:
            drawn = NORMAL.inv_cdf(max(uniform(self.seed, "latency", key, seen), 1e-12))
            # Less half the variance: the mean stays `latency_s`, whatever sigma is.
            seconds *= 2.718281828459045 ** (self.sigma * (drawn - self.sigma / 2.0))
        return seconds + self.token_s * tokens

    def to_json(self) -> str:
        """All settings, for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def _check(self) -> None:
        times = [since for since, _ in self.schedule]
        if not times or times[0] != 0.0 or times != sorted(set(times)):
            raise ConfigError(
                f"the times of the knee must begin with 0 and increase, as in "
                f"knee=[(0, 60), (10, 20)], got {times}"
            )
        if self.kind not in ("queue", "reject", "thrash", "batch"):
            raise ConfigError(f"kind must be queue, reject, thrash or batch, got {self.kind!r}")
        small = {"knee": min(knee for _, knee in self.schedule), "rpm": self.rpm}
        small |= {"tpm": self.tpm, "context": self.context}
        for name, value in small.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("latency_s", "sigma", "token_s", "drip_s", "slow_factor", "batch_s"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ConfigError(f"{name} must be finite and at least 0, got {value}")
        planned = {*self.faults, *_scripted(self.script)}
        if unknown := sorted(planned - FAULTS.keys()):
            raise ConfigError(f"unknown fault {unknown[0]!r}; choose from {', '.join(FAULTS)}")
        probabilities = list(self.faults.values())
        if any(one < 0 for one in probabilities) or sum(probabilities) > 1.0 + 1e-9:
            raise ConfigError(
                f"the probabilities of faults must be at least 0 and sum to at most 1, "
                f"got {probabilities}"
            )
        self.target()  # the rules are checked there


def _question(given: Mapping[str, str]) -> Question:
    try:
        more = {name: given.get(name, "") for name in ("category", "id")}
        return Question(given["question"], given["answer"], **more)
    except KeyError as error:
        raise ConfigError(f"a question needs question and answer, and has no {error}") from None


def _scripted(script: Sequence[str | None] | Mapping[str, str | Sequence[str | None]]) -> set[str]:
    parts = list(script.values()) if isinstance(script, Mapping) else [script]
    named = [[part] if isinstance(part, str) else part for part in parts]
    return {fault for faults in named for fault in faults if fault is not None}
