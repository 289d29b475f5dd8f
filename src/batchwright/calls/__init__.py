"""Requests in, ordered outcomes out: the call engine.

    request -> cache -> limit -> endpoint -> outcome

`pool.py` is what callers hold; `engine/engine.py` has the life of a request from top to bottom.
"""

from batchwright.calls.cache.store import Cache
from batchwright.calls.endpoints import Endpoint, parse_model
from batchwright.calls.engine.budgets import ErrorBudget
from batchwright.calls.limit import AutoLimit, FixedLimit
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source, Usage
from batchwright.calls.pool import Interrupted, Pool, Stream
from batchwright.calls.queries import (
    Texts,
    Vectors,
    batch_encode_queries,
    batch_mutate_queries,
    batch_query_target_model,
)
from batchwright.calls.request import Request, chat, complete, embed, respond

__all__ = [
    "AutoLimit",
    "Cache",
    "Done",
    "Endpoint",
    "ErrorBudget",
    "Failed",
    "FixedLimit",
    "Interrupted",
    "Kind",
    "Outcome",
    "Pool",
    "Request",
    "Source",
    "Stream",
    "Texts",
    "Usage",
    "Vectors",
    "batch_encode_queries",
    "batch_mutate_queries",
    "batch_query_target_model",
    "chat",
    "complete",
    "embed",
    "parse_model",
    "respond",
]
