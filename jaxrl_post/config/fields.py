"""Annotations of options: a number's range, and what may change on resuming.

    steps: Annotated[int, COUNT, FREE] = 200

Every number has a range, or `ANY` if it has none of its own. A `FREE` option may differ
when a run is resumed; in a `FREE` section, all options may.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from jaxrl_post.config.errors import ConfigError

__all__ = [
    "ANY",
    "COUNT",
    "DECAY",
    "FREE",
    "NOT_NEGATIVE",
    "POSITIVE",
    "SEED",
    "SHARE",
    "Range",
    "check_numbers",
    "fields_of",
    "replaced",
]


def _told(number: float) -> str:
    """Writes a number for a message: an integer with all of its digits."""
    return str(number) if isinstance(number, int) else f"{number:g}"


@dataclass(frozen=True)
class Range:
    """An interval; both ends belong to it unless they are open or infinite.

    >>> print(Range(0, 1, open_high=True), Range(0, open_low=True), Range(1), sep="; ")
    in [0, 1); greater than 0; at least 1
    """

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        # Infinity and NaN are in no interval.
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (value > self.low if self.open_low else value >= self.low)
            and (value < self.high if self.open_high else value <= self.high)
        )

    def __str__(self) -> str:
        if math.isinf(self.high):
            return (
                f"{'greater than' if self.open_low else 'at least'} {_told(self.low)}"
            )
        brackets = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"in {brackets[0]}{_told(self.low)}, {_told(self.high)}{brackets[1]}"


COUNT, NOT_NEGATIVE = Range(1), Range(0)
# JAX keeps 32 bits of a seed: two larger seeds may give the same noise.
SEED = Range(0, 2**32 - 1)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1)
DECAY = Range(0, 1, open_high=True)
ANY, FREE = "any number", "free to change"


def fields_of(config: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yields every option of a configuration: its sections and their options.

    Args:
        config: a dataclass of options.

    Yields:
        Name (`optimizer.beta1`), value and annotations of an option.
    """
    hints = get_type_hints(type(config), include_extras=True)
    for name, value in vars(config).items():
        yield name, value, getattr(hints[name], "__metadata__", ())
        if dataclasses.is_dataclass(value):
            for inner, item, notes in fields_of(value):
                yield f"{name}.{inner}", item, notes


def check_numbers(config: Any) -> None:
    """Checks that every number of a configuration is in its range.

    Args:
        config: a dataclass of options, nested ones included.

    Raises:
        ConfigError: one is out of its range.

    >>> from jaxrl_post.config.run import CheckpointConfig, RunConfig
    >>> check_numbers(RunConfig(checkpoint=CheckpointConfig(every=0)))
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --checkpoint.every: must be at least 1; got 0
    """
    for name, value, notes in fields_of(config):
        for note in notes:
            if value is not None and isinstance(note, Range) and value not in note:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option}: must be {note}; got {_told(value)}")


def replaced[Config](config: Config, path: str, value: Any) -> Config:
    """Returns a configuration with another value of an option.

    Args:
        config: a nested dataclass.
        path: of the option, such as "algorithm.clip_high".
        value: the option's.
    """
    name, _, rest = path.partition(".")
    inner = replaced(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: inner})  # type: ignore[type-var]
