"""The options of reward models: one that judges samples, one that learns from them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, COUNT, FREE, POSITIVE
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig

__all__ = ["PrmConfig", "RewardModelConfig"]


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


@dataclass(frozen=True)
class PrmConfig:
    """The implicit reward model (PRM) of prime; other algorithms have none.

    It is a language model that learns, in every step, to tell the step's right answers
    from the wrong ones. Its reward of a token is beta times the log-ratio of the
    token's probability to the reference's (--algorithm.reference).

    Attributes:
        model: initial weights: a Hugging Face directory, or ORG/NAME on the hub; None
            for the policy's own weights, or for its base if both train adapters.
        beta: scale of the rewards: of an answer, beta times the log-ratio of its
            probability to the reference's.
        scores: when the step's answers are scored. before: by the model before its
            update on them, as in the paper; after: by the updated model, which has seen
            their outcomes (verl's default).
        solved_reward: an answer with at least this reward is labelled right, the others
            wrong; None takes the reward itself as the label, in [0, 1].
        optimizer: of the model, and its learning rate. It takes one pass over a batch.
        lora: adapter to train instead of the whole model.
    """

    model: str | None = None
    beta: Annotated[float, POSITIVE] = 0.05
    scores: Literal["before", "after"] = "before"
    solved_reward: Annotated[float | None, ANY] = None
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6)
    )
    lora: AdapterConfig = field(default_factory=AdapterConfig)
