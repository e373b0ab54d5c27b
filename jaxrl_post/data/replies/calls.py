"""A call from what a model wrote of it; None where it cannot be read."""

import json
from collections.abc import Mapping
from typing import Any

from jaxrl_post.messages import ToolCall, mended

__all__ = ["Schemas", "loads", "made", "named"]

# The schemas of the arguments, by the name of the tool.
type Schemas = Mapping[str, Mapping[str, Any]]

# Levels of lists and objects in the arguments of a call. Templates, tools and clients
# are functions that call themselves at every level, and have an end.
DEEPEST = 100


def made(value: Any) -> ToolCall | None:
    r"""A call from a JSON value with a name and arguments.

    The texts of a call are Unicode, and its arguments JSON as RFC 8259 has it: without
    NaN and infinities.

    >>> made({"name": "f", "arguments": {"a": 1}})
    ToolCall(name='f', arguments='{"a": 1}', id='')
    >>> made({"name": "f", "arguments": {"a": float("nan")}})
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
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
