"""Converts a policy's text to an action of a schema, and an observation to text."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from jaxrl_post.envs.tasks.blocks import after_thoughts

__all__ = ["ActionError", "action_of", "check_field", "text_of_observation"]

# Fields of every OpenEnv action and observation that are not for the policy.
_KEPT_BACK = ("metadata", "reward", "done")


class ActionError(Exception):
    """A text that is no action; the policy reads the message, and tries again."""


def action_of(
    text: str, field: str | None, schema: Mapping[str, Any]
) -> dict[str, Any]:
    """Parses a policy's text as an action.

    What stands before the last "</think>" is left out. With `field` the rest, stripped
    of white space, is the value of that field: of a field that the schema calls an
    integer, a number, a boolean or something else than a text it is read as JSON.
    Without, the last JSON object in the text is the action.

    Args:
        text: of the policy.
        field: the field that is the text; None for a JSON object.
        schema: JSON schema of an action.

    Raises:
        ActionError: the text holds no JSON object, or no value for the field.

    >>> action_of('I go east. {"move": "e"}', None, {})
    {'move': 'e'}
    >>> action_of("<think>Half?</think> 50", "guess", {"properties": {"guess": {
    ...     "type": "integer"}}})
    {'guess': 50}
    >>> action_of(" east ", "move", {"properties": {"move": {"type": "string"}}})
    {'move': 'east'}
    """
    said = after_thoughts(text).strip()
    if field is None:
        return _last_object(said)
    wanted = schema["properties"][field]
    if _is_text(wanted):
        return {field: said}
    try:
        return {field: _DECODER.decode(said)}
    except (ValueError, RecursionError) as error:
        kind = wanted.get("type", "JSON value")
        raise ActionError(
            f"an answer must be nothing but the {field}, of type {kind}, got "
            f"{reprlib.repr(said)}"
        ) from error


def check_field(field: str | None, schema: Mapping[str, Any]) -> None:
    """Refuses a field that cannot be the only one of an action.

    Raises:
        ValueError: the schema has no such field, or requires others too.

    >>> check_field("move", {"properties": {"go": {}, "metadata": {}}})
    Traceback (most recent call last):
    ValueError: actions have no field 'move'; they have go
    """
    if field is None:
        return
    fields = [name for name in schema.get("properties", {}) if name not in _KEPT_BACK]
    if field not in fields:
        raise ValueError(
            f"actions have no field {field!r}; they have {', '.join(fields) or 'none'}"
        )
    others = [name for name in schema.get("required", ()) if name != field]
    if others:
        raise ValueError(
            f"actions need more than the field {field!r}: {', '.join(others)}; leave "
            "the option 'action' out, so that the policy answers with JSON"
        )


def text_of_observation(observation: Any, field: str | None) -> str:
    """Writes an observation as the text that the policy reads.

    With `field` the value of that field. Otherwise all fields but "metadata", "reward"
    and "done", without those that are null: the value if only one is left, else the
    object. A text is shown as it is, anything else as JSON.

    Args:
        observation: a JSON object.
        field: the field to show; None for all.

    Raises:
        ValueError: the observation is no object, or has no such field.

    >>> text_of_observation({"echo": "hello", "hint": None, "done": False}, None)
    'hello'
    >>> text_of_observation({"board": [1, 0], "turn": 3}, None)
    '{"board": [1, 0], "turn": 3}'
    """
    if not isinstance(observation, dict):
        raise ValueError(f"an observation must be an object, got {observation!r:.80}")
    if field is not None:
        if field not in observation:
            names = ", ".join(observation) or "none"
            raise ValueError(f"an observation has no field {field!r}; it has {names}")
        return _shown(observation[field])
    left = {
        name: value
        for name, value in observation.items()
        if name not in _KEPT_BACK and value is not None
    }
    if len(left) == 1:
        return _shown(*left.values())
    return _shown(left)


def _last_object(text: str) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    place = text.find("{")
    while place >= 0:
        try:
            value, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            found = value
        place = text.find("{", end)
    if found is None:
        raise ActionError(
            f"an answer must hold an action, a JSON object, got {reprlib.repr(text)}"
        )
    return found


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a field may be a text; one without a type may be anything."""
    kinds = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    named = [each["type"] for each in kinds if "type" in each]
    texts = any(isinstance(v, str) for each in kinds for v in each.get("enum", ()))
    return texts or "string" in named or not (named or "enum" in schema)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number} is too large")
    return float(number)


# Python reads NaN, Infinity and 1e999, and writes the last as Infinity.
_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
