"""`compute_score` with the signatures that trainers call: one sample, a batch, verl's keywords."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from batchwright.errors import BadRow, Mismatch
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.reward import Response, message_text
from batchwright.rewards.score import Column, Scorer

__all__ = [
    "acompute_score",
    "close_scorers",
    "compute_score",
    "scorer_for",
]

_DOCUMENTED = {
    "verbosity_words": "word_count_before_measurements",
    "correctness_proportion_correct": "proportion_correct",
    "correctness_all_correct": "all_correct",
    "correctness_wrong_number": "wrong_number_of_measurements",
    "monitor_reward": "monitor_correctness_reward",
    "monitor_correct": "monitor_correctness",
}
"""Columns that the documented reward of lists between tags has under other names."""

Row = dict[str, Column]
_opened: list[Scorer] = []


def compute_score(
    response: str | None = None,
    ground_truth: Any = None,
    dataset_name: str | None = None,
    extra_info: Mapping[str, Any] | None = None,
    *,
    data_source: str | None = None,
    solution_str: str | None = None,
    data_sources: Iterable[str] | None = None,
    solution_strs: Iterable[str] | None = None,
    ground_truths: Iterable[Any] | None = None,
    extra_infos: Iterable[Mapping[str, Any] | None] | None = None,
    config: str | None = None,
    missing: Missing | None = None,
    **_: Any,
) -> Row | list[Row]:
    """Score one sample, or a batch if `solution_strs` is given; rows hold `score`, `valid`, `why`.

    The reward is that of the file `config`, else of the file in BATCHWRIGHT_REWARDS, else that of
    the environment variables (`RewardsConfig.from_environment`). A batch may mix data sets. An
    invalid reward is an error, unless `missing` is `mask` or a number. The pool stays open until
    the process ends, or until `close_scorers()`.
    """
    scorer = scorer_for(config)
    if solution_strs is not None or ground_truths is not None or data_sources is not None:
        responses = _batch(data_sources, solution_strs, ground_truths, extra_infos)
        return _rows(scorer, scorer.score(responses), missing)
    one = _single(
        response if solution_str is None else solution_str,
        ground_truth,
        dataset_name if data_source is None else data_source,
        extra_info,
    )
    return _rows(scorer, scorer.score([one]), missing)[0]


async def acompute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    config: str | None = None,
    missing: Missing | None = None,
    **_: Any,
) -> Row:
    """`compute_score` of one sample from inside an event loop; concurrent calls share the pool."""
    scorer = scorer_for(config)
    one = _single(solution_str, ground_truth, data_source, extra_info)
    return _rows(scorer, await scorer.ascore([one]), missing)[0]


def scorer_for(config: str | None = None) -> Scorer:
    """The scorer of a file or of the environment variables, one per process and setting."""
    path = config or os.environ.get("BATCHWRIGHT_REWARDS")
    if path:
        return _of_file(path)
    names = ("TRAIN_WITH_MONITOR", "MONITOR_CACHE", "MONITOR_CACHE_FILE", "MONITOR_MODEL_NAME")
    more = ("MONITOR_CORRECT_REWARD", "MONITOR_WRONG_REWARD", "K", "OPENAI_BASE_URL")
    all_names = (*names, *more, "BATCHWRIGHT_ON")
    given = tuple((name, os.environ[name]) for name in all_names if name in os.environ)
    # The endpoint reads the key itself; here only its presence counts.
    return _of_environment(given, bool(os.environ.get("OPENAI_API_KEY")))


def close_scorers() -> None:
    """Close the scorers of this process; the next call reads its configuration again."""
    while _opened:
        _opened.pop().close()
    _of_file.cache_clear()
    _of_environment.cache_clear()


@cache
def _of_file(path: str) -> Scorer:
    return _kept(Scorer(RewardsConfig.load(path)))


@cache
def _of_environment(given: tuple[tuple[str, str], ...], key: bool) -> Scorer:
    environ = dict(given) | ({"OPENAI_API_KEY": "set"} if key else {})
    return _kept(Scorer(RewardsConfig.from_environment(environ)))


def _kept(scorer: Scorer) -> Scorer:
    _opened.append(scorer)
    return scorer


def _single(
    response: str | None,
    ground_truth: Any,
    dataset: str | None,
    extra: Mapping[str, Any] | None,
) -> Response:
    """The sample of a trainer as a response."""
    if extra is not None and not isinstance(extra, Mapping):
        raise BadRow(f"extra_info must be a dict or None, got {type(extra).__name__}")
    known = dict(extra or {})
    asked = next((known[name] for name in ("prompt", "question") if name in known), "")
    prompt = str(message_text(asked))
    # Anything but text is rejected when it is scored.
    return Response(response, ground_truth, str(dataset or ""), prompt, known)  # type: ignore[arg-type]


def _batch(
    data_sources: Iterable[str] | None,
    solution_strs: Iterable[str] | None,
    ground_truths: Iterable[Any] | None,
    extra_infos: Iterable[Mapping[str, Any] | None] | None,
) -> list[Response]:
    """The batch of a trainer as responses; lists of unequal length are an error."""
    texts = list(solution_strs if solution_strs is not None else ())
    columns: dict[str, Sequence[Any]] = {"solution_strs": texts}
    for name, given in (("data_sources", data_sources), ("ground_truths", ground_truths)):
        columns[name] = [None] * len(texts) if given is None else list(given)
    columns["extra_infos"] = [None] * len(texts) if extra_infos is None else list(extra_infos)
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise Mismatch(f"lists of a batch differ in length: {sizes}; pass one entry per sample")
    rows = zip(*columns.values(), strict=True)
    return [_single(text, truth, source, extra) for text, source, truth, extra in rows]


def _rows(scorer: Scorer, rewards: Any, missing: Missing | None) -> list[Row]:
    rows = scorer.columns(rewards, missing)
    return [{_DOCUMENTED.get(name, name): value for name, value in row.items()} for row in rows]
