"""The passes of `parts.draw` as Mosaic kernels for TPUs.

The first kernel reads the vocabulary's matrix once. A tile of logits is a product that
stays in VMEM, transposed as in `token_logprob`: a vocabulary entry is a sublane, a row
of hidden states a lane. The second kernel copies the parts of 16 rows at a time.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.mosaic import VMEM_BYTES, product
from jaxrl_post.kernels.next_token.parts import ENTRIES, Layout, Statistics, scaled
from jaxrl_post.kernels.token_logprob.pallas_tpu import Tiles, choose_tiles
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array, Float, Int

__all__ = ["GROUP", "logits", "statistics", "tiles_for"]

# Rows of a step of the second kernel: as many copies run at once.
GROUP = 16
# Bytes of the matrix in a step of the first kernel: reading them takes several times as
# long as the step itself.
STEP_BYTES = 8 * 2**20
# Logits of a step: more take Mosaic longer to compile than they save.
STEP_LOGITS = 2**19


def tiles_for(rows: int, width: int, itemsize: int) -> Tiles:
    """The tile sizes for hidden states [rows, width] of `itemsize` bytes a number.

    >>> tiles_for(64, 896, 2), tiles_for(2048, 8192, 2)
    (Tiles(rows=128, columns=4096), Tiles(rows=896, columns=512))
    """
    most = choose_tiles(width, itemsize, "forward").rows
    rows = min(most, math.ceil(rows / 128) * 128)
    columns = min(STEP_BYTES // (width * itemsize), STEP_LOGITS // rows)
    return Tiles(rows, max(128, columns // 128 * 128))


def statistics(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    inverse: Float[Array, " rows"],
    layout: Layout,
) -> Statistics:
    """Implements `Passes`."""
    rows, width = hidden.shape
    columns = weight.shape[0]
    tiles = tiles_for(rows, width, hidden.dtype.itemsize)
    if layout.tiles is not None:
        tiles = Tiles(*layout.tiles)
    padded = math.ceil(rows / tiles.rows) * tiles.rows
    hidden = jnp.pad(hidden, ((0, padded - rows), (0, 0)))
    inverse = jnp.pad(inverse, (0, padded - rows), constant_values=1.0)
    steps, parts = math.ceil(columns / tiles.columns), tiles.columns // ENTRIES
    # Whole registers of eight sublanes.
    lines = math.ceil(steps / 8) * 8
    sums, tops, likeliest = pl.pallas_call(
        functools.partial(_statistics_kernel, columns, layout),
        out_shape=[
            jax.ShapeDtypeStruct((steps * parts, padded), jnp.float32),
            jax.ShapeDtypeStruct((lines, padded), jnp.float32),
            jax.ShapeDtypeStruct((1, padded), jnp.int32),
        ],
        grid=(padded // tiles.rows, steps),
        in_specs=[
            pl.BlockSpec((1, tiles.rows), lambda row, _: (0, row)),
            pl.BlockSpec((tiles.rows, width), lambda row, _: (row, 0)),
            pl.BlockSpec((tiles.columns, width), lambda _, column: (column, 0)),
        ],
        out_specs=[
            pl.BlockSpec((parts, tiles.rows), lambda row, column: (column, row)),
            pl.BlockSpec((lines, tiles.rows), lambda row, _: (0, row)),
            pl.BlockSpec((1, tiles.rows), lambda row, _: (0, row)),
        ],
        scratch_shapes=[pltpu.VMEM((1, tiles.rows), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=layout.interpret,
        name="next_token_statistics",
    )(inverse[None], hidden, weight)
    tops = tops[:steps, :rows]
    # Each tile's sums are relative to the largest logit up to it.
    sums = sums[:, :rows].reshape(steps, parts, rows)
    sums = sums * jnp.exp(tops - tops[-1])[:, None]
    return Statistics(sums.reshape(-1, rows), tops[-1], likeliest[0, :rows])


def _statistics_kernel(
    columns: int,
    layout: Layout,
    inverse: Any,
    hidden: Any,
    weight: Any,
    sums: Any,
    tops: Any,
    likeliest: Any,
    largest: Any,
) -> None:
    step = pl.program_id(1)
    tile, rows = weight.shape[0], hidden.shape[0]
    parts = tile // ENTRIES

    @pl.when(step == 0)
    def _() -> None:
        largest[...] = jnp.full((1, rows), MASKED, jnp.float32)
        likeliest[...] = jnp.zeros((1, rows), jnp.int32)

    z = scaled(product(weight[...], hidden[...], (1, 1)), inverse[...], layout)
    if columns % tile:
        # Memory behind the weight may hold anything.
        column = step * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        z = jnp.where(column < columns, z, MASKED)
    z = z.reshape(parts, ENTRIES, rows)
    highest = z.max(axis=1)
    own, before = highest.max(axis=0, keepdims=True), largest[...]
    part = step * parts + jax.lax.broadcasted_iota(jnp.int32, (parts, 1), 0)
    part = jnp.where(highest == own, part, columns).min(axis=0, keepdims=True)
    likeliest[...] = jnp.where(own > before, part, likeliest[...])
    top = jnp.maximum(before, own)
    sums[...] = jnp.exp(z - top[None]).sum(axis=1)
    tops[pl.ds(step, 1)] = top
    largest[...] = top


def logits(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    parts: Int[Array, " rows"],
    layout: Layout,
) -> Float[Array, "entries rows"]:
    """Implements `Passes`."""
    rows, width = hidden.shape
    padded = math.ceil(rows / GROUP) * GROUP

    def of_row(row: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (ENTRIES, width), lambda group, parts: (parts[group * GROUP + row], 0)
        )

    # Entry (row, j ENTRIES + i) is the row's logit in part of the group's row j.
    found = pl.pallas_call(
        _logits_kernel,
        out_shape=jax.ShapeDtypeStruct((padded, GROUP * ENTRIES), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(padded // GROUP,),
            in_specs=[
                pl.BlockSpec((GROUP, width), lambda group, _: (group, 0)),
                *(of_row(row) for row in range(GROUP)),
            ],
            out_specs=pl.BlockSpec(
                (GROUP, GROUP * ENTRIES), lambda group, _: (group, 0)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=layout.interpret,
        name="next_token_logits",
    )(
        jnp.pad(parts, (0, padded - rows)),
        jnp.pad(hidden, ((0, padded - rows), (0, 0))),
        *[weight] * GROUP,
    )
    own = jnp.arange(rows, dtype=jnp.int32)[:, None, None] % GROUP
    found = found[:rows].reshape(rows, GROUP, ENTRIES)
    return jnp.take_along_axis(found, own, axis=1)[:, 0].T


def _logits_kernel(parts: Any, hidden: Any, *refs: Any) -> None:
    del parts
    *tables, found = refs
    table = jnp.concatenate([table[...] for table in tables], axis=0)
    found[...] = product(hidden[...], table, (1, 1))
