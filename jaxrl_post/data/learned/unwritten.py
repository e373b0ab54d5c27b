"""Finds the parts of a conversation that a chat template leaves out.

Many templates write no tools, no calls or no reasoning, and say nothing about it. What
a template writes may depend on the whole conversation, so this is asked for each one:
it is written again with a mark in each of its parts, and marks that are missing tell
what is left out. A mark is made of letters and digits, which no escape changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from jaxrl_post.data import chat
from jaxrl_post.data.chat import NO_OPTIONS, Messages, Options
from jaxrl_post.data.learned.turns import parts, thought_of, with_thought
from jaxrl_post.data.replies import THOUGHT
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

__all__ = ["Learned", "unwritten"]

# Which turns of the assistant are trained on; the others may lack their reasoning.
type Learned = Literal["all", "last", "none"]

# Characters from which a text's occurrence in a rendering is no coincidence.
LONG = 16


def unwritten(
    tokenizer: Tokenizer,
    messages: Messages,
    options: Options = NO_OPTIONS,
    *,
    learned: Learned = "all",
    texts: Sequence[str] = (),
) -> tuple[str, ...]:
    """Lists parts of a conversation in no text that is trained on or a prompt.

    These are tools, tool calls with their arguments, reasoning, contents of messages,
    and names of speakers. The reasoning of turns that are not learned does not count,
    nor the name of a tool that was called by it, nor the ids of calls.

    Args:
        tokenizer: with or without a chat template.
        messages: a conversation, or with "none" a prompt.
        options: inputs of the template.
        learned: which turns of the assistant are learned, as by `parts`.
        texts: the texts of the conversation, if they are known.

    Returns:
        Nouns for a message to people, such as "tool calls"; empty if all is written.

    >>> call = {"name": "look", "arguments": {}}
    >>> said = {"role": "assistant", "content": "", "tool_calls": [call]}
    >>> unwritten(Tokenizer.train(["1"]), [{"role": "user", "content": "1"}, said])
    ('tool calls',)
    """
    rows = [chat.row_of(message) for message in messages]
    if learned != "none":
        while rows and rows[-1]["role"] != "assistant":
            rows.pop()
    if not options.tools and all(_is_found(row, texts) for row in rows):
        return ()
    marked = _Marked(rows, options.tools or (), learned)
    if tokenizer.chat_templates:
        options = replace(options, tools=marked.tools or None)
        found = _texts(tokenizer, marked.rows, options, learned)
        if found is None:
            return ()
    else:
        found = [row["content"] for row in marked.rows if "content" in row]
    missing = {
        noun: None
        for mark, noun in marked.nouns.items()
        if not any(mark in text for text in found)
    }
    return tuple(missing)


def _texts(
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    options: Options,
    learned: Learned,
) -> list[str] | None:
    """Texts that a template writes of a conversation; None if it refuses it."""
    try:
        if learned != "none":
            last = learned == "last"
            found = parts(tokenizer, rows, options, only_last=last)
            return [text for text, _ in found]
    except TokenizerError:
        pass  # such as a turn that the template leaves out
    try:
        asked = rows[-1]["role"] != "assistant"
        return [chat.render_text(tokenizer, rows, options, prompt=asked)]
    except TokenizerError:
        return None


def _is_found(row: Mapping[str, Any], texts: Sequence[str]) -> bool:
    """Whether a plain message stands in a text, without a trial."""
    if row.keys() - {"role", "content"}:
        return False
    content = row["content"]
    if not isinstance(content, str) or THOUGHT in content:
        return False
    content = content.strip()
    sure = row["role"] in ("user", "assistant") or len(content) >= LONG
    return sure and any(content in text for text in texts)


class _Marked:
    """A conversation with marks.

    Attributes:
        rows: the messages.
        tools: the tools.
        nouns: for each mark, what it is a mark of.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        learned: Learned,
    ) -> None:
        self.nouns: dict[str, str] = {}
        self.tools = [_named(tool, self._mark("tools")) for tool in tools]
        turns = [i for i, row in enumerate(rows) if row["role"] == "assistant"]
        own = {"all": turns, "last": turns[-1:], "none": []}[learned]
        self._called: dict[str, str] = {}
        self.rows = [self._row(row, i in own) for i, row in enumerate(rows)]

    def _mark(self, noun: str) -> str:
        mark = f"qz{len(self.nouns)}x"
        self.nouns[mark] = noun
        return mark

    def _row(self, row: Mapping[str, Any], learned: bool) -> dict[str, Any]:
        marked = dict(row)
        content = row.get("content")
        if isinstance(content, str) and content.rpartition(THOUGHT)[2].strip():
            role = row["role"]
            noun = "answers" if role == "assistant" else f"messages of role {role!r}"
            marked["content"] = f"{content.rstrip()} {self._mark(noun)}"
        if learned and thought_of(row):
            marked = with_thought(marked, self._mark("reasoning"))
        if calls := row.get("tool_calls"):
            marked["tool_calls"] = [self._call(call) for call in calls]
        if name := row.get("name"):
            called = row["role"] == "tool" and self._called.get(name)
            marked["name"] = called or self._mark("names of speakers")
        return marked

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function, mark = call.get("function", call), self._mark("tool calls")
        self._called[function["name"]] = mark
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = {key: self._mark("tool calls") for key in arguments}
        return _named(call, mark, {"arguments": arguments})


def _named(
    tool: Mapping[str, Any], name: str, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A tool or a call with another name."""
    changed = {"name": name, **(more or {})}
    if "function" in tool:
        return {**tool, "function": {**tool["function"], **changed}}
    return {**tool, **changed}
