"""Training of a query mutation policy."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = ["MutatorResult", "build_env", "load_policy", "train_query_mutator"]

if TYPE_CHECKING:
    from batchwright.train.query_mutator.loop import (
        MutatorResult,
        build_env,
        load_policy,
        train_query_mutator,
    )
else:
    # The loop needs torch; the settings beside it, which a command's help is made from, do not.
    __getattr__ = lazy_names(__name__, "batchwright.train.query_mutator.loop")
