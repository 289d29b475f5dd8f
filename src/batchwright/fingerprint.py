"""Canonical bytes for plain values, so that equal values hash equally and unequal ones do not.

Every value is written as one type letter, its size and its bytes. Nothing is joined by a
separator that could also stand inside a value, so `["ab", "c"]` and `["a", "bc"]` differ.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Value", "canonical", "digest", "digest_array", "merkle_root"]

Value = None | bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"]


def canonical(value: Value) -> bytes:
    """The bytes of `value`, equal for equal values on every machine and version.

    A mapping is written in the order of its keys; a tuple equals a list; an int differs from
    the float of the same value.

    >>> canonical(["ab", "c"]) == canonical(["a", "bc"])
    False
    >>> canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1})
    True
    """
    if isinstance(value, str):
        # First, as most of a manifest is text.
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):
        return _tagged(b"b", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _tagged(b"i", str(value).encode())
    if isinstance(value, float):
        # Adding zero turns -0.0 into 0.0: the two compare equal, so they must hash equal.
        return _tagged(b"f", struct.pack("<d", value + 0.0))
    if isinstance(value, bytes):
        return _tagged(b"y", value)
    if isinstance(value, Mapping):
        items = sorted(value.items())
        return _tagged(b"m", b"".join(canonical(k) + canonical(v) for k, v in items))
    if isinstance(value, Sequence):
        return _tagged(b"l", b"".join(canonical(item) for item in value))
    raise TypeError(f"no canonical form for {type(value).__name__}")


def digest(*values: Value) -> str:
    """SHA-256 of `values` in hexadecimal.

    >>> digest("plan", 1)[:16]
    '98805f95c9293924'
    """
    return hashlib.sha256(canonical(values)).hexdigest()


def digest_array(array: "NDArray[Any]") -> str:
    """SHA-256 of an array's type, shape and values, the same on either byte order."""
    import numpy as np

    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    head = canonical([little.dtype.str, list(little.shape)])
    hasher = hashlib.sha256(head)
    # Only values that stand in a row in memory can be seen as bytes.
    flat = np.ascontiguousarray(little).reshape(-1)
    hasher.update(flat.view("u1").data if flat.size else b"")
    return hasher.hexdigest()


def merkle_root(leaves: Iterable[str]) -> str:
    """One digest over many, of which any leaf can be proved with log(n) others.

    A leaf without a partner moves up unchanged; leaves and nodes are hashed under different
    names, so no list of leaves has the root of another.
    """
    level = [digest("leaf", leaf) for leaf in leaves]
    while len(level) > 1:
        pairs = [digest("node", a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0] if level else digest("empty")


def _tagged(tag: bytes, body: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(body), body)
