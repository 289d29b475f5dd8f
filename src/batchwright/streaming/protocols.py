"""What every source of samples can do, for `for` and for `async for`."""

from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from batchwright.streaming.sample import StreamMetrics, StreamSample

__all__ = ["AsyncSampleStream", "LocalStream", "SampleStream"]


@runtime_checkable
class SampleStream(Protocol):
    """A source to iterate over with `for`.

    An iteration goes from the current position to the end; the next one begins anew. The state
    taken between two samples, loaded into a stream with the same settings, gives the samples
    that an uninterrupted stream would give.
    """

    @property
    def metrics(self) -> StreamMetrics: ...

    def __iter__(self) -> Iterator[StreamSample]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as nested JSON values and arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class AsyncSampleStream(Protocol):
    """A source to iterate over with `async for`; state as in `SampleStream`."""

    @property
    def metrics(self) -> StreamMetrics: ...

    def __aiter__(self) -> AsyncIterator[StreamSample]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as nested JSON values and arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LocalStream:
    """A stream that waits for nobody: whatever `for` gives, `async for` gives as well."""

    metrics: StreamMetrics

    def __iter__(self) -> Iterator[StreamSample]:
        raise NotImplementedError

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        for sample in self:
            yield sample

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None
