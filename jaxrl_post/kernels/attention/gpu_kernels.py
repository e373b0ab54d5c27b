"""The attention kernels for Hopper GPUs: what a block of threads computes.

`pallas_gpu.py` calls them, and says how they work together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.attention.kernel_tiles import KernelSettings, Shape
from jaxrl_post.kernels.attention.reference import MASKED
from jaxrl_post.kernels.mosaic_gpu import capped, store
from jaxrl_post.types import Array

__all__ = [
    "OWN_ROWS",
    "SWIZZLED",
    "Buffers",
    "Sizes",
    "Work",
    "forward_kernel",
    "key_kernel",
    "key_parts",
    "query_kernel",
]

# Where the maximum begins: far below a score, and far above a masked one, so that the
# weight of a masked score is 0 even if the query has seen no key.
LOWEST = MASKED / 2
# Rows of a warpgroup.
OWN_ROWS = 64
# Head sizes are padded to a multiple of it: a row of the widest swizzle, in numbers.
SWIZZLED = 64
# Registers of a thread that computes, and of one that copies; 65,536 in all.
REGISTERS, FEW_REGISTERS = 240, 24
# Blocks of threads that keep a GPU's multiprocessors busy: three for each of 132, which
# run one at a time each.
ENOUGH_BLOCKS = 396


def key_parts(blocks: int, group: int) -> int:
    """Into how many parts a group's heads are cut for the gradient of its keys.

    Each part has blocks of threads of its own, and its sums are added afterwards. So a
    GPU is busy also where few keys are read by many heads.

    Args:
        blocks: of threads, if a block goes through all heads of a group.
        group: query heads that read one key/value head.

    Returns:
        The least divisor of `group` that makes enough blocks, or `group`.

    >>> key_parts(64, 8), key_parts(256, 6), key_parts(1024, 4)
    (8, 2, 1)
    """
    divisors = (n for n in range(1, group) if group % n == 0)
    return next((n for n in divisors if n * blocks >= ENOUGH_BLOCKS), group)


class Sizes(NamedTuple):
    """Sizes of the pieces into which a kernel cuts its work.

    Attributes:
        halves: blocks of OWN_ROWS tokens that a block of threads has, one for each of
            its two warpgroups; 1: both compute for the same tokens.
        passing: tokens of a block that passes.
        slots: blocks that pass whose operands are in shared memory.
    """

    halves: int
    passing: int
    slots: int

    @property
    def rows(self) -> int:
        """Tokens of a block of threads."""
        return self.halves * OWN_ROWS

    @property
    def swizzled(self) -> int:
        """Numbers of a row of the swizzle: the weights have no more columns."""
        return min(self.passing, SWIZZLED)

    @classmethod
    def of(cls, name: str, head_dim: int, value_dim: int) -> "Sizes":
        """The sizes of a kernel.

        Wide heads leave less shared memory for what passes. Their sums of keys and of
        values do not fit into the registers of one warpgroup, and each has one of them.
        """
        if head_dim <= 192 and value_dim <= 128:
            return cls(2, 64, 3)
        if name == "attention_key":
            return cls(1, 32, 4)
        return cls(2, 32 if name == "attention_query" else 64, 2)


class Work(NamedTuple):
    """Facts that all blocks of threads of a kernel share.

    Attributes:
        settings: static.
        shape: static.
        sizes: static.
        begins: where each block's part of the list begins, and the last one ends.
        others: the list.
        of_query: facts of queries.
        of_key: facts of keys.
    """

    settings: KernelSettings
    shape: Shape
    sizes: Sizes
    begins: Any
    others: Any
    of_query: Any
    of_key: Any


class Buffers(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
        staying: its own tokens.
        passing: slots of what passes.
        rounded: weights.
        facts: of what passes.
        by_column: numbers of the queries that pass; none where keys do.
        ready: barrier: what stays has arrived.
        loaded: barriers: operands have arrived.
        consumed: barriers: operands have been used.
    """

    staying: Any
    passing: Any
    rounded: Any
    facts: Any
    by_column: Any
    ready: Any
    loaded: Any
    consumed: Any


class _Block(NamedTuple):
    """The work of one block of threads.

    Attributes:
        sizes: static.
        row: of the batch.
        block: of queries or keys within the row.
        own: this warpgroup.
        half: which half of the block's tokens it computes for.
        rows: this warpgroup's tokens within the row.
        begin: first entry of its part of the list.
        steps: number of blocks that pass.
        each: how often a listed block passes, once for each head of a part of a group.
        others: the list.
        passing: blocks of the passing kind in a row.
        loaded: barriers: operands have arrived.
        consumed: barriers: operands have been used.
    """

    sizes: Sizes
    row: Any
    block: Any
    own: Any
    half: Any
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
        work: Work,
        buffers: Buffers,
        *,
        by_key: bool = False,
        each: int = 1,
    ) -> "_Block":
        _, shape, sizes, begins, others, *_ = work
        number, own = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        half = own if sizes.halves > 1 else 0
        blocks = shape.length // sizes.rows
        row, block = jax.lax.div(number, blocks), jax.lax.rem(number, blocks)
        if not by_key:
            # Late queries see more keys, and early keys are seen by more queries. What
            # takes longest begins first, so that a row's last blocks are short.
            block = blocks - 1 - block
            number = row * blocks + block
        begin = begins[number]
        steps = (begins[number + 1] - begin) * each
        rows = pl.ds(block * sizes.rows + half * OWN_ROWS, OWN_ROWS)
        passing = shape.length // sizes.passing
        place = row, block, own, half, rows
        barriers = buffers.loaded, buffers.consumed
        return cls(sizes, *place, begin, steps, each, others, passing, *barriers)

    def slot(self, step: Any) -> Any:
        return jax.lax.rem(step, self.sizes.slots)

    def copy_rows(self, ready: Any, pairs: list[tuple[Any, Any]]) -> None:
        """Copies the block's own tokens."""
        for array, buffer in pairs:
            for half in range(self.sizes.halves):
                begin = self.block * self.sizes.rows + half * OWN_ROWS
                plgpu.copy_gmem_to_smem(
                    array.at[pl.ds(begin, OWN_ROWS)], buffer.at[half], ready
                )

    def copy(self, pairs: Callable[[Any, Any], list[tuple[Any, Any]]]) -> None:
        """Copies what passes, as slots become free.

        Args:
            pairs: of the tokens of a block and the step's head: arrays and buffers.
        """

        @pl.loop(0, self.steps)
        def _(step: Any) -> None:
            slot = self.slot(step)

            @pl.when(step >= self.sizes.slots)
            def _() -> None:
                plgpu.barrier_wait(self.consumed.at[slot])

            other = jax.lax.div(
                self.others[self.begin + jax.lax.div(step, self.each)], 2
            )
            size = self.sizes.passing
            tokens = pl.ds(jax.lax.rem(other, self.passing) * size, size)
            for array, buffer in pairs(tokens, jax.lax.rem(step, self.each)):
                plgpu.copy_gmem_to_smem(array, buffer.at[slot], self.loaded.at[slot])


def forward_kernel(
    work: Work, inputs: Sequence[Any], results: Sequence[Any], buffers: Buffers
) -> None:
    """Writes `out` and `normalizer`, the log of each query's sum, of a tile of queries.

    The tile stays in shared memory while the tiles of keys that it sees pass.
    """
    settings, shape, sizes, _, _, of_query, of_key = work
    (query, key, value), (out, normalizer) = inputs, results
    staying, passing, rounded, facts, _, ready, loaded, consumed = buffers
    block, head = _Block.here(work, buffers), jax.lax.axis_index("head")
    row = block.row

    @pl.when(block.own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        block.copy_rows(ready, [(query.at[row, head], staying[0])])
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
            products = _product(staying[0].at[block.half], passing[0].at[slot])
            scores = _scores(settings, products, rows, facts.at[slot])
            higher = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp(scores - _over_columns(higher, sizes.passing))
            shrink = jnp.exp(top - higher)
            total = total * shrink + weights.sum(axis=1)
            _round(weights, rounded.at[block.own])
            mixed = tuple(
                sums * _over_columns(shrink, width)
                + _mixed(rounded.at[block.own], passing[1].at[slot, :, columns])
                for sums, columns in zip(mixed, chunks, strict=True)
            )
            plgpu.barrier_arrive(consumed.at[slot])
            return mixed, higher, total

        # The sums of wide values are computed by parts, which takes fewer registers.
        width = SWIZZLED if shape.value_dim > 128 else shape.value_dim
        chunks = [pl.ds(i, width) for i in range(0, shape.value_dim, width)]
        nothing = tuple(_zeros(width) for _ in chunks)
        state = nothing, _constant(LOWEST), _constant(0.0)
        mixed, top, total = jax.lax.fori_loop(0, block.steps, step, state)
        # A query that has seen no key gets 0.
        whole = jnp.where(total > 0, total, 1.0)
        share = _over_columns(1.0 / whole, width)
        for sums, columns in zip(mixed, chunks, strict=True):
            store(out.at[row, head, block.rows, columns], sums * share)
        store(normalizer.at[row, head, block.rows], top + jnp.log(whole))


def query_kernel(
    work: Work, inputs: Sequence[Any], results: Sequence[Any], buffers: Buffers
) -> None:
    """Writes `d_query` of a tile of queries, past which the keys that it sees pass.

    `towards` is the gradient of the output, `inner` its product with the output.
    """
    settings, shape, sizes, _, _, of_query, of_key = work
    (query, key, value, towards, normalizer, inner), (d_query,) = inputs, results
    staying, passing, rounded, facts, _, ready, loaded, consumed = buffers
    block, head = _Block.here(work, buffers), jax.lax.axis_index("head")
    row = block.row

    @pl.when(block.own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        own = [(query.at[row, head], staying[0]), (towards.at[row, head], staying[1])]
        block.copy_rows(ready, own)
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
        mean = _of_rows(inner.at[row, head, block.rows])
        plgpu.barrier_wait(ready)

        def step(total: Any, number: Any, _: Any) -> None:
            slot = block.slot(number)
            plgpu.barrier_wait(loaded.at[slot])
            products = _product(staying[0].at[block.half], passing[0].at[slot])
            scores = _scores(settings, products, rows, facts.at[slot])
            weights = jnp.exp(scores - _over_columns(whole, sizes.passing))
            d_weights = _product(staying[1].at[block.half], passing[1].at[slot])
            d_scores = weights * (d_weights - _over_columns(mean, sizes.passing))
            d_products = _unscaled(settings, scores, d_scores)
            _add(total, d_products, rounded.at[block.own], passing[0].at[slot])
            plgpu.barrier_arrive(consumed.at[slot])

        def sums(total: Any) -> None:
            jax.lax.fori_loop(0, block.steps, functools.partial(step, total), None)
            store(d_query.at[row, head, block.rows], total[...])

        pl.run_scoped(sums, _accumulator(shape.head_dim))


def key_kernel(
    work: Work, inputs: Sequence[Any], results: Sequence[Any], buffers: Buffers
) -> None:
    """Writes `d_key` and `d_value` of a tile of keys, past which its queries pass.

    `towards` is the gradient of the output, `inner` its product with the output. Both
    gradients have the sums of each part of a head's group (`key_parts`).
    """
    settings, shape, sizes, _, _, of_query, of_key = work
    (query, key, value, towards, normalizer, inner), (d_key, d_value) = inputs, results
    staying, passing, rounded, facts, by_column, ready, loaded, consumed = buffers
    parts = d_key.shape[1] // shape.kv_heads
    each = shape.group // parts
    block = _Block.here(work, buffers, by_key=True, each=each)
    part = jax.lax.axis_index("head")
    head = jax.lax.div(part, parts)
    row = block.row

    @pl.when(block.own == 2)
    def _() -> None:
        plgpu.set_max_registers(FEW_REGISTERS, action="decrease")
        own = [(key.at[row, head], staying[0]), (value.at[row, head], staying[1])]
        block.copy_rows(ready, own)

        def pairs(tokens: Any, number: Any) -> list[tuple[Any, Any]]:
            reads = part * each + number
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

        def step(totals: dict[str, Any], number: Any, _: Any) -> None:
            slot = block.slot(number)
            plgpu.barrier_wait(loaded.at[slot])
            products = _product(staying[0].at[block.half], passing[0].at[slot])
            scores = _scores(settings, products, rows, facts.at[slot])
            whole = _over_rows(_of_columns(by_column[0].at[slot]))
            weights = jnp.exp(scores - whole)
            buffer = rounded.at[block.own]
            if "value" in totals:
                _add(totals["value"], weights, buffer, passing[1].at[slot])
            if "key" in totals:
                d_weights = _product(staying[1].at[block.half], passing[1].at[slot])
                mean = _over_rows(_of_columns(by_column[1].at[slot]))
                d_scores = weights * (d_weights - mean)
                d_products = _unscaled(settings, scores, d_scores)
                _add(totals["key"], d_products, buffer, passing[0].at[slot])
            plgpu.barrier_arrive(consumed.at[slot])

        def compute(*names: str) -> None:
            def sums(*accumulators: Any) -> None:
                totals = dict(zip(names, accumulators, strict=True))
                body = functools.partial(step, totals)
                jax.lax.fori_loop(0, block.steps, body, None)
                for name, total in totals.items():
                    store(gradients[name].at[row, part, block.rows], total[...])

            pl.run_scoped(sums, *(_accumulator(widths[name]) for name in names))

        gradients = {"key": d_key, "value": d_value}
        widths = {"key": shape.head_dim, "value": shape.value_dim}
        if sizes.halves > 1:
            compute("key", "value")
        else:
            pl.when(block.own == 0)(lambda: compute("value"))
            pl.when(block.own == 1)(lambda: compute("key"))


def _product(rows: Any, columns: Any) -> Array:
    """[OWN_ROWS, passing]: products of rows in shared memory."""

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, rows, columns.transpose((1, 0)))
        return total[...]

    return pl.run_scoped(multiply, _accumulator(columns.shape[0]))


def _round(weights: Array, buffer: Any) -> None:
    """Writes weights, rounded, into shared memory.

    The tensor cores could read them from registers, but the interpreter knows no such
    product.
    """
    buffer[...] = weights.astype(buffer.dtype)
    plgpu.commit_smem()


def _add(total: Any, weights: Array, buffer: Any, rows: Any) -> None:
    """Adds the product of weights, rounded, with rows in shared memory."""
    _round(weights, buffer)
    plgpu.wgmma(total, buffer, rows)
    plgpu.wgmma_wait(0)


def _mixed(weights: Any, rows: Any) -> Array:
    """The product of weights with rows, both in shared memory."""

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, weights, rows)
        return total[...]

    return pl.run_scoped(multiply, _accumulator(rows.shape[1]))


def _accumulator(width: int) -> Any:
    """Registers for sums of products, which begin with zeros."""
    return plgpu.WGMMAAccumulatorRef((OWN_ROWS, width), jnp.float32)


def _scores(
    settings: KernelSettings, products: Array, rows: Sequence[Array], columns: Any
) -> Array:
    """Scores of a tile; `MASKED` where a query does not see a key.

    Args:
        settings: static.
        products: [OWN_ROWS, passing].
        rows: facts of the block's own tokens: index, position, and the end of keys.
        columns: facts of what passes, in shared memory.
    """
    scores = capped(products * settings.scale, settings.softcap)
    by_key = len(rows) == 3
    own = [_over_columns(fact, products.shape[1]) for fact in rows]
    passing = [_over_rows(_of_columns(columns.at[i])) for i in range(3 - by_key)]
    query, key = (passing, own) if by_key else (own, passing)
    seen = (key[0] <= query[0]) & (query[0] < key[2])
    if settings.window is not None:
        seen = seen & (query[1] - key[1] < settings.window)
    return jnp.where(seen, scores, MASKED)


def _unscaled(settings: KernelSettings, scores: Array, d_scores: Array) -> Array:
    """The gradient of the products, from the gradient of the scores."""
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


def _over_columns(values: Array, columns: int) -> Array:
    return jax.lax.broadcast_in_dim(values, (OWN_ROWS, columns), [0])


def _over_rows(values: Array) -> Array:
    return jax.lax.broadcast_in_dim(values, (OWN_ROWS, *values.shape), [1])


def _constant(value: float) -> Array:
    values = jnp.full((OWN_ROWS,), value, jnp.float32)
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA.reduce(1))


def _zeros(width: int) -> Array:
    zeros = jnp.zeros((OWN_ROWS, width), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
