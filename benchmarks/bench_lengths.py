"""The length cache: write and load a million entries, beside a plain loop over JSON lines.

Timed is, for writing, a list of ids and a list of lengths -> a finished file, journal, checksum
and fsync included for ours (given whole, or one by one), neither for the plain loop; for loading,
the file -> lengths and ids as arrays (ours) or as a dictionary (the plain loop, and ours where it
says so). Files stand in the page cache. `data lengths build` with the tokenizer `bytes` is all
that is not the tokenizer: rows are read, checked, hashed, and lengths and tokens written; beside
it only their JSON is parsed.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchwright.data import LengthCache, build_lengths
from common import Contender, Report, arguments, lengths_of, measure

Entries = tuple[list[str], list[int]]


def entries(n: int) -> Entries:
    return [f"sample-{i:08d}" for i in range(n)], lengths_of("lognormal", n).tolist()


def writing(path: Path, one_by_one: bool = False) -> Contender:
    def prepare(given: Entries) -> Callable[[], Path]:
        def call() -> Path:
            with LengthCache.create(path, tokenizer_hash="benchmark") as cache:
                if not one_by_one:
                    cache.extend(*given)
                    return path
                for id, length in zip(*given, strict=True):
                    cache.add(id, length)
            return path

        return call

    name = f"batchwright {path.suffix}{', one by one' if one_by_one else ''}"
    return Contender(name, prepare, lambda given, made: size(made))


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


def rows_of(words: int, n: int) -> list[str]:
    return [json.dumps({"prompt": f"{i} " + "word " * words, "completion": "ok"}) for i in range(n)]


def building(rows: list[str]) -> Callable[[], int]:
    def call() -> int:
        # Tokens are kept by what the data holds, so every call gets a place of its own.
        with tempfile.TemporaryDirectory(prefix="benchmark-") as own:
            os.environ["BATCHWRIGHT_TOKENS"] = own
            path = Path(own, "rows.jsonl")
            path.write_text("\n".join(rows))
            return build_lengths(path, "bytes", f"{own}/lengths.jsonl", workers=1).measured

    return call


def parsing(rows: list[str]) -> Callable[[], int]:
    return lambda: sum(1 for row in rows if json.loads(row))


def rows_read(rows: list[str], read: int) -> Mapping[str, Any]:
    assert read == len(rows)
    return {}


def of_bytes(report: Report, n: int) -> None:
    """`lengths build -t bytes` beside the parsing of the same rows."""
    table, shares = [], []
    for words in (2, 100):
        rows = rows_of(words, n)
        spent = []
        for name, prepare in (("parse the JSON", parsing), ("lengths build -t bytes", building)):
            contender = Contender(name, prepare, rows_read)
            got = measure(contender, rows, rows[:100], runs=3, limit_s=600.0)
            if got.busy is None:
                report.not_measured(name, got.reason)
                continue
            spent.append(got.busy)
            size = sum(map(len, rows)) / n
            table.append([f"{name}, rows of {size:.0f} bytes", 1e6 * got.busy / n])
        shares.append(spent[-1] / spent[0] if len(spent) == 2 else None)
    report.table(f"{n:,} rows", ("", "processor us/row"), table)
    ratio = None if report.args.quick else shares[0]
    report.target("lengths build -t bytes, short rows, x parsing", ratio, most=10.0)


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
        own = [writing(path, one_by_one) for one_by_one in (False, True) for path in paths]
        for way in [*own, writing_plain(plain)]:
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
    of_bytes(report, 5_000 if args.quick else 100_000)
    for name in ("batchwright .jsonl", "batchwright .safetensors"):
        measured = loads.get(name) if n == 1_000_000 else None
        report.target(f"{name}: load of 1M entries, s", measured, most=1.0)
        for way in (name, f"{name}, one by one"):
            ratio = writes[way] / writes["plain json loop"] if n == 1_000_000 else None
            report.target(f"{way}: write of 1M entries, of the plain loop's time", ratio, most=1.0)
    report.close()


if __name__ == "__main__":
    main()
