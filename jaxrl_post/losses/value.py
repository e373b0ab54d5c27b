"""Losses of value functions (critics), and metrics of their fit.

The arrays are aligned with the tokens whose state they value; gradients flow through
`values` alone.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float

__all__ = ["clipped_value_loss", "explained_variance", "value_clip_fraction"]


@checked
def clipped_value_loss(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    value_clip: float | None,
) -> Float[Array, "*shape"]:
    """Squared error of the value, clipped against moves far from the old value.

    L_t = 1/2 max((V_t - R_t)^2, (clip(V_t, old_t - c, old_t + c) - R_t)^2)

    TRL, verl, OpenRLHF and baselines' PPO have the factor 1/2, and weigh the loss by a
    further coefficient.

    Args:
        values: V, differentiable, in the unit of the rewards.
        old_values: V at the start of the batch's updates; not read without a clip.
        returns: R, the target of V.
        value_clip: c > 0, in the unit of the rewards, or None for the plain squared
            error.

    Returns:
        float32, >= 0; 0 where the mask is False.

    Raises:
        ValueError: `value_clip` is not positive.

    References:
        Schulman et al., Proximal Policy Optimization, arXiv:1707.06347 (without clip).
        Engstrom et al., Implementation Matters in Deep Policy Gradients,
        arXiv:2005.12729 (the clip, which is in PPO's code and not in its paper).

    >>> values, old, returns = jnp.array([2.0]), jnp.array([0.0]), jnp.array([3.0])
    >>> mask = jnp.array([True])
    >>> clipped_value_loss(values, old, returns, mask, value_clip=1.0).tolist()
    [2.0]
    >>> clipped_value_loss(values, old, returns, mask, value_clip=None).tolist()
    [0.5]
    """
    plain, clipped = _errors(values, old_values, returns, mask, value_clip)
    return 0.5 * jnp.maximum(plain, clipped)


@checked
def value_clip_fraction(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    value_clip: float,
) -> Metric:
    """Fraction of tokens whose gradient the value clip removes.

    These are the tokens whose clipped error is larger than the plain one.

    Args:
        values: V.
        old_values: V at the start of the batch's updates.
        returns: R.
        value_clip: > 0, in the unit of the rewards.

    Returns:
        (number of such tokens, number of tokens).

    Raises:
        ValueError: `value_clip` is not positive.

    >>> values, old, returns = jnp.array([2.0, 0.5]), jnp.zeros(2), jnp.full(2, 3.0)
    >>> mask = jnp.array([True, True])
    >>> value_clip_fraction(values, old, returns, mask, value_clip=1.0).mean().item()
    0.5
    """
    plain, clipped = _errors(values, old_values, returns, mask, value_clip)
    return masked((clipped > plain).astype(jnp.float32), mask)


@checked
def explained_variance(
    values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, ""]:
    """Share of the returns' variance that the values explain.

    1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, below 0 for a
    worse one. It is no `Metric`, because the value of a batch is not a mean over its
    parts.

    Args:
        values: V.
        returns: R.

    Returns:
        float32 scalar <= 1, without gradient; 0 where the returns do not vary by more
        than the rounding of float32.

    >>> values, returns = jnp.array([1.0, 2.0]), jnp.array([1.0, 3.0])
    >>> explained_variance(values, returns, jnp.array([True, True])).item()
    0.75
    """
    values = counted(jax.lax.stop_gradient(values), mask)
    returns = counted(jax.lax.stop_gradient(returns), mask)
    total = _variance(returns, mask)
    residual = _variance(returns - values, mask)
    # Returns that are equal in theory differ by the rounding of advantage plus value.
    size = masked(jnp.square(returns) + jnp.square(values), mask).mean()
    # Not `total > ...`, which would hide a NaN.
    constant = total <= (16 * float(jnp.finfo(jnp.float32).eps)) ** 2 * size
    return jnp.where(constant, 0.0, 1.0 - residual / jnp.where(constant, 1.0, total))


def _errors(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    value_clip: float | None,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Squared errors of the values and of the clipped values; 0 where not counted."""
    if value_clip is not None and value_clip <= 0:
        raise ValueError(
            f"value_clip must be > 0, or None for no clip, got {value_clip}"
        )
    values = counted(values, mask)
    returns = counted(jax.lax.stop_gradient(returns), mask)
    plain = jnp.square(values - returns)
    if value_clip is None:
        return plain, plain
    old_values = counted(jax.lax.stop_gradient(old_values), mask)
    near = jnp.clip(values, old_values - value_clip, old_values + value_clip)
    return plain, jnp.square(near - returns)


def _variance(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, ""]:
    """Population variance of the counted values: exactly 0 where all are equal."""
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    # Sum distances from the smallest value: equal values then give exactly 0.
    smallest = jnp.where(mask, values, jnp.inf).min(initial=jnp.inf)
    distance = counted(values - smallest, mask)
    mean = distance.sum() / count
    return jnp.square(counted(distance - mean, mask)).sum() / count
