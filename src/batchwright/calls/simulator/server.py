"""The simulator at work: who is turned away, what is written when, and counts of it all."""

import asyncio
import json
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.calls.simulator.answers import Models
from batchwright.calls.simulator.http import Connection, chunks, response
from batchwright.calls.simulator.service import Bucket, Job, Service
from batchwright.calls.simulator.wire import Ask, Refusal, Reply, events, read, whole
from batchwright.errors import BatchwrightError, NoServer

if TYPE_CHECKING:
    from batchwright.calls.simulator.behaviour import Simulator

__all__ = ["Call", "Server", "child"]

BUSY = "server busy, please try again.  maximum pending requests exceeded"
PAGE = b"<!doctype html><html><title>502</title><body><h1>Bad gateway</h1></body></html>"
COUNTS: tuple[str, ...]
COUNTS = ("received", "refused", "rejected", "limited", "failed", "started", "finished")
COUNTS += ("spoiled", "aborted", "prompt_tokens", "completion_tokens")
AT_ONCE = {"429": 429, "500": 500, "503": 503}
SPOILING = frozenset({"reset", "cut", "html", "bad_json", "empty", "wrong_shape"})


@dataclass(slots=True, eq=False)
class Call:
    """One answer on its way: what is written at the end of each part of its job."""

    connection: Connection
    ask: Ask
    pieces: Sequence[bytes]
    fault: str | None


class Server:
    """Everything one simulator holds: its models, its service and its counts."""

    def __init__(self, simulator: "Simulator") -> None:
        self.simulator = simulator
        self.names = simulator.model_names
        self.connections: set[Connection] = set()
        self.models = Models(simulator)
        self.service: Service[Call] = Service(simulator.kind, simulator.schedule)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self.reset(0.0)

    def reset(self, now: float) -> None:
        """Forget all counts. The knee's schedule begins anew unless calls are in flight."""
        simulator = self.simulator
        if not self.in_flight:
            self.service = Service(simulator.kind, simulator.schedule, now)
        self.service.peak = self.service.serving
        self.buckets = [
            None if limit is None else Bucket(limit, simulator.burst_s)
            for limit in (simulator.rpm, simulator.tpm)
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
        spoiled, aborted and in flight."""
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

    def take(self, connection: Connection, path: str, body: bytes) -> None:
        """A call came in whole: turn it away, or begin to serve it."""
        now = self.now()
        self.counts["received"] += 1
        ask = read(path, body, self.names)
        if isinstance(ask, Refusal):
            self.counts["refused"] += 1
            return connection.refuse(path, ask)
        self.pump()
        if self.service.full(now):
            self.counts["rejected"] += 1
            return connection.refuse(path, self._busy(ask), self.simulator.retry_after_s)
        seen = self.models.seen[ask.key]
        reply = self.models.reply(ask, seen)
        if wait := self._over_limit(reply, now):
            self.counts["limited"] += 1
            said = f"Rate limit reached; please try again in {wait:.3f}s"
            return connection.refuse(path, Refusal(429, said, "rate_limit_exceeded"), wait)
        self.models.seen[ask.key] += 1
        text = ask.prompt or " ".join(ask.inputs)
        self.prompts.setdefault(ask.key, text[:200])
        fault = self.simulator.fault_of(text, ask.key, seen, self.counts["started"])
        self.counts["started"] += 1
        if fault is not None:
            self.faults[fault] += 1
        if fault in AT_ONCE:
            self.counts["failed"] += 1
            refusal = Refusal(AT_ONCE[fault], f"simulated error {fault}", "simulated")
            retry_after_s = None if fault == "500" else self.simulator.retry_after_s
            return connection.refuse(path, refusal, retry_after_s)
        seconds = self.simulator.seconds_of(ask.key, seen, reply.completion_tokens)
        call, parts = self._prepare(connection, ask, reply, fault, seconds, seen)
        job = Job(call, parts)
        connection.job = job
        self.service.arrive(job, now)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["completion_tokens"] += reply.completion_tokens
        if parts[0] <= 0.0:
            self.pump()
        else:
            self._set_timer()
        return None

    def _busy(self, ask: Ask) -> Refusal:
        """Turned away at the knee, in the words of the protocol."""
        if ask.protocol == "ollama":
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
        ask: Ask,
        reply: Reply,
        fault: str | None,
        seconds: float,
        seen: int,
    ) -> tuple[Call, list[float]]:
        """What will be written, in pieces, and the time each piece takes."""
        if fault == "slow":
            seconds *= self.simulator.slow_factor
        if fault == "hang":
            return Call(connection, ask, [b""], fault), [inf]
        if fault == "empty":
            texts = [("", "stop")] * len(reply.texts)
            reply = replace(reply, texts=texts, vectors=None, completion_tokens=0)
        name = f"{ask.key.hex()[:16]}-{seen}"
        if fault == "html":
            pieces = [response(200, PAGE, "text/html")]
        elif fault in ("wrong_shape", "bad_json"):
            body = json.dumps(whole(replace(ask, packed=False), reply, name, seconds)).encode()
            body = b'{"status":"accepted","items":[]}' if fault == "wrong_shape" else body[:-9]
            pieces = [response(200, body)]
        elif ask.stream:
            pieces = chunks(events(ask, reply, name, seconds), ask.protocol)
        else:
            pieces = [response(200, json.dumps(whole(ask, reply, name, seconds)).encode())]
        if fault in ("cut", "reset"):
            sent = b"".join(pieces)
            body_start = sent.index(b"\r\n\r\n") + 4
            pieces = [sent[: (body_start + len(sent)) // 2]]
        if fault == "drip":
            sent = b"".join(pieces)
            pieces = [sent[place : place + 1] for place in range(len(sent))]
            pauses = [self.simulator.drip_s] * (len(pieces) - 1)
            return Call(connection, ask, pieces, fault), [seconds, *pauses]
        return Call(connection, ask, pieces, fault), [seconds / len(pieces)] * len(pieces)

    def now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def pump(self) -> None:
        """Write what is due by now, and wake up when there is more."""
        for job, part in self.service.due(self.now()):
            call = job.call
            last = part == len(job.parts) - 1
            if last:
                # Counted before it is written: whoever has the answer finds it in the counts.
                self._count(call)
            call.connection.write(call.pieces[part])
            if last:
                call.connection.answered(call.fault)
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
            self.finished[call.ask.key] += 1

    def abort(self, job: Job[Call]) -> None:
        """The client left before its answer: the place is free."""
        self.pump()
        if job.state != "over":
            self.service.leave(job, self.now())
            self.counts["aborted"] += 1
            self.pump()

    def run(self, port: int, unix: Path | None, started: Callable[[str], None]) -> None:
        """Serve until `stop`; `started` is told the address once connections are taken."""
        asyncio.run(self._serve(port, unix, started))

    def stop(self) -> None:
        """End `run`, from any thread."""
        if self._loop is not None and self._end is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._end.set)

    async def _serve(self, port: int, unix: Path | None, started: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self.reset(self.now())
        _allow_many_sockets()
        try:
            if unix is None:
                server = await self._loop.create_server(
                    lambda: Connection(self), "127.0.0.1", port, backlog=4096
                )
                url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            else:
                server = await self._loop.create_unix_server(
                    lambda: Connection(self), unix, backlog=4096
                )
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
            # One more turn of the loop, in which the connections are told.
            await asyncio.sleep(0)
            if self._timer is not None:
                self._timer.cancel()


def child() -> None:
    """Serve in a process of its own: what and where from stdin, the address to stdout.

    The end of stdin is the end of the server, so it never outlives the process it serves.
    """
    from batchwright.calls.simulator.behaviour import Simulator

    # Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server(Simulator.from_json(sys.stdin.readline()))
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
