"""Finds the token that ends a turn of the assistant in a chat template.

It may differ from the checkpoint's end-of-sequence token. A base model ends documents
with one token (Qwen 2.5 with <|endoftext|>), while its chat template ends turns with
another, such as ChatML's <|im_end|>.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_post.data import templates
from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = ["find_turn_end"]

# Contents that cannot be part of a template's own text.
QUESTION, ANSWER, NEXT = "\ufdd0ask\ufdd0", "\ufdd0answer\ufdd0", "\ufdd0next\ufdd0"

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Kind(NamedTuple):
    """Features of the test conversation that some templates require."""

    system: bool  # a system message
    parts: bool  # contents that are lists
    tools: bool


KINDS = [Kind(*chosen) for chosen in itertools.product((False, True), repeat=3)]


def find_turn_end(
    template: str, special_tokens: Mapping[str, str], tokens: Collection[str]
) -> str:
    r"""Finds the token that the assistant has to produce at the end of its answer.

    Renders a short conversation twice, with and without a question after the answer.
    The result is the first of these that exists:

    1. the last of the tokens with which the text after the answer begins in both
       renderings, e.g. ChatML's <|im_end|>;
    2. the first token after the last answer, e.g. <|return|> of GPT-OSS, whose earlier
       turns end with <|end|>, a token that also occurs inside a turn;
    3. the first token of the next turn, e.g. GLM's <|user|>, if no token ends a turn.

    Args:
        template: the Jinja source.
        special_tokens: variables of the template, such as "eos_token".
        tokens: the tokens that are matched whole in a text.

    Raises:
        TokenizerError: the template fails or writes no answer, or no token follows it.

    >>> template = "{% for m in messages %}{{ m.content }}<end>\n{% endfor %}"
    >>> find_turn_end(template, {}, ["<begin>", "<end>"])
    '<end>'
    """
    last, earlier = _what_follows(template, special_tokens)
    named = sorted(filter(None, tokens), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, named)) or r"(?!)")
    closing, between = pattern.findall(last), pattern.findall(earlier)
    shared = 0
    while shared < min(len(closing), len(between)):
        if closing[shared] != between[shared]:
            break
        shared += 1
    if shared:
        return closing[shared - 1]
    if closing or between:
        return (closing or between)[0]
    raise TokenizerError(
        "chat: the chat template ends the assistant's turn with "
        f"{last or earlier!r:.80}, in which there is no special token of "
        "tokenizer.json, so a model cannot learn to stop there; write "
        "{{ eos_token }} after the assistant's content in the template, or use a "
        "tokenizer that has the template's tokens"
    )


def _what_follows(template: str, special_tokens: Mapping[str, str]) -> tuple[str, str]:
    """The text after the last answer, and the text between an answer and a question.

    The latter is empty if the template does not allow another question.
    """
    failure: TokenizerError | None = None
    asked = (("user", QUESTION), ("assistant", ANSWER))
    for kind in KINDS:
        try:
            whole = _written(template, special_tokens, asked, kind)
        except TokenizerError as error:
            failure = failure or error
            continue
        if ANSWER not in whole:
            continue
        last = whole.rpartition(ANSWER)[2]
        try:
            more = (*asked, ("user", NEXT))
            before, asked_again, _ = _written(
                template, special_tokens, more, kind
            ).rpartition(NEXT)
        except TokenizerError:
            return last, ""
        _, answered, earlier = before.rpartition(ANSWER)
        return last, earlier if asked_again and answered else ""
    raise TokenizerError(
        "chat: the end of the assistant's turn cannot be found, because the chat "
        f"template does not write one: {failure or 'it leaves the content out'}; give "
        "the model a template that writes a user's message and the assistant's answer"
    ) from failure


def _written(
    template: str,
    special_tokens: Mapping[str, str],
    turns: Sequence[tuple[str, str]],
    kind: Kind,
) -> str:
    if kind.system:
        turns = [("system", "Be brief."), *turns]
    messages = [
        {
            "role": role,
            "content": [{"type": "text", "text": text}] if kind.parts else text,
        }
        for role, text in turns
    ]
    variables: dict[str, Any] = {
        **special_tokens,
        "messages": messages,
        "tools": [TOOL] if kind.tools else None,
        "documents": None,
        "add_generation_prompt": False,
    }
    return templates.run(template, variables).text
