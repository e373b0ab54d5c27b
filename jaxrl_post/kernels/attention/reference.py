"""The definition, with all scores in memory."""

import jax.numpy as jnp

from jaxrl_post.types import Array, Bool, Float

__all__ = ["attend", "visible"]

# Finite, so that a row that sees nothing gives numbers, not NaN.
MASKED = -1e30


def visible(
    query_positions: Array,
    kv_positions: Array,
    query_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    window: int | None,
) -> Bool[Array, "batch queries keys"]:
    """Which key each query sees: same segment, not later, within the window."""
    distance = query_positions[:, :, None] - kv_positions[:, None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if query_segment_ids is not None and kv_segment_ids is not None:
        mask &= query_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    return mask


def attend(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys head_dim"],
    mask: Bool[Array, "batch queries keys"],
    scale: float,
) -> Float[Array, "batch queries heads head_dim"]:
    """Softmax attention; scores and softmax in float32, the result as `query`."""
    batch, queries, heads, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "btngd,bnsd->bngts", grouped, key, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, None, None], scores * scale, MASKED)
    scores = scores - scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores)
    total = weights.sum(axis=-1)
    mixed = jnp.einsum(
        "bngts,bnsd->btngd",
        weights.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    mixed = mixed / jnp.moveaxis(total, 3, 1)[..., None]
    return mixed.astype(query.dtype).reshape(batch, queries, heads, dim)
