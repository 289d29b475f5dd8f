"""Gym servers: episodes that a policy plays become samples with the server's reward.

    connection -> dialect -> policy -> episode -> samples

The client plays on chuk-puzzles-gym and on `GymServer`, our own, which needs nothing else.
"""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "GymConfig",
    "GymEpisodeStream",
    "GymOutputMode",
    "GymPolicy",
    "GymServer",
    "GymTransport",
    "HintPolicy",
    "ModelPolicy",
    "RandomPolicy",
    "Turn",
]

if TYPE_CHECKING:
    from batchwright.streaming.gym.config import GymConfig, GymOutputMode, GymTransport
    from batchwright.streaming.gym.episodes import GymEpisodeStream
    from batchwright.streaming.gym.policies import (
        GymPolicy,
        HintPolicy,
        ModelPolicy,
        RandomPolicy,
        Turn,
    )
    from batchwright.streaming.gym.server import GymServer
else:
    __getattr__ = lazy_names(
        __name__,
        "batchwright.streaming.gym.config",
        "batchwright.streaming.gym.server",
        "batchwright.streaming.gym.policies",
        "batchwright.streaming.gym.episodes",
    )
