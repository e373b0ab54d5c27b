"""The page of an evaluation: its tables, its samples, and what it escapes."""

import re

import pytest

from jaxrl_post.records.report.evaluation import MAX_SAMPLES, evaluation_page, lines_of

HOSTILE = "</pre></style></title><script>alert(1)</script>\x1b[31m{{ 1 }}"

AGAINST = {
    "tasks": 10,
    "unpaired": 2,
    "means": [0.8, 0.3],
    "difference": -0.5,
    "interval": [-0.8, -0.2],
    "gained": 0,
    "lost": 5,
    "p_value": 0.0625,
    "method": "exact McNemar test",
    "verdict": "worse",
    "regressed": True,
    "differs": ["max_tokens"],
}


def constraint(verdict: str, **changes):
    fields = {
        "metric": "accuracy",
        "at_least": 0.25,
        "at_most": None,
        "strict": False,
        "value": 0.3,
        "interval": [0.1078, 0.6032],
        "verdict": verdict,
        "failed": verdict == "broken",
        "known": [],
    }
    return {**fields, **changes}


def part(**changes):
    fields = {
        "tasks": 10,
        "samples": 10,
        "failed": 1,
        "accuracy": 0.3,
        "interval": [0.1078, 0.6032],
        "pass_at": {},
        "mean_reward": 0.3,
        "mean_tokens": 12.5,
        "max_tokens": 20,
        "stopped": 0.9,
        "metrics": {"length": 4.25},
        "constraints": [],
        "against": None,
        "config": {"env": "arithmetic", "split": "eval"},
    }
    return {**fields, **changes}


def results(*parts, **changes):
    config = {"model": "tiny", "env": "arithmetic", "suite": "s.toml", "against": None}
    common = {"seconds": 62.0, "command": "", "versions": {"jax": "1"}}
    return {"parts": [*parts], **common, "config": config, **changes}


def sample(task: int, **changes):
    fields = {
        "task_id": task,
        "sample_index": 0,
        "prompt": f"prompt of {task}",
        "completion": f"answer to {task}",
        "reward": 0.0,
        "finish_reason": "stop",
        "error": "",
        "lost": False,
    }
    return {**fields, **changes}


def test_the_page_has_every_part_and_verdict():
    sums = part(name="sums", kind="held-out", constraints=[constraint("undecided")])
    hard = part(name="hard", kind="adversarial", against=AGAINST)
    page = evaluation_page(results(sums, hard, alone=["part x is new"]), {})
    assert "<b>sums</b>" in page
    assert "adversarial" in page
    assert "1 failed" in page
    assert "of 2 constraints and comparisons; 1 undecided" in page
    assert '<b class="muted">undecided</b>' in page
    assert '<b class="bad">regressed</b>' in page
    assert "0.3 (95%: 0.1078 to 0.6032)" in page
    assert "-80.0 to -20.0" in page
    assert "exact McNemar test; sampled otherwise: max_tokens" in page
    assert "part x is new" in page
    assert "left: 10.78%; width: 49.54%" in page
    assert "1 min 2 s" in page


def test_one_evaluation_has_no_verdict():
    alone = part(command="", seconds=1.0, versions={})
    page = evaluation_page(
        {**alone, "config": {**results()["config"], "split": "eval", "suite": None}}, {}
    )
    assert "<h2>Scores</h2>" in page
    assert "Verdict" not in page
    assert "Constraints" not in page


def test_lines_say_what_was_asked_and_found():
    bounds = {"at_most": 0.5, "strict": True}
    unknown = {"value": None, "interval": None, "known": ["accuracy", "length"]}
    found = [
        *lines_of(
            part(
                name="a",
                constraints=[
                    constraint("held", **bounds),
                    constraint("broken", metric="lenth", **unknown),
                ],
                against=AGAINST,
            )
        )
    ]
    assert [line.asked for line in found] == [
        "accuracy at least 0.25 and at most 0.5, strict",
        "lenth at least 0.25",
        "accuracy against the baseline",
    ]
    assert found[1].found == "not measured; there are accuracy, length"
    assert found[2].found == (
        "80.0% to 30.0%: -50.0 points (95%: -80.0 to -20.0), p 0.062, on 10 tasks"
    )
    assert [line.failed for line in found] == [False, True, True]
    assert found[2].verdict == "regressed"


def test_few_samples_are_shown_the_lost_first():
    many = [sample(i, lost=i == 30) for i in range(40)]
    page = evaluation_page(results(part(name="a", kind="held-out")), {"a": many})
    assert "Not solved: a (40)" in page
    assert page.count("<article") == MAX_SAMPLES
    assert page.index("answer to 30") < page.index("answer to 0")
    assert f"{40 - MAX_SAMPLES} more in the file of completions" in page
    long = [sample(0, completion="x" * 5000)]
    page = evaluation_page(results(part(name="a", kind="held-out")), {"a": long})
    assert "[3000 more characters]" in page


@pytest.mark.parametrize("place", ["prompt", "completion", "error", "finish_reason"])
def test_texts_are_escaped_and_shown(place):
    shown = {"a": [sample(0, **{place: HOSTILE})]}
    page = evaluation_page(results(part(name="a", kind="held-out")), shown)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "␛[31m{{ 1 }}" in page
    policy = re.search(r'Policy" content="([^"]*)"', page)
    assert policy[1] == "default-src 'none'; style-src 'unsafe-inline'"


def test_names_are_escaped():
    hostile = part(name="a", kind="held-out", metrics={HOSTILE: 1.0})
    hostile["config"] = {**hostile["config"], "env": HOSTILE}
    page = evaluation_page(results(hostile, command=HOSTILE), {})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 3
