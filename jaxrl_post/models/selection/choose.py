"""The indexer: its projections, and the keys that it chooses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.attention import in_tiles
from jaxrl_post.models.cache import LayerCache
from jaxrl_post.models.config import LatentAttention, ModelConfig
from jaxrl_post.models.layers import project, to_heads
from jaxrl_post.models.params import IndexerParams
from jaxrl_post.models.rope import apply_rope
from jaxrl_post.models.selection.places import NO_KEY, by_batch, plain
from jaxrl_post.sharding import Rules
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "IndexParts",
    "choose_in_cache",
    "choose_in_rows",
    "index_parts",
    "no_choice",
]

KEY_NORM_EPS = 1e-6
# Queries whose scores of all keys are held at a time.
BLOCK = 128


class IndexParts(NamedTuple):
    """The indexer's projections of tokens, without gradient.

    Attributes:
        queries: rotated.
        keys: normed and rotated.
        weights: float32, of the heads, times dim ** -0.5.
        top_k: number of keys to choose.
    """

    queries: Float[Array, "batch length heads dim"]
    keys: Float[Array, "batch length dim"]
    weights: Float[Array, "batch length heads"]
    top_k: int


def index_parts(
    latent: LatentAttention,
    params: IndexerParams[Array],
    x: Float[Array, "tokens hidden"],
    query_latent: Float[Array, "tokens query_rank"] | None,
    shape: tuple[int, ...],
    tables: tuple[Array, Array] | None,
) -> IndexParts:
    """Projects tokens to the indexer's queries, keys and weights.

    Args:
        latent: of a model with an indexer.
        params: of the indexer.
        x: the layer's normed hidden states.
        query_latent: the queries' normed latents.
        shape: batch and length.
        tables: cosines and sines of the layer's rotation; None for no rotation.
    """
    indexer = latent.indexer
    assert indexer is not None
    assert query_latent is not None
    params, x, query_latent = jax.lax.stop_gradient((params, x, query_latent))
    queries = to_heads(query_latent, params.queries, None, shape)
    keys = project(x, params.keys).astype(jnp.float32)
    centred = keys - keys.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    keys = centred * jax.lax.rsqrt(variance + KEY_NORM_EPS)
    keys = keys * params.key_norm.astype(jnp.float32)
    keys = keys + params.key_norm_bias.astype(jnp.float32)
    keys = keys.astype(x.dtype).reshape(*shape, 1, -1)
    if tables is not None:
        turned = indexer.interleaved
        queries = apply_rope(queries, *tables, interleaved=turned)
        keys = apply_rope(keys, *tables, interleaved=turned)
    # A TPU would round both factors to bfloat16 otherwise.
    weights = jnp.matmul(
        x.astype(jnp.float32),
        params.weights.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    scale = (indexer.num_heads * indexer.head_dim) ** -0.5
    return IndexParts(
        queries, keys[:, :, 0], (scale * weights).reshape(*shape, -1), indexer.top_k
    )


def no_choice(config: ModelConfig, shape: tuple[int, ...]) -> Array | None:
    """An empty choice, for the first layer of a loop over rows [batch, length].

    None where no layer chooses.
    """
    indexer = config.indexer
    if indexer is None or not config.selects or shape[1] <= indexer.top_k:
        return None
    return jnp.full((*shape, indexer.top_k), NO_KEY, jnp.int32)


def choose_in_rows(
    parts: IndexParts,
    positions: Int[Array, "batch length"],
    ends: Int[Array, "batch length"] | None,
    rules: Rules,
) -> Int[Array, "batch length top_k"] | None:
    """Chooses among the tokens of rows.

    Args:
        parts: of the rows' tokens.
        positions: int32, along each token's path.
        ends: int32, as `TokenBatch.ends`; None if each row is one sequence.
        rules: how a mesh of `jax.set_mesh`, if any, splits the batch.

    Returns:
        The choice; None where rows have so few tokens that all are chosen.
    """
    queries, keys, weights, top_k = parts
    if keys.shape[1] <= top_k:
        return None
    if ends is not None:
        places = jnp.arange(keys.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(places, positions.shape)

    def choose(queries: Array, weights: Array, at: Array, *among: Any) -> Array:
        return _chosen(top_k, (queries, weights, at), *among)

    arrays = queries, weights, positions, keys, positions, ends
    return by_batch(choose, rules, *arrays)


def choose_in_cache(
    parts: IndexParts,
    positions: Int[Array, "batch queries"],
    entry: LayerCache,
    rules: Rules,
) -> Int[Array, "batch queries top_k"] | None:
    """Chooses among the entries of a cache, whose values are the indexer's keys.

    Args:
        parts: of the tokens of this call, whose keys are in the cache.
        positions: int32, of these tokens.
        entry: the layer's part of the cache.
        rules: as in `choose_in_rows`.

    Returns:
        The choice; None where the cache has room for so few tokens that all are chosen.
    """
    shared, count = entry.shared, entry.keys.shape[2]
    if shared is not None:
        count += shared.key.shape[2]
    if count <= parts.top_k:
        return None
    members = 1 if shared is None else shared.members

    def choose(queries: Array, weights: Array, at: Array, *cached: Any) -> Array:
        own, key_at, common = cached
        keys = plain(own, queries.dtype)[:, 0]
        if common is not None:
            entries, begins, places = common
            group = places // members
            before = plain(entries, queries.dtype)[:, 0].at[group].get(mode="clip")
            # A sequence that shares nothing has been given the last group's.
            alone = group >= begins.shape[0]
            begins = begins.at[group].get(mode="clip")
            begins = jnp.where(alone[:, None], NO_KEY, begins)
            keys = jnp.concatenate([before, keys], axis=1)
            key_at = jnp.concatenate([begins, key_at], axis=1)
        return _chosen(parts.top_k, (queries, weights, at), keys, key_at, None)

    common = None if shared is None else (shared.value, shared.positions, shared.places)
    arrays = parts.queries, parts.weights, positions, entry.values, entry.positions
    return by_batch(choose, rules, *arrays, common)


def _chosen(
    top_k: int,
    of_queries: tuple[Array, Array, Array],
    keys: Float[Array, "batch keys dim"],
    key_at: Int[Array, "batch keys"],
    ends: Int[Array, "batch keys"] | None,
) -> Int[Array, "batch queries top_k"]:
    """The choice of queries, given as (queries, weights, at).

    A query sees the keys with `key_at <= at`, and with ends those with `at < ends`.
    """

    def block(queries: Array, weights: Array, at: Array) -> Array:
        products = jnp.einsum(
            "bqhd,bkd->bqhk", queries, keys, preferred_element_type=jnp.float32
        )
        scores = (weights[..., None] * jax.nn.relu(products)).sum(axis=2)
        seen = key_at[:, None] <= at[:, :, None]
        if ends is not None:
            seen &= at[:, :, None] < ends[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        # It takes the first of equal scores.
        best, places = jax.lax.top_k(scores, top_k)
        return jnp.where(best > -jnp.inf, places, NO_KEY)

    return in_tiles(block, BLOCK, *of_queries)
