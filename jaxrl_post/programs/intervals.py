"""Confidence intervals of a share, such as the accuracy on some tasks."""

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["interval_over_tasks", "wilson_interval"]

# Two-sided 95 %.
Z = 1.959964


def wilson_interval(share: float, count: float, *, z: float = Z) -> tuple[float, float]:
    r"""Wilson's score interval of a proportion.

    (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)

    Args:
        share: p, in [0, 1].
        count: n, >= 1 independent observations; need not be an integer.
        z: quantile of the normal distribution; the default is for 95 %.

    Returns:
        (lower, upper), in [0, 1].

    Raises:
        ValueError: `share` or `count` is out of its range.

    References:
        Wilson, Probable Inference, the Law of Succession, and Statistical Inference,
        JASA 22 (1927).

    >>> low, high = wilson_interval(0.5, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    if not 0 <= share <= 1 or count < 1:
        raise ValueError(
            f"wilson_interval: share must lie in [0, 1] and count be at least 1; "
            f"got {share} of {count}"
        )
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    scale = 1 + z * z / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def interval_over_tasks(
    shares: Sequence[float], samples: int, *, z: float = Z
) -> tuple[float, float]:
    r"""95 % confidence interval of accuracy: the mean over tasks of the solved share.

    Samples of a task are correlated, so N samples of n tasks are not N independent
    observations. This is Wilson's interval for the effective number of observations

        n_e = p (1 - p) / (s^2 / n),    n <= n_e <= N

    with p the mean and s^2 the variance of the shares; n_e = n with one sample per
    task, and if all tasks or none are solved (s = 0). With fewer than about 20 tasks,
    s is too uncertain and the interval too narrow.

    Args:
        shares: solved share of each task's samples, in [0, 1], at least one.
        samples: N, of all tasks together.
        z: as for `wilson_interval`.

    Returns:
        (lower, upper), in [0, 1].

    References:
        Dean and Pagano, Evaluating Confidence Interval Methods for Binomial
        Proportions in Clustered Surveys, J. Survey Statistics and Methodology 3 (2015).

    >>> interval_over_tasks([0.0, 1.0] * 50, 800) == wilson_interval(0.5, 100)
    True
    >>> interval_over_tasks([0.5] * 100, 800) == wilson_interval(0.5, 800)
    True
    """
    count, mean = len(shares), float(np.mean(shares))
    worth = float(count)
    if count > 1 and 0 < mean < 1:
        variance = float(np.var(shares, ddof=1)) / count
        most = mean * (1 - mean) / variance if variance > 0 else math.inf
        worth = min(max(most, count), samples)
    return wilson_interval(mean, worth, z=z)
