"""What the calls came to: counts, latencies, tokens and money."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchwright.calls.outcome import Done, Failed, Kind, Usage
from batchwright.calls.request import Request

__all__ = ["Ledger", "Prices", "estimate_tokens", "estimate_usage"]

Prices = Mapping[str, tuple[float, float]]
"""Of each model: the price of a million tokens in, and of a million out."""

BYTES_A_TOKEN = 4
LATENCIES = 512
"""Quantiles are of the last so many answers."""


def estimate_usage(request: Request, answer_tokens: float = 0.0) -> Usage:
    """What a call may use before the server has counted: text by its size, answers by `max_tokens`.

    `answer_tokens` stands for an answer whose length is not limited, say the mean so far.
    """
    body = request.body
    most = body.get("max_tokens") or body.get("max_completion_tokens") or answer_tokens
    return Usage(len(request.data) // BYTES_A_TOKEN, int(most))


def estimate_tokens(request: Request, answer_tokens: float = 0.0) -> int:
    """The tokens of both ways together."""
    return estimate_usage(request, answer_tokens).total


@dataclass(slots=True)
class Ledger:
    """Counters of one pool. Everything is counted once, on the pool's own thread."""

    prices: Prices = field(default_factory=dict)
    asked: int = 0
    """Requests given to the pool."""
    sent: int = 0
    """Tries that left for a server, hedges and retries among them."""
    done: int = 0
    hits: int = 0
    """Answered by the cache."""
    shared: int = 0
    """Answered by an equal call in flight, here or in another process."""
    retries: int = 0
    rejects: int = 0
    hedges: int = 0
    failed: Counter[Kind] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    """Answers without token counts of the server; their cost is estimated from their size."""
    cost: float = 0.0
    cache_errors: int = 0
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))
    _answers: int = 0

    def price(self, request: Request, usage: Usage) -> float:
        into, out = self.prices.get(request.model, (0.0, 0.0))
        return (usage.prompt_tokens * into + usage.completion_tokens * out) / 1e6

    def answered(self, request: Request, done: Done, seconds: float) -> None:
        """An answer came back from a server, and is paid."""
        usage = done.usage
        if usage is None:
            self.uncounted += 1
            usage = estimate_usage(request, len(done.text) / BYTES_A_TOKEN)
        else:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
        if self.prices:
            self.cost += self.price(request, usage)
        self._answers += 1
        self._latencies.append(seconds)

    @property
    def mean_answer_tokens(self) -> float:
        return self.completion_tokens / self._answers if self._answers else 0.0

    @property
    def mean_cost(self) -> float:
        return self.cost / self._answers if self._answers else 0.0

    def quantiles(self, *shares: float) -> list[float | None]:
        """Latencies in seconds, of the last answers; None before the first one."""
        ordered = sorted(self._latencies)
        last = len(ordered) - 1
        return [ordered[round(share * last)] if ordered else None for share in shares]

    @property
    def measured(self) -> int:
        """How many answers the quantiles rest on."""
        return len(self._latencies)

    def failure(self, failed: Failed) -> None:
        self.failed[failed.kind] += 1

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
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "uncounted": self.uncounted,
            "cost": self.cost,
            "cache_errors": self.cache_errors,
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
        }
