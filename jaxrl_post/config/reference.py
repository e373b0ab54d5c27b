"""Checks the options of a reference that follows the trained policy."""

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import PreferenceLossConfig
from jaxrl_post.config.run import RunConfig

__all__ = ["check_reference"]


def check_reference(
    options: AlgorithmConfig | PreferenceLossConfig, section: str, run: RunConfig
) -> None:
    """Refuses a reference that cannot follow, and options without effect.

    Whether the run has a reference is checked where its algorithm or loss is made.

    Args:
        options: how the reference follows.
        section: name of `options` on the command line, such as "algorithm".
        run: the run's options.

    Raises:
        ConfigError: names the option.
    """
    steps, mixup = options.reference_sync_steps, options.reference_mixup
    option, share = f"--{section}.reference-sync-steps", f"--{section}.reference-mixup"
    if not steps:
        if mixup != 1.0:
            raise ConfigError(
                f"{share}: without {option} the reference stays as it is; got "
                f"{mixup:g}; drop the option, or give the other"
            )
        return
    if run.epochs is None and steps >= run.steps:
        raise ConfigError(
            f"{option}: must be less than --steps, {run.steps}, or no step has a new "
            f"reference; got {steps}"
        )
    if not run.lora.rank:
        return
    if mixup != 1.0:
        raise ConfigError(
            f"{share}: must be 1 with --lora.rank, a copy of the adapter: the product "
            f"of two mixed matrices is no mixture of their products; got {mixup:g}; "
            "drop the option, or train without an adapter"
        )
    if options.reference is not None:
        raise ConfigError(
            f"{option}: {options.reference} cannot follow an adapter, because it has "
            f"another base; drop the option, or drop --{section}.reference, so that "
            "the policy before its first step is the reference"
        )
