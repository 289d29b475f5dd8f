"""Which rank this process is, and of how many."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from batchwright.errors import ConfigError

__all__ = ["World"]

# In this order: torchrun's own names first, because torchrun runs inside SLURM jobs too.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True, slots=True)
class World:
    """One rank of a world of `size`; `found` says where the numbers came from.

    >>> World.detect({"RANK": "1", "WORLD_SIZE": "4"})
    World(rank=1, size=4, local_rank=1, local_size=4, found='torchrun')
    >>> World.detect({}).size
    1
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    found: str = "given"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"world size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank must be between 0 and {self.size - 1} for a world size of {self.size}, "
                f"got {self.rank}"
            )

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> "World":
        """Rank and size from torchrun's variables, else SLURM's, else a world of one."""
        environ = os.environ if environ is None else environ
        for name, rank, size, local_rank, local_size in _LAUNCHERS:
            if name == "SLURM" and "SLURM_STEP_ID" not in environ:
                # A batch script that srun did not start is one process, whatever its tasks.
                continue
            if rank in environ and size in environ:
                r, s = _number(environ, rank), _number(environ, size)
                return cls(
                    rank=r,
                    size=s,
                    local_rank=_number(environ, local_rank) if local_rank in environ else r,
                    local_size=_number(environ, local_size) if local_size in environ else s,
                    found=name,
                )
        half = [v for _, *names in _LAUNCHERS[:1] for v in names[:2] if v in environ]
        if half:
            raise ConfigError(f"only {half[0]} is set; set both RANK and WORLD_SIZE, or neither")
        return cls(found="single process")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not an integer") from None
