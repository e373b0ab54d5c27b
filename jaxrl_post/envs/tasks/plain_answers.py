"""Answers that reasoning-gym's scorers evaluate, held to plain data and formulas.

Some scorers also give all of the reward for what is no answer: `nan`, another puzzle's
numbers, any text. Such an answer is not shown to them either.

Some of the library's scorers run `eval` or sympy's `parse_expr`, which is `eval` too,
on the text that they score. What a model wrote must never be executed. So such a scorer
is shown an answer only if it is one of the problem's own right answers, or if its
syntax tree has nothing but what an answer of the task consists of; and then it is shown
text that is written from that tree.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

__all__ = ["harmless"]

# Tasks whose answers are lists, or text, and that evaluate what looks otherwise.
_DATA = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}

# Tasks whose answers are formulas, with the names that an answer may have in addition
# to its problem's.
_FORMULAS = {
    "countdown": set[str](),
    "puzzle24": set[str](),
    "polynomial_multiplication": set[str](),
    "simple_integration": {"C"},
    "intermediate_integration": {"C", "E", "pi"},
}

# Tasks whose scorers make an exact fraction of a number, so that "1e999999999" takes
# all memory or time there is, in one step that nothing interrupts.
_FRACTIONS = {"coin_flip"}
# A task whose scorer takes the distance to nan for none.
_FINITE = {"complex_arithmetic"}
# A task whose scorer takes each text for the same truth value.
_WORDS = {"game_of_life_halting"}
_NO_NUMBER = re.compile(r"nan|inf", re.IGNORECASE)
_HUGE = re.compile(r"[eE][+-]?[0-9_]{4}")

# Names of functions that answers may call, by task. A call of another is refused, also
# of those that only sympy's names lead to.
_BOUNDED = {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"}
_BOUNDED |= {"sqrt", "log", "ln", "Abs", "tanh", "asinh", "acosh", "atanh"}
# Numbers explode if one of these is within another function.
_GROWING = {"exp", "sinh", "cosh"}
_FUNCTIONS = {"intermediate_integration": _BOUNDED | _GROWING}

_OPERATIONS = (ast.Add, ast.Sub, ast.Mult, ast.Div)

# Limits, where the problem's own right answer is not larger.
_CHARACTERS = 1000
_DIGITS = 30
_POWER = 32
_LARGEST_FLOAT = 1e9


def harmless(answer: str, task: str, entry: Mapping[str, Any]) -> str | None:
    """Returns text that is safe to show to a scorer of the library for an answer.

    Args:
        answer: the model's answer, stripped of white space.
        task: the library's name of the task that scores it.
        entry: the library's entry of the problem.

    Returns:
        The answer itself if the task's scorer does not evaluate it, or if it is one of
        the problem's right answers; text of the same value if it is plain data or a
        plain formula of moderate size; None if it is anything else, or if the scorer
        would take for an answer what is none.

    >>> entry = {"answer": "4*(5 + 1)*1", "metadata": {"numbers": [4, 5, 1, 1]}}
    >>> harmless("(5+1)*4*1", "puzzle24", entry)
    '(5 + 1) * 4 * 1'
    >>> harmless("9**9**9", "puzzle24", entry)
    >>> harmless("__import__('os').system('id')", "puzzle24", entry)
    """
    if task in _FRACTIONS and (_HUGE.search(answer) or _begins(answer, entry)):
        return None
    if task in _FINITE and _NO_NUMBER.search(answer):
        return None
    if task in _WORDS:
        right = str(entry["answer"])
        return right if answer.strip().lower() == right.lower() else None
    if task not in _DATA and task not in _FORMULAS:
        return answer
    if answer in _right_answers(entry):
        return answer
    right = str(entry["answer"])
    if len(answer) > max(_CHARACTERS, 4 * len(right)):
        return None
    tree = _parsed(answer)
    if tree is None:
        return None
    if task in _DATA:
        return ast.unparse(tree) if _is_data(tree) else None
    names = _FORMULAS[task] | _names(entry)
    limits = _Limits.of(right, names, _FUNCTIONS.get(task, set()))
    if task == "puzzle24" and not _uses(tree, entry["metadata"]["numbers"]):
        return None
    return ast.unparse(tree) if limits.hold(tree) else None


def _uses(tree: ast.expr, numbers: Sequence[int]) -> bool:
    """Whether a formula has the numbers of the puzzle, each once, and no others."""
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return sorted(map(str, found)) == sorted(map(str, numbers))


def _begins(answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether an answer is only the first digits of the right number.

    The scorer gives all of the reward for these, such as 0 where 0.3125 is right.
    """
    right = str(entry["answer"]).replace(",", "")
    try:
        value = float(Fraction(answer.replace(",", "")))
        apart = abs(value - float(Fraction(right)))
    except (ValueError, ZeroDivisionError, OverflowError):
        return False
    # Within the scorer's own tolerance it is right.
    return apart > 1e-4 and f"{float(Fraction(right)):.10g}".startswith(f"{value:.10g}")


def _right_answers(entry: Mapping[str, Any]) -> list[str]:
    right = [str(entry["answer"]), str(entry["answer"]).strip()]
    return right + list(entry["metadata"].get("valid_answers", ()))


def _names(entry: Mapping[str, Any]) -> set[str]:
    """The names of variables in the texts of a problem."""
    metadata = entry["metadata"]
    texts = (metadata.get(key) for key in ("variable", "polynomial_expr"))
    trees = [_parsed(text) for text in texts if text]
    nodes = [node for tree in trees if tree is not None for node in ast.walk(tree)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _parsed(text: str) -> ast.expr | None:
    """Parses an expression, without executing it; None for other text."""
    try:
        with warnings.catch_warnings():
            # About what looks like a mistake, such as calling a number.
            warnings.simplefilter("ignore")
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _is_data(node: ast.expr) -> bool:
    """Whether this is text, a number, or a list or tuple of such, however deep."""
    match node:
        case ast.Constant(value=value):
            return type(value) in (str, int)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return type(value) is int
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return all(map(_is_data, parts))
        case _:
            return False


@dataclass(frozen=True)
class _Limits:
    """Names and operations that a formula may have.

    Attributes:
        names: of variables and constants.
        functions: that may be called.
        power: that exponents may reach, multiplied along a path into the tree. It
            bounds the digits of what sympy computes at once.
        digits: of a whole number.
    """

    names: set[str]
    functions: set[str]
    power: int
    digits: int

    @classmethod
    def of(cls, right: str, names: set[str], functions: set[str]) -> _Limits:
        """Limits that are no tighter than a right answer's own size."""
        numbers = list(_numbers(right))
        digits = max((len(str(abs(number))) for number in numbers), default=1)
        powers = list(_exponents(right))
        power = max(powers, default=1)
        return cls(names, functions, max(_POWER, 2 * power), max(_DIGITS, 2 * digits))

    def hold(self, node: ast.expr, power: int = 1, within: int = 0) -> bool:
        """Whether a formula is within the limits.

        Args:
            node: the formula, or a part of it.
            power: the exponents around it, multiplied.
            within: how many function calls are around it.
        """
        match node:
            case ast.Constant(value=value):
                return self._is_number(value)
            case ast.Name(id=name):
                return name in self.names
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                return self.hold(operand, power, within)
            case ast.BinOp(left=left, op=operation, right=right) if isinstance(
                operation, _OPERATIONS
            ):
                parts = (left, right)
                return all(self.hold(part, power, within) for part in parts)
            case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=exponent):
                return self._is_call("exp", [exponent], power, within)
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
                number = _constant(exponent)
                if number is None or number.denominator > self.power:
                    return False
                power *= max(1, math.ceil(abs(number)))
                return power <= self.power and self.hold(base, power, within)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._is_call(name, arguments, power, within)
            case _:
                return False

    def _is_call(
        self, name: str, arguments: list[ast.expr], power: int, within: int
    ) -> bool:
        if name not in self.functions or len(arguments) != 1:
            return False
        if within > (0 if name in _GROWING else 1):
            return False
        return self.hold(arguments[0], power, within + 1)

    def _is_number(self, value: object) -> bool:
        if type(value) is int:
            return len(str(abs(value))) <= self.digits
        return type(value) is float and abs(value) <= _LARGEST_FLOAT


def _constant(node: ast.expr) -> Fraction | None:
    """The value of an exponent: a number, or a quotient of two; None for others."""
    match node:
        case ast.Constant(value=int() | float() as value) if type(value) is not bool:
            return Fraction(value) if abs(value) <= _LARGEST_FLOAT else None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _constant(operand)
            return None if number is None else -number
        case ast.BinOp(
            left=ast.Constant(value=above),
            op=ast.Div(),
            right=ast.Constant(value=below),
        ) if type(above) is int and type(below) is int and below:
            return Fraction(above, below)
        case _:
            return None


def _numbers(right: str) -> Iterator[int]:
    tree = _parsed(right)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.value


def _exponents(right: str) -> Iterator[int]:
    tree = _parsed(right)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            number = _constant(node.right)
            yield 1 if number is None else math.ceil(abs(number))
