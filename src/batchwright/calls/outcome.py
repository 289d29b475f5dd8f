"""What a call came to: the server's answer, or the kind of its failure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

__all__ = ["Done", "Failed", "Kind", "Outcome", "Source", "Usage"]

Source = Literal["live", "cache", "shared", "hedge"]
"""Who answered: the server, the cache, an equal call in flight, the second try of a straggler."""


class Kind(StrEnum):
    """Why a call failed. `Failed.error` has the details."""

    RATE_LIMITED = "rate_limited"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    BAD_BODY = "bad_body"
    TRUNCATED = "truncated"
    HTTP_4XX = "http_4xx"
    HTTP_5XX = "http_5xx"
    EMPTY = "empty"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Done:
    """An answer; true in a condition."""

    text: str
    """The first choice's text; "" for embeddings."""
    body: Mapping[str, Any]
    """The whole answer in the OpenAI shape, whatever protocol it came by."""
    finish: str | None = None
    """`stop`, `length`, ... as the server said; `length` means that the answer was cut off."""
    usage: Usage | None = None
    """None if the server did not say."""
    seconds: float = 0.0
    tries: int = 1
    source: Source = "live"
    endpoint: str = ""
    raw: bytes | None = field(default=None, repr=False, compare=False)
    """The body as it was sent, until the cache has it: so nobody writes it as JSON again. Only
    where text, finish and usage are what `read_off` finds in it."""

    def __bool__(self) -> Literal[True]:
        return True

    @property
    def vectors(self) -> list[list[float]]:
        """Of an embedding request: one vector an input, in the order of the inputs."""
        rows = sorted(self.body.get("data", ()), key=lambda row: row.get("index", 0))
        return [row["embedding"] for row in rows]


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer; false in a condition. There is nothing in it that could pass for one."""

    kind: Kind
    error: str
    """One sentence; never holds a key or the prompt."""
    status: int | None = None
    seconds: float = 0.0
    tries: int = 1
    endpoint: str = ""
    retry_after_s: float | None = field(default=None, compare=False)

    def __bool__(self) -> Literal[False]:
        return False


Outcome = Done | Failed
