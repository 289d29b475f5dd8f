"""A reward with its parts, and whether it is valid: invalid ones never enter the loss."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Part", "Response", "Reward", "message_text"]

Fact = float | str | bool | None


@dataclass(frozen=True, slots=True)
class Response:
    """What is scored: the text of a model, with its ground truth and prompt."""

    text: str
    truth: Any = None
    dataset: str = ""
    prompt: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a reward; if it is invalid, `value` is NaN and `why` names the reason."""

    value: float
    why: str = ""
    """Empty, a failure kind of calls (`timeout`, ...), `parse`, `ambiguous`, `bad_truth`,
    `missing_field`, `not_finite` for a value that is no finite number, or `rule_error` for a rule
    that raised."""
    error: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Further measurements, one column each."""

    def __post_init__(self) -> None:
        if not self.why and not math.isfinite(self.value):
            object.__setattr__(self, "why", "not_finite")
            object.__setattr__(self, "error", f"the value is {self.value}")
            object.__setattr__(self, "value", math.nan)

    @property
    def valid(self) -> bool:
        return not self.why

    @classmethod
    def missing(cls, why: str, error: str, facts: Mapping[str, Fact] | None = None) -> "Part":
        """An invalid part.

        >>> Part.missing("parse", "no score in the answer").valid
        False
        """
        return cls(math.nan, why, error, facts or {})


@dataclass(frozen=True, slots=True)
class Reward:
    """The weighted sum of the parts; NaN unless every part of nonzero weight is valid."""

    value: float
    valid: bool
    parts: Mapping[str, Part]
    why: str = ""
    """The reason of the first invalid part; empty if the reward is valid."""

    @classmethod
    def of(cls, parts: Mapping[str, tuple[float, Part]]) -> "Reward":
        """Sum (weight, part) by name; a part of weight 0 is reported and does not count.

        >>> Reward.of({"right": (2.0, Part(0.5)), "length": (0.0, Part.missing("parse", ""))}).value
        1.0
        """
        counted = [(weight, part) for weight, part in parts.values() if weight]
        valid = all(part.valid for _, part in counted)
        value = sum(weight * part.value for weight, part in counted) if valid else math.nan
        why = next((part.why for _, part in counted if not part.valid), "")
        return cls(float(value), valid, {name: part for name, (_, part) in parts.items()}, why)


def message_text(content: Any) -> Any:
    """The text of a list of chat messages, joined by newlines; anything else is returned as is.

    >>> message_text([{"role": "assistant", "content": "So it is 4."}])
    'So it is 4.'
    """
    if isinstance(content, str | Mapping) or not isinstance(content, Iterable):
        return content
    messages = list(content)
    if not all(isinstance(message, Mapping) for message in messages):
        return content
    # The content of a message may be a list too: of text and image parts.
    texts = [message_text(part.get("content") or part.get("text") or "") for part in messages]
    return "\n".join(text for text in texts if isinstance(text, str))
