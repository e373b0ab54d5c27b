"""Finds the tokens that top-k, top-p and min-p keep, without sorting the vocabulary.

The likeliest 128 tokens of a row nearly always hold all that is kept, and then tell the
least of it. Otherwise the bits of the least kept logit are found one by one: each takes
a sum over the tokens above a candidate. Over a vocabulary that a mesh splits, devices
exchange their likeliest tokens and these sums, and no logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post.types import Array, Float, HostOrDevice, Int

__all__ = ["CANDIDATES", "Likeliest", "SamplingArrays", "least_kept", "likeliest"]

# Tokens of a row that are looked at first.
CANDIDATES = 128
# Tokens of a block; the largest of each block is found first.
BLOCK = 128


class SamplingArrays(NamedTuple):
    """Sampling parameters, one entry per row; see `SamplingParams`."""

    temperature: Float[HostOrDevice, " rows"]
    top_k: Int[HostOrDevice, " rows"]
    top_p: Float[HostOrDevice, " rows"]
    min_p: Float[HostOrDevice, " rows"]


class Likeliest(NamedTuple):
    """The largest logits of each row, in descending order, the smaller id first.

    Attributes:
        logits: float32; -inf beyond the vocabulary.
        ids: int32, their tokens.
    """

    logits: Float[Array, "rows most"]
    ids: Int[Array, "rows most"]


def likeliest(
    scaled: Float[Array, "vocab rows"], most: int, axes: tuple[str, ...] = ()
) -> Likeliest:
    """Finds the largest logits of each row.

    Args:
        scaled: this device's logits.
        most: how many; more than the vocabulary are padded.
        axes: mesh axes of a `shard_map` that split the vocabulary.

    >>> found = likeliest(jnp.array([[1.0], [3.0], [2.0]]), 2)
    >>> found.ids.tolist(), found.logits.tolist()
    ([[1, 2]], [[3.0, 2.0]])
    """
    vocab, rows = scaled.shape
    if vocab > most * BLOCK:
        # The blocks with the largest maxima hold the largest logits.
        none = ((0, -vocab % BLOCK), (0, 0))
        blocks = jnp.pad(scaled, none, constant_values=-jnp.inf)
        blocks = blocks.reshape(-1, BLOCK, rows)
        _, chosen = jax.lax.top_k(blocks.max(axis=1).T, most)
        # In their order, so that the first of equal logits comes first.
        chosen = jnp.sort(chosen, axis=1)
        inside = jnp.take_along_axis(
            blocks.transpose(2, 0, 1), chosen[:, :, None], axis=1
        )
        logits, places = jax.lax.top_k(inside.reshape(rows, -1), most)
        of_block = jnp.take_along_axis(chosen, places // BLOCK, axis=1)
        ids = of_block * BLOCK + places % BLOCK
    else:
        logits, ids = jax.lax.top_k(scaled.T, min(most, vocab))
    ids = ids.astype(jnp.int32)
    if axes:
        ids += jax.lax.axis_index(axes) * vocab
        logits, ids = (
            jax.lax.all_gather(array, axes, axis=1, tiled=True)
            for array in (logits, ids)
        )
        logits, places = jax.lax.top_k(logits, min(most, logits.shape[1]))
        ids = jnp.take_along_axis(ids, places, axis=1)
    missing = ((0, 0), (0, most - logits.shape[1]))
    return Likeliest(
        jnp.pad(logits, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    )


def least_kept(
    scaled: Float[Array, "vocab rows"],
    weights: Float[Array, "vocab rows"],
    sampling: SamplingArrays,
    found: Likeliest,
    axes: tuple[str, ...] = (),
) -> Float[Array, " rows"]:
    """The least logit that top-k and top-p keep; all equal ones are kept with it.

    A token is kept if fewer than top-k tokens are likelier, and if the likelier ones
    have less than top-p of the mass. The likeliest token is always kept.

    Args:
        scaled: this device's logits.
        weights: exp(scaled - the row's largest logit).
        sampling: parameters of the rows.
        found: `CANDIDATES` tokens of `likeliest`, or more.
        axes: as in `likeliest`.
    """

    def sums(array: Array, dtype: DTypeLike = jnp.float32) -> Array:
        total = array.sum(axis=0, dtype=dtype)
        return jax.lax.psum(total, axes) if axes else total

    most = jnp.where(sampling.top_k == 0, jnp.iinfo(jnp.int32).max, sampling.top_k)
    # top_p = 1 keeps all tokens, even if the rounded sum reaches 1 early.
    limit = jnp.where(sampling.top_p >= 1, jnp.inf, sampling.top_p * sums(weights))
    whole = (sampling.top_k == 0) & (sampling.top_p >= 1)

    mass = jnp.exp(found.logits - found.logits[:, :1])
    before = jnp.cumsum(mass, axis=1) - mass
    ranks = jnp.arange(mass.shape[1], dtype=jnp.int32)
    keep = (ranks < most[:, None]) & (before < limit[:, None])
    keep = keep.at[:, 0].set(True)
    # All of them are kept, so others may be kept too.
    unknown = keep[:, -1] & ~whole
    least = jnp.min(jnp.where(keep, found.logits, jnp.inf), axis=1)
    least = jnp.where(whole, -jnp.inf, least)

    def search() -> Array:
        def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            """Halves the interval between a number below the least and a kept one."""
            below, kept = ends
            width = kept.astype(jnp.uint32) - below.astype(jnp.uint32)
            middle = below + (width // 2).astype(jnp.int32)
            above = scaled > _number(middle)
            keeps = (sums(above, jnp.int32) < most) & (
                sums(jnp.where(above, weights, 0.0)) < limit
            )
            # At a width of 1 the middle is `below`.
            keeps &= width > 1
            return jnp.where(keeps, below, middle), jnp.where(keeps, middle, kept)

        kept = _order(found.logits[:, 0])
        below = jnp.full_like(kept, _order(jnp.float32(-jnp.inf)) - 1)
        return _number(jax.lax.fori_loop(0, 32, halve, (below, kept))[1])

    anywhere = unknown.any()
    if axes:
        # All devices search or none, since the sums are over all of them.
        mesh = jax.sharding.get_abstract_mesh()
        anywhere = jax.lax.pmax(anywhere.astype(jnp.int32), mesh.axis_names) > 0
    searched = jax.lax.cond(anywhere, search, lambda: least)
    # A row's result does not depend on whether another one was searched.
    return jnp.where(unknown, searched, least)


def _order(number: Array) -> Array:
    """int32 that are ordered as these float32 are."""
    bits = jax.lax.bitcast_convert_type(number, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _number(order: Array) -> Array:
    """The float32 of `_order`."""
    bits = order ^ ((order >> 31) & jnp.int32(0x7FFFFFFF))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
