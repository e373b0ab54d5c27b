"""Converts conversations to token ids, with or without a chat template."""

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from jaxrl_post.data import spans, templates
from jaxrl_post.data.call_forms import taken_by
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import PICTURE, Message
from jaxrl_post.pictures import Picture, PictureError, Shown, expanded

__all__ = [
    "NO_OPTIONS",
    "NO_TEXT_AFTER",
    "REASONING",
    "MessageLike",
    "Messages",
    "Options",
    "RewrittenError",
    "misplaced",
    "once_ended",
    "pictures_of",
    "render",
    "render_reply",
    "render_text",
    "rendered",
    "require_eyes",
    "row_of",
    "shown",
    "sources",
    "text_of",
    "timed",
    "with_tools",
]

# The attributes to read from a turn that is not a mapping.
FIELDS = (
    "role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name",
    "pictures",
)  # fmt: skip
# Data sets and templates use several names for a turn's reasoning.
REASONING = ("reasoning_content", "thinking", "reasoning")
# The error about a prompt without a token from which an answer can begin.
NO_TEXT_AFTER = (
    "the prompt ends with a picture, and an answer begins after a token of text; put "
    "the picture before the text, or choose a chat template that begins the answer"
)
# Marks the end of a message to be continued; the space at its end shows whether the
# template strips contents.
MARK = "\ufdd0continued\ufdd0 "


class RewrittenError(TokenizerError):
    """A template writes earlier turns differently once later ones follow."""


@runtime_checkable
class MessageLike(Protocol):
    """A message of a conversation, with a role and a content.

    It may also have `reasoning_content`, `tool_calls`, `tool_call_id` and `name`, as
    messages of a chat API do. Functions that take a turn also accept a mapping with
    these keys and any other keys that the template reads. A message with `pictures`,
    bytes of files, has U+FFFC in its content for each (`messages.Message`).
    """

    @property
    def role(self) -> str:
        """The speaker, such as "user"."""
        ...

    @property
    def content(self) -> str:
        """The text of the message."""
        ...


type Messages = Sequence[MessageLike | Mapping[str, Any]]


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
        now: the time that the template sees; None for the tokenizer's, or else the
            current time, with which some templates' tokens change from day to day.
        adapt: gives calls in the form that the template takes, with arguments as an
            object or as JSON text; otherwise as they are, as transformers does.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    now: datetime.datetime | None = None
    adapt: bool = False

    def __post_init__(self) -> None:
        taken = [name for name in templates.GIVEN if name in self.variables]
        if taken:
            raise ValueError(
                f"Options: variables must not be named {', '.join(templates.GIVEN)}; "
                f"got {', '.join(taken)}"
            )


NO_OPTIONS = Options()


def with_tools(tools: Sequence[Mapping[str, Any]]) -> Options:
    """The template's inputs for a task: its tools, if it has any."""
    return Options(tools=tools or None, adapt=True)


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
        TokenizerError: the template fails, or the model sees no pictures.
        PictureError: as `shown`.

    >>> from jaxrl_post.envs import Message
    >>> tokenizer = Tokenizer.train(["1+2="])
    >>> tokenizer.decode(render(tokenizer, [Message("user", "1+2=")]))
    '1+2='
    """
    if not tokenizer.chat_templates:
        text = ""
        for number, message in enumerate(map(row_of, messages), 1):
            text += text_of(message)
            ended = number < len(messages) or not (prompt or continue_final)
            if message["role"] == "assistant" and ended:
                text = once_ended(tokenizer, text)
        check(text)
        return shown(tokenizer, _open_end(tokenizer, text), messages)
    text = render_text(
        tokenizer,
        messages,
        options,
        prompt=prompt and not continue_final,
        continue_final=continue_final,
    )
    check(text)
    # The template writes BOS itself.
    return shown(tokenizer, tokenizer.encode(text), messages)


def pictures_of(
    tokenizer: Tokenizer, messages: Iterable[MessageLike | Mapping[str, Any]]
) -> list[tuple[Picture, ...]]:
    """The pictures of each message, decoded and resized.

    Args:
        tokenizer: of a model that sees, if a message has pictures.
        messages: any.

    Raises:
        TokenizerError: the model sees no pictures.
        PictureError: a picture cannot be decoded; the error names its message.
    """
    messages = list(messages)
    require_eyes(tokenizer, messages)
    return [
        tuple(
            _decoded(tokenizer, source, f"messages[{place}], picture {number}")
            for number, source in enumerate(sources(message), 1)
        )
        for place, message in enumerate(messages)
    ]


def require_eyes(
    tokenizer: Tokenizer, messages: Iterable[MessageLike | Mapping[str, Any]]
) -> None:
    """Raises TokenizerError if messages have pictures, and the model sees none."""
    if tokenizer.eyes is not None:
        return
    for place, message in enumerate(messages):
        if sources(message):
            raise TokenizerError(
                f"chat: messages[{place}] has a picture, and this model reads text "
                "alone; load a model that sees with --vision, or leave the picture out"
            )


def _decoded(tokenizer: Tokenizer, source: bytes, where: str) -> Picture:
    assert tokenizer.eyes is not None, "required before"
    try:
        return tokenizer.eyes.picture(source)
    except PictureError as error:
        raise PictureError(f"{where}: {error}") from error


def shown(
    tokenizer: Tokenizer,
    ids: tuple[int, ...],
    messages: Iterable[MessageLike | Mapping[str, Any]],
) -> tuple[int, ...]:
    """Puts the tokens of the messages' pictures in the places left for them.

    Args:
        tokenizer: with which the messages were written.
        ids: token ids of the messages.
        messages: those with these tokens, and no others.

    Returns:
        The row; with pictures it is a `Shown`, which keeps them in memory.

    Raises:
        TokenizerError: as `pictures_of`.
        PictureError: as `pictures_of`; or there are more or fewer places than pictures.
    """
    messages = list(messages)
    found = pictures_of(tokenizer, messages)
    if tokenizer.eyes is None:
        return ids
    token, count = tokenizer.eyes.image_token, sum(map(len, found))
    if (places := ids.count(token)) != count:
        raise misplaced(messages, places, count)
    if not count:
        return ids
    pictures = [picture for each in found for picture in each]
    return Shown.of(expanded(ids, pictures, token), pictures)


def misplaced(
    messages: Sequence[MessageLike | Mapping[str, Any]], places: int, count: int
) -> PictureError:
    """The error about pictures that a template does not write, or writes too often."""
    roles = [
        f"messages[{place}] of role {row_of(message)['role']!r}"
        for place, message in enumerate(messages)
        if sources(message)
    ]
    has = f"{count} pictures ({', '.join(roles)})" if roles else "no picture"
    return PictureError(
        f"chat: the conversation has {has}, and its text has {places} image tokens; "
        "the chat template must write one for each picture, which many do for the "
        "user alone, and no text may contain the image token itself"
    )


def sources(message: MessageLike | Mapping[str, Any]) -> Sequence[bytes]:
    """The bytes of a message's pictures."""
    if isinstance(message, Mapping):
        return message.get("pictures") or ()
    return getattr(message, "pictures", ())


def once_ended(tokenizer: Tokenizer, text: str) -> str:
    """A text with the end-of-sequence token, which some data sets write themselves."""
    return text.removesuffix(tokenizer.eos_token) + tokenizer.eos_token


def _open_end(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids of a text with BOS but without an EOS that the tokenizer appends.

    Some tokenizers put one behind every text; an answer cannot follow it.
    """
    ids, stops = tokenizer.encode(text, special=True), tokenizer.stop_ids
    # In an empty text, prefix and suffix tokens cannot be told apart.
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
    rows = [row_of(message) for message in messages]
    if not rows:
        raise TokenizerError("chat: a conversation has at least one message; got none")
    if not continue_final:
        return rendered(tokenizer, rows, options, prompt).text
    said, content = _marked(rows[-1].get("content"))
    rows[-1] = {**rows[-1], "content": content}
    whole = rendered(tokenizer, rows, options, False).text
    text, mark, after = whole.rpartition(MARK.rstrip())
    if rows[-1].get("pictures"):
        said = said.rpartition(PICTURE)[2]
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
    the tokens equal the template's.

    Args:
        tokenizer: with or without a chat template.
        before: the conversation, the assistant's turn last.
        messages: the new messages, at least one.
        options: inputs of the template.
        stop_id: the stop token that was sampled; None if the turn has none.
        continue_final: as `render`.
        prompt: as `render`.

    Raises:
        RewrittenError: the template renders earlier turns differently if later turns
            follow.
        PictureError: as `shown`, of the new messages.

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
            timed(tokenizer, options),
            continue_final=continue_final,
            prompt=prompt and not continue_final,
        )
    else:
        text, space = tokenizer.eos_token, ""
        text += "".join(text_of(row_of(message)) for message in messages)
    ids = tokenizer.encode(text)
    if ids[:1] == (stop_id,):
        ids = ids[1:]
    elif space:
        ids = tokenizer.encode(space + text)
    return shown(tokenizer, ids, messages)


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
        raise RewrittenError(
            "chat: this chat template rewrites earlier turns when later ones follow, "
            "so tokens that were sampled would change; send the messages without token "
            "ids, to have all of them written again"
        )
    asked = render_text(tokenizer, before[:-1], options) if before[1:] else ""
    # The prompt may hold text that a finished turn has not, such as <think>.
    begin = len(asked) if kept.startswith(asked) else 0
    end = spans.answer_end(kept, tokenizer.stop_tokens, begin)
    turn, content = kept[begin:end], row_of(before[-1]).get("content")
    # Is the space at the end the answer's own, or the template's, as in Llama 2?
    own = isinstance(content, str) and content[-1:].isspace()
    return longer[end:], "" if own else turn[len(turn.rstrip()) :]


def timed(tokenizer: Tokenizer, options: Options) -> Options:
    """Fixes the time, because several renderings are compared."""
    return replace(options, now=options.now or tokenizer.now or datetime.datetime.now())


def rendered(
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
    if options.adapt:
        rows = taken_by(source, tokenizer.special_tokens, rows)
    try:
        variables = {
            **tokenizer.special_tokens,
            **tokenizer.variables,
            **templates.plain(options.variables, "variables"),
            "messages": [
                templates.plain(_in_parts(row), f"messages[{i}]")
                for i, row in enumerate(rows)
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


def row_of(message: MessageLike | Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it.

    It has no None, and reasoning under each of its names. Its pictures are in its text
    until the template is run (`rendered`), so it can be marked, cut and compared.

    Raises:
        TokenizerError: it has no role.
    """
    if isinstance(message, Mapping):
        entries = dict(message)
    elif isinstance(message, Message):
        entries = message.to_json()
        if message.pictures:
            entries["pictures"] = message.pictures
        if message.tool_calls:
            entries["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
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
        given = dict.fromkeys(REASONING, reasoning[0])
        row = {**given, **row, "reasoning_content": reasoning[0]}
    return row


def text_of(row: Mapping[str, Any]) -> str:
    """The text of a message, for a tokenizer without a template."""
    if not isinstance(row.get("content"), str):
        raise TokenizerError(
            "chat: without a chat template a message is its text; "
            f"got the content {row.get('content')!r}"
        )
    return row["content"]


def _in_parts(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for a template: with pictures, its content is a list of parts."""
    if not row.get("pictures"):
        return row
    first, *texts = row["content"].split(PICTURE)
    parts = [{"type": "text", "text": first}]
    for text in texts:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    kept = [part for part in parts if part.get("text") != ""]
    others = {name: value for name, value in row.items() if name != "pictures"}
    return {**others, "content": kept}


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
