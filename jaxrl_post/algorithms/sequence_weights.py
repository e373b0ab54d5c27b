"""Policy-gradient algorithms that weigh or compare sequences differently from GRPO.

name          advantage                    ratio              loss is the mean over
vespo         group, over std              sequence, kernel   all tokens
luspo         group, over std              sequence, clipped  sequences, of token sum
clipped_rloo  leave-one-out                sequence, clipped  sequences
lite_ppo      group, over the batch's std  token, clipped     all tokens
gdpo          components, each normalised  token, clipped     tokens, then sequences
opo           group, optimal baseline      none               all tokens
remax         over the greedy completion   none               sequences, of token sum
"""

from functools import partial
from typing import Unpack

from jaxrl_post.algorithms import terms
from jaxrl_post.algorithms.composition import SharedOptions, compose, only_shared
from jaxrl_post.algorithms.objective import Algorithm
from jaxrl_post.losses import advantages, baselines, reduce
from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["clipped_rloo", "gdpo", "lite_ppo", "luspo", "opo", "remax", "vespo"]


def vespo(
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Variational Sequence-level Soft Policy Optimization.

    It is REINFORCE weighted by a smooth kernel of the sequence's product ratio to the
    sampler, which replaces both clip and correction.

    Args:
        k_positive: >= 0; see `policy.vespo`, whose defaults these are.
        lambda_positive: >= 0.
        k_negative: >= 0.
        lambda_negative: >= 0.
        **shared: see `SharedOptions`, without a correction.

    References:
        Shen et al., VESPO: Variational Sequence-level Soft Policy Optimization,
        arXiv:2602.10693.

    >>> vespo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.kernel_weighted_ratio(
            k_positive=k_positive,
            lambda_positive=lambda_positive,
            k_negative=k_negative,
            lambda_negative=lambda_negative,
        ),
        reduction=reduce.token_mean,
        anchor="behavior",
        **(SharedOptions(correction=None) | only_shared(vespo, shared)),
    )


def luspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Length-Unbiased Sequence Policy Optimization.

    It is GSPO with sequences weighted by length: it takes the mean over sequences of
    the token sum, while GSPO's token mean gives tokens of long answers less weight.

    References:
        Liu et al., Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261.

    >>> luspo().needs_reference
    False
    """
    return compose(
        advantages=partial(advantages.group_normalized, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.clipped_sequence_ratio(
            clip_low=clip_low, clip_high=clip_high
        ),
        reduction=reduce.sequence_mean_of_token_sum,
        **only_shared(luspo, shared),
    )


def clipped_rloo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """RLOO with PPO's clip of the sequence's ratio, for several updates per batch.

    On policy its gradient is `rloo`'s. The sequence is one action, as in the paper.

    References:
        Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization for
        Learning from Human Feedback in LLMs, arXiv:2402.14740.

    >>> clipped_rloo().needs_reference
    False
    """
    return compose(
        advantages=advantages.leave_one_out,
        policy_loss=terms.clipped_product_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.sequence_mean_of_token_mean,
        **only_shared(clipped_rloo, shared),
    )._replace(turn_credit="averages")


def lite_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Lite PPO: rewards centred in their group and scaled by the batch's deviation.

    Its authors found this scaling and the mean over all tokens sufficient for PPO
    without a critic.

    Args:
        ddof: 1 or 0; see `baselines.batch_scaled`.
        epsilon: >= 0, added to the batch's standard deviation.

    References:
        Liu et al., Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning,
        arXiv:2508.08221.

    >>> lite_ppo().needs_reference
    False
    """
    return compose(
        advantages=partial(baselines.batch_scaled, ddof=ddof, epsilon=epsilon),
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        **only_shared(lite_ppo, shared),
    )


def gdpo(
    *,
    weights: tuple[float, ...] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
    epsilon_inside: bool = True,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Group reward-Decoupled Normalization Policy Optimization, for several rewards.

    It is GRPO with each reward component normalised before the components are added.
    `advantages` takes (rewards [groups, samples, components], valid [groups, samples]).

    Args:
        weights: one per component; None for 1 each. `advantages` checks their number.
        ddof: 1 or 0; see `baselines.gdpo`.
        epsilon: >= 0, added to the standard deviations.
        epsilon_inside: see `baselines.gdpo`.

    Returns:
        The algorithm, whose `reads` is "components".

    References:
        Liu et al., GDPO: Group reward-Decoupled Normalization Policy Optimization for
        Multi-reward RL Optimization, arXiv:2601.05242.

    >>> gdpo().needs_reference
    False
    """
    estimate = partial(
        baselines.gdpo, ddof=ddof, epsilon=epsilon, epsilon_inside=epsilon_inside
    )
    # `compose` traces its parts with one component, so the weights are added after it.
    composed = compose(
        advantages=estimate,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.sequence_mean_of_token_mean,
        reads="components",
        **only_shared(gdpo, shared),
    )
    return composed._replace(
        advantages=partial(estimate, weights=weights), turn_credit="outcome"
    )


def opo(**shared: Unpack[SharedOptions]) -> Algorithm:
    """On-Policy RL with Optimal reward baseline.

    It is REINFORCE with the group's mean reward, weighted by length, as baseline.
    `advantages` takes (rewards, valid, lengths), all [groups, samples].

    Returns:
        The algorithm, whose `reads` is "lengths".

    References:
        Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.

    >>> opo().needs_reference
    False
    """
    return compose(
        advantages=_over_lengths,
        policy_loss=terms.reinforce(),
        reduction=reduce.token_mean,
        reads="lengths",
        **only_shared(opo, shared),
    )._replace(has_ratio=False, turn_credit="outcome")


def remax(**shared: Unpack[SharedOptions]) -> Algorithm:
    """REINFORCE with the reward of the prompt's greedy completion as baseline.

    One sample per prompt is enough. `advantages` takes (rewards [groups, samples],
    valid [groups, samples], greedy_rewards [groups]).

    Returns:
        The algorithm, whose `reads` is "greedy".

    References:
        Li et al., ReMax, arXiv:2310.10505.

    >>> remax().needs_reference
    False
    """
    return compose(
        advantages=_over_greedy,
        policy_loss=terms.reinforce(),
        reduction=reduce.sequence_mean_of_token_sum,
        reads="greedy",
        **only_shared(remax, shared),
    )._replace(has_ratio=False, compares_samples=False, turn_credit="outcome")


@checked
def _over_lengths(
    rewards: Float[Array, "groups samples"],
    valid: Bool[Array, "groups samples"],
    lengths: Int[Array, "groups samples"],
) -> Float[Array, "groups samples"]:
    return baselines.optimal_baseline(rewards, lengths, valid)


@checked
def _over_greedy(
    rewards: Float[Array, "groups samples"],
    valid: Bool[Array, "groups samples"],
    greedy_rewards: Float[Array, "groups"],
) -> Float[Array, "groups samples"]:
    return baselines.remax(rewards, greedy_rewards, valid)
