"""OpenAI-compatible servers that share no code with the simulator: slots, queue, rejects, thrash.

`http.server` with a thread for each connection, and one condition variable around the slots.
"""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal


@dataclass
class Foreign:
    """What the server does, and what it saw."""

    kind: Literal["queue", "reject", "thrash"] = "queue"
    slots: int = 4
    seconds: float = 0.02
    status: int = 429
    """Of a rejection."""
    retry_after: str | None = None
    hang: frozenset[str] = frozenset()
    """The first `hangs` tries of these prompts are never answered."""
    hangs: int = 1
    broken: frozenset[str] = frozenset()
    """Every try of these prompts ends with an error of the server."""
    power: float = 1.5
    threads: int = 0
    """Each open connection has one of so many threads to itself, as in llama.cpp; 0: no limit."""
    away: tuple[int, Any, float, float] | None = None
    """Status and body of what is answered at once from so many seconds after the first request on,
    and for how many seconds: a server that restarts, or the proxy before it."""
    patience_s: float = 5.0
    """A thread closes its connection when that has been idle for so long."""
    waited_out: int = 0
    """How often it did."""
    received: int = 0
    rejected: int = 0
    peak: int = 0
    prompts: list[str] = field(default_factory=list)
    _since: float = 0.0
    _working: int = 0
    _next: int = 0
    _turn: int = 0
    _free: threading.Condition = field(default_factory=threading.Condition)
    _over: threading.Event = field(default_factory=threading.Event)

    def respond(self, prompt: str) -> tuple[int, dict[str, str], Any]:
        with self._free:
            self.received += 1
            self._since = self._since or time.monotonic()
            if self._is_away():
                return self._refused()
            before = self.prompts.count(prompt)
            self.prompts.append(prompt)
        if prompt in self.broken:
            return 500, {}, {"error": {"message": "CUDA error"}}
        if before < self.hangs and prompt in self.hang:
            self._over.wait(60)
            return 500, {}, {}
        with self._free:
            if self.kind == "reject" and self._working >= self.slots:
                self.rejected += 1
                headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
                return self.status, headers, {"error": {"message": "too many requests, busy"}}
            if self.kind == "queue":
                ticket, self._next = self._next, self._next + 1
                # First come, first served.
                self._free.wait_for(lambda: self._turn == ticket and self._working < self.slots)
                self._turn += 1
            self._working += 1
            self.peak = max(self.peak, self._working)
            over = max(1.0, self._working / self.slots)
            self._free.notify_all()
        time.sleep(self.seconds * (over**self.power if self.kind == "thrash" else 1.0))
        with self._free:
            self._working -= 1
            self._free.notify_all()
            if self._is_away():
                # What was in its queue is lost.
                return self._refused()
        message = {"role": "assistant", "content": f"re: {prompt}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}

    def _is_away(self) -> bool:
        if self.away is None:
            return False
        _, _, start, seconds = self.away
        return start <= time.monotonic() - self._since < start + seconds

    def _refused(self) -> tuple[int, dict[str, str], Any]:
        assert self.away is not None
        self.rejected += 1
        return self.away[0], {}, self.away[1]

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve on a free port of this machine; gives the address."""
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            timeout = self.patience_s if self.threads else None

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(size))
                status, headers, told = foreign.respond(body["messages"][-1]["content"])
                data = json.dumps(told).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True

            def log_error(self, format: str, *_: Any) -> None:
                foreign.waited_out += "timed out" in format

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512
            block_on_close = False

            def process_request(self, *given: Any) -> None:
                if pool is None:
                    super().process_request(*given)
                else:
                    pool.submit(self.process_request_thread, *given)

            def handle_error(self, *_: Any) -> None:
                pass

        pool = ThreadPoolExecutor(self.threads) if self.threads else None
        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            self._over.set()
            server.shutdown()
            server.server_close()
            if pool is not None:
                pool.shutdown(cancel_futures=True)
