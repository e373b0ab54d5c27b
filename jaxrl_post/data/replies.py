r"""Reads what a model said: its reasoning, its answer, and its tool calls.

Families write tool calls in formats of their own. The format of a model is known by its
chat template, which writes earlier calls in it:

- hermes (Qwen 2.5, Qwen 3, Hermes):
  `<tool_call>{"name": .., "arguments": {..}}</tool_call>`;
- llama (Llama 3.1 to 3.3): `{"name": .., "parameters": {..}}`, perhaps after
  `<|python_tag|>`;
- mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or
  `[TOOL_CALLS]name[ARGS]{..}`;
- deepseek (V3, R1): name and JSON between marks that begin and end a call;
- harmony (GPT-OSS): `<|channel|>commentary to=functions.NAME <|message|>{..}<|call|>`.

Text that looks like a call and is none, such as broken JSON, stays in the answer, and
is counted, so that nothing is lost and the model can be told.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxrl_post.messages import ToolCall

__all__ = ["FORMATS", "Format", "FormatName", "Reply", "format_of", "parse"]

type FormatName = Literal["hermes", "llama", "mistral", "deepseek", "harmony"]

THINK, THOUGHT = "<think>", "</think>"


def _deepseek_mark(name: str) -> str:
    """A special token of DeepSeek, with a wide bar and low lines for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN = _deepseek_mark("tool calls begin")
CALLS_END = _deepseek_mark("tool calls end")
CALL_BEGIN = _deepseek_mark("tool call begin")
CALL_END = _deepseek_mark("tool call end")
CALL_SEPARATOR = _deepseek_mark("tool sep")


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


@dataclass(frozen=True)
class Format:
    """How a family writes what is not its answer.

    Attributes:
        name: of the format of tool calls; None if the template has no known one.
        thinks: whether reasoning stands between <think> and </think>.
    """

    name: FormatName | None = None
    thinks: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks that begin what is not the answer."""
        marks = FORMATS[self.name][0] if self.name else ()
        return (*marks, THINK, THOUGHT) if self.thinks else marks


def format_of(template: str | None) -> Format:
    """The format of the model with this chat template.

    >>> format_of("{{ '<tool_call>' }}").name, format_of("{{ messages }}").name
    ('hermes', None)
    """
    if template is None:
        return Format()
    thinks = THOUGHT in template
    if "<|channel|>" in template:
        return Format("harmony")
    marks: tuple[tuple[FormatName, str], ...] = (
        ("deepseek", CALL_BEGIN),
        ("mistral", "[TOOL_CALLS]"),
        ("hermes", "<tool_call>"),
        ("llama", "<|python_tag|>"),
    )
    for name, mark in marks:
        if mark in template:
            return Format(name, thinks)
    if "<|start_header_id|>" in template and "ipython" in template:
        # Llama 3.2, which has no mark of its own for calls.
        return Format("llama", thinks)
    return Format(None, thinks)


def parse(
    text: str,
    form: Format,
    *,
    thinking: bool = False,
    tools: bool = True,
    finished: bool = True,
) -> Reply:
    r"""Takes a reply apart.

    Args:
        text: what was sampled, with special tokens, without the stop token.
        form: the model's format.
        thinking: whether the prompt ends inside the reasoning, after <think>.
        tools: whether to read tool calls; without, they stay in the content.
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
    content, calls, broken = FORMATS[form.name][1](text, finished)
    return Reply(content, reasoning, calls, broken)


def _without_begun(text: str, marks: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text


def _call(value: Any) -> ToolCall | None:
    """A call from a JSON value with a name and arguments; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        # Some models write the object as text.
        arguments = _loads(arguments)
    if not value["name"] or not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _named(name: str, arguments: str) -> ToolCall | None:
    """A call from a name and the text of its arguments; None if it is none."""
    return _call({"name": name.strip(), "arguments": _loads(arguments)})


def _loads(text: str) -> Any:
    """The JSON value of a text; None if it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _between(
    text: str,
    finished: bool,
    opening: str,
    closing: str,
    read: Callable[[str], ToolCall | None],
    noise: tuple[str, ...] = (),
) -> _Calls:
    """Calls that stand between two marks, one call each.

    Args:
        text: where to look.
        finished: whether a call without its closing mark is complete.
        opening: mark before a call.
        closing: mark after a call.
        read: makes a call of the text between.
        noise: marks around all calls.
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
        call = read(inside)
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


def _hermes(text: str, finished: bool) -> _Calls:
    def read(inside: str) -> ToolCall | None:
        return _call(_loads(inside.strip()))

    return _between(text, finished, "<tool_call>", "</tool_call>", read)


def _llama(text: str, finished: bool) -> _Calls:
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
        call = _call(value)
        if call is None:
            # An answer in JSON is no call.
            return _Calls(text, (), 1 if isinstance(value, dict) and calls else 0)
        calls.append(call)
        body = body[end:].lstrip(" \n;")
    return _Calls("", tuple(calls), 0)


def _mistral(text: str, finished: bool) -> _Calls:
    mark = "[TOOL_CALLS]"
    content, found, rest = text.partition(mark)
    if not found:
        return _Calls(text, (), 0)
    if not finished:
        return _Calls(content, (), 0)
    if "[ARGS]" in rest:
        parts = [part.partition("[ARGS]") for part in rest.split(mark)]
        calls = [_named(re.sub(r"\[CALL_ID\].*", "", p[0]), p[2]) for p in parts]
    else:
        values = _loads(rest.strip())
        calls = [_call(value) for value in values] if isinstance(values, list) else []
    read = tuple(call for call in calls if call is not None)
    if not read or len(read) < len(calls):
        return _Calls(text, (), max(1, len(calls) - len(read)))
    return _Calls(content, read, 0)


def _deepseek(text: str, finished: bool) -> _Calls:
    def read(inside: str) -> ToolCall | None:
        kind, _, rest = inside.partition(CALL_SEPARATOR)
        if rest.lstrip().startswith("{"):
            return _named(kind, rest)
        name, _, body = rest.partition("\n")
        fenced = re.fullmatch(r"\s*```(?:json)?\n(.*?)\n?```\s*", body, re.DOTALL)
        return None if fenced is None else _named(name, fenced[1])

    return _between(
        text,
        finished,
        CALL_BEGIN,
        CALL_END,
        read,
        noise=(CALLS_BEGIN, CALLS_END),
    )


HARMONY_MARKS = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>")
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
            call = _named(target[1].removeprefix("functions."), message["body"])
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


# Marks that begin calls, and how to read them.
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[str, bool], _Calls]]] = {
    "hermes": (("<tool_call>",), _hermes),
    "llama": (("<|python_tag|>",), _llama),
    "mistral": (("[TOOL_CALLS]",), _mistral),
    "deepseek": ((CALLS_BEGIN, CALL_BEGIN, CALLS_END), _deepseek),
    "harmony": (HARMONY_MARKS, lambda text, finished: _Calls(text, (), 0)),
}
