"""Lines to and from a gym server over telnet, TCP or a websocket."""

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from enum import Enum, auto

from batchwright.errors import BadReply, NoServer, one_line
from batchwright.streaming.gym.config import GymConfig, GymTransport

__all__ = ["LineSplitter", "Lines", "connect"]

MAX_LINE = 1 << 20
"""Bytes of a line. Observations have a few thousand; what is longer is not held in memory."""
CHUNK = 1 << 16

IAC, SB, SE, WILL = 255, 250, 240, 251
HELLO = bytes([IAC, 253, 1, IAC, 253, 3, IAC, 252, 34])
"""DO ECHO, DO SUPPRESS-GO-AHEAD, WONT LINEMODE. A client that says nothing at first makes
chuk-puzzles-gym wait for a second; of one that says anything else it loses the first ten bytes."""


class Lines(ABC):
    """A connection that carries lines of text."""

    def __init__(self, telnet: bool) -> None:
        self._splitter = LineSplitter(telnet)
        self._ready: list[str] = []

    @abstractmethod
    async def send(self, *lines: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _chunk(self) -> bytes:
        """What comes next; `NoServer` if the connection has ended."""

    async def receive(self) -> str:
        """The next line without its end; `NoServer` if the connection has ended."""
        while not self._ready:
            self._ready = self._splitter.feed(await self._chunk())[::-1]
        return self._ready.pop()

    async def unasked(self) -> str:
        """Text that has come without being received yet: before a command there should be none."""
        # In the first turn the loop asks the socket, in the second it reads from it.
        for _ in range(2):
            await asyncio.sleep(0)
        if not self._ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    self._ready = self._splitter.feed(await self._chunk())[::-1]
        return self._ready[-1] if self._ready else self._splitter.partial


class LineSplitter:
    r"""Bytes in, lines out; telnet commands are removed, if it is telnet, wherever a chunk is cut.

    >>> splitter = LineSplitter(telnet=True)
    >>> splitter.feed(b"one\r\ntw\xff\xfb")
    ['one']
    >>> splitter.feed(b"\x01o\n")
    ['two']
    """

    def __init__(self, telnet: bool) -> None:
        self._telnet = telnet
        self._partial = bytearray()
        self._state = _Telnet.TEXT

    @property
    def partial(self) -> str:
        """The beginning of a line that has not ended yet."""
        return self._partial.decode(errors="replace")

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that this chunk completes."""
        telnet = self._telnet and (self._state is not _Telnet.TEXT or IAC in chunk)
        self._partial += self._strip(chunk) if telnet else chunk
        *lines, self._partial = self._partial.split(b"\n")
        if max(map(len, (*lines, self._partial))) > MAX_LINE:
            raise BadReply(f"the server sent a line of more than {MAX_LINE:,} bytes; is it a gym?")
        try:
            return [line.rstrip(b"\r").decode() for line in lines]
        except UnicodeDecodeError as error:
            raise BadReply("the server sent bytes that are not UTF-8; is it a gym?") from error

    def _strip(self, chunk: bytes) -> bytes:
        kept = bytearray()
        for byte in chunk:
            if self._state is _Telnet.TEXT and byte != IAC:
                kept.append(byte)
            elif self._state is _Telnet.COMMAND and byte == IAC:
                kept.append(IAC)
                self._state = _Telnet.TEXT
            else:
                self._state = _next(self._state, byte)
        return bytes(kept)


class _Telnet(Enum):
    """What the byte before leads to."""

    TEXT = auto()
    COMMAND = auto()
    OPTION = auto()
    SUBNEGOTIATION = auto()
    SUBNEGOTIATION_IAC = auto()


def _next(state: _Telnet, byte: int) -> _Telnet:
    match state:
        case _Telnet.TEXT:
            return _Telnet.COMMAND
        case _Telnet.COMMAND if byte == SB:
            return _Telnet.SUBNEGOTIATION
        case _Telnet.COMMAND if byte >= WILL:
            return _Telnet.OPTION
        case _Telnet.SUBNEGOTIATION:
            return _Telnet.SUBNEGOTIATION_IAC if byte == IAC else state
        case _Telnet.SUBNEGOTIATION_IAC if byte != SE:
            return _Telnet.SUBNEGOTIATION
        case _:
            return _Telnet.TEXT


class _Stream(Lines):
    """TCP, with or without telnet negotiation."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, telnet: bool
    ) -> None:
        super().__init__(telnet)
        self._reader, self._writer = reader, writer

    async def send(self, *lines: str) -> None:
        await self._write("".join(f"{line}\n" for line in lines).encode())

    async def greet(self) -> None:
        """Say that this is a telnet client."""
        await self._write(HELLO)

    async def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise NoServer(f"the connection broke: {error}") from None

    async def _chunk(self) -> bytes:
        try:
            chunk = await self._reader.read(CHUNK)
        except OSError as error:
            raise NoServer(f"the connection broke: {error}") from None
        if not chunk:
            raise NoServer("the server closed the connection")
        return chunk

    async def close(self) -> None:
        # Aborted, not closed: a server that does not read must not hold up its client.
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class _WebSocket(Lines):
    """Lines over the messages of a websocket, wherever the server cuts them."""

    def __init__(self) -> None:
        import aiohttp

        super().__init__(telnet=False)
        self._session = aiohttp.ClientSession()

    async def open(self, config: GymConfig) -> None:
        import aiohttp

        url = f"http://{config.address}/ws"
        try:
            self._socket = await self._session.ws_connect(url, max_msg_size=MAX_LINE)
        except BaseException as error:
            await self.close()
            match error:
                case aiohttp.ClientConnectorError(os_error=reason):
                    raise _unreachable(config, reason) from None
                case aiohttp.WSServerHandshakeError(status=status):
                    what = f"an HTTP server answers {status} at /ws"
                case aiohttp.ClientError() | OSError():
                    # Its own words would be a dump of what the parser saw.
                    what = "what answers there does not speak HTTP"
                case _:
                    raise
            raise NoServer(
                f"no websocket at {config.address}: {what}; check the port, or use the transport "
                f"telnet or tcp"
            ) from None

    async def send(self, *lines: str) -> None:
        try:
            await self._socket.send_str("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise NoServer(f"the connection broke: {error}") from None

    async def _chunk(self) -> bytes:
        data = (await self._socket.receive()).data
        if not isinstance(data, str | bytes):
            raise NoServer("the server closed the websocket")
        return data.encode() if isinstance(data, str) else data

    async def close(self) -> None:
        await self._session.close()


async def connect(config: GymConfig) -> Lines:
    """A connection by the transport of the settings; the caller has the deadline."""
    if config.transport is GymTransport.WEBSOCKET:
        messages = _WebSocket()
        await messages.open(config)
        return messages
    try:
        ends = await asyncio.open_connection(config.host, config.port)
    except OSError as error:
        raise _unreachable(config, error) from None
    stream = _Stream(*ends, telnet=config.transport is GymTransport.TELNET)
    if config.transport is GymTransport.TELNET:
        await stream.greet()
    return stream


def _unreachable(config: GymConfig, error: OSError) -> NoServer:
    """Why nobody answers, and what to do about it: only on this machine a server can be started."""
    here = config.host in ("localhost", "::1") or config.host.startswith("127.")
    if isinstance(error, socket.gaierror):
        way = f"check the host's name, {config.host}"
    elif here and config.transport is not GymTransport.WEBSOCKET:
        way = f"start one with: batchwright gym serve --port {config.port}"
    else:
        way = "check that it runs, its host and its port"
    return NoServer(f"no gym at {config.address}: {one_line(error)}; {way}")
