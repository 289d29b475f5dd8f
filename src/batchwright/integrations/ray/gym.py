"""Gym clients as actors of a Ray cluster, whose episodes become one stream of samples."""

import asyncio
from typing import Any

from batchwright import __version__
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import ConfigError, NoServer, need, one_line
from batchwright.integrations.ray.cluster import join, raised_there, same_version
from batchwright.streaming.gym import GymConfig, GymEpisodeStream, ModelPolicy
from batchwright.streaming.gym.episodes import Episode, _Slot

__all__ = ["RayGymStream"]

TRIES = 3
"""Actors that one episode may be lost with before the stream ends."""


class RayGymStream(GymEpisodeStream):
    """A `GymEpisodeStream` whose episodes are played by `workers` actors of the cluster.

    Each actor plays `connections` episodes at once, with connections and a policy of its own:
    hint, random, or a model as URL#NAME, whose calls go through the one `RayPool` of the cluster.
    Samples come in the order of the episodes, and are those of one machine where server and policy
    are deterministic. An actor that is lost is replaced and its episodes are played again, from
    their beginnings; `lost` counts them. They are samples of no attempt but the last.
    """

    def __init__(
        self,
        config: GymConfig | None = None,
        tokenizer: Tokenizer | str = "bytes",
        policy: str = "hint",
        *,
        workers: int,
        num_episodes: int | None = None,
        connections: int = 1,
        seed: int = 42,
    ) -> None:
        ray = need("ray", extra="ray")
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        super().__init__(
            config,
            tokenizer,
            num_episodes=num_episodes,
            connections=workers * connections,
            seed=seed,
        )
        self.lost = 0
        """Episodes that were begun on an actor which was lost, and played again on another."""
        self._ray, self._workers, self._policy_name = ray, workers, policy
        self._actors: list[Any] = [None] * workers
        self._given_out = 0

    async def _take_turn(self, number: int, slots: "asyncio.Queue[_Slot]") -> Episode:
        """Play an episode on the actor of the first connection that is free."""
        slot = await slots.get()
        # A slot is a place at one actor from its first use on.
        if not isinstance(slot, _Place):
            slot = _Place(self._given_out % self._workers)
            self._given_out += 1
        episode = await self._on(slot, number)
        if episode.last is None:
            slots.put_nowait(slot)
        return episode

    async def _on(self, slot: _Slot, number: int) -> Episode:
        assert isinstance(slot, _Place)
        errors = self._ray.exceptions
        for tried in range(1, TRIES + 1):
            actor = self._actor(slot.worker)
            try:
                episode: Episode = await actor.play.remote(number, self.config)
                return episode
            except errors.RayTaskError as error:
                raise raised_there(error) from None
            except errors.RayActorError as error:
                self.lost += 1
                if self._actors[slot.worker] is actor:
                    self._actors[slot.worker] = None
                if tried == TRIES:
                    raise NoServer(
                        f"episode {number} was lost with its actor {TRIES} times: "
                        f"{one_line(error)[:300]}; batchwright must be installed on every node"
                    ) from None
        raise AssertionError

    def _actor(self, worker: int) -> Any:
        if self._actors[worker] is None:
            if not self._ray.is_initialized():
                join()
            made = self._ray.remote(_Player).options(num_cpus=1, max_concurrency=1000)
            self._actors[worker] = made.remote(
                __version__, self.config, self._policy_name, self.seed
            )
        return self._actors[worker]

    def close(self) -> None:
        """End the actors; the next episode would start others."""
        for actor in filter(None, self._actors):
            self._ray.kill(actor)
        self._actors = [None] * self._workers


class _Place(_Slot):
    """A connection of one of the actors."""

    __slots__ = ("worker",)

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker


class _Player:
    """The actor: plays an episode by its number, on the first of its connections that is free."""

    def __init__(self, version: str, config: GymConfig, policy: str, seed: int) -> None:
        self._version = version
        player: Any = policy
        if policy not in ("hint", "random"):
            from batchwright.calls.endpoints import parse_model
            from batchwright.integrations.ray.pool import RayPool

            endpoint, model = parse_model(policy)
            player = ModelPolicy(RayPool(endpoint), model)
        self._stream = GymEpisodeStream(config, "bytes", player, seed=seed)
        self._free: list[_Slot] = []

    async def play(self, number: int, config: GymConfig) -> Episode:
        # Not where it is made: an actor that cannot be made counts as lost, and its reason too.
        same_version(self._version)
        self._stream.config = config
        slot = self._free.pop() if self._free else _Slot()
        try:
            episode = await self._stream._on(slot, number)
        except BaseException:
            await slot.drop()
            raise
        if episode.last is None:
            self._free.append(slot)
        return episode
