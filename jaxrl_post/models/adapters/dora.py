"""The column norms of an adapted matrix, by which DoRA divides."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post.models.matrix import Matrix, dense
from jaxrl_post.types import Array, Float

__all__ = ["column_norms"]


def column_norms(
    base: Array | Matrix, down: Array, up: Array, scale: float, dtype: DTypeLike
) -> Float[Array, "..."]:
    """Returns ||W + s A B|| of every output, float32, without a gradient.

    The sum W + s A B is never formed, since per column
    ||w + s A b||^2 = ||w||^2 + 2 s (A^T w) . b + s^2 b . (A^T A) b.

    Args:
        base: W [*inputs, *outputs].
        down: A [*inputs, rank].
        up: B [rank, *outputs].
        scale: s.
        dtype: dtype in which W, A and B are multiplied with activations.

    References:
        DoRA, arXiv:2402.09353, section 4.3: no gradient through the norm.
    """
    inputs = tuple(range(down.ndim - 1))
    parts = dense(base, dtype), down.astype(dtype), up.astype(dtype)
    weight, down, up = map(jax.lax.stop_gradient, parts)

    # Only the large product is computed in `dtype`; the small ones are float32.
    crossed = jnp.tensordot(down, weight, (inputs, inputs)).astype(jnp.float32)
    narrow, wide = down.astype(jnp.float32), up.astype(jnp.float32)
    gram = jnp.tensordot(narrow, narrow, (inputs, inputs))
    gram = jnp.tensordot(gram, wide, axes=1)
    changes = jnp.sum(wide * (2 * scale * crossed + scale**2 * gram), axis=0)
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=inputs) + changes
    # Rounding can make the square of a tiny norm negative.
    return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
