"""Paired tests against numbers by hand, and laws of the bootstrap."""

import math
import tracemalloc

import numpy as np
import pytest

from jaxrl_post.watch.paired import interval_of_mean, paired


def single(pairs):
    """Evaluations with one sample a task, from (before, after) of each."""
    return tuple(
        {str(task): [pair[side]] for task, pair in enumerate(pairs)} for side in (0, 1)
    )


@pytest.mark.parametrize(
    ("gained", "lost", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 (1/2)
        (5, 0, 0.0625),  # 2 (1/32)
        (0, 6, 0.03125),
        (3, 3, 1.0),
        (8, 2, 0.109375),  # 2 (1 + 10 + 45) / 1024
        (1, 9, 0.021484375),  # 2 (1 + 10) / 1024
        (59, 41, 0.08862608),  # The sign test of 41 in 100, as tables have it.
    ],
)
def test_mcnemar_is_exact(gained, lost, p_value):
    pairs = [(0, 1)] * gained + [(1, 0)] * lost + [(1, 1)] * 3 + [(0, 0)] * 2
    found = paired(*single(pairs))
    assert found.p_value == pytest.approx(p_value, rel=1e-6)
    assert (found.gained, found.lost) == (gained, lost)
    assert found.difference == pytest.approx((gained - lost) / len(pairs))
    assert found.means == (
        pytest.approx((lost + 3) / len(pairs)),
        pytest.approx((gained + 3) / len(pairs)),
    )
    assert "exact McNemar" in found.method


def test_mcnemar_of_many_tasks_is_the_sum_of_binomials():
    found = paired(*single([(0, 1)] * 700 + [(1, 0)] * 600))
    below = sum(math.comb(1300, i) for i in range(601))
    assert found.p_value == 2 * below / 2**1300


def test_the_interval_is_the_normal_one_for_many_tasks():
    # 2,500 tasks, 300 gained and 200 lost: mean 0.04, variance 0.2 - 0.04^2.
    pairs = [(0, 1)] * 300 + [(1, 0)] * 200 + [(1, 1)] * 2000
    found = paired(*single(pairs))
    half = 1.959964 * math.sqrt((0.2 - 0.04**2) / 2500)
    expected = (0.04 - half, 0.04 + half)
    assert found.interval == pytest.approx(expected, abs=1e-3)
    assert found.verdict == "better"
    other = paired(*reversed(single(pairs)))
    assert other.difference == -found.difference
    assert other.verdict == "worse"


def test_both_ways_of_drawing_agree():
    generator = np.random.default_rng(1)
    values = generator.normal(0.3, 1.0, size=400)
    half = 1.959964 * values.std() / 20
    expected = (values.mean() - half, values.mean() + half)
    assert interval_of_mean(list(values)) == pytest.approx(expected, abs=0.01)
    coarse = values.round(1).clip(-2, 2)
    assert len(set(coarse)) < 64 < len(set(values))
    assert interval_of_mean(list(coarse)) == pytest.approx(expected, abs=0.03)


def test_samples_of_a_task_count_as_one_task():
    # By the bootstrap: changes of 3/4, 1/4 and 1/4, all on one side.
    before = {"a": [0, 0, 0, 1], "b": [0, 1], "c": [0.5]}
    after = {"a": [1, 1], "b": [1, 0, 1, 1], "c": [0.75, 0.75]}
    found = paired(before, after)
    assert found.means == (0.25 * (1 + 2 + 2) / 3, 0.25 * (4 + 3 + 3) / 3)
    assert found.difference == pytest.approx(1.25 / 3)
    assert (found.gained, found.lost) == (None, None)
    assert found.interval == (0.25, 0.75)
    assert found.p_value == pytest.approx(2 / 10_001)
    assert "bootstrap" in found.method
    assert "McNemar" not in found.method


def test_equal_evaluations_do_not_differ():
    scores = {"a": [0.5, 1.0], "b": [0.25]}
    found = paired(scores, scores)
    assert (found.difference, found.interval, found.p_value) == (0, (0, 0), 1)
    assert found.verdict == "same"


def test_tasks_of_one_evaluation_alone_are_counted():
    found = paired({"a": [1], "b": [0], "x": [1]}, {"b": [1], "a": [1], "y": [0]})
    assert (found.tasks, found.unpaired) == (2, 2)
    assert (found.gained, found.lost) == (1, 0)


def test_order_changes_nothing_and_the_seed_little():
    generator = np.random.default_rng(0)
    before, after = (
        {str(i): [float(x)] for i, x in enumerate(generator.normal(size=100))}
        for _ in range(2)
    )
    found = paired(before, after)
    assert found == paired(before, dict(reversed(after.items())))
    other = paired(before, after, seed=1)
    assert found.interval != other.interval
    assert found.interval == pytest.approx(other.interval, abs=0.02)


@pytest.mark.parametrize("few", [True, False])
def test_many_tasks_take_little_memory(few):
    values = np.arange(100_000) % 3 if few else np.linspace(-1, 2, 100_000)
    tracemalloc.start()
    low, high = interval_of_mean(values, resamples=100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert low < values.mean() < high
    assert most < 2**26


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"a": [1]}, {"b": [1], "c": [1]}, "no task is in both evaluations, of 1 bef"),
        ({}, {}, "no task is in both evaluations, of 0 before and 0 after; compare"),
        ({"a": []}, {"a": [1]}, r"task a must have finite scores, .*; got \[\]"),
        ({"a": [1]}, {"a": [math.nan]}, r"task a must have .*; got \[nan\]"),
    ],
)
def test_what_cannot_be_compared(before, after, message):
    with pytest.raises(ValueError, match=message):
        paired(before, after)


def test_resamples_are_positive():
    with pytest.raises(ValueError, match="resamples must be at least 1; got 0"):
        paired({"a": [1]}, {"a": [1]}, resamples=0)
