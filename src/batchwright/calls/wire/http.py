"""One try of one call over HTTP: bytes to a server and back, every fault as a typed outcome.

The only module that uses aiohttp. One session per endpoint, all on the pool's loop.
"""

import asyncio
import base64
import io
import os
import ssl
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.loop import in_thread, unforked
from batchwright.calls.outcome import Failed, Kind, Outcome, parse_body
from batchwright.calls.request import Request
from batchwright.calls.wire import ollama, openai
from batchwright.calls.wire.masking import Mask
from batchwright.errors import ConfigError, NoServer

__all__ = ["Exchange", "FunctionTransport", "HttpTransport", "Transport", "Unanswered", "connect"]

LONGEST_NAME = 200
"""Characters of a model's name that are kept."""
LIST_S = 10.0
"""How long a server may take to list its models."""
MOST_LIST_BYTES = 4 * 2**20
"""Of the list of a server's models."""
MOST_BODY_BYTES = 32 * 2**20
"""The longest response of a chat or completion call, decompressed; a longer one is not read."""
VECTOR_BYTES = 128 * 2**10
"""So much longer it may be for each text of an embedding call: 5,000 numbers in full length."""
MOST_ERROR_BYTES, MOST_ERROR_S = 16 * 2**10, 2.0
"""So much is read of a response that is an error, and for so long: its status says the rest."""
IDLE_S = 0.2
"""An idle connection to a server without TLS is closed after so long, because some servers keep a
thread for each that is open: llama.cpp has two more than slots, and with idle ones at all of them
it leaves the other connections alone for seconds. To make a connection without TLS costs nothing.
"""
PIECE_BYTES = 2**20
"""Decompressed at a time, so that neither the memory nor the loop belongs to a server."""


class Exchange(NamedTuple):
    """What a server responded with."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Unanswered(Exception):
    """No whole response came; the message says why."""


class Transport(Protocol):
    """What the engine needs of an endpoint."""

    async def send(self, request: Request) -> Outcome:
        """One try. Only cancellation leaves it as an exception."""

    async def close(self) -> None: ...


async def connect(endpoint: Endpoint) -> Transport:
    """The transport for an endpoint; to be called on the loop that will use it."""
    if endpoint.remote:
        return HttpTransport(endpoint)
    # A model may take seconds to load; other endpoints keep working meanwhile.
    return await in_thread(lambda: FunctionTransport(endpoint))


class _BadBody(Exception):
    """A body that is not read: too long, or compressed in a way that was not asked for."""


class HttpTransport:
    """Calls to a server by aiohttp.

    A response is read up to `MOST_BODY_BYTES`, an error up to `MOST_ERROR_BYTES`. No redirect is
    followed: the API key goes to the address that was given and nowhere else.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        of_ollama = endpoint.protocol == "ollama"
        self._encode = ollama.encode if of_ollama else openai.encode
        self._decode = ollama.decode if of_ollama else openai.decode
        self._name = endpoint.name
        self._model = endpoint.model
        self._key = endpoint.api_key()
        self._mask = Mask.of(endpoint)
        self._base = endpoint.url
        self._urls: dict[str, URL] = {}
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate"}
        connector: aiohttp.BaseConnector
        # aiohttp would look the proxy up in a thread for every single call.
        self._proxy: URL | None = None
        self._proxy_headers: dict[str, str] | None = None
        if endpoint.socket is not None:
            connector = aiohttp.UnixConnector(
                path=endpoint.socket, limit=0, keepalive_timeout=IDLE_S
            )
        else:
            self._proxy, password = _proxy(endpoint.base)
            if self._base.startswith("https:"):
                connector = aiohttp.TCPConnector(limit=0, ssl=_tls(endpoint))
                self._proxy_headers = password
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
                # Without a tunnel the proxy reads the request itself.
                headers |= password
        # aiohttp sends the headers of the session to a proxy, an API key too.
        self._headers: dict[str, str] | None = None
        if self._key and self._proxy is None:
            headers["Authorization"] = f"Bearer {self._key}"
        elif self._key:
            self._headers = {"Authorization": f"Bearer {self._key}"}
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            # The engine limits concurrency and time; a second timeout would only cost.
            timeout=aiohttp.ClientTimeout(),
            cookie_jar=aiohttp.DummyCookieJar(),
            # aiohttp would decompress a kilobyte to a megabyte before anybody could count.
            auto_decompress=False,
        )

    async def send(self, request: Request) -> Outcome:
        try:
            if self._model is not None and self._model != request.model:
                body = {**request.body, "model": self._model}
                request = Request(request.kind, body, request.draw, request.salt)
            path, data = self._encode(request)
        except ConfigError as error:
            return Failed(Kind.HTTP_4XX, str(error), endpoint=self._name, unsent=True)
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base + path)
        responding = False
        try:
            response = await self._session.post(
                url,
                data=data,
                headers=self._headers,
                allow_redirects=False,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
            )
            responding = True
            try:
                if response.status == 200:
                    body_bytes = await _whole(response, _most(request))
                else:
                    body_bytes = await _beginning(response)
            finally:
                response.release()
        except _BadBody as error:
            return Failed(Kind.BAD_BODY, str(error), response.status)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                # aiohttp has no timeout here, so this is the system's own for connecting.
                text = f"timeout while connecting to {self._name}"
                return Failed(Kind.UNREACHABLE, text, unsent=True)
            kind, text = _fault(error, responding, self._name)
            unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientHttpProxyError)
            return Failed(kind, openai.scrub(self._mask.hide(text), request), unsent=unsent)
        headers: Mapping[str, str] = response.headers
        if response.status != 200:
            # Before it is cut to a line, which could leave half of a key.
            body_bytes = self._mask.hide_in(body_bytes)
            headers = CIMultiDict((n, self._mask.hide(v)) for n, v in headers.items())
        elif self._mask.is_in(body_bytes):
            why = "the response repeats the API key, which would be stored with it"
            return Failed(Kind.BAD_BODY, why, 200)
        outcome = self._decode(request, response.status, headers, body_bytes)
        if (
            isinstance(outcome, Failed)
            and (shown := self._mask.hide(outcome.error)) != outcome.error
        ):
            after = outcome.retry_after_s
            return Failed(outcome.kind, shown, outcome.status, retry_after_s=after)
        return outcome

    async def close(self) -> None:
        await self._session.close()

    async def exchange(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        content_type: str = "application/json",
        *,
        timeout_s: float,
        most_bytes: int = MOST_LIST_BYTES,
        root: bool = False,
    ) -> Exchange:
        """One request that is no call, such as for a list, below the base URL or, by `root`, the
        server's root.

        Raises:
            Unanswered: no whole response came; the server may have acted on the request.
            ValueError: the response is longer than `most_bytes`, or compressed in a way that was
                not asked for.
        """
        base = str(URL(self._base).origin()) if root else self._base
        given = {} if data is None else {"Content-Type": content_type}
        responding = False
        try:
            async with self._session.request(
                method,
                URL(base + path),
                # From a stream, so that a large file does not block the loop.
                data=None if data is None else io.BytesIO(data),
                headers={**(self._headers or {}), **given},
                allow_redirects=False,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                responding = True
                if response.status < 300:
                    body = await _whole(response, most_bytes)
                else:
                    body = await _beginning(response)
                if response.status >= 300:
                    body = self._mask.hide_in(body)
                return Exchange(response.status, response.headers, body)
        except _BadBody as error:
            raise ValueError(f"{self._name}: {error}") from None
        except TimeoutError:
            raise Unanswered(f"no response of {self._name} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _, text = _fault(error, responding, self._name)
            raise Unanswered(self._mask.hide(text)) from None

    async def models(self) -> list[str] | None:
        """The names of the server's models; None if it does not list them.

        Raises:
            NoServer: it cannot be reached, or is taken for an Ollama and is none.
        """
        is_ollama = self._decode is ollama.decode
        path = "/api/tags" if is_ollama else "/models"
        try:
            response = await self.exchange("GET", path, timeout_s=LIST_S)
            body = parse_body(response.body) if response.status == 200 else None
        except ValueError:
            return None
        except Unanswered as error:
            raise NoServer(f"{error}; start the server, or check its address") from None
        if is_ollama and response.status == 404:
            # Every Ollama has it; here each call would fail the same way.
            raise NoServer(
                f"the server at {self._name} is no Ollama: it has no {path}; one that speaks "
                f"OpenAI's protocol, as llama.cpp and vLLM do, is written http://HOST:PORT/v1"
            )
        rows = body.get("data", body.get("models")) if isinstance(body, dict) else None
        if not isinstance(rows, list):
            return None
        names = (row.get("id") or row.get("name") for row in rows if isinstance(row, dict))
        return [self._mask.hide(str(name))[:LONGEST_NAME] for name in names if name]


class FunctionTransport:
    """Calls to a function of this process, several at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        with unforked():
            # Loading a model imports libraries for seconds.
            from batchwright.calls.wire.batcher import MicroBatcher, local_model

            function = endpoint.function
            if function is None:
                function = local_model(endpoint.base)
        self._batcher = MicroBatcher(function, endpoint.batch, name=endpoint.name)

    async def send(self, request: Request) -> Outcome:
        return await self._batcher(request)

    async def close(self) -> None:
        # It waits for the running batch.
        await in_thread(self._batcher.close)


def _most(request: Request) -> int:
    """The longest response that a request may have."""
    given = request.body.get("input")
    texts = len(given) if isinstance(given, list) else 1
    return MOST_BODY_BYTES + (VECTOR_BYTES * texts if request.kind == "embed" else 0)


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, decompressed.

    Raises:
        _BadBody: it has more than `most` bytes, or an encoding that was not asked for.
    """
    size = response.content_length
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if size is not None and size > most:
        raise _BadBody(_too_long(most))
    plain = encoding in ("", "identity")
    if plain and size is not None and "Transfer-Encoding" not in response.headers:
        return await response.read()
    unpack = None if plain else _Unpacker(encoding)
    parts, total = [], 0
    async for part in response.content.iter_any():
        for piece in (part,) if unpack is None else unpack(part):
            total += len(piece)
            if total > most:
                raise _BadBody(_too_long(most))
            parts.append(piece)
            if unpack is not None:
                # A bomb is many pieces of one part: others get their turn, and the deadline too.
                await asyncio.sleep(0)
    if unpack is not None and not unpack.whole:
        raise aiohttp.ClientPayloadError("the compressed response was cut off")
    return b"".join(parts)


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """What an error says first; a connection that fails or dawdles meanwhile does not matter."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    found = b""
    try:
        unpack = None if encoding in ("", "identity") else _Unpacker(encoding)
        async with asyncio.timeout(MOST_ERROR_S):
            async for part in response.content.iter_any():
                for piece in (part,) if unpack is None else unpack(part):
                    found += piece[:MOST_ERROR_BYTES]
                    if len(found) >= MOST_ERROR_BYTES:
                        return found[:MOST_ERROR_BYTES]
    except (aiohttp.ClientError, OSError, ValueError, _BadBody):
        pass
    return found


def _too_long(most: int) -> str:
    return f"the response is longer than {most:,} bytes and was not read"


class _Unpacker:
    """Decompresses a stream, a piece of `PIECE_BYTES` at a time."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            # Nothing else is repeated: a header may hold anything, a key too.
            what = encoding if encoding in ("br", "zstd", "compress") else "nobody knows"
            raise _BadBody(f"the response is encoded as {what}, which was not asked for")
        self.encoding = encoding
        self.whole = False
        self._stream: zlib._Decompress | None = None

    def __call__(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:
                # Some servers send deflate without the header of zlib.
                bare = self.encoding == "deflate" and data[0] & 15 != 8
                bits = -15 if bare else 15 if self.encoding == "deflate" else 31
                self._stream, self.whole = zlib.decompressobj(bits), False
            try:
                yield self._stream.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise _BadBody(f"the response is not {self.encoding}, as it says") from None
            data = self._stream.unconsumed_tail
            if self._stream.eof:
                # Another member may follow.
                data, self._stream, self.whole = self._stream.unused_data, None, True


def _fault(error: Exception, responding: bool, name: str) -> tuple[Kind, str]:
    """The kind of a network fault, and its message."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Kind.UNREACHABLE, f"the host of {name} cannot be resolved (DNS); check its name"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        reason = getattr(error, "certificate_error", None) or error
        return Kind.UNREACHABLE, f"TLS connection to {name} failed: {reason}"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return Kind.UNREACHABLE, f"the proxy for {name} cannot be reached: {_reason(error)}"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Kind.UNREACHABLE, f"the proxy for {name} responded with status {error.status}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return Kind.UNREACHABLE, f"cannot connect to {name}: {_reason(error)}"
    if isinstance(error, aiohttp.ClientPayloadError) or responding:
        return Kind.TRUNCATED, f"the response of {name} was cut off"
    if isinstance(error, aiohttp.ClientResponseError | ValueError):
        return Kind.BAD_BODY, f"{name} does not speak HTTP"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return Kind.UNREACHABLE, f"{name} closed the connection without a response"
    return Kind.UNREACHABLE, f"no response of {name}: {_reason(error)}"


def _reason(error: Exception) -> str:
    inner = getattr(error, "os_error", error)
    number = getattr(inner, "errno", None)
    # asyncio's own message has the address instead of the reason.
    return os.strerror(number) if number else type(inner).__name__


def _tls(endpoint: Endpoint) -> ssl.SSLContext | bool:
    """The system's certificates, or those in SSL_CERT_FILE instead."""
    if not endpoint.base.startswith("https:"):
        return True
    file = os.environ.get("SSL_CERT_FILE")
    if file and not os.path.exists(file):
        raise ConfigError(f"SSL_CERT_FILE={file} does not exist; correct or unset it")
    return ssl.create_default_context(cafile=file or None)


def _proxy(base: str) -> tuple[URL | None, dict[str, str]]:
    """The proxy for an address from the environment, and the header it needs."""
    parts = urlsplit(base)
    found = urllib.request.getproxies()
    text = found.get(parts.scheme) or found.get("all")
    if not text or urllib.request.proxy_bypass(parts.netloc):
        return None, {}
    try:
        proxy = URL(text if "://" in text else f"http://{text}")
    except ValueError:
        # Its message may repeat a password.
        raise ConfigError(
            f"the proxy that the environment gives for {parts.hostname} is not an address; "
            f"write http://host:port, or unset {parts.scheme}_proxy"
        ) from None
    if proxy.scheme not in ("http", "https"):
        raise ConfigError(
            f"a {proxy.scheme} proxy for {parts.hostname} is not supported; "
            f"set an http proxy, or add the host to NO_PROXY"
        )
    headers: dict[str, str] = {}
    if proxy.user is not None:
        login = f"{proxy.user}:{proxy.password or ''}".encode()
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(login).decode()
    return proxy.with_user(None), headers
