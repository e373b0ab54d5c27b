"""Decode attention in two parts, shared keys and own keys, merged by log-sum-exp."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_post.kernels.attention.reference import MASKED, Scoring, visible
from jaxrl_post.kernels.decode_attention.quantized import (
    Entries,
    OwnKeys,
    QuantizedEntries,
    SharedKeys,
)
from jaxrl_post.types import Array

__all__ = ["Part", "attend_in_parts", "part_of_keys"]


class Part(NamedTuple):
    """A softmax over some of the keys, before it is divided by its sum.

    Attributes:
        mixed: float32 [batch, queries, heads, value_dim], sum of exp(score - top) v.
        top: float32 [batch, queries, heads], the largest score.
        total: float32 [batch, queries, heads], sum of exp(score - top).
    """

    mixed: Array
    top: Array
    total: Array


def attend_in_parts(
    query: Array,
    own: OwnKeys,
    query_positions: Array,
    shared: SharedKeys | None,
    scoring: Scoring,
    part_of: Callable[..., "Part"],
) -> Array:
    """Attention over the shared keys, read once a group, and over the own keys.

    `part_of` computes the part of some keys, as `part_of_keys`.
    """
    sinks, scoring = scoring.sinks, scoring._replace(sinks=None)
    parts = [part_of(query, own, query_positions, scoring)]
    if shared is not None:
        parts.append(_shared_part(part_of, scoring, query, query_positions, shared))
    top = parts[0].top
    if len(parts) > 1:
        top = jnp.maximum(top, parts[1].top)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32))
    factors = [jnp.exp(part.top - top) for part in parts]
    total = sum(p.total * f for p, f in zip(parts, factors, strict=True))
    mixed = sum(p.mixed * f[..., None] for p, f in zip(parts, factors, strict=True))
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32) - top)
    return (mixed / jnp.asarray(total)[..., None]).astype(query.dtype)


def _shared_part(
    part_of: Callable[..., Part],
    scoring: Scoring,
    query: Array,
    query_positions: Array,
    shared: SharedKeys,
) -> Part:
    """The part of the shared keys: the queries of a group become one sequence's."""
    key, value, positions, places, members = shared
    batch, queries, heads, _ = query.shape
    groups = key.shape[0]

    def gathered(array: Array, empty: float) -> Array:
        """[batch, queries, ...] as [groups, members * queries, ...]."""
        shape = (groups * members, *array.shape[1:])
        found = jnp.full(shape, empty, array.dtype)
        found = found.at[places].set(array, mode="drop", unique_indices=True)
        return found.reshape(groups, members * queries, *array.shape[2:])

    # A place without a sequence stands before every key.
    at = gathered(query_positions, -1)
    part = part_of(gathered(query, 0), OwnKeys(key, value, positions), at, scoring)

    def returned(array: Array, empty: float) -> Array:
        whole = array.reshape(groups * members, queries, heads, *array.shape[3:])
        return whole.at[places].get(mode="fill", fill_value=empty)

    assert batch == places.shape[0]
    return Part(
        returned(part.mixed, 0.0), returned(part.top, MASKED), returned(part.total, 0.0)
    )


def part_of_keys(
    query: Array, own: OwnKeys, query_positions: Array, scoring: Scoring
) -> Part:
    """Computes the softmax over some of the keys; sinks are no part of it.

    Scores and weights are float32, laid out as in `attention.reference.attend`. Without
    `value` the keys are the values too.
    """
    (key, value, kv_positions), (window, scale, softcap) = own, scoring[:3]
    value = key if value is None else value
    mask = visible(query_positions, kv_positions, None, window)
    batch, queries, heads, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group = heads // kv_heads
    grouped = query.reshape(batch, queries, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * queries, dim)
    codes, key_scales = _codes(key, grouped.dtype)
    scores = jnp.einsum(
        "bnqd,bnkd->bnqk", grouped, codes, preferred_element_type=jnp.float32
    )
    assert scale is not None
    scores = scores * (scale if key_scales is None else scale * key_scales)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    shape = (batch, kv_heads, group, queries, keys)
    seen = jnp.broadcast_to(mask[:, None, None], shape).reshape(scores.shape)
    scores = jnp.where(seen, scores, MASKED)
    top = scores.max(axis=-1)
    weights = jnp.exp(scores - top[..., None])
    values, value_scales = _codes(value, grouped.dtype)
    mixing = weights if value_scales is None else weights * value_scales
    mixed = jnp.einsum(
        "bnqk,bnkd->bnqd",
        mixing.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )

    def by_head(array: Array) -> Array:
        shape = (batch, kv_heads, group, queries, *array.shape[3:])
        moved = jnp.moveaxis(array.reshape(shape), 3, 1)
        return moved.reshape(batch, queries, heads, *array.shape[3:])

    return Part(by_head(mixed), by_head(top), by_head(weights.sum(axis=-1)))


def _codes(entries: Entries, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """Operand of a matrix product, and a factor [batch, kv_heads, 1, keys] for it."""
    if isinstance(entries, QuantizedEntries):
        return entries.codes.astype(dtype), entries.scales.swapaxes(2, 3)
    return entries, None
