"""The OpenAI and Ollama protocols on the server's side: bodies in, replies and errors out.

Bodies of OpenAI's Responses API are in `responses.py`, its files and batches in `batches.py`.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Any, Literal

from batchwright.files import parse_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CREATED",
    "PATHS",
    "PIECE",
    "ParsedRequest",
    "Refusal",
    "Reply",
    "about_models",
    "error",
    "events",
    "logprobs_of",
    "parse",
    "pieces_of",
    "text_of",
    "whole",
]

Protocol = Literal["openai", "responses", "ollama"]

PATHS: Mapping[str, tuple[Protocol, str]] = {
    "/v1/chat/completions": ("openai", "chat"),
    "/v1/completions": ("openai", "complete"),
    "/v1/embeddings": ("openai", "embed"),
    "/v1/responses": ("responses", "chat"),
    "/api/chat": ("ollama", "chat"),
    "/api/generate": ("ollama", "complete"),
    "/api/embed": ("ollama", "embed"),
    "/api/embeddings": ("ollama", "embed"),
}
"""The paths of calls, their protocol and their kind."""

WHOLE_NUMBERS = {"n", "max_tokens", "max_completion_tokens", "num_predict", "seed", "dimensions"}
WHOLE_NUMBERS |= {"top_logprobs", "max_output_tokens"}
MOST_LOGPROBS = 20
FIELDS = {
    "/v1/responses": "input",
    "/v1/chat/completions": "messages",
    "/api/chat": "messages",
    "/api/embeddings": "prompt",
}

CREATED = 1_700_000_000
CREATED_TEXT = "2023-11-14T22:13:20Z"
"""The creation time of every response: two servers with one seed send the same bytes."""

FUNCTION_OUTPUT = "function_call_output"
"""The item of the Responses API that holds the result of a call."""
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
    tools: tuple[tuple[str, Any], ...]
    """Names and parameter schemas of the functions that the reply calls; none for a text."""
    logprobs: int | None
    """How many alternatives to give for each token; None for no log probabilities."""
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
    tools: Sequence[tuple[str, str]] = field(default=())
    """Names and JSON arguments of the functions that every choice calls instead of a text."""


def parse(path: str, body: bytes, models: Sequence[str]) -> ParsedRequest | Refusal:
    """The request in a body, or why there is none."""
    protocol, kind = PATHS[path]
    try:
        given = parse_json(body)
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
        if protocol != "ollama":
            message = f"The model `{name}` does not exist; there are: {', '.join(models)}"
        return Refusal(404, message, "model_not_found", "model")
    field = FIELDS.get(path, "input" if kind == "embed" else "prompt")
    content = given.get(field)
    if protocol == "responses":
        if given.get("previous_response_id"):
            wanted = given["previous_response_id"]
            message = f"Previous response with id '{wanted}' not found; responses are not stored"
            code = "previous_response_not_found"
            return Refusal(404, message, code, "previous_response_id")
        if isinstance(content, str):
            content = [{"role": "user", "content": content}]
    if content is None or (kind == "chat" and not _are_messages(content)):
        # Ollama loads a model on an empty request.
        if protocol != "ollama" or kind == "embed" or content is not None:
            return Refusal(400, f"'{field}' is missing or of the wrong type", param=field)
        content = [] if kind == "chat" else ""
    if wrong := _wrong_type(given):
        return Refusal(400, f"'{wrong}' is of the wrong type or out of range", param=wrong)
    return _parsed(protocol, kind, path, model, content, given)


def _parsed(
    protocol: Protocol, kind: str, path: str, model: str, content: Any, given: Mapping[str, Any]
) -> ParsedRequest:
    settings = (given.get("options") or {}) if protocol == "ollama" else given
    limits = {"ollama": ("num_predict",), "responses": ("max_output_tokens",)}
    names = limits.get(protocol, ("max_tokens", "max_completion_tokens"))
    limit = next((settings[name] for name in names if settings.get(name) is not None), None)
    stop = settings.get("stop") or ()
    system, prompt = "", ""
    inputs: tuple[str, ...] = ()
    tools: tuple[tuple[str, Any], ...] = ()
    if kind == "chat":
        contents = [text_of(_said(message)) for message in content]
        if protocol == "responses" and given.get("instructions"):
            contents.insert(0, str(given["instructions"]))
        system, prompt = "\n\n".join(contents[:-1]), (contents or [""])[-1]
        if given.get("tools"):
            tools = _called(given, content, prompt)
    elif kind == "complete":
        system, prompt = str(given.get("system") or ""), text_of(content)
    else:
        inputs = _inputs(content)
    schema = given.get("format") or None
    wanted = given.get("response_format")
    if protocol == "responses":
        wanted = (given.get("text") or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema"):
        schema = (wanted.get("json_schema") or wanted).get("schema") or "json"
    seed = settings.get("seed")
    exact = seed is not None or settings.get("temperature") == 0
    limit = limit if limit is not None and limit > 0 else None
    stop = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
    choices = min(max(1, given.get("n") or 1), 128) if protocol == "openai" else 1
    named: tuple[object, ...]
    named = (kind, model, system, prompt, inputs, limit, stop, choices, seed, exact, repr(schema))
    if tools:
        named = (*named, repr(tools))
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
        tools=tools,
        logprobs=None if kind == "embed" else _wanted_logprobs(protocol, kind, given),
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
        said = _ollama_piece(parsed, text, reply.tools)
        return {**said, **_ollama_end(parsed, reply, finish, seconds)}
    usage = _usage(reply, embed=parsed.kind == "embed")
    if parsed.kind == "embed":
        rows = [] if reply.vectors is None else [_vector(v, parsed.packed) for v in reply.vectors]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(rows)]
        return {"object": "list", "data": data, "model": parsed.model, "usage": usage}
    choices: list[dict[str, Any]] = []
    for index, (text, finish) in enumerate(reply.texts):
        spoken: dict[str, Any] = {"text": text}
        if parsed.kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if reply.tools:
                made = _tool_calls(reply.tools, f"{name}-{index}")
                message |= {"content": None, "tool_calls": made}
            spoken = {"message": message}
        sure = None if reply.tools else _logprobs(parsed, pieces_of(text), 0)
        choices.append({"index": index, **spoken, "logprobs": sure, "finish_reason": finish})
    kind = "chat.completion" if parsed.kind == "chat" else "text_completion"
    return {**_head(parsed, name, kind), "choices": choices, "usage": usage}


def events(parsed: ParsedRequest, reply: Reply, name: str, seconds: float) -> list[bytes]:
    """The response as a stream: server-sent events, or JSON lines from Ollama."""
    if parsed.protocol == "ollama":
        text, finish = reply.texts[0]
        lines = [_ollama_piece(parsed, piece) for piece in pieces_of(text)]
        if reply.tools:
            lines = [_ollama_piece(parsed, "", reply.tools)]
        lines.append({**_ollama_piece(parsed, ""), **_ollama_end(parsed, reply, finish, seconds)})
        return [json.dumps(line).encode() + b"\n" for line in lines]
    kind = "chat.completion.chunk" if parsed.kind == "chat" else "text_completion"
    head = _head(parsed, name, kind)
    if parsed.usage_event:
        head["usage"] = None
    found: list[dict[str, Any]] = []
    for index, (text, finish) in enumerate(reply.texts):
        spoken: list[dict[str, Any]]
        if reply.tools:
            spoken = _tool_deltas(_tool_calls(reply.tools, f"{name}-{index}"))
        else:
            spoken = _text_deltas(parsed, text)
        for place, said in enumerate(spoken):
            end = finish if place == len(spoken) - 1 else None
            choice = {"index": index, "logprobs": None, **said, "finish_reason": end}
            found.append({**head, "choices": [choice]})
    if parsed.usage_event:
        found.append({**head, "choices": [], "usage": _usage(reply, embed=False)})
    sent = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in found]
    return [*sent, b"data: [DONE]\n\n"]


def _text_deltas(parsed: ParsedRequest, text: str) -> list[dict[str, Any]]:
    """What the events of a text hold: its pieces, each with its log probabilities, and an end."""
    found: list[dict[str, Any]] = []
    offset = 0
    for piece in pieces_of(text):
        said: dict[str, Any] = {"text": piece}
        if parsed.kind == "chat":
            said = {"delta": {"content": piece}}
        if parsed.logprobs is not None:
            said["logprobs"] = _logprobs(parsed, [piece], offset)
        found.append(said)
        offset += len(piece)
    if parsed.kind == "chat":
        found.insert(0, {"delta": {"role": "assistant", "content": ""}})
        return [*found, {"delta": {}}]
    return [*found, {"text": ""}]


def _tool_deltas(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls in pieces, as OpenAI streams them: the name first, then the arguments."""
    found: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": None}}]
    for index, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        named = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
        found.append({"delta": {"tool_calls": [{"index": index, **named}]}})
        for piece in pieces_of(arguments):
            said = {"index": index, "function": {"arguments": piece}}
            found.append({"delta": {"tool_calls": [said]}})
    return [*found, {"delta": {}}]


def _tool_calls(tools: Sequence[tuple[str, str]], name: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{name}-{number}",
            "type": "function",
            "function": {"name": function, "arguments": arguments},
        }
        for number, (function, arguments) in enumerate(tools)
    ]


def pieces_of(text: str) -> list[str]:
    """The tokens of a simulated text; joined they are the text."""
    found: list[str] = PIECE.findall(text)
    return found


def logprobs_of(pieces: Sequence[str], alternatives: int) -> list[dict[str, Any]]:
    """Log probabilities as OpenAI's chat gives them: drawn from the token, the chosen one first.

    The probabilities of a token and of its alternatives are less than 1 together.

    >>> [one["token"] for one in logprobs_of(["Hello"], 2)[0]["top_logprobs"]]
    ['Hello', 'Hello~1']
    """
    found = []
    for piece in pieces:
        drawn = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=2).digest()
        share = 0.5 + int.from_bytes(drawn) / 2**17
        shares = [share, *((1 - share) * 0.5**n for n in range(1, alternatives))]
        tokens = [piece, *(f"{piece}~{n}" for n in range(1, alternatives))]
        top = [_token(*pair) for pair in zip(tokens, shares, strict=True)]
        found.append({**top[0], "top_logprobs": top[:alternatives]})
    return found


def _token(piece: str, share: float) -> dict[str, Any]:
    data = list(piece.encode("utf-8", "surrogatepass"))
    return {"token": piece, "logprob": log(share), "bytes": data}


def _logprobs(parsed: ParsedRequest, pieces: Sequence[str], offset: int) -> dict[str, Any] | None:
    """Log probabilities in the shape of the request's kind; `offset` is where the pieces begin."""
    if parsed.logprobs is None:
        return None
    tokens = logprobs_of(pieces, parsed.logprobs)
    if parsed.kind == "chat":
        return {"content": tokens, "refusal": None}
    starts = [offset]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return {
        "tokens": list(pieces),
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in token["top_logprobs"]} for token in tokens
        ],
        "text_offset": starts[:-1],
    }


def error(path: str, refusal: Refusal) -> dict[str, Any]:
    """An error in the shape of the protocol that `path` belongs to."""
    if path.startswith("/api/"):
        return {"error": refusal.message}
    kind = STATUS_TYPES.get(refusal.status, "server_error")
    about = {"message": refusal.message, "type": kind}
    return {"error": {**about, "param": refusal.param, "code": refusal.code}}


def about_models(
    path: str, body: bytes, models: Sequence[str], context: int | None = None
) -> dict[str, Any] | Refusal | None:
    """Responses to requests about models; None for any other path."""
    if path == "/v1/models":
        return {"object": "list", "data": [_card(name, context) for name in models]}
    if path.startswith("/v1/models/"):
        name = path.removeprefix("/v1/models/")
        if name in models:
            return _card(name, context)
        return Refusal(404, f"The model `{name}` does not exist", "model_not_found", "model")
    if path == "/api/version":
        return {"version": "0.12.0"}
    if path in ("/api/tags", "/api/ps"):
        return {"models": [_ollama_card(name) for name in models]}
    if path == "/api/show":
        try:
            given = parse_json(body)
            wanted = str(given.get("model") or given.get("name"))
        except (ValueError, AttributeError):
            return Refusal(400, "the body must be a JSON object with a model")
        if wanted.removesuffix(":latest") not in models:
            return Refusal(404, f"model '{wanted}' not found")
        about: dict[str, Any] = {"general.architecture": "simulated", "general.parameter_count": 0}
        if context is not None:
            about["simulated.context_length"] = context
        card = _ollama_card(wanted)
        shown = {"modelfile": f"FROM {wanted}", "parameters": "", "template": "{{ .Prompt }}"}
        dated = {"details": card["details"], "modified_at": CREATED_TEXT}
        return {**shown, **dated, "model_info": about, "capabilities": ["completion", "embedding"]}
    return None


def _card(name: str, context: int | None) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": CREATED, "owned_by": "batchwright"}
    # As vLLM and SGLang say it.
    return card if context is None else {**card, "max_model_len": context}


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


def _ollama_piece(
    parsed: ParsedRequest, text: str, tools: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    head: dict[str, Any] = {"model": parsed.model, "created_at": CREATED_TEXT}
    if parsed.logprobs is not None and text:
        head["logprobs"] = logprobs_of(pieces_of(text), parsed.logprobs)
    if parsed.kind == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if tools:
            # Ollama gives the arguments as an object, not as JSON in a string.
            message["tool_calls"] = [
                {"function": {"index": number, "name": name, "arguments": json.loads(arguments)}}
                for number, (name, arguments) in enumerate(tools)
            ]
        return {**head, "message": message, "done": False}
    return {**head, "response": text, "done": False}


def _ollama_end(parsed: ParsedRequest, reply: Reply, finish: str, seconds: float) -> dict[str, Any]:
    nanoseconds = int(seconds * 1e9)
    idle = parsed.kind == "complete" and not parsed.prompt
    return {
        "done": True,
        "done_reason": "load" if idle else "stop" if reply.tools else finish,
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
    for name in ("options", "stream_options", "response_format", "text"):
        if not isinstance(given.get(name) or {}, dict):
            return name
    tools = given.get("tools") or []
    if not isinstance(tools, list) or not all(_function(tool).get("name") for tool in tools):
        return "tools"
    every: dict[str, Any] = {**given, **(given.get("options") or {})}
    for name, value in every.items():
        if name in WHOLE_NUMBERS and not (value is None or isinstance(value, int)):
            return name
        if name == "stop" and not (value is None or isinstance(value, str | list)):
            return name
        if name == "top_logprobs" and value is not None and not 0 <= value <= MOST_LOGPROBS:
            return name
        if name == "logprobs" and not isinstance(value, int | None):
            return name
        if name == "dimensions" and value is not None and not 2 <= value <= 65_536:
            return name
    return None


def _are_messages(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(message, dict) for message in given)


def _said(message: Mapping[str, Any]) -> Any:
    """What stands in a message, or in an item of the Responses API."""
    return (
        message.get("output") if message.get("type") == FUNCTION_OUTPUT else message.get("content")
    )


def _function(tool: Any) -> Mapping[str, Any]:
    """A function's name and parameters: flat in the Responses API, inside `function` elsewhere."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return {}
    found = tool.get("function", tool)
    return found if isinstance(found, dict) else {}


def _called(
    given: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], prompt: str
) -> tuple[tuple[str, Any], ...]:
    """The functions that the model calls: those that the prompt names, else the first one.

    None by `tool_choice: none`, and after the result of a call unless one is required.
    """
    functions = [_function(tool) for tool in given["tools"]]
    choice = given.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        wanted = _function(choice).get("name")
        functions = [one for one in functions if one["name"] == wanted]
    else:
        last = messages[-1] if messages else {}
        done = last.get("role") == "tool" or last.get("type") == FUNCTION_OUTPUT
        if choice == "none" or (choice == "auto" and done):
            return ()
        functions = [one for one in functions if str(one["name"]) in prompt] or functions[:1]
    if given.get("parallel_tool_calls") is False:
        functions = functions[:1]
    return tuple((str(one["name"]), one.get("parameters") or {}) for one in functions)


def _wanted_logprobs(protocol: Protocol, kind: str, given: Mapping[str, Any]) -> int | None:
    wanted = given.get("logprobs")
    if protocol == "responses":
        wanted = "message.output_text.logprobs" in (given.get("include") or ())
    elif protocol == "openai" and kind == "complete":
        # The older API takes the number of alternatives itself.
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
            return None
        return min(wanted, MOST_LOGPROBS)
    return int(given.get("top_logprobs") or 0) if wanted else None


def text_of(content: Any) -> str:
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
