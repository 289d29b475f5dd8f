"""Responses in, rewards out: all calls of all parts of all responses in one window."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchwright.calls import Outcome, Pool, Request
from batchwright.errors import BadRow, ConfigError
from batchwright.rewards.reward import Part, Response, Reward
from batchwright.rewards.rules import Rule

__all__ = ["Work", "ascore_all", "needed", "plan_work", "score_all"]


@dataclass(frozen=True, slots=True)
class Work:
    """The calls that some responses need, and where each answer belongs."""

    responses: Sequence[Response]
    requests: Sequence[Request]
    spans: Sequence[Sequence[tuple[Rule, int, int]]]
    """For each response: the parts that apply to it, each with its stretch of requests."""

    def rewards(self, outcomes: Sequence[Outcome]) -> list[Reward]:
        """The rewards, given the outcomes of `requests` in their order."""
        found = []
        for response, spans in zip(self.responses, self.spans, strict=True):
            parts: dict[str, tuple[float, Part]] = {}
            for rule, first, end in spans:
                parts[rule.column] = (rule.weight, rule.part_of(response, outcomes[first:end]))
            found.append(Reward.of(parts))
        return found


def plan_work(responses: Iterable[Response], parts: Sequence[Rule]) -> Work:
    """What has to be asked before the responses can be scored.

    Raises:
        ConfigError: a response's data set has no part, or two parts of one name.
        BadRow: a template asks for a field that a sample has not.
    """
    given = list(responses)
    requests: list[Request] = []
    spans = []
    for number, response in enumerate(given):
        text: object = response.text
        if not isinstance(text, str):
            raise BadRow(f"response {number} is {type(text).__name__}, not text; decode it first")
        span: list[tuple[Rule, int, int]] = []
        for part in parts:
            if part.applies(response):
                first = len(requests)
                requests += part.requests_of(response)
                span.append((part, first, len(requests)))
        columns = [part.column for part, _, _ in span]
        if len(set(columns)) != len(columns):
            raise ConfigError(f"two parts share a name among {columns}; give each its own `name`")
        if not span:
            known = sorted({name for part in parts for name in part.datasets})
            raise ConfigError(
                f"response {number} is of data set {response.dataset!r}, for which there is no "
                f"part; there are parts for {', '.join(known) or 'nothing'}"
            )
        spans.append(span)
    return Work(given, requests, spans)


def score_all(
    responses: Iterable[Response],
    parts: Sequence[Rule],
    pool: Pool | None = None,
) -> list[Reward]:
    """Score responses, in order. `pool` makes the calls; rules alone need none.

    >>> from batchwright.rewards.rules import Numeric
    >>> [right, wrong] = score_all([Response("4", "4"), Response("5", "4")], [Numeric()])
    >>> right.value, wrong.value
    (1.0, 0.0)
    """
    work = plan_work(responses, parts)
    outcomes = needed(pool, work.requests).map(work.requests) if work.requests else []
    return work.rewards(outcomes)


async def ascore_all(
    responses: Iterable[Response], parts: Sequence[Rule], pool: Pool | None = None
) -> list[Reward]:
    """`score_all` for those who are in an event loop already."""
    work = plan_work(responses, parts)
    outcomes = await needed(pool, work.requests).amap(work.requests) if work.requests else []
    return work.rewards(outcomes)


def needed(pool: Pool | None, requests: Sequence[Request]) -> Pool:
    """The pool, or the reason why one has to be named."""
    if pool is None:
        models = sorted({request.model for request in requests})
        raise ConfigError(
            f"{len(requests):,} calls to {', '.join(models)} are needed and no endpoint is named; "
            f"add endpoints = [...]"
        )
    return pool
