"""Scores a short answer by its words: SQuAD's F1 and exact match.

References:
    Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text",
    arXiv:1606.05250.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

__all__ = ["token_f1", "words"]

_DROPPED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def words(text: str) -> list[str]:
    """The words that are compared: lower case, without articles and punctuation.

    Punctuation is ASCII's. Words are separated by white space, so a text in
    Chinese or Japanese is one word.

    >>> words("The U.S. Senate!")
    ['us', 'senate']
    """
    return _ARTICLES.sub(" ", text.lower().translate(_DROPPED)).split()


def token_f1(said: str, accepted: Sequence[str]) -> tuple[float, bool]:
    """The F1 of an answer's words with the accepted text that fits best.

        precision = common / words said      recall = common / words accepted
        F1 = 2 precision recall / (precision + recall)

    `common` counts a word as often as both have it.

    Args:
        said: the answer.
        accepted: at least one text.

    Returns:
        The largest F1, in [0, 1], and whether the words equal an accepted text's, in
        order.

    >>> token_f1("the Eiffel tower in Paris", ["Eiffel Tower", "Tour Eiffel"])
    (0.6666666666666666, False)
    """
    mine = words(said)
    theirs = [words(each) for each in accepted]
    return max(_f1(mine, each) for each in theirs), mine in theirs


def _f1(mine: list[str], theirs: list[str]) -> float:
    common = (Counter(mine) & Counter(theirs)).total()
    # Equal to the formula above; two empty answers are equal.
    return 2 * common / (len(mine) + len(theirs)) if mine or theirs else 1.0
