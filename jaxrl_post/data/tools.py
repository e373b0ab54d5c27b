"""Tools of a conversation as tokens: answers that call them, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_post.data import chat
from jaxrl_post.data.replies import THINK, THOUGHT, Format, Reply, format_of, parse
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import PICTURE, Message

__all__ = [
    "expresses_tools",
    "form_of",
    "no_tools",
    "read",
    "schemas_of",
    "shortened",
    "thinks",
]

_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_at_something",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def no_tools(tokenizer: Tokenizer) -> str | None:
    """Says why a model cannot be given tools; None if it can.

    >>> no_tools(Tokenizer.train(["1"]))
    'the tokenizer has no chat template'
    """
    if not tokenizer.chat_templates:
        return "the tokenizer has no chat template"
    if not expresses_tools(tokenizer):
        return "its chat template does not write the tools that it is given"
    if form_of(tokenizer).name is None:
        return "its chat template writes calls in a format that is not known"
    return None


def form_of(tokenizer: Tokenizer) -> Format:
    """The format in which the model writes reasoning and tool calls."""
    found = tokenizer.chat_templates
    first = next(iter(found.values()), None)
    return format_of(found.get("tool_use") or found.get("default") or first)


def expresses_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes the tools that it is given."""
    if not tokenizer.chat_templates:
        return False
    rows = [{"role": "user", "content": "?"}]
    try:
        text = chat.render_text(tokenizer, rows, chat.Options(tools=[_TOOL]))
    except TokenizerError:
        return False
    return "look_at_something" in text


def thinks(
    tokenizer: Tokenizer, prompt: Sequence[int], continued: str | None = None
) -> bool:
    """Whether a prompt ends inside the reasoning: <think> was opened and not closed.

    What stands before the head of the last turn, such as a user's text, does not count.

    Args:
        tokenizer: the model's.
        prompt: token ids; the last eight are looked at; numbers of pictures are not.
        continued: the text of the last message, if the prompt leaves it open.
    """
    if continued and (THINK in continued or THOUGHT in continued):
        return continued.rfind(THINK) > continued.rfind(THOUGHT)
    # Pictures have negative numbers (`pictures.numbered`).
    last = [token for token in prompt[-8:] if token >= 0]
    for place in reversed(range(len(last))):
        if _begins_turn(tokenizer, last[place]):
            del last[: place + 1]
            break
    tail = tokenizer.backend.decode(last, skip_special_tokens=False)
    return THINK in tail and THOUGHT not in tail[tail.rindex(THINK) :]


def _begins_turn(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token may begin a turn's head in a chat template."""
    added = tokenizer.added_tokens.get(token)
    if added is None or not added.content.strip():
        return False
    return added.content not in (THINK, THOUGHT)


def schemas_of(
    tools: Sequence[Mapping[str, Any]],
) -> dict[str, Mapping[str, Any]]:
    """The schemas of the arguments, by the name of the tool.

    >>> schemas_of([{"type": "function", "function": {"name": "f"}}])
    {'f': {'type': 'object'}}
    """
    functions = [tool.get("function", tool) for tool in tools]
    return {
        each["name"]: each.get("parameters") or {"type": "object"} for each in functions
    }


def read(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    said: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Reply:
    r"""Takes an answer apart into reasoning, text and tool calls.

    Args:
        tokenizer: the model's.
        prompt: token ids before the answer; the last few are enough.
        said: token ids of the answer, without a stop token that ended it.
        tools: the conversation's tools; their schemas give arguments their types.

    >>> read(Tokenizer.train(["42"]), (), Tokenizer.train(["42"]).encode("42")).content
    '42'
    """
    form = form_of(tokenizer)
    return parse(
        tokenizer.decode(said, keep=form.marks(tools=True)),
        form,
        thinking=thinks(tokenizer, prompt),
        schemas=schemas_of(tools),
    )


def shortened(
    tokenizer: Tokenizer, messages: Sequence[Message], most: int
) -> tuple[Message, ...]:
    """Cuts tool results to a number of tokens, by removing their middle.

    Args:
        tokenizer: the model's.
        messages: of any role; only tools' messages are cut, and no picture of them.
        most: tokens of a message's content, without the mark in the cut.

    >>> tokenizer = Tokenizer.train(["7"])
    >>> result = Message("tool", "0123456789", tool_call_id="1")
    >>> shortened(tokenizer, [result], 4)[0].content
    '01[... 6 tokens left out ...]89'
    """
    return tuple(
        _shortened(tokenizer, message, most) if message.role == "tool" else message
        for message in messages
    )


def _shortened(tokenizer: Tokenizer, message: Message, most: int) -> Message:
    ids = tokenizer.encode(message.content)
    if len(ids) <= most:
        return message
    head, tail = most - most // 2, most // 2
    before = tokenizer.backend.decode(list(ids[:head]), skip_special_tokens=False)
    after = tokenizer.backend.decode(
        list(ids[len(ids) - tail :]), skip_special_tokens=False
    )
    mark = f"[... {len(ids) - most} tokens left out ...]"
    if message.pictures:
        # Text is left out alone: every picture stays.
        lost = len(message.pictures) - (before + after).count(PICTURE)
        mark += PICTURE * lost
    return replace(message, content=before + mark + after)
