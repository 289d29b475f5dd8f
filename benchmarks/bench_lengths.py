"""The length cache: write and load a million entries, beside a plain loop over JSON lines.

Timed is, for writing, a list of ids and a list of lengths -> a finished file, journal, checksum
and fsync included for ours, neither for the plain loop; for loading, the file -> lengths and ids
as arrays (ours) or as a dictionary (the plain loop, and ours where it says so). Files stand in
the page cache.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchwright.data import LengthCache
from common import Contender, Report, arguments, lengths_of, measure

Entries = tuple[list[str], list[int]]


def entries(n: int) -> Entries:
    return [f"sample-{i:08d}" for i in range(n)], lengths_of("lognormal", n).tolist()


def writing(path: Path) -> Contender:
    def prepare(given: Entries) -> Callable[[], Path]:
        def call() -> Path:
            with LengthCache.create(path, tokenizer_hash="benchmark") as cache:
                cache.extend(*given)
            return path

        return call

    return Contender(f"batchwright {path.suffix}", prepare, lambda given, made: size(made))


def writing_plain(path: Path) -> Contender:
    def prepare(given: Entries) -> Callable[[], Path]:
        def call() -> Path:
            with path.open("w") as file:
                for id, length in zip(*given, strict=True):
                    file.write(json.dumps({"sample_id": id, "length": length}) + "\n")
            return path

        return call

    return Contender("plain json loop", prepare, lambda given, made: size(made))


def size(path: Path) -> Mapping[str, Any]:
    return {"MB": path.stat().st_size / 1e6}


def loading(path: Path, as_dict: bool) -> Contender:
    def prepare(given: Entries) -> Callable[[], Any]:
        def call() -> Any:
            cache = LengthCache.load(path)
            return cache.get_all() if as_dict else cache.lengths

        return call

    def summary(given: Entries, loaded: Any) -> Mapping[str, Any]:
        if not as_dict:
            loaded = dict(zip(loaded.ids, loaded.values.tolist(), strict=True))
        assert loaded == dict(zip(*given, strict=True))
        return {}

    name = f"batchwright {path.suffix}{', as a dict' if as_dict else ''}"
    return Contender(name, prepare, summary)


def loading_plain(path: Path) -> Contender:
    def prepare(given: Entries) -> Callable[[], dict[str, int]]:
        def call() -> dict[str, int]:
            with path.open() as file:
                rows = map(json.loads, file)
                return {row["sample_id"]: row["length"] for row in rows}

        return call

    def summary(given: Entries, loaded: dict[str, int]) -> Mapping[str, Any]:
        assert loaded == dict(zip(*given, strict=True))
        return {}

    return Contender("plain json loop", prepare, summary)


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("lengths", args)
    n = 50_000 if args.quick else 1_000_000
    given = entries(n)
    writes: dict[str, float] = {}
    loads: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        paths = [folder / "lengths.jsonl", folder / "lengths.safetensors"]
        plain = folder / "plain.jsonl"
        rows = []
        for way in [*map(writing, paths), writing_plain(plain)]:
            got = measure(way, given, entries(100), runs=3, limit_s=600.0)
            if got.seconds is None:
                report.not_measured(f"writing, {way.name}", got.reason)
                continue
            writes[way.name] = got.busy
            rows.append([way.name, got.seconds, 1e6 * got.seconds / n, got.summary["MB"]])
        report.table(f"write {n:,} entries", ("", "seconds", "us/entry", "MB"), rows)

        rows = []
        ways = [loading(path, as_dict) for path in paths for as_dict in (False, True)]
        for way in [*ways, loading_plain(plain)]:
            got = measure(way, given, given, runs=5, limit_s=600.0)
            if got.seconds is None:
                report.not_measured(f"loading, {way.name}", got.reason)
                continue
            loads[way.name] = got.seconds
            extra = (got.extra_bytes or 0) / n
            rows.append([way.name, got.seconds, 1e6 * got.seconds / n, extra])
        report.table(f"load {n:,} entries", ("", "seconds", "us/entry", "extra bytes/entry"), rows)
    for name in ("batchwright .jsonl", "batchwright .safetensors"):
        measured = loads.get(name) if n == 1_000_000 else None
        report.target(f"{name}: load of 1M entries, s", measured, most=1.0)
        ratio = writes[name] / writes["plain json loop"] if n == 1_000_000 else None
        report.target(f"{name}: write of 1M entries, of the plain loop's time", ratio, most=1.0)
    report.close()


if __name__ == "__main__":
    main()
