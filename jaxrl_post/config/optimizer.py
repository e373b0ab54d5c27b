"""The options of an optimizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import COUNT, DECAY, FREE, NOT_NEGATIVE, POSITIVE

__all__ = ["OptimizerConfig"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning-rate schedule and gradient clipping.

    Attributes:
        learning_rate: peak.
        warmup_steps: optimizer steps of linear warm-up from 0.
        schedule: what follows the warm-up; "linear" and "cosine" end at 0.
        schedule_steps: steps of the run, as --steps counts them, at which the schedule
            ends; None for the --steps with which the run begins. A continuation beyond
            them has to give it.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: of Adam.
        weight_decay: decoupled; matrices only, not norms and biases.
        max_grad_norm: gradients are scaled down to this global norm; 0 for no clipping.
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
