"""Evaluation of a query-mutation run: its policy compared with baselines on held-out questions."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.checkpoint import latest
from batchwright.envs.query_mutation.env import MutationPipelines
from batchwright.envs.query_mutation.operators import OPERATORS, load_operators
from batchwright.envs.questions import Question, Split, load_questions
from batchwright.errors import ConfigError
from batchwright.events import finite
from batchwright.files import check_output, write_atomic
from batchwright.rl import choose
from batchwright.train.query_mutator.compare import Comparison, compare_strategies
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.query_mutator.loop import build_env, load_policy
from batchwright.train.query_mutator.models import open_models

__all__ = ["as_json", "check_folder", "evaluate_run"]


def evaluate_run(
    run: Path,
    *,
    questions: int = 0,
    bandit_episodes: int = 500,
    output: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare the run's policy with identity, random, single operators, a plan and a bandit.

    Responses are cached in the run, so a second evaluation makes no calls.
    """
    config = QueryMutatorConfig.of_run(run)
    if latest(run / "checkpoints") is None:
        raise ConfigError(f"{run} has no checkpoint yet; resume it with --resume {run}")
    names: tuple[Split, ...] = ("train", "valid", "test")
    splits: dict[str, Sequence[Question]]
    splits = {name: load_questions(config.dataset, name) for name in names}
    if questions:
        # From the whole split, as files are often sorted by topic.
        for name, found in splits.items():
            most = min(questions, len(found))
            splits[name] = [found[len(found) * n // most] for n in range(most)]
    with open_models(config, run) as models:
        policy = load_policy(run, build_env(config, models), config)

        def make_env(
            on: Sequence[Question],
            num_envs: int | None = None,
            order: Literal["drawn", "each"] = "each",
        ) -> MutationPipelines:
            return MutationPipelines(
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

        comparison = compare_strategies(
            models,
            make_env,
            splits,
            by_policy,
            seed=config.seed,
            bandit_episodes=bandit_episodes,
            progress=progress,
        )
    if output is not None:
        _write(comparison, output)
    return comparison


def as_json(found: Comparison) -> dict[str, Any]:
    """The content of `evaluation.json`: strategies under `ways`, `versus` and `robustness`."""
    return {
        "ways": [asdict(strategy) for strategy in found.strategies],
        "versus": None if found.versus is None else asdict(found.versus),
        "robustness": asdict(found.robustness),
    }


_BEGINS = re.compile(rb'\{\n  "ways": \[')
"""How `evaluation.json` begins."""


def check_folder(output: Path, force: bool) -> None:
    """Refuse a folder in which an evaluation would replace files of somebody else."""
    check_output(output / "evaluation.json", _BEGINS, force=force)
    if force or (output / "evaluation.json").exists():
        return
    for name in ("gain.png", "transcripts"):
        if (output / name).exists():
            raise ConfigError(
                f"{output / name} was not written by an evaluation, so it is not replaced; "
                f"choose another folder, or replace it with --force"
            )


def _write(found: Comparison, output: Path) -> None:
    content = json.dumps(finite(as_json(found)), indent=2) + "\n"
    write_atomic(output / "evaluation.json", content.encode())
    for name, turns in found.turns.items():
        lines = (json.dumps(finite(asdict(turn)), ensure_ascii=False) for turn in turns)
        path = output / "transcripts" / f"{name.replace(' ', '_')}.jsonl"
        write_atomic(path, "".join(line + "\n" for line in lines).encode("utf-8", "replace"))
