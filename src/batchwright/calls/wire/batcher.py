"""Models inside this process: a function of a batch of requests, called with full batches."""

import contextlib
import queue
import threading
import time
import weakref
from asyncio import AbstractEventLoop, Future, get_running_loop
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from batchwright.calls.endpoints import BatchFunction
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.calls.wire.openai import from_body, scrub
from batchwright.errors import BatchwrightError, ConfigError, MissingFile
from batchwright.models import registry as models

__all__ = ["BatchFunction", "LocalModel", "MicroBatcher", "local_model"]

Response = Mapping[str, Any] | str | Exception

BATCH = 32
"""Requests in one call of a function, by default."""

WAIT_S = 0.005
"""Far less than a model takes, and enough for responses of one batch to become new requests."""


class LocalModel(Protocol):
    """A `BatchFunction` that holds a model until it is closed."""

    name: str

    def __call__(self, requests: Sequence[Request]) -> Sequence[Response]: ...

    def close(self) -> None: ...


def local_model(
    name: str | Path, *, parallel: int = 8, threads: int | None = None, context: int | None = None
) -> LocalModel:
    """The model called `name`, loaded into this process.

    `smollm2` and any file that ends in `.gguf` run by llama.cpp: `parallel` requests at a time
    with `context` tokens each, on `threads` processor threads. `minilm` gives embeddings. `tiny`
    is a random Llama over bytes. Anything else is a folder as `save_pretrained` writes it, of a
    language model or of a sentence embedder; these run by transformers, on a GPU if there is
    one, the whole batch at once, so that the three settings do not apply to them.
    """
    text = str(name)
    if text in models.REGISTRY:
        file = models.find(text).path
        if file is None:
            raise MissingFile(f"{text} is not downloaded yet; run: batchwright models get {text}")
    else:
        file = Path(name) if text.endswith(".gguf") else None
    if file is not None:
        from batchwright.models.llama import Llama

        return Llama(file, text, parallel=parallel, threads=threads, context=context)
    from batchwright.models import generate

    return generate.load(name)


class _Waiting(NamedTuple):
    request: Request
    future: "Future[Outcome]"
    loop: AbstractEventLoop
    start: float


class MicroBatcher:
    """Calls a `BatchFunction` with as many requests as are waiting, up to `batch`.

    A call waits until the batch is full, or `wait_s` after the first request of it could have
    run. The function runs in one thread of its own, never twice at a time. Requests may come
    from any event loop. Cancelling one that waits takes it out of the batch; once the batch
    runs, it runs to its end and the result is dropped.

    Every request ends as one outcome. What the function raises fails the whole batch, an
    exception among its responses one request: as `http_4xx` if it is an error of this package,
    which means that the request cannot be served however often it is sent, and as `http_5xx`
    otherwise. Responses that are too few, too many or of another type are `bad_body`, one
    without text is `empty`.
    """

    def __init__(
        self, function: BatchFunction, batch: int = BATCH, wait_s: float = WAIT_S, name: str = ""
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batch must be at least 1, got {batch}")
        self._function: BatchFunction | None = function
        self.batch = batch
        self.wait_s = wait_s
        self.name = name or str(getattr(function, "name", "")) or "in-process"
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    async def __call__(self, request: Request) -> Outcome:
        loop = get_running_loop()
        future: Future[Outcome] = loop.create_future()
        with self._lock:
            if self._function is None:
                return _closed(self.name, 0.0)
            self._start(self._function)
            self._queue.put(_Waiting(request, future, loop, time.monotonic()))
        return await future

    def close(self) -> None:
        """Wait for the running batch, fail what waits as `cancelled`, and release the function.

        A model that nobody else holds is freed with that; one that is the caller's stays open.
        """
        with self._lock:
            self._function = None
            self._closing.set()
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _start(self, function: BatchFunction) -> None:
        # A forked child has the object and not the thread; what waited there is the parent's.
        if self._thread is not None and self._thread.is_alive():
            return
        self._queue = queue.SimpleQueue()
        work = (self._queue, self._closing, function, self.batch, self.wait_s, self.name)
        self._thread = threading.Thread(
            target=_work, args=work, name=f"batchwright {self.name}", daemon=True
        )
        # The thread holds no reference to the batcher, so that one nobody uses any more ends.
        weakref.finalize(self, self._queue.put, None)
        self._thread.start()


def _work(
    waiting: "queue.SimpleQueue[_Waiting | None]",
    closing: threading.Event,
    function: BatchFunction,
    batch: int,
    wait_s: float,
    name: str,
) -> None:
    left: list[_Waiting] = []
    while not closing.is_set() and (first := waiting.get()) is not None:
        if first.future.cancelled():
            continue
        left = [first]
        until = time.monotonic() + wait_s
        while len(left) < batch:
            try:
                more = waiting.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if more is None:
                waiting.put(None)
                break
            if not more.future.cancelled():
                left.append(more)
        if closing.is_set():
            break
        if taken := [one for one in left if not one.future.cancelled()]:
            _deliver(taken, _run(function, taken, name))
        left = []
    with contextlib.suppress(queue.Empty):
        while True:
            if (one := waiting.get_nowait()) is not None:
                left.append(one)
    now = time.monotonic()
    _deliver(left, [_closed(name, now - one.start) for one in left])


def _run(function: BatchFunction, taken: Sequence[_Waiting], name: str) -> list[Outcome]:
    responses: Sequence[object]
    try:
        responses = function([one.request for one in taken])
    except Exception as error:  # a function of the user may raise anything, and it is data here
        responses = [error] * len(taken)
    if not isinstance(responses, Sequence) or isinstance(responses, str | bytes):
        responses = [_Wrong(f"{type(responses).__name__} instead of a sequence")] * len(taken)
    elif len(responses) != len(taken):
        seen = f"{len(responses)} responses to {len(taken)} requests"
        responses = [_Wrong(seen)] * len(taken)
    now = time.monotonic()
    return [
        _outcome(one.request, response, now - one.start, name)
        for one, response in zip(taken, responses, strict=True)
    ]


def _deliver(taken: Sequence[_Waiting], outcomes: Sequence[Outcome]) -> None:
    """Hand the outcomes to the loops that wait for them, each loop woken once."""
    by_loop: dict[AbstractEventLoop, list[tuple[Future[Outcome], Outcome]]] = {}
    for one, outcome in zip(taken, outcomes, strict=True):
        by_loop.setdefault(one.loop, []).append((one.future, outcome))
    for loop, pairs in by_loop.items():
        # A loop that was closed meanwhile has nobody waiting.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, pairs)


def _settle(pairs: "Iterable[tuple[Future[Outcome], Outcome]]") -> None:
    for future, outcome in pairs:
        if not future.done():
            future.set_result(outcome)


class _Wrong(Exception):
    """What a function returned instead of responses."""


def _outcome(request: Request, response: object, seconds: float, name: str) -> Outcome:
    outcome: Outcome
    if isinstance(response, _Wrong):
        text = f"{name} returned {response}; it must return one each, in order"
        outcome = Failed(Kind.BAD_BODY, text)
    elif isinstance(response, BatchwrightError):
        outcome = Failed(Kind.HTTP_4XX, scrub(str(response), request), 400)
    elif isinstance(response, Exception):
        text = f"{name} raised {type(response).__name__}: {scrub(str(response), request)}"
        outcome = Failed(Kind.HTTP_5XX, text.removesuffix(": "), 500)
    elif isinstance(response, str | Mapping):
        outcome = from_body(
            request, _body(request, response) if isinstance(response, str) else response
        )
    else:
        seen = type(response).__name__
        text = f"{name} returned a response of type {seen}; it must be a string or a mapping"
        outcome = Failed(Kind.BAD_BODY, text)
    return replace(outcome, seconds=seconds, endpoint=name)


def _body(request: Request, text: str) -> dict[str, Any]:
    """A text as the whole response; its finish reason and token counts are unknown."""
    if request.kind == "respond":
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "role": "assistant", "content": [part]}
        return {"model": request.model, "status": "completed", "output": [message]}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if request.kind == "complete":
        choice["text"] = text
    else:
        choice["message"] = {"role": "assistant", "content": text}
    return {"model": request.model, "choices": [choice]}


def _closed(name: str, seconds: float) -> Failed:
    return Failed(Kind.CANCELLED, f"{name} was closed", seconds=seconds, endpoint=name)
