"""The part of a request that an in-process model reads; `batchwright.calls.Request` fits."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

__all__ = ["ModelRequest"]


class ModelRequest(Protocol):
    """A chat, completion or embedding to compute, its body in the OpenAI shape."""

    @property
    def kind(self) -> Literal["chat", "complete", "embed", "respond"]: ...
    @property
    def body(self) -> Mapping[str, Any]: ...
    @property
    def draw(self) -> int | None: ...
    @property
    def key(self) -> bytes: ...
    @property
    def model(self) -> str: ...
