"""The sealed way to write what is read back: folders, small JSON files and text.

A folder has a `manifest.json`: what it holds, in which version, with a checksum of each array or
file and one of its own. Arrays are mapped, so opening one reads nothing: the manifest has a CRC of
each block of them, and a block is checked before its first use. An array of which a few samples
are read at random has an array of CRCs beside it, one for each page. A small JSON file has a
checksum as its last field, a text that people read a line on top of it. What is damaged is
refused by name.
"""

import hashlib
import json
import math
import mmap
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import BadFile, BatchwrightError, CannotRead, ConfigError
from batchwright.files import (
    atomic_folder,
    cannot_read,
    check_replaceable,
    existing,
    open_regular,
    parse_json,
    read_regular,
    regular_handle,
    remove_leftovers,
    write_atomic,
)
from batchwright.fingerprint import digest

__all__ = [
    "BLOCK",
    "MANIFEST",
    "PAGE",
    "SUMS",
    "ArrayWriter",
    "MappedArray",
    "SealedFolder",
    "check_text",
    "read_sealed_json",
    "sealed_text",
    "sha256_of",
    "write_array",
    "write_sealed_json",
]

MANIFEST = "manifest.json"
MOST_BYTES = 64 * 2**20
"""The largest manifest: what claims to be longer is not even read."""
BLOCK = 256 * 2**10
"""Bytes that are checked at once: a quarter of a millisecond."""
PAGE = 4096
"""Bytes that are checked at once where little is read: less than that a disk never reads."""
SUMS = "_crc32"
"""Ends the name of the array with the checksums of another."""
MANY_BYTES = 8 * 2**20
"""From here on, several threads check an array."""


class SealedFolder:
    """A kind of folder: its format and version, what it is called, what to do if it is damaged."""

    def __init__(self, format: str, version: int, what: str, remedy: str) -> None:
        self.format = format
        self.version = version
        self.what = what
        self._remedy = remedy
        self._says = f'"format": "{format}"'

    def replacing(self, path: Path, inside: str = "") -> AbstractContextManager[Path]:
        """A temporary folder that replaces `path`, if that is of this kind or empty."""
        return atomic_folder(path, inside + MANIFEST, self._says)

    def check_replaceable(self, path: Path) -> None:
        """Refuse now what `replacing` would refuse, before work is done for nothing."""
        check_replaceable(path, MANIFEST, self._says)

    def write(self, folder: Path, fields: dict[str, Any], files: Sequence[str] = ()) -> None:
        """Write the manifest: `fields`, with the SHA-256 of each of `files` under `files`."""
        if files:
            fields = {**fields, "files": {name: sha256_of(folder / name) for name in files}}
        sealed = {"format": self.format, "version": self.version, **fields}
        sealed["sha256"] = digest(sealed)
        raw = (json.dumps(sealed, indent=2) + "\n").encode()
        if len(raw) > MOST_BYTES:
            raise ConfigError(
                f"the manifest of this {self.what} would have {len(raw):,} bytes, and at most "
                f"{MOST_BYTES:,} are read back; write fewer and larger files"
            )
        (folder / MANIFEST).write_bytes(raw)

    def read(self, path: Path) -> dict[str, Any]:
        """The fields of the manifest; `BadFile` if the folder is of another kind or damaged."""
        if not path.exists():
            # Where folders cannot be exchanged, a killed writer may have left it set aside.
            remove_leftovers(path.parent)
        existing(path, self.what)
        try:
            sealed = parse_json(_read_small(path / MANIFEST))
            if not isinstance(sealed, dict):
                raise TypeError("it is not an object")
            if sealed["format"] != self.format:
                raise self.damaged(path, f"its format is {sealed['format']!r}, not {self.format!r}")
            if sealed["version"] != self.version:
                raise BadFile(
                    f"the {self.what} {path} has format version {sealed['version']!r}, and this "
                    f"version of batchwright reads {self.version}; use the version that wrote it, "
                    f"or make it again with this one"
                )
            if digest({k: v for k, v in sealed.items() if k != "sha256"}) != sealed["sha256"]:
                raise self.damaged(path, f"{MANIFEST} does not match its checksum")
        except (FileNotFoundError, NotADirectoryError):
            raise BadFile(
                f"{path} is not a {self.what}: it has no {MANIFEST}; {self._remedy}"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, BatchwrightError):
                raise
            raise self.damaged(path, f"{MANIFEST} cannot be read: {error}") from None
        return sealed

    def check_files(self, path: Path, fields: Mapping[str, Any], *needed: str) -> None:
        """Raise unless every file under `files` matches its checksum and all `needed` are there."""
        files = fields.get("files")
        for name in {*needed, *(files if isinstance(files, dict) else ())}:
            self.check_file(path, fields, name)

    def check_file(self, path: Path, fields: Mapping[str, Any], name: str) -> Path:
        """A file of the folder that the manifest lists, every byte of it checked."""
        files = fields.get("files")
        if not isinstance(files, dict) or name not in files:
            raise self.damaged(path, f"its manifest does not list {name}")
        file = self.inside(path, name)
        try:
            found = sha256_of(file)
        except (FileNotFoundError, NotADirectoryError):
            raise self.damaged(path, f"{name} is missing") from None
        if found != files[name]:
            raise self.damaged(path, f"{name} does not match its checksum")
        return file

    def inside(self, path: Path, name: str) -> Path:
        """The place of a file by its name in the manifest, which must be inside the folder."""
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] == "/" or "\0" in name or "\\" in name:
            raise self.damaged(path, f"its manifest names {name!r}, which is not inside it")
        return path / name

    def open_array(
        self,
        path: Path,
        name: str,
        entry: Mapping[str, Any],
        *,
        dtype: str | None = None,
        sums: "MappedArray | None" = None,
    ) -> "MappedArray":
        """Map an array of the folder; its type and size are checked now, each block when used.

        The checksums of its blocks are in the manifest, or they are the array `sums`.
        """
        if not re.fullmatch(r"\w{1,100}", name):
            raise self.damaged(path, f"its manifest names an array {name!r}")
        file = path / f"{name}.bin"
        kind, shape = self._type(path, name, entry, dtype)
        if name.endswith(SUMS) and len(shape) != 1:
            raise self.damaged(path, f"its manifest does not describe {name} as a list")
        block = entry.get("block", BLOCK)
        if block not in (BLOCK, PAGE):
            raise self.damaged(path, f"its manifest has blocks of {block!r} bytes for {file.name}")
        size = math.prod(shape) * kind.itemsize
        try:
            handle, seen = regular_handle(file)
            try:
                if seen != size:
                    raise self.damaged(path, f"{file.name} has {seen:,} bytes, not {size:,}")
                # An empty file cannot be mapped.
                raw = mmap.mmap(handle, size, access=mmap.ACCESS_READ) if size else b""
            finally:
                os.close(handle)
            if block == PAGE and isinstance(raw, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
                # A few samples are read at random: readahead can be megabytes for each of them.
                raw.madvise(mmap.MADV_RANDOM)
        except (FileNotFoundError, NotADirectoryError):
            raise self.damaged(path, f"{file.name} is missing") from None
        except OSError as error:
            raise error if isinstance(error, CannotRead) else cannot_read(file, error) from error
        found = _sums(entry) if sums is None else sums
        if found is None or len(found) != -(-size // block):
            raise self.damaged(path, f"it has no checksum of each block of {file.name}")
        values = np.frombuffer(raw, kind).reshape(shape)

        def damaged(first: int) -> BadFile:
            where = f"bytes {first:,} to {min(first + block, size) - 1:,}"
            return self.damaged(path, f"{file.name} does not match its checksum, in {where}")

        return MappedArray(values, raw, found, block, str(entry["sha256"]), damaged)

    def _type(
        self, path: Path, name: str, entry: Mapping[str, Any], dtype: str | None
    ) -> tuple[np.dtype[Any], tuple[int, ...]]:
        try:
            kind, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
            fits = kind.kind in "biuf" and (dtype is None or kind == np.dtype(dtype))
            fits = fits and len(shape) <= 8 and all(type(n) is int and n >= 0 for n in shape)
            fits = fits and math.prod(shape) * kind.itemsize < 2**63
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            wanted = "numbers" if dtype is None else f"numbers of type {dtype}"
            raise self.damaged(path, f"its manifest does not describe {name} as {wanted}")
        return kind, shape

    def damaged(self, path: Path, reason: str) -> BadFile:
        """The error for a folder of this kind that cannot be used, and the way out."""
        return BadFile(f"the {self.what} {path} cannot be used: {reason}; {self._remedy}")


class MappedArray:
    """An array of a sealed folder: a block of it is read and checked before its first use.

    Each process checks a block once. Other threads may use it meanwhile: at worst two check one.
    """

    __slots__ = ("_block", "_checked", "_damaged", "_done", "_raw", "_sha256", "_sums", "unread")

    def __init__(
        self,
        array: NDArray[Any],
        raw: mmap.mmap | bytes,
        sums: "NDArray[np.uint32] | MappedArray",
        block: int,
        sha256: str,
        damaged: Callable[[int], BadFile],
    ) -> None:
        self.unread = array
        """The array itself; `whole` or `part` must be called before its values are used."""
        self._raw = raw
        self._sums = sums
        self._block = block
        self._sha256 = sha256
        self._damaged = damaged
        self._checked = bytearray(len(sums))
        self._done = not len(sums)

    def __len__(self) -> int:
        return len(self.unread)

    @property
    def is_small(self) -> bool:
        """Whether it is one block."""
        return len(self._checked) <= 1

    def whole(self) -> NDArray[Any]:
        """All of the array."""
        if not self._done:
            blocks = [block for block, done in enumerate(self._checked) if not done]
            if len(self._raw) >= MANY_BYTES:
                # CRCs are computed outside the interpreter lock.
                workers = len(os.sched_getaffinity(0))
                if isinstance(self._raw, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
                    self._raw.madvise(mmap.MADV_WILLNEED)
                with ThreadPoolExecutor(workers) as threads:
                    parts = (blocks[at::workers] for at in range(workers))
                    list(threads.map(self._check_each, parts))
            else:
                self._check_each(blocks)
            self._done = True
        return self.unread

    def part(self, first: int, stop: int) -> NDArray[Any]:
        """The items from `first` to `stop - 1` of an array of one dimension."""
        if not self._done and first < stop:
            size = self.unread.itemsize
            for block in range(first * size // self._block, (stop * size - 1) // self._block + 1):
                if not self._checked[block]:
                    self._check(block)
        return self.unread[first:stop]

    def check_all(self) -> None:
        """Read every byte anew and compare with the one strong checksum of the whole."""
        if hashlib.sha256(self._raw).hexdigest() != self._sha256:
            raise self._damaged(0)
        self.whole()

    def _check_each(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._check(block)

    def _check(self, block: int) -> None:
        first = block * self._block
        stop = min(first + self._block, len(self._raw))
        with memoryview(self._raw) as whole, whole[first:stop] as part:
            found = zlib.crc32(part)
        sums = self._sums
        wanted = sums.part(block, block + 1)[0] if isinstance(sums, MappedArray) else sums[block]
        if found != wanted:
            raise self._damaged(first)
        self._checked[block] = 1


class ArrayWriter:
    """The checksums of an array whose bytes come in parts of any size, one for each block."""

    def __init__(self, dtype: np.dtype[Any], block: int = BLOCK) -> None:
        self._dtype = dtype
        self._block = block
        self._sha256 = hashlib.sha256()
        self._sums = array("I")
        self._size = 0

    def update(self, raw: bytes | memoryview) -> None:
        """Count in the bytes that follow."""
        self._sha256.update(raw)
        view = memoryview(raw)
        while view:
            inside = self._size % self._block
            if not inside:
                self._sums.append(0)
            part = view[: self._block - inside]
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self._size += len(part)
            view = view[len(part) :]

    def sha256(self, more: bytes = b"") -> str:
        """The checksum of all bytes so far, and of `more` after them."""
        hasher = self._sha256.copy()
        hasher.update(more)
        return hasher.hexdigest()

    def entry(self, shape: Sequence[int] | None = None) -> dict[str, Any]:
        """What the manifest says of the array."""
        return {
            "dtype": self._dtype.str,
            "shape": [self._size // self._dtype.itemsize] if shape is None else list(shape),
            "sha256": self._sha256.hexdigest(),
            "crc32": "".join(f"{sum:08x}" for sum in self._sums),
            **({} if self._block == BLOCK else {"block": self._block}),
        }

    def write_sums(self, folder: Path, name: str) -> dict[str, dict[str, Any]]:
        """Write the checksums as an array of their own, where a manifest would be too long.

        What the manifest says of both arrays.
        """
        sums = write_array(folder, name + SUMS, np.array(self._sums, "<u4"), self._block)
        entry = self.entry()
        del entry["crc32"]
        return {name: entry, name + SUMS: sums}


def write_array(folder: Path, name: str, array: NDArray[Any], block: int = BLOCK) -> dict[str, Any]:
    """Write an array as little-endian bytes and return its entry for the manifest."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    raw = little.reshape(-1).view("u1").data if little.size else b""
    with (folder / f"{name}.bin").open("wb") as file:
        file.write(raw)
    writer = ArrayWriter(little.dtype, block)
    writer.update(raw)
    return writer.entry(little.shape)


def _sums(entry: Mapping[str, Any]) -> NDArray[np.uint32] | None:
    """The checksums in a manifest; None if they are none."""
    text = entry.get("crc32")
    if not isinstance(text, str) or not re.fullmatch(r"(?:[0-9a-f]{8})*", text):
        return None
    return np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint32)


def write_sealed_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write one JSON object, whole or not at all, with a checksum as its last field."""
    plain = json.loads(json.dumps(dict(fields)))
    sealed = {**plain, "sha256": digest(plain)}
    write_atomic(path, (json.dumps(sealed, indent=2) + "\n").encode())


def read_sealed_json(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """What `write_sealed_json` wrote, without the checksum; `BadFile` if it is not that."""
    try:
        fields = parse_json(_read_small(existing(path, what)))
        if not isinstance(fields, dict):
            raise TypeError("it is not an object")
        found = fields.pop("sha256", None)
        if digest(fields) != found:
            raise ValueError("it does not match its checksum")
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BatchwrightError):
            raise
        raise BadFile(f"the {what} {path} cannot be used: {error}; {remedy}") from None
    return fields


_SEAL = re.compile(r"^# sealed", re.MULTILINE)
_SEALED = re.compile(r"# sealed ([0-9a-f]{64}): [^\n]*\n(.*)# sealed \1\n", re.DOTALL)


def sealed_text(body: str, note: str) -> str:
    """A text in which `#` begins comments, between two lines with its checksum.

    >>> print(sealed_text("lr = 0.1", "settings").splitlines()[1])
    lr = 0.1
    """
    body = body if body.endswith("\n") else f"{body}\n"
    found = hashlib.sha256(body.encode()).hexdigest()
    return f"# sealed {found}: {note}\n{body}# sealed {found}\n"


def check_text(text: str, path: Path, remedy: str) -> bool:
    """Whether a text is sealed; `BadFile` if it is, or was, and has changed since.

    The seal stands at both ends, so that a text without its beginning or its end has one still.
    """
    if _SEAL.search(text) is None:
        return False
    match = _SEALED.fullmatch(text)
    body = b"" if match is None else match[2].encode("utf-8", "surrogatepass")
    if match is None or hashlib.sha256(body).hexdigest() != match[1]:
        raise BadFile(f"{path} has changed since it was written: {remedy}")
    return True


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file."""
    with open_regular(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise cannot_read(path, error) from error


def _read_small(path: Path) -> bytes:
    raw = read_regular(path, MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return raw
