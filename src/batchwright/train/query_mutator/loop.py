"""Learning which rewriting of a question makes a target model answer it, top to bottom.

    questions -> environments -> rollout -> PPO -> checkpoint, transcripts, events

Every random number is a function of the seed and a counter, and every response of a model is
cached. So a run that was killed resumes from its last checkpoint with the same responses, and a
finished one can be replayed with no server.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.calls import Pool
from batchwright.envs.query_mutation.env import MutationPipelines, Turn
from batchwright.envs.query_mutation.operators import OPERATORS, load_operators
from batchwright.envs.questions import load_questions
from batchwright.errors import BudgetExceeded
from batchwright.events import finite
from batchwright.files import write_atomic
from batchwright.lines import checked_lines
from batchwright.rl import PPO, PPOConfig, Runner, policy_for
from batchwright.sealed import write_sealed_json
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.query_mutator.models import Models, open_models
from batchwright.train.query_mutator.rollout import OverlappingRunner
from batchwright.train.run import Run
from batchwright.train.tracking import Tracker, Tracking

__all__ = ["MutatorResult", "build_env", "load_policy", "train_query_mutator"]


Environments = Callable[
    [QueryMutatorConfig, Models, Path, Callable[[Turn], object]],
    AbstractContextManager[MutationPipelines],
]
"""Opens the environments of a run, from its settings, models, folder and what takes each turn."""


@dataclass(frozen=True, slots=True)
class MutatorResult:
    """What a run did, in this call."""

    run_dir: Path
    finished: bool
    stopped_by: str | None
    """SIGTERM, SIGUSR1, Ctrl-C or --stop-after; None if it is finished."""
    updates: int
    steps: int
    invalid_steps: int
    reasons: dict[str, int]
    """Invalid steps by reason, as in the transcripts."""
    rejected: int
    """Rewritings that the guard rejected."""
    lost_steps: int
    """Steps that were lost with the actor that made them, and made again."""
    failed_starts: int
    """Episodes whose question got no score in its original wording."""
    first_gain: float | None
    """Mean gain of an episode in the first update."""
    last_gain: float | None
    """Mean gain of an episode in the last tenth of the updates."""
    calls: dict[str, float]
    seconds: float
    tracker_failures: int = 0
    """Calls of trackers that raised; training went on without them."""


def train_query_mutator(
    config: QueryMutatorConfig,
    *,
    resume: bool = False,
    replay: Path | None = None,
    trackers: Callable[[Path], Sequence[Tracker]] = lambda folder: (),
    progress: Callable[[int, int, str], None] | None = None,
    pool: Callable[..., Pool] | None = None,
    environments: Environments | None = None,
) -> MutatorResult:
    """Train, resume the run in `config.save_dir`, or replay the run in `replay`.

    `trackers` are made of the run's folder, which is numbered. `progress` gets the steps done, all
    steps, and how many calls were answered and what the last update gained; the first time before
    any call. Ctrl-C, SIGTERM and SIGUSR1 end the update, or leave a rollout between two steps, and
    save; a second Ctrl-C stops at once. `pool` and `environments` are made in the place of `Pool`
    and of what `build_env` makes.
    """
    began = time.perf_counter()
    with ExitStack() as open_things:
        run = open_things.enter_context(Run(config, resume=resume))
        tracking = Tracking(trackers(run.folder), run)
        transcript = _Transcript(run.folder / "rollouts")
        gains: list[float] = []

        def shown() -> None:
            if progress:
                calls = f"{models.used['mutator_calls'] + models.used['target_calls']:,} calls"
                gain = f", gain {gains[-1]:+.3f}" if gains else ""
                total = ppo.total_updates * ppo.steps_per_update
                progress(ppo.steps + transcript.pending, total, calls + gain)

        models = open_things.enter_context(
            open_models(
                config,
                replay or run.folder,
                replay=replay is not None,
                events=run.log,
                on_call=shown,
                pool=pool,
            )
        )
        if environments is None:
            env = build_env(config, models, on_turn=transcript.add)
        else:
            env = open_things.enter_context(
                environments(config, models, run.folder, transcript.add)
            )
        runner = OverlappingRunner if config.overlap else Runner
        ppo = PPO(env, policy_for(env, seed=config.seed), _ppo(config), runner=runner)
        if found := run.latest():
            ppo.restore(found)
        open_things.callback(tracking.finish)
        tracking.start({k: str(v) for k, v in vars(run.config).items()})
        run.start(update=ppo.updates, updates=ppo.total_updates)
        begun_at = ppo.updates
        shown()

        def stopping() -> bool:
            return run.stop(ppo.updates - begun_at) is not None

        # A rollout takes as long as its calls. Those it has made are cached, so that the same
        # rollout costs nothing when the run resumes.
        assert isinstance(ppo.runner, Runner)
        ppo.runner.stop = stopping

        def after(learner: PPO, metrics: dict[str, float]) -> None:
            gain = metrics.get("charts/episodic_return")
            if gain is not None:
                gains.append(gain)
            transcript.write(learner.updates)
            if learner.updates % config.log_interval == 0:
                run.event("update", update=learner.updates, **metrics)
                tracking.log(learner.updates, metrics)
            shown()
            if run.due():
                with run.saving():
                    learner.save(run.checkpoints)

        try:
            ppo.learn(
                on_update=after,
                save_to=run.checkpoints,
                save_every=config.save_interval,
                stop=stopping,
            )
        except BudgetExceeded as error:
            run.event("stop", update=ppo.updates, why="error budget", error=str(error))
            raise
        finished = ppo.updates >= ppo.total_updates
        if finished and not run.is_left(begun_at, ppo.updates, "operators.json"):
            names = [operator.name for operator in env.operators]
            write_sealed_json(run.folder / "operators.json", {"operators": names})
            run.finish(ppo.updates)
        last = gains[-max(1, len(gains) // 10) :]
        result = MutatorResult(
            run_dir=run.folder,
            finished=finished,
            stopped_by=None if finished else run.stop(ppo.updates - begun_at),
            updates=ppo.updates,
            steps=ppo.steps,
            invalid_steps=env.counts["invalid"],
            reasons=dict(sorted(env.reasons.items())),
            rejected=env.counts["guard"],
            lost_steps=getattr(env, "lost", 0),
            failed_starts=env.counts["failed_starts"],
            first_gain=gains[0] if gains else None,
            last_gain=float(np.mean(last)) if last else None,
            calls=models.stats(),
            seconds=time.perf_counter() - began,
            tracker_failures=tracking.failures,
        )
        run.event(
            "stop",
            update=ppo.updates,
            why="done" if finished else "stopped",
            tracker_failures=tracking.failures,
        )
        return result


def build_env(
    config: QueryMutatorConfig,
    models: Models,
    *,
    on_turn: Callable[[Turn], object] | None = None,
    made: type[MutationPipelines] = MutationPipelines,
) -> MutationPipelines:
    """The environments of a run, on the train split of its questions."""
    operators = load_operators(config.operators) if config.operators else OPERATORS
    return made(
        load_questions(config.dataset, "train"),
        models.mutator,
        models.target,
        models.rate,
        config.num_processes,
        run=models.run,
        embed=models.embed,
        dim=models.dim,
        operators=operators,
        max_steps=config.per_episode_max_steps,
        least_similarity=config.least_similarity,
        cost=config.cost,
        seed=config.seed,
        failures=models.failures,
        on_turn=on_turn,
    )


def load_policy(run: Path, env: MutationPipelines, config: QueryMutatorConfig) -> Any:
    """The policy of a run's newest checkpoint."""
    ppo = PPO(env, policy_for(env, seed=config.seed), _ppo(config))
    ppo.resume(run / "checkpoints")
    return ppo.policy.eval()


def _ppo(config: QueryMutatorConfig) -> PPOConfig:
    return PPOConfig(
        total_steps=config.num_env_steps,
        num_steps=config.num_steps,
        epochs=config.ppo_epoch,
        minibatches=config.num_mini_batch,
        lr=config.lr,
        gamma=config.gamma,
        clip=config.clip_param,
        value_coef=config.value_loss_coef,
        entropy_coef=config.entropy_coef,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
    )


class _Transcript:
    """Turns of an update, written as one file when it is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turns: list[Turn] = []

    @property
    def pending(self) -> int:
        """Turns that are not written yet."""
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        self._turns.append(turn)

    def write(self, update: int) -> None:
        rows = sorted(self._turns, key=lambda t: (t.env, t.episode, t.step))
        lines = (json.dumps(finite(asdict(turn)), ensure_ascii=False) for turn in rows)
        raw = checked_lines(line.encode("utf-8", "replace") for line in lines)
        write_atomic(self._folder / f"{update:06d}.jsonl", raw)
        self._turns.clear()
