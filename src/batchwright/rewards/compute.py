"""`compute_score` as trainers call it: one sample, a batch, or verl's keywords."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from batchwright.errors import BadRow, Mismatch
from batchwright.rewards.config import Missing, RewardsConfig
from batchwright.rewards.reward import Response, words
from batchwright.rewards.scorer import Column, Scorer

__all__ = [
    "acompute_score",
    "batch_of",
    "compute_score",
    "forget_scorers",
    "scorer_for",
    "single_of",
]

_DOCUMENTED = {
    "verbosity_words": "word_count_before_measurements",
    "correctness_proportion_correct": "proportion_correct",
    "correctness_all_correct": "all_correct",
    "correctness_wrong_number": "wrong_number_of_measurements",
    "monitor_reward": "monitor_correctness_reward",
    "monitor_correct": "monitor_correctness",
}
"""Columns under the names that the reward of lists between tags has had before."""

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

    The reward is the one of the file `config`, of the file that BATCHWRIGHT_REWARDS names, or
    that of the environment (`RewardsConfig.from_environment`). A batch may mix data sets. A
    missing reward is an error, unless `missing` is `mask` or a number.
    """
    scorer = scorer_for(config)
    if solution_strs is not None or ground_truths is not None or data_sources is not None:
        responses = batch_of(data_sources, solution_strs, ground_truths, extra_infos)
        return _rows(scorer, scorer.score(responses), missing)
    one = single_of(
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
    """One sample inside an event loop; samples that are scored at once share the pool."""
    scorer = scorer_for(config)
    one = single_of(solution_str, ground_truth, data_source, extra_info)
    return _rows(scorer, await scorer.ascore([one]), missing)[0]


def scorer_for(config: str | None = None) -> Scorer:
    """The reward of a file or of the environment, one a process and setting."""
    path = config or os.environ.get("BATCHWRIGHT_REWARDS")
    if path:
        return _of_file(path)
    names = ("TRAIN_WITH_MONITOR", "MONITOR_CACHE", "MONITOR_CACHE_FILE", "MONITOR_MODEL_NAME")
    more = ("MONITOR_CORRECT_REWARD", "MONITOR_WRONG_REWARD", "K", "OPENAI_BASE_URL")
    given = tuple((name, os.environ[name]) for name in names + more if name in os.environ)
    # The key itself is read by the endpoint; here only whether there is one.
    return _of_environment(given, bool(os.environ.get("OPENAI_API_KEY")))


def forget_scorers() -> None:
    """Close the scorers of this process; the next call reads its configuration anew."""
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


def single_of(
    response: str | None,
    ground_truth: Any,
    dataset: str | None,
    extra: Mapping[str, Any] | None,
) -> Response:
    """One sample of a trainer as a response."""
    if extra is not None and not isinstance(extra, Mapping):
        raise BadRow(f"the extra_info of a sample is {type(extra).__name__}; give a dict or None")
    known = dict(extra or {})
    asked = next((known[name] for name in ("prompt", "question") if name in known), "")
    prompt = str(words(asked))
    # Anything but text is refused by name when it is scored.
    return Response(response, ground_truth, str(dataset or ""), prompt, known)  # type: ignore[arg-type]


def batch_of(
    data_sources: Iterable[str] | None,
    solution_strs: Iterable[str] | None,
    ground_truths: Iterable[Any] | None,
    extra_infos: Iterable[Mapping[str, Any] | None] | None,
) -> list[Response]:
    """A batch of a trainer as responses; lists of unequal length are refused."""
    texts = list(solution_strs if solution_strs is not None else ())
    columns: dict[str, Sequence[Any]] = {"solution_strs": texts}
    for name, given in (("data_sources", data_sources), ("ground_truths", ground_truths)):
        columns[name] = [None] * len(texts) if given is None else list(given)
    columns["extra_infos"] = [None] * len(texts) if extra_infos is None else list(extra_infos)
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise Mismatch(f"the lists of a batch differ in length: {sizes}; give one entry a sample")
    rows = zip(*columns.values(), strict=True)
    return [single_of(text, truth, source, extra) for text, source, truth, extra in rows]


def _rows(scorer: Scorer, rewards: Any, missing: Missing | None) -> list[Row]:
    rows = scorer.columns(rewards, missing)
    return [{_DOCUMENTED.get(name, name): value for name, value in row.items()} for row in rows]
