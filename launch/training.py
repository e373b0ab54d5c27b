"""Shared by the training programs: default options and loading."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_post.config.run import RunConfig
from launch.cli import given, help_asked
from launch.recipes.beginnings import Rates, begun

__all__ = ["DEFAULTS", "beginning", "offline", "online"]

# The end of a description, for --help.
DEFAULTS = (
    "\n\nSome defaults depend on --model, --lora.rank and, where these exist, on "
    "--env, --recipe, --algorithm.name and --loss.name: give these with --help to see "
    "the defaults."
)

# With one of these options the user has an own task or model, so no demo.
OWN = ("--model", "--lora.path", "--env", "--data.path", "--config")


def beginning[Config: RunConfig](
    config: Config,
    rates: Rates,
    *,
    demo: Callable[[], Config] | None = None,
    critic: bool = False,
) -> Callable[[Sequence[str]], Config]:
    """Makes `Program.default`: the defaults for the kind of model.

    Args:
        config: with the defaults for a checkpoint.
        rates: learning rates of the program.
        demo: the configuration if neither model nor task is given; None for no demo.
        critic: whether the program trains a critic.
    """

    def default(arguments: Sequence[str]) -> Config:
        own = any(given(arguments, option) is not None for option in OWN)
        if demo is not None and not own and not help_asked(arguments):
            return demo()
        # An adapter names a checkpoint under it.
        path = given(arguments, "--lora.path")
        return begun(
            config,
            rates,
            model=given(arguments, "--model") or path,
            lora=path is not None or given(arguments, "--lora.rank") not in (None, "0"),
            critic_lora=(
                given(arguments, "--critic.lora.rank") not in (None, "0")
                if critic
                else None
            ),
        )

    return default


def offline() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """The `Program.load` of the programs that train on a data set."""
    from jaxrl_post.programs.offline import run_offline
    from jaxrl_post.programs.run import RUN_ERRORS

    return run_offline, RUN_ERRORS


def online() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """The `Program.load` of the programs that sample."""
    from jaxrl_post.programs.experience import SAMPLING_ERRORS
    from jaxrl_post.programs.online import run_rl
    from jaxrl_post.programs.run import RUN_ERRORS

    return run_rl, (*RUN_ERRORS, *SAMPLING_ERRORS)
