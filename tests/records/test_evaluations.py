"""Evaluations in evaluations.jsonl: every held-out task's reward and prompt."""

import json
import math

import pytest

from jaxrl_post.records.directory import JsonLines, RunDirectory
from jaxrl_post.records.rows.evaluations import (
    evaluation_row,
    prompt_digest,
    read_evaluations,
)
from jaxrl_post.rollout.episode import Episode, Turn
from jaxrl_post.tokens import Tokens


def answer(task, reward):
    context, said = Tokens.context([5]), Tokens.generated([7], [-0.5], version=0)
    turn = Turn(context, said, f"prompt of {task}", "4", "stop", reward or 0.0)
    error = "" if reward is not None else "the judge timed out"
    return Episode(0, 0, task, f"prompt of {task}", (turn,), error=error)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path)


def test_rewards_and_prompts_by_task(directory):
    assert read_evaluations(directory) == []
    rows = [
        evaluation_row(0, [answer(1, 0.5), answer(7, None), answer(3, math.nan)]),
        evaluation_row(10, [answer(1, 1.0)]),
    ]
    log = JsonLines(directory.evaluations, None)
    log.append(rows)
    log.close()
    first, second = read_evaluations(directory)
    assert (first.step, second.step) == (0, 10)
    assert first.rewards == {"1": 0.5, "7": None, "3": None}
    assert second.rewards == {"1": 1.0}
    assert second.prompts == {"1": prompt_digest("prompt of 1")}


@pytest.mark.parametrize(
    "tasks",
    [
        None,
        [],
        {"a": 1},
        {"a": ["x"]},
        {"a": "xy"},
        {"a": ["x", "1.0"]},
        {"a": ["x", math.nan]},
    ],
)
def test_a_damaged_row_is_refused(directory, tasks):
    directory.evaluations.write_text(json.dumps({"step": 3, "tasks": tasks}) + "\n")
    with pytest.raises(ValueError, match="the row of step 3 is no evaluation"):
        read_evaluations(directory)
