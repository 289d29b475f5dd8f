"""Length caches on disk: `.jsonl` is readable, `.safetensors` loads fast.

A `.jsonl` cache is a header line, a line for each entry, and an end record:

    {"format":"batchwright.lengths","version":2,"tokenizer_hash":"...","loss":true}
    {"sample_id":"a","length":12,"loss":[7,5],"content":"0123456789abcdef"}
    {"end":true,"entries":1,"dataset_hash":"...","sha256":"..."}

`loss` is the first token that is predicted with loss (the length, if none is) and how many are;
an entry without it has loss on all tokens but the first, which nothing predicts. If the header
says `"loss":false`, nothing is known about it. `content` is a hash of the row that was measured.
`row` is added to entries whose number is not their row's, which happens after a row that was
skipped. The last line is a function of all
others, and a reader compares it whole, so a change of any byte is detected.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.errors import BadFile, BadLength, ConfigError, DuplicateId, one_line
from batchwright.files import existing, parse_json, read_regular, writing
from batchwright.fingerprint import digest, digest_array
from batchwright.remote import local_output

__all__ = [
    "JOURNAL",
    "LONGEST",
    "bad_length",
    "check_path",
    "checked_lengths",
    "partial_path",
    "read_entries",
    "write_entries",
]

LONGEST = 2**31 - 1
"""Lengths are int32 everywhere, so this is the longest sample possible."""

FORMAT = "batchwright.lengths"
JOURNAL = "batchwright.lengths.partial"
"""The format of the journal of an unfinished cache."""

VERSION = 2
START = b'{"format":"batchwright.lengths"'
END = b'{"end":true'
FEW_BYTES = 1 << 22
BLOCK = 8192
FIELDS = ("sample_id", "length", "loss", "content", "row")
HEX = frozenset("0123456789abcdef")
AGAIN = "run `batchwright data lengths build` again with the same output"


def checked_lengths(values: NDArray[Any], ids: Ids) -> NDArray[np.int32]:
    """The values as int32, or `BadLength` with the first id whose value is out of range."""
    if values.dtype.kind not in "iu":
        raise BadLength(f"lengths must be integers, got an array of {values.dtype}")
    wrong = (values < 1) | (values > LONGEST)
    if wrong.any():
        item = int(wrong.argmax())
        raise bad_length(ids[item], values[item])
    return np.ascontiguousarray(values, np.int32)


def bad_length(id: str, value: object) -> BadLength:
    return BadLength(
        f"sample {id!r} has length {value}; a length must be an integer from 1 to {LONGEST:,}"
    )


def check_path(path: Path) -> None:
    """Refuse a path whose suffix is no known format, or that is another kind of file."""
    if path.suffix not in (".jsonl", ".safetensors"):
        raise ConfigError(
            f"{path} has no known format; a length cache ends in .jsonl or .safetensors"
        )
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file for the lengths")
    if path.exists():
        head = read_regular(path, 1 << 16)
        ours = head.startswith(START) if path.suffix == ".jsonl" else FORMAT.encode() in head
        if head and not ours:
            raise ConfigError(
                f"{path} is not a length cache and is not overwritten; name another file"
            )


def write_entries(path: Path, entries: Entries, *, unique: bool = False) -> None:
    """Write a finished cache atomically, the same bytes for the same entries.

    Ids are unique in what is written; readers rely on that and on the checksum. Who gathered them
    in a dictionary knows that they are, and saves the time to look.
    """
    check_path(path)
    if not unique and (pair := entries.ids.first_duplicate()) is not None:
        raise DuplicateId(
            f"duplicate sample id {entries.ids[pair[0]]!r}, entries {pair[0]} and {pair[1]} "
            f"(from 0); ids must be unique"
        )
    with local_output(path) as local, writing(local) as temporary:
        if path.suffix == ".jsonl":
            _write_jsonl(temporary, entries)
        else:
            _write_safetensors(temporary, entries)


def read_entries(path: Path) -> Entries:
    """Read a finished cache; `BadFile` says what is wrong with any other file."""
    if path.suffix not in (".jsonl", ".safetensors"):
        raise BadFile(f"{path} is not a length cache; one ends in .jsonl or .safetensors")
    partial = partial_path(path)
    if not path.exists() and partial.exists():
        raise BadFile(f"{path} is not finished, only {partial.name} exists; {AGAIN}: it resumes")
    raw = read_regular(existing(path, "length cache"))
    entries = _read_jsonl(path, raw) if path.suffix == ".jsonl" else _read_safetensors(path, raw)
    checked_lengths(entries.lengths, entries.ids)
    return entries


def partial_path(path: Path) -> Path:
    """The journal of an unfinished cache."""
    return path.with_name(f"{path.name}.partial")


def _write_jsonl(path: Path, entries: Entries) -> None:
    header = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer_hash": entries.tokenizer_hash,
        "loss": entries.loss is not None,
    }
    hasher = hashlib.sha256()
    with path.open("wb") as file:

        def write(text: str) -> None:
            file.write(raw := text.encode())
            hasher.update(raw)

        write(json.dumps(header, separators=(",", ":")) + "\n")
        for block in _blocks(entries):
            write(block)
        file.write(_end(len(entries.ids), entries.dataset_hash, hasher.hexdigest()))


def _blocks(entries: Entries) -> Iterator[str]:
    """The lines of all entries, many at a time."""
    lengths, content = entries.lengths, entries.content
    n = len(lengths)
    # What most entries do not have is made for those that do, or for all at once.
    more = [""] * n
    if entries.loss is not None:
        differs = (entries.loss != _all_but_the_first(lengths)).any(axis=1)
        for at in np.flatnonzero(differs).tolist():
            first, count = entries.loss[at].tolist()
            more[at] = f',"loss":[{first},{count}]'
    if content.any():
        digits = content.astype(">u8").tobytes().hex()
        for at in np.flatnonzero(content).tolist():
            more[at] += f',"content":"{digits[16 * at : 16 * at + 16]}"'
    if entries.rows is not None:
        for at in np.flatnonzero(entries.rows != np.arange(n)).tolist():
            more[at] += f',"row":{int(entries.rows[at])}'
    line = '{"sample_id":%s,"length":%d%s}\n'
    ids = iter(entries.ids)
    for start in range(0, n, BLOCK):
        # One formatting for all lines of a block costs a third of one for each.
        stop = min(n, start + BLOCK)
        given: list[Any] = [None] * (3 * (stop - start))
        given[::3] = map(encode_basestring_ascii, islice(ids, stop - start))
        given[1::3] = lengths[start:stop].tolist()
        given[2::3] = more[start:stop]
        yield line * (stop - start) % tuple(given)


def _all_but_the_first(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.stack([np.ones_like(lengths), lengths - 1], axis=1)


def _end(entries: int, dataset_hash: str, sha256: str) -> bytes:
    end = {"end": True, "entries": entries, "dataset_hash": dataset_hash, "sha256": sha256}
    return json.dumps(end, separators=(",", ":")).encode() + b"\n"


def _read_jsonl(path: Path, raw: bytes) -> Entries:
    if not raw.startswith(START):
        raise BadFile(f"{path} is not a length cache: its first line is not the header of one")
    last = raw.rfind(b"\n", 0, len(raw) - 1) + 1
    if not raw.startswith(END, last) or not raw.endswith(b"\n"):
        raise BadFile(f"{path} is truncated: it has no end record; {AGAIN}: it resumes")
    sha256 = hashlib.sha256(memoryview(raw)[:last]).hexdigest()
    if sha256.encode() not in raw[last:]:
        raise _damaged(path, "its bytes do not match its checksum")
    first = raw.find(b"\n") + 1
    try:
        header = parse_json(raw[:first])
    except ValueError as error:
        raise _damaged(path, f"its header is not JSON: {one_line(error)}") from None
    if header.get("version") != VERSION:
        raise BadFile(f"{path} has version {header.get('version')}, this reads {VERSION}; {AGAIN}")
    entries = _parse_lines(path, memoryview(raw)[first:last], header["tokenizer_hash"])
    if not header.get("loss"):
        entries = dataclasses.replace(entries, loss=None)
    if raw[last:] != _end(len(entries.ids), entries.dataset_hash, sha256):
        raise _damaged(path, "its end record does not match its entries")
    return entries


def _parse_lines(path: Path, lines: memoryview, tokenizer_hash: str) -> Entries:
    # To import Arrow takes longer than to read a few lines without it.
    few = len(lines) <= FEW_BYTES and "pyarrow" not in sys.modules
    return (_parse_few if few else _parse_many)(path, lines, tokenizer_hash)


def _parse_few(path: Path, lines: memoryview, tokenizer_hash: str) -> Entries:
    try:
        found = parse_json(b"[%b]" % b",".join(bytes(lines).splitlines()))
        if not {name for entry in found for name in entry} <= {*FIELDS}:
            raise ValueError("an entry has a field that is not known")
        ids, lengths, loss, content, rows = (
            [entry.get(name) for entry in found] for name in FIELDS
        )
        if not {*map(type, ids)} <= {str} or not {*map(type, lengths)} <= {int}:
            raise ValueError("an entry lacks its sample_id or its length")
        digits = [text or "0" * 16 for text in content]
        if not {*map(len, digits)} <= {16} or not set("".join(digits)) <= HEX:
            raise ValueError("a content hash is not 16 hexadecimal digits")
        known = [number if row is None else row for number, row in enumerate(rows)]
        own = Ids.of(ids)
        checked = checked_lengths(np.array(lengths, np.int64), own)
        named = [at for at, pair in enumerate(loss) if pair is not None]
        return Entries(
            own,
            checked,
            np.frombuffer(bytes.fromhex("".join(digits)), ">u8").astype(np.uint64),
            None if {*rows} <= {None} else np.array(known, np.int64),
            tokenizer_hash,
            _checked_loss(checked, np.array(named, np.int64), [loss[at] for at in named]),
        )
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, BadLength):
            raise
        raise _damaged(path, one_line(error)[:200]) from None


def _parse_many(path: Path, lines: memoryview, tokenizer_hash: str) -> Entries:
    import pyarrow as pa
    import pyarrow.json as pa_json

    text, number = pa.large_string(), pa.int64()
    schema = pa.schema(
        [
            ("sample_id", text),
            ("length", number),
            ("loss", pa.list_(number)),
            ("content", text),
            ("row", number),
        ]
    )
    if not lines:
        table = schema.empty_table()
    else:
        try:
            table = pa_json.read_json(
                pa.BufferReader(lines),
                pa_json.ReadOptions(block_size=1 << 22),
                pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
            )
        except (pa.ArrowException, ValueError) as error:
            raise _damaged(path, one_line(error)[:200]) from None
    if table["sample_id"].null_count or table["length"].null_count:
        raise _damaged(path, "an entry lacks its sample_id or its length")
    ids = Ids.from_arrays(*_strings(table["sample_id"]))
    lengths = checked_lengths(table["length"].to_numpy(), ids)
    rows = None
    if table["row"].null_count < len(ids):
        index = pa.array(np.arange(len(ids)))
        rows = pa.compute.coalesce(table["row"], pa.chunked_array([index])).to_numpy()
    pairs = table["loss"].combine_chunks()
    named = np.flatnonzero(pairs.is_valid().to_numpy(zero_copy_only=False))
    try:
        loss = _checked_loss(lengths, named, pairs.drop_null().to_pylist())
    except (ValueError, TypeError) as error:
        raise _damaged(path, one_line(error)[:200]) from None
    return Entries(ids, lengths, _hex(path, table["content"]), rows, tokenizer_hash, loss)


def _checked_loss(
    lengths: NDArray[np.int32], items: NDArray[np.int64], pairs: list[Any] | NDArray[Any]
) -> NDArray[np.int32]:
    """The loss of all entries: that of `items` is `pairs`, all others have it on every token."""
    loss = _all_but_the_first(lengths)
    if len(items):
        given = np.array(pairs, np.int64)
        if given.shape != (len(items), 2):
            raise ValueError("the loss of an entry is not two numbers")
        loss[items] = given
        first, count, most = given[:, 0], given[:, 1], lengths[items]
        if ((first < 1) | (first > most) | (count < 0) | (count > most - first)).any():
            raise ValueError("the loss of an entry is outside its tokens")
    return loss


def _strings(column: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets and bytes of a large_string column, copied out of Arrow's buffers."""
    joined = column.combine_chunks()
    if not len(joined):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    _, ends, data = joined.buffers()
    offsets = np.frombuffer(ends, np.int64)[joined.offset : joined.offset + len(joined) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return offsets - offsets[0], content[offsets[0] : offsets[-1]].copy()


_NIBBLES = np.full(256, 255, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def _hex(path: Path, column: Any) -> NDArray[np.uint64]:
    """Sixteen hexadecimal digits each, nulls as 0."""
    import pyarrow.compute

    offsets, data = _strings(pyarrow.compute.fill_null(column, "0" * 16))
    nibbles = _NIBBLES[data]
    if (np.diff(offsets) != 16).any() or (nibbles == 255).any():
        raise _damaged(path, "a content hash is not 16 hexadecimal digits")
    values = np.zeros(len(offsets) - 1, np.uint64)
    for digit in nibbles.reshape(-1, 16).T:
        values = (values << np.uint64(4)) | digit
    return values


def _write_safetensors(path: Path, entries: Entries) -> None:
    from safetensors.numpy import save

    arrays: dict[str, NDArray[Any]] = {"lengths": entries.lengths, "content": entries.content}
    if entries.ids.arrays is not None:
        arrays["id_offsets"], arrays["id_bytes"] = entries.ids.arrays
    if entries.rows is not None:
        arrays["rows"] = entries.rows
    if entries.loss is not None:
        arrays["loss"] = entries.loss
    header = {
        "format": FORMAT,
        "version": VERSION,
        "entries": len(entries.ids),
        "tokenizer_hash": entries.tokenizer_hash,
        "dataset_hash": entries.dataset_hash,
        "sha256": _sum(entries),
    }
    # One key, because the order of several is not the same in every run.
    # To bytes first: a full disk must be an OSError, and the library raises an error of its own.
    path.write_bytes(save(arrays, {FORMAT: json.dumps(header, separators=(",", ":"))}))


def _read_safetensors(path: Path, raw: bytes) -> Entries:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    size = int.from_bytes(raw[:8], "little")
    head = raw[8 : 8 + size]
    if size > len(raw) or FORMAT.encode() not in head:
        raise BadFile(f"{path} is not a length cache, or its first bytes are damaged")
    try:
        # Only spaces may follow the header; the library accepts other white space as well.
        metadata = parse_json(head.rstrip(b" "))["__metadata__"]
        header = parse_json(metadata[FORMAT])
        arrays = load(raw)
        if header["version"] != VERSION:
            raise BadFile(f"{path} has version {header['version']}, this reads {VERSION}; {AGAIN}")
        entries = _from_tensors(arrays, header)
        entries.ids.keys()  # damaged offsets show here
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, BadFile) and "version" in str(error):
            raise
        raise _damaged(path, one_line(error)[:200]) from None
    again = {
        **header,
        "format": FORMAT,
        "entries": len(entries.ids),
        "dataset_hash": entries.dataset_hash,
        "sha256": _sum(entries),
    }
    if again != header or not head.rstrip(b" ").endswith(b"}"):
        raise _damaged(path, "its bytes do not match its checksum")
    return entries


def _from_tensors(arrays: dict[str, NDArray[Any]], header: dict[str, Any]) -> Entries:
    lengths, content, rows = arrays["lengths"], arrays["content"], arrays.get("rows")
    loss = arrays.get("loss")
    if "id_offsets" in arrays:
        ids = Ids.from_arrays(arrays["id_offsets"], arrays["id_bytes"])
    else:
        ids = Ids.numbered(len(lengths))
    columns = [lengths, content] if rows is None else [lengths, content, rows]
    if any(column.shape != (len(ids),) for column in columns):
        raise ValueError("its arrays differ in length")
    if loss is not None:
        loss = _checked_loss(lengths, np.arange(len(ids)), loss)
    return Entries(ids, lengths, content, rows, str(header["tokenizer_hash"]), loss)


def _sum(entries: Entries) -> str:
    # Ids and content are in the data set's hash already, so each byte is hashed once.
    rows = None if entries.rows is None else digest_array(entries.rows)
    lengths = digest_array(entries.lengths)
    loss = None if entries.loss is None else digest_array(entries.loss)
    return digest(
        FORMAT, VERSION, lengths, loss, rows, entries.tokenizer_hash, entries.dataset_hash
    )


def _damaged(path: Path, reason: str) -> BadFile:
    return BadFile(f"{path} is damaged: {reason}; {AGAIN}")
