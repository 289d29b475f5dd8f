"""The Ollama protocol: requests and responses translated from and to the OpenAI format.

Pure functions. A parameter that Ollama does not have is refused, never left out.
"""

import json
from collections.abc import Mapping
from typing import Any

from batchwright.calls.outcome import Failed, Kind, Outcome, parse_body
from batchwright.calls.request import Request
from batchwright.calls.wire.openai import fields_of, from_body, refused
from batchwright.errors import ConfigError

__all__ = ["decode", "encode"]

PATHS = {"chat": "/api/chat", "complete": "/api/generate", "embed": "/api/embed"}
OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "num_ctx")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repeat_penalty")},
    **{name: name for name in ("typical_p", "repeat_last_n", "num_predict", "num_keep")},
    "max_tokens": "num_predict",
    "max_completion_tokens": "num_predict",
}
PASSED_THROUGH = {
    "chat": {"model", "keep_alive", "think", "tools", "format", "options"}
    | {"logprobs", "top_logprobs"},
    "complete": {"model", "prompt", "suffix", "keep_alive", "think", "format", "options", "system"},
    "embed": {"model", "input", "keep_alive", "truncate", "dimensions", "options"},
}


def encode(request: Request) -> tuple[str, bytes]:
    """Path and body for an Ollama server.

    >>> from batchwright.calls import chat
    >>> encode(chat("m", "2+2?", max_tokens=4))[1].decode()
    '{"messages":[{"content":"2+2?","role":"user"}],"model":"m","options":{"num_predict":4},\
"stream":false}'
    """
    if request.kind == "respond":
        raise ConfigError(
            "Ollama's own protocol has no Responses API; "
            "use the server's OpenAI address (http://host:11434/v1)"
        )
    sent: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in request.body.items():
        if name in PASSED_THROUGH[request.kind]:
            sent[name] = value
        elif name == "messages":
            sent["messages"] = [_message(message) for message in value]
        elif name == "stop":
            options["stop"] = [value] if isinstance(value, str) else value
        elif name == "response_format":
            sent["format"] = _format(value)
        elif name in OPTIONS and request.kind != "embed":
            options[OPTIONS[name]] = value
        elif not (name == "n" and value == 1) and not (name == "stream" and not value):
            raise ConfigError(
                f"Ollama has no parameter {name!r} for a {request.kind} request; "
                f"leave it out, or use the server's OpenAI address (http://host:11434/v1)"
            )
    if options or "options" in sent:
        sent["options"] = {**options, **sent.get("options", {})}
    if request.kind != "embed":
        sent["stream"] = False
    if request.kind == "complete":
        # Ollama would wrap plain text into the chat template.
        sent["raw"] = True
    data = json.dumps(sent, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return PATHS[request.kind], data.encode()


def decode(request: Request, status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    """The outcome, its body in the OpenAI format."""
    if status != 200:
        return refused(request, status, headers, body)
    try:
        parsed = parse_body(body)
    except ValueError:
        what = "HTML" if body[:512].lstrip()[:1] == b"<" else f"{len(body):,} bytes"
        return Failed(Kind.BAD_BODY, f"the server responded with {what}, not JSON", status)
    if not isinstance(parsed, dict) or parsed.get("error"):
        return from_body(request, parsed)
    if request.kind != "embed" and parsed.get("done") is False:
        return Failed(Kind.TRUNCATED, "the server sent only the beginning of a response", status)
    try:
        return from_body(request, _translated(request, parsed))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        text = f"the response to a {request.kind} call has {fields_of(parsed)}"
        return Failed(Kind.BAD_BODY, text, status)


def _translated(request: Request, response: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": response.get("model", request.model)}
    if request.kind == "embed":
        rows = enumerate(response["embeddings"])
        body["object"] = "list"
        body["data"] = [{"object": "embedding", "index": i, "embedding": row} for i, row in rows]
    else:
        choice: dict[str, Any] = {"index": 0, "finish_reason": response.get("done_reason", "stop")}
        if request.kind == "chat":
            body["object"] = "chat.completion"
            message = response["message"]
            choice["message"] = {"role": "assistant", "content": message["content"]}
            if message.get("tool_calls"):
                made = [_tool_call(n, one) for n, one in enumerate(message["tool_calls"])]
                choice["message"]["tool_calls"] = made
                choice["finish_reason"] = "tool_calls"
        else:
            body["object"] = "text_completion"
            choice["text"] = response["response"]
        if response.get("logprobs"):
            choice["logprobs"] = {"content": response["logprobs"]}
        body["choices"] = [choice]
    if "prompt_eval_count" in response or "eval_count" in response:
        # Ollama leaves the prompt's count out when it has the prompt in its own cache.
        prompt, completion = (int(response.get(n, 0)) for n in ("prompt_eval_count", "eval_count"))
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
    return body


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text parts joined; images go into a field of their own."""
    if message.get("tool_calls"):
        made = [_parsed_call(one) for one in message["tool_calls"]]
        message = {**message, "tool_calls": made}
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts, images = [], []
    for part in content:
        if part.get("type") == "text":
            texts.append(part["text"])
            continue
        url = part.get("image_url", {}).get("url", "")
        head, comma, data = url.partition(";base64,")
        if not comma or not head.startswith("data:"):
            raise ConfigError(
                f"Ollama takes text and images as data: URLs, not a {part.get('type')!r}; "
                f"put the image into the message in base64"
            )
        images.append(data)
    joined = {**message, "content": "\n".join(texts)}
    return {**joined, "images": images} if images else joined


def _tool_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as OpenAI writes it: with an id, its arguments as JSON in a string."""
    function = call["function"]
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as Ollama writes it, its arguments as an object."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse_body(arguments.encode())
        except ValueError:
            raise ConfigError(
                f"the arguments of the call of {function.get('name')!r} are not JSON, "
                f"which Ollama takes only as an object; correct the message"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _format(wanted: Any) -> Any:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "json_object":
        return "json"
    if kind == "json_schema":
        return wanted["json_schema"]["schema"]
    raise ConfigError(f"response_format must be json_object or json_schema, got {wanted!r}")
