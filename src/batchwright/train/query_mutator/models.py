"""The models behind query mutation: who rewrites, answers, judges and embeds, as plain functions.

A run keeps every answer in `calls.db` and every failed place in `failures.jsonl`. Together they
are a cassette: the run can be done again from them with no server, to the same numbers.
"""

import json
import re
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
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
    chat,
    embed,
    parse_model,
)
from batchwright.calls.cache.store import Cache
from batchwright.calls.simulator.ngrams import hashed_ngrams
from batchwright.calls.wire.discovery import check_model
from batchwright.envs.query_mutation.env import Ask, Embed, Rate, Score
from batchwright.envs.questions import Question, load_questions
from batchwright.errors import BadFile, CannotWrite, ConfigError, Mismatch, MissingFile, NoServer
from batchwright.events import EventLog
from batchwright.rewards import Contains, Exact, Judge, Numeric, Response, Rule, Similarity
from batchwright.rewards.score import ascore_all
from batchwright.train.query_mutator.config import QueryMutatorConfig, width_of

__all__ = ["FailureLog", "Phrasing", "open_phrasing"]

DIM = 256
"""Of the built-in embedder."""
SYSTEM = "Answer the question with the answer alone, in as few words as possible."
_PLAIN_NUMBER = re.compile(r"\s*[-+$]?[\d.,/]+\s*%?\s*")


class FailureLog:
    """`failures.jsonl`: the places where calls of a run failed, each with its kind.

    A later line about the same place counts: a run that was killed may do some steps again.
    """

    def __init__(self, path: Path, *, replay: bool) -> None:
        self._path, self._replay = path, replay
        self._known: dict[str, str] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                self._known[row["place"]] = row["why"]
            except (ValueError, KeyError, TypeError):
                # The last line may be torn, by a kill while it was written.
                if number < len(lines):
                    raise BadFile(f"{path} line {number} is not a failure record") from None

    def known(self, place: str) -> str | None:
        return (self._known.get(place) or None) if self._replay else None

    def note(self, place: str, why: str) -> None:
        if self._replay or self._known.get(place, "") == why:
            return
        self._known[place] = why
        try:
            with self._path.open("ab") as file:
                file.write(json.dumps({"place": place, "why": why}).encode() + b"\n")
        except OSError as error:
            raise CannotWrite(f"cannot write {self._path}: {error.strerror}") from error


@dataclass(frozen=True)
class Phrasing:
    """Everything the environment asks, opened."""

    mutator: Ask
    target: Ask
    rate: Rate
    embed: Embed
    dim: int
    pools: tuple[Pool, ...]
    failures: FailureLog
    asked: Counter[str]
    """Calls and tokens so far by what they were for, those from the cache too."""

    def run(self, work: Coroutine[Any, Any, Any], /) -> Any:
        return self.pools[0].run(work)

    def stats(self) -> dict[str, float]:
        """Calls, tokens and shares of all pools together."""
        found: dict[str, float] = {}
        for pool in self.pools:
            for name, value in pool.stats().items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found[name] = found.get(name, 0) + value
        return found


@contextmanager
def open_phrasing(
    config: QueryMutatorConfig,
    folder: Path,
    *,
    replay: bool = False,
    events: EventLog | None = None,
) -> Iterator[Phrasing]:
    """The models of a run; its answers are kept in `folder`, or all come from there (`replay`)."""
    store = folder / "calls.db"
    if replay and not store.exists():
        raise MissingFile(f"{folder} holds no calls.db; only a run that was begun can be replayed")
    with ExitStack() as open_things:
        # An answer cut off at max_tokens is what the target said: it is kept as well.
        mode: Literal["use", "replay"] = "replay" if replay else "use"
        cache = open_things.enter_context(Cache(store, cut_off="keep", mode=mode))
        pools: dict[tuple[str, ...], Pool] = {}

        def pool_for(role: str, model: str) -> tuple[Pool, str]:
            endpoints, name = _endpoints(config, role, model, replay)
            key = tuple(endpoint.name for endpoint in endpoints)
            if key not in pools:
                pools[key] = open_things.enter_context(
                    Pool(
                        *endpoints,
                        limit=width_of(config),
                        deadline_s=config.deadline_s,
                        tries=1 if replay else 5,
                        cache=cache,
                        budget=None if replay else ErrorBudget(config.error_budget, window=200),
                        events=events,
                    )
                )
            if not replay:
                for endpoint in endpoints:
                    pools[key].run(check_model(endpoint, name))
            return pools[key], name

        failures = FailureLog(folder / "failures.jsonl", replay=replay)
        asked: Counter[str] = Counter()
        rewriter = config.mutator_model or config.target_model
        target = _counted(
            _target(config, *pool_for("qa", config.target_model), replay), "target", asked
        )
        mutator = _counted(
            _mutator(config, *pool_for("mutator", rewriter), replay), "mutator", asked
        )
        rate = _rate(config, pool_for)
        embedder, dim = _embedder(config, pool_for)
        every = tuple(pools.values())
        yield Phrasing(mutator, target, rate, embedder, dim, every, failures, asked)


def _endpoints(
    config: QueryMutatorConfig, role: str, model: str, replay: bool
) -> tuple[tuple[Endpoint, ...], str]:
    if model == "sim":
        from batchwright.calls.simulator import Simulator

        known = load_questions(config.dataset, "all")
        rows = [{"question": q.question, "answer": q.answer, "category": q.category} for q in known]
        server = Simulator(questions=rows)
        return (Endpoint(server.in_process(), name="sim"),), f"sim-{role}"
    if replay:
        # Nobody is asked: what is not on the cassette was not asked by the run.
        name = model.rpartition("#")[2].removeprefix("ollama:").removeprefix("local:")
        return (Endpoint(_nobody, name="cassette"),), name
    if ":" in model or "#" in model:
        endpoint, name = parse_model(model)
        return (endpoint,), name
    if not config.endpoint:
        raise ConfigError(
            f"the model {model!r} has no server; give --endpoint URL, or write ollama:{model}, "
            f"URL#{model}, local:smollm2 or sim"
        )
    return tuple(Endpoint(url) for url in config.endpoint), model


def _nobody(requests: Sequence[Request]) -> list[Exception]:
    return [MissingFile("not on the cassette") for _ in requests]


def _target(config: QueryMutatorConfig, pool: Pool, model: str, replay: bool) -> Ask:
    async def ask(prompt: str, seed: int) -> Outcome:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        request = chat(model, messages, temperature=0, max_tokens=config.max_tokens)
        return _on_cassette(await pool.call(request), replay, model)

    return ask


def _mutator(config: QueryMutatorConfig, pool: Pool, model: str, replay: bool) -> Ask:
    async def ask(prompt: str, seed: int) -> Outcome:
        request = chat(
            model,
            prompt,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            seed=seed,
        )
        return _on_cassette(await pool.call(request), replay, model)

    return ask


def _counted(ask: Ask, name: str, asked: "Counter[str]") -> Ask:
    async def counting(prompt: str, seed: int) -> Outcome:
        outcome = await ask(prompt, seed)
        asked[f"{name}_calls"] += 1
        if outcome and outcome.usage:
            asked["tokens"] += outcome.usage.total
        return outcome

    return counting


def _on_cassette(outcome: Outcome, replay: bool, model: str) -> Outcome:
    if replay and not outcome:
        raise Mismatch(
            f"the run that is replayed has no answer of {model} to a question that comes up now; "
            f"replay with the files and the version it was made with"
        )
    return outcome


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

    async def rate(question: Question, wording: str, answer: str) -> Score:
        if kind == "cosine-similarity" and fixed is None:
            one, other = hashed_ngrams([answer, question.answer], DIM)
            return Score(max(0.0, float(one @ other)))
        rule = fixed or (Numeric() if _PLAIN_NUMBER.fullmatch(question.answer) else Contains())
        response = Response(answer, question.answer, prompt=question.question)
        (reward,) = await ascore_all([response], [rule], pool)
        if not reward.valid:
            return Score(float("nan"), f"reward_{reward.why}")
        return Score(max(0.0, reward.value))

    return rate


def _embedder(config: QueryMutatorConfig, pool_for: Any) -> tuple[Embed, int]:
    if config.embedder == "ngrams":

        async def hashed(texts: Sequence[str]) -> NDArray[np.float32]:
            return hashed_ngrams(texts, DIM)

        return hashed, DIM
    pool, name = pool_for("embed", config.embedder)

    async def asked(texts: Sequence[str]) -> NDArray[np.float32]:
        outcomes = [await pool.call(embed(name, text)) for text in texts]
        rows = []
        for outcome in outcomes:
            if not outcome:
                raise NoServer(
                    f"{name} gave no embedding ({outcome.kind}: {outcome.error}); the agent cannot "
                    f"see without one, use --embedder ngrams or a server that stands"
                )
            vector = np.asarray(outcome.vectors[0], np.float32)
            rows.append(vector / max(float(np.linalg.norm(vector)), 1e-9))
        return np.stack(rows)

    dim = len(pool.run(asked(["How long is a vector?"]))[0])
    return asked, dim
