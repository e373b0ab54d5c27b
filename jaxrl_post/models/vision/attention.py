"""Attention among the patches of a picture, in both directions.

Scores are computed for a block of queries at a time and again in the backward pass, so
that memory grows with the number of patches and not with its square.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["full_attention", "window_attention"]

# Scores of a picture's head that are held at a time, 4 MiB of float32; and the fewest
# queries of a block, below which matrix products are slow.
SCORES = 2**20
FEWEST = 128
# A smaller score than any, but finite: a row without keys then has a finite gradient.
NO_SCORE = -1e30


def full_attention(
    query: Float[Array, "pictures patches heads head_dim"],
    key: Float[Array, "pictures patches heads head_dim"],
    value: Float[Array, "pictures patches heads head_dim"],
    counts: Int[Array, " pictures"],
) -> Float[Array, "pictures patches heads head_dim"]:
    """Attention among all patches of a picture.

    Args:
        query: rotated queries, any float dtype.
        key: rotated keys.
        value: values.
        counts: int32, patches of each picture; they come first.

    Returns:
        As `query`; outputs of padding mean nothing.
    """
    patches = query.shape[1]
    seen = jnp.arange(patches, dtype=jnp.int32) < counts[:, None]
    size = _block(patches, max(FEWEST, SCORES // patches))

    def body(query: Array) -> Array:
        return _attend(query, key, value, seen[:, None, :])

    return _by_blocks(body, [query], size)


def window_attention(
    query: Float[Array, "pictures patches heads head_dim"],
    key: Float[Array, "pictures patches heads head_dim"],
    value: Float[Array, "pictures patches heads head_dim"],
    windows: Int[Array, "pictures patches"],
    size: int,
) -> Float[Array, "pictures patches heads head_dim"]:
    """Attention among the patches of a window.

    The patches of a window follow one another. So a block of `size` patches needs the
    keys of this block and of its two neighbours alone.

    Args:
        query: rotated queries, any float dtype.
        key: rotated keys.
        value: values.
        windows: int32, the number of each patch's window; -1 in padding.
        size: the largest number of patches in a window.

    Returns:
        As `query`; outputs of padding mean nothing.
    """
    pictures, patches = windows.shape
    if patches <= 2 * size:
        seen = _same(windows, windows)
        return _attend(query, key, value, seen)
    blocks = -(-patches // size)
    short = blocks * size - patches

    def cut(array: Array, filler: int = 0) -> Array:
        rest = [(0, 0)] * (array.ndim - 2)
        whole = jnp.pad(array, [(0, 0), (0, short), *rest], constant_values=filler)
        return whole.reshape(pictures, blocks, size, *array.shape[2:])

    def near(array: Array, filler: int = 0) -> Array:
        parts = cut(array, filler)
        ends = jnp.full_like(parts[:, :1], filler)
        before = jnp.concatenate([ends, parts[:, :-1]], axis=1)
        after = jnp.concatenate([parts[:, 1:], ends], axis=1)
        return jnp.concatenate([before, parts, after], axis=2)

    def body(query: Array, key: Array, value: Array, own: Array, others: Array):
        return jax.vmap(_attend, in_axes=1, out_axes=1)(
            query, key, value, _same(own, others)
        )

    inputs = [cut(query), near(key), near(value), cut(windows, -1), near(windows, -1)]
    together = _block(blocks, SCORES // (3 * size * size))
    found = _by_blocks(body, inputs, together)
    return found.reshape(pictures, blocks * size, *query.shape[2:])[:, :patches]


def _same(
    own: Int[Array, "*batch queries"], others: Int[Array, "*batch keys"]
) -> Bool[Array, "*batch queries keys"]:
    """Whether a query and a key lie in one window."""
    return (own[..., :, None] == others[..., None, :]) & (others >= 0)[..., None, :]


def _attend(
    query: Float[Array, "pictures queries heads head_dim"],
    key: Float[Array, "pictures keys heads head_dim"],
    value: Float[Array, "pictures keys heads head_dim"],
    seen: Bool[Array, "pictures #queries keys"],
) -> Float[Array, "pictures queries heads head_dim"]:
    """Softmax attention; scores, softmax and sums are float32."""
    scores = jnp.einsum(
        "pqhd,pkhd->phqk", query, key, preferred_element_type=jnp.float32
    )
    scores = jnp.where(seen[:, None], scores * query.shape[-1] ** -0.5, NO_SCORE)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    found = jnp.einsum(
        "phqk,pkhd->pqhd", shares, value, preferred_element_type=jnp.float32
    )
    return found.astype(query.dtype)


def _block(total: int, most: int) -> int:
    """The size of blocks: the largest power of two within `most`, or all."""
    size = 1
    while 2 * size <= max(most, 1):
        size *= 2
    return min(size, total)


def _by_blocks(body: Callable[..., Array], inputs: Sequence[Array], size: int) -> Array:
    """Maps `body` over blocks of the second dim of `inputs`, one after the other."""
    total = inputs[0].shape[1]
    if size >= total:
        return body(*inputs)
    blocks = -(-total // size)
    short = blocks * size - total

    def cut(array: Array) -> Array:
        rest = [(0, 0)] * (array.ndim - 2)
        # Zeros are valid inputs, and their outputs are dropped.
        whole = jnp.pad(array, [(0, 0), (0, short), *rest])
        whole = whole.reshape(array.shape[0], blocks, size, *array.shape[2:])
        return jnp.moveaxis(whole, 1, 0)

    def step(carry: None, parts: tuple[Array, ...]) -> tuple[None, Array]:
        return carry, body(*parts)

    # The scores of a block are not kept for the backward pass.
    again = functools.partial(jax.checkpoint, prevent_cse=False)(step)
    _, found = jax.lax.scan(again, None, tuple(map(cut, inputs)))
    found = jnp.moveaxis(found, 0, 1)
    return found.reshape(found.shape[0], blocks * size, *found.shape[3:])[:, :total]
