"""The tokens between a served answer and the next, without rendering served turns.

A chat template may write an earlier answer differently than the model did: other spaces
in a tool call, no reasoning in earlier turns. A prompt that is rendered again would
then not begin with the tokens that were served, and to train on these would be to train
on another prompt. So the served tokens stay, and only what follows them is rendered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post.data import chat
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import Message

__all__ = ["bridge"]

# Stands for the answer; no template writes it itself.
MARK = "\ufdd0answer\ufdd0"


def bridge(
    tokenizer: Tokenizer,
    before: Sequence[Message | Mapping[str, Any]],
    messages: Sequence[Message | Mapping[str, Any]],
    options: chat.Options,
    *,
    stop_id: int | None,
) -> tuple[int, ...] | None:
    r"""Token ids that follow a served answer, up to the start of the next one.

    First as `chat.render_reply`, which needs a template that leaves earlier turns as
    they are. Otherwise the conversation is rendered with a mark as the answer, and what
    stands behind the mark follows: the end of the turn and the new messages.

    Args:
        tokenizer: the model's.
        before: the conversation, the served answer last.
        messages: the new messages, at least one.
        options: inputs of the template.
        stop_id: the stop token that was sampled; None if the answer has none.

    Returns:
        The tokens; None if the template shows no place where the answer ends.

    >>> tokenizer = Tokenizer.train(["1+2=3"])
    >>> said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    >>> new = [{"role": "user", "content": "+1="}]
    >>> found = bridge(tokenizer, said, new, chat.Options(), stop_id=None)
    >>> tokenizer.backend.decode(found, skip_special_tokens=False)
    '<|eos|>+1='
    """
    chat.require_eyes(tokenizer, messages)
    try:
        return chat.render_reply(tokenizer, before, messages, options, stop_id=stop_id)
    except TokenizerError:
        if not tokenizer.chat_templates:
            return None
    marked = {"role": "assistant", "content": MARK}
    try:
        text = chat.render_text(tokenizer, [*before[:-1], marked, *messages], options)
    except TokenizerError:
        # Such as a template that wants tool results to follow a call.
        return None
    parts = text.split(MARK)
    if len(parts) != 2 or not parts[1].strip():
        return None
    ids = tokenizer.encode(parts[1])
    if stop_id is None:
        # A turn that was cut gets its end as context.
        return chat.shown(tokenizer, ids, messages)
    end = tokenizer.backend.token_to_id(tokenizer.turn_end)
    if ids[:1] != (end,):
        # The answer may end in the text before the next turn.
        return None
    return chat.shown(tokenizer, ids[1:] if stop_id == end else ids, messages)
