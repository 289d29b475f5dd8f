"""What checking costs: opening, the first use and later uses of plans and token stores.

A plan of ten million samples (100,000 with --quick) and a store of 50 million tokens (a million).
Printed are the best of several tries in one process, each with files that were opened anew; CRC-32
of every block, which is what the first use pays, stands beside SHA-256 of the whole. Opening stands
beside the same opening without checks, turn by turn: the manifest parsed but not compared with its
checksum, and each array mapped without a look at its size and its sums. What a version before all
checks took is not measured, as its files are others; nor is a cold disk. Samples of the
store are read in random order, with every block checked on its first use, with all of them checked
already, and with no checks at all.
"""

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.data.tokens.store import TokenStore
from batchwright.errors import BadFile
from batchwright.rng import stream
from batchwright.sealed import BLOCK, MANIFEST, MappedArray, SealedFolder
from common import arguments, write_store

TRIES = 5


def best(work: Callable[[], object]) -> float:
    """Seconds of the quickest of several calls."""
    found = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def side_by_side(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the quickest call of each, in turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(4 * TRIES):
        for work, times in zip((one, other), found, strict=True):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return min(found[0]), min(found[1])


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Sealed folders are opened without a comparison of anything."""

    def read(self: SealedFolder, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
        return found

    def open_array(self: SealedFolder, path: Path, name: str, entry: Any, **_: Any) -> MappedArray:
        kind, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        with (path / f"{name}.bin").open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            raw = mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        return MappedArray(
            np.frombuffer(raw, kind).reshape(shape),
            raw,
            np.empty(0, np.uint32),
            BLOCK,
            "",
            lambda _: BadFile(),
        )

    before = SealedFolder.read, SealedFolder.open_array
    SealedFolder.read, SealedFolder.open_array = read, open_array  # type: ignore[method-assign]
    try:
        yield
    finally:
        SealedFolder.read, SealedFolder.open_array = before  # type: ignore[method-assign]


def bare(path: Path) -> None:
    with unchecked():
        BatchPlan.load(path)


def plans(folder: Path, samples: int) -> None:
    lengths = stream(42, "bench/seal").integers(1, 2048, samples, np.int32)
    for layout in ("packed", "bucketed"):
        config = BatchingConfig(layout=layout, token_budget=16384, pack_max_length=2048)
        path = BatchPlanBuilder(lengths, config).build(1).save(folder / layout)
        files = sorted(path.glob("*.bin"))
        size = sum(file.stat().st_size for file in files)
        opened, without = side_by_side(
            lambda path=path: BatchPlan.load(path), lambda path=path: bare(path)
        )
        fresh = [BatchPlan.load(path) for _ in range(TRIES)]
        first = best(lambda fresh=fresh: fresh.pop().order.prove())
        plan = BatchPlan.load(path)
        plan.batch(0, 0)
        later = best(lambda plan=plan: plan.batch(0, 1))
        whole = best(
            lambda files=files: [hashlib.sha256(file.read_bytes()).digest() for file in files]
        )
        print(
            f"plan, {layout}, {samples:,} samples, {size / 2**20:.0f} MiB: "
            f"open {opened * 1e3:.2f} ms (without checks {without * 1e3:.2f} ms, ratio "
            f"{opened / without:.2f}), "
            f"checks of the first use {first * 1e3:.1f} ms ({size / first / 2**30:.1f} GiB/s; "
            f"SHA-256 of the files {whole * 1e3:.1f} ms), a microbatch {later * 1e6:.0f} us"
        )


def tokens(folder: Path, count: int) -> None:
    path, length = folder / "store", 500
    n = count // length
    arrays = {
        "tokens": stream(42, "bench/seal/tokens").integers(0, 50_000, n * length, np.int32),
        "mask": np.ones(n * length, np.uint8),
        "offsets": np.arange(n + 1, dtype=np.int64) * length,
        "loss": np.tile(np.array([1, length - 1], np.int32), (n, 1)),
        "content": np.arange(1, n + 1, dtype=np.uint64),
    }
    write_store(path, arrays, "x")
    order = stream(42, "bench/seal/order").permutation(n)
    opened = best(lambda: TokenStore(path))

    def read(store: TokenStore) -> None:
        for item in order:
            store(int(item))

    def unchecked(store: TokenStore) -> None:
        for item in order:
            first = int(item) * length
            store.tokens.unread[first : first + length].sum()
            store.mask.unread[first : first + length].sum()

    def summed(store: TokenStore) -> None:
        for item in order:
            sample = store(int(item))
            sample.input_ids.sum()
            sample.loss_mask.sum()

    fresh = [TokenStore(path) for _ in range(TRIES)]
    checked = best(lambda: summed(fresh.pop()))
    store = TokenStore(path)
    read(store)
    again, bare = best(lambda: summed(store)), best(lambda: unchecked(store))
    print(
        f"token store, {count:,} tokens: open {opened * 1e3:.2f} ms, a sample in its first epoch "
        f"{checked / n * 1e6:.2f} us, later {again / n * 1e6:.2f} us, slices of the bare arrays "
        f"{bare / n * 1e6:.2f} us"
    )


def main() -> None:
    quick = arguments(__doc__.splitlines()[0]).parse_args().quick
    print("seal: what checking costs; nothing is saved")
    with tempfile.TemporaryDirectory() as folder:
        plans(Path(folder), 100_000 if quick else 10_000_000)
        tokens(Path(folder), 1_000_000 if quick else 50_000_000)


if __name__ == "__main__":
    main()
