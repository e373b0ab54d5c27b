"""Row tiles with recomputation: logits of one tile are in memory at a time.

Rows that the mask leaves out cost nothing: the rows that count are gathered into tiles,
and the number of tiles is decided at run time. Over a sharded vocabulary each device
works on its own columns and the tiles' statistics are summed across `axes`.

Backward, with p = softmax(z), z = h W^T / temperature, H the entropy, and g, e the
cotangents of log-prob and entropy: dz = g (onehot - p) - e p (log p + H).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array

__all__ = ["Layout", "Residuals", "backward", "forward"]


class Layout(NamedTuple):
    """Static facts of one call.

    Attributes:
        tile: rows whose logits are in memory at a time.
        vocab_size: columns that exist; those from there on are padding.
        temperature: divides the logits.
        axes: mesh axes over which the vocabulary is split, none where it is whole.
    """

    tile: int
    vocab_size: int
    temperature: float
    axes: tuple[str, ...] = ()


class Residuals(NamedTuple):
    """Per-row statistics that the backward pass needs, float32 [rows]."""

    normalizer: Array
    entropy: Array


def forward(
    hidden: Array, weight: Array, targets: Array, mask: Array, layout: Layout
) -> tuple[Array, Array, Residuals]:
    """Returns log-prob and entropy [rows] (0 where masked) and what backward needs."""
    rows = hidden.shape[0]
    order, num_tiles = _tiles(mask, layout.tile)

    def body(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        chosen = _tile(order, index, layout.tile)
        logits, first = _logits(_take(hidden, chosen), weight, layout)
        stats = _statistics(logits, _take(targets, chosen) - first, layout)
        return tuple(
            array.at[chosen].set(value, mode="drop")
            for array, value in zip(carry, stats, strict=True)
        )

    zeros = jnp.zeros((rows,), jnp.float32)
    target, normalizer, entropy = jax.lax.fori_loop(
        0, num_tiles, body, (zeros, zeros, zeros)
    )
    return target - normalizer, entropy, Residuals(normalizer, entropy)


def backward(
    hidden: Array,
    weight: Array,
    targets: Array,
    mask: Array,
    residuals: Residuals,
    cotangents: tuple[Array, Array],
    layout: Layout,
) -> tuple[Array, Array]:
    """Returns the gradients of hidden [rows, d] and weight [vocab, d], both float32.

    Under a split vocabulary the first is this device's part of a sum.
    """
    order, num_tiles = _tiles(mask, layout.tile)
    by_row = (targets, *residuals, *cotangents)

    def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_weight = carry
        chosen = _tile(order, index, layout.tile)
        inputs = _take(hidden, chosen)
        target, normalizer, entropy, g, e = (_take(array, chosen) for array in by_row)
        # Rows that fill up the last tile read zeros, also as g and e: no influence.
        logits, first = _logits(inputs, weight, layout)
        log_p = logits - normalizer[:, None]
        columns = jnp.arange(weight.shape[0], dtype=jnp.int32)
        onehot = columns == (target - first)[:, None]
        spread = g[:, None] + e[:, None] * (log_p + entropy[:, None])
        d_logits = jnp.where(onehot, g[:, None], 0.0) - jnp.exp(log_p) * spread
        d_logits = (d_logits / layout.temperature).astype(weight.dtype)
        d_rows = jnp.einsum(
            "tv,vd->td", d_logits, weight, preferred_element_type=jnp.float32
        )
        d_weight += jnp.einsum(
            "tv,td->vd", d_logits, inputs, preferred_element_type=jnp.float32
        )
        return d_hidden.at[chosen].set(d_rows, mode="drop"), d_weight

    start = (
        jnp.zeros(hidden.shape, jnp.float32),
        jnp.zeros(weight.shape, jnp.float32),
    )
    return jax.lax.fori_loop(0, num_tiles, body, start)


def _tiles(mask: Array, tile: int) -> tuple[Array, Array]:
    """Rows that count, in order, padded with an index out of range; number of tiles."""
    rows = mask.shape[0]
    count = mask.sum(dtype=jnp.int32)
    order = jnp.nonzero(mask, size=rows, fill_value=rows)[0].astype(jnp.int32)
    order = jnp.pad(order, (0, -rows % tile), constant_values=rows)
    return order, (count + tile - 1) // tile


def _tile(order: Array, index: Array, tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(order, index * tile, tile)


def _take(array: Array, chosen: Array) -> Array:
    """Rows of `array`; an index out of range gives zeros."""
    return array.at[chosen].get(mode="fill", fill_value=0)


def _logits(hidden: Array, weight: Array, layout: Layout) -> tuple[Array, Any]:
    """Scaled float32 logits [tile, columns] and the id of the first column here."""
    product = jnp.einsum(
        "td,vd->tv", hidden, weight, preferred_element_type=jnp.float32
    )
    logits = product * (1.0 / layout.temperature)
    columns, first = weight.shape[0], jnp.int32(0)
    if layout.axes:
        first = jax.lax.axis_index(layout.axes) * columns
    total = columns * (jax.lax.axis_size(layout.axes) if layout.axes else 1)
    if total != layout.vocab_size:
        exists = first + jnp.arange(columns, dtype=jnp.int32) < layout.vocab_size
        logits = jnp.where(exists, logits, MASKED)
    return logits, first


def _statistics(
    logits: Array, local_targets: Array, layout: Layout
) -> tuple[Array, Array, Array]:
    """Target logit, log-normaliser and entropy of each row of a tile."""
    top = logits.max(axis=-1)
    if layout.axes:
        top = jax.lax.pmax(top, layout.axes)
    shifted = logits - top[:, None]
    weights = jnp.exp(shifted)
    total, weighted = weights.sum(axis=-1), (weights * shifted).sum(axis=-1)
    here = (local_targets >= 0) & (local_targets < logits.shape[1])
    safe = jnp.where(here, local_targets, 0)
    target = jnp.take_along_axis(logits, safe[:, None], axis=-1)[:, 0]
    target = jnp.where(here, target, 0.0)
    if layout.axes:
        total, weighted, target = jax.lax.psum((total, weighted, target), layout.axes)
    return target, top + jnp.log(total), jnp.log(total) - weighted / total
