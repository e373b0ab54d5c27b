"""Calls functions from outside the package, which an option names."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.config.checks import known
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.specs import call, imported, parse_query

__all__ = ["loaded", "made"]

PACKAGE = str(Path(__file__).parents[1])


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
        ConfigError: there is no such function, or the import of its module fails.
    """
    try:
        return imported(name, kind, known(names))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    except Exception as error:
        raise ConfigError(_raised(f"{option} {name}", error)) from error


def made(
    spec: str,
    build: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    option: str,
    kind: str,
    broken: Callable[[Any], str | None],
) -> Any:
    """Calls a function with options of the command and those behind a question mark.

    Args:
        spec: its name, and perhaps parameters.
        build: the function.
        options: arguments that options of the command give.
        option: that names the function, for error messages.
        kind: what it makes, for error messages.
        broken: tells what is wrong with what a function from outside of the package
            returns; None for nothing.

    Raises:
        ConfigError: a parameter is given twice; or, from outside, the function or
            `broken` raises, or something is wrong with what it returns.
        ValueError: a parameter does not exist, or is missing.
    """
    name, _, query = spec.partition("?")
    given = dict(options)
    for parameter, value in parse_query(spec, query).items():
        if parameter in given:
            raise ConfigError(
                f"{option} {spec}: an option of the command gives {parameter}, too; "
                "drop one of the two"
            )
        given[parameter] = value
    if ":" not in name:
        return call(build, given, name, kind=kind)
    try:
        found = call(build, given, name, kind=kind)
        problem = broken(found)
    except Exception as error:
        raise ConfigError(_raised(f"{option} {name}", error)) from error
    if problem is not None:
        raise ConfigError(f"{option} {name}: {problem}")
    return found


def _raised(where: str, error: Exception) -> str:
    """The text of an exception, and the line outside of the package that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()
        and not frame.filename.startswith(PACKAGE)
        and "site-packages" not in frame.filename
    ]
    line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{where}: {type(error).__name__}: {error}{line}"
