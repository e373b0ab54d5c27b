"""The interface of a tokenizer that episodes use."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_post.data import chat
from jaxrl_post.data.tokenizer import Tokenizer

__all__ = ["Codec"]


@dataclass(frozen=True)
class Codec:
    """Converts messages to tokens, and sampled tokens to text."""

    tokenizer: Tokenizer

    def render(self, messages: Sequence[chat.Turn]) -> tuple[int, ...]:
        """Tokens of a conversation, up to the start of the assistant's answer."""
        return chat.render(self.tokenizer, messages)

    def reply(
        self,
        before: Sequence[chat.Turn],
        messages: Sequence[chat.Turn],
        *,
        stop_id: int | None,
    ) -> tuple[int, ...]:
        """Tokens between the assistant's sampled turn and its next turn.

        Args:
            before: the conversation, the assistant's turn last.
            messages: the new messages.
            stop_id: the stop token that was sampled; None if the turn has none.
        """
        return chat.render_reply(self.tokenizer, before, messages, stop_id=stop_id)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(tokens)
