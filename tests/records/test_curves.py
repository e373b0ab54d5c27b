"""Curves of runs: exact while short, true means and extremes when long."""

import math

import numpy as np
import pytest

from jaxrl_post.records.report import curves as module
from jaxrl_post.records.report.curves import Curves


def rows(values, first=1):
    for step, value in enumerate(values, start=first):
        yield {"step": step, "time": 10.0 * step, "metrics": {"a": value}}


@pytest.fixture
def small(monkeypatch):
    """Blocks are few, so that a short run has all that a long one has."""
    monkeypatch.setattr(module, "MAX_BLOCKS", 8)
    monkeypatch.setattr(module, "MAX_WAITING", 3)


def test_a_short_run_is_exact():
    curves = Curves()
    for row in rows([1.0, None, None, 4.0, None], first=5):
        curves.add(row)
    curve = curves["a"]
    assert curve.points == curve.extremes == [(5, 1.0), (8, 4.0)]
    assert curve.missing == ((6, 7), (9, 9))
    assert (curves.first, curves.last, curves.rows) == (5, 9, 5)
    assert (curves.began, curves.ended) == (50.0, 90.0)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 31, 64, 65, 1000])
def test_blocks_keep_sums_counts_and_extremes(small, count):
    values = np.random.default_rng(count).normal(size=count)
    values[count // 2] = 50.0
    curves = Curves()
    for row in rows(values.tolist()):
        curves.add(row)
    curve = curves["a"]
    assert len(curve.steps) <= 8
    assert curve.total == pytest.approx(values.sum())
    assert curve.lows.min() == values.min()
    assert curve.highs.max() == 50.0
    assert curve.steps[-1] == count
    width = 2 ** max(0, math.ceil(math.log2(count / 8)))
    blocks = [values[at : at + width] for at in range(0, count, width)]
    np.testing.assert_allclose(curve.values, [each.mean() for each in blocks])
    np.testing.assert_array_equal(curve.lows, [each.min() for each in blocks])
    ends = [min(at + width, count) for at in range(0, count, width)]
    np.testing.assert_array_equal(curve.steps, ends)


def test_metrics_of_some_rows_share_the_steps_of_the_others(small):
    curves = Curves()
    for step in range(1, 33):
        metrics = {"all": 1.0} | ({"some": float(step)} if step % 8 == 0 else {})
        curves.add({"step": step, "time": 0.0, "metrics": metrics})
    assert curves["some"].points == [(8, 8.0), (16, 16.0), (24, 24.0), (32, 32.0)]
    assert {*curves["some"].steps} <= {*curves["all"].steps}


def test_reading_between_two_rows_changes_nothing(small):
    values = [*range(100)]
    read, other = Curves(), Curves()
    for row in rows(values):
        read.add(row)
        other.add(row)
        assert read["a"].steps[-1] == row["step"]
    assert read["a"].points == other["a"].points


def test_many_runs_of_missing_values_are_joined(monkeypatch):
    monkeypatch.setattr(module, "MAX_MISSING", 5)
    curves = Curves()
    for row in rows([None if step % 2 else 1.0 for step in range(100)]):
        curves.add(row)
    missing = curves["a"].missing
    assert len(missing) <= 10
    covered = {step for first, last in missing for step in range(first, last + 1)}
    assert covered >= {*range(2, 101, 2)}


def test_values_of_a_run_that_diverged_are_bounded():
    curves = Curves.of({"a": [1e300, -1e300, 1]})
    assert curves["a"].values.tolist() == [1e100, -1e100, 1.0]


def test_within_takes_a_part():
    curves = Curves.of({"a": [1.0, None, 3.0, 4.0, None]})
    part = curves["a"].within(2, 4)
    assert part.points == [(3, 3.0), (4, 4.0)]
    assert part.missing == ((2, 2),)
    assert part.extremes is part.points


def test_an_unknown_metric_is_none_of_it():
    curves = Curves.of({"a": [1.0], "b": [None]})
    assert [*curves] == ["a", "b"]
    assert curves.get("c") is None
    assert curves["b"].points == []
