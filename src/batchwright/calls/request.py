"""A request as plain data: a body in the OpenAI format, and the key that identifies it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchwright.errors import ConfigError

__all__ = ["Request", "chat", "complete", "embed", "respond"]

VERSION = 1
"""Part of every key: a change of the key's meaning must not find old responses."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A call to make. `body` is sent to an OpenAI-compatible server as it is, nothing is added.

    Equal requests are one call only if they are deterministic: temperature 0, a seed, an
    embedding, or a given `draw`. The same random request made twice is two draws.
    """

    kind: Literal["chat", "complete", "embed", "respond"]
    body: Mapping[str, Any]
    draw: int | None = None
    """Which draw of a random request this is; makes it exact, so that it can be cached."""
    salt: str = ""
    """What the response depends on besides the body, say the revision of the weights."""
    data: bytes = field(init=False, repr=False)
    """The body as JSON, encoded once: these bytes are sent and hashed."""
    _key: bytes | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not self.body.get("model"):
            raise ConfigError(f"a {self.kind} request needs a model; the body has none")
        # 0 and 0.0 hash alike: temperature 0 and 0.0 must not be two requests.
        body = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in self.body.items()
        }
        try:
            text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
            data = text.encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the body of a {self.kind} request is not JSON: {error}") from None
        object.__setattr__(self, "data", data)

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def exact(self) -> bool:
        """Whether equal requests have equal responses, which may be shared and cached.

        >>> chat("m", "2+2?").exact, chat("m", "2+2?", temperature=0).exact
        (False, True)
        """
        return (
            self.draw is not None
            or self.kind == "embed"
            or self.body.get("temperature") == 0
            or self.body.get("seed") is not None
        )

    @property
    def key(self) -> bytes:
        """SHA-256 of everything the response depends on; a pool adds its `scope_of` endpoints.

        >>> chat("m", "2+2?", draw=0).key == chat("m", "2+2?", draw=1).key
        False
        >>> chat("m", "2+2?", top_p=1).key == chat("m", "2+2?", top_p=1.0).key
        True
        """
        found = self._key
        if found is None:
            head = f"{VERSION} {self.kind} {self.draw} {len(self.salt)} {self.salt} ".encode()
            found = hashlib.sha256(head + self.data).digest()
            object.__setattr__(self, "_key", found)
        return found

    def scoped(self, scope: str) -> "Request":
        """The same request with the scope of a pool before its salt; itself for an empty scope.

        >>> request = chat("m", "2+2?", temperature=0)
        >>> request.scoped("local:a").key == request.scoped("local:b").key
        False
        """
        if not scope:
            return self
        made = object.__new__(Request)
        for name in ("kind", "body", "draw", "data"):
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "salt", f"{scope} {self.salt}")
        object.__setattr__(made, "_key", None)
        return made


def chat(
    model: str,
    prompt: str | Sequence[Mapping[str, Any]],
    /,
    *,
    draw: int | None = None,
    salt: str = "",
    **parameters: Any,
) -> Request:
    """A chat request; a string is one user message.

    >>> chat("m", "2+2?", temperature=0).data.decode()
    '{"messages":[{"content":"2+2?","role":"user"}],"model":"m","temperature":0}'
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return Request("chat", {"model": model, "messages": messages, **parameters}, draw, salt)


def complete(
    model: str, prompt: str, /, *, draw: int | None = None, salt: str = "", **parameters: Any
) -> Request:
    """A request for a completion of plain text."""
    return Request("complete", {"model": model, "prompt": prompt, **parameters}, draw, salt)


def respond(
    model: str,
    prompt: str | Sequence[Mapping[str, Any]],
    /,
    *,
    draw: int | None = None,
    salt: str = "",
    **parameters: Any,
) -> Request:
    """A request to OpenAI's Responses API; a list holds its input items, such as messages.

    >>> respond("m", "2+2?", max_output_tokens=9).data.decode()
    '{"input":"2+2?","max_output_tokens":9,"model":"m"}'
    """
    given = prompt if isinstance(prompt, str) else list(prompt)
    return Request("respond", {"model": model, "input": given, **parameters}, draw, salt)


def embed(
    model: str, text: str | Sequence[str], /, *, salt: str = "", **parameters: Any
) -> Request:
    """A request for the embeddings of one text or of several."""
    given = text if isinstance(text, str) else list(text)
    return Request("embed", {"model": model, "input": given, **parameters}, None, salt)
