"""The two policies of a prover.

That of rules has learned logits for rules and a uniform distribution over facts (but for hubs whose
facts take more than two pages: later pages are then somewhat less probable). A rule's logit is
one number, so what is learned from one query holds for every entity, seen before or not. A query
can be given up at its beginning; a rule once begun is followed.

The neural one embeds predicates, constants, variables and rules, and chooses facts as well.
"""

import torch
from torch import Tensor, nn

from batchwright import rng
from batchwright.envs.prover.env import END, NEXT, RULE
from batchwright.envs.prover.layout import FIRST
from batchwright.rl.policy import Encoder, GoalEncoder, Policy, Tensors
from batchwright.train.prover.program import Asked

__all__ = ["GIVEN_UP_LATE", "RuleActor", "RuleCritic", "neural_policy", "rule_policy"]

GIVEN_UP_LATE = -30.0
"""The logit of giving up in the middle of a rule: negligible, and finite for the sums."""


class RuleActor(Encoder):
    """Logits from two tables, of rules and of giving up a kind of query."""

    width = 1

    def __init__(self, num_rules: int, first_question: int, num_questions: int) -> None:
        super().__init__()
        self.rules = nn.Parameter(torch.zeros(num_rules))
        self.end = nn.Parameter(torch.zeros(num_questions))
        self._first = first_question

    def state(self, obs: Tensors) -> Tensor:
        """The number of the query at its beginning, -1 later, [N, 1]."""
        question = obs["goals"][:, :1, 0].long() - self._first
        return question.clamp(min=-1)

    def point(self, obs: Tensors, state: Tensor) -> Tensor:
        candidates = obs["candidates"]
        kind, number = candidates[..., 0], candidates[..., 1].long().clamp(min=0)
        rules = self.rules[number.clamp(max=len(self.rules) - 1)]
        end = torch.where(state >= 0, self.end[state.clamp(min=0)], GIVEN_UP_LATE)
        # As probable as the facts that are not on this page, so that each is as probable as these.
        left = obs["n_valid"] - obs["mask"][:, FIRST:].sum(1)
        turn = left.clamp(min=1).log()[:, None]
        scores = torch.where(kind == END, end, torch.where(kind == NEXT, turn, 0.0))
        return torch.where(kind == RULE, rules, scores)


class RuleCritic(Encoder):
    """Values by the kind of query and the number of goals left."""

    def __init__(
        self, first_question: int, num_questions: int, num_goals: int, width: int = 8
    ) -> None:
        super().__init__()
        self.width = width
        self.table = nn.Embedding(num_questions * (num_goals + 1), width)
        nn.init.normal_(self.table.weight, 0.0, 0.1)
        self._first, self._sizes = first_question, num_goals + 1

    def state(self, obs: Tensors) -> Tensor:
        question = (obs["query"][:, 1].long() - self._first).clamp(min=0)
        left = (obs["goals"][:, :, 0] >= 0).sum(1)
        found: Tensor = self.table(question * self._sizes + left)
        return found

    def point(self, obs: Tensors, state: Tensor) -> Tensor:
        raise NotImplementedError("a critic does not choose")


def rule_policy(asked: Asked, seed: int = 0) -> Policy:
    """An untrained policy: all rules of a query, and giving it up, are equally probable."""
    first, questions = asked.first_question, 2 * asked.steps.num_predicates
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, "policy"))
        actor = RuleActor(len(asked.rules), first, questions)
        return Policy(actor, RuleCritic(first, questions, asked.depth - 1))


def neural_policy(asked: Asked, width: int, constant_scale: float, seed: int = 0) -> Policy:
    """An untrained actor-critic with a row for every predicate, `_kge` ones too, term and rule."""
    constants = asked.steps.num_entities
    sizes = asked.facts.num_predicates, constants + 2 * asked.goals + 1, len(asked.rules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, "policy"))
        actor = GoalEncoder(
            *sizes, width=width, num_constants=constants, constant_scale=constant_scale
        )
        return Policy(actor, GoalEncoder(*sizes, width=width))
