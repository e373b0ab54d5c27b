"""The options of the algorithm, its correction for the sampler, and distillation."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, NOT_NEGATIVE, POSITIVE, SHARE, Range

__all__ = [
    "ALGORITHMS",
    "AlgorithmConfig",
    "CorrectionConfig",
    "CorrectionName",
    "DistillConfig",
    "DivergenceName",
]

# Functions of `jaxrl_post.algorithms`.
ALGORITHMS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "gmpo", "sapo", "max_rl",
    "dppo", "gdpo", "opo", "remax", "clipped_rloo", "luspo", "lite_ppo", "vespo", "ppo",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "prime", "distillation",
)  # fmt: skip

CorrectionName = Literal[
    "none", "truncated_tokens", "truncated_sequences", "icepop", "icepop_sequences",
    "masked_sequences",
]  # fmt: skip

DivergenceName = Literal["sampled", "forward_kl", "reverse_kl", "jsd", "top_k"]


@dataclass(frozen=True)
class DistillConfig:
    """Options for comparing student and teacher in distillation.

    Attributes:
        divergence: sampled: a token that the student drew has the advantage log teacher
            - log student; the other choices compare whole distributions at every token:
            forward_kl, KL(teacher || student); reverse_kl, KL(student || teacher); jsd,
            GKD's divergence between the two; top_k, the forward KL from the teacher's
            likeliest tokens.
        data: text on which they are compared. samples: the student's own samples;
            demonstrations: the environment's, as many per step as there would be
            samples.
        temperature: divides both models' logits where whole distributions are compared.
        beta: share of the teacher in the mixture of jsd, in [0, 1]; 0 is the forward
            KL, 1 the reverse KL. None for 0.5.
        top_k: number of the teacher's likeliest tokens that top_k compares one by one;
            None for 64.
        tail: what top_k does with all other tokens. bucket: compares them as one token
            with their total probability; renormalize: leaves them out. None for bucket.
    """

    divergence: DivergenceName = "sampled"
    data: Literal["samples", "demonstrations"] = "samples"
    temperature: Annotated[float, POSITIVE] = 1.0
    beta: Annotated[float | None, ANY] = None
    top_k: Annotated[int | None, ANY] = None
    tail: Literal["bucket", "renormalize"] | None = None


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction in the loss for log-probs that differ between sampler and trainer.

    Attributes:
        kind: how a token's loss is weighted by the ratio of its probability in the
            trainer to that in the sampler. truncated_*: by the ratio, at most `cap`;
            icepop*: by the ratio where it is within `low` and `high`, else by 0;
            masked_sequences: as truncated_tokens, but by 0 in sequences whose geometric
            mean of ratios is outside `low` and `high`; none: not at all.
            truncated_sequences and icepop_sequences take the ratio of the whole
            sequence.
        cap: largest weight, of truncated_* and masked_sequences; None for the default.
        low: lower bound of the ratio; None for icepop's default. masked_sequences has
            no default and needs a value.
        high: upper bound of the ratio; None for icepop's default. masked_sequences has
            no default and needs a value.
    """

    kind: CorrectionName = "truncated_tokens"
    cap: Annotated[float | None, ANY] = None
    low: Annotated[float | None, ANY] = None
    high: Annotated[float | None, ANY] = None


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm and its hyperparameters; None takes the default of its paper.

    Attributes:
        name: grpo, dr_grpo, dapo, gspo, cispo, rloo, gmpo, sapo, max_rl, dppo, gdpo,
            opo, remax, clipped_rloo, luspo, lite_ppo, vespo, ppo, reinforce_plus_plus,
            reinforce_plus_plus_baseline, prime or distillation, functions of
            `jaxrl_post.algorithms`; or <module>:<function> of one that returns an
            Algorithm. Further parameters of the function follow a question mark:
            grpo?dual_clip=3, dppo?threshold=0.15.
        clip_low: how far below 1 a policy ratio may fall before it is clipped; for
            gmpo, how far its logarithm may fall below 0, in nats; for cispo, the lower
            bound of the ratio itself.
        clip_high: how far above 1 a policy ratio may rise before it is clipped; for
            gmpo, how far its logarithm may rise above 0, in nats; for cispo, the upper
            bound of the ratio itself.
        kl_coefficient: weight of the KL divergence to the reference policy, in nats: in
            the reward for ppo and reinforce_plus_plus, in the loss for the others; 0
            needs no reference.
        kl_estimator: estimator of that KL divergence; k1 only inside the reward, or
            with kl_weights. None for k1 in the reward, k2 for
            reinforce_plus_plus_baseline, and k3 in other losses.
        kl_weights: weighs that KL in the loss, token by token, by the policy's
            probability ratio to the named policy; the weight has a gradient, so that k1
            and k3 have the KL's gradient in expectation. policy: the ratio to itself,
            which changes only the gradient; proximal: to the policy before the step's
            first update; behavior: to the sampler. None for no weight.
        reference: Hugging Face directory of the reference policy, or ORG/NAME on the
            hub (ORG/NAME@REVISION for a revision); in distillation it is the teacher.
            None for the run's initial model.
        reference_sync_steps: the reference moves to the policy whenever this many steps
            of the run have passed, as in TR-DPO and ProRL; 0 for never.
        reference_mixup: share of the policy in the parameters of the reference that has
            moved; the rest is the reference before. 1 for a copy, as an adapter needs.
        entropy_coefficient: weight of the entropy bonus: the loss subtracts this times
            the policy's entropy, in nats.
        aggregation: how the loss of a step is made of the losses of its tokens.
            token_mean: mean over all tokens; sequence_mean: mean over each sequence's
            tokens, then over sequences; sequence_sum: sum over each sequence's tokens,
            then mean over sequences; fixed: that divided by --rollout.max-tokens. None
            for the algorithm's own.
        scale_advantages: whether an advantage is divided by the standard deviation of
            its group's rewards: group, none, or None for the algorithm's own.
        reward_weights: weights of the reward's parts in gdpo, as NAME=WEIGHT, such as
            own=1 length=0.5; parts that are not named do not count. Without the option
            every part has weight 1. A reward model's part is named model; an
            environment without parts has one, environment; a reward that an agent posts
            in addition to parts is named posted.
        turn_credit: rewards with which a turn of an episode is credited. outcome: the
            sum over the episode; turns: its own reward and the later turns' rewards.
            With turns, ppo and reinforce_plus_plus, which discount by the token, place
            a turn's reward at the turn's last token.
        turn_discount: discount factor per turn for the rewards of later turns; 0
            credits a turn with only its own reward.
        support: tokens among which a sampled token is scored if --rollout.top-k,
            --rollout.top-p or --rollout.min-p cut tokens off, or an agent asked for a
            schema, a grammar or the call of a tool. kept: the tokens that the sampler
            kept, so that the policy is the distribution from which it drew, if these
            are at most --rollout.top-k (128 without that option); full: the whole
            vocabulary.
        correction: how the loss corrects for log-probs that differ between sampler and
            trainer.
    """

    name: str = "grpo"
    clip_low: Annotated[float | None, NOT_NEGATIVE] = None
    clip_high: Annotated[float | None, NOT_NEGATIVE] = None
    kl_coefficient: Annotated[float, NOT_NEGATIVE] = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_plus"] | None = None
    kl_weights: Literal["policy", "proximal", "behavior"] | None = None
    reference: str | None = None
    reference_sync_steps: Annotated[int, NOT_NEGATIVE] = 0
    reference_mixup: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    entropy_coefficient: Annotated[float, NOT_NEGATIVE] = 0.0
    aggregation: (
        Literal["token_mean", "sequence_mean", "sequence_sum", "fixed"] | None
    ) = None
    scale_advantages: Literal["group", "none"] | None = None
    reward_weights: tuple[str, ...] = ()
    turn_credit: Literal["outcome", "turns"] = "outcome"
    turn_discount: Annotated[float, SHARE] = 1.0
    support: Literal["kept", "full"] = "kept"
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
