"""A file of prompts by OpenAI's Batch API: half the price, and done within a day.

What is about to be created on the server is written to a journal beside the output before, and
its id after. So a run that was killed at any point finds its files and batches again, uploads
and pays nothing twice, and collects.
"""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.calls.cache.store import Cache
from batchwright.calls.endpoints import Endpoint, scope_of
from batchwright.calls.engine.stats import Prices, Stats, most_usage
from batchwright.calls.outcome import Done, Failed, Kind, Outcome
from batchwright.calls.promptfile import Answers, Prompt, Spent
from batchwright.calls.request import Request
from batchwright.calls.wire.batches import (
    ENDED,
    BatchServer,
    encode_line,
    outcome_of_line,
    path_of,
    why_failed,
)
from batchwright.errors import BadFile, CannotWrite, ConfigError, Mismatch
from batchwright.files import fsync_folder, read_regular
from batchwright.lines import LineFile, read_lines

__all__ = ["DISCOUNT", "BatchRun", "Journal", "Part", "custom_id", "split"]

DISCOUNT = 0.5
"""What a token costs in a batch, of its usual price."""
MOST_REQUESTS, MOST_BYTES = 50_000, 200_000_000
"""Of one input file."""
WHAT = "list of batches"
FIRST_POLL_S, MOST_POLL_S = 0.25, 60.0


@dataclass(slots=True)
class Part:
    """One input file and its batch; the ids are those of the server."""

    name: str
    path: str
    requests: list[str]
    """The custom ids of its lines."""
    file: str | None = None
    batch: str | None = None
    earlier: bool = False
    """Whether an earlier run made it."""
    status: str | None = None
    counts: tuple[int, int] = (0, 0)
    """Lines that are done, and that failed."""


class Journal:
    """The parts of a run, in a hidden file beside the output; each line survives `kill -9`."""

    HEAD = "calls run --batch-api"

    def __init__(self, output: Path, address: str) -> None:
        self.path = output.with_name(f".{output.name}.batches")
        self.parts: dict[str, Part] = {}
        self._address = address
        content = read_regular(self.path) if self.path.exists() else b""
        try:
            self._rows = list(read_lines(self.path, content, WHAT, dict))
            if self._rows:
                self._check_first(self._rows[0])
            for row in self._rows[1:]:
                if "requests" in row:
                    self.parts[row["name"]] = Part(**row, earlier=True)
                else:
                    part = self.parts[row["name"]]
                    part.file, part.batch = row.get("file", part.file), row.get("batch", part.batch)
        except (BadFile, KeyError, TypeError) as error:
            raise BadFile(
                f"{self.path}, which has the ids of batches, is damaged or was not written by this "
                f"command; move it away, and look for the batches at the server"
            ) from error

    def begin(self, part: Part) -> None:
        """A file is about to be uploaded."""
        named = {"name": part.name, "path": part.path, "requests": part.requests}
        self._write(named)
        self.parts[part.name] = part

    def uploaded(self, part: Part, file: str) -> None:
        part.file = file
        self._write({"name": part.name, "file": file})

    def created(self, part: Part, batch: str) -> None:
        part.batch = batch
        self._write({"name": part.name, "batch": batch})

    def remove(self) -> None:
        """Everything is in the output."""
        self.path.unlink(missing_ok=True)

    def _check_first(self, row: Mapping[str, Any]) -> None:
        if row["batchwright"] != self.HEAD:
            raise KeyError(self.HEAD)
        if row["server"] != self._address:
            raise Mismatch(
                f"the batches of this output are at {row['server']}, not at {self._address}; "
                f"give that endpoint, or choose another output"
            )

    def _write(self, row: dict[str, Any]) -> None:
        first = {"batchwright": self.HEAD, "server": self._address}
        rows = [row] if self._rows else [first, row]
        try:
            with closing(LineFile(self.path, WHAT)) as file:
                for one in rows:
                    file.append(json.dumps(one).encode())
                file.sync()
            if not self._rows:
                fsync_folder(self.path.parent)
        except OSError as error:
            raise CannotWrite(
                f"cannot write {self.path}, which has the ids of batches: {error.strerror}; "
                f"free space and run again to resume"
            ) from error
        self._rows += rows


def split(
    sizes: Iterable[int], most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES
) -> list[range]:
    """Consecutive lines of these sizes, in as few files as the limits allow.

    >>> split([3, 3, 3, 9], most_requests=2, most_bytes=8)
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    found: list[range] = []
    start, total, count = 0, 0, 0
    for count, size in enumerate(sizes, start=1):
        at = count - 1
        if at > start and (at - start == most_requests or total + size > most_bytes):
            found.append(range(start, at))
            start, total = at, 0
        total += size
    if count > start:
        found.append(range(start, count))
    return found


@dataclass(slots=True)
class BatchRun:
    """Sends the missing prompts of an output in batches, waits for them, and collects.

    Each prompt ends as one outcome in `answers`. A request that a batch did not get to before it
    expired is a failure of kind `timeout`; one of a batch that was cancelled stays open, and so
    do those for which there is no money left.
    """

    endpoint: Endpoint
    prompts: Sequence[Prompt]
    answers: Answers
    spent: Spent | None = None
    prices: Prices | None = None
    """Those of a batch."""
    max_cost: float | None = None
    most_tokens: int | None = None
    """The most completion tokens of a request that sets no limit, if it is known."""
    cache: Cache | None = None
    progress: Callable[[int, int, str], None] | None = None
    journal: Journal = field(init=False)
    capped: bool = field(init=False, default=False)
    """The spending cap left prompts that were not sent."""
    hits: int = field(init=False, default=0)
    prompt_tokens: int = field(init=False, default=0)
    completion_tokens: int = field(init=False, default=0)
    foreign: int = field(init=False, default=0)
    """Lines in the files of batches that belong to no request of theirs."""
    _open: dict[str, list[int]] = field(init=False, default_factory=dict)
    """Prompts without an outcome, by custom id: equal exact requests have one."""
    _held: set[str] = field(init=False, default_factory=set)
    """Open requests of batches that were cancelled while this run waited for them."""
    _server: BatchServer = field(init=False)

    def __post_init__(self) -> None:
        self.journal = Journal(self.answers.path, self.endpoint.address)
        for index in self.answers.missing:
            self._open.setdefault(custom_id(self.prompts[index].request), []).append(index)
        known = {custom_id(prompt.request) for prompt in self.prompts}
        if any(not known.issuperset(part.requests) for part in self.journal.parts.values()):
            raise Mismatch(
                f"the batches of this output were sent for other prompts or settings; give these "
                f"again, or choose another output, or move {self.journal.path} away, which has "
                f"the ids of the batches"
            )

    async def run(self) -> None:
        """Collect what earlier runs sent, then send and collect the rest."""
        self._server = BatchServer(self.endpoint)
        try:
            self._look_up()
            await self._collect(list(self.journal.parts.values()))
            while parts := self._next():
                for part in parts:
                    self.journal.begin(part)
                await self._collect(parts)
        finally:
            await self._server.close()

    async def cancel(self) -> None:
        """Cancel the batches that are open, and collect what they have done."""
        self._server = BatchServer(self.endpoint)
        try:
            for part in self.journal.parts.values():
                await self._find(part)
                if part.batch is not None:
                    await self._server.cancel(part.batch)
            await self._collect([p for p in self.journal.parts.values() if p.batch is not None])
        finally:
            await self._server.close()

    @property
    def unsent(self) -> int:
        """Prompts without an outcome."""
        return sum(map(len, self._open.values()))

    def _request(self, name: str) -> Request:
        return self.prompts[self._open[name][0]].request

    def _look_up(self) -> None:
        """Take from the cache what it has."""
        if self.cache is None:
            return
        scope = scope_of([self.endpoint])
        keys = {self._request(name).scoped(scope).key: name for name in self._open}
        for key, done in self.cache.get_many(list(keys)).items():
            self.hits += 1
            self._finish(keys[key], done)

    def _next(self) -> list[Part]:
        """The parts to send now: all open requests that fit under the cap."""
        chosen = [name for name in self._open if name not in self._held]
        if self.max_cost is not None:
            chosen = self._affordable(chosen, self.max_cost)
        groups: dict[tuple[str, str], list[str]] = {}
        for name in chosen:
            request = self._request(name)
            groups.setdefault((request.model, path_of(request)), []).append(name)
        parts = []
        for (_, path), names in groups.items():
            for few in split(len(encode_line(name, self._request(name))) for name in names):
                made = f"batchwright-{secrets.token_hex(12)}.jsonl"
                parts.append(Part(made, path, names[few.start : few.stop]))
        return parts

    def _affordable(self, names: Sequence[str], max_cost: float) -> list[str]:
        """The first of these requests that cannot cost more than what is left, together."""
        assert self.spent is not None
        assert self.prices is not None
        stats = Stats(self.prices)
        left = max_cost - self.spent.total - self.spent.unsettled_cost
        for number, name in enumerate(names):
            request = self._request(name)
            usage = most_usage(request, self.most_tokens)
            if usage is None:
                raise ConfigError(
                    "--max-cost with --batch-api needs a bound for every call, since a batch is "
                    "paid for as a whole; set --max-tokens or --model-max-tokens"
                )
            left -= stats.price(request, usage)
            if left < 0:
                self.capped = True
                return list(names[:number])
        self.capped = False
        return list(names)

    async def _find(self, part: Part) -> None:
        """Look at the server for what an earlier run was about to create when it ended."""
        if part.file is None:
            found = await self._server.find_file(part.name)
            if found is not None:
                self.journal.uploaded(part, str(found["id"]))
        if part.file is not None and part.batch is None:
            found = await self._server.find_batch(part.file)
            if found is not None:
                self.journal.created(part, str(found["id"]))

    async def _collect(self, parts: Sequence[Part]) -> None:
        """Send what is not sent yet, wait until all have ended, and take their outcomes."""
        owner = {name: part for part in self.journal.parts.values() for name in part.requests}
        wanted = {
            part.name: [n for n in part.requests if n in self._open and owner[n] is part]
            for part in parts
        }
        waiting = [part for part in parts if wanted[part.name]]
        for part in waiting:
            await self._send(part)
        pause, first = FIRST_POLL_S, True
        while waiting:
            for part in list(waiting):
                assert part.batch is not None
                batch = await self._server.get(part.batch)
                part.status = str(batch.get("status"))
                counts = batch.get("request_counts") or {}
                part.counts = (int(counts.get("completed") or 0), int(counts.get("failed") or 0))
                if part.status in ENDED:
                    waiting.remove(part)
                    several = len(parts) > 1 and any(p.status != "failed" for p in parts)
                    before = part.earlier and first
                    await self._take(part, batch, wanted[part.name], before, several)
            self._report(parts)
            first = False
            if waiting:
                await asyncio.sleep(pause)
                pause = min(MOST_POLL_S, 1.5 * pause)

    async def _send(self, part: Part) -> None:
        if part.earlier:
            await self._find(part)
        if part.file is None:
            requests = {custom_id(p.request): p.request for p in self.prompts}
            content = b"".join(encode_line(name, requests[name]) for name in part.requests)
            self.journal.uploaded(part, await self._server.upload(part.name, content))
        if part.batch is None:
            assert part.file is not None
            batch = await self._server.create(part.file, part.path)
            self.journal.created(part, str(batch["id"]))

    async def _take(
        self,
        part: Part,
        batch: Mapping[str, Any],
        names: Sequence[str],
        before: bool,
        several: bool,
    ) -> None:
        """Take the outcomes of a batch that has ended, perhaps `before` this run."""
        lines: dict[str, dict[str, Any]] = {}
        known = set(part.requests)
        for field_name in ("output_file_id", "error_file_id"):
            if batch.get(field_name):
                for line in await self._server.lines(str(batch[field_name])):
                    name = line.get("custom_id")
                    if name in known and name not in lines:
                        lines[str(name)] = line
                    else:
                        self.foreign += 1
        default = _without_line(batch)
        paid: list[tuple[Request, Outcome]] = []
        for name in names:
            request = self._request(name)
            outcome: Outcome = default
            if name in lines:
                outcome = outcome_of_line(request, lines[name])
            if isinstance(outcome, Done):
                paid.append((request.scoped(scope_of([self.endpoint])), outcome))
            elif outcome.kind is Kind.CANCELLED:
                if not before:
                    self._held.add(name)
                continue
            elif part.earlier and self._open[name][0] < self.answers.known:
                # An earlier run has written this failure, and it is to be tried again.
                continue
            elif several and part.status == "failed" and outcome.kind is Kind.RATE_LIMITED:
                # The others filled the server's queue; it is sent again after them.
                continue
            self._finish(name, outcome)
        if self.cache is not None and paid:
            self.cache.put_many(paid)

    def _finish(self, name: str, outcome: Outcome) -> None:
        indices = self._open.pop(name)
        prompt = self.prompts[indices[0]]
        if isinstance(outcome, Done) and outcome.source == "live":
            if outcome.usage is not None:
                self.prompt_tokens += outcome.usage.prompt_tokens
                self.completion_tokens += outcome.usage.completion_tokens
            if self.spent is not None and prompt.mark not in self.spent.paid:
                # Single calls of an earlier run that were never answered go on counting.
                self.spent.reserve(prompt.request, 0.0)
                self.spent.add(prompt, outcome, own_cache=False)
        for index in indices:
            self.answers.add(index, outcome)

    def _report(self, parts: Sequence[Part]) -> None:
        if self.progress is not None:
            done = sum(sum(part.counts) for part in parts)
            states = Counter(part.status or "not sent" for part in parts)
            note = ", ".join(f"{n} {status}" for status, n in states.items())
            self.progress(done, sum(len(part.requests) for part in parts), note)


def custom_id(request: Request) -> str:
    """What names a request in the files of a batch."""
    return request.key.hex()[:32]


def _without_line(batch: Mapping[str, Any]) -> Failed:
    """The failure of a request about which the files of a batch say nothing."""
    name, status = batch.get("id"), batch.get("status")
    if status == "failed":
        return why_failed(batch)
    if status == "expired":
        return Failed(Kind.TIMEOUT, f"batch {name} expired before it came to this request")
    if status == "cancelled":
        return Failed(Kind.CANCELLED, f"batch {name} was cancelled")
    return Failed(Kind.BAD_BODY, f"the files of batch {name} have no line for this request")
