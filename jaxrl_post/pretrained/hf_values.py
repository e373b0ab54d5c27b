"""Reads single values of a config.json and checks their type, range and null.

transformers distinguishes null from an absent key: an absent key has the family's
default; null means None, where the key's type allows it. So the functions here refuse
null, except those named `optional_...`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.pretrained.errors import CheckpointError

__all__ = [
    "Json",
    "Range",
    "flag",
    "integer",
    "integers",
    "number",
    "optional_flag",
    "optional_integer",
    "optional_number",
    "section",
    "text",
]

type Json = Mapping[str, Any]


@dataclass(frozen=True)
class Range:
    """The numbers allowed for a key, from `low` to `high`.

    >>> Range(1, 100).problem(0)
    'must be at least 1'
    """

    low: float
    high: float

    def problem(self, value: float) -> str:
        """Describes the requirement that a number violates; empty if it is valid."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        if value < self.low:
            return f"must be at least {self.low:g}"
        return f"must be at most {self.high:g}" if value > self.high else ""


# Positions and widths are int32 in the decoder. All other numbers are float32, and
# their squares and quotients must be finite too.
LARGEST_INTEGER = 2**31 - 1
LARGEST, SMALLEST = 1e30, 1e-30

COUNT = Range(1, LARGEST_INTEGER)
POSITIVE = Range(SMALLEST, LARGEST)

# Keys with another range than the default: COUNT for integers, POSITIVE for the rest.
RANGES: Mapping[str, Range] = {
    # Python loops over the layers before weights are read; no model has even 1,000.
    "num_hidden_layers": Range(1, 10_000),
    "max_window_layers": Range(0, LARGEST_INTEGER),
    "first_k_dense_replace": Range(0, LARGEST_INTEGER),
    "n_shared_experts": Range(0, LARGEST_INTEGER),
    "num_kv_shared_layers": Range(0, LARGEST_INTEGER),
    "hidden_size_per_layer_input": Range(0, LARGEST_INTEGER),
    "full_rotary_share": Range(SMALLEST, 1),
    "num_nextn_predict_layers": Range(0, 1000),
    "num_mtp_layers": Range(0, 1000),
    "num_mtp_modules": Range(0, 1000),
    "index_skip_topk_offset": Range(0, LARGEST_INTEGER),
    "rms_norm_eps": Range(0, LARGEST),
    "initializer_range": Range(0, LARGEST),
    "factor": Range(1e-6, 1e6),
    "partial_rotary_factor": Range(SMALLEST, 1),
    "llama_4_scaling_beta": Range(0, LARGEST),
    # transformers reads 0 as absent.
    "beta_fast": Range(0, LARGEST),
    "beta_slow": Range(0, LARGEST),
    "mscale": Range(0, LARGEST),
    "mscale_all_dim": Range(0, LARGEST),
}


def integer(raw: Json, key: str, default: int | None = None) -> int:
    """Reads an integer; without a default the key is required.

    Raises:
        CheckpointError: the value is missing, no integer, or out of the key's range.
    """
    value = _required(raw, key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be an integer; got {_shown(value)}")
    _check_range(key, value, RANGES.get(key, COUNT))
    return value


def optional_integer(raw: Json, key: str, default: int | None = None) -> int | None:
    """Reads an integer; null gives None, and an absent key gives the default."""
    return None if raw.get(key, default) is None else integer(raw, key, default)


def integers(raw: Json, key: str) -> list[int]:
    """Reads a list of integers; null and an absent key give an empty list."""
    value = raw.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise CheckpointError(f"{key} must be a list of integers; got {_shown(value)}")
    return value


def number(raw: Json, key: str, default: float | None = None) -> float:
    """Reads a number; without a default the key is required.

    Raises:
        CheckpointError: the value is missing, no number, or out of the key's range.
    """
    value = _required(raw, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"{key} must be a number; got {_shown(value)}")
    _check_range(key, value, RANGES.get(key, POSITIVE))
    return float(value)


def optional_number(raw: Json, key: str, default: float | None = None) -> float | None:
    """Reads a number; null gives None, and an absent key gives the default."""
    return None if raw.get(key, default) is None else number(raw, key, default)


def flag(raw: Json, key: str, default: bool) -> bool:
    """Reads true or false.

    Raises:
        CheckpointError: the value has another type.
    """
    value = _required(raw, key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} must be true or false; got {_shown(value)}")
    return value


def optional_flag(raw: Json, key: str, default: bool) -> bool:
    """Reads true or false; null means false."""
    return raw.get(key, default) is not None and flag(raw, key, default)


def text(raw: Json, key: str, default: str) -> str:
    """Reads a string.

    Raises:
        CheckpointError: the value has another type.
    """
    value = _required(raw, key, default)
    if not isinstance(value, str):
        raise CheckpointError(f"{key} must be a string; got {_shown(value)}")
    return value


def section(raw: Json, key: str) -> Json:
    """Reads a JSON object; null and an absent key give an empty object.

    Raises:
        CheckpointError: the value has another type.
    """
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key} must be a JSON object; got {_shown(value)}")
    return value


def _required(raw: Json, key: str, default: Any) -> Any:
    value = raw.get(key, default)
    if value is not None:
        return value
    if key not in raw:
        raise CheckpointError(f"{key} is missing")
    remedy = "" if default is None else f"; without the key it is {default}"
    raise CheckpointError(f"{key} must not be null{remedy}")


def _check_range(key: str, value: float, allowed: Range) -> None:
    problem = allowed.problem(value)
    if problem:
        raise CheckpointError(f"{key} {problem}; got {_shown(value)}")


def _shown(value: Any) -> str:
    # Python refuses to print integers of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of many digits"
    return f"{value!r:.120}"
