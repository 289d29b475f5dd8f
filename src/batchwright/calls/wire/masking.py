"""Secrets in what a server sends back: found and hidden, in the ways that servers write them."""

import base64
import re
from urllib.parse import unquote, urlsplit

from batchwright.calls.endpoints import Endpoint

__all__ = ["KEY_CHARACTERS", "Mask"]

KEY_CHARACTERS = 16
"""A shorter key may be in a response by chance, which is then not refused."""
PART_CHARACTERS = 6
"""A shorter part of an address may be in an error by chance, which is then not hidden."""
HIDDEN = "..."


class Mask:
    r"""The API key of an endpoint and what its address hides, as a server may repeat them.

    That is as they are, in base64 (of a longer text too, such as `Bearer KEY`), in hexadecimal
    digits, and with any of their characters escaped as in an address, in JSON or in HTML.

    >>> Mask("sk-0123456789abcdef").hide("401: sk%2D0123456789abcdef is no key")
    '401: ... is no key'
    """

    def __init__(self, *secrets: str) -> None:
        found = []
        for secret in filter(None, secrets):
            coded = [re.escape(form) for form in _coded(secret)]
            found += [_escaped(secret), *coded, _spaced_hex(secret)]
        pattern = "|".join(found) or "(?!)"
        self._text, self._raw = re.compile(pattern), re.compile(pattern.encode())
        self._literal = [
            form.encode()
            for secret in secrets
            if len(secret) >= KEY_CHARACTERS
            for form in {secret, *_coded(secret)}
        ]

    @classmethod
    def of(cls, endpoint: Endpoint) -> "Mask":
        shown = set(endpoint.name.split("/"))
        parts = urlsplit(endpoint.url).path.split("/") if endpoint.remote else []
        own = [p for p in parts if p not in shown and len(p) >= PART_CHARACTERS]
        return cls(endpoint.api_key() or "", *map(unquote, own))

    def hide(self, text: str) -> str:
        return self._text.sub(HIDDEN, text)

    def hide_in(self, raw: bytes) -> bytes:
        return self._raw.sub(HIDDEN.encode(), raw)

    def is_in(self, raw: bytes) -> bool:
        """Whether a long secret stands there, as it is, encoded or with characters escaped."""
        if not self._literal:
            return False
        texts = [raw]
        if b"\\" in raw:
            texts.append(raw.replace(b"\\", b""))
        if any(sign in raw for sign in _SIGNS):
            # In one pass each, so that no body is hostile: patterns of all ways would try them all.
            once = _ESCAPE.sub(_unescaped, raw).replace(b"\\", b"")
            texts += [once, _ESCAPE.sub(_unescaped, once)]
        return any(form in text for form in self._literal for text in texts)


_SIGNS = (b"\\u00", b"\\x", b"%", b"&#")
_ESCAPE = re.compile(
    rb"(?i)(?:\\u00|\\x|%(?:25)*)(?P<hex>[0-9a-f]{2})|&#x0*(?P<short>[0-9a-f]{1,2});"
    rb"|&#0*(?P<number>[0-9]{1,3});"
)


def _unescaped(match: re.Match[bytes]) -> bytes:
    digits = match["hex"] or match["short"]
    code = int(digits, 16) if digits else int(match["number"])
    return bytes([code]) if code < 256 else match[0]


def _escaped(secret: str) -> str:
    def one(char: str) -> str:
        code = f"{ord(char):02x}"
        ways = rf"%(?:25)*{code}|\\+(?:u00|x){code}|\\+0?{ord(char):o}"
        ways += rf"|&#(?:0*{ord(char)}|x0*{code});"
        return rf"(?:\\*{re.escape(char)}|(?i:{ways}))"

    return "".join(map(one, secret))


def _coded(secret: str) -> list[str]:
    """What stays the same in base64 and in hexadecimal digits, whatever is around."""
    raw = secret.encode()
    found = [raw.hex(), raw.hex().upper()]
    for before in range(3):
        text = base64.b64encode(bytes(before) + raw).decode().rstrip("=")
        # The first and the last character depend on what stands beside the secret too.
        core = text[(0, 2, 3)[before] : -1]
        if len(core) >= PART_CHARACTERS:
            found += [core, core.translate(str.maketrans("+/", "-_"))]
    return list(dict.fromkeys(found))


def _spaced_hex(secret: str) -> str:
    """A pattern of hexadecimal digits with something between each two."""
    return "(?i:" + "[ :,-]".join(f"{byte:02x}" for byte in secret.encode()) + ")"
