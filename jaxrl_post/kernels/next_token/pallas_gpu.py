"""The passes of `parts.draw` on Hopper GPUs: a Mosaic kernel, and a gather.

A block of threads computes tiles of logits, one tile of rows x a range of the
vocabulary, by `mosaic_gpu.Products`; each of the two warpgroups that multiply has all
rows and half of a tile's columns. Of every 16 logits of a row only the largest and the
sum of exponentials leave the registers, an eighth of what logits would take. The 16
logits that a row's token is among are then products with rows of the vocabulary that
XLA gathers, and so are the columns behind the last whole tile.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.mosaic_gpu import DEPTH, Products, capped, product_kernel
from jaxrl_post.kernels.next_token import xla
from jaxrl_post.kernels.next_token.parts import ENTRIES, Layout, Statistics
from jaxrl_post.kernels.next_token.xla import logits
from jaxrl_post.types import Array, Float

__all__ = ["COLUMNS", "logits", "ranges_of", "rows_of", "statistics"]

# Columns of a warpgroup's logits, and of a tile.
OWN_COLUMNS = 128
COLUMNS = 2 * OWN_COLUMNS
# Parts of a warpgroup's columns.
PARTS = OWN_COLUMNS // ENTRIES
# Steps whose operands are in shared memory: at most 48 KiB each.
SLOTS = 4
# Blocks of threads at most: one for each of an H100's 132 multiprocessors, so that all
# of them read the vocabulary at the same time.
BLOCKS = 132


def rows_of(rows: int) -> int:
    """Rows of a tile: hidden states are read again for every tile of the vocabulary.

    >>> rows_of(48), rows_of(256)
    (64, 128)
    """
    return 64 if rows <= 64 else 128


def ranges_of(rows: int, columns: int) -> tuple[int, int]:
    """Tiles of columns that a block of threads computes, and the number of ranges.

    >>> ranges_of(256, 151_936)
    (9, 66)
    """
    row_tiles, tiles = math.ceil(rows / rows_of(rows)), columns // COLUMNS
    part = math.ceil(tiles / max(1, BLOCKS // row_tiles))
    return part, math.ceil(tiles / part)


def statistics(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    inverse: Float[Array, " rows"],
    layout: Layout,
) -> Statistics:
    """Implements `Passes`; `api` refuses sizes that do not fit."""
    tiles = weight.shape[0] // COLUMNS
    one = _of_tiles(hidden, weight, inverse, layout)
    if weight.shape[0] % COLUMNS == 0:
        return one
    other = xla.statistics(hidden, weight[tiles * COLUMNS :], inverse, layout)
    top = jnp.maximum(one.top, other.top)
    sums = [each.sums * jnp.exp(each.top - top) for each in (one, other)]
    behind = other.likeliest + tiles * (COLUMNS // ENTRIES)
    likeliest = jnp.where(one.top >= other.top, one.likeliest, behind)
    return Statistics(jnp.concatenate(sums), top, likeliest)


def _of_tiles(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    inverse: Float[Array, " rows"],
    layout: Layout,
) -> Statistics:
    """The statistics of the whole tiles of `weight`."""
    assert hidden.shape[1] % DEPTH == 0
    rows = hidden.shape[0]
    own, tiles = rows_of(rows), weight.shape[0] // COLUMNS
    row_tiles = math.ceil(rows / own)
    part, ranges = ranges_of(rows, weight.shape[0])
    padding = row_tiles * own - rows
    found = product_kernel(
        functools.partial(_statistics_kernel, layout, part),
        name="next_token_statistics",
        grid=(row_tiles, ranges),
        tile=(own, COLUMNS),
        slots=SLOTS,
        dtype=hidden.dtype,
        results=plgpu.SMEM((2, 2, PARTS, own), jnp.float32),
        result=jax.ShapeDtypeStruct((tiles, row_tiles, 2, 2, PARTS, own), jnp.float32),
        interpret=layout.interpret,
    )(
        jnp.pad(hidden, ((0, padding), (0, 0))),
        weight,
        jnp.pad(inverse, (0, padding), constant_values=1.0),
    )
    # [largest or sum, part, row]
    found = found.transpose(3, 0, 2, 4, 1, 5)
    highest, sums = found.reshape(2, -1, row_tiles * own)[:, :, :rows]
    top = highest.max(axis=0)
    likeliest = jnp.argmax(highest == top, axis=0).astype(jnp.int32)
    return Statistics(sums * jnp.exp(highest - top), top, likeliest)


def _statistics_kernel(
    layout: Layout,
    part: int,
    hidden: Any,
    weight: Any,
    inverse: Any,
    found: Any,
    hidden_buffer: Any,
    weight_buffer: Any,
    results: Any,
    loaded: Any,
    consumed: Any,
) -> None:
    """Per part of 16 logits, computes the largest and the sum of exp(z - largest)."""
    row_tile, own = jax.lax.axis_index("rows"), jax.lax.axis_index("warpgroup")
    first, rows = jax.lax.axis_index("range") * part, hidden_buffer.shape[1]
    tiles = jnp.minimum(part, weight.shape[0] // COLUMNS - first)
    buffers, steps = (hidden_buffer, weight_buffer), hidden.shape[1] // DEPTH
    products = Products(buffers, loaded, consumed, steps)

    def operands(tile: Any, inner: Any) -> tuple[Any, Any]:
        of_rows = pl.ds(row_tile * rows, rows)
        columns = pl.ds((first + tile) * COLUMNS, COLUMNS)
        return hidden.at[of_rows, inner], weight.at[columns, inner]

    def compute() -> None:
        of_row = plgpu.load(
            inverse.at[pl.ds(row_tile * rows, rows)],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )

        columns = pl.ds(own * OWN_COLUMNS, OWN_COLUMNS)

        @pl.loop(0, tiles)
        def _(tile: Any) -> None:
            z = products.of_tile(tile, pl.ds(0, rows), columns)
            if layout.divisor != 1.0:
                z = z * (1.0 / layout.divisor)
            z = capped(z, layout.softcap) * _wide(of_row, OWN_COLUMNS)
            # The copy of the last tile has left shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number in range(PARTS):
                begin = number * ENTRIES
                among = jax.lax.slice(z, (0, begin), (rows, begin + ENTRIES))
                highest = among.max(axis=1)
                results[own, 0, number] = highest
                odds = jnp.exp(among - _wide(highest, ENTRIES))
                results[own, 1, number] = odds.sum(axis=1)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                results.at[own], found.at[first + tile, row_tile, own]
            )

        plgpu.wait_smem_to_gmem(0)

    products.computed(tiles, operands, compute)


def _wide(values: Array, columns: int) -> Array:
    """Values of rows, for so many columns."""
    return jax.lax.broadcast_in_dim(values, (values.shape[0], columns), [0])
