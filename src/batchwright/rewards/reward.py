"""A reward with its parts, and whether it may be learned from."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Part", "Response", "Reward", "words"]

Fact = float | str | bool | None


@dataclass(frozen=True, slots=True)
class Response:
    """What is scored: a model's words and what is known about the right ones."""

    text: str
    truth: Any = None
    dataset: str = ""
    prompt: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a reward. If it is not valid, `value` is NaN and `why` names the kind."""

    value: float
    why: str = ""
    """Empty, a kind of failed call (`timeout`, ...), or `parse`, `bad_truth`, `missing_field`."""
    error: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What else was seen, as columns."""

    @property
    def valid(self) -> bool:
        return not self.why

    @classmethod
    def missing(cls, why: str, error: str, facts: Mapping[str, Fact] | None = None) -> "Part":
        """A part that could not be found out.

        >>> Part.missing("parse", "no score in the answer").valid
        False
        """
        return cls(math.nan, why, error, facts or {})


@dataclass(frozen=True, slots=True)
class Reward:
    """The weighted sum of the parts; NaN unless every part with a weight is valid."""

    value: float
    valid: bool
    parts: Mapping[str, Part]
    why: str = ""
    """The kind of the first part that spoilt it; empty if it is valid."""

    @classmethod
    def of(cls, parts: Mapping[str, tuple[float, Part]]) -> "Reward":
        """Sum (weight, part) by name. A part of weight 0 is looked at and does not count.

        >>> Reward.of({"right": (2.0, Part(0.5)), "length": (0.0, Part.missing("parse", ""))}).value
        1.0
        """
        counted = [(weight, part) for weight, part in parts.values() if weight]
        valid = all(part.valid for _, part in counted)
        value = sum(weight * part.value for weight, part in counted) if valid else math.nan
        why = next((part.why for _, part in counted if not part.valid), "")
        return cls(float(value), valid, {name: part for name, (_, part) in parts.items()}, why)


def words(said: Any) -> Any:
    """The text of a list of messages, one below the other; anything else stays as it is.

    >>> words([{"role": "assistant", "content": "So it is 4."}])
    'So it is 4.'
    """
    if isinstance(said, str) or not isinstance(said, Iterable) or isinstance(said, Mapping):
        return said
    turns = list(said)
    if not all(isinstance(turn, Mapping) for turn in turns):
        return said
    # A content may itself be a list: of texts, beside pictures.
    contents = [words(turn.get("content") or turn.get("text") or "") for turn in turns]
    return "\n".join(content for content in contents if isinstance(content, str))
