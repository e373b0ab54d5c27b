"""Attention layers: grouped-query attention and multi-head latent attention."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.kernels.attention import Scoring, Sight, attention
from jaxrl_post.kernels.decode_attention import OwnKeys, decode_attention
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models.cache import LayerCache
from jaxrl_post.models.config import LatentAttention, ModelConfig
from jaxrl_post.models.layers import norm, project, to_heads, unit_norm
from jaxrl_post.models.matrix import dense
from jaxrl_post.models.params import AttentionParams, LatentAttentionParams
from jaxrl_post.models.rope import apply_rope
from jaxrl_post.models.selection import (
    attend_in_cache,
    attend_in_rows,
    choose_in_cache,
    choose_in_rows,
    index_parts,
)
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "Context",
    "KeysValues",
    "LatentParts",
    "from_latents",
    "grouped_query",
    "keys_and_values",
    "latent_attention",
    "latent_parts",
    "queries",
    "to_latents",
    "with_gate",
]

HEAD_AXES = ("batch", "length", "heads", "head_dim")
# Training uses the cache's layout too.
KV_AXES = ("batch", "kv_heads", "length", "head_dim")


@struct.dataclass
class KeysValues:
    """Keys and values of a layer that other layers read, in training.

    Attributes:
        keys: rotated.
        values: as attention reads them.
    """

    keys: Float[Array, "batch kv_heads length head_dim"]
    values: Float[Array, "batch kv_heads length value_dim"]


class Context(NamedTuple):
    """Inputs of attention other than the hidden states.

    Attributes:
        positions: int32, along the sequence.
        ends: int32, as `TokenBatch.ends`; None if each row is one sequence.
        indices: int32, the tokens' places in their rows if rows are cut into chunks
            (`sharding.Chunks`); None if they are whole.
        tables: cosines and sines of the layer's rotation; None for no rotation.
        window: the layer's sliding window in tokens, None for full attention.
        entry: the layer's part of a cache; None: attention among these tokens alone.
            For a layer without keys of its own: what the layer returned whose keys it
            reads.
        kernels: implementation of attention.
        choice: of the last layer that has an indexer, as `selection.choose_in_rows`
            returns it; None for full attention.
        at: as `Mode.at`, which meets queries, keys and values.
    """

    positions: Int[Array, "batch length"]
    ends: Int[Array, "batch length"] | None
    indices: Int[Array, "batch length"] | None
    tables: tuple[Array, Array] | None
    window: int | None
    entry: LayerCache | KeysValues | None
    kernels: Implementation = "auto"
    choice: Int[Array, "batch length top_k"] | None = None
    at: Callable[[str, Array], Array] = lambda _, own: own

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch and length."""
        return self.positions.shape


def grouped_query(
    config: ModelConfig,
    params: AttentionParams[Array],
    x: Float[Array, "tokens hidden"],
    context: Context,
    rules: Rules,
) -> tuple[Float[Array, "tokens hidden"], LayerCache | KeysValues]:
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245).

    Without keys of its own, it reads the entry of `context`.

    Returns:
        The update of the residual stream; and the keys and values that were read: the
        cache with these tokens, or these tokens' own.
    """
    query, gate = queries(config, params, x, context)
    query, entry = context.at("query", query), context.entry
    if params.key is not None:
        key, value = keys_and_values(config, params, x, context)
        key, value = context.at("key", key), context.at("value", value)
        entry = _with_entries(key.swapaxes(1, 2), value.swapaxes(1, 2), context, rules)
    if entry is None:
        raise ValueError(
            "attention: has no keys; the parameters do not belong to the config"
        )
    attended = _attend(config, query, entry, context, rules, params.sinks)
    attended = with_gate(attended, gate).reshape(x.shape[0], -1)
    return project(attended, params.output, params.output_bias, inputs=2), entry


def queries(
    config: ModelConfig,
    params: AttentionParams[Array],
    x: Float[Array, "tokens hidden"],
    context: Context,
) -> tuple[
    Float[Array, "batch length heads head_dim"],
    Float[Array, "batch length heads head_dim"] | None,
]:
    """Projects to rotated queries, and to the gate, if any."""
    query, gate = to_heads(x, params.query, params.query_bias, context.shape), None
    if config.attention_gate:
        query, gate = jnp.split(query, 2, axis=-1)
    if params.query_norm is not None:
        query = norm(config, query, params.query_norm)
    query = _rotate(config, _clipped(config, query), context)
    return _scaled(config, query, context), gate


def keys_and_values(
    config: ModelConfig,
    params: AttentionParams[Array],
    x: Float[Array, "tokens hidden"],
    context: Context,
) -> tuple[
    Float[Array, "batch length kv_heads head_dim"],
    Float[Array, "batch length kv_heads head_dim"],
]:
    """Projects to rotated keys, and to values, of a layer with keys of its own."""
    assert params.key is not None
    key = value = to_heads(x, params.key, params.key_bias, context.shape)
    if params.value is not None:
        value = to_heads(x, params.value, params.value_bias, context.shape)
    if params.key_norm is not None:
        key = norm(config, key, params.key_norm)
    if config.value_norm:
        value = unit_norm(config, value)
    key, value = _clipped(config, key), _clipped(config, value)
    return _rotate(config, key, context), value


def _clipped(config: ModelConfig, x: Array) -> Array:
    bound = config.qkv_clip
    return x if bound is None else jnp.clip(x, -bound, bound)


def with_gate(
    attended: Float[Array, "*tokens heads head_dim"],
    gate: Float[Array, "*tokens heads head_dim"] | None,
) -> Float[Array, "*tokens heads head_dim"]:
    """Multiplies the output of attention by the sigmoid of its gate, if any."""
    return attended if gate is None else attended * jax.nn.sigmoid(gate)


def latent_attention(
    config: ModelConfig,
    latent: LatentAttention,
    params: LatentAttentionParams[Array],
    x: Float[Array, "tokens hidden"],
    context: Context,
    rules: Rules,
) -> tuple[
    Float[Array, "tokens hidden"],
    LayerCache | KeysValues,
    Int[Array, "batch length top_k"] | None,
]:
    """Multi-head latent attention, over all earlier keys or over chosen ones.

    With c the latent of a token, a head's key is [U_k c, r] and its value U_v c, where
    r is the rotated key that all heads share. Training computes keys and values from
    the latents. A cache holds [c, r] alone: U_k is then applied to the query and U_v to
    the result, since q . U_k c = (U_k^T q) . c. Both are equal up to rounding.

    References:
        DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Returns:
        The update of the residual stream; what was read, as `grouped_query`; and the
        chosen keys, None if queries see all.
    """
    parts = latent_parts(config, latent, params, x, context)
    choice, index = context.choice, None
    if config.selects and params.indexer is not None:
        of_tokens = x, parts.query_latent, context.shape, context.tables
        index = index_parts(latent, params.indexer, *of_tokens)
    if context.entry is None:
        shape = context.positions.shape
        both = to_heads(parts.latent, params.kv_up, None, shape)
        key_nope, value = jnp.split(both, [latent.nope_dim], axis=-1)
        rotated = (*key_nope.shape[:3], latent.rope_dim)
        key_rope = jnp.broadcast_to(parts.key_rope, rotated)
        key = jnp.concatenate([key_nope, key_rope], axis=-1)
        query = jnp.concatenate([parts.query_nope, parts.query_rope], axis=-1)
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        entry = _with_entries(key, value, context, rules)
        if index is not None:
            choice = choose_in_rows(index, context.positions, context.ends, rules)
        if choice is None:
            attended = _attend(config, query, entry, context, rules)
        else:
            assert isinstance(entry, KeysValues)
            query = constrain(query, HEAD_AXES, rules)
            attended = attend_in_rows(
                query, entry.keys, entry.values, choice, config.score_scale
            )
    else:
        up = dense(params.kv_up, x.dtype)
        query, row = to_latents(parts, up[..., : latent.nope_dim])
        row = row.swapaxes(1, 2)
        beside = row[..., :0] if index is None else index.keys[:, None]
        entry = _with_entries(row, beside, context, rules)
        assert isinstance(entry, LayerCache)
        if index is not None:
            choice = choose_in_cache(index, context.positions, entry, rules)
        if choice is None:
            mixed = _attend(config, query, entry, context, rules)
        else:
            query = constrain(query, HEAD_AXES, rules)
            mixed = attend_in_cache(query, entry, choice, config.score_scale, rules)
        mixed = mixed[..., : latent.kv_rank]
        attended = from_latents(mixed, up[..., latent.nope_dim :])
    attended = attended.reshape(x.shape[0], -1)
    out = project(attended, params.output, params.output_bias, inputs=2)
    return out, entry, choice


class LatentParts(NamedTuple):
    """The projections of latent attention.

    Attributes:
        query_nope: the queries' dims without rotation.
        query_rope: their rotated dims.
        latent: the normed latents.
        key_rope: the rotated key of all heads.
        query_latent: the queries' normed latents; None if they have none.
    """

    query_nope: Float[Array, "batch length heads nope_dim"]
    query_rope: Float[Array, "batch length heads rope_dim"]
    latent: Float[Array, "tokens kv_rank"]
    key_rope: Float[Array, "batch length 1 rope_dim"]
    query_latent: Float[Array, "tokens query_rank"] | None


def latent_parts(
    config: ModelConfig,
    latent: LatentAttention,
    params: LatentAttentionParams[Array],
    x: Float[Array, "tokens hidden"],
    context: Context,
) -> LatentParts:
    """Projects tokens to queries, to latents and to the rotated key."""
    shape = context.positions.shape
    query, query_latent = _latent_query(config, latent, params, x, shape)
    query_nope, query_rope = jnp.split(query, [latent.nope_dim], axis=-1)
    compressed, key_rope = jnp.split(
        project(x, params.kv_down, params.kv_down_bias), [latent.kv_rank], axis=-1
    )
    return LatentParts(
        query_nope,
        _rotate(config, query_rope, context),
        norm(config, compressed, params.kv_norm, latent.norm_eps),
        _rotate(config, key_rope.reshape(*shape, 1, -1), context),
        query_latent,
    )


def to_latents(
    parts: LatentParts, key_up: Float[Array, "kv_rank heads nope_dim"]
) -> tuple[
    Float[Array, "batch length heads width"], Float[Array, "batch length 1 width"]
]:
    """Returns queries that meet entries of a cache, [U_k^T q, r], and the entries."""
    moved = jnp.einsum("blhn,rhn->blhr", parts.query_nope, key_up)
    query = jnp.concatenate([moved, parts.query_rope], axis=-1)
    latents = parts.latent.reshape(*parts.key_rope.shape[:3], -1)
    return query, jnp.concatenate([latents, parts.key_rope], axis=-1)


def from_latents(
    mixed: Float[Array, "batch length heads kv_rank"],
    value_up: Float[Array, "kv_rank heads value_dim"],
) -> Float[Array, "batch length heads value_dim"]:
    """Returns the values of mixed latents, U_v c."""
    return jnp.einsum("blhr,rhv->blhv", mixed, value_up)


def _latent_query(
    config: ModelConfig,
    latent: LatentAttention,
    params: LatentAttentionParams[Array],
    x: Array,
    shape: tuple[int, ...],
) -> tuple[Float[Array, "batch length heads head_dim"], Array | None]:
    """Computes queries from x, through the queries' latent if there is one."""
    if params.query is not None:
        return to_heads(x, params.query, None, shape), None
    parts = params.query_down, params.query_norm, params.query_up
    down, scale, up = cast("tuple[Array, Array, Array]", parts)
    low = project(x, down, params.query_down_bias)
    low = norm(config, low, scale, latent.norm_eps)
    return to_heads(low, up, None, shape), low


def _rotate(config: ModelConfig, x: Array, context: Context) -> Array:
    if context.tables is None:
        return x
    return apply_rope(x, *context.tables, interleaved=config.rope_interleaved)


def _scaled(config: ModelConfig, query: Array, context: Context) -> Array:
    """Applies the config's `query_scaling`, if any."""
    scaling = config.query_scaling
    if scaling is None:
        return query
    contexts = (context.positions // scaling.length).astype(jnp.float32)
    factor = 1.0 + scaling.strength * jnp.log1p(contexts)
    return query * factor[:, :, None, None].astype(query.dtype)


def _with_entries(
    key: Array, value: Array, context: Context, rules: Rules
) -> LayerCache | KeysValues:
    """Writes the keys and values of these tokens to the cache, if there is one."""
    if context.entry is None:
        key, value = (constrain(each, KV_AXES, rules) for each in (key, value))
        return KeysValues(key, value)
    assert isinstance(context.entry, LayerCache)
    return context.entry.write(key, value, context.positions, rules, context.kernels)


def _attend(
    config: ModelConfig,
    query: Array,
    entry: LayerCache | KeysValues,
    context: Context,
    rules: Rules,
    sinks: Array | None = None,
) -> Float[Array, "batch length heads value_dim"]:
    """Attends to these tokens, or to the cache, which has them."""
    query = constrain(query, HEAD_AXES, rules)
    scoring = Scoring(
        context.window, config.score_scale, config.attention_softcap, sinks
    )
    positions = context.positions
    if isinstance(entry, KeysValues):
        return attention(
            query,
            entry.keys,
            entry.values,
            Sight(positions, positions, context.ends, context.indices),
            scoring=scoring,
            rules=rules,
            implementation=context.kernels,
        )
    shared, keys, values = entry.shared, entry.keys, entry.values
    if config.latent is not None:
        # The keys serve as values, because cutting off r would copy the cache.
        values = None
        shared = None if shared is None else shared._replace(value=None)
    keys, values = jax.tree.map(
        lambda leaf: constrain(leaf, KV_AXES, rules), (keys, values)
    )
    return decode_attention(
        query,
        OwnKeys(keys, values, entry.positions),
        positions,
        shared=shared,
        scoring=scoring,
        rules=rules,
        implementation=context.kernels,
    )
