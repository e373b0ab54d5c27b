"""Estimators of KL(policy || reference) from tokens that the policy sampled.

With d = log policy - log reference at a sampled token, E[d] = KL, and

    k1 = d                  unbiased; as a loss its expected gradient is 0
    k2 = d^2 / 2            biased; its expected gradient is the KL's
    k3 = e^-d + d - 1       unbiased and >= 0; its gradient is KL(reference || policy)'s
    k3_plus                 the value of k3, the gradient of k2

Two modifiers extend them. `with_score_term` adds the gradient of the distribution from
which the tokens are sampled; the expected gradient of k1 and k3 is then the KL's.
`with_importance_weights` corrects for tokens that another policy sampled.

Clamps in other frameworks: verl and NeMo RL clamp k3's log-ratio to +-20 and its result
to +-10; OpenRLHF clamps every result to +-10; TRL clamps nothing. The gradient beyond a
clamp is 0. Gradients flow through the policy alone.

References:
    Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html, 2020.
    Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL,
    arXiv:2506.09477 (the gradients).
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.correction import token_weights, truncated
from jaxrl_post.losses.ratios import MAX_LOG_RATIO, token_log_ratio
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float

__all__ = [
    "adaptive_coefficient",
    "k1",
    "k2",
    "k3",
    "k3_plus",
    "with_importance_weights",
    "with_score_term",
]

# Ziegler et al. clip the relative error of one step to +- this.
_MAX_ERROR = 0.2


@checked
def k1(
    policy_logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*shape"]:
    """The log-ratio d itself; for metrics and for penalties inside the reward.

    It is not a loss: E[grad d] = E[grad log policy] = 0, so its gradient is only noise.

    Args:
        policy_logprobs: log-probs (nats) under the policy that sampled the tokens.
        reference_logprobs: log-probs (nats) of the same tokens under the other policy.
        max_log_ratio: d is clamped to +-max_log_ratio; None for no clamp.
        max_value: the result is clamped to +-max_value; None for no clamp.

    Raises:
        ValueError: a clamp is not positive.

    >>> k1(jnp.array([-1.0]), jnp.array([-3.0]), jnp.array([True])).tolist()
    [2.0]
    """
    d = token_log_ratio(
        policy_logprobs, reference_logprobs, mask, max_log_ratio=max_log_ratio
    )
    return _bounded(d, max_value)


@checked
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


@checked
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
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where most tokens are.
    return _bounded(jnp.expm1(-d) + d, max_value)


@checked
def k3_plus(
    policy_logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    max_log_ratio: float | None = MAX_LOG_RATIO,
    max_value: float | None = None,
) -> Float[Array, "*shape"]:
    """The value of `k3` with the gradient of `k2`.

    On policy both are unbiased: the value for the KL, the gradient for its gradient.

    Args:
        policy_logprobs: log-probs (nats) under the policy that sampled the tokens.
        reference_logprobs: log-probs (nats) of the same tokens under the other policy.
        max_log_ratio: d is clamped to +-max_log_ratio; None for no clamp.
        max_value: k3 and k2 are both clamped to +-max_value; None for no clamp.

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


@checked
def with_score_term(
    values: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """The same values, with the gradient of their expectation under the policy.

    grad E_p[v] = E_p[grad v + v grad log p]

    so stop_gradient(v_t) grad log p_t is added to each value's own gradient. k1 and k3
    then have the KL's gradient in expectation (k3, inside its clamps, even has k2's
    gradient at every token); k2 has the gradient of E[k2], which is not the KL.

    Args:
        values: per token, from one of the estimators.
        policy_logprobs: log p (nats) under the policy that sampled the tokens.

    Returns:
        float32, the values; 0 where the mask is False.

    References:
        Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL,
        arXiv:2506.09477.

    >>> def total(logprobs):
    ...     mask = jnp.array([True])
    ...     values = k1(logprobs, jnp.array([-3.0]), mask)
    ...     return with_score_term(values, logprobs, mask).sum()
    >>> value, gradient = jax.value_and_grad(total)(jnp.array([-1.0]))
    >>> value.item(), gradient.tolist()  # d, and 1 + d
    (2.0, [3.0])
    """
    values = counted(values, mask)
    # The score's value is 0 and its gradient grad log p, also where log p is -inf.
    score = token_log_ratio(policy_logprobs, policy_logprobs, mask)
    return values + jax.lax.stop_gradient(values) * score


@checked
def with_importance_weights(
    values: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    cap: float | None = None,
) -> Float[Array, "*shape"]:
    """Multiplies values by importance weights, for tokens that another policy sampled.

    stop_gradient(min(p_t / behavior_t, cap)) v_t

    The estimators assume tokens from the policy itself; the weight corrects for others:
    E_behavior[(p / behavior) v] = E_p[v]. It has no gradient here, as in older NeMo RL;
    DeepSeek-V3.2 and newer NeMo RL differentiate it too. For that, apply this function
    to the result of `with_score_term`: uncapped, this is the KL's unbiased gradient.

    Args:
        values: per token, from one of the estimators, differentiable.
        cap: > 0, the largest weight; None for only the ratio's own bound e^20.

    Raises:
        ValueError: `cap` is not positive.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556, eq. 7.

    >>> p, behavior = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.0625]))
    >>> mask = jnp.array([True, True])
    >>> with_importance_weights(jnp.ones(2), p, behavior, mask, cap=4.0).tolist()
    [2.0, 4.0]
    """
    weights = token_weights(policy_logprobs, behavior_logprobs, mask)
    if cap is not None:
        weights = truncated(weights, cap=cap)
    return weights * counted(values, mask)


@checked
def adaptive_coefficient(
    coefficient: Float[Array, ""] | float,
    observed_kl: Float[Array, ""] | float,
    *,
    target: float,
    horizon: float,
    num_steps: float = 1,
) -> Float[Array, ""]:
    """Next coefficient of the KL penalty, by a proportional step towards a target KL.

    c' = c (1 + num_steps / horizon clip(KL / target - 1, -0.2, 0.2))

    The paper has num_steps / horizon = 0.1 for every batch; its code, verl and OpenRLHF
    count `num_steps` in samples, over a horizon of 10000.

    Args:
        coefficient: c, scalar.
        observed_kl: the batch's KL, scalar, in the unit of `target`.
        target: > 0, in nats (a token's or a sequence's, as `observed_kl` is).
        horizon: > 0, in steps or samples.
        num_steps: in (0, 5 horizon), steps or samples since the last update.

    Returns:
        float32 scalar; NaN if an input is.

    References:
        Ziegler et al., Fine-Tuning Language Models from Human Preferences,
        arXiv:1909.08593, section 2.2.

    >>> adaptive_coefficient(1.0, 9.0, target=6.0, horizon=10.0, num_steps=5).item()
    1.100000023841858
    """
    if not target > 0:
        raise ValueError(f"target must be > 0 (nats), got {target}")
    if not horizon > 0:
        raise ValueError(f"horizon must be > 0, got {horizon}")
    if not 0 < num_steps < horizon / _MAX_ERROR:
        raise ValueError(
            f"num_steps must be in (0, {horizon / _MAX_ERROR}), 5 times the horizon, "
            f"beyond which the coefficient could turn negative, got {num_steps}"
        )
    coefficient = jnp.asarray(coefficient, jnp.float32)
    observed_kl = jnp.asarray(observed_kl, jnp.float32)
    error = jnp.clip(observed_kl / target - 1.0, -_MAX_ERROR, _MAX_ERROR)
    return coefficient * (1.0 + error * (num_steps / horizon))


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
