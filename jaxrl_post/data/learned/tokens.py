"""Tokens of a text of which parts are sampled: none spans the end of a prompt."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from jaxrl_post.data.tokenizer import Tokenizer

__all__ = ["as_sampled"]


def as_sampled(
    tokenizer: Tokenizer, text: str, places: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    r"""Token ids of a text, and the index in the text at which each token begins.

    A sampler tokenises a prompt before it knows how the answer begins. Tokenised as a
    whole, prompt and answer may have a token in common: `<think>\n` and `\n4` have
    `\n\n`. So at each of `places` the ids are those of the text before it, tokenised
    alone, and the text is cut there if the whole has others.

    Args:
        tokenizer: whose tokens these are.
        text: prompts and answers in turn, without the special tokens around it.
        places: where answers begin.

    Raises:
        TextError: as `Tokenizer.encode`.

    >>> tokenizer = Tokenizer.train(["unhappy"], vocab_size=300)
    >>> as_sampled(tokenizer, "unhappy", [])[1]
    (0,)
    >>> ids, begins = as_sampled(tokenizer, "unhappy", [2])
    >>> ids[: begins.index(2)] == tokenizer.encode("un")
    True
    """
    ids, begins = tokenizer.encode_with_begins(text)
    apart = [
        place
        for place in places
        if 0 < place < len(text)
        and not _as_prompted(tokenizer, text, ids, begins, place)
    ]
    if not apart:
        return ids, begins
    ids, begins = tokenizer.encode_with_begins(text[: apart[0]])
    for begin, end in zip(apart, [*apart[1:], len(text)], strict=True):
        more, where = tokenizer.encode_with_begins(text[begin:end], after=True)
        ids = (*ids, *more)
        begins = (*begins, *(begin + place for place in where))
    return ids, begins


def _as_prompted(
    tokenizer: Tokenizer,
    text: str,
    ids: Sequence[int],
    begins: Sequence[int],
    place: int,
) -> bool:
    """Whether a text's tokens before a place are those of the text that ends there."""
    end = bisect_left(begins, place)
    # What follows a token that is matched whole does not depend on what precedes it.
    added, first = tokenizer.added_tokens, max(end - 1, 0)
    while first and ids[first] not in added:
        first -= 1
    begin = begins[first] if first else 0
    return tuple(ids[first:end]) == tokenizer.encode(text[begin:place])
