"""The interface of a tokenizer that episodes use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.data import chat
from jaxrl_post.data import tools as calls
from jaxrl_post.data.bridges import bridge
from jaxrl_post.data.replies import Reply
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import Message
from jaxrl_post.pictures import PictureError

__all__ = ["Codec"]

type Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Codec:
    """Converts messages to tokens, and sampled tokens to messages.

    Attributes:
        tokenizer: the model's; with its eyes, messages may have pictures
            (`Tokenizer.with_eyes`).
        max_result_tokens: tokens that a tool's result may have; a longer one loses its
            middle.
    """

    tokenizer: Tokenizer
    max_result_tokens: int = 1024

    def render(
        self, messages: Sequence[chat.MessageLike], tools: Tools = ()
    ) -> tuple[int, ...]:
        """Tokens of a conversation, up to the start of the assistant's answer.

        Raises:
            TokenizerError: as `chat.render`.
            PictureError: as `chat.render`; or the last token is a picture's.
        """
        return _open(chat.render(self.tokenizer, messages, chat.with_tools(tools)))

    def reply(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        stop_id: int | None,
    ) -> tuple[int, ...]:
        """Tokens between the assistant's sampled turn and its next turn.

        With tools, what was sampled stays as it is also where the chat template writes
        an earlier turn otherwise, such as without its reasoning.

        Args:
            before: the conversation, the assistant's turn last.
            messages: the new messages.
            tools: the task's tools.
            stop_id: the stop token that was sampled; None if the turn has none.

        Raises:
            chat.RewrittenError: the template writes earlier turns differently now; the
                prompt of the next turn is `render` of all messages.
            TokenizerError: the tokens do not follow from the template.
            PictureError: as `chat.render_reply`; or the last token is a picture's.
        """
        options = chat.with_tools(tools)
        if not tools:
            return _open(
                chat.render_reply(
                    self.tokenizer, before, messages, options, stop_id=stop_id
                )
            )
        messages = calls.shortened(self.tokenizer, messages, self.max_result_tokens)
        found = bridge(self.tokenizer, before, messages, options, stop_id=stop_id)
        if found is None:
            raise TokenizerError(
                "chat: this chat template does not show where an answer ends, so what "
                f"its tools return cannot follow it; got {before[-1]!r:.200}"
            )
        return _open(found)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(tokens)

    def read(
        self, prompt: Sequence[int], said: Sequence[int], tools: Tools = ()
    ) -> Reply:
        """Takes an answer apart into reasoning, text and tool calls.

        Args:
            prompt: token ids before the answer; the last few are enough.
            said: token ids of the answer, without a stop token that ended it.
            tools: the task's tools.
        """
        return calls.read(self.tokenizer, prompt, said, tools)


def _open(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt from whose last token a model can sample the next one."""
    if prompt and prompt[-1] < 0:
        raise PictureError(chat.NO_TEXT_AFTER)
    return prompt
