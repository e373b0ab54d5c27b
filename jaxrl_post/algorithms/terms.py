"""Policy terms: what a policy-gradient method makes of the tokens of a batch.

Each function returns the `policy_loss` of `compose`. To write a method of one's own,
write another, or pass one of these to `compose` with other parts.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_post.algorithms.objective import PolicyLoss, PolicyTerm
from jaxrl_post.losses import diagnostics, policy, ratios, trust_region
from jaxrl_post.metrics import masked
from jaxrl_post.types import Array, Bool, Float, Int

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


def clipped_token_ratio(
    *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """PPO's clipped surrogate of each token's ratio.

    Args:
        clip_low: in [0, 1]; the ratio is clipped at 1 - clip_low.
        clip_high: >= 0; the ratio is clipped at 1 + clip_high.
        dual_clip: > 1, or None; see `policy.clipped_surrogate`.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = clipped_token_ratio(clip_low=0.2, clip_high=0.28)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        del segment_ids
        loss = policy.clipped_surrogate(
            policy_logprobs,
            proximal_logprobs,
            advantages,
            mask,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )
        ratio = ratios.token_ratio(policy_logprobs, proximal_logprobs, mask)
        return _clipped(loss, ratio, advantages, mask, clip_low, clip_high)

    return policy_loss


def clipped_sequence_ratio(*, clip_low: float, clip_high: float) -> PolicyLoss:
    """GSPO's clipped surrogate of each sequence's length-normalised ratio.

    Args:
        clip_low: in [0, 1]; the ratio is clipped at 1 - clip_low.
        clip_high: >= 0; the ratio is clipped at 1 + clip_high.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = clipped_sequence_ratio(clip_low=3e-4, clip_high=4e-4)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        arrays = (policy_logprobs, proximal_logprobs)
        loss = policy.gspo(
            *arrays,
            advantages,
            mask,
            segment_ids,
            clip_low=clip_low,
            clip_high=clip_high,
        )
        ratio = ratios.sequence_ratio(*arrays, mask, segment_ids)
        return _clipped(loss, ratio, advantages, mask, clip_low, clip_high)

    return policy_loss


def clipped_product_ratio(*, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped surrogate of each sequence's whole ratio, the tokens' product.

    Args:
        clip_low: in [0, 1]; the ratio is clipped at 1 - clip_low.
        clip_high: >= 0; the ratio is clipped at 1 + clip_high.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = clipped_product_ratio(clip_low=0.2, clip_high=0.2)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        arrays = (policy_logprobs, proximal_logprobs)
        clip = {"clip_low": clip_low, "clip_high": clip_high}
        loss = policy.clipped_sequence_surrogate(
            *arrays, advantages, mask, segment_ids, **clip
        )
        ratio = ratios.sequence_product_ratio(*arrays, mask, segment_ids)
        return _clipped(loss, ratio, advantages, mask, clip_low, clip_high)

    return policy_loss


def kernel_weighted_ratio(
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> PolicyLoss:
    """VESPO: the log-prob weighted by a kernel of each sequence's whole ratio.

    Args:
        k_positive: >= 0, power of the kernel where the advantage is not negative.
        lambda_positive: >= 0, its rate there.
        k_negative: >= 0, power of the kernel where the advantage is negative.
        lambda_negative: >= 0, its rate there.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.full((1, 2), -0.5), jnp.ones((1, 2))
    >>> term = kernel_weighted_ratio(
    ...     k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0
    ... )
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[0.5, 0.5]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        arrays = (policy_logprobs, proximal_logprobs)
        loss = policy.vespo(
            *arrays,
            advantages,
            mask,
            segment_ids,
            k_positive=k_positive,
            lambda_positive=lambda_positive,
            k_negative=k_negative,
            lambda_negative=lambda_negative,
        )
        ratio = ratios.sequence_product_ratio(*arrays, mask, segment_ids)
        return _unclipped(loss, ratio, mask)

    return policy_loss


def weighting_token_ratio(*, ratio_low: float, ratio_high: float) -> PolicyLoss:
    """CISPO: the log-prob weighted by each token's bounded ratio.

    The clip fractions count tokens of either sign of the advantage.

    Args:
        ratio_low: in [0, 1], lower bound of the ratio itself.
        ratio_high: >= 1, upper bound of the ratio itself.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.full((1, 2), -0.5), jnp.ones((1, 2))
    >>> term = weighting_token_ratio(ratio_low=0.0, ratio_high=5.0)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[0.5, 0.5]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        del segment_ids
        loss = policy.cispo(
            policy_logprobs,
            proximal_logprobs,
            advantages,
            mask,
            ratio_low=ratio_low,
            ratio_high=ratio_high,
        )
        ratio = ratios.token_ratio(policy_logprobs, proximal_logprobs, mask)
        return PolicyTerm(
            loss=loss,
            ratio=ratio,
            clip_fraction_low=diagnostics.outside_fraction(ratio, mask, low=ratio_low),
            clip_fraction_high=diagnostics.outside_fraction(
                ratio, mask, high=ratio_high
            ),
        )

    return policy_loss


def geometric_mean_ratio(*, clip_low: float, clip_high: float) -> PolicyLoss:
    """GMPO: the geometric mean of a sequence's clipped token ratios.

    The ratio that is shown, and clipped, is each token's.

    Args:
        clip_low: >= 0, in nats; the log-ratio is clipped at -clip_low.
        clip_high: >= 0, in nats; the log-ratio is clipped at clip_high.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = geometric_mean_ratio(clip_low=0.4, clip_high=0.4)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        arrays = (policy_logprobs, proximal_logprobs)
        loss = policy.gmpo(
            *arrays,
            advantages,
            mask,
            segment_ids,
            clip_low=clip_low,
            clip_high=clip_high,
        )
        ratio = ratios.token_ratio(*arrays, mask)
        low, high = 1 - math.exp(-clip_low), math.exp(clip_high) - 1
        return _clipped(loss, ratio, advantages, mask, low, high)

    return policy_loss


def soft_gated_ratio(*, tau_positive: float, tau_negative: float) -> PolicyLoss:
    """SAPO: a smooth gate of each token's ratio. Nothing is clipped.

    Args:
        tau_positive: > 0, of tokens with a positive advantage; larger is narrower.
        tau_negative: > 0, of the others.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = soft_gated_ratio(tau_positive=1.0, tau_negative=1.05)
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-2.0, -2.0]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        del segment_ids
        loss = policy.sapo(
            policy_logprobs,
            proximal_logprobs,
            advantages,
            mask,
            tau_positive=tau_positive,
            tau_negative=tau_negative,
        )
        ratio = ratios.token_ratio(policy_logprobs, proximal_logprobs, mask)
        return _unclipped(loss, ratio, mask)

    return policy_loss


def divergence_masked_ratio(
    *,
    divergence: Callable[[Array, Array, Array], Array],
    threshold: float,
    ratio_high: float | None,
) -> PolicyLoss:
    """DPPO: the plain ratio, without the tokens that are led out of a trust region.

    The paper's region is around the sampler's policy: compose with anchor="behavior".
    The clip fractions are of the tokens left out, by the sign of their advantage.

    Args:
        divergence: `trust_region.binary_tv` or `trust_region.binary_kl`.
        threshold: >= 0, in the divergence's unit.
        ratio_high: > 0, bound of the ratio as a weight; see `trust_region.dppo`.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    >>> term = divergence_masked_ratio(
    ...     divergence=trust_region.binary_tv, threshold=0.15, ratio_high=20.0
    ... )
    >>> term(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[-1.0, -1.0]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        del segment_ids
        arrays = (policy_logprobs, proximal_logprobs)
        loss = trust_region.dppo(
            *arrays,
            advantages,
            mask,
            divergence=divergence,
            threshold=threshold,
            ratio_high=ratio_high,
        )
        ratio = ratios.token_ratio(*arrays, mask)
        keep = trust_region.dppo_mask(
            ratio, divergence(*arrays, mask), advantages, mask, threshold=threshold
        )
        left_out = [~keep & (advantages < 0), ~keep & (advantages > 0)]
        low, high = (masked(event.astype(jnp.float32), mask) for event in left_out)
        return PolicyTerm(loss, ratio, low, high)

    return policy_loss


def opsm(policy_loss: PolicyLoss, *, threshold: float) -> PolicyLoss:
    """Off-policy sequence masking around another policy loss.

    The loss of sequences with a negative advantage that the policy has left is 0. How
    far is the mean of log q - log p, q the log-probs that the policy loss gets: the
    proximal ones, or the sampler's with anchor="behavior", as in DeepSeek-V3.2. Adds
    the metric policy/off_policy_fraction, of the tokens left out.

    Args:
        policy_loss: one of the others here.
        threshold: in nats a token.

    Returns:
        A policy loss for `compose`.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.

    >>> p, q = jnp.array([[-3.0, -3.0]]), jnp.array([[-1.0, -1.0]])
    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> term = opsm(reinforce(), threshold=1.0)
    >>> term(p, q, jnp.array([[-1.0, -1.0]]), ids > 0, ids).loss.tolist()
    [[0.0, 0.0]]
    """

    def masked_policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
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
    """REINFORCE: the plain log-prob. The ratio is only watched; nothing is clipped.

    Returns:
        A policy loss for `compose`.

    >>> p, ones = jnp.full((1, 2), -0.5), jnp.ones((1, 2))
    >>> reinforce()(p, p, ones, ones > 0, ones.astype(int)).loss.tolist()
    [[0.5, 0.5]]
    """

    def policy_loss(
        policy_logprobs: Float[Array, "rows length"],
        proximal_logprobs: Float[Array, "rows length"],
        advantages: Float[Array, "rows length"],
        mask: Bool[Array, "rows length"],
        segment_ids: Int[Array, "rows length"],
    ) -> PolicyTerm:
        del segment_ids
        loss = policy.reinforce(policy_logprobs, advantages, mask)
        ratio = ratios.token_ratio(policy_logprobs, proximal_logprobs, mask)
        return _unclipped(loss, ratio, mask)

    return policy_loss


def _clipped(
    loss: Float[Array, "rows length"],
    ratio: Float[Array, "rows length"],
    advantages: Float[Array, "rows length"],
    mask: Bool[Array, "rows length"],
    clip_low: float,
    clip_high: float,
) -> PolicyTerm:
    """Adds the fractions of tokens whose gradient each side of the clip removes."""
    return PolicyTerm(
        loss=loss,
        ratio=ratio,
        clip_fraction_low=diagnostics.clip_fraction_low(
            ratio, advantages, mask, clip_low=clip_low
        ),
        clip_fraction_high=diagnostics.clip_fraction_high(
            ratio, advantages, mask, clip_high=clip_high
        ),
    )


def _unclipped(
    loss: Float[Array, "rows length"],
    ratio: Float[Array, "rows length"],
    mask: Bool[Array, "rows length"],
) -> PolicyTerm:
    none_clipped = diagnostics.outside_fraction(ratio, mask)
    return PolicyTerm(loss, ratio, none_clipped, none_clipped)
