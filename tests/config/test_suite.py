"""Suites of evaluations in files, and what is refused in them."""

import json

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.files.suite import (
    MetricConstraint,
    check_evaluation,
    parts_of,
)

TOML = """
[[parts]]
name = "sums"
env = "arithmetic?level=2"
num_tasks = 5
constraints = [{metric = "accuracy", at_least = 0.5, at_most = 1}]

[[parts]]
name = "rows"
kind = "adversarial"
env = "gsm8k"
data.path = "test.jsonl"
samples = 4
temperature = 1
"""
YAML = """
parts:
  - name: sums
    env: arithmetic?level=2
    num_tasks: 5
    constraints:
      - {metric: accuracy, at_least: 0.5, at_most: 1}
  - name: rows
    kind: adversarial
    env: gsm8k
    data: {path: test.jsonl}
    samples: 4
    temperature: 1
"""


def written(tmp_path, content, name="suite.json") -> EvaluateConfig:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return EvaluateConfig("demo", suite=str(file), max_tokens=7)


def part(**options):
    return {"name": "a", "env": "arithmetic", **options}


@pytest.mark.parametrize(("name", "text"), [("s.toml", TOML), ("s.yaml", YAML)])
def test_a_part_has_its_own_options_and_the_ones_of_the_command_line(
    name, text, tmp_path
):
    sums, rows = parts_of(written(tmp_path, text, name))
    assert (sums.name, sums.kind) == ("sums", "held-out")
    assert sums.constraints == (MetricConstraint("accuracy", 0.5, 1),)
    assert (sums.config.env, sums.config.num_tasks) == ("arithmetic?level=2", 5)
    assert (sums.config.samples, sums.config.max_tokens) == (1, 7)
    assert (rows.name, rows.kind, rows.constraints) == ("rows", "adversarial", ())
    assert (rows.config.data.path, rows.config.samples) == ("test.jsonl", 4)
    assert (rows.config.temperature, rows.config.num_tasks) == (1, None)
    assert sums.config.suite is rows.config.suite is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*suite.json: not JSON"),
        ("[]", "suite.json must hold an object; got"),
        ({}, r"suite.json: parts must be a list .* \[\[parts\]\] in TOML; got None"),
        ({"parts": []}, r"parts must be a list with a table for each part.*got \[\]"),
        ({"part": [part()]}, "suite.json: unknown key 'part'; did you mean parts"),
        ({"parts": [3]}, "suite.json: part 1 must be a table; got 3"),
        ({"parts": [{"env": "guess"}]}, "part 1: name must have letters.*got None"),
        ({"parts": [part(name="a b")]}, "part 1: name must have .*; got 'a b'"),
        ({"parts": [{"name": "a"}]}, "part a: env is missing; give its environment"),
        ({"parts": [part(), part()]}, "2 parts have the name 'a'; give each its own"),
        ({"parts": [part(kind="ood")]}, "part a: kind must be one of held-out, out-"),
        (
            {"parts": [part(num_task=3)]},
            "part a: unknown key 'num_task'; did you mean num_tasks",
        ),
        (
            {"parts": [part(model="tiny")]},
            "part a: model is the same for all parts; give it on the command line",
        ),
        ({"parts": [part(num_tasks="3")]}, "part a: num_tasks must be int.*got '3'"),
        ({"parts": [part(num_tasks=0)]}, "part a: --num-tasks: must be at least 1"),
        ({"parts": [part(samples=2)]}, "part a: --samples: 2 greedy samples of a task"),
        ({"parts": [part(data={"pth": "a"})]}, "part a: data: unknown key 'pth'"),
        (
            {"parts": [part(data={"path": "no/such"})]},
            "part a: --data.path: no/such: No such file",
        ),
        ({"parts": [part(constraints={})]}, "part a: constraints must be a list"),
        ({"parts": [part(constraints=[1])]}, "part a: constraint 1 must be a table"),
        (
            {"parts": [part(constraints=[{"at_least": 1}])]},
            "part a: constraint 1: metric is missing; name one, such as accuracy",
        ),
        (
            {"parts": [part(constraints=[{"metric": "accuracy"}])]},
            "constraint 1: needs a finite at_least or at_most.*; got None and None",
        ),
        (
            {
                "parts": [
                    part(constraints=[{"metric": "a", "at_least": 2, "at_most": 1}])
                ]
            },
            "needs a finite at_least or at_most, or both in this order; got 2 and 1",
        ),
        (
            {"parts": [part(constraints=[{"metric": "a", "atleast": 2}])]},
            "constraint 1: unknown key 'atleast'; did you mean at_least",
        ),
        (
            {"parts": [part(constraints=[{"metric": "a", "at_least": "2"}])]},
            "constraint 1: at_least must be float.*got '2'",
        ),
    ],
)
def test_what_makes_no_suite_is_refused(content, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"^--suite: .*{message}"):
        check_evaluation(written(tmp_path, content))


def test_an_environment_is_given_by_the_parts_alone(tmp_path):
    config = EvaluateConfig("demo", env="guess", suite="suite.toml")
    with pytest.raises(ConfigError, match=r"^--env: each part of --suite suite.toml"):
        check_evaluation(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "no.toml"}, r"^--suite: cannot read no.toml: .*No such file"),
        ({"against": "no.json"}, r"^--against: no.json: No such file"),
        ({"against_margin": 0.1}, r"^--against-margin: is for a comparison; give --ag"),
        ({"output": "a.html"}, r"^--output: names the JSON file.*; got a.html"),
    ],
)
def test_files_and_margins_that_cannot_be(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_evaluation(EvaluateConfig("demo", **options))
