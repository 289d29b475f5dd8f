"""Optimizer steps of an online run: stream, replay buffer, window, microbatches.

    request -> stream (in a thread) -> replay buffer -> window over a snapshot -> steps

Before each window the samples that were requested are put into the buffer, the curriculum chooses
the next range of difficulties, and the next request is made, so that episodes are played while
the model trains. Nothing depends on time, so a run over a deterministic stream repeats exactly.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from batchwright.batching import CheckpointPosition
from batchwright.batching.collation import CollatedBatch
from batchwright.checkpoint import Checkpoint
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch, OversizedSample
from batchwright.streaming.curriculum import SuccessRateCurriculum
from batchwright.streaming.protocols import AsyncSampleStream
from batchwright.streaming.replay import ReplayBatch, ReplayBuffer, ReplayBufferConfig
from batchwright.streaming.rows import SOURCES
from batchwright.streaming.sample import SampleSource, StreamSample
from batchwright.streaming.window import RollingBatchPlanWindow, WindowConfig
from batchwright.train.run import Run
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.feed import Feed, Range, open_stream
from batchwright.train.sft.prepare import bucket_edges

__all__ = ["OnlineSteps"]

OFFLINE = SOURCES.index(SampleSource.OFFLINE)


class OnlineSteps:
    """The steps of an online run, and the state that they continue from."""

    def __init__(
        self,
        config: SftConfig,
        run: Run,
        tokenizer: Tokenizer,
        *,
        vocabulary: int,
        context: int | None,
        stream: AsyncSampleStream | None = None,
    ) -> None:
        self._config, self._run = config, run
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self.total = config.max_steps or sys.maxsize
        self.ended = False
        """Whether the stream has ended before the steps did."""
        self.packed = config.chosen_layout == "packed"
        self._curriculum: SuccessRateCurriculum | None = None
        self._range: Range = (config.difficulty_min, config.difficulty_max)
        if config.curriculum == "success-rate":
            self._curriculum = SuccessRateCurriculum(*self._range)
            self._range = self._curriculum.first
        settings = ReplayBufferConfig(max_size=config.buffer_size, seed=config.seed)
        self.buffer = ReplayBuffer(settings)
        self.window = RollingBatchPlanWindow(self.buffer, _window_config(config, context))
        self._limit = self.window.config.batching(0).limit
        self._closing = ExitStack()
        if stream is None:
            stream = open_stream(config, tokenizer, self._range, self._closing)
        self._feed = Feed(stream)
        self._closing.callback(self._feed.close)
        self._too_long = self._bad_rows = 0
        self._done = (0, 0)
        self.position = CheckpointPosition(plan="online")
        self._age = 0.0

    def facts(self) -> dict[str, Any]:
        """For the first event of the run."""
        source = self._config.online_source
        return {"plan": "online", "source": source, "skipped_rows": self._bad_rows}

    def state(self) -> dict[str, Any]:
        """What the next step depends on, besides the weights; the buffer is saved on its own.

        To its folder is added what has changed. The parts that older checkpoints name are kept.
        """
        folder = self._run.folder / "replay"
        self.buffer.save(folder, keep=self._config.keep + 1)
        saved = self.buffer.saved
        assert saved is not None
        consumed, total = self._done
        window = {**self.window.state_dict(), "consumed": consumed, "total_microbatches": total}
        return {
            "online": {
                "replay": {"part": saved.number, "sha256": saved.sha256},
                "window": window,
                "stream": self._feed.state,
                "stream_ended": self._feed.ended,
                "range": list(self._range),
                "counts": [self._too_long, self._bad_rows],
            }
        }

    def load(self, found: Checkpoint, position: CheckpointPosition) -> None:
        """Continue from a checkpoint."""
        saved = found.state["online"]
        part = int(saved["replay"]["part"])
        self.buffer = ReplayBuffer.load(self._run.folder / "replay", part=part)
        if self.buffer.saved is None or self.buffer.saved.sha256 != saved["replay"]["sha256"]:
            raise Mismatch(
                f"part {part} of {self._run.folder}/replay is not the one that the checkpoint "
                f"names; restore the folder as the run left it"
            )
        self.window = RollingBatchPlanWindow(self.buffer, self.window.config)
        self.window.load_state_dict(saved["window"])
        self._range = (saved["range"][0], saved["range"][1])
        self._feed.load(saved["stream"])
        self._feed.ended = bool(saved["stream_ended"])
        self._too_long, self._bad_rows = saved["counts"]
        self._done = (int(saved["window"]["consumed"]), int(saved["window"]["total_microbatches"]))
        self.position = position

    def fill(self) -> None:
        """Put the rows of --data into the buffer, where a new run begins."""
        if not self._config.data:
            return
        from batchwright.streaming.offline import OfflineDatasetStream

        rows = OfflineDatasetStream(
            open_source(self._config.data, self._config.ignore_column, self._config.ids),
            tokenizer=self._tokenizer,
            # Too long is what --overflow says.
            max_length=2**31 - 1,
            on_bad_row=self._config.on_bad_row,
        )
        self.buffer.add_batch(self._fitting(rows))
        self._bad_rows = rows.metrics.samples_errored
        if self.buffer.total_evicted:
            raise ConfigError(
                f"--data has {self.buffer.total_added:,} rows, more than "
                f"--buffer-size {self._config.buffer_size:,}; raise it, or give fewer rows"
            )

    def steps(
        self, stop: Callable[[], bool], progress: Callable[[int, int], None] | None = None
    ) -> Generator[list[CollatedBatch], None, None]:
        """The microbatches of each step, until the stream ends or `stop` says so while waiting."""
        self._ask()
        size = self._config.step_size or self._config.grad_accum
        while True:
            if not self.window.remaining_microbatches:
                chosen = self._take(stop, progress)
                if chosen is None:
                    return
                self.window.build_next_window(chosen)
                self._done = (0, self.window.total_microbatches)
                self._report(chosen)
            specs = list(islice(self.window.iter_current(), size))
            items = np.concatenate([spec.items for spec in specs])
            serials = self.window.current_samples.serials[items]
            self._age = float((self.buffer.total_added - serials).mean())
            yield [self.window.collate(spec, pad_id=self._tokenizer.pad_id) for spec in specs]

    def finish_step(self, step: int) -> dict[str, Any]:
        """Move the position behind the step that was trained; what to log about it."""
        window = self.window.current_state
        assert window is not None
        self._done = (window.microbatches_consumed, self.window.total_microbatches)
        self.position = CheckpointPosition(
            window.window_id, window.microbatches_consumed, step, plan="online"
        )
        known = {"success_rate": self.buffer.success_rate}
        return {
            "window": window.window_id,
            "buffer": self.buffer.size,
            "sample_age": self._age,
            "difficulty_low": self._range[0],
            "difficulty_high": self._range[1],
            **{name: value for name, value in known.items() if value is not None},
        }

    def summary(self) -> dict[str, Any]:
        """What the run came to, for its report."""
        return {
            "samples": self.buffer.total_added,
            "buffer": self.buffer.size,
            "evicted": self.buffer.total_evicted,
            "windows": self.window.total_windows,
            "success_rate": self.buffer.success_rate,
            "difficulty": list(self._range),
            "too_long": self._too_long,
            "waited_for": self._feed.waited_for,
        }

    def close(self) -> None:
        self._closing.close()

    def _aimed(self) -> Range | None:
        """The range that the stream is set to; None leaves it as it was made."""
        return self._range if self._curriculum else None

    def _ask(self) -> None:
        if not self._feed.ended:
            self._feed.ask(self._config.online_fresh, self._aimed())

    def _take(
        self, stop: Callable[[], bool], progress: Callable[[int, int], None] | None
    ) -> ReplayBatch | None:
        """Take requested samples until there are enough to train on; None to end or stop."""
        while True:
            samples = [] if self._feed.ended else self._feed.take(stop)
            if not samples:
                self.ended = self._feed.ended or samples is not None
                return None
            # All of them first: a sample that is refused leaves the state before its request.
            kept = list(self._fitting(samples))
            self._feed.accept()
            self.buffer.add_batch(kept)
            self._move(len(kept))
            self._ask()
            chosen = self._chosen()
            least = self._config.online_min_samples
            if len(chosen) >= least:
                return chosen
            if progress:
                progress(len(chosen), least)
            if self.buffer.is_full:
                raise ConfigError(
                    f"the buffer is full, and {len(chosen):,} of its {self.buffer.size:,} samples "
                    f"are to be trained on, of {least:,} (--online-min-samples); train on all with "
                    f"--online-train-on all, or ask for lower difficulties"
                )

    def _fitting(self, samples: Iterable[StreamSample]) -> Iterator[StreamSample]:
        """The samples that the model takes; those that are too long follow --overflow."""
        for sample in samples:
            highest = int(sample.input_ids.max())
            if highest >= self._vocabulary:
                raise BadRow(
                    f"sample {sample.sample_id!r} has token {highest}, the model has "
                    f"{self._vocabulary:,}; make the stream with the tokenizer of the model"
                )
            if sample.length <= self._limit or self._config.overflow in ("truncate", "split"):
                yield sample
            elif self._config.overflow == "skip":
                self._too_long += 1
            else:
                raise OversizedSample(
                    f"sample {sample.sample_id!r} has {sample.length:,} tokens, a row takes "
                    f"{self._limit:,}; choose --overflow skip, truncate or split, or longer rows"
                )

    def _move(self, added: int) -> None:
        """Let the curriculum choose, by what the last request came to."""
        if self._curriculum is None or not added:
            return
        found = self.buffer.difficulty_stats(last=added)
        if not any(part.samples for part in found):
            raise ConfigError(
                "--curriculum success-rate needs samples that state their difficulty, and none "
                "does; use --curriculum none"
            )
        self._range = self._curriculum.following(self._range, found)

    def _chosen(self) -> ReplayBatch:
        """The samples of the buffer that the policy of --online-train-on takes."""
        held = self.buffer.snapshot()
        if self._config.online_train_on == "all":
            return held
        return held.take((held.rows["success"] == 1) | (held.rows["source"] == OFFLINE))

    def _report(self, chosen: ReplayBatch) -> None:
        state = self.window.current_state
        assert state is not None
        success = self.buffer.snapshot().rows["success"]
        self._run.event(
            "window",
            window=state.window_id,
            plan=state.plan_fingerprint,
            buffer=self.buffer.size,
            added=self.buffer.total_added,
            evicted=self.buffer.total_evicted,
            trained_on=len(chosen),
            failed=int((success == 0).sum()),
            unjudged=int((success < 0).sum()),
            overlap=state.overlap_microbatches,
            too_long=self._too_long,
            bad_rows=self._bad_rows,
            errors=self._feed.metrics.samples_errored,
            waited_for=self._feed.waited_for,
            success_rate=self.buffer.success_rate,
            by_difficulty=[
                {**asdict(part), "success_rate": part.success_rate}
                for part in self.buffer.difficulty_stats()
                if part.samples
            ],
            range=self._range,
        )


def _window_config(config: SftConfig, context: int | None) -> WindowConfig:
    longest = 2**31 - 1 if context is None else context
    if config.chosen_layout == "packed" and config.pack_max_len > longest:
        raise ConfigError(
            f"--pack-max-len must be at most {longest:,}, the tokens that the model takes, got "
            f"{config.pack_max_len:,}"
        )
    given: dict[str, Any] = {}
    if edges := bucket_edges(config):
        given["bucket_edges"] = edges
    return WindowConfig(
        window_microbatches=config.online_window,
        min_samples=1,
        token_budget=config.token_budget,
        overflow_max=longest,
        layout=config.chosen_layout,
        pack_max_length=config.pack_max_len,
        overflow=config.overflow,
        seed=config.seed,
        **given,
    )
