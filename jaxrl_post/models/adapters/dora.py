"""What DoRA divides by: the norms of a changed matrix's columns."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post.models.matrix import Matrix, dense
from jaxrl_post.types import Array, Float

__all__ = ["column_norms"]


def column_norms(
    base: Array | Matrix, down: Array, up: Array, scale: float, dtype: DTypeLike
) -> Float[Array, "..."]:
    """||W + s A B|| of every output, float32, as a constant of differentiation.

    From its parts, so that the sum is not formed:
    ||w + s A b||^2 = ||w||^2 + 2 s (A^T w) . b + s^2 b . (A^T A) b.

    Args:
        base: W [*inputs, *outputs].
        down: A [*inputs, rank].
        up: B [rank, *outputs].
        scale: s.
        dtype: in which the three are multiplied with activations.

    References:
        DoRA, arXiv:2402.09353, section 4.3: without a gradient through the norm.
    """
    inputs = tuple(range(down.ndim - 1))
    parts = dense(base, dtype), down.astype(dtype), up.astype(dtype)
    weight, down, up = map(jax.lax.stop_gradient, parts)

    # The large product stays in its dtype; the rest is small and float32.
    crossed = jnp.tensordot(down, weight, (inputs, inputs)).astype(jnp.float32)
    narrow, wide = down.astype(jnp.float32), up.astype(jnp.float32)
    gram = jnp.tensordot(narrow, narrow, (inputs, inputs))
    gram = jnp.tensordot(gram, wide, axes=1)
    changes = jnp.sum(wide * (2 * scale * crossed + scale**2 * gram), axis=0)
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=inputs) + changes
    # Rounding may take a column that is nearly zero below zero.
    return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
