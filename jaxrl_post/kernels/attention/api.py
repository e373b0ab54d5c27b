"""Attention: checks the arguments and calls an implementation."""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.attention.reference import attend, visible
from jaxrl_post.types import Array, Float, Int

__all__ = ["QUERY_TILE", "attention"]

Implementation = Literal["reference", "xla"]

# Queries per tile of the "xla" implementation, which holds one tile's scores at a time.
QUERY_TILE = 512


def attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    *,
    query_positions: Int[Array, "batch queries"],
    kv_positions: Int[Array, "batch keys"],
    query_segment_ids: Int[Array, "batch queries"] | None = None,
    kv_segment_ids: Int[Array, "batch keys"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "batch queries heads value_dim"]:
    """Causal grouped-query attention.

    A query sees the keys of its own segment whose position is not later than its own,
    and, with a window w, less than w before it. Query head h reads key/value head
    h // (heads / kv_heads). Decoding has one query per row, over the cache's keys.

    Args:
        query: float, any dtype.
        key: the same dtype, in the cache's layout.
        value: like `key`, but of any width.
        query_positions: int32 positions within the segment.
        kv_positions: int32 positions of the keys.
        query_segment_ids: int32, or None where each row is one sequence.
        kv_segment_ids: int32, None exactly where `query_segment_ids` is.
        window: tokens that a query looks back, itself included; None for all.
        scale: of the scores; default head_dim ** -0.5.
        softcap: c in c tanh(scores / c), after the scale; None for no cap (Gemma 2,
            arXiv:2408.00118).
        sinks: one logit per query head, added to the softmax's denominator only, so
            that a head may attend to no token (Xiao et al., arXiv:2309.17453).
        implementation: "xla" tiles the queries and recomputes scores in the backward
            pass, so that memory grows with keys x tile; "reference" holds all scores.

    Returns:
        The attended values, in `query`'s dtype. A query that sees no key gets the mean
        of all values (with sinks, 0): callers must mask it.

    Raises:
        ValueError: heads is not a multiple of kv_heads, one segment array is missing,
            the window is empty, the softcap is not positive, or the implementation is
            unknown.

    References:
        Ainslie et al., GQA, arXiv:2305.13245.
    """
    heads, kv_heads = query.shape[2], key.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"attention: heads must be a multiple of kv_heads; got {heads} and "
            f"{kv_heads}"
        )
    if (query_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError(
            "attention: give segment ids of both queries and keys, or none"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"attention: window must be at least 1, the query itself, or None; "
            f"got {window}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap must be > 0 or None; got {softcap}")
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"attention: implementation must be one of {get_args(Implementation)}; "
            f"got {implementation!r}"
        )
    factor = query.shape[3] ** -0.5 if scale is None else scale

    def block(query: Array, positions: Array, segments: Array | None) -> Array:
        mask = visible(positions, kv_positions, segments, kv_segment_ids, window)
        return attend(query, key, value, mask, factor, softcap, sinks)

    queries = query.shape[1]
    if implementation == "reference" or queries <= QUERY_TILE:
        return block(query, query_positions, query_segment_ids)
    return _tiled(block, query, query_positions, query_segment_ids)


def _tiled(block, query: Array, positions: Array, segments: Array | None) -> Array:
    """Applies `block` to the tiles of queries one after another."""
    queries = query.shape[1]
    num_tiles = math.ceil(queries / QUERY_TILE)
    padding = num_tiles * QUERY_TILE - queries

    def tiles(array: Array | None) -> Array | None:
        if array is None:
            return None
        widths = [(0, 0)] * array.ndim
        widths[1] = (0, padding)
        split = jnp.pad(array, widths).reshape(
            array.shape[0], num_tiles, QUERY_TILE, *array.shape[2:]
        )
        return jnp.moveaxis(split, 1, 0)

    step = jax.checkpoint(lambda tile: block(*tile))
    out = jax.lax.map(step, (tiles(query), tiles(positions), tiles(segments)))
    out = jnp.moveaxis(out, 0, 1).reshape(query.shape[0], -1, *out.shape[-2:])
    return out[:, :queries]
