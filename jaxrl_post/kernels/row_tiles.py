"""Computes rows in tiles of a fixed size, so that a row's result is its own alone.

A compiler may sum in another order, fuse otherwise, or call another kernel when the
number of rows changes. Here it is always the same number: a tile is computed by one
computation, whose bits for a row depend on the row, the weights and the dtype. It
stands apart from what is done before and after it (`isolated`), and is repeated by a
loop whose length is known when the program runs, so that nothing is unrolled.

References:
    He et al., Defeating Nondeterminism in LLM Inference, Thinking Machines Lab, 2025
    (batch-invariant kernels).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array, Bool, Int, PyTree

__all__ = ["TILE", "isolated", "map_tiles", "padded_rows"]

# Rows of a tile. Fewer waste less of a decoding step with few samples, more make better
# matrix products: 2,048 rows took 1.1 to 1.5 times the time of one product (512 x 1376
# and 1376 x 512, float32, two cores), tiles of 8 took 2 to 3 times.
TILE = 32


def padded_rows(rows: int) -> int:
    """The smallest multiple of TILE that is not less than `rows`.

    >>> padded_rows(1), padded_rows(64)
    (32, 64)
    """
    return math.ceil(rows / TILE) * TILE


def isolated(
    function: Callable[..., PyTree], certain: Bool[Array, ""], *arguments: PyTree
) -> PyTree:
    """Calls a function in a computation of its own, with which nothing is fused.

    Fused with other operations a function may round differently: a product may merge
    with the next sum, and a vectorised logarithm is not the scalar one to the last bit.
    A branch of a conditional is compiled by itself, and a compiler keeps a conditional
    whose condition it does not know. `optimization_barrier` would not do: XLA drops it
    before it fuses.

    Args:
        function: of `arguments`.
        certain: true, but not known when the program is compiled.
        arguments: trees of arrays.
    """
    shapes = jax.eval_shape(function, *arguments)

    def never(*_: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.lax.cond(certain, function, never, *arguments)


def map_tiles(
    function: Callable[..., PyTree],
    arrays: Sequence[PyTree],
    count: Int[Array, ""],
) -> PyTree:
    """Applies a function of rows, such as a projection, to tiles of TILE rows.

    Args:
        function: from arrays [TILE, ...] to arrays [TILE, ...]; a row of its results
            must depend on this row of its arguments only.
        arrays: trees of arrays [rows, ...], rows a multiple of TILE.
        count: int32, number of rows to compute; they come first.

    Returns:
        What `function` returns, for all rows; zeros in tiles beyond `count`.

    >>> rows = jnp.ones((64, 2))
    >>> sums = map_tiles(lambda x: x.sum(axis=1), [rows], jnp.int32(5))
    >>> sums[0].item(), sums[-1].item()
    (2.0, 0.0)
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    assert rows % TILE == 0

    def part(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((TILE, *array.shape[1:]), array.dtype)

    shapes = jax.eval_shape(function, *jax.tree.map(part, arrays))
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), shapes
    )

    def body(index: Array, results: PyTree) -> PyTree:
        first = index * TILE
        inputs = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, first, TILE), arrays
        )
        found = isolated(function, first < count, *inputs)
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_slice_in_dim(
                whole, new, first, 0
            ),
            results,
            found,
        )

    tiles = jnp.minimum((count + TILE - 1) // TILE, rows // TILE)
    return jax.lax.fori_loop(0, tiles, body, empty)
