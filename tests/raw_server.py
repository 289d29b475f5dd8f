"""A server for tests that says exactly the bytes it is told to, or none at all."""

import asyncio
import json
import select
import socket
import socketserver
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """One request as it came, and how often its body had come before."""

    path: str
    headers: dict[str, str]
    body: Any
    before: int
    writer: asyncio.StreamWriter = field(repr=False)

    @property
    def text(self) -> str:
        """What was asked."""
        return str(self.body["messages"][0]["content"])

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def reply(self, status: int = 200, body: Any = None, **headers: str) -> None:
        await self.send(reply(status, body, **headers))

    async def answer(self, text: str | None = None) -> None:
        await self.reply(body=answer(f"re: {self.text}" if text is None else text))

    def reset(self) -> None:
        self.writer.transport.abort()


def answer(text: str, usage: tuple[int, int] = (7, 3), finish: str = "stop") -> dict[str, Any]:
    """A chat answer in the OpenAI shape."""
    return {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
    }


def reply(status: int = 200, body: Any = None, **headers: str) -> bytes:
    """The bytes of a whole HTTP answer."""
    content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


Handler = Callable[[Seen], Awaitable[None]]


class RawServer:
    """Runs `handler` for every request, on a thread of its own. Use it with `with`."""

    def __init__(
        self,
        handler: Handler,
        port: int = 0,
        unix: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.handler = handler
        self.port = port
        self.unix = unix
        self.tls = tls
        self.seen: list[Seen] = []
        self.counts: Counter[str] = Counter()
        self.open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "RawServer":
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        if self.unix:
            self._server = await asyncio.start_unix_server(self._serve, self.unix)
        else:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", self.port, backlog=1024, ssl=self.tls
            )
            self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        """As if the process was killed: nobody gets a word."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode().split("\r\n")[:-2]
                headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw) if raw else None
                name = json.dumps(body, sort_keys=True)
                seen = Seen(first.split()[1], headers, body, self.counts[name], writer)
                self.counts[name] += 1
                self.seen.append(seen)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await self.handler(seen)
                finally:
                    self.open -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


class Tunnel(socketserver.ThreadingTCPServer):
    """A proxy that connects its clients to where they ask by CONNECT, and reads nothing of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Digger)
        self.heads: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Tunnel":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Digger(socketserver.BaseRequestHandler):
    server: Tunnel
    request: socket.socket

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.request.recv(1) or b"\r\n\r\n"
        self.server.heads.append(head.decode())
        method, target = head.decode().split()[:2]
        if method != "CONNECT":
            self.request.sendall(reply(405))
            return
        host, port = target.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as far:
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            other = {self.request: far, far: self.request}
            while True:
                for side in select.select(list(other), [], [])[0]:
                    try:
                        data = side.recv(65536)
                        other[side].sendall(data)
                    except ConnectionError:
                        return
                    if not data:
                        return
