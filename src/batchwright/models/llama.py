"""llama.cpp inside this process: a model in a GGUF file, with its own server or as a function."""

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchwright.errors import BadFile, ConfigError, MissingFile, need
from batchwright.models.request import ModelRequest

__all__ = ["CONTEXT", "Llama"]

CONTEXT = 2048
"""Tokens of prompt and answer that one request has room for, unless told otherwise."""

SILENT = 0
"""llama.cpp's level of words; at 3, its own default, it writes a page for every request."""


class Llama:
    """A language model run by llama.cpp, `parallel` requests at a time.

    Requests share every step of the model (continuous batching), each with `context` tokens of
    room. Temperature, seed, stop and the other settings in a request's body are llama.cpp's own.
    What is computed together is rounded together: now and then, close to a tie, an answer
    differs from the one the same request gets alone.

    llama.cpp comes with its HTTP server, on `host` and `port`. Used as a function, it listens on
    a free port of this machine and answers nobody, because nobody is told its key.
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
                raise ConfigError(f"{setting}={value} is not possible; give 1 or more")
        if not path.is_file():
            raise MissingFile(f"no model file at {path}; check the path")
        llama = need("xllamacpp", extra="local")
        settings = llama.CommonParams()
        settings.model.path = str(path)
        settings.model_alias = {name}
        settings.n_parallel = parallel
        settings.n_ctx = parallel * (context or CONTEXT)
        # Threads that share a core with others wait for each other in circles, so one is left.
        count = threads or max(1, (os.cpu_count() or 1) - 1)
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = count
        settings.verbosity = SILENT
        settings.warmup = False
        # Up to 8 GiB of old prompts otherwise; what a slot still holds is reused all the same.
        settings.cache_ram_mib = 0
        settings.ui = False
        # A page of some other site, open in a browser here, has no business with it.
        settings.cors_origins = "http://127.0.0.1"
        # It would show anybody what the others asked.
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
                f"llama.cpp cannot load {path}: {' '.join(str(error).split())}; get the file again"
            ) from None

    @property
    def url(self) -> str:
        """Where its HTTP server listens, without a path."""
        return str(self._server.listening_address)

    def __call__(self, requests: Sequence[ModelRequest]) -> list[Mapping[str, Any] | Exception]:
        with ThreadPoolExecutor(min(self._parallel, len(requests) or 1)) as threads:
            return list(threads.map(self._answer, requests))

    def close(self) -> None:
        """Give the memory back, at the end of the requests under way."""
        self._server = None

    def _answer(self, request: ModelRequest) -> Mapping[str, Any] | Exception:
        if request.kind == "embed":
            return ConfigError(f"{self.name} gives no embeddings; use local:minilm")
        if request.body.get("stream"):
            return ConfigError(f"{self.name} answers in one piece in-process; leave out stream")
        body = dict(request.body)
        if request.draw is not None and "seed" not in body:
            # The same draw of the same request is the same answer.
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
