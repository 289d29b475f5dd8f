"""Proofs that a policy finds by beam search, as a scorer.

Every query is asked in the environment that the policy was trained in. At each step the `beam` most
probable partial proofs of a query go on; what is left out is counted as pruned. An entity's score
is the summed probability of the proofs found that end with it. As in the exact sum of `scorer`, no
proof uses one fact twice in a row, back and forth.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from batchwright.envs.prover.env import FACT, ProverEnv
from batchwright.envs.prover.layout import GIVE_UP
from batchwright.errors import ConfigError
from batchwright.logic.rank.ranking import Side
from batchwright.rl.policy import Policy
from batchwright.train.prover.program import Asked
from batchwright.train.prover.scorer import log_scores

__all__ = ["BeamScorer", "Searched"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(slots=True)
class Searched:
    """What all searches of a scorer came to."""

    queries: int = 0
    proofs: int = 0
    """Proofs found."""
    proved: float = 0.0
    """Their summed probability."""
    pruned: float = 0.0
    """The summed probability of the partial proofs that did not fit into the beam."""


class BeamScorer:
    """Scores log(1 + probability / FLOOR) of the answers that beam search finds.

    `ask` is how the policy was trained: "tail" searches once for all answers of a query, "truth"
    once for each entity, as to whether the triple with it is true. `num_envs` proofs are extended
    at once, in whole beams.
    """

    def __init__(
        self,
        asked: Asked,
        policy: Policy,
        beam: int,
        *,
        ask: Literal["tail", "truth"] = "tail",
        num_envs: int = 4096,
    ) -> None:
        if beam < 1:
            raise ConfigError(f"the beam must hold at least 1 partial proof, got {beam}")
        self.asked, self.policy, self.beam = asked, policy, beam
        self.searched = Searched()
        self.num_entities = asked.steps.num_entities
        self.num_predicates = asked.steps.num_predicates
        self._ask = ask
        self._together = max(1, num_envs // beam)
        self._env: ProverEnv | None = None

    def how(self) -> dict[str, Any]:
        """How proofs were found so far, ready for JSON; figures are means over the searches."""
        counts, searches = self.searched, max(1, self.searched.queries)
        return {
            "search": f"beam of {self.beam}",
            "searches": counts.queries,
            "proofs_found": counts.proofs / searches,
            "probability_found": counts.proved / searches,
            "probability_pruned": counts.pruned / searches,
        }

    def mass(self, given: Ints, predicates: Ints, side: Side) -> Doubles:
        """The probability of the proofs found for each entity, [Q, N]."""
        n, preds = self.asked.steps.num_entities, self.asked.steps.num_predicates
        questions = np.stack([given, predicates, given], 1).astype(np.int32)
        questions[:, 1] += (2 if side == "tail" else 3) * preds
        found = np.zeros((len(given), n))
        if self._ask == "tail":
            questions[:, 2] = [self._no_fact(*question) for question in questions[:, :2].tolist()]
            where = np.arange(len(given))
        else:
            where = np.repeat(np.arange(len(given)), n)
            questions = questions[where]
            questions[:, 2] = np.tile(np.arange(n), len(given))
        for start in range(0, len(questions), self._together):
            part = slice(start, start + self._together)
            self._search(questions[part], where[part], found)
        return found

    def scores(self, given: Ints, predicates: Ints, side: Side) -> Floats:
        # A query with several answers is ranked once for each, and searched only once.
        pairs = predicates.astype(np.int64) * self.asked.steps.num_entities + given
        _, first, place = np.unique(pairs, return_index=True, return_inverse=True)
        return log_scores(self.mass(given[first], predicates[first], side))[place]

    def _no_fact(self, entity: int, predicate: int) -> int:
        """An answer that is no fact, so that asking for it hides none; 0 if all are facts."""
        known = self.asked.facts.tails(entity, predicate)
        missing = np.setdiff1d(np.arange(len(known) + 1), known)[0]
        return int(missing) if missing < self.asked.steps.num_entities else 0

    def _search(self, questions: Ints, where: Longs, found: Doubles) -> None:
        """Add the probabilities of the proofs of question i to row `where[i]` of `found`."""
        env, beam, total = self._environment(questions)
        group = np.arange(env.num_envs) // beam
        logp = np.full(env.num_envs, -np.inf)
        logp[: total * beam : beam] = 0.0
        used = np.full((env.num_envs, 4), -1, np.int32)
        counts = self.searched
        counts.queries += total
        while len(alive := np.flatnonzero(logp > -np.inf)):
            row, action, score = self._successors(env, alive, logp[alive], used)
            order = np.lexsort((-score, group[row]))
            first = np.searchsorted(group[row][order], np.arange(env.num_envs // beam))
            place = np.arange(len(order)) - first[group[row[order]]]
            kept = place < beam
            counts.pruned += float(np.exp(score[order[~kept]]).sum())
            order, slot = order[kept], (group[row[order]] * beam + place)[kept]
            parents, actions = np.arange(env.num_envs), np.full(env.num_envs, GIVE_UP)
            parents[slot], actions[slot] = row[order], action[order]
            used = env.observation["candidates"][parents, actions]
            env.copy_slots(parents)
            step = env.step(actions)
            logp[:] = -np.inf
            logp[slot] = score[order]
            proven = np.flatnonzero(step.info["proven"] & (logp > -np.inf))
            np.add.at(
                found, (where[group[proven]], step.info["answer"][proven]), np.exp(logp[proven])
            )
            counts.proofs += len(proven)
            counts.proved += float(np.exp(logp[proven]).sum())
            logp[step.done] = -np.inf

    def _successors(
        self, env: ProverEnv, alive: Longs, logp: Doubles, used: Ints
    ) -> tuple[Longs, Longs, Doubles]:
        """Slot, action and log-probability of each way to go on, other than giving up."""
        obs = {name: torch.from_numpy(array[alive]) for name, array in env.observation.items()}
        with torch.inference_mode():
            ways = torch.log_softmax(self.policy.logits(obs).double(), -1).numpy()
        mask = obs["mask"].numpy().copy()
        mask[:, GIVE_UP] = False
        again = (obs["candidates"].numpy() == used[alive, None]).all(-1)
        mask &= ~(again & (used[alive, :1] == FACT))
        row, action = np.nonzero(mask)
        return alive[row], action, logp[row] + ways[row, action]

    def _environment(self, questions: Ints) -> tuple[ProverEnv, int, int]:
        """An environment in which every question fills a beam; the last question fills the rest."""
        rest = np.repeat(questions[-1:], self._together - len(questions), axis=0)
        queries = np.repeat(np.concatenate([questions, rest]), self.beam, axis=0)
        if self._env is None:
            self._env = self.asked.env(queries, len(queries), ask=self._ask, once=True)
        self._env.ask_anew(queries)
        return self._env, self.beam, len(questions)
