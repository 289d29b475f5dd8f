"""A file of prompts in, a file of responses in the same order out, resumable at any point.

Whole lines are appended in the order of the prompts, so the file always holds a prefix of the
result. Responses that came out of order are in a cache until their turn comes.
"""

import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from batchwright.calls.engine.stats import Prices, Stats
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Usage
from batchwright.calls.request import Request, chat, respond
from batchwright.errors import BadFile, BadRow, CannotRead, CannotWrite, Mismatch
from batchwright.files import (
    append_to,
    existing,
    fsync_folder,
    open_regular,
    parse_json,
    read_regular,
    short_lines,
    write_all,
)
from batchwright.lines import LineFile, checked_line, read_line, read_lines

__all__ = ["Answers", "Api", "Prompt", "Spent", "read_answers", "read_prompts"]


Api = Literal["chat", "responses"]
RENAMED = {"max_tokens": "max_output_tokens"}
MISPLACED = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "n", "seed"),
    *("max_output_tokens", "stop", "tools", "tool_choice", "response_format", "logprobs"),
    *("frequency_penalty", "presence_penalty", "params", "model"),
)
"""What belongs under `parameters`: beside the prompt it would be sent by nobody."""


def _mark_of(request: Request) -> str:
    """Identifies a request in the files beside an output."""
    return request.key.hex()[:16]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: its id and its request."""

    id: str | int
    request: Request

    @property
    def mark(self) -> str:
        """Identifies the request in the output file."""
        return _mark_of(self.request)


def read_prompts(
    path: Path, model: str, parameters: Mapping[str, Any], api: Api = "chat"
) -> list[Prompt]:
    """Rows with `prompt` or `messages`, optional `id`, and `parameters`, which override ours.

    `api` is where they are sent: chat completions, or OpenAI's Responses API, for which
    `max_tokens` is called `max_output_tokens` and `messages` are input items.

    A random request becomes an exact one by its row's number: a second run finds its response.
    """
    make = chat
    if api == "responses":
        make = respond
        parameters = {RENAMED.get(name, name): value for name, value in parameters.items()}
    prompts: list[Prompt] = []
    seen: set[str | int] = set()
    if path.is_dir():
        raise BadFile(f"{path} is a folder; name a JSONL file of prompts")
    with open_regular(existing(path, "file of prompts")) as file:
        for number, line in enumerate(short_lines(file, path), start=1):
            if not line.strip():
                continue
            row = _row(path, number, line)
            name = row.get("id", number - 1)
            if not isinstance(name, str | int) or name in seen:
                raise BadRow(
                    f"{path}, line {number}: the id {name!r} must be a unique string or integer"
                )
            seen.add(name)
            if wrong := [one for one in MISPLACED if one in row]:
                raise BadRow(
                    f"{path}, line {number}: {', '.join(wrong)} beside the prompt would not be "
                    f'sent; write it as "parameters": {{"{wrong[0]}": ...}}'
                )
            own = row.get("parameters", {})
            what = row.get("prompt") if "prompt" in row else row.get("messages")
            if not isinstance(own, dict) or not isinstance(what, str | list) or not what:
                raise BadRow(
                    f"{path}, line {number}: a row needs a string `prompt` or a list `messages`, "
                    f"and `parameters` must be an object; this one has {sorted(row)}"
                )
            given = {**parameters, **own}
            request = make(given.pop("model", model), what, **given)
            if not request.exact:
                request = make(request.model, what, draw=number - 1, **given)
            prompts.append(Prompt(name, request))
    return prompts


Line = tuple[bytes, dict[str, Any]]
"""A line of the output with its line break, and the same parsed."""


def read_answers(path: Path, prompts: Sequence[Prompt]) -> list[Line]:
    """The complete lines of an output, which must belong to these prompts; opens it to read only.

    A partial last line, as a crash leaves it, is no line, but must be the beginning of one.
    """
    if not path.exists():
        return []
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file"
        raise CannotWrite(f"cannot write {path}: it is {what}; choose another path")
    try:
        content = read_regular(path)
    except CannotRead as error:
        raise CannotWrite(f"{error}, or choose another path") from error
    *whole, torn = content.split(b"\n")
    found: list[Line] = []
    for number, line in enumerate(whole):
        try:
            row = parse_json(line)
            mark = row["key"]
        except (ValueError, KeyError, TypeError):
            mark = None
        if number >= len(prompts) or mark != prompts[number].mark:
            raise Mismatch(_FOREIGN.format(path=path, number=number + 1))
        if read_line(line) is None:
            raise Mismatch(_CHANGED.format(path=path, number=number + 1))
        found.append((line + b"\n", row))
    if torn:
        number = len(found)
        begin = _encoded({"id": prompts[number].id})[:-1] if number < len(prompts) else b"\n"
        # A few bytes are somebody else's as well, unless there are lines of ours before them.
        if not torn.startswith(begin) and not (found and begin.startswith(torn)):
            raise Mismatch(_FOREIGN.format(path=path, number=number + 1))
    return found


_FOREIGN = (
    "{path}, line {number}: this is not a response to prompt {number} with these settings; "
    "choose another output, or replace this one with --force"
)


_CHANGED = (
    "{path}, line {number}: this response has changed since it was written, its crc does not fit; "
    "restore the file, or have all responses written again, those in the cache unpaid, with --force"
)


class Answers:
    """The file of responses, locked while it is open.

    `known` counts the prompts that have a response already, from the first on; a partial last
    line of a crash is removed. A file that is not an output for these prompts is refused and
    stays as it is; `force` empties it instead.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[Prompt],
        *,
        retry_failed: bool = False,
        force: bool = False,
    ):
        self.path = path
        self._prompts = prompts
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = append_to(path)
        except OSError as error:
            raise CannotWrite(
                f"cannot write {path}: {error.strerror}; choose another path"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._lines = read_answers(path, prompts)
            except Mismatch:
                if not force:
                    raise
                self._lines = []
            self._size = sum(len(raw) for raw, _ in self._lines)
            os.ftruncate(self._file, self._size)
        except BlockingIOError:
            os.close(self._file)
            raise CannotWrite(
                f"another process is writing {path}; wait for it or choose another output"
            ) from None
        except BaseException:
            os.close(self._file)
            raise
        self.known = len(self._lines)
        self.failed_before = [i for i, (_, row) in enumerate(self._lines) if "error" in row]
        self._again = retry_failed and bool(self.failed_before)
        self._waiting: dict[int, bytes] = {}
        self._next = self.known
        self.failed = len(self.failed_before)
        """Rows that have an error instead of a response."""

    @property
    def missing(self) -> list[int]:
        """Indices of the prompts to make calls for."""
        again = self.failed_before if self._again else []
        return [*again, *range(self.known, len(self._prompts))]

    @property
    def written(self) -> int:
        return self._next

    def add(self, index: int, outcome: Outcome) -> None:
        """Add an outcome; it is written when all before it are. A cancelled call stays open."""
        if isinstance(outcome, Failed) and outcome.kind is Kind.CANCELLED:
            return
        raw = checked_line(_encoded(_shown(self._prompts[index], outcome)))
        self.failed += isinstance(outcome, Failed)
        if index < self.known:
            self.failed -= 1
            self._lines[index] = (raw, {})
            return
        self._waiting[index] = raw
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._next += 1
        if ready:
            self._append(b"".join(ready))

    def close(self) -> None:
        """Flush to disk; rows that were retried replace the old ones atomically."""
        if self._again:
            from batchwright.files import write_atomic

            content = os.pread(self._file, os.fstat(self._file).st_size, 0)
            rows = b"".join(raw for raw, _ in self._lines)
            # A symbolic link stays one.
            write_atomic(Path(os.path.realpath(self.path)), rows + content[self._size :])
        try:
            os.fsync(self._file)
            fsync_folder(self.path.parent)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, raw: bytes) -> None:
        try:
            write_all(self._file, raw)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> CannotWrite:
        return CannotWrite(
            f"cannot write {self.path}: {error.strerror}; free space and run again, "
            f"it resumes from the file and the cache"
        )


class Spent:
    """What the calls for one output have cost, over all its runs, in a hidden file beside it.

    A line that survives `kill -9` is written before a try is sent, with the mark of its prompt and
    the most that it may cost, and another one when it is paid or refused. A try without the second
    line counts as that most from then on: nobody knows what was billed for it. Only one process may
    hold it, the one that has the `Answers`; a pool reserves on a thread of its own.
    """

    def __init__(
        self,
        output: Path,
        prices: Prices,
        prompts: Sequence[Prompt],
        known: Sequence[Line],
        most_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self.path = output.with_name(f".{output.name}.spent")
        self._stats = Stats(prices, most_tokens or {})
        content = read_regular(self.path) if self.path.exists() else b""
        self.paid: set[str] = set()
        self.total = 0.0
        self._open: dict[str, list[float]] = {}
        """By mark: the most that each try may cost that is in flight or was never answered."""
        self._lock = threading.Lock()
        self._found = len(content)
        self._file: LineFile | None = None
        for one in read_lines(self.path, content, "count of what was paid", _payment):
            if one.cost is None:
                self._open.setdefault(one.mark, []).append(one.at_most)
            else:
                self._settled(one.mark)
                if one.is_paid:
                    self.paid.add(one.mark)
                    self.total += one.cost
        self._new: list[dict[str, Any]] = []
        if not content:
            # Earlier runs had no prices, or all their calls are done.
            for prompt, (_, row) in zip(prompts, known, strict=False):
                if "usage" in row:
                    usage = Usage(row["usage"]["prompt"], row["usage"]["completion"])
                    self._count(prompt.mark, self._stats.price(prompt.request, usage))
        self.earlier = self.total

    @property
    def unsettled(self) -> int:
        """Tries that are in flight, or were never answered and may be billed."""
        return sum(map(len, self._open.values()))

    @property
    def unsettled_cost(self) -> float:
        """The most that they may cost; inf if one of them has no bound."""
        return sum(map(sum, self._open.values()))

    def most_cost(self, prompt: Prompt) -> float:
        """The most that one try may cost; inf if there is no bound."""
        return self._stats.most_cost(prompt.request)

    def settle(
        self, cached: Callable[[Sequence[Prompt]], Iterable[Done | None]], prompts: Sequence[Prompt]
    ) -> None:
        """Count the responses that are in the own cache of a run that ended before it did."""
        late = [prompt for prompt in prompts if prompt.mark in self._open]
        for prompt, done in zip(late, cached(late), strict=True):
            if done is not None and prompt.mark in self._open:
                self._count(prompt.mark, self._stats.cost_of(prompt.request, done))
        self.earlier = self.total

    def reserve(self, request: Request, cost: float) -> None:
        """A try is about to be sent that costs at most so much; inf if there is no bound."""
        mark = _mark_of(request)
        with self._lock:
            self._open.setdefault(mark, []).append(cost)
            self._new.append({"key": mark, "at_most": cost if math.isfinite(cost) else None})
            self._write()

    def release(self, request: Request) -> None:
        """A try of the request is not billed."""
        mark = _mark_of(request)
        with self._lock:
            self._settled(mark)
            self._new.append({"key": mark, "cost": None})
            self._write()

    def add(self, prompt: Prompt, outcome: Outcome, *, own_cache: bool) -> None:
        """Write down what a response cost; one from `own_cache` an earlier run paid, and once."""
        if not isinstance(outcome, Done):
            return
        lost = own_cache and outcome.source == "cache" and prompt.mark not in self.paid
        if lost or outcome.source in ("live", "hedge"):
            with self._lock:
                self._count(prompt.mark, self._stats.cost_of(prompt.request, outcome))
                self._write()

    def remove(self) -> None:
        """Nothing is left to be paid for this output."""
        self.path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._found = 0

    def _count(self, mark: str, cost: float) -> None:
        self._settled(mark)
        self.paid.add(mark)
        self.total += cost
        self._new.append({"key": mark, "cost": cost})

    def _settled(self, mark: str) -> None:
        """One try of a prompt has ended, the last that was sent."""
        tries = self._open.get(mark)
        if tries:
            tries.pop()
            if not tries:
                del self._open[mark]

    def _write(self) -> None:
        try:
            if self._file is None:
                size = self.path.stat().st_size if self.path.exists() else 0
                if size != self._found:
                    raise OSError(0, "another process has written it meanwhile")
                self._file = LineFile(self.path, "count of what was paid")
            while self._new:
                self._file.append(json.dumps(self._new[0]).encode())
                del self._new[0]
        except OSError as error:
            raise CannotWrite(
                f"cannot write {self.path}, which counts what was paid: {error.strerror}; "
                f"run again when that is over, it resumes from the file and the cache"
            ) from error


class _Payment(NamedTuple):
    """A line of `Spent`: a try was sent, and may cost `at_most`, or one ended and had its cost."""

    mark: str
    at_most: float
    cost: float | None
    is_paid: bool


def _payment(row: dict[str, Any]) -> _Payment:
    if "at_most" in row:
        most = math.inf if row["at_most"] is None else float(row["at_most"])
        return _Payment(str(row["key"]), most, None, False)
    cost = row["cost"]
    return _Payment(str(row["key"]), 0.0, float(cost or 0.0), cost is not None)


def _encoded(row: dict[str, Any]) -> bytes:
    # Half a surrogate pair has no UTF-8; escaped it is JSON.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise BadRow(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow(f'{path}, line {number}: not an object; write {{"prompt": "..."}}')
    return row


def _shown(prompt: Prompt, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt.id}
    if isinstance(outcome, Done):
        row |= {"text": outcome.text, "finish": outcome.finish}
        if outcome.usage is not None:
            usage = outcome.usage
            row["usage"] = {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens}
    else:
        row |= {"error": str(outcome.kind), "detail": outcome.error}
    return {**row, "key": prompt.mark}
