"""Checks of the arguments of environments."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

__all__ = ["require_integer", "require_path_options", "require_share"]


def require_integer(argument: str, value: object, low: int, high: int) -> None:
    """Raises ValueError unless a value is an integer in [low, high].

    >>> require_integer("terms", 9, 2, 8)
    Traceback (most recent call last):
    ValueError: terms must be an integer in [2, 8], got 9
    """
    # True and False are integers to isinstance.
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{argument} must be an integer in [{low}, {high}], got {value!r}"
        )


def require_share(argument: str, value: float) -> None:
    """Raises ValueError unless a value is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{argument} must be a share in [0, 1], got {value!r}")


def require_path_options(environment: Any, generated: Sequence[str]) -> None:
    """Raises ValueError if options of files and of generated tasks are mixed.

    Args:
        environment: a dataclass with `path` and `eval_path`; without a path it
            generates its tasks.
        generated: names of the options that only generated tasks have.
    """
    if environment.path is None:
        if environment.eval_path is not None:
            raise ValueError("eval_path needs path: name the training rows, too")
        return
    for field in fields(environment):
        given = getattr(environment, field.name) != field.default
        if field.name in generated and given:
            raise ValueError(
                f"{field.name} is of generated tasks: drop it, or drop path"
            )
