"""Computes rows in tiles of a fixed size, so that a row's result is its own alone.

A compiler may sum in another order, fuse otherwise, or call another kernel when the
number of rows changes. Here it is always the same number: a tile is computed by one
computation, whose bits for a row depend on the row, the weights and the dtype. It
stands apart from what is done before and after it (`isolated`), and is repeated by a
loop whose length is known when the program runs, so that nothing is unrolled.

Tiles of another size may give other bits, so sampler and trainer have the same. Fewer
rows waste less of a decoding step with few samples, more make better matrix products.

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

__all__ = ["check_tile", "isolated", "map_tiles", "padded_rows", "tile_for"]

# Rows of a tile. On two cores (float32, `small`) a pass over 528 tokens took as long in
# tiles of 64 rows as in tiles of 128.
TILES = (8, 16, 32, 64)


def tile_for(samples: int) -> int:
    """Rows of a tile for a run that decodes so many samples at once.

    >>> tile_for(1), tile_for(16), tile_for(17), tile_for(1000)
    (8, 16, 32, 64)
    """
    return next((tile for tile in TILES if samples <= tile), TILES[-1])


def check_tile(tile: int, where: str) -> None:
    """Checks the rows of a tile of exact mode, where 0 stands for no exact mode.

    Raises:
        ValueError: there is no such tile.

    >>> check_tile(24, "Policy")
    Traceback (most recent call last):
    ValueError: Policy: exact must be the rows of a tile, ...
    """
    if tile not in (0, *TILES):
        raise ValueError(
            f"{where}: exact must be the rows of a tile, 8, 16, 32 or 64, or 0 for no "
            f"exact mode; got {tile}"
        )


def padded_rows(rows: int, tile: int) -> int:
    """The smallest multiple of `tile` that is not less than `rows`.

    >>> padded_rows(1, 32), padded_rows(64, 32)
    (32, 64)
    """
    return math.ceil(rows / tile) * tile


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
    tile: int,
) -> PyTree:
    """Applies a function of rows, such as a projection, to one tile after the other.

    Args:
        function: from arrays [tile, ...] to arrays [tile, ...]; a row of its results
            must depend on this row of its arguments only.
        arrays: trees of arrays [rows, ...], rows a multiple of `tile`.
        count: int32, number of rows to compute; they come first.
        tile: rows of a tile.

    Returns:
        What `function` returns, for all rows; zeros in tiles beyond `count`.

    >>> rows = jnp.ones((64, 2))
    >>> sums = map_tiles(lambda x: x.sum(axis=1), [rows], jnp.int32(5), 32)
    >>> sums[0].item(), sums[-1].item()
    (2.0, 0.0)
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    assert rows % tile == 0

    def part(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tile, *array.shape[1:]), array.dtype)

    if rows == tile:
        return isolated(function, count > 0, *arrays)
    shapes = jax.eval_shape(function, *jax.tree.map(part, arrays))
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), shapes
    )

    def body(index: Array, results: PyTree) -> PyTree:
        first = index * tile
        inputs = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, first, tile), arrays
        )
        found = isolated(function, first < count, *inputs)
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_slice_in_dim(
                whole, new, first, 0
            ),
            results,
            found,
        )

    tiles = jnp.minimum((count + tile - 1) // tile, rows // tile)
    return jax.lax.fori_loop(0, tiles, body, empty)
