"""Files of object stores and of the web, as local copies with checksums.

    s3://bucket/data.jsonl  ->  ranges  ->  ~/.cache/batchwright/remote/KEY/data.jsonl + .sha256

An object is read once, in ranges, and then from its copy, which belongs to the version that the
store names (its ETag, generation or blob); where it names none, the object is read again each time,
in one request, because ranges of two versions could not be told apart. A copy that was cut off is
resumed; one whose bytes changed on the disk is fetched again; an object that changed while it was
read is refused, as is an answer of the web with another range than was asked for.
Credentials are those of the environment, as the library of each store finds them.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchwright.errors import (
    CannotRead,
    CannotWrite,
    ConfigError,
    Mismatch,
    MissingExtra,
    MissingFile,
    need,
    one_line,
)
from batchwright.files import home, write_all, write_atomic
from batchwright.fingerprint import digest

__all__ = ["address_of", "fetched", "local_output", "name_of", "origin_of"]

RANGE = 1 << 24
"""Bytes of one request."""
SCHEMES = ("s3", "gs", "hf", "http", "https", "az", "abfs")
ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://?(?=[^/])")
"""`Path` makes one slash of two."""
VERSION = (
    *("ETag", "etag", "generation", "VersionId", "last_commit", "LastModified", "last_modified"),
    *("Last-Modified", "Content-MD5", "Digest", "mtime", "blob_id", "xet_hash"),
)
"""What stores say of the version of an object, under the names that their libraries use."""
SUM = ".sha256"
WEB = ("http", "https")
URL = re.compile(r"https?://[^\s'\"<>]+")
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_origins: dict[Path, tuple[str, str]] = {}
BLOCK = 1 << 22


def address_of(path: str | os.PathLike[str]) -> str | None:
    """The address that a path is, with both slashes; None for a local one.

    >>> address_of(Path("s3://bucket/a.jsonl")), address_of("plans/a"), address_of("hf:/data/a")
    ('s3://bucket/a.jsonl', None, None)
    """
    text = os.fspath(path)
    found = ADDRESS.match(text)
    if isinstance(path, str) and text.startswith("hf:/") and not text.startswith("hf://"):
        # hf:NAME, where the name is a folder of this machine.
        return None
    return None if found is None else f"{found[1]}://{text[found.end() :]}"


def name_of(address: str) -> str:
    """An address as it may be shown: no user, password or query.

    >>> name_of("https://me:secret@host/a.jsonl?token=x")
    'https://host/a.jsonl'
    """
    scheme, _, rest = address.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def fetched(path: str | os.PathLike[str]) -> Path:
    """A local path as it is; of an address, the local copy of the file or folder there.

    Raises:
        MissingFile: nothing is there.
        CannotRead: the store refuses, or cannot be reached.
        Mismatch: the object changed while it was read.
    """
    address = address_of(path)
    if address is None:
        return Path(path)
    with _said(address):
        system, inner = _system(address)
        # Not `isfile`, which takes every refusal for absence.
        if system.info(inner)["type"] == "file":
            return _copy(system, inner, address)
        found = [
            name
            for name, one in system.find(inner, detail=True).items()
            # An empty object of a folder's own name is how consoles draw the folder.
            if one.get("size") != 0 or not _is_folder_name(name, inner)
        ]
    if not found:
        raise MissingFile(f"no data at {name_of(address)}; check the address")
    # A folder is a folder of links: which objects it has is part of its version.
    with _said(address):
        names = {_below(one, inner): one for one in found}
        copies = {
            name: _copy(system, one, f"{address.rstrip('/')}/{name}") for name, one in names.items()
        }
    key = digest("folder", address, sorted((name, str(at)) for name, at in copies.items()))[:24]
    folder = _place() / key / (address.rstrip("/").rpartition("/")[2] or "folder")
    for name, copy in copies.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.exists() and not link.samefile(copy):
            link.unlink()
        with contextlib.suppress(FileExistsError):
            os.link(copy, link)
        if (origin := origin_of(copy)) is not None:
            _origins[link] = origin
    return folder


def origin_of(path: Path) -> tuple[str, str] | None:
    """Of a copy that this process fetched: the address of the object, and its checksum.

    None for other files, and for an address with a password or a query, which goes to nobody.
    """
    return _origins.get(path)


@contextlib.contextmanager
def local_output(path: Path) -> Iterator[Path]:
    """A place to write what is to stand at `path`: itself, or a folder that is uploaded after.

    The manifest of a folder is uploaded last, so that what was cut off is not taken for whole.
    """
    address = address_of(path)
    if address is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
        local = Path(folder) / (address.rstrip("/").rpartition("/")[2] or "output")
        yield local
        with _said(address, writing=True):
            system, inner = _system(address)
            if local.is_file():
                system.put_file(str(local), inner)
            files = [one for one in local.rglob("*") if one.is_file()] if local.is_dir() else []
            old = set(system.find(inner)) if files and system.exists(inner) else set()
            new = {}
            for one in sorted(files, key=lambda one: (one.name == "manifest.json", str(one))):
                at = f"{inner.rstrip('/')}/{one.relative_to(local).as_posix()}"
                system.put_file(str(one), at)
                new[at] = one
            # Of an earlier version; only now, so that a reader finds one of the two.
            for one in old - new.keys():
                system.rm_file(one)


def _copy(system: Any, inner: str, address: str) -> Path:
    """The local copy of an object, made or completed if need be."""
    info = _info(system, inner)
    on_the_web = address.partition("://")[0] in WEB
    # What follows a "?" there may be a secret, and may choose the object.
    shown = name_of(inner) if on_the_web else inner
    name = shown.rstrip("/").rpartition("/")[2] or "data"
    folder = _place() / digest("object", address, info)[:24]
    place, sums = folder / name, folder / (name + SUM)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        part = folder / f".{name}.part"
        if len(info) == 1 or info["size"] is None:
            # A store that names no version may have another one of the same size by now.
            part.unlink(missing_ok=True)
            system.get_file(inner, str(part))
        else:
            if place.exists() and sums.exists():
                if (known := _sum(place)) == sums.read_text().strip():
                    return _remembered(place, address, known)
                place.unlink()
            _read_ranges(system, inner, part, info["size"], address)
        if _info(system, inner) != info:
            part.unlink()
            raise Mismatch(
                f"{name_of(address)} changed while it was read; run again when it is complete"
            )
        found = _sum(part)
        write_atomic(sums, found.encode())
        os.replace(part, place)
    return _remembered(place, address, found)


def _remembered(copy: Path, address: str, checksum: str) -> Path:
    if name_of(address) == address:
        _origins[copy] = (address, checksum)
    return copy


def _read_ranges(system: Any, inner: str, part: Path, size: int, address: str) -> None:
    read = _web_range if address.partition("://")[0] in WEB else _store_range
    handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        at = os.fstat(handle).st_size // RANGE * RANGE
        while at < size:
            end = min(at + RANGE, size)
            raw, start = read(system, inner, at, end, size)
            if start + len(raw) <= at or start + len(raw) > size:
                raise Mismatch(
                    f"{name_of(address)} changed while it was read: {len(raw):,} bytes from "
                    f"{start:,} on instead of {end - at:,} from {at:,}; run again when it is "
                    f"complete"
                )
            os.lseek(handle, start, os.SEEK_SET)
            write_all(handle, raw)
            at = start + len(raw)
        os.ftruncate(handle, size)
        os.fsync(handle)
    finally:
        os.close(handle)


def _store_range(system: Any, inner: str, at: int, end: int, size: int) -> tuple[bytes, int]:
    """Bytes of an object from `at` on; a range that is cut short is none."""
    raw = system.cat_file(inner, start=at, end=end)
    return (raw if len(raw) == end - at else b""), at


def _web_range(system: Any, inner: str, at: int, end: int, size: int) -> tuple[bytes, int]:
    """Bytes of a page, and where they stand in it by what the server says of them.

    Fewer than were asked for are an answer. All of them are what a server without ranges sends.
    """
    from fsspec.asyn import sync

    async def ask() -> tuple[int, str, bytes]:
        session = await system.set_session()
        given = dict(system.kwargs)
        asked = {"Range": f"bytes={at}-{end - 1}", "Accept-Encoding": "identity"}
        headers = {**given.pop("headers", {}), **asked}
        async with session.get(system.encode_url(inner), headers=headers, **given) as answer:
            answer.raise_for_status()
            return answer.status, answer.headers.get("Content-Range", ""), await answer.read()

    status, said, raw = sync(system.loop, ask)
    if status != 206:
        return (raw if len(raw) == size else b""), 0
    found = CONTENT_RANGE.fullmatch(said.strip())
    if (
        found is None
        or int(found[1]) != at
        or int(found[2]) - at + 1 != len(raw)
        or found[3] not in ("*", str(size))
    ):
        raise CannotRead(
            f"cannot read {name_of(inner)}: asked for bytes {at} to {end - 1} of {size}, the "
            f"server answered with {len(raw)} bytes as {said or 'no Content-Range'!r}; it does "
            f"not serve ranges as HTTP has them, so fetch the file by other means"
        )
    return raw, at


def _info(system: Any, inner: str) -> dict[str, Any]:
    """Size and version of an object, as the store tells them now."""
    system.invalidate_cache()
    found = system.info(inner)
    said = {name: str(found[name]) for name in VERSION if found.get(name) is not None}
    size = found.get("size")
    return {"size": None if size is None else int(size), **said}


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place() -> Path:
    return home() / "remote"


def _is_folder_name(one: str, folder: str) -> bool:
    return one.endswith("/") or one == folder.rstrip("/")


def _below(one: str, folder: str) -> str:
    name = one.removeprefix(folder.rstrip("/")).lstrip("/")
    if not name or ".." in name.split("/"):
        raise CannotRead(f"the object {one} has a name that no file may have; rename it")
    return name


def _system(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path within it."""
    fsspec = need("fsspec", extra="remote")
    scheme = address.partition("://")[0]
    try:
        system, inner = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise MissingExtra(
            f"{scheme}:// needs a library that is missing ({one_line(error)}); run: "
            f"pip install 'batchwright[remote]'" + (" adlfs" if scheme in ("az", "abfs") else "")
        ) from None
    except ValueError as error:
        raise ConfigError(f"cannot parse the address {name_of(address)}: {error}") from None
    return system, inner


@contextlib.contextmanager
def _said(address: str, *, writing: bool = False) -> Iterator[None]:
    """What the libraries of stores raise, as one sentence."""
    name = name_of(address)
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("batchwright."):
            raise
        # Broad on purpose: every store has errors of its own, and some call all of them absence.
        cause = error.__cause__
        told = cause is None or isinstance(cause, FileNotFoundError)
        if isinstance(error, FileNotFoundError) and not writing:
            if told or _status(cause) == 404:
                raise MissingFile(f"no data at {name}; check the address") from None
            error = cause if isinstance(cause, Exception) else error
        kind = CannotWrite if writing else CannotRead
        what = "write to" if writing else "read"
        denied = isinstance(error, PermissionError) or _status(error) in (401, 403)
        denied = denied or "credential" in type(error).__name__.lower()
        # Libraries put the whole address into what they say, with what is secret in it.
        told_as = URL.sub(lambda found: name_of(found[0]), one_line(error))
        why = f"{type(error).__name__}: {told_as[:200]}"
        way = (
            "its credentials are read from the environment, and these have no right to it"
            if denied
            else "check the address and the connection"
        )
        raise kind(f"cannot {what} {name} ({why}); {way}") from None


def _status(error: BaseException | None) -> int:
    """What the store answered, wherever its library keeps it; 0 if that is not known."""
    if str(error).startswith("Forbidden"):
        # gcsfs keeps the word alone.
        return 403
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {})
        return int(response.get("HTTPStatusCode", 0))
    found = (
        *(getattr(error, "status", 0), getattr(error, "code", 0)),
        getattr(response, "status_code", 0),
    )
    return next((one for one in found if isinstance(one, int) and one), 0)
