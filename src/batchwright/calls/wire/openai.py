"""The OpenAI protocol: encoding requests and decoding responses.

Pure functions; vLLM, SGLang, llama.cpp and others speak it as well.
"""

import email.utils
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from batchwright.calls.outcome import (
    Done,
    Failed,
    Kind,
    Outcome,
    content_text,
    parse_body,
    read_body,
)
from batchwright.calls.request import Request

__all__ = ["decode", "encode", "fields_of", "from_body", "refused", "retry_after_s", "scrub"]

PATHS = {"chat": "/chat/completions", "complete": "/completions", "embed": "/embeddings"}
PATHS["respond"] = "/responses"
LONGEST_ERROR = 200
QUOTE = 12
"""So many consecutive characters of the prompt are a quotation."""
FINAL = {
    "insufficient_quota",
    "credit_balance_exhausted",
    "organization_spend_limit_exceeded",
    "organization_usage_limit_exceeded",
    "project_spend_limit_exceeded",
    "enforced_spend_limit_reached",
    "billing_not_active",
}
"""Codes of a 429 for which waiting does not help: the account has no credit or has reached its
spending limit. OpenAI and Anthropic document them, but for the last, which is known from reports.
Words like quota or billing say nothing: Gemini, Vertex and Azure use them for limits of a minute.
"""
BROKEN_OFF = ("error", "abort")
"""Finish reasons of a response that nobody finished: OpenRouter's when a provider fails, vLLM's and
SGLang's when the request was aborted. The text so far is not the response."""
BUSY = ("busy", "overload", "pending", "capacity", "too many", "rate limit", "queue is full")
"""Words by which a 503 asks for fewer calls."""


def encode(request: Request) -> tuple[str, bytes]:
    """The path below the base URL, and the body, which the request already holds.

    >>> from batchwright.calls import chat
    >>> encode(chat("m", "2+2?"))[0]
    '/chat/completions'
    """
    return PATHS[request.kind], request.data


def decode(request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    """The response with its text, or the kind of failure.

    >>> from batchwright.calls import chat
    >>> decode(chat("m", "2+2?"), 200, {}, b"<html>")
    Failed(kind=<Kind.BAD_BODY: 'bad_body'>, error='the server responded with HTML, not JSON', \
status=200, seconds=0.0, tries=1, endpoint='', retry_after_s=None, unsent=False)
    """
    if status != 200:
        return refused(request, status, headers, body)
    raw: bytes | None = body
    try:
        parsed = parse_body(body)
    except ValueError:
        # Not JSON, or JSON in another encoding or with a byte order mark, which costs more to find.
        raw = None
        try:
            parsed = parse_body(body.decode(json.detect_encoding(body)).encode())
        except ValueError:
            return _not_json(status, body)
    return from_body(request, parsed, raw)


def from_body(request: Request, body: Any, raw: bytes | None = None) -> Outcome:
    """The outcome of a body in the OpenAI format; `raw` is the same in UTF-8."""
    try:
        if request.kind == "embed":
            return _embedded(request, body, raw)
        if request.kind == "respond":
            return _responded(request, body, raw)
        choice = body["choices"][0]
        if body.get("error"):
            return _wrong_shape(request, body)
        if choice.get("finish_reason") in BROKEN_OFF or choice.get("error"):
            return _broken_off(request, choice)
        if request.kind == "chat":
            message = choice["message"]
            text = content_text(message.get("content"))
            empty = not text or text.isspace()
            if empty and not (message.get("tool_calls") or message.get("function_call")):
                return _empty(choice)
        else:
            text = choice["text"]
            if not text:
                return _empty(choice)
        if not isinstance(text or "", str):
            return Failed(Kind.BAD_BODY, "the content of the response is not text", 200)
        return _done(text or "", body, raw)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return _wrong_shape(request, body)


def _done(text: str, body: Mapping[str, Any], raw: bytes | None) -> Done:
    found, finish, usage = read_body(body)
    # Whoever has only the body, as the cache, must read the same text from it.
    return Done(text, body, finish, usage, raw=raw if found == text else None)


def refused(request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Failed:
    """The failure of a response with another status than 200."""
    error = _error(body)
    message = scrub(_message(error), request)
    after = retry_after_s(headers)
    if after is None:
        after = _retry_delay_s(error)
    text = f"the server responded with status {status}" + (f": {message}" if message else "")
    kind = Kind.HTTP_5XX if status >= 500 else Kind.HTTP_4XX
    if status == 429:
        if FINAL.isdisjoint(_codes(error)):
            kind = Kind.RATE_LIMITED
    elif status in (503, 529):
        lower = message.lower()
        if status == 529 or after is not None or any(word in lower for word in BUSY):
            kind = Kind.RATE_LIMITED
    elif status in (408, 409, 425):
        # Lost on the way, or against another request: the official clients try again too.
        kind = Kind.TIMEOUT
    elif 300 <= status < 400:
        # Signed addresses have their secret in the query.
        where = (headers.get("Location") or "elsewhere").partition("?")[0]
        text = f"the server redirects ({status}) to {where[:80]}; give that address instead"
    return Failed(kind, text, status, retry_after_s=after)


def retry_after_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds to wait by the Retry-After header, a number or a date; None without one.

    >>> retry_after_s({"Retry-After": "2.5"}), retry_after_s({"Retry-After": "soon"})
    (2.5, None)
    """
    milliseconds, value = headers.get("retry-after-ms"), headers.get("Retry-After")
    for text, unit in ((milliseconds, 1e-3), (value, 1.0)):
        if text is None:
            continue
        try:
            wait = float(text) * unit
        except ValueError:
            continue
        if 0 <= wait < float("inf"):
            return wait
    if value is None:
        return None
    try:
        date = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, date - (time.time() if now is None else now))


def scrub(text: str, request: Request) -> str:
    """A server's message on one short line, without the prompt.

    >>> from batchwright.calls import chat
    >>> scrub("cannot read 'tell me about otters' today", chat("m", "tell me about otters"))
    "cannot read '...' today"
    """
    text = " ".join(text.split())
    text = text[: 4 * LONGEST_ERROR]
    hidden = bytearray(len(text))
    for part in _texts(request):
        part = " ".join(part.split())
        width = min(QUOTE, len(part))
        if width < 2:
            continue
        for start in range(len(text) - width + 1):
            if text[start : start + width] in part:
                hidden[start : start + width] = b"\1" * width
    shown = "".join("\0" if mark else char for char, mark in zip(text, hidden, strict=True))
    while "\0\0" in shown:
        shown = shown.replace("\0\0", "\0")
    return shown.replace("\0", "...")[:LONGEST_ERROR]


def _texts(request: Request) -> Iterator[str]:
    """What the caller wrote: messages, prompt, inputs."""
    found: list[Any] = [request.body.get(name) for name in ("messages", "prompt", "input")]
    while found:
        one = found.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            found.extend(value for name, value in one.items() if name not in ("role", "type"))
        elif isinstance(one, list | tuple):
            found.extend(one)


def _error(body: bytes) -> Any:
    """What an error's body says, parsed, without its wrappers; the text itself if not JSON."""
    if body[:512].lstrip()[:1] == b"<":
        return "an HTML page"
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return body[:1000].decode(errors="replace")
    if isinstance(parsed, list) and parsed:
        # Gemini's OpenAI address puts errors into a list.
        parsed = parsed[0]
    return parsed.get("error", parsed) if isinstance(parsed, dict) else parsed


def _message(error: Any) -> str:
    """The message for people inside an error."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return str(error)[:2000]


def _codes(error: Any) -> set[str]:
    """The words by which an error names itself to programs."""
    if not isinstance(error, dict):
        return set()
    details = error.get("details")
    inner = details.get("error_code") if isinstance(details, dict) else None
    found = (error.get("code"), error.get("type"), inner)
    return {one for one in found if isinstance(one, str)}


def _retry_delay_s(error: Any) -> float | None:
    """The wait that Google's RetryInfo asks for in the body, as in {"retryDelay": "26.5s"}."""
    details = error.get("details") if isinstance(error, dict) else None
    for one in details if isinstance(details, list) else ():
        delay = one.get("retryDelay") if isinstance(one, dict) else None
        if isinstance(delay, str) and re.fullmatch(r"\d{1,9}(\.\d+)?s", delay):
            return float(delay[:-1])
    return None


def _not_json(status: int, body: bytes) -> Failed:
    start = body[:512].lstrip()
    if start[:1] == b"<":
        return Failed(Kind.BAD_BODY, "the server responded with HTML, not JSON", status)
    if start[:5] == b"data:":
        return Failed(Kind.BAD_BODY, "the server streamed its response; leave out `stream`", status)
    what = "nothing" if not body else f"{len(body):,} bytes that are not JSON"
    return Failed(Kind.BAD_BODY, f"the server responded with {what}", status)


def _wrong_shape(request: Request, body: Any) -> Failed:
    if isinstance(body, dict) and body.get("error"):
        error = body["error"]
        message = scrub(_message(error), request)
        code = str(error.get("code")) if isinstance(error, dict) else ""
        if code.isascii() and code.isdigit() and 400 <= int(code[:4]) < 600:
            # A router passes its provider's status on inside the body.
            failed = refused(request, int(code), {}, json.dumps(error).encode())
            told = failed.error.replace("responded with", "responded 200 with an error of", 1)
            return Failed(failed.kind, told, 200, retry_after_s=failed.retry_after_s)
        return Failed(Kind.BAD_BODY, f"the server responded 200 with an error: {message}", 200)
    seen = f"fields {fields_of(body)}" if isinstance(body, dict) else type(body).__name__
    return Failed(Kind.BAD_BODY, f"the response to a {request.kind} call has {seen}", 200)


def _broken_off(request: Request, choice: Mapping[str, Any]) -> Failed:
    """The failure of a response that the server, or a provider behind it, did not finish."""
    if choice.get("error"):
        return _wrong_shape(request, choice)
    why = str(choice["finish_reason"])[:40]
    text = f"the server broke the response off (finish_reason={why!r})"
    return Failed(Kind.TRUNCATED, text, 200)


def fields_of(body: Mapping[str, Any]) -> list[str]:
    """A few names of fields, for a message."""
    return sorted(str(name)[:40] for name in body)[:6]


def _empty(choice: Mapping[str, Any]) -> Failed:
    why = choice.get("finish_reason")
    return Failed(Kind.EMPTY, f"the response has no text (finish_reason={str(why)[:40]!r})", 200)


def _responded(request: Request, body: Any, raw: bytes | None) -> Outcome:
    """The outcome of a body of the Responses API, which reports failures with status 200."""
    status = body["status"]
    if status in ("queued", "in_progress"):
        return Failed(Kind.BAD_BODY, f"the response is {status}; leave out `background`", 200)
    if status not in ("completed", "incomplete"):
        error = body.get("error") or {}
        limited = error.get("code") == "rate_limit_exceeded"
        kind = Kind.RATE_LIMITED if limited else Kind.HTTP_5XX
        message = scrub(_message(error), request)
        return Failed(kind, f"the response is {status}: {message or 'no reason is given'}", 200)
    done = _done(read_body(body)[0], body, raw)
    called = any(item.get("type") == "function_call" for item in body["output"])
    if called or not (not done.text or done.text.isspace()):
        return done
    return Failed(Kind.EMPTY, f"the response has no text (finish_reason={done.finish!r})", 200)


def _embedded(request: Request, body: Any, raw: bytes | None) -> Outcome:
    given = request.body["input"]
    # A list of numbers is one text as tokens.
    several = isinstance(given, list) and not (given and isinstance(given[0], int))
    wanted = len(given) if several else 1
    rows = body["data"]
    if len(rows) != wanted or sorted(r.get("index", i) for i, r in enumerate(rows)) != list(
        range(wanted)
    ):
        return Failed(Kind.BAD_BODY, f"{wanted} vectors were requested, {len(rows)} came", 200)
    if not all(row["embedding"] for row in rows):
        return Failed(Kind.EMPTY, "the response has an empty vector", 200)
    return _done("", body, raw)
