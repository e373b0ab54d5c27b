"""The folder of rollouts: what a row holds, and what resuming removes."""

import dataclasses
import importlib.util
import json

import numpy as np
import pyarrow.parquet
import pytest

from jaxrl_post.config.algorithm import DistillConfig
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.files import WriteError
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.rollouts import RolloutLog
from jaxrl_post.rollout.episode import Episode, Group, Turn
from jaxrl_post.tokens import Tokens


def turn(ids, **facts) -> Turn:
    logprobs = [-0.5 * number for number in range(len(ids))]
    sampled = Tokens.generated(ids, logprobs, version=3)
    known = {"heard": "ask", "text": "say", "finish_reason": "stop"} | facts
    return Turn(Tokens.context([1, 2]), sampled, **known)


TURNS = (turn([5], reward=1.0, rewards={"own": 1.0}), turn([6, 7], reward=0.5))
LONG = Episode(7, 0, 40, "ask", TURNS, "stop")
FAILED = Episode(7, 1, 40, "as\ud800k", (turn([8], text="\ud800"),), "failed", "broken")
EMPTY = Episode(8, 0, 41, "none", (), "failed", "no turns")
SHORT = Episode(8, 1, 41, "other", (turn([9], reward=0.0),), "length")
GROUPS = [Group(7, (LONG, FAILED)), Group(8, (EMPTY, SHORT))]


def is_trained(episode: Episode) -> bool:
    return not episode.error


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path)


def written(directory, advantages=None, step=12) -> list[dict]:
    log = RolloutLog(directory, resume_step=-1)
    log.write(step, GROUPS, advantages, is_trained)
    [file] = directory.rollouts.iterdir()
    assert file.name == f"step_{step:06d}.parquet"
    return pyarrow.parquet.read_table(file).to_pylist()


def test_a_row_is_an_episode_with_its_tokens(directory):
    rows = written(directory)
    first = rows[0]
    turns = json.loads(first.pop("turns"))
    assert first == {
        "step": 12, "task_id": "40", "prompt_id": 7, "sample_index": 0,
        "prompt": "ask", "completion": "say\n\n> ask\n\nsay", "reward": 1.5,
        "rewards": '{"own": 1.0}', "finish_reason": "stop", "error": "",
        "trained": True, "num_tokens": 7, "num_sampled": 3,
        "token_ids": [1, 2, 5, 1, 2, 6, 7],
        "sampled": [False, False, True, False, False, True, True],
        "logprobs": [0, 0, 0, 0, 0, 0, -0.5],
        "versions": [-1, -1, 3, -1, -1, 3, 3], "advantages": None,
    }  # fmt: skip
    assert [(each["context"], each["sampled"]) for each in turns] == [(2, 1), (2, 2)]
    assert [each["reward"] for each in turns] == [1.0, 0.5]
    assert [row["reward"] for row in rows] == [1.5, None, None, 0.0]
    assert [row["trained"] for row in rows] == [True, False, False, True]
    # A lone surrogate, which models write and UTF-8 does not.
    assert (rows[1]["prompt"], rows[1]["completion"]) == ("as?k", "?")
    assert (rows[2]["token_ids"], rows[2]["turns"]) == ([], "[]")


@pytest.mark.parametrize(
    ("advantages", "wanted"),
    [
        ([[1, -1], [2, -2]], [[1, 1], [-1], [], [-2]]),
        (
            [[[1, 2], [3, 0]], [[0, 0], [4, 0]]],
            [[1, 2], [3], [], [4]],
        ),
    ],
)
def test_an_advantage_stands_at_each_turn(directory, advantages, wanted):
    rows = written(directory, np.array(advantages, np.float32))
    assert [row["advantages"] for row in rows] == wanted


@pytest.mark.parametrize(
    ("resumed", "left"), [(-1, []), (0, []), (2, [1, 2]), (9, [1, 2, 3])]
)
def test_resuming_removes_the_files_of_later_steps_alone(directory, resumed, left):
    log = RolloutLog(directory, resume_step=-1)
    for step in (1, 2, 3):
        log.write(step, GROUPS, None, is_trained)
    assert log.counts() == {"rollouts": 3}
    others = (
        "notes.txt",
        "step_5.parquet",
        "step_000007.parquet.txt",
        "step_a.parquet",
    )
    for name in others:
        (directory.rollouts / name).write_text("mine")
    log = RolloutLog(directory, resume_step=resumed)
    found = {path.name for path in directory.rollouts.iterdir()}
    assert found == {*others, *(f"step_{step:06d}.parquet" for step in left)}
    assert log.counts() == {"rollouts": len(left)}


def test_a_step_that_is_written_again_is_the_same_file(directory):
    written(directory)
    [file] = directory.rollouts.iterdir()
    before = file.read_bytes()
    written(directory)
    assert file.read_bytes() == before


def test_a_path_that_is_no_folder_is_named(directory):
    directory.rollouts.write_text("")
    with pytest.raises(WriteError, match="before is unchanged"):
        written(directory)


def test_what_cannot_be_written_is_refused_with_the_options(monkeypatch):
    config = RLConfig(log_rollouts="parquet")
    check_options(config)
    demonstrations = DistillConfig(data="demonstrations", divergence="forward_kl")
    with pytest.raises(ConfigError, match=r"^--log-rollouts: nothing is sampled with"):
        check_options(dataclasses.replace(config, distill=demonstrations))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^--log-rollouts .*pip install .*\[parquet\]"
    ):
        check_options(config)
