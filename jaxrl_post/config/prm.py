"""The options of prime's implicit reward model."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, POSITIVE
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig

__all__ = ["PrmConfig"]


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
