"""Names of processes by which others can tell whether they are still alive."""

import functools
import os
import uuid
from pathlib import Path

__all__ = ["boot_id", "is_dead", "new_owner"]


def new_owner() -> str:
    """A name for a part of this process, unlike any other: boot, namespace, pid, start, number."""
    number = uuid.uuid4().hex[:8]
    return f"{boot_id()} {_namespace()} {os.getpid()} {_started(os.getpid())} {number}"


def is_dead(owner: str) -> bool:
    """Whether the process of this name has certainly ended.

    A name that is not ours, or one from another container, whose processes we cannot see, may be
    alive.
    """
    try:
        boot, namespace, pid, started, _ = owner.split()
        number = int(pid)
    except ValueError:
        return False
    if boot != boot_id():
        return True
    # A process that came later may have the same pid, but not the same start.
    return namespace == _namespace() != "-" and started != _started(number)


@functools.cache
def boot_id() -> str:
    """What changes when the machine starts anew; "-" where that is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; "" for one that is gone or only unburied."""
    try:
        # The name in brackets may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
