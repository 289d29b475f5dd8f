"""What tests of provers share: every episode of a policy, and whether two runs end alike."""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from batchwright.checkpoint import latest
from batchwright.envs.prover.env import FACT, ProverEnv
from batchwright.events import read_events
from batchwright.rl.policy import Policy
from batchwright.train.prover.policy import rule_policy
from batchwright.train.prover.program import Asked


def unlike(asked: Asked, seed: int = 0) -> Policy:
    """A policy with likes and dislikes."""
    policy = rule_policy(asked)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.actor.rules.normal_(generator=numbers)  # type: ignore[union-attr, operator]
        policy.actor.end.normal_(generator=numbers)  # type: ignore[union-attr, operator]
    return policy


def enumerated(
    asked: Asked, policy: Policy, question: Any, ask: Literal["tail", "truth"] = "tail"
) -> np.ndarray:
    """The chance of every answer, from every episode that the environment allows.

    Proofs that use one fact twice in a row do not count.
    """
    env = ProverEnv(
        asked.facts,
        asked.rules,
        [question],
        1,
        depth=asked.depth,
        goals=asked.depth - 1,
        max_candidates=asked.width,
        ask=ask,
        inverse=asked.inverse,
    )
    chance = np.zeros(asked.steps.num_entities)

    def explore(actions: list[int], likely: float, facts: list[tuple[int, ...]]) -> None:
        obs = env.reset()
        step = None
        for action in actions:
            step = env.step(np.array([action]))
        if step is not None and step.done[0]:
            if step.info["proven"][0] and all(a != b for a, b in pairwise(facts)):
                chance[step.info["answer"][0]] += likely
            return
        logits = policy.logits({name: torch.from_numpy(a.copy()) for name, a in obs.items()})
        chances = torch.softmax(logits.detach().double(), -1)[0].tolist()
        rows, mask = obs["candidates"][0].tolist(), obs["mask"][0].copy()
        for action in np.flatnonzero(mask).tolist():
            used = [tuple(rows[action][1:])] if rows[action][0] == FACT else []
            explore([*actions, action], likely * chances[action], facts + used)

    explore([], 1.0, [])
    return chance


def same_end(one: Path, other: Path) -> None:
    for folder in ("checkpoints", "model"):
        states = []
        for run in (one, other):
            found = latest(run / folder)
            assert found is not None
            states.append((found.step, flat(found.state)))
        assert states[0] == states[1]
    events = [numbers(run) for run in (one, other)]
    assert events[0] == events[1]


def flat(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: flat(value) for name, value in state.items()}
    return (state.dtype.str, state.tobytes()) if isinstance(state, np.ndarray) else state


def numbers(run: Path) -> dict[tuple[str, int], Any]:
    """What every round came to, without what depends on the clock."""
    return {
        (event.kind, event.fields["round"]): {
            k: v for k, v in event.fields.items() if not k.endswith(("SPS", "_s", "seconds"))
        }
        for event in read_events(run / "events.jsonl")
        if event.kind in ("round", "eval")
    }
