"""Evaluation of a query-mutation run: its policy beside plain ways, on held-out questions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.checkpoint import latest
from batchwright.envs.query_mutation.env import BatchedQueryMutationEnv
from batchwright.envs.query_mutation.operators import OPERATORS, load_operators
from batchwright.envs.questions import Question, Split, load_questions
from batchwright.errors import ConfigError
from batchwright.events import finite
from batchwright.files import write_atomic
from batchwright.rl import choose
from batchwright.train.query_mutator.compare import Comparison, compare_ways
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.query_mutator.loop import build_env, load_policy
from batchwright.train.query_mutator.models import open_phrasing

__all__ = ["evaluate_run"]


def evaluate_run(
    run: Path,
    *,
    questions: int = 0,
    bandit_episodes: int = 500,
    output: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare the run's policy with identity, random, single operators, a plan and a bandit.

    Answers are kept in the run's own cache, so a second evaluation asks nobody.
    """
    config = QueryMutatorConfig.of_run(run)
    if latest(run / "checkpoints") is None:
        raise ConfigError(f"{run} has no checkpoint yet; resume it with --resume {run}")
    splits: tuple[Split, ...] = ("train", "valid", "test")
    parts: dict[str, Sequence[Question]]
    parts = {split: load_questions(config.dataset, split) for split in splits}
    if questions:
        parts = {split: found[:questions] for split, found in parts.items()}
    with open_phrasing(config, run) as models:
        policy = load_policy(run, build_env(config, models), config)

        def make_env(
            on: Sequence[Question],
            num_envs: int | None = None,
            order: Literal["drawn", "each"] = "each",
        ) -> BatchedQueryMutationEnv:
            return BatchedQueryMutationEnv(
                on,
                models.mutator,
                models.target,
                models.rate,
                len(on) if num_envs is None else num_envs,
                run=models.run,
                embed=models.embed,
                dim=models.dim,
                operators=load_operators(config.operators) if config.operators else OPERATORS,
                max_steps=config.per_episode_max_steps,
                least_similarity=config.least_similarity,
                seed=config.seed + 1,
                order=order,
            )

        def by_policy(features: NDArray[np.float32], step: int) -> NDArray[np.int64]:
            mask = np.ones((len(features), len(policy.actor.actions)), np.bool_)
            seen = {"features": torch.from_numpy(features), "mask": torch.from_numpy(mask)}
            with torch.inference_mode():
                logits = policy.logits(seen)
            return choose(logits, mask, None)[0]

        found = compare_ways(
            models,
            make_env,
            parts,
            by_policy,
            seed=config.seed,
            bandit_episodes=bandit_episodes,
            progress=progress,
        )
    if output is not None:
        _write(found, output)
    return found


def _write(found: Comparison, output: Path) -> None:
    data = {
        "ways": [finite(asdict(way)) for way in found.ways],
        "robustness": finite(asdict(found.robustness)),
    }
    write_atomic(output / "evaluation.json", (json.dumps(data, indent=2) + "\n").encode())
    for name, turns in found.turns.items():
        lines = (json.dumps(finite(asdict(turn)), ensure_ascii=False) for turn in turns)
        path = output / "transcripts" / f"{name.replace(' ', '_')}.jsonl"
        write_atomic(path, "".join(line + "\n" for line in lines).encode("utf-8", "replace"))
