"""Values of a config.json, checked one by one; null counts as absent."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models.errors import CheckpointError

__all__ = ["Json", "flag", "integer", "number", "optional_integer", "optional_number"]

type Json = Mapping[str, Any]


def integer(raw: Json, key: str, default: int | None = None) -> int:
    """Reads an integer; no default means that it is required.

    Raises:
        CheckpointError: it is missing, or no integer.
    """
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be an integer; got {value!r}")
    return value


def optional_integer(raw: Json, key: str) -> int | None:
    """Reads an integer that may be absent."""
    return None if raw.get(key) is None else integer(raw, key)


def number(raw: Json, key: str, default: float | None = None) -> float:
    """Reads a number; no default means that it is required.

    Raises:
        CheckpointError: it is missing, or no number.
    """
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{key} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be a number; got {value!r}")
    return float(value)


def optional_number(raw: Json, key: str) -> float | None:
    """Reads a number that may be absent."""
    return None if raw.get(key) is None else number(raw, key)


def flag(raw: Json, key: str, default: bool) -> bool:
    """Reads true or false.

    Raises:
        CheckpointError: it is something else.
    """
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false; got {value!r}")
    return value
