"""The options of an optimizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import COUNT, DECAY, FREE, NOT_NEGATIVE, POSITIVE

__all__ = ["OptimizerConfig"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning-rate schedule and gradient clipping.

    Attributes:
        learning_rate: peak learning rate, which the warm-up reaches.
        warmup_steps: optimizer steps in which the learning rate rises linearly. The
            first step has learning_rate / warmup_steps, the last one learning_rate.
        schedule: learning rate after the warm-up: "constant", or falling to 0 along a
            straight line ("linear") or a cosine ("cosine").
        schedule_steps: step of the run, as --steps counts them, at which the schedule
            ends; None for the --steps with which the run begins. A run that continues
            beyond that step has to give it.
        beta1: decay of AdamW's first moment, the mean of the gradients.
        beta2: decay of AdamW's second moment, the mean of the squared gradients.
        epsilon: AdamW's epsilon, added to the root of the second moment.
        weight_decay: decoupled weight decay of AdamW; applied to matrices, not to norms
            and biases.
        max_grad_norm: largest global norm of the gradient; a larger gradient is scaled
            down to it. 0 for no clipping.
    """

    learning_rate: Annotated[float, POSITIVE] = 1e-5
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: Annotated[int | None, COUNT, FREE] = None
    beta1: Annotated[float, DECAY] = 0.9
    beta2: Annotated[float, DECAY] = 0.95
    epsilon: Annotated[float, POSITIVE] = 1e-8
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
