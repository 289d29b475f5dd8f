"""The simulator's server: which requests it accepts, what it writes when, and its counts."""

import asyncio
import json
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from batchwright.calls.simulator.answers import Models
from batchwright.calls.simulator.batches import Batches
from batchwright.calls.simulator.behaviour import Behaviour
from batchwright.calls.simulator.http import Connection, HttpRequest, chunks, response
from batchwright.calls.simulator.service import Bucket, Job, Service
from batchwright.calls.simulator.wire import (
    PATHS,
    ParsedRequest,
    Refusal,
    Reply,
    about_models,
    parse,
)
from batchwright.errors import BatchwrightError, NoServer

__all__ = ["Call", "Server", "child"]

FOREIGN = re.compile(
    rb"(?im)^host:(?![ \t]*(127(\.[0-9]+){3}|\[::1\]|localhost)(:[0-9]+)?[ \t]*\r?$)"
)
"""A host that is another name than those of this machine."""
BEARER = re.compile(rb"(?im)^authorization:[ \t]*bearer[ \t]+(.*?)\r?$")
BUSY = "server busy, please try again.  maximum pending requests exceeded"
PAGE = b"<!doctype html><html><title>502</title><body><h1>Bad gateway</h1></body></html>"
COUNTS: tuple[str, ...]
COUNTS = ("received", "refused", "rejected", "limited", "failed", "started", "finished")
COUNTS += ("spoiled", "aborted", "prompt_tokens", "completion_tokens")
COUNTS += ("uploads", "batches", "batch_requests")
AT_ONCE = {"429": 429, "500": 500, "503": 503}
SPOILING = frozenset({"reset", "cut", "html", "bad_json", "empty", "wrong_shape"})


@dataclass(slots=True, eq=False)
class Call:
    """One response in the making: what is written at the end of each part of its job."""

    connection: Connection
    parsed: ParsedRequest
    pieces: Sequence[bytes]
    fault: str | None


class Server:
    """Everything one simulator holds: its models, its service and its counts."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.names = behaviour.model_names
        self.connections: set[Connection] = set()
        self.jobs: dict[Connection, Job[Call]] = {}
        self.models = Models(behaviour)
        self.service: Service[Call] = Service(behaviour.kind, behaviour.schedule)
        self.batches = Batches(behaviour, self.models, self.names, self._pay, self._tally)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._is_unix = False
        self.reset(0.0)

    def reset(self, now: float) -> None:
        """Reset all counts. The knee's schedule restarts unless calls are in flight."""
        behaviour = self.behaviour
        if not self.in_flight:
            self.service = Service(behaviour.kind, behaviour.schedule, now)
        self.service.peak = self.service.serving
        self.buckets = [
            None if limit is None else Bucket(limit, behaviour.burst_s)
            for limit in (behaviour.rpm, behaviour.tpm)
        ]
        self.models.seen.clear()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.finished: Counter[bytes] = Counter()
        self.prompts: dict[bytes, str] = {}
        self.peak_in_flight = self.in_flight

    @property
    def in_flight(self) -> int:
        return self.service.serving + self.service.waiting

    def stats(self, calls: bool = False) -> dict[str, Any]:
        """The counts. Received is the sum of refused, rejected, limited, failed, finished,
        spoiled, aborted and in flight; the requests inside batches are counted by themselves."""
        found: dict[str, Any] = {name: self.counts[name] for name in COUNTS}
        found["in_flight"] = self.in_flight
        found["serving"] = self.service.serving
        found["waiting"] = self.service.waiting
        found["peak_in_flight"] = self.peak_in_flight
        found["peak_serving"] = self.service.peak
        found["connections"] = len(self.connections)
        found["distinct"] = len(self.models.seen)
        found["repeated"] = sum(self.finished.values()) - len(self.finished)
        found["faults"] = dict(self.faults)
        if calls:
            found["calls"] = [
                {"prompt": self.prompts[key], "seen": seen, "finished": self.finished[key]}
                for key, seen in self.models.seen.items()
            ]
        return found

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        """Respond to a request, or accept it as a call."""
        path = request.path
        # A page whose name was made to point here is not on this machine (DNS rebinding).
        if not self._is_unix and FOREIGN.search(request.headers):
            return connection.refuse(path, Refusal(403, "this server is for 127.0.0.1 only"))
        key = self.behaviour.api_key
        if key is not None and path.startswith(("/v1/", "/api/")):
            given = BEARER.search(request.headers)
            if given is None or given[1].decode("latin-1") != key:
                return connection.refuse(path, Refusal(401, "Incorrect API key", "invalid_api_key"))
        if path in PATHS:
            if request.method != "POST":
                return connection.refuse(path, Refusal(405, f"{path} takes POST"))
            return self.take(connection, path, request.body)
        if path == "/" and request.method in ("GET", "HEAD"):
            return connection.send(200, b"Ollama is running", "text/plain")
        found: dict[str, Any] | bytes | Refusal | None
        if path == "/health":
            found = {"status": "ok"}
        elif path == "/simulator/stats":
            self.pump()
            found = self.stats(calls="calls=1" in request.query)
        elif path == "/simulator/reset":
            self.reset(self.now())
            found = self.stats()
        elif path.startswith(("/v1/files", "/v1/batches")):
            found = self.batches.handle(request, self.now())
        else:
            found = about_models(path, request.body, self.names, self.behaviour.context)
        if found is None:
            found = Refusal(404, f"there is nothing at {path}", "not_found")
        if isinstance(found, Refusal):
            return connection.refuse(path, found)
        if isinstance(found, bytes):
            return connection.send(200, found, "application/jsonl")
        return connection.send(200, json.dumps(found).encode())

    def take(self, connection: Connection, path: str, body: bytes) -> None:
        """Refuse a call, or start to serve it."""
        now = self.now()
        self.counts["received"] += 1
        parsed = parse(path, body, self.names)
        if isinstance(parsed, Refusal):
            self.counts["refused"] += 1
            return connection.refuse(path, parsed)
        self.pump()
        if self.service.full(now):
            self.counts["rejected"] += 1
            return connection.refuse(path, self._busy(parsed), self.behaviour.retry_after_s)
        seen = self.models.seen[parsed.key]
        reply = self.models.reply(parsed, seen)
        if wait := self._over_limit(reply, now):
            self.counts["limited"] += 1
            message = f"Rate limit reached; please try again in {wait:.3f}s"
            return connection.refuse(path, Refusal(429, message, "rate_limit_exceeded"), wait)
        self.models.seen[parsed.key] += 1
        text = parsed.prompt or " ".join(parsed.inputs)
        self.prompts.setdefault(parsed.key, text[:200])
        fault = self.behaviour.fault_of(text, parsed.key, seen, self.counts["started"])
        self.counts["started"] += 1
        if fault is not None:
            self.faults[fault] += 1
        if fault in AT_ONCE:
            self.counts["failed"] += 1
            refusal = Refusal(AT_ONCE[fault], f"simulated error {fault}", "simulated")
            retry_after_s = None if fault == "500" else self.behaviour.retry_after_s
            return connection.refuse(path, refusal, retry_after_s)
        seconds = self.behaviour.seconds_of(parsed.key, seen, reply.completion_tokens)
        call, parts = self._prepare(connection, parsed, reply, fault, seconds, seen)
        job = Job(call, parts)
        self.jobs[connection] = job
        connection.busy = True
        self.service.arrive(job, now)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["completion_tokens"] += reply.completion_tokens
        if parts[0] <= 0.0:
            self.pump()
        else:
            self._set_timer()
        return None

    def _tally(self, name: str) -> None:
        self.counts[name] += 1

    def _pay(self, parsed: ParsedRequest, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a finished line of a batch."""
        self.prompts.setdefault(parsed.key, parsed.prompt[:200])
        self.finished[parsed.key] += 1
        self.counts["batch_requests"] += 1
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["completion_tokens"] += completion_tokens

    def _busy(self, parsed: ParsedRequest) -> Refusal:
        """The rejection above the knee, in the words of the protocol."""
        if parsed.protocol == "ollama":
            return Refusal(503, BUSY)
        return Refusal(429, "Too many requests at once; please try again", "rate_limit_exceeded")

    def _over_limit(self, reply: Reply, now: float) -> float:
        costs = (1, reply.prompt_tokens + reply.completion_tokens)
        pairs = [(b, cost) for b, cost in zip(self.buckets, costs, strict=True) if b is not None]
        wait = max((bucket.wait(cost, now) for bucket, cost in pairs), default=0.0)
        if not wait:
            for bucket, cost in pairs:
                bucket.take(cost)
        return wait

    def _prepare(
        self,
        connection: Connection,
        parsed: ParsedRequest,
        reply: Reply,
        fault: str | None,
        seconds: float,
        seen: int,
    ) -> tuple[Call, list[float]]:
        """What will be written, in pieces, and the time each piece takes."""
        if fault == "slow":
            seconds *= self.behaviour.slow_factor
        if fault == "hang":
            return Call(connection, parsed, [b""], fault), [inf]
        if fault == "empty":
            texts = [("", "stop")] * len(reply.texts)
            reply = replace(reply, texts=texts, vectors=None, completion_tokens=0, tools=())
        name = f"{parsed.key.hex()[:16]}-{seen}"
        if fault == "html":
            pieces = [response(200, PAGE, "text/html")]
        elif fault in ("wrong_shape", "bad_json"):
            body = json.dumps(
                self.models.whole(replace(parsed, packed=False), reply, name, seconds)
            ).encode()
            body = b'{"status":"accepted","items":[]}' if fault == "wrong_shape" else body[:-9]
            pieces = [response(200, body)]
        elif parsed.stream:
            pieces = chunks(self.models.events(parsed, reply, name, seconds), parsed.protocol)
        else:
            pieces = [
                response(200, json.dumps(self.models.whole(parsed, reply, name, seconds)).encode())
            ]
        if fault in ("cut", "reset"):
            sent = b"".join(pieces)
            body_start = sent.index(b"\r\n\r\n") + 4
            pieces = [sent[: (body_start + len(sent)) // 2]]
        if fault == "drip":
            sent = b"".join(pieces)
            pieces = [sent[place : place + 1] for place in range(len(sent))]
            pauses = [self.behaviour.drip_s] * (len(pieces) - 1)
            return Call(connection, parsed, pieces, fault), [seconds, *pauses]
        return Call(connection, parsed, pieces, fault), [seconds / len(pieces)] * len(pieces)

    def now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def pump(self) -> None:
        """Write what is due by now, and wake up when there is more."""
        for job, part in self.service.due(self.now()):
            call = job.call
            last = part == len(job.parts) - 1
            if last:
                # Counted before it is written: whoever has the response finds it in the counts.
                self._count(call)
            call.connection.write(call.pieces[part])
            if last:
                self.jobs.pop(call.connection, None)
                call.connection.finish(call.fault)
        self._set_timer()

    def _set_timer(self) -> None:
        moment = self.service.next_time()
        if moment is None:
            return
        assert self._loop is not None
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= moment:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(moment, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.pump()

    def _count(self, call: Call) -> None:
        if call.connection.transport.is_closing():
            self.counts["aborted"] += 1
        elif call.fault in SPOILING:
            self.counts["spoiled"] += 1
        else:
            self.counts["finished"] += 1
            self.finished[call.parsed.key] += 1

    def lost(self, connection: Connection) -> None:
        """A client left; if that was before its response, its slot is free."""
        self.connections.discard(connection)
        job = self.jobs.pop(connection, None)
        if job is None:
            return
        self.pump()
        if job.state != "over":
            self.service.leave(job, self.now())
            self.counts["aborted"] += 1
            self.pump()

    def run(self, port: int, unix: Path | None, started: Callable[[str], None]) -> None:
        """Serve until `stop`; `started` is called with the address once it listens."""
        asyncio.run(self._serve(port, unix, started))

    def stop(self) -> None:
        """End `run`, from any thread."""
        if self._loop is not None and self._end is not None:
            with suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._end.set)

    async def _serve(self, port: int, unix: Path | None, started: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self.reset(self.now())
        _allow_many_sockets()
        try:
            self._is_unix = unix is not None
            if unix is None:
                server = await self._loop.create_server(
                    self._accept, "127.0.0.1", port, backlog=4096
                )
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            else:
                server = await self._loop.create_unix_server(self._accept, unix, backlog=4096)
                url = f"unix://{unix}"
        except (OSError, OverflowError) as reason:
            place = f"port {port}" if unix is None else str(unix)
            raise NoServer(f"cannot serve on {place}: {reason}; choose another") from None
        started(url)
        try:
            await self._end.wait()
        finally:
            server.close()
            for connection in list(self.connections):
                connection.transport.abort()
            # One more iteration of the loop, in which the connections are notified.
            await asyncio.sleep(0)
            if self._timer is not None:
                self._timer.cancel()

    def _accept(self) -> Connection:
        connection = Connection(self.handle, self.lost)
        self.connections.add(connection)
        return connection


def child() -> None:
    """Serve in a process of its own: settings and port from stdin, the address to stdout.

    The end of stdin is the end of the server, so it never outlives the process it serves.
    """
    # Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server(Behaviour.from_json(sys.stdin.readline()))
    place = json.loads(sys.stdin.readline())
    unix = None if place["unix"] is None else Path(place["unix"])

    def started(url: str) -> None:
        print(url, flush=True)
        asyncio.get_running_loop().add_reader(sys.stdin, server.stop)

    try:
        server.run(place["port"], unix, started)
    except BatchwrightError as reason:
        print(reason, flush=True)


def _allow_many_sockets() -> None:
    """As many open connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
