"""The three batch functions of query mutation: rewrite, answer, embed many queries at once.

Order is kept. A failed call leaves a placeholder (the original query, `NO_ANSWER`, a row of NaN)
that is marked as invalid: `result.valid` says which entries are real responses, and
`result.invalid_count` how many are not. Train on the valid ones only.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchwright.calls.endpoints import parse_model
from batchwright.calls.outcome import Done, Outcome
from batchwright.calls.pool import Pool
from batchwright.calls.request import Request, chat, embed
from batchwright.errors import BadFile, ConfigError, Mismatch, MissingFile
from batchwright.files import existing, read_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "NO_ANSWER",
    "Texts",
    "Vectors",
    "batch_encode_queries",
    "batch_mutate_queries",
    "batch_query_target_model",
    "mutated_text",
]

NO_ANSWER = "No answer from the model."
"""The placeholder for the answer of a call that failed."""

_HEADING = re.compile(
    r"^[\s*#]*(?:[\w ]{0,24}question[\w ]{0,10}|rewritten|answer)\s*:[\s*]*", re.IGNORECASE
)

BatchSize = int | Literal["auto"]


class Texts(list[str]):
    """Texts in the order of the queries, and which of them are responses of the model."""

    def __init__(self, texts: Sequence[str], valid: Sequence[bool], outcomes: Sequence[Outcome]):
        super().__init__(texts)
        self.valid = tuple(valid)
        self.outcomes = tuple(outcomes)

    @property
    def invalid_count(self) -> int:
        return len(self) - sum(self.valid)


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """One row per query; `np.asarray` gives the array. Rows of failed calls are NaN."""

    array: "NDArray[np.float32]"
    valid: "NDArray[np.bool_]"
    outcomes: tuple[Outcome, ...]

    @property
    def invalid_count(self) -> int:
        return len(self) - int(self.valid.sum())

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> "NDArray[np.float32]":
        row: NDArray[np.float32] = self.array[index]
        return row

    def __iter__(self) -> "Iterator[NDArray[np.float32]]":
        return iter(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "NDArray[Any]":
        import numpy as np

        return np.array(self.array, dtype=dtype, copy=copy)


def batch_mutate_queries(
    queries: Sequence[str],
    prompts: Sequence[str],
    model: str,
    temperature: float = 0.7,
    max_tokens: int = 512,
    batch_size: BatchSize = 8,
    *,
    seed: int | None = None,
    pool: Pool | None = None,
) -> Texts:
    """Send each prompt to the mutator; a mutation that failed is the original query, invalid.

    `mutated_text` reads the replies: JSON, `{"mutated_query": ...}`, or the new query alone.
    `batch_size` is the number of calls in flight (1: sequential). `model` is a model of the
    local Ollama server, or anything that `parse_model` takes. With a `pool` of your own, `model`
    is the name that its server knows, and the pool's own limit applies.
    """
    if len(queries) != len(prompts):
        raise Mismatch(f"{len(queries)} queries and {len(prompts)} prompts; pass one prompt each")
    chosen, name = _pool(model, batch_size, pool)
    given: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    if seed is not None:
        given["seed"] = seed
    outcomes = chosen.map([chat(name, prompt, **given) for prompt in prompts])
    found = [mutated_text(o.text) if isinstance(o, Done) else None for o in outcomes]
    texts = [query if new is None else new for query, new in zip(queries, found, strict=True)]
    return Texts(texts, [new is not None for new in found], outcomes)


def batch_query_target_model(
    queries: Sequence[str],
    model: str,
    temperature: float = 0.0,
    max_tokens: int = 512,
    image_paths: Sequence[str | Path | None] | None = None,
    batch_size: BatchSize = 8,
    *,
    default: str = NO_ANSWER,
    pool: Pool | None = None,
) -> Texts:
    """The target's answers; a failed call gives `default`, marked invalid.

    `image_paths` has one image per query, or None for a query without one.
    """
    images = image_paths if image_paths is not None else [None] * len(queries)
    if len(images) != len(queries):
        raise Mismatch(f"{len(queries)} queries and {len(images)} image paths; pass one path each")
    chosen, name = _pool(model, batch_size, pool)
    given: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    requests = [
        chat(name, query if image is None else _with_image(query, Path(image)), **given)
        for query, image in zip(queries, images, strict=True)
    ]
    outcomes = chosen.map(requests)
    texts = [outcome.text if isinstance(outcome, Done) else default for outcome in outcomes]
    return Texts(texts, [bool(outcome) for outcome in outcomes], outcomes)


def batch_encode_queries(
    queries: Sequence[str],
    obs_size: int = 768,
    model: str = "nomic-embed-text",
    batch_size: BatchSize = 8,
    *,
    pool: Pool | None = None,
) -> Vectors:
    """The embedding of each query, truncated or zero-padded to `obs_size`; float32 [N, size]."""
    import numpy as np

    if obs_size < 1:
        raise ConfigError(f"obs_size must be at least 1, got {obs_size}")
    chosen, name = _pool(model, batch_size, pool)
    requests: list[Request] = [embed(name, query) for query in queries]
    outcomes = chosen.map(requests)
    rows = np.full((len(queries), obs_size), np.nan, np.float32)
    valid = np.zeros(len(queries), np.bool_)
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, Done):
            vector = np.asarray(outcome.vectors[0], np.float32)[:obs_size]
            rows[number] = 0.0
            rows[number, : len(vector)] = vector
            valid[number] = bool(np.isfinite(vector).all())
    return Vectors(rows, valid, tuple(outcomes))


def mutated_text(text: str) -> str | None:
    """The new query in a mutator's reply; None if there is none.

    A JSON object anywhere in the reply gives its "mutated_query"; a reply that is an object
    without one gives its first string. Otherwise it is the first line, without heading and
    quotes: small models append reasons. For queries of several lines, prompt for JSON.

    >>> mutated_text('Sure: {"mutated_query": "How far is the moon?"}')
    'How far is the moon?'
    >>> mutated_text('New question: "How far is it?"\\n\\nI kept the meaning.')
    'How far is it?'
    >>> mutated_text('{"mutated_query": 3}') is None, mutated_text("...") is None
    (True, True)
    """
    found = _json_object(text)
    if "mutated_query" in found or (found and text.lstrip().startswith("{")):
        texts = [value for value in found.values() if isinstance(value, str)]
        query = found.get("mutated_query", texts[0] if texts else None)
        chosen = query.strip() if isinstance(query, str) else ""
    elif '"mutated_query"' in text:
        # JSON that was cut off, at max_tokens perhaps: the query is not whole.
        return None
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        first = _HEADING.sub("", lines[0]) if lines else ""
        chosen = (first or "".join(lines[1:2])).strip("\"'“”* ")
    return chosen if re.search(r"\w", chosen) else None


def _json_object(text: str) -> dict[str, Any]:
    """The first JSON object of a text; empty if there is none that can be read."""
    start = text.find("{")
    try:
        found = json.JSONDecoder().raw_decode(text, start)[0] if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return dict(found)


def _with_image(query: str, path: Path) -> list[dict[str, Any]]:
    try:
        data = base64.b64encode(read_regular(existing(path, "image"))).decode()
    except BadFile as error:
        raise MissingFile(f"cannot read the image: {error}") from error
    kind = "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else "png"
    url = {"url": f"data:image/{kind};base64,{data}"}
    parts = [{"type": "text", "text": query}, {"type": "image_url", "image_url": url}]
    return [{"role": "user", "content": parts}]


_pools: dict[tuple[str, BatchSize], tuple[Pool, str]] = {}
"""One pool per model and batch size, so that connections and learned limits are reused."""


def _pool(model: str, batch_size: BatchSize, given: Pool | None) -> tuple[Pool, str]:
    if given is not None:
        return given, model
    found = _pools.get((model, batch_size))
    if found is None:
        words = model == "sim" or "#" in model or model.startswith(("ollama:", "local:"))
        endpoint, name = parse_model(model if words else f"ollama:{model}")
        found = _pools[model, batch_size] = Pool(endpoint, limit=batch_size), name
    return found
