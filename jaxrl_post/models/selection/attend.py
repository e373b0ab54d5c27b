"""Attention to chosen keys: by a mask in training, gathered from a cache."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.attention import in_tiles
from jaxrl_post.kernels.attention.reference import attend
from jaxrl_post.models.cache import LayerCache
from jaxrl_post.models.selection.places import NO_KEY, by_batch, plain
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = ["attend_in_cache", "attend_in_rows"]

# Queries at a time: over all keys, and over gathered keys, which each query has for
# itself.
BLOCK, GATHERED_BLOCK = 128, 16


def attend_in_rows(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_heads length head_dim"],
    value: Float[Array, "batch kv_heads length value_dim"],
    choice: Int[Array, "batch length top_k"],
    scale: float,
) -> Float[Array, "batch length heads value_dim"]:
    """Attends to the chosen tokens of rows; others have no weight.

    Args:
        query: any float dtype.
        key: the same dtype.
        value: the same dtype.
        choice: as `choose_in_rows` returns it.
        scale: of the scores.
    """

    def block(query: Array, choice: Array) -> Array:
        nothing = jnp.zeros(key.shape[2], bool)
        seen = jax.vmap(jax.vmap(lambda row: nothing.at[row].set(True, mode="drop")))
        return attend(query, key, value, seen(choice), scale)

    return in_tiles(block, BLOCK, query, choice)


def attend_in_cache(
    query: Float[Array, "batch queries heads width"],
    entry: LayerCache,
    choice: Int[Array, "batch queries top_k"],
    scale: float,
    rules: Rules,
) -> Float[Array, "batch queries heads width"]:
    """Attends to the chosen entries of a cache, which are keys and values at once.

    Args:
        query: any float dtype.
        entry: the layer's part of the cache.
        choice: as `choose_in_cache` returns it.
        scale: of the scores.
        rules: how a mesh of `jax.set_mesh`, if any, splits batch and heads.
    """
    shared = entry.shared

    def attended(query: Array, choice: Array, own: Any, common: Any) -> Array:
        def block(query: Array, choice: Array) -> Array:
            found = plain(_gathered(own, common, choice), query.dtype)
            rows, heads = choice.shape[:2], query.shape[2:]
            query = query.reshape(-1, 1, *heads)
            found = found.reshape(-1, 1, *found.shape[2:])
            seen = (choice != NO_KEY).reshape(-1, 1, choice.shape[2])
            return attend(query, found, found, seen, scale).reshape(*rows, *heads)

        return in_tiles(block, GATHERED_BLOCK, query, choice)

    common = None
    if shared is not None:
        common = shared.key, shared.places // shared.members
    heads = query.shape[2]
    return by_batch(attended, rules, query, choice, entry.keys, common, heads=heads)


def _gathered(own: Any, common: tuple[Any, Array] | None, choice: Array) -> Any:
    """Entries [batch, queries, top_k, width] of the chosen places."""

    def taken(entries: Array, places: Array) -> Array:
        def of_one(rows: Array, at: Array) -> Array:
            return rows.at[at].get(mode="clip")

        return jax.vmap(of_one)(entries[:, 0], places)

    if common is None:
        return jax.tree.map(lambda entries: taken(entries, choice), own)
    shared, group = common
    count = jax.tree.leaves(shared)[0].shape[2]

    def either(entries: Array, before: Array) -> Array:
        theirs = before.at[group[:, None, None], 0, choice].get(mode="clip")
        own = taken(entries, jnp.maximum(choice - count, 0))
        return jnp.where(choice[..., None] < count, theirs, own)

    return jax.tree.map(either, own, shared)
