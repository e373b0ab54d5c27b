"""Renders the messages of a request to the tokens of the prompt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.data import chat
from jaxrl_post.data.call_forms import calls_of
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.pictures import Eyes, PictureError, Shown
from jaxrl_post.pictures.contents import content_of
from jaxrl_post.pictures.source import bytes_of
from jaxrl_post.sampler.requests import MOST_INT
from jaxrl_post.serve.calls import ApiError
from jaxrl_post.serve.fields import ChatMessage, Tool, text_of

__all__ = ["messages_of", "prompt_of", "tools_of", "with_pictures"]

# Fields of an earlier answer that say what was sampled; no template reads them.
SAMPLED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def messages_of(
    messages: Sequence[ChatMessage], eyes: Eyes | None, most: int
) -> list[dict[str, Any]]:
    """Messages as chat templates read them.

    Parts of text are joined, arguments of calls become objects, a missing content is
    an empty one, and a developer is a system. Pictures are data: URLs; their headers
    are read, and nothing is decoded.

    Args:
        messages: of a request.
        eyes: of the model; None if it reads text alone.
        most: tokens that pictures may have together.

    Raises:
        ApiError: a part that is no text and, for a model that sees, no picture; a
            picture of the assistant; pictures that are too large.
    """
    found = [_message(message, place, eyes) for place, message in enumerate(messages)]
    if eyes is None:
        return found
    count = 0
    for place, row in enumerate(found):
        for picture in row.get("pictures", ()):
            try:
                count += eyes.num_tokens(picture)
            except PictureError as error:
                raise _refused(place, error) from error
    if count > most:
        raise ApiError(
            400,
            f"This model's maximum context length is {most} tokens. However, your "
            f"pictures have {count} tokens. Please send fewer or smaller ones.",
            code="context_length_exceeded",
        )
    return found


def _message(message: ChatMessage, place: int, eyes: Eyes | None) -> dict[str, Any]:
    row = message.model_dump(exclude_none=True, exclude={*SAMPLED, "pictures"})
    row["content"], pictures = _content(message.content, place, eyes)
    if pictures:
        if row["role"] == "assistant":
            error = PictureError("an answer is text alone; send pictures as the user")
            raise _refused(place, error)
        row["pictures"] = pictures
    if row["role"] == "developer":
        row["role"] = "system"
    if calls := calls_of(row.pop("tool_calls", ())):
        row["tool_calls"] = calls
    return row


def _content(
    content: str | list[dict[str, Any]] | None, place: int, eyes: Eyes | None
) -> tuple[str, tuple[bytes, ...]]:
    try:
        if eyes is None or not isinstance(content, list):
            return text_of(content or ""), ()
        most = eyes.limits.bytes
        return content_of(content, lambda source: _picture(source, most))
    except ValueError as error:
        raise _refused(place, error) from error


def _picture(source: bytes | str | None, most: int) -> bytes:
    if source is None:
        raise PictureError("has no picture; send a data: URL")
    return bytes_of(source, None, most)


def _refused(place: int, error: ValueError) -> ApiError:
    return ApiError(400, f"messages[{place}].content: {error}", param="messages")


def tools_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates read them; None without any."""
    if not tools:
        return None
    return [tool.model_dump(exclude_none=True) for tool in tools]


def prompt_of(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    options: chat.Options,
    *,
    continue_final: bool = False,
    prompt: bool = True,
    most: int = MOST_INT,
    check: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...]:
    """Token ids of a conversation.

    If an answer of the assistant says which tokens it was made of
    (`generation_token_ids`, after `prompt_token_ids`), these come first as they are,
    and only what follows the answer is rendered.

    Args:
        tokenizer: the model's.
        messages: the conversation.
        options: inputs of the template.
        continue_final: as `chat.render`.
        prompt: as `chat.render`.
        most: as `messages_of`.
        check: as `chat.render`; of a text that follows no served tokens.

    Raises:
        ApiError: the template refuses the conversation, or rewrites earlier turns; or
            as `messages_of`.
    """
    rows = messages_of(messages, tokenizer.eyes, most)
    pinned = [
        place
        for place, message in enumerate(messages)
        if message.prompt_token_ids and message.generation_token_ids
    ]
    try:
        last = bool(pinned) and pinned[-1] + 1 == len(messages)
        if not pinned or (last and not continue_final):
            return chat.render(
                tokenizer,
                rows,
                options,
                continue_final=continue_final,
                prompt=prompt,
                check=check,
            )
        place = pinned[-1]
        said = messages[place].generation_token_ids or []
        before = with_pictures(
            tokenizer, messages[place].prompt_token_ids or [], rows[:place]
        )
        stop_id = said[-1] if said[-1] in tokenizer.stop_ids else None
        if last:
            # The answer itself is continued, so it has not ended.
            return Shown.joined(before, said if stop_id is None else said[:-1])
        after = chat.render_reply(
            tokenizer,
            rows[: place + 1],
            rows[place + 1 :],
            options,
            stop_id=stop_id,
            continue_final=continue_final,
            prompt=prompt,
        )
        return Shown.joined(before, said, after)
    except (TokenizerError, PictureError) as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error


def with_pictures(
    tokenizer: Tokenizer, ids: Sequence[int], rows: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    """Token ids of a client, in which the tokens of pictures get their numbers.

    Args:
        tokenizer: the model's.
        ids: with an image token for each token of a picture, as clients get them.
        rows: the messages of these tokens.

    Raises:
        PictureError: there are more or fewer image tokens.
    """
    if tokenizer.eyes is None:
        return tuple(ids)
    pictures = [picture for row in rows for picture in chat.sources(row)]
    return tokenizer.eyes.restored(ids, pictures)
