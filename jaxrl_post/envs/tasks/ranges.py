"""Checks of the arguments of environments."""

__all__ = ["require_integer", "require_share"]


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
