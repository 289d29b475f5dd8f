"""What the benchmarks share: data sets, timing in a child process, tables and result files.

Every contender runs in a forked child of its own, so that neither its memory nor its imports
touch the next one. The child prepares the input in the form the contender likes best (not
timed), makes one small warm-up call (timed apart: it holds imports of machine code or
compilation), then calls on the full input several times. The best call counts, because on a
shared machine noise only ever adds.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.permutation import permute
from batchwright.rng import stream

__all__ = [
    "CAPACITY",
    "Contender",
    "Measured",
    "Report",
    "arguments",
    "data_folder",
    "free_memory",
    "lengths_of",
    "measure",
    "write_store",
]

CAPACITY = 2048
SEED = 42
RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    *("batchwright", "numpy", "numba", "scipy", "pyarrow", "tokenizers", "torch", "datasets"),
    *("trl", "LightBinPack", "axolotl", "fairseq-fast", "lhotse", "verl", "math-verify"),
    *("transformers", "accelerate", "torchdata", "mosaicml-streaming"),
    *("aiohttp", "openai", "inspect_ai", "litellm", "diskcache", "lmdb"),
    *("gymnasium", "tensordict", "torchrl", "stable-baselines3", "chuk-puzzles-gym"),
)

# Peers must not look for a hub while they are timed.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def lengths_of(name: str, n: int, capacity: int = CAPACITY, draw: int = 0) -> NDArray[np.int32]:
    """`n` lengths from 1 to `capacity`, the same in every process.

    lognormal: chats and short documents, mean 358 at 2048.
    mixture: those, longer documents around 0.6 of the capacity, and some cut at it; mean 730.
    hard: around 0.36 of the capacity, where two leave a hole and three rarely fit.
    """
    random = stream(SEED, f"benchmark/{name}", n, capacity, draw)
    short = random.lognormal(5.5, 0.9, n)
    if name == "lognormal":
        values = short
    elif name == "mixture":
        kind = random.random(n)
        long = random.normal(0.6 * capacity, 0.15 * capacity, n)
        values = np.select([kind < 0.63, kind < 0.93], [short, long], capacity)
    elif name == "hard":
        values = random.normal(0.36 * capacity, 0.08 * capacity, n)
    elif name == "long":
        values = random.lognormal(7.0, 1.2, n)
    else:
        raise ValueError(f"no data set {name!r}; there are lognormal, mixture, hard and long")
    return np.clip(values, 1, capacity).astype(np.int32)


@dataclass(frozen=True)
class Contender:
    """A name and how to make ready: `prepare(input)` imports, converts and returns the timed call.

    `summary(input, result)` looks at the result after the clock has stopped: it checks it and
    returns what the table shows.
    """

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    summary: Callable[[Any, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Measured:
    """One contender on one input, or the reason why there is no number."""

    name: str
    seconds: float | None = None
    first_seconds: float | None = None
    """The warm-up call on a small input: compilation, or loading of compiled code."""
    busy: float | None = None
    """The least of elapsed and processor seconds over all calls: what one call needs when nobody
    else wants the cores. Ratios of pure computing are taken from these."""
    calls: tuple[float, ...] = ()
    """Seconds of every full call, in order; `seconds` is the least of them."""
    extra_bytes: int | None = None
    """Peak memory over what stood before the call, its result included."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def measure(
    contender: Contender,
    given: Any,
    small: Any,
    *,
    limit_s: float = 120.0,
    runs: int = 7,
    patience_s: float = 10.0,
    warm: bool = True,
) -> Measured:
    """Run a contender in a forked child: at most `runs` calls, no new one after `patience_s`.

    Numba has run a kernel before the first of them, unless the child is not to be `warm`.

    A call that takes longer than `limit_s` ends the child, and so does one that takes three
    quarters of the memory that was free before; an import that fails is a reason, not an error.
    """
    if _Smoke.on:
        return _here(contender, small)
    # Forked, so that the input is shared and not sent; nothing here may have started threads.
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(there, contender, given, small, runs, patience_s, warm), daemon=False
    )
    # Not all that is free: the machine may be shared, and the kernel kills whom it likes.
    most_bytes = free_memory() * 3 // 4
    child.start()
    there.close()
    got: dict[str, Any] = {"calls": []}
    reason = ""
    try:
        while True:
            # Imports and checks of the result get more time than the call itself.
            waiting = limit_s if "ready" in got and not got["calls"] else max(limit_s, 900.0)
            reason = _wait(here, child.pid, waiting, most_bytes)
            if reason:
                break
            kind, value = here.recv()
            if kind == "call":
                got["calls"].append(value)
            else:
                got[kind] = value
            if kind in ("done", "error"):
                reason = value if kind == "error" else ""
                break
    except EOFError:
        child.join()
        reason = f"its process ended with code {child.exitcode}"
    finally:
        child.kill()
        child.join()
    if reason:
        return Measured(contender.name, reason=reason)
    calls = tuple(elapsed for elapsed, _ in got["calls"])
    return Measured(
        contender.name,
        seconds=min(calls),
        busy=min(min(pair) for pair in got["calls"]),
        first_seconds=got["ready"],
        calls=calls,
        extra_bytes=got["extra"],
        summary=got["done"],
    )


def _here(contender: Contender, given: Any) -> Measured:
    """Run a contender in this process, after a first call as always.

    What it imports is there for the others, and to import it is most of what a smoke run does.
    """
    try:
        contender.prepare(given)()
        call = contender.prepare(given)
        start, worked = time.perf_counter(), time.process_time()
        result = call()
        seconds, busy = time.perf_counter() - start, time.process_time() - worked
        summary = dict(contender.summary(given, result))
    except Exception as error:
        return Measured(contender.name, reason=_said(error))
    # Shares are taken of all of these.
    least = max(1e-9, min(seconds, busy))
    return Measured(contender.name, seconds, seconds, least, (seconds,), 0, summary)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _child(
    pipe: Connection,
    contender: Contender,
    given: Any,
    small: Any,
    runs: int,
    patience_s: float,
    warm: bool,
) -> None:
    try:
        if warm:
            # Else the small call would do without numba, and the first full one would load it.
            permute(3, 1000, np.uint64(7))
        warm_up = contender.prepare(small)
        start = time.perf_counter()
        warm_up()
        first = time.perf_counter() - start
        call = contender.prepare(given)
        del warm_up
        _give_back()
        pipe.send(("ready", first))
        before = _resident()
        _forget_peak()
        begun = time.perf_counter()
        for number in range(runs):
            result = None
            start, worked = time.perf_counter(), time.process_time()
            result = call()
            pair = time.perf_counter() - start, time.process_time() - worked
            if number == 0:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                pipe.send(("extra", max(0, peak - before)))
            pipe.send(("call", pair))
            if time.perf_counter() - begun > patience_s:
                break
        pipe.send(("done", dict(contender.summary(given, result))))
    except BaseException as error:
        pipe.send(("error", _said(error)))


def _wait(pipe: Connection, pid: int | None, seconds: float, most_bytes: int) -> str:
    """Wait for the child's next message; the reason to end it instead, if there is one."""
    end = time.monotonic() + seconds
    while not pipe.poll(0.1):
        if time.monotonic() > end:
            return f"over the limit of {seconds:.0f} s"
        # A child that has just ended is told by the pipe.
        with contextlib.suppress(OSError):
            if _resident(pid or "self") > most_bytes:
                return f"over the limit of {most_bytes / 1e9:.0f} GB, 3/4 of what was free"
    return ""


def free_memory() -> int:
    """Bytes that can be taken without hurting others."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def _resident(pid: int | str = "self") -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _give_back() -> None:
    """Return free memory to the system: a call that fits into it would seem to need none."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    """Let the peak start at the present size: preparing may have needed more than the call."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class Report:
    """Collects tables and targets of one script; prints them and saves them as JSON."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.tables: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        self.stamp = machine()
        # A note of who else was at work while the numbers were taken.
        self.load_before = os.getloadavg()[0]
        self._begun = time.monotonic()
        print(f"{name}: {self.stamp['cpu']}, {self.stamp['cores']} cores, {self.stamp['date']}")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Print a table and keep it. Cells are numbers, text or None (shown as a dash)."""
        listed = [list(row) for row in rows]
        self.tables.append({"title": title, "columns": list(columns), "rows": listed})
        print(f"\n{title}")
        cells = [list(columns), *[[_cell(value) for value in row] for row in listed]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        for row in cells:
            first = row[0].ljust(widths[0])
            rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            print("  " + "  ".join([first, *rest]).rstrip(), flush=True)

    def target(
        self,
        what: str,
        value: float | None,
        *,
        most: float | None = None,
        least: float | None = None,
    ) -> None:
        """Compare a number with what was asked for. None: it was not measured in this run."""
        met = None
        if value is not None:
            met = value <= most if most is not None else value >= (least or 0.0)
        goal = f"<= {_cell(most)}" if most is not None else f">= {_cell(least)}"
        self.targets.append({"what": what, "goal": goal, "value": value, "reached": met})

    def not_measured(self, peer: str, reason: str) -> None:
        """Say once that a peer has no numbers here."""
        if peer not in self.missing:
            self.missing[peer] = reason
            print(f"not measured: {peer} ({reason})", flush=True)

    def close(self) -> None:
        """Print the targets and save everything, unless --no-save was given."""
        print()
        words = {None: "not measured in this run", True: "reached", False: "NOT reached"}
        for target in self.targets:
            state = words[target["reached"]]
            print(f"target {target['what']} {target['goal']}: {_cell(target['value'])}, {state}")
        wall, busy = time.monotonic() - self._begun, _processor_seconds()
        print(f"took {wall:,.0f} s, {busy:,.0f} s of processor time")
        if self.args.no_save:
            return
        folder = RESULTS / "quick" if self.args.quick else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        saved = {
            "benchmark": self.name,
            "machine": self.stamp,
            "load": {"before": self.load_before, "after": os.getloadavg()[0]},
            "took": {"seconds": round(wall), "processor_seconds": round(busy)},
            "note": "best call of several; the machine was shared, so trust ratios, not seconds",
            "not_measured": self.missing,
            "targets": self.targets,
            "tables": self.tables,
        }
        path = folder / f"{self.name}.json"
        lost = self._lost(path)
        if lost:
            print(f"not saved: {path.name} has what was not measured here: {'; '.join(lost)}")
            return
        path.write_text(json.dumps(saved, indent=1, default=_plain) + "\n")
        print(f"saved {path.relative_to(RESULTS.parent)}")

    def _lost(self, path: Path) -> list[str]:
        """Tables of an earlier run that this one has not, because a peer or a part is missing."""
        if not self.missing or not path.exists():
            return []
        here = {table["title"] for table in self.tables}
        before = [table["title"] for table in json.loads(path.read_bytes())["tables"]]
        return [title for title in before if title not in here] if len(before) > len(here) else []


def _processor_seconds() -> float:
    """Of this process and all that it started and that ended."""
    each = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in each)


def machine() -> dict[str, Any]:
    """What the numbers were taken on; no names and no paths."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


class _Smoke(argparse.Action):
    """Sets --quick and --no-save, and lets `measure` take the small input once."""

    on = False

    def __call__(self, parser: Any, found: Any, *rest: Any) -> None:
        found.quick = found.no_save = found.smoke = _Smoke.on = True


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags every script has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument(
        "--smoke", action=_Smoke, nargs=0, default=False, help="does it run? figures mean nothing"
    )
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a peer's call may take")
    return parser


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float | np.floating):
        number = float(value)
        if number != 0 and abs(number) < 0.01:
            return f"{number:.2e}" if abs(number) < 1e-4 else f"{number:.5f}"
        if abs(number) >= 1000:
            return f"{number:,.0f}"
        return f"{number:.4f}" if abs(number) < 10 else f"{number:.2f}"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{int(value):,}"
    return str(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


def write_store(path: Path, arrays: Mapping[str, NDArray[Any]], tokenizer_hash: str) -> None:
    """A token store of these arrays, as if they had been tokenised."""
    from batchwright.data.tokens.store import LARGE, STORE
    from batchwright.sealed import PAGE, ArrayWriter, write_array

    with STORE.replacing(path) as folder:
        files: dict[str, Any] = {}
        for name, array in arrays.items():
            files[name] = write_array(folder, name, array)
            if name in LARGE:
                writer = ArrayWriter(LARGE[name], PAGE)
                writer.update(memoryview(array.view("u1")))
                files |= writer.write_sums(folder, name)
        none = {"count": 0, "reasons": []}
        fields = {"source": "made", "tokenizer": "made", "dataset_hash": "made"}
        fields["tokenizer_hash"] = tokenizer_hash
        STORE.write(folder, {**fields, "skipped": none, "repeated": none, "files": files})


def data_folder() -> Path:
    """Where graphs and texts are: `$BATCHWRIGHT_DATA`, else beside the checkout."""
    return Path(os.environ.get("BATCHWRIGHT_DATA", Path(__file__).parents[2] / "shared" / "data"))
