"""Attention of packed rows as Mosaic kernels for Hopper GPUs; masked tiles are skipped.

The tiles of queries x keys that hold a visible score are listed when the program runs
(`kernel_tiles.TileList`), sorted by queries for the forward pass and the gradient of
the queries, and by keys for the gradient of keys and values. A block of threads has the
sums of one block of queries, or of keys, in registers, and reads its part of the list.
One warpgroup copies operands into shared memory, some tiles ahead; two others compute,
each for half of the block's rows. Keys and values have their gradient from all heads
that read them, one after another, so that each sum is computed in one order. Where that
makes too few blocks of threads, a part of the heads has a block, and the parts are
added afterwards.

The softmax is computed online; the backward pass computes the scores again, from the
log-sum-exp.

References:
    Dao, FlashAttention-2, arXiv:2307.08691.
    Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxrl_post.kernels.attention.gpu_kernels import (
    OWN_ROWS,
    SWIZZLED,
    Buffers,
    Sizes,
    Work,
    forward_kernel,
    key_kernel,
    key_parts,
    query_kernel,
)
from jaxrl_post.kernels.attention.kernel_tiles import (
    KernelSettings,
    Shape,
    Tile,
    TileList,
)
from jaxrl_post.kernels.attention.packed import Operands, Towards, padded_facts
from jaxrl_post.types import Array

__all__ = ["GpuTiles"]


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """The `Tiles` of the "pallas_gpu" implementation."""

    settings: KernelSettings

    def forward(
        self, operands: Operands, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array]:
        """As `Tiles` has it."""
        call = _Call.of(self.settings, "attention_forward", operands, aligned)
        shape, length = call.shape, operands.query.shape[1]
        out, normalizer = call(
            forward_kernel,
            call.inputs(operands),
            [
                shape.of_queries(shape.value_dim, dtype),
                jax.ShapeDtypeStruct(
                    (shape.batch, shape.heads, shape.length), jnp.float32
                ),
            ],
        )
        out = out.swapaxes(1, 2)[:, :length, :, : operands.value.shape[-1]]
        return out, normalizer.swapaxes(1, 2)[:, :length]

    def backward(
        self, operands: Operands, towards: Towards, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array, Array]:
        """As `Tiles` has it."""
        query, key, value, *_ = operands
        cotangent, *numbers = towards
        length, d_out = query.shape[1], cotangent.astype(query.dtype)

        def of(name: str) -> tuple[_Call, list[Array]]:
            call = _Call.of(self.settings, name, operands, aligned)
            rows = [call.shape.queries(a[..., None])[..., 0] for a in numbers]
            return call, [*call.inputs(operands), call.queries(d_out), *rows]

        call, arrays = of("attention_query")
        shape = call.shape
        (d_query,) = call(
            query_kernel,
            arrays,
            [shape.of_queries(shape.head_dim, dtype)],
        )
        call, arrays = of("attention_key")
        shape, parts = call.shape, call.parts

        def of_parts(width: int) -> jax.ShapeDtypeStruct:
            sizes = shape.batch, shape.kv_heads * parts, shape.length, width
            return jax.ShapeDtypeStruct(sizes, jnp.float32 if parts > 1 else dtype)

        def added(array: Array, like: Array) -> Array:
            """The sum of a group's parts."""
            if parts > 1:
                array = array.reshape(
                    shape.batch, shape.kv_heads, parts, *array.shape[2:]
                )
                array = array.sum(axis=2).astype(dtype)
            return array[:, :, :length, : like.shape[-1]]

        d_key, d_value = call(
            key_kernel,
            arrays,
            [of_parts(shape.head_dim), of_parts(shape.value_dim)],
        )
        return (
            d_query.swapaxes(1, 2)[:, :length, :, : query.shape[-1]],
            added(d_key, key),
            added(d_value, value),
        )


class _Call(NamedTuple):
    """A kernel over the listed tiles.

    Attributes:
        settings: static.
        shape: static.
        name: of the kernel; the sums of "attention_key" belong to blocks of keys.
        sizes: static.
        parts: static; of the heads of a group, for the gradient of keys.
        lists: int32: where each block's part of the list begins, and where the last one
            ends; and the list.
        facts: int32 [batch, 3, length] of queries, and of keys.
    """

    settings: KernelSettings
    shape: Shape
    name: str
    sizes: Sizes
    parts: int
    lists: tuple[Array, Array]
    facts: tuple[Array, Array]

    @classmethod
    def of(
        cls,
        settings: KernelSettings,
        name: str,
        operands: Operands,
        aligned: bool,
    ) -> "_Call":
        *arrays, of_query, of_key = operands
        arrays = [_widened(array) for array in arrays]
        sizes = Sizes.of(name, arrays[1].shape[-1], arrays[2].shape[-1])
        by_key, cut = name == "attention_key", (sizes.rows, sizes.passing)
        tile = Tile(*(reversed(cut) if by_key else cut))
        shape = Shape.of(settings._replace(tile=tile), *arrays)
        of_query, of_key = (padded_facts(f, shape.length) for f in (of_query, of_key))
        tiles = TileList.of(settings, shape, by_key, of_query, of_key, aligned)
        blocks = shape.batch * (shape.length // sizes.rows)
        parts = key_parts(blocks * shape.kv_heads, shape.group) if by_key else 1
        # Copies of its last entry fill up the list.
        begins = jnp.searchsorted(tiles.sums, jnp.arange(blocks + 1, dtype=jnp.int32))
        begins = jnp.minimum(begins.astype(jnp.int32), tiles.count)
        facts = jnp.stack(of_query, axis=1), jnp.stack(of_key, axis=1)
        return cls(settings, shape, name, sizes, parts, (begins, tiles.others), facts)

    def queries(self, array: Array) -> Array:
        return self.shape.queries(_widened(array))

    def inputs(self, operands: Operands) -> list[Array]:
        """Queries, keys and values, which every kernel reads."""
        query, *of_keys = operands[:3]
        keys = (self.shape.padded(_widened(array), 2) for array in of_keys)
        return [self.queries(query), *keys]

    def __call__(
        self,
        kernel: Callable[..., None],
        operands: Sequence[Array],
        results: Sequence[jax.ShapeDtypeStruct],
    ) -> Sequence[Array]:
        shape, sizes, interpret = self.shape, self.sizes, self.settings.interpret
        by_key = self.name == "attention_key"
        if interpret is True:
            interpret = plgpu.InterpretGPUParams()
        dtype = operands[0].dtype
        backward = len(operands) > 3

        def staged(*shape: int) -> Any:
            """Shared memory as the tensor cores and the copies read it."""
            transforms = (
                plgpu.TilingTransform((8, sizes.swizzled)),  # type: ignore[abstract]
                plgpu.SwizzleTransform(2 * sizes.swizzled),  # type: ignore[abstract]
            )
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        # The rows of a block, and what passes: a block of the other kind.
        widths = shape.head_dim, shape.value_dim
        staying = widths if backward else widths[:1]
        copies = 3 + 2 * by_key
        heads = shape.kv_heads * self.parts if by_key else shape.heads
        halves, passing, slots = sizes
        last = 4 + len(operands)

        def body(*refs: Any) -> None:
            work = Work(self.settings, shape, sizes, *refs[:4])
            kernel(work, refs[4:last], refs[last:-8], Buffers(*refs[-8:]))

        return plgpu.kernel(
            body,
            out_type=list(results),
            scratch_types=[
                [staged(halves, OWN_ROWS, width) for width in staying],
                [staged(slots, passing, width) for width in widths],
                staged(2, OWN_ROWS, passing),
                plgpu.SMEM((slots, 3, passing), jnp.int32),
                [plgpu.SMEM((slots, passing), jnp.float32)] * 2 * by_key,
                plgpu.Barrier(num_arrivals=halves * len(staying)),
                plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
                plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            ],
            grid=(shape.batch * (shape.length // sizes.rows), heads),
            grid_names=("block", "head"),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            kernel_name=self.name,
        )(*self.lists, *self.facts, *operands)


def _widened(array: Array) -> Array:
    """Heads of a size that swizzles divide; zeros change no product."""
    more = -array.shape[-1] % SWIZZLED
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)]) if more else array
