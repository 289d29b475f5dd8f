"""What several commands share: flags, reading length caches, ranks, lists of numbers."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from batchwright.cli.output import spelled
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.batching import BatchPlan
    from batchwright.data.lengths import Lengths

__all__ = [
    "Address",
    "CachePath",
    "DryRun",
    "On",
    "OutFolder",
    "PlanPath",
    "Rank",
    "WorldSize",
    "amount",
    "at_least",
    "edges_of",
    "hint",
    "joined",
    "load_lengths",
    "load_sources",
    "sharded",
]

PlanPath = Annotated[Path, Parameter(name=["--plan", "-p"], help="A batch plan.")]
CachePath = Annotated[Path, Parameter(name=["--cache", "-c"], help="A length cache.")]
OutFolder = Annotated[Path, Parameter(name=["--output", "-o"], help="Folder to write.")]
DryRun = Annotated[bool, Parameter(negative="", help="Show the result, write nothing.")]
Rank = Annotated[int | None, Parameter(name=["--rank", "-r"], help="Show this rank only.")]
WorldSize = Annotated[int | None, Parameter(name=["--world-size", "-w"], help="Number of ranks.")]

On = Annotated[Literal["here", "ray"], Parameter(help="Work in this process, or on a Ray cluster.")]
Address = Annotated[
    str | None,
    Parameter(help="Ray cluster; default: RAY_ADDRESS, else one is started on this machine."),
]


def joined(on: str, address: str | None) -> bool:
    """Whether the work goes to a Ray cluster, which is joined then, and named on stderr."""
    if on != "ray":
        if address is not None:
            raise ConfigError("--address goes with --on ray")
        return False
    from batchwright.cli.output import say
    from batchwright.integrations.ray import join

    say(join(address), err=True)
    return True


def load_lengths(path: Path) -> "Lengths":
    """A finished length cache."""
    from batchwright.data.lengths import LengthCache

    return LengthCache.load(path).lengths


def load_sources(paths: list[Path]) -> "dict[str, Lengths]":
    """Several length caches by the names of their files."""
    names = [path.name.partition(".")[0] for path in paths]
    if len(set(names)) != len(names):
        raise ConfigError(f"every source needs a name of its own, got {names}; rename a file")
    return {name: load_lengths(path) for name, path in zip(names, paths, strict=True)}


UNITS = {
    "age": {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800},
    "size": {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


def amount(what: str, text: str) -> float:
    """The seconds of `30d`, the bytes of `2GB`.

    >>> amount("age", "30d"), amount("size", "1.5 GB")
    (2592000.0, 1500000000.0)
    """
    units = UNITS[what]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    wanted = "" if found is None else found[2]
    by_name = {name.lower(): factor for name, factor in units.items()}
    if found is None or wanted.lower() not in by_name:
        raise ConfigError(
            f"cannot parse the {what} {text!r}; give a number and one of "
            f"{', '.join(filter(None, units))}"
        )
    return float(found[1]) * by_name[wanted.lower()]


def edges_of(text: str) -> tuple[int, ...]:
    """The numbers of `128,256,512`.

    >>> edges_of("128, 256")
    (128, 256)
    """
    try:
        return tuple(int(part) for part in text.replace(" ", "").split(","))
    except ValueError:
        raise ConfigError(
            f"bucket edges must be integers separated by commas, got {text!r}; write 128,256,512"
        ) from None


def hint(*words: object) -> str:
    """The command to type next, quoted so that it can be pasted into a shell.

    >>> hint("data", "batching", "suggest", "-c", Path("my lengths.jsonl"))
    "next: batchwright data batching suggest -c 'my lengths.jsonl'"
    """
    return "next: " + shlex.join(["batchwright", *map(spelled, words)])


def at_least(least: int, **given: int | None) -> None:
    """Refuse a number that is too small, by the name of its flag."""
    for name, value in given.items():
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least {least}, got {value}")


def sharded(plan: "BatchPlan", rank: int | None, world_size: int | None) -> "BatchPlan":
    """The shard of one rank, or the whole plan if neither flag is given."""
    if (rank is None) != (world_size is None):
        raise ConfigError("--rank and --world-size go together; give both or neither")
    if rank is None or world_size is None:
        return plan
    return plan.shard(rank, world_size)
