r"""Reads the LaTeX of an answer, all of it or nothing, and compares answers.

math-verify compares what was read. Its own `parse` is not used: where it cannot read a
text it takes a part of it, such as 4 of `4\sqrt(2)`, and it measures time on the clock,
so that a busy machine would decide what is right.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from jaxrl_post.envs.processor_time import processor_time
from jaxrl_post.envs.tasks.mathematics.text import (
    NUMBER,
    WORDS,
    cleaned,
    without_unit,
)

__all__ = ["equal", "require_library"]

# Seconds of processor time to compare two answers, which takes milliseconds.
_COMPARING_S = 2.0

# As math-verify has them: decimal places of a decimal number that are compared, and
# digits of other numbers.
_PLACES = 6
_DIGITS = 15
# Relative difference of a decimal number: six places say nothing of 1e-7.
_CLOSE = 1e-5
# And of the two sides of `\\approx`.
_ABOUT = 0.01

_FRACTION = re.compile(r"(?<![\w.])(\d+) +(\d+)/(\d+)(?![\w.])")
_DIGITS_ONLY = re.compile(r"[\d.,]+$")
_BARE = re.compile(r"\d|[({]+[\d./]+[)}]+$")
# The library leaves these out before it reads.
_LEFT_OUT = re.compile(r"\\[lcvd]?dots|\.\.|['\"]")
# What a subscript or a power of one character may stand in.
_BRACES = re.compile(r"([_^])(?:\{\s*(\w)\s*\}|(\w))")
_ROOT = re.compile(r"\\?sqrt\s*\(([^()]*)\)")
# A number with an exponent as JSON writes it, alone or as an element.
_EXPONENT = re.compile(
    r"(?:(?<=[(\[{,;])|^)(\s*[-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d+)"
    r"(?=\s*(?:$|[)\]},;\\]))"
)
# Kinds of the parser's tokens whose text says more than their kind.
_SAYING = (
    "NUMBER",
    "E_NOTATION",
    "PERCENT_NUMBER",
    "LETTER_NO_E",
    "GREEK_CMD",
    "OTHER_SYMBOL_CMD",
    "SYMBOL",
    "VARIABLE",
    "ACCENT",
)


def equal(reference: str, answer: str) -> bool:
    r"""Whether two answers are equal.

    They are if they are the same text, or the same words but for capitals, or if both
    can be read to their end, as a number or as LaTeX, and math-verify finds what they
    say equal. Units at the end do not count.

    A comma between groups of three digits belongs to the number, as in "1,080". In
    brackets it separates, so (10,200) has two elements, unless a group begins with 0,
    as no element does: (1,000, 2,500) has two as well.

    Args:
        reference: a number, or LaTeX.
        answer: a number, or LaTeX.

    Raises:
        TimeoutError: it takes too much processor time to tell.
        ModuleNotFoundError: if the extra `math` is not installed.

    >>> equal("(0,100)", r"\left( 0, 100 \right)"), equal("10200", "(10,200)")
    (True, False)
    >>> equal("4", r"4\sqrt(2)"), equal(r"4\sqrt{2}", r"4\sqrt(2)")
    (False, True)
    """
    require_library()
    mine, theirs = cleaned(reference), cleaned(answer)
    if _spelled(mine) == _spelled(theirs):
        return bool(mine)
    if WORDS.fullmatch(mine) and WORDS.fullmatch(theirs):
        return mine.casefold() == theirs.casefold()
    with processor_time(_COMPARING_S, "comparing an answer"):
        left, right = _read(mine), _read(theirs)
        return left is not None and right is not None and _same(left, right)


def _spelled(text: str) -> str:
    return " ".join(_BRACES.sub(r"\1\2\3 ", text).split())


def _same(left: Any, right: Any) -> bool:
    from math_verify.grader import sympy_expr_eq

    if not sympy_expr_eq(left, right, _PLACES, _DIGITS):
        return False
    import sympy

    numbers = [each for each in (left, right) if isinstance(each, sympy.Expr)]
    if len(numbers) < 2 or not any(each.has(sympy.Float) for each in numbers):
        return True
    if not all(each.is_number for each in numbers):
        return True
    return bool(abs(left - right) <= _CLOSE * max(abs(left), abs(right)))


def _read(text: str) -> Any:
    """What a cleaned text says; None unless it can be read to its end."""
    import sympy

    text = without_unit(text)
    if NUMBER.fullmatch(text):
        above, slash, below = text.partition("/")
        whole = sympy.Integer if above.lstrip("-").isdigit() else sympy.Float
        return whole(above) / sympy.Rational(below) if slash else whole(above)
    text = _FRACTION.sub(r"\1\\frac{\2}{\3}", text)
    if _LEFT_OUT.search(text):
        return None
    text = _EXPONENT.sub(r"\1\\times10^{\2}", _ROOT.sub(r"\\sqrt{\1}", text))
    try:
        return _reader()(text)
    except MemoryError:
        raise
    # Whatever the parser raises, it has not read the text.
    except Exception:
        return None


def require_library() -> None:
    """Imports math-verify.

    Raises:
        ModuleNotFoundError: if the extra `math` is not installed.
    """
    try:
        # Not at the top: it imports sympy, which only grading needs.
        import math_verify  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "answers are graded with math-verify, and there is no module "
            f"{error.name!r}: "
            "pip install 'jaxrl_post[math]'",
            name=error.name,
        ) from error


@functools.cache
def _reader() -> Callable[[str], Any]:
    """Makes the function that reads LaTeX: its classes need the library."""
    from antlr4.CommonTokenFactory import CommonTokenFactory
    from antlr4.Token import CommonToken
    from latex2sympy2_extended import latex2sympy2
    from latex2sympy2_extended.antlr_parser import PSParser
    from math_verify.grader import should_treat_as_complex

    form = latex2sympy2.NormalizationConfig(
        malformed_operators=True, nits=True, boxed="none"
    )
    saying = {getattr(PSParser, name) for name in _SAYING}

    class Token(CommonToken):
        """Knows whether its text was asked for."""

        asked = False

        @property
        def text(self) -> Any:
            self.asked = True
            return super().text

    class Tokens(CommonTokenFactory):
        def create(self, source: Any, type: int, text: Any, *place: int) -> Token:  # noqa: A002
            *span, line, column = place
            token = Token(source, type, *span)
            token.line, token.column = line, column
            return token

    class Reader(latex2sympy2._Latex2Sympy):
        """Reads LaTeX; raises unless all of it is in what it returns."""

        def create_parser(self, latex_str: str) -> Any:
            parser = super().create_parser(latex_str)
            self.stream: Any = parser.getTokenStream()
            self.stream.tokenSource._factory = Tokens()
            return parser

        def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
            pair = [self.rule2text(each) for each in arr[i : i + 2]]
            # The library adds them, as in 2\\frac{1}{2}.
            if len(pair) == 2 and _DIGITS_ONLY.match(pair[0]) and _BARE.match(pair[1]):
                raise ValueError("two numbers side by side")
            return super().convert_postfix_list(arr, i)

        def convert_relation(self, rel: Any) -> Any:
            found = super().convert_relation(rel)
            # The library keeps one side of what is said to be about equal.
            if rel.APPROX():
                sides = [super().convert_relation(rel.relation(i)) for i in (0, 1)]
                near = [complex(side) for side in sides if side.is_number]
                if len(near) > 1 and abs(near[0] - near[1]) > _ABOUT * abs(near[0]):
                    raise ValueError("the two sides are not about equal")
            return found

        def read(self, text: str) -> Any:
            found = self.parse(text)
            for token in self.stream.tokens:
                if token.type in saying and not token.asked:
                    raise ValueError(f"the library left out {token.text!r}")
            return found

    def read(text: str) -> Any:
        latex = latex2sympy2.normalize_latex(text, form)
        return Reader(is_real=not should_treat_as_complex(latex)).read(latex)

    return read
