"""Flags shared by the commands of `batchwright calls`."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from batchwright.calls import Endpoint

__all__ = ["EndpointFlag", "KeyEnv", "ModelFlag", "endpoint_at"]

EndpointFlag = Annotated[
    list[str],
    Parameter(
        name=["--endpoint", "-e"],
        negative="",
        help="http://host:8000/v1, ollama://host, "
        "unix:///path.sock, local:smollm2; several share the load.",
    ),
]
ModelFlag = Annotated[
    str, Parameter(name=["--model", "-m"], help="The model's name at the endpoint.")
]
KeyEnv = Annotated[
    str | None,
    Parameter(
        help="Environment variable that holds the API key (default for https: OPENAI_API_KEY)."
    ),
]


def endpoint_at(target: str, key_env: str | None) -> "Endpoint":
    """The endpoint of the flags."""
    from batchwright.calls import Endpoint

    return Endpoint(target, key_env=key_env)
