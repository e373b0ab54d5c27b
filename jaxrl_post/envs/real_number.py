"""Converts a user's return value to a number, from any numeric library."""

from __future__ import annotations

import math
import numbers
from decimal import Decimal

__all__ = ["NumberError", "real_number", "shown"]


class NumberError(ValueError):
    """A reward or a metric that is not a finite real number."""


def real_number(name: str, value: object) -> float:
    """A real number as a float.

    Args:
        name: of the value, for the error.
        value: a bool, int, float, Fraction or Decimal, a scalar of NumPy, or an array
            of any library with one value and no axes.

    Raises:
        NumberError: it is anything else, or not finite as a float.

    >>> from fractions import Fraction
    >>> real_number("reward", True), real_number("reward", Fraction(1, 4))
    (1.0, 0.25)
    >>> real_number("reward", None)
    Traceback (most recent call last):
    jaxrl_post.envs.real_number.NumberError: reward must be a finite number, got None
    (NoneType)
    """
    number = value
    # NumPy's bool, and arrays without axes of NumPy, JAX or PyTorch, are not `Real`.
    if getattr(value, "shape", None) == () and callable(
        item := getattr(value, "item", None)
    ):
        number = item()
    if isinstance(number, numbers.Real | Decimal):
        try:
            result = float(number)
        except (OverflowError, ValueError):
            # An integer that is too large, or a signalling NaN.
            result = math.inf
        if math.isfinite(result):
            return result
    raise NumberError(f"{name} must be a finite number, got {shown(value)}")


def shown(value: object) -> str:
    """A value for an error: shortened, with its type unless it is a float."""
    if type(value) is float:
        return repr(value)
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
