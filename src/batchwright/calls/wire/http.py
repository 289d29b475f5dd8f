"""One try of one call over HTTP: bytes to a server and back, every fault as a typed outcome.

The only module that uses aiohttp. One session per endpoint, all on the pool's loop.
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
from batchwright.calls.loop import in_thread, unforked
from batchwright.calls.outcome import Failed, Kind, Outcome
from batchwright.calls.request import Request
from batchwright.calls.wire import ollama, openai
from batchwright.errors import ConfigError, NoServer

__all__ = ["FunctionTransport", "HttpTransport", "Transport", "connect"]

LIST_S = 10.0
"""How long a server may take to list its models."""
MOST_BODY_BYTES = 256 * 2**20
"""A longer response is not read to its end."""


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
                body_bytes = await _whole(response)
            finally:
                response.release()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                # aiohttp has no timeout here, so this is the system's own for connecting.
                return Failed(Kind.UNREACHABLE, f"timeout while connecting to {self._name}")
            kind, text = _fault(error, responding, self._name)
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
        """The names of the server's models; None if it does not list them.

        Raises:
            NoServer: it cannot be reached.
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
                body = await response.json(content_type=None) if response.status == 200 else None
        except ValueError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            _, text = _fault(error, False, self._name)
            raise NoServer(f"{text}; start the server, or check its address") from None
        rows = body.get("data", body.get("models")) if isinstance(body, dict) else None
        if not isinstance(rows, list):
            return None
        names = (row.get("id") or row.get("name") for row in rows if isinstance(row, dict))
        return [str(name) for name in names if name]


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


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    size = response.content_length
    if size is not None and size <= MOST_BODY_BYTES:
        return await response.read()
    parts, total = [], 0
    async for part in response.content.iter_any():
        total += len(part)
        if total > MOST_BODY_BYTES:
            raise aiohttp.ClientPayloadError(f"the response is longer than {total:,} bytes")
        parts.append(part)
    return b"".join(parts)


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
    proxy = URL(text if "://" in text else f"http://{text}")
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
