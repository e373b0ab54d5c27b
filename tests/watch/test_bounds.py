"""Bounds on the values of a metric, absolute and against the run's own past."""

import math

import numpy as np
import pytest

from jaxrl_post.watch.bounds import Condition, Series, pattern_of


def crossings(values, kind, bound, **options):
    """The places, from 0, at which the values cross a bound."""
    series = Series(Condition("a", kind, bound, **options))
    return [place for place, value in enumerate(values) if series.crossed(value)]


@pytest.mark.parametrize(
    ("kind", "bound", "values", "expected"),
    [
        ("above", 1.0, [1.0, 1.1, 0.0, 2.0], [1, 3]),
        ("below", 0.0, [0.0, -0.1, 5.0], [1]),
        ("equals", 0.0, [0.0, 1e-9, -0.0], [0, 2]),
        # The median of the past is 2.
        ("times", 3.0, [1.0, 2.0, 3.0, 6.1, 2.0], [3]),
        ("times", 3.0, [1.0, 2.0, 3.0, 6.0], []),
        ("share", 0.5, [1.0, 2.0, 3.0, 0.9, 2.0], [3]),
        ("share", 0.5, [1.0, 2.0, 3.0, 1.0], []),
        # Deviations of 1 and 0 from 2 have the median 1: 1.4826 for a normal one.
        ("rises", 2.0, [1.0, 2.0, 3.0, 5.0], [3]),
        ("rises", 2.0, [1.0, 2.0, 3.0, 4.9], []),
        ("falls", 2.0, [1.0, 2.0, 3.0, -1.0], [3]),
        ("falls", 2.0, [1.0, 2.0, 3.0, -0.9], []),
        # Negative values move by their size.
        ("share", 0.7, [-10.0, -10.0, -10.0, -12.9, -13.1], [4]),
        ("times", 3.0, [-1.0, -1.0, -1.0, 0.9, 1.1], [4]),
        # The mean of the first three is 2.
        ("gains", 1.5, [1.0, 2.0, 3.0, 3.4, 3.5, 9.0, 2.0], [4, 5]),
        ("loses", 1.5, [1.0, 2.0, 3.0, 0.6, 0.5, -9.0, 2.0], [4, 5]),
    ],
)
def test_each_bound(kind, bound, values, expected):
    assert crossings(values, kind, bound, known=3) == expected


def test_a_trend_compares_two_halves():
    # Halves of 4: 1 +- 0.1 and then higher by 0.5, with a standard error of 0.08.
    low, high = [0.9, 1.1, 0.9, 1.1], [1.4, 1.6, 1.4, 1.6]
    assert crossings(low + high, "climbs", 4.0, past=8) == [7]
    assert crossings(high + low, "sinks", 4.0, past=8) == [7]
    assert crossings(high + low, "climbs", 4.0, past=8) == []
    assert crossings(low + high, "climbs", 4.0, past=8, least=0.6) == []
    assert crossings(low + low, "climbs", 0.1, past=8) == []


def test_noise_alone_seldom_makes_a_trend():
    rng = np.random.default_rng(0)
    found = sum(
        bool(crossings(rng.normal(size=20), "climbs", 5.0, past=20))
        for _ in range(2000)
    )
    assert found <= 2


def test_a_relative_bound_needs_its_past():
    values = [1.0] * 9 + [100.0]
    assert crossings(values, "times", 2.0) == []
    assert crossings([1.0, *values], "times", 2.0) == [10]


def test_values_that_cross_are_no_part_of_the_past():
    # Were they, the fifth 10 would be the median itself.
    assert crossings([1.0] * 3 + [10.0] * 6, "times", 2.0, known=3) == [*range(3, 9)]


def test_a_new_level_becomes_the_past_in_the_end():
    values = [1.0] * 5 + [10.0] * 12
    assert crossings(values, "times", 2.0, known=3, past=5) == [*range(5, 10)]


def test_the_first_values_may_be_left_out():
    assert crossings([100.0, 100.0, 1.0], "above", 10.0, after=2) == []
    assert crossings([100.0, 100.0, 100.0], "above", 10.0, after=2) == [2]


def test_small_differences_do_not_count():
    values = [0.001] * 10 + [0.01, 1.0]
    assert crossings(values, "times", 2.0, least=0.1) == [11]


def test_values_that_are_not_finite_are_no_values():
    values = [1.0] * 3 + [math.nan, math.inf, -math.inf, 5.0]
    assert crossings(values, "times", 2.0, known=3) == [6]
    assert crossings([math.nan, math.inf], "above", 1.0) == []


def test_a_constant_past_has_no_spread():
    assert crossings([1.0] * 10 + [1.0001], "rises", 5.0) == [10]
    assert crossings([1.0] * 10 + [1.0001], "rises", 5.0, least=0.01) == []


@pytest.mark.parametrize(
    ("metric", "name", "fits"),
    [
        ("rollout/failed/<kind>", "rollout/failed/timeout", True),
        ("rollout/failed/<kind>", "rollout/failed", False),
        ("time/<rollout|train>", "time/train", True),
        ("time/<rollout|train>", "time/eval", False),
        ("eval/<part>", "eval/a/b", False),
        ("a(b+<c>", "a(b+x", True),
        ("a.b/<c>", "axb/c", False),
    ],
)
def test_names_with_words(metric, name, fits):
    assert bool(pattern_of(metric).fullmatch(name)) is fits
