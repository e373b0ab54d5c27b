"""Reads specifications of the command line: a name, and options behind it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["call", "imported", "parse_query"]


def parse_query(spec: str, query: str) -> dict[str, Any]:
    """The options of a specification.

    Args:
        spec: the whole specification, for error messages.
        query: what stands behind the question mark, such as "level=2&seed=7".

    Raises:
        ValueError: an option has no value, or is given twice.

    >>> parse_query("arithmetic?level=2", "level=2")
    {'level': 2}
    """
    # urllib would decode "+" as a space, but "+-" is a valid value of `operations`.
    chosen: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        option, equals, text = pair.partition("=")
        if not (option and equals):
            raise ValueError(
                f"options in spec {spec!r} must be name=value, joined by '&', "
                f"got {pair!r}"
            )
        if option in chosen:
            raise ValueError(f"option {option!r} is given twice in spec {spec!r}")
        try:
            chosen[option] = json.loads(text)
        except json.JSONDecodeError:
            chosen[option] = text
    return chosen


def call(
    build: Callable[..., Any],
    chosen: Mapping[str, Any],
    name: str,
    *,
    kind: str = "environment",
    also: Sequence[str] = (),
) -> Any:
    """Calls a factory with options, and names what is wrong with them.

    Args:
        build: a function or class.
        chosen: the options.
        name: of what it makes, for error messages.
        kind: what it makes, for error messages.
        also: options of another factory of the same name, for error messages.

    Raises:
        ValueError: an option does not exist, or is missing.

    >>> call(lambda size: size, {"sise": 2}, "numbers")
    Traceback (most recent call last):
    ValueError: environment 'numbers' has no option 'sise'; it has size; did you mean
    'size'?
    """
    parameters = inspect.signature(build).parameters.values()
    named = [
        p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    known = [parameter.name for parameter in named]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        for option in chosen:
            if option not in known:
                known += also
                close = difflib.get_close_matches(option, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"{kind} {name!r} has no option {option!r}; it has "
                    f"{', '.join(known) or 'none'}{hint}"
                )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in chosen:
            raise ValueError(
                f"{kind} {name!r} needs the option {parameter.name!r}, as in "
                f"'{name}?{parameter.name}=...'"
            )
    return build(**chosen)


def imported(name: str, kind: str, known: str = "", *, data: bool = False) -> Any:
    """Imports what `module:attribute` names.

    Args:
        name: a module and one of its functions or classes, such as "my_module:make".
        kind: what it makes, for error messages.
        known: the other names that there are, for error messages.
        data: whether it may be something else than a function or a class.

    Raises:
        ValueError: there is no such module or attribute. An import that fails inside of
            the module raises its own error.

    >>> imported("math:sqrt", "grader")(4)
    2.0
    >>> imported("math:absent", "grader")
    Traceback (most recent call last):
    ValueError: no grader 'math:absent': 'math' has no function or class 'absent'
    """
    there = f". There are {known}" if known else ""
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        others = f"; there are {known}" if known else ""
        raise ValueError(f"no {kind} {name!r}{others}")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        # The module exists, but an import inside it failed: keep that error.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"no {kind} {name!r}: there is no module {error.name!r} on sys.path{there}"
        ) from error
    if found is None or not (data or callable(found)):
        thing = "" if data else "function or class "
        raise ValueError(f"no {kind} {name!r}: {module!r} has no {thing}{attribute!r}")
    return found
