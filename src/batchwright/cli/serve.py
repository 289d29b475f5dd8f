"""`batchwright serve`: a model behind the OpenAI API, with no hub and no account."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from batchwright.cli.output import Quiet, say

__all__ = ["serve"]


def serve(
    model: Annotated[str, Parameter(help="smollm2, or a GGUF file.")],
    *,
    port: Annotated[int, Parameter(help="Port; 0 picks a free one.")] = 8080,
    host: Annotated[str, Parameter(help="A loopback address.")] = "127.0.0.1",
    parallel: Annotated[int, Parameter(help="Requests served concurrently.")] = 4,
    context: Annotated[
        int, Parameter(help="Context length of a request: tokens of prompt and completion.")
    ] = 2048,
    threads: Annotated[
        int | None, Parameter(help="CPU threads; default: all cores but one.")
    ] = None,
    get: Annotated[
        bool, Parameter(negative="", help="Download the model first if needed.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model with llama.cpp until Ctrl-C: chat, completions, /health, /metrics."""
    import os
    import signal

    from batchwright.models.llama import Llama

    path = _file(model, get, quiet)
    _check_address(host, port)
    name = path.stem if model.endswith(".gguf") else model
    # Blocked before llama.cpp starts its threads, so that only the wait below receives them; a
    # signal that comes while the model loads stays pending until then.
    stops = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        server = Llama(
            path, name, parallel=parallel, threads=threads, context=context, serve_at=(host, port)
        )
        room = _ready(server.url)
        say(
            f"{name} at {server.url}/v1 ({parallel} concurrent requests of {room:,} tokens); "
            f"Ctrl-C stops it",
        )
        signal.sigwait(stops)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    say("stopped", err=True)
    # llama.cpp's own shutdown waits for ever for a request in flight, and there is nothing to
    # save: its clients see a closed connection.
    os._exit(0)


def _file(model: str, get: bool, quiet: bool) -> Path:
    from batchwright.cli.output import progress_bar
    from batchwright.errors import ConfigError, MissingFile
    from batchwright.models import registry as models

    if model.endswith(".gguf"):
        return Path(model)
    if model not in models.REGISTRY:
        raise ConfigError(
            f"unknown model {model}; known: {', '.join(models.REGISTRY)}, or name a GGUF file"
        )
    if get:
        with progress_bar(f"downloading {model} (bytes)", quiet) as progress:
            return models.get(model, progress=progress)
    path = models.find(model).path
    if path is None:
        raise MissingFile(
            f"{model} is not downloaded yet; run: batchwright models get {model}, or add --get"
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
            f"--host {host} is not a loopback address, and the server has no authentication; "
            f"use 127.0.0.1, and a tunnel such as ssh -L from elsewhere"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NoServer(
                f"port {port} of {host} is in use; choose another, or --port 0 for a free one"
            ) from None
        raise NoServer(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from None


def _ready(url: str) -> int:
    """The context length of a request, as the running server reports it."""
    import json
    from urllib.request import ProxyHandler, build_opener

    # A proxy from the environment cannot reach loopback addresses.
    with build_opener(ProxyHandler({})).open(f"{url}/v1/models", timeout=60) as answer:
        return int(json.load(answer)["data"][0]["meta"]["n_ctx"])
