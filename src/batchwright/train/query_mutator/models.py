"""The models of query mutation as functions: mutator, target, judge and embedder.

A run caches every response in `calls.db` and records every failed call in `failures.jsonl`.
Together they are enough to replay the run without a server, with identical results.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchwright.calls import (
    Endpoint,
    ErrorBudget,
    Outcome,
    Pool,
    Request,
    embed,
)
from batchwright.calls.cache.store import Cache
from batchwright.calls.endpoints import OLLAMA_NAME
from batchwright.calls.simulator.ngrams import hashed_ngrams
from batchwright.envs.query_mutation.env import Ask, Embed, Rate, Score
from batchwright.envs.query_mutation.models import (
    DIM,
    ask_mutator,
    ask_target,
    check_server,
    find_model,
    hashed,
    rate_by,
)
from batchwright.envs.questions import Question
from batchwright.errors import CannotWrite, Mismatch, MissingFile, NoServer
from batchwright.events import EventLog
from batchwright.files import read_regular
from batchwright.lines import LineFile, read_lines
from batchwright.rewards import Contains, Exact, Judge, Numeric, Rule, Similarity
from batchwright.train.query_mutator.config import QueryMutatorConfig, width_of

__all__ = ["FailureLog", "Models", "open_models"]


class FailureLog:
    """`failures.jsonl`: the places where calls of a run failed, each with its failure kind.

    The last line about a place wins: a killed and resumed run may repeat some steps.
    """

    def __init__(self, path: Path, *, replay: bool) -> None:
        self._path, self._replay = path, replay
        self._known: dict[str, str] = {}
        self._file: LineFile | None = None
        raw = read_regular(path) if path.exists() else b""
        for place, why in read_lines(path, raw, "list of failures", _failure):
            self._known[place] = why

    def known(self, place: str) -> str | None:
        return (self._known.get(place) or None) if self._replay else None

    def note(self, place: str, why: str) -> None:
        if self._replay or self._known.get(place, "") == why:
            return
        self._known[place] = why
        try:
            if self._file is None:
                self._file = LineFile(self._path, "list of failures")
            self._file.append(json.dumps({"place": place, "why": why}).encode())
        except OSError as error:
            raise CannotWrite(f"cannot write {self._path}: {error.strerror}") from error


def _failure(row: dict[str, Any]) -> tuple[str, str]:
    return str(row["place"]), str(row["why"])


@dataclass(frozen=True)
class Models:
    """The open models of a run, as the environment takes them."""

    mutator: Ask
    target: Ask
    rate: Rate
    embed: Embed
    dim: int
    pools: tuple[Pool, ...]
    failures: FailureLog
    used: Counter[str]
    """Calls by role and tokens so far, cached responses included."""

    def run(self, work: Coroutine[Any, Any, Any], /) -> Any:
        return self.pools[0].run(work)

    def stats(self) -> dict[str, float]:
        """Sums of the statistics of all pools."""
        found: dict[str, float] = {}
        for pool in self.pools:
            for name, value in pool.stats().items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found[name] = found.get(name, 0) + value
        return found


@contextmanager
def open_models(
    config: QueryMutatorConfig,
    folder: Path,
    *,
    replay: bool = False,
    events: EventLog | None = None,
    on_call: Callable[[], None] = lambda: None,
    pool: Callable[..., Pool] | None = None,
    check: bool = True,
) -> Iterator[Models]:
    """The models of a run, with their responses cached in `folder`; `replay` makes no calls.

    `on_call` is called after each call that mutator or target answered or failed. `pool` makes
    pools other than `Pool`, of the path of the cache. Without `check`, servers are not looked for.
    """
    store = folder / "calls.db"
    if replay and not store.exists():
        raise MissingFile(f"{folder} has no calls.db; only a run that was started can be replayed")
    if check and not replay:
        asyncio.run(_check_servers(config))
    with ExitStack() as stack:
        mode: Literal["use", "replay"] = "replay" if replay else "use"
        cache = store if pool else stack.enter_context(Cache(store, mode=mode))
        pools: dict[tuple[str, ...], Pool] = {}

        def pool_for(role: str, model: str) -> tuple[Pool, str]:
            endpoints, name = _endpoints(config, role, model, replay)
            key = tuple(endpoint.name for endpoint in endpoints)
            if key not in pools:
                pools[key] = stack.enter_context(
                    (pool or Pool)(
                        *endpoints,
                        limit=width_of(config),
                        deadline_s=config.deadline_s,
                        tries=1 if replay else 5,
                        cache=cache,
                        budget=None if replay else ErrorBudget(config.error_budget, window=200),
                        events=events,
                    )
                )
            return pools[key], name

        failures = FailureLog(folder / "failures.jsonl", replay=replay)
        used: Counter[str] = Counter()
        rewriter = config.mutator_model or config.target_model
        target = ask_target(*pool_for("qa", config.target_model), config.max_tokens)
        mutator = ask_mutator(*pool_for("mutator", rewriter), config.temperature, config.max_tokens)
        if replay:
            target = _replayed(target, config.target_model)
            mutator = _replayed(mutator, rewriter)
        target = _counted(target, "target", used, on_call)
        mutator = _counted(mutator, "mutator", used, on_call)
        rate = _rate(config, pool_for)
        embedder, dim = _embedder(config, pool_for)
        every = tuple(pools.values())
        yield Models(mutator, target, rate, embedder, dim, every, failures, used)


async def _check_servers(config: QueryMutatorConfig) -> None:
    """Look for the servers before any model is loaded into this process, which takes a while."""
    judge = config.judge_model if config.reward_type == "llm-judge" else ""
    models = (config.target_model, config.mutator_model, judge, config.embedder)
    for model in dict.fromkeys(models):
        if model and model not in ("sim", "ngrams") and not model.startswith("local:"):
            endpoints, name = _endpoints(config, "", model, replay=False)
            for endpoint in endpoints:
                await check_server(endpoint, name)


def _endpoints(
    config: QueryMutatorConfig, role: str, model: str, replay: bool
) -> tuple[tuple[Endpoint, ...], str]:
    if config.endpoint and model != "sim" and OLLAMA_NAME.fullmatch(model):
        return _unless_replayed([Endpoint(url) for url in config.endpoint], replay), model
    endpoint, name = find_model(model, role, config.dataset)
    if model == "sim":
        return (endpoint,), name
    return _unless_replayed([endpoint], replay), name


def _unless_replayed(endpoints: Sequence[Endpoint], replay: bool) -> tuple[Endpoint, ...]:
    """These, or what stands for them when no call is made: every response is in the cache."""
    if not replay:
        return tuple(endpoints)
    return tuple(Endpoint(_not_cached, name=one.name, identity=one.identity) for one in endpoints)


def _not_cached(requests: Sequence[Request]) -> list[Exception]:
    return [MissingFile("not in the cache of the replayed run") for _ in requests]


def _counted(ask: Ask, name: str, used: Counter[str], on_call: Callable[[], None]) -> Ask:
    async def counting(prompt: str, seed: int) -> Outcome:
        outcome = await ask(prompt, seed)
        used[f"{name}_calls"] += 1
        if outcome and outcome.usage:
            used["tokens"] += outcome.usage.total
        on_call()
        return outcome

    return counting


def _replayed(ask: Ask, model: str) -> Ask:
    async def replaying(prompt: str, seed: int) -> Outcome:
        outcome = await ask(prompt, seed)
        if not outcome:
            raise Mismatch(
                f"the replayed run has no cached response of {model} to a request; "
                f"replay with the files and the version of the original run"
            )
        return outcome

    return replaying


def _rate(config: QueryMutatorConfig, pool_for: Any) -> Rate:
    kind = config.reward_type
    pool: Pool | None = None
    fixed: Rule | None = None
    if kind == "llm-judge":
        pool, name = pool_for("judge", config.judge_model or config.target_model)
        fixed = Judge(models=(name,))
    elif kind == "cosine-similarity":
        if config.embedder != "ngrams":
            pool, name = pool_for("embed", config.embedder)
            fixed = Similarity(model=name)
    elif kind != "match":
        fixed = {"numeric": Numeric(), "exact": Exact(), "contains": Contains()}[kind]

    if kind != "cosine-similarity" or fixed is not None:
        return rate_by(fixed, pool)

    async def similarity(question: Question, wording: str, answer: str) -> Score:
        one, other = hashed_ngrams([answer, question.answer], DIM)
        return Score(max(0.0, float(one @ other)))

    return similarity


def _embedder(config: QueryMutatorConfig, pool_for: Any) -> tuple[Embed, int]:
    if config.embedder == "ngrams":
        return hashed, DIM
    pool, name = pool_for("embed", config.embedder)

    async def served(texts: Sequence[str]) -> NDArray[np.float32]:
        outcomes = [await pool.call(embed(name, text)) for text in texts]
        rows = []
        for outcome in outcomes:
            if not outcome:
                raise NoServer(
                    f"{name} returned no embedding ({outcome.kind}: {outcome.error}), which the "
                    f"policy needs; use --embedder ngrams, or a server that is up"
                )
            vector = np.asarray(outcome.vectors[0], np.float32)
            rows.append(vector / max(float(np.linalg.norm(vector)), 1e-9))
        return np.stack(rows)

    dim = len(pool.run(served(["How long is a vector?"]))[0])
    return served, dim
