"""What `gym run --run-dir` records: every turn of every episode, and counts as they grow."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.files import write_atomic
from batchwright.lines import checked_lines

if TYPE_CHECKING:
    from batchwright.data.tokenizers import Tokenizer
    from batchwright.events import EventLog
    from batchwright.streaming import StreamSample

__all__ = ["EpisodeRecord"]

EVERY_S = 1.0


class EpisodeRecord:
    """Writes `rollouts/<n>.jsonl` and a record `episode` about it, at most once a second.

    Its number counts all episodes that ended.
    """

    def __init__(self, log: "EventLog", folder: Path, tokenizer: "Tokenizer") -> None:
        self._log, self._folder, self._tokenizer = log, folder / "rollouts", tokenizer
        self._open: dict[str, list[StreamSample]] = {}
        self._ended: list[list[StreamSample]] = []
        self._episodes = 0
        # A run that is continued adds files after those that are there.
        names = [path.stem for path in self._folder.glob("*.jsonl")]
        self._files = max((int(name) for name in names if name.isdecimal()), default=0)
        self._written = time.monotonic()

    def add(self, sample: "StreamSample") -> None:
        name = sample.episode_id or sample.sample_id
        samples = self._open.setdefault(name, [])
        samples.append(sample)
        if sample.step_index == (sample.total_steps or 0) - 1:
            self._ended.append(self._open.pop(name))
            if time.monotonic() - self._written >= EVERY_S:
                self.flush()

    def flush(self) -> None:
        """Write the episodes that ended since the last time."""
        if not self._ended:
            return
        seconds, self._written = time.monotonic() - self._written, time.monotonic()
        first = self._episodes
        self._episodes += len(self._ended)
        rows = [
            self._turn(first + k, sample)
            for k, episode in enumerate(self._ended)
            for sample in episode
        ]
        self._files += 1
        lines = (json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") for row in rows)
        write_atomic(self._folder / f"{self._files:06d}.jsonl", checked_lines(lines))
        samples = [sample for episode in self._ended for sample in episode]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        self._log.write(
            "episode",
            episode=self._episodes,
            ended=len(self._ended),
            solved=sum(bool(episode[-1].success) for episode in self._ended) / len(self._ended),
            reward=sum(rewards) / len(rewards) if rewards else None,
            turns=len(samples),
            tokens=sum(len(sample.input_ids) for sample in samples),
            seconds=seconds,
        )
        self._ended = []

    def _turn(self, episode: int, sample: "StreamSample") -> dict[str, Any]:
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        said = [token for token, loss in zip(ids, mask, strict=True) if loss]
        asked = [token for token, loss in zip(ids, mask, strict=True) if not loss]
        return {
            "env": 0,
            "episode": episode,
            "step": (sample.step_index or 0) + 1,
            "question": f"{sample.dataset_id}, difficulty {sample.difficulty or 0:.2f}",
            "prompt": self._tokenizer.decode(asked),
            "response": self._tokenizer.decode(said),
            "reward": sample.reward,
            "why": "" if sample.reward is not None else str(sample.episode_status or ""),
        }
