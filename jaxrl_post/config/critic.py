"""The options of PPO's critic."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.fields import NOT_NEGATIVE, SHARE
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig

__all__ = ["CriticConfig"]


@dataclass(frozen=True)
class CriticConfig:
    """The critic (value model) of ppo; other algorithms have none.

    Attributes:
        backbone: separate: a model of its own; shared: a value head on the policy.
        model: initial weights of a separate critic, from a reward model or a language
            model: a Hugging Face directory, or ORG/NAME on the hub; None for the
            policy's own weights, or for its base if both train adapters.
        gamma: discount factor per token.
        gae_lambda: lambda of generalized advantage estimation (GAE), for the policy's
            advantages.
        value_lambda: lambda of GAE for the critic's targets; 1 makes them the returns.
        clip: largest change of a value in the updates of a batch before it is clipped;
            0 for no clipping.
        coefficient: weight of the critic's loss where critic and policy share a
            backbone.
        warmup_steps: first steps of the run, in which a separate critic learns and the
            policy does not.
        bootstrap_truncated: adds the critic's value of the state after the cut to the
            reward of an answer that was cut at the token limit; without it, the cut
            counts as the end.
        optimizer: of a separate critic, and its learning rate.
        lora: adapter to train, with the value head, instead of a separate critic's
            whole model.
    """

    backbone: Literal["separate", "shared"] = "separate"
    model: str | None = None
    gamma: Annotated[float, SHARE] = 1.0
    gae_lambda: Annotated[float, SHARE] = 0.95
    value_lambda: Annotated[float, SHARE] = 1.0
    clip: Annotated[float, NOT_NEGATIVE] = 0.2
    coefficient: Annotated[float, NOT_NEGATIVE] = 0.1
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    bootstrap_truncated: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
