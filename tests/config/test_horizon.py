"""Schedules end where the run that began said, however long its continuation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.horizon import (
    check_schedules,
    optimizer_steps,
    with_horizons,
    with_warmups,
)
from jaxrl_post.config.offline import PreferenceConfig, RewardConfig, SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, UpdateConfig, differences
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
            "--optimizer.schedule-steps: has no effect with --optimizer.schedule "
            "constant; got 9. Drop the option (its default is None), or choose linear "
            "or cosine or wsd",
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
    steps = optimizer_steps(with_horizons(config, None))
    # An implicit reward model takes one pass over a batch.
    assert steps == {"optimizer": 6, "critic.optimizer": 10, "prm.optimizer": 5}
    policy, critic = steps["optimizer"], steps["critic.optimizer"]
    assert moved(optimizer, policy, 8) == [True] * 6 + [False] * 2
    assert moved(optimizer, critic, 11) == [True] * 10 + [False]


def test_a_schedule_that_ends_above_0_goes_on_at_its_last_rate():
    final = dataclasses.replace(LINEAR, final_ratio=0.1)
    began = saved(run(200, final, critic=final))
    longer = run(300, final, critic=final)
    assert ends(with_horizons(longer, began)) == (200, 200)
    early = dataclasses.replace(final, schedule_steps=100)
    check_schedules(run(200, early))
    assert ends(with_horizons(run(200, early), None)) == (100, None)


def warmups(config: RunConfig) -> tuple[int, int | None]:
    critic = config.critic.optimizer if isinstance(config, RLConfig) else None
    return config.optimizer.warmup_steps, critic and critic.warmup_steps


def share(ratio: float, **options) -> OptimizerConfig:
    return OptimizerConfig(warmup_ratio=ratio, **options)


def test_a_share_is_one_of_the_optimizer_steps_of_each_network():
    # 8 optimizer steps a step; in the first 20 steps the critic learns alone.
    config = dataclasses.replace(
        run(100, share(0.1), critic=share(0.2), warmup_steps=20),
        update=UpdateConfig(minibatches=4, epochs=2),
    )
    began = with_horizons(config, None)
    assert warmups(began) == (64, 160)
    # A schedule that ends later makes the run no longer.
    later = share(0.1, schedule="linear", schedule_steps=1000)
    assert warmups(with_horizons(run(100, later), None)) == (10, 0)
    # A continuation keeps them, however long it is.
    for steps in (50, 100, 300):
        longer = dataclasses.replace(config, steps=steps)
        found = with_horizons(longer, dataclasses.asdict(began))
        assert warmups(found) == (64, 160)
        assert differences(dataclasses.asdict(began), found) == []


@pytest.mark.parametrize("kind", [SFTConfig, PreferenceConfig, RewardConfig])
@pytest.mark.parametrize(("steps", "expected"), [(200, 20), (3, 1), (1, 1), (64, 6)])
def test_the_warm_up_of_an_offline_run_fits_a_short_one(kind, steps, expected):
    assert warmups(with_horizons(kind(steps=steps), None)) == (expected, None)


def begun(steps: int = 200, **optimizer) -> dict:
    """config.json of a run that fine-tunes; without `warmup_ratio` if it is None."""
    config = SFTConfig(steps=steps, optimizer=OptimizerConfig(**optimizer))
    return dataclasses.asdict(with_horizons(config, None))


def before_shares(steps: int, warmup_steps: int) -> dict:
    found = begun(steps, warmup_steps=warmup_steps)
    for name in ("name", "warmup_ratio", "final_ratio", "decay_ratio", "momentum"):
        del found["optimizer"][name]
    return found


@pytest.mark.parametrize(
    ("earlier", "now", "expected"),
    [
        # The same option, and the same number in another way.
        (begun(warmup_ratio=0.2), share(0.2), 40),
        (begun(warmup_ratio=0.2), OptimizerConfig(warmup_steps=40), 40),
        (begun(3, warmup_ratio=0.1), share(0.1), 1),
        (begun(warmup_steps=40), share(0.2), 40),
        (begun(), OptimizerConfig(), 0),
        # The default of an earlier version was 20 steps.
        (before_shares(1000, 20), SFTConfig().optimizer, 20),
        (before_shares(1000, 5), OptimizerConfig(warmup_steps=5), 5),
        # A recipe had 5 of 160 steps.
        (before_shares(160, 5), share(5 / 160), 5),
        (before_shares(1000, 0), OptimizerConfig(), 0),
    ],
)
def test_the_same_warm_up_is_resumed(earlier, now, expected):
    config = SFTConfig(steps=2000, optimizer=now)
    assert differences(earlier, with_warmups(config, earlier)) == []
    found = with_horizons(config, earlier)
    assert warmups(found) == (expected, None)
    assert differences(earlier, found) == []
    # And resumed again.
    again = dataclasses.asdict(found)
    assert warmups(with_horizons(config, again)) == (expected, None)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (begun(warmup_ratio=0.2), share(0.3)),
        (begun(warmup_ratio=0.2), OptimizerConfig(warmup_steps=41)),
        (begun(warmup_ratio=0.2), OptimizerConfig()),
        (begun(warmup_steps=40), share(0.3)),
        (begun(warmup_steps=40), OptimizerConfig()),
        (before_shares(200, 5), share(0.5)),
    ],
)
def test_another_warm_up_is_refused(earlier, now):
    found = with_warmups(SFTConfig(optimizer=now), earlier)
    changed = differences(earlier, found)
    assert [each.partition(":")[0] for each in changed] == ["optimizer.warmup_steps"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            run(3, OptimizerConfig(warmup_steps=4)),
            "--optimizer.warmup-steps: must be at most 3, the optimizer steps that "
            "this run takes with it, or the learning rate never reaches its peak; got "
            "4. Give fewer, --optimizer.warmup-ratio for a share of the run, or more "
            "--steps",
        ),
        # The policy takes fewer than its critic.
        (
            run(5, OptimizerConfig(warmup_steps=4), warmup_steps=2),
            "--optimizer.warmup-steps: must be at most 3, ",
        ),
        (
            run(5, CONSTANT, critic=OptimizerConfig(warmup_steps=6), warmup_steps=2),
            "--critic.optimizer.warmup-steps: must be at most 5, ",
        ),
        # The schedule is longer than the run.
        (
            run(3, OptimizerConfig("adamw", 1e-3, 4, schedule="linear",
                                   schedule_steps=9)),
            "--optimizer.warmup-steps: must be at most 3, ",
        ),
    ],
)  # fmt: skip
def test_a_warm_up_longer_than_the_run_is_refused(config, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        with_horizons(config, None)
    fits = dataclasses.replace(config, steps=6)
    with_horizons(fits, None)
    # A continuation of fewer steps takes part of the warm-up with which it began.
    began = dataclasses.asdict(with_horizons(fits, None))
    with_horizons(config, began)


def test_epochs_are_what_a_longer_run_needs_where_they_are_given():
    config = run(3, OptimizerConfig(warmup_steps=4))
    with pytest.raises(ConfigError, match=r"or more --epochs$"):
        with_horizons(dataclasses.replace(config, epochs=0.5), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sgd", "beta2": 0.9}, "beta2: has no effect with --optimizer.name s"),
        ({"name": "adafactor", "beta1": 0.8}, "beta1: "),
        ({"name": "lion", "epsilon": 1e-6}, "epsilon: "),
        ({"momentum": 0.9}, "momentum: has no effect with --optimizer.name adamw"),
        ({"name": "adafactor", "moment_dtype": "bfloat16"}, "moment-dtype: "),
        ({"final_ratio": 0.1}, "final-ratio: has no effect with --optimizer.schedule"),
        ({"schedule": "linear", "decay_ratio": 0.2}, "decay-ratio: "),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup-ratio: .* give one"),
    ],
)
@pytest.mark.parametrize("section", ["optimizer", "critic.optimizer"])
def test_options_without_effect_are_refused(options, message, section):
    one = OptimizerConfig(**options)
    config = run(9, one) if section == "optimizer" else run(9, critic=one)
    message = message.replace("--optimizer", f"--{section}")
    with pytest.raises(ConfigError, match=rf"^--{section}.{message}"):
        check_schedules(config)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "sgd", "momentum": 0.0, "moment_dtype": "bfloat16"},
        {"name": "muon", "beta1": 0.8, "beta2": 0.9, "momentum": 0.9, "epsilon": 1e-7},
        {"name": "lion", "beta1": 0.95, "beta2": 0.98, "weight_decay": 1.0},
        {"name": "adafactor", "schedule": "cosine", "final_ratio": 0.1},
        {"schedule": "wsd", "decay_ratio": 0.2, "final_ratio": 0.1},
    ],
)
def test_options_that_are_read_are_not(options):
    check_schedules(run(9, OptimizerConfig(**options)))
