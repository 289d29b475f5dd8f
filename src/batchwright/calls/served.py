"""Whether a server is there and has the model, asked before the first call."""

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.transport import HttpTransport
from batchwright.errors import NoServer

__all__ = ["check_model"]

SHOWN = 12
"""Models named in the sentence about a wrong one."""


async def check_model(endpoint: Endpoint, model: str) -> None:
    """Look for `model` among the models that a server lists; one that lists none is believed.

    Raises:
        NoServer: nobody answers, or the server has other models only, which are named.
    """
    if not endpoint.remote:
        return
    transport = HttpTransport(endpoint)
    try:
        names = await transport.models()
    finally:
        await transport.close()
    # Ollama lists the tag that is meant where none is given.
    if names is None or {model, f"{model}:latest"} & set(names):
        return
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
    raise NoServer(f"{endpoint.name} has no model {model!r}; it has {shown or 'none at all'}")
