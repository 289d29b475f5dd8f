"""The prover's environment on TensorDicts: thin over `ProverEnv`, which does the work on arrays."""

from typing import Any, Literal

from numpy.typing import ArrayLike

from batchwright.envs.prover.env import ProverEnv
from batchwright.envs.torchrl import TorchRLEnv
from batchwright.errors import ConfigError
from batchwright.logic.facts import Facts
from batchwright.logic.mine.mining import mine
from batchwright.logic.rules import Rules
from batchwright.logic.vocab import Vocab

__all__ = ["BatchedVecEnv"]


class BatchedVecEnv(TorchRLEnv):
    """`batch_size` queries proved at once in one process, as a TorchRL `EnvBase`.

    `reset()` and `step(td)` give TensorDicts with the batch size [B], which `batch_size[0]` reads;
    `rollout`, collectors, transforms and losses of TorchRL work on it. All settings are those of
    `ProverEnv`, which is `.env` and which our own PPO steps without a TensorDict in between.

    A `data_handler` is anything with `facts`, such as a `Graph`; its `rules` and its queries
    (`train_queries` or `train`) are taken where none are given, and if it has no rules they are
    mined from the facts. Facts that are triples of numbers are named by the `index_manager`: a
    `Vocab`, or anything with the dictionaries `constant_idx2str` and `predicate_idx2str`.
    """

    env: ProverEnv

    def __init__(
        self,
        facts: Facts | ArrayLike | None = None,
        rules: Rules | None = None,
        queries: ArrayLike | None = None,
        batch_size: int | Literal["auto"] = "auto",
        *,
        index_manager: Any = None,
        data_handler: Any = None,
        **settings: Any,
    ) -> None:
        facts = _given(facts, data_handler, "facts")
        if facts is None:
            raise ConfigError("no facts; give facts and rules, or a data_handler that has them")
        vocab = _vocab(_given(index_manager, data_handler, "vocab"))
        if not isinstance(facts, Facts):
            if vocab is None:
                raise ConfigError("facts that are triples of numbers need an index_manager")
            facts = Facts.of(facts, vocab)
        rules = _given(rules, data_handler, "rules")
        if rules is None:
            if vocab is None:
                raise ConfigError("no rules; give some, or an index_manager to mine rules with")
            rules = mine(facts, vocab).rules
        queries = _given(queries, data_handler, "train_queries", "train")
        if queries is None:
            raise ConfigError("no queries; give at least one triple")
        super().__init__(ProverEnv(facts, rules, queries, batch_size, **settings))


def _given(value: Any, handler: Any, *names: str) -> Any:
    """The value, or else what the handler has under the first of the names that it has."""
    found = (getattr(handler, name, None) for name in names)
    return value if value is not None else next((each for each in found if each is not None), None)


def _vocab(manager: Any) -> Vocab | None:
    """The names of an index manager; numbers that it leaves out get a name that says so."""
    if manager is None or isinstance(manager, Vocab):
        return manager
    kinds = []
    for kind in ("constant_idx2str", "predicate_idx2str"):
        names = getattr(manager, kind, None)
        if not names:
            raise ConfigError(
                f"an index_manager is a Vocab or has {kind}, got a {type(manager).__name__}"
            )
        kinds.append(tuple(names.get(i, f"<{i}>") for i in range(max(names) + 1)))
    return Vocab(*kinds)
