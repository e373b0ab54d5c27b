"""Reference implementation of attention, with all scores in memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array, Bool, Float

__all__ = ["PLAIN", "Scoring", "attend", "visible"]

# Finite, so that a query that sees no key gives numbers, not NaN.
MASKED = -1e30


class Scoring(NamedTuple):
    """Options of how products of queries and keys become scores.

    Attributes:
        window: tokens that a query looks back, itself included; None for all.
        scale: of the scores; None: head_dim ** -0.5.
        softcap: c in c tanh(scores / c), after the scale; None for no cap (Gemma 2,
            arXiv:2408.00118).
        sinks: one logit per query head, added to the softmax's denominator only, so
            that a head may attend to no token (Xiao et al., arXiv:2309.17453).
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Float[Array, " heads"] | None = None

    def checked(self, operation: str, head_dim: int) -> "Scoring":
        """The same with a scale.

        Raises:
            ValueError: the window is empty, or the cap is not positive.
        """
        window, softcap = self.window, self.softcap
        if window is not None and window < 1:
            raise ValueError(
                f"{operation}: window must be at least 1, the query itself, or None; "
                f"got {window}"
            )
        if softcap is not None and not softcap > 0:
            raise ValueError(f"{operation}: softcap must be > 0 or None; got {softcap}")
        scale = head_dim**-0.5 if self.scale is None else float(self.scale)
        return self._replace(scale=scale)


PLAIN = Scoring()


def visible(
    query_positions: Array, kv_positions: Array, ends: Array | None, window: int | None
) -> Bool[Array, "batch queries keys"]:
    """Mask of the keys that each query sees, as `api.attention` defines it."""
    distance = query_positions[:, :, None] - kv_positions[:, None, :]
    if ends is None:
        mask = distance >= 0
    else:
        index = jnp.arange(ends.shape[1], dtype=jnp.int32)
        mask = index[None, None, :] <= index[None, :, None]
        mask &= index[None, :, None] < ends[:, None, :]
    if window is not None:
        mask &= distance < window
    return mask


def attend(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch kv_heads keys head_dim"],
    value: Float[Array, "batch kv_heads keys value_dim"],
    mask: Bool[Array, "batch queries keys"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    """Softmax attention; scores and softmax in float32, the result as `query`.

    The queries of a group become one dimension, so that both products are plain batched
    matrix products: with more dimensions XLA's CPU backend takes twice as long for the
    gradients. Batch and kv_heads stay separate: a mesh may split each, and a merged
    dimension would have to be gathered.
    """
    batch, queries, heads, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group = heads // kv_heads
    grouped = query.reshape(batch, queries, kv_heads, group, dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * queries, dim)
    scores = jnp.einsum(
        "bnqd,bnkd->bnqk", grouped, key, preferred_element_type=jnp.float32
    )
    shape = (batch, kv_heads, group, queries, keys)
    seen = jnp.broadcast_to(mask[:, None, None], shape).reshape(scores.shape)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, MASKED)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1)
        by_head = jnp.repeat(by_head, queries, axis=-1)
        by_head = by_head.reshape(1, kv_heads, group * queries, 1)
        top = jnp.maximum(top, by_head)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(by_head - top)
    mixed = jnp.einsum(
        "bnqk,bnkd->bnqd",
        weights.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    mixed = (mixed / total).astype(query.dtype)
    width = value.shape[-1]
    mixed = mixed.reshape(batch, kv_heads, group, queries, width)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, width)
