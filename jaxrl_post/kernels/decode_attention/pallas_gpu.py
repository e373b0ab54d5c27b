"""Decode attention as a Mosaic kernel for Hopper GPUs: the softmax over some keys.

Decoding reads every key and value once and computes little with each, so what counts is
how fast they come out of the GPU's memory. A block of threads is one warpgroup. It goes
through the keys that some of its queries see, 64 at a time, and copies of the next ones
always run. Blocks of threads share a multiprocessor where their shared memory allows
two, so that one computes while the other waits. The keys of a sequence are split
between several blocks where there would be too few of them, and their parts are merged
afterwards.

The tensor cores multiply 64 rows at least. They are keys here, and in the second
product numbers of a value: a few queries then take a few columns, 16 at least, and the
sums of the widest value fit into the registers of one warpgroup. The queries of all
heads that read one key/value head, and for shared keys the queries of all sequences of
a group, are columns of one product. Quantised entries become numbers in shared memory.

References:
    Dao, Flash-Decoding for long-context inference, 2023,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.attention.reference import MASKED, Scoring
from jaxrl_post.kernels.decode_attention.gpu_sizes import KEYS, Sizes, Widths
from jaxrl_post.kernels.decode_attention.quantized import (
    Entries,
    OwnKeys,
    QuantizedEntries,
)
from jaxrl_post.kernels.decode_attention.xla import Part
from jaxrl_post.kernels.mosaic_gpu import capped, store
from jaxrl_post.types import Array

__all__ = ["part_of_keys"]

# Where the maximum begins: far below a score, and far above a masked one.
LOWEST = MASKED / 2
NO_TOKEN = jnp.iinfo(jnp.int32).max


def part_of_keys(
    query: Array,
    own: OwnKeys,
    query_positions: Array,
    scoring: Scoring,
    *,
    interpret: Any = False,
    sizes: Sizes | None = None,
) -> Part:
    """Computes the softmax over some of the keys, as `xla.part_of_keys`.

    Args:
        interpret: False to compile the kernel, True or how to interpret it.
        sizes: None: as `Sizes.of` says.
    """
    key, value, kv_positions = own
    batch, queries, heads, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    # The sampler's views have a multiple of 16 keys; only the smallest ones are padded,
    # which copies them.
    keys = max(KEYS, math.ceil(keys / 16) * 16)
    key, value, kv_positions = _with_keys(key, value, kv_positions, keys)
    item = jax.tree.leaves(key)[0].dtype.itemsize
    widths = Widths(dim, 0 if value is None else value.shape[3], item)
    sizes = sizes or Sizes.of(batch * kv_heads, group * queries, keys, widths)

    columns = math.ceil(group * queries / sizes.queries) * sizes.queries
    empty = columns - group * queries
    grouped = query.reshape(batch, queries, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, empty), (0, 0)))
    at = jnp.tile(query_positions, (1, group))
    at = jnp.pad(at, ((0, 0), (0, empty)), constant_values=-1)

    first, steps = _needed(sizes, at, kv_positions, scoring.window)
    settings = _Settings(widths, sizes, scoring, interpret)
    parts = math.ceil(math.ceil(keys / KEYS) / sizes.steps)
    mixed, sums = settings.run(
        parts,
        [first, steps, at, kv_positions, grouped],
        [*_arrays(key), *(() if value is None else _arrays(value))],
    )

    # A part that has no step was not written.
    begins = jnp.arange(parts, dtype=jnp.int32)[:, None, None] * sizes.steps
    written = jnp.repeat(begins < steps, sizes.queries, axis=-1)[:, :, None]
    top = jnp.where(written, sums[..., 0, :], LOWEST)
    highest = top.max(axis=0)
    factors = jnp.where(written, jnp.exp(top - highest), 0.0)
    total = (jnp.where(written, sums[..., 1, :], 0.0) * factors).sum(axis=0)
    mixed = jnp.where(written[..., None, :], mixed, 0.0) * factors[..., None, :]
    mixed = mixed.sum(axis=0).swapaxes(2, 3)
    # A query that sees no key gets 0, and not 0 / 0.
    total = jnp.where(total == 0.0, 1.0, total)

    def by_head(array: Array) -> Array:
        own = array[:, :, : group * queries]
        own = own.reshape(batch, kv_heads, group, queries, *array.shape[3:])
        moved = jnp.moveaxis(own, 3, 1)
        return moved.reshape(batch, queries, heads, *array.shape[3:])

    return Part(by_head(mixed), by_head(highest), by_head(total))


def _needed(
    sizes: Sizes, at: Array, kv_positions: Array, window: int | None
) -> tuple[Array, Array]:
    """First step with a visible key, and how many steps there are up to the last one.

    Both are int32 [batch, blocks of queries].
    """
    batch, keys = kv_positions.shape
    more = ((0, 0), (0, -keys % KEYS))
    padded = jnp.pad(kv_positions, more, constant_values=NO_TOKEN)
    by_step = padded.reshape(batch, 1, -1, KEYS)
    by_block = at.reshape(batch, -1, 1, sizes.queries)
    active = by_step.min(axis=-1) <= by_block.max(axis=-1)
    if window is not None:
        newest = jnp.where(by_step == NO_TOKEN, -1, by_step).max(axis=-1)
        oldest = jnp.where(by_block < 0, NO_TOKEN, by_block).min(axis=-1)
        active &= newest > oldest - window
    index = jnp.arange(active.shape[-1], dtype=jnp.int32)
    first = jnp.where(active, index, index.size).min(axis=-1)
    end = jnp.where(active, index + 1, 0).max(axis=-1)
    return first, jnp.maximum(end - first, 0)


class _Settings(NamedTuple):
    """Static facts of one call.

    Attributes:
        widths: of a head.
        sizes: of a block of threads.
        scoring: window, scale and softcap; sinks are no part of it.
        interpret: False to compile the kernel, True or how to interpret it.
    """

    widths: Widths
    sizes: Sizes
    scoring: Scoring
    interpret: Any

    @property
    def chunks(self) -> list[int]:
        """Starts of parts of 64 numbers of a value; the last ones overlap if needed."""
        width = self.widths.mixed_dim
        return [*range(0, width - KEYS, KEYS), width - KEYS]

    def run(
        self, parts: int, facts: list[Array], arrays: list[Array]
    ) -> Sequence[Array]:
        """Attended values [parts, batch, heads, width, queries], and their sums.

        Args:
            parts: blocks of threads that share the keys of a head.
            facts: first steps and numbers of steps, positions of queries and of keys,
                and queries [batch, heads, queries, dim].
            arrays: keys, then values: [batch, heads, keys, width], and with codes their
                scales [batch, heads, keys].

        Returns:
            float32, sums of exp(score - top) v; and [parts, batch, heads, 2, queries]:
            top, and the sum of exp(score - top). Parts without a step are not written.
        """
        widths, sizes, query = self.widths, self.sizes, facts[-1]
        batch, heads, columns, _ = query.shape
        leaves = (batch, heads)
        dtype = arrays[0].dtype

        def staged(*shape: int, dtype: Any = jnp.bfloat16, like: int = 0) -> Any:
            return _staged(shape, dtype, like or shape[-1])

        interpret = self.interpret
        if interpret is True:
            interpret = plgpu.InterpretGPUParams()
        both = [width for width in widths[:2] if width]
        scales = len(both) * widths.coded
        scratch = _Scratch(
            query=staged(sizes.queries, widths.dim),
            stored=[staged(sizes.slots, KEYS, width, dtype=dtype) for width in both],
            decoded=[staged(KEYS, width) for width in both * widths.coded],
            weights=staged(sizes.queries, KEYS, like=widths.mixed_dim),
            positions=plgpu.SMEM((sizes.slots, KEYS), jnp.int32),
            scales=[plgpu.SMEM((sizes.slots, KEYS), jnp.float32)] * scales,
            ready=plgpu.Barrier(num_arrivals=1),
            keys_loaded=plgpu.Barrier(
                num_arrivals=2 + scales, num_barriers=sizes.slots
            ),
            values_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=sizes.slots),
        )
        return plgpu.kernel(
            functools.partial(_kernel, self),
            out_type=[
                jax.ShapeDtypeStruct(
                    (parts, *leaves, widths.mixed_dim, columns), jnp.float32
                ),
                jax.ShapeDtypeStruct((parts, *leaves, 2, columns), jnp.float32),
            ],
            scratch_types=list(scratch),
            # Blocks that read the same keys start one after another.
            grid=(batch * heads, parts, columns // sizes.queries),
            grid_names=("head", "part", "block"),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, reduction_scratch_bytes=sizes.exchanged_bytes
            ),
            interpret=interpret,
            kernel_name="decode_attention",
        )(*facts, *arrays)


class _Scratch(NamedTuple):
    """Shared memory of a block of threads.

    Attributes:
        query: its queries.
        stored: keys and values as they come, by slot.
        decoded: keys and values as numbers; [] where they come so.
        weights: of a step's keys.
        positions: of keys, by slot.
        scales: of keys and values, by slot.
        ready: barrier: the queries have arrived.
        keys_loaded: barriers: a slot's keys have arrived, and what belongs to them.
        values_loaded: barriers: a slot's values have arrived.
    """

    query: Any
    stored: list[Any]
    decoded: list[Any]
    weights: Any
    positions: Any
    scales: list[Any]
    ready: Any
    keys_loaded: Any
    values_loaded: Any


def _staged(shape: tuple[int, ...], dtype: Any, like: int) -> Any:
    """Shared memory as the tensor cores and the copies read it.

    Args:
        shape: of the buffer.
        dtype: of its numbers.
        like: a width that rows of the swizzle must divide, as they divide the width of
            `shape`: both operands of a product have the same swizzle.
    """
    item = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(128, like * item)
    transforms = (
        plgpu.TilingTransform((8, swizzle // item)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(swizzle),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class _Copies(NamedTuple):
    """Copies of keys and values into shared memory.

    Attributes:
        keys: pairs of an array and its buffers, which arrive together.
        values: likewise; [] where the keys are the values too.
        scratch: of the block of threads.
        begin: of a step: its first key in the arrays.
        steps: how many there are.
        slots: of the buffers.
    """

    keys: list[tuple[Any, Any]]
    values: list[tuple[Any, Any]]
    scratch: _Scratch
    begin: Callable[[Any], Any]
    steps: Any
    slots: int

    def start(self, step: Any, pairs: list[tuple[Any, Any]], loaded: Any) -> None:
        """Starts the copies of a step, if there is such a step."""

        @pl.when((step >= 0) & (step < self.steps))
        def _() -> None:
            slot = jax.lax.rem(step, self.slots)
            tokens = pl.ds(self.begin(step), KEYS)
            for array, buffer in pairs:
                plgpu.copy_gmem_to_smem(
                    array.at[tokens], buffer.at[slot], loaded.at[slot]
                )

    def start_keys(self, step: Any) -> None:
        self.start(step, self.keys, self.scratch.keys_loaded)

    def start_values(self, step: Any) -> None:
        if self.values:
            self.start(step, self.values, self.scratch.values_loaded)


def _kernel(settings: _Settings, *refs: Any) -> None:
    widths, sizes = settings.widths, settings.sizes
    first, steps, at, key_at, query, *rest = refs
    number = (1 + (widths.value_dim > 0)) * (1 + widths.coded)
    arrays, (mixed_out, sums_out, *buffers) = rest[:number], rest[number:]
    scratch = _Scratch(*buffers)
    head, part, block = (jax.lax.axis_index(name) for name in ("head", "part", "block"))
    heads, keys = query.shape[1], key_at.shape[1]
    row, head = jax.lax.div(head, heads), jax.lax.rem(head, heads)
    begin = first[row, block] + part * sizes.steps
    steps = jnp.clip(steps[row, block] - part * sizes.steps, 0, sizes.steps)
    columns = pl.ds(block * sizes.queries, sizes.queries)

    def first_key(step: Any) -> Any:
        # The last step begins earlier, so that it ends with the keys.
        return jnp.minimum((begin + step) * KEYS, keys - KEYS)

    per = 1 + widths.coded
    stored = [array.at[row, head] for array in arrays[::per]]
    scales = [array.at[row, head] for array in arrays[1::2]] if widths.coded else []
    pairs = [
        (stored[0], scratch.stored[0]),
        (key_at.at[row], scratch.positions),
        *zip(scales, scratch.scales, strict=True),
    ]
    values = list(zip(stored[1:], scratch.stored[1:], strict=True))
    copies = _Copies(pairs, values, scratch, first_key, steps, sizes.slots)

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(
            query.at[row, head, columns], scratch.query, scratch.ready
        )

        @pl.loop(0, sizes.slots)
        def _(step: Any) -> None:
            copies.start_keys(step)
            copies.start_values(step)

        own_at = _of_columns(at.at[row, columns])
        plgpu.barrier_wait(scratch.ready)

        def body(step: Any, state: tuple) -> tuple:
            duplicates = (
                (begin + step) * KEYS - first_key(step) if keys % KEYS else None
            )
            return _step(settings, copies, own_at, duplicates, step, state)

        state = (
            tuple(_zeros(sizes.queries) for _ in settings.chunks),
            _constant(LOWEST, sizes.queries),
            _zeros(sizes.queries),
        )
        mixed, top, total = jax.lax.fori_loop(0, steps, body, state)
        at_part = mixed_out.at[part, row, head], sums_out.at[part, row, head]
        for start, values in zip(settings.chunks, mixed, strict=True):
            store(at_part[0].at[pl.ds(start, KEYS), columns], values)
        store(at_part[1].at[0, columns], top)
        store(at_part[1].at[1, columns], total.sum(axis=0))


def _step(
    settings: _Settings,
    copies: _Copies,
    own_at: Array,
    duplicates: Any,
    step: Any,
    state: tuple,
) -> tuple:
    """One step of the softmax.

    Args:
        settings: static.
        copies: of the block of threads.
        own_at: positions of the queries.
        duplicates: keys that an earlier step has seen, the first ones; None for none.
        step: number of the step.
        state: sums of values, 64 numbers of them x queries each; the largest scores;
            and the sums of weights, of every 64th key.
    """
    mixed, top, total = state
    scratch, slots, coded = copies.scratch, copies.slots, settings.widths.coded
    window, scale, softcap = settings.scoring[:3]
    assert scale is not None
    queries = settings.sizes.queries
    slot = jax.lax.rem(step, slots)
    plgpu.barrier_wait(scratch.keys_loaded.at[slot])
    keys = scratch.stored[0].at[slot]
    if coded:
        keys = _decoded(keys, scratch.decoded[0])
        plgpu.commit_smem()
    scores = _product(keys, scratch.query.transpose((1, 0))) * scale
    scales = [_over_columns(_of_rows(s.at[slot]), queries) for s in scratch.scales]
    if coded:
        scores = scores * scales[0]
    scores = capped(scores, softcap)
    key_at = _over_columns(_of_rows(scratch.positions.at[slot]), queries)
    back = _over_rows(own_at) - key_at
    seen = back >= 0
    if window is not None:
        seen = seen & (back < window)
    if duplicates is not None:
        index = plgpu.broadcasted_iota(
            jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA
        )
        seen = seen & (index >= duplicates)
    scores = jnp.where(seen, scores, MASKED)
    higher = jnp.maximum(top, scores.max(axis=0))
    weights = jnp.exp(scores - _over_rows(higher))
    shrink = _over_rows(jnp.exp(top - higher))
    total = total * shrink + weights
    mixing = weights * scales[-1] if coded else weights

    if copies.values:
        plgpu.barrier_wait(scratch.values_loaded.at[slot])
    values = scratch.stored[-1].at[slot]
    if coded:
        values = scratch.decoded[-1]
        if copies.values:
            _decoded(scratch.stored[-1].at[slot], values)
    store(scratch.weights.transpose((1, 0)), mixing)
    # All warps are past it: the keys of this step have been used, and the values of the
    # last one.
    plgpu.commit_smem()
    if copies.values or coded:
        copies.start_keys(step + slots)
    else:
        copies.start_keys(jnp.where(step > 0, step - 1 + slots, -1))
    copies.start_values(jnp.where(step > 0, step - 1 + slots, -1))
    mixed = tuple(
        sums * shrink
        + _product(
            values.at[:, pl.ds(start, KEYS)].transpose((1, 0)),
            scratch.weights.transpose((1, 0)),
        )
        for start, sums in zip(settings.chunks, mixed, strict=True)
    )
    return mixed, higher, total


def _product(rows: Any, columns: Any) -> Array:
    """[64, queries]: a product of operands in shared memory."""

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, rows, columns)
        return total[...]

    shape = rows.shape[0], columns.shape[1]
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _decoded(codes: Any, buffer: Any) -> Any:
    """Writes codes as numbers, which every code of a byte is exactly."""
    loaded = plgpu.load(codes, layout=plgpu.Layout.WGMMA, optimized=False)
    if codes.dtype != jnp.int8:
        loaded = loaded.astype(jnp.float32)
    buffer[...] = loaded.astype(buffer.dtype)
    return buffer


def _of_rows(values: Any) -> Array:
    """Values of the keys of a step."""
    return plgpu.load(values, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _of_columns(values: Any) -> Array:
    """Values of the queries."""
    return plgpu.load(values, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def _over_columns(values: Array, queries: int) -> Array:
    return jax.lax.broadcast_in_dim(values, (KEYS, queries), [0])


def _over_rows(values: Array) -> Array:
    return jax.lax.broadcast_in_dim(values, (KEYS, *values.shape), [1])


def _constant(value: float, queries: int) -> Array:
    values = jnp.full((queries,), value, jnp.float32)
    return plgpu.layout_cast(values, plgpu.Layout.WGMMA.reduce(0))


def _zeros(queries: int) -> Array:
    zeros = jnp.zeros((KEYS, queries), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def _arrays(entries: Entries) -> list[Array]:
    if isinstance(entries, QuantizedEntries):
        return [entries.codes, entries.scales[..., 0]]
    assert isinstance(entries, jax.Array)
    return [entries]


def _with_keys(
    key: Entries, value: Entries | None, positions: Array, count: int
) -> tuple[Entries, Entries | None, Array]:
    more = count - positions.shape[1]
    if not more:
        return key, value, positions
    widths = ((0, 0), (0, 0), (0, more), (0, 0))
    key, value = jax.tree.map(lambda leaf: jnp.pad(leaf, widths), (key, value))
    none = ((0, 0), (0, more))
    return key, value, jnp.pad(positions, none, constant_values=NO_TOKEN)
