"""One policy for every environment: a pointer network over the candidates that the mask allows.

An encoder turns an observation into a state vector and scores candidates by their product with
it, so the network does not depend on the number of candidates, and a candidate that can be
described can be chosen, seen before or not. Actor and critic each have their own encoder.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from batchwright import rng
from batchwright.envs.api import Env, Wrapper, array_env, symbolic
from batchwright.errors import BadLoss, ConfigError
from batchwright.logic.prove.search import FACT, RULE
from batchwright.rl import kernels

__all__ = ["Encoder", "FeatureEncoder", "GoalEncoder", "Policy", "choose", "policy_for"]

Tensors = Mapping[str, Tensor]
"""An observation of N environments as tensors, the first axis N."""


class Encoder(nn.Module):
    """The interface of a network that serves as actor or critic."""

    width: int

    def state(self, obs: Tensors) -> Tensor:
        """The observation as vectors [N, width]."""
        raise NotImplementedError

    def point(self, obs: Tensors, state: Tensor) -> Tensor:
        """The product of each state with each of its candidates [N, K].

        Undefined where `obs["mask"]` is false.
        """
        raise NotImplementedError


class Policy(nn.Module):
    """An actor and a critic without shared weights."""

    def __init__(self, actor: Encoder, critic: Encoder, *, temperature: float = 1.0) -> None:
        super().__init__()
        if temperature <= 0:
            raise ConfigError(f"temperature must be above 0, got {temperature}")
        self.actor = actor
        self.critic = critic
        self.temperature = temperature
        self.head = nn.Linear(critic.width, 1)
        nn.init.orthogonal_(self.head.weight, 1.0)
        nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def logits(self, obs: Tensors) -> Tensor:
        """[N, K]; the lowest finite number where the mask is false.

        Finite, so that no gradient and no entropy becomes 0 * infinity. Its probability is
        exactly zero if any candidate is allowed.
        """
        scores = self.actor.point(obs, self.actor.state(obs))
        if self.temperature != 1.0:
            scores = scores / self.temperature
        return scores.masked_fill(~obs["mask"], torch.finfo(scores.dtype).min)

    def value(self, obs: Tensors) -> Tensor:
        """[N]"""
        return cast(Tensor, self.head(self.critic.state(obs))).squeeze(-1)


class FeatureEncoder(Encoder):
    """For observations with `features` [N, num_features] and a fixed set of actions."""

    def __init__(
        self, num_features: int, num_actions: int, *, width: int = 64, layers: int = 2
    ) -> None:
        super().__init__()
        self.width = width
        self.body = _layers([num_features, *[width] * layers], nn.Tanh)
        # Small, so that a new policy is close to uniform and explores.
        self.actions = nn.Parameter(nn.init.orthogonal_(torch.empty(num_actions, width), 0.01))

    def state(self, obs: Tensors) -> Tensor:
        return cast(Tensor, self.body(obs["features"]))

    def point(self, obs: Tensors, state: Tensor) -> Tensor:
        return state @ self.actions.T


class GoalEncoder(Encoder):
    """For symbolic observations: `goals` [N, A, 3], `query` [N, 3] and `candidates` [N, K, 4].

    A goal is (predicate, term, term), the query (head, predicate, tail) and a candidate (kind,
    predicate or rule, term, term), as `batchwright.envs.prover` lists them; -1 is padding and
    masked, in attention as well. One embedding table holds all of them, so an entity has the same
    vector everywhere. The state is made of the first goal and what it attends to among the other
    goals and the query. A candidate is the sum of the vectors by which it differs from others: its
    kind, its rule, and those terms of a fact that the goal leaves open. In addition it is seen
    whether these are the query's own, which generalizes to entities never seen in training. The
    first `num_constants` terms enter with their vectors multiplied by `constant_scale`: what is
    learned of single entities then counts less than what is learned of predicates and rules.

    Only real goals and candidates that the mask allows are computed: most of a padded [N, K]
    would be waste. (So it does not work under torch's vmap: TorchRL's GAE has `deactivate_vmap`.)
    """

    def __init__(
        self,
        num_predicates: int,
        num_terms: int,
        num_rules: int,
        *,
        width: int = 64,
        num_constants: int = 0,
        constant_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.width = width
        kinds = 4
        # The first row of each kind in the table; row 0 is padding.
        starts = np.cumsum([1, kinds, num_predicates, num_rules, num_terms]).tolist()
        self._kinds, self._predicates, self._rules, self._terms, size = starts
        self.table = nn.Embedding(size, width, padding_idx=0)
        nn.init.normal_(self.table.weight, 0.0, width**-0.5)
        with torch.no_grad():
            self.table.weight[0] = 0.0
        scale = torch.ones(size)
        scale[self._terms : self._terms + num_constants] = constant_scale
        self.register_buffer("scale", scale, persistent=False)
        # What a candidate is worth whatever the state.
        self.worth = nn.Embedding(size, 1, padding_idx=0)
        nn.init.zeros_(self.worth.weight)
        self.atom = nn.Linear(3 * width, width)
        self.body = _layers([2 * width, 2 * width, width], nn.ReLU, last=False)
        self.same = nn.Linear(width, 4)

    def state(self, obs: Tensors) -> Tensor:
        atoms = torch.cat([obs["goals"], obs["query"][:, None, [1, 0, 2]]], 1)
        real = atoms[..., 0] >= 0
        found = self._atoms(atoms[real])
        vectors = found.new_zeros(*real.shape, self.width).index_put((real,), found)
        first, others = vectors[:, 0], vectors[:, 1:]
        likeness = (others @ first[..., None]).squeeze(-1) / self.width**0.5
        # Finite, for slots that show nothing at all.
        weights = likeness.masked_fill(~real[:, 1:], torch.finfo(likeness.dtype).min).softmax(-1)
        memory = (weights[:, None] @ others).squeeze(1)
        return cast(Tensor, self.body(torch.cat([first, memory], -1)))

    def point(self, obs: Tensors, state: Tensor) -> Tensor:
        mask = obs["mask"]
        row, column = mask.nonzero(as_tuple=True)
        given = obs["candidates"][row, column].long()  # [M, 4]
        kind, number, terms = given[:, 0], given[:, 1], given[:, 2:]
        fact, rule = kind == FACT, kind == RULE
        goal = obs["goals"][:, 0, 1:][row]
        opened = fact[:, None] & (terms != goal)
        rows = torch.cat(
            [
                torch.where(rule, number + self._rules, kind + self._kinds)[:, None],
                torch.where(opened, terms + self._terms, 0),
            ],
            1,
        )
        scale = cast(Tensor, self.scale)[rows]
        vector = F.embedding_bag(
            rows, self.table.weight, mode="sum", padding_idx=0, per_sample_weights=scale
        )
        ends = obs["query"][:, [0, 2]][row]
        equal = (terms[:, :, None] == ends[:, None]) & opened[:, :, None]
        scores: Tensor = (state[row] * vector).sum(-1) / self.width**0.5
        scores = scores + (self.worth(rows).squeeze(-1) * scale).sum(1)
        scores = scores + (self.same(state)[row] * equal.flatten(1)).sum(-1)
        return scores.new_zeros(mask.shape).index_put((row, column), scores)

    def _atoms(self, atoms: Tensor) -> Tensor:
        atoms = atoms.long()
        rows = torch.cat([atoms[..., :1] + self._predicates, atoms[..., 1:] + self._terms], -1)
        rows = torch.where(atoms >= 0, rows, 0)
        vectors = self.table(rows) * cast(Tensor, self.scale)[rows][..., None]
        joined: Tensor = self.atom(vectors.flatten(-2))
        return F.relu(joined)


def policy_for(
    env: Env | Wrapper, *, width: int = 64, temperature: float = 1.0, seed: int = 0
) -> Policy:
    """A policy for the environment's observations, with the same weights for the same seed.

    An environment that wraps another one as `env` and keeps its observations gets the same policy.
    """
    inner = array_env(env)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, "policy"))
        actor, critic = (_encoder_for(inner, width) for _ in range(2))
        return Policy(actor, critic, temperature=temperature)


def choose(
    logits: Tensor, mask: NDArray[np.bool_], key: int | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """An action for each row and its log-probability.

    It is sampled with random numbers keyed by (key, row), or greedy without a key. It never lies
    outside the mask.
    """
    given = logits.detach().float().cpu().numpy()
    actions, logp = np.empty(len(given), np.int64), np.empty(len(given), np.float32)
    if key is None:
        bad = kernels.greedy(given, mask, actions, logp)
    else:
        bad = kernels.sample(given, mask, np.uint64(key), actions, logp)
    if bad >= 0 and not mask[bad].any():
        raise ConfigError(
            f"the mask of environment {bad} allows no action; a state without one must end its "
            f"episode"
        )
    if bad >= 0:
        raise BadLoss(
            f"the policy's logits for environment {bad} are not finite; train again with a lower "
            f"learning rate"
        )
    return actions, logp


def _encoder_for(env: Env, width: int) -> Encoder:
    if (inner := symbolic(env)) is not None:
        return GoalEncoder(inner.num_predicates, inner.num_terms, inner.num_rules, width=width)
    if "features" in env.spec:
        (num_features,) = env.spec["features"].shape
        return FeatureEncoder(num_features, env.num_actions, width=width)
    raise ConfigError(
        f"no encoder for observations of {', '.join(sorted(env.spec))}; give the environment "
        f"`features`, or build a Policy with your own Encoder"
    )


def _layers(sizes: Sequence[int], activation: type[nn.Module], *, last: bool = True) -> Any:
    """Linear layers with orthogonal weights and an activation after each, but for `last`."""
    modules: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        linear = nn.Linear(inside, outside)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        modules += [linear, activation()]
    return nn.Sequential(*modules[: None if last else -1])
