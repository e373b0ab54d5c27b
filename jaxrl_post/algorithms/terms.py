"""Policy terms: what a policy-gradient method makes of the tokens of a batch.

Each function returns the `policy_loss` of `compose`. To write a method of one's own,
write another, or pass one of these to `compose` with other parts.
"""

from jaxrl_post.algorithms.objective import PolicyLoss, PolicyTerm
from jaxrl_post.losses import diagnostics, policy, ratios
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "clipped_sequence_ratio",
    "clipped_token_ratio",
    "reinforce",
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

    >>> import jax.numpy as jnp
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

    >>> import jax.numpy as jnp
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


def weighting_token_ratio(*, ratio_low: float, ratio_high: float) -> PolicyLoss:
    """CISPO: the log-prob weighted by each token's bounded ratio.

    The clip fractions count tokens of either sign of the advantage.

    Args:
        ratio_low: in [0, 1], lower bound of the ratio itself.
        ratio_high: >= 1, upper bound of the ratio itself.

    Returns:
        A policy loss for `compose`.

    >>> import jax.numpy as jnp
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


def reinforce() -> PolicyLoss:
    """REINFORCE: the plain log-prob. The ratio is only watched; nothing is clipped.

    Returns:
        A policy loss for `compose`.

    >>> import jax.numpy as jnp
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
        ratio = ratios.token_ratio(policy_logprobs, proximal_logprobs, mask)
        none_clipped = diagnostics.outside_fraction(ratio, mask)
        return PolicyTerm(
            loss=policy.reinforce(policy_logprobs, advantages, mask),
            ratio=ratio,
            clip_fraction_low=none_clipped,
            clip_fraction_high=none_clipped,
        )

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
