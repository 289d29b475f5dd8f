"""Keep answers and find them again: calls a second and bytes an entry, beside other caches.

Timed for every contender is the way from Python objects to the disk and back: a request and its
answer, about 600 bytes of JSON, under a key of 32 bytes.

    batchwright    SQLite, one table; checksums, leases and the rules of what is kept included
    diskcache      SQLite, its Cache with default settings
    lmdb           a memory-mapped tree; with sync=False it survives what the others survive
    files          one file an entry, written aside and renamed, in 256 folders

All of them survive the end of the process; only `lmdb, sync` survives a power cut without losing
anything. Puts a second end when the store is closed. Rates of single gets and of batches depend on
the processor, those of puts on the disk too, so both elapsed and processor time are shown.
"""

import argparse
import contextlib
import json
import multiprocessing
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from batchwright.calls import Done, Request, Usage, chat
from batchwright.calls.cache.store import Cache
from batchwright.rng import stream
from common import Contender, Measured, Report, arguments, measure

BATCH = 100
PROCESSES = 4
Entry = tuple[Request, Done]


class Store(Protocol):
    """What is asked of every cache."""

    def put_many(self, entries: Sequence[Entry]) -> object: ...
    def get_many(self, keys: Sequence[bytes]) -> Mapping[bytes, Any]: ...
    def close(self) -> None: ...


def value(entry: Entry) -> bytes:
    """What a peer keeps: the same request and answer."""
    request, done = entry
    return b"[" + request.data + b"," + json.dumps(done.body, separators=(",", ":")).encode() + b"]"


class DiskCache:
    def __init__(self, folder: Path) -> None:
        from diskcache import Cache

        # Its own limit of a gigabyte would begin to remove entries.
        self.cache = Cache(str(folder), size_limit=2**40)

    def put_many(self, entries: Sequence[Entry]) -> None:
        with self.cache.transact() if len(entries) > 1 else contextlib.nullcontext():
            for entry in entries:
                self.cache.add(entry[0].key, value(entry))

    def get_many(self, keys: Sequence[bytes]) -> Mapping[bytes, Any]:
        found = ((key, self.cache.get(key)) for key in keys)
        return {key: json.loads(data) for key, data in found if data is not None}

    def close(self) -> None:
        self.cache.close()


class Lmdb:
    sync = True

    def __init__(self, folder: Path) -> None:
        import lmdb

        self.env = lmdb.open(str(folder), map_size=2**33, sync=self.sync)

    def put_many(self, entries: Sequence[Entry]) -> None:
        with self.env.begin(write=True) as transaction:
            for entry in entries:
                transaction.put(entry[0].key, value(entry), overwrite=False)

    def get_many(self, keys: Sequence[bytes]) -> Mapping[bytes, Any]:
        with self.env.begin() as transaction:
            found = ((key, transaction.get(key)) for key in keys)
            return {key: json.loads(data) for key, data in found if data is not None}

    def close(self) -> None:
        self.env.close()


class LmdbNoSync(Lmdb):
    sync = False


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(256):
            (folder / f"{number:02x}").mkdir(exist_ok=True)

    def put_many(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            path = self._path(entry[0].key)
            aside = path.with_suffix(f".{uuid.uuid4().hex}")
            aside.write_bytes(value(entry))
            aside.rename(path)

    def get_many(self, keys: Sequence[bytes]) -> Mapping[bytes, Any]:
        found = {}
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                found[key] = json.loads(self._path(key).read_bytes())
        return found

    def close(self) -> None:
        pass

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name[2:]


def ours(folder: Path) -> Store:
    return Cache(folder / "calls.db")


OURS = "batchwright"
STORES: dict[str, Callable[[Path], Store]] = {
    OURS: ours,
    "diskcache": DiskCache,
    "lmdb, sync": Lmdb,
    "lmdb, no sync": LmdbNoSync,
    "files": Files,
}


def entries_of(n: int, first: int = 0) -> list[Entry]:
    """Questions and answers of the length of a judge's, the same in every process."""
    random = stream(42, "benchmark/cache")
    words = [bytes(random.integers(97, 123, 6, "u1").tolist()).decode() for _ in range(1000)]
    listed = []
    for number in range(first, first + n):
        begin = number * 17 % 900
        prompt = f"{number} " + " ".join(words[begin : begin + 24])
        text = " ".join(words[begin + 30 : begin + 60])
        body = {
            "id": f"chatcmpl-{number:024d}",
            "object": "chat.completion",
            "model": "judge-small",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 60, "completion_tokens": 64, "total_tokens": 124},
        }
        done = Done(text, body, "stop", Usage(60, 64))
        listed.append((chat("judge-small", prompt, temperature=0), done))
    return listed


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="bench_cache_"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def putting(make: Callable[[Path], Store], size: int) -> Callable[[Any], Callable[[], Any]]:
    """A new store every time, filled and closed; returns the bytes it takes on the disk."""

    def prepare(entries: list[Entry]) -> Callable[[], int]:
        def call() -> int:
            with folder() as place:
                store = make(place)
                for part in batches(entries, size):
                    store.put_many(part)
                store.close()
                return sum(
                    file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file()
                )

        return call

    return prepare


def getting(make: Callable[[Path], Store], size: int) -> Callable[[Any], Callable[[], Any]]:
    """A full store, of which keys are asked in random order."""

    def prepare(given: tuple[list[Entry], int]) -> Callable[[], int]:
        entries, asked = given
        place = Path(tempfile.mkdtemp(prefix="bench_cache_"))
        store = make(place)
        for part in batches(entries, 1000):
            store.put_many(part)
        order = stream(7, "benchmark/cache/order").permutation(len(entries))[:asked].tolist()
        keys = [entries[number][0].key for number in order]

        def call() -> int:
            return sum(len(store.get_many(part)) for part in batches(keys, size))

        return call

    return prepare


def writing(make: Callable[[Path], Store]) -> Callable[[Any], Callable[[], Any]]:
    """Several processes that write at once, every entry by two of them."""

    def prepare(entries: list[Entry]) -> Callable[[], tuple[int, int]]:
        context = multiprocessing.get_context("fork")

        def work(place: Path, mine: int) -> None:
            store = make(place)
            share = len(entries) // PROCESSES
            turned = entries[mine * share :] + entries[: mine * share]
            for part in batches(turned[: 2 * share], 20):
                store.put_many(part)
            store.close()

        def call() -> tuple[int, int]:
            with folder() as place:
                make(place).close()
                workers = [
                    context.Process(target=work, args=(place, number))
                    for number in range(PROCESSES)
                ]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
                store = make(place)
                found = sum(
                    len(store.get_many([entry[0].key for entry in part]))
                    for part in batches(entries, 1000)
                )
                store.close()
                return found, sum(worker.exitcode != 0 for worker in workers)

        return call

    return prepare


def check_size(entries: list[Entry], disk_bytes: int) -> Mapping[str, Any]:
    values = sum(len(value(entry)) for entry in entries)
    return {"bytes": disk_bytes / len(entries), "times": disk_bytes / values}


def check_found(given: tuple[list[Entry], int], found: int) -> Mapping[str, Any]:
    assert found == min(given[1], len(given[0])), found
    return {}


def check_written(entries: list[Entry], result: tuple[int, int]) -> Mapping[str, Any]:
    return {"missing": len(entries) - result[0], "errors": result[1]}


def rate(count: int, seconds: float | None) -> float | None:
    return None if seconds is None else count / seconds


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("cache", args)
    with folder() as place:
        # Children are ended without notice; what they leave behind goes with this folder.
        tempfile.tempdir = str(place)
        compare(report, args)
    report.close()


def compare(report: Report, args: argparse.Namespace) -> None:
    n = 2_000 if args.quick else 20_000
    singles = n // 10
    entries = entries_of(n)
    few = entries[:50]
    runs: dict[str, dict[str, Measured]] = {}
    for name, make in STORES.items():
        jobs: list[tuple[str, Contender, Any, Any]] = [
            ("put", Contender(name, putting(make, 1), check_size), entries[:singles], few),
            ("puts", Contender(name, putting(make, BATCH), check_size), entries, few),
            ("get", Contender(name, getting(make, 1), check_found), (entries, singles), (few, 50)),
            ("gets", Contender(name, getting(make, BATCH), check_found), (entries, n), (few, 50)),
            ("four", Contender(name, writing(make), check_written), entries[: n // 5], few),
        ]
        found = {}
        for job, contender, given, small in jobs:
            got = measure(contender, given, small, limit_s=args.limit, runs=5, patience_s=1.0)
            if got.seconds is None:
                report.not_measured(f"{name}: {job}", got.reason)
            found[job] = got
        runs[name] = found

    counts = {"put": singles, "puts": n, "get": singles, "gets": n}
    for title, field in (("elapsed", "seconds"), ("processor", "busy")):
        rows = []
        for name, found in runs.items():
            rates = [rate(counts[job], getattr(found[job], field)) for job in counts]
            base = [rate(counts[job], getattr(runs[OURS][job], field)) for job in counts]
            ratios = [a / b if a and b else None for a, b in zip(rates, base, strict=True)]
            rows.append([label(name), *rates, *ratios])
        heads = ("single puts/s", "batch puts/s", "single gets/s", "batch gets/s")
        times = tuple(f"x ours, {head.removesuffix('/s')}" for head in heads)
        report.table(
            f"{n:,} entries, batches of {BATCH}, by {title} time (higher is better)",
            ("", *heads, *times),
            rows,
        )
    report.table(
        "bytes on the disk, and the bytes of requests and answers alone as 1",
        ("", "bytes/entry", "times"),
        [
            [label(name), found["puts"].summary.get("bytes"), found["puts"].summary.get("times")]
            for name, found in runs.items()
        ],
    )
    put = 2 * (n // 5)
    report.table(
        f"{PROCESSES} processes, every entry put by two of them, batches of 20",
        ("", "puts/s", "missing", "failed processes"),
        [
            [
                label(name),
                rate(put, found["four"].seconds),
                found["four"].summary.get("missing"),
                found["four"].summary.get("errors"),
            ]
            for name, found in runs.items()
        ],
    )
    mine = runs[OURS]
    report.target("single gets a processor second", rate(singles, mine["get"].busy), least=16_000.0)
    report.target("batch gets a processor second", rate(n, mine["gets"].busy), least=16_000.0)
    report.target("batch puts a processor second", rate(n, mine["puts"].busy), least=10_000.0)
    report.target("bytes on the disk a byte kept", mine["puts"].summary.get("times"), most=1.2)
    lost = mine["four"].summary
    failures = lost["missing"] + lost["errors"] if lost else None
    report.target("four writers: entries missing and errors", failures, most=0.0)


def label(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{name} ({metadata.version(name.partition(',')[0])})"
    return name


if __name__ == "__main__":
    main()
