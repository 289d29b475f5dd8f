"""Requests and responses as the rows of a cache file."""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from batchwright.calls.outcome import Done, Usage, read_body
from batchwright.calls.request import Request
from batchwright.errors import ConfigError

__all__ = [
    "EXPORTED",
    "KEY_BYTES",
    "Row",
    "as_json",
    "is_intact",
    "pack_row",
    "timestamp",
    "unpack",
]

Row = tuple[bytes, bytes, int, str, bytes, bytes]
"""An entry as it stands in the file: key, checksum, time, model, response, request."""

KEY_BYTES = 16
"""Of a key in the file: it stands there twice, and half of SHA-256 tells requests apart too."""
EXPORTED = re.compile(rb'\{"key": "[0-9a-f]{64}", "at": "')
"""How a line of `as_json` begins."""
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_DECODE = json.JSONDecoder().decode


def pack_row(request: Request, done: Done, *, keep_cut_off: bool) -> Row | None:
    """The row of a response; None if it may not be cached.

    Cached are responses to exact requests that are neither empty nor, without `keep_cut_off`,
    cut off.
    """
    if not request.exact or _is_empty(request, done):
        return None
    if not keep_cut_off and done.cut_off:
        return None
    response = _pack(done)
    if response is None:
        return None
    key = request.key[:KEY_BYTES]
    model = request.model
    if not model.isascii():
        # Half of a surrogate pair has no UTF-8.
        model = model.encode(errors="replace").decode()
    at = int(time.time())
    checksum = _checksum(key, at, model.encode(), response)
    return key, checksum, at, model, response, _pack_request(request)


def unpack(data: bytes) -> Done:
    """The response in a row."""
    entry = _DECODE(data.decode())
    text, finish, usage = read_body(entry["body"])
    if "usage" in entry:
        usage = entry["usage"] and Usage(*entry["usage"])
    return Done(
        text=entry.get("text", text),
        body=entry["body"],
        finish=entry.get("finish", finish),
        usage=usage,
        tries=0,
        source="cache",
    )


def is_intact(key: bytes, checksum: bytes, at: int, model: bytes, response: bytes) -> bool:
    """Whether a row is what was written; SQLite may return any type for a damaged one."""
    return (
        isinstance(key, bytes)
        and isinstance(at, int)
        and isinstance(model, bytes)
        and isinstance(response, bytes)
        and _checksum(key, at, model, response) == checksum
    )


def as_json(
    key: bytes, checksum: bytes, at: int, model: bytes, response: bytes, packed: bytes
) -> dict[str, Any] | None:
    """A row for export; None unless both request and response are what was written."""
    if not is_intact(key, checksum, at, model, response):
        return None
    try:
        entry = json.loads(packed)
        request = Request(entry["kind"], entry["body"], entry.get("draw"), entry.get("salt", ""))
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # The checksum covers the response only; a damaged request may be anything.
        return None
    if not request.key.startswith(key):
        return None
    try:
        done = unpack(response)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return {
        "key": request.key.hex(),
        "at": timestamp(at).isoformat(),
        "kind": request.kind,
        "draw": request.draw,
        "salt": request.salt,
        "request": request.body,
        "text": done.text,
        "finish": done.finish,
        "cut_off": done.cut_off,
        "usage": done.usage and asdict(done.usage),
        "body": done.body,
    }


def timestamp(seconds: int) -> datetime:
    """Seconds since 1970 as a time in UTC, clipped to the years that Python knows."""
    return datetime.fromtimestamp(min(max(seconds, 0), 253402300799), UTC)


def _pack(done: Done) -> bytes | None:
    """A response as JSON: its body, and what `read_body` does not find in it; None if not JSON.

    >>> _pack(Done("4", {"choices": [{"text": "4", "finish_reason": "stop"}]}, "stop"))
    b'{"body":{"choices":[{"text":"4","finish_reason":"stop"}]}}'
    """
    raw = done.raw
    # Line breaks only take space; the other two are not JSON, though Python reads them: whoever
    # exports the response could not.
    if raw is not None and not (b"\n" in raw or b"NaN" in raw or b"Infinity" in raw):
        return b'{"body":' + raw + b"}"
    text, finish, usage = read_body(done.body)
    entry: dict[str, Any] = {"body": dict(done.body)}
    if done.text != text:
        entry["text"] = done.text
    if done.finish != finish:
        entry["finish"] = done.finish
    if done.usage != usage:
        entry["usage"] = done.usage and [done.usage.prompt_tokens, done.usage.completion_tokens]
    try:
        return _json(entry)
    except (TypeError, ValueError):
        return None


def _pack_request(request: Request) -> bytes:
    """A request as JSON, for people and for export; never read to serve one."""
    if request.draw is None and not request.salt:
        return b'{"kind":"' + request.kind.encode() + b'","body":' + request.data + b"}"
    rest: dict[str, Any] = {"kind": request.kind}
    if request.draw is not None:
        rest["draw"] = request.draw
    if request.salt:
        rest["salt"] = request.salt
    return _json(rest)[:-1] + b',"body":' + request.data + b"}"


def _checksum(key: bytes, at: int, model: bytes, response: bytes) -> bytes:
    """Eight bytes that tell whether these belong together."""
    head = b"%d %d " % (at, len(model))
    return hashlib.blake2b(key + head + model + response, digest_size=8).digest()


def _is_empty(request: Request, done: Done) -> bool:
    """Whether the response holds nothing: no text, no tool call, no vector."""
    if done.text:
        return False
    if request.kind == "embed":
        return not done.body.get("data")
    if request.kind == "respond":
        items = [item for item in done.body.get("output") or () if isinstance(item, dict)]
        return not any(item.get("type") == "function_call" for item in items)
    return not any(
        isinstance(choice.get("message"), dict) and choice["message"].get("tool_calls")
        for choice in _choices(done.body)
    )


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = body.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, dict)]


def _json(value: Any) -> bytes:
    try:
        return _ENCODE(value).encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair has no UTF-8, but JSON can escape it.
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
