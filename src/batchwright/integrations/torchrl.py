"""Our policies as TorchRL's actor and critic, for its collectors, GAE and losses."""

from collections.abc import Callable

import torch

from batchwright.envs.torchrl import TorchRLEnv
from batchwright.errors import need
from batchwright.rl.policy import Policy

need("torchrl", extra="rl")

from tensordict.nn import TensorDictModule  # noqa: E402 - only now known to be installed
from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator  # noqa: E402

__all__ = ["actor_critic"]

Tensors = dict[str, torch.Tensor]


class _OnRows(torch.nn.Module):
    """A network on observations with any leading axes, as one row each."""

    def __init__(
        self,
        names: list[str],
        axes: list[int],
        parts: list[torch.nn.Module],
        made: Callable[[Tensors], torch.Tensor],
    ) -> None:
        super().__init__()
        self._names, self._axes, self._made = names, axes, made
        # Named as parts, so that their parameters are those of this module.
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, *obs: torch.Tensor) -> torch.Tensor:
        leading = obs[0].shape[: obs[0].ndim - self._axes[0]]
        rows = {
            name: tensor.reshape(-1, *tensor.shape[tensor.ndim - axes :])
            for name, axes, tensor in zip(self._names, self._axes, obs, strict=True)
        }
        return self._made(rows).reshape(*leading, -1)


def actor_critic(env: TorchRLEnv, policy: Policy) -> tuple[ProbabilisticActor, ValueOperator]:
    """The policy as TorchRL's modules, sharing its weights: what they learn, it learns.

    The actor draws within the mask. GAE must be told `deactivate_vmap=True`, since the networks
    compute only what is not padding.
    """
    names = list(env.env.spec)
    axes = [len(spec.shape) for spec in env.env.spec.values()]

    def scores(obs: Tensors) -> torch.Tensor:
        return policy.logits(obs)

    def value(obs: Tensors) -> torch.Tensor:
        return policy.value(obs)[:, None]

    actor = _OnRows(names, axes, [policy.actor], scores)
    critic = _OnRows(names, axes, [policy.critic, policy.head], value)
    return (
        ProbabilisticActor(
            TensorDictModule(actor, names, ["logits"]),
            in_keys=["logits", "mask"],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        ),
        ValueOperator(critic, names),
    )
