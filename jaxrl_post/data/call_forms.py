"""Forms of tool calls for chat templates: arguments as an object, or as JSON text.

Most templates write an object themselves, in the family's own way. Some concatenate the
arguments, as DeepSeek's do, and so need JSON text; some recognise a message that only
calls by a content of None, and others would write "None". A trial shows which kind a
template is.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jaxrl_post.data import templates
from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = ["calls_of", "taken_by"]

# Name, key and value of a trial's call; letters, which no escape changes.
NAME, KEY, VALUE = "qzname", "qzkey", "qzvalue"
OBJECT = {KEY: VALUE}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
    },
}


class _Form(NamedTuple):
    """Form in which a template takes a message that calls.

    Attributes:
        text: whether arguments are JSON text instead of an object.
        empty: the content of a message that says nothing else.
    """

    text: bool
    empty: str | None


def calls_of(value: Any, *, strict: bool = False) -> list[Any]:
    """The calls of a message, their arguments as objects.

    Arguments are an object, or JSON text as chat APIs write them, also text of such
    text; what is missing is an empty object.

    Args:
        value: a list of calls, each with a name and arguments, perhaps in `function`.
        strict: refuses arguments that are no object. A model may have written such a
            call, so a history keeps them; a data set must not teach them.

    Raises:
        TokenizerError: no list of objects with a name; with `strict`, no object as
            arguments.

    >>> calls_of([{"function": {"name": "f", "arguments": '{"a": 1}'}}])
    [{'function': {'name': 'f', 'arguments': {'a': 1}}}]
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TokenizerError(
            "chat: tool_calls of a message must be a list of calls, each an object "
            f"with a function; got {value!r:.80}"
        )
    return [_call(call, strict) for call in value]


def _call(call: Any, strict: bool) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TokenizerError(
            "chat: a call of tool_calls must be an object with a function, which has "
            f"name and arguments; got {call!r:.80}"
        )
    arguments = _object(function.get("arguments"))
    if strict and not isinstance(arguments, Mapping):
        raise TokenizerError(
            f"chat: arguments of the call {function['name']!r} must be an object, or "
            f"the JSON text of one; got {arguments!r:.80}"
        )
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _object(arguments: Any) -> Any:
    """Parses arguments that are JSON text; returns others as they are."""
    value = {} if arguments is None else arguments
    while isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            return arguments
    return value if isinstance(value, Mapping) else arguments


def taken_by(
    source: str, special_tokens: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Messages with calls in the form that a template takes.

    Args:
        source: the Jinja source.
        special_tokens: variables of the template, such as "eos_token".
        rows: messages whose calls have objects as arguments.

    >>> source = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    >>> source += "{{ c.function.arguments + '.' }}{% endfor %}{% endfor %}"
    >>> call = {"function": {"name": "f", "arguments": {}}}
    >>> [row] = taken_by(source, {}, [{"role": "assistant", "tool_calls": [call]}])
    >>> row["tool_calls"], row["content"]
    ([{'function': {'name': 'f', 'arguments': '{}'}}], '')
    """
    if not any(row.get("tool_calls") for row in rows):
        return rows
    form = _form(source, tuple(sorted(special_tokens.items())))
    return [_given(row, form) if row.get("tool_calls") else row for row in rows]


def _given(row: Mapping[str, Any], form: _Form) -> dict[str, Any]:
    calls = row["tool_calls"]
    if form.text:
        calls = [_as_text(call) for call in calls]
    return {**row, "content": row.get("content") or form.empty, "tool_calls": calls}


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _as_text(call["function"])}
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": arguments}


@lru_cache(maxsize=64)
def _form(source: str, special_tokens: tuple[tuple[str, str], ...]) -> _Form:
    """The first form in which a template writes a call as it is."""
    for tools in ([TOOL], None):
        for system in (False, True):
            for text in (False, True):
                written = {
                    found: form
                    for form in (_Form(text, None), _Form(text, ""))
                    if (found := _trial(source, special_tokens, form, tools, system))
                }
                if written:
                    # An empty content may become a further, empty turn; None does not.
                    return written[min(written, key=len)]
    return _Form(False, "")


def _trial(
    source: str,
    special_tokens: tuple[tuple[str, str], ...],
    form: _Form,
    tools: list[Any] | None,
    system: bool,
) -> str | None:
    """The text of a conversation with a call; None if the call is not written well."""
    function = {"name": NAME, "arguments": OBJECT}
    call = {"id": "abcde1234", "type": "function", "function": function}
    result = {"role": "tool", "content": "5", "name": NAME, "tool_call_id": call["id"]}
    rows: list[Mapping[str, Any]] = [
        {"role": "user", "content": "?"},
        _given({"role": "assistant", "tool_calls": [call]}, form),
        result,
        {"role": "assistant", "content": "."},
    ]
    if system:
        rows = [{"role": "system", "content": "Be brief."}, *rows]
    variables = {
        **dict(special_tokens),
        "messages": rows,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": False,
    }
    try:
        text = templates.run(source, variables).text
    except TokenizerError:
        return None
    # The call was written as a Python object, or its JSON text was escaped as a text.
    spoilt = [str(OBJECT), f'\\"{KEY}', *(["None"] if form.empty is None else [])]
    if VALUE not in text or any(each in text for each in spoilt):
        return None
    return text
