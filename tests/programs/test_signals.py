"""A run that is told to stop, or ends, at any moment: nothing lost, nothing twice."""

import dataclasses
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig
from jaxrl_post.programs.online import run_rl
from jaxrl_post.programs.run import RunResult
from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from jaxrl_post.records.sinks import warnings_shown
from jaxrl_post.records.tracing import Tracing
from tests.programs.trainers import CONFIG, RL, make_model

pytestmark = pytest.mark.processes

STEPS = 4
# Metrics that are of a process, or of its clock.
OWN = UNSTEADY


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
        log_rollouts="parquet",
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
    # Options that may change: the other runs are not traced.
    assert go_on(dataclasses.replace(config, profile="2:3")).completed
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
    for name, steps in (("evaluations", [0, 2, STEPS]), ("diagnostics", [2, STEPS])):
        logs = [
            list(read_rows(Path(each.run_dir or "") / f"{name}.jsonl"))
            for each in (whole, other)
        ]
        assert logs[0] == logs[1], name
        assert [row["step"] for row in logs[0]] == steps
    rollouts, again = (
        {p.name: p.read_bytes() for p in Path(each.run_dir or "", "rollouts").iterdir()}
        for each in (whole, other)
    )
    assert list(sorted(again)) == [f"step_{n:06d}.parquet" for n in range(1, STEPS + 1)]
    assert rollouts == again
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


@pytest.mark.slow("stops and resumes a whole run")
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


def test_a_trace_has_whole_steps_and_the_names_of_their_phases(whole):
    folder = Path(whole.run_dir or "", "profile")
    [trace] = folder.rglob("perfetto_trace.json.gz")
    assert [*trace.parent.glob("*.xplane.pb")]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [each for each in events if each.get("name") == "step"]
    assert sorted(str(each["args"]["step_num"]) for each in steps) == ["2", "3"]
    for step in steps:
        inside = {
            each["name"]
            for each in events
            if each.get("ts", -1) >= step["ts"]
            and each["ts"] + each.get("dur", 0) <= step["ts"] + step["dur"]
        }
        assert {"rollout", "reward", "logprobs", "train"} <= inside


@pytest.mark.parametrize("failed", ["start_trace", "stop_trace"])
def test_a_trace_that_cannot_be_written_costs_no_step(
    whole, tmp_path, monkeypatch, failed
):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the disk is full")

    stop = jax.profiler.stop_trace
    monkeypatch.setattr(jax.profiler, failed, fail)
    out = io.StringIO()
    traced = dataclasses.replace(whole, profile="2:3")
    with (
        warnings_shown(Console(file=out, width=999)),
        Tracing(traced, tmp_path, 1) as tracing,
    ):
        for step in (2, 3, 4):
            with tracing.step(step):
                pass
    assert f"--profile: no trace in {tmp_path}: the disk is full" in out.getvalue()
    if failed == "stop_trace":
        stop()


@pytest.mark.parametrize(
    ("done", "told"),
    [
        (1, ""),
        (2, "the run is at step 2 already, and a step is traced while it is taken; "
            "steps from 3 on are traced"),
        (3, "the run is at step 3 already, and a step is traced while it is taken; "
            "none is traced"),
    ],
)  # fmt: skip
def test_steps_that_were_taken_before_are_not_traced(whole, tmp_path, done, told):
    out = io.StringIO()
    with warnings_shown(Console(file=out, width=999)):
        Tracing(dataclasses.replace(whole, profile="2:3"), tmp_path, done)
    assert out.getvalue() == (f"--profile 2:3: {told}\n" if told else "")


def test_samples_that_are_gone_are_told(whole, tmp_path):
    shutil.copytree(whole.run_dir or "", tmp_path / "run")
    ours = dataclasses.replace(whole, run_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "samples.jsonl").unlink()
    (tmp_path / "run" / "rollouts" / "step_000002.parquet").unlink()
    out = io.StringIO()
    # With no step left it trains nothing.
    run_rl(ours, console=Console(file=out, width=999), command="")
    assert f"samples.jsonl: of what was written up to step {STEPS} (" in out.getvalue()
    lost = (
        f"rollouts: of what was written up to step {STEPS} ({STEPS} rows or files), 3"
    )
    assert lost in out.getvalue()
    assert "metrics.jsonl: of" not in out.getvalue()
