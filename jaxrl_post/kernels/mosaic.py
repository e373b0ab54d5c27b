"""Shared by the TPU kernels: products of blocks, and lists of blocks."""

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array

__all__ = ["VMEM_BYTES", "listed", "product"]

# All of a kernel's VMEM. TPU v5p and v7x have 64 MiB, v5e and v6e 128.
VMEM_BYTES = 56 * 2**20


def product(one: Array, other: Array, axes: tuple[int, int]) -> Array:
    """A matrix product that sums over an axis of each, in float32.

    Operands of float32 are not rounded to bfloat16, which is a TPU's default.

    >>> product(jnp.ones((2, 3)), jnp.ones((2, 4)), (0, 0)).shape
    (3, 4)
    """
    precision = jax.lax.Precision
    exact = precision.HIGHEST if one.dtype == jnp.float32 else precision.DEFAULT
    return jax.lax.dot_general(
        *(one, other),
        (((axes[0],), (axes[1],)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def listed(active: Array, most: int) -> tuple[Array, Array]:
    """The places of the blocks that are computed, for scalar memory.

    Args:
        active: bool, any shape, at least one of them True.
        most: at least the number of active ones.

    Returns:
        int32 [most], the places in `active`, flat and ascending, the last one repeated;
        and int32 [], the number of active ones.

    >>> found, count = listed(jnp.array([False, True, False, True]), 3)
    >>> found.tolist(), int(count)
    ([1, 3, 3], 2)
    """
    size = active.size
    number = jnp.arange(size, dtype=jnp.int32)
    found = jax.lax.sort(jnp.where(active.reshape(-1), number, size))[:most]
    count = active.sum(dtype=jnp.int32)
    return jnp.minimum(found, found[count - 1]), count
