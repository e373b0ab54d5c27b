"""Policy terms: the per-token losses of policy-gradient methods.

Each function returns a `policy_loss` for `compose`. For a new method, write another
such function, or pass one of these to `compose` with other parts.
"""

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from jaxrl_post.algorithms.objective import (
    Mask,
    PerToken,
    PolicyLoss,
    PolicyTerm,
    SegmentIds,
)
from jaxrl_post.losses import diagnostics, policy, ratios, trust_region
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array

__all__ = [
    "clipped_product_ratio",
    "clipped_sequence_ratio",
    "clipped_token_ratio",
    "divergence_masked_ratio",
    "geometric_mean_ratio",
    "kernel_weighted_ratio",
    "opsm",
    "reinforce",
    "soft_gated_ratio",
    "weighting_token_ratio",
]

type Fractions = tuple[Metric, Metric]


def clipped_token_ratio(
    *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate of each token's ratio.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = clipped_token_ratio(clip_low=0.2, clip_high=0.28)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    loss = partial(
        policy.clipped_surrogate,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return _policy_loss(_of_tokens(loss), _TOKEN_RATIO, _clipped(clip_low, clip_high))


def clipped_sequence_ratio(
    *, clip_low: float, clip_high: float, by_token: bool = True
) -> PolicyLoss:
    """GSPO's clipped surrogate of each sequence's length-normalised ratio.

    Args:
        by_token: whether a token's loss has the gradient of that token alone
            (`policy.gspo_token`), so that its own advantage and correction count for
            it. False spreads it over its sequence (`policy.gspo`). Where these are
            equal in a sequence, so are the gradients.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = clipped_sequence_ratio(clip_low=3e-4, clip_high=4e-4)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    surrogate = policy.gspo_token if by_token else policy.gspo
    loss = partial(surrogate, clip_low=clip_low, clip_high=clip_high)
    return _policy_loss(loss, ratios.sequence_ratio, _clipped(clip_low, clip_high))


def clipped_product_ratio(*, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped surrogate of each sequence's ratio, the product of token ratios.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = clipped_product_ratio(clip_low=0.2, clip_high=0.2)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    loss = partial(
        policy.clipped_sequence_surrogate, clip_low=clip_low, clip_high=clip_high
    )
    return _policy_loss(
        loss, ratios.sequence_product_ratio, _clipped(clip_low, clip_high)
    )


def kernel_weighted_ratio(
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> PolicyLoss:
    """VESPO: the log-prob weighted by a kernel of each sequence's product ratio.

    Args:
        k_positive: >= 0, power of the kernel where the advantage is not negative.
        lambda_positive: >= 0, rate of the kernel there.
        k_negative: >= 0, power of the kernel where the advantage is negative.
        lambda_negative: >= 0, rate of the kernel there.

    >>> p, ones = jnp.full((1, 2), -0.5), jnp.ones((1, 2))
    >>> term = kernel_weighted_ratio(
    ...     k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0
    ... )
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[0.5, 0.5]]
    """

    loss = partial(
        policy.vespo,
        k_positive=k_positive,
        lambda_positive=lambda_positive,
        k_negative=k_negative,
        lambda_negative=lambda_negative,
    )
    return _policy_loss(loss, ratios.sequence_product_ratio, _unclipped)


def weighting_token_ratio(*, ratio_low: float, ratio_high: float) -> PolicyLoss:
    """CISPO: the log-prob weighted by each token's bounded ratio.

    The clip fractions count tokens of either sign of the advantage.

    Args:
        ratio_low: in [0, 1], lower bound of the ratio itself.
        ratio_high: >= 1, upper bound of the ratio itself.

    >>> p, ones = jnp.full((1, 2), -0.5), jnp.ones((1, 2))
    >>> term = weighting_token_ratio(ratio_low=0.0, ratio_high=5.0)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[0.5, 0.5]]
    """

    loss = partial(policy.cispo, ratio_low=ratio_low, ratio_high=ratio_high)

    def outside(ratio: PerToken, advantages: PerToken, mask: Mask) -> Fractions:
        del advantages
        fraction = partial(diagnostics.outside_fraction, ratio, mask)
        return fraction(low=ratio_low), fraction(high=ratio_high)

    return _policy_loss(_of_tokens(loss), _TOKEN_RATIO, outside)


def geometric_mean_ratio(*, clip_low: float, clip_high: float) -> PolicyLoss:
    """GMPO: the geometric mean of a sequence's clipped token ratios.

    The ratio and clip metrics are of single tokens.

    Args:
        clip_low: >= 0, in nats; the log-ratio is clipped at -clip_low.
        clip_high: >= 0, in nats; the log-ratio is clipped at clip_high.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = geometric_mean_ratio(clip_low=0.4, clip_high=0.4)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    loss = partial(policy.gmpo, clip_low=clip_low, clip_high=clip_high)
    clip = _clipped(1 - math.exp(-clip_low), math.exp(clip_high) - 1)
    return _policy_loss(loss, _TOKEN_RATIO, clip)


def soft_gated_ratio(*, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """SAPO: a smooth gate of each token's ratio. Nothing is clipped.

    Args:
        tau_positive: > 0, for tokens with a positive advantage; larger is narrower.
        tau_negative: > 0, for the other tokens.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = soft_gated_ratio(tau_positive=1.0, tau_negative=1.05)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-2.0, -2.0]]
    """

    loss = partial(policy.sapo, tau_positive=tau_positive, tau_negative=tau_negative)
    return _policy_loss(_of_tokens(loss), _TOKEN_RATIO, _unclipped)


def divergence_masked_ratio(
    *,
    divergence: Callable[[Array, Array, Array], Array],
    threshold: float,
    ratio_high: float | None,
) -> PolicyLoss:
    """DPPO: the plain ratio, without the tokens that would leave a trust region.

    The paper's region is around the sampler's policy: compose with anchor="behavior".
    The clip fractions count the tokens left out, by the sign of their advantage.

    Args:
        divergence: `trust_region.binary_tv` or `trust_region.binary_kl`.
        threshold: >= 0, in the divergence's unit.
        ratio_high: > 0, bound of the ratio as a weight; see `trust_region.dppo`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = divergence_masked_ratio(
    ...     divergence=trust_region.binary_tv, threshold=0.15, ratio_high=20.0
    ... )
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    loss = partial(
        trust_region.dppo,
        divergence=divergence,
        threshold=threshold,
        ratio_high=ratio_high,
    )

    def policy_loss(
        policy_logprobs: PerToken,
        proximal_logprobs: PerToken,
        advantages: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> PolicyTerm:
        del segment_ids
        arrays = (policy_logprobs, proximal_logprobs)
        ratio = ratios.token_ratio(*arrays, mask)
        keep = trust_region.dppo_mask(
            ratio, divergence(*arrays, mask), advantages, mask, threshold=threshold
        )
        left_out = [~keep & (advantages < 0), ~keep & (advantages > 0)]
        low, high = (masked(event.astype(jnp.float32), mask) for event in left_out)
        return PolicyTerm(loss(*arrays, advantages, mask), ratio, low, high)

    return policy_loss


def opsm(policy_loss: PolicyLoss, *, threshold: float) -> PolicyLoss:
    """Off-policy sequence masking around another policy loss.

    The loss is 0 for sequences with a negative advantage whose mean of log q - log p
    exceeds the threshold. q is the policy that `policy_loss` gets: the proximal one, or
    with anchor="behavior" the sampler's, as in DeepSeek-V3.2. This adds the metric
    policy/off_policy_fraction, the fraction of tokens so masked.

    Args:
        policy_loss: another policy loss of this module.
        threshold: in nats per token.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.

    >>> p, q = jnp.array([[-3.0, -3.0]]), jnp.array([[-1.0, -1.0]])
    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> term = opsm(reinforce(), threshold=1.0)
    >>> term(p, q, jnp.array([[-1.0, -1.0]]), ids > 0, ids).loss.tolist()
    [[0.0, 0.0]]
    """

    def masked_policy_loss(
        policy_logprobs: PerToken,
        proximal_logprobs: PerToken,
        advantages: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> PolicyTerm:
        arrays = (policy_logprobs, proximal_logprobs, advantages, mask, segment_ids)
        term = policy_loss(*arrays)
        left_out = mask & ~trust_region.opsm_mask(*arrays, threshold=threshold)
        fraction = masked(left_out.astype(jnp.float32), mask)
        return term._replace(
            loss=jnp.where(left_out, 0.0, term.loss),
            metrics=(term.metrics or {}) | {"policy/off_policy_fraction": fraction},
        )

    return masked_policy_loss


def reinforce() -> PolicyLoss:
    """REINFORCE: the plain log-prob. The ratio is only a metric; nothing is clipped.

    >>> p, ones = jnp.full((1, 2), -0.5), jnp.ones((1, 2))
    >>> reinforce()(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[0.5, 0.5]]
    """

    def loss(policy_logprobs: PerToken, _: PerToken, *rest: Array) -> PerToken:
        return policy.reinforce(policy_logprobs, *rest)

    return _policy_loss(_of_tokens(loss), _TOKEN_RATIO, _unclipped)


def _of_tokens(function: Callable[..., PerToken]) -> Callable[..., PerToken]:
    """Adapts a per-token function to calls with segment ids as the last argument."""
    return lambda *arrays: function(*arrays[:-1])


_TOKEN_RATIO = _of_tokens(ratios.token_ratio)


def _policy_loss(
    loss: Callable[..., PerToken],
    ratio: Callable[..., PerToken],
    fractions: Callable[[PerToken, PerToken, Mask], Fractions],
) -> PolicyLoss:
    """Builds a policy loss from its parts.

    Args:
        loss: of (policy_logprobs, proximal_logprobs, advantages, mask, segment_ids).
        ratio: of (policy_logprobs, proximal_logprobs, mask, segment_ids).
        fractions: (ratio, advantages, mask) to the fractions of tokens at the lower
            and at the upper clip.
    """

    def policy_loss(
        policy_logprobs: PerToken,
        proximal_logprobs: PerToken,
        advantages: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> PolicyTerm:
        policies = (policy_logprobs, proximal_logprobs)
        found = ratio(*policies, mask, segment_ids)
        low, high = fractions(found, advantages, mask)
        return PolicyTerm(
            loss=loss(*policies, advantages, mask, segment_ids),
            ratio=found,
            clip_fraction_low=low,
            clip_fraction_high=high,
        )

    return policy_loss


def _clipped(
    clip_low: float, clip_high: float
) -> Callable[[PerToken, PerToken, Mask], Fractions]:
    """Fractions of the tokens whose gradient each side of the clip removes."""

    def fractions(ratio: PerToken, advantages: PerToken, mask: Mask) -> Fractions:
        arrays = (ratio, advantages, mask)
        low = diagnostics.clip_fraction_low(*arrays, clip_low=clip_low)
        return low, diagnostics.clip_fraction_high(*arrays, clip_high=clip_high)

    return fractions


def _unclipped(ratio: PerToken, advantages: PerToken, mask: Mask) -> Fractions:
    del advantages
    none = diagnostics.outside_fraction(ratio, mask)
    return none, none
