r"""Extracts the final answer of a response to a math problem."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from jaxrl_post.envs.tasks.blocks import after_thoughts
from jaxrl_post.envs.tasks.mathematics.text import (
    NUMBER,
    WORDS,
    cleaned,
    plain_characters,
    undecorated,
)

__all__ = ["Extraction", "final_answer", "is_number", "require_extraction"]

type Extraction = Literal["flexible", "strict"]

# Text that makes a number the beginning of a longer answer: 4\sqrt{2}, 5!, 3 or 5.
_GOES_ON = re.compile(
    r"[!\w({]|\s*(?:[\^_]|[-+*/:=<>]\s*[\d.\\(]|\\(?!text|math|mbox)|[,;]\s*[-+\\.(]?\d)"
    r"|\s+(?:\d+/\d|\d{3}(?!\d))|\s+(?:or|and|to)\s+[-+\\.(]?\d"
    r"|\s*(?:\\text\s*\{)?\s*(?:hundred|thousand|(?:m|b|tr)illion|dozen|percent of)",
    re.ASCII | re.IGNORECASE,
)
# An answer that does not begin with a number, as \frac{1}{2}, +5 or (1,2).
_FORMULA = re.compile(r"\+?[\d.]|-?\\(?!boxed|fbox)|[(\[]\s*[-+\d.\\]")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
# TeX boxes one token then, which is hardly meant.
_NO_BRACE = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])(?!\s*\{)")
_BRACE = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\\\|\\[{}]|[{}]")

# Longer than any real answer; bounds the time that math-verify spends on a response.
_LONGEST_ANSWER = 200
# A line behind the mark, or the one below it, as far as an answer may go.
_MARK = re.compile(r"####(?=\s{0,99}([^\n]{0,400}))")


def final_answer(text: str, *, extraction: Extraction = "strict") -> str | None:
    r"""Extracts the one answer of a response that is graded.

    The last marked answer counts: a number after "####", or the content of
    `\boxed{...}`. So a response may correct itself, but gains nothing from listing
    candidates. A last box that does not close leaves no marked answer. What stands
    before the last "</think>" is no answer. Without a marked one,
    "strict" returns None, "flexible" the last number of the text. Dollar and percent
    signs, Markdown's asterisks, thousands separators and LaTeX spaces are dropped:
    "$1,080" is "1080", and "50%" is "50", never 0.5. Commas in brackets stay, as
    `mathematics.reading.equal` says.

    Args:
        text: the response.
        extraction: "strict" or "flexible".

    Returns:
        A number ("1080", "-3.50", "3/4") or the LaTeX of an answer; None if there is
        no answer, or if the answer has more than 200 characters.

    Raises:
        ValueError: if `extraction` is neither "strict" nor "flexible".

    >>> final_answer("She earns $1,080.\n#### 1,080")
    '1080'
    >>> final_answer(r"Not \boxed{5}; it is \boxed{7}.")
    '7'
    >>> final_answer(r"Not \boxed{5}; it is \boxed{(10,200)}.")
    '(10,200)'
    >>> final_answer("So 30 + 20 gives 50%.") is None
    True
    >>> final_answer("So 30 + 20 gives 50%.", extraction="flexible")
    '50'
    """
    require_extraction(extraction)
    text = plain_characters(after_thoughts(text))
    start, answer = _last_box(text)
    for position, marked in _marked(text):
        if position > start:
            start, answer = position, marked
    if answer is None and extraction == "flexible":
        for number in NUMBER.finditer(undecorated(text)):
            answer = number[0]
    return answer if answer is None or len(answer) <= _LONGEST_ANSWER else None


def _marked(text: str) -> Iterator[tuple[int, str]]:
    """Positions and answers of the marks "####" that a number or a formula follows."""
    for mark in _MARK.finditer(text):
        line = undecorated(mark[1].strip())
        if (number := NUMBER.match(line)) is not None:
            whole = _GOES_ON.match(line, number.end()) is None
            yield mark.start(), number[0] if whole else cleaned(line)
        elif _FORMULA.match(line) and not WORDS.search(_COMMAND.sub("", line)):
            yield mark.start(), cleaned(line)


def _last_box(text: str) -> tuple[int, str | None]:
    r"""Position and content of the last \boxed{...}; None if it does not close."""
    last, content = -1, None
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{" or len(brace[0]) > 2:
            open_braces.append(brace)
        elif brace[0] == "}" and open_braces:
            opening = open_braces.pop()
            if len(opening[0]) > 1 and opening.start() > last:
                last = opening.start()
                content = text[opening.end() : brace.start()]
    for opening in open_braces:
        if len(opening[0]) > 1 and opening.start() > last:
            last, content = opening.start(), None
    for bare in _NO_BRACE.finditer(text, max(last, 0)):
        last, content = bare.start(), None
    if content is None or len(content) > 10 * _LONGEST_ANSWER:
        return last, None
    return last, cleaned(content) or None


def is_number(text: str) -> bool:
    """Whether a text is one number; signs and separators as in "$1,080" are ignored."""
    return NUMBER.fullmatch(undecorated(text).strip()) is not None


def require_extraction(extraction: str) -> None:
    """Raises ValueError unless `extraction` is "flexible" or "strict"."""
    if extraction not in ("flexible", "strict"):
        raise ValueError(
            f"extraction must be 'flexible' or 'strict', got {extraction!r}"
        )
