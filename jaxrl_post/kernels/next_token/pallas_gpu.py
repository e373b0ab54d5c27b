"""The passes of `parts.draw` on Hopper GPUs: a Mosaic kernel, and a gather.

A block of threads computes tiles of logits, one tile of rows x a range of the
vocabulary. One warpgroup copies operands into shared memory, some steps ahead; two
others multiply them into registers (wgmma), each all rows with half of a tile's
columns. Of every 16 logits of a row only the largest and the sum of exponentials leave
the registers, an eighth of what logits would take. The 16 logits that a row's token is
among are then products with rows of the vocabulary that XLA gathers, and so are the
columns behind the last whole tile.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.next_token import xla
from jaxrl_post.kernels.next_token.parts import ENTRIES, Layout, Statistics
from jaxrl_post.kernels.next_token.xla import logits
from jaxrl_post.types import Array, Float

__all__ = ["COLUMNS", "DEPTH", "SLOTS", "logits", "ranges_of", "rows_of", "statistics"]

# Columns of a warpgroup's logits and of a tile, and the part of the width that is
# multiplied at a time: 128 bytes, a row of the widest swizzle.
OWN_COLUMNS = 128
COLUMNS, DEPTH = 2 * OWN_COLUMNS, 64
# Parts of a warpgroup's columns.
PARTS = OWN_COLUMNS // ENTRIES
# Steps whose operands are in shared memory: at most 48 KiB each.
SLOTS = 4
# Registers of a thread that multiplies, and of one that copies; 65,536 in all.
REGISTERS, FEW_REGISTERS = 232, 40
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
    """As `Passes` says; `api` refuses sizes that do not fit."""
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
    interpret = layout.interpret
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    transforms = (
        plgpu.TilingTransform((8, DEPTH)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(128),  # type: ignore[abstract]
    )
    found = plgpu.kernel(
        functools.partial(_statistics_kernel, layout, part),
        out_type=jax.ShapeDtypeStruct(
            (tiles, row_tiles, 2, 2, PARTS, own), jnp.float32
        ),
        scratch_types=[
            plgpu.SMEM((SLOTS, own, DEPTH), hidden.dtype, transforms=transforms),
            plgpu.SMEM((SLOTS, COLUMNS, DEPTH), weight.dtype, transforms=transforms),
            plgpu.SMEM((2, 2, PARTS, own), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        ],
        grid=(row_tiles, ranges),
        grid_names=("rows", "range"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="next_token_statistics",
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


class _Block(NamedTuple):
    """The tiles of one block of threads.

    Attributes:
        part: tiles of a range.
        hidden: all hidden states.
        weight: all of the vocabulary's matrix.
        buffers: of hidden states and weight, in shared memory.
        loaded: barriers: operands have arrived.
        consumed: barriers: operands have been used.
    """

    part: int
    hidden: Any
    weight: Any
    buffers: tuple[Any, Any]
    loaded: Any
    consumed: Any

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.hidden.shape[1] // DEPTH

    @property
    def first(self) -> Any:
        """The first tile."""
        return jax.lax.axis_index("range") * self.part

    @property
    def tiles(self) -> Any:
        """Number of tiles."""
        left = self.weight.shape[0] // COLUMNS - self.first
        return jnp.minimum(self.part, left)

    def copy(self) -> None:
        """Copies the operands of all steps, as slots become free."""
        own = self.buffers[0].shape[1]
        rows = pl.ds(jax.lax.axis_index("rows") * own, own)

        @pl.loop(0, self.tiles * self.steps)
        def _(number: Any) -> None:
            slot = jax.lax.rem(number, SLOTS)
            inner = pl.ds(jax.lax.rem(number, self.steps) * DEPTH, DEPTH)
            column = (self.first + jax.lax.div(number, self.steps)) * COLUMNS

            @pl.when(number >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(self.consumed.at[slot])

            for array, at, buffer in (
                (self.hidden, rows, self.buffers[0]),
                (self.weight, pl.ds(column, COLUMNS), self.buffers[1]),
            ):
                plgpu.copy_gmem_to_smem(
                    array.at[at, inner], buffer.at[slot], self.loaded.at[slot]
                )

    def products(self, tile: Any) -> Array:
        """Products of all rows with this warpgroup's columns of a tile."""
        columns = pl.ds(jax.lax.axis_index("warpgroup") * OWN_COLUMNS, OWN_COLUMNS)

        def multiply(total: Any) -> Array:
            def step(number: Any, _: Any) -> None:
                slot = jax.lax.rem(number, SLOTS)
                plgpu.barrier_wait(self.loaded.at[slot])
                plgpu.wgmma(
                    total,
                    self.buffers[0].at[slot],
                    self.buffers[1].at[slot, columns].transpose((1, 0)),
                )
                # The product before this one is complete then.
                plgpu.wgmma_wait(1)

                @pl.when(number > tile * self.steps)
                def _() -> None:
                    before = jax.lax.rem(number + SLOTS - 1, SLOTS)
                    plgpu.barrier_arrive(self.consumed.at[before])

            first, end = tile * self.steps, (tile + 1) * self.steps
            jax.lax.fori_loop(first, end, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.consumed.at[jax.lax.rem(end - 1, SLOTS)])
            return total[...]

        own = self.buffers[0].shape[1]
        shape = plgpu.WGMMAAccumulatorRef((own, OWN_COLUMNS), jnp.float32)
        return pl.run_scoped(multiply, shape)


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
    """Of each part of 16 logits the largest, and the sum of exp(z - largest)."""
    own = jax.lax.axis_index("warpgroup")
    buffers = hidden_buffer, weight_buffer
    block = _Block(part, hidden, weight, buffers, loaded, consumed)
    rows = hidden_buffer.shape[1]

    @pl.when(own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        block.copy()

    @pl.when(own < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        row_tile = jax.lax.axis_index("rows")
        of_row = plgpu.load(
            inverse.at[pl.ds(row_tile * rows, rows)],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )

        @pl.loop(0, block.tiles)
        def _(tile: Any) -> None:
            z = block.products(tile)
            if layout.divisor != 1.0:
                z = z * (1.0 / layout.divisor)
            if layout.softcap is not None:
                # c tanh(x / c), by an exponential: the GPU's own tanh has 11 bits.
                odds = jnp.exp(z * (2.0 / layout.softcap))
                z = layout.softcap - (2.0 * layout.softcap) / (odds + 1.0)
            z = z * _wide(of_row, OWN_COLUMNS)
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
                results.at[own], found.at[block.first + tile, row_tile, own]
            )

        plgpu.wait_smem_to_gmem(0)


def _wide(values: Array, columns: int) -> Array:
    """Values of rows, for so many columns."""
    return jax.lax.broadcast_in_dim(values, (values.shape[0], columns), [0])
