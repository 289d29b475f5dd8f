"""Episodes of a gym server as a stream of samples; only what the server scored becomes one."""

import asyncio
import inspect
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from batchwright import rng
from batchwright.calls.loop import background
from batchwright.data.rows.sample import encode_rows
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadReply, BadRow, ConfigError, Mismatch, NoServer
from batchwright.streaming.gym.config import GymConfig
from batchwright.streaming.gym.dialects import Dialect, Task, greeted
from batchwright.streaming.gym.policies import GymPolicy, PolicyName, Turn, policy_of
from batchwright.streaming.gym.transports import connect
from batchwright.streaming.sample import EpisodeStatus, SampleSource, StreamMetrics, StreamSample

__all__ = ["Episode", "GymEpisodeStream"]

AHEAD = 2
"""Episodes for each connection that are being played or wait to be consumed: while a long one
holds up those behind it, the other connections have something to do."""
MAX_DELAY_S = 60.0


@dataclass(slots=True)
class _Step:
    prompt: str
    written: str
    reward: float


@dataclass(slots=True)
class Episode:
    """One puzzle, played to its end or to the failure that ended it."""

    number: int
    status: EpisodeStatus = EpisodeStatus.RUNNING
    task: Task | None = None
    steps: list[_Step] = field(default_factory=list)
    unscored: int = 0
    """Moves that did not fit the grammar and that the server could not be told of."""
    error: str = ""
    """Why it ended as `error` or `timeout`."""
    last: NoServer | BadReply | None = None
    """What the stream ends with, once this episode was counted."""

    @property
    def finished(self) -> bool:
        """Whether the server scored it; of all others no sample is made."""
        return self.status in (EpisodeStatus.SUCCESS, EpisodeStatus.FAILURE)


@dataclass(slots=True)
class _Slot:
    """A place for one connection, and how often in a row it has failed."""

    dialect: Dialect | None = None
    failures: int = 0

    async def drop(self) -> None:
        if self.dialect is not None:
            dialect, self.dialect = self.dialect, None
            await dialect.lines.close()


class GymEpisodeStream:
    """Samples of episodes that a policy plays on a gym server, for `for` and `async for`.

    A step is a sample: the prompt is the observation, the loss covers what the policy wrote.
    Reward, difficulty and success are what the server said. An episode whose connection broke,
    whose deadline passed or whose replies could not be read is counted in `status_counts` and
    gives no sample.

    `connections` episodes are played at once. Samples come in the order of the episodes, whoever
    ends first; puzzle and seed of episode k are a function of `seed` and k. So two streams are
    equal if server and policy are deterministic and no episode failed on the way. A loaded state
    plays the episode it was taken in again, from its beginning, and skips what was consumed.

    `num_episodes` None plays on until the consumer stops. After `max_retries` failures in a row
    on one connection, each with twice the wait of the one before, the last one is raised.
    """

    def __init__(
        self,
        config: GymConfig | None = None,
        tokenizer: Tokenizer | str = "bytes",
        policy: GymPolicy | PolicyName = "hint",
        *,
        num_episodes: int | None = None,
        connections: int = 1,
        seed: int = 42,
    ) -> None:
        for name, value in (("num_episodes", num_episodes), ("connections", connections)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.config = config or GymConfig()
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.policy = policy_of(policy)
        self.num_episodes, self.connections, self.seed = num_episodes, connections, seed
        self.metrics = StreamMetrics()
        self.status_counts: Counter[str] = Counter()
        """Episodes by how they ended: success, failure, timeout, error."""
        self.unscored = 0
        """Moves that did not fit the grammar, on a server that scores no such move; they count
        towards `max_steps` and give no sample."""
        self.last_error = ""
        self._episode = 0
        self._given = 0

    def __iter__(self) -> Iterator[StreamSample]:
        """Episodes are played by the background loop of this process, also between samples."""
        running, samples = background(), aiter(self)
        # A cancelled `anext` still has connections to close when `aclose` is asked for.
        turn = asyncio.Lock()

        async def following() -> StreamSample | None:
            async with turn:
                return await anext(samples, None)

        async def close() -> None:
            async with turn:
                await samples.aclose()  # type: ignore[attr-defined]

        try:
            while True:
                coroutine, future = following(), None
                try:
                    future = asyncio.run_coroutine_threadsafe(coroutine, running.loop)
                    sample = future.result()
                except BaseException:
                    if future is not None:
                        future.cancel()
                    elif inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                        # Ctrl-C fell before the loop had it.
                        coroutine.close()
                    raise
                if sample is None:
                    return
                yield sample
        finally:
            closed = asyncio.run_coroutine_threadsafe(close(), running.loop)
            if not running.here:
                closed.result()

    async def __aiter__(self) -> AsyncIterator[StreamSample]:
        slots: asyncio.Queue[_Slot] = asyncio.Queue()
        for _ in range(self.connections):
            slots.put_nowait(_Slot())
        ahead: deque[asyncio.Task[Episode]] = deque()
        following = self._episode
        last = math.inf if self.num_episodes is None else self.num_episodes
        try:
            while True:
                while len(ahead) < AHEAD * self.connections and following < last:
                    ahead.append(asyncio.create_task(self._take_turn(following, slots)))
                    following += 1
                if not ahead:
                    break
                # Left in the queue until it is done: a cancelled wait must not lose it.
                await asyncio.wait([ahead[0]])
                episode = ahead.popleft().result()
                for sample in self._consume(episode):
                    yield sample
                if episode.last is not None:
                    raise episode.last
            self._episode = 0
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
            while not slots.empty():
                await slots.get_nowait().drop()

    def _consume(self, episode: Episode) -> Iterator[StreamSample]:
        """Count an episode and give its samples, with the state after each."""
        try:
            samples = self._samples(episode)
        except BadRow as error:
            samples, episode.status, episode.error = [], EpisodeStatus.ERROR, str(error)
        for sample in samples[self._given :]:
            self._given += 1
            self.metrics.record_sample(sample)
            if self._given == len(samples):
                self._end(episode)
            yield sample
        if self._episode <= episode.number:
            # It gave none; or it was played again, for a resumed stream, and was shorter.
            self._end(episode)

    def _end(self, episode: Episode) -> None:
        self.status_counts[episode.status.value] += 1
        self.unscored += episode.unscored
        self.last_error = episode.error or self.last_error
        if episode.finished:
            self.metrics.record_episode(episode.status is EpisodeStatus.SUCCESS)
        self._episode, self._given = episode.number + 1, 0

    async def _take_turn(self, number: int, slots: asyncio.Queue[_Slot]) -> Episode:
        """Play an episode on the first connection that is free."""
        slot = await slots.get()
        try:
            episode = await self._on(slot, number)
        except BaseException:
            # The stream ends with this, so nobody needs the slot any more.
            await slot.drop()
            raise
        if episode.last is None:
            slots.put_nowait(slot)
        return episode

    async def _on(self, slot: _Slot, number: int) -> Episode:
        while slot.dialect is None:
            try:
                slot.dialect = await self._open()
            except NoServer as error:
                await self._failed(slot, error)
        episode = Episode(number)
        try:
            async with asyncio.timeout(self.config.episode_timeout):
                await self._play(episode, slot.dialect)
        except TimeoutError:
            episode.status = EpisodeStatus.TIMEOUT
            failure: NoServer | BadReply = NoServer(
                f"episode {number} took over {self.config.episode_timeout:g} s"
            )
        except (NoServer, BadReply) as error:
            episode.status, failure = EpisodeStatus.ERROR, error
        else:
            slot.failures = 0
            return episode
        episode.error = str(failure)
        try:
            await self._failed(slot, failure)
        except (NoServer, BadReply) as last:
            episode.last = last
        return episode

    async def _open(self) -> Dialect:
        """A connection whose greeting was understood."""
        config, lines = self.config, None
        try:
            async with asyncio.timeout(config.connect_timeout):
                lines = await connect(config)
                return await greeted(lines, config)
        except BaseException as error:
            if lines is not None:
                await lines.close()
            if isinstance(error, TimeoutError):
                what = "did not greet as a gym" if lines is not None else "cannot be reached"
                raise NoServer(
                    f"{config.address} {what} within {config.connect_timeout:g} s; check host, "
                    f"port and transport"
                ) from None
            if isinstance(error, NoServer | BadReply) and config.address not in str(error):
                raise type(error)(
                    f"{config.address} did not greet as a gym: {error}; check host, port and "
                    f"transport (a port that speaks TLS needs a tunnel that ends it)"
                ) from None
            raise

    async def _failed(self, slot: _Slot, error: NoServer | BadReply) -> None:
        """Wait, longer after each failure in a row; raise if there were too many."""
        await slot.drop()
        slot.failures += 1
        if slot.failures > self.config.max_retries:
            raise error
        await asyncio.sleep(min(self.config.retry_delay * 2 ** (slot.failures - 1), MAX_DELAY_S))

    async def _play(self, episode: Episode, dialect: Dialect) -> None:
        task = await dialect.start(rng.key(self.seed, "gym/episode", episode.number) % 2**31)
        episode.task = task

        async def hint() -> str | None:
            action = await dialect.hint()
            if action is not None and not task.fits(action):
                raise BadReply(f"the hint {action[:80]!r} does not fit {task.grammar!r}")
            return action

        for step in range(self.config.max_steps):
            prompt = f"{task.puzzle}: {task.grammar}\n{dialect.text()}\n"
            random = rng.stream(self.seed, "gym/policy", episode.number, step)
            written = await self.policy.act(Turn(prompt, step, random, hint, task))
            if written is None:
                break
            action = _action(written)
            fits = task.fits(action)
            move = await (dialect.act(action) if fits else dialect.act_malformed())
            if move is None:
                episode.unscored += 1
                continue
            episode.steps.append(_Step(prompt, written, move.reward))
            if move.done:
                episode.status = EpisodeStatus.SUCCESS if move.success else EpisodeStatus.FAILURE
                return
        episode.status = EpisodeStatus.FAILURE

    def _samples(self, episode: Episode) -> list[StreamSample]:
        if not episode.finished or episode.task is None:
            return []
        name = f"gym_{self.seed}_{episode.number:06d}"
        rows = [
            (f"{name}_{k}", {"prompt": step.prompt, "completion": step.written})
            for k, step in enumerate(episode.steps)
        ]
        samples = []
        for k, (_, sample) in enumerate(encode_rows(rows, self.tokenizer)):
            if isinstance(sample, BadRow):
                raise sample
            samples.append(
                StreamSample.from_sample(
                    sample,
                    dataset_id=episode.task.puzzle,
                    source=SampleSource.GYM,
                    timestamp=datetime.now(UTC),
                    episode_id=name,
                    episode_status=episode.status,
                    step_index=k,
                    total_steps=len(episode.steps),
                    reward=episode.steps[k].reward,
                    difficulty=episode.task.difficulty,
                    success=episode.status is EpisodeStatus.SUCCESS,
                )
            )
        return samples

    def reset(self) -> None:
        """Restart at episode 0."""
        self._episode = self._given = 0
        self.metrics, self.status_counts, self.last_error = StreamMetrics(), Counter(), ""
        self.unscored = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self._settings(),
            "episode": self._episode,
            "given": self._given,
            "status_counts": dict(self.status_counts),
            "unscored": self.unscored,
            "metrics": self.metrics.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if dict(state["settings"]) != self._settings():
            raise Mismatch(
                f"the state is of a gym stream with {state['settings']}, this one has "
                f"{self._settings()}; make it with the settings it was saved with"
            )
        self._episode, self._given = int(state["episode"]), int(state["given"])
        self.status_counts = Counter(state["status_counts"])
        self.unscored = int(state["unscored"])
        self.metrics = StreamMetrics(**state["metrics"])

    def _settings(self) -> dict[str, Any]:
        """What the samples depend on; another host or deadline continues the same stream."""
        names = {"output_mode", "puzzle_types", "difficulty_range", "max_steps"}
        chosen = self.config.model_dump(mode="json", include=names)
        return {**chosen, "tokenizer": self.tokenizer.fingerprint, "seed": self.seed}


def _action(written: str) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in written.splitlines() if line.strip()), "")
