"""What the tests on Ray clusters share: a cluster of several nodes on loopback.

Import this before anything that imports Ray, which reads these settings when it is imported.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
# So that Ray means loopback by 127.0.0.1, and not the address of this machine.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
pytest.importorskip("ray", reason="ray is not installed; `make machines` installs and runs this")

import ray
from ray.cluster_utils import Cluster

from batchwright.integrations.ray import join

__all__ = ["cluster_of", "new_node", "processes"]


@contextmanager
def cluster_of(*cores: int) -> Iterator[Cluster]:
    """A node for each number of cores, joined from here; tests add those that they take away."""
    found = Cluster()
    try:
        for number in cores:
            new_node(found, number)
        join(found.address)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def new_node(cluster: Cluster, cores: int, **more: Any) -> Any:
    """Add a node; the first one is the head."""
    if cluster.head_node is None:
        more["include_dashboard"] = False
    return cluster.add_node(
        num_cpus=cores, object_store_memory=2**27, node_ip_address="127.0.0.1", **more
    )


def processes(name: str) -> set[int]:
    """The processes of this machine whose title begins with `name`, as `ray::_Owner`."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(name.encode()):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found
