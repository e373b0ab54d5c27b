"""Warns about prompts that are rendered already, and so would be rendered twice."""

import itertools
import logging
import re
from collections.abc import Iterable

from jaxrl_post.data import chat
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

__all__ = ["Rendered"]

logger = logging.getLogger(__name__)

# A content that no template writes by itself.
PROBE = "\ufdd0"
# Heads of turns that are no words and no single signs, such as [INST].
HEAD = re.compile(r"[^\w\s].{3}", re.DOTALL)


class Rendered:
    """Counts examples whose texts have what the chat template writes around turns.

    These are the special tokens around turns, and the head of a user's turn, such as
    Llama 2's [INST]. Without a template, they are the special tokens around a text.
    Tokens that are not special, such as <think>, may be in an answer.

    Args:
        tokenizer: the model's.

    >>> template = "{% for m in messages %}[INST]{{ m.content }}<|eos|>{% endfor %}"
    >>> found = Rendered(Tokenizer.train(["12"], chat_template=template))
    >>> found.look(["1+1="]), found.look(["[INST]1+1="]), found.look(["2<|eos|>"])
    (False, True, True)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        marks = _marks(tokenizer)
        longest_first = sorted(marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._seen = self._count = 0
        self._first: tuple[int, str] | None = None

    def look(self, texts: Iterable[str]) -> bool:
        """Counts the next example; returns whether it is rendered already."""
        number, self._seen = self._seen, self._seen + 1
        found = next(filter(None, map(self._marks.search, texts)), None)
        if found is None:
            return False
        self._count += 1
        if self._first is None:
            self._first = (number, found.group())
        return True

    def warn(self, what: str) -> None:
        """Logs how many examples there were, and the first, and begins again.

        Args:
            what: the examples, such as "train tasks of gsm8k".
        """
        if self._first is not None:
            number, mark = self._first
            logger.warning(
                "%d of %d %s have %r in their texts (the first is example %d, from "
                "0): they look rendered already, and the chat template renders them "
                "once more; take its tokens out of the texts",
                self._count,
                self._seen,
                what,
                mark,
                number,
            )
        self._seen = self._count = 0
        self._first = None


def _marks(tokenizer: Tokenizer) -> set[str]:
    if not tokenizer.chat_templates:
        around = set(tokenizer.encode(PROBE, special=True))
        return {text for text, id_ in tokenizer.special_ids.items() if id_ in around}
    rows = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
    try:
        text = chat.render_text(tokenizer, rows)
    except TokenizerError:  # an error where an example is rendered
        return set()
    heads = text.split(PROBE)
    special = {*tokenizer.special_ids, *tokenizer.stop_tokens}
    found = {token for token in special if token in text}
    if len(heads) <= len(rows):
        return found
    # The head of a user's turn is the common end of the texts before the first and
    # later turns.
    ends = zip(reversed(heads[0].strip()), reversed(heads[2].strip()), strict=False)
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], ends)
    head = "".join(character for character, _ in shared)[::-1]
    for token in found:
        head = head.replace(token, "")
    # ChatML's head is a token and "user", which any text may have.
    return found | ({head.strip()} if HEAD.match(head.strip()) else set())
