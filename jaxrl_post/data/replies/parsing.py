"""Takes a reply apart, in the format of its family."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_post.data.replies import tagged
from jaxrl_post.data.replies.calls import Schemas, loads, made, named
from jaxrl_post.data.replies.formats import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    HARMONY_MARKS,
    THINK,
    THOUGHT,
    Format,
    FormatName,
)
from jaxrl_post.messages import ToolCall

__all__ = ["Reply", "parse"]

UNTYPED: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class Reply:
    """A message of the assistant, in parts.

    Attributes:
        content: the answer.
        reasoning: what came before it between thinking marks; None if there are none.
        calls: the tool calls, in order.
        broken: number of calls that could not be read; they stay in the content.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    broken: int = 0


class _Calls(NamedTuple):
    """The text around the calls, the calls, and the number of broken ones."""

    content: str
    calls: tuple[ToolCall, ...]
    broken: int


def parse(
    text: str,
    form: Format,
    *,
    thinking: bool = False,
    tools: bool = True,
    schemas: Schemas = UNTYPED,
    finished: bool = True,
) -> Reply:
    r"""Takes a reply apart.

    Args:
        text: what was sampled, with special tokens, without the stop token.
        form: the model's format.
        thinking: whether the prompt ends inside the reasoning, after <think>.
        tools: whether to read tool calls; without, they stay in the content.
        schemas: of the tools' arguments, by name, where a format writes arguments
            without their types.
        finished: whether the text is whole. If not, the end of the text that may be the
            beginning of a mark is left out, and so is a call that is not complete; the
            parts of a longer text then begin with those of a shorter one.

    >>> qwen = Format("hermes", thinks=True)
    >>> call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    >>> said = "Why?</think>I look." + call
    >>> reply = parse(said, qwen, thinking=True)
    >>> reply.reasoning, reply.content, reply.calls
    ('Why?', 'I look.', (ToolCall(name='f', arguments='{}', id=''),))
    """
    if form.name == "harmony":
        return _harmony(text, tools=tools, finished=finished)
    if not finished:
        text = _without_begun(text, form.openings)
    reasoning = None
    if form.thinks:
        begun = thinking
        stripped = text.lstrip()
        if not begun and stripped.startswith(THINK):
            begun, text = True, stripped[len(THINK) :]
        if begun:
            reasoning, mark, text = text.partition(THOUGHT)
            reasoning = reasoning.strip() if mark or finished else reasoning.lstrip()
            text = text.lstrip("\n")
    if not tools or form.name is None:
        return Reply(text, reasoning)
    content, calls, broken = READERS[form.name](text, finished, schemas)
    return Reply(content, reasoning, calls, broken)


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text


def _between(
    text: str,
    finished: bool,
    opening: str,
    closing: str,
    read: Callable[[str], ToolCall | None],
    noise: tuple[str, ...] = (),
    *,
    closed: bool = False,
) -> _Calls:
    """Calls that stand between two marks, one call each.

    Args:
        text: where to look.
        finished: whether a call without its closing mark is complete.
        opening: mark before a call.
        closing: mark after a call.
        read: makes a call of the text between.
        noise: marks around all calls.
        closed: whether a call must have its closing mark, because nothing else shows
            that it is whole.
    """
    content, calls, broken = "", [], 0
    while True:
        before, mark, rest = text.partition(opening)
        content += before
        if not mark:
            break
        inside, end, after = rest.partition(closing)
        if not end and not finished:
            break
        call = None if closed and not end else read(inside)
        if call is None:
            broken += 1
            content += opening + inside + end
        else:
            calls.append(call)
        text = after
    for each in noise:
        content = content.replace(each, "")
    if calls and not content.strip():
        content = ""
    return _Calls(content.rstrip("\n") if calls else content, tuple(calls), broken)


def _hermes(text: str, finished: bool, schemas: Schemas) -> _Calls:
    del schemas

    def read(inside: str) -> ToolCall | None:
        return made(loads(inside.strip()))

    return _between(text, finished, "<tool_call>", "</tool_call>", read)


def _qwen_coder(text: str, finished: bool, schemas: Schemas) -> _Calls:
    def read(inside: str) -> ToolCall | None:
        return tagged.qwen_coder(inside, schemas)

    return _between(text, finished, "<tool_call>", "</tool_call>", read)


def _glm(text: str, finished: bool, schemas: Schemas) -> _Calls:
    def read(inside: str) -> ToolCall | None:
        return tagged.glm(inside, schemas)

    return _between(text, finished, "<tool_call>", "</tool_call>", read, closed=True)


def _llama(text: str, finished: bool, schemas: Schemas) -> _Calls:
    del schemas
    body = text.removeprefix("<|python_tag|>").strip()
    if not finished and (body.startswith("{") or body != text.strip()):
        # Whether such a text is a call shows at its end.
        return _Calls("", (), 0)
    if not body.startswith("{"):
        return _Calls(text, (), 0)
    calls, decoder = [], json.JSONDecoder()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return _Calls(text, (), 1)
        call = made(value)
        if call is None:
            # An answer in JSON is no call.
            broken = isinstance(value, dict) and (
                bool(calls) or ("name" in value and "parameters" in value)
            )
            return _Calls(text, (), int(broken))
        calls.append(call)
        body = body[end:].lstrip(" \n;")
    return _Calls("", tuple(calls), 0)


def _mistral(text: str, finished: bool, schemas: Schemas) -> _Calls:
    del schemas
    mark = "[TOOL_CALLS]"
    content, found, rest = text.partition(mark)
    if not found:
        return _Calls(text, (), 0)
    if not finished:
        return _Calls(content, (), 0)
    if "[ARGS]" in rest:
        parts = [part.partition("[ARGS]") for part in rest.split(mark)]
        calls = [named(re.sub(r"\[CALL_ID\].*", "", p[0]), p[2]) for p in parts]
    else:
        values = loads(rest.strip())
        calls = [made(value) for value in values] if isinstance(values, list) else []
    read = tuple(call for call in calls if call is not None)
    if not read or len(read) < len(calls):
        return _Calls(text, (), max(1, len(calls) - len(read)))
    return _Calls(content, read, 0)


def _deepseek(text: str, finished: bool, schemas: Schemas) -> _Calls:
    del schemas

    def read(inside: str) -> ToolCall | None:
        kind, _, rest = inside.partition(CALL_SEPARATOR)
        if rest.lstrip().startswith("{"):
            return named(kind, rest)
        name, _, body = rest.partition("\n")
        fenced = re.fullmatch(r"\s*```(?:json)?\n(.*?)\n?```\s*", body, re.DOTALL)
        return None if fenced is None else named(name, fenced[1])

    return _between(
        text,
        finished,
        CALL_BEGIN,
        CALL_END,
        read,
        noise=(CALLS_BEGIN, CALLS_END),
    )


HARMONY_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to> to=\S+?)?<\|channel\|>(?P<head>[^<]*)"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def _harmony(text: str, *, tools: bool, finished: bool) -> Reply:
    """A reply of messages in channels: analysis is reasoning, final the answer."""
    if not finished:
        text = _without_begun(text, (*HARMONY_MARKS, "<|constrain|>", "<|return|>"))
    content, thoughts, calls, broken, end = "", [], [], 0, 0
    for message in HARMONY_MESSAGE.finditer(text):
        end = message.end()
        target = re.search(r"to=(\S+)", (message["to"] or "") + " " + message["head"])
        if target is not None:
            if not tools or (not finished and not message["end"]):
                continue
            call = named(target[1].removeprefix("functions."), message["body"])
            if call is None:
                broken += 1
                content += message[0]
            else:
                calls.append(call)
        elif message["head"].strip().startswith("analysis"):
            thoughts.append(message["body"])
        else:
            content += message["body"]
    if finished and not end:
        # Not in channels at all.
        content = text
    reasoning = "\n".join(thoughts) if thoughts else None
    return Reply(content, reasoning, tuple(calls), broken)


# How to read calls. Those of GPT-OSS are messages of their own; see `_harmony`.
READERS: Mapping[FormatName, Callable[[str, bool, Schemas], _Calls]] = {
    "hermes": _hermes,
    "qwen_coder": _qwen_coder,
    "glm": _glm,
    "llama": _llama,
    "mistral": _mistral,
    "deepseek": _deepseek,
}
