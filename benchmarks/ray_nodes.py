"""Ray clusters of several nodes on this machine, for benchmarks and tests.

Import this before anything that imports Ray, which reads these settings when it is imported.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"
# So that Ray means loopback by 127.0.0.1, and not the address of this machine.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# Ray starts its workers with a niceness of 15. Nodes of their own have nobody to give way to; here
# they share the cores with everything else.
os.environ |= {"RAY_worker_niceness": "0"}

__all__ = ["cluster_of", "lose", "new_node", "processes"]


@contextmanager
def cluster_of(*cores: int) -> Iterator[Any]:
    """A node for each number of cores, joined from here."""
    import ray
    from ray.cluster_utils import Cluster

    from batchwright.integrations.ray import join

    found = Cluster()
    try:
        for number in cores:
            new_node(found, number)
        join(found.address)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def new_node(cluster: Any, cores: int, **more: Any) -> Any:
    """Add a node; the first one is the head."""
    if cluster.head_node is None:
        more["include_dashboard"] = False
    settings = {"num_cpus": cores, "object_store_memory": 2**27, "node_ip_address": "127.0.0.1"}
    for left in reversed(range(10)):
        try:
            return cluster.add_node(**settings, **more)
        except Exception as error:
            # Ray has no class for it: it gives a node half a minute to start, however busy the
            # machine is.
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError


def lose(cluster: Any, node: Any) -> None:
    """Take a node away as a loss of power does: all its processes at once.

    Its workers would otherwise go on for seconds, until they miss their node.
    """
    parents = {one.process.pid for one in node.all_processes["raylet"]}
    for pid in (*parents, *workers_of(node)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def parent_of(pid: int) -> int:
    """The process that started a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def workers_of(node: Any) -> list[int]:
    """The processes that a node has started for tasks and actors."""
    parents = {one.process.pid for one in node.all_processes["raylet"]}
    everyone = map(int, filter(str.isdecimal, os.listdir("/proc")))
    return [pid for pid in everyone if parent_of(pid) in parents]


def processes(cluster: Any, name: str) -> set[int]:
    """The workers of a cluster whose title begins with `name`, as `ray::_Owner`."""
    found = set()
    for pid in (pid for node in cluster.list_all_nodes() for pid in workers_of(node)):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name.encode()):
                found.add(pid)
    return found
