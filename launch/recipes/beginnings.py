"""Default options that depend on the kind of model.

The configurations' own defaults are for full training of a checkpoint. An adapter takes
a learning rate about ten times as large. A model with random weights takes a still
larger one and, before reinforcement learning, a warm start.

References:
    Schulman and Thinking Machines Lab, LoRA Without Regret, 2025 (the factor of ten).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, WarmStartConfig

__all__ = ["Rates", "begun", "is_checkpoint"]

type Kind = Literal["checkpoint", "adapter", "preset"]


@dataclass(frozen=True)
class Rates:
    """Learning rates of a program, by the kind of model.

    Attributes:
        checkpoint: for full training of a checkpoint.
        adapter: for an adapter.
        preset: for a model with random weights.
    """

    checkpoint: float
    adapter: float
    preset: float

    def of(self, kind: Kind) -> float:
        """The learning rate for a kind of model."""
        return getattr(self, kind)


CRITIC = Rates(checkpoint=1e-5, adapter=1e-4, preset=1e-3)


def begun[Config: RunConfig](
    config: Config,
    rates: Rates,
    *,
    model: str | None,
    lora: bool,
    critic_lora: bool | None,
) -> Config:
    """Sets learning rates and warm start for the kind of model.

    Args:
        config: with the defaults for a checkpoint.
        rates: learning rates of the program.
        model: directory, ORG/NAME or preset; None for the configuration's own.
        lora: whether the policy gets an adapter.
        critic_lora: whether a critic does; None if the program trains no critic.
    """
    preset = not is_checkpoint(config.model if model is None else model)

    def kind(adapter: bool) -> Kind:
        return "preset" if preset else "adapter" if adapter else "checkpoint"

    rate = rates.of(kind(lora))
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=rate))
    if not isinstance(config, RLConfig):
        return config
    if preset:
        warm = WarmStartConfig(steps=400, examples_per_step=128)
        config = replace(config, warm_start=warm)
    if critic_lora is not None:
        optimizer = CriticConfig().optimizer
        rate = CRITIC.of(kind(critic_lora))
        optimizer = replace(optimizer, learning_rate=rate)
        config = replace(config, critic=replace(config.critic, optimizer=optimizer))
    return config


def is_checkpoint(name: str) -> bool:
    """Whether a model is a checkpoint: a directory, or ORG/NAME on the hub.

    A directory with another content may have the name of a preset.
    """
    return "/" in name or any(
        (Path(name) / file).is_file() for file in ("config.json", "adapter_config.json")
    )
