"""Replay buffers on disk: JSON, one safetensors file, or a folder saved incrementally.

A folder holds numbered parts, each a safetensors file that is written under a temporary name
and renamed: a killed process leaves the last whole part. `00000003.full.safetensors` holds
everything, `00000004.delta.safetensors` what has changed since part 3, whose checksum it names.
When the changes outweigh the last full part a new full part is written, then the older ones are
removed, but for as many as were asked to be kept; if their writer is killed before it has done
so, by the next process that loads or saves the buffer. Every part carries a checksum over its
arrays and its metadata. A buffer knows the newest part of its folder when it saved or loaded
there, and does not save over what another writer has added since.
"""

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from batchwright.checkpoint import write_arrays
from batchwright.errors import (
    BadFile,
    BatchwrightError,
    CannotWrite,
    ConfigError,
    Mismatch,
    MissingFile,
)
from batchwright.files import (
    cannot_read,
    existing,
    fsync_folder,
    open_regular,
    parse_json,
    read_regular,
    write_atomic,
    writing,
)
from batchwright.fingerprint import digest, digest_array
from batchwright.streaming.rows import (
    ROW,
    Contents,
    arrays_of,
    batch_of,
    check_rows,
    contents_of,
    pack,
)
from batchwright.streaming.sample import StreamSample

if TYPE_CHECKING:
    from batchwright.streaming.replay import ReplayBuffer

__all__ = ["Saved", "from_dict", "load_buffer", "save_buffer", "to_dict"]

FORMAT = "batchwright.replay"
VERSION = "1"
PART = re.compile(r"(\d{8})\.(full|delta)\.safetensors")
LOCK = ".lock"
REQUIRED = ("config", "samples", "priorities", "total_added", "total_evicted")
OPTIONAL = ("serials", "draws", "sha256")

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a buffer was last saved or read: its next save there writes only changes."""

    folder: Path
    number: int
    sha256: str
    full_bytes: int
    delta_bytes: int
    newest: tuple[int, str]
    """Number and checksum of the newest part then: another one is of another writer."""


def save_buffer(buffer: "ReplayBuffer", path: Path, keep: int) -> Path:
    """Write `buffer` in the form that the name of `path` says."""
    if path.suffix == ".json":
        write_atomic(path, _text(buffer))
    elif path.suffix == ".safetensors":
        _write_part(path, _whole(buffer), _head(buffer, "full", 0, ""))
    else:
        _save_folder(buffer, path, keep)
    return path


def load_buffer(path: Path, part: int | None) -> "ReplayBuffer":
    """Read what `save_buffer` wrote, every byte of it checked."""
    existing(path, "replay buffer")
    if path.is_dir():
        return _load_folder(path, part)
    if part is not None:
        raise ConfigError(f"{path} is one file; only a folder has parts to choose from")
    if path.suffix == ".json":
        return _load_json(path)
    arrays, head = _read_part(path)
    if head["kind"] != "full":
        raise _damaged(path, "it holds only changes; open the folder it is in")
    return _restored(path, head, *batch_of(arrays))


def to_dict(buffer: "ReplayBuffer") -> dict[str, Any]:
    """A buffer as JSON values; `serials` and `draws` let a restored one continue exactly."""
    held = buffer.snapshot()
    return {
        "config": buffer.config.model_dump(mode="json"),
        "samples": [sample.model_dump(mode="json") for sample in held],
        "priorities": held.priorities.tolist(),
        "total_added": buffer.total_added,
        "total_evicted": buffer.total_evicted,
        "serials": held.serials.tolist(),
        "draws": buffer.draws,
    }


def from_dict(data: Mapping[str, Any], what: str) -> "ReplayBuffer":
    """The buffer of JSON values; `serials` and `draws` may be missing."""
    from batchwright.streaming.replay import ReplayBuffer, ReplayBufferConfig

    if not isinstance(data, Mapping):
        raise BadFile(f"{what} holds no replay buffer: it is a {type(data).__name__}")
    wrong = [name for name in REQUIRED if name not in data]
    wrong += [name for name in data if name not in REQUIRED + OPTIONAL]
    if wrong:
        raise BadFile(
            f"{what} holds no replay buffer: its keys are {', '.join(map(str, data))}; "
            f"expected {', '.join(REQUIRED)}"
        )
    try:
        buffer = ReplayBuffer(ReplayBufferConfig(**data["config"]))
        samples = [StreamSample(**fields) for fields in data["samples"]]
        first = int(data["total_added"]) - len(samples)
        serials = data.get("serials", range(first, first + len(samples)))
        for name, listed in (("priorities", data["priorities"]), ("serials", serials)):
            if len(listed) != len(samples):
                raise Mismatch(f"it has {len(listed):,} {name} for {len(samples):,} samples")
        packed = [
            pack(sample, float(priority), int(serial))
            for sample, priority, serial in zip(samples, data["priorities"], serials, strict=True)
        ]
        rows = np.array([row for row, _ in packed], ROW)
        check_rows(rows)
        counters = {
            "size": len(samples),
            "total_added": int(data["total_added"]),
            "total_evicted": int(data["total_evicted"]),
            "draws": int(data.get("draws", 0)),
        }
        buffer.restore(rows, contents_of([content for _, content in packed]), counters)
    except (BatchwrightError, TypeError, ValueError, OverflowError) as error:
        raise BadFile(f"{what} holds no replay buffer: {error}") from None
    return buffer


def _text(buffer: "ReplayBuffer") -> bytes:
    """`to_dict` as JSON, a line for each sample, sealed by a checksum of all that is before it."""
    data = to_dict(buffer)
    lines = ["{"]
    for name, value in data.items():
        if name == "samples":
            rows = ",\n    ".join(json.dumps(sample) for sample in value)
            lines.append(f'  "samples": [\n    {rows}\n  ],' if value else '  "samples": [],')
        elif name == "config":
            shown = json.dumps(value, indent=2).replace("\n", "\n  ")
            lines.append(f'  "config": {shown},')
        else:
            lines.append(f'  "{name}": {json.dumps(value)},')
    body = "\n".join(lines).encode()
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b'\n  "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _load_json(path: Path) -> "ReplayBuffer":
    try:
        raw = read_regular(path)
        data = parse_json(raw)
    except BadFile:
        raise
    except ValueError as error:
        raise _damaged(path, f"it is not whole JSON: {error}") from None
    if isinstance(data, dict) and "sha256" in data:
        body = raw[: raw.rfind(b'\n  "sha256": "')]
        if raw.rstrip() != (body + _seal(body)).rstrip():
            raise _damaged(path, "it does not match its checksum")
    return from_dict(data, str(path))


def _save_folder(buffer: "ReplayBuffer", folder: Path, keep: int) -> None:
    with _locked(folder):
        parts = _parts(folder)
        newest = max(parts, default=0)
        saved = buffer.saved
        if saved is not None and saved.folder == folder.resolve():
            _refuse_overtaken(folder, saved, _newest(parts))
        if saved is not None and (saved.folder, saved.number) == (folder.resolve(), newest):
            arrays = _changes(buffer)
            size = sum(array.nbytes for array in arrays.values())
            if saved.delta_bytes + size <= saved.full_bytes:
                head = _head(buffer, "delta", newest + 1, saved.sha256)
                _write_part(folder / f"{newest + 1:08d}.delta.safetensors", arrays, head)
                delta = saved.delta_bytes + size
                buffer.mark_saved(_saved(folder, head, saved.full_bytes, delta))
                return
        arrays = _whole(buffer)
        head = {**_head(buffer, "full", newest + 1, ""), "keep": keep}
        _write_part(folder / f"{newest + 1:08d}.full.safetensors", arrays, head)
        full = sum(array.nbytes for array in arrays.values())
        buffer.mark_saved(_saved(folder, head, full, 0))
        # Only now: a reader, or a process killed here, still has a whole state.
        for path in _superseded(_parts(folder), keep):
            path.unlink(missing_ok=True)
        fsync_folder(folder)


def _superseded(parts: Mapping[int, Path], keep: int) -> list[Path]:
    """Parts that are older than the last `keep` full ones."""
    full = sorted(number for number, path in parts.items() if ".full." in path.name)
    return [path for number, path in parts.items() if number < full[-keep:][0]]


def _remove_superseded(folder: Path, part: int | None) -> None:
    """Remove what the writer of the newest full part was about to remove, unless one is at work.

    Nothing is removed of what cannot be written, or if an older `part` was asked for.
    """
    with contextlib.suppress(OSError, BatchwrightError, LookupError, TypeError, ValueError):
        parts = _parts(folder)
        newest = max(number for number, path in parts.items() if ".full." in path.name)
        keep = int(_read_head(parts[newest])["keep"])
        older = _superseded(parts, max(keep, 1))
        if not older or (part is not None and parts[part] in older):
            return
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in older:
                path.unlink(missing_ok=True)


def _saved(
    folder: Path,
    head: Mapping[str, Any],
    full_bytes: int,
    delta_bytes: int,
    newest: tuple[int, str] | None = None,
) -> Saved:
    number, checksum = head["number"], head["sha256"]
    newest = newest or (number, checksum)
    return Saved(folder.resolve(), number, checksum, full_bytes, delta_bytes, newest)


def _newest(parts: Mapping[int, Path]) -> tuple[int, str]:
    """Number and checksum of the newest part; 0 and nothing if there is none."""
    if not parts:
        return 0, ""
    return max(parts), str(_read_head(parts[max(parts)])["sha256"])


def _refuse_overtaken(folder: Path, saved: Saved, newest: tuple[int, str]) -> None:
    """An error for a buffer whose folder another writer has saved to: one would undo the other."""
    if newest != saved.newest:
        raise Mismatch(
            f"another writer has saved to {folder} since this buffer was last saved or loaded "
            f"there (the newest part is {newest[0]}, not {saved.newest[0]}); save to another "
            f"folder, or load this one again"
        )


def _load_folder(folder: Path, part: int | None) -> "ReplayBuffer":
    for _ in range(50):
        parts = _parts(folder)
        if not parts:
            raise MissingFile(
                f"the folder {folder} has no saved buffer yet; wait until its writer has saved "
                f"once, or save a buffer there"
            )
        if part is not None and part not in parts:
            raise _damaged(folder, f"it has no part {part}")
        wanted = {number: path for number, path in parts.items() if part is None or number <= part}
        try:
            buffer = _load_parts(folder, wanted, _newest(parts))
            _remove_superseded(folder, part)
            return buffer
        except FileNotFoundError:
            # Parts are removed after a full one was written: look again. Each turn means that
            # a writer has finished another full part, so this ends.
            if _parts(folder).keys() == parts.keys():
                raise _damaged(folder, "a part cannot be opened") from None
    raise _damaged(folder, "it is rewritten faster than it can be read")


def _load_parts(folder: Path, parts: dict[int, Path], newest: tuple[int, str]) -> "ReplayBuffer":
    full = [number for number, path in parts.items() if ".full." in path.name]
    if not full:
        raise _damaged(folder, "it has no full part")
    numbers = [number for number in sorted(parts) if number >= max(full)]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise _damaged(folder, f"a part is missing between {numbers[0]} and {numbers[-1]}")
    arrays, head = _read_part(parts[numbers[0]], "full", numbers[0])
    rows, contents = batch_of(arrays)
    full_bytes = sum(array.nbytes for array in arrays.values())
    delta_bytes = 0
    for number in numbers[1:]:
        arrays, following = _read_part(parts[number], "delta", number)
        if following["previous"] != head["sha256"]:
            raise _damaged(parts[number], f"it does not follow part {number - 1}")
        rows, contents = _changed(parts[number], rows, contents, arrays, following)
        delta_bytes += sum(array.nbytes for array in arrays.values())
        head = following
    buffer = _restored(folder, head, rows, contents)
    buffer.mark_saved(_saved(folder, head, full_bytes, delta_bytes, newest))
    return buffer


def _whole(buffer: "ReplayBuffer") -> Arrays:
    held = buffer.snapshot()
    return arrays_of(held.rows, held.contents)


def _changes(buffer: "ReplayBuffer") -> Arrays:
    """The samples that are new in their slots, and new numbers of those that are not."""
    renewed, changed = buffer.unsaved()
    fresh, other = buffer.at(renewed), buffer.at(changed)
    return {
        **arrays_of(fresh.rows, fresh.contents),
        "renewed": renewed,
        "changed": changed,
        "changed_priority": other.priorities,
        "changed_replay_count": np.ascontiguousarray(other.rows["replay_count"]),
    }


def _changed(
    path: Path,
    rows: NDArray[np.void],
    contents: Contents,
    arrays: Arrays,
    head: Mapping[str, Any],
) -> tuple[NDArray[np.void], Contents]:
    """The state after the changes of one part."""
    size = int(head["counters"]["size"])
    fresh_rows, fresh = batch_of(arrays)
    renewed, changed = arrays["renewed"], arrays["changed"]
    for slots in (renewed, changed):
        if len(slots) and not 0 <= slots.min() <= slots.max() < size:
            raise _damaged(path, "it changes slots that are not there")
    known = min(len(rows), size)
    # Slots stay dense, so a buffer that grew has new samples from there on.
    if len(renewed) != len(fresh) or (renewed >= known).sum() != size - known:
        raise _damaged(path, "its samples do not fit its slots")
    grown = np.zeros(size, rows.dtype)
    grown[:known] = rows[:known]
    listed = np.empty(size, object)
    listed[:known] = contents[:known]
    grown[renewed] = fresh_rows
    listed[renewed] = fresh
    grown["priority"][changed] = arrays["changed_priority"]
    grown["replay_count"][changed] = arrays["changed_replay_count"]
    return grown, listed


def _restored(
    path: Path, head: Mapping[str, Any], rows: NDArray[np.void], contents: Contents
) -> "ReplayBuffer":
    from batchwright.streaming.replay import ReplayBuffer, ReplayBufferConfig

    try:
        buffer = ReplayBuffer(ReplayBufferConfig(**head["config"]))
        buffer.restore(rows, contents, head["counters"])
    except (BatchwrightError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    return buffer


def _head(buffer: "ReplayBuffer", kind: str, number: int, previous: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "number": number,
        "previous": previous,
        "config": buffer.config.model_dump(mode="json"),
        "counters": buffer.counters(),
    }


def _write_part(path: Path, arrays: Arrays, head: dict[str, Any]) -> None:
    """Write a safetensors file whose metadata is `head`, into which its checksum is put."""
    head["sha256"] = _sum(arrays, head)
    with writing(path) as temporary:
        write_arrays(temporary, arrays, {"replay": json.dumps(head)})


def _read_head(path: Path) -> dict[str, Any]:
    # The library says of a file that cannot be opened that it is not there.
    open_regular(path).close()
    try:
        with safe_open(path, "numpy") as file:
            head: dict[str, Any] = parse_json((file.metadata() or {})["replay"])
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _damaged(path, f"it is not a file of the format {FORMAT}")
    if head.get("version") != VERSION:
        raise _damaged(
            path, f"it has format version {head.get('version')}, this version reads {VERSION}"
        )
    return head


def _read_part(path: Path, kind: str = "", number: int = 0) -> tuple[Arrays, dict[str, Any]]:
    head = _read_head(path)
    try:
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        seen = _sum(arrays, head)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error
    except (SafetensorError, TypeError, ValueError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from None
    if seen != head.get("sha256"):
        raise _damaged(path, "it does not match its checksum")
    if kind and (head["kind"], head["number"]) != (kind, number):
        raise _damaged(path, f"it is the {head['kind']} part {head['number']} under another name")
    return arrays, head


def _sum(arrays: Arrays, head: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in head.items() if name != "sha256"}
    return digest(fields, [[name, digest_array(arrays[name])] for name in sorted(arrays)])


def _parts(folder: Path) -> dict[int, Path]:
    found = ((PART.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in sorted(found, key=_by_path) if match}


def _by_path(found: tuple[object, Path]) -> Path:
    return found[1]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and let one process at a time write into it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file; name a folder, or a file that ends in .json or .safetensors"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ours = any(path.name == LOCK or PART.fullmatch(path.name) for path in folder.iterdir())
        if not ours and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds files that are no replay buffer; name another folder"
            )
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except BatchwrightError:
        raise
    except OSError as error:
        raise CannotWrite(f"cannot write {folder}: {error.strerror or error}") from error


def _damaged(path: Path, reason: str) -> BadFile:
    return BadFile(
        f"the replay buffer {path} cannot be used: {reason}; restore it from a backup, "
        f"or start an empty buffer"
    )
