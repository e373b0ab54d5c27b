"""What the kernels for GPUs have in common: writing from registers into memory."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.types import Array

__all__ = ["store"]


def store(array: Any, values: Array) -> None:
    """Writes from registers into shared memory or that of the GPU.

    Args:
        array: the reference, also a transposed one.
        values: of its shape; they are cast to its dtype.
    """
    values = values.astype(array.dtype)
    # JAX 0.12 refuses writes that are not coalesced unless told otherwise, and JAX 0.11
    # has no such function, and writes them.
    if hasattr(plgpu, "store"):
        plgpu.store(array, values, optimized=False)
    else:
        array[...] = values
