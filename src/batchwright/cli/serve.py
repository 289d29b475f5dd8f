"""`batchwright serve`: a real model behind the OpenAI protocol, with no hub and no account."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from batchwright.cli.output import Quiet

__all__ = ["serve"]


def serve(
    model: Annotated[str, Parameter(help="smollm2, or a GGUF file.")],
    *,
    port: Annotated[int, Parameter(help="0 takes a free one.")] = 8080,
    host: Annotated[str, Parameter(help="An address of this machine only.")] = "127.0.0.1",
    parallel: Annotated[int, Parameter(help="Requests that are answered at a time.")] = 4,
    context: Annotated[
        int, Parameter(help="Tokens a request and its answer may have together.")
    ] = 2048,
    threads: Annotated[
        int | None, Parameter(help="Processor threads; all cores but one if left out.")
    ] = None,
    get: Annotated[
        bool, Parameter(negative="", help="Fetch the model first if it is not here.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model by llama.cpp until Ctrl-C: chat, completions, /health, /metrics."""
    import os
    import signal
    import sys

    from batchwright.models.llama import Llama

    path = _file(model, get, quiet)
    _check_address(host, port)
    name = path.stem if model.endswith(".gguf") else model
    # Blocked before llama.cpp starts its threads, so that only the wait below sees them; a stop
    # that comes while the model loads is kept until then.
    stops = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        server = Llama(
            path, name, parallel=parallel, threads=threads, context=context, serve_at=(host, port)
        )
        room = _ready(server.url)
        print(
            f"{name} at {server.url}/v1 ({parallel} at a time, {room:,} tokens each); "
            f"Ctrl-C stops it",
            flush=True,
        )
        signal.sigwait(stops)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    print("stopped", file=sys.stderr, flush=True)
    # llama.cpp's own end waits for ever for a request that is still under way, and there is
    # nothing to save: its callers see a closed connection.
    os._exit(0)


def _file(model: str, get: bool, quiet: bool) -> Path:
    from batchwright.cli.output import progress_bar
    from batchwright.errors import ConfigError, MissingFile
    from batchwright.models import registry as models

    if model.endswith(".gguf"):
        return Path(model)
    if model not in models.REGISTRY:
        raise ConfigError(
            f"there is no model {model} to serve; known: {', '.join(models.REGISTRY)}, "
            f"or name a GGUF file"
        )
    if get:
        with progress_bar(f"fetching {model} (bytes)", quiet) as progress:
            return models.get(model, progress=progress)
    path = models.find(model).path
    if path is None:
        raise MissingFile(
            f"{model} is not here yet; run: batchwright models get {model}, or add --get"
        )
    return path


def _check_address(host: str, port: int) -> None:
    """Say what is wrong with the address before the model is loaded."""
    import errno
    import ipaddress
    import socket

    from batchwright.errors import ConfigError, NoServer

    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        own = False
    if not own:
        raise ConfigError(
            f"the host {host} is not of this machine alone, and the server asks nobody for a "
            f"password; use 127.0.0.1, and from elsewhere a tunnel such as ssh -L"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"the port {port} is not possible; use 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NoServer(
                f"port {port} of {host} is in use; name another, or --port 0 for a free one"
            ) from None
        raise NoServer(
            f"cannot listen at {host}:{port}: {error.strerror}; name another port"
        ) from None


def _ready(url: str) -> int:
    """The tokens each request has room for, asked of the server itself: it is up."""
    import json
    from urllib.request import ProxyHandler, build_opener

    # A proxy of the environment knows nothing of this machine's own addresses.
    with build_opener(ProxyHandler({})).open(f"{url}/v1/models", timeout=60) as answer:
        return int(json.load(answer)["data"][0]["meta"]["n_ctx"])
