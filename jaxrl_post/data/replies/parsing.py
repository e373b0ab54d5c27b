"""Takes a reply apart, in the format of its family."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_post.data.replies import tagged
from jaxrl_post.data.replies.calls import (
    Schemas,
    loads,
    made,
    mark_outside,
    named,
)
from jaxrl_post.data.replies.formats import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    HARMONY_ENDS,
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
            beginning of a mark is left out, and so is a call that is not complete, and
            white space that later text may remove. So content, reasoning and calls of
            an unfinished text are a prefix of every longer text's: a stream never takes
            back what it has sent.

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
            reasoning, _, text = text.partition(THOUGHT)
            reasoning, text = reasoning.strip(), text.lstrip("\n")
        elif not finished and not stripped:
            # <think> may follow, before which white space is nothing.
            text = ""
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
    quoting: bool = False,
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
        quoting: whether the call is JSON, whose strings may have a mark in them.
    """
    content, calls, broken = "", [], 0
    noises = re.compile("|".join(map(re.escape, noise)) or r"(?!)")
    while True:
        before, mark, text = text.partition(opening)
        content += noises.sub("", before)
        if not mark:
            break
        first = text.find(closing)
        end = first
        if quoting:
            end, _ = mark_outside(text, [closing]) or (-1, -1)
        if end < 0 and not finished:
            break
        whole = end >= 0 or (not closed and (quoting or first < 0))
        call = read(text[:end] if end >= 0 else text) if whole else None
        if call is None:
            broken += 1
            # An unreadable call may have a quotation mark too many.
            end = first
            content += opening + (text[: end + len(closing)] if end >= 0 else text)
        else:
            calls.append(call)
        text = text[end + len(closing) :] if end >= 0 else ""
    if (calls or not finished) and not content.strip():
        content = ""
    if calls or not finished:
        content = content.rstrip("\n")
    return _Calls(content, tuple(calls), broken)


def _hermes(text: str, finished: bool, schemas: Schemas) -> _Calls:
    del schemas

    def read(inside: str) -> ToolCall | None:
        return made(loads(inside.strip()))

    return _between(text, finished, "<tool_call>", "</tool_call>", read, quoting=True)


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
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not finished and (body[:1] in ("", "{") or body != text.strip()):
        # Only its end shows whether such a text is a call.
        return _Calls("", (), 0)
    if not body.startswith("{"):
        return _Calls(text, (), 0)
    calls, decoder = [], json.JSONDecoder()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return _Calls(text, (), 1)
        is_meant = _is_meant_by_llama(value)
        call = made(value) if is_meant else None
        if call is None:
            # An answer in JSON is no call.
            return _Calls(text, (), int(is_meant or bool(calls)))
        calls.append(call)
        body = body[end:].lstrip(" \n;")
    return _Calls("", tuple(calls), 0)


def _is_meant_by_llama(value: Any) -> bool:
    """Whether a JSON value is meant as a call, and is no answer that has a name."""
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        return False
    keys = value.keys() - {"type"}
    return keys in ({"name", "parameters"}, {"name", "arguments"})


def _mistral(text: str, finished: bool, schemas: Schemas) -> _Calls:
    del schemas
    mark = "[TOOL_CALLS]"
    content, found, rest = text.partition(mark)
    if not found:
        return _Calls(text, (), 0)
    if not finished:
        return _Calls(content, (), 0)
    if re.match(r"\s*\[(?!ARGS\]|CALL_ID\])", rest):
        values = loads(rest.strip())
        calls = [made(value) for value in values] if isinstance(values, list) else []
    else:
        calls = _named_by_mistral(rest, mark)
    read = tuple(call for call in calls if call is not None)
    if not read or len(read) < len(calls):
        return _Calls(text, (), max(1, len(calls) - len(read)))
    return _Calls(content, read, 0)


def _named_by_mistral(text: str, mark: str) -> list[ToolCall | None]:
    """Calls that begin with their names; None for the first that cannot be read.

    Args:
        text: after the first mark.
        mark: between calls.
    """
    calls, decoder = [], json.JSONDecoder()
    while True:
        name, _, body = text.partition("[ARGS]")
        body = body.lstrip()
        try:
            arguments, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return [*calls, None]
        name = re.sub(r"\[CALL_ID\].*", "", name).strip()
        calls.append(made({"name": name, "arguments": arguments}))
        text = body[end:].lstrip()
        if not text:
            return calls
        if not text.startswith(mark):
            return [*calls, None]
        text = text.removeprefix(mark)


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
        quoting=True,
    )


HARMONY_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?P<to> to=\S+?)?<\|channel\|>(?P<head>[^<]*)"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
# The end of a text that may be the beginning of a header.
HARMONY_BEGUN = re.compile(
    r"(?:(?: to=\S+?)?<\|(?:start|channel)\|>.*| (?:t(?:o(?:=\S*)?)?)?)\Z", re.DOTALL
)
# A header that the end of the text cuts.
HARMONY_CUT = re.compile(
    r"(?:<\|start\|>(?:assistant)?(?: to=\S*)?"
    r"|(?:<\|start\|>assistant)?(?: to=\S+?)?<\|channel\|>[^<]*"
    r"(?:<\|constrain\|>[^<]*)?)\Z"
)


def _harmony(text: str, *, tools: bool, finished: bool) -> Reply:
    """A reply of messages in channels: analysis is reasoning, final the answer.

    What stands outside of channels belongs to the answer.
    """
    if not finished:
        text = _without_begun(text, HARMONY_MARKS)
    content, thoughts, calls, broken, place = "", [], [], 0, 0
    while header := HARMONY_HEADER.search(text, place):
        outside = text[place : header.start()]
        content += outside if outside.strip() else ""
        named_in = (header["to"] or "") + " " + header["head"]
        target = re.search(r"to=(\S+)", named_in)
        end = _harmony_end(text, header.end(), target is not None, finished)
        if end is None:
            return Reply(content, _joined(thoughts), tuple(calls), broken)
        body, place = text[header.end() : end[0]], end[1]
        if target is None:
            if header["head"].strip().startswith("analysis"):
                thoughts.append(body)
            else:
                content += body
        elif tools:
            call = named(target[1].removeprefix("functions."), body)
            if call is None:
                broken += 1
                # As in other formats, the first mark ends an unreadable message.
                place = _first_end(text, header.end())[1]
                content += text[header.start() : place]
            else:
                calls.append(call)
    outside = text[place:]
    begun = (HARMONY_CUT if finished else HARMONY_BEGUN).search(outside)
    outside = outside if begun is None else outside[: begun.start()]
    if outside.strip() or (finished and not place):
        content += outside
    return Reply(content, _joined(thoughts), tuple(calls), broken)


def _harmony_end(
    text: str, begin: int, is_call: bool, finished: bool
) -> tuple[int, int] | None:
    """Finds the end of a message's body, and the mark after it; None for not yet.

    Args:
        text: of the reply.
        begin: of the body.
        is_call: whether the body is JSON, whose strings may have a mark in them.
        finished: whether the text is whole.
    """
    if not is_call:
        return _first_end(text, begin)
    found = mark_outside(text, HARMONY_ENDS, begin)
    # The mark after a call is a stop token, which is no text.
    return (len(text), len(text)) if found is None and finished else found


def _first_end(text: str, begin: int) -> tuple[int, int]:
    """Finds the first mark that ends a message, or the end of the text.

    A message without such a mark ends where the next one starts.
    """
    marks = [(text.find(mark, begin), mark) for mark in HARMONY_ENDS]
    ends = [(at, at + len(mark)) for at, mark in marks if at >= 0]
    start = text.find("<|start|>", begin)
    ends += [(start, start)] if start >= 0 else []
    return min(ends, default=(len(text), len(text)))


def _joined(thoughts: Sequence[str]) -> str | None:
    return "\n".join(thoughts) if thoughts else None


# Readers of calls. GPT-OSS writes calls as separate messages; see `_harmony`.
READERS: Mapping[FormatName, Callable[[str, bool, Schemas], _Calls]] = {
    "hermes": _hermes,
    "qwen_coder": _qwen_coder,
    "glm": _glm,
    "llama": _llama,
    "mistral": _mistral,
    "deepseek": _deepseek,
}
