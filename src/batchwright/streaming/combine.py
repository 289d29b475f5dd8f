"""Streams made of streams: merged, shuffled, rate-limited.

Each is a generator that says what it needs next (a sample from one of its streams, a pause) and
what it gives; one driver runs it for `for`, another for `async for`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchwright import rng
from batchwright.errors import ConfigError, Mismatch
from batchwright.streaming.protocols import (
    AsyncSampleStream,
    SampleStream,
    check_state,
    metrics_of,
)
from batchwright.streaming.rows import ROW, arrays_of, batch_of, contents_of, pack, unpack
from batchwright.streaming.sample import StreamMetrics, StreamSample, whole_number

__all__ = [
    "Combined",
    "Give",
    "Merged",
    "Program",
    "Pull",
    "RateLimited",
    "Shuffled",
    "Wait",
    "merge",
    "rate_limit",
    "shuffle",
]

Stream = SampleStream | AsyncSampleStream


@dataclass(frozen=True, slots=True)
class Pull:
    """Send me the next sample of this stream, None if it has ended."""

    stream: int


@dataclass(frozen=True, slots=True)
class Give:
    """Yield this sample to the consumer."""

    sample: StreamSample


@dataclass(frozen=True, slots=True)
class Wait:
    """Continue after this many seconds."""

    seconds: float


Program = Generator[Pull | Give | Wait, StreamSample | None, None]


class Combined:
    """Runs a program over streams; `for` needs streams for `for`, `async for` the other kind."""

    own_state: tuple[str, ...] = ()
    """Keys of the state beside those that all combined streams have."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        if not streams:
            raise ConfigError("there are no streams to combine; give at least one")
        for stream in streams:
            if not isinstance(stream, SampleStream | AsyncSampleStream):
                raise ConfigError(
                    f"a {type(stream).__name__} is no stream of samples; give streams, "
                    f"such as OfflineDatasetStream, each as an argument of its own"
                )
        self._streams = tuple(streams)
        self.metrics = StreamMetrics()

    def program(self) -> Program:
        """What to do from the current position to the end."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[StreamSample]:
        sources = [iter(stream) for stream in self._streams]  # type: ignore[arg-type]
        program, answer = self.program(), None
        while (step := _next(program, answer)) is not None:
            answer = None
            if isinstance(step, Pull):
                answer = next(sources[step.stream], None)
            elif isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                self.metrics.record_sample(step.sample)
                yield step.sample

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        sources = [aiter(stream) for stream in self._streams]  # type: ignore[arg-type]
        program, answer = self.program(), None
        while (step := _next(program, answer)) is not None:
            answer = None
            if isinstance(step, Pull):
                answer = await anext(sources[step.stream], None)
            elif isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            else:
                self.metrics.record_sample(step.sample)
                yield step.sample

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "streams": {str(k): s.state_dict() for k, s in enumerate(self._streams)},
            "metrics": self.metrics.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, type(self).__name__, "kind", "streams", "metrics", *self.own_state)
        if len(state["streams"]) != len(self._streams):
            raise Mismatch(
                f"the state is of {len(state['streams'])} streams, here are {len(self._streams)}; "
                f"combine the same streams in the same order"
            )
        metrics = metrics_of(state)
        for k, stream in enumerate(self._streams):
            stream.load_state_dict(state["streams"][str(k)])
        self.metrics = metrics


class Merged(Combined):
    """Streams interleaved by weight; see `merge`."""

    own_state = ("given", "ended")

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float] | None) -> None:
        super().__init__(streams)
        self._weights = [1.0] * len(streams) if weights is None else [float(w) for w in weights]
        if len(self._weights) != len(streams) or not all(0 < w < np.inf for w in self._weights):
            raise ConfigError(
                f"weights must be one positive number for each of the {len(streams)} streams, "
                f"got {weights}"
            )
        self._begin()

    def _begin(self) -> None:
        self._given = [0] * len(self._streams)
        self._ended = [False] * len(self._streams)

    def program(self) -> Program:
        while not all(self._ended):
            due = min(
                (k for k, ended in enumerate(self._ended) if not ended),
                key=lambda k: ((self._given[k] + 1) / self._weights[k], k),
            )
            sample = yield Pull(due)
            if sample is None:
                self._ended[due] = True
                continue
            self._given[due] += 1
            yield Give(sample)
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "given": list(self._given), "ended": list(self._ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._given, self._ended = list(state["given"]), list(state["ended"])


class Shuffled(Combined):
    """A stream through a shuffle buffer; see `shuffle`."""

    own_state = ("held", "draws", "ended")

    def __init__(self, stream: Stream, buffer_size: int, seed: int) -> None:
        super().__init__([stream])
        self._size = whole_number("buffer_size", buffer_size, 1)
        self._seed = whole_number("seed", seed)
        self._held: list[StreamSample] = []
        self._draws, self._ended = 0, False

    def program(self) -> Program:
        while True:
            while len(self._held) < self._size and not self._ended:
                sample = yield Pull(0)
                if sample is None:
                    self._ended = True
                else:
                    self._held.append(sample)
            if not self._held:
                break
            # A key for each draw: the place depends on its number alone, so state is a counter.
            drawn = rng.key(self._seed, "streaming/shuffle", self._draws) % len(self._held)
            self._draws += 1
            self._held[drawn], self._held[-1] = self._held[-1], self._held[drawn]
            yield Give(self._held.pop())
        self._ended = False

    def state_dict(self) -> dict[str, Any]:
        packed = [pack(sample, sample.priority, k) for k, sample in enumerate(self._held)]
        rows = np.array([row for row, _ in packed], ROW)
        return {
            **super().state_dict(),
            "held": arrays_of(rows, contents_of([content for _, content in packed])),
            "draws": self._draws,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        rows, contents = batch_of(state["held"])
        self._held = [unpack(row, content) for row, content in zip(rows, contents, strict=True)]
        self._draws, self._ended = int(state["draws"]), bool(state["ended"])


class RateLimited(Combined):
    """A stream at a limited rate; see `rate_limit`."""

    def __init__(self, stream: Stream, per_second: float, clock: Callable[[], float]) -> None:
        super().__init__([stream])
        if not 0 < per_second < np.inf:
            raise ConfigError(f"per_second must be above 0, got {per_second}")
        self._gap_s, self._clock = 1.0 / per_second, clock

    def program(self) -> Program:
        due = self._clock()
        while True:
            # Before the pull: a limit is there to spare the source.
            if (early_s := due - self._clock()) > 0:
                yield Wait(early_s)
            due = max(due, self._clock()) + self._gap_s
            sample = yield Pull(0)
            if sample is None:
                return
            yield Give(sample)


def merge(*streams: Stream, weights: Sequence[float] | None = None) -> Merged:
    """Several streams as one, in proportion to `weights`, until all have ended.

    Deterministic: the next sample comes from the stream that is furthest behind its share, so
    that after any number of samples each stream is within one of it. A stream that has ended
    leaves its share to the others. To take samples as they arrive, use `prefetch`.
    """
    return Merged(streams, weights)


def shuffle(stream: Stream, buffer_size: int = 1000, seed: int = 42) -> Shuffled:
    """A stream in random order, as far as a buffer of `buffer_size` samples reaches."""
    return Shuffled(stream, buffer_size, seed)


def rate_limit(
    stream: Stream, per_second: float, *, clock: Callable[[], float] = time.monotonic
) -> RateLimited:
    """At most `per_second` samples a second, evenly spaced; the source is not asked earlier."""
    return RateLimited(stream, per_second, clock)


def _next(program: Program, answer: StreamSample | None) -> Pull | Give | Wait | None:
    try:
        return program.send(answer)
    except StopIteration:
        return None
