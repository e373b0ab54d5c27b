"""The alarms of a run on its page, and the charts of what rules read."""

import re

import pytest

from tests.records.test_report import directory as directory
from tests.records.test_report import headings_of, log_alarms, log_metrics, read


def test_alarms_stand_by_rule_before_the_charts(directory):
    log_metrics(directory, {step: {"train/loss": 0.5} for step in range(1, 10)})
    log_alarms(
        directory,
        {"step": 2, "rule": "low", "action": "stop", "evidence": "b 0, below 1"},
        {"step": 4, "first": 2},
        {"step": 9, "first": 7, "evidence": "a 3, above 1"},
    )
    html, page = read(directory)
    assert headings_of(html) == ["Alarms", "Optimization"]
    assert page.headings == ["low", "high ", "Loss"]
    cells = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", html)
    runbook = [("Meaning", "It is high."), ("Usual causes", "Many.")]
    runbook += [("Look at", "Look here.")]
    assert cells == [
        *(*runbook, ("Step 2", "b 0, below 1")),
        *(*runbook, ("Steps 2 to 4", "a 2, above 1")),
        ("Steps 7 to 9", "a 3, above 1"),
    ]
    assert "2 alarms" in page.words
    assert "action: stop" in page.words
    assert not any("more in alarms.jsonl" in words for words in page.words)


def test_of_many_alarms_each_rule_has_its_first(directory):
    log_metrics(directory, {step: {} for step in range(100)})
    many = ({"step": step} for step in range(70))
    log_alarms(directory, *many, {"step": 70, "rule": "late"})
    html, page = read(directory)
    assert page.headings == ["high ", "late"]
    assert len(re.findall("<th>Step ", html)) == 50
    assert "70 alarms" in page.words
    assert "21 more in alarms.jsonl." in page.words


@pytest.mark.parametrize(("metrics", "said"), [({"watch/alarms": 0.0}, 1), ({}, 0)])
def test_a_watched_run_says_that_it_has_no_alarms(directory, metrics, said):
    log_metrics(directory, {1: {"train/loss": 0.5, **metrics}})
    html, page = read(directory)
    assert page.words.count("No alarms.") == said
    assert headings_of(html) == ["Optimization"]


def test_what_is_watched_has_charts(directory):
    rows: dict[int, dict[str, float]] = {
        step: {
            "grader/strict": 0.5,
            "grader/mine": 0.25,
            "grader_gap/strict": 0.25,
            "eval/grader/strict": 0.5,
            "correlation/length": 0.5,
            "watch/alarms": step - 1.0,
            "audit/unsampled": 0.0,
            "audit/misplaced": 0.125,
            "host/memory_bytes": 1e9,
        }
        for step in (1, 2)
    }
    log_metrics(directory, rows)
    html, page = read(directory)
    # Nothing is left for "Other metrics".
    assert headings_of(html) == ["Watch", "Machine"]
    assert page.headings == [
        *("Score by mine", "Score by strict", "Reward minus strict"),
        *("Held-out score by strict", "Reward and length"),
        *("Raised rules", "Batch against episodes", "Memory of process 0"),
    ]
    legend = re.findall(r"</i>([\w ]+) <span>(.*?)</span>", html)
    assert legend == [("raised", "100.0%"), ("misplaced", "100.0%")]
    assert "<h3>Batch against episodes</h3><b>12.5%</b>" in html
