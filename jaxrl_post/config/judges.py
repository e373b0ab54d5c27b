"""Checks of the options that say where answers are judged."""

import importlib.util

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs.workers.hosts import check_hosts

__all__ = ["check_judges"]

# Reserved for each process unless an option says otherwise.
CPUS = 1.0


def check_judges(judges: str, reward_cpus: float, section: str) -> None:
    """Refuses judges that are nowhere, and CPUs that nobody reserves.

    Args:
        judges: the option of this name, as `check_hosts` has it.
        reward_cpus: the option of this name.
        section: of both options, such as "rollout.", for messages.

    Raises:
        ConfigError: names the option.

    >>> check_judges("ray.10.0.0.1", 1.0, "rollout.")
    Traceback (most recent call last):
    ConfigError: --rollout.judges: must be local, ray, ... got 'ray.10.0.0.1'
    """
    try:
        check_hosts(judges)
    except ValueError as error:
        raise ConfigError(f"--{section}judges: {error}") from error
    if judges == "local" and reward_cpus != CPUS:
        raise ConfigError(
            f"--{section}reward-cpus: processes of this machine reserve no CPUs; got "
            f"{reward_cpus:g}; drop the option, or give --{section}judges ray"
        )
    if judges != "local" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"--{section}judges {judges}: there is no module 'ray': "
            "pip install 'jaxrl_post[ray]'"
        )
