"""Paired tests of two evaluations of the same tasks: bootstrap over tasks, McNemar."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Paired", "interval_of_mean", "paired"]

RESAMPLES = 10_000
# Two-sided 95 %.
QUANTILES = (0.025, 0.975)
# Most drawn numbers that are in memory at a time.
CHUNK = 2**21
# Up to so many distinct values, their counts in a resample are drawn instead of tasks.
FEW_VALUES = 64


@dataclass(frozen=True)
class Paired:
    """The difference of two evaluations on the tasks that both have.

    Attributes:
        tasks: number of tasks that both have.
        unpaired: number of tasks that only one of them has; they count for nothing.
        means: mean over the tasks of a task's mean score, before and after.
        difference: the mean after, less the mean before.
        interval: 95 % confidence interval of `difference`.
        gained: tasks that only the evaluation after solved; None unless each task has
            one score of 0 or 1 in both.
        lost: tasks that only the evaluation before solved; None as for `gained`.
        p_value: two-sided, of no difference.
        method: the test and the interval, in words.
    """

    tasks: int
    unpaired: int
    means: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    gained: int | None
    lost: int | None
    p_value: float
    method: str

    @property
    def verdict(self) -> str:
        """The word "better" or "worse", or "same" if the interval contains 0."""
        low, high = self.interval
        return "better" if low > 0 else "worse" if high < 0 else "same"


def paired(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Paired:
    r"""Compares two evaluations task by task.

    With x_i the mean score of task i before and y_i after, the interval is a percentile
    bootstrap of the mean of y_i - x_i, which draws tasks with replacement: samples of
    a task are correlated. If each task has one score of 0 or 1 in both, the test is
    McNemar's, exactly: of the n tasks that one of the two alone solved, the number that
    the evaluation after solved is binomial with n and 1/2,

        p = min(1, 2 sum_{i <= k} C(n, i) / 2^n),    k = min(gained, lost).

    Otherwise p is the bootstrap's: twice the smaller share of resamples on one side of
    0, with one resample added to both.

    Args:
        before: scores of the samples of each task, by the task's id: 1 for solved and 0
            for not, or rewards. At least one score a task; finite.
        after: the same of the other evaluation.
        resamples: number of bootstrap resamples, >= 1.
        seed: of the resamples, >= 0.

    Raises:
        ValueError: no task is in both; a task has no score, or one that is not finite;
            `resamples` is not positive.

    References:
        McNemar, Note on the Sampling Error of the Difference between Correlated
        Proportions or Percentages, Psychometrika 12 (1947); Efron and Tibshirani, An
        Introduction to the Bootstrap (1993), chapters 13 and 16.

    >>> before = {"a": [0], "b": [1], "c": [0], "d": [0], "gone": [1]}
    >>> found = paired(before, {"a": [1], "b": [1], "c": [1], "d": [0]})
    >>> found.difference, found.gained, found.lost, found.p_value, found.unpaired
    (0.5, 2, 0, 0.5, 1)
    """
    if resamples < 1:
        raise ValueError(f"paired: resamples must be at least 1; got {resamples}")
    common = [task for task in before if task in after]
    if not common:
        raise ValueError(
            f"paired: no task is in both evaluations, of {len(before)} before and "
            f"{len(after)} after; compare evaluations of the same tasks"
        )
    first, second = (
        np.array([_mean(scores[task], task) for task in common])
        for scores in (before, after)
    )
    changes = second - first
    drawn = _resampled_means(changes, resamples, seed)
    single = all(
        len(scores[task]) == 1 and scores[task][0] in (0, 1)
        for scores in (before, after)
        for task in common
    )
    gained, lost = int(np.sum(changes > 0)), int(np.sum(changes < 0))
    bootstrap = f"{resamples:,} bootstrap resamples of the tasks"
    if single:
        p_value = _mcnemar(gained, lost)
        method = f"exact McNemar test; interval by {bootstrap}"
    else:
        smaller = min(int(np.sum(drawn <= 0)), int(np.sum(drawn >= 0)))
        p_value = min(1.0, 2 * (smaller + 1) / (resamples + 1))
        method = f"test and interval by {bootstrap}"
    return Paired(
        tasks=len(common),
        unpaired=len(before) + len(after) - 2 * len(common),
        means=(float(first.mean()), float(second.mean())),
        difference=float(changes.mean()),
        interval=_interval(drawn),
        gained=gained if single else None,
        lost=lost if single else None,
        p_value=p_value,
        method=method,
    )


def interval_of_mean(
    values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % confidence interval of a mean over tasks, by a percentile bootstrap.

    With fewer than about 20 tasks it is too narrow.

    Args:
        values: one of each task, at least one; finite.
        resamples: number of bootstrap resamples, >= 1.
        seed: of the resamples, >= 0.

    Returns:
        (lower, upper).

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.

    >>> interval_of_mean([3.0, 3.0, 3.0])
    (3.0, 3.0)
    """
    return _interval(_resampled_means(np.asarray(values, float), resamples, seed))


def _mean(scores: Sequence[float], task: str) -> float:
    if not len(scores) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"paired: task {task} must have finite scores, at least one; got "
            f"{list(scores)!r:.80}"
        )
    return math.fsum(scores) / len(scores)


def _interval(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(drawn, QUANTILES)
    return float(low), float(high)


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means of `resamples` draws with replacement, as many values as there are each."""
    generator = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    size = len(values)
    if len(distinct) <= FEW_VALUES:
        # The same distribution, for any number of tasks at the cost of a few.
        times = generator.multinomial(size, counts / size, size=resamples)
        return times @ distinct / size
    rows = max(1, CHUNK // size)
    return np.concatenate(
        [
            values[generator.integers(size, size=(count, size), dtype=np.int32)].mean(1)
            for count in _split(resamples, rows)
        ]
    )


def _split(total: int, most: int) -> Iterator[int]:
    """Yields counts of at most `most` that add up to a total."""
    for begin in range(0, total, most):
        yield min(most, total - begin)


def _mcnemar(gained: int, lost: int) -> float:
    total, term, below = gained + lost, 1, 0
    for i in range(min(gained, lost) + 1):
        below += term
        term = term * (total - i) // (i + 1)
    return min(1.0, 2 * below / 2**total)
