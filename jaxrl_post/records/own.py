"""Calls functions from outside the package, which an option names."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.config.checks import known
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.specs import call, imported, named_parameters, parse_query, raised

__all__ = ["loaded", "made"]


def loaded(
    name: str, option: str, kind: str, names: Sequence[str]
) -> Callable[..., Any]:
    """Imports a function.

    Args:
        name: `module:function`.
        option: that names it, for error messages, such as "--loss.name".
        kind: what it makes, for error messages.
        names: the names of the package, for error messages.

    Raises:
        ConfigError: there is no such function, the import of its module fails, or its
            parameters cannot be given by name.
    """
    try:
        build = imported(name, kind, known(names))
        named_parameters(build, f"{kind} {name!r}")
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    return build


def made(
    spec: str,
    build: Callable[..., Any],
    options: Mapping[str, tuple[str, Any]],
    *,
    option: str,
    kind: str,
    broken: Callable[[Any], str | None],
    shared: type | None = None,
) -> Any:
    """Calls a function with options of the command and those behind a question mark.

    Args:
        spec: its name, and perhaps parameters.
        build: the function.
        options: arguments that options of the command give, each with its option.
        option: that names the function, for error messages.
        kind: what it makes, for error messages.
        broken: tells what is wrong with what a function from outside of the package
            returns; None for nothing.
        shared: as for `specs.call`.

    Raises:
        ConfigError: a parameter is given twice, does not exist, is missing, or has a
            wrong type or value; or, from outside, the function or `broken` raises, or
            something is wrong with what it returns.
    """
    name, _, query = spec.partition("?")
    given = {parameter: value for parameter, (_, value) in options.items()}
    try:
        behind = parse_query(spec, query)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    for parameter, value in behind.items():
        if parameter in given:
            raise ConfigError(
                f"{option} {spec}: an option of the command gives {parameter}, too; "
                "drop one of the two"
            )
        given[parameter] = value
    try:
        found = call(build, given, name, kind=kind, shared=shared)
    except ValueError as error:
        told = (
            f"{option}: {error}" if name in str(error) else f"{option} {spec}: {error}"
        )
        for parameter, (flag, _) in options.items():
            if re.search(
                rf"(^|: ){parameter} must |argument '{parameter}'", str(error)
            ):
                told = f"{flag}: {error}"
        raise ConfigError(told) from error
    if ":" not in name:
        return found
    try:
        problem = broken(found)
    except Exception as error:
        raise ConfigError(f"{option} {name}: {raised(error)}") from error
    if problem is not None:
        raise ConfigError(f"{option} {name}: {problem}")
    return found
