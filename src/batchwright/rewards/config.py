"""The configuration of a reward, its parts and endpoints: TOML or environment variables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchwright.errors import BadFile, ConfigError
from batchwright.files import existing, parse_toml, read_regular_text
from batchwright.rewards.expressions import Math
from batchwright.rewards.model_rules import Judge, Monitor, Similarity
from batchwright.rewards.rules import (
    Contains,
    Correctness,
    Exact,
    Format,
    JsonSchema,
    Numeric,
    Pattern,
    Verbosity,
)

__all__ = ["Missing", "RewardsConfig"]

AnyPart = Annotated[
    Format
    | Correctness
    | Verbosity
    | Pattern
    | Numeric
    | Math
    | Exact
    | Contains
    | JsonSchema
    | Judge
    | Monitor
    | Similarity,
    Field(discriminator="kind"),
]
Missing = Literal["raise", "mask"] | float
"""What an invalid reward becomes: an error, NaN (`mask`), or this number."""

OPENAI = "https://api.openai.com/v1"
DOCUMENTED = ("diamonds*", "function_correctness*")
"""The data sets whose responses are lists between `<measurements>` tags."""


class RewardsConfig(BaseModel):
    """A reward: its parts, the endpoints that serve its models, and what an invalid one becomes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: tuple[AnyPart, ...] = Field(min_length=1)
    endpoints: tuple[str, ...] = ()
    """As `Endpoint` takes them: `http://host:8000/v1`, `ollama://host`, `local:NAME`."""
    key_env: str | None = None
    """The environment variable with the API key."""
    batch_size: int | Literal["auto"] = "auto"
    """Calls in flight."""
    on: Literal["here", "ray"] = "here"
    """Where the calls are made: in each process by itself, or by one pool of the Ray cluster, so
    that all its workers stay within one limit and share one cache."""
    cache: Path | None = None
    """File that caches responses."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Timeout of a call in seconds, including its retries."""
    error_budget: float | None = Field(default=None, gt=0, lt=1)
    """Stop when more than this fraction of the last 1000 calls failed."""
    missing: Missing = "raise"

    @classmethod
    def load(cls, path: str | Path) -> "RewardsConfig":
        """Read a TOML file; an error names the place of the mistake."""
        place = existing(Path(path), "reward configuration")
        try:
            found = parse_toml(read_regular_text(place))
        except BadFile:
            raise
        except ValueError as error:
            raise BadFile(f"{path} is not TOML: {error}") from None
        return cls.of(found, str(path))

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str = "the configuration") -> "RewardsConfig":
        """Validate settings; `where` names their source in errors.

        >>> RewardsConfig.of({"part": [{"kind": "numeric"}]}).part[0].column
        'numeric'
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(step) for step in first["loc"]) or "it"
            raise ConfigError(f"{where}: {place}: {first['msg']}") from None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "RewardsConfig":
        """The reward of lists between tags, by TRAIN_WITH_MONITOR and the variables around it.

        Format, correctness and `K` per word before the tag; with `TRAIN_WITH_MONITOR=true` a
        monitor at `OPENAI_BASE_URL`, by default OpenAI with `OPENAI_API_KEY`.

        >>> [part.column for part in RewardsConfig.from_environment({"K": "-0.01"}).part]
        ['format', 'correctness', 'correctness', 'verbosity']
        """
        lists = {"kind": "correctness", "datasets": ("diamonds*",)}
        partial = {
            "kind": "correctness",
            "datasets": ("function_correctness*",),
            "wrong_count": "partial",
        }
        parts: list[dict[str, Any]] = [
            {"kind": "format", "datasets": DOCUMENTED},
            lists,
            partial,
            {
                "kind": "verbosity",
                "datasets": DOCUMENTED,
                "weight": _number(environ, "K", "0"),
            },
        ]
        settings: dict[str, Any] = {"part": parts}
        if _truth(environ, "TRAIN_WITH_MONITOR", "false"):
            url = environ.get("OPENAI_BASE_URL", OPENAI)
            if url == OPENAI and not environ.get("OPENAI_API_KEY"):
                raise ConfigError(
                    "TRAIN_WITH_MONITOR is set and OPENAI_API_KEY is not; "
                    "export OPENAI_API_KEY, or OPENAI_BASE_URL for your own server"
                )
            parts.append(
                {
                    "kind": "monitor",
                    "datasets": DOCUMENTED,
                    "model": environ.get("MONITOR_MODEL_NAME", "gpt-4o-mini"),
                    "correct": _number(environ, "MONITOR_CORRECT_REWARD", "-1"),
                    "wrong": _number(environ, "MONITOR_WRONG_REWARD", "1"),
                }
            )
            # Your own server may need no key.
            key = "OPENAI_API_KEY" if environ.get("OPENAI_API_KEY") else ""
            settings |= {"endpoints": (url,), "key_env": key}
            settings["on"] = environ.get("BATCHWRIGHT_ON", "here")
            if _truth(environ, "MONITOR_CACHE", "true"):
                settings["cache"] = environ.get("MONITOR_CACHE_FILE", "monitor_cache.db")
        return cls.of(settings, "the environment")


def _truth(environ: Mapping[str, str], name: str, default: str) -> bool:
    value = environ.get(name, default).strip().lower()
    if value not in ("true", "false", "1", "0", "yes", "no", ""):
        raise ConfigError(f"{name} must be true or false, got {name}={environ[name]!r}")
    return value in ("true", "1", "yes")


def _number(environ: Mapping[str, str], name: str, default: str) -> float:
    try:
        return float(environ.get(name) or default)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {name}={environ[name]!r}") from None
