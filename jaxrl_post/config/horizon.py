"""The warm-up and the end of a learning-rate schedule, which a resumed run keeps."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.optimizer import OptimizerConfig, check_optimizer
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig

__all__ = [
    "CRITIC",
    "POLICY",
    "PRM",
    "check_schedules",
    "optimizer_steps",
    "with_horizons",
    "with_warmups",
]

# The options that hold the optimizer of the policy, and of what is trained next to it.
POLICY, CRITIC, PRM = "optimizer", "critic.optimizer", "prm.optimizer"


def check_schedules(config: RunConfig) -> None:
    """Refuses options of an optimizer without effect, and ends that make no sense.

    Raises:
        ConfigError: names the option.
    """
    for name, optimizer in _optimizers(config).items():
        check_optimizer(optimizer, name)
        end = optimizer.schedule_steps
        # The length of a run in epochs is known once its data was read.
        if end is None or config.epochs is not None or end >= config.steps:
            continue
        if not optimizer.final_ratio:
            raise ConfigError(
                f"{_option(name)}: must be at least --steps, {config.steps}, since a "
                f"{optimizer.schedule} schedule ends at 0, and further steps train "
                f"nothing; got {end}"
            )


def with_warmups[Config: RunConfig](config: Config, saved: Mapping[str, Any]) -> Config:
    """Fills in the number of steps of the warm-ups of a run that is continued.

    A share that stayed the same is of the run that began. Another one is the share of
    as many steps, so that a warm-up of another length is refused
    (`config.run.differences`).

    Args:
        config: of the continuation.
        saved: the configuration of the run, as config.json holds it.
    """
    usual = _optimizers(type(config)())
    lengths = _lengths(replace(config, steps=saved.get("steps", config.steps)))
    found = dict[str, OptimizerConfig]()
    for name, optimizer in _optimizers(config).items():
        section, steps = _section(saved, name), optimizer.warmup(lengths[name])
        # An earlier version had no shares, and has what is one by default now.
        ratio = section.get("warmup_ratio", usual[name].warmup_ratio)
        if 0 < optimizer.warmup_ratio == ratio:
            steps = section.get("warmup_steps", steps)
        found[name] = replace(optimizer, warmup_steps=steps)
    return _with_optimizers(config, found)


def with_horizons[Config: RunConfig](
    config: Config, saved: Mapping[str, Any] | None, directory: str = ""
) -> Config:
    """Fills in `schedule_steps` and `warmup_steps` of a run whose length is known.

    Schedules end at the `steps` with which the run began by default, and a share of
    warm-up is one of these. A resumed run with more `steps` keeps both. Where its
    schedule has fallen to 0, it has to give a longer one; from the step at which it
    resumes, its learning rate follows the longer schedule.

    Args:
        config: of the run; `schedule_steps` is set if the user gave it.
        saved: the configuration with which the run began, as config.json holds it; None
            for a new run.
        directory: of the run, for messages.

    Raises:
        ConfigError: `steps` is beyond the end of a schedule that falls to 0; names the
            directory and the options to give. Or a new run is shorter than its warm-up.

    >>> from dataclasses import asdict
    >>> linear = OptimizerConfig(schedule="linear")
    >>> began = with_horizons(RunConfig(steps=200, optimizer=linear), None)
    >>> began.optimizer.schedule_steps
    200
    >>> with_horizons(RunConfig(steps=300, optimizer=linear), asdict(began), "runs/a")
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --steps: the linear schedule of the run ...
    """
    if saved is None:
        config = _with_optimizers(config, _warmed(config))
    else:
        config = with_warmups(config, saved)
    found = {
        name: replace(optimizer, schedule_steps=_end(name, optimizer, config, saved))
        for name, optimizer in _optimizers(config).items()
        if optimizer.schedule != "constant"
    }
    short = {
        name: end
        for name, optimizer in found.items()
        if (end := optimizer.schedule_steps or 0) < config.steps
        and not optimizer.final_ratio
    }
    if short:
        name, end = min(short.items(), key=lambda item: item[1])
        options = " ".join(f"{_option(each)} {config.steps}" for each in short)
        raise ConfigError(
            f"--steps: the {found[name].schedule} schedule of the run in {directory} "
            f"reaches 0 at step {end}, and further steps train nothing; got "
            f"{config.steps}. Give {options} to make the schedule longer, or another "
            "--run-dir"
        )
    return _with_optimizers(config, found)


def _warmed(config: RunConfig) -> dict[str, OptimizerConfig]:
    """The optimizers of a new run, with the number of steps of their warm-ups."""
    found = dict[str, OptimizerConfig]()
    for name, length in _lengths(config).items():
        optimizer = _optimizers(config)[name]
        steps = optimizer.warmup(length)
        if steps > length:
            longer = "--steps" if config.epochs is None else "--epochs"
            raise ConfigError(
                f"--{name}.warmup-steps: must be at most {length}, the optimizer steps "
                "that this run takes with it, or the learning rate never reaches its "
                f"peak; got {steps}. Give fewer, --{name}.warmup-ratio for a share of "
                f"the run, or more {longer}"
            )
        found[name] = replace(optimizer, warmup_steps=steps)
    return found


def optimizer_steps(config: RunConfig) -> dict[str, int]:
    """Number of optimizer steps in each schedule, by the option of the optimizer.

    The policy takes none while a critic warms up. An implicit reward model takes one
    pass over a batch.

    >>> from jaxrl_post.config.critic import CriticConfig
    >>> from jaxrl_post.config.run import UpdateConfig
    >>> critic = CriticConfig(warmup_steps=20)
    >>> update = UpdateConfig(minibatches=4)
    >>> optimizer_steps(RLConfig(steps=100, critic=critic, update=update))
    {'optimizer': 320, 'critic.optimizer': 400, 'prm.optimizer': 400}
    """
    ends = {
        name: optimizer.schedule_steps or config.steps
        for name, optimizer in _optimizers(config).items()
    }
    return _updates(config, ends)


def _lengths(config: RunConfig) -> dict[str, int]:
    """Number of optimizer steps of the whole run, by the option of the optimizer."""
    return _updates(config, dict.fromkeys(_optimizers(config), config.steps))


def _updates(config: RunConfig, steps: Mapping[str, int]) -> dict[str, int]:
    """Number of optimizer steps that each optimizer takes in steps of the run."""
    update = config.update
    alone = config.critic.warmup_steps if isinstance(config, RLConfig) else 0
    return {
        name: (count - alone if name == POLICY else count)
        * update.minibatches
        * (1 if name == PRM else update.epochs)
        for name, count in steps.items()
    }


def _optimizers(config: RunConfig) -> dict[str, OptimizerConfig]:
    """The optimizers of a run, by the option that holds them."""
    found = {POLICY: config.optimizer}
    if isinstance(config, RLConfig):
        found |= {name: attrgetter(name)(config) for name in (CRITIC, PRM)}
    return found


def _with_optimizers[Config: RunConfig](
    config: Config, found: Mapping[str, OptimizerConfig]
) -> Config:
    """Replaces optimizers of a run, by the option that holds them."""
    for name, optimizer in found.items():
        section = name.rpartition(".")[0]
        if section:
            changed = replace(getattr(config, section), optimizer=optimizer)
            config = replace(config, **{section: changed})
        else:
            config = replace(config, optimizer=optimizer)
    return config


def _option(name: str) -> str:
    return f"--{name}.schedule-steps"


def _section(saved: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The options of an optimizer in a saved configuration."""
    for part in name.split("."):
        saved = saved.get(part, {})
    return saved


def _end(
    name: str,
    optimizer: OptimizerConfig,
    config: RunConfig,
    saved: Mapping[str, Any] | None,
) -> int:
    if optimizer.schedule_steps is not None or saved is None:
        return optimizer.schedule_steps or config.steps
    return _section(saved, name).get("schedule_steps") or saved["steps"]
