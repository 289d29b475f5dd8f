"""Find the token store of a data set and a tokenizer, or make it: once, resumed after kill -9."""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.build import Build, EncodedChunk
from batchwright.data.build.build import RepeatedIds
from batchwright.data.build.journal import Journal, Record
from batchwright.data.build.known import Known, columns_of
from batchwright.data.build.workers import Workers, check_workers
from batchwright.data.rows.source import OnBadRow, Source
from batchwright.data.tokenizers.tokenizer import Tokenizer
from batchwright.data.tokens.kept import ELSEWHERE, StoreLock, stores_folder
from batchwright.data.tokens.store import LARGE, STORE, TokenStore
from batchwright.errors import BadFile, BadRow, CannotWrite, DuplicateId
from batchwright.files import link_or_copy, write_all
from batchwright.fingerprint import digest
from batchwright.sealed import MANIFEST, PAGE, ArrayWriter, write_array

__all__ = ["find_store", "make_store"]

JOURNAL = "batchwright.tokens.partial"
COPY_ITEMS = 1 << 22

log = logging.getLogger(__name__)


def find_store(source: Source, tokenizer: Tokenizer) -> TokenStore | None:
    """The finished store of this data and tokenizer, if there is one."""
    path = _path(source, tokenizer)
    if not (path / MANIFEST).is_file():
        return None
    store = TokenStore(path)
    # When it was used last, for whoever prunes; a folder of somebody else stays as it is.
    with contextlib.suppress(OSError):
        os.utime(path / MANIFEST)
    return store


def make_store(
    source: Source,
    tokenizer: Tokenizer,
    *,
    on_bad_row: OnBadRow = "fail",
    repeated_ids: RepeatedIds = "fail",
    workers: int | Workers | None = None,
    progress: Callable[[int, int], None] | None = None,
    check: bool = False,
) -> tuple[TokenStore, int]:
    """The store of this data and tokenizer, and how many rows were tokenised for it now.

    A finished one is only opened, or read whole if it is to be checked. Else every row is
    tokenised that is neither in the store of an earlier version of the data nor in what a killed
    build left. The folder is the same whatever
    the number of workers and however often the build was interrupted. Of two processes that make
    the same store, one waits for the other.
    """
    # Also where nothing is left to be tokenised.
    check_workers(workers)
    store, tokenised = _intact(source, tokenizer, check), 0
    path = _path(source, tokenizer)
    if store is not None:
        _clear(path, source, tokenizer)
    else:
        with StoreLock(path):
            # Another process may have made it meanwhile.
            store = _intact(source, tokenizer, check)
            if store is None:
                with _Unfinished.beside(path, source, tokenizer) as unfinished:
                    build = Build(
                        source,
                        tokenizer,
                        unfinished.known,
                        on_bad_row=on_bad_row,
                        repeated_ids=repeated_ids,
                        workers=workers,
                        progress=progress,
                    )
                    for chunk in build:
                        unfinished.append(chunk)
                    _write(path, build, unfinished, source, tokenizer)
                tokenised = build.tokenised
                store = TokenStore(path)
    if store.skipped.count and on_bad_row == "fail":
        raise BadRow(store.skipped.reasons[0])
    if store.repeated.count and repeated_ids == "fail":
        raise DuplicateId(store.repeated.reasons[0])
    return store, tokenised


def _path(source: Source, tokenizer: Tokenizer) -> Path:
    key = digest("tokens", STORE.version, source.fingerprint, tokenizer.fingerprint)
    return stores_folder() / key[:16]


def _clear(path: Path, source: Source, tokenizer: Tokenizer) -> None:
    """Remove what a build left that was killed when its store was finished already."""
    partial = _partial(path, source, tokenizer)
    if partial.exists() or StoreLock(path).exists():
        with contextlib.suppress(OSError), StoreLock(path, wait=False):
            shutil.rmtree(partial)


def _intact(source: Source, tokenizer: Tokenizer, check: bool) -> TokenStore | None:
    try:
        store = find_store(source, tokenizer)
        if check and store is not None:
            store.check()
        return store
    except BadFile as error:
        log.warning("%s: it is made again", error)
        return None


class _Unfinished:
    """Tokens in the order they were made, in a folder beside the store, and their journal.

    A chunk's tokens are written before its record, which holds the checksum of all so far: what a
    killed build left behind the last record is cut off. Places count first the rows of `earlier`, a
    store of an earlier version of the data, then the rows here.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, earlier: TokenStore | None) -> None:
        self._folder = folder
        self._earlier = earlier
        self._journal = Journal(folder / "journal.jsonl", JOURNAL, tokenizer.fingerprint)
        self._files = {name: (folder / f"{name}.bin").open("a+b", 0) for name in LARGE}
        self._writers = {name: ArrayWriter(LARGE[name], PAGE) for name in LARGE}
        for file in self._files.values():
            file.seek(0)
        columns = [columns_of(record) for record in self._journal.replay(self._is_intact)]
        self.resumed = sum(len(column[0]) for column in columns)
        self._sizes = [column[2].astype(np.int64) for column in columns]
        if earlier is not None:
            old = earlier.entries
            columns.insert(0, (old.ids.keys(), old.content, old.lengths))
        self.known = Known.of(columns)
        self._count = len(self.known)
        self._places: list[NDArray[np.int64]] = []
        for name, file in self._files.items():
            file.truncate(sum(int(part.sum()) for part in self._sizes) * LARGE[name].itemsize)

    @classmethod
    @contextmanager
    def beside(cls, path: Path, source: Source, tokenizer: Tokenizer) -> Iterator["_Unfinished"]:
        """Kept when the block ends with an error, if there is anything to keep; else deleted."""
        earlier = _earlier(source, tokenizer)
        self = cls(_begun(path, source, tokenizer), tokenizer, earlier)
        if self.resumed:
            log.warning("resuming: %s rows are tokenised already", f"{self.resumed:,}")
        try:
            yield self
        except BaseException:
            self._close(keep=not self._journal.is_empty)
            raise
        self._close(keep=False)

    def append(self, chunk: EncodedChunk) -> None:
        """Add the rows tokenised now; the others are here already."""
        new = chunk.is_new
        places = chunk.places.copy()
        places[new] = self._count + np.arange(int(new.sum()))
        self._count += int(new.sum())
        self._places.append(places)
        self._sizes.append(chunk.lengths[new].astype(np.int64))
        pieces: dict[str, NDArray[Any]] = {"tokens": chunk.tokens, "mask": chunk.mask}
        raw = {name: _bytes(values, name) for name, values in pieces.items()}
        try:
            for name, file in self._files.items():
                self._writers[name].update(raw[name])
                write_all(file.fileno(), raw[name])
        except OSError as error:
            raise CannotWrite(
                f"cannot write {self._folder}: {error.strerror}; {ELSEWHERE}, and run again: "
                f"it resumes from here"
            ) from None
        self._journal.append(*chunk.record(), self._checksum())

    def put(self, folder: Path, kept: NDArray[np.bool_]) -> dict[str, Any]:
        """Tokens and masks of the rows that are `kept`, in the order of the rows, into `folder`."""
        places = np.concatenate(self._places)[kept]
        as_made = len(places) == self._count and np.array_equal(places, np.arange(self._count))
        if as_made and self._earlier is None:
            # Which is usual: nothing is written twice.
            for name in LARGE:
                link_or_copy(self._folder / f"{name}.bin", folder / f"{name}.bin")
            writers = self._writers
        else:
            writers = {name: self._copy(folder, name, places) for name in LARGE}
        files: dict[str, Any] = {}
        for name, writer in writers.items():
            files |= writer.write_sums(folder, name)
        return files

    def _copy(self, folder: Path, name: str, places: NDArray[np.int64]) -> ArrayWriter:
        parts = [_mapped(self._folder / f"{name}.bin", name)]
        sizes = [np.zeros(1, np.int64), *self._sizes]
        if self._earlier is not None:
            parts.insert(0, getattr(self._earlier, name).whole())
            sizes.insert(1, self._earlier.lengths.values.astype(np.int64))
        offsets, border = np.cumsum(np.concatenate(sizes)), len(parts[0])
        # Rows stand as they were made unless the data changed in between: one run is usual.
        first_here = 0 if self._earlier is None else len(self._earlier)
        breaks = (np.diff(places) != 1) | (places[1:] == first_here)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]
        writer = ArrayWriter(LARGE[name], PAGE)
        with (folder / f"{name}.bin").open("wb") as file:
            for first, stop in pairwise(bounds):
                begin, end = int(offsets[places[first]]), int(offsets[places[stop - 1] + 1])
                part, before = parts[0], 0
                if len(parts) == 2 and places[first] >= first_here:
                    part, before = parts[1], border
                for at in range(begin, end, COPY_ITEMS):
                    raw = part[at - before : min(at + COPY_ITEMS, end) - before].tobytes()
                    file.write(raw)
                    writer.update(raw)
        return writer

    def _is_intact(self, record: Record) -> bool:
        items = sum(record[1])
        raw = {name: f.read(items * LARGE[name].itemsize) for name, f in self._files.items()}
        if record[3:] != (self._checksum(raw),):
            return False
        for name, part in raw.items():
            self._writers[name].update(part)
        return True

    def _checksum(self, more: Mapping[str, bytes] | None = None) -> str:
        """Of all that was written so far, and `more`: what the finished files are hashed by."""
        return "".join(
            writer.sha256(more[name] if more else b"")[:16]
            for name, writer in self._writers.items()
        )

    def _close(self, *, keep: bool) -> None:
        for file in self._files.values():
            file.close()
        if keep:
            self._journal.close()
            return
        for name in self._files:
            (self._folder / f"{name}.bin").unlink(missing_ok=True)
        self._journal.remove()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _partial_name(source: Source, tokenizer: Tokenizer) -> str:
    return digest("partial", source.name, tokenizer.fingerprint)[:8]


def _partial(path: Path, source: Source, tokenizer: Tokenizer) -> Path:
    """The folder in which a store is made."""
    return path.with_name(f"{_partial_name(source, tokenizer)}-{path.name}.partial")


def _begun(path: Path, source: Source, tokenizer: Tokenizer) -> Path:
    """Where to make a store: with what a build of an earlier version of the data left, if any."""
    name, folder = _partial_name(source, tokenizer), _partial(path, source, tokenizer)
    for left in path.parent.glob(f"{name}-*.partial") if not folder.exists() else ():
        store = path.with_name(left.name.removeprefix(f"{name}-").removesuffix(".partial"))
        with contextlib.suppress(OSError), StoreLock(store, wait=False):
            left.rename(folder)
            break
    return folder


def _earlier(source: Source, tokenizer: Tokenizer) -> TokenStore | None:
    """The newest store of a data set of this name, for the rows that have not changed since."""
    folder = stores_folder()
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            fields = STORE.read(path)
            if (fields["source"], fields["tokenizer_hash"]) == (source.name, tokenizer.fingerprint):
                found.append(((path / MANIFEST).stat().st_mtime, path))
        except (BadFile, KeyError, OSError):
            continue
    for _, path in sorted(found, reverse=True):
        with contextlib.suppress(BadFile, OSError):
            store = TokenStore(path)
            # What is copied gets a new checksum, so damage must not pass.
            store.check()
            return store
    return None


def _write(
    path: Path, build: Build, unfinished: _Unfinished, source: Source, tokenizer: Tokenizer
) -> None:
    entries, kept = build.entries()
    with STORE.replacing(path) as folder:
        files = unfinished.put(folder, kept)
        offsets = np.concatenate([[0], np.cumsum(entries.lengths, dtype=np.int64)])
        files["offsets"] = write_array(folder, "offsets", offsets)
        files["loss"] = write_array(folder, "loss", _loss(folder / "mask.bin", offsets))
        files["content"] = write_array(folder, "content", entries.content)
        if entries.rows is not None:
            files["rows"] = write_array(folder, "rows", entries.rows)
        if entries.ids.arrays is not None:
            files["id_offsets"] = write_array(folder, "id_offsets", entries.ids.arrays[0])
            files["id_data"] = write_array(folder, "id_data", entries.ids.arrays[1])
        STORE.write(
            folder,
            {
                "source": source.name,
                "tokenizer": tokenizer.name,
                "dataset_hash": entries.dataset_hash,
                "tokenizer_hash": entries.tokenizer_hash,
                "skipped": _said(build.skipped),
                "repeated": _said(build.repeated),
                "files": files,
            },
        )


def _loss(mask: Path, offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """For each sample the first token that is predicted with loss, and how many are.

    The first token of a sample is never predicted. Where none is, the first is the length.
    """
    mapped = _mapped(mask, "mask")
    loss = np.empty((len(offsets) - 1, 2), np.int32)
    at = 0
    while at < len(loss):
        stop = max(at + 1, int(np.searchsorted(offsets, offsets[at] + COPY_ITEMS)) - 1)
        bounds = offsets[at : stop + 1] - offsets[at]
        carries = np.array(mapped[offsets[at] : offsets[stop]])
        carries[bounds[:-1]] = 0
        places = np.append(np.flatnonzero(carries), len(carries))
        before = np.searchsorted(places, bounds)
        first = np.minimum(places[np.minimum(before[:-1], len(places) - 1)], bounds[1:])
        loss[at:stop, 0] = first - bounds[:-1]
        loss[at:stop, 1] = np.diff(np.minimum(before, len(places) - 1))
        at = stop
    return loss


def _said(skipped: Any) -> dict[str, Any]:
    return {"count": skipped.count, "reasons": list(skipped.reasons)}


def _mapped(path: Path, name: str) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, LARGE[name], "r") if path.stat().st_size else np.empty(0, LARGE[name])


def _bytes(values: NDArray[Any], name: str) -> bytes:
    return np.ascontiguousarray(values, LARGE[name]).tobytes()
