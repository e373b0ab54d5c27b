"""Importance weights that correct the mismatch between sampler and trainer.

The sampler drew the tokens from `behavior_logprobs`; the update assumes that they come
from `proximal_logprobs` (the trainer's own, at the start of the batch's updates). The
weight proximal / behavior makes a token's loss unbiased again. To bound the variance,
extreme weights are truncated or their tokens dropped. Dropped tokens have weight 0 and
stay in the loss's denominator.

Decoupled PPO is this weight times the surrogate clipped around the proximal policy:

    proximal_t / behavior_t  clipped_surrogate(policy_t, proximal_t, A_t)

so the trust region is around a recent policy, no matter how old the sampler's is.

Weights carry no gradient, and are 1 at uncounted tokens. Set a missing behavior
log-prob to NaN, which makes the loss NaN, and not to 0, which means probability 1.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.ratios import (
    sequence_product_ratio,
    sequence_ratio,
    token_ratio,
)
from jaxrl_post.losses.sequences import in_sequence
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "decoupled_weights",
    "icepop",
    "sequence_masked",
    "sequence_weights",
    "token_weights",
    "truncated",
]


@checked
def token_weights(
    proximal_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Importance weight of each token: w_t = proximal_t / behavior_t.

    Returns:
        float32 in [e^-20, e^20], without gradient; 1 where the mask is False.

    >>> token_weights(jnp.array([-1.0]), jnp.array([-1.0]), jnp.array([True])).tolist()
    [1.0]
    """
    return jax.lax.stop_gradient(
        token_ratio(proximal_logprobs, behavior_logprobs, mask)
    )


@checked
def sequence_weights(
    proximal_logprobs: Float[Array, "*batch length"],
    behavior_logprobs: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """Importance weight of each sequence, the product of its tokens' weights.

    Returns:
        float32 in [e^-20, e^20], without gradient; each token gets its sequence's.

    >>> trainer, sampler = jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.0])
    >>> sequence_weights(trainer, sampler, jnp.array([True, True])).tolist()
    [1.0, 1.0]
    """
    return jax.lax.stop_gradient(
        sequence_product_ratio(proximal_logprobs, behavior_logprobs, mask, segment_ids)
    )


@checked
def truncated(
    weights: Float[Array, "*shape"], *, cap: float = 2.0
) -> Float[Array, "*shape"]:
    """Truncated importance sampling: min(w, cap).

    Args:
        weights: of tokens or of sequences, >= 0.
        cap: > 0.

    Returns:
        float32, at most `cap`.

    Raises:
        ValueError: `cap` is not positive.

    References:
        Ionides, Truncated Importance Sampling, 2008.
        Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training, https://fengyao.notion.site/off-policy-rl, 2025.

    >>> truncated(jnp.array([0.5, 3.0]), cap=2.0).tolist()
    [0.5, 2.0]
    """
    if cap <= 0:
        raise ValueError(f"cap must be > 0, got {cap}")
    return jnp.minimum(weights.astype(jnp.float32), cap)


@checked
def decoupled_weights(
    proximal_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    cap: float,
) -> Float[Array, "*shape"]:
    """Decoupled PPO's weight of each token: min(proximal_t / behavior_t, cap).

    The papers do not bound the weight. AReaL's default drops the tokens beyond the cap
    instead of truncating them: `icepop(token_weights(...), low=0.0, high=cap)`.

    Args:
        cap: > 0.

    Returns:
        float32, at most `cap`, without gradient; min(1, cap) where the mask is False.

    Raises:
        ValueError: `cap` is not positive.

    References:
        Hilton, Cobbe and Schulman, Batch size-invariance for policy optimization,
        arXiv:2110.00641.
        Fu et al., AReaL, arXiv:2505.24298.

    >>> proximal, behavior = jnp.array([-1.0, -1.0]), jnp.array([-1.0, -9.0])
    >>> mask = jnp.array([True, True])
    >>> decoupled_weights(proximal, behavior, mask, cap=5.0).tolist()
    [1.0, 5.0]
    """
    return truncated(token_weights(proximal_logprobs, behavior_logprobs, mask), cap=cap)


@checked
def icepop(
    weights: Float[Array, "*shape"], *, low: float = 0.5, high: float = 5.0
) -> Float[Array, "*shape"]:
    """IcePop: keeps weights inside [low, high] as they are; outside they become 0.

    Args:
        weights: of tokens or of sequences, >= 0.
        low: 0 <= low <= high.
        high: upper bound, inclusive.

    Returns:
        float32.

    Raises:
        ValueError: the bounds are negative or in the wrong order.

    References:
        Ling Team, Every Step Evolves (Ring-1T), arXiv:2510.18855.

    >>> icepop(jnp.array([0.25, 0.75, 6.0])).tolist()
    [0.0, 0.75, 0.0]
    """
    _require_bounds(low, high)
    weights = weights.astype(jnp.float32)
    # NaN is neither below nor above the bounds, so it stays visible.
    return jnp.where((weights < low) | (weights > high), 0.0, weights)


@checked
def sequence_masked(
    weights: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    behavior_logprobs: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    low: float,
    high: float,
) -> Float[Array, "*batch length"]:
    """Drops whole sequences by the geometric mean of their tokens' weights.

    w_t if low <= exp(mean_t(log proximal_t - log behavior_t)) <= high, else 0

    Args:
        weights: of tokens or of sequences, >= 0.
        low: 0 <= low <= high.
        high: upper bound, inclusive.

    Returns:
        float32; 1 where the mask is False, unless its sequence is dropped.

    Raises:
        ValueError: the bounds are negative or in the wrong order.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> trainer, sampler = jnp.array([[-1.0], [-2.0]]), jnp.array([[-1.0], [-1.0]])
    >>> mask = jnp.array([[True], [True]])
    >>> sequence_masked(
    ...     jnp.ones((2, 1)), trainer, sampler, mask, low=0.5, high=2.0
    ... ).tolist()
    [[1.0], [0.0]]
    """
    _require_bounds(low, high)
    mean_weight = jax.lax.stop_gradient(
        sequence_ratio(proximal_logprobs, behavior_logprobs, mask, segment_ids)
    )
    mask = in_sequence(mask, segment_ids)
    weights = jnp.where(mask, weights.astype(jnp.float32), 1.0)
    # A NaN mean must stay visible even where no weight is NaN.
    weights = jnp.where(jnp.isnan(mean_weight), mean_weight, weights)
    return jnp.where((mean_weight < low) | (mean_weight > high), 0.0, weights)


def _require_bounds(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"bounds must satisfy 0 <= low <= high, got {low} and {high}")
