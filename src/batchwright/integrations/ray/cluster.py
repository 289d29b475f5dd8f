"""The Ray cluster that commands and pools work on: joined or started."""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from batchwright import __version__
from batchwright.errors import BatchwrightError, Mismatch, NoServer, need, one_line

__all__ = ["join", "node_versions", "raised_there", "same_version", "wait_for_losses"]

REACH_S = 10.0
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""A frame of HTTP/2 without any."""
LONGEST_FOLDER = 38
"""Bytes of a temporary folder that leave room for the names that Ray puts below it."""
ANSWER_S = 60.0
"""How long an answer is waited for: of a node that is asked, which starts a process for it."""


def join(address: str | None = None) -> str:
    """Join the cluster at `address` or RAY_ADDRESS, or start one on this machine; say which.

    A cluster that this process has joined already is the one that is used.

    Raises:
        NoServer: there is no cluster at the address, or it cannot be joined from here.
    """
    given = address or os.environ.get("RAY_ADDRESS")
    if not given and "ray" not in sys.modules:
        # Read by Ray when it is imported: a cluster that is started here is to be on loopback,
        # where nobody else can reach it.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray = need("ray", extra="ray")
    if ray.is_initialized():
        return f"Ray: the cluster at {_where(ray)}, joined before"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if given:
            _check_reachable(given)
            ray.init(address=given, **quiet)
        else:
            # "local": not the cluster that a note of an earlier one here may name.
            ray.init(address="local", include_dashboard=False, _temp_dir=_short_folder(), **quiet)
    except Exception as error:
        # RuntimeError for other versions of Ray or Python, ValueError for a bad address, and
        # Exception itself for a node that does not start within half a minute.
        known = (RuntimeError, ValueError, OSError, ray.exceptions.RayError)
        if type(error) is not Exception and not isinstance(error, known):
            raise
        where = f"the Ray cluster at {given}" if given else "a Ray cluster on this machine"
        raise NoServer(
            f"cannot join {where}: {one_line(error)[:300]}; give HOST:PORT of a running "
            f"cluster (`ray start --head`), or none, nor RAY_ADDRESS, to start one here"
        ) from None
    return f"Ray: {'the' if given else 'a'} cluster at {_where(ray)}" + (
        "" if given else ", started here and for this command"
    )


def _short_folder() -> str | None:
    """Where Ray can have its sockets, whose names the system limits to 107 bytes.

    None for where it has them by itself: in RAY_TMPDIR, or in TMPDIR unless that is too long.
    """
    too_long = "RAY_TMPDIR" not in os.environ and len(tempfile.gettempdir()) > LONGEST_FOLDER
    return "/tmp/ray" if too_long else None


def _check_reachable(address: str) -> None:
    """Raise where nobody listens, or something else does: Ray would try for minutes.

    Its servers speak gRPC, which begins with settings of HTTP/2 from both sides.
    """
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return
    with socket.create_connection((host.strip("[]"), int(port)), REACH_S) as there:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        there.settimeout(ANSWER_S)
        there.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        if there.recv(len(SETTINGS))[3:4] != SETTINGS[3:4]:
            raise OSError("what answers there is not Ray")


def _where(ray: Any) -> str:
    nodes = sum(node["Alive"] for node in ray.nodes())
    cores = ray.cluster_resources().get("CPU", 0)
    shown = "1 node" if nodes == 1 else f"{nodes} nodes"
    return f"{ray.get_runtime_context().gcs_address} ({shown}, {cores:g} cores)"


def raised_there(error: Any) -> Exception:
    """What a task or an actor raised, as it raised it."""
    cause = error.cause
    return cause if isinstance(cause, BatchwrightError) else error


def wait_for_losses() -> None:
    """Wait until each node of the cluster has answered, or is known to be lost.

    What was lost with a node is noticed before the node is, and until then Ray places work there.
    """
    _asked(need("ray", extra="ray"), lambda: None)


def _asked(ray: Any, ask: Callable[[], Any]) -> list[tuple[dict[str, Any], Any]]:
    """The nodes that count as alive, and what `ask` is there: an answer, an error, or too late."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: str(n["NodeID"]))
    asked = [
        ray.remote(ask)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for node in nodes
    ]
    ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
    return list(zip(nodes, asked, strict=True))


def same_version(of_command: str, of_node: str = __version__, *, node: str = "a node") -> None:
    """Refuse to work with another version of the package; called on the node, or told its version.

    Raises:
        Mismatch: they differ.
    """
    if of_node != of_command:
        raise Mismatch(
            f"{node} has batchwright {of_node} and the command {of_command}; install one version "
            f"on all nodes"
        )


def node_versions() -> list[dict[str, str | None]]:
    """Of each living node of the joined cluster: its address and its versions.

    None for what is not installed there; a node that does not answer has `why`.
    """
    ray = need("ray", extra="ray")

    # Inside, so that it travels as code: the package may be what is missing there.
    def versions() -> dict[str, str | None]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found: dict[str, str | None] = {"python": platform.python_version()}
        for name in ("ray", "batchwright", "torch", "transformers", "tokenizers"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
        return found

    rows: list[dict[str, str | None]] = []
    for node, answer in _asked(ray, versions):
        row = {"node": f"{node['NodeID'][:8]} at {node['NodeManagerAddress']}"}
        try:
            rows.append({**row, **ray.get(answer, timeout=0)})
        except ray.exceptions.RayError as error:
            rows.append({**row, "why": one_line(error)[:200]})
    return rows
