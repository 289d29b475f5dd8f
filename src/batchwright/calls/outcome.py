"""The outcome of a call: the server's response, or the kind of failure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

__all__ = [
    "Done",
    "Failed",
    "Kind",
    "Outcome",
    "Source",
    "Usage",
    "content_text",
    "parse_body",
    "read_body",
]

Source = Literal["live", "cache", "shared", "hedge"]
"""Where a response came from: the server, the cache or the memory of the pool, an equal call in
flight, a hedged retry."""

MOST_TOKENS = 10**8
"""A server that counts more tokens for one call, or fewer than none, has not counted."""
MOST_VALUES = 2 * 10**6
"""Lists and objects in one body: a megabyte of `[]` is twenty of memory."""
_PARSE = json.JSONDecoder().decode

MAY_BE_BILLED = frozenset({408, 499, 502, 504, 524})
"""Error statuses of those who stopped waiting for a server that may have done the work."""
CUT_OFF = ("length", "content_filter")
"""Finish reasons that leave a response incomplete."""


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
    """Token counts as the server reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Done:
    """A response; true in a condition."""

    text: str
    """The first choice's text; "" for embeddings."""
    body: Mapping[str, Any]
    """The whole response in the OpenAI format, whatever protocol it came by; of a `respond` request
    in the format of the Responses API."""
    finish: str | None = None
    """`stop`, `length`, ... as the server reported; `length` means that the text was cut off."""
    usage: Usage | None = None
    """None if the server reported none."""
    seconds: float = 0.0
    tries: int = 1
    source: Source = "live"
    endpoint: str = ""
    raw: bytes | None = field(default=None, repr=False, compare=False)
    """The body as the wire delivered it, for the cache: no JSON is written twice. Only where
    `read_body` finds the same text, finish and usage in it; outcomes of a pool have none."""

    def __bool__(self) -> Literal[True]:
        return True

    @property
    def cut_off(self) -> bool:
        """Whether any choice of the response stopped before its end, say at `max_tokens`."""
        if self.finish in CUT_OFF:
            return True
        choices = self.body.get("choices")
        if not isinstance(choices, list) or len(choices) < 2:
            return False
        return any(isinstance(o, Mapping) and o.get("finish_reason") in CUT_OFF for o in choices)

    @property
    def vectors(self) -> list[list[float]]:
        """Of an embedding request: one vector per input, in the order of the inputs."""
        rows = sorted(self.body.get("data", ()), key=lambda row: row.get("index", 0))
        return [row["embedding"] for row in rows]


@dataclass(frozen=True, slots=True)
class Failed:
    """No response; false in a condition. Nothing in it could pass for a response."""

    kind: Kind
    error: str
    """One sentence; never holds an API key or the prompt."""
    status: int | None = None
    seconds: float = 0.0
    tries: int = 1
    endpoint: str = ""
    retry_after_s: float | None = field(default=None, compare=False)
    unsent: bool = field(default=False, compare=False)
    """The request certainly did not reach the server."""

    def __bool__(self) -> Literal[False]:
        return False

    @property
    def free(self) -> bool:
        """Whether nobody bills the try: it was refused, or did not reach the server.

        A server that was cut off, or responded with what cannot be read, may have done the work.
        """
        refused = self.status is not None and self.status >= 400
        return self.unsent or (refused and self.status not in MAY_BE_BILLED)


Outcome = Done | Failed


def read_body(body: Mapping[str, Any]) -> tuple[str, str | None, Usage | None]:
    """Text, finish reason and token counts of a response in the OpenAI format.

    >>> read_body({"choices": [{"text": "4", "finish_reason": "stop"}]})
    ('4', 'stop', None)
    """
    text, finish, usage = "", None, None
    if isinstance(output := body.get("output"), list):
        text, finish = _read_output(body, output)
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message, reason = choices[0].get("message"), choices[0].get("finish_reason")
        content = message.get("content") if isinstance(message, dict) else choices[0].get("text")
        content = content_text(content)
        text = content if isinstance(content, str) else ""
        finish = reason if isinstance(reason, str) else None
    counts = body.get("usage")
    if counts and isinstance(counts, dict):
        prompt = counts.get("prompt_tokens") or counts.get("input_tokens") or 0
        completion = counts.get("completion_tokens") or counts.get("output_tokens") or 0
        if type(prompt) is type(completion) is int and _counted(prompt) and _counted(completion):
            usage = Usage(prompt, completion)
    return text, finish, usage


def content_text(content: Any) -> Any:
    """The text of a message's content that comes in parts; anything else is returned as is.

    >>> content_text([{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}])
    'It is 4.'
    """
    if not isinstance(content, list) or not content:
        return content
    found = [part.get("text") for part in content if isinstance(part, dict)]
    texts = [text for text in found if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(content) else content


def _read_output(body: Mapping[str, Any], output: list[Any]) -> tuple[str, str | None]:
    """Text and finish reason of a body of the Responses API, in the words of chat completions."""
    items = [item for item in output if isinstance(item, dict)]
    texts = [
        part["text"]
        for item in items
        if item.get("type") == "message" and isinstance(item.get("content"), list)
        for part in item["content"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish: str | None = None
    if body.get("status") == "incomplete":
        finish = "length" if reason == "max_output_tokens" else str(reason)
    elif body.get("status") == "completed":
        called = any(item.get("type") == "function_call" for item in items)
        finish = "tool_calls" if called else "stop"
    return "".join(texts), finish


def parse_body(body: bytes) -> Any:
    """The value of a body in UTF-8; ValueError if there is none, or one too large to hold.

    >>> parse_body(b'{"a": [1]}')
    {'a': [1]}
    """
    if len(body) > MOST_VALUES and body.count(b"[") + body.count(b"{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} lists and objects")
    try:
        return _PARSE(body.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _counted(tokens: int) -> bool:
    return 0 <= tokens <= MOST_TOKENS
