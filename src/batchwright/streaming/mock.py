"""A deterministic mock gym for tests and demonstrations: episodes of sums, no server."""

from collections.abc import Iterator, Mapping
from typing import Any

from batchwright import rng
from batchwright.data.rows.sample import encode_row
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import ConfigError, Mismatch
from batchwright.streaming.protocols import LocalStream, check_state, metrics_of, position_of
from batchwright.streaming.sample import (
    EpisodeStatus,
    SampleSource,
    StreamMetrics,
    StreamSample,
    real_number,
    whole_number,
)

__all__ = ["MockGymStream"]


class MockGymStream(LocalStream):
    """Episodes of sums, one a step, longer numbers where it is harder.

    A failed episode ends with a wrong answer. The reward is 1 on the last step of a success and
    0 elsewhere. Samples are marked `synthetic`: no server scored them.
    Episode k is a function of the seed and k.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | str = "bytes",
        num_episodes: int = 100,
        steps_per_episode: int = 5,
        difficulty_range: tuple[float, float] = (0.0, 1.0),
        success_rate: float = 0.7,
        seed: int = 42,
    ) -> None:
        low, high = (real_number("difficulty_range", part, 0.0, 1.0) for part in difficulty_range)
        if not 0.0 <= low <= high <= 1.0:
            raise ConfigError(f"difficulty_range must ascend within 0 to 1, got ({low}, {high})")
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.num_episodes = whole_number("num_episodes", num_episodes, 1)
        self.steps_per_episode = whole_number("steps_per_episode", steps_per_episode, 1)
        self.difficulty_range = (low, high)
        self.success_rate = real_number("success_rate", success_rate, 0.0, 1.0)
        self.seed = whole_number("seed", seed)
        self.metrics = StreamMetrics()
        self._position = 0

    def __iter__(self) -> Iterator[StreamSample]:
        while self._position < self.num_episodes * self.steps_per_episode:
            episode, first = divmod(self._position, self.steps_per_episode)
            for sample in self.episode(episode)[first:]:
                self._position += 1
                self.metrics.record_sample(sample)
                if self._position % self.steps_per_episode == 0:
                    self.metrics.record_episode(bool(sample.success))
                yield sample
        self._position = 0

    def episode(self, number: int) -> list[StreamSample]:
        """The samples of one episode."""
        random = rng.stream(self.seed, "mock/episode", number)
        low, high = self.difficulty_range
        difficulty = low + (high - low) * float(random.random())
        success = bool(random.random() < self.success_rate)
        status = EpisodeStatus.SUCCESS if success else EpisodeStatus.FAILURE
        largest = 10 ** (1 + round(8 * difficulty))
        samples = []
        for step in range(self.steps_per_episode):
            a, b = (int(random.random() * largest) for _ in "ab")
            last = step == self.steps_per_episode - 1
            answer = a + b + (last and not success)
            name = f"mock_{number:04d}"
            row = {"prompt": f"Step {step + 1}: {a} + {b} = ", "completion": str(answer)}
            samples.append(
                StreamSample.from_sample(
                    encode_row(row, self.tokenizer, f"{name}_{step}"),
                    dataset_id="mock_gym",
                    source=SampleSource.SYNTHETIC,
                    episode_id=name,
                    episode_status=status,
                    step_index=step,
                    total_steps=self.steps_per_episode,
                    reward=float(last and success),
                    difficulty=difficulty,
                    success=success,
                )
            )
        return samples

    def reset(self) -> None:
        """Restart at episode 0."""
        self._position = 0
        self.metrics = StreamMetrics()

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "MockGymStream",
            "settings": self._settings(),
            "position": self._position,
            "metrics": self.metrics.model_dump(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "MockGymStream", "kind", "settings", "position", "metrics")
        if list(state["settings"]) != self._settings():
            raise Mismatch(
                f"the state is of a mock gym with the settings {state['settings']}, this one has "
                f"{self._settings()}; make it with those it was saved with"
            )
        metrics = metrics_of(state)
        self._position = position_of(state, "position", self.num_episodes * self.steps_per_episode)
        self.metrics = metrics

    def _settings(self) -> list[Any]:
        return [
            self.tokenizer.fingerprint,
            self.num_episodes,
            self.steps_per_episode,
            *self.difficulty_range,
            self.success_rate,
            self.seed,
        ]
