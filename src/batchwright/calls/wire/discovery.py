"""What a server says about itself: that it is there, its models, how long their responses get."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from batchwright.calls.endpoints import Endpoint
from batchwright.calls.outcome import Done, Failed, Kind, Outcome, parse_body
from batchwright.errors import NoServer

if TYPE_CHECKING:
    from batchwright.calls.wire.http import HttpTransport

__all__ = ["ModelLimit", "check_any", "check_first", "check_model", "model_limit"]

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


class ModelLimit(NamedTuple):
    """The most completion tokens of a response, whatever a request allows, and who says so."""

    tokens: int
    source: str


OUTPUT_LIMITS = ("max_completion_tokens", "max_output_tokens")
CONTEXTS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""What servers call the length of a model's context in their list of models: vLLM and SGLang;
OpenRouter and Together; Groq; Mistral and LM Studio. A response is shorter than its context."""
OLLAMA_CONTEXTS = 10
"""Ollama ends a response without `num_predict` after so many contexts: it shifts them."""
ASK_S = 10.0


async def model_limit(endpoint: Endpoint, model: str) -> ModelLimit | None:
    """How long a response of `model` can get by what its server says; None if it does not say.

    Asked are the list of models, llama.cpp's `/props` and Ollama's `/api/show`. No call is made,
    and a server that is not there says nothing.
    """
    if not endpoint.remote:
        return None
    from batchwright.calls.wire.http import HttpTransport

    transport = HttpTransport(endpoint)
    name = endpoint.model or model
    try:
        if endpoint.protocol == "ollama":
            return _by_ollama(await _asked(transport, "POST", "/api/show", name))
        rows = (await _asked(transport, "GET", "/models")).get("data")
        found = _by_list([row for row in rows or () if isinstance(row, dict)], name)
        if found is None:
            found = _by_props(await _asked(transport, "GET", "/props", root=True))
        if found is None:
            found = _by_ollama(await _asked(transport, "POST", "/api/show", name, root=True))
        return found
    finally:
        await transport.close()


async def _asked(
    transport: "HttpTransport", method: str, path: str, model: str = "", *, root: bool = False
) -> dict[str, Any]:
    from batchwright.calls.wire.http import Unanswered

    data = json.dumps({"model": model}).encode() if model else None
    try:
        response = await transport.exchange(method, path, data, timeout_s=ASK_S, root=root)
        found = parse_body(response.body) if response.status == 200 else None
    except (Unanswered, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _by_list(rows: Sequence[Mapping[str, Any]], model: str) -> ModelLimit | None:
    for row in rows:
        if row.get("id") != model:
            continue
        provider = row.get("top_provider")
        places = [row, provider] if isinstance(provider, Mapping) else [row]
        found = [
            ModelLimit(place[field], f"{field} in its list of models")
            for place in places
            for field in (*OUTPUT_LIMITS, *CONTEXTS)
            if _positive(place.get(field))
        ]
        return min(found) if found else None
    return None


def _by_props(body: Mapping[str, Any]) -> ModelLimit | None:
    settings = body.get("default_generation_settings")
    tokens: Any = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    return ModelLimit(tokens, "n_ctx in its /props") if _positive(tokens) else None


def _by_ollama(body: Mapping[str, Any]) -> ModelLimit | None:
    for line in str(body.get("parameters") or "").splitlines():
        words = line.split()
        if words[:1] == ["num_predict"] and words[-1].isdecimal() and int(words[-1]) > 0:
            return ModelLimit(int(words[-1]), "num_predict of its Modelfile")
    about = body.get("model_info")
    for name, value in about.items() if isinstance(about, Mapping) else ():
        if str(name).endswith(".context_length") and _positive(value):
            why = f"{OLLAMA_CONTEXTS} times the {name} that it shows"
            return ModelLimit(OLLAMA_CONTEXTS * value, why)
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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
