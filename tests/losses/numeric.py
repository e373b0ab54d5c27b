"""Derivatives of float64 transcriptions, to compare with the losses' derivatives."""

from collections.abc import Callable

import numpy as np


def gradient(
    function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6
) -> np.ndarray:
    """Central differences of the sum of `function`'s values in each entry of `x`."""
    slopes = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        difference = function(x + shift).sum() - function(x - shift).sum()
        slopes[index] = difference / (2 * step)
    return slopes
