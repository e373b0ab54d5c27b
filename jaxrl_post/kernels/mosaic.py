"""Matrix products of blocks in VMEM, as the TPU kernels take them."""

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array

__all__ = ["product"]


def product(one: Array, other: Array, axes: tuple[int, int]) -> Array:
    """A matrix product that sums over an axis of each, in float32.

    Operands of float32 are not rounded to bfloat16, which is a TPU's default.

    >>> product(jnp.ones((2, 3)), jnp.ones((2, 4)), (0, 0)).shape
    (3, 4)
    """
    exact = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        *(one, other),
        (((axes[0],), (axes[1],)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
