"""The OpenAI and Ollama protocols on the server's side: bodies in, replies and errors out."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "PATHS",
    "ParsedRequest",
    "Refusal",
    "Reply",
    "about_models",
    "error",
    "events",
    "parse",
    "whole",
]

Protocol = Literal["openai", "ollama"]

PATHS: Mapping[str, tuple[Protocol, str]] = {
    "/v1/chat/completions": ("openai", "chat"),
    "/v1/completions": ("openai", "complete"),
    "/v1/embeddings": ("openai", "embed"),
    "/api/chat": ("ollama", "chat"),
    "/api/generate": ("ollama", "complete"),
    "/api/embed": ("ollama", "embed"),
    "/api/embeddings": ("ollama", "embed"),
}
"""The paths of calls, their protocol and their kind."""

WHOLE_NUMBERS = {"n", "max_tokens", "max_completion_tokens", "num_predict", "seed", "dimensions"}
FIELDS = {
    "/v1/chat/completions": "messages",
    "/api/chat": "messages",
    "/api/embeddings": "prompt",
}

CREATED = 1_700_000_000
CREATED_TEXT = "2023-11-14T22:13:20Z"
"""The creation time of every response: two servers with one seed send the same bytes."""

PIECE = re.compile(r"\s*\S+|\s+$")
STATUS_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


@dataclass(slots=True)
class ParsedRequest:
    """A request of either protocol. Not frozen: that would cost a tenth of a call's time."""

    protocol: Protocol
    kind: str
    model: str
    """Without Ollama's `:latest`."""
    system: str
    """All messages before the last one."""
    prompt: str
    inputs: tuple[str, ...]
    """Of an embedding: the texts."""
    stream: bool
    usage_event: bool
    choices: int
    most_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    exact: bool
    """Whether the same request must get the same response."""
    schema: object
    """A JSON schema, `json` for any object, None for text."""
    dim: int | None
    packed: bool
    """Vectors as base64 of little-endian float32, which OpenAI's client requests."""
    bare: bool
    """Ollama's older format: one vector under `embedding`."""
    key: bytes
    """Identifies the request, whichever protocol and client it came by."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is refused with an error before it costs anything."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(slots=True)
class Reply:
    """What the model said: texts with their finish reasons, or vectors."""

    texts: Sequence[tuple[str, str]]
    vectors: "NDArray[np.float32] | None"
    prompt_tokens: int
    completion_tokens: int


def parse(path: str, body: bytes, models: Sequence[str]) -> ParsedRequest | Refusal:
    """The request in a body, or why there is none."""
    protocol, kind = PATHS[path]
    try:
        given = json.loads(body)
    except ValueError as fault:
        return Refusal(400, f"the body is not JSON: {fault}")
    if not isinstance(given, dict):
        return Refusal(400, "the body must be a JSON object")
    name = given.get("model")
    if not isinstance(name, str) or not name:
        return Refusal(400, "you must provide a model parameter", param="model")
    model = name.removesuffix(":latest")
    if model not in models:
        message = f"model '{name}' not found"
        if protocol == "openai":
            message = f"The model `{name}` does not exist; there are: {', '.join(models)}"
        return Refusal(404, message, "model_not_found", "model")
    field = FIELDS.get(path, "input" if kind == "embed" else "prompt")
    content = given.get(field)
    if content is None or (kind == "chat" and not _are_messages(content)):
        # Ollama loads a model on an empty request.
        if protocol == "openai" or kind == "embed" or content is not None:
            return Refusal(400, f"'{field}' is missing or of the wrong type", param=field)
        content = [] if kind == "chat" else ""
    if wrong := _wrong_type(given):
        return Refusal(400, f"'{wrong}' is of the wrong type or out of range", param=wrong)
    return _parsed(protocol, kind, path, model, content, given)


def _parsed(
    protocol: Protocol, kind: str, path: str, model: str, content: Any, given: Mapping[str, Any]
) -> ParsedRequest:
    settings = given if protocol == "openai" else given.get("options") or {}
    limit = settings.get("num_predict") if protocol == "ollama" else given.get("max_tokens")
    if protocol == "openai" and limit is None:
        limit = given.get("max_completion_tokens")
    stop = settings.get("stop") or ()
    system, prompt = "", ""
    inputs: tuple[str, ...] = ()
    if kind == "chat":
        contents = [_text(message.get("content")) for message in content]
        system, prompt = "\n\n".join(contents[:-1]), (contents or [""])[-1]
    elif kind == "complete":
        system, prompt = str(given.get("system") or ""), _text(content)
    else:
        inputs = _inputs(content)
    schema = given.get("format") or None
    wanted = given.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema"):
        schema = (wanted.get("json_schema") or {}).get("schema") or "json"
    seed = settings.get("seed")
    exact = seed is not None or settings.get("temperature") == 0
    limit = limit if limit is not None and limit > 0 else None
    stop = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
    choices = min(max(1, given.get("n") or 1), 128) if protocol == "openai" else 1
    named = (kind, model, system, prompt, inputs, limit, stop, choices, seed, exact, repr(schema))
    options = given.get("stream_options") or {}
    return ParsedRequest(
        protocol=protocol,
        kind=kind,
        model=model,
        system=system,
        prompt=prompt,
        inputs=inputs,
        stream=bool(given.get("stream", protocol == "ollama")) and kind != "embed",
        usage_event=bool(options.get("include_usage")),
        choices=choices,
        most_tokens=limit,
        stop=stop,
        seed=seed,
        exact=exact,
        schema=schema,
        dim=given.get("dimensions"),
        packed=given.get("encoding_format") == "base64",
        bare=path == "/api/embeddings",
        key=hashlib.blake2b(repr(named).encode("utf-8", "surrogatepass"), digest_size=16).digest(),
    )


def whole(parsed: ParsedRequest, reply: Reply, name: str, seconds: float) -> dict[str, Any]:
    """The response as one JSON object; `name` goes into its id."""
    if parsed.protocol == "ollama":
        if parsed.kind == "embed":
            rows = [] if reply.vectors is None else reply.vectors.tolist()
            if parsed.bare:
                return {"embedding": rows[0] if rows else []}
            counts = {"total_duration": int(seconds * 1e9), "load_duration": 0}
            counts["prompt_eval_count"] = reply.prompt_tokens
            return {"model": parsed.model, "embeddings": rows, **counts}
        text, finish = reply.texts[0]
        return {**_ollama_piece(parsed, text), **_ollama_end(parsed, reply, finish, seconds)}
    usage = _usage(reply, embed=parsed.kind == "embed")
    if parsed.kind == "embed":
        rows = [] if reply.vectors is None else [_vector(v, parsed.packed) for v in reply.vectors]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(rows)]
        return {"object": "list", "data": data, "model": parsed.model, "usage": usage}
    choices: list[dict[str, Any]] = []
    for index, (text, finish) in enumerate(reply.texts):
        spoken: dict[str, Any] = {"text": text}
        if parsed.kind == "chat":
            spoken = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choices.append({"index": index, **spoken, "logprobs": None, "finish_reason": finish})
    kind = "chat.completion" if parsed.kind == "chat" else "text_completion"
    return {**_head(parsed, name, kind), "choices": choices, "usage": usage}


def events(parsed: ParsedRequest, reply: Reply, name: str, seconds: float) -> list[bytes]:
    """The response as a stream: server-sent events, or JSON lines from Ollama."""
    if parsed.protocol == "ollama":
        text, finish = reply.texts[0]
        lines = [_ollama_piece(parsed, piece) for piece in PIECE.findall(text)]
        lines.append({**_ollama_piece(parsed, ""), **_ollama_end(parsed, reply, finish, seconds)})
        return [json.dumps(line).encode() + b"\n" for line in lines]
    kind = "chat.completion.chunk" if parsed.kind == "chat" else "text_completion"
    head = _head(parsed, name, kind)
    if parsed.usage_event:
        head["usage"] = None
    found: list[dict[str, Any]] = []
    for index, (text, finish) in enumerate(reply.texts):
        pieces: list[str | None] = [*PIECE.findall(text), None]
        if parsed.kind == "chat":
            pieces.insert(0, "")
        for place, piece in enumerate(pieces):
            spoken: dict[str, Any] = {"text": piece or ""}
            if parsed.kind == "chat":
                delta: dict[str, str] = {} if piece is None else {"content": piece}
                spoken = {"delta": {"role": "assistant", **delta} if place == 0 else delta}
            end = finish if piece is None else None
            choice = {"index": index, **spoken, "logprobs": None, "finish_reason": end}
            found.append({**head, "choices": [choice]})
    if parsed.usage_event:
        found.append({**head, "choices": [], "usage": _usage(reply, embed=False)})
    sent = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in found]
    return [*sent, b"data: [DONE]\n\n"]


def error(path: str, refusal: Refusal) -> dict[str, Any]:
    """An error in the shape of the protocol that `path` belongs to."""
    if path.startswith("/api/"):
        return {"error": refusal.message}
    kind = STATUS_TYPES.get(refusal.status, "server_error")
    about = {"message": refusal.message, "type": kind}
    return {"error": {**about, "param": refusal.param, "code": refusal.code}}


def about_models(path: str, body: bytes, models: Sequence[str]) -> dict[str, Any] | Refusal | None:
    """Responses to requests about models; None for any other path."""
    if path == "/v1/models":
        return {"object": "list", "data": [_card(name) for name in models]}
    if path.startswith("/v1/models/"):
        name = path.removeprefix("/v1/models/")
        if name in models:
            return _card(name)
        return Refusal(404, f"The model `{name}` does not exist", "model_not_found", "model")
    if path == "/api/version":
        return {"version": "0.12.0"}
    if path in ("/api/tags", "/api/ps"):
        return {"models": [_ollama_card(name) for name in models]}
    if path == "/api/show":
        try:
            given = json.loads(body)
            wanted = str(given.get("model") or given.get("name"))
        except (ValueError, AttributeError):
            return Refusal(400, "the body must be a JSON object with a model")
        if wanted.removesuffix(":latest") not in models:
            return Refusal(404, f"model '{wanted}' not found")
        about = {"general.architecture": "simulated", "general.parameter_count": 0}
        card = _ollama_card(wanted)
        shown = {"modelfile": f"FROM {wanted}", "parameters": "", "template": "{{ .Prompt }}"}
        dated = {"details": card["details"], "modified_at": CREATED_TEXT}
        return {**shown, **dated, "model_info": about, "capabilities": ["completion", "embedding"]}
    return None


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "batchwright"}


def _ollama_card(name: str) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    details = {"parent_model": "", "format": "gguf", "family": "simulated", "families": []}
    full = name if ":" in name else f"{name}:latest"
    sizes = {"parameter_size": "0B", "quantization_level": "F32"}
    about = {"modified_at": CREATED_TEXT, "size": 0, "digest": digest}
    return {"name": full, "model": full, **about, "details": {**details, **sizes}}


def _head(parsed: ParsedRequest, name: str, kind: str) -> dict[str, Any]:
    start = "chatcmpl" if parsed.kind == "chat" else "cmpl"
    return {"id": f"{start}-{name}", "object": kind, "created": CREATED, "model": parsed.model}


def _usage(reply: Reply, *, embed: bool) -> dict[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    usage = {"prompt_tokens": reply.prompt_tokens, "total_tokens": total}
    return usage if embed else {**usage, "completion_tokens": reply.completion_tokens}


def _ollama_piece(parsed: ParsedRequest, text: str) -> dict[str, Any]:
    head = {"model": parsed.model, "created_at": CREATED_TEXT}
    if parsed.kind == "chat":
        return {**head, "message": {"role": "assistant", "content": text}, "done": False}
    return {**head, "response": text, "done": False}


def _ollama_end(parsed: ParsedRequest, reply: Reply, finish: str, seconds: float) -> dict[str, Any]:
    nanoseconds = int(seconds * 1e9)
    idle = parsed.kind == "complete" and not parsed.prompt
    return {
        "done": True,
        "done_reason": "load" if idle else finish,
        "total_duration": nanoseconds,
        "load_duration": 0,
        "prompt_eval_count": reply.prompt_tokens,
        "prompt_eval_duration": nanoseconds // 4,
        "eval_count": reply.completion_tokens,
        "eval_duration": nanoseconds - nanoseconds // 4,
    }


def _vector(vector: "NDArray[np.float32]", packed: bool) -> str | list[float]:
    if packed:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def _wrong_type(given: Mapping[str, Any]) -> str | None:
    """The first parameter of the wrong type or out of range."""
    for name in ("options", "stream_options", "response_format"):
        if not isinstance(given.get(name) or {}, dict):
            return name
    every: dict[str, Any] = {**given, **(given.get("options") or {})}
    for name, value in every.items():
        if name in WHOLE_NUMBERS and not (value is None or isinstance(value, int)):
            return name
        if name == "stop" and not (value is None or isinstance(value, str | list)):
            return name
        if name == "dimensions" and value is not None and not 2 <= value <= 65_536:
            return name
    return None


def _are_messages(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(message, dict) for message in given)


def _text(content: Any) -> str:
    """The text of a message: a string, or OpenAI's list of parts."""
    if isinstance(content, list):
        parts = (part.get("text", "") if isinstance(part, dict) else part for part in content)
        return "".join(str(part) for part in parts)
    return "" if content is None else str(content)


def _inputs(given: Any) -> tuple[str, ...]:
    """One text or several; a list of numbers is one text as token ids."""
    if not isinstance(given, list):
        return (str(given),)
    if given and all(isinstance(one, int) for one in given):
        return (" ".join(map(str, given)),)
    return tuple(" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in given)
