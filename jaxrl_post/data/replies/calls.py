"""Parses a call from a model's text of it; None where it cannot be read."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post.messages import ToolCall, mended

__all__ = ["Schemas", "loads", "made", "mark_outside", "named"]

# The schemas of the arguments, by the name of the tool.
type Schemas = Mapping[str, Mapping[str, Any]]

# Levels of lists and objects in the arguments of a call. Templates, tools and clients
# recurse at every level, up to a limit.
DEEPEST = 100

# A string of JSON, or the beginning of one that the end of the text cuts.
STRING = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'


def made(value: Any) -> ToolCall | None:
    r"""A call from a JSON value with a name and arguments.

    The arguments have to be there, as `arguments` or as `parameters`: what has only a
    name may be anything. The texts of a call are Unicode, and its arguments JSON as
    RFC 8259 has it: without NaN and infinities.

    >>> made({"name": "f", "arguments": {"a": 1}})
    ToolCall(name='f', arguments='{"a": 1}', id='')
    >>> made({"name": "f", "arguments": {"a": float("nan")}})
    >>> made({"name": "Ada", "age": 36})
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(given) != 1:
        return None
    [arguments] = given
    if isinstance(arguments, str):
        # Some models write the object as text.
        arguments = loads(arguments)
    if not value["name"] or not isinstance(arguments, dict) or _is_deep(arguments):
        return None
    try:
        # 1e999 is JSON, but an infinity to Python.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return ToolCall(mended(value["name"]), mended(written))


def named(name: str, arguments: str) -> ToolCall | None:
    """A call from a name and the text of its arguments."""
    return made({"name": name.strip(), "arguments": loads(arguments)})


def loads(text: str) -> Any:
    """The JSON value of a text; None if it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def mark_outside(
    text: str, marks: Sequence[str], begin: int = 0
) -> tuple[int, int] | None:
    """Finds the first mark outside of JSON strings; None for none.

    Args:
        text: JSON, perhaps with something before it and after it.
        marks: any of these.
        begin: where to look from, outside of strings.

    Returns:
        Where the mark begins, and where it ends.

    >>> mark_outside('{"a": "]]"}]]', ["]]"])
    (11, 13)
    """
    either = "|".join(map(re.escape, marks))
    for found in re.compile(f"{STRING}|({either})", re.DOTALL).finditer(text, begin):
        if found[1]:
            return found.span()
    return None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        if not inner:
            return False
        level = inner
    return True
