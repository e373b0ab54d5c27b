"""Calls of GLM and of Qwen3-Coder: the arguments are texts between tags.

A text `3` may be the number or the text, which only the schema of the tool tells. A
value is text unless its schema says otherwise.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_post.data.replies.calls import Schemas, loads, made
from jaxrl_post.messages import ToolCall

__all__ = ["glm", "kinds_of", "qwen_coder", "resolved"]

# A value in which another begins has lost its end; it would swallow the other.
GLM_PAIR = re.compile(
    r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>"
    r"((?:(?!<arg_key>|<arg_value>).)*?)</arg_value>",
    re.DOTALL,
)
QWEN_CALL = re.compile(r"\s*<function=([^<>]+)>(.*)</function>\s*", re.DOTALL)
# The line breaks next to the tags are not part of the value.
QWEN_PAIR = re.compile(
    r"\s*<parameter=([^<>]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL
)
# JSON's true, false and null, as templates write them that leave the writing to Python.
PYTHON = {"True": "true", "False": "false", "None": "null"}
KINDS = {"string", "integer", "number", "boolean", "null", "array", "object"}
# References of a schema that are followed, one after another.
MOST_REFERENCES = 20


def glm(inside: str, schemas: Schemas) -> ToolCall | None:
    r"""The call between the marks of GLM; None if it cannot be read.

    >>> tools = {"f": {"properties": {"a": {"type": "integer"}}}}
    >>> pairs = "<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n"
    >>> glm("f\n" + pairs, tools).arguments, glm("f\n" + pairs, {}).arguments
    ('{"a": 3}', '{"a": "3"}')
    """
    name, mark, pairs = inside.partition("<arg_key>")
    return _typed(name, GLM_PAIR, mark + pairs, schemas)


def qwen_coder(inside: str, schemas: Schemas) -> ToolCall | None:
    r"""The call between the marks of Qwen3-Coder; None if it cannot be read.

    >>> qwen_coder("<function=f>\n<parameter=a>\nb\n</parameter>\n</function>", {})
    ToolCall(name='f', arguments='{"a": "b"}', id='')
    """
    found = QWEN_CALL.fullmatch(inside)
    return found and _typed(found[1], QWEN_PAIR, found[2], schemas)


def kinds_of(schema: Any, whole: Mapping[str, Any]) -> frozenset[str]:
    """The types of JSON that a schema allows; "string" if it names none.

    Args:
        schema: of a value.
        whole: the schema to whose parts references point.

    >>> sorted(kinds_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {}))
    ['integer', 'null']
    >>> sorted(kinds_of({}, {})), sorted(kinds_of({"enum": [1, 2]}, {}))
    (['string'], ['integer'])
    """
    return _kinds(schema, whole) & KINDS or frozenset(["string"])


def resolved(schema: Any, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolves a schema's references; {} for what is no schema."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        target = schema.get("$ref")
        if not isinstance(target, str):
            return schema
        schema = whole
        for part in target.removeprefix("#").split("/")[1:]:
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """As `kinds_of`, but none if the schema names none."""
    schema = resolved(schema, whole)
    if depth > MOST_REFERENCES:
        return frozenset()
    if "const" in schema:
        return frozenset([_kind(schema["const"])])
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind, schema["enum"]))
    named = schema.get("type")
    if named is not None:
        return frozenset(map(str, named if isinstance(named, list) else [named]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            # An alternative without a type may be a text.
            found = [_kinds(each, whole, depth + 1) for each in schema[key]]
            return frozenset().union(*(each or {"string"} for each in found))
    every = schema.get("allOf")
    for each in every if isinstance(every, list) else ():
        found = _kinds(each, whole, depth + 1)
        if found:
            return found
    for key, kind in (("properties", "object"), ("items", "array")):
        if key in schema:
            return frozenset([kind])
    return frozenset()


def _kind(value: Any) -> str:
    """The type of JSON that a value has."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return kinds.get(type(value), "object" if isinstance(value, dict) else "array")


def _typed(
    name: str, pair: re.Pattern[str], text: str, schemas: Schemas
) -> ToolCall | None:
    """A call from its name and the text of its arguments."""
    name, place, arguments = name.strip(), 0, {}
    if not re.fullmatch(r"[^\s<>]+", name):
        return None
    schema = schemas.get(name) or {}
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if not isinstance(properties, Mapping):
        properties = {}
    end = len(text.rstrip())
    while place < end:
        found = pair.match(text, place)
        if found is None:
            return None
        place, key = found.end(), found[1].strip()
        try:
            kinds = kinds_of(properties.get(key, others), schema)
            arguments[key] = _value(found[2], kinds)
        except ValueError:
            return None
    return made({"name": name, "arguments": arguments})


def _value(text: str, kinds: frozenset[str]) -> Any:
    """The value of a text.

    Raises:
        ValueError: it has none of these types.
    """
    if kinds != {"string"}:
        written = text.strip()
        written = PYTHON.get(written, written)
        value = loads(written)
        kind = "" if value is None and written != "null" else _kind(value)
        if kind != "string" and kind in kinds:
            return value
        if kind == "integer" and "number" in kinds:
            return value
        # 3.0 is an integer to JSON Schema.
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            return int(value)
    if "string" in kinds:
        return text
    raise ValueError(f"{text!r} is none of {sorted(kinds)}")
