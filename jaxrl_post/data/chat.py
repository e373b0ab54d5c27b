"""Conversations to token ids."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

__all__ = ["Turn", "render", "render_reply"]


@runtime_checkable
class Turn(Protocol):
    """A message: who speaks, and what."""

    @property
    def role(self) -> str:
        """Such as "user"."""
        ...

    @property
    def content(self) -> str:
        """The text."""
        ...


def render(tokenizer: Tokenizer, messages: Sequence[Turn]) -> tuple[int, ...]:
    """Token ids of a conversation, up to where the assistant's answer begins.

    With a chat template that template decides. Without one the contents follow one
    another, which is what a base model and the built-in tasks use.

    Args:
        tokenizer: with or without a chat template.
        messages: the conversation so far, at least one message.

    Raises:
        TokenizerError: the template needs jinja2, which is not installed, or fails.

    >>> from jaxrl_post.envs import Message
    >>> tokenizer = Tokenizer.train(["1+2="])
    >>> tokenizer.decode(render(tokenizer, [Message("user", "1+2=")]))
    '1+2='
    """
    if tokenizer.chat_template is None:
        text = "".join(message.content for message in messages)
        return tokenizer.encode(text, special=True)
    # The template writes BOS itself.
    return tokenizer.encode(_apply(tokenizer, messages, answer=True))


def render_reply(
    tokenizer: Tokenizer, before: Sequence[Turn], messages: Sequence[Turn]
) -> tuple[int, ...]:
    """Token ids that follow the assistant's turn when others speak.

    The assistant's own tokens are kept as it produced them, so only what is new is
    tokenised: the text of the longer conversation from where the assistant's turn ended
    in the shorter one. A sampled turn ends with its stop token; what a template writes
    after it, such as ChatML's newline, is new.

    Args:
        tokenizer: with or without a chat template.
        before: the conversation, the assistant's turn last.
        messages: what is said next, at least one message.

    Raises:
        TokenizerError: the template renders earlier turns differently once later ones
            follow.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode("".join(message.content for message in messages))
    shorter = _apply(tokenizer, before, answer=False)
    longer = _apply(tokenizer, [*before, *messages], answer=True)
    if not longer.startswith(shorter):
        raise TokenizerError(
            "chat: this chat template rewrites earlier turns when later ones follow, "
            "so tokens that were sampled would change; use it for single-turn tasks "
            "only"
        )
    return tokenizer.encode(longer[_turn_end(tokenizer, shorter) :])


def _turn_end(tokenizer: Tokenizer, text: str) -> int:
    """Index after the stop token of the last turn; of the end where there is none."""
    stops = [tokenizer.backend.id_to_token(index) for index in tokenizer.stop_ids]
    ends = [text.rindex(stop) + len(stop) for stop in stops if stop and stop in text]
    end = max(ends, default=len(text))
    return len(text) if text[end:].strip() else end


def _apply(tokenizer: Tokenizer, messages: Sequence[Turn], *, answer: bool) -> str:
    assert tokenizer.chat_template is not None
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise TokenizerError(
            "chat: this tokenizer has a chat template, which needs jinja2; "
            "pip install 'jaxrl_post[chat]'"
        ) from error
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=[{"role": m.role, "content": m.content} for m in messages],
            add_generation_prompt=answer,
            **tokenizer.special_tokens,
        )
    except TemplateError as error:
        raise TokenizerError(f"chat: the chat template failed: {error}") from error
