"""Reads conversations and texts for supervised fine-tuning from files, strictly."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxrl_post.conversations import (
    answer_of,
    group_of,
    pictures_of,
    prompt_of,
    text_of,
)
from jaxrl_post.data import formats
from jaxrl_post.data.call_forms import calls_of
from jaxrl_post.data.tokenizer_files import TokenizerError
from jaxrl_post.jsonl import BadRowError, OnBadRow, Report
from jaxrl_post.messages import identity
from jaxrl_post.pictures.rows import COLUMNS
from jaxrl_post.tables import Format, Layout, listed, read_table

__all__ = ["Chat", "Text", "read_chats"]

_ROLES = ("system", "developer", "user", "assistant", "tool")

# The keys of a message that chat templates read; others would be ignored silently.
_KEYS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content",
    "thinking", "reasoning",
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """A conversation; the assistant's turns are trained on.

    Args:
        messages: each with "role" and "content", as a chat template reads them, and
            "pictures" if the content shows any (`messages.Message`).
        group: the text before the assistant's first turn, with names of its pictures;
            examples with the same group are held out together.
        only_last: learn only the last turn, the answer to a prompt.
        tools: JSON schemas of functions; None without tools.
    """

    messages: tuple[Mapping[str, Any], ...]
    group: str
    only_last: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Text:
    """A plain text; every token is trained on.

    Args:
        text: the text, not empty.
    """

    text: str

    @property
    def group(self) -> str:
        """The text itself: equal texts are held out together."""
        return self.text


def read_chats(
    path: str | os.PathLike[str],
    *,
    on_bad_row: OnBadRow = "fail",
    columns: Mapping[str, str] = MappingProxyType({}),
    file_format: Format = "auto",
) -> tuple[list[Chat | Text], Report]:
    r"""Reads the examples of supervised fine-tuning.

    The fields of the first good row determine which of five layouts the file has; every
    row must have this layout:

    - messages: a list of {"role", "content"}, with at least one turn of the assistant.
      A message may also have name, tool_calls, tool_call_id and reasoning_content, and
      the row may have `tools`. Arguments of a call are an object, or the JSON text of
      one.
    - prompt, completion: each a text, or messages; the completion, one message, is
      learned. A text as the prompt is a message of the user. Messages and `tools` are
      as above.
    - text: every token is learned.
    - conversations, of ShareGPT: a list of {"from", "value"}, perhaps with system and
      tools; every turn of gpt and every function_call is learned.
    - instruction, output, of Alpaca, perhaps with input, system and history; the output
      and the answers in the history are learned.

    A content may be a list of parts, texts and pictures, and a row of messages or of a
    prompt may have a column `images` (`pictures.rows`).

    Which files it reads, bad rows, columns, formats, the report and what is raised are
    as in `tables.read_table`.

    Returns:
        The conversations or texts, and a report.

    >>> import pathlib, tempfile
    >>> row = '{"messages": [{"role": "user", "content": "2+2="}, '
    >>> row += '{"role": "assistant", "content": "4"}]}'
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "chats.jsonl")
    ...     _ = path.write_text(row)
    ...     (chat,), report = read_chats(path)
    >>> chat.group, chat.messages[-1]["content"]
    ('2+2=', '4')
    """
    return read_table(
        path,
        _LAYOUTS,
        on_bad_row=on_bad_row,
        columns=columns,
        file_format=file_format,
        messages=("prompt", "messages", "conversations", "completion"),
    )


def _conversation(row: Mapping[str, Any]) -> list[Chat | Text]:
    value = row["messages"]
    if not isinstance(value, list):
        got = type(value).__name__
        raise BadRowError(f"field 'messages' must be a list of messages, got {got}")
    return [_chat(value, "messages", row.get("tools"))]


def _shared(field: str, row: Mapping[str, Any]) -> list[Chat | Text]:
    """A row of ShareGPT."""
    messages = formats.sharegpt_messages(row, field)
    return [_chat(messages, field, formats.sharegpt_tools(row))]


def _instruction(row: Mapping[str, Any]) -> list[Chat | Text]:
    """A row of Alpaca."""
    prompt = formats.alpaca_prompt(row)
    output = text_of(row["output"], "field 'output'")
    if not output.strip():
        raise BadRowError("field 'output' is empty")
    said = {"role": "assistant", "content": output}
    # Earlier answers are learned too.
    if any(each["role"] == "assistant" for each in prompt):
        return [_chat([*prompt, said], "history", None)]
    group = "\n\n".join(each["content"] for each in prompt)
    return [Chat((*prompt, said), group, only_last=True)]


def _chat(value: list[Any], field: str, tools: Any) -> Chat:
    messages = _messages(value, field)
    first = next(
        (i for i, each in enumerate(messages) if each["role"] == "assistant"), None
    )
    if first is None:
        raise BadRowError(
            f"field {field!r} has no turn of the assistant, so there is nothing to "
            "learn"
        )
    return Chat(messages, _group(messages[:first]), tools=_tools(tools))


def _group(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(
        identity(each.get("content") or "", pictures_of(each)) for each in messages
    )


def _messages(value: list[Any], field: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        _message(each, f"field {field!r}, message {number}")
        for number, each in enumerate(value, start=1)
    )


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError(f"{where} must be an object, got {type(value).__name__}")
    message = {key: item for key, item in value.items() if item is not None}
    try:
        if calls := calls_of(message.pop("tool_calls", ()), strict=True):
            message["tool_calls"] = calls
    except TokenizerError as error:
        raise BadRowError(f"{where}: {error}") from None
    if message.get("role") not in _ROLES:
        raise BadRowError(
            f"{where}: 'role' must be one of {listed(_ROLES)}, got "
            f"{message.get('role')!r}"
        )
    for key in message:
        if key not in _KEYS and not (key == "pictures" and pictures_of(message)):
            raise BadRowError(
                f"{where}: the key {key!r} is not known; there are {listed(_KEYS)}"
            )
    # A message that calls a tool may have no content.
    if "content" in message or not message.get("tool_calls"):
        text_of(message.get("content"), f"{where}: 'content'")
    silent = not message.get("content", "").strip()
    if message["role"] == "assistant" and silent and not message.get("tool_calls"):
        raise BadRowError(f"{where}: the assistant says nothing")
    return message


def _tools(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise BadRowError(
            f"field 'tools' must be a list of objects, got {type(value).__name__}"
        )
    return tuple(value)


def _completion(row: Mapping[str, Any]) -> list[Chat | Text]:
    tools = _tools(row.get("tools"))
    if tools is not None or _says_more(row["prompt"]) or _says_more(row["completion"]):
        return [_with_calls(row["prompt"], row["completion"], tools)]
    prompt = prompt_of(row["prompt"])
    answer = answer_of(row["completion"], "completion", prompt)
    if not answer.strip():
        raise BadRowError("the completion is empty")
    messages = tuple(
        {"role": m.role, "content": m.content}
        | ({"pictures": m.pictures} if m.pictures else {})
        for m in prompt
    )
    reply = {"role": "assistant", "content": answer}
    return [Chat((*messages, reply), group_of(prompt), only_last=True)]


def _says_more(value: Any) -> bool:
    """Whether a message of a list has more than a role and a content."""
    return isinstance(value, list) and any(
        isinstance(each, dict) and any(each.get(key) for key in _KEYS[2:])
        for each in value
    )


def _with_calls(
    prompt: Any, completion: Any, tools: tuple[Mapping[str, Any], ...] | None
) -> Chat:
    """A prompt and its completion, with all that their messages have."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    for field, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list) or not value:
            got = type(value).__name__
            raise BadRowError(f"field {field!r} must be str or messages, got {got}")
    before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
    if before[-1]["role"] == "assistant":
        raise BadRowError(
            "the prompt must end with a message to answer, got one of the assistant"
        )
    if after[: len(before)] == before:
        after = after[len(before) :]
    if len(after) != 1 or after[0]["role"] != "assistant":
        raise BadRowError(
            "field 'completion' must be the assistant's message, alone or after the "
            f"prompt's messages, got the roles {[each['role'] for each in after]}"
        )
    return Chat((*before, *after), _group(before), only_last=True, tools=tools)


def _text(row: Mapping[str, Any]) -> list[Chat | Text]:
    text = text_of(row["text"], "field 'text'")
    if not text.strip():
        raise BadRowError("field 'text' is empty")
    return [Text(text)]


def _of_sharegpt(field: str) -> Layout[Chat | Text]:
    return Layout(
        (field,),
        partial(_shared, field),
        (*formats.SHAREGPT_OPTIONAL, *COLUMNS),
        "sharegpt",
        partial(formats.is_sharegpt, field),
    )


_LAYOUTS: Sequence[Layout[Chat | Text]] = (
    _of_sharegpt("messages"),
    Layout(("messages",), _conversation, ("tools", *COLUMNS)),
    Layout(("prompt", "completion"), _completion, ("tools", *COLUMNS)),
    Layout(("text",), _text),
    _of_sharegpt("conversations"),
    Layout(
        ("instruction", "output"),
        _instruction,
        formats.ALPACA_OPTIONAL,
        "alpaca",
        formats.is_alpaca,
    ),
)
