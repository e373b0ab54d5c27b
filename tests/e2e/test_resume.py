"""No work is lost: kill -9 and SIGTERM, then resume, equal the run never stopped."""

import contextlib
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post.records.directory import read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from tests.e2e.conftest import EPISODES, QUICK

STEPS = 24
# Every part that has state: updates from an earlier policy, groups that wait, and a
# reference that follows; and, in EPISODES, episodes that are unfinished when a step is
# taken.
UPDATES = (
    "--update.minibatches=2",
    "--update.epochs=2",
    "--rollout.dynamic-sampling",
    "--algorithm.kl-coefficient=0.01",
    "--algorithm.reference-sync-steps=3",
    "--algorithm.reference-mixup=0.5",
)


def options(run: Path, *more: str) -> list[str]:
    return [
        f"--run-dir={run}",
        f"--steps={STEPS}",
        "--checkpoint.every=2",
        "--eval.every=5",
        "--checkpoint.keep-best=eval/reward",
        # Enough that most answers end.
        "--warm-start.steps=40",
        "--warm-start.examples-per-step=16",
        *QUICK,
        # On one device; a few lengths of rows, each of which is compiled.
        "--update.microbatch-tokens=64",
        "--log-rollouts=parquet",
        *more,
    ]


def weights(run: Path, name: str = "model") -> dict[str, np.ndarray]:
    return load_file(run / name / "model.safetensors")


def rows(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return list(read_rows(file)) if file.exists() else []


@pytest.mark.processes
@pytest.mark.slow("starts three trainers, one after the other")
def test_one_kill_and_resume_is_bit_identical(program, tmp_path, record_property):
    # In the first third, so that the end is far off.
    assert_that_kills_change_nothing(
        program, tmp_path, record_property, EPISODES, steps=8, kill_after=[2]
    )


@pytest.mark.all
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "steps"),
    [(UPDATES, STEPS), (EPISODES, 12), ((*UPDATES, "--exact"), STEPS)],
    ids=["updates", "episodes", "exact"],
)
def test_kill_and_resume_is_bit_identical(
    program, tmp_path, request, record_property, kind, steps
):
    draw = random.Random(1)
    kills = request.config.getoption("--kills")
    kill_after = sorted(draw.randrange(steps) for _ in range(kills))
    assert_that_kills_change_nothing(
        program, tmp_path, record_property, kind, steps=steps, kill_after=kill_after
    )


def assert_that_kills_change_nothing(
    program, tmp_path, record_property, kind, *, steps, kill_after
):
    """A run killed after each of these rows ends as an uninterrupted one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = program("launch.grpo", *options(whole, *kind, f"--steps={steps}"))
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output

    moments = random.Random(0)
    killed_at = []
    for wanted in kill_after:
        process = program("launch.grpo", *options(broken, *kind, f"--steps={steps}"))
        # A row that an earlier process left is there at once: then it is killed while
        # it starts, else anywhere in the step, evaluation or checkpoint that follows.
        starting = len(rows(broken)) > wanted
        deadline = time.monotonic() + 1200
        while len(rows(broken)) <= wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=moments.uniform(0, 8 if starting else 0.4))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        killed_at.append(len(rows(broken)))
    # In the file of pytest --junit-xml.
    record_property("rows of metrics at the kills", killed_at)
    process = program("launch.grpo", *options(broken, *kind, f"--steps={steps}"))
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    assert killed_at, "the run ended before it could be killed"

    for folder in ("model", "best"):
        expected, found = weights(whole, folder), weights(broken, folder)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(value, found[name], err_msg=name)
    assert (whole / "best.json").read_text() == (broken / "best.json").read_text()
    assert [row["step"] for row in rows(broken)] == list(range(steps + 1))
    for one, other in zip(rows(whole), rows(broken), strict=True):
        for name, value in one["metrics"].items():
            if not name.startswith(UNSTEADY):
                assert other["metrics"][name] == value, (one["step"], name)
    written, again = (
        {p.name: p.read_bytes() for p in (run / "rollouts").iterdir()}
        for run in (whole, broken)
    )
    assert sorted(again) == [f"step_{n:06d}.parquet" for n in range(1, steps + 1)]
    assert written == again
    if kind is EPISODES:
        waiting = [row["metrics"].get("rollout/in_flight", 0) for row in rows(whole)]
        assert max(waiting) > 0, "no episode was under way: the test shows nothing"


@pytest.mark.processes
@pytest.mark.slow("starts two trainers")
def test_sigterm_saves_and_says_so_and_the_same_command_goes_on(program, tmp_path):
    run = tmp_path / "run"
    process = program("launch.grpo", *options(run, "--steps=10000"))
    deadline = time.monotonic() + 1200
    while len(rows(run)) <= 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    assert "SIGTERM: finishing this step, then saving" in output
    last = rows(run)[-1]["step"]
    assert f"stopped after step {last}, all of it saved" in output
    assert (run / "report.html").exists()

    process = program("launch.grpo", *options(run, f"--steps={last + 2}"))
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    assert f"resumed at step {last} of {last + 2}" in output
    assert [row["step"] for row in rows(run)] == list(range(last + 3))
