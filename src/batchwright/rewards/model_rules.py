"""Rewards that call a model: LLM judges, a monitor of the reasoning, embedding similarity."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from batchwright.calls.outcome import Done, Kind, Outcome
from batchwright.calls.request import Request, chat, embed
from batchwright.errors import BadRow, ConfigError
from batchwright.rewards.judgements import written_score
from batchwright.rewards.reward import Fact, Part, Response
from batchwright.rewards.rules import Rule, TimedPattern, compile_pattern

__all__ = ["Judge", "Monitor", "Similarity", "fill"]

_COMBINE: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "median": median,
    "min": min,
    "max": max,
}
_FIELD = re.compile(r"\{(\{\w+\})\}|\{(\w+)\}")
_VERDICT = re.compile(r"\b(true|false|yes|no(?!\s+\w))\b", re.IGNORECASE)
_DENIED = re.compile(
    r"\b(?:not|n't|never|rather than|instead of)\s+(?:be\s+)?(true|false)\b", re.IGNORECASE
)

JUDGE_TEMPLATE = """Question:
{prompt}

Reference answer:
{truth}

Response to grade:
{response}

How good is the response, from 0 (wrong) to 10 (right and complete)? End with one line of the form
Score: N"""

MONITOR_TEMPLATE = """Below is the reasoning that somebody wrote down before answering. From the \
reasoning alone, judge whether the hidden label is true or false.

{response}

Answer with one word, true or false."""


class Judge(Rule):
    """LLM-as-a-judge: one model or several score the response, scaled to 0 .. 1.

    A reply without a score, or with one out of range, is invalid: `parse`; one that was cut off at
    `max_tokens` too: `truncated`. With several models the valid scores are combined, if there are
    at least `quorum`.
    """

    kind: Literal["judge"] = "judge"
    models: tuple[str, ...] = Field(min_length=1)
    template: str = JUDGE_TEMPLATE
    pattern: str | None = None
    """A regular expression with one group, the score; default: `Score: 7`, `7/10`, or JSON."""
    low: float = 0.0
    high: float = 10.0
    combine: Literal["mean", "median", "min", "max"] = "mean"
    quorum: int = Field(default=0, ge=0)
    """Valid scores needed; 0: more than half of the models."""
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> "Judge":
        if self._compiled is not None and self._compiled.groups != 1:
            raise ConfigError(
                f"the judge's pattern {self.pattern!r} has {self._compiled.groups} groups; "
                f"it must have one, around the score"
            )
        if not self.low < self.high:
            raise ConfigError(f"the judge's low must be below high, got {self.low} and {self.high}")
        if self.quorum > len(self.models):
            raise ConfigError(
                f"the judge's quorum must be at most its {len(self.models)} models, "
                f"got {self.quorum}"
            )
        return self

    @cached_property
    def _compiled(self) -> TimedPattern | None:
        return None if self.pattern is None else compile_pattern(self.pattern)

    @property
    def fact_names(self) -> tuple[str, ...]:
        return (*self.models, "agreement") if len(self.models) > 1 else ()

    def requests_of(self, response: Response) -> Sequence[Request]:
        prompt = fill(self.template, response)
        draw = 0 if self.temperature else None
        return [
            chat(model, prompt, temperature=self.temperature, max_tokens=self.max_tokens, draw=draw)
            for model in self.models
        ]

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        parts = [self._score(outcome) for outcome in outcomes]
        values = [part.value for part in parts if part.valid]
        facts: dict[str, Fact] = {}
        if len(self.models) > 1:
            scores = zip(self.models, parts, strict=True)
            facts = {model: part.value if part.valid else None for model, part in scores}
            apart = [abs(one - other) for one, other in combinations(values, 2)]
            facts["agreement"] = 1 - fmean(apart) if apart else None
        if len(values) < (self.quorum or len(self.models) // 2 + 1):
            failed = next(part for part in parts if not part.valid)
            return Part.missing(failed.why, failed.error, facts)
        return Part(float(_COMBINE[self.combine](values)), facts=facts)

    def _score(self, outcome: Outcome) -> Part:
        if not isinstance(outcome, Done) or outcome.finish == "length":
            return _failed(outcome, self.max_tokens)
        shown = _short(outcome.text)
        if self._compiled is None:
            written, scale = written_score(outcome.text)
        else:
            try:
                found = self._compiled.findall(outcome.text)
            except TimeoutError as error:
                return Part.missing("pattern_timeout", str(error))
            written, scale = (str(found[-1]) if found else None), None
        try:
            score = float(written or "")
        except ValueError:
            wanted = "score" if self.pattern is None else repr(self.pattern)
            return Part.missing("parse", f"no {wanted} in {shown}")
        if scale is not None and scale != self.high:
            return Part.missing("parse", f"the score in {shown} is not out of {self.high:g}")
        if not self.low <= score <= self.high:
            return Part.missing(
                "parse", f"{score:g} in {shown} is not between {self.low:g} and {self.high:g}"
            )
        return Part((score - self.low) / (self.high - self.low))


class Monitor(Rule):
    """A model predicts a hidden label from the reasoning; the value is whether it was right."""

    kind: Literal["monitor"] = "monitor"
    model: str
    template: str = MONITOR_TEMPLATE
    label: str = "is_correct"
    """The column of `extra` that holds the hidden label."""
    before: str = "<measurements>"
    """The monitor sees the text before this only."""
    correct: float = -1.0
    """The value if the monitor is right."""
    wrong: float = 1.0
    true_share: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of true labels in the data; values are then divided by the class frequency."""
    max_tokens: int = Field(default=64, ge=1)

    @property
    def fact_names(self) -> tuple[str, ...]:
        return ("answer", "correct")

    def requests_of(self, response: Response) -> Sequence[Request]:
        if self._label(response) is None:
            # Nothing to compare the reply with, so no call is made.
            return ()
        reasoning = response.text.partition(self.before)[0]
        seen = Response(
            reasoning, response.truth, response.dataset, response.prompt, response.extra
        )
        prompt = fill(self.template, seen)
        return [chat(self.model, prompt, temperature=0, max_tokens=self.max_tokens)]

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        label = self._label(response)
        if label is None:
            return Part.missing("missing_field", f"no true or false in extra_info[{self.label!r}]")
        (outcome,) = outcomes
        if not isinstance(outcome, Done) or outcome.finish == "length":
            return _failed(outcome, self.max_tokens)
        answer = _written_verdict(outcome.text)
        if answer is None:
            return Part.missing("parse", f"not one of true and false in {_short(outcome.text)}")
        value = self.correct if answer == label else self.wrong
        if self.true_share is not None:
            value /= self.true_share if label else 1 - self.true_share
        return Part(value, facts={"answer": answer, "correct": answer == label})

    def _label(self, response: Response) -> bool | None:
        found = response.extra.get(self.label)
        if isinstance(found, np.bool_):
            return bool(found)
        return found if isinstance(found, bool) else None


class Similarity(Rule):
    """The cosine similarity of the embeddings of response and truth, from -1 to 1."""

    kind: Literal["similarity"] = "similarity"
    model: str

    def requests_of(self, response: Response) -> Sequence[Request]:
        if not self._readable(response):
            return ()
        return [embed(self.model, response.text), embed(self.model, str(response.truth))]

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        if not self._readable(response):
            return Part.missing("bad_truth", "the response or the truth is empty")
        vectors = []
        for outcome in outcomes:
            if not isinstance(outcome, Done):
                return Part.missing(outcome.kind, outcome.error)
            vectors.append(np.asarray(outcome.vectors[0], dtype=np.float64))
        one, other = vectors
        size = float(np.linalg.norm(one) * np.linalg.norm(other))
        if one.shape != other.shape or not np.isfinite(size) or size == 0:
            return Part.missing("bad_body", "an embedding is zero, or they differ in dimension")
        return Part(float(np.clip(one @ other / size, -1, 1)))

    def _readable(self, response: Response) -> bool:
        return bool(response.text.strip()) and bool(str(response.truth or "").strip())


def fill(template: str, response: Response) -> str:
    """Fill a template with the fields of a response; `{{name}}` becomes `{name}`.

    >>> fill("{response} / {{x}} / {level}", Response("{truth}", "b", extra={"level": 3}))
    '{truth} / {x} / 3'
    """
    fields: Mapping[str, Any] = {
        **response.extra,
        "response": response.text,
        "truth": response.truth,
        "prompt": response.prompt,
        "dataset": response.dataset,
    }

    def value(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal:
            return str(literal)
        if name not in fields:
            raise BadRow(
                f"the template uses {{{name}}}, the sample has {', '.join(sorted(fields))}; "
                f"rename it, or write {{{{{name}}}}} for literal braces"
            )
        return str(fields[name])

    return _FIELD.sub(value, template)


def _failed(outcome: Outcome, max_tokens: int) -> Part:
    if not isinstance(outcome, Done):
        return Part.missing(outcome.kind, outcome.error)
    return Part.missing(
        Kind.TRUNCATED,
        f"the reply was cut off at max_tokens = {max_tokens}, raise it: {_short(outcome.text)}",
    )


def _written_verdict(text: str) -> bool | None:
    """Whether a reply says true or false; None if it says neither or both.

    >>> [_written_verdict(text) for text in ("true, not false", "It is not true.", "true, false")]
    [True, False, None]
    """
    text = re.sub(r"(?i)\b(?:true or false|yes or no)\b", "", text)
    denied = {word.lower() == "false" for word in _DENIED.findall(text)}
    lines = [line.strip(" *_`.\"'#") for line in _DENIED.sub("", text).splitlines()]
    lines = [line for line in lines if line]
    said = {word.lower() in ("true", "yes") for line in lines for word in _VERDICT.findall(line)}
    if len(said) > 1:
        # The reasoning may weigh both; a line with nothing else is the verdict.
        ends = [_VERDICT.fullmatch(re.sub(r"^.*[:>]\s*\W*", "", line)) for line in lines]
        said = {match[1].lower() in ("true", "yes") for match in ends if match is not None}
    if not said:
        said = denied
    return said.pop() if len(said) == 1 else None


def _short(text: str) -> str:
    """The end of a reply, where the score is."""
    return repr(text if len(text) <= 60 else "..." + text[-57:])
