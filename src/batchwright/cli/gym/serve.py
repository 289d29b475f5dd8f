"""`batchwright gym serve`: a puzzle server on this machine."""

from typing import Annotated

from cyclopts import Parameter

from batchwright.cli.output import Format, say, show

__all__ = ["serve"]


def serve(
    *,
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes a free one.")] = 8023,
    seed: Annotated[int, Parameter(help="Of puzzles that are asked for without a seed.")] = 0,
    format: Format = "text",
) -> None:
    """Serve puzzles on 127.0.0.1 until Ctrl-C, then print the counts; first, the address."""
    import asyncio
    import json
    import signal

    from batchwright.report.text import table
    from batchwright.streaming.gym.server import HOST, GymServer

    server = GymServer(port, seed)

    async def until_stopped() -> None:
        await server.start()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        address = {"host": HOST, "port": server.port}
        say(json.dumps(address) if format == "json" else f"{HOST}:{server.port}")
        await stopped.wait()
        await server.stop()

    asyncio.run(until_stopped())
    counts = {name: server.counts[name] for name in ("connections", "puzzles", "solved")}
    show(counts, table(["gym", "count"], [[k, str(v)] for k, v in counts.items()]), format)
