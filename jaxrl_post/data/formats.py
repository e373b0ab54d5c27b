"""Reads rows of ShareGPT and Alpaca as messages with roles and contents.

References:
    LLaMA-Factory's data formats, github.com/hiyouga/LLaMA-Factory (data/README.md): the
    roles function_call and observation, system and history, pairs.
    Taori et al., Stanford Alpaca, 2023 (instruction, input and output).
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxrl_post.conversations import pictures_of, text_of
from jaxrl_post.jsonl import BadRowError
from jaxrl_post.tables import listed

__all__ = [
    "ALPACA_OPTIONAL",
    "SHAREGPT_OPTIONAL",
    "alpaca_prompt",
    "is_alpaca",
    "is_alpaca_pair",
    "is_sharegpt",
    "is_sharegpt_pair",
    "sharegpt_answer",
    "sharegpt_messages",
    "sharegpt_tools",
]

SHAREGPT_OPTIONAL = ("system", "tools")
ALPACA_OPTIONAL = ("input", "system", "history")

# The speakers of ShareGPT.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


def sharegpt_messages(row: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """The messages of a conversation of turns {"from", "value"}.

    Args:
        row: with the conversation, and perhaps the text of a system message.
        field: of the conversation.

    Returns:
        Messages with role and content; one that calls functions has tool_calls.

    Raises:
        BadRowError: the conversation has another form, an unknown speaker or no value,
            or two system messages.

    >>> sharegpt_messages({"turns": [{"from": "human", "value": "Hi!"}]}, "turns")
    [{'role': 'user', 'content': 'Hi!'}]
    """
    turns = row[field]
    if not isinstance(turns, list):
        got = type(turns).__name__
        raise BadRowError(f"field {field!r} must be a list of turns, got {got}")
    if not turns:
        raise BadRowError(f"field {field!r} has no turn")
    messages = [
        _message(turn, f"field {field!r}, turn {number}")
        for number, turn in enumerate(turns, start=1)
    ]
    return [*_system(row, messages), *messages]


def sharegpt_answer(row: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """The answer of a pair, {"from", "value"}, as a list of one message.

    Raises:
        BadRowError: it is something else.
    """
    return [_message(row[field], f"field {field!r}")]


def sharegpt_tools(row: Mapping[str, Any]) -> Any:
    """The tools of a row, which may be JSON text, as chat templates read them.

    Raises:
        BadRowError: the text is not JSON.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "field 'tools'") if tools.strip() else None
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]


def alpaca_prompt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    r"""The messages of an instruction, its input, and what was said before.

    Args:
        row: with the texts `instruction` and perhaps `input`, which follows it on a
            line of its own, and `system`; `history` has pairs of an instruction and its
            answer.

    Raises:
        BadRowError: a field has another form.

    >>> alpaca_prompt({"instruction": "Add.", "input": "1 2"})
    [{'role': 'user', 'content': 'Add.\n1 2'}]
    """
    messages = []
    for number, pair in enumerate(_history(row.get("history")), start=1):
        where = f"field 'history', pair {number}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRowError(
                f"{where} must be an instruction and its answer, got {pair!r:.80}"
            )
        said = [text_of(text, where) for text in pair]
        messages += [_said("user", said[0]), _said("assistant", said[1])]
    texts = [text_of(row["instruction"], "field 'instruction'")]
    if row.get("input") is not None:
        texts.append(text_of(row["input"], "field 'input'"))
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise BadRowError("fields 'instruction' and 'input' are empty")
    messages.append(_said("user", "\n".join(texts)))
    return [*_system(row, messages), *messages]


def is_sharegpt(field: str, row: Mapping[str, Any]) -> bool:
    """Whether the first turn of a conversation has ShareGPT's keys, and no role."""
    turns = row.get(field)
    return isinstance(turns, list) and bool(turns) and _is_turn(turns[0])


def is_sharegpt_pair(row: Mapping[str, Any]) -> bool:
    """Whether both answers of a pair are turns of ShareGPT."""
    return _is_turn(row.get("chosen")) and _is_turn(row.get("rejected"))


def is_alpaca(row: Mapping[str, Any]) -> bool:
    """Whether a row has an instruction and an output as texts."""
    return all(isinstance(row.get(each), str) for each in ("instruction", "output"))


def is_alpaca_pair(row: Mapping[str, Any]) -> bool:
    """Whether the answers to an instruction are texts without speakers."""
    fields = ("instruction", "chosen", "rejected")
    texts = [row.get(each) for each in fields]
    return row.get("prompt") is None and all(
        isinstance(text, str) and not text.lstrip().startswith("Human:")
        for text in texts
    )


def _is_turn(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else set()
    return keys >= {"from", "value"} and "role" not in keys


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRowError(f"{where} must be an object, got {type(turn).__name__}")
    given = {key: value for key, value in turn.items() if value is not None}
    for key, other in (("from", "role"), ("value", "content")):
        if key in given and other in given:
            raise BadRowError(f"{where}: has both {key!r} and {other!r}; give one")
        if key not in given:
            hint = "; --data.format plain reads role and content, in the field that "
            hint = (
                f"{hint}--data.columns messages=FIELD names" if "role" in turn else ""
            )
            raise BadRowError(f"{where}: no {key!r} (keys: {listed(turn)}){hint}")
    pictures = pictures_of(given)
    more = given.keys() - {"from", "value", *(["pictures"] if pictures else [])}
    if more:
        raise BadRowError(
            f"{where}: the key {min(more)!r} is not known; there are 'from', 'value'"
        )
    speaker, text = given["from"], text_of(given["value"], f"{where}: 'value'")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise BadRowError(
            f"{where}: 'from' must be one of {listed(list(_SPEAKERS))}, got {speaker!r}"
        )
    if speaker == "function_call":
        calls = _json(text, f"{where}: 'value' of a function_call")
        calls = calls if isinstance(calls, list) else [calls]
        calls = [
            {"type": "function", "function": call}
            if isinstance(call, dict) and "function" not in call
            else call
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    said = _said(_SPEAKERS[speaker], text)
    return said | ({"pictures": pictures} if pictures else {})


def _system(
    row: Mapping[str, Any], messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The message of the field `system`, if a row has one."""
    if row.get("system") is None:
        return []
    text = text_of(row["system"], "field 'system'")
    if text.strip() and messages[0]["role"] == "system":
        raise BadRowError(
            "field 'system' and the first turn are both system messages; keep one"
        )
    return [_said("system", text)] if text.strip() else []


def _history(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        got = type(value).__name__
        raise BadRowError(f"field 'history' must be a list of pairs, got {got}")
    return value


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{what} must be JSON: {error}") from None
