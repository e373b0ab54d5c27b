"""The end of a learning-rate schedule, which a resumed run keeps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig

__all__ = ["check_schedules", "optimizer_steps", "with_horizons"]

POLICY, CRITIC = "optimizer", "critic.optimizer"


def check_schedules(config: RunConfig) -> None:
    """Refuses a schedule's end that makes no sense.

    Raises:
        ConfigError: names the option.
    """
    for name, optimizer in _optimizers(config).items():
        option, end = _option(name), optimizer.schedule_steps
        if end is None:
            continue
        if optimizer.schedule == "constant":
            raise ConfigError(
                f"{option}: a constant schedule has no end; drop the option, or give "
                f"--{name}.schedule linear or cosine"
            )
        # The length of a run in epochs is known once its data was read.
        if config.epochs is None and end < config.steps:
            raise ConfigError(
                f"{option}: must be at least --steps, {config.steps}, since a "
                f"{optimizer.schedule} schedule ends at 0, and further steps train "
                f"nothing; got {end}"
            )


def with_horizons[Config: RunConfig](
    config: Config, saved: Mapping[str, Any] | None, directory: str = ""
) -> Config:
    """Fills in `schedule_steps`: by default the `steps` with which the run began.

    Linear and cosine schedules reach 0 there. A resumed run with more `steps` keeps
    this end, so it has to give a longer schedule; from the step at which it resumes,
    its learning rate follows the longer schedule.

    Args:
        config: of the run; `schedule_steps` is set if the user gave it.
        saved: the configuration with which the run began, as config.json holds it; None
            for a new run.
        directory: of the run, for messages.

    Raises:
        ConfigError: `steps` is beyond the end; names the directory and the options to
            give.

    >>> from dataclasses import asdict
    >>> linear = OptimizerConfig(schedule="linear")
    >>> began = with_horizons(RunConfig(steps=200, optimizer=linear), None)
    >>> began.optimizer.schedule_steps
    200
    >>> with_horizons(RunConfig(steps=300, optimizer=linear), asdict(began), "runs/a")
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --steps: the linear schedule of the run ...
    """
    found = {
        name: replace(optimizer, schedule_steps=_end(name, optimizer, config, saved))
        for name, optimizer in _optimizers(config).items()
        if optimizer.schedule != "constant"
    }
    ends = {name: optimizer.schedule_steps for name, optimizer in found.items()}
    short = {name: end for name, end in ends.items() if end and end < config.steps}
    if short:
        name, end = min(short.items(), key=lambda item: item[1])
        options = " ".join(f"{_option(each)} {config.steps}" for each in short)
        raise ConfigError(
            f"--steps: the {found[name].schedule} schedule of the run in {directory} "
            f"reaches 0 at step {end}, and further steps train nothing; got "
            f"{config.steps}. Give {options} to make the schedule longer, or another "
            "--run-dir"
        )
    if POLICY in found:
        config = replace(config, optimizer=found[POLICY])
    if CRITIC in found and isinstance(config, RLConfig):
        config = replace(config, critic=replace(config.critic, optimizer=found[CRITIC]))
    return config


def optimizer_steps(config: RunConfig) -> tuple[int, int]:
    """Number of optimizer steps in the schedules of the policy and of the critic.

    The policy takes none while a critic warms up.

    >>> from jaxrl_post.config.critic import CriticConfig
    >>> from jaxrl_post.config.run import UpdateConfig
    >>> critic = CriticConfig(warmup_steps=20)
    >>> update = UpdateConfig(minibatches=4)
    >>> optimizer_steps(RLConfig(steps=100, critic=critic, update=update))
    (320, 400)
    """
    each = config.update.minibatches * config.update.epochs
    policy = config.optimizer.schedule_steps or config.steps
    if not isinstance(config, RLConfig):
        return policy * each, 0
    critic = config.critic.optimizer.schedule_steps or config.steps
    return (policy - config.critic.warmup_steps) * each, critic * each


def _optimizers(config: RunConfig) -> dict[str, OptimizerConfig]:
    """The optimizers of a run, by the option that holds them."""
    found = {POLICY: config.optimizer}
    if isinstance(config, RLConfig):
        found[CRITIC] = config.critic.optimizer
    return found


def _option(name: str) -> str:
    return f"--{name}.schedule-steps"


def _end(
    name: str,
    optimizer: OptimizerConfig,
    config: RunConfig,
    saved: Mapping[str, Any] | None,
) -> int:
    if optimizer.schedule_steps is not None or saved is None:
        return optimizer.schedule_steps or config.steps
    section: Mapping[str, Any] = saved
    for part in name.split("."):
        section = section.get(part, {})
    return section.get("schedule_steps") or saved["steps"]
