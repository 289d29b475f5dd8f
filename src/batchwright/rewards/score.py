"""Responses in, rewards out: all calls of all parts of all responses are in flight together."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from batchwright.calls import Endpoint, ErrorBudget, Outcome, Pool, Request
from batchwright.calls.loop import unforked
from batchwright.calls.wire.discovery import check_first
from batchwright.errors import (
    BadReward,
    BadRow,
    BatchwrightError,
    ConfigError,
    one_line,
)
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.reward import Part, Response, Reward
from batchwright.rewards.rules import Rule

__all__ = ["Column", "Scorer", "Work", "ascore_all", "plan_work", "score_all"]

Column = float | str | bool


@dataclass(frozen=True, slots=True)
class Work:
    """The calls that some responses need, and which outcomes belong to which part."""

    responses: Sequence[Response]
    requests: Sequence[Request]
    spans: Sequence[Sequence[tuple[Rule, int, int]]]
    """For each response: the parts that apply to it, each with its slice of requests."""
    failed: Mapping[tuple[int, str], Part]
    """Parts whose rule raised while it made its requests, by response and column."""

    def rewards(self, outcomes: Sequence[Outcome]) -> list[Reward]:
        """The rewards, given the outcomes of `requests` in order."""
        found = []
        for number, (response, spans) in enumerate(zip(self.responses, self.spans, strict=True)):
            parts: dict[str, tuple[float, Part]] = {}
            for rule, first, end in spans:
                part = self.failed.get((number, rule.column))
                parts[rule.column] = rule.weight, part or _part(rule, response, outcomes[first:end])
            found.append(Reward.of(parts))
        return found


def plan_work(responses: Iterable[Response], parts: Sequence[Rule]) -> Work:
    """The calls to make before the responses can be scored.

    Raises:
        ConfigError: no part applies to a response, or two parts share a name.
        BadRow: a template uses a field that a sample does not have.
    """
    given = list(responses)
    requests: list[Request] = []
    spans = []
    failed = {}
    for number, response in enumerate(given):
        text: object = response.text
        if not isinstance(text, str):
            raise BadRow(f"response {number} is {type(text).__name__}, not text; decode it first")
        span: list[tuple[Rule, int, int]] = []
        for part in parts:
            if part.applies(response):
                first = len(requests)
                try:
                    requests += part.requests_of(response)
                except BatchwrightError:
                    raise
                except Exception as error:
                    failed[number, part.column] = _raised(part, error)
                span.append((part, first, len(requests)))
        columns = [part.column for part, _, _ in span]
        if len(set(columns)) != len(columns):
            raise ConfigError(f"two parts share a name among {columns}; give each its own `name`")
        if not span:
            known = sorted({name for part in parts for name in part.datasets})
            raise ConfigError(
                f"response {number} is from data set {response.dataset!r}, and no part applies to "
                f"it; there are parts for {', '.join(known) or 'nothing'}: add one for it to the "
                f"TOML file that --config, `config` or BATCHWRIGHT_REWARDS names"
            )
        spans.append(span)
    return Work(given, requests, spans, failed)


def _part(rule: Rule, response: Response, outcomes: Sequence[Outcome]) -> Part:
    """The part of a rule; what a rule raises by mistake is an invalid part of this response."""
    try:
        part: object = rule.part_of(response, outcomes)
    except BatchwrightError:
        # A setting or a template is wrong: for every response.
        raise
    except Exception as error:
        return _raised(rule, error)
    if not isinstance(part, Part):
        name = type(rule).__name__
        return Part.missing(
            "rule_error", f"{name}.part_of returned {type(part).__name__}; it must return a Part"
        )
    return part


def _raised(rule: Rule, error: Exception) -> Part:
    where = f"the rule {type(rule).__name__} raised {type(error).__name__}"
    return Part.missing("rule_error", f"{where}: {one_line(error)}")


def score_all(
    responses: Iterable[Response],
    parts: Sequence[Rule],
    pool: Pool | None = None,
) -> list[Reward]:
    """Score responses, in order; `pool` makes the calls, rules without a model need none.

    >>> from batchwright.rewards.rules import Numeric
    >>> [right, wrong] = score_all([Response("4", "4"), Response("5", "4")], [Numeric()])
    >>> right.value, wrong.value
    (1.0, 0.0)
    """
    work = plan_work(responses, parts)
    outcomes = _required(pool, work.requests).map(work.requests) if work.requests else []
    return work.rewards(outcomes)


async def ascore_all(
    responses: Iterable[Response], parts: Sequence[Rule], pool: Pool | None = None
) -> list[Reward]:
    """`score_all` from inside an event loop."""
    work = plan_work(responses, parts)
    outcomes = await _required(pool, work.requests).amap(work.requests) if work.requests else []
    return work.rewards(outcomes)


class Scorer:
    """Scores by a configuration. It can be pickled: each process opens its own pool on first use.

    Until one call succeeded, an unreachable server, a wrong key or an unknown model raises
    `NoServer`; after that, the samples it affects are invalid.

    >>> scorer = Scorer(RewardsConfig.of({"part": [{"kind": "numeric"}]}))
    >>> scorer.score([Response("4", "4")])[0].value
    1.0
    """

    def __init__(self, config: RewardsConfig) -> None:
        self.config = config
        self._pool: Pool | None = None
        self._pid = 0
        self._answered = False

    def __reduce__(self) -> tuple[type["Scorer"], tuple[RewardsConfig]]:
        return type(self), (self.config,)

    @property
    def pool(self) -> Pool | None:
        """The pool of this process; None without endpoints."""
        if not self.config.endpoints:
            return None
        with unforked():
            if self._pool is None or self._pid != os.getpid():
                config = self.config
                self._pid = os.getpid()
                self._pool = _pool_class(config)(
                    *(Endpoint(url, key_env=config.key_env) for url in config.endpoints),
                    limit=config.batch_size,
                    cache=config.cache,
                    deadline_s=config.deadline_s,
                    budget=ErrorBudget(config.error_budget) if config.error_budget else None,
                )
            return self._pool

    def score(
        self,
        responses: Iterable[Response],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Reward]:
        """Rewards in the order of the responses; `progress` gets calls done and their total."""
        work = plan_work(responses, self.config.part)
        return work.rewards(self.call(work.requests, progress))

    async def ascore(self, responses: Iterable[Response]) -> list[Reward]:
        """`score` from inside an event loop; concurrent calls share the pool."""
        work = plan_work(responses, self.config.part)
        if not work.requests:
            return work.rewards([])
        pool = _required(self.pool, work.requests)
        if not self._answered:
            await asyncio.to_thread(pool.check, work.requests)
        return work.rewards(self._checked(await pool.amap(work.requests)))

    def call(
        self,
        requests: Sequence[Request],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Outcome]:
        """The outcomes of requests, in order."""
        if not requests:
            return []
        pool = _required(self.pool, requests)
        if not self._answered:
            pool.check(requests)
        return self._checked(pool.map(requests, progress=progress))

    def columns(
        self, rewards: Sequence[Reward], missing: Missing | None = None
    ) -> list[dict[str, Column]]:
        """One row per reward, all with the same columns: `score`, `valid`, `why` and the parts.

        `missing` chooses what an invalid reward becomes: an error, NaN (`mask`) or a number;
        `valid` and `why` tell in each case.

        Raises:
            BadReward: a reward is invalid and `missing` is `raise`.
        """
        policy = self.config.missing if missing is None else missing
        invalid = [number for number, reward in enumerate(rewards) if not reward.valid]
        if invalid and policy == "raise":
            first = rewards[invalid[0]]
            error = next(part.error for part in first.parts.values() if part.why == first.why)
            raise BadReward(
                f"{len(invalid)} of {len(rewards)} rewards are missing, the first is sample "
                f"{invalid[0]}: {first.why}, {error}; set missing to mask or a number to continue"
            )
        return [self._row(reward, policy) for reward in rewards]

    def close(self) -> None:
        """Close the pool of this process, if there is one."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.close()
        self._pool = None

    def _checked(self, outcomes: list[Outcome]) -> list[Outcome]:
        if not self._answered:
            self._answered = check_first(outcomes)
        return outcomes

    def _row(self, reward: Reward, policy: Missing) -> dict[str, Column]:
        nan = float("nan")
        score = reward.value
        if not reward.valid and isinstance(policy, int | float):
            score = float(policy)
        # A valid reward may lack a part of weight 0; the row says why.
        why = reward.why or next((p.why for p in reward.parts.values() if not p.valid), "")
        row: dict[str, Column] = {"score": score, "valid": reward.valid, "why": why}
        for rule in self.config.part:
            part = reward.parts.get(rule.column)
            name = f"{rule.column}_reward"
            row.setdefault(name, nan)
            if part is not None:
                row[name] = rule.weight * part.value
            for fact in rule.fact_names:
                found = None if part is None else part.facts.get(fact)
                column = f"{rule.column}_{fact}"
                if found is not None:
                    row[column] = found if isinstance(found, str) else float(found)
                row.setdefault(column, nan)
        return row


def _pool_class(config: RewardsConfig) -> type[Pool]:
    """The class of pools that a configuration chooses."""
    if config.on == "here":
        return Pool
    # By name: what stands on other frameworks is above this package, and is not imported by it.
    found: type[Pool] = import_module("batchwright.integrations.ray").RayPool
    return found


def _required(pool: Pool | None, requests: Sequence[Request]) -> Pool:
    if pool is None:
        models = sorted({request.model for request in requests})
        raise ConfigError(
            f"{len(requests):,} calls to {', '.join(models)} are needed, and there is no endpoint; "
            f"add endpoints = [...]"
        )
    return pool
