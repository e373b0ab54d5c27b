"""What the training programs share: where their options begin, and what runs them."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_post.config.run import RunConfig
from launch.cli import given
from launch.recipes.beginnings import Rates, begun

__all__ = ["beginning", "online"]

# Who gives one of these has a task or a model of their own, not the demo's.
OWN = ("--model", "--env", "--data.path", "--config")


def beginning[Config: RunConfig](
    config: Config, rates: Rates, *, demo: Callable[[], Config] | None = None
) -> Callable[[Sequence[str]], Config]:
    """Makes `Program.default`: the defaults of the kind of model that is asked for.

    Args:
        config: with the defaults of a checkpoint.
        rates: of the program.
        demo: what the program does when neither model nor task is named; None for
            nothing of the kind.
    """

    def default(arguments: Sequence[str]) -> Config:
        help_asked = any(option in arguments for option in ("-h", "--help"))
        own = any(given(arguments, option) is not None for option in OWN)
        if demo is not None and not own and not help_asked:
            return demo()
        return begun(
            config,
            rates,
            model=given(arguments, "--model"),
            lora=given(arguments, "--lora.rank") not in (None, "0"),
            critic_lora=given(arguments, "--critic.lora.rank") not in (None, "0"),
        )

    return default


def online() -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """What runs the programs that sample, as `Program.load`."""
    from jaxrl_post.programs.experience import SAMPLING_ERRORS
    from jaxrl_post.programs.online import run_rl
    from jaxrl_post.programs.run import RUN_ERRORS

    return run_rl, (*RUN_ERRORS, *SAMPLING_ERRORS)
