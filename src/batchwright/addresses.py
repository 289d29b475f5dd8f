"""Keys in the addresses of servers: refused in settings that are written down, hidden elsewhere."""

import hashlib
import re

from batchwright.errors import ConfigError

__all__ = ["refuse_secret", "without_secrets"]

SECRET = re.compile(
    r"(?=[^/]*\d)(?=[^/]*[A-Za-z])"
    r"(?:sk-[^/]{8,}|[^/]*[A-Za-z0-9]{16,}[^/]*|[^/]*[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}[^/]*)"
)
"""A part of a path that is a key rather than a word: sixteen letters and digits, a UUID, sk-..."""


def refuse_secret(name: str, value: str) -> None:
    """Refuse a setting that is written into a run directory and has a key in its address.

    >>> refuse_secret("target_model", "http://gpu0:8000/${KEY}/v1#m")
    >>> refuse_secret("target_model", "http://gpu0:8000/sk-0123456789abcdef/v1#m")
    Traceback (most recent call last):
    batchwright.errors.ConfigError: target_model has what looks like a key in the path of \
its address, which the run directory would keep; export it and write ${NAME} in its place
    """
    place = value.partition("://")[2].partition("/")[0]
    if "@" in place or ("://" in value and "?" in value):
        raise ConfigError(
            f"{name} has a user, a password or a query in its address; give the address alone, "
            f"and the API key in the environment"
        )
    if "://" in value and without_secrets(value) != value:
        raise ConfigError(
            f"{name} has what looks like a key in the path of its address, which the run directory "
            f"would keep; export it and write ${{NAME}} in its place"
        )


def without_secrets(url: str) -> str:
    """An address with the keys in its path replaced by a few digits of their hashes.

    >>> without_secrets("https://example.com/sk-0123456789abcdef/v1")
    'https://example.com/...221df4/v1'
    >>> without_secrets("https://example.com/openai/deployments/gpt-4o-mini-2024-07-18")
    'https://example.com/openai/deployments/gpt-4o-mini-2024-07-18'
    """
    scheme, mark, rest = url.rpartition("://")
    place, *path = rest.split("/")
    shown = [
        f"...{hashlib.sha256(part.encode()).hexdigest()[:6]}" if SECRET.fullmatch(part) else part
        for part in path
    ]
    return scheme + mark + "/".join([place, *shown])
