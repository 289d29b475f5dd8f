"""Online samples: streams, a replay buffer and rolling batch plans.

    stream -> replay buffer -> snapshot -> window of microbatches

A stream never invents a sample: what cannot be read is an error or is counted, by choice.
"""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "AnswerPolicy",
    "AsyncOfflineDatasetStream",
    "AsyncSampleStream",
    "BufferEvictionPolicy",
    "DifficultyBin",
    "EpisodeStatus",
    "GymConfig",
    "GymEpisodeStream",
    "MockGymStream",
    "OfflineDatasetStream",
    "Prefetched",
    "ReasoningGymStream",
    "ReplayBatch",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "RollingBatchPlanWindow",
    "SampleSource",
    "SampleStream",
    "StreamMetrics",
    "StreamSample",
    "SuccessRateCurriculum",
    "WindowConfig",
    "WindowState",
    "merge",
    "model_answers",
    "prefetch",
    "rate_limit",
    "shuffle",
]

if TYPE_CHECKING:
    from batchwright.streaming.combine import merge, rate_limit, shuffle
    from batchwright.streaming.curriculum import SuccessRateCurriculum
    from batchwright.streaming.gym import GymConfig, GymEpisodeStream
    from batchwright.streaming.mock import MockGymStream
    from batchwright.streaming.offline import AsyncOfflineDatasetStream, OfflineDatasetStream
    from batchwright.streaming.protocols import AsyncSampleStream, SampleStream
    from batchwright.streaming.queues import Prefetched, prefetch
    from batchwright.streaming.reasoning import AnswerPolicy, ReasoningGymStream, model_answers
    from batchwright.streaming.replay import (
        BufferEvictionPolicy,
        DifficultyBin,
        ReplayBatch,
        ReplayBuffer,
        ReplayBufferConfig,
    )
    from batchwright.streaming.sample import (
        EpisodeStatus,
        SampleSource,
        StreamMetrics,
        StreamSample,
    )
    from batchwright.streaming.window import RollingBatchPlanWindow, WindowConfig, WindowState
else:
    # In order of what they import: a buffer needs no tokenizer, a stream no planner.
    __getattr__ = lazy_names(
        __name__,
        "batchwright.streaming.sample",
        "batchwright.streaming.protocols",
        "batchwright.streaming.replay",
        "batchwright.streaming.combine",
        "batchwright.streaming.queues",
        "batchwright.streaming.curriculum",
        "batchwright.streaming.mock",
        "batchwright.streaming.reasoning",
        "batchwright.streaming.offline",
        "batchwright.streaming.window",
        "batchwright.streaming.gym",
    )
