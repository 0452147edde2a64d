"""How to compare runs from few seeds: interquartile means, stratified bootstrap, probability of improvement, profiles.

After Agarwal et al. 2021 (arXiv 2108.13264), in numpy. Scores are a list with one array per task; the first axis of an
array is the seed, the unit that the bootstrap resamples; further axes, such as a run's last evaluations, stay together.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scores = Sequence[NDArray[np.float64]]


class Interval(NamedTuple):
    """A point estimate and its bootstrap interval."""

    point: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.point:.4g} [{self.low:.4g}, {self.high:.4g}]"


def iqm(scores: Scores) -> float:
    """Interquartile mean: the mean of all values together, less a quarter of them (rounded down) at either end."""
    values = np.sort(np.concatenate([np.ravel(task) for task in scores]))
    cut = len(values) // 4
    return float(values[cut : len(values) - cut].mean())


def bootstrap(
    statistic: Callable[..., float], *groups: Scores, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile interval of `statistic(*groups)` under the stratified bootstrap.

    Args:
        statistic: Takes as many `Scores` as there are groups, e.g. `iqm`, `ratio_of_iqms`.
        groups: Each is resampled on its own, with replacement, seed by seed within a task.
        confidence: Two-sided, in (0, 1). The lower end is a one-sided bound at (1 + confidence) / 2.
        resamples: Bootstrap draws.
        seed: Of the draws: the same scores give the same interval.
    """
    rng = np.random.default_rng(seed)
    draws = [
        statistic(*([task[rng.integers(len(task), size=len(task))] for task in scores] for scores in groups))
        for _ in range(resamples)
    ]
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(statistic(*groups), float(low), float(high))


def ratio_of_iqms(ours: Scores, theirs: Scores) -> float:
    """IQM of ours over IQM of theirs; only meaningful for positive scores."""
    return iqm(ours) / iqm(theirs)


def probability_of_improvement(ours: Scores, theirs: Scores) -> float:
    """Chance that a run of ours beats a run of theirs, averaged over tasks; ties count half, runs by their mean."""
    wins = []
    for x, y in zip(ours, theirs, strict=True):
        a, b = _per_run(x)[:, None], _per_run(y)[None, :]
        wins.append(np.mean((a > b) + 0.5 * (a == b)))
    return float(np.mean(wins))


def performance_profile(scores: Scores, thresholds: ArrayLike) -> NDArray[np.float64]:
    """(K,) share of runs that score above each of K thresholds, averaged over tasks."""
    levels = np.asarray(thresholds, dtype=np.float64)
    return np.mean([(_per_run(task)[:, None] > levels).mean(axis=0) for task in scores], axis=0)


def _per_run(task: NDArray[np.float64]) -> NDArray[np.float64]:
    return task.reshape(len(task), -1).mean(axis=1)
