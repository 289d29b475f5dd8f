"""Samples of a stream by request, gathered in a thread; and the streams that have a name."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from typing import Any

from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import ConfigError
from batchwright.streaming.protocols import AsyncSampleStream
from batchwright.streaming.sample import StreamSample
from batchwright.train.sft.config import SftConfig

__all__ = ["Feed", "Range", "open_stream"]

Range = tuple[float, float]
"""Of difficulties, from and to."""
LOOK_S = 0.2
"""Seconds between two looks at whether to stop, while samples are waited for."""


class Feed:
    """One request at a time, of a number of samples: that bounds what waits in memory.

    The stream runs on an event loop in a thread of its own.
    """

    def __init__(self, stream: AsyncSampleStream) -> None:
        if not isinstance(stream, AsyncSampleStream):
            raise ConfigError(f"{type(stream).__name__} is no stream for `async for`; give one")
        self._stream = stream
        self.state: dict[str, Any] = {"aim": None, "stream": stream.state_dict()}
        """The position behind the samples that were taken, and the range it was set to then."""
        self.metrics = stream.metrics
        self.ended = False
        self.waited_for = 0
        """Samples that were not there yet when they were wanted."""
        self._aim: Range | None = None
        self._samples: Any = None
        self._asked: Future[tuple[list[StreamSample], dict[str, Any], bool]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def load(self, state: Mapping[str, Any]) -> None:
        if state["aim"] is not None:
            self._aim = (state["aim"][0], state["aim"][1])
            _set_range(self._stream, self._aim)
        self._stream.load_state_dict(state["stream"])
        self.state = dict(state)

    def ask(self, count: int, aim: Range | None) -> None:
        """Begin to gather `count` samples, and those to the end of the last one's episode."""
        self._asked = asyncio.run_coroutine_threadsafe(self._gather(count, aim), self._loop)

    def take(self, stop: Callable[[], bool]) -> list[StreamSample] | None:
        """The samples that were asked for, once they are there; None if `stop` says so first.

        None at all: the stream has ended. The position follows with `accept`.
        """
        assert self._asked is not None
        late = not self._asked.done()
        while not self._asked.done():
            if stop():
                return None
            wait([self._asked], LOOK_S)
        samples = self._asked.result()[0]
        self.waited_for += len(samples) if late else 0
        return samples

    def accept(self) -> None:
        """Move the position behind the samples that were taken."""
        assert self._asked is not None
        _, self.state, self.ended = self._asked.result()
        self.metrics = self._stream.metrics.model_copy()

    def close(self) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        # A source that hangs must not hang the run; the thread is a daemon.
        with suppress(TimeoutError):
            closing.result(5.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            self._loop.close()

    async def _gather(
        self, count: int, aim: Range | None
    ) -> tuple[list[StreamSample], dict[str, Any], bool]:
        if aim is not None and aim != self._aim:
            # Nothing that was played ahead under another range is kept.
            await self._stop_playing()
            _set_range(self._stream, aim)
            self._aim = aim
        if self._samples is None:
            self._samples = aiter(self._stream)
        taken: list[StreamSample] = []
        sample: StreamSample | None = None
        while len(taken) < count or not _ends_episode(taken[-1]):
            sample = await anext(self._samples, None)
            if sample is None:
                break
            taken.append(sample)
        return taken, {"aim": aim, "stream": self._stream.state_dict()}, sample is None

    async def _stop_playing(self) -> None:
        if self._samples is not None:
            samples, self._samples = self._samples, None
            await samples.aclose()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._stop_playing()


def open_stream(
    config: SftConfig, tokenizer: Tokenizer, asked: Range, closing: ExitStack
) -> AsyncSampleStream:
    """The stream that --online-source names, endless, of difficulties in the range.

    What it needs open is closed with `closing`.
    """
    names = tuple(name.strip() for name in config.online_tasks.split(",") if name.strip())
    if config.online_source == "mock":
        from batchwright.streaming.mock import MockGymStream

        return MockGymStream(
            tokenizer, num_episodes=2**31, difficulty_range=asked, seed=config.seed
        )
    if config.online_source == "reasoning-gym":
        from batchwright.streaming.reasoning import ReasoningGymStream, model_answers

        policy: Any = config.online_policy or "answer"
        if policy != "answer":
            policy = model_answers(*_model(policy, closing))
        return ReasoningGymStream(
            names,
            tokenizer,
            policy,
            difficulty_range=asked,
            seed=config.seed,
            on_bad_row=config.on_bad_row,
        )
    from batchwright.streaming.gym import GymConfig, GymEpisodeStream, GymTransport, ModelPolicy

    player: Any = config.online_policy or "hint"
    if player not in ("hint", "random"):
        player = ModelPolicy(*_model(player, closing))
    server = GymConfig(
        host=config.gym_host,
        port=config.gym_port,
        transport=GymTransport(config.gym_transport),
        puzzle_types=names or None,
        difficulty_range=asked,
    )
    return GymEpisodeStream(
        server, tokenizer, player, connections=config.gym_connections, seed=config.seed
    )


def _model(name: str, closing: ExitStack) -> Any:
    """A pool and the name of the model in it."""
    from batchwright.calls import Pool, parse_model

    endpoint, model = parse_model(name)
    return closing.enter_context(Pool(endpoint)), model


def _set_range(stream: AsyncSampleStream, asked: Range) -> None:
    from batchwright.streaming.gym import GymEpisodeStream

    if isinstance(stream, GymEpisodeStream):
        stream.config = stream.config.model_copy(update={"difficulty_range": asked})
        return
    if not hasattr(stream, "difficulty_range"):
        raise ConfigError(
            f"--curriculum success-rate needs a stream with a difficulty_range to set, got "
            f"{type(stream).__name__}; use --curriculum none"
        )
    stream.difficulty_range = asked


def _ends_episode(sample: StreamSample) -> bool:
    if sample.step_index is None or sample.total_steps is None:
        return True
    return sample.step_index == sample.total_steps - 1
