"""Probability ratios between two policies, per token and per sequence.

Every ratio is exp of a log-ratio clamped to +-MAX_LOG_RATIO, so it lies in
[2.1e-9, 4.9e8] and neither overflows float32 nor underflows to 0; the gradient beyond
the clamp is 0. The gradient flows through the first policy alone: the ratio of a policy
to itself is exactly 1 and differentiates as the on-policy ratio p / stop_gradient(p).
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted, sequence_mean, sequence_sum
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "MAX_LOG_RATIO",
    "gspo_token_ratio",
    "sequence_product_ratio",
    "sequence_ratio",
    "token_log_ratio",
    "token_ratio",
]

MAX_LOG_RATIO = 20.0

# Stands for -inf, so that the ratio of two impossible tokens is 1 and not NaN.
_IMPOSSIBLE = -1e30


def within(
    values: Float[Array, "*shape"],
    low: Float[Array, "*shape"] | float,
    high: Float[Array, "*shape"] | float,
) -> Float[Array, "*shape"]:
    """Clips values to [low, high]; the gradient passes at the bounds themselves.

    `jnp.clip` passes half of it there. With a bound of 0 on one side, a ratio of 1 lies
    on the bound, and half of the gradient on policy would be lost. NaN stays NaN.

    >>> jax.grad(lambda x: within(x, 0.0, 1.0))(1.0).item()
    1.0
    """
    return jnp.where(values < low, low, jnp.where(values > high, high, values))


@checked
def token_log_ratio(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> Float[Array, "*shape"]:
    """Log-ratio of two policies at each token: log p_t - log q_t, clamped.

    Args:
        proximal_logprobs: log q (nats), held constant.
        max_log_ratio: the result is clamped to +-max_log_ratio; None for no clamp.

    Raises:
        ValueError: `max_log_ratio` is not positive.

    >>> p, q = jnp.array([-1.0, -99.0]), jnp.array([-1.5, -1.0])
    >>> token_log_ratio(p, q, jnp.array([True, True])).tolist()
    [0.5, -20.0]
    """
    difference = _log_difference(policy_logprobs, proximal_logprobs, mask)
    if max_log_ratio is None:
        return difference
    if max_log_ratio <= 0:
        raise ValueError(
            f"max_log_ratio must be > 0, or None for no clamp, got {max_log_ratio}"
        )
    return within(difference, -max_log_ratio, max_log_ratio)


@checked
def token_ratio(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Ratio of two policies at each token: p_t / q_t.

    Args:
        proximal_logprobs: log q (nats), held constant.

    Returns:
        float32, positive and finite; 1 where the mask is False.

    >>> p, q = jnp.array([-1.0, -jnp.inf]), jnp.array([-1.0, jnp.nan])
    >>> token_ratio(p, q, jnp.array([True, False])).tolist()
    [1.0, 1.0]
    """
    return jnp.exp(token_log_ratio(policy_logprobs, proximal_logprobs, mask))


@checked
def sequence_ratio(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """Length-normalised ratio of a sequence, the geometric mean of its token ratios.

    s_i = (p(y_i) / q(y_i))^(1 / |y_i|) = exp(mean_t(log p_t - log q_t))

    Args:
        proximal_logprobs: log q (nats), held constant.

    Returns:
        float32; every token of a sequence gets the sequence's ratio.

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 7.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])
    >>> sequence_ratio(p, q, jnp.array([True, True])).tolist()
    [1.0, 1.0]
    """
    difference = _log_difference(policy_logprobs, proximal_logprobs, mask)
    log_ratio = sequence_mean(difference, mask, segment_ids)
    return jnp.exp(within(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@checked
def sequence_product_ratio(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """Likelihood ratio of a sequence, the product of its token ratios: p(y) / q(y).

    Args:
        proximal_logprobs: log q (nats), held constant.

    Returns:
        float32; every token of a sequence gets the sequence's ratio.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])
    >>> sequence_product_ratio(p, q, jnp.array([True, True])).tolist()
    [1.0, 1.0]
    """
    difference = _log_difference(policy_logprobs, proximal_logprobs, mask)
    log_ratio = sequence_sum(difference, mask, segment_ids)
    return jnp.exp(within(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@checked
def gspo_token_ratio(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """The ratio of GSPO-token: the sequence's value, each token's own gradient.

    s_{i,t} = stop_gradient(s_i) p_t / stop_gradient(p_t)

    With one advantage per sequence it has GSPO's value and gradient; with advantages
    that differ between the tokens of a sequence it credits each token with its own.

    Args:
        proximal_logprobs: log q (nats), held constant.

    Returns:
        float32; every token of a sequence gets the sequence's ratio.

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 14.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])
    >>> gspo_token_ratio(p, q, jnp.array([True, True])).tolist()
    [1.0, 1.0]
    """
    of_sequence = sequence_ratio(policy_logprobs, proximal_logprobs, mask, segment_ids)
    on_policy = token_ratio(policy_logprobs, policy_logprobs, mask)
    return jax.lax.stop_gradient(of_sequence) * on_policy


def _log_difference(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """log p - log q where counted, unclamped; q is held constant."""
    constant = counted(jax.lax.stop_gradient(proximal_logprobs), mask)
    policy = jnp.maximum(counted(policy_logprobs, mask), _IMPOSSIBLE)
    return policy - jnp.maximum(constant, _IMPOSSIBLE)
