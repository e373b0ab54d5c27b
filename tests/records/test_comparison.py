"""A page that compares runs: curves, options that differ, paired tests."""

import json

import pytest

from jaxrl_post.records.directory import RunDescription, RunDirectory
from jaxrl_post.records.report.comparison import compare_evaluations, write_comparison
from jaxrl_post.records.sinks import MetricsLog
from launch import report
from tests.browser import dom_of, needs_browser

ATTACK = "<script>alert(1)</script><img src=x>"


def run(path, metrics, evaluations=(), prompts="p", **config):
    """Writes the logs of a run: metrics by step, rewards by task of evaluations."""
    directory = RunDirectory(path)
    with MetricsLog(directory, clock=lambda: 0.0) as log:
        for step, values in metrics.items():
            log.write(step, values)
    directory.describe(RunDescription("c", "m", 1, "dp1", {}, config))
    with directory.evaluations.open("w") as file:
        for step, rewards in evaluations:
            tasks = {task: [prompts, reward] for task, reward in rewards.items()}
            file.write(json.dumps({"step": step, "tasks": tasks}) + "\n")
    return directory


@pytest.fixture
def two(tmp_path):
    """Two runs with 10 tasks; the second gains 6 and loses 1."""
    before = {str(n): float(n < 3) for n in range(10)}
    after = {str(n): float(n >= 1) for n in range(9)} | {"9": 0.0}
    return (
        run(
            tmp_path / "x" / "run",
            {1: {"reward/mean": 0.25, "mine": 1.0}, 2: {"reward/mean": 0.5}},
            [(0, dict.fromkeys(before, 0.0)), (2, before)],
            seed=1,
            optimizer={"learning_rate": 1.0},
        ),
        run(
            tmp_path / "y" / "run",
            {1: {"reward/mean": 0.75, "critic/loss": 3.0}},
            [(1, after)],
            seed=2,
            optimizer={"learning_rate": 1.0},
        ),
    )


def test_last_evaluations_are_tested_task_by_task(two):
    found = compare_evaluations(*two)
    assert found.steps == (2, 1)
    accuracy = found.accuracy
    assert accuracy is not None
    assert accuracy.means == pytest.approx((0.3, 0.8))
    assert (accuracy.gained, accuracy.lost) == (6, 1)
    # McNemar: 2 * (C(7, 0) + C(7, 1)) / 2^7.
    assert accuracy.p_value == 2 * (1 + 7) / 2**7
    assert found.notes == ()


def test_other_prompts_and_failed_judgements_are_told(tmp_path):
    metrics = {1: {"reward/mean": 0.5}}
    first = run(tmp_path / "a", metrics, [(1, {"1": 1.0, "2": None, "3": 0.4})])
    second = run(
        tmp_path / "b",
        metrics,
        [(1, {"1": 1.0, "2": 1.0, "3": 0.6})],
        eval={"solved_reward": 0.5},
    )
    found = compare_evaluations(first, second)
    assert found.accuracy is not None
    # Task 2 counts as not solved; its reward counts for nothing.
    assert found.accuracy.means == pytest.approx((1 / 3, 1.0))
    assert found.reward is not None
    assert found.reward.tasks == 2
    assert found.reward.difference == pytest.approx(0.1)
    assert len(found.notes) == 2
    assert "1 in one run and of 0.5 in the other" in found.notes[0]
    assert "1 tasks have an answer that could not be judged" in found.notes[1]
    other = run(tmp_path / "c", metrics, [(1, {"1": 1.0})], prompts="other")
    found = compare_evaluations(first, other)
    assert found.accuracy is None
    assert "1 tasks have other prompts" in found.notes
    assert "no task is in both evaluations" in found.notes
    none = run(tmp_path / "d", metrics)
    assert compare_evaluations(first, none).steps is None


def test_tasks_of_one_evaluation_alone_are_told(tmp_path):
    metrics = {1: {"reward/mean": 0.5}}
    first = run(tmp_path / "a", metrics, [(1, {"1": 1.0, "2": 1.0, "3": 0.0})])
    second = run(tmp_path / "b", metrics, [(1, {"1": 1.0, "4": 0.0})])
    found = compare_evaluations(first, second)
    assert found.notes == ("3 tasks are in one of the two evaluations alone",)


def test_page_has_curves_options_and_tests(two, tmp_path):
    page = write_comparison(two, tmp_path / "page.html").read_text()
    # The names tell the runs apart.
    assert "<title>x/run and y/run</title>" in page
    for title in ("Reward", "mine", "Critic&#39;s loss"):
        assert f"<h3>{title}</h3>" in page
    assert "A 0.5, B 0.75" in page
    options = page[page.index("Options that differ (1)") :]
    assert "<th>seed</th><td>1</td><td>2</td>" in options
    assert "learning_rate" not in options
    assert "30.0% → 80.0%; difference 50.0%" in page
    assert "p = 0.12, 10 tasks, 6 gained, 1 lost" in page
    # Rewards of 0 and 1 are tested once.
    assert page.count("exact McNemar") == 1


def test_texts_of_runs_are_no_markup(tmp_path):
    runs = [
        run(tmp_path / f"{n}{ATTACK.replace('/', '')}", {1: {ATTACK: 1.0}}, option=n)
        for n in range(2)
    ]
    page = write_comparison(runs, tmp_path / "page.html", title=ATTACK).read_text()
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert") >= 3


def test_runs_are_named_if_they_cannot_be_compared(tmp_path, two, capsys):
    with pytest.raises(ValueError, match="2 to 8 runs, got 9"):
        write_comparison([two[0]] * 9, tmp_path / "page.html")
    missing = str(tmp_path / "none")
    assert report.main([str(two[0].path), missing]) == 1
    assert f"{missing} is no run directory" in capsys.readouterr().out.replace("\n", "")
    assert report.main([]) == 1


def test_only_pages_are_replaced(tmp_path, two, capsys):
    path, taken = str(two[0].path), tmp_path / "metrics.jsonl"
    assert report.main([path, path, "--output", str(taken)]) == 1
    assert "--output: must end in .html" in capsys.readouterr().out
    assert not taken.exists()
    page = tmp_path / "one.html"
    assert report.main([path, "--output", str(page)]) == 0
    assert "<h3>Reward</h3>" in page.read_text()


def test_program_writes_the_page(tmp_path, two, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [str(each.path) for each in two]
    assert report.main([*paths, "--title", "Both"]) == 0
    assert "report: comparison.html" in capsys.readouterr().out
    assert "<title>Both</title>" in (tmp_path / "comparison.html").read_text()


@needs_browser
def test_a_browser_draws_a_line_for_each_run(two, tmp_path):
    drawn = dom_of(write_comparison(two, tmp_path / "page.html"), tmp_path / "profile")
    assert drawn.count('class="plot js-plotly-plot"') == 3
    reward = drawn[drawn.index("<h3>Reward</h3>") : drawn.index("<h3>mine</h3>")]
    assert reward.count('class="trace scatter') >= 2
