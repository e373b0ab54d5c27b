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
    joined,
    without_unit,
)
from jaxrl_post.extras import install

__all__ = ["equal", "require_library"]

# Seconds of processor time to compare two answers, which takes milliseconds.
_COMPARING_S = 2.0

# As math-verify has them: decimal places of a decimal number that are compared, and
# digits of other numbers.
_PLACES = 6
_DIGITS = 15
# Relative difference of a decimal number: six places cannot compare 1e-7.
_CLOSE = 1e-5
# Relative difference of the two sides of `\\approx`.
_ABOUT = 0.01

_FRACTION = re.compile(r"(?<![\w.])(\d+) +(\d+)/(\d+)(?![\w.])")
_DIGITS_ONLY = re.compile(r"[\d.,]+$")
_BARE = re.compile(r"\d|\{+[\d./]+\}+$")
_PROPER = re.compile(r"\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?$")
_MINUS_POWER = re.compile(r"\^-(\d+)")
_RELATION = re.compile(r"[<>]|\\(?:[lg]eq?|[lg]t|leqslant|geqslant)(?![a-zA-Z])")
# The library leaves these out before it reads.
_LEFT_OUT = re.compile(r"\\[lcvd]?dots|\.\.|['\"]")
# Braces around a subscript or a power of one character.
_BRACES = re.compile(r"([_^])(?:\{\s*(\w)\s*\}|(\w))")
_ROOT = re.compile(r"\\?sqrt\s*\(([^()]*)\)")
# A number with an exponent as JSON writes it, alone or as an element.
_EXPONENT = re.compile(
    r"(?:(?<=[(\[{,;=])|^)(\s*[-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d+)"
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

    They are if they are the same text, or the same words except for capitals, or if
    both can be read to their end, as a number or as LaTeX, and math-verify finds what
    they say equal. Units at the end do not count.

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
    kinds = {_kind(mine), _kind(theirs)} - {None}
    if len(kinds) > 1 and not kinds <= {"()", "(]", "[)", "[]", "relation"}:
        return False
    with processor_time(_COMPARING_S, "comparing an answer"):
        left, right = _read(mine), _read(theirs)
        if left is None or right is None:
            return False
        try:
            return _same(left, right)
        except MemoryError:
            raise
        # The library raises where it cannot compare, as of x != 2 with x != 3.
        except Exception:
            return False


def _kind(text: str) -> str | None:
    """Brackets of a list or an interval, or "relation"; None for all else."""
    text = re.sub(r"\\(?:left|right|big|Big)(?![a-zA-Z])", "", text)
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace(" ", "")
    if _RELATION.search(text):
        return "relation"
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "{}"
    if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", text):
        return text[0] + text[-1]
    return None


def _spelled(text: str) -> str:
    return " ".join(_BRACES.sub(r"\1\2\3 ", text).split())


def _same(left: Any, right: Any) -> bool:
    from math_verify.grader import sympy_expr_eq

    if not sympy_expr_eq(left, right, _PLACES, _DIGITS):
        return False
    import sympy

    # Six places cannot compare small numbers, in any position.
    small = [
        sorted(abs(n) for n in each.atoms(sympy.Number) if 0 < abs(n) < _ABOUT)
        for each in (left, right)
        if isinstance(each, sympy.Basic)
    ]
    if len(small) == 2 and len(small[0]) == len(small[1]):
        for one, other in zip(*small, strict=True):
            if abs(one - other) > _CLOSE * max(one, other):
                return False
    numbers = [
        # Such as x = 3.
        each.rhs if isinstance(each, sympy.Eq) and each.lhs.is_Symbol else each
        for each in (left, right)
    ]
    numbers = [each for each in numbers if isinstance(each, sympy.Expr)]
    if len(numbers) < 2 or not any(each.has(sympy.Float) for each in numbers):
        return True
    if not all(each.is_number for each in numbers):
        return True
    one, other = numbers
    return bool(abs(one - other) <= _CLOSE * max(abs(one), abs(other)))


def _read(text: str) -> Any:
    """Parses a cleaned text; None unless it can be read to its end."""
    import sympy

    text = joined(without_unit(text))
    if NUMBER.fullmatch(text):
        above, slash, below = text.partition("/")
        whole = sympy.Integer if above.lstrip("-").isdigit() else sympy.Float
        return whole(above) / sympy.Rational(below) if slash else whole(above)
    text = _FRACTION.sub(r"\1\\frac{\2}{\3}", text)
    if _LEFT_OUT.search(text):
        return None
    text = _EXPONENT.sub(r"\1\\times10^{\2}", _ROOT.sub(r"\\sqrt{\1}", text))
    text = _MINUS_POWER.sub(r"^{-\1}", text)
    try:
        return _reader()(text)
    except MemoryError:
        raise
    # Every error of the parser means that it has not read the text.
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
            f"{install('math')}",
            name=error.name,
        ) from error


@functools.cache
def _reader() -> Callable[[str], Any]:
    """Makes the function that reads LaTeX: its classes need the library."""
    import sympy
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

    class Lexemes(CommonTokenFactory):
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
            self.stream.tokenSource._factory = Lexemes()
            return parser

        def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
            first = self.convert_postfix(arr[i])
            is_factor = isinstance(first, (sympy.Expr, sympy.MatrixBase))
            if i == len(arr) - 1 or not is_factor:
                return super().convert_postfix_list(arr, i)
            text, follows = (self.rule2text(each) for each in arr[i : i + 2])
            if _DIGITS_ONLY.match(text):
                if _BARE.match(follows):
                    raise ValueError("two numbers side by side")
                mixed = _PROPER.match(follows)
                # 2\\frac{1}{2} is two and a half. The library adds other factors too.
                if mixed and int(mixed[1]) < int(mixed[2]):
                    first, i = first + self.convert_postfix(arr[i + 1]), i + 1
                    if i == len(arr) - 1:
                        return first
            rest = self.convert_postfix_list(arr, i + 1)
            if isinstance(first, sympy.MatrixBase) or isinstance(
                rest, sympy.MatrixBase
            ):
                return self.mat_mul_flat(first, rest)
            return self.mul_flat(first, rest)

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
