"""Inverts a cumulative distribution: from a uniform number to an index."""

import jax.numpy as jnp

from jaxrl_post.types import Array, Float, Int

__all__ = ["BLOCK", "find", "first"]

# Weights whose sum is compared first.
BLOCK = 128


def find(
    weights: Float[Array, "count rows"],
    target: Float[Array, " rows"],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """First index at which the running sum of weights exceeds the target.

    An entry of zero weight is never chosen. If no entry exceeds the target because of
    rounding, it is the index of the largest weight.

    Args:
        weights: not negative.
        target: in [0, sum of the weights).

    Returns:
        The index, int32, and the target less the weights before it.

    >>> import jax.numpy as jnp
    >>> index, left = find(jnp.array([[1.0], [0.0], [2.0]]), jnp.array([1.5]))
    >>> index.item(), left.item()
    (2, 0.5)
    """
    running = jnp.cumsum(weights, axis=0)
    # Rounded sums may not be monotone, so one may exceed the target at an empty entry.
    index = first((running > target) & (weights > 0), weights)
    before = jnp.take_along_axis(running - weights, index[None], axis=0)[0]
    return index, target - before


def first(reached: Array, weights: Float[Array, "count rows"]) -> Int[Array, " rows"]:
    """Index of each column's first True; without a True, of its largest weight."""
    return jnp.where(
        reached.any(axis=0), jnp.argmax(reached, axis=0), jnp.argmax(weights, axis=0)
    ).astype(jnp.int32)
