"""Whether a server is reachable and has the model, checked before a long run."""

from collections.abc import Sequence

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.outcome import Done, Failed, Kind, Outcome
from batchwright.errors import NoServer

__all__ = ["check_any", "check_first", "check_model"]

SHOWN = 12
"""Models listed in the error about a missing one."""
_PERMANENT = {401, 403, 404}
"""No API key, a wrong one, no such model or path: the next call would fail the same."""


async def check_model(endpoint: Endpoint, model: str) -> None:
    """Look for `model` among the models that a server lists; one that lists none passes.

    Raises:
        NoServer: it cannot be reached, or has other models only, which are listed.
    """
    names = await _listed(endpoint)
    # Ollama lists the tag that is meant where none is given.
    if names is None or {model, f"{model}:latest"} & set(names):
        return
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
    raise NoServer(f"{endpoint.name} has no model {model!r}; it has {shown or 'none at all'}")


async def check_any(endpoints: Sequence[Endpoint]) -> None:
    """Query each server for its models until one responds, with whatever status.

    Raises:
        NoServer: none of them accepts a connection.
    """
    errors = []
    for endpoint in endpoints:
        try:
            await _listed(endpoint)
        except NoServer as error:
            errors.append(str(error))
        else:
            return
    raise NoServer("; ".join(errors))


def check_first(outcomes: Sequence[Outcome]) -> bool:
    """Whether a server responded to one of the first calls; cached responses do not count.

    Raises:
        NoServer: every call failed because the address, the API key or the model's name is wrong.
    """
    if any(isinstance(outcome, Done) and outcome.source != "cache" for outcome in outcomes):
        return True
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    permanent = [
        outcome
        for outcome in failed
        if outcome.kind is Kind.UNREACHABLE or outcome.status in _PERMANENT
    ]
    if failed and len(permanent) == len(failed):
        raise NoServer(
            f"the first {len(failed):,} calls all failed: {failed[0].error}; "
            f"check the endpoints, the API key and the names of the models"
        )
    return False


async def _listed(endpoint: Endpoint) -> list[str] | None:
    """The models of a server; None for one that lists none, and for a function."""
    if not endpoint.remote:
        return None
    # Here, because importing aiohttp takes a while and functions do not need it.
    from batchwright.calls.wire.http import HttpTransport

    transport = HttpTransport(endpoint)
    try:
        return await transport.models()
    finally:
        await transport.close()
