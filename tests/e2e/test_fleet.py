"""Samplers in other processes may die at any time: the run stays the same."""

import itertools
import random
from pathlib import Path

import pytest

from tests.e2e.fleets import COMMON, Fleet, alone, result_of

# 9 runs of 23 disturbances each.
EVERY = [*itertools.product([0, 1, 3], [1, 2, 3])]


def check(
    program, tmp_path: Path, ahead: int, samplers: int, kills: int, parts: int = 1
) -> None:
    """Disturbs a run; it trains on the same samples to the same parameters."""
    options, steps = (*COMMON, f"--rollout.ahead={ahead}"), 12
    draw = random.Random(10 * ahead + samplers)
    with Fleet(program, tmp_path / "run", options, steps, samplers, parts) as fleet:
        fleet.disturb(draw, kills)
        fleet.finish()
    found = result_of(tmp_path / "run")
    whole = alone(program, tmp_path / "whole", (*options, f"--steps={steps}"))
    drawn = [
        (step, row["prompt_id"], row["sample_index"])
        for step, rows in found.trained.items()
        for row in rows
    ]
    assert len({*drawn}) == len(drawn), "a sample was trained on twice"
    assert found.steps == whole.steps
    # Token ids, log-probs, versions and rewards of every sample of every step.
    assert found.trained == whole.trained
    assert found.weights == whole.weights


@pytest.mark.processes
@pytest.mark.slow("starts a trainer and samplers again after each of 6 kills")
def test_kills_change_nothing(program, tmp_path):
    check(program, tmp_path, ahead=1, samplers=2, kills=6)


# `test_kills_change_nothing` guards the same.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("starts a trainer and samplers again after each of 23 kills")
@pytest.mark.parametrize(("ahead", "samplers"), EVERY)
def test_kills_change_nothing_ahead_and_with_any_samplers(
    program, tmp_path, ahead, samplers
):
    check(program, tmp_path, ahead=ahead, samplers=samplers, kills=23)


# `tests/fleet/test_turns.py` guards the same.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow(
    "starts a trainer and two processes of a sampler after each of 6 kills"
)
def test_a_sampler_may_have_several_processes(program, tmp_path):
    check(program, tmp_path, ahead=1, samplers=1, kills=6, parts=2)
