"""Files and batches of OpenAI's Batch API on the server's side, kept in memory.

A batch is validated when it is created. Its lines finish one after another over `batch_s` seconds;
one with the fault `hang` never does, so that its batch expires after `batch_window_s`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

from batchwright.calls.simulator.answers import Models
from batchwright.calls.simulator.behaviour import Behaviour
from batchwright.calls.simulator.http import HttpRequest
from batchwright.calls.simulator.wire import CREATED, PATHS, ParsedRequest, Refusal, error, parse
from batchwright.files import parse_json

__all__ = ["MOST_BYTES", "MOST_REQUESTS", "Batches"]

MOST_REQUESTS, MOST_BYTES = 50_000, 200_000_000
"""Of one input file, as OpenAI documents them."""
ENDPOINTS = tuple(path for path, (protocol, _) in PATHS.items() if protocol != "ollama")
BOUNDARY = re.compile(rb'(?im)^content-type:\s*multipart/form-data;.*boundary="?([^";\r\n]+)')
NAME = re.compile(rb'(?i)name="([^"]*)"(?:.*filename="([^"]*)")?')
STUCK = ("hang", "reset", "cut")
REFUSED = {"429": 429, "500": 500, "503": 503}


@dataclass(slots=True)
class _File:
    id: str
    name: str
    purpose: str
    content: bytes
    at: float

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": CREATED + int(self.at),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


@dataclass(slots=True)
class _Line:
    """One request of a batch, and its fault."""

    custom_id: str
    parsed: ParsedRequest | Refusal
    fault: str | None = None
    seen: int = 0
    """How often the request had come before."""


@dataclass(slots=True)
class _Batch:
    id: str
    at: float
    given: dict[str, Any]
    lines: list[_Line] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    cancelled: float | None = None
    status: str = "validating"
    ended: float | None = None
    finished: int = 0
    failed: int = 0
    files: dict[str, str] = field(default_factory=dict)


class Batches:
    """All files and batches of one server. `paid` is called for every line that has finished,
    `count` for every upload and every batch."""

    def __init__(
        self,
        behaviour: Behaviour,
        models: Models,
        names: tuple[str, ...],
        paid: Callable[[ParsedRequest, int, int], None],
        count: Callable[[str], None],
    ) -> None:
        self._behaviour = behaviour
        self._models = models
        self._names = names
        self._paid = paid
        self._files: dict[str, _File] = {}
        self._batches: dict[str, _Batch] = {}
        self._count = count
        self._numbers = 0

    def handle(self, request: HttpRequest, now: float) -> dict[str, Any] | bytes | Refusal | None:
        """The response to a request about files or batches; None for any other path."""
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["v1", "files"]:
                return self._upload(request, now)
            case "GET", ["v1", "files"]:
                purpose = parse_qs(request.query).get("purpose", [None])[0]
                found = [f.shown() for f in self._files.values() if purpose in (None, f.purpose)]
                return _listed(found, request.query)
            case "POST", ["v1", "batches"]:
                return self._create(request.body, now)
            case "GET", ["v1", "batches"]:
                return _listed([self._shown(b, now) for b in self._batches.values()], request.query)
            case method, ["v1", "files", name, *rest]:
                file = self._files.get(name)
                if file is None:
                    return Refusal(404, f"No such File object: {name}", "not_found", "id")
                if (method, rest) == ("DELETE", []):
                    del self._files[name]
                    return {"id": name, "object": "file", "deleted": True}
                if method == "GET" and rest in ([], ["content"]):
                    return file.content if rest else file.shown()
            case method, ["v1", "batches", name, *rest]:
                batch = self._batches.get(name)
                if batch is None:
                    return Refusal(404, f"No batch found with id '{name}'.", "not_found", "id")
                if (method, rest) == ("POST", ["cancel"]):
                    return self._cancel(batch, now)
                if (method, rest) == ("GET", []):
                    return self._shown(batch, now)
        return None

    def _upload(self, request: HttpRequest, now: float) -> dict[str, Any] | Refusal:
        parts = _parts(request)
        if parts is None or "file" not in parts or "purpose" not in parts:
            return Refusal(400, "send file and purpose as multipart/form-data", None, "file")
        (name, content), (_, purpose) = parts["file"], parts["purpose"]
        if purpose != b"batch":
            return Refusal(400, "the purpose of a file must be batch", None, "purpose")
        if len(content) > MOST_BYTES:
            return Refusal(413, f"a file of {len(content):,} bytes is too large")
        self._count("uploads")
        file = self._add(name, "batch", content, now)
        return file.shown()

    def _add(self, name: str, purpose: str, content: bytes, now: float) -> _File:
        self._numbers += 1
        file = _File(f"file-sim{self._numbers:06}", name, purpose, content, now)
        self._files[file.id] = file
        return file

    def _create(self, body: bytes, now: float) -> dict[str, Any] | Refusal:
        try:
            given = parse_json(body)
        except ValueError as fault:
            return Refusal(400, f"the body is not JSON: {fault}")
        if not isinstance(given, dict) or given.get("endpoint") not in ENDPOINTS:
            return Refusal(
                400, f"'endpoint' must be one of {', '.join(ENDPOINTS)}", None, "endpoint"
            )
        if given.get("completion_window") != "24h":
            return Refusal(400, "'completion_window' must be 24h", None, "completion_window")
        file = self._files.get(str(given.get("input_file_id")))
        if file is None:
            wanted = given.get("input_file_id")
            return Refusal(400, f"No such File object: {wanted}", "not_found", "input_file_id")
        self._count("batches")
        batch = _Batch(f"batch_sim{len(self._batches):06}", now, given)
        self._batches[batch.id] = batch
        batch.lines, batch.errors = self._validated(file.content, given["endpoint"])
        first = _described(batch, now, self._behaviour.batch_window_s)
        if batch.errors:
            batch.status, batch.ended = "failed", now
        else:
            batch.status = "in_progress"
        return first

    def _validated(self, content: bytes, path: str) -> tuple[list[_Line], list[dict[str, Any]]]:
        lines: list[_Line] = []
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        models: set[Any] = set()
        rows = content.splitlines()
        if not rows:
            return [], [_wrong("empty_file", "The batch input file is empty.", None)]
        if len(rows) > MOST_REQUESTS:
            message = f"The input file has {len(rows):,} requests, over {MOST_REQUESTS:,}."
            return [], [_wrong("too_many_tasks", message, None)]
        for number, row in enumerate(rows, start=1):
            problem = _problem(row, path, seen)
            if isinstance(problem, tuple):
                errors.append(_wrong(*problem, number))
                continue
            seen.add(problem["custom_id"])
            body = problem["body"]
            models.add(body.get("model"))
            if len(models) > 1:
                message = "The requests of a batch must all be for one model."
                errors.append(_wrong("mismatched_model", message, number))
                continue
            if body.get("model") not in self._names:
                message = f"The model `{body.get('model')}` does not exist."
                errors.append(_wrong("model_not_found", message, number))
                continue
            parsed = parse(path, json.dumps(body).encode(), self._names)
            lines.append(_Line(problem["custom_id"], parsed))
        for number, line in enumerate(lines):
            if isinstance(line.parsed, ParsedRequest):
                parsed = line.parsed
                text = parsed.prompt or " ".join(parsed.inputs)
                line.seen = self._models.seen[parsed.key]
                line.fault = self._behaviour.fault_of(text, parsed.key, line.seen, number)
                self._models.seen[parsed.key] += 1
        return lines, errors

    def _cancel(self, batch: _Batch, now: float) -> dict[str, Any] | Refusal:
        self._advance(batch, now)
        if batch.status != "in_progress":
            message = f"Cannot cancel a batch with status '{batch.status}'."
            return Refusal(409, message, None)
        batch.cancelled = now
        shown = _described(batch, now, self._behaviour.batch_window_s)
        return {**shown, "status": "cancelling", "cancelling_at": CREATED + int(now)}

    def _shown(self, batch: _Batch, now: float) -> dict[str, Any]:
        self._advance(batch, now)
        return _described(batch, now, self._behaviour.batch_window_s)

    def _advance(self, batch: _Batch, now: float) -> None:
        """Bring a batch up to date: count the lines that are done, and end it if it is over."""
        if batch.status != "in_progress":
            return
        until = now if batch.cancelled is None else batch.cancelled
        elapsed = until - batch.at
        total = self._behaviour.batch_s
        share = min(1.0, elapsed / total) if total > 0 else 1.0
        due = batch.lines[: int(len(batch.lines) * share)]
        done = [line for line in due if line.fault not in STUCK]
        batch.failed = sum(_fails(line) for line in done)
        batch.finished = len(done) - batch.failed
        if batch.cancelled is not None:
            self._end(batch, "cancelled", done, now)
        elif len(done) == len(batch.lines):
            self._end(batch, "completed", done, now)
        elif elapsed >= self._behaviour.batch_window_s:
            self._end(batch, "expired", done, now)

    def _end(self, batch: _Batch, status: str, done: list[_Line], now: float) -> None:
        batch.status, batch.ended = status, now
        outputs: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        finished = {line.custom_id for line in done}
        for number, line in enumerate(batch.lines):
            head: dict[str, Any] = {
                "id": f"batch_req_{batch.id}_{number}",
                "custom_id": line.custom_id,
            }
            if line.custom_id not in finished:
                word = "cancelled" if status == "cancelled" else "expired"
                message = f"This request was not executed before the batch {word}."
                if word == "expired":
                    message = "This request was not executed before the window expired."
                said = {"code": f"batch_{word}", "message": message}
                errors.append({**head, "response": None, "error": said})
                continue
            code, body = self._answered(batch, line, number)
            made = {"status_code": code, "request_id": f"req_{batch.id}_{number}", "body": body}
            (outputs if code == 200 else errors).append({**head, "response": made, "error": None})
        for kind, rows in (("output", outputs), ("error", errors)):
            if rows:
                content = "".join(json.dumps(row) + "\n" for row in rows).encode()
                name = f"{batch.id}_{kind}.jsonl"
                batch.files[kind] = self._add(name, "batch_output", content, now).id

    def _answered(self, batch: _Batch, line: _Line, number: int) -> tuple[int, dict[str, Any]]:
        parsed = line.parsed
        path = batch.given["endpoint"]
        if isinstance(parsed, Refusal):
            return parsed.status, error(path, parsed)
        if line.fault in REFUSED:
            status = REFUSED[line.fault]
            return status, error(path, Refusal(status, f"simulated error {status}", "simulated"))
        plain = replace(parsed, stream=False)
        reply = self._models.reply(plain, line.seen)
        self._paid(parsed, reply.prompt_tokens, reply.completion_tokens)
        if line.fault in ("html", "bad_json", "wrong_shape"):
            return 200, {"status": "accepted", "items": []}
        if line.fault == "empty":
            texts = [("", "stop")] * len(reply.texts)
            reply = replace(reply, texts=texts, vectors=None, tools=())
        return 200, self._models.whole(plain, reply, f"{batch.id}-{number}", 0.0)


def _fails(line: _Line) -> bool:
    return isinstance(line.parsed, Refusal) or line.fault in REFUSED


def _problem(row: bytes, path: str, seen: set[str]) -> tuple[str, str] | dict[str, Any]:
    """Code and message of what is wrong with a line; the line itself if nothing is."""
    try:
        line = parse_json(row)
    except ValueError:
        return "invalid_json_line", "This line is not parseable as valid JSON."
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        return "missing_required_parameter", "Missing required parameter: 'custom_id'."
    if line["custom_id"] in seen:
        return "duplicate_custom_id", "The custom_id for this request is a duplicate."
    if line.get("method") != "POST":
        return "invalid_method", "The method of a request must be POST."
    if line.get("url") != path:
        return "mismatched_endpoint", f"The url of a request must be {path}."
    if not isinstance(line.get("body"), dict):
        return "missing_required_parameter", "Missing required parameter: 'body'."
    return line


def _wrong(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}


def _described(batch: _Batch, now: float, window_s: float) -> dict[str, Any]:
    times: dict[str, int | None] = {
        f"{name}_at": None
        for name in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
    }
    if batch.ended is not None:
        times[f"{batch.status}_at"] = CREATED + int(batch.ended)
    failed = {"object": "list", "data": batch.errors} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.given["endpoint"],
        "errors": failed,
        "input_file_id": batch.given["input_file_id"],
        "completion_window": batch.given["completion_window"],
        "status": batch.status,
        "output_file_id": batch.files.get("output"),
        "error_file_id": batch.files.get("error"),
        "created_at": CREATED + int(batch.at),
        "expires_at": CREATED + int(batch.at + window_s),
        "cancelling_at": None,
        **times,
        "request_counts": {
            "total": len(batch.lines),
            "completed": batch.finished,
            "failed": batch.failed,
        },
        "metadata": batch.given.get("metadata"),
    }


def _listed(rows: list[dict[str, Any]], query: str) -> dict[str, Any] | Refusal:
    """A page of a list, the newest first."""
    given = {name: values[0] for name, values in parse_qs(query).items()}
    most = given.get("limit", "20")
    if not most.isdecimal():
        return Refusal(400, "'limit' must be a number", None, "limit")
    newest = iter(reversed(rows))
    if after := given.get("after"):
        for row in newest:
            if row["id"] == after:
                break
    page = list(islice(newest, int(most)))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": next(newest, None) is not None,
    }


def _parts(request: HttpRequest) -> Mapping[str, tuple[str, bytes]] | None:
    """File name and content of each field of a form; None if the body is none."""
    boundary = BOUNDARY.search(request.headers)
    if boundary is None:
        return None
    found = {}
    for part in (b"\r\n" + request.body).split(b"\r\n--" + boundary[1])[1:]:
        head, mark, content = part.partition(b"\r\n\r\n")
        named = NAME.search(head)
        if mark and named:
            file = (named[2] or b"").decode(errors="replace")
            found[named[1].decode(errors="replace")] = (file, content)
    return found
