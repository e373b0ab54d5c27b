"""What other frameworks compute under these names, choice by choice.

Each function is one composition whose defaults are the framework's own, so that a run
there can be continued, or doubted, here:

                   epsilon  alone   loss is the mean over   KL (k3)  sampler's mismatch
    verl_grpo      1e-6     raw     all tokens              <= 10    -
    verl_dr_grpo   no std   raw     sequences, of sum / C   <= 10    -
    verl_cispo     1e-6     raw     all tokens              <= 10    -
    trl_grpo       1e-4     0       all tokens              as it is sequences, w <= 3
    trl_dr_grpo    no std   0       sequences, of sum / C   as it is sequences, w <= 3
    trl_cispo      1e-4     0       all tokens              as it is sequences, w <= 3
    nemo_rl_grpo   1e-6     0       all tokens              <= 10    -
    openrlhf_grpo  1e-9     0       all tokens              <= 10    -

"Alone" is the advantage of a group's only sample. All take the sample standard
deviation (n - 1), NeMo RL of the group's other samples, whose mean is its baseline too.
verl alone has a dual clip. A ratio's logarithm is clamped to +-20 here, as in verl,
whatever the framework does.

Where a framework divides by all sequences, and where by those that count a token, is
told in `losses.reduce`. What is not part of an `Algorithm` is a keyword there: the
values across tokens that the policy did not produce are `returns.gae(gaps=)`, the
overlong penalty's bound is `shaping.overlong_penalty(bound=)`.
"""

from functools import partial
from typing import Literal

from jaxrl_post.algorithms import terms
from jaxrl_post.algorithms.corrections import icepop_sequences
from jaxrl_post.algorithms.objective import (
    Algorithm,
    Correction,
    KlEstimator,
    PolicyLoss,
    Reduction,
    compose,
)
from jaxrl_post.losses import advantages, entropy, kl, reduce

__all__ = [
    "nemo_rl_grpo",
    "openrlhf_grpo",
    "trl_cispo",
    "trl_dr_grpo",
    "trl_grpo",
    "verl_cispo",
    "verl_dr_grpo",
    "verl_grpo",
]

# verl and NeMo RL clamp the log-ratio to +-20 and the result to +-10, OpenRLHF the
# result alone: beyond a log-ratio of 20 the result is beyond 10, so they are the same.
CLAMPED_K3: KlEstimator = partial(kl.k3, max_log_ratio=20.0, max_value=10.0)
PLAIN_K3: KlEstimator = partial(kl.k3, max_log_ratio=None)

# TRL's GRPOConfig: vllm_importance_sampling_mode "sequence_mask", _cap 3.0.
SEQUENCE_MASK = icepop_sequences(low=0.0, high=3.0)


def verl_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    kl_coefficient: float = 0.0,
    reduction: Reduction = reduce.token_mean,
    correction: Correction | None = None,
) -> Algorithm:
    """verl's GRPO: adv_estimator grpo with policy_loss vanilla.

    Epsilon 1e-6; a group's only sample keeps its raw reward; a dual clip at 3; the mean
    over all tokens (loss_agg_mode token-mean).

    Args:
        clip_low: in [0, 1]; verl's clip_ratio_low.
        clip_high: >= 0; verl's clip_ratio_high.
        dual_clip: > 1; verl's clip_ratio_c.
        kl_coefficient: >= 0; verl's kl_loss_coef, 0.001 where use_kl_loss is set.
        reduction: verl's loss_agg_mode.
        correction: of the sampler's mismatch; verl's rollout_correction, off.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        verl, verl/trainer/ppo/core_algos.py, https://github.com/volcengine/verl.

    >>> import jax.numpy as jnp
    >>> verl_grpo().advantages(jnp.array([[7.0]]), jnp.array([[True]])).tolist()
    [[7.0]]
    """
    return compose(
        advantages=partial(
            advantages.group_normalized, ddof=1, epsilon=1e-6, single="raw"
        ),
        policy_loss=terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        ),
        reduction=reduction,
        kl_coefficient=kl_coefficient,
        kl_estimator=CLAMPED_K3,
        correction=correction,
    )


def verl_dr_grpo(
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    kl_coefficient: float = 0.0,
    correction: Correction | None = None,
) -> Algorithm:
    """verl's Dr. GRPO: norm_adv_by_std_in_grpo off, seq-mean-token-sum-norm.

    Args:
        denominator: > 0, in tokens; verl's loss_scale_factor, for which it takes the
            padded width of the batch's responses where nobody sets it.
        clip_low: in [0, 1]; verl's clip_ratio_low.
        clip_high: >= 0; verl's clip_ratio_high.
        dual_clip: > 1; verl's clip_ratio_c.
        kl_coefficient: >= 0; verl's kl_loss_coef, 0.001 where use_kl_loss is set.
        correction: of the sampler's mismatch; verl's rollout_correction, off.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        verl, verl/trainer/ppo/core_algos.py, https://github.com/volcengine/verl.

    >>> verl_dr_grpo(denominator=1024.0).needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_centered, single="raw"),
        policy_loss=terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        ),
        reduction=partial(reduce.constant_denominator, denominator=denominator),
        kl_coefficient=kl_coefficient,
        kl_estimator=CLAMPED_K3,
        correction=correction,
    )


def verl_cispo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    correction: Correction | None = None,
) -> Algorithm:
    """verl's CISPO, which bounds the ratio by 1 - clip_low and 1 + clip_high.

    Args:
        clip_low: in [0, 1]; verl's clip_ratio_low, of which anything above 1 is no
            bound and is 1 here.
        clip_high: >= 0; verl's clip_ratio_high.
        kl_coefficient: >= 0; verl's kl_loss_coef, 0.001 where use_kl_loss is set.
        correction: of the sampler's mismatch; verl's rollout_correction, off.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        verl, verl/trainer/ppo/core_algos.py, https://github.com/volcengine/verl.

    >>> verl_cispo(clip_high=0.28).needs_reference
    False
    """
    return compose(
        advantages=partial(
            advantages.group_normalized, ddof=1, epsilon=1e-6, single="raw"
        ),
        policy_loss=terms.weighting_token_ratio(
            ratio_low=1 - clip_low, ratio_high=1 + clip_high
        ),
        reduction=reduce.token_mean,
        kl_coefficient=kl_coefficient,
        kl_estimator=CLAMPED_K3,
        correction=correction,
    )


def trl_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: Literal["token", "sequence"] = "token",
    threshold: float | None = None,
    quantile: float = 0.0,
    entropy_coefficient: float = 0.0,
    kl_coefficient: float = 0.0,
    reduction: Reduction = reduce.token_mean,
    correction: Correction | None = SEQUENCE_MASK,
) -> Algorithm:
    """TRL's GRPOTrainer as it comes.

    Epsilon 1e-4; a group's only sample gets 0; no clamp in the KL; the mean over all
    tokens (loss_type dapo). Sequences whose importance weight exceeds 3 are dropped.

    Args:
        clip_low: in [0, 1]; TRL's epsilon.
        clip_high: >= 0; TRL's epsilon_high.
        dual_clip: TRL's delta, > 1 + clip_high, below which TRL's would also cut the
            clip's own range; None for none.
        ratio_level: TRL's importance_sampling_level.
        threshold: in nats a token; TRL's off_policy_mask_threshold, of the KL from the
            proximal policy. TRL measures from the sampler, which is the same where
            sampler and trainer agree. None for no mask.
        quantile: in [0, 1], share of the tokens of lowest entropy that get no policy
            loss; 1 minus TRL's top_entropy_quantile. They still count in the mean.
        entropy_coefficient: weight of the entropy's mean over all tokens.
        kl_coefficient: >= 0, weight of the KL to the reference policy; TRL's beta.
        reduction: TRL's loss_type; `reduce.sequence_mean_of_token_mean` for grpo.
        correction: TRL's vllm_importance_sampling_mode and _cap.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range; there is a dual clip of
            sequences; or an entropy coefficient with another reduction than the mean
            over tokens, which TRL takes of the entropy whatever the loss type is.

    References:
        TRL, trl/trainer/grpo_trainer.py, https://github.com/huggingface/trl.

    >>> trl_grpo(kl_coefficient=0.04).needs_reference
    True
    """
    if entropy_coefficient and reduction is not reduce.token_mean:
        raise ValueError(
            f"entropy_coefficient must be 0 with this reduction, got "
            f"{entropy_coefficient}; TRL's entropy is a mean over tokens, which has "
            "another denominator"
        )
    policy_loss = _trl_clip(clip_low, clip_high, dual_clip, ratio_level)
    if threshold is not None:
        policy_loss = terms.opsm(policy_loss, threshold=threshold)
    choice = partial(entropy.entropy_quantile_mask, quantile=quantile)
    return compose(
        advantages=partial(advantages.group_normalized, ddof=1, epsilon=1e-4),
        policy_loss=policy_loss,
        reduction=reduction,
        kl_coefficient=kl_coefficient,
        kl_estimator=PLAIN_K3,
        correction=correction,
        entropy_coefficient=entropy_coefficient,
        token_choice=choice if quantile else None,
    )


def trl_dr_grpo(
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    correction: Correction | None = SEQUENCE_MASK,
) -> Algorithm:
    """TRL's Dr. GRPO: loss_type dr_grpo, scale_rewards none.

    Args:
        denominator: > 0, in tokens; TRL's max_completion_length.
        clip_low: in [0, 1]; TRL's epsilon.
        clip_high: >= 0; TRL's epsilon_high.
        kl_coefficient: >= 0, weight of the KL to the reference policy; TRL's beta.
        correction: TRL's vllm_importance_sampling_mode and _cap.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        TRL, trl/trainer/grpo_trainer.py, https://github.com/huggingface/trl.

    >>> trl_dr_grpo(denominator=256.0).needs_reference
    False
    """
    return compose(
        advantages=advantages.group_centered,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=partial(reduce.constant_denominator, denominator=denominator),
        kl_coefficient=kl_coefficient,
        kl_estimator=PLAIN_K3,
        correction=correction,
    )


def trl_cispo(
    *,
    ratio_high: float = 5.0,
    kl_coefficient: float = 0.0,
    correction: Correction | None = SEQUENCE_MASK,
) -> Algorithm:
    """TRL's CISPO (loss_type cispo), whose epsilon_high bounds the ratio itself.

    Args:
        ratio_high: >= 1, the largest ratio; TRL's epsilon_high, of which it recommends
            5; its own default, meant for the clip of GRPO, is 0.2. There is no lower
            bound.
        kl_coefficient: >= 0, weight of the KL to the reference policy; TRL's beta.
        correction: TRL's vllm_importance_sampling_mode and _cap.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        TRL, trl/trainer/grpo_trainer.py, https://github.com/huggingface/trl.

    >>> trl_cispo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=1, epsilon=1e-4),
        policy_loss=terms.weighting_token_ratio(ratio_low=0.0, ratio_high=ratio_high),
        reduction=reduce.token_mean,
        kl_coefficient=kl_coefficient,
        kl_estimator=PLAIN_K3,
        correction=correction,
    )


def nemo_rl_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
    reduction: Reduction = reduce.token_mean,
    correction: Correction | None = None,
) -> Algorithm:
    """NeMo RL's GRPO, of its examples' configuration.

    Baseline and standard deviation are of the group's other samples. Where these do not
    vary (always so in a group of two) the advantage is not scaled; otherwise epsilon is
    1e-6. A group's only sample gets 0. The mean is over all tokens (token_level_loss).

    Args:
        clip_low: in [0, 1]; NeMo RL's ratio_clip_min.
        clip_high: >= 0; NeMo RL's ratio_clip_max.
        kl_coefficient: >= 0; NeMo RL's reference_policy_kl_penalty.
        reduction: `reduce.sequence_mean_of_token_mean` without token_level_loss.
        correction: NeMo RL's use_importance_sampling_correction, off.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        NeMo RL, examples/configs/grpo_math_1B.yaml, https://github.com/NVIDIA-NeMo/RL.

    >>> nemo_rl_grpo().needs_reference
    True
    """
    return compose(
        advantages=partial(advantages.leave_one_out_normalized, epsilon=1e-6),
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduction,
        kl_coefficient=kl_coefficient,
        kl_estimator=CLAMPED_K3,
        correction=correction,
    )


def openrlhf_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
    correction: Correction | None = None,
) -> Algorithm:
    """OpenRLHF's GRPO: advantage_estimator group_norm, use_kl_loss, kl_estimator k3.

    Epsilon 1e-9; groups of one are refused there and get 0 here; the mean over all
    tokens. Without use_kl_loss its KL is in the reward, after the normalisation.

    Args:
        clip_low: in [0, 1]; the first of OpenRLHF's eps_clip_low_high.
        clip_high: >= 0; the second.
        kl_coefficient: >= 0; OpenRLHF's init_kl_coef.
        correction: OpenRLHF's enable_vllm_is_correction, off.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        OpenRLHF, openrlhf/trainer/ppo_utils/experience_maker.py,
        https://github.com/OpenRLHF/OpenRLHF.

    >>> openrlhf_grpo().needs_reference
    True
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=1, epsilon=1e-9),
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        kl_coefficient=kl_coefficient,
        kl_estimator=CLAMPED_K3,
        correction=correction,
    )


def _trl_clip(
    clip_low: float, clip_high: float, dual_clip: float | None, ratio_level: str
) -> PolicyLoss:
    """TRL's clipped surrogate, of tokens or of sequences."""
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ValueError(
            f"dual_clip must be > 1 + clip_high = {1 + clip_high}, got {dual_clip}"
        )
    if ratio_level == "token":
        return terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        )
    if ratio_level != "sequence":
        raise ValueError(
            f"ratio_level must be 'token' or 'sequence', got {ratio_level!r}"
        )
    if dual_clip is not None:
        raise ValueError(
            f"dual_clip must be None with ratio_level 'sequence', got {dual_clip}"
        )
    return terms.clipped_sequence_ratio(clip_low=clip_low, clip_high=clip_high)
