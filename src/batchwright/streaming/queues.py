"""Prefetching through a bounded queue: a full queue applies back-pressure to its streams.

Nothing here polls. A producer sleeps until there is space, a consumer until there is a sample.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.errors import ConfigError, Mismatch
from batchwright.streaming.protocols import AsyncSampleStream, SampleStream
from batchwright.streaming.sample import StreamMetrics, StreamSample

__all__ = ["Prefetched", "prefetch"]

Stream = SampleStream | AsyncSampleStream


@dataclass(frozen=True, slots=True)
class _Item:
    """A sample with the state of its stream behind it; no sample: the stream ended or failed."""

    stream: int
    sample: StreamSample | None
    state: Mapping[str, Any]
    error: BaseException | None = None


class Prefetched:
    """Streams that are read ahead; see `prefetch`."""

    def __init__(self, streams: Sequence[Stream], size: int) -> None:
        if not streams:
            raise ConfigError("there are no streams to prefetch; give at least one")
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        self._streams = tuple(streams)
        self.size = size
        self.most_queued = 0
        """The most samples that were in the queue at once."""
        self.metrics = StreamMetrics()
        self._states: list[Mapping[str, Any]] = [s.state_dict() for s in streams]

    def __iter__(self) -> Iterator[StreamSample]:
        queue = _BoundedQueue(self.size)
        threads = [
            threading.Thread(target=self._work, args=(k, queue), daemon=True)
            for k in range(len(self._streams))
        ]
        for thread in threads:
            thread.start()
        try:
            left = len(threads)
            while left:
                item = queue.get()
                sample = self._take(item, queue.most)
                if sample is None:
                    left -= 1
                else:
                    yield sample
        finally:
            queue.close()
            for k, thread in enumerate(threads):
                # A source that hangs must not hang its consumer; the thread is a daemon.
                thread.join(timeout=5.0)
                if not thread.is_alive():
                    self._rewind(k)

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        queue: asyncio.Queue[_Item] = asyncio.Queue(self.size)
        tasks = [asyncio.create_task(self._awork(k, queue)) for k in range(len(self._streams))]
        try:
            left = len(tasks)
            while left:
                self.most_queued = max(self.most_queued, queue.qsize())
                sample = self._take(await queue.get(), 0)
                if sample is None:
                    left -= 1
                else:
                    yield sample
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for k in range(len(tasks)):
                self._rewind(k)

    def _work(self, k: int, queue: "_BoundedQueue") -> None:
        stream = self._streams[k]
        assert isinstance(stream, SampleStream)
        try:
            for sample in stream:
                if not queue.put(_Item(k, sample, stream.state_dict())):
                    return
            queue.put(_Item(k, None, stream.state_dict()))
        # Raised again where the samples are consumed, which would wait for ever otherwise.
        except BaseException as error:
            queue.put(_Item(k, None, {}, error))

    async def _awork(self, k: int, queue: asyncio.Queue[_Item]) -> None:
        stream = self._streams[k]
        assert isinstance(stream, AsyncSampleStream)
        try:
            async for sample in stream:
                await queue.put(_Item(k, sample, stream.state_dict()))
            await queue.put(_Item(k, None, stream.state_dict()))
        except Exception as error:
            await queue.put(_Item(k, None, {}, error))

    def _take(self, item: _Item, most: int) -> StreamSample | None:
        if item.error is not None:
            raise item.error
        self.most_queued = max(self.most_queued, most)
        self._states[item.stream] = item.state
        if item.sample is not None:
            self.metrics.record_sample(item.sample)
        return item.sample

    def _rewind(self, k: int) -> None:
        """Rewind a stream to the last sample that was consumed: none in the queue is lost."""
        self._streams[k].load_state_dict(self._states[k])

    def state_dict(self) -> dict[str, Any]:
        """The position of the consumer; samples in the queue are read again on resume."""
        return {
            "streams": {str(k): dict(state) for k, state in enumerate(self._states)},
            "metrics": self.metrics.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["streams"]) != len(self._streams):
            raise Mismatch(
                f"the state is of {len(state['streams'])} streams, here are {len(self._streams)}; "
                f"prefetch the same streams in the same order"
            )
        for k, stream in enumerate(self._streams):
            stream.load_state_dict(state["streams"][str(k)])
            self._states[k] = stream.state_dict()
        self.metrics = StreamMetrics(**state["metrics"])


class _BoundedQueue:
    """A queue between threads that can be closed: then `put` gives up at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.most = 0

    def put(self, item: _Item) -> bool:
        """Wait for space; False if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._size)
            if self._closed:
                return False
            self._items.append(item)
            self.most = max(self.most, len(self._items))
            self._changed.notify_all()
            return True

    def get(self) -> _Item:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def prefetch(*streams: Stream, size: int = 64) -> Prefetched:
    """Read streams ahead by at most `size` samples; several are merged as samples arrive.

    `for` runs each stream in a thread, `async for` in a task. An error of a stream is raised to
    the consumer. Leaving the loop stops the streams and rewinds them to what was consumed,
    which is also the state. With several streams each keeps its own order,
    but their interleaving is a matter of time; `merge` is deterministic.
    """
    return Prefetched(streams, size)
