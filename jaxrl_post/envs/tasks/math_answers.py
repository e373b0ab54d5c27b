r"""Extracts the final answer of a response to a math problem, and compares answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

__all__ = ["Extraction", "equal", "final_answer", "is_number", "require_extraction"]

type Extraction = Literal["flexible", "strict"]

# Characters that surround or group the digits of a number without changing its value.
_DECORATION = re.compile(
    r"\\[,!;: ]|(?<=\d)\{,\}(?=\d)|(?<=\d),(?=\d{3}(?!\d))"
    # Kept between two digits: "*" is a product there, "$" or "%" separates two amounts.
    r"|(?<!\d)(?:\\?[$%]|\*+)|(?:\\?[$%]|\*+)(?!\d)",
    re.ASCII,
)
_UNSIGNED = r"(?:\d+(?:\.\d+)?|\.\d+)"
# A minus after a digit, a letter or a closing bracket subtracts: "10-5" ends with "5".
_NUMBER = rf"(?:(?<![\w)\]}}])-)?{_UNSIGNED}(?:/{_UNSIGNED})?"
_PLAIN = re.compile(_NUMBER, re.ASCII)
_MARKED = re.compile(rf"####\s*({_NUMBER})", re.ASCII)
_BRACE = re.compile(r"\\boxed\{|[{}]")

# Longer than any real answer; bounds the time that math-verify spends on a response.
_LONGEST_ANSWER = 200


def final_answer(text: str, *, extraction: Extraction = "strict") -> str | None:
    r"""Extracts the one answer of a response that is graded.

    The last marked answer counts: a number after "####", or the content of
    `\boxed{...}`. So a response may correct itself, but gains nothing from listing
    candidates. Without a mark, "strict" returns None, "flexible" the last number of the
    text. Dollar and percent signs, Markdown's asterisks, thousands separators and LaTeX
    spaces are dropped: "$1,080" is "1080", and "50%" is "50", never 0.5.

    Args:
        text: the response.
        extraction: "strict" or "flexible".

    Returns:
        A number ("1080", "-3.50", "3/4") or the LaTeX of a box; None if there is no
        answer, or if the answer has more than 200 characters.

    Raises:
        ValueError: if `extraction` is neither "strict" nor "flexible".

    >>> final_answer("She earns $1,080.\n#### 1,080")
    '1080'
    >>> final_answer(r"Not \boxed{5}; it is \boxed{7}.")
    '7'
    >>> final_answer("So 30 + 20 gives 50%.") is None
    True
    >>> final_answer("So 30 + 20 gives 50%.", extraction="flexible")
    '50'
    """
    require_extraction(extraction)
    # Typeset text has the minus sign U+2212, but the patterns expect "-".
    text = _DECORATION.sub("", text.replace("\N{MINUS SIGN}", "-"))
    start, answer = _last_box(text)
    for marked in _MARKED.finditer(text):
        if marked.start() > start:
            start, answer = marked.start(), marked[1]
    if answer is None and extraction == "flexible":
        for number in _PLAIN.finditer(text):
            answer = number[0]
    return answer if answer is None or len(answer) <= _LONGEST_ANSWER else None


def _last_box(text: str) -> tuple[int, str | None]:
    r"""Position and content of the last \boxed{...} whose braces balance."""
    last, content = -1, None
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening[0] != "{" and opening.start() > last:
                last = opening.start()
                content = text[opening.end() : brace.start()].strip()
    return last, content or None


def equal(reference: str, answer: str) -> bool:
    """Whether math-verify finds two answers equal.

    Args:
        reference: a number, or LaTeX without dollar signs.
        answer: a number, or LaTeX without dollar signs.

    Raises:
        ModuleNotFoundError: if the extra `math` is not installed.
    """
    parse, verify = _math_verify()
    return bool(verify(parse(_expression(reference)), parse(_expression(answer))))


def is_number(text: str) -> bool:
    """Whether a text is one number; signs and separators as in "$1,080" are ignored."""
    return _PLAIN.fullmatch(_DECORATION.sub("", text).strip()) is not None


def _expression(text: str) -> str:
    # Plain numbers skip the LaTeX parser: it is slower, and parses "3/4." differently.
    return text if _PLAIN.fullmatch(text) else f"${text}$"


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        # Not at the top: it imports sympy, which only grading needs.
        import math_verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "answers are graded with math-verify, and there is no module "
            f"{error.name!r}: "
            "pip install 'jaxrl_post[math]'",
            name=error.name,
        ) from error
    return math_verify.parse, math_verify.verify


def require_extraction(extraction: str) -> None:
    """Raises ValueError unless `extraction` is "flexible" or "strict"."""
    if extraction not in ("flexible", "strict"):
        raise ValueError(
            f"extraction must be 'flexible' or 'strict', got {extraction!r}"
        )
