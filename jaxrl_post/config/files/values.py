"""Reads the options of a file: the config.json of a run, or JSON, YAML or TOML."""

import dataclasses
import functools
import re
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.jsonl import json_file

__all__ = ["as_arguments", "from_values", "read"]


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as YAML 1.2 does, and refuses a repeated key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [each.value for each, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"key {key!r} appears twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read(file: Path, option: str = "--config") -> dict[str, Any]:
    """Returns the options of a file, in sections, as a run's config.json has them.

    Args:
        file: read as YAML or TOML if its name ends so, else as JSON.
        option: that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    readers = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml}
    reader = readers.get(file.suffix.lower(), functools.partial(json_file, strict=True))
    try:
        content = reader(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: cannot read {file}: {error}") from error
    except RecursionError:
        raise ConfigError(f"{option}: cannot read {file}: nested too deeply") from None
    # A run's config.json is a `RunDescription`, with the options in `config`.
    if isinstance(content, dict) and "versions" in content:
        content = content.get("config")
    if not isinstance(content, dict):
        raise ConfigError(f"{option}: {file} must hold an object; got {content!r:.80}")
    return content


def _yaml(file: Path) -> Any:
    try:
        return yaml.load(file.read_text(encoding="utf-8-sig"), _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _toml(file: Path) -> Any:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None


def as_arguments(values: dict[str, Any], prefix: str = "--") -> list[str]:
    """The options of a file as a command line has them; null leaves one out.

    >>> as_arguments({"model": "tiny", "lora": {"rank": 8, "targets": None}})
    ['--model=tiny', '--lora.rank=8']
    """
    found: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += as_arguments(value, f"{prefix}{name}.")
        elif value is not None:
            found.append(f"{prefix}{name}={value}")
    return found


def from_values[Config](
    default: Config, values: dict[str, Any], *, where: str
) -> Config:
    """Replaces fields of a nested dataclass; an unknown key is an error.

    Raises:
        ConfigError: a key that is no field, or a value of the wrong type.
    """
    changes: dict[str, Any] = {}
    hints = get_type_hints(type(default))
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(
                f"{where}: unknown key {name!r:.80}; known: {', '.join(sorted(hints))}"
            )
        old = getattr(default, name)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {name} must be an object; got {value!r:.80}"
                )
            changes[name] = from_values(old, value, where=f"{where}: {name}")
        elif not _fits(value, hints[name]):
            hint = hints[name]
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ConfigError(
                f"{where}: {name} must be {expected.removeprefix('typing.')}; "
                f"got {value!r:.80}"
            )
        else:
            changes[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of an option."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
