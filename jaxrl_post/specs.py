"""Reads specifications of the command line: a name, and options behind it."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import importlib
import inspect
import json
import os
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "call",
    "check_plain",
    "check_takes",
    "fits",
    "imported",
    "modules_of",
    "named_parameters",
    "parse_query",
    "raised",
]

# Folders whose lines are not the user's own.
_OTHERS = (
    str(Path(__file__).parent),
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "<frozen",
)
_PACKAGE = __name__.partition(".")[0]
_JSON = (str, int, float, bool, types.NoneType, list, dict)


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
    shared: type | None = None,
) -> Any:
    """Calls a factory with options, and names what is wrong with them.

    Args:
        build: a function or class.
        chosen: the options.
        name: of what it makes, for error messages; "module:function" for a factory from
            outside of the package.
        kind: what it makes, for error messages.
        also: options of another factory of the same name, for error messages.
        shared: a TypedDict of the keyword arguments that a parameter `**` takes if it
            has no annotation; None if these are unknown.

    Raises:
        ValueError: an option does not exist, is missing, or has another type than its
            parameter's annotation; a factory from outside of the package raises.

    >>> call(lambda size: size, {"sise": 2}, "numbers")
    Traceback (most recent call last):
    ValueError: environment 'numbers' has no option 'sise'; it has size; did you mean
    'size'?
    """
    what = f"{kind} {name!r}"
    named, rest = named_parameters(build, what)
    known = {each.name: _wanted(each) for each in named}
    own_only = rest is None or bool(_fields(rest.annotation))
    if rest is not None:
        known |= _fields(rest.annotation) or _fields(shared)
    absent = [option for option in chosen if option not in known]
    names = [*known, *also]
    if absent and own_only:
        raise ValueError(_no_option(what, absent[0], names))
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in chosen:
            raise ValueError(
                f"{what} needs the option {parameter.name!r}, as in "
                f"'{name}?{parameter.name}=...'"
            )
    for option, value in chosen.items():
        if option in known and not fits(value, known[option]):
            text = f"; for a text write {option}={json.dumps(str(value))}"
            raise ValueError(
                f"{what}: {option} must be {_values_of(known[option])}, got "
                f"{value!r:.80}{text if fits('', known[option]) else ''}"
            )
    try:
        return build(**chosen)
    except (Exception, SystemExit) as error:
        unknown = next((each for each in absent if repr(each) in str(error)), None)
        if isinstance(error, TypeError) and unknown is not None and names:
            told = f"{_no_option(what, unknown, names)}. It raises {raised(error)}"
            raise ValueError(told) from error
        if ":" not in name:
            raise
        given = ", ".join(f"{key}={value!r:.40}" for key, value in chosen.items())
        told = f"{name}({given})" if given else name
        raise ValueError(f"{told}: {raised(error)}") from error


def named_parameters(
    build: Callable[..., Any], what: str
) -> tuple[list[inspect.Parameter], inspect.Parameter | None]:
    """The parameters that a call can give by name, and the one that takes the rest.

    Args:
        build: a function or class.
        what: it is, for error messages.

    Raises:
        ValueError: a parameter without a default has no name that a call can give, or
            Python does not know the parameters.
    """
    try:
        signature = inspect.signature(build, eval_str=True)
    except Exception:  # an annotation that does not evaluate
        try:
            signature = inspect.signature(build)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{what}: its parameters are unknown ({error}); name a function that "
                "is written in Python"
            ) from error
    named, rest = [], None
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:
            rest = each
        elif each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            named.append(each)
        elif each.kind is each.POSITIONAL_ONLY and each.default is each.empty:
            raise ValueError(
                f"{what}: the parameter {each.name!r} takes no name, and options are "
                "given by name; write it without '/'"
            )
    return named, rest


def _values_of(wanted: Any) -> str:
    """The values that an annotation allows, in words.

    >>> _values_of(typing.Literal["fail", "skip"]), _values_of(float), _values_of(bool)
    ("'fail' or 'skip'", 'a number', 'true or false')
    """
    value = getattr(wanted, "__value__", wanted)  # Type aliases have one.
    if typing.get_origin(value) is typing.Literal:
        *others, last = map(repr, typing.get_args(value))
        return f"{', '.join(others)} or {last}" if others else last
    words = {bool: "true or false", int: "an integer", float: "a number"}
    return words.get(wanted) or f"of type {inspect.formatannotation(wanted)}"


def _wanted(parameter: inspect.Parameter) -> Any:
    """The type of a parameter: its annotation, else the type of a number's default."""
    kind = type(parameter.default)
    if parameter.annotation is not parameter.empty or kind not in (bool, int, float):
        return parameter.annotation
    return bool if kind is bool else float


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value of JSON may stand for an annotation; True where it is unclear.

    >>> fits(2, float), fits("2", float | None), fits(True, int)
    (True, False, False)
    """
    if isinstance(wanted, typing.TypeAliasType):
        return fits(value, wanted.__value__)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return fits(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if collections.abc.Callable in (wanted, origin):
        return callable(value)
    if wanted in (None, types.NoneType):
        return value is None
    if type(value) not in _JSON:
        return True
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if wanted is float:
        return type(value) in (int, float) and value == value  # NaN is no number here
    if wanted in (str, bool, int, list, dict):
        return type(value) is wanted
    if origin in (list, tuple, collections.abc.Sequence):
        items = [each for each in arguments if each is not ...]
        alike = type(value) is list and (origin is not tuple or arguments[1:] == (...,))
        return type(value) is list and (
            not alike or all(fits(each, items[0]) for each in value)
        )
    return True


def imported(name: str, kind: str, known: str = "", *, data: bool = False) -> Any:
    """Imports what `module:attribute` names.

    Args:
        name: a module and one of its functions or classes, such as "my_module:make".
        kind: what it makes, for error messages.
        known: the other names that there are, for error messages.
        data: whether it may be something else than a function or a class.

    Raises:
        ValueError: there is no such module or attribute, the module raises while it is
            imported, or the function is async or a generator.

    >>> imported("math:sqrt", "grader")(4)
    2.0
    >>> imported("math:fab", "grader")
    Traceback (most recent call last):
    ValueError: no grader 'math:fab': 'math' has no function or class 'fab'; did
    you mean 'fabs'?
    """
    there = f". There are {known}" if known else ""
    module, colon, attribute = name.partition(":")
    stem = Path(module).stem
    hint = ""
    if colon and stem.isidentifier() and ("/" in module or module.endswith(".py")):
        hint = (
            f"; a file is named as a module, '{stem}:{attribute}', in the directory of "
            "the command or in one of PYTHONPATH"
        )
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        others = f"; there are {known}" if known else ""
        if not colon and (close := difflib.get_close_matches(name, known.split(", "))):
            others += f"; did you mean {close[0]!r}?"
        raise ValueError(f"no {kind} {name!r}{hint}{others}")
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        absent = getattr(error, "name", None)
        if not isinstance(error, ModuleNotFoundError) or not (
            absent and f"{module}.".startswith(f"{absent}.")
        ):
            raise ValueError(
                f"no {kind} {name!r}: the import of {module!r} fails: {raised(error)}"
            ) from error
        raise ValueError(
            f"no {kind} {name!r}: there is no module {absent!r} on sys.path{hint}"
            f"{there}"
        ) from error
    found = getattr(loaded, attribute, None)
    if found is None or not (data or callable(found)):
        thing = "" if data else "function or class "
        names = [each for each, value in vars(loaded).items() if callable(value)]
        close = difflib.get_close_matches(attribute, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        if found is not None:
            hint = f", which is a value of type {type(found).__name__}"
        raise ValueError(
            f"no {kind} {name!r}: {module!r} has no {thing}{attribute!r}{hint}"
        )
    check_plain(found, f"{kind} {name!r}")
    return found


def modules_of(name: str) -> dict[str, Path]:
    """The files of the modules of what `module:attribute` names.

    Args:
        name: as `imported` takes it.

    Returns:
        By the module's name: that module, and the one that defines the function or the
        class. One without a file is left out, and so is one of this package.

    >>> [*modules_of("json:dumps")], modules_of("builtins:len")
    (['json'], {})
    """
    module, _, attribute = name.partition(":")
    found = inspect.unwrap(getattr(importlib.import_module(module), attribute))
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    names = dict.fromkeys((module, getattr(found, "__module__", module)))
    files = {each: getattr(sys.modules.get(each), "__file__", None) for each in names}
    return {
        each: Path(file)
        for each, file in files.items()
        if file and os.path.isfile(file) and each.split(".")[0] != _PACKAGE
    }


def check_plain(function: Any, what: str) -> None:
    """Refuses a function that is called without its body being run.

    Args:
        function: anything; what is no function passes.
        what: it is, for error messages.

    Raises:
        ValueError: it is async, or a generator.
    """
    own = inspect.getattr_static(type(function), "__call__", None)
    for each in (function, own):
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise ValueError(
                f"{what} is an async function, which is not awaited here; write a "
                "plain one, which may call asyncio.run"
            )
        if inspect.isgeneratorfunction(each):
            raise ValueError(
                f"{what} is a generator, which yields; write a function that returns"
            )


def check_takes(function: Any, names: Sequence[str], what: str) -> None:
    """Refuses a function that cannot be called with so many arguments.

    Args:
        function: anything; what has no known parameters passes.
        names: of the arguments, which are given by position.
        what: it is, for error messages.

    Raises:
        ValueError: it takes fewer, or needs more.

    >>> check_takes(lambda rewards: rewards, ("rewards", "valid"), "advantages")
    Traceback (most recent call last):
    ValueError: advantages must take (rewards, valid), got a function of (rewards)
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError:
        own = ", ".join(map(str, signature.parameters.values()))
        raise ValueError(
            f"{what} must take ({', '.join(names)}), got a function of ({own})"
        ) from None


def raised(error: BaseException) -> str:
    """The text of an exception, and the line outside of the package that raised it."""
    text, remedy = str(error), ""
    if type(error).__module__.split(".")[0] in ("jax", "jaxlib"):
        # Pages about JAX's own operations follow.
        text = text.partition("\n")[0]
        if "Trace" in type(error).__name__:
            remedy = (
                "; jax.jit traces this code: use jax.numpy in the place of numpy, and "
                "jnp.where in the place of if"
            )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(each in frame.filename for each in _OTHERS)
    ]
    line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        text, line = str(error.msg), f" ({error.filename}:{error.lineno})"
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{told}{line}{remedy}"


def _fields(annotation: Any) -> dict[str, Any]:
    """Types by name of a TypedDict, also of an unpacked one; nothing of others."""
    if typing.get_origin(annotation) is typing.Unpack:
        (annotation,) = typing.get_args(annotation)
    return typing.get_type_hints(annotation) if typing.is_typeddict(annotation) else {}


def _no_option(what: str, option: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(option, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{what} has no option {option!r}; it has {', '.join(names) or 'none'}{hint}"
