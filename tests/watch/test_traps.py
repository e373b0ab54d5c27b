"""Every trap is named by a rule, in a run of a tiny model and by the script."""

import dataclasses
import subprocess
import sys

import pytest

from jaxrl_post.config.run import flattened
from jaxrl_post.envs import WorkerPool
from jaxrl_post.learner.learner import UpdateError
from jaxrl_post.programs.watching.traps import TRAPS
from jaxrl_post.watch.alarms import RunWatch
from jaxrl_post.watch.rule import default_rules
from tests.programs.conftest import coin as coin
from tests.programs.trainers import RL, make_trainer


@pytest.fixture(scope="module")
def judges(coin):
    with WorkerPool(coin.Coin()) as pool:
        yield pool


def named(trainer, steps=6) -> dict[str, int]:
    """The rules that raise an alarm, with the step of their first one."""
    options = flattened(dataclasses.asdict(trainer.config))
    watch, found = RunWatch(default_rules(), options), dict[str, int]()
    for step in range(1, steps + 1):
        try:
            metrics, _ = trainer.step(step)
        except UpdateError as error:
            metrics = error.metrics
            steps = step
        for alarm in watch.look(step, metrics):
            found.setdefault(alarm.rule.name, step)
        if step == steps:
            break
    return found


def config(reference: bool):
    coefficient = 0.05 if reference else 0.0
    algorithm = dataclasses.replace(RL.algorithm, kl_coefficient=coefficient)
    return dataclasses.replace(RL, algorithm=algorithm)


@pytest.mark.parametrize("reference", [False, True])
def test_a_run_without_a_trap_is_quiet(coin, judges, reference):
    trainer = make_trainer(coin.Coin(), judges, config(reference))
    # A random model seldom ends its answers.
    assert named(trainer).keys() <= {"truncation"}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_named(coin, judges, name):
    trap = TRAPS[name]
    trainer = make_trainer(coin.Coin(), judges, config(trap.reference))
    trap.plant(trainer)
    found = named(trainer)
    assert found.keys() & set(trap.rules), found


@pytest.mark.all
@pytest.mark.parametrize(
    "arguments",
    [("traps",), ("exploits",), ("clean", "--count", "8")],
    ids=lambda arguments: arguments[0],
)
def test_the_script_finds_every_fault_and_no_other(arguments):
    # Takes minutes: whole runs of the recipes, with their warm starts.
    command = [sys.executable, "-m", "benchmarks.alarms", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
