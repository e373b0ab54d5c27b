"""Tokens of a partly sampled text: no token spans the end of a prompt."""

from bisect import bisect_left
from collections.abc import Iterable

from jaxrl_post.data.tokenizer import Tokenizer

__all__ = ["AsSampled"]


class AsSampled:
    r"""The tokens of texts, each prompts and answers in turn, as they are sampled.

    A sampler tokenises a prompt before it knows how the answer begins. Tokenised as a
    whole, prompt and answer may have a token in common: `<think>\n` and `\n4` have
    `\n\n`. So where an answer begins, the ids before it equal the prompt's,
    tokenised alone, and the text is cut there if the whole has others.

    Texts that begin like the one before them, as the turns of a conversation do, are
    tokenised from where they differ.

    Args:
        tokenizer: whose tokens these are.

    >>> tokenizer = Tokenizer.train(["unhappy"], vocab_size=300)
    >>> sampled = AsSampled(tokenizer)
    >>> sampled.encode("unhappy", [])[1]
    (0,)
    >>> ids, begins = sampled.encode("unhappy", [2])
    >>> ids[: begins.index(2)] == tokenizer.encode("un")
    True
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens
        self._longest = max((len(t.content) for t in self._added.values()), default=0)
        # The last text, its tokens and where they begin.
        self._text = ""
        self._ids: tuple[int, ...] = ()
        self._begins: tuple[int, ...] = ()

    def encode(
        self, text: str, places: Iterable[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of a text, and the index in the text at which each token begins.

        Args:
            text: without the special tokens around it.
            places: where answers begin.

        Raises:
            TextError: as `Tokenizer.encode`.
        """
        self._read(text)
        inside = (place for place in places if 0 < place < len(text))
        apart = [place for place in inside if not self._is_prompt(place)]
        if not apart:
            return self._ids, self._begins
        ids, begins = self._tokenizer.encode_with_begins(text[: apart[0]])
        for begin, end in zip(apart, [*apart[1:], len(text)], strict=True):
            more, where = self._tokenizer.encode_with_begins(
                text[begin:end], after=True
            )
            ids = (*ids, *more)
            begins = (*begins, *(begin + place for place in where))
        return ids, begins

    def _read(self, text: str) -> None:
        """Tokenises a text as a whole."""
        ends, before = range(min(len(text), len(self._text)) + 1), self._text
        same = bisect_left(ends, True, key=lambda end: text[:end] != before[:end]) - 1
        # A token that is matched whole may depend on the text after it, too.
        same -= self._longest
        first = self._last_added(bisect_left(self._begins, same))
        kept = self._begins[first] if first else 0
        ids, begins = self._tokenizer.encode_with_begins(text[kept:])
        self._text = text
        self._ids = (*self._ids[:first], *ids)
        self._begins = (*self._begins[:first], *(kept + place for place in begins))

    def _is_prompt(self, place: int) -> bool:
        """Whether the text before a place, tokenised alone, has the same tokens."""
        end = bisect_left(self._begins, place)
        first = self._last_added(end)
        begin = self._begins[first] if first else 0
        ids = self._tokenizer.encode(self._text[begin:place])
        return self._ids[first:end] == ids

    def _last_added(self, end: int) -> int:
        """The last of so many tokens that is matched whole; 0 if there is none.

        The tokens from there on do not depend on what precedes them.
        """
        places = reversed(range(1, end))
        return next((i for i in places if self._ids[i] in self._added), 0)
