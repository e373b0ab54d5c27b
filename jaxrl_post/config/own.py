"""Calls functions that somebody wrote outside of the package, named by an option."""

import difflib
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.specs import call, imported

__all__ = ["called", "check_name", "loaded"]

PACKAGE = str(Path(__file__).parents[1])


def check_name(spec: str, option: str, kind: str, names: Sequence[str]) -> None:
    """Refuses a name that is none of the package's and names no module.

    Args:
        spec: the name, perhaps with parameters behind a question mark.
        option: that gives it, for error messages.
        kind: what it names, for error messages.
        names: those of the package.

    Raises:
        ConfigError: names the ones that are close.
    """
    name = spec.partition("?")[0]
    if ":" not in name and name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{option}: no {kind} {name!r}; there are {_known(names)}{hint}"
        )


def loaded(
    name: str, option: str, kind: str, names: Sequence[str]
) -> Callable[..., Any]:
    """Imports a function.

    Args:
        name: `module:function`.
        option: that names it, for error messages, such as "--loss.name".
        kind: what it makes, for error messages.
        names: those of the package, for error messages.

    Raises:
        ConfigError: there is no such function, or the import of its module fails.
    """
    try:
        return imported(name, kind, _known(names))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    except Exception as error:
        raise ConfigError(_raised(f"{option} {name}", error)) from error


def called(
    build: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    name: str,
    option: str,
    kind: str,
    broken: Callable[[Any], str | None],
) -> Any:
    """Calls a function, and looks at what it returns.

    Args:
        build: the function.
        options: its arguments.
        name: `module:function`, for error messages.
        option: that names it, for error messages.
        kind: what it makes, for error messages.
        broken: tells what is wrong with what it returns; None for nothing.

    Raises:
        ConfigError: the function or `broken` raises, or something is wrong.
    """
    try:
        made = call(build, options, name, kind=kind)
        problem = broken(made)
    except Exception as error:
        raise ConfigError(_raised(f"{option} {name}", error)) from error
    if problem is not None:
        raise ConfigError(f"{option} {name}: {problem}")
    return made


def _known(names: Sequence[str]) -> str:
    return f"{', '.join(names)}, <module>:<function>"


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
