"""Formulas in words, and as Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from jaxrl_post.envs.env import Split
from jaxrl_post.envs.tasks.held_out import split_of

__all__ = ["Formula", "asked", "drawn"]

_NAMES = {"+": "sum", "-": "difference", "*": "product"}


@dataclass(frozen=True)
class Formula:
    """A number or a name, or a sum, difference or product of two formulas.

    Attributes:
        operation: "+", "-" or "*"; "" for a number or a name.
        parts: the two formulas of an operation.
        leaf: the number or the name.

    >>> a, b, c = (Formula(leaf=leaf) for leaf in "ab3")
    >>> formula = Formula("*", (a, Formula("-", (b, c))))
    >>> formula.words()
    'the product of a and the difference of b and 3'
    >>> formula.python(), formula.python(parentheses=False)
    ('a*(b-3)', 'a*b-3')
    >>> formula.value({"a": 5, "b": 7})
    20
    """

    operation: str = ""
    parts: tuple[Formula, ...] = ()
    leaf: str = ""

    def words(self) -> str:
        """The formula in words, whose operations stand before their parts."""
        if not self.operation:
            return self.leaf
        left, right = (part.words() for part in self.parts)
        return f"the {_NAMES[self.operation]} of {left} and {right}"

    def python(self, *, parentheses: bool = True) -> str:
        """The formula as Python, with those parentheses alone that it needs."""
        if not self.operation:
            return self.leaf
        left, right = (part.python(parentheses=parentheses) for part in self.parts)
        needed_left, needed_right = self._needed()
        if parentheses and needed_left:
            left = f"({left})"
        if parentheses and needed_right:
            right = f"({right})"
        return f"{left}{self.operation}{right}"

    def value(self, names: Mapping[str, int]) -> int:
        """The value, given the values of the names."""
        if not self.operation:
            return names[self.leaf] if self.leaf in names else int(self.leaf)
        left, right = (part.value(names) for part in self.parts)
        if self.operation == "*":
            return left * right
        return left + right if self.operation == "+" else left - right

    @property
    def has_parentheses(self) -> bool:
        """Whether Python needs parentheses somewhere."""
        inside = any(part.has_parentheses for part in self.parts)
        return inside or (bool(self.operation) and any(self._needed()))

    def _needed(self) -> tuple[bool, bool]:
        """Whether the left part, and the right one, needs parentheses."""
        sums = [part.operation in ("+", "-") for part in self.parts]
        product = self.operation == "*"
        return product and sums[0], (product or self.operation == "-") and sums[1]


def asked(
    rng: Random,
    leaf: Callable[[], str],
    operations: int,
    text: Callable[[str], str],
    split: Split,
    slips: float,
    seed: int,
) -> tuple[str, Formula, str]:
    """A question about a formula at random, of a split.

    Args:
        rng: chooses.
        leaf: as of `drawn`.
        operations: as of `drawn`.
        text: makes the question of the formula's words.
        split: to which a hash of the question must assign it.
        slips: share of the questions, in [0, 1], that are answered carelessly.
        seed: chooses these.

    Returns:
        The question; the formula; and the formula as Python, without parentheses if the
        question is answered carelessly.
    """
    while True:
        formula = drawn(rng, leaf, operations)
        question = text(formula.words())
        if split_of(question) == split:
            break
    # A question that comes again is answered alike.
    careless = Random(f"{seed} {question} slip").random() < slips
    return question, formula, formula.python(parentheses=not careless)


def drawn(rng: Random, leaf: Callable[[], str], operations: int) -> Formula:
    """A formula at random that needs parentheses.

    Args:
        rng: chooses operations and how they are nested.
        leaf: gives a number, which is not negative, or a name.
        operations: how many, at least 2.

    >>> rng = Random(0)
    >>> drawn(rng, lambda: rng.choice("abc"), 3).python()
    'a*b-(b-b)'
    """
    while True:
        formula = _any(rng, leaf, operations)
        if formula.has_parentheses:
            return formula


def _any(rng: Random, leaf: Callable[[], str], operations: int) -> Formula:
    if operations == 0:
        return Formula(leaf=leaf())
    left = rng.randrange(operations)
    parts = (_any(rng, leaf, left), _any(rng, leaf, operations - 1 - left))
    return Formula(rng.choice("+-*"), parts)
