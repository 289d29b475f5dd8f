"""Counts, latencies, tokens and cost of a pool's calls, and the event log about them."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from batchwright.calls.engine.endpoint import Upstream
from batchwright.calls.outcome import Done, Failed, Kind, Usage
from batchwright.calls.request import Request
from batchwright.errors import CannotWrite
from batchwright.events import EventLog

__all__ = ["Prices", "Stats", "StatsLog", "estimate_usage", "most_completion", "most_usage"]

Prices = Mapping[str, tuple[float, float]]
"""Of each model: dollars for a million prompt tokens, and for a million completion tokens."""

BYTES_PER_TOKEN = 4
TEMPLATE_TOKENS = 100
"""What the chat template of a server may add to a prompt, at most."""
TEXT = ("text", "input_text", "output_text")
"""Parts of a message whose tokens can be bounded."""
ERROR, ERRORS = 200, 50
"""Characters of an error sentence, and different ones, that are counted."""
LATENCIES = 512
"""Quantiles are of the last so many responses."""


def estimate_usage(request: Request, completion_tokens: float = 0.0) -> Usage:
    """Tokens of a call before the server counts them: the prompt by its bytes.

    The completion counts as `max_tokens`; `completion_tokens`, say the mean so far, stands for
    one without a limit.
    """
    limit = most_completion(request)
    tokens = completion_tokens if limit is None else limit
    return Usage(len(request.data) // BYTES_PER_TOKEN, int(tokens))


def most_completion(request: Request) -> int | None:
    """The most completion tokens that a request allows, all choices together; None if any number.

    >>> from batchwright.calls.request import chat
    >>> most_completion(chat("m", "2+2?", max_tokens=9, n=3)), most_completion(chat("m", "2+2?"))
    (27, None)
    """
    if request.kind == "embed":
        return 0
    body = request.body
    names = ("max_tokens", "max_completion_tokens", "num_predict", "max_output_tokens")
    limits = [body[name] for name in names if body.get(name) is not None]
    choices = [body.get(name) or 1 for name in ("n", "best_of")]
    if not limits or not all(isinstance(one, int) and one > 0 for one in limits + choices):
        return None
    return int(max(limits)) * int(max(choices))


def most_usage(request: Request, most: int | None = None) -> Usage | None:
    """An upper bound of the tokens of one try; None if the request does not give one.

    `most` are the completion tokens of one choice that the model itself cannot exceed: they bound
    a request that sets no limit.

    A token of text takes a byte at least. What an image, a sound, a stored conversation or a tool
    of the server takes is not known.
    """
    completion = most_completion(request)
    body = request.body
    if completion is None and most is not None:
        choices = [body.get(name) or 1 for name in ("n", "best_of")]
        if all(isinstance(one, int) and one > 0 for one in choices):
            completion = most * int(max(choices))
    messages = body.get("messages") or ()
    if request.kind == "respond":
        stored = any(body.get(name) for name in ("previous_response_id", "conversation", "prompt"))
        tools = [tool for tool in body.get("tools") or () if isinstance(tool, Mapping)]
        if stored or any(tool.get("type") != "function" for tool in tools):
            return None
        messages = body["input"] if isinstance(body["input"], list) else ()
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    plain = all(isinstance(part, Mapping) and part.get("type") in TEXT for part in parts)
    if completion is None or not plain:
        return None
    return Usage(len(request.data) + TEMPLATE_TOKENS, completion)


@dataclass(slots=True)
class Stats:
    """Counters of one pool, all of them changed on the pool's own loop."""

    prices: Prices = field(default_factory=dict)
    most_tokens: Mapping[str, int] = field(default_factory=dict)
    """Completion tokens that a response of a model has at most, where requests do not say it."""
    asked: int = 0
    """Requests given to the pool."""
    sent: int = 0
    """Tries that left for a server, hedges and retries included."""
    done: int = 0
    hits: int = 0
    """Served from the cache."""
    shared: int = 0
    """Served by an equal call in flight, here or in another process."""
    retries: int = 0
    rejects: int = 0
    hedges: int = 0
    given_up: int = 0
    """Tries that hung while calls sent later were answered, and were cut off."""
    failed: Counter[Kind] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Sentences of failed calls; when there are too many different ones, the rest as one."""
    busy_s: float = 0.0
    """Seconds that tries were in flight, those that failed included."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    """Responses without the server's token counts; they count as the most they may cost, or, if
    their requests give no bound, by their size."""
    cost: float = 0.0
    unsettled: int = 0
    """Tries without a readable response that the server may bill all the same."""
    unsettled_cost: float = 0.0
    """The most that they may cost, counted only where there are prices; inf without a bound."""
    capped: bool = False
    """The spending cap was reached."""
    cache_errors: int = 0
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))
    _responses: int = 0

    def price(self, request: Request, usage: Usage) -> float:
        """Dollars for a call with these tokens."""
        prompt, completion = self.prices.get(request.model, (0.0, 0.0))
        return (usage.prompt_tokens * prompt + usage.completion_tokens * completion) / 1e6

    def most_cost(self, request: Request) -> float:
        """The most dollars that one try may cost; inf if the request does not give a bound."""
        if self.prices.get(request.model) == (0, 0):
            return 0.0
        usage = most_usage(request, self.most_tokens.get(request.model))
        return inf if usage is None else self.price(request, usage)

    def cost_of(self, request: Request, done: Done) -> float:
        """Dollars for a response; without the server's token counts, the most it may cost."""
        if done.usage is not None:
            return self.price(request, done.usage)
        most = self.most_cost(request)
        if most < inf:
            return most
        return self.price(request, estimate_usage(request, len(done.text) / BYTES_PER_TOKEN))

    def responded(self, request: Request, done: Done, seconds: float) -> None:
        """Count a response of a server, which is paid for."""
        usage = done.usage
        if usage is None:
            self.uncounted += 1
        else:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
        if self.prices:
            self.cost += self.cost_of(request, done)
        self._responses += 1
        self._latencies.append(seconds)

    @property
    def mean_completion_tokens(self) -> float:
        return self.completion_tokens / self._responses if self._responses else 0.0

    @property
    def responses(self) -> int:
        """Responses of servers, each of which is paid for."""
        return self._responses

    def quantiles(self, *shares: float) -> list[float | None]:
        """Latencies in seconds, of the last responses; None before the first one."""
        ordered = sorted(self._latencies)
        last = len(ordered) - 1
        return [ordered[round(share * last)] if ordered else None for share in shares]

    @property
    def measured(self) -> int:
        """How many responses the quantiles rest on."""
        return len(self._latencies)

    def unanswered(self, request: Request) -> None:
        """Count a try that may be billed, and whose response is not there."""
        self.unsettled += 1
        if self.prices:
            self.unsettled_cost += self.most_cost(request)

    def failure(self, failed: Failed) -> None:
        self.failed[failed.kind] += 1
        sentence = failed.error[:ERROR]
        known = sentence in self.errors or len(self.errors) < ERRORS
        self.errors[sentence if known else "other errors"] += 1

    def as_dict(self) -> dict[str, Any]:
        p50, p95, p99 = self.quantiles(0.5, 0.95, 0.99)
        return {
            "asked": self.asked,
            "done": self.done,
            "failed": self.failed.total(),
            "failed_by_kind": {str(kind): n for kind, n in self.failed.items() if n},
            "sent": self.sent,
            "hits": self.hits,
            "shared": self.shared,
            "retries": self.retries,
            "rejects": self.rejects,
            "hedges": self.hedges,
            "given_up": self.given_up,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "uncounted": self.uncounted,
            "cost": self.cost,
            "unsettled": self.unsettled,
            "unsettled_cost": self.unsettled_cost if self.unsettled_cost < inf else None,
            "capped": self.capped,
            "cache_errors": self.cache_errors,
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
        }


class StatsLog:
    """Writes statistics and limit changes to an event log; without a log it does nothing."""

    def __init__(
        self, events: EventLog | None, stats: Stats, upstreams: Sequence[Upstream]
    ) -> None:
        self._events = events
        self._stats = stats
        self._upstreams = upstreams
        self.since = 0.0
        """Where the window of the next line begins."""
        self._reported: dict[str, int] = {}
        self._busy_s = self._cost = 0.0
        self._failed_by: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def write_changes(self) -> None:
        """Every change of a limit, with its reason."""
        for upstream in self._upstreams:
            for change in upstream.limit.take_changes():
                fields = {"from": change.before, "to": change.after, "why": change.why}
                self._write("limit", endpoint=upstream.endpoint.name, **fields)

    def write_calls(self, now: float) -> None:
        """What happened since the last line, if anything did."""
        if self._events is None:
            return
        self.write_changes()
        stats = self._stats
        counts = {
            "sent": stats.sent,
            "hit": stats.hits,
            "dedup": stats.shared,
            "retry": stats.retries,
            "failed": stats.failed.total(),
            "done": stats.done,
        }
        new = {name: n - self._reported.get(name, 0) for name, n in counts.items()}
        window, self.since = now - self.since, now
        if not any(new.values()):
            return
        self._reported = counts
        p50, p95, p99 = stats.quantiles(0.5, 0.95, 0.99)
        busy_s, self._busy_s = stats.busy_s - self._busy_s, stats.busy_s
        failed_by = Counter({str(kind): n for kind, n in stats.failed.items()})
        kinds, errors = failed_by - self._failed_by, stats.errors - self._errors
        self._failed_by, self._errors = failed_by, stats.errors.copy()
        limit = sum(upstream.limit.limit for upstream in self._upstreams)
        self._write(
            "calls",
            window_s=round(window, 3),
            **new,
            p50=p50,
            p95=p95,
            p99=p99,
            limit=limit,
            busy_s=round(busy_s, 4),
            room_s=round(limit * window, 4),
            failed_by=dict(kinds),
            errors=dict(errors),
            in_flight=sum(upstream.in_flight for upstream in self._upstreams),
            spent=stats.cost - self._cost,
        )
        self._cost = stats.cost

    def _write(self, kind: str, /, **fields: Any) -> None:
        if self._events is None:
            return
        try:
            self._events.write(kind, **fields)
        except (CannotWrite, ValueError):
            # A log that cannot be written, or is closed already, must not stop the calls.
            self._events = None
