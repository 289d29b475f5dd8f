"""One try of one call: bytes to a server and back, every network fault as a typed outcome.

The only module that knows aiohttp. One session an endpoint, all on the pool's loop.
"""

import base64
import os
import ssl
import urllib.request
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.loop import in_thread
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.calls.wire import ollama, openai
from batchwright.errors import ConfigError, NoServer

__all__ = ["FunctionTransport", "HttpTransport", "Transport", "connect"]

LIST_S = 10.0
"""How long a server may take to list its models."""
MOST_BODY_BYTES = 256 * 2**20
"""An answer that goes on for longer than this is not one."""


class Transport(Protocol):
    """What the pool needs of an endpoint."""

    async def send(self, request: Request) -> Outcome:
        """One try. Only cancellation leaves it as an exception."""

    async def close(self) -> None: ...


async def connect(endpoint: Endpoint) -> Transport:
    """The transport for an endpoint; to be called on the loop that will use it."""
    if endpoint.remote:
        return HttpTransport(endpoint)
    # A model may take seconds to load, and other endpoints go on meanwhile.
    return await in_thread(lambda: FunctionTransport(endpoint))


class HttpTransport:
    """Calls to a server by aiohttp."""

    def __init__(self, endpoint: Endpoint) -> None:
        of_ollama = endpoint.protocol == "ollama"
        self._encode = ollama.encode if of_ollama else openai.encode
        self._decode = ollama.decode if of_ollama else openai.decode
        self._name = endpoint.name
        self._model = endpoint.model
        self._key = endpoint.api_key()
        self._base = endpoint.base
        self._urls: dict[str, URL] = {}
        headers = {"Content-Type": "application/json"}
        connector: aiohttp.BaseConnector
        # aiohttp would look the proxy up in a thread for every single call.
        self._proxy: URL | None = None
        self._proxy_headers: dict[str, str] | None = None
        if endpoint.socket is not None:
            connector = aiohttp.UnixConnector(path=endpoint.socket, limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, ssl=_tls(endpoint))
            self._proxy, password = _proxy(endpoint.base)
            if self._base.startswith("https:"):
                self._proxy_headers = password
            else:
                # Without a tunnel the proxy reads the call itself.
                headers |= password
        # aiohttp tells a proxy whatever stands in the headers of the session, a key too.
        self._headers: dict[str, str] | None = None
        if self._key and self._proxy is None:
            headers["Authorization"] = f"Bearer {self._key}"
        elif self._key:
            self._headers = {"Authorization": f"Bearer {self._key}"}
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            # The pool's limit and its deadlines stand above this; a second clock would only cost.
            timeout=aiohttp.ClientTimeout(),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def send(self, request: Request) -> Outcome:
        try:
            if self._model is not None and self._model != request.model:
                body = {**request.body, "model": self._model}
                request = Request(request.kind, body, request.draw, request.salt)
            path, data = self._encode(request)
        except ConfigError as error:
            return Failed(Kind.HTTP_4XX, str(error), endpoint=self._name)
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base + path)
        begun = False
        try:
            response = await self._session.post(
                url,
                data=data,
                headers=self._headers,
                allow_redirects=False,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
            )
            begun = True
            try:
                body_bytes = await _whole(response)
            finally:
                response.release()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                # aiohttp has no clock here, so this is the system's own for connecting.
                return Failed(Kind.UNREACHABLE, f"no connection to {self._name} in time")
            kind, text = _fault(error, begun, self._name)
            return Failed(kind, openai.scrub(text, request, self._key))
        outcome = self._decode(request, response.status, response.headers, body_bytes)
        if self._key and isinstance(outcome, Failed) and self._key in outcome.error:
            return Failed(
                outcome.kind,
                openai.scrub(outcome.error, request, self._key),
                outcome.status,
                retry_after_s=outcome.retry_after_s,
            )
        return outcome

    async def close(self) -> None:
        await self._session.close()

    async def models(self) -> list[str] | None:
        """The names of the models there; None if the server does not say.

        Raises:
            NoServer: nobody answers at the address.
        """
        path = self._base + ("/api/tags" if self._decode is ollama.decode else "/models")
        try:
            async with self._session.get(
                URL(path),
                headers=self._headers,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
                timeout=aiohttp.ClientTimeout(total=LIST_S),
            ) as response:
                listed = await response.json(content_type=None) if response.status == 200 else None
        except ValueError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            _, text = _fault(error, False, self._name)
            raise NoServer(f"{text}; start the server, or check its address") from None
        rows = listed.get("data", listed.get("models")) if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            return None
        names = (row.get("id") or row.get("name") for row in rows if isinstance(row, dict))
        return [str(name) for name in names if name]


class FunctionTransport:
    """Calls to a function of this process, several at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        from batchwright.calls.wire.batcher import MicroBatcher, local_model

        function = endpoint.function
        if function is None:
            function = local_model(endpoint.base)
        self._batcher = MicroBatcher(function, endpoint.batch, name=endpoint.name)

    async def send(self, request: Request) -> Outcome:
        return await self._batcher(request)

    async def close(self) -> None:
        # It waits for the batch that runs.
        await in_thread(self._batcher.close)


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    size = response.content_length
    if size is not None and size <= MOST_BODY_BYTES:
        return await response.read()
    parts, total = [], 0
    async for part in response.content.iter_any():
        total += len(part)
        if total > MOST_BODY_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer goes on after {total:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _fault(error: Exception, begun: bool, name: str) -> tuple[Kind, str]:
    """The kind of a network fault, and a sentence about it."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Kind.UNREACHABLE, f"the host of {name} has no address; check its name"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        reason = getattr(error, "certificate_error", None) or error
        return Kind.UNREACHABLE, f"no safe connection to {name}: {reason}"
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return Kind.UNREACHABLE, f"the proxy for {name} cannot be reached: {_reason(error)}"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Kind.UNREACHABLE, f"the proxy for {name} answered {error.status}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return Kind.UNREACHABLE, f"no connection to {name}: {_reason(error)}"
    if isinstance(error, aiohttp.ClientPayloadError) or begun:
        return Kind.TRUNCATED, f"the answer of {name} broke off"
    if isinstance(error, aiohttp.ClientResponseError | ValueError):
        return Kind.BAD_BODY, f"{name} does not answer in HTTP"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return Kind.UNREACHABLE, f"{name} closed the connection before it answered"
    return Kind.UNREACHABLE, f"no answer of {name}: {_reason(error)}"


def _reason(error: Exception) -> str:
    inner = getattr(error, "os_error", error)
    number = getattr(inner, "errno", None)
    # asyncio's own words name the address instead of the reason.
    return os.strerror(number) if number else type(inner).__name__


def _tls(endpoint: Endpoint) -> ssl.SSLContext | bool:
    """The system's certificates, or in their place the ones that SSL_CERT_FILE holds."""
    if not endpoint.base.startswith("https:"):
        return True
    file = os.environ.get("SSL_CERT_FILE")
    if file and not os.path.exists(file):
        raise ConfigError(f"SSL_CERT_FILE names {file}, which is not there; correct or unset it")
    return ssl.create_default_context(cafile=file or None)


def _proxy(base: str) -> tuple[URL | None, dict[str, str]]:
    """The proxy that the environment names for an address, and the header it wants."""
    parts = urlsplit(base)
    found = urllib.request.getproxies()
    text = found.get(parts.scheme) or found.get("all")
    if not text or urllib.request.proxy_bypass(parts.netloc):
        return None, {}
    proxy = URL(text if "://" in text else f"http://{text}")
    if proxy.scheme not in ("http", "https"):
        raise ConfigError(
            f"a {proxy.scheme} proxy for {parts.hostname} is not supported; "
            f"name an http proxy, or put the host into NO_PROXY"
        )
    headers: dict[str, str] = {}
    if proxy.user is not None:
        words = f"{proxy.user}:{proxy.password or ''}".encode()
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(words).decode()
    return proxy.with_user(None), headers
