"""Attention of packed rows as Mosaic kernels for Hopper GPUs; masked tiles are skipped.

The tiles of queries x keys that hold a visible score are listed when the program runs
(`kernel_tiles.TileList`), sorted by queries for the forward pass and the gradient of
the queries, and by keys for that of keys and values. A block of threads has the sums of
one block of queries, or of keys, in registers, and reads its part of the list. One
warpgroup copies operands into shared memory, some tiles ahead; two others compute, each
for half of the block's rows. Keys and values have their gradient from all heads that
read them, one after another, so that each sum is computed in one order.

The softmax is computed online; the backward pass computes the scores again, from the
log-sum-exp.

References:
    Dao, FlashAttention-2, arXiv:2307.08691.
    Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxrl_post.kernels.attention.kernel_tiles import Settings, Shape, Tile, TileList
from jaxrl_post.kernels.attention.packed import Facts, padded_facts
from jaxrl_post.kernels.attention.reference import MASKED
from jaxrl_post.types import Array

__all__ = ["GpuTiles"]

# Where the maximum begins: far below a score, and far above a masked one, so that the
# weight of a masked score is 0 even if the query has seen no key.
LOWEST = MASKED / 2
# Rows of a block, of which each of two warpgroups has half, and of a block that passes.
ROWS, PASSING = 128, 64
OWN_ROWS = ROWS // 2
# Blocks that pass whose operands are in shared memory.
SLOTS = 3
# A row of the widest swizzle, in numbers; head sizes are padded to a multiple of it.
SWIZZLED = 64
# Registers of a thread that computes, and of one that copies; 65,536 in all.
REGISTERS, FEW_REGISTERS = 240, 24


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """The `Tiles` of the "pallas_gpu" implementation."""

    settings: Settings

    def forward(
        self,
        query: Array,
        key: Array,
        value: Array,
        of_query: Facts,
        of_key: Facts,
        dtype: DTypeLike,
        *,
        aligned: bool,
    ) -> tuple[Array, Array]:
        """As `Tiles` has it."""
        call = _Call.of(
            self.settings, False, query, key, value, of_query, of_key, aligned
        )
        shape, length = call.shape, query.shape[1]
        out, normalizer = call(
            _forward_kernel,
            [call.queries(query), call.keys(key), call.keys(value)],
            [
                shape.of_queries(shape.value_dim, dtype),
                jax.ShapeDtypeStruct(
                    (shape.batch, shape.heads, shape.length), jnp.float32
                ),
            ],
            name="attention_forward",
        )
        out = out.swapaxes(1, 2)[:, :length, :, : value.shape[-1]]
        return out, normalizer.swapaxes(1, 2)[:, :length]

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        of_query: Facts,
        of_key: Facts,
        cotangent: Array,
        normalizer: Array,
        inner: Array,
        dtype: DTypeLike,
        *,
        aligned: bool,
    ) -> tuple[Array, Array, Array]:
        """As `Tiles` has it."""
        facts, length = (of_query, of_key, aligned), query.shape[1]
        towards = cotangent.astype(query.dtype)

        def of(by_key: bool) -> tuple[_Call, list[Array]]:
            call = _Call.of(self.settings, by_key, query, key, value, *facts)
            queries, keys = call.queries, call.keys
            rows = [
                call.shape.queries(a[..., None])[..., 0] for a in (normalizer, inner)
            ]
            return call, [
                queries(query),
                keys(key),
                keys(value),
                queries(towards),
                *rows,
            ]

        call, operands = of(False)
        shape = call.shape
        (d_query,) = call(
            _query_kernel,
            operands,
            [shape.of_queries(shape.head_dim, dtype)],
            name="attention_query",
        )
        call, operands = of(True)
        shape = call.shape
        d_key, d_value = call(
            _key_kernel,
            operands,
            [
                shape.of_keys(shape.head_dim, dtype),
                shape.of_keys(shape.value_dim, dtype),
            ],
            name="attention_key",
        )
        return (
            d_query.swapaxes(1, 2)[:, :length, :, : query.shape[-1]],
            d_key[:, :, :length, : key.shape[-1]],
            d_value[:, :, :length, : value.shape[-1]],
        )


class _Call(NamedTuple):
    """A kernel over the listed tiles.

    Attributes:
        settings: static.
        shape: static.
        by_key: whether the sums belong to blocks of keys.
        lists: int32: where each block's part of the list begins, and where the last one
            ends; and the list.
        facts: int32 [batch, 3, length] of queries, and of keys.
    """

    settings: Settings
    shape: Shape
    by_key: bool
    lists: tuple[Array, Array]
    facts: tuple[Array, Array]

    @classmethod
    def of(
        cls,
        settings: Settings,
        by_key: bool,
        query: Array,
        key: Array,
        value: Array,
        of_query: Facts,
        of_key: Facts,
        aligned: bool,
    ) -> "_Call":
        tile = Tile(PASSING, ROWS) if by_key else Tile(ROWS, PASSING)
        arrays = (_widened(array) for array in (query, key, value))
        shape = Shape.of(settings._replace(tile=tile), *arrays)
        of_query, of_key = (padded_facts(f, shape.length) for f in (of_query, of_key))
        tiles = TileList.of(settings, shape, by_key, of_query, of_key, aligned)
        blocks = shape.batch * (shape.length // ROWS)
        # The list goes on with copies of its last entry.
        begins = jnp.searchsorted(tiles.sums, jnp.arange(blocks + 1, dtype=jnp.int32))
        begins = jnp.minimum(begins.astype(jnp.int32), tiles.count)
        facts = jnp.stack(of_query, axis=1), jnp.stack(of_key, axis=1)
        return cls(settings, shape, by_key, (begins, tiles.others), facts)

    def queries(self, array: Array) -> Array:
        return self.shape.queries(_widened(array))

    def keys(self, array: Array) -> Array:
        return self.shape.padded(_widened(array), 2)

    def __call__(
        self,
        kernel: Callable[..., None],
        operands: Sequence[Array],
        results: Sequence[jax.ShapeDtypeStruct],
        *,
        name: str,
    ) -> Sequence[Array]:
        shape, interpret = self.shape, self.settings.interpret
        if interpret is True:
            interpret = plgpu.InterpretGPUParams()
        dtype = operands[0].dtype
        backward = len(operands) > 3

        def staged(*sizes: int) -> Any:
            """Shared memory as the tensor cores and the copies read it."""
            transforms = (
                plgpu.TilingTransform((8, SWIZZLED)),  # type: ignore[abstract]
                plgpu.SwizzleTransform(128),  # type: ignore[abstract]
            )
            return plgpu.SMEM(sizes, dtype, transforms=transforms)

        # The rows of a block, and what passes: a block of the other kind.
        widths = shape.head_dim, shape.value_dim
        staying = widths if backward or self.by_key else widths[:1]
        copies = 3 + 2 * self.by_key
        heads = shape.kv_heads if self.by_key else shape.heads
        return plgpu.kernel(
            functools.partial(kernel, self.settings, shape),
            out_type=list(results),
            scratch_types=[
                [staged(2, OWN_ROWS, width) for width in staying],
                [staged(SLOTS, PASSING, width) for width in widths],
                staged(2, OWN_ROWS, PASSING),
                plgpu.SMEM((SLOTS, 3, PASSING), jnp.int32),
                [plgpu.SMEM((SLOTS, PASSING), jnp.float32)] * 2 * self.by_key,
                plgpu.Barrier(num_arrivals=2 * len(staying)),
                plgpu.Barrier(num_arrivals=copies, num_barriers=SLOTS),
                plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            ],
            grid=(shape.batch * (shape.length // ROWS), heads),
            grid_names=("block", "head"),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            kernel_name=name,
        )(*self.lists, *self.facts, *operands)


def _widened(array: Array) -> Array:
    """Heads of a size that swizzles divide; zeros change no product."""
    more = -array.shape[-1] % SWIZZLED
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)]) if more else array


class _Block(NamedTuple):
    """The work of one block of threads.

    Attributes:
        row: of the batch.
        block: of queries or keys within the row.
        own: this warpgroup.
        rows: this warpgroup's tokens within the row.
        begin: first entry of its part of the list.
        steps: number of blocks that pass.
        each: how often a listed block passes, once for each head.
        others: the list.
        passing: blocks of the passing kind in a row.
        loaded: barriers: operands have arrived.
        consumed: barriers: operands have been used.
    """

    row: Any
    block: Any
    own: Any
    rows: Any
    begin: Any
    steps: Any
    each: int
    others: Any
    passing: int
    loaded: Any
    consumed: Any

    @classmethod
    def here(
        cls,
        shape: Shape,
        begins: Any,
        others: Any,
        barriers: tuple[Any, Any],
        each: int = 1,
    ) -> "_Block":
        number, own = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        blocks = shape.length // ROWS
        row, block = jax.lax.div(number, blocks), jax.lax.rem(number, blocks)
        begin = begins[number]
        steps = (begins[number + 1] - begin) * each
        rows = pl.ds(block * ROWS + own * OWN_ROWS, OWN_ROWS)
        passing = shape.length // PASSING
        return cls(
            row, block, own, rows, begin, steps, each, others, passing, *barriers
        )

    def half(self, which: int) -> Any:
        """Tokens of one warpgroup."""
        return pl.ds(self.block * ROWS + which * OWN_ROWS, OWN_ROWS)

    def slot(self, step: Any) -> Any:
        return jax.lax.rem(step, SLOTS)

    def copy(self, pairs: Callable[[Any, Any], list[tuple[Any, Any]]]) -> None:
        """Copies what passes, as slots become free.

        Args:
            pairs: of the tokens of a block and the step's head: arrays and buffers.
        """

        @pl.loop(0, self.steps)
        def _(step: Any) -> None:
            slot = self.slot(step)

            @pl.when(step >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(self.consumed.at[slot])

            other = jax.lax.div(
                self.others[self.begin + jax.lax.div(step, self.each)], 2
            )
            tokens = pl.ds(jax.lax.rem(other, self.passing) * PASSING, PASSING)
            for array, buffer in pairs(tokens, jax.lax.rem(step, self.each)):
                plgpu.copy_gmem_to_smem(array, buffer.at[slot], self.loaded.at[slot])


def _forward_kernel(
    settings: Settings,
    shape: Shape,
    begins: Any,
    others: Any,
    of_query: Any,
    of_key: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    normalizer: Any,
    staying: Any,
    passing: Any,
    rounded: Any,
    facts: Any,
    _: Any,
    ready: Any,
    loaded: Any,
    consumed: Any,
) -> None:
    block = _Block.here(shape, begins, others, (loaded, consumed))
    head = jax.lax.axis_index("head")
    row = block.row

    @pl.when(block.own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        _copy_rows(block, ready, [(query.at[row, head], staying[0])])
        of = jax.lax.div(head, shape.group)
        block.copy(
            lambda tokens, _: [
                (key.at[row, of, tokens], passing[0]),
                (value.at[row, of, tokens], passing[1]),
                (of_key.at[row, :, tokens], facts),
            ]
        )

    @pl.when(block.own < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        rows = [_of_rows(of_query.at[row, i, block.rows]) for i in range(2)]
        plgpu.barrier_wait(ready)

        def step(number: Any, state: tuple) -> tuple:
            mixed, top, total = state
            slot = block.slot(number)
            plgpu.barrier_wait(loaded.at[slot])
            products = _product(staying[0].at[block.own], passing[0].at[slot])
            scores = _scores(settings, products, rows, facts.at[slot])
            higher = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp(scores - _over_columns(higher))
            shrink = jnp.exp(top - higher)
            total = total * shrink + weights.sum(axis=1)
            mixed = mixed * _over_columns(shrink, shape.value_dim)
            mixed = mixed + _mixed(weights, rounded.at[block.own], passing[1].at[slot])
            plgpu.barrier_arrive(consumed.at[slot])
            return mixed, higher, total

        state = _zeros(shape.value_dim), _constant(LOWEST), _constant(0.0)
        mixed, top, total = jax.lax.fori_loop(0, block.steps, step, state)
        # A query that has seen no key gets 0.
        whole = jnp.where(total > 0, total, 1.0)
        mixed = mixed * _over_columns(1.0 / whole, shape.value_dim)
        _write(out.at[row, head, block.rows], mixed)
        _write(normalizer.at[row, head, block.rows], top + jnp.log(whole))


def _query_kernel(
    settings: Settings,
    shape: Shape,
    begins: Any,
    others: Any,
    of_query: Any,
    of_key: Any,
    query: Any,
    key: Any,
    value: Any,
    towards: Any,
    normalizer: Any,
    inner: Any,
    d_query: Any,
    staying: Any,
    passing: Any,
    rounded: Any,
    facts: Any,
    _: Any,
    ready: Any,
    loaded: Any,
    consumed: Any,
) -> None:
    block = _Block.here(shape, begins, others, (loaded, consumed))
    head = jax.lax.axis_index("head")
    row = block.row

    @pl.when(block.own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        own = [(query.at[row, head], staying[0]), (towards.at[row, head], staying[1])]
        _copy_rows(block, ready, own)
        of = jax.lax.div(head, shape.group)
        block.copy(
            lambda tokens, _: [
                (key.at[row, of, tokens], passing[0]),
                (value.at[row, of, tokens], passing[1]),
                (of_key.at[row, :, tokens], facts),
            ]
        )

    @pl.when(block.own < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        rows = [_of_rows(of_query.at[row, i, block.rows]) for i in range(2)]
        whole = _of_rows(normalizer.at[row, head, block.rows])
        part = _of_rows(inner.at[row, head, block.rows])
        plgpu.barrier_wait(ready)

        def step(total: Any, number: Any, _: Any) -> None:
            slot = block.slot(number)
            plgpu.barrier_wait(loaded.at[slot])
            products = _product(staying[0].at[block.own], passing[0].at[slot])
            scores = _scores(settings, products, rows, facts.at[slot])
            weights = jnp.exp(scores - _over_columns(whole))
            d_weights = _product(staying[1].at[block.own], passing[1].at[slot])
            d_scores = weights * (d_weights - _over_columns(part))
            d_products = _unscaled(settings, scores, d_scores)
            _add(total, d_products, rounded.at[block.own], passing[0].at[slot])
            plgpu.barrier_arrive(consumed.at[slot])

        def sums(total: Any) -> None:
            jax.lax.fori_loop(0, block.steps, functools.partial(step, total), None)
            _write(d_query.at[row, head, block.rows], total[...])

        pl.run_scoped(sums, _accumulator(shape.head_dim))


def _key_kernel(
    settings: Settings,
    shape: Shape,
    begins: Any,
    others: Any,
    of_query: Any,
    of_key: Any,
    query: Any,
    key: Any,
    value: Any,
    towards: Any,
    normalizer: Any,
    inner: Any,
    d_key: Any,
    d_value: Any,
    staying: Any,
    passing: Any,
    rounded: Any,
    facts: Any,
    by_column: Any,
    ready: Any,
    loaded: Any,
    consumed: Any,
) -> None:
    block = _Block.here(shape, begins, others, (loaded, consumed), shape.group)
    head = jax.lax.axis_index("head")
    row = block.row

    @pl.when(block.own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        own = [(key.at[row, head], staying[0]), (value.at[row, head], staying[1])]
        _copy_rows(block, ready, own)

        def pairs(tokens: Any, number: Any) -> list[tuple[Any, Any]]:
            reads = head * shape.group + number
            return [
                (query.at[row, reads, tokens], passing[0]),
                (towards.at[row, reads, tokens], passing[1]),
                (of_query.at[row, :, tokens], facts),
                (normalizer.at[row, reads, tokens], by_column[0]),
                (inner.at[row, reads, tokens], by_column[1]),
            ]

        block.copy(pairs)

    @pl.when(block.own < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        rows = [_of_rows(of_key.at[row, i, block.rows]) for i in range(3)]
        plgpu.barrier_wait(ready)

        def step(key_total: Any, value_total: Any, number: Any, _: Any) -> None:
            slot = block.slot(number)
            plgpu.barrier_wait(loaded.at[slot])
            products = _product(staying[0].at[block.own], passing[0].at[slot])
            scores = _scores(settings, products, rows, facts.at[slot])
            whole = _over_rows(_of_columns(by_column[0].at[slot]))
            weights = jnp.exp(scores - whole)
            buffer = rounded.at[block.own]
            _add(value_total, weights, buffer, passing[1].at[slot])
            d_weights = _product(staying[1].at[block.own], passing[1].at[slot])
            part = _over_rows(_of_columns(by_column[1].at[slot]))
            d_scores = weights * (d_weights - part)
            d_products = _unscaled(settings, scores, d_scores)
            _add(key_total, d_products, buffer, passing[0].at[slot])
            plgpu.barrier_arrive(consumed.at[slot])

        def sums(*totals: Any) -> None:
            jax.lax.fori_loop(0, block.steps, functools.partial(step, *totals), None)
            for array, total in zip((d_key, d_value), totals, strict=True):
                _write(array.at[row, head, block.rows], total[...])

        widths = shape.head_dim, shape.value_dim
        pl.run_scoped(sums, *(_accumulator(width) for width in widths))


def _copy_rows(block: _Block, ready: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Copies the block's own tokens, a half for each warpgroup."""
    for array, buffer in pairs:
        for which in range(2):
            plgpu.copy_gmem_to_smem(
                array.at[block.half(which)], buffer.at[which], ready
            )


def _product(rows: Any, columns: Any) -> Array:
    """[OWN_ROWS, PASSING]: products of rows in shared memory."""

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, rows, columns.transpose((1, 0)))
        return total[...]

    return pl.run_scoped(multiply, _accumulator(PASSING))


def _add(total: Any, weights: Array, buffer: Any, rows: Any) -> None:
    """Adds the product of weights, rounded, with rows in shared memory.

    The weights go through shared memory too, because the interpreter knows no product
    of registers.
    """
    buffer[...] = weights.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.wgmma(total, buffer, rows)
    plgpu.wgmma_wait(0)


def _mixed(weights: Array, buffer: Any, rows: Any) -> Array:
    """The product of weights, rounded, with rows in shared memory."""

    def multiply(total: Any) -> Array:
        _add(total, weights, buffer, rows)
        return total[...]

    return pl.run_scoped(multiply, _accumulator(rows.shape[1]))


def _accumulator(width: int) -> Any:
    """Registers for sums of products, which begin with zeros."""
    return plgpu.WGMMAAccumulatorRef((OWN_ROWS, width), jnp.float32)


def _scores(
    settings: Settings, products: Array, rows: Sequence[Array], columns: Any
) -> Array:
    """Scores of a tile; `MASKED` where a query does not see a key.

    Args:
        settings: static.
        products: [OWN_ROWS, PASSING].
        rows: facts of the block's own tokens: index, position, and the end of keys.
        columns: facts of what passes, in shared memory.
    """
    scores = products * settings.scale
    if settings.softcap is not None:
        # c tanh(x / c), by an exponential: the GPU's own tanh has 11 bits.
        odds = jnp.exp(scores * (2.0 / settings.softcap))
        scores = settings.softcap - (2.0 * settings.softcap) / (odds + 1.0)
    by_key = len(rows) == 3
    own = [_over_columns(fact) for fact in rows]
    passing = [_over_rows(_of_columns(columns.at[i])) for i in range(3 - by_key)]
    query, key = (passing, own) if by_key else (own, passing)
    seen = (key[0] <= query[0]) & (query[0] < key[2])
    if settings.window is not None:
        seen = seen & (query[1] - key[1] < settings.window)
    return jnp.where(seen, scores, MASKED)


def _unscaled(settings: Settings, scores: Array, d_scores: Array) -> Array:
    """The gradient of the products from that of the scores."""
    if settings.softcap is not None:
        # Hidden scores are far outside of the cap; their weights are 0.
        capped = jnp.maximum(scores, -settings.softcap) * (1.0 / settings.softcap)
        d_scores = d_scores * (1.0 - capped * capped)
    return d_scores * settings.scale


def _of_rows(values: Any) -> Array:
    """Values of this warpgroup's rows, from the GPU's memory."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.load(values, layout=layout, optimized=False)


def _of_columns(values: Any) -> Array:
    """Values of the columns of a tile, from shared memory."""
    return plgpu.load(values, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def _over_columns(values: Array, columns: int = PASSING) -> Array:
    return jax.lax.broadcast_in_dim(values, (OWN_ROWS, columns), [0])


def _over_rows(values: Array) -> Array:
    return jax.lax.broadcast_in_dim(values, (OWN_ROWS, PASSING), [1])


def _constant(value: float) -> Array:
    values = jnp.full((OWN_ROWS,), value, jnp.float32)
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA.reduce(1))


def _zeros(width: int) -> Array:
    zeros = jnp.zeros((OWN_ROWS, width), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def _write(array: Any, values: Array) -> None:
    """Writes from registers into the GPU's memory."""
    plgpu.store(array, values.astype(array.dtype), optimized=False)
