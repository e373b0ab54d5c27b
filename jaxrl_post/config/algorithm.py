"""Which algorithm, and what corrects for the sampler."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, NOT_NEGATIVE, SHARE

__all__ = ["AlgorithmConfig", "AlgorithmName", "CorrectionConfig", "CorrectionName"]

AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "gmpo", "sapo", "max_rl",
    "gdpo", "opo", "remax", "clipped_rloo", "luspo", "lite_ppo", "vespo", "ppo",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "distillation",
]  # fmt: skip

CorrectionName = Literal[
    "none", "truncated_tokens", "truncated_sequences", "icepop", "icepop_sequences",
    "masked_sequences",
]  # fmt: skip


@dataclass(frozen=True)
class CorrectionConfig:
    """How the loss allows for what sampler and trainer disagree on.

    Attributes:
        kind: of `jaxrl_post.algorithms.corrections`.
        cap: of the weights, for all kinds but icepop; None keeps the default.
        low: lower bound of icepop and masked_sequences; None keeps the default.
        high: upper bound of the same.
    """

    kind: CorrectionName = "truncated_tokens"
    cap: Annotated[float | None, ANY] = None
    low: Annotated[float | None, ANY] = None
    high: Annotated[float | None, ANY] = None


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which algorithm, and what departs from its paper's defaults (None keeps them).

    Attributes:
        name: of `jaxrl_post.algorithms`.
        clip_low: lower clip; cispo's lower ratio bound.
        clip_high: upper clip; cispo's upper ratio bound.
        kl_coefficient: weight of the KL to the reference policy: in the reward of ppo
            and reinforce_plus_plus, in the loss of the others; 0 needs no reference.
        kl_estimator: of that term; k1 only inside the reward. None for k1 there and k3
            in a loss.
        reference: Hugging Face directory of the reference policy, or ORG/NAME on the
            hub (ORG/NAME@REVISION for a revision); it is the teacher of distillation;
            None for the model as it began.
        entropy_coefficient: weight of the entropy that the loss rewards.
        reward_weights: of gdpo, NAME=WEIGHT of the parts of the reward, such as own=1
            length=0.5; parts that are not named do not count. None for all, with 1.
        turn_credit: outcome: all turns of an episode are credited with the sum of its
            rewards; turns: each turn with the rewards from it on. In ppo and
            reinforce_plus_plus, which discount by the token, a turn's reward then
            stands at the turn's last token.
        turn_discount: a turn, of the rewards from a turn on; 0 credits a turn with its
            own reward alone.
        correction: of what the sampler's log-probs differ by.
    """

    name: AlgorithmName = "grpo"
    clip_low: Annotated[float | None, NOT_NEGATIVE] = None
    clip_high: Annotated[float | None, NOT_NEGATIVE] = None
    kl_coefficient: Annotated[float, NOT_NEGATIVE] = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_plus"] | None = None
    reference: str | None = None
    entropy_coefficient: Annotated[float, NOT_NEGATIVE] = 0.0
    reward_weights: tuple[str, ...] = ()
    turn_credit: Literal["outcome", "turns"] = "outcome"
    turn_discount: Annotated[float, SHARE] = 1.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
