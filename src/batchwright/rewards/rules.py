"""Rewards without a model: format, correctness, verbosity, regex, numbers, text, JSON schema."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from batchwright.calls.outcome import Outcome
from batchwright.calls.request import Request
from batchwright.errors import ConfigError, need
from batchwright.rewards.answers import Answer, Verdict, compare, read_answer, read_truth
from batchwright.rewards.numbers import Number
from batchwright.rewards.reward import Fact, Part, Response

__all__ = [
    "Contains",
    "Correctness",
    "Exact",
    "Format",
    "JsonSchema",
    "Numeric",
    "Pattern",
    "Rule",
    "TimedPattern",
    "Verbosity",
    "compile_pattern",
    "tagged_list",
    "verdict_part",
]

MOST_PATTERN_S = 1.0
"""Processor seconds of one pattern on one response."""
_WORDS = {"true": True, "false": False, "yes": True, "no": False, "null": None, "none": None}


class Rule(BaseModel):
    """A part of a reward; subclasses define its calls and its value.

    Scoring has two steps, so that all calls of all parts of all responses are in flight
    together: `requests_of` returns the calls, `part_of` reads their outcomes in the same order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """Its column; default: the kind."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    datasets: tuple[str, ...] = ()
    """Data sets it applies to, names or prefixes ending in `*`; empty: all."""

    @property
    def column(self) -> str:
        return self.name or str(getattr(self, "kind", type(self).__name__.lower()))

    @property
    def fact_names(self) -> tuple[str, ...]:
        """The facts of its parts, so that all rows have the same columns."""
        return ()

    def applies(self, response: Response) -> bool:
        """
        >>> Verbosity(datasets=("diamonds-*",)).applies(Response("", dataset="diamonds-seed0"))
        True
        """
        return not self.datasets or any(
            response.dataset == name
            or (name.endswith("*") and response.dataset.startswith(name[:-1]))
            for name in self.datasets
        )

    def requests_of(self, response: Response) -> Sequence[Request]:
        """The calls that this part needs for one response."""
        return ()

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """The value of the response, given the outcomes of its calls."""
        raise NotImplementedError


class Format(Rule):
    """0.5 for a pair of tags, 0.5 for a list between them that can be parsed."""

    kind: Literal["format"] = "format"
    tag: str = "measurements"

    @property
    def fact_names(self) -> tuple[str, ...]:
        return ("tags", "readable")

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> Format().part_of(Response("<measurements>[true]</measurements>"), ()).value
        1.0
        """
        tags = f"<{self.tag}>" in response.text and f"</{self.tag}>" in response.text
        read = tagged_list(response.text, self.tag) is not None
        return Part(0.5 * tags + 0.5 * read, facts={"tags": tags, "readable": read})


class Correctness(Rule):
    """The fraction of a tagged list that equals the truth, element by element."""

    kind: Literal["correctness"] = "correctness"
    tag: str = "measurements"
    scale: float = 3.0
    """The value of a list without a mistake."""
    wrong_count: Literal["zero", "partial"] = "zero"
    """A list of another length: 0, or the equal elements divided by the true length."""

    @property
    def fact_names(self) -> tuple[str, ...]:
        return ("proportion_correct", "all_correct", "wrong_number")

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> answer = "<measurements>[true, false]</measurements>"
        >>> Correctness().part_of(Response(answer, "[true, true]"), ()).value
        1.5
        """
        truth = _truths(response.truth)
        if not truth:
            return Part.missing("bad_truth", f"the truth {response.truth!r} is not a list")
        found = tagged_list(response.text, self.tag)
        other = found is not None and len(found) != len(truth)
        share = 0.0
        if found is not None and not (other and self.wrong_count == "zero"):
            share = sum(a == b for a, b in zip(found, truth, strict=False)) / len(truth)
        facts = {
            "proportion_correct": share,
            "all_correct": share == 1.0 and not other,
            "wrong_number": other,
        }
        return Part(self.scale * share, facts=facts)


class Verbosity(Rule):
    """The number of words before a tag, or of all words without one; the weight is their price."""

    kind: Literal["verbosity"] = "verbosity"
    tag: str = "measurements"

    @property
    def fact_names(self) -> tuple[str, ...]:
        return ("words",)

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> Verbosity().part_of(Response("so it is <measurements>[1]</measurements>"), ()).value
        3.0
        """
        words = len(response.text.partition(f"<{self.tag}>")[0].split())
        return Part(float(words), facts={"words": words})


class Pattern(Rule):
    """1 if a regular expression matches, else 0.

    One that takes over a second on a response makes the part invalid: `pattern_timeout`.
    """

    kind: Literal["regex"] = "regex"
    pattern: str

    @model_validator(mode="after")
    def _compiles(self) -> "Pattern":
        _ = self._compiled
        return self

    @cached_property
    def _compiled(self) -> "TimedPattern":
        return compile_pattern(self.pattern)

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> Pattern(pattern=r"#### \\d+$").part_of(Response("so #### 12"), ()).value
        1.0
        """
        try:
            return Part(float(bool(self._compiled.findall(response.text, first=True))))
        except TimeoutError as error:
            return Part.missing("pattern_timeout", str(error))


class Numeric(Rule):
    """1 if the answer of the response equals the truth, else 0; `answers` tells where it is.

    Integers and fractions are compared exactly, decimals within a tolerance.
    """

    kind: Literal["numeric"] = "numeric"
    tolerance: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """For decimals, relative to the truth, absolute if that is below 1; default: a millionth of
    the truth, and never more than half the last written digit."""
    ambiguous: Literal["invalid", "wrong"] = "invalid"
    """What an answer is that is right in one of its readings only, or is not read."""

    @property
    def fact_names(self) -> tuple[str, ...]:
        # Where it stood is text, and shown by `reward explain`: trainers average columns.
        return ("number",)

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> Numeric().part_of(Response("It is $1,200.", "#### 1200"), ()).value
        1.0
        >>> Numeric().part_of(Response("1.200 dollars", "1200"), ()).why
        'ambiguous'
        """
        truth = read_truth(response.truth)
        if truth is None:
            return Part.missing(
                "bad_truth",
                f"the truth {response.truth!r} is no number; the part math compares expressions",
            )
        answer = read_answer(response.text)
        return verdict_part(compare(answer, truth, self.tolerance), answer, self.ambiguous)


class Exact(Rule):
    """1 if the response equals the truth, ignoring case, whitespace and a final full stop."""

    kind: Literal["exact"] = "exact"

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> Exact().part_of(Response(" Paris. ", "paris"), ()).value
        1.0
        """
        if not isinstance(response.truth, str) or not response.truth.strip():
            return Part.missing("bad_truth", f"the truth {response.truth!r} is not a text")
        return Part(float(_normalized(response.text) == _normalized(response.truth)))


class Contains(Rule):
    """1 if the response contains the truth as whole words, else 0."""

    kind: Literal["contains"] = "contains"

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        """
        >>> Contains().part_of(Response("The capital is Paris, of course.", "Paris"), ()).value
        1.0
        >>> Contains().part_of(Response("15", "5"), ()).value
        0.0
        """
        if not isinstance(response.truth, str) or not response.truth.strip():
            return Part.missing("bad_truth", f"the truth {response.truth!r} is not a text")
        plain, text = _normalized(response.truth), response.text.casefold()
        if plain.partition(" ")[0] not in text:
            return Part(0.0)
        wanted = re.escape(plain).replace(r"\ ", r"\s+")
        return Part(float(re.search(rf"(?<!\w){wanted}(?!\w)", text) is not None))


class JsonSchema(Rule):
    """1 if the response is JSON that matches a schema, 0.5 if it is other JSON, else 0."""

    kind: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] = Field(alias="schema")

    @cached_property
    def _validator(self) -> Any:
        jsonschema = need("jsonschema", extra="schema")
        maker = jsonschema.validators.validator_for(self.schema_)
        try:
            maker.check_schema(self.schema_)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"the JSON schema is invalid: {error.message}") from None
        return maker(self.schema_)

    @property
    def fact_names(self) -> tuple[str, ...]:
        return ("json", "fits")

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        text = response.text.strip()
        if text.startswith("```"):
            text = text.removeprefix("```").removeprefix("json").removesuffix("```")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return Part(0.0, facts={"json": False, "fits": False})
        fits = bool(self._validator.is_valid(found))
        return Part(1.0 if fits else 0.5, facts={"json": True, "fits": fits})


def tagged_list(text: str, tag: str) -> list[Any] | None:
    """The values of the last `<tag>[...]</tag>` of a text; None if there is none to parse.

    >>> tagged_list("<m>[True, 2, 'x']</m>", "m")
    [True, 2, 'x']
    """
    mark = re.escape(tag)
    # The match stops at the next tag, so that a text that repeats the tag a thousand times, as
    # policies do, takes linear time.
    inside = rf"<{mark}>\s*\[((?:(?!<{mark}>).)*?)\]\s*</{mark}>"
    found = re.findall(inside, text, re.DOTALL)
    return _values(found[-1]) if found else None


def verdict_part(verdict: Verdict, answer: Answer, ambiguous: Literal["invalid", "wrong"]) -> Part:
    """The part of a compared answer, with the number that was read and where it stood."""
    first = answer.readings[0].value if answer.readings else None
    # Exact numbers may be larger than any float.
    small = isinstance(first, Number) and abs(first.value) < 10**300
    number = float(first.value) if isinstance(first, Number) and small else None
    facts: dict[str, Fact] = {"number": number, "where": answer.where}
    if verdict == "ambiguous" and ambiguous == "invalid":
        shown = answer.text if len(answer.text) <= 60 else answer.text[:57] + "..."
        return Part.missing(
            "ambiguous",
            f"the answer {shown!r} can be read in several ways, or not at all; "
            f'set ambiguous = "wrong" to count such answers as wrong',
            facts,
        )
    return Part(float(verdict == "right"), facts=facts)


class TimedPattern:
    """A regular expression of Python, which ends in time whatever the text is."""

    def __init__(self, pattern: str) -> None:
        # The engine of the standard library cannot be stopped while it backtracks.
        import regex

        self.groups = re.compile(pattern).groups
        self._compiled = regex.compile(pattern)

    def findall(self, text: str, *, first: bool = False) -> list[str]:
        """The matches, or the group of each if there is one; with `first` one at most.

        Raises:
            TimeoutError: it takes more than `MOST_PATTERN_S`.
        """
        found = []
        try:
            for match in self._compiled.finditer(text, timeout=MOST_PATTERN_S):
                found.append(match[1 if self.groups == 1 else 0] or "")
                if first:
                    break
        except TimeoutError:
            raise TimeoutError(
                f"the pattern {self._compiled.pattern!r} takes over {MOST_PATTERN_S:g} s on a "
                f"response of {len(text):,} characters"
            ) from None
        return found


def compile_pattern(pattern: str) -> TimedPattern:
    """A compiled regular expression, or a ConfigError that says why it does not compile."""
    import regex

    try:
        return TimedPattern(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"the pattern {pattern!r} is not a regular expression: {error}") from None


def _truths(truth: Any) -> list[Any] | None:
    if isinstance(truth, str):
        inner = truth.strip()
        if not (inner.startswith("[") and inner.endswith("]")):
            return None
        return _values(inner[1:-1])
    if isinstance(truth, np.ndarray):
        # List columns of Parquet files are arrays.
        return list(truth.tolist()) if truth.ndim == 1 else None
    return list(truth) if isinstance(truth, list | tuple) else None


def _values(inside: str) -> list[Any] | None:
    """Comma-separated values in JSON or Python syntax; None if one cannot be parsed."""
    values: list[Any] = []
    for word in (word.strip() for word in inside.split(",")):
        if word.lower() in _WORDS:
            values.append(_WORDS[word.lower()])
            continue
        try:
            values.append(json.loads(word.replace("'", '"')))
        except (ValueError, RecursionError):
            return None
    return values


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
