"""Verdicts on evaluations: constraints, and comparisons with a baseline."""

import json

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.files.suite import MetricConstraint
from jaxrl_post.programs.evaluation.verdicts import (
    Baseline,
    compared,
    judged,
    read_baseline,
    solved_by_task,
)
from jaxrl_post.programs.intervals import interval_over_tasks, wilson_interval
from jaxrl_post.rollout import Episode, Group, Turn
from jaxrl_post.tokens import Tokens


def episode(task: int, reward: float | None, *, tokens=3, finish="stop", **metrics):
    said = Tokens.generated([1] * tokens, [0.0] * tokens, version=0)
    turn = Turn(Tokens.context([1]), said, "?", "!", finish, reward, metrics=metrics)
    return Episode(
        task, 0, task, "?", (turn,), finish, "" if reward is not None else "raised"
    )


# 20 tasks: 14 are solved, 2 could not be judged, 3 of 18 are cut.
GROUPS = [
    *(Group(i, (episode(i, 1.0, tokens=2 + i % 3, even=i % 2),)) for i in range(14)),
    Group(14, (episode(14, 0.5, even=0),)),
    *(Group(i, (episode(i, None),)) for i in (15, 16)),
    *(Group(i, (episode(i, 0.0, finish="length"),)) for i in range(17, 20)),
]


def verdict(metric: str, **bounds):
    return judged(MetricConstraint(metric, **bounds), GROUPS, solved_reward=1.0)


@pytest.mark.parametrize(
    ("metric", "value", "interval"),
    [
        ("accuracy", 0.7, wilson_interval(0.7, 20)),
        ("failed", 0.1, wilson_interval(0.1, 20)),
        ("stopped", 15 / 18, wilson_interval(15 / 18, 18)),
        ("even", 7 / 15, wilson_interval(7 / 15, 15)),
    ],
)
def test_rates_have_the_interval_of_a_proportion(metric, value, interval):
    found = verdict(metric, at_least=0.0)
    assert found.value == pytest.approx(value)
    assert found.interval == pytest.approx(interval)
    assert found.verdict == "held"


@pytest.mark.parametrize(
    ("metric", "value"), [("mean_reward", 14.5 / 18), ("mean_tokens", 53 / 18)]
)
def test_other_metrics_have_a_bootstrap_over_tasks(metric, value):
    found = verdict(metric, at_least=100.0)
    assert found.value == pytest.approx(value)
    assert found.interval is not None
    low, high = found.interval
    assert low < value < high < low + 0.8
    assert found.verdict == "broken"


# The accuracy is 0.7, with an interval from 0.481 to 0.855.
@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"at_least": 0.48}, "held"),
        ({"at_least": 0.49}, "undecided"),
        ({"at_least": 0.85}, "undecided"),
        ({"at_least": 0.86}, "broken"),
        ({"at_most": 0.86}, "held"),
        ({"at_most": 0.5}, "undecided"),
        ({"at_most": 0.48}, "broken"),
        ({"at_least": 0.48, "at_most": 0.86}, "held"),
        ({"at_least": 0.48, "at_most": 0.85}, "undecided"),
        ({"at_least": 0.2, "at_most": 0.4}, "broken"),
    ],
)
def test_a_constraint_is_held_by_the_whole_interval(bounds, expected):
    for strict in (False, True):
        found = verdict("accuracy", strict=strict, **bounds)
        assert found.verdict == expected
        worst = {"undecided", "broken"} if strict else {"broken"}
        assert found.failed == (expected in worst)


def test_samples_of_a_task_are_no_further_tasks():
    groups = [
        Group(i, tuple(episode(i, float(j < solved)) for j in range(4)))
        for i, solved in enumerate((4, 4, 0, 1))
    ]
    found = judged(MetricConstraint("accuracy", 0.1), groups, solved_reward=1.0)
    shares = [1.0, 1.0, 0.0, 0.25]
    assert (found.value, found.interval) == (0.5625, interval_over_tasks(shares, 16))


def test_a_metric_that_there_is_not_breaks_its_constraint():
    found = verdict("evn", at_least=0.0)
    assert (found.value, found.interval, found.verdict) == (None, None, "broken")
    assert found.failed
    assert found.known == (
        *("accuracy", "even", "failed", "mean_reward", "mean_tokens", "stopped"),
    )


def test_scores_are_named_by_prompt():
    hashes = [f"hash {i}" for i in range(20)]
    found = solved_by_task(hashes, GROUPS, solved_reward=0.5)
    assert found == {name: [int(i < 15)] for i, name in enumerate(hashes)}


def by_task(*solved: int):
    return {str(i): [each] for i, each in enumerate(solved)}


@pytest.mark.parametrize(
    ("after", "margin", "expected", "regressed"),
    [
        ([1] * 12, 0.0, "same", False),
        ([1] * 10 + [0] * 2, 0.0, "same", False),
        ([1] * 4 + [0] * 8, 0.0, "worse", True),
        # The interval ends at -0.42.
        ([1] * 4 + [0] * 8, 0.3, "worse", True),
        ([1] * 4 + [0] * 8, 0.5, "worse", False),
    ],
)
def test_a_part_regressed_if_the_whole_interval_is_below_the_margin(
    after, margin, expected, regressed
):
    baseline = Baseline("a.json", {"": by_task(*[1] * 12)}, {"": {}})
    found = compared("", by_task(*after), {}, baseline, margin=margin)
    assert (found.paired.verdict, found.regressed) == (expected, regressed)
    back = Baseline("a.json", {"": by_task(*after)}, {"": {}})
    found = compared("", by_task(*[1] * 12), {}, back)
    assert not found.regressed
    assert found.paired.verdict == {"worse": "better"}.get(expected, expected)


def test_parts_and_sampling_that_differ_are_told():
    then = {"temperature": 0.0, "max_tokens": 5, "stop_ids": [3]}
    now = {"temperature": 0.0, "max_tokens": 7, "stop_ids": [4], "top_k": 1}
    scores = by_task(1, 0)
    baseline = Baseline("a.json", {"x": scores, "y": scores}, {"x": then, "y": then})
    assert compared("x", scores, now, baseline).differs == ("max_tokens", "top_k")
    assert compared("z", scores, now, baseline) is None
    assert [*baseline.alone(["x", "z"])] == [
        "part z is not in a.json, so it is not compared",
    ]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"b": ["1"]}, "a.json has the parts a, and this evaluation has the parts b;"),
        ({"": ["1"]}, "a.json has the parts a, and this evaluation has no suite; comp"),
        (
            {"a": ["7", "8", "9"]},
            "a.json has 2 tasks of part a, and none has the prompt of one of the 3 tas",
        ),
    ],
)
def test_evaluations_with_nothing_in_common_are_refused(tasks, message):
    baseline = Baseline("a.json", {"a": by_task(1, 0)}, {"a": {}})
    with pytest.raises(ConfigError, match=f"^--against: {message}"):
        baseline.check(tasks)
    baseline.check({"a": ["1", "9"], "new": ["3"]})
    more = Baseline("a.json", {"a": by_task(1, 0), "b": by_task(1)}, {"a": {}, "b": {}})
    with pytest.raises(
        ConfigError, match=r"a\.json has the parts b, and this evaluation"
    ):
        more.check({"a": ["1", "9"]})


def test_a_baseline_is_an_evaluation_or_a_suite(tmp_path):
    file = tmp_path / "a.json"
    one = {"by_task": {"x": [1, 0]}, "sampling": {"temperature": 1.0}}
    file.write_text(json.dumps(one))
    assert read_baseline(str(file)).by_task == {"": {"x": [1, 0]}}
    file.write_text(json.dumps({"parts": [{"name": "a", **one}]}))
    found = read_baseline(str(file))
    assert found.by_task == {"a": {"x": [1, 0]}}
    assert found.sampling == {"a": {"temperature": 1.0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*: not JSON"),
        ("[]", "has no by_task with scores of 0 and 1 for each task; results of earli"),
        ('{"accuracy": 1}', "has no by_task.*: evaluate the baseline again with --out"),
        ('{"by_task": {}}', "has no by_task"),
        ('{"by_task": {"a": []}}', "has no by_task"),
        ('{"by_task": {"a": [0.5]}}', "has no by_task"),
        ('{"parts": {"by_task": {"a": [1]}}}', "has no by_task"),
        ('{"parts": [{"by_task": {"a": [1]}, "name": 3}]}', "has no by_task"),
        (
            json.dumps({"parts": [{"by_task": {"a": [1]}, "name": "x"}] * 2}),
            "has two parts of one name, in the parts x, x",
        ),
    ],
)
def test_results_without_scores_are_no_baseline(content, message, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=rf"^--against: .*{message}"):
        read_baseline(str(file))
