"""When two results of queries are equal, and when their order matters."""

import random

import pytest

from jaxrl_post.envs.tasks.sql.execution import Rows
from jaxrl_post.envs.tasks.sql.results import equal, is_ordered


def rows(*found, columns=None):
    names = "abc"[: len(found[0]) if columns is None else columns]
    return Rows(tuple(found), tuple(names))


A, B = (1, "a"), (2, "b")

# (found, expected, equal in any order, equal in this order)
COMPARED = [
    (rows(A, B), rows(A, B), True, True),
    (rows(B, A), rows(A, B), True, False),
    # As often: a set would call these equal.
    (rows(A, A, B), rows(A, B, B), False, False),
    (rows(A, B, B), rows(A, B), False, False),
    # By position.
    (rows(("a", 1)), rows((1, "a")), False, False),
    (rows((1, 2)), rows((1, 2, 3)), False, False),
    (rows(columns=2), rows(columns=2), True, True),
    (rows(columns=1), rows(columns=2), False, False),
    # Numbers.
    (rows((2,)), rows((2.0,)), True, True),
    (rows((0.1 + 0.2,)), rows((0.3,)), True, True),
    (rows((1_000_000.0,)), rows((1_000_000.9,)), True, True),
    (rows((1_000_000.0,)), rows((1_000_002.0,)), False, False),
    (rows((1_000_000,)), rows((1_000_001,)), False, False),
    (rows((0.0,)), rows((1e-12,)), True, True),
    (rows((float("inf"),)), rows((float("inf"),)), True, True),
    (rows(("2",)), rows((2,)), False, False),
    # Missing, empty, bytes.
    (rows((None,)), rows((None,)), True, True),
    (rows((None,)), rows(("",)), False, False),
    (rows((None,)), rows((0,)), False, False),
    (rows((b"a",)), rows(("a",)), False, False),
    (rows((None, 1), (2, None)), rows((2, None), (None, 1)), True, False),
    # Rounding must not decide which rows are compared.
    (rows((0.1 + 0.2, 4), (0.3, 5)), rows((0.3, 4), (0.1 + 0.2, 5)), True, True),
]


@pytest.mark.parametrize(("found", "expected", "same", "in_order"), COMPARED)
def test_comparisons(found, expected, same, in_order):
    assert equal(found, expected, ordered=False) is same
    assert equal(expected, found, ordered=False) is same
    assert equal(found, expected, ordered=True) is in_order


def test_any_order_is_equal_to_any_other():
    rng = random.Random(1)
    values = (None, 1, 1.0, 2.5, 1e9, "1", "x", b"\x01", 0.1 + 0.2, 0.3)
    for _ in range(200):
        one = [tuple(rng.choices(values, k=3)) for _ in range(6)]
        other = rng.sample(one, 6)
        assert equal(rows(*one), rows(*other), ordered=False)


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t\norder\n\tby a desc limit 3;", True),
        ("SELECT a FROM t", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 3)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t ORDER BY 1", True),
        ("SELECT 'x ORDER BY y' FROM t", False),
        ("SELECT 'it''s' FROM t ORDER BY a", True),
        ('SELECT "ORDER BY" FROM t', False),
        ("SELECT [order], `by` FROM t", False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT a FROM t /* ( */ ORDER /* x */ BY a", True),
        ("SELECT border, by_x FROM t", False),
        ("WITH u AS (SELECT a FROM t ORDER BY a) SELECT a FROM u", False),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT ')' FROM (SELECT a FROM t ORDER BY a)", False),
    ],
)
def test_the_outermost_level_decides_whether_order_matters(query, ordered):
    assert is_ordered(query) is ordered
