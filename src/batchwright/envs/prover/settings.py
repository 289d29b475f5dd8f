"""Settings of the prover environment: reward schemes, kinds of queries, sizes."""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.envs.prover import layout
from batchwright.errors import BadProgram, ConfigError, Mismatch
from batchwright.logic.facts import Facts, as_triples
from batchwright.logic.rules import Rules

__all__ = [
    "ASKS",
    "CODES",
    "REWARDS",
    "Ask",
    "Ended",
    "auto_batch",
    "check_settings",
    "checked",
    "inverses",
    "scheme",
    "truths",
]

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Ask = Literal["truth", "head", "tail", "both"]

REWARDS = {
    "proved": (1.0, 0.0, 0.0, 0.0, 0.0),
    "proved_signed": (1.0, 0.0, -1.0, 0.0, 0.0),
    "correct": (1.0, 0.0, 0.0, 1.0, 0.0),
    "cautious": (1.0, -0.5, -1.5, 1.0, 0.0),
    "balanced": (1.0, -1.0, -1.0, 1.0, 0.0),
    "balanced_end": (1.0, -1.0, -1.0, 1.0, 0.3),
}
"""Terminal rewards, numbers 0 to 5 in this order: for a true query proved, a true one given up, a
false one proved, a false one given up, and a bonus on the last if it was given up by END. In the
last two schemes giving up a false query is worth 1 / negatives, so that a cycle of episodes is
balanced."""

CODES = np.array([1.0, 2.0, 3.0, 4.0, 0.0], np.float32)
"""What kernels write where a function is to say the reward, in the order of `REWARDS`."""


class Ended(NamedTuple):
    """The episodes that ended in one step, [n] each: what a reward function is given."""

    proved: Bools
    label: Bools
    """Whether the query is true; of an open query that was proved, whether the answer is."""
    depth: NDArray[np.int64]
    """Goals resolved."""
    steps: NDArray[np.int64]
    """Actions, turned pages included."""
    truncated: Bools
    """Cut off at the depth."""
    invalid: Bools
    """Ended by an action outside the mask."""
    answer: NDArray[np.int64]
    """The entity found for an open argument, -1 for none."""
    query_index: NDArray[np.int64]


ASKS: dict[str, int] = {
    "truth": layout.TRUTH,
    "head": layout.ASK_HEAD,
    "tail": layout.ASK_TAIL,
    "both": layout.ASK_BOTH,
}

AUTO_MOST = 16_384
"""The largest `batch_size="auto"`: beyond it throughput does not grow."""


def checked(queries: ArrayLike, facts: Facts, rules: Rules) -> Ints:
    asked = as_triples(queries)
    if not len(asked):
        raise BadProgram("no queries; give at least one triple")
    if (facts.num_entities, facts.num_predicates) != (rules.num_entities, rules.num_predicates):
        raise Mismatch("facts and rules have different vocabularies; build both with one")
    high = np.array([facts.num_entities, facts.num_predicates, facts.num_entities])
    bad = np.flatnonzero(((asked < 0) | (asked >= high)).any(axis=1))
    if bad.size:
        raise BadProgram(
            f"query {bad[0]:,} is {asked[bad[0]].tolist()}, and ids are allowed up to "
            f"{(high - 1).tolist()}; use the vocabulary of the facts"
        )
    return asked


def check_settings(
    total: int,
    labels: Bools,
    depth: int,
    width: int,
    goals: int,
    negatives: int,
    ask: str,
    once: bool,
) -> None:
    for name, value, least in (
        ("depth", depth, 1),
        ("max_candidates", width, 3),
        ("goals", goals, 1),
        ("negatives", negatives, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if ask not in ASKS:
        raise ConfigError(f"ask must be one of {', '.join(ASKS)}, got {ask!r}")
    if negatives and (once or ask != "truth"):
        raise ConfigError(
            "negatives need ask='truth' and once=False; leave negatives at 0 with once or an "
            "open ask"
        )
    if labels.shape != (total,):
        raise Mismatch(f"{total:,} queries need as many labels, got {labels.size:,}")


def scheme(reward: str | int, negatives: int) -> NDArray[np.float32]:
    names = list(REWARDS)
    if isinstance(reward, int) and 0 <= reward < len(names):
        reward = names[reward]
    if not isinstance(reward, str) or reward not in REWARDS:
        raise ConfigError(
            f"reward must be 0 to 5 or one of {', '.join(names)}, or a function of the episodes "
            f"that ended, got {reward!r}"
        )
    scheme = np.array(REWARDS[reward], np.float32)
    if reward.startswith("balanced"):
        scheme[3] /= max(negatives, 1)
    return scheme


def truths(facts: Facts, true_queries: Ints, negatives: int, known: Facts | None) -> Facts:
    """What no corrupted query may be: `known`, or the facts and the queries that are true."""
    if known is None:
        if not negatives:
            return facts
        return Facts.of(np.concatenate([facts.triples, true_queries]), facts)
    if (known.num_entities, known.num_predicates) != (facts.num_entities, facts.num_predicates):
        raise Mismatch("known and facts have different vocabularies; build both with one")
    return known


def inverses(facts: Facts, inverse: Ints | None) -> Ints:
    """For each predicate the one declared as its inverse, or -1."""
    if inverse is None:
        return np.full(facts.num_predicates, -1, np.int32)
    declared = np.ascontiguousarray(inverse, np.int32)
    if declared.shape != (facts.num_predicates,):
        raise Mismatch(
            f"inverse has shape {list(declared.shape)}; it needs a predicate or -1 for each of "
            f"the {facts.num_predicates:,} predicates"
        )
    return declared


def auto_batch(goals: int, width: int, depth: int, rollout: int = 0, embedding: int = 64) -> int:
    """As many slots as an eighth of the free memory holds, a power of two.

    What PPO needs for rollouts of that many steps is counted: observations, a shuffled copy of
    them, and in a quarter of them at a time the vectors of all candidates, about eight each.
    """
    observed = goals * 12 + width * 17 + 32
    slot_bytes = 2 * observed + (depth + 1) * (goals + 1) * 12 + 256
    slot_bytes += rollout * (2 * observed + 8 * width * embedding * 4 // 4)
    free = 1 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass  # Not Linux: a gigabyte is a safe guess.
    count = min(max(1, free // 8 // slot_bytes), AUTO_MOST)
    return int(1 << (int(count).bit_length() - 1))
