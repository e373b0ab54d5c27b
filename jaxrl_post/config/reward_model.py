"""The options of a reward model that judges samples."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, COUNT, FREE

__all__ = ["RewardModelConfig"]


@dataclass(frozen=True)
class RewardModelConfig:
    """A trained reward model that adds to the environment's own reward.

    reward = environment_weight * the environment's + weight * the model's

    gdpo normalises each of these parts and has weights of its own, so it refuses both.

    Attributes:
        model: directory of a reward model or a process reward model, as launch.reward
            writes them, or ORG/NAME on the hub; None for none.
        weight: factor of the model's output: a reward model's value of the whole
            answer, or a process reward model's probability that the steps are right.
        environment_weight: factor of the environment's own reward; 0 leaves only the
            model's.
        separator: text at which an answer is cut into steps, for a process reward
            model.
        steps: reduction of a process reward model's step probabilities to one value:
            the smallest, the last, their product or their mean.
        batch_tokens: tokens, padding included, that are judged in one forward pass.
        mesh: mesh of devices that the reward model has for itself, such as "dp2"; ""
            for the trainer's devices. With --samplers it needs its own, because they
            sample and judge while the trainer's devices train.
    """

    model: str | None = None
    weight: Annotated[float, ANY] = 1.0
    environment_weight: Annotated[float, ANY] = 1.0
    separator: str = "\n"
    steps: Literal["min", "last", "product", "mean"] = "min"
    batch_tokens: Annotated[int, COUNT] = 16384
    mesh: Annotated[str, FREE] = ""
