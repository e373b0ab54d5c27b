"""Attention of packed rows by tiles of queries x keys; masked tiles are skipped.

A forest of sequences leaves most of the scores below the diagonal masked: a completion
sees its prompt and itself, not the group's other completions. The tiles that hold a
visible score are listed when the program runs, so that one program serves every batch
and the work follows the batch. The softmax is computed online, tile by tile, and the
backward pass computes the scores again, so memory grows with the length and not with
its square.

References:
    Dao et al., FlashAttention, arXiv:2205.14135.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl_post.kernels.attention.packed import Facts, Operands, Towards, padded_facts
from jaxrl_post.kernels.attention.reference import MASKED
from jaxrl_post.types import Array

__all__ = ["TileSettings", "XlaTiles"]

# Bytes of the scores that are computed at a time: few, so that they stay in a
# processor's cache, or many, so that an accelerator has enough to do.
SCORE_BYTES = 2**20
ACCELERATOR_SCORE_BYTES = 2**26


class TileSettings(NamedTuple):
    """Static facts of one call.

    Attributes:
        tile: queries, and keys, of a tile.
        scale: of the scores.
        window: tokens that a query looks back, itself included; None for all.
        softcap: c in c tanh(scores / c), after the scale; None for no cap.
    """

    tile: int
    scale: float
    window: int | None
    softcap: float | None


class _Tasks(NamedTuple):
    """The tiles with a visible score, as blocks of queries and of keys.

    The entries of one chunk have distinct blocks of queries and distinct blocks of
    keys, so their sums can be written at once. Unused entries are out of range.
    """

    queries: Array
    keys: Array
    num_chunks: Array


@dataclasses.dataclass(frozen=True)
class XlaTiles:
    """The `Tiles` of the "xla" implementation."""

    settings: TileSettings

    def forward(
        self, operands: Operands, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array]:
        """As `Tiles` has it."""
        run = functools.partial(_attended, self.settings, dtype, aligned)
        return self._on_platform(run, operands)

    def backward(
        self, operands: Operands, towards: Towards, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array, Array]:
        """As `Tiles` has it."""
        run = functools.partial(_gradients, self.settings, dtype, aligned)
        return self._on_platform(run, operands, towards)

    def _on_platform(self, function: Callable, operands: Operands, *others: Any) -> Any:
        """Calls `function` with the number of tiles at a time that suits it."""
        one = operands.query.shape[2] * self.settings.tile**2 * 4

        def run(size: int) -> Callable:
            return functools.partial(function, max(1, size // one))

        # Decided when the program is lowered, which may be for another platform.
        return jax.lax.platform_dependent(
            *(operands, *others),
            cpu=run(SCORE_BYTES),
            default=run(ACCELERATOR_SCORE_BYTES),
        )


def _attended(
    settings: TileSettings,
    dtype: DTypeLike,
    aligned: bool,
    chunk: int,
    operands: Operands,
) -> tuple[Array, Array]:
    query, key, value, *facts = operands
    batch, length, kv_heads = *query.shape[:2], key.shape[1]
    queries = _query_blocks(query, kv_heads, settings.tile)
    keys, values = (_key_blocks(array, settings.tile) for array in (key, value))
    between, tasks = _cut(settings, aligned, chunk, *facts)
    blocks, _, rows, _ = queries.shape
    top = jnp.full((blocks, kv_heads, rows), MASKED, jnp.float32)
    total = jnp.zeros_like(top)
    mixed = jnp.zeros((blocks, kv_heads, rows, value.shape[-1]), jnp.float32)

    def step(number: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        q, k = _chunk(tasks, number, chunk)
        scores, seen = _scores(settings, queries, keys, between, q, k)
        top, total, mixed = (_take(array, q) for array in state)
        higher = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        shrink = jnp.exp(top - higher)
        total = total * shrink + weights.sum(axis=-1)
        chosen = _take(values, k)
        mixed = mixed * shrink[..., None] + _product(
            "cnqk,cnkd->cnqd", weights.astype(chosen.dtype), chosen
        )
        found = higher, total, mixed
        return tuple(_put(a, q, new) for a, new in zip(state, found, strict=True))

    top, total, mixed = jax.lax.fori_loop(
        0, tasks.num_chunks, step, (top, total, mixed)
    )
    total = jnp.where(total > 0, total, 1.0)
    mixed = (mixed / total[..., None]).astype(dtype)
    normalizer = (top + jnp.log(total))[..., None]
    whole = functools.partial(
        _from_query_blocks, batch=batch, length=length, tile=settings.tile
    )
    return whole(mixed), whole(normalizer)[..., 0]


def _gradients(
    settings: TileSettings,
    dtype: DTypeLike,
    aligned: bool,
    chunk: int,
    operands: Operands,
    towards: Towards,
) -> tuple[Array, Array, Array]:
    query, key, value, *facts = operands
    cotangent, normalizer, inner = towards
    batch, length, kv_heads = *query.shape[:2], key.shape[1]
    split = functools.partial(_query_blocks, kv_heads=kv_heads, tile=settings.tile)
    queries, d_outs = split(query), split(cotangent)
    normalizer, inner = (split(a[..., None])[..., 0] for a in (normalizer, inner))
    keys, values = (_key_blocks(array, settings.tile) for array in (key, value))
    between, tasks = _cut(settings, aligned, chunk, *facts)

    def step(number: Array, grads: tuple[Array, ...]) -> tuple[Array, ...]:
        q, k = _chunk(tasks, number, chunk)
        scores, seen = _scores(settings, queries, keys, between, q, k)
        weights = jnp.exp(scores - _take(normalizer, q)[..., None])
        weights = jnp.where(seen, weights, 0.0)
        d_out, chosen = _take(d_outs, q), _take(values, k)
        d_weights = _product("cnqd,cnkd->cnqk", d_out, chosen)
        d_scores = weights * (d_weights - _take(inner, q)[..., None])
        if settings.softcap is not None:
            slope = 1.0 - jnp.square(scores / settings.softcap)
            # Hidden scores are far outside of the cap.
            d_scores = jnp.where(seen, d_scores * slope, 0.0)
        d_scores = (d_scores * settings.scale).astype(key.dtype)
        found = (
            (q, _product("cnqk,cnkd->cnqd", d_scores, _take(keys, k))),
            (k, _product("cnqk,cnqd->cnkd", d_scores, _take(queries, q))),
            (k, _product("cnqk,cnqd->cnkd", weights.astype(d_out.dtype), d_out)),
        )
        return tuple(
            _put(total, blocks, _take(total, blocks) + new)
            for total, (blocks, new) in zip(grads, found, strict=True)
        )

    zeros = tuple(jnp.zeros(a.shape, jnp.float32) for a in (queries, keys, values))
    d_query, d_key, d_value = jax.lax.fori_loop(0, tasks.num_chunks, step, zeros)
    return (
        _from_query_blocks(d_query, batch, length, settings.tile).astype(dtype),
        _from_key_blocks(d_key, batch, length).astype(dtype),
        _from_key_blocks(d_value, batch, length).astype(dtype),
    )


def _cut(
    settings: TileSettings,
    aligned: bool,
    chunk: int,
    of_query: Facts,
    of_key: Facts,
) -> tuple[tuple[Facts, Facts], _Tasks]:
    """Facts of blocks of queries and of keys, and the tiles that are computed."""
    tile = settings.tile
    length = math.ceil(of_key.ends.shape[1] / tile) * tile
    query, key = (padded_facts(facts, length) for facts in (of_query, of_key))
    tasks = _tasks(settings, aligned, chunk, query, key)
    query, key = (Facts(*(p.reshape(-1, tile) for p in f)) for f in (query, key))
    return (query, key), tasks


def _scores(
    settings: TileSettings,
    queries: Array,
    keys: Array,
    facts: tuple[Facts, Facts],
    q: Array,
    k: Array,
) -> tuple[Array, Array]:
    """Scores of a chunk of tiles, and which are visible; the others are `MASKED`."""
    scores = _product("cnqd,cnkd->cnqk", _take(queries, q), _take(keys, k))
    scores = scores * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    of_query, of_key = (
        Facts(*(_take(part, blocks) for part in of))
        for of, blocks in zip(facts, (q, k), strict=True)
    )
    index = of_query.indices[:, :, None]
    seen = (of_key.indices[:, None] <= index) & (index < of_key.ends[:, None])
    if settings.window is not None:
        back = of_query.positions[:, :, None] - of_key.positions[:, None]
        seen &= back < settings.window
    # [chunk, tile, tile] for every head of a group.
    group = queries.shape[2] // settings.tile
    seen = jnp.tile(seen, (1, group, 1))[:, None]
    return jnp.where(seen, scores, MASKED), seen


def _tasks(
    settings: TileSettings, aligned: bool, chunk: int, of_query: Facts, of_key: Facts
) -> _Tasks:
    """Lists the tiles that hold a visible score."""
    batch = of_key.ends.shape[0]
    query, key = (
        Facts(*(part.reshape(batch, -1, settings.tile) for part in facts))
        for facts in (of_query, of_key)
    )
    blocks = key.ends.shape[1]
    # A diagonal of tiles, q - k constant, has every block at most once a row; so has
    # one that wraps around at the edge.
    q, k = np.tril_indices(blocks) if aligned else np.indices((blocks, blocks))
    q, k = q.reshape(-1), k.reshape(-1)
    diagonal = (q - k) % blocks
    order = np.argsort(diagonal, kind="stable")
    q, k, diagonal = q[order], k[order], diagonal[order]
    first, last = query.indices.min(axis=-1)[:, q], query.indices.max(axis=-1)[:, q]
    active = key.ends.max(axis=-1)[:, k] > first
    active &= key.indices.min(axis=-1)[:, k] <= last
    if settings.window is not None:
        first, last = query.positions.min(axis=-1), key.positions.max(axis=-1)
        active &= first[:, q] - last[:, k] < settings.window
    # Diagonal by diagonal, and within one row by row.
    diagonal = np.broadcast_to(diagonal, (batch, len(q)))
    order = np.argsort(diagonal, axis=None, kind="stable")
    diagonal = diagonal.reshape(-1)[order]
    row = np.arange(batch)[:, None] * blocks
    q, k = ((row + block).reshape(-1)[order] for block in (q, k))
    active = active.reshape(-1)[order]
    count = jax.ops.segment_sum(active.astype(jnp.int32), jnp.asarray(diagonal), blocks)
    chunks = (count + chunk - 1) // chunk
    # A diagonal begins with a new chunk.
    begin = chunk * (jnp.cumsum(chunks) - chunks)
    rank = jnp.cumsum(active) - 1 - (jnp.cumsum(count) - count)[diagonal]
    size = len(q) + blocks * chunk
    place = jnp.where(active, begin[diagonal] + rank, size)
    unused = jnp.full((size,), batch * blocks, jnp.int32)
    queries, keys = (
        unused.at[place].set(jnp.asarray(block, jnp.int32), mode="drop")
        for block in (q, k)
    )
    return _Tasks(queries, keys, chunks.sum())


def _padded(array: Array, tile: int, axis: int = 1) -> Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % tile)
    return jnp.pad(array, widths)


def _query_blocks(array: Array, kv_heads: int, tile: int) -> Array:
    """[batch, length, heads, dim] to [blocks, kv_heads, group * tile, dim]."""
    batch, _, heads, dim = array.shape
    split = _padded(array, tile).reshape(
        batch, -1, tile, kv_heads, heads // kv_heads, dim
    )
    split = split.transpose(0, 1, 3, 4, 2, 5)
    return split.reshape(-1, kv_heads, heads // kv_heads * tile, dim)


def _from_query_blocks(blocks: Array, batch: int, length: int, tile: int) -> Array:
    _, kv_heads, rows, dim = blocks.shape
    split = blocks.reshape(batch, -1, kv_heads, rows // tile, tile, dim)
    split = split.transpose(0, 1, 4, 2, 3, 5)
    return split.reshape(batch, -1, kv_heads * rows // tile, dim)[:, :length]


def _key_blocks(array: Array, tile: int) -> Array:
    """[batch, kv_heads, length, dim] to [blocks, kv_heads, tile, dim]."""
    batch, kv_heads, _, dim = array.shape
    split = _padded(array, tile, axis=2).reshape(batch, kv_heads, -1, tile, dim)
    return split.swapaxes(1, 2).reshape(-1, kv_heads, tile, dim)


def _from_key_blocks(blocks: Array, batch: int, length: int) -> Array:
    _, kv_heads, tile, dim = blocks.shape
    split = blocks.reshape(batch, -1, kv_heads, tile, dim).swapaxes(1, 2)
    return split.reshape(batch, kv_heads, -1, dim)[:, :, :length]


def _chunk(tasks: _Tasks, number: Array, chunk: int) -> tuple[Array, Array]:
    return tuple(  # type: ignore[return-value]
        jax.lax.dynamic_slice_in_dim(array, number * chunk, chunk)
        for array in (tasks.queries, tasks.keys)
    )


def _take(array: Array, blocks: Array) -> Array:
    """Returns blocks of `array`; an out-of-range index gives zeros."""
    return array.at[blocks].get(mode="fill", fill_value=0)


def _put(array: Array, blocks: Array, values: Array) -> Array:
    """Replaces blocks of `array`; out-of-range indices are ignored."""
    return array.at[blocks].set(values, mode="drop", unique_indices=True)


def _product(form: str, one: Array, other: Array) -> Array:
    return jnp.einsum(form, one, other, preferred_element_type=jnp.float32)
