"""Agreement of a judge's scores with labels: accuracy, Cohen's kappa, calibration."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from batchwright.errors import ConfigError, Mismatch

__all__ = ["Agreement", "Bin", "agreement"]


@dataclass(frozen=True, slots=True)
class Bin:
    """The samples whose scores lie in one interval of the calibration plot."""

    low: float
    high: float
    count: int
    mean_score: float
    share_true: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Scores compared with labels; a score of at least `threshold` predicts true."""

    count: int
    missing: int
    """Samples without a valid score; excluded from everything else."""
    threshold: float
    accuracy: float
    kappa: float | None
    """Cohen's kappa: 1 is perfect, 0 is chance level; None where chance agreement is 1."""
    true_positive: int
    false_positive: int
    true_negative: int
    false_negative: int
    brier: float
    calibration_error: float
    """Expected calibration error: mean distance of score and fraction of true labels per bin."""
    bins: tuple[Bin, ...]


def agreement(
    scores: ArrayLike, labels: ArrayLike, *, threshold: float = 0.5, bins: int = 10
) -> Agreement:
    """Compare scores from 0 to 1 with labels; a score that is NaN is missing.

    >>> found = agreement([0.9, 0.8, 0.3, 0.6], [True, True, False, False])
    >>> found.accuracy, found.kappa
    (0.75, 0.5)
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    if values.shape != truth.shape or values.ndim != 1:
        raise Mismatch(
            f"scores and labels must be lists of equal length, got {values.size} and {truth.size}"
        )
    there = np.isfinite(values)
    missing = int((~there).sum())
    values, truth = values[there], truth[there]
    if not len(values):
        raise ConfigError("no sample has both a valid score and a label; check the ids in both")
    if values.min() < 0 or values.max() > 1:
        raise ConfigError(
            f"scores must be between 0 and 1, got {values.min():g} to {values.max():g}; "
            f"choose the column of a judge, or set --low and --high"
        )
    said = values >= threshold
    right = said == truth
    chance = said.mean() * truth.mean() + (1 - said.mean()) * (1 - truth.mean())
    places = np.minimum((values * bins).astype(int), bins - 1)
    found = tuple(
        Bin(
            low=place / bins,
            high=(place + 1) / bins,
            count=int(inside.sum()),
            mean_score=float(values[inside].mean()),
            share_true=float(truth[inside].mean()),
        )
        for place in range(bins)
        if (inside := places == place).any()
    )
    return Agreement(
        count=len(values),
        missing=missing,
        threshold=threshold,
        accuracy=float(right.mean()),
        kappa=None if chance == 1 else float((right.mean() - chance) / (1 - chance)),
        true_positive=int((said & truth).sum()),
        false_positive=int((said & ~truth).sum()),
        true_negative=int((~said & ~truth).sum()),
        false_negative=int((~said & truth).sum()),
        brier=float(((values - truth) ** 2).mean()),
        calibration_error=sum(b.count * abs(b.mean_score - b.share_true) for b in found)
        / len(values),
        bins=found,
    )
