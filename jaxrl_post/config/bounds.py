"""The range of every option that is a number."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config.run import ConfigError

__all__ = ["BOUNDS", "Bound", "check_numbers"]


@dataclass(frozen=True)
class Bound:
    """An interval; both ends belong to it unless they are open or infinite.

    >>> print(Bound(0, 1, open_high=True), Bound(0, open_low=True), Bound(1), sep="; ")
    in [0, 1); greater than 0; at least 1
    """

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        # Infinity and NaN are in no interval.
        return (
            math.isfinite(value)
            and (value > self.low if self.open_low else value >= self.low)
            and (value < self.high if self.open_high else value <= self.high)
        )

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{'greater than' if self.open_low else 'at least'} {self.low:g}"
        brackets = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"in {brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"


COUNT, NUMBER = Bound(1), Bound(0)
POSITIVE = Bound(0, open_low=True)
SHARE = Bound(0, 1)
DECAY = Bound(0, 1, open_high=True)

# By the end of the option's name: those of an optimizer hold for the critic's too.
# An option that is not here may be any number.
BOUNDS = {
    "seed": NUMBER,
    "steps": COUNT,
    "log_every": COUNT,
    "log_samples": NUMBER,
    "log_eval_samples": NUMBER,
    "examples_per_step": COUNT,
    "max_tokens": COUNT,
    "max_turns": COUNT,
    "max_prompt_tokens": NUMBER,
    "num_tasks": COUNT,
    "samples": COUNT,
    "num_slots": COUNT,
    "temperature": NUMBER,
    "top_k": NUMBER,
    "top_p": Bound(0, 1, open_low=True),
    "min_p": SHARE,
    "reward_workers": COUNT,
    "reward_deadline_s": POSITIVE,
    "deadline_s": POSITIVE,
    "margin": NUMBER,
    "centering": NUMBER,
    "eval.every": NUMBER,
    "eval.num_tasks": COUNT,
    "checkpoint.every": COUNT,
    "checkpoint.keep": COUNT,
    "warm_start.steps": NUMBER,
    "warm_start.learning_rate": POSITIVE,
    "update.minibatches": COUNT,
    "update.epochs": COUNT,
    "update.row_tokens": NUMBER,
    "update.microbatch_tokens": COUNT,
    "update.router_balance": NUMBER,
    "update.router_z": NUMBER,
    "optimizer.learning_rate": POSITIVE,
    "optimizer.warmup_steps": NUMBER,
    "optimizer.schedule_steps": COUNT,
    "optimizer.beta1": DECAY,
    "optimizer.beta2": DECAY,
    "optimizer.epsilon": POSITIVE,
    "optimizer.weight_decay": NUMBER,
    "optimizer.max_grad_norm": NUMBER,
    "lora.rank": NUMBER,
    "lora.alpha": POSITIVE,
    "algorithm.clip_low": NUMBER,
    "algorithm.clip_high": NUMBER,
    "algorithm.kl_coefficient": NUMBER,
    "algorithm.entropy_coefficient": NUMBER,
    "algorithm.turn_discount": SHARE,
    "reward.batch_tokens": COUNT,
    "critic.gamma": SHARE,
    "critic.gae_lambda": SHARE,
    "critic.value_lambda": SHARE,
    "critic.clip": NUMBER,
    "critic.coefficient": NUMBER,
    "critic.warmup_steps": NUMBER,
    "distill.temperature": POSITIVE,
    "rollout.prompts_per_step": COUNT,
    "rollout.samples_per_prompt": COUNT,
    "rollout.max_prompt_tokens": NUMBER,
    "rollout.max_turns": COUNT,
    "rollout.partial": NUMBER,
    "rollout.temperature": POSITIVE,
    "rollout.top_k": NUMBER,
    "rollout.top_p": Bound(0, 1, open_low=True),
    "rollout.min_p": SHARE,
    "rollout.num_slots": NUMBER,
    "rollout.steps_per_call": NUMBER,
    "rollout.max_draws": COUNT,
    "rollout.overlong_buffer": NUMBER,
    "rollout.overlong_penalty": NUMBER,
    "rollout.reward_workers": COUNT,
    "rollout.reward_deadline_s": POSITIVE,
    "rollout.reward_grace_s": NUMBER,
    "rollout.max_failed_share": SHARE,
    "rollout.deadline_s": POSITIVE,
    "data.eval_share": Bound(0, 1, open_low=True, open_high=True),
    "loss.beta": POSITIVE,
    "loss.label_smoothing": Bound(0, 0.5, open_high=True),
    "loss.nll_weight": NUMBER,
    "loss.desirable_weight": NUMBER,
    "loss.undesirable_weight": NUMBER,
}


def check_numbers(config: Any) -> None:
    """Checks every number of a configuration by itself.

    Args:
        config: a dataclass of options, nested ones included.

    Raises:
        ConfigError: one is out of its range.

    >>> from jaxrl_post.config.run import CheckpointConfig, SFTConfig
    >>> check_numbers(SFTConfig(checkpoint=CheckpointConfig(every=0)))
    Traceback (most recent call last):
    jaxrl_post.config.run.ConfigError: --checkpoint.every: must be at least 1; got 0
    """
    _check(config, "")


def _check(section: Any, prefix: str) -> None:
    for name, value in vars(section).items():
        if dataclasses.is_dataclass(value):
            _check(value, f"{prefix}{name}.")
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        bound = _bound(prefix + name)
        if bound is not None and value not in bound:
            option = (prefix + name).replace("_", "-")
            raise ConfigError(f"--{option}: must be {bound}; got {value:g}")


def _bound(name: str) -> Bound | None:
    """The bound of an option, by its whole name or by the last two parts of it."""
    return BOUNDS.get(name) or BOUNDS.get(".".join(name.split(".")[-2:]))
