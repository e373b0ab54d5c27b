"""Renders the messages of a request to the tokens of the prompt."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_post.data import chat
from jaxrl_post.data.call_forms import calls_of
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.serve.calls import ApiError
from jaxrl_post.serve.fields import ChatMessage, Tool, text_of

__all__ = ["messages_of", "prompt_of", "tools_of"]

# Fields of an earlier answer that say what was sampled; no template reads them.
SAMPLED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them.

    Parts of text are joined, arguments of calls become objects, a missing content is
    an empty one, and a developer is a system.

    Raises:
        ApiError: a part that is no text.
    """
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: ChatMessage, place: int) -> dict[str, Any]:
    row = message.model_dump(exclude_none=True, exclude=set(SAMPLED))
    row["content"] = _text(message.content, place)
    if row["role"] == "developer":
        row["role"] = "system"
    if calls := calls_of(row.pop("tool_calls", ())):
        row["tool_calls"] = calls
    return row


def _text(content: str | list[dict[str, Any]] | None, place: int) -> str:
    try:
        return text_of(content or "")
    except ValueError as error:
        raise ApiError(
            400, f"messages[{place}].content: {error}", param="messages"
        ) from error


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
        check: as `chat.render`; of a text that follows no served tokens.

    Raises:
        ApiError: the template refuses the conversation, or rewrites earlier turns.
    """
    rows = messages_of(messages)
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
        before = messages[place].prompt_token_ids or []
        stop_id = said[-1] if said[-1] in tokenizer.stop_ids else None
        if last:
            # The answer itself is continued, so it has not ended.
            return (*before, *(said if stop_id is None else said[:-1]))
        after = chat.render_reply(
            tokenizer,
            rows[: place + 1],
            rows[place + 1 :],
            options,
            stop_id=stop_id,
            continue_final=continue_final,
            prompt=prompt,
        )
        return (*before, *said, *after)
    except TokenizerError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error
