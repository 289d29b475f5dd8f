"""OpenAI's Responses API on the server's side: a reply as one object, or as its stream of events.

Nothing is stored: a `previous_response_id` is never found.
"""

import json
from typing import Any

from batchwright.calls.simulator.wire import CREATED, ParsedRequest, Reply, logprobs_of, pieces_of

__all__ = ["events", "whole"]


def whole(parsed: ParsedRequest, reply: Reply, name: str) -> dict[str, Any]:
    """The finished response; `name` goes into the ids."""
    text, finish = reply.texts[0]
    cut = finish == "length"
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    return {
        **_begun(parsed, name),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(parsed, reply, name, text, cut),
        "usage": usage,
    }


def events(parsed: ParsedRequest, reply: Reply, name: str) -> list[bytes]:
    """The response as server-sent events, each with its type and number."""
    final = whole(parsed, reply, name)
    begun = _begun(parsed, name)
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(final["output"]):
        at = {"item_id": item["id"], "output_index": index}
        field, nothing = ("content", []) if item["type"] == "message" else ("arguments", "")
        empty = {**item, "status": "in_progress", field: nothing}
        found.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        found += _text_events(item, at) if item["type"] == "message" else _call_events(item, at)
        found.append({"type": "response.output_item.done", "output_index": index, "item": item})
    found.append({"type": f"response.{final['status']}", "response": final})
    return [
        f"event: {one['type']}\ndata: {json.dumps({**one, 'sequence_number': n})}\n\n".encode()
        for n, one in enumerate(found)
    ]


def _text_events(item: dict[str, Any], at: dict[str, Any]) -> list[dict[str, Any]]:
    part = item["content"][0]
    at = {**at, "content_index": 0}
    # Events have log probabilities without the bytes of the tokens.
    sure = [
        {**_short(token), "top_logprobs": [_short(one) for one in token["top_logprobs"]]}
        for token in part["logprobs"]
    ]
    pieces = pieces_of(part["text"])
    deltas = [
        {
            "type": "response.output_text.delta",
            **at,
            "delta": piece,
            "logprobs": sure[n : n + 1],
        }
        for n, piece in enumerate(pieces)
    ]
    empty = {**part, "text": "", "logprobs": []}
    done = {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": sure}
    return [
        {"type": "response.content_part.added", **at, "part": empty},
        *deltas,
        done,
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _short(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}


def _call_events(item: dict[str, Any], at: dict[str, Any]) -> list[dict[str, Any]]:
    kind = "response.function_call_arguments"
    deltas = [
        {"type": f"{kind}.delta", **at, "delta": piece} for piece in pieces_of(item["arguments"])
    ]
    said = {"name": item["name"], "arguments": item["arguments"]}
    return [*deltas, {"type": f"{kind}.done", **at, **said}]


def _begun(parsed: ParsedRequest, name: str) -> dict[str, Any]:
    """The response before the model has said anything."""
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": CREATED,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": parsed.most_tokens,
        "metadata": {},
        "model": parsed.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _items(
    parsed: ParsedRequest, reply: Reply, name: str, text: str, cut: bool
) -> list[dict[str, Any]]:
    status = "incomplete" if cut else "completed"
    if reply.tools:
        return [
            {
                "id": f"fc_{name}-{number}",
                "type": "function_call",
                "status": status,
                "call_id": f"call_{name}-{number}",
                "name": function,
                "arguments": arguments,
            }
            for number, (function, arguments) in enumerate(reply.tools)
        ]
    sure = [] if parsed.logprobs is None else logprobs_of(pieces_of(text), parsed.logprobs)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": sure}
    message = {"id": f"msg_{name}", "type": "message", "status": status, "role": "assistant"}
    return [{**message, "content": [part]}]
