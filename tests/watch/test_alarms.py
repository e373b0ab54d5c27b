"""Alarms: when they are raised, when they are over, what they say."""

import math

import numpy as np
import pytest

from jaxrl_post.watch.alarms import NOT_FINITE, RunWatch
from jaxrl_post.watch.bounds import Condition
from jaxrl_post.watch.rule import Rule, default_rules


def watch(*conditions, steps=2, **options):
    return RunWatch([Rule("mine", conditions, "It is high.", steps=steps, **options)])


HIGH = Condition("a", "above", 1.0)


def raised(watched, rows):
    """The steps at which alarms are raised, from 1."""
    return [
        (alarm.first, alarm.step)
        for step, row in enumerate(rows, 1)
        for alarm in watched.look(step, row)
    ]


def of(values):
    return [{} if value is None else {"a": value} for value in values]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([2, 2], [(1, 2)]),
        ([2, 0, 2], []),
        ([2, None, 2], [(1, 3)]),
        ([2, 2, 2, 2, 2], [(1, 2)]),
        # Once is not over: the alarm stands.
        ([2, 2, 0, 2, 2, 2], [(1, 2)]),
        ([2, 2, 0, 0, 2, 2], [(1, 2), (5, 6)]),
        ([2, math.nan, 2], [(1, 3)]),
        ([], []),
    ],
)
def test_steps_in_a_row(values, steps):
    assert raised(watch(HIGH), of(values)) == steps


def test_a_raised_rule_stands_until_it_is_over():
    watched = watch(HIGH)
    stands = []
    for step, row in enumerate(of([2, 2, 0, 0, 2]), 1):
        watched.look(step, row)
        stands.append(bool(watched.raised))
    assert stands == [False, True, True, False, False]


def test_all_conditions_have_to_hold_in_the_same_step():
    watched = watch(HIGH, Condition("b", "below", 0.0), steps=1)
    rows = [{"a": 2.0}, {"b": -1.0}, {"a": 2.0, "b": 1.0}, {"a": 2.0, "b": -1.0}]
    assert raised(watched, rows) == [(4, 4)]


def test_a_metric_divided_by_another():
    watched = watch(Condition("a", "above", 0.5, per="b"), steps=1)
    rows = [
        {"a": 1.0, "b": 3.0},
        {"a": 1.0, "b": 0.0},
        {"a": 1.0},
        {"a": 2.0, "b": 3.0},
    ]
    assert raised(watched, rows) == [(4, 4)]


def gap(metrics):
    """The function of a rule; None if a metric is missing."""
    return metrics["a"] - metrics["b"] if {"a", "b"} <= metrics.keys() else None


def test_a_function_of_the_metrics():
    function = "tests.watch.test_alarms:gap"
    watched = watch(Condition("gap", "above", 1.0, function=function), steps=1)
    rows = [{"a": 3.0}, {"a": 3.0, "b": 2.5}, {"a": 3.0, "b": 1.0}]
    assert raised(watched, rows) == [(3, 3)]


def breaks(metrics):
    """A function of a rule that has a fault."""
    raise KeyError("nothing")


def test_a_function_that_raises_is_told_and_left_out(caplog):
    function = "tests.watch.test_alarms:breaks"
    watched = watch(Condition("gap", "above", 1.0, function=function), steps=1)
    assert raised(watched, [{"a": 3.0}] * 3) == []
    [record] = caplog.records
    assert "rule mine: its function" in record.getMessage()
    assert "KeyError" in record.getMessage()


@pytest.mark.parametrize(
    "row",
    [
        # Rewards of another scale, healthy: nothing is to be told.
        lambda rng, share: {"reward/mean": 1000 - 5 * rng.random(), "reward/std": 3.0},
        lambda rng, share: (
            {"reward/mean": 5 + 4 * share, "reward/std": 3.0}
            | {"grader/x": 0.5 + 0.4 * share, "grader_gap/x": 4.5 + 3.6 * share}
        ),
        lambda rng, share: {"train/loss": rng.normal(0, 300)},
        lambda rng, share: {
            "reward/mean": -10 - 0.3 * share,
            "policy/entropy": 1 - share,
        },
        lambda rng, share: {
            "reward/mean": -0.5 + rng.normal(0, 0.05),
            "reward/std": 0.3,
        },
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_rewards_of_every_scale_are_quiet_where_nothing_is_wrong(row, seed):
    rng = np.random.default_rng(seed)
    watched = RunWatch(default_rules(), {"mismatch.warn": 1.05})
    rows = [row(rng, step / 300) for step in range(300)]
    assert raised(watched, rows) == []


def test_of_several_metrics_the_worst_is_named():
    watched = watch(Condition("failed/<kind>", "above", 0.0), steps=2)
    watched.look(1, {"failed/raised": 1.0, "failed/timeout": 0.0})
    [alarm] = watched.look(2, {"failed/raised": 2.0})
    assert alarm.evidence == "failed/raised 1, 2, above 0"
    watched = watch(Condition("failed/<kind>", "above", 0.0), steps=2)
    watched.look(1, {"failed/raised": 1.0})
    [alarm] = watched.look(2, {"failed/timeout": 3.0})
    assert alarm.evidence == "failed/<kind> 1, 3, above 0"


def test_an_alarm_says_everything_in_lines():
    rule = Rule("mine", (HIGH,), "It is high.", "Heat.", "The fan.", steps=2)
    watched = RunWatch([rule])
    watched.look(7, {"a": 2.0})
    [alarm] = watched.look(8, {"a": 3.5})
    assert alarm.told() == (
        "mine, steps 7 to 8: It is high.\n  a 2, 3.5, above 1\n"
        "  usual causes: Heat.\n  look at: The fan."
    )
    row = alarm.to_json()
    assert (row["step"], row["first"], row["action"]) == (8, 7, "warn")
    assert row["findings"] == [
        {"metric": "a", "values": (2.0, 3.5), "bound": "above 1"}
    ]


def test_the_strongest_action_comes_first():
    rules = [
        Rule(name, (HIGH,), "a", steps=1, action=name)
        for name in ("warn", "stop", "keep", "pause")
    ]
    found = RunWatch(rules).look(1, {"a": 2.0})
    assert [each.rule.action for each in found] == ["stop", "pause", "keep", "warn"]


def test_metrics_that_are_not_finite_are_counted():
    watched = watch(Condition(NOT_FINITE, "above", 1.0), steps=1)
    assert raised(watched, of([math.nan])) == []
    rows = [{"a": math.inf, "b": math.nan}]
    assert raised(watched, rows) == [(1, 1)]


def test_rules_without_their_metrics_stay_quiet_and_are_listed():
    watched = RunWatch(default_rules(), {"mismatch.warn": 1.05})
    for step in range(1, 100):
        assert watched.look(step, {"train/other": 1.0}) == []
    assert {*watched.never_measured()["reward-collapse"]} == {"reward/mean"}


def test_a_bound_may_be_an_option():
    [rule] = [rule for rule in default_rules() if rule.name == "mismatch"]
    for bound, expected in ((1.05, [(1, 1)]), (1.5, [])):
        watched = RunWatch([rule], {"mismatch.warn": bound})
        row = {"mismatch/token_mult_prob_error": 1.2}
        assert raised(watched, [row]) == expected


RETRIED = ["full-disk", "away-server"]
CUT = "rollout/truncated_fraction"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{CUT: s} for s in (0.4, 0.5, 0.75, 1.0, 1.0)], ["truncation"]),
        ([{CUT: 0.49}] * 9, []),
        ([{CUT: s} for s in (0.5, 0.5, 0.0, 0.5, 0.5)], []),
        ([{"advantage/std": s} for s in (0.1, 0.0, 0.0, 0.0)], ["no-spread"]),
        ([{"reward/mean": 0.8}] * 12 + [{"reward/mean": 0.1}] * 4, ["reward-collapse"]),
        ([{"reward/mean": 0.8}] * 12 + [{"reward/mean": 0.1}] * 3, []),
        (
            [{"train/grad_norm": 1.0}] * 10 + [{"train/grad_norm": 50.0}],
            ["gradient-spike"],
        ),
        ([{"rollout/failed/timeout": 3.0}] * 5, ["failed-judgements"]),
        ([{"host/disk_checkpoints": 1.5}], ["disk-room"]),
        ([{"retries/disk_s": 59.0, "retries/judges_s": 60.0}], []),
        ([{"retries/disk_s": 61.0}, {"retries/judges_s": 61.0}], RETRIED),
        (
            [{"reference/changed": 0.0}, {"reference/changed": 1.0}],
            ["reference-changed"],
        ),
    ],
)
def test_default_rules(rows, names):
    watched = RunWatch(default_rules(), {"mismatch.warn": 1.05})
    found = [
        a.rule.name for step, row in enumerate(rows, 1) for a in watched.look(step, row)
    ]
    assert found == names


def test_a_reward_that_parts_from_its_grader_is_named():
    watched = RunWatch(default_rules(), {"mismatch.warn": 1.05})
    names = []
    for step in range(1, 13):
        share = step / 12
        row = {"reward/mean": 0.3 + 0.5 * share, "grader/strict": 0.3 - 0.2 * share}
        row["reward/std"] = 0.4
        row["grader_gap/strict"] = row["reward/mean"] - row["grader/strict"]
        names += [alarm.rule.name for alarm in watched.look(step, row)]
    assert names == ["reward-gap", "reward-hacking"]
