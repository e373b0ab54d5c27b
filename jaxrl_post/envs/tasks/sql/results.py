"""Compares the rows of two queries."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_post.envs.tasks.sql.execution import Rows

__all__ = ["equal", "is_ordered"]

# Relative difference of numbers that are equal; absolute, near zero.
_CLOSE = 1e-6
_TINY = 1e-9

# Comments, texts, quoted names, brackets, and the words and brackets that matter.
_TOKENS = re.compile(
    r"--[^\n]*|/\*.*?(?:\*/|\Z)|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]"
    r"|\w+|[()]",
    re.S,
)


def is_ordered(query: str) -> bool:
    """Whether a query has ORDER BY at its outermost level.

    >>> is_ordered("SELECT a FROM (SELECT a FROM t ORDER BY a)")
    False
    >>> is_ordered("WITH u AS (SELECT 1 AS a) SELECT a FROM u order /* */ by a")
    True
    """
    depth, before = 0, ""
    for token in _TOKENS.findall(query):
        if token.startswith(("--", "/*")):
            continue
        depth += (token == "(") - (token == ")")
        word = token.upper()
        if depth == 0 and before == "ORDER" and word == "BY":
            return True
        before = word if depth == 0 else ""
    return False


def equal(found: Rows, expected: Rows, *, ordered: bool) -> bool:
    """Whether two results have the same rows, as often.

    Columns are compared by position, not by name. NULL equals NULL. Numbers
    are equal if they differ by no more than one part in a million; a number is never
    equal to a text.

    Args:
        found: the rows of the query that is judged.
        expected: the rows of the right query.
        ordered: whether the order of the rows matters.

    >>> one = Rows(((1, "a"), (2, None)), ("number", "text"))
    >>> two = Rows(((2.0, None), (1, "a")), ("number", "text"))
    >>> equal(one, two, ordered=False), equal(one, two, ordered=True)
    (True, False)
    """
    if len(found.columns) != len(expected.columns):
        return False
    if len(found.rows) != len(expected.rows):
        return False
    mine: Sequence[Any] = found.rows
    theirs: Sequence[Any] = expected.rows
    if not ordered:
        mine, theirs = sorted(mine, key=_key), sorted(theirs, key=_key)
    return all(
        all(map(_same, row, other)) for row, other in zip(mine, theirs, strict=True)
    )


def _key(row: Sequence[Any]) -> tuple[Any, ...]:
    """Sorts rows that are equal to the same place.

    What is no number decides first, then numbers with fewer digits than `_CLOSE`
    compares: how a number was rounded must not decide which row meets which.
    """
    exact = tuple(map(_exact, row))
    numbers = [float(value) for value in row if isinstance(value, int | float)]
    return exact, tuple(float(f"{value:.5g}") for value in numbers), tuple(numbers)


def _exact(value: Any) -> tuple[int, str]:
    if value is None:
        return 0, ""
    if isinstance(value, int | float):
        return 1, ""
    return (2, value) if isinstance(value, str) else (3, value.hex())


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, int) and isinstance(other, int):
        return value == other
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=_CLOSE, abs_tol=_TINY)
    return type(value) is type(other) and value == other
