"""Warnings about the metrics of a run."""

import logging

import pytest

from jaxrl_post.programs.watching.rules import RULES, Warnings
from jaxrl_post.records.metric_table import row_of


def told(caplog, rows: list[dict[str, float]]) -> list[str]:
    """The warnings of a run with these metrics in its steps."""
    caplog.clear()
    watch = Warnings()
    with caplog.at_level(logging.WARNING):
        for step, metrics in enumerate(rows, 1):
            watch(step, metrics)
    return [record.getMessage() for record in caplog.records]


def test_answers_that_are_cut_are_told_once(caplog):
    cut = "rollout/truncated_fraction"
    shares = [0.4, 0.5, 0.75, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    messages = told(caplog, [{cut: share} for share in shares])
    assert len(messages) == 1
    assert messages[0].startswith("steps 2 to 4: 75 % of the answers were cut")
    assert "--rollout.max-tokens" in messages[0]


@pytest.mark.parametrize(
    "shares", [[0.49] * 9, [0.5, 0.5, 0.0, 0.5, 0.5], [1.0, 1.0], []]
)
def test_fewer_or_other_steps_are_not_told(caplog, shares):
    rows = [{"rollout/truncated_fraction": share} for share in shares]
    assert told(caplog, rows) == []


def test_groups_without_spread_are_told(caplog):
    messages = told(caplog, [{"advantage/std": value} for value in (0.1, 0, 0, 0)])
    assert len(messages) == 1
    assert messages[0].startswith("steps 2 to 4: all advantages were 0")


def test_a_run_without_the_metrics_is_not_warned(caplog):
    assert told(caplog, [{"train/loss": 0.0}] * 9) == []


def test_a_step_without_the_metric_changes_nothing(caplog):
    zero = {"advantage/std": 0.0}
    assert len(told(caplog, [zero, {}, zero, {}, zero])) == 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.metric)
def test_rules_are_of_documented_metrics(rule):
    assert row_of(rule.metric) is not None
