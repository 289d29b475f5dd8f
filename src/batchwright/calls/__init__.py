"""Requests in, ordered outcomes out: the call engine.

    request -> cache -> limit -> endpoint -> outcome

`pool.py` is where callers meet it, `engine.py` where the steps meet.
"""

from batchwright.calls.budget import ErrorBudget
from batchwright.calls.endpoints import Endpoint, parse_model
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source, Usage
from batchwright.calls.pool import Interrupted, Pool, Stream
from batchwright.calls.request import Request, chat, complete, embed

__all__ = [
    "Done",
    "Endpoint",
    "ErrorBudget",
    "Failed",
    "Interrupted",
    "Kind",
    "Outcome",
    "Pool",
    "Request",
    "Source",
    "Stream",
    "Usage",
    "chat",
    "complete",
    "embed",
    "parse_model",
]
