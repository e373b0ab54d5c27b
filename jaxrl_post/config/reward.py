"""The options of reward models."""

from dataclasses import dataclass, field
from typing import Literal

from jaxrl_post.config.preference import PairsConfig
from jaxrl_post.config.run import ConfigError, OfflineConfig

__all__ = ["RewardConfig", "check_kind"]


@dataclass(frozen=True)
class RewardConfig(OfflineConfig):
    """A reward model from preference pairs, or from steps with a label each.

    Attributes:
        kind: outcome: one reward an answer, from pairs; process: a verdict on each step
            of a solution.
        data: of the pairs, or of the solutions.
        centering: weight of the squared sum of a pair's rewards, which keeps them
            around 0; of kind outcome.
        margin: times the difference of a pair's scores in the file, by how much its
            rewards should differ; 0 asks for no scores; of kind outcome.
        separator: what follows each step, which is judged at its last token; by default
            a line break (a shell writes two as $'\\n\\n'); of kind process.
    """

    kind: Literal["outcome", "process"] = "outcome"
    data: PairsConfig = field(default_factory=PairsConfig)
    centering: float = 0.01
    margin: float = 0.0
    separator: str = "\n"


# Which options are of which kind alone.
OPTIONS = {"outcome": ("centering", "margin"), "process": ("separator",)}


def check_kind(config: RewardConfig) -> None:
    """Refuses options of the other kind.

    Raises:
        ConfigError: naming the option.

    >>> check_kind(RewardConfig(kind="process", margin=1.0))
    Traceback (most recent call last):
    jaxrl_post.config.run.ConfigError: --margin: is for --kind outcome alone; got ...
    """
    if not config.separator or "\\n" in config.separator:
        raise ConfigError(
            f"--separator: must not be empty, nor have a backslash before an n; got "
            f"{config.separator!r}. A shell writes a line break as $'\\n'"
        )
    if config.centering < 0:
        raise ConfigError(f"--centering: must be >= 0; got {config.centering:g}")
    for kind, names in OPTIONS.items():
        for name in names if kind != config.kind else ():
            value = getattr(config, name)
            if value != getattr(RewardConfig, name):
                raise ConfigError(
                    f"--{name}: is for --kind {kind} alone; got {value!r} with --kind "
                    f"{config.kind}; drop the option"
                )
