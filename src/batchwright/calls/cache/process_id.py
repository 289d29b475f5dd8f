"""Names for processes, by which other processes can tell whether they have exited."""

import functools
import os
import uuid
from pathlib import Path

__all__ = ["boot_id", "has_exited", "new_owner"]


def new_owner() -> str:
    """A unique name for this process: boot id, pid namespace, pid, start time, random number."""
    number = uuid.uuid4().hex[:8]
    return f"{boot_id()} {_namespace()} {os.getpid()} {_start_time(os.getpid())} {number}"


def has_exited(owner: str) -> bool:
    """Whether the process of this name has certainly exited.

    A name in another format, or from another container, whose processes cannot be seen from here,
    counts as alive.
    """
    try:
        boot, namespace, pid, started, _ = owner.split()
        number = int(pid)
    except ValueError:
        return False
    if boot != boot_id():
        return True
    # A later process may reuse the pid, but it has another start time.
    return namespace == _namespace() != "-" and _start_time(number) not in (started, None)


@functools.cache
def boot_id() -> str:
    """The kernel's id of the current boot; "-" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; "" if it has exited or is a zombie.

    None if that cannot be told: it is hidden from here, or no file can be opened.
    """
    try:
        # The command name in parentheses may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except OSError:
            return None
        return None
    return "" if fields[0] in "ZX" else fields[19]
