"""llama.cpp in this process: a GGUF file, called as a function or served over HTTP."""

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchwright.errors import BadFile, ConfigError, MissingFile, need, one_line
from batchwright.models.request import ModelRequest

__all__ = ["CONTEXT", "Llama"]

CONTEXT = 2048
"""Default context of one request: tokens of prompt and completion together."""

SILENT = 0
"""llama.cpp's log level; at 3, its default, it logs a page for every request."""


class Llama:
    """A language model run by llama.cpp, `parallel` requests at a time.

    Requests share every forward pass (continuous batching), each with a context of `context`
    tokens. Temperature, seed, stop and the other settings in a request's body are llama.cpp's
    own. Batched arithmetic rounds differently: now and then, close to a tie, a completion differs
    from the one the same request gets alone.

    llama.cpp brings its HTTP server, at `serve_at` (host and port). Called as a function, it
    listens on a free loopback port and refuses every request, because its key is secret.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        parallel: int = 8,
        threads: int | None = None,
        context: int | None = None,
        serve_at: tuple[str, int] | None = None,
    ) -> None:
        for setting, value in (("parallel", parallel), ("threads", threads), ("context", context)):
            if value is not None and value < 1:
                raise ConfigError(f"{setting} must be at least 1, got {value}")
        if not path.is_file():
            raise MissingFile(f"no model file at {path}; check the path")
        llama = need("xllamacpp", extra="local")
        settings = llama.CommonParams()
        settings.model.path = str(path)
        settings.model_alias = {name}
        settings.n_parallel = parallel
        settings.n_ctx = parallel * (context or CONTEXT)
        # Threads that share a core with other work spin waiting for each other: leave one core.
        count = threads or max(1, (os.cpu_count() or 1) - 1)
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = count
        settings.verbosity = SILENT
        settings.warmup = False
        # Otherwise up to 8 GiB of old prompts; the prefix a slot still holds is reused anyway.
        settings.cache_ram_mib = 0
        settings.ui = False
        # A page of another site, open in a local browser, must not reach it.
        settings.cors_origins = "http://127.0.0.1"
        # It would show every client the prompts of the others.
        settings.endpoint_slots = False
        settings.endpoint_metrics = True
        if serve_at is None:
            settings.api_keys = [secrets.token_hex(32)]
        else:
            settings.hostnames, settings.port = [serve_at[0]], serve_at[1]
        self.name = name
        self._parallel = parallel
        try:
            self._server: Any = llama.Server(settings)
        except (RuntimeError, ValueError) as error:
            raise BadFile(
                f"llama.cpp cannot load {path}: {one_line(error)}; get the file again"
            ) from None

    @property
    def url(self) -> str:
        """Where its HTTP server listens, without a path."""
        return str(self._server.listening_address)

    def __call__(self, requests: Sequence[ModelRequest]) -> list[Mapping[str, Any] | Exception]:
        with ThreadPoolExecutor(min(self._parallel, len(requests) or 1)) as threads:
            return list(threads.map(self._answer, requests))

    def close(self) -> None:
        """Free the memory once the requests in flight are done."""
        self._server = None

    def _answer(self, request: ModelRequest) -> Mapping[str, Any] | Exception:
        if request.kind == "embed":
            return ConfigError(f"{self.name} has no embeddings; use local:minilm")
        if request.kind == "respond":
            return ConfigError(f"{self.name} has no Responses API; send a chat request")
        if request.body.get("stream"):
            return ConfigError(f"{self.name} does not stream in-process; leave out stream")
        body = dict(request.body)
        if request.draw is not None and "seed" not in body:
            # The same draw of the same request gives the same completion.
            body["seed"] = int.from_bytes(request.key[:4], "little") >> 1
        server = self._server
        handle = (
            server.handle_chat_completions if request.kind == "chat" else server.handle_completions
        )
        try:
            answer: dict[str, Any] = handle(body)
        except ValueError as error:
            return ConfigError(f"{self.name} cannot read the request: {error}")
        if refusal := answer.get("error"):
            said = f"{self.name} answered {refusal.get('code')}: {refusal.get('message')}"
            return RuntimeError(said) if refusal.get("code", 500) >= 500 else ConfigError(said)
        return answer
