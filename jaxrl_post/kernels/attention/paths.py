"""Attention whose result for a token depends on its path alone, to the last bit.

A token's path is the sequence that ends with it. The keys of a path are read in blocks
of BLOCK tokens, counted from its first token, one block after another, for every batch,
row, layout of the cache's pages and segments of a tree. So the trainer, which has
packed trees, and the sampler, which has a cache, sum in the same order. The products of
a block are one program of fixed shape (see `kernels.row_tiles`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.attention.reference import MASKED
from jaxrl_post.kernels.row_tiles import isolated
from jaxrl_post.types import Array, Float, Int

__all__ = ["BLOCK", "PathSettings", "Tasks", "attend_paths", "queries_per_task"]

# Keys of a block; a cache's length must be a multiple of it.
BLOCK = 64
# Rows of the products with a block: queries of a path times the query heads that share
# a key/value head. Training would have more of them, decoding has one query.
ROWS = 8


class PathSettings(NamedTuple):
    """Static facts of one call: as in `tiles.TileSettings`, and tasks at once."""

    at_once: int
    scale: float
    window: int | None
    softcap: float | None


class Tasks(NamedTuple):
    """Queries in groups; a task's queries lie one after another on one path.

    Attributes:
        queries: int32 [tasks, queries_per_task], indices of tokens; the number of
            tokens or more for none.
        positions: int32, like `queries`, along the path; -1 for none.
        count: int32, number of tasks to compute; they come first.
    """

    queries: Int[Array, "tasks queries"]
    positions: Int[Array, "tasks queries"]
    count: Int[Array, ""]


def queries_per_task(group: int) -> int:
    """Number of queries of a task if `group` query heads share a key/value head.

    >>> queries_per_task(1), queries_per_task(4), queries_per_task(32)
    (8, 2, 1)
    """
    return max(1, ROWS // group)


def attend_paths(
    settings: PathSettings,
    query: Float[Array, "tokens heads head_dim"],
    tasks: Tasks,
    fetch: Callable[[Array, Array], tuple[Array, Array]],
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Attends from every query to the tokens of its path that are not later.

    Args:
        settings: static.
        query: any float dtype.
        tasks: the queries to compute.
        fetch: from numbers of tasks [n] and of a block (a scalar) to the block's keys
            [n, kv_heads, BLOCK, head_dim] and values. Entries beyond a task's last
            query may be anything.
        sinks: as in `attention`.

    Returns:
        In `query`'s dtype; 0 where no task has the token.
    """
    tokens, heads, _ = query.shape
    at_once = settings.at_once
    padding = -tasks.queries.shape[0] % at_once
    tasks = Tasks(
        jnp.pad(tasks.queries, ((0, padding), (0, 0)), constant_values=tokens),
        jnp.pad(tasks.positions, ((0, padding), (0, 0)), constant_values=-1),
        tasks.count,
    )
    per_task = tasks.queries.shape[1]
    numbers = jax.ShapeDtypeStruct((at_once,), jnp.int32)
    block = jax.ShapeDtypeStruct((), jnp.int32)
    keys, values = jax.eval_shape(fetch, numbers, block)
    kv_heads, width = keys.shape[1], values.shape[-1]
    group = heads // kv_heads
    lead = (at_once, kv_heads, per_task * group)

    def rows(array: Array) -> Array:
        """[at_once, per_task, heads, dim] as [at_once, kv_heads, rows, dim]."""
        split = array.reshape(at_once, per_task, kv_heads, group, -1)
        return split.transpose(0, 2, 1, 3, 4).reshape(*lead, -1)

    def chunk(number: Array, out: Array) -> Array:
        chosen = number * at_once + jnp.arange(at_once, dtype=jnp.int32)
        first = number * at_once
        queries = jax.lax.dynamic_slice_in_dim(tasks.queries, first, at_once)
        positions = jax.lax.dynamic_slice_in_dim(tasks.positions, first, at_once)
        of_rows = jnp.repeat(positions, group, axis=1)
        last = positions.max(axis=1)
        own = rows(query.at[queries].get(mode="fill", fill_value=0))
        if sinks is None:
            top = jnp.full(lead, MASKED, jnp.float32)
            total = jnp.zeros(lead, jnp.float32)
        else:
            # A sink is a score that every query sees, with a value of 0.
            by_head = sinks.astype(jnp.float32).reshape(kv_heads, 1, group)
            by_row = jnp.broadcast_to(by_head, (kv_heads, per_task, group))
            top = jnp.broadcast_to(by_row.reshape(1, kv_heads, -1), lead)
            total = jnp.ones(lead, jnp.float32)

        def one_block(number: Array, state: tuple) -> tuple:
            at = number * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            keys, values = fetch(chosen, number)
            distance = of_rows[:, :, None] - at
            seen = distance >= 0
            if settings.window is not None:
                seen &= distance < settings.window
            # Unwritten entries may be NaN, which a weight of 0 would not remove.
            written = at <= last[:, None]
            values = jnp.where(written[:, None, :, None], values, 0)
            # A chunk has a query: its last position is not negative.
            return isolated(
                functools.partial(_block, settings),
                last.max() >= 0,
                *(own, keys, values, seen[:, None], *state),
            )

        state = (top, total, jnp.zeros((*lead, width), jnp.float32))
        first_block = jnp.int32(0)
        if settings.window is not None:
            # A block that no query sees changes no bit of the state.
            earliest = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max)
            oldest = earliest.min() - settings.window + 1
            first_block = jnp.maximum(oldest, 0) // BLOCK
        state = jax.lax.fori_loop(
            first_block, last.max() // BLOCK + 1, one_block, state
        )
        mixed = state[2] / state[1][..., None]
        mixed = mixed.reshape(at_once, kv_heads, per_task, group, width)
        mixed = mixed.transpose(0, 2, 1, 3, 4).reshape(-1, heads, width)
        at = queries.reshape(-1)
        return out.at[at].set(mixed.astype(query.dtype), mode="drop")

    empty = jnp.zeros((tokens, heads, width), query.dtype)
    chunks = (tasks.count + at_once - 1) // at_once
    return jax.lax.fori_loop(0, chunks, chunk, empty)


def _block(
    settings: PathSettings,
    query: Array,
    key: Array,
    value: Array,
    seen: Array,
    top: Array,
    total: Array,
    mixed: Array,
) -> tuple[Array, Array, Array]:
    """Adds a block to the online softmax; all sums are float32."""
    scores = jnp.einsum(
        "tnqd,tnkd->tnqk", query, key, preferred_element_type=jnp.float32
    )
    scores = scores * settings.scale
    if settings.softcap is not None:
        scores = settings.softcap * jnp.tanh(scores / settings.softcap)
    scores = jnp.where(seen, scores, MASKED)
    new = jnp.maximum(top, scores.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - new[..., None]), 0.0)
    factor = jnp.exp(top - new)
    added = jnp.einsum(
        "tnqk,tnkd->tnqd",
        weights.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    total = total * factor + weights.sum(axis=-1)
    return new, total, mixed * factor[..., None] + added
