"""Supervised fine-tuning on a batch plan."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = ["SftResult", "Tracker", "learning_rate", "microbatch_loss", "train_sft"]

if TYPE_CHECKING:
    from batchwright.train.sft.loop import (
        SftResult,
        Tracker,
        learning_rate,
        microbatch_loss,
        train_sft,
    )
else:
    # The loop needs torch; its settings, which a command's help is made from, do not.
    __getattr__ = lazy_names(__name__, "batchwright.train.sft.loop")
