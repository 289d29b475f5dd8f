"""Rewards for OpenRLHF: a `reward_func` in a file, or a remote reward model over HTTP.

    --remote_rm_url examples/rewards/openrlhf.py          (newer: --reward.remote_url)
    --remote_rm_url http://127.0.0.1:5000/get_reward      batchwright reward serve -c rewards.toml

OpenRLHF has no invalid reward: every number enters the loss, and an exception of the function is
logged at INFO and ignored. So an invalid reward is an error that is printed too, or a number of
your choice, never NaN; and once the error budget is exceeded, every later call fails as well.
"""

import asyncio
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from aiohttp import web

from batchwright.errors import (
    BatchwrightError,
    BudgetExceeded,
    ConfigError,
    Mismatch,
    NoServer,
    UnknownSample,
)
from batchwright.files import parse_json
from batchwright.rewards.compute import scorer_for
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.files import response_of
from batchwright.rewards.reward import Response
from batchwright.rewards.score import Column, Scorer

__all__ = ["RewardFunction", "responses_of", "reward_func", "serve"]

_SPECIAL = re.compile(r"(?:<([|\uff5c])[^<>]{1,40}\1>|</?s>|<eos>|<pad>)$")
_LONGEST_SPECIAL = 44
"""A special token at the end of a decoded text, and the most characters it has."""
_HOSTS = ("127.0.0.1", "localhost", "::1")
_FATAL = (BudgetExceeded, NoServer)
"""Errors after which every later call fails too, so that training cannot go on without rewards."""


class RewardFunction:
    """`reward_func(queries, prompts, labels)` of a configuration; it is thread-safe."""

    def __init__(
        self, config: RewardsConfig | str | Path | None = None, *, missing: Missing | None = None
    ) -> None:
        self._given = config
        self._missing = missing
        self._scorer: Scorer | None = None
        self._lock = threading.Lock()
        self._stopped: BatchwrightError | None = None
        self._printed: set[type] = set()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickle, (self._given, self._missing)

    @property
    def scorer(self) -> Scorer:
        """Made on first use, in each process."""
        with self._lock:
            if self._scorer is None:
                if isinstance(self._given, RewardsConfig):
                    found = Scorer(self._given)
                else:
                    found = scorer_for(None if self._given is None else str(self._given))
                missing = found.config.missing if self._missing is None else self._missing
                if missing == "mask":
                    raise ConfigError(
                        "missing must be raise or a number with OpenRLHF, got mask; "
                        "NaN would enter the loss"
                    )
                self._scorer = found
            return self._scorer

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]
    ) -> dict[str, Any]:
        """`rewards`, `scores` and `extra_logs` as tensors, one entry per query."""
        try:
            self._check()
            rewards = self.scorer.score(responses_of(queries, prompts, labels))
            rows = self.scorer.columns(rewards, self._missing)
        except BatchwrightError as error:
            self._report(error)
            raise
        return _tensors(rows)

    async def lists(self, queries: Any, prompts: Any, labels: Any) -> dict[str, Any]:
        """The same as lists, from inside an event loop: the body of an HTTP response."""
        try:
            self._check()
            rewards = await self.scorer.ascore(responses_of(queries, prompts, labels))
            rows = self.scorer.columns(rewards, self._missing)
        except BatchwrightError as error:
            self._report(error)
            raise
        return _plain(_tensors(rows))

    def close(self) -> None:
        """Close the pool of this process."""
        if self._scorer is not None:
            self._scorer.close()

    def _check(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _report(self, error: BatchwrightError) -> None:
        with self._lock:
            if isinstance(error, _FATAL):
                self._stopped = error
            first = type(error) not in self._printed
            self._printed.add(type(error))
        if first:
            # OpenRLHF logs exceptions of a reward function at INFO, where they are not seen.
            print(f"batchwright: no reward: {error}", file=sys.stderr, flush=True)


def _unpickle(given: Any, missing: Missing | None) -> RewardFunction:
    return RewardFunction(given, missing=missing)


reward_func = RewardFunction()
"""The reward of the file in BATCHWRIGHT_REWARDS, or of the other environment variables."""


def responses_of(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]
) -> list[Response]:
    """OpenRLHF's texts as responses: a query is a prompt followed by the response.

    A label is the truth, or a JSON object with `ground_truth`, `data_source`, `extra_info`.

    >>> responses_of(["<s>2+2? It is 4.</s>"], ["2+2?"], ["4"])
    [Response(text=' It is 4.', truth='4', dataset='', prompt='2+2?', extra={})]
    """
    if not len(queries) == len(prompts) == len(labels):
        raise Mismatch(
            f"{len(queries)} queries, {len(prompts)} prompts and {len(labels)} labels; "
            f"pass three lists of equal length"
        )
    rows = zip(queries, prompts, labels, strict=True)
    return [_response(query, prompt, label) for query, prompt, label in rows]


def _response(query: Any, prompt: Any, label: Any) -> Response:
    text = query
    if isinstance(query, str) and isinstance(prompt, str):
        # A long prompt is truncated from the left before the model sees it.
        for part in (prompt, prompt[-200:]):
            _, found, after = query.partition(part) if part else ("", "", "")
            if found:
                text = after
                break
        text = _without_specials(text)
    row: dict[str, Any] = {"ground_truth": label}
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            known = parse_json(label)
        except ValueError:
            known = None
        if isinstance(known, dict) and "ground_truth" in known:
            row = known
    return response_of({**row, "prompt": prompt, "response": text})


def _without_specials(text: str) -> str:
    """A text without the special tokens at its end; padding may be thousands of them.

    >>> _without_specials("It is 4. </s><pad> <pad>"), _without_specials("It is 4. ")
    ('It is 4.', 'It is 4. ')
    """
    end = found = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        match = _SPECIAL.search(text, max(0, end - _LONGEST_SPECIAL), end)
        if match is None:
            return text if found == len(text) else text[:found].rstrip()
        end = found = match.start()


def _tensors(rows: Sequence[dict[str, Column]]) -> dict[str, Any]:
    """Rows in OpenRLHF's format; text columns are left out, because its logs are numbers."""
    columns = [name for name in (rows[0] if rows else ()) if name not in ("score", "why")]
    logs = {
        name: torch.tensor([float(row[name]) for row in rows])
        for name in columns
        if not isinstance(rows[0][name], str)
    }
    rewards = torch.tensor([float(row["score"]) for row in rows])
    return {"rewards": rewards, "scores": rewards.clone(), "extra_logs": logs}


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(value) if isinstance(value, dict) else value.tolist()
        for name, value in found.items()
    }


def _app(function: RewardFunction) -> web.Application:
    """The HTTP server: POST {"query": [...], "prompts": [...], "labels": [...]} as JSON."""

    async def post(request: web.Request) -> web.Response:
        # A page whose name was made to point here is not on this machine (DNS rebinding).
        if urlsplit(f"//{request.host}").hostname not in _HOSTS:
            return web.json_response({"error": "this server is for 127.0.0.1 only"}, status=403)
        # Against cross-site requests: a web page can post a form here without CORS, but not JSON.
        if request.content_type != "application/json":
            return web.json_response({"error": "send application/json"}, status=415)
        try:
            given = parse_json(await request.read())
            texts = [given[name] for name in ("query", "prompts", "labels")]
            if not all(isinstance(column, list) for column in texts):
                raise UnknownSample("query, prompts and labels must be lists")
        except (ValueError, KeyError, TypeError, UnknownSample) as error:
            reason = f"send query, prompts and labels, lists of equal length: {error}"
            return web.json_response({"error": reason}, status=400)
        try:
            found = await function.lists(*texts)
        except BatchwrightError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.json_response(found)

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/", post)
    app.router.add_post("/get_reward", post)
    return app


async def serve(
    function: RewardFunction, port: int, started: Callable[[str], None] | None = None
) -> None:
    """Serve on 127.0.0.1 until SIGINT or SIGTERM; `started` gets the URL."""
    function.scorer  # noqa: B018 - a wrong configuration fails before anyone connects
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    runner = web.AppRunner(_app(function), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise NoServer(
                f"cannot listen on port {port} of 127.0.0.1 ({error.strerror}); choose another, "
                f"or --port 0 for any free port"
            ) from None
        if started is not None:
            host, taken = runner.addresses[0][:2]
            started(f"http://{host}:{taken}/get_reward")
        await stop.wait()
    finally:
        await runner.cleanup()
        await asyncio.to_thread(function.close)
