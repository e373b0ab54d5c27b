"""The log of evaluations: every held-out task's reward, also after a resume."""

import json
import math

import pytest

from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.evaluations import (
    EvaluationLog,
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
    with EvaluationLog(directory) as log:
        log.write(0, [answer(1, 0.5), answer(7, None), answer(3, math.nan)])
        log.write(10, [answer(1, 1.0)])
    first, second = read_evaluations(directory)
    assert (first.step, second.step) == (0, 10)
    assert first.rewards == {"1": 0.5, "7": None, "3": None}
    assert second.rewards == {"1": 1.0}
    assert second.prompts == {"1": prompt_digest("prompt of 1")}


def test_a_resumed_run_writes_later_evaluations_again(directory):
    with EvaluationLog(directory) as log:
        for step in (0, 10, 20):
            log.write(step, [answer(1, float(step))])
    with EvaluationLog(directory, resume_step=10) as log:
        assert log.counts() == {"evaluations.jsonl": 2}
        log.write(20, [answer(1, 7.0)])
    assert [each.rewards["1"] for each in read_evaluations(directory)] == [0, 10, 7]


@pytest.mark.parametrize("tasks", [None, [], {"a": 1}, {"a": ["x"]}])
def test_a_damaged_row_is_refused(directory, tasks):
    directory.evaluations.write_text(json.dumps({"step": 3, "tasks": tasks}) + "\n")
    with pytest.raises(ValueError, match="the row of step 3 is no evaluation"):
        read_evaluations(directory)
