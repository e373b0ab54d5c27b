"""The recipe `prime`, shortened: the policy learns, and so does its reward model."""

import numpy as np
import pytest

from jaxrl_post.records.directory import read_rows


# programs/test_prime.py guards the numbers of a step.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("a warm start, and 20 steps of a model that learns")
def test_the_recipe_learns(program, tmp_path):
    run = tmp_path / "run"
    # As the recipe begins, but for the fall of the learning rates.
    process = program(
        "launch.grpo", "--recipe=prime", "--steps=20", f"--run-dir={run}",
        "--optimizer.schedule=constant", "--optimizer.warmup-steps=5",
        "--prm.optimizer.schedule=constant", "--prm.optimizer.warmup-steps=5",
    )  # fmt: skip
    output, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, output
    rows = {row["step"]: row["metrics"] for row in read_rows(run / "metrics.jsonl")}
    assert rows[20]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.15
    assert rows[1]["prm/loss"] == pytest.approx(np.log(2), abs=1e-5)
    late = np.mean([rows[step]["prm/loss"] for step in range(11, 21)])
    assert late < np.log(2)
    assert rows[1]["prm/process_reward_std"] < 1e-6
    assert rows[20]["prm/process_reward_std"] > 0.01
    assert (run / "prm" / "model.safetensors").exists()
