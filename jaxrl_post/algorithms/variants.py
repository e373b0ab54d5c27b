"""Policy-gradient algorithms that replace one part of GRPO, mostly its clip.

name     advantage        instead of PPO's clip               loss is the mean over
gmpo     group, over std  token clips in a geometric mean     tokens, then sequences
sapo     group, over std  a sigmoid gate of the token ratio   tokens, then sequences
dppo     group, over std  a bound on the policies' divergence all tokens
max_rl   group, over mean (the clip)                          all tokens
"""

from collections.abc import Callable
from functools import partial
from typing import Unpack

from jaxrl_post.algorithms import terms
from jaxrl_post.algorithms.composition import SharedOptions, compose, only_shared
from jaxrl_post.algorithms.objective import Algorithm
from jaxrl_post.losses import advantages, baselines, reduce, trust_region
from jaxrl_post.types import Array

__all__ = ["dppo", "gmpo", "max_rl", "sapo"]


def gmpo(
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Geometric-Mean Policy Optimization.

    It is GRPO with sequences weighted by the geometric mean of their clipped token
    ratios. A single outlier changes this mean little, so the clip range can be wide.

    Args:
        clip_low: >= 0, in nats; a token's log-ratio is clipped at -clip_low.
        clip_high: >= 0, in nats; a token's log-ratio is clipped at clip_high.

    References:
        Zhao et al., Geometric-Mean Policy Optimization, arXiv:2507.20673.

    >>> gmpo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.geometric_mean_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.sequence_mean_of_token_mean,
        **only_shared(gmpo, shared),
    )._replace(turn_credit="averages")


def sapo(
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Soft Adaptive Policy Optimization.

    It is GRPO with a sigmoid gate instead of the clip: a token's gradient fades as its
    ratio moves away from 1, but is never cut off. On policy its gradient is GRPO's, but
    the loss's value is not.

    Args:
        tau_positive: > 0, for positive advantages; a larger tau fades gradients faster.
        tau_negative: > 0, for negative advantages.

    References:
        Gao et al., Soft Adaptive Policy Optimization, arXiv:2511.20347.

    >>> sapo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.soft_gated_ratio(
            tau_positive=tau_positive, tau_negative=tau_negative
        ),
        reduction=reduce.sequence_mean_of_token_mean,
        **only_shared(sapo, shared),
    )


def dppo(
    *,
    threshold: float,
    divergence: Callable[[Array, Array, Array], Array] = trust_region.binary_tv,
    ratio_high: float | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Divergence Proximal Policy Optimization.

    It is the plain policy gradient, without the tokens whose next-token distribution
    has moved beyond a threshold and would move further. Ratio and divergence are
    relative to the sampler's policy, so no other correction is needed. verl bounds the
    ratio by 20, TRL by 10.

    Args:
        threshold: >= 0, in the divergence's unit, so it has no default. TRL takes a
            total variation of 0.2, and 0.28 on the upper side.
        divergence: `trust_region.binary_tv` or `trust_region.binary_kl`.
        ratio_high: > 0, bound of the ratio as a weight (verl has 20); None for none.
        **shared: see `SharedOptions`, without a correction.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879.

    >>> dppo(threshold=0.15).needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.divergence_masked_ratio(
            divergence=divergence, threshold=threshold, ratio_high=ratio_high
        ),
        reduction=reduce.token_mean,
        anchor="behavior",
        **(SharedOptions(correction=None) | only_shared(dppo, shared)),
    )


def max_rl(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Maximum Likelihood Reinforcement Learning.

    Rewards are centred and divided by their group's mean, so that the policy maximises
    the log of a prompt's success rate. Every token weighs the same, as in the paper's
    gradient of whole sequences; PPO's clip allows several updates per batch.

    Returns:
        The algorithm, for rewards >= 0.

    References:
        Tajwar et al., Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.

    >>> max_rl().needs_reference
    False
    """
    return compose(
        advantages=baselines.max_rl,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        **only_shared(max_rl, shared),
    )._replace(positive_rewards=True)
