"""Requests in, ordered outcomes out: the call engine.

    request -> cache -> limit -> endpoint -> outcome

`pool.py` is where the steps meet.
"""

from batchwright.calls.outcome import Done, Failed, Kind, Outcome, Source, Usage
from batchwright.calls.request import Request, chat, complete, embed

__all__ = [
    "Done",
    "Failed",
    "Kind",
    "Outcome",
    "Request",
    "Source",
    "Usage",
    "chat",
    "complete",
    "embed",
]
