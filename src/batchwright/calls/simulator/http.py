"""One client's connection to the simulator: HTTP/1.1 requests in, answers out, byte for byte."""

import asyncio
import hashlib
import json
import re
import socket
import struct
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from batchwright.calls.simulator.wire import CREATED, CREATED_TEXT, PATHS, Refusal, error

if TYPE_CHECKING:
    from batchwright.calls.simulator.server import Call, Server
    from batchwright.calls.simulator.service import Job

__all__ = ["Connection", "chunks", "response"]

LARGEST_HEAD = 1 << 16
LARGEST_BODY = 1 << 26
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?:\r|$)")
BEARER = re.compile(rb"(?im)^authorization:[ \t]*bearer[ \t]+(.*?)\r?$")
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}
REASONS |= {405: "Method Not Allowed", 411: "Length Required", 413: "Content Too Large"}
REASONS |= {429: "Too Many Requests", 431: "Request Header Fields Too Large"}
REASONS |= {500: "Internal Server Error", 503: "Service Unavailable"}


class Connection(asyncio.Protocol):
    """One client: requests in, one answer at a time out."""

    transport: asyncio.Transport

    def __init__(self, server: "Server") -> None:
        self.server = server
        self.job: Job[Call] | None = None
        self._buffer = bytearray()
        self._closing = False
        self._promised = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.add(self)

    def connection_lost(self, reason: Exception | None) -> None:
        self.server.connections.discard(self)
        job, self.job = self.job, None
        if job is not None:
            self.server.abort(job)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read()

    def _read(self) -> None:
        """Handle the requests that are there, up to one that has to wait."""
        buffer = self._buffer
        while buffer and self.job is None and not self._closing:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > LARGEST_HEAD:
                    self._broken(431, "the request's head is too long")
                return
            line, _, headers = bytes(buffer[:end]).partition(b"\r\n")
            head = b"\r\n" + headers.lower()
            words = line.decode("latin-1").split(" ")
            found = LENGTH.search(head)
            size = int(found[1]) if found else 0
            if wrong := _wrong(words, head, size):
                self._broken(*wrong)
                return
            if len(buffer) < end + 4 + size:
                if b"\r\nexpect: 100-continue" in head and not self._promised:
                    self._promised = True
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(buffer[end + 4 : end + 4 + size])
            del buffer[: end + 4 + size]
            self._promised = False
            kept = b"\r\nconnection: keep-alive" in head
            self._closing = b"\r\nconnection: close" in head or (
                words[2] == "HTTP/1.0" and not kept
            )
            self._handle(words[0], words[1], body, headers)

    def _handle(self, method: str, address: str, body: bytes, headers: bytes) -> None:
        if not address.startswith("/"):
            # As a client of a proxy writes it: the whole address.
            address = "/" + address.partition("://")[2].partition("/")[2]
        path, _, query = address.partition("?")
        server = self.server
        key = server.simulator.api_key
        if key is not None and path.startswith(("/v1/", "/api/")):
            given = BEARER.search(headers)
            if given is None or given[1].decode("latin-1") != key:
                return self.refuse(path, Refusal(401, "Incorrect API key", "invalid_api_key"))
        if path in PATHS:
            if method != "POST":
                return self.refuse(path, Refusal(405, f"{path} takes POST"))
            return server.take(self, path, body)
        found: dict[str, Any] | Refusal | None
        if path == "/health":
            found = {"status": "ok"}
        elif path == "/simulator/stats":
            server.pump()
            found = server.stats(calls="calls=1" in query)
        elif path == "/simulator/reset":
            server.reset(server.now())
            found = server.stats()
        else:
            found = _about_models(path, body, server.names)
        if path == "/" and method in ("GET", "HEAD"):
            return self._send(200, b"Ollama is running", "text/plain")
        if found is None:
            found = Refusal(404, f"there is nothing at {path}", "not_found")
        if isinstance(found, Refusal):
            return self.refuse(path, found)
        return self._send(200, json.dumps(found).encode())

    def refuse(self, path: str, refusal: Refusal, retry_after_s: float | None = None) -> None:
        """Answer with an error, at once."""
        extra = ""
        if retry_after_s is not None:
            # The standard has whole seconds; servers send fractions all the same, and so do
            # tests that have no seconds to lose.
            milliseconds = ceil(retry_after_s * 1000)
            extra = f"Retry-After: {milliseconds / 1000:g}\r\nretry-after-ms: {milliseconds}\r\n"
        body = json.dumps(error(path, refusal)).encode()
        self._send(refusal.status, body, extra=extra)

    def _send(
        self, status: int, body: bytes, content: str = "application/json", extra: str = ""
    ) -> None:
        self.write(response(status, body, content, extra))
        if self._closing:
            self.transport.close()

    def _broken(self, status: int, sentence: str) -> None:
        self._closing = True
        self.refuse("/", Refusal(status, sentence))

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def answered(self, fault: str | None) -> None:
        """The last piece is written: end the connection, or go on with the next request."""
        self.job = None
        if self.transport.is_closing():
            return
        if fault == "reset":
            raw = self.transport.get_extra_info("socket")
            # Closing with unsent data thrown away is what makes the kernel send a reset.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif fault == "cut" or self._closing:
            self.transport.close()
        elif self._buffer:
            # Not from here: a client that sends many requests at once would nest them all.
            asyncio.get_running_loop().call_soon(self._read)


def response(status: int, body: bytes, content: str = "application/json", extra: str = "") -> bytes:
    """A whole answer with its head."""
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunks(sent: Sequence[bytes], protocol: str) -> list[bytes]:
    """A streamed answer, each event in a chunk of its own."""
    content = "text/event-stream" if protocol == "openai" else "application/x-ndjson"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content}\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in sent]
    return [head.encode() + pieces[0], *pieces[1:-1], pieces[-1] + b"0\r\n\r\n"]


def _wrong(words: Sequence[str], head: bytes, size: int) -> tuple[int, str] | None:
    """Why a request cannot be read at all."""
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return 400, "this is not HTTP/1.1"
    if b"\r\ntransfer-encoding:" in head:
        return 411, "send a Content-Length; chunked bodies are not read"
    if size > LARGEST_BODY:
        return 413, f"a body of {size:,} bytes is too large"
    return None


def _about_models(path: str, body: bytes, models: Sequence[str]) -> dict[str, Any] | Refusal | None:
    """Answers to the questions about models; None if `path` asks no such question."""
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
        return {"models": [_local_card(name) for name in models]}
    if path == "/api/show":
        try:
            given = json.loads(body)
            wanted = str(given.get("model") or given.get("name"))
        except (ValueError, AttributeError):
            return Refusal(400, "the body must be a JSON object with a model")
        if wanted.removesuffix(":latest") not in models:
            return Refusal(404, f"model '{wanted}' not found")
        about = {"general.architecture": "simulated", "general.parameter_count": 0}
        card = _local_card(wanted)
        shown = {"modelfile": f"FROM {wanted}", "parameters": "", "template": "{{ .Prompt }}"}
        kept = {"details": card["details"], "modified_at": CREATED_TEXT}
        return {**shown, **kept, "model_info": about, "capabilities": ["completion", "embedding"]}
    return None


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "batchwright"}


def _local_card(name: str) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    details = {"parent_model": "", "format": "gguf", "family": "simulated", "families": []}
    full = name if ":" in name else f"{name}:latest"
    sizes = {"parameter_size": "0B", "quantization_level": "F32"}
    about = {"modified_at": CREATED_TEXT, "size": 0, "digest": digest}
    return {"name": full, "model": full, **about, "details": {**details, **sizes}}
