"""Compares the options of a resumed run with those it began with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_post.config.fields import FREE, fields_of
from jaxrl_post.config.run import RunConfig

__all__ = ["differences", "flattened"]


def differences(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The options that a resumed run must not change, but does.

    `FREE` options may differ. The end of a learning-rate schedule stays the same unless
    it is given anew (config/horizon.py).

    Args:
        saved: the configuration of the run, as config.json holds it.
        config: of the resumed run.

    Returns:
        One line per option; empty if the run can be resumed.

    >>> saved = dataclasses.asdict(RunConfig(seed=3, steps=7))
    >>> differences(saved, RunConfig())
    ['seed: 3 then, 0 now']
    """
    before, now = flattened(saved), flattened(dataclasses.asdict(config))
    free = [name for name, _, notes in fields_of(config) if FREE in notes]
    return [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
        and not any(name == each or name.startswith(f"{each}.") for each in free)
    ]


def flattened(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their whole names; tuples as lists, as JSON holds them.

    >>> flattened({"seed": 0, "update": {"epochs": 2}})
    {'seed': 0, 'update.epochs': 2}
    """
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= flattened(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(item) if isinstance(item, tuple) else item
    return flat
