"""Where calls go: a server by its address, or a function of this process."""

import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from batchwright.addresses import without_secrets
from batchwright.calls.request import Request
from batchwright.errors import ConfigError

__all__ = [
    "BatchFunction",
    "Endpoint",
    "parse_model",
    "scope_of",
]

BatchFunction = Callable[[Sequence[Request]], Sequence[Mapping[str, Any] | str | Exception]]
"""A response for each request: a text, a body in the OpenAI format, or an exception."""

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
Protocol = Literal["openai", "ollama", "function", "local"]

NAMELESS = "nameless-"
"""How the identity of a function begins that only this process can tell from others."""
OLLAMA_PORT = 11434
OLLAMA_NAME = re.compile(r"(?!local:|ollama:)[\w.-]+(?:/[\w.-]+)*(?::[\w.-]+)?", re.ASCII)
"""A model's name as Ollama writes it, with a tag or without: `qwen2.5:3b`."""


@dataclass(frozen=True, slots=True, init=False)
class Endpoint:
    """One server or function, and its protocol.

    `http://host:8000/v1` is OpenAI-compatible (`/v1` is added to an address without a path),
    `ollama://host:11434` speaks Ollama's own protocol, `unix:///path.sock` is an OpenAI-compatible
    server on a socket file, `local:smollm2` and `local:PATH` are models inside this process, and a
    function is called with up to `batch` requests at a time.

    An API key is read from the environment variable `key_env`, which must be set then. Without
    `key_env`, OPENAI_API_KEY is sent if it is set, but to `https` addresses only: a key that is
    in the environment for one service is not sent to every server. `key_env=""` sends none. A key
    in the path of an address is `${NAME}`, a variable of the environment, in its place.
    `model` replaces the model's name in every request sent here.

    Cached responses belong to the model's name and to the `identity` of the endpoint. By default
    that is the address of an https service, so that its responses are not those of a stand-in;
    the name or path of a local model; module and name of a function, or the `name` given here. A
    lambda, a closure, a partial, a method or an object without such a `name` is known to this
    `Endpoint` only, so that no later run is given what another one of its kind responded.
    Servers by http, on a socket and of Ollama come and go under many addresses, so they have
    none: give an `identity` where one name means different weights.

    >>> Endpoint("ollama://gpu0")
    Endpoint('ollama://gpu0:11434')
    >>> Endpoint("http://gpu0:8000").identity, Endpoint("http://gpu0:8000", model="b").identity
    ('', ' model=b')
    >>> Endpoint("https://api.example.com/v1").identity
    'https://api.example.com/v1'
    """

    name: str
    """Its name in outcomes, events and statistics; never holds a secret."""
    protocol: Protocol
    base: str
    """The base URL, with the names of variables, or the name or folder of a local model."""
    socket: str | None
    """The socket file to connect to."""
    model: str | None
    key_env: str | None
    function: BatchFunction | None
    batch: int
    identity: str
    """Which model responds, where the name in a request does not say it; part of cache keys."""

    def __init__(
        self,
        target: str | BatchFunction,
        *,
        key_env: str | None = None,
        model: str | None = None,
        name: str | None = None,
        batch: int = 32,
        identity: str | None = None,
    ) -> None:
        protocol: Protocol
        base, socket, function = "", None, None
        if not isinstance(target, str):
            protocol, function = "function", target
            shown = getattr(target, "__name__", type(target).__name__)
        elif target.startswith("local:") and target != "local:":
            protocol, base, shown = "local", target.removeprefix("local:"), target
        else:
            protocol, base, socket, shown = _address(target)
        if batch < 1:
            raise ConfigError(f"batch must be at least 1, got {batch}")
        if identity is None:
            identity = _identity(protocol, base, function, name)
        if model is not None:
            identity += f" model={model}"
        fields = (name or shown, protocol, base, socket, model, key_env, function, batch, identity)
        for field, value in zip(self.__slots__, fields, strict=True):
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r})"

    @property
    def address(self) -> str:
        """Where it is, whatever its name: what is learned about it is saved under this."""
        return self.socket or without_secrets(self.base)

    @property
    def url(self) -> str:
        """The base URL with the values of its variables, read at the moment of use."""
        return VARIABLE.sub(_variable, self.base)

    @property
    def nameless(self) -> bool:
        """Whether its responses can be found in a cache through this object only."""
        return self.identity.startswith(f"function:{NAMELESS}")

    @property
    def remote(self) -> bool:
        return self.protocol in ("openai", "ollama")

    def api_key(self) -> str | None:
        """The key itself, read at the moment of use and stored nowhere.

        White space around it, such as the line break of a file it was read from, is not sent.
        """
        variable = self.key_env
        if variable is None:
            if self.protocol != "openai" or not self.base.startswith("https:"):
                return None
            variable = "OPENAI_API_KEY"
        if not variable:
            return None
        key = os.environ.get(variable, "").strip()
        if not key and self.key_env is not None:
            raise ConfigError(
                f"the environment variable {self.key_env} for {self.name} is not set; "
                f"export it, or leave key_env out"
            )
        if not (key.isascii() and key.isprintable()):
            # Not the key itself: it is one, though a damaged one.
            raise ConfigError(
                f"the API key in {variable} holds a line break or another character that no "
                f"header may have; export it again, on one line and in ASCII"
            )
        return key or None


def _identity(
    protocol: Protocol, base: str, function: BatchFunction | None, name: str | None
) -> str:
    if protocol == "local":
        # A folder or file by any spelling; a name of the registry is no path.
        return "local:" + (os.path.realpath(base) if "/" in base else base)
    if function is not None:
        return f"function:{name or _qualified(function) or NAMELESS + uuid.uuid4().hex}"
    return without_secrets(base) if base.startswith("https:") else ""


def _qualified(function: Any) -> str | None:
    """A name that means the same function in every process; None where a name says too little.

    What a lambda, a closure, a partial, a method or an object does depends on more than its name.
    """
    if not isinstance(function, FunctionType) or "<" in function.__qualname__:
        return None
    module = function.__module__
    if module == "__main__":
        # Every script has this name.
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None:
            return None
        module = os.path.realpath(file)
    return f"{module}.{function.__qualname__}"


def scope_of(endpoints: Iterable[Endpoint]) -> str:
    """What the cached responses of a pool depend on besides the request; often nothing.

    Any of the endpoints may respond, so all their identities are in it: a pool over two models
    shares no response with a pool over one of them.
    """
    found = sorted({endpoint.identity for endpoint in endpoints})
    return "" if found == [""] else json.dumps(found)


def parse_model(text: str) -> tuple[Endpoint, str]:
    """An endpoint and a model's name from one string.

    A name with a tag such as `qwen2.5:3b`, and `ollama:NAME`, is a model of the Ollama server of
    this machine (or of OLLAMA_HOST), `URL#NAME` one of any server, `local:smollm2` or `local:PATH`
    one inside this process, `sim` the simulator, started in a process of its own.

    >>> parse_model("http://gpu0:8000/v1#judge")
    (Endpoint('http://gpu0:8000/v1'), 'judge')
    >>> parse_model("qwen2.5:3b")[1], parse_model("ollama:qwen2.5:3b")[1]
    ('qwen2.5:3b', 'qwen2.5:3b')
    """
    if text == "sim":
        return Endpoint(_simulator(), key_env="", name="sim"), "sim"
    if text.startswith("local:"):
        return Endpoint(text), text.removeprefix("local:")
    # A word without a tag may be a mistyped setting: only the prefix makes it a model.
    if ":" in text and OLLAMA_NAME.fullmatch(text.removeprefix("ollama:")):
        return Endpoint(_ollama()), text.removeprefix("ollama:")
    url, mark, name = text.rpartition("#")
    if mark and url and name:
        return Endpoint(url), name
    raise ConfigError(
        f"cannot parse the model {_harmless(text)!r}; write ollama:NAME, a name of Ollama with its "
        f"tag such as qwen2.5:3b, URL#NAME, local:smollm2, local:PATH or sim"
    )


def _ollama() -> str:
    """The address of the local Ollama server, or of OLLAMA_HOST as Ollama itself reads it."""
    host = os.environ.get("OLLAMA_HOST", "").strip().strip("\"'") or "localhost"
    scheme, mark, place = host.rpartition("://")
    place = f"localhost{place}" if place.startswith(":") else place
    if mark and ":" not in place.rpartition("]")[2].partition("/")[0]:
        # With a scheme and no port it means the port of the scheme, as in any URL.
        name, slash, path = place.partition("/")
        place = f"{name}:{443 if scheme == 'https' else 80}{slash}{path}"
    return f"ollama+{scheme or 'http'}://{place}"


def _address(target: str) -> tuple[Protocol, str, str | None, str]:
    """Protocol, base URL, socket file and name of an address."""
    try:
        parts = urlsplit(target)
        port = parts.port
    except ValueError:
        # Its message repeats what it could not read, a password too.
        raise ConfigError(
            f"cannot parse the address {_harmless(target)!r}; write http://host:port/v1"
        ) from None
    family, plus, scheme = parts.scheme.rpartition("+")
    if scheme == "ollama" and not plus:
        family, scheme = "ollama", "http"
    if family not in ("", "ollama") or scheme not in ("http", "https", "unix"):
        raise ConfigError(
            f"cannot parse the address {_harmless(target)!r}; write http://host:port/v1, "
            f"https://..., ollama://host:11434, unix:///path.sock, local:smollm2 or local:PATH"
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"the address of {parts.hostname or 'an endpoint'} has a user, a password, a query or "
            f"a fragment; give the address alone, and the API key in an environment variable "
            f"(key_env)"
        )
    path = VARIABLE.sub(_variable, parts.path).rstrip("/")
    # What is shown and stored has the variable's name in the place of its value.
    named = parts.path.rstrip("/")
    if scheme == "unix":
        if not path or parts.netloc:
            raise ConfigError(
                f"the address {_harmless(target)!r} has no socket file; write unix:///path.sock"
            )
        shown = f"unix://{path}"
        if family:
            return "ollama", "http://localhost", unquote(path), "ollama+" + shown
        return "openai", "http://localhost/v1", unquote(path), shown
    host = parts.hostname
    if not host:
        raise ConfigError(
            f"the address {_harmless(target)!r} has no host; write http://host:port/v1"
        )
    host = f"[{host}]" if ":" in host else host
    if family:
        place = f"{host}:{port or OLLAMA_PORT}"
        shown = f"ollama://{place}{named}" if scheme == "http" else f"ollama+https://{place}{named}"
        return "ollama", urlunsplit((scheme, place, named, "", "")), None, without_secrets(shown)
    place = f"{host}:{port}" if port else host
    base = urlunsplit((scheme, place, named or "/v1", "", ""))
    return "openai", base, None, without_secrets(base)


def _variable(match: re.Match[str]) -> str:
    value = os.environ.get(match[1], "").strip()
    if not value:
        raise ConfigError(
            f"the environment variable {match[1]} of an address is not set; export it"
        )
    return quote(value, safe="")


def _harmless(target: str) -> str:
    """What was typed as an address, for an error: no password, query or key, and not too long."""
    before, at, after = target.rpartition("@")
    scheme, mark, _ = before.partition("://")
    shown = f"{scheme}{mark}...@{after}" if at and mark else f"...@{after}" if at else target
    shown = shown.partition("?")[0]
    # Without a scheme the first word may be the key itself.
    return without_secrets(shown if "://" in shown else f"/{shown}").removeprefix("/")[:200]


def _simulator() -> str:
    """The address of a simulator that lives as long as this process."""
    import atexit
    import contextlib

    from batchwright.calls.simulator import Simulator

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(Simulator().running())
