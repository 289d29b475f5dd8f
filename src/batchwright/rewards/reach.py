"""Whether anybody is there to be asked: a wrong address is known before the deadline is over."""

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from batchwright.calls import Done, Endpoint, Failed, Kind, Outcome
from batchwright.errors import NoServer

__all__ = ["knock", "refuse_strangers"]

KNOCK_S = 5.0
_NOT_OURS = {401, 403, 404}
"""No key, a wrong key, no such model or path: the next call would be told the same."""


def knock(endpoints: Sequence[Endpoint]) -> None:
    """Open a connection to each server, and close it.

    Raises:
        NoServer: not one of them takes a connection.
    """
    errors = []
    for endpoint in endpoints:
        if not endpoint.remote:
            return
        try:
            _open(endpoint).close()
        except OSError as error:
            errors.append(f"{endpoint.name}: {error.strerror or error}")
        else:
            return
    raise NoServer(
        f"no connection to {'; '.join(errors)}; start the server, or change the endpoints"
    )


def refuse_strangers(outcomes: Sequence[Outcome]) -> bool:
    """Look at the first calls; whether a server answered one of them. What is kept is no answer.

    Raises:
        NoServer: every call failed because the address, the key or the model's name is wrong.
    """
    if any(isinstance(outcome, Done) and outcome.source != "cache" for outcome in outcomes):
        return True
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    hopeless = [
        outcome
        for outcome in failed
        if outcome.kind is Kind.UNREACHABLE or outcome.status in _NOT_OURS
    ]
    if failed and len(hopeless) == len(failed):
        raise NoServer(
            f"the first {len(failed):,} calls all failed: {failed[0].error}; "
            f"check the endpoints, the key and the names of the models"
        )
    return False


def _open(endpoint: Endpoint) -> socket.socket:
    if endpoint.socket is not None:
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.settimeout(KNOCK_S)
            opened.connect(endpoint.socket)
        except OSError:
            opened.close()
            raise
        return opened
    parts = urlsplit(endpoint.base)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return socket.create_connection((parts.hostname or "localhost", port), KNOCK_S)
