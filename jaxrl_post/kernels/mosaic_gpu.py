"""Shared by the kernels for Hopper GPUs: products of tiles, caps, and writing.

A block of threads that multiplies tiles has three warpgroups. One copies operands into
shared memory, some steps ahead; two multiply them into registers (wgmma).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.types import Array

__all__ = ["DEPTH", "Products", "capped", "product_kernel", "staged", "store"]

# The part of the width that is multiplied at a time: 128 bytes of bfloat16, a row of
# the widest swizzle.
DEPTH = 64
# Registers of a thread that multiplies, and of one that copies; 65,536 in all.
REGISTERS, FEW_REGISTERS = 232, 40


def staged(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the tensor cores and the copies read it; DEPTH numbers a row."""
    transforms = (
        plgpu.TilingTransform((8, DEPTH)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(128),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Products(NamedTuple):
    """Products of tiles of two matrices [rows, width], whose width is summed over.

    Attributes:
        buffers: of both matrices' tiles in shared memory, [slots, rows, DEPTH] each.
        loaded: a barrier a slot: operands have arrived.
        consumed: a barrier a slot: operands have been used.
        steps: parts of the width, of DEPTH numbers each.
    """

    buffers: tuple[Any, Any]
    loaded: Any
    consumed: Any
    steps: int

    @property
    def slots(self) -> int:
        """Steps whose operands are in shared memory."""
        return self.buffers[0].shape[0]

    def computed(
        self,
        tiles: Any,
        operands: Callable[[Any, Any], tuple[Any, Any]],
        compute: Callable[[], None],
    ) -> None:
        """Lets one warpgroup copy the operands of all tiles, and two compute.

        Args:
            tiles: number of tiles; 0 if there is nothing to compute.
            operands: the parts of both matrices in memory, of a tile and a part of the
                width.
            compute: calls `of_tile` once for each tile, in order.
        """
        own = jax.lax.axis_index("warpgroup")

        @pl.when(own == 2)
        def _() -> None:
            plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
            self._copy(tiles, operands)

        @pl.when(own < 2)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            compute()

    def of_tile(self, tile: Any, rows: Any, columns: Any) -> Array:
        """Products of rows of one buffer with rows of the other, float32.

        Args:
            tile: its number.
            rows: of the first buffer, a slice.
            columns: rows of the second buffer, a slice.
        """

        def multiply(total: Any) -> Array:
            def step(number: Any, _: Any) -> None:
                slot = jax.lax.rem(number, self.slots)
                plgpu.barrier_wait(self.loaded.at[slot])
                plgpu.wgmma(
                    total,
                    self.buffers[0].at[slot, rows],
                    self.buffers[1].at[slot, columns].transpose((1, 0)),
                )
                # The product before this one is complete then.
                plgpu.wgmma_wait(1)

                @pl.when(number > tile * self.steps)
                def _() -> None:
                    before = jax.lax.rem(number + self.slots - 1, self.slots)
                    plgpu.barrier_arrive(self.consumed.at[before])

            first, end = tile * self.steps, (tile + 1) * self.steps
            jax.lax.fori_loop(first, end, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.consumed.at[jax.lax.rem(end - 1, self.slots)])
            return total[...]

        shape = rows.size, columns.size
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def _copy(
        self, tiles: Any, operands: Callable[[Any, Any], tuple[Any, Any]]
    ) -> None:
        """Copies the operands of all steps, as slots become free."""

        @pl.loop(0, tiles * self.steps)
        def _(number: Any) -> None:
            slot = jax.lax.rem(number, self.slots)
            inner = pl.ds(jax.lax.rem(number, self.steps) * DEPTH, DEPTH)

            @pl.when(number >= self.slots)
            def _() -> None:
                plgpu.barrier_wait(self.consumed.at[slot])

            parts = operands(jax.lax.div(number, self.steps), inner)
            for part, buffer in zip(parts, self.buffers, strict=True):
                plgpu.copy_gmem_to_smem(part, buffer.at[slot], self.loaded.at[slot])


def product_kernel(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, int],
    tile: tuple[int, int],
    slots: int,
    dtype: Any,
    results: Any,
    result: jax.ShapeDtypeStruct,
    interpret: Any,
) -> Callable[..., Array]:
    """`kernel` as a function of arrays.

    The kernel gets the arrays, the result, and what `Products` needs: two buffers,
    shared memory for results, and the barriers loaded and consumed.

    Args:
        kernel: what the three warpgroups of a block do.
        name: of the kernel.
        grid: tiles of rows and ranges of columns; blocks of neighbouring ranges start
            one after another.
        tile: rows of either operand in a tile.
        slots: steps whose operands are in shared memory.
        dtype: of the operands.
        results: shared memory for results.
        result: what is computed.
        interpret: False to compile it, True or how to interpret it.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    return plgpu.kernel(
        kernel,
        out_type=result,
        scratch_types=[
            *[staged((slots, size, DEPTH), dtype) for size in tile],
            results,
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        grid=grid,
        grid_names=("rows", "range"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name=name,
    )


def capped(logits: Array, softcap: float | None) -> Array:
    """softcap tanh(logits / softcap); None for no cap.

    By an exponential: the GPU's own tanh has 11 bits.
    """
    if softcap is None:
        return logits
    odds = jnp.exp(logits * (2.0 / softcap))
    return softcap - (2.0 * softcap) / (odds + 1.0)


def store(array: Any, values: Array) -> None:
    """Writes from registers into shared or global memory.

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
