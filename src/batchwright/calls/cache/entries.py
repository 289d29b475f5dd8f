"""Requests and answers as the bytes that a cache keeps."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from batchwright.calls.outcome import Done, Usage
from batchwright.calls.request import Request
from batchwright.calls.wire.openai import read_off
from batchwright.errors import ConfigError

__all__ = [
    "checksum",
    "is_cut_off",
    "is_empty",
    "is_whole",
    "line",
    "moment",
    "pack",
    "pack_request",
    "unpack",
]

CUT_OFF = ("length", "content_filter")
"""Reasons to finish that leave an answer incomplete."""
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_DECODE = json.JSONDecoder().decode


def pack(done: Done) -> bytes | None:
    """An answer as JSON: its body, and what cannot be read off the body; None if it is not JSON.

    >>> pack(Done("4", {"choices": [{"text": "4", "finish_reason": "stop"}]}, "stop"))
    b'{"body":{"choices":[{"text":"4","finish_reason":"stop"}]}}'
    """
    raw = done.raw
    # Lines are for people and only take space; the other two are not JSON, though Python reads
    # them: whoever exports the answer could not.
    if raw is not None and not (b"\n" in raw or b"NaN" in raw or b"Infinity" in raw):
        return b'{"body":' + raw + b"}"
    text, finish, usage = read_off(done.body)
    kept: dict[str, Any] = {}
    if done.text != text:
        kept["text"] = done.text
    if done.finish != finish:
        kept["finish"] = done.finish
    if done.usage != usage:
        kept["usage"] = done.usage and [done.usage.prompt_tokens, done.usage.completion_tokens]
    kept = {"body": dict(done.body), **kept}
    try:
        return _json(kept)
    except (TypeError, ValueError):
        return None


def unpack(data: bytes) -> Done:
    """The answer again, as it comes from a cache."""
    kept = _DECODE(data.decode())
    text, finish, usage = read_off(kept["body"])
    if "usage" in kept:
        usage = kept["usage"] and Usage(*kept["usage"])
    return Done(
        text=kept.get("text", text),
        body=kept["body"],
        finish=kept.get("finish", finish),
        usage=usage,
        tries=0,
        source="cache",
    )


def pack_request(request: Request) -> bytes:
    """A request as JSON, for people and for export; never read to answer one."""
    if request.draw is None and not request.salt:
        return b'{"kind":"' + request.kind.encode() + b'","body":' + request.data + b"}"
    rest: dict[str, Any] = {"kind": request.kind}
    if request.draw is not None:
        rest["draw"] = request.draw
    if request.salt:
        rest["salt"] = request.salt
    return _json(rest)[:-1] + b',"body":' + request.data + b"}"


def checksum(key: bytes, answer: bytes) -> bytes:
    """Eight bytes that tell whether these two belong together."""
    return hashlib.blake2b(key + answer, digest_size=8).digest()


def is_whole(key: bytes, digest: bytes, answer: bytes) -> bool:
    """Whether a row is what was written; SQLite may give any type for a damaged one."""
    return isinstance(key, bytes) and isinstance(answer, bytes) and checksum(key, answer) == digest


def line(key: bytes, at: int, digest: bytes, answer: bytes, told: bytes) -> dict[str, Any] | None:
    """An entry for people; None unless both its halves are what was written."""
    if not is_whole(key, digest, answer):
        return None
    try:
        kept = json.loads(told)
        request = Request(kept["kind"], kept["body"], kept.get("draw"), kept.get("salt", ""))
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError):
        # The checksum covers the answer only; a torn request may be anything.
        return None
    if not request.key.startswith(key):
        return None
    done = unpack(answer)
    return {
        "key": request.key.hex(),
        "at": moment(at).isoformat(),
        "kind": request.kind,
        "draw": request.draw,
        "salt": request.salt,
        "request": request.body,
        "text": done.text,
        "finish": done.finish,
        "usage": done.usage and asdict(done.usage),
        "body": done.body,
    }


def moment(seconds: int) -> datetime:
    """Seconds since 1970 as a time in UTC, inside the years that Python knows."""
    return datetime.fromtimestamp(min(max(seconds, 0), 253402300799), UTC)


def is_empty(request: Request, done: Done) -> bool:
    """Whether the server answered with nothing: no text, no call of a tool, no vector."""
    if done.text:
        return False
    if request.kind == "embed":
        return not done.body.get("data")
    return not any(
        isinstance(choice.get("message"), dict) and choice["message"].get("tool_calls")
        for choice in _choices(done.body)
    )


def is_cut_off(done: Done) -> bool:
    """Whether any choice of the answer stopped before its end."""
    if done.finish in CUT_OFF:
        return True
    choices = done.body.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        return False
    return any(one.get("finish_reason") in CUT_OFF for one in _choices(done.body))


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
