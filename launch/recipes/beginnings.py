"""Where the options of a program begin, by the kind of model that they name.

The configurations' own defaults are for a checkpoint that trains whole. An adapter
takes a learning rate about ten times as large, and a model with random weights larger
ones still, and a warm start.

References:
    Schulman and Thinking Machines Lab, LoRA Without Regret, 2025 (the factor of ten).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, WarmStartConfig

__all__ = ["Rates", "begun"]

type Kind = Literal["checkpoint", "adapter", "preset"]


@dataclass(frozen=True)
class Rates:
    """Learning rates of a program.

    Attributes:
        checkpoint: of a checkpoint that trains whole.
        adapter: of an adapter.
        preset: of a model with random weights.
    """

    checkpoint: float
    adapter: float
    preset: float

    def of(self, kind: Kind) -> float:
        """The rate of a kind of model."""
        return getattr(self, kind)


CRITIC = Rates(checkpoint=1e-5, adapter=1e-4, preset=1e-3)


def begun[Config: RunConfig](
    config: Config, rates: Rates, *, model: str | None, lora: bool, critic_lora: bool
) -> Config:
    """A configuration with the defaults of the kind of model that is named.

    Args:
        config: with the defaults of a checkpoint.
        rates: of the program.
        model: directory, ORG/NAME or preset; None for the configuration's own.
        lora: whether the policy gets an adapter.
        critic_lora: whether a critic does.
    """
    preset = not _is_checkpoint(config.model if model is None else model)

    def kind(adapter: bool) -> Kind:
        return "preset" if preset else "adapter" if adapter else "checkpoint"

    rate = rates.of(kind(lora))
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=rate))
    if not isinstance(config, RLConfig):
        return config
    if preset:
        warm = WarmStartConfig(steps=400, examples_per_step=128)
        config = replace(config, warm_start=warm)
    if config.algorithm.name == "ppo":
        optimizer = CriticConfig().optimizer
        rate = CRITIC.of(kind(critic_lora))
        optimizer = replace(optimizer, learning_rate=rate)
        config = replace(config, critic=replace(config.critic, optimizer=optimizer))
    return config


def _is_checkpoint(name: str) -> bool:
    """Whether a model is loaded: a directory, or a name with an organisation."""
    return "/" in name or Path(name).is_dir()
