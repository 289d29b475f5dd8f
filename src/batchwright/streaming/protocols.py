"""What every source of samples can do, for `for` and for `async for`."""

import operator
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from pydantic import ValidationError

from batchwright.errors import Mismatch, one_line
from batchwright.streaming.sample import StreamMetrics, StreamSample

__all__ = [
    "AsyncSampleStream",
    "LocalStream",
    "SampleStream",
    "check_state",
    "metrics_of",
    "position_of",
]


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


def check_state(state: Mapping[str, Any], kind: str, *names: str) -> None:
    """Refuse what is not the state of a `kind`, or lacks one of these keys."""
    if not isinstance(state, Mapping):
        raise Mismatch(f"the state of a {kind} is a dictionary, got {type(state).__name__}")
    if state.get("kind", kind) != kind:
        raise Mismatch(
            f"the state is of a {state['kind']}, this is a {kind}; load it into one of those"
        )
    missing = [name for name in names if name not in state]
    if missing:
        raise Mismatch(
            f"the state has no {missing[0]!r}, so it is not that of a {kind}; "
            f"load what its state_dict() gave"
        )


def position_of(state: Mapping[str, Any], name: str, most: int | None = None) -> int:
    """A count of a state, from 0 to `most`."""
    try:
        number = operator.index(state[name])
    except TypeError:
        raise Mismatch(f"{name} of the state must be an integer, got {state[name]!r}") from None
    if number < 0 or (most is not None and number > most):
        limit = "at least 0" if most is None else f"from 0 to {most:,}"
        raise Mismatch(f"{name} of the state must be {limit}, got {number:,}")
    return number


def metrics_of(state: Mapping[str, Any]) -> StreamMetrics:
    """The metrics of a state."""
    try:
        return StreamMetrics(**state["metrics"])
    except (ValidationError, TypeError) as error:
        raise Mismatch(f"the metrics of the state cannot be read: {one_line(error)}") from None


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
