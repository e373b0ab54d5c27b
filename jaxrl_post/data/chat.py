"""Converts conversations to token ids, with or without a chat template."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_post.data import spans, templates
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import Message

__all__ = [
    "Options",
    "Turn",
    "answered",
    "conversation",
    "render",
    "render_reply",
    "render_text",
    "with_tools",
]

# The attributes to read from a turn that is not a mapping.
FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
# Data sets use several names for a turn's reasoning; templates read the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Marks the end of a message to be continued; the space at its end shows whether the
# template strips contents.
MARK = "\ufdd0continued\ufdd0 "
SHOWN = 30  # characters of a template's text, in errors


@runtime_checkable
class Turn(Protocol):
    """A message of a conversation, with a role and a content.

    It may also have `reasoning_content`, `tool_calls`, `tool_call_id` and `name`, as
    messages of a chat API do. Functions that take a turn also accept a mapping with
    these keys and any other keys that the template reads.
    """

    @property
    def role(self) -> str:
        """The speaker, such as "user"."""
        ...

    @property
    def content(self) -> str:
        """The text of the message."""
        ...


type Messages = Sequence[Turn | Mapping[str, Any]]


@dataclass(frozen=True)
class Options:
    """The inputs of a chat template besides the conversation.

    Attributes:
        tools: JSON schemas of functions, as in chat APIs.
        documents: mappings with the keys that the template reads, such as "title".
        variables: further variables by name, such as {"enable_thinking": False}, on
            top of the tokenizer's.
        template: name of the template, if the tokenizer has several; None for
            "tool_use" if it exists and there are tools, else for "default".
        now: the time that the template sees; None for that of the tokenizer, or else
            the current time, with which some templates' tokens change from day to day.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    now: datetime.datetime | None = None

    def __post_init__(self) -> None:
        taken = [name for name in templates.GIVEN if name in self.variables]
        if taken:
            raise ValueError(
                f"Options: variables must not be named {', '.join(templates.GIVEN)}; "
                f"got {', '.join(taken)}"
            )


def with_tools(tools: Sequence[Mapping[str, Any]]) -> Options:
    """The template's inputs for a task: its tools, if it has any."""
    return Options(tools=tools or None)


def render(
    tokenizer: Tokenizer,
    messages: Messages,
    options: Options = Options(),
    *,
    continue_final: bool = False,
    prompt: bool = True,
    check: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...]:
    """Token ids of a conversation, up to the start of the assistant's answer.

    The chat template writes the whole text, including BOS. Without a chat template, as
    for base models and the built-in tasks, the contents are concatenated, and EOS
    follows each earlier answer of the assistant, as in an episode. An EOS that the
    tokenizer would put behind every text is left out.

    Args:
        tokenizer: with or without a chat template.
        messages: the conversation so far, at least one message.
        options: inputs of the template.
        continue_final: leaves the last message open, to be continued.
        prompt: ends with the head of the assistant's next turn, if no message is left
            open; without, with the end of the last message.
        check: called with the text before it is tokenised; may refuse it by raising.

    Raises:
        TokenizerError: the template fails.

    >>> from jaxrl_post.envs import Message
    >>> tokenizer = Tokenizer.train(["1+2="])
    >>> tokenizer.decode(render(tokenizer, [Message("user", "1+2=")]))
    '1+2='
    """
    if not tokenizer.chat_templates:
        text = ""
        for number, message in enumerate(map(_message, messages), 1):
            text += _content(message)
            ended = number < len(messages) or not (prompt or continue_final)
            if message["role"] == "assistant" and ended:
                text += tokenizer.eos_token
        check(text)
        return _open_end(tokenizer, text)
    text = render_text(
        tokenizer,
        messages,
        options,
        prompt=prompt and not continue_final,
        continue_final=continue_final,
    )
    check(text)
    # The template writes BOS itself.
    return tokenizer.encode(text)


def _open_end(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of a text with BOS but without an EOS that the tokenizer appends.

    Some tokenizers put one behind every text; an answer cannot follow it.
    """
    ids, stops = tokenizer.encode(text, special=True), tokenizer.stop_ids
    # Of an empty text, what stands before it and behind it look alike.
    if not text or ids[-1] not in stops:
        return ids
    _, begins = tokenizer.encode_with_begins(text, special=True)
    end = len(ids)
    while begins[end - 1] < 0 and ids[end - 1] in stops:
        end -= 1
    return ids[:end]


def render_text(
    tokenizer: Tokenizer,
    messages: Messages,
    options: Options = Options(),
    *,
    prompt: bool = True,
    continue_final: bool = False,
) -> str:
    """Renders a conversation with its chat template, as transformers does.

    Args:
        tokenizer: with a chat template.
        messages: at least one message.
        options: inputs of the template.
        prompt: appends the generation prompt, after which the assistant answers.
        continue_final: leaves the last message open instead.

    Raises:
        TokenizerError: no template, the template fails, or it changes the text of the
            message to be continued.
    """
    if continue_final and prompt:
        raise TokenizerError(
            "chat: continue_final leaves the last message open, prompt begins another; "
            "ask for one of them"
        )
    rows = [_message(message) for message in messages]
    if not rows:
        raise TokenizerError("chat: a conversation has at least one message; got none")
    if not continue_final:
        return _run(tokenizer, rows, options, prompt).text
    said, content = _marked(rows[-1].get("content"))
    rows[-1] = {**rows[-1], "content": content}
    whole = _run(tokenizer, rows, options, False).text
    text, mark, after = whole.rpartition(MARK.rstrip())
    if not mark or said.strip() not in text:
        raise TokenizerError(
            "chat: the template does not write the last message as it is, so nothing "
            f"can continue it; got {said!r}"
        )
    return text if after.startswith(" ") else text.rstrip()


def render_reply(
    tokenizer: Tokenizer,
    before: Messages,
    messages: Messages,
    options: Options = Options(),
    *,
    stop_id: int | None,
    continue_final: bool = False,
    prompt: bool = True,
) -> tuple[int, ...]:
    r"""Token ids between the assistant's sampled turn and its next turn.

    The sampled tokens stay as they are; only the new text is tokenised: the rendering
    of the longer conversation from the end of the assistant's answer on. This text
    begins with the token that ends a turn, such as ChatML's <|im_end|>. If the template
    has no such token, the text begins with the head of the next turn, at which the
    model stops. If its first token is `stop_id`, it was sampled and is not repeated. If
    the turn was cut or stopped with another token, the first token was not sampled and
    is added as context. Another sampled stop token stays in the episode; apart from it,
    the tokens equal those of the template.

    Args:
        tokenizer: with or without a chat template.
        before: the conversation, the assistant's turn last.
        messages: the new messages, at least one.
        options: inputs of the template.
        stop_id: the stop token that was sampled; None if the turn has none.
        continue_final: as `render`.
        prompt: as `render`.

    Raises:
        TokenizerError: the template renders earlier turns differently if later turns
            follow.

    >>> tokenizer = Tokenizer.train(["1+2=3"])
    >>> before = [{"role": "assistant", "content": "3"}]
    >>> again = [{"role": "user", "content": "+1="}]
    >>> cut = render_reply(tokenizer, before, again, stop_id=None)
    >>> tokenizer.backend.decode(cut, skip_special_tokens=False)
    '<|eos|>+1='
    >>> cut[1:] == render_reply(tokenizer, before, again, stop_id=tokenizer.eos_id)
    True
    """
    if tokenizer.chat_templates:
        text, space = _following(
            tokenizer,
            before,
            messages,
            _timed(tokenizer, options),
            continue_final=continue_final,
            prompt=prompt and not continue_final,
        )
    else:
        text, space = tokenizer.eos_token, ""
        text += "".join(_content(_message(message)) for message in messages)
    ids = tokenizer.encode(text)
    if ids[:1] == (stop_id,):
        return ids[1:]
    return tokenizer.encode(space + text) if space else ids


def conversation(
    tokenizer: Tokenizer,
    messages: Messages,
    options: Options = Options(),
    *,
    only_last: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Tokens of a whole conversation, and a mask of those that the assistant produces.

    The assistant produces its text, its reasoning, its tool calls and the token that
    ends its turn. These spans are the `{% generation %}` blocks of the template, each
    with a stop token that follows it. Without blocks, the spans are found by rendering:
    a turn begins where its generation prompt ends. Every turn must end with a stop
    token, or the model would not learn to stop. If the template ends a turn only by the
    head of the next turn, `Tokenizer.turn_end` is appended to the last turn. The text
    is tokenised once, as a whole. A token is in the mask if it begins in a span;
    transformers' mask also has tokens that only reach into a span, but there are none
    if special tokens surround the turn. Without a template the contents are
    concatenated, with the end-of-sequence token after each turn of the assistant.

    Args:
        tokenizer: with or without a chat template.
        messages: the conversation, with at least one turn of the assistant.
        options: inputs of the template.
        only_last: masks only the assistant's last turn.

    Returns:
        int32 ids [length] and bool mask [length].

    Raises:
        TokenizerError: no turn of the assistant; the template fails, renders a turn
            differently if later turns follow, or ends a turn without a stop token.

    >>> tokenizer = Tokenizer.train(["1+2=3"])
    >>> question = {"role": "user", "content": "1+2="}
    >>> answer = {"role": "assistant", "content": "3"}
    >>> tokens, mask = conversation(tokenizer, [question, answer])
    >>> tokenizer.backend.decode(tokens[mask], skip_special_tokens=False)
    '3<|eos|>'
    """
    rows = [_message(message) for message in messages]
    if not any(row["role"] == "assistant" for row in rows):
        raise TokenizerError(
            "chat: a conversation to learn from needs a turn of the assistant; got "
            f"the roles {[row['role'] for row in rows]}"
        )
    if tokenizer.chat_templates:
        text, found = _templated(tokenizer, rows, _timed(tokenizer, options), only_last)
    else:
        text, found = _plain(tokenizer, rows, only_last)
    ids, begins = tokenizer.encode_with_begins(
        text, special=not tokenizer.chat_templates
    )
    tokens = np.asarray(ids, np.int32)
    places = np.asarray(begins, np.int64)
    mask = np.zeros(len(tokens), np.bool_)
    for begin, end in found:
        mask |= (begin <= places) & (places < end)
    return tokens, mask


def answered(
    tokenizer: Tokenizer,
    messages: Messages,
    answer: str | Message,
    options: Options = Options(),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt and the answer to learn, including the token that ends the turn.

    With a chat template, this token is the template's end of a turn, which may differ
    from the end-of-sequence token; text that the template writes after it is dropped.

    Args:
        tokenizer: with or without a chat template.
        messages: the conversation so far.
        answer: the text of the assistant's answer; a message if it calls tools.
        options: inputs of the template.

    Returns:
        Token ids of the prompt, and of the answer.

    Raises:
        TokenizerError: as `conversation`.

    >>> tokenizer = Tokenizer.train(["1+2=3"])
    >>> _, target = answered(tokenizer, [{"role": "user", "content": "1+2="}], "3")
    >>> tokenizer.backend.decode(list(target), skip_special_tokens=False)
    '3<|eos|>'
    """
    if isinstance(answer, str):
        answer = Message("assistant", answer)
    if not tokenizer.chat_templates:
        if answer.tool_calls:
            raise TokenizerError(
                "chat: without a chat template there is no way to write a tool call; "
                f"got {answer!r:.200}"
            )
        # Tokenise the prompt apart from the answer, as the sampler sees it.
        target = (*tokenizer.encode(answer.content), tokenizer.eos_id)
        return render(tokenizer, messages), target
    tokens, mask = conversation(tokenizer, [*messages, answer], options, only_last=True)
    learned = np.flatnonzero(mask)
    if not learned.size:
        raise TokenizerError(
            "chat: the chat template writes nothing of the assistant's turn; got the "
            f"answer {answer!r:.80}"
        )
    first, end = int(learned[0]), int(learned[-1]) + 1
    return tuple(tokens[:first].tolist()), tuple(tokens[first:end].tolist())


def _following(
    tokenizer: Tokenizer,
    before: Messages,
    messages: Messages,
    options: Options,
    *,
    continue_final: bool,
    prompt: bool,
) -> tuple[str, str]:
    """The text from an answer's stop token on, and the template's space before it."""
    shorter = render_text(tokenizer, before, options, prompt=False)
    longer = render_text(
        tokenizer,
        [*before, *messages],
        options,
        prompt=prompt,
        continue_final=continue_final,
    )
    kept = spans.closed(shorter, longer, tokenizer.stop_tokens)
    if kept is None:
        raise TokenizerError(
            "chat: this chat template rewrites earlier turns when later ones follow, "
            "so tokens that were sampled would change; use it for single-turn tasks "
            "only"
        )
    asked = render_text(tokenizer, before[:-1], options) if before[1:] else ""
    # The prompt may hold text that a finished turn has not, such as <think>.
    begin = len(asked) if kept.startswith(asked) else 0
    end = spans.answer_end(kept, tokenizer.stop_tokens, begin)
    turn, content = kept[begin:end], _message(before[-1]).get("content")
    # Is the space at the end the answer's own, or the template's, as in Llama 2?
    own = isinstance(content, str) and content[-1:].isspace()
    return longer[end:], "" if own else turn[len(turn.rstrip()) :]


def _timed(tokenizer: Tokenizer, options: Options) -> Options:
    """Fixes the time, because several renderings are compared."""
    return replace(options, now=options.now or tokenizer.now or datetime.datetime.now())


def _templated(
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    options: Options,
    only_last: bool,
) -> tuple[str, list[spans.Span]]:
    def text_of(part: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        return _run(tokenizer, part, options, prompt).text

    whole, stops = _run(tokenizer, rows, options, False), tokenizer.stop_tokens
    if whole.generated is None:
        found = spans.assistant_spans(text_of, rows, stops, only_last=only_last)
        for span in found[:-1]:
            _check_end(tokenizer, whole.text, span)
    else:
        found = spans.through_stops(whole.text, whole.generated, stops)
        if only_last:
            found = spans.last_turn(text_of, rows, found)
    return _with_last_end(tokenizer, whole.text, found)


def _with_last_end(
    tokenizer: Tokenizer, text: str, found: list[spans.Span]
) -> tuple[str, list[spans.Span]]:
    """The text and its spans, with a stop token at the end of the last span.

    The token is appended if the template ends a turn by the head of the next turn.
    """
    if not found or spans.ends_with_stop(text, found[-1], tokenizer.stop_tokens):
        return text, found
    begin, end = found[-1]
    if text[end:].strip():
        _check_end(tokenizer, text, found[-1])
    text = text[:end] + tokenizer.turn_end
    return text, [*found[:-1], (begin, len(text))]


def _check_end(tokenizer: Tokenizer, text: str, span: spans.Span) -> None:
    """Raises TokenizerError if a turn of the assistant has no stop token at its end."""
    if spans.ends_with_stop(text, span, tokenizer.stop_tokens):
        return
    _ = tokenizer.turn_end  # raises where the template has none
    raise TokenizerError(
        "chat: after a turn of the assistant the chat template writes "
        f"{text[span[1] : span[1] + SHOWN]!r}, which begins with no stop token "
        f"({', '.join(tokenizer.stop_tokens)}), so a model would not learn to stop "
        "there; add that token's id to eos_token_id of generation_config.json, or move "
        "{% endgeneration %} behind it where the template has such blocks"
    )


def _plain(
    tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]], only_last: bool
) -> tuple[str, list[spans.Span]]:
    text, found = "", []
    for row in rows:
        begin = len(text)
        text += _content(row)
        if row["role"] == "assistant":
            text += tokenizer.eos_token
            found.append((begin, len(text)))
    return text, found[-1:] if only_last else found


def _run(
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    options: Options,
    prompt: bool,
) -> templates.Rendered:
    tools, documents = options.tools, options.documents
    named = options.template
    if named is None and tools is not None and "tool_use" in tokenizer.chat_templates:
        named = "tool_use"
    source = tokenizer.chat_templates.get(named or "default")
    if source is None:
        known = ", ".join(tokenizer.chat_templates) or "none"
        raise TokenizerError(
            f"chat: the tokenizer has no chat template {named or 'default'!r}; name "
            f"one of its own in the options; got {known}"
        )
    try:
        variables = {
            **tokenizer.special_tokens,
            **tokenizer.variables,
            **templates.plain(options.variables, "variables"),
            "messages": [
                templates.plain(row, f"messages[{i}]") for i, row in enumerate(rows)
            ],
            "tools": templates.plain(tools, "tools"),
            "documents": templates.plain(documents, "documents"),
            "add_generation_prompt": prompt,
        }
    except RecursionError as error:
        raise TokenizerError(
            "chat: the messages, tools or variables are nested too deep to be written; "
            "send flatter ones"
        ) from error
    return templates.run(source, variables, now=options.now or tokenizer.now)


def _message(message: Turn | Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: without None, reasoning under both names."""
    if isinstance(message, Mapping):
        entries = dict(message)
    elif isinstance(message, Message):
        entries = message.to_json()
        if message.tool_calls:
            entries["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    # Templates write an object in the family's own way.
                    "function": {
                        "name": call.name,
                        "arguments": json.loads(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
    else:
        entries = {name: getattr(message, name, None) for name in FIELDS}
    row = {name: value for name, value in entries.items() if value is not None}
    if not isinstance(row.get("role"), str):
        raise TokenizerError(f"chat: a message needs a role; got {message!r}")
    reasoning = [row[name] for name in REASONING if name in row]
    if reasoning:
        row = {"thinking": reasoning[0], **row, "reasoning_content": reasoning[0]}
    return row


def _content(row: Mapping[str, Any]) -> str:
    """The text of a message, for a tokenizer without a template."""
    if not isinstance(row.get("content"), str):
        raise TokenizerError(
            "chat: without a chat template a message is its text; "
            f"got the content {row.get('content')!r}"
        )
    return row["content"]


def _marked(content: Any) -> tuple[str, Any]:
    """The last text of a content, and the content with `MARK` after that text."""
    if isinstance(content, str):
        return content, content + MARK
    parts = list(content or [])
    for index, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and "text" in part:
            parts[index] = {**part, "text": part["text"] + MARK}
            return part["text"], parts
    raise TokenizerError(
        f"chat: the last message has no text to be continued; got {content!r}"
    )
