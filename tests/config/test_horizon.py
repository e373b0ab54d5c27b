"""Schedules end where the run that began said, however long its continuation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.horizon import check_schedules, optimizer_steps, with_horizons
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, UpdateConfig
from jaxrl_post.learner.state import make_optimizer
from jaxrl_post.models.spec import ParamSpec

LINEAR = OptimizerConfig(schedule="linear")
COSINE = OptimizerConfig(schedule="cosine")
CONSTANT = OptimizerConfig()


def run(
    steps: int,
    policy: OptimizerConfig = LINEAR,
    *,
    critic: OptimizerConfig = CONSTANT,
    warmup_steps: int = 0,
) -> RLConfig:
    made = CriticConfig(optimizer=critic, warmup_steps=warmup_steps)
    return RLConfig(steps=steps, optimizer=policy, critic=made)


def saved(config: RunConfig) -> dict:
    """config.json of a run that began with a configuration."""
    return dataclasses.asdict(with_horizons(config, None))


def ends(config: RunConfig) -> tuple[int | None, int | None]:
    critic = config.critic.optimizer if isinstance(config, RLConfig) else None
    return config.optimizer.schedule_steps, critic and critic.schedule_steps


def ended(steps: int) -> OptimizerConfig:
    return dataclasses.replace(LINEAR, schedule_steps=steps)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (run(200), (200, None)),
        (run(200, COSINE), (200, None)),
        (run(200, CONSTANT, critic=COSINE), (None, 200)),
        (run(200, ended(500), critic=ended(300)), (500, 300)),
        (run(200, CONSTANT), (None, None)),
        (SFTConfig(steps=9, optimizer=LINEAR), (9, None)),
    ],
)
def test_a_run_begins_with_ends_at_its_steps_or_where_it_was_told(config, expected):
    assert ends(with_horizons(config, None)) == expected


@pytest.mark.parametrize("steps", [1, 199, 200])
def test_a_continuation_keeps_the_end(steps):
    began = saved(run(200, LINEAR, critic=COSINE))
    assert ends(with_horizons(run(steps, LINEAR, critic=COSINE), began)) == (
        200,
        200,
    )


def test_a_continuation_within_a_longer_schedule_needs_no_option():
    began = saved(run(200, ended(500)))
    assert ends(with_horizons(run(400), began)) == (500, None)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (run(200), "--optimizer.schedule-steps 300"),
        (run(200, COSINE), "--optimizer.schedule-steps 300"),
        (
            run(200, CONSTANT, critic=LINEAR),
            "--critic.optimizer.schedule-steps 300",
        ),
        (
            run(200, LINEAR, critic=LINEAR),
            "--optimizer.schedule-steps 300 --critic.optimizer.schedule-steps 300",
        ),
    ],
)
def test_steps_that_would_train_nothing_are_refused_with_the_options_to_give(
    config, options
):
    longer = dataclasses.replace(config, steps=300)
    with pytest.raises(
        ConfigError,
        match=r"^--steps: the (linear|cosine) schedule of the run in runs/a reaches 0 "
        r"at step 200, and further steps train nothing; got 300\. "
        rf"Give {re.escape(options)} to make the schedule longer, "
        "or another --run-dir$",
    ):
        with_horizons(longer, saved(config), "runs/a")


def test_the_options_that_a_refusal_names_are_enough_and_are_remembered():
    began = saved(run(200, LINEAR, critic=LINEAR))
    longer = with_horizons(run(300, ended(300), critic=ended(300)), began)
    assert ends(longer) == (300, 300)
    again = run(300, LINEAR, critic=LINEAR)
    assert ends(with_horizons(again, dataclasses.asdict(longer))) == (300, 300)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            run(9, dataclasses.replace(ended(9), schedule="constant")),
            "--optimizer.schedule-steps: a constant schedule has no end; drop the "
            "option, or give --optimizer.schedule linear or cosine",
        ),
        (
            run(9, critic=ended(8)),
            "--critic.optimizer.schedule-steps: must be at least --steps, 9, since a "
            "linear schedule ends at 0, and further steps train nothing; got 8",
        ),
    ],
)
def test_an_end_that_makes_no_sense_is_refused(config, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_schedules(config)


def moved(optimizer: OptimizerConfig, num_steps: int, count: int) -> list[bool]:
    """Whether each of so many optimizer steps changes a parameter."""
    specs = {"w": ParamSpec((1,), ("embed",))}
    transformation = make_optimizer(optimizer, specs, num_steps)
    params = {"w": jnp.ones(1)}
    state, found = transformation.init(params), []
    for _ in range(count):
        # Optax promotes its counts.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transformation.update(params, state, params)
        found.append(bool(updates["w"][0] != 0))
    return found


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_each_network_learns_to_its_last_step_and_not_beyond(schedule):
    # 5 steps of 2 updates; in the first 2 steps the critic learns alone.
    optimizer = OptimizerConfig(schedule=schedule)
    config = dataclasses.replace(
        run(5, optimizer, critic=optimizer, warmup_steps=2),
        update=UpdateConfig(epochs=2),
    )
    policy, critic = optimizer_steps(with_horizons(config, None))
    assert (policy, critic) == (6, 10)
    assert moved(optimizer, policy, 8) == [True] * 6 + [False] * 2
    assert moved(optimizer, critic, 11) == [True] * 10 + [False]
