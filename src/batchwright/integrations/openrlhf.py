"""Rewards for OpenRLHF: a `reward_func` by file, and the same behind HTTP.

    --remote_rm_url examples/rewards/openrlhf.py          (newer: --reward.remote_url)
    --remote_rm_url http://127.0.0.1:5000/get_reward      batchwright reward serve -c rewards.toml

OpenRLHF has no missing reward: what it is given enters the loss, and an error of the function is
logged at INFO and passed over. So a missing reward is an error that is printed as well, or a
number of your choice, never NaN; and once the error budget is spent, every later call fails too.
"""

import asyncio
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from batchwright.rewards.compute import scorer_for
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.files import response_of
from batchwright.rewards.reward import Response
from batchwright.rewards.scorer import Column, Scorer

__all__ = ["RewardFunction", "app_of", "responses_of", "reward_func", "serve", "tensors_of"]

_SPECIAL = re.compile(r"(?:\s*(?:<([|\uff5c])[^<>]{1,40}\1>|</?s>|<eos>|<pad>))+\s*$")
"""What decoding with special tokens leaves behind the words."""
_LAST = (BudgetExceeded, NoServer)
"""After these nothing can be scored; to go on would be to learn from nothing."""


class RewardFunction:
    """`reward_func(queries, prompts, labels)` of a configuration; threads may call it at once."""

    def __init__(
        self, config: RewardsConfig | str | Path | None = None, *, missing: Missing | None = None
    ) -> None:
        self._given = config
        self._missing = missing
        self._scorer: Scorer | None = None
        self._lock = threading.Lock()
        self._stopped: BatchwrightError | None = None
        self._said: set[type] = set()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _remade, (self._given, self._missing)

    @property
    def scorer(self) -> Scorer:
        """Made when it is first asked for, in whatever process that is."""
        with self._lock:
            if self._scorer is None:
                if isinstance(self._given, RewardsConfig):
                    found = Scorer(self._given)
                else:
                    found = scorer_for(None if self._given is None else str(self._given))
                if (self._missing or found.config.missing) == "mask":
                    raise ConfigError(
                        "missing = mask is not possible with OpenRLHF, where NaN would enter the "
                        "loss; choose raise or a number"
                    )
                self._scorer = found
            return self._scorer

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]
    ) -> dict[str, Any]:
        """`rewards`, `scores` and `extra_logs` as tensors, one entry a query."""
        try:
            self._check()
            rewards = self.scorer.score(responses_of(queries, prompts, labels))
            rows = self.scorer.columns(rewards, self._missing)
        except BatchwrightError as error:
            self._loud(error)
            raise
        return tensors_of(rows)

    async def lists(self, queries: Any, prompts: Any, labels: Any) -> dict[str, Any]:
        """The same as plain lists, from inside an event loop: the HTTP form."""
        try:
            self._check()
            rewards = await self.scorer.ascore(responses_of(queries, prompts, labels))
            rows = self.scorer.columns(rewards, self._missing)
        except BatchwrightError as error:
            self._loud(error)
            raise
        return _plain(tensors_of(rows))

    def close(self) -> None:
        """End the pool of this process."""
        if self._scorer is not None:
            self._scorer.close()

    def _check(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def _loud(self, error: BatchwrightError) -> None:
        with self._lock:
            if isinstance(error, _LAST):
                self._stopped = error
            first = type(error) not in self._said
            self._said.add(type(error))
        if first:
            # OpenRLHF logs what a reward function raises at INFO, which nobody sees.
            print(f"batchwright: no reward: {error}", file=sys.stderr, flush=True)


def _remade(given: Any, missing: Missing | None) -> RewardFunction:
    return RewardFunction(given, missing=missing)


reward_func = RewardFunction()
"""The reward that BATCHWRIGHT_REWARDS names, or that of the document's environment."""


def responses_of(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]
) -> list[Response]:
    """OpenRLHF's texts as responses: a query is a prompt and what was written after it.

    A label is the truth, or a JSON object with `ground_truth`, `data_source`, `extra_info`.

    >>> responses_of(["<s>2+2? It is 4.</s>"], ["2+2?"], ["4"])
    [Response(text=' It is 4.', truth='4', dataset='', prompt='2+2?', extra={})]
    """
    if not len(queries) == len(prompts) == len(labels):
        raise Mismatch(
            f"{len(queries)} queries, {len(prompts)} prompts and {len(labels)} labels are not "
            f"three equal lists"
        )
    rows = zip(queries, prompts, labels, strict=True)
    return [_response(query, prompt, label) for query, prompt, label in rows]


def _response(query: Any, prompt: Any, label: Any) -> Response:
    text = query
    if isinstance(query, str) and isinstance(prompt, str):
        # A long prompt is cut from the left before the model sees it.
        for part in (prompt, prompt[-200:]):
            _, found, after = query.partition(part)
            if found and part:
                text = after
                break
        text = _SPECIAL.sub("", text)
    row: dict[str, Any] = {"ground_truth": label}
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            known = json.loads(label)
        except ValueError:
            known = None
        if isinstance(known, dict) and "ground_truth" in known:
            row = known
    return response_of({**row, "prompt": prompt, "response": text})


def tensors_of(rows: Sequence[dict[str, Column]]) -> dict[str, Any]:
    """Rows as what OpenRLHF reads; words are left out of its logs, which are numbers."""
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


def app_of(function: RewardFunction) -> web.Application:
    """The HTTP form: POST {"query": [...], "prompts": [...], "labels": [...]} as JSON."""

    async def post(request: web.Request) -> web.Response:
        # A page in a browser of this machine cannot send JSON here unasked; a form it can.
        if request.content_type != "application/json":
            return web.json_response({"error": "send application/json"}, status=415)
        try:
            given = json.loads(await request.read())
            texts = [given[name] for name in ("query", "prompts", "labels")]
            if not all(isinstance(column, list) for column in texts):
                raise UnknownSample("query, prompts and labels must be lists")
        except (ValueError, KeyError, TypeError, UnknownSample) as error:
            reason = f"send query, prompts and labels, lists of one length: {error}"
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
    """Serve on 127.0.0.1 until SIGINT or SIGTERM; `started` is told the address."""
    function.scorer  # noqa: B018 - a wrong configuration is known before anybody connects
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    runner = web.AppRunner(app_of(function), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise NoServer(
                f"port {port} of 127.0.0.1 cannot be had ({error.strerror}); name another, "
                f"or --port 0 for a free one"
            ) from None
        if started is not None:
            host, taken = runner.addresses[0][:2]
            started(f"http://{host}:{taken}/get_reward")
        await stop.wait()
    finally:
        await runner.cleanup()
        await asyncio.to_thread(function.close)
