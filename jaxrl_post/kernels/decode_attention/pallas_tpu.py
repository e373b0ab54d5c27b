"""Decode attention as a Mosaic kernel for TPUs: the softmax over some of the keys.

Decoding reads every key and value once and computes little with each, so what counts is
how fast they come out of HBM. A block holds keys of several heads and sequences, two
MiB where there are so many: reading it takes longer than a step of the grid costs. The
blocks in which some query sees a key are listed when the program runs, and the others
are not read: the grid is as long as the list.

A query is a sublane and a key a lane. The queries of all heads that read one key/value
head, and for shared keys the queries of all sequences of a group, are the rows of a
product. An array whose last dimension is no multiple of 128 would be padded to one in
HBM; such keys and values are read with the keys last, as XLA lays them out by itself.
The softmax is computed online. Quantised entries become numbers in VMEM; HBM and its
bandwidth see a byte each.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.attention.reference import MASKED, Scoring
from jaxrl_post.kernels.decode_attention.quantized import (
    Entries,
    OwnKeys,
    QuantizedEntries,
)
from jaxrl_post.kernels.decode_attention.xla import Part
from jaxrl_post.kernels.mosaic import VMEM_BYTES, listed, product
from jaxrl_post.types import Array

__all__ = ["Sizes", "part_of_keys"]

# Most bytes of the keys of a block. Two such blocks of keys, and two of values, are in
# VMEM at a time.
BLOCK_BYTES = 2 * 2**20
# Most pairs of a sequence and a key/value head in a block, which a step computes one
# after the other.
PAIRS = 8
# Most queries of a block, over the heads of a group.
QUERIES = 512
# Keys of a block: at most, and a multiple of, unless it has all of them.
KEYS, LANES = 1024, 128
# Where the maximum begins: far below a score, and far above a masked one.
LOWEST = MASKED / 2
NO_TOKEN = jnp.iinfo(jnp.int32).max


class Sizes(NamedTuple):
    """Sizes of a block.

    Attributes:
        batch: sequences.
        heads: key/value heads.
        queries: queries, over the heads that read one key/value head.
        keys: keys.
    """

    batch: int
    heads: int
    queries: int
    keys: int

    @classmethod
    def of(
        cls, batch: int, heads: int, queries: int, keys: int, key_bytes: int
    ) -> "Sizes":
        """The block for arrays of these sizes, and `keys` after padding.

        `key_bytes` is the size of one head's key, or value, in VMEM.

        >>> Sizes.of(256, 8, 16, 2048, 256)
        Sizes(batch=1, heads=8, queries=16, keys=1024)
        >>> Sizes.of(256, 1, 16, 2048, 256)
        Sizes(batch=8, heads=1, queries=16, keys=1024)
        """
        own_heads = _divisor(heads, PAIRS)
        most = max(LANES, min(KEYS, BLOCK_BYTES // (own_heads * key_bytes)))
        if keys <= most:
            # The sampler's views are multiples of 16 and need no padding, which copies.
            own_keys = _padded_to(keys, 16)
        else:
            own_keys = LANES * _divisor(_padded_to(keys, LANES) // LANES, most // LANES)
        own_queries = min(queries, QUERIES)
        fitting = min(
            PAIRS // own_heads,
            QUERIES // own_queries,
            BLOCK_BYTES // (own_heads * own_keys * key_bytes),
        )
        return cls(_divisor(batch, max(1, fitting)), own_heads, own_queries, own_keys)


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
        interpret: False to compile the kernel, or how to interpret it.
        sizes: None: as `Sizes.of` says. They must divide the padded arrays.
    """
    key, value, kv_positions = own
    batch, queries, heads, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    rows = _padded_to(group * queries, 16)
    rows = rows if rows <= QUERIES else _padded_to(rows, QUERIES)
    if sizes is None:
        width = max(dim, 0 if value is None else value.shape[3])
        key_bytes = width * jax.tree.leaves(key)[0].dtype.itemsize
        sizes = Sizes.of(batch, kv_heads, rows, keys, key_bytes)
    if keys % sizes.keys:
        keys = _padded_to(keys, sizes.keys)
        key, value, kv_positions = _with_keys(key, value, kv_positions, keys)

    grouped = query.reshape(batch, queries, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    empty = rows - group * queries
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, empty), (0, 0)))
    at = jnp.tile(query_positions, (1, group))
    found, count = _needed(sizes, at, kv_positions, scoring.window, rows)
    at = jnp.pad(at, ((0, 0), (0, empty)), constant_values=-1)

    call = _Call((batch, kv_heads, rows, keys), sizes, found, count)
    value_dim = (key if value is None else value).shape[3]
    mixed, sums = call(
        functools.partial(
            *(_kernel, sizes, scoring, keys // sizes.keys),
            key_last=(_is_key_last(key), _is_key_last(key if value is None else value)),
            keys_are_values=value is None,
        ),
        [
            ("query", grouped),
            ("row", at[:, :, None]),
            ("key position", kv_positions[:, None]),
            *_operands(key),
            *(() if value is None else _operands(value)),
        ],
        [
            (
                "query",
                jax.ShapeDtypeStruct((*grouped.shape[:3], value_dim), jnp.float32),
            ),
            ("query", jax.ShapeDtypeStruct((*grouped.shape[:3], LANES), jnp.float32)),
        ],
        interpret,
    )

    def by_head(array: Array) -> Array:
        own = array[:, :, : group * queries]
        own = own.reshape(batch, kv_heads, group, queries, *array.shape[3:])
        moved = jnp.moveaxis(own, 3, 1)
        return moved.reshape(batch, queries, heads, *array.shape[3:])

    return Part(by_head(mixed), by_head(sums[..., 0]), by_head(sums[..., -1]))


def _needed(
    sizes: Sizes, at: Array, kv_positions: Array, window: int | None, rows: int
) -> tuple[Array, Array]:
    """Lists the blocks with a visible key, and for each sum at least one."""
    batch, keys = kv_positions.shape

    def queries(array: Array, empty: int) -> Array:
        widths = (0, 0), (0, rows - array.shape[1])
        padded = jnp.pad(array, widths, constant_values=empty)
        return padded.reshape(batch, -1, 1, sizes.queries)

    by_block = kv_positions.reshape(batch, 1, -1, sizes.keys)
    active = by_block.min(axis=-1) <= queries(at, -1).max(axis=-1)
    if window is not None:
        last = jnp.where(by_block == NO_TOKEN, -1, by_block).max(axis=-1)
        # An empty place of a group (-1) sees nothing.
        seeing = jnp.where(at < 0, NO_TOKEN, at)
        active &= last > queries(seeing, NO_TOKEN).min(axis=-1) - window
    active = active.reshape(-1, sizes.batch, *active.shape[1:]).any(axis=1)
    assert active.shape[2] == keys // sizes.keys
    # Every sum is written, also for queries that see nothing.
    nothing = ~active.any(axis=-1)
    active = active.at[:, :, 0].set(active[:, :, 0] | nothing)
    return listed(active, active.size)


class _Call(NamedTuple):
    """A kernel over the listed blocks.

    Attributes:
        whole: sizes of the arrays: batch, kv_heads, queries and keys.
        sizes: of a block.
        found: int32 [blocks], blocks of sequences x queries x keys.
        count: int32 [], how many there are.
    """

    whole: tuple[int, int, int, int]
    sizes: Sizes
    found: Array
    count: Array

    def __call__(
        self, kernel: Any, operands: list[Any], results: list[Any], interpret: Any
    ) -> Sequence[Array]:
        sizes = self.sizes
        blocks = [one // own for one, own in zip(self.whole, sizes, strict=True)]

        def spec(kind: str, array: Any) -> pl.BlockSpec:
            def at(head: Any, task: Any, found: Any, _: Any) -> Any:
                key = found[task] % blocks[3]
                row = found[task] // blocks[3]
                query, row = row % blocks[2], row // blocks[2]
                return {
                    "query": (row, head, query, 0),
                    "row": (row, query, 0),
                    "key": (row, head, key, 0),
                    "key last": (row, head, 0, key),
                    "scale": (row, head, 0, key),
                    "key position": (row, 0, key),
                }[kind]

            block = {
                "query": (sizes.batch, sizes.heads, sizes.queries, array.shape[-1]),
                "row": (sizes.batch, sizes.queries, 1),
                "key": (sizes.batch, sizes.heads, sizes.keys, array.shape[-1]),
                "key last": (sizes.batch, sizes.heads, array.shape[2], sizes.keys),
                "scale": (sizes.batch, sizes.heads, 1, sizes.keys),
                "key position": (sizes.batch, 1, sizes.keys),
            }[kind]
            return pl.BlockSpec(block, at)

        tasks = self.count
        if not isinstance(interpret, bool):
            # The interpreter that looks for races knows no grid that is decided at run
            # time. The kernel skips what lies behind the last block.
            tasks = self.found.shape[0]
        scratch = (sizes.batch, sizes.heads, sizes.queries)
        widths = LANES, LANES, results[0][1].shape[-1]
        return pl.pallas_call(
            kernel,
            out_shape=[result for _, result in results],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(blocks[1], tasks),
                in_specs=[spec(*operand) for operand in operands],
                out_specs=[spec(*result) for result in results],
                scratch_shapes=[
                    pltpu.VMEM((*scratch, width), jnp.float32) for width in widths
                ],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=VMEM_BYTES,
            ),
            interpret=interpret,
            name="decode_attention",
        )(self.found, self.count[None], *(array for _, array in operands))


def _kernel(
    sizes: Sizes,
    scoring: Scoring,
    key_blocks: int,
    found: Any,
    count: Any,
    query: Any,
    query_position: Any,
    key_position: Any,
    *refs: Any,
    key_last: tuple[bool, bool],
    keys_are_values: bool,
) -> None:
    *entries, mixed_out, sums_out, top, total, mixed = refs
    window, scale, softcap = scoring[:3]
    assert scale is not None
    share = len(entries) if keys_are_values else len(entries) // 2
    keys, values = entries[:share], entries[-share:]
    number, end = pl.program_id(1), count[0] - 1
    block = found[number] // key_blocks
    before = found[jnp.maximum(number - 1, 0)] // key_blocks
    after = found[jnp.minimum(number + 1, end)] // key_blocks
    real = number <= end

    @pl.when(real & ((number == 0) | (before != block)))
    def _() -> None:
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        mixed[...] = jnp.zeros_like(mixed)

    def step(row: int, head: int) -> None:
        back = query_position[row] - key_position[row]
        seen = back >= 0
        if window is not None:
            seen &= back < window
        queries = query[row, head]
        codes, scales = _block(keys, row, head, queries.dtype)
        scores = product(queries, codes, (1, 1 - key_last[0]))
        scores = scores * (scale if scales is None else scale * scales)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores * (1.0 / softcap))
        scores = jnp.where(seen, scores, MASKED)
        old = top[row, head][:, :1]
        higher = jnp.maximum(old, scores.max(axis=1, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(old - higher)
        codes, scales = _block(values, row, head, queries.dtype)
        mixing = weights if scales is None else weights * scales
        mixed[row, head] = mixed[row, head] * shrink + product(
            *(mixing.astype(codes.dtype), codes, (1, int(key_last[1])))
        )
        sums = total[row, head][:, :1] * shrink + weights.sum(axis=1, keepdims=True)
        total[row, head] = jnp.broadcast_to(sums, total.shape[2:])
        top[row, head] = jnp.broadcast_to(higher, top.shape[2:])

    @pl.when(real)
    def _() -> None:
        for row in range(sizes.batch):
            for head in range(sizes.heads):
                step(row, head)

    @pl.when(real & ((number == end) | (after != block)))
    def _() -> None:
        mixed_out[...] = mixed[...]
        lane = jax.lax.broadcasted_iota(jnp.int32, sums_out.shape, 3)
        # A query that sees no key gets 0, and not 0 / 0.
        sums = jnp.where(total[...] == 0.0, 1.0, total[...])
        sums_out[...] = jnp.where(lane < LANES // 2, top[...], sums)


def _is_key_last(entries: Entries) -> bool:
    return entries.shape[3] % LANES != 0


def _operands(entries: Entries) -> list[tuple[str, Array]]:
    codes, scales = entries, []
    if isinstance(entries, QuantizedEntries):
        codes, scales = entries.codes, [("scale", entries.scales.swapaxes(2, 3))]
    assert isinstance(codes, jax.Array)
    if _is_key_last(entries):
        return [("key last", codes.swapaxes(2, 3)), *scales]
    return [("key", codes), *scales]


def _block(refs: list[Any], row: int, head: int, dtype: Any) -> tuple[Any, Any]:
    """Operand of a product, and a factor [1, keys] for it."""
    codes, *scales = refs
    if not scales:
        return codes[row, head], None
    return codes[row, head].astype(jnp.float32).astype(dtype), scales[0][row, head]


def _with_keys(
    key: Entries, value: Entries | None, positions: Array, count: int
) -> tuple[Entries, Entries | None, Array]:
    more = count - positions.shape[1]
    widths = ((0, 0), (0, 0), (0, more), (0, 0))
    key, value = jax.tree.map(lambda leaf: jnp.pad(leaf, widths), (key, value))
    none = ((0, 0), (0, more))
    return key, value, jnp.pad(positions, none, constant_values=NO_TOKEN)


def _padded_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _divisor(size: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next(n for n in range(min(size, most), 0, -1) if size % n == 0)
