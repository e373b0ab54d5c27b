"""A run that is told to stop, or ends, at any moment: nothing lost, nothing twice."""

import dataclasses
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.run import RunResult
from jaxrl_post.records.directory import read_rows
from tests.programs.trainers import CONFIG, RL, make_model

pytestmark = pytest.mark.processes

STEPS = 4
# Metrics that are of a process, or of its clock.
OWN = ("time/", "throughput/")


@pytest.fixture(scope="module")
def config(coin, tmp_path_factory) -> RLConfig:
    del coin
    model, folder = make_model(), tmp_path_factory.mktemp("signals")
    pretrained.save(folder / "model", CONFIG, model.params, tokenizer=model.tokenizer)
    rollout = dataclasses.replace(
        RL.rollout, reward_deadline_s=120.0, max_failed_share=1.0, guesses=2
    )
    return dataclasses.replace(
        RL,
        run_dir=str(folder / "whole"),
        model=str(folder / "model"),
        # Some episodes have no reward, for which JSON has no number.
        env="coin:Coin?broken=10",
        rollout=rollout,
        steps=STEPS,
        eval=EvalConfig(every=2, num_tasks=12),
        log_samples=16,
        checkpoint=CheckpointConfig(every=100),
        log=(),
    )


def go_on(
    config: RLConfig, should_stop: Callable[[], bool] = lambda: False
) -> RunResult:
    console = Console(file=io.StringIO())
    return run_rl(config, console=console, command="", should_stop=should_stop)


def at(call: int, then: Callable[[], bool] = lambda: True) -> Callable[[], bool]:
    """Tells a run to stop when it asks for the n-th time."""
    asked: list[None] = []
    return lambda: asked.append(None) or (len(asked) == call and then())


def killed() -> bool:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(config) -> RLConfig:
    assert go_on(config).completed
    return config


def assert_same_logs(whole: RLConfig, other: RLConfig) -> None:
    one, two = (
        list(read_rows(Path(each.run_dir or "") / "samples.jsonl"))
        for each in (whole, other)
    )
    assert one == two
    assert {row["step"] for row in one} == {0, 2, STEPS}
    assert {row["split"] for row in one if row["step"] == 2} == {"eval", "train"}
    assert any(row["reward"] is None for row in one if row["split"] == "train")
    left, right = (
        list(read_rows(Path(each.run_dir or "") / "metrics.jsonl"))
        for each in (whole, other)
    )
    assert [row["step"] for row in right] == list(range(STEPS + 1))
    for expected, found in zip(left, right, strict=True):
        assert expected["metrics"].keys() == found["metrics"].keys()
        for name, value in expected["metrics"].items():
            if not name.startswith(OWN):
                assert found["metrics"][name] == value, (expected["step"], name)


@pytest.mark.slow("trains three runs")
def test_a_run_that_is_stopped_before_an_evaluation_makes_it_later_and_once(
    whole, tmp_path
):
    ours = dataclasses.replace(whole, run_dir=str(tmp_path / "run"))
    stopped = go_on(ours, at(2))
    assert (stopped.step, stopped.completed) == (2, False)
    # It ends between the evaluation and the next checkpoint.
    with pytest.raises(KeyboardInterrupt):
        go_on(ours, at(1, killed))
    again = go_on(ours, at(1))
    assert (again.step, again.completed) == (3, False)
    assert go_on(ours).completed
    assert_same_logs(whole, ours)


def test_a_run_that_is_told_to_stop_in_an_evaluation_takes_no_other_step(
    whole, tmp_path
):
    ours = dataclasses.replace(whole, run_dir=str(tmp_path / "run"))
    stopped = go_on(ours, at(3))
    assert (stopped.step, stopped.completed) == (2, False)
    assert go_on(ours).completed
    assert_same_logs(whole, ours)


def test_samples_that_are_gone_are_told(whole, tmp_path):
    shutil.copytree(whole.run_dir or "", tmp_path / "run")
    ours = dataclasses.replace(whole, run_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "samples.jsonl").unlink()
    out = io.StringIO()
    # With no step left it trains nothing.
    run_rl(ours, console=Console(file=out, width=999), command="")
    assert f"samples.jsonl: of what was written up to step {STEPS} (" in out.getvalue()
    assert "metrics.jsonl: of" not in out.getvalue()
