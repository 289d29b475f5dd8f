"""HTTP/1.1 of the simulator: requests parsed, responses and faults written byte by byte."""

import asyncio
import json
import re
import socket
import struct
from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

from batchwright.calls.simulator.wire import Refusal, error

__all__ = ["Connection", "HttpRequest", "chunks", "response"]

LARGEST_HEAD = 1 << 16
LARGEST_BODY = 1 << 28
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?:\r|$)")
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}
REASONS |= {
    403: "Forbidden",
    405: "Method Not Allowed",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
}
REASONS |= {429: "Too Many Requests", 431: "Request Header Fields Too Large"}
REASONS |= {500: "Internal Server Error", 503: "Service Unavailable"}


class HttpRequest(NamedTuple):
    """One request of a client."""

    method: str
    path: str
    query: str
    headers: bytes
    body: bytes


class Connection(asyncio.Protocol):
    """One client: requests in, one response at a time out.

    `handle` gets every request. It writes the response at once, or sets `busy` and calls
    `finish` after the last byte. `lost` is called when the client has left.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        handle: Callable[["Connection", HttpRequest], None],
        lost: Callable[["Connection"], None],
    ) -> None:
        self.busy = False
        self._handle = handle
        self._lost = lost
        self._buffer = bytearray()
        self._closing = False
        self._continued = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, reason: Exception | None) -> None:
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read()

    def _read(self) -> None:
        """Handle the requests that are there, up to one that has to wait."""
        buffer = self._buffer
        while buffer and not self.busy and not self._closing:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > LARGEST_HEAD:
                    self._malformed(431, "the request's head is too long")
                return
            line, _, headers = bytes(buffer[:end]).partition(b"\r\n")
            head = b"\r\n" + headers.lower()
            words = line.decode("latin-1").split(" ")
            found = LENGTH.search(head)
            size = int(found[1]) if found else 0
            if problem := _problem(words, head, size):
                self._malformed(*problem)
                return
            if len(buffer) < end + 4 + size:
                if b"\r\nexpect: 100-continue" in head and not self._continued:
                    self._continued = True
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(buffer[end + 4 : end + 4 + size])
            del buffer[: end + 4 + size]
            self._continued = False
            keep_alive = b"\r\nconnection: keep-alive" in head
            self._closing = b"\r\nconnection: close" in head or (
                words[2] == "HTTP/1.0" and not keep_alive
            )
            address = words[1]
            if not address.startswith("/"):
                # As a client of a proxy writes it: the whole address.
                address = "/" + address.partition("://")[2].partition("/")[2]
            path, _, query = address.partition("?")
            self._handle(self, HttpRequest(words[0], path, query, headers, body))

    def send(
        self, status: int, body: bytes, content: str = "application/json", extra: str = ""
    ) -> None:
        """Write a whole response."""
        self.write(response(status, body, content, extra))
        if self._closing:
            self.transport.close()

    def refuse(self, path: str, refusal: Refusal, retry_after_s: float | None = None) -> None:
        """Respond with an error, at once."""
        extra = ""
        if retry_after_s is not None:
            # The standard has whole seconds; servers send fractions all the same, and so do
            # tests that have no seconds to lose.
            milliseconds = ceil(retry_after_s * 1000)
            extra = f"Retry-After: {milliseconds / 1000:g}\r\nretry-after-ms: {milliseconds}\r\n"
        body = json.dumps(error(path, refusal)).encode()
        self.send(refusal.status, body, extra=extra)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish(self, fault: str | None) -> None:
        """After the last byte: end the connection as the fault says, or read the next request."""
        self.busy = False
        if self.transport.is_closing():
            return
        if fault == "reset":
            raw = self.transport.get_extra_info("socket")
            # Closing with unsent data discarded is what makes the kernel send a reset.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        elif fault == "cut" or self._closing:
            self.transport.close()
        elif self._buffer:
            # Not from here: a client that sends many requests at once would nest them all.
            asyncio.get_running_loop().call_soon(self._read)

    def _malformed(self, status: int, message: str) -> None:
        self._closing = True
        self.refuse("/", Refusal(status, message))


def response(status: int, body: bytes, content: str = "application/json", extra: str = "") -> bytes:
    """A whole response with its head."""
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunks(sent: Sequence[bytes], protocol: str) -> list[bytes]:
    """A streamed response, each event in a chunk of its own."""
    content = "application/x-ndjson" if protocol == "ollama" else "text/event-stream"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content}\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in sent]
    return [head.encode() + pieces[0], *pieces[1:-1], pieces[-1] + b"0\r\n\r\n"]


def _problem(words: Sequence[str], head: bytes, size: int) -> tuple[int, str] | None:
    """Why a request cannot be read at all."""
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return 400, "this is not HTTP/1.1"
    if b"\r\ntransfer-encoding:" in head:
        return 411, "send a Content-Length; chunked bodies are not read"
    if size > LARGEST_BODY:
        return 413, f"a body of {size:,} bytes is too large"
    return None
