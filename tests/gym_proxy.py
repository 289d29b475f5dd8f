"""A proxy before a gym server that damages one line of its replies, and the server itself."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

COMMAND = Path(sys.executable).parent / "batchwright"

Spoil = Callable[[int, int, bytes, asyncio.StreamWriter], Awaitable[bool]]
"""Connection, line, the line itself and where it goes; True if it was dealt with."""


@contextmanager
def served(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`batchwright gym serve` as a process, and its port."""
    words = [COMMAND, "gym", "serve", "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline().rpartition(":")[2])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@asynccontextmanager
async def proxy(upstream: int, spoil: Spoil) -> AsyncIterator[int]:
    """The port of a proxy before the gym at `upstream`; connections and lines count from 0."""
    connections = 0
    tasks: set[asyncio.Task[None]] = set()
    ends: list[asyncio.StreamWriter] = []

    async def up(reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(4096):
            server.write(chunk)

    async def down(number: int, lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = 0
        while line := await lines.readline():
            if not await spoil(number, place, line, writer):
                writer.write(line)
                await writer.drain()
            place += 1

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number, connections = connections, connections + 1
        lines, server = await asyncio.open_connection("127.0.0.1", upstream)
        ends.append(server)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(up(reader, server))
            second = group.create_task(down(number, lines, writer))
            await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            second.cancel()
        writer.transport.abort()
        server.transport.abort()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        tasks.add(asyncio.ensure_future(relay(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            end.transport.abort()
        # An aborted transport closes its socket in the next round of the loop.
        await asyncio.sleep(0)
