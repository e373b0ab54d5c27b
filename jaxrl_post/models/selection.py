"""Sparse attention: a small indexer chooses the keys that each query sees.

With x a token's hidden state and q its normed query latent, the indexer has the queries
a_h = R(W_h q), one key b = R(LayerNorm(K x)), which all heads share, and the weights
w_h = (V x)_h / sqrt(heads), in float32. R rotates the leading dims by the position. The
query of token t gives the key of token j the score

    s(t, j) = sum_h w_h relu(a_h(t) . b(j) / sqrt(dim)).

Among the keys that the query may see, the `top_k` with the largest scores are chosen,
equal scores from the earliest token on, and the softmax is over these alone. Neither
the choice nor the indexer has a gradient.

A choice is int32 [batch, queries, top_k]: places among the keys, in any order, and
`NO_KEY` where a query sees fewer. In training the keys are those of the query's row. In
a cache they are the entries that a sequence shares, and then its own.

Queries are computed in blocks: scores of all keys are held for one block at a time.

References:
    DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.attention import in_tiles
from jaxrl_post.kernels.attention.reference import attend
from jaxrl_post.kernels.decode_attention import QuantizedEntries
from jaxrl_post.models.cache import LayerCache
from jaxrl_post.models.config import LatentAttention, ModelConfig
from jaxrl_post.models.layers import project, to_heads
from jaxrl_post.models.params import IndexerParams
from jaxrl_post.models.rope import apply_rope
from jaxrl_post.sharding import Rules, dividing_axes
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "NO_KEY",
    "IndexParts",
    "attend_in_cache",
    "attend_in_rows",
    "choose_in_cache",
    "choose_in_rows",
    "index_parts",
    "no_choice",
]

NO_KEY = jnp.iinfo(jnp.int32).max
KEY_NORM_EPS = 1e-6

# Queries of a block: over all keys, and over gathered keys, of which each query has its
# own.
BLOCK, GATHERED_BLOCK = 128, 16


class IndexParts(NamedTuple):
    """What the indexer makes of tokens, without gradient.

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
    """What stands for a choice before the first layer of rows [batch, length].

    It has the shape of a choice, as a loop over layers needs it. None where no layer
    chooses.
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
    return _by_batch(choose, rules, *arrays)


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
        keys = _plain(own, queries.dtype)[:, 0]
        if common is not None:
            entries, begins, places = common
            group = places // members
            before = _plain(entries, queries.dtype)[:, 0].at[group].get(mode="clip")
            # A sequence that shares nothing has been given the last group's.
            alone = group >= begins.shape[0]
            begins = begins.at[group].get(mode="clip")
            begins = jnp.where(alone[:, None], NO_KEY, begins)
            keys = jnp.concatenate([before, keys], axis=1)
            key_at = jnp.concatenate([begins, key_at], axis=1)
        return _chosen(parts.top_k, (queries, weights, at), keys, key_at, None)

    common = None if shared is None else (shared.value, shared.positions, shared.places)
    arrays = parts.queries, parts.weights, positions, entry.values, entry.positions
    return _by_batch(choose, rules, *arrays, common)


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
            found = _plain(_gathered(own, common, choice), query.dtype)
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
    return _by_batch(attended, rules, query, choice, entry.keys, common, heads=heads)


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
        # -0.0 is no less than 0.0.
        scores = jnp.where(scores == 0, 0.0, scores)
        seen = key_at[:, None] <= at[:, :, None]
        if ends is not None:
            seen &= at[:, :, None] < ends[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        # Of equal scores it takes the first.
        best, places = jax.lax.top_k(scores, top_k)
        return jnp.where(best > -jnp.inf, places, NO_KEY)

    return in_tiles(block, BLOCK, *of_queries)


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


def _plain(entries: Any, dtype: Any) -> Array:
    if isinstance(entries, QuantizedEntries):
        entries = entries.dequantize()
    return entries.astype(dtype)


def _by_batch(
    function: Callable[..., Array],
    rules: Rules,
    query: Array,
    *others: Any,
    heads: int | None = None,
) -> Array:
    """Lets each device compute its own rows, by local numbers of groups.

    Args:
        function: of `query` [batch, queries, heads, dim] and the others, which have one
            key/value head.
        rules: logical axis to mesh axes.
        query: decides how the batch is split.
        *others: trees of arrays whose first dimension is split likewise.
        heads: number of heads, if they are split too; the result then has them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(query, *others)
    batch = dividing_axes("batch", query.shape[0], mesh, rules) or None
    of_query = of_result = P(batch)
    if heads is not None:
        split = dividing_axes("heads", heads, mesh, rules) or None
        of_query = of_result = P(batch, None, split)
    local = jax.shard_map(
        function,
        in_specs=(of_query, *(P(batch) for _ in others)),
        out_specs=of_result,
        check_vma=False,
    )
    return local(query, *others)
