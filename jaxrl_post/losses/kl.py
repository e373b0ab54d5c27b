"""Estimators of KL(policy || reference) from tokens that the policy sampled.

With d = log policy - log reference at a sampled token, E[d] = KL, and

    k1 = d                  unbiased; as a loss its expected gradient is 0
    k2 = d^2 / 2            biased; its expected gradient is the KL's
    k3 = e^-d + d - 1       unbiased and >= 0; its gradient is KL(reference || policy)'s
    k3_plus                 the value of k3, the gradient of k2

Dialects of the clamps: verl and NeMo RL clamp k3's log-ratio to +-20 and its result to
+-10; OpenRLHF clamps the log-ratio of all to +-10; TRL clamps nothing. The gradient
beyond a clamp is 0. Gradients flow through the policy alone.

References:
    Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html, 2020.
    Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL,
    arXiv:2506.09477 (the gradients).
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.ratios import MAX_LOG_RATIO, token_log_ratio
from jaxrl_post.types import Array, Bool, Float

__all__ = ["k1", "k2", "k3", "k3_plus"]


def k1(
    policy_logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*shape"]:
    """The log-ratio d itself; for metrics and for penalties inside the reward.

    Not a loss: E[grad d] = E[grad log policy] = 0, so minimising it adds only noise.

    Args:
        policy_logprobs: log-probs (nats) under the policy that sampled the tokens.
        reference_logprobs: log-probs (nats) of the same tokens under the other policy.
        mask: bool, True where a token counts.
        max_log_ratio: d is clamped to +-max_log_ratio; None for no clamp.
        max_value: the result is clamped to +-max_value; None for no clamp.

    Returns:
        float32; 0 where the mask is False.

    Raises:
        ValueError: a clamp is not positive.

    >>> k1(jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([True])).tolist()
    [2.0]
    """
    d = token_log_ratio(
        policy_logprobs, reference_logprobs, mask, max_log_ratio=max_log_ratio
    )
    return _bounded(d, max_value)


def k2(
    policy_logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*shape"]:
    """Half the squared log-ratio, d^2 / 2.

    Args:
        policy_logprobs: log-probs (nats) under the policy that sampled the tokens.
        reference_logprobs: log-probs (nats) of the same tokens under the other policy.
        mask: bool, True where a token counts.
        max_log_ratio: d is clamped to +-max_log_ratio; None for no clamp.
        max_value: the result is clamped to +-max_value; None for no clamp.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: a clamp is not positive.

    >>> k2(jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([True])).tolist()
    [2.0]
    """
    d = token_log_ratio(
        policy_logprobs, reference_logprobs, mask, max_log_ratio=max_log_ratio
    )
    return _bounded(0.5 * jnp.square(d), max_value)


def k3(
    policy_logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*shape"]:
    """The low-variance unbiased estimate e^-d + d - 1.

    Args:
        policy_logprobs: log-probs (nats) under the policy that sampled the tokens.
        reference_logprobs: log-probs (nats) of the same tokens under the other policy.
        mask: bool, True where a token counts.
        max_log_ratio: d is clamped to +-max_log_ratio; None for no clamp, and then the
            value overflows to inf below d = -88.
        max_value: the result is clamped to +-max_value; None for no clamp.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: a clamp is not positive.

    >>> k3(jnp.array([-1.0]), jnp.array([-1.0]), jnp.array([True])).tolist()
    [0.0]
    """
    d = token_log_ratio(
        policy_logprobs, reference_logprobs, mask, max_log_ratio=max_log_ratio
    )
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where training lives.
    return _bounded(jnp.expm1(-d) + d, max_value)


def k3_plus(
    policy_logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*shape"]:
    """The value of `k3` with the gradient of `k2`.

    An unbiased value to watch and, on policy, the unbiased gradient of the KL.

    Args:
        policy_logprobs: log-probs (nats) under the policy that sampled the tokens.
        reference_logprobs: log-probs (nats) of the same tokens under the other policy.
        mask: bool, True where a token counts.
        max_log_ratio: d is clamped to +-max_log_ratio; None for no clamp.
        max_value: value and gradient are those of the results clamped to +-max_value;
            None for no clamp.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: a clamp is not positive.

    >>> def total(logprobs):
    ...     return k3_plus(logprobs, jnp.array([-3.0]), jnp.array([True])).sum()
    >>> jax.grad(total)(jnp.array([-1.0])).tolist()
    [2.0]
    """
    arrays = (policy_logprobs, reference_logprobs, mask)
    value = k3(*arrays, max_log_ratio=max_log_ratio, max_value=max_value)
    slope = k2(*arrays, max_log_ratio=max_log_ratio, max_value=max_value)
    return jax.lax.stop_gradient(value) + (slope - jax.lax.stop_gradient(slope))


def _bounded(
    values: Float[Array, "*shape"], max_value: float | None
) -> Float[Array, "*shape"]:
    if max_value is None:
        return values
    if max_value <= 0:
        raise ValueError(
            f"max_value must be > 0, or None for no clamp, got {max_value}"
        )
    return jnp.clip(values, -max_value, max_value)
