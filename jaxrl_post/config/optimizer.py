"""The options of an optimizer."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import (
    COUNT,
    DECAY,
    FREE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
)

__all__ = ["MomentDtype", "OptimizerConfig", "OptimizerName", "check_optimizer"]

OptimizerName = Literal["adamw", "muon", "adafactor", "lion", "sgd"]
MomentDtype = Literal["float32", "bfloat16"]

ENDING = ("linear", "cosine", "wsd")
# Options that only some values of another option read: the other one, those values.
READ_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "moment_dtype": ("name", ("adamw", "muon", "lion", "sgd")),
    "beta1": ("name", ("adamw", "muon", "lion")),
    "beta2": ("name", ("adamw", "muon", "lion")),
    "momentum": ("name", ("muon", "sgd")),
    "epsilon": ("name", ("adamw", "muon")),
    "schedule_steps": ("schedule", ENDING),
    "final_ratio": ("schedule", ENDING),
    "decay_ratio": ("schedule", ("wsd",)),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer with a learning-rate schedule and gradient clipping.

    Attributes:
        name: adamw; muon, momentum whose matrices are orthogonalised, for the matrices
            of layers and of adapters, and AdamW for embeddings, heads, routers, norms
            and biases, both with AdamW's learning rates; adafactor, whose second moment
            is a row and a column of a matrix; lion, the sign of a mean of gradients,
            with a third to a tenth of AdamW's learning rate; sgd, with momentum.
        learning_rate: peak learning rate, which the warm-up reaches.
        warmup_steps: optimizer steps in which the learning rate rises linearly. The
            first step has learning_rate / warmup_steps, the last one learning_rate.
        warmup_ratio: the warm-up as a share of the run's optimizer steps, rounded, at
            least one step, in place of `warmup_steps`. A continuation keeps the number
            of steps with which the run began.
        schedule: learning rate after the warm-up: "constant"; falling along a straight
            line ("linear") or a cosine ("cosine"); or constant, and falling along a
            straight line at the end ("wsd": warm-up, stable, decay).
        schedule_steps: step of the run, as --steps counts them, at which the schedule
            ends; None for the --steps with which the run begins. A run that continues
            beyond that step at a rate of 0 has to give it.
        final_ratio: share of the peak learning rate at which a schedule ends, and which
            later steps keep.
        decay_ratio: share of the schedule's optimizer steps in which wsd falls.
        beta1: decay of the first moment, the mean of the gradients, of AdamW, and of
            the mean whose sign lion takes.
        beta2: decay of AdamW's second moment, the mean of the squared gradients, and of
            the mean of gradients that lion keeps (0.99 in its paper).
        momentum: decay of muon's mean of the gradients and of sgd's sum of them; 0 for
            none.
        epsilon: added to the root of AdamW's second moment, and to the norm by which
            muon divides a matrix.
        weight_decay: decoupled weight decay, a share of the parameters that is
            subtracted times the learning rate; applied to matrices, not to norms and
            biases.
        moment_dtype: dtype of the mean of the gradients; bfloat16 halves its memory.
            Second moments are float32.
        max_grad_norm: largest global norm of the gradient; a larger gradient is scaled
            down to it. 0 for no clipping.

    References:
        AdamW, arXiv:1711.05101; Muon, K. Jordan et al. 2024, with the scale of
        arXiv:2502.16982; Adafactor, arXiv:1804.04235; Lion, arXiv:2302.06675; wsd,
        arXiv:2404.06395.
    """

    name: OptimizerName = "adamw"
    learning_rate: Annotated[float, POSITIVE] = 1e-5
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    warmup_ratio: Annotated[float, SHARE, FREE] = 0.0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    schedule_steps: Annotated[int | None, COUNT, FREE] = None
    final_ratio: Annotated[float, SHARE] = 0.0
    decay_ratio: Annotated[float, Range(0, 1, open_low=True)] = 0.1
    beta1: Annotated[float, DECAY] = 0.9
    beta2: Annotated[float, DECAY] = 0.95
    momentum: Annotated[float, DECAY] = 0.95
    epsilon: Annotated[float, POSITIVE] = 1e-8
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    moment_dtype: MomentDtype = "float32"
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0

    def warmup(self, num_steps: int) -> int:
        """Number of optimizer steps of the warm-up in a run of `num_steps` of them.

        >>> OptimizerConfig(warmup_ratio=0.1).warmup(200)
        20
        """
        if self.warmup_steps or not self.warmup_ratio:
            return self.warmup_steps
        return max(1, round(self.warmup_ratio * num_steps))


def check_optimizer(config: OptimizerConfig, section: str) -> None:
    """Refuses options that the optimizer or its schedule does not read.

    Args:
        config: of one optimizer.
        section: of its options, such as "optimizer", for messages.

    Raises:
        ConfigError: names the option.

    >>> check_optimizer(OptimizerConfig(name="sgd", beta2=0.9), "optimizer")
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --optimizer.beta2: has no effect with ...
    """
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"--{section}.warmup-ratio: says the length of the warm-up, as "
            f"--{section}.warmup-steps does; got {config.warmup_ratio:g} and "
            f"{config.warmup_steps}; give one"
        )
    defaults = {field.name: field.default for field in fields(config)}
    for name, (other, readers) in READ_WITH.items():
        given, chosen = getattr(config, name), getattr(config, other)
        if given != defaults[name] and chosen not in readers:
            raise ConfigError(
                f"--{section}.{name.replace('_', '-')}: has no effect with "
                f"--{section}.{other} {chosen}; got {given}. Drop the option (its "
                f"default is {defaults[name]}), or choose {' or '.join(readers)}"
            )
